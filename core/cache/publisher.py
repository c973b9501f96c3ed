"""The stream of cache events for KV-aware routers, over ZMQ, in the wire format that vLLM and SGLang established.

A PUB socket sends [topic, sequence number (8 bytes, big-endian), msgpack of `EventBatch`]. A subscriber that misses a
number asks the replay socket (ROUTER) for everything from a number on, and gets [number, batch] as long as there are
some, then [-1, empty]. If the first is not kept any more, the stream soon tells all that is cached anew, after an
`AllBlocksCleared`. A block is a page.
Source: the documented subscriber example of vLLM, and what llm-d's and Dynamo's indexers decode.
"""
from __future__ import annotations

import ipaddress
import logging
import threading
import time
from collections import deque

import msgspec
import numpy as np
import zmq

from ..config import CacheSettings
from ..errors import ConfigError
from .events import CacheEvents, Cleared, Removed, Stored
from .manager import CacheManager

log = logging.getLogger(__name__)

KEPT_BATCHES, KEPT_BYTES = 10_000, 64 * 2**20  # for replay
SEND_QUEUE = KEPT_BATCHES + 16  # messages that wait for one slow reader; it misses what comes beyond
ANEW_S = 10.0         # between two times that everything is told anew
LINGER_MS = 200       # how long what was sent may take to leave at the end
STOP = "inproc://stop"
END = (-1).to_bytes(8, "big", signed=True)


class EventBatch(msgspec.Struct, array_like=True, omit_defaults=True, frozen=True):
    """What happened in one step. ts: seconds since 1970."""

    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class BlockStored(msgspec.Struct, array_like=True, omit_defaults=True, tag=True, frozen=True):
    """Blocks that follow one another; `token_ids` are all of theirs. parent_block_hash None: the first of a prompt.

    extra_keys: for blocks that not everybody shares (adapter, salt, tenant), one list a block that names the domain.
    """

    block_hashes: list[int]
    parent_block_hash: int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None = None
    extra_keys: list[tuple[str]] | None = None


class BlockRemoved(msgspec.Struct, array_like=True, omit_defaults=True, tag=True, frozen=True):
    """Blocks that are no longer cached."""

    block_hashes: list[int]
    medium: str | None


class AllBlocksCleared(msgspec.Struct, array_like=True, omit_defaults=True, tag=True, frozen=True):
    """No block is cached."""


def wire_event(event: Stored | Removed | Cleared, block_size: int) -> BlockStored | BlockRemoved | AllBlocksCleared:
    """An event of the cache in the words of the wire. Fields about other tiers of memory are null: there is one."""
    if isinstance(event, Removed):
        return BlockRemoved(event.hashes, None)
    if isinstance(event, Cleared):
        return AllBlocksCleared()
    keys = [(event.domain.hex(),)] * len(event.hashes) if event.domain else None
    return BlockStored(event.hashes, event.parent, np.frombuffer(event.tokens, "<i4").tolist(), block_size, None, None,
                       None, keys)


class Kept:
    """The last batches, for whoever missed some. Two threads use it."""

    def __init__(self, batches: int = KEPT_BATCHES, size: int = KEPT_BYTES):
        self._most, self._size = batches, size
        self._batches: deque[tuple[int, bytes]] = deque()
        self._bytes = 0
        self._lock = threading.Lock()

    def add(self, sequence: int, payload: bytes) -> None:
        """Keep a batch; the oldest go when there are too many, or too many bytes of them. The newest always stays."""
        with self._lock:
            self._batches.append((sequence, payload))
            self._bytes += len(payload)
            while len(self._batches) > self._most or self._bytes > self._size and len(self._batches) > 1:
                self._bytes -= len(self._batches.popleft()[1])

    def since(self, sequence: int) -> tuple[list[tuple[int, bytes]], bool]:
        """The batches from `sequence` on, and whether some before them are not kept any more."""
        with self._lock:
            found = [batch for batch in self._batches if batch[0] >= sequence]
            return found, bool(self._batches) and sequence < self._batches[0][0]


class Publisher:
    """Sockets are bound when it is made; `attach` makes a cache tell it; then `publish` is called after each step."""

    def __init__(self, settings: CacheSettings):
        assert settings.kv_events is not None
        self._topic = settings.kv_events_topic.encode()
        self.sequence = 0  # of the next batch
        self._kept = Kept()
        self._anew = threading.Event()
        self._next_anew = 0.0
        self._events: CacheEvents | None = None
        self._encode = msgspec.msgpack.Encoder().encode
        self._context = zmq.Context()
        self._socket = self._bind(zmq.PUB, settings.kv_events, "--kv-events")
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.bind(STOP)
        self._thread: threading.Thread | None = None
        if settings.kv_events_replay is not None:
            router = self._bind(zmq.ROUTER, settings.kv_events_replay, "--kv-events-replay")
            self._thread = threading.Thread(target=self._replay, args=(router,), daemon=True, name="kv-events-replay")
            self._thread.start()

    def attach(self, cache: CacheManager) -> None:
        """Tell of this cache from now on, beginning with what it holds."""
        self._cache = cache
        self._events = cache.tree.listener = CacheEvents(cache.pool.total, cache.page_size)

    def publish(self) -> None:
        """Send what happened since the last call, if anything did; nothing before there is a cache."""
        if self._events is None:
            return
        if self._anew.is_set() and time.monotonic() >= self._next_anew:
            self._anew.clear()
            self._next_anew = time.monotonic() + ANEW_S
            self.attach(self._cache)
        events = self._events.drain(self._cache.tree)
        if not events:
            return
        payload = self._encode(EventBatch(time.time(), [wire_event(e, self._cache.page_size) for e in events]))
        self._kept.add(self.sequence, payload)
        self._socket.send_multipart((self._topic, self.sequence.to_bytes(8, "big"), payload), zmq.NOBLOCK)
        self.sequence += 1

    def close(self) -> None:
        """Stop; what was sent may still reach its subscribers for a moment. May be called twice."""
        if self._context.closed:
            return
        if self._thread is not None:
            self._stop.send(b"")
            self._thread.join()
        self._context.destroy(LINGER_MS)

    def _bind(self, kind: int, endpoint: str, flag: str) -> zmq.Socket:
        socket = self._context.socket(kind)
        socket.set_hwm(SEND_QUEUE)
        try:
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            self._context.destroy(linger=0)
            raise ConfigError(f"{flag} {endpoint}: {error.strerror}; expected a free address such as "
                              "tcp://127.0.0.1:5557") from None
        if not is_local(endpoint):
            log.warning("%s %s: everybody who can reach this address can read the token ids of all cached prompts",
                        flag, endpoint)
        return socket

    def _replay(self, router: zmq.Socket) -> None:
        """In a thread of its own, with sockets of its own: answer requests until it is told to stop."""
        with router, self._context.socket(zmq.PAIR) as stop:
            stop.connect(STOP)
            poller = zmq.Poller()
            poller.register(router, zmq.POLLIN)
            poller.register(stop, zmq.POLLIN)
            while stop not in dict(poller.poll()):
                self._answer(router)

    def _answer(self, router: zmq.Socket) -> None:
        *envelope, start = router.recv_multipart()
        if len(envelope) not in (1, 2) or len(start) != 8:
            return  # not of this protocol
        batches, lost = self._kept.since(int.from_bytes(start, "big"))
        if lost:
            self._anew.set()
        for sequence, payload in batches:
            router.send_multipart([*envelope, sequence.to_bytes(8, "big"), payload])
        router.send_multipart([*envelope, END, b""])


def is_local(endpoint: str) -> bool:
    """Can only this machine reach the endpoint?"""
    scheme, _, rest = endpoint.partition("://")
    host = rest.rpartition(":")[0].strip("[]")
    if scheme != "tcp" or host == "localhost":
        return scheme in ("ipc", "inproc") or host == "localhost"
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:  # *, or the name of an interface
        return False
