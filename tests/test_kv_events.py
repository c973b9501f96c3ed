"""The stream of cache events: its wire format, gaps and replay, and that it always adds up to what is cached."""
from __future__ import annotations

import json
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule
from isthmus.core.cache.events import Cleared, Removed, Stored, block_hashes
from isthmus.core.cache.manager import CacheManager
from isthmus.core.cache.publisher import END, Kept, Publisher, is_local, wire_event
from isthmus.core.config import CacheSettings, Config
from isthmus.core.engine import EngineCore
from isthmus.core.errors import ConfigError
from isthmus.core.scheduler.request import cache_domain
from isthmus.core.settings import read_environment, resolve

from .cache_machine import CacheMachine
from .checkpoints import tiny_llama_gguf
from .effort import SOON
from .test_cli_serve import Serving
from .test_engine import engine, run, submit  # noqa: F401

COST = 15  # seconds
PAGE = 4


# ---- a subscriber, written from the documented format alone

class Event(msgspec.Struct, array_like=True, tag=True, kw_only=True):
    pass


class BlockStored(Event):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(Event):
    block_hashes: list[int | bytes]
    medium: str | None


class AllBlocksCleared(Event):
    pass


class Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


decode = msgspec.msgpack.Decoder(Batch).decode


class Follower:
    """Goes through batches: `blocks` is hash -> (hash before, tokens), `next` the number of the batch to come."""

    def __init__(self) -> None:
        self.next, self.cleared = 0, 0
        self.blocks: dict[int | bytes, tuple[int | bytes | None, tuple[int, ...]]] = {}

    def apply(self, payload: bytes) -> None:
        for event in decode(payload).events:
            if isinstance(event, BlockStored):
                size = event.block_size
                assert len(event.token_ids) == size * len(event.block_hashes)
                assert event.parent_block_hash is None or event.parent_block_hash in self.blocks
                before = event.parent_block_hash
                for i, name in enumerate(event.block_hashes):
                    assert name not in self.blocks, "a block is stored twice"
                    self.blocks[name] = before, tuple(event.token_ids[i * size:(i + 1) * size])
                    before = name
            elif isinstance(event, BlockRemoved):
                for name in event.block_hashes:
                    del self.blocks[name]
            else:
                self.blocks.clear()
                self.cleared += 1


class Subscriber(Follower):
    """A follower at a socket. `missed`: numbers that did not come by themselves."""

    def __init__(self, endpoint: str, replay: str | None = None, topic: bytes = b""):
        super().__init__()
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.SUB)
        self.socket.connect(endpoint)
        self.socket.subscribe(topic)
        self.router = None
        if replay:
            self.router = self.context.socket(zmq.DEALER)
            self.router.connect(replay)
        self.missed: list[int] = []
        self.topics: set[bytes] = set()

    def __enter__(self):
        return self

    def __exit__(self, *exception):
        self.context.destroy(linger=0)

    def replayed(self, start: int) -> list[tuple[int, bytes]]:
        self.router.send_multipart([b"", start.to_bytes(8, "big")])
        found = []
        while True:
            assert self.router.poll(SOON * 1000), "no answer from the replay socket"
            empty, number, payload = self.router.recv_multipart()
            assert empty == b""
            if number == END:
                assert payload == b""
                return found
            found.append((int.from_bytes(number, "big"), payload))

    def catch_up(self, core: EngineCore) -> None:
        """Take in all that the engine has published; gaps are filled from the replay socket."""
        while self.next < core._publisher.sequence:
            assert self.socket.poll(SOON * 1000), "nothing comes"
            topic, number, payload = self.socket.recv_multipart()
            self.topics.add(topic)
            number = int.from_bytes(number, "big")
            if number > self.next:
                self.missed += range(self.next, number)
                for earlier, old in self.replayed(self.next) if self.router else ():
                    if earlier == self.next < number:
                        self.apply(old)
                        self.next += 1
            if number == self.next:
                self.apply(payload)
                self.next += 1

    def wait_for(self, publish) -> None:
        """Let the subscription arrive: until then a PUB socket sends nothing."""
        for _ in range(int(SOON * 50)):
            if self.socket.poll(20):
                return
            publish()
        raise AssertionError("nothing arrives")


class Told:
    """What a subscriber should know, from what the tree holds now. A listener."""

    def __init__(self, cache: CacheManager):
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self._size, self._names = cache.page_size * 4, {0: None}
        cache.tree.tell(self)

    def stored(self, tokens: bytes, pages: bytes, before: bytes, domain: bytes) -> None:
        before = self._names[int.from_bytes(before[-4:], "little")]
        for i, page in enumerate(np.frombuffer(pages, np.int32).tolist()):
            block = tokens[i * self._size:(i + 1) * self._size]
            name = self._names[page] = int(block_hashes(block, self._size, before, domain)[0])
            self.blocks[name] = before, tuple(np.frombuffer(block, np.int32).tolist())
            before = name


def cached(cache: CacheManager) -> dict[int, tuple[int | None, tuple[int, ...]]]:
    return Told(cache).blocks


@pytest.fixture
def addresses(tmp_path):
    return f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay"


@pytest.fixture
def streaming(engine, addresses, monkeypatch):  # noqa: F811
    """(engine that publishes, subscriber that follows)"""
    real = EngineCore.__init__

    def init(core, config, *args, **kwargs):
        cache = replace(config.cache, kv_events=addresses[0], kv_events_replay=addresses[1], kv_events_topic="kv@a@b")
        real(core, replace(config, cache=cache), *args, **kwargs)
    monkeypatch.setattr(EngineCore, "__init__", init)
    core = engine()
    with Subscriber(*addresses) as subscriber:
        subscriber.wait_for(lambda: (submit(core, "hello", [1], max_tokens=1), run(core),
                                     core._publisher.attach(core.cache), core.command("ping")))
        yield core, subscriber
    core.close()


def test_the_stream_adds_up_to_what_is_cached(streaming):
    core, subscriber = streaming
    for i in range(60):  # 30 pages are far too few for all of them
        submit(core, f"r{i}", [i % 7, *range(20 + i % 3), i % 5], max_tokens=1 + i % 6)
        if i % 3 == 2:
            run(core)
        if i == 30:
            assert core.command("flush_cache")["flushed_pages"] > 0
        if i % 10 == 9:
            subscriber.catch_up(core)
            assert subscriber.blocks == cached(core.cache) and subscriber.blocks
    run(core)
    subscriber.catch_up(core)
    assert subscriber.blocks == cached(core.cache)
    assert core.cache.evicted_pages > 0 and subscriber.topics == {b"kv@a@b"} and subscriber.cleared >= 2


def test_the_subscriber_of_the_documentation(streaming, addresses, capsys):
    page = (Path(__file__).parents[1] / "docs" / "observability.md").read_text()
    code = next(part for part in page.split("```python\n")[1:] if "subscribe" in part).partition("```")[0]
    code = code.replace("tcp://127.0.0.1:5557", addresses[0]).replace("while True:", "for _ in range(2):")
    follows = threading.Thread(target=exec, args=(code, {}), daemon=True)
    follows.start()
    core, _ = streaming
    for i in range(int(SOON * 50)):
        submit(core, "hello", [1 + i % 9, 2, 3, 4, 5, 6, 7, 8], max_tokens=1)
        run(core)
        core._publisher.attach(core.cache)
        core.command("ping")
        follows.join(0.02)
        if not follows.is_alive():
            break
    assert " BlockStored [" in capsys.readouterr().out and not follows.is_alive()


def test_a_gap_is_filled_from_the_replay_socket(streaming):
    core, subscriber = streaming
    subscriber.catch_up(core)
    known = len(subscriber.missed)
    for i in range(5):
        submit(core, f"r{i}", [i, *range(12)], max_tokens=2)
        run(core)
    assert subscriber.blocks != cached(core.cache)
    lost = -1
    while lost < core._publisher.sequence - 1:
        assert subscriber.socket.poll(SOON * 1000)
        lost = int.from_bytes(subscriber.socket.recv_multipart()[1], "big")
    submit(core, "last", [30, *range(12)], max_tokens=2)
    run(core)
    subscriber.catch_up(core)
    assert len(subscriber.missed) >= known + 5
    assert subscriber.blocks == cached(core.cache)


def test_a_late_subscriber_asks_for_everything(streaming, addresses):
    core, _ = streaming
    submit(core, "a", [*range(13)], max_tokens=2)
    run(core)
    with Subscriber(*addresses) as late:
        batches = late.replayed(0)
        assert [number for number, _ in batches] == list(range(len(batches)))
        for _, payload in batches:
            late.apply(payload)
        assert late.blocks == cached(core.cache) and late.blocks
        assert late.replayed(len(batches)) == []


def test_what_is_not_kept_any_more_is_told_anew(streaming, addresses):
    core, subscriber = streaming
    core._publisher._kept._most = 1
    submit(core, "a", [*range(13)], max_tokens=2)
    run(core)
    with Subscriber(*addresses) as late:
        late.wait_for(lambda: (late.replayed(0), core.command("ping")))
        late.next = int.from_bytes(late.socket.recv_multipart()[1], "big")
        late.apply(late.replayed(late.next)[0][1])
        assert late.cleared == 1 and late.blocks == cached(core.cache) and late.blocks
        before = core._publisher.sequence
        core._publisher._next_anew += 10 * SOON  # it has just done so
        late.replayed(0)
        core.command("ping")  # a loop of such requests does not make it repeat itself
        assert core._publisher.sequence == before


@pytest.mark.parametrize("envelope", ([], [b""]))
def test_both_forms_of_a_replay_request(streaming, addresses, envelope):
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(addresses[1])
        socket.send_multipart([b"", b"not a number", b"of this protocol"])
        socket.send_multipart([*envelope, b"\0" * 8])
        assert socket.poll(SOON * 1000)
        *got, number, _ = socket.recv_multipart()
        assert got == envelope and number == b"\0" * 8


def test_the_wire_form_of_each_event():
    def raw(event):
        return msgspec.msgpack.decode(msgspec.msgpack.encode(wire_event(event, 2)))
    tokens = np.array([5, 6, 7, 8], "<i4").tobytes()
    public = raw(Stored([10, 2**64 - 1], None, tokens, b""))
    assert public == ["BlockStored", [10, 2**64 - 1], None, [5, 6, 7, 8], 2, None, None, None, None]
    private = raw(Stored([10, 11], 9, tokens, b"\x01\xff"))
    assert private == ["BlockStored", [10, 11], 9, [5, 6, 7, 8], 2, None, None, None, [["01ff"], ["01ff"]]]
    assert raw(Removed([10])) == ["BlockRemoved", [10], None]
    assert raw(Cleared()) == ["AllBlocksCleared"]


def test_domains_have_blocks_of_their_own(streaming):
    core, subscriber = streaming
    for name, domain in (("a", b""), ("b", cache_domain(salt="s"))):
        request = submit(core, name, [*range(9)], max_tokens=1)
        run(core)
        core.submit(msgspec.structs.replace(request, id=name + "2", domain=domain))
        run(core)
    subscriber.catch_up(core)
    assert subscriber.blocks == cached(core.cache) and len(subscriber.blocks) == 4


class StreamMachine(CacheMachine):
    """After every step the stream, gone through by a subscriber, is what the tree holds."""

    def begin(self, page: int, pages: int) -> None:
        super().begin(page, pages)
        self.publisher = Publisher(CacheSettings(kv_events="inproc://events"))
        self.publisher.attach(self.cache)
        self.follower = Follower()

    @rule()
    def tell_anew(self) -> None:
        self.publisher.attach(self.cache)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "publisher"):
            return
        self.publisher.publish()
        for number, payload in self.publisher._kept.since(self.follower.next)[0]:
            assert number == self.follower.next
            self.follower.apply(payload)
            self.follower.next += 1
        assert self.follower.blocks == cached(self.cache)

    def teardown(self) -> None:
        if hasattr(self, "publisher"):
            self.publisher.close()


StreamMachine.begin = initialize(page=st.sampled_from([1, 2, 4]), pages=st.integers(6, 40))(StreamMachine.begin)
TestStream = StreamMachine.TestCase
TestStream.settings = settings(max_examples=25, stateful_step_count=30, deadline=None)


def test_kept_batches_are_bounded():
    kept = Kept(batches=3, size=10)
    for i in range(5):
        kept.add(i, b"xx")
    assert kept.since(0) == ([(2, b"xx"), (3, b"xx"), (4, b"xx")], True)
    assert kept.since(3) == ([(3, b"xx"), (4, b"xx")], False) and kept.since(9) == ([], False)
    kept.add(5, b"x" * 9)
    assert kept.since(5) == ([(5, b"x" * 9)], False) and kept.since(0)[1]
    kept.add(6, b"x" * 100)
    assert [number for number, _ in kept.since(0)[0]] == [6]
    assert Kept().since(0) == ([], False)


@pytest.mark.parametrize("endpoint,local", [
    ("tcp://127.0.0.1:5557", True), ("tcp://localhost:1", True), ("tcp://[::1]:1", True), ("ipc:///tmp/x", True),
    ("tcp://*:5557", False), ("tcp://0.0.0.0:1", False), ("tcp://10.0.0.1:1", False), ("tcp://eth0:1", False)])
def test_addresses_that_others_reach_are_warned_of(endpoint, local):
    assert is_local(endpoint) is local


@pytest.mark.parametrize("name", ("kv_events", "kv_events_replay"))
@pytest.mark.parametrize("value", ("5557", "127.0.0.1:5557", "udp://127.0.0.1:5557", "tcp://127.0.0.1", "inproc://x",
                                   "tcp://127.0.0.1:99999", "tcp://127.0.0.1:65536"))
def test_what_is_no_address_is_refused(name, value):
    with pytest.raises(ConfigError, match=r"is not an address such as tcp://127\.0\.0\.1:5557"):
        resolve({name: value}, {})


def test_events_of_a_cache_that_is_off_are_refused():
    with pytest.raises(ConfigError, match="with --no-prefix-cache nothing is"):
        EngineCore(Config(cache=CacheSettings(kv_events="tcp://127.0.0.1:5558", prefix_cache=False)))


def test_an_address_may_be_a_variable():
    assert read_environment({"ISTHMUS_KV_EVENTS": "tcp://127.0.0.1:5557"}) == {"kv_events": "tcp://127.0.0.1:5557"}


def test_a_taken_address_is_told_before_anything_is_loaded():
    with zmq.Context() as context, context.socket(zmq.PUB) as socket:
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        config = Config(cache=CacheSettings(kv_events=f"tcp://127.0.0.1:{port}"))
        with pytest.raises(ConfigError, match=f"--kv-events tcp://127.0.0.1:{port}: Address already in use"):
            EngineCore(config)


def test_a_publisher_frees_its_addresses(addresses):
    config = CacheSettings(kv_events=addresses[0], kv_events_replay=addresses[1])
    for _ in range(2):
        publisher = Publisher(config)
        publisher.attach(CacheManager(4, PAGE))
        publisher.publish()
        publisher.close()
        publisher.close()
        assert not publisher._thread.is_alive()


@pytest.mark.parametrize("words", ([], ["--in-process"]))
def test_a_server_streams_what_its_requests_leave(addresses, tmp_path, words):
    model = str(tiny_llama_gguf(tmp_path / "tiny.gguf"))
    flags = ["--kv-events", addresses[0], "--kv-events-replay", addresses[1], "--kv-events-topic", "kv@here@tiny"]
    with Serving(model, *words, *flags, temporary=tmp_path) as server, Subscriber(*addresses) as subscriber:
        def ask(method, path, body=None):
            return json.loads(server.ask(method, path, body).read())
        prompt = "the quick brown fox jumps over the lazy dog " * 3
        for salt in (None, "private"):
            ask("POST", "/v1/completions", {"prompt": prompt, "max_tokens": 20, "cache_salt": salt, "ignore_eos": True})
        for _, payload in subscriber.replayed(0):
            subscriber.apply(payload)
        stats = ask("GET", "/server_info")["stats"]
        assert len(subscriber.blocks) == stats["pages_cached"] > 0 and stats["kv_event_batches"] > 1
        ask("POST", "/flush_cache")
        subscriber.next = stats["kv_event_batches"]
        for _, payload in subscriber.replayed(subscriber.next):
            subscriber.apply(payload)
        assert not subscriber.blocks


def test_an_engine_that_is_started_anew_begins_the_stream_anew(addresses, tmp_path):
    model = str(tiny_llama_gguf(tmp_path / "tiny.gguf"))
    flags = ["--kv-events", addresses[0], "--kv-events-replay", addresses[1]]
    with Serving(model, *flags, temporary=tmp_path) as server, Subscriber(*addresses) as subscriber:
        def blocks():
            body = {"prompt": "the quick brown fox jumps over the lazy dog " * 3, "max_tokens": 1}
            while server.ask("POST", "/v1/completions", body).status != 200:
                time.sleep(0.1)
            subscriber.blocks = {}
            batches = subscriber.replayed(0)
            assert batches[0][0] == 0 and isinstance(decode(batches[0][1]).events[0], AllBlocksCleared)
            for _, payload in batches:
                subscriber.apply(payload)
            return subscriber.blocks
        first = dict(blocks())
        next(child for child in server.children if "scheduler" in " ".join(child.cmdline())).kill()
        assert blocks() == first and first


def test_replay_without_events_is_refused():
    with pytest.raises(ConfigError, match="--kv-events-replay .* needs --kv-events"):
        EngineCore(Config(cache=CacheSettings(kv_events_replay="tcp://127.0.0.1:5558")))
