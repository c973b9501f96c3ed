"""Sessions and pins: what is kept longer, for how long, and that pins never stand in anybody's way."""
from __future__ import annotations

import json
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from isthmus.core.cache.manager import CacheManager
from isthmus.core.cache.pins import SESSIONS, SWEEP, depth
from isthmus.core.config import CacheSettings, Config
from isthmus.core.errors import RequestError
from isthmus.core.messages import CacheHint, SamplingParams, Submit, pack_ids
from isthmus.core.recording.rerun import rerun
from isthmus.core.server.limits import MAX_PIN
from starlette.testclient import TestClient

from .cache_machine import CacheMachine
from .checkpoints import tiny_llama_gguf
from .fake_client import make_app
from .test_cli_serve import Serving
from .test_recording import DECIDED, make

POLICIES = ("lru", "learned")
COST = 20  # seconds


class Run:
    """A cache of 16 pages of one token each, of which pins may hold 8, and whole requests on it."""

    def __init__(self, policy: str = "lru", share: float = 0.5):
        self.cache = CacheManager(17, 1, policy, strict=True, pin_share=share)
        self.owner = 0

    def serve(self, tokens: list[int], session: str = "", ends: bool = False) -> int:
        """A request from its admission to its end; how many of its tokens were cached."""
        self.owner += 1
        ids, hint = np.array(tokens, np.int32), CacheHint(session, ends) if session else None
        pages, node = self.cache.acquire(ids, b"")
        use = self.cache.admit(ids, len(pages), node, hint)
        fresh = self.cache.take(len(ids) - len(pages), self.owner)
        assert fresh is not None
        row = np.concatenate([pages, fresh]).astype(np.int32)
        shared, node = self.cache.commit(ids, row, len(pages), self.owner, b"", node, use)
        self.cache.release(row, shared, self.owner, node, use, hint)
        self.cache.verify({})
        return len(pages)

    def cached(self, tokens: list[int]) -> int:
        return self.cache.cached_tokens(np.array(tokens, np.int32), b"")


A, B, C = [1] * 4, [2] * 4, [3] * 4


@pytest.mark.parametrize("policy", POLICIES)
def test_what_is_pinned_goes_last(policy):
    run = Run(policy)
    run.serve(A, "a")
    assert run.cache.pin("a", 10, 0).pages == 4
    run.serve(B)
    run.serve(C)
    run.serve([4] * 12)                    # needs all that is not pinned
    assert run.cached(A) == 4 and run.cached(B) == run.cached(C) == 0
    run.serve([5] * 16)                    # needs everything: a pin is no lock
    assert run.cached(A) == 0
    run.cache.tick(1.0)
    assert len(run.cache.pins) == run.cache.pins.pages == 0


@pytest.mark.parametrize("policy", POLICIES)
def test_a_pin_ends_with_its_time(policy):
    run = Run(policy)
    run.serve(A, "a")
    run.cache.pin("a", 10, 0)
    run.serve([4] * 12)
    run.serve([5] * 12)                    # the policy has offered the pinned leaf by now
    assert run.cached(A) == 4
    run.cache.tick(9.9)
    assert len(run.cache.pins) == 1
    run.cache.tick(10.0)
    assert len(run.cache.pins) == 0
    run.serve([6] * 13)
    assert run.cached(A) < 4


@pytest.mark.parametrize("end", ("unpin", "end of session"))
def test_a_pin_can_be_ended(end):
    run = Run()
    run.serve(A, "a")
    run.cache.pin("a", 10, 0)
    if end == "unpin":
        assert run.cache.pins.unpin("a") and not run.cache.pins.unpin("a")
    else:
        run.serve(A, "a", ends=True)
    assert run.cache.pins.pages == 0
    run.serve([4] * 16)
    assert run.cached(A) == 0


def test_a_pin_follows_its_session_and_lasts_as_long_again():
    run = Run()
    run.serve(A, "a")
    run.cache.pin("a", 10, 0)
    run.cache.tick(8.0)
    run.serve([*A, 7, 7], "a")
    assert run.cache.pins.pages == 6
    run.cache.tick(17.0)
    run.serve([4] * 10)
    assert run.cached([*A, 7, 7]) == 6
    run.cache.tick(18.0)
    assert run.cache.pins.pages == 0


def test_a_session_that_outgrows_all_pins_keeps_what_was_pinned():
    run = Run()
    run.serve(A, "a")
    run.cache.pin("a", 10, 0)
    run.serve([*A, *[7] * 6], "a")
    assert run.cache.pins.pages == 4
    run.serve([4] * 12)
    assert run.cached([*A, *[7] * 6]) == 4


def test_pins_hold_a_bounded_share_and_the_first_to_expire_makes_room():
    run = Run()
    for session, tokens, ttl in (("a", A, 5), ("b", B, 50)):
        run.serve(tokens, session)
        run.cache.pin(session, ttl, 0)
    run.serve(C, "c")
    run.cache.pin("c", 9, 0)
    assert run.cache.pins.pages == 8 == run.cache.pins.limit
    assert set(run.cache.pins._pins) == {"b", "c"}
    run.serve([9] * 9, "large")            # takes one page of a pin: of the one that expires first
    with pytest.raises(RequestError, match="9 pages cached, more than the 8 .*--pin-share") as caught:
        run.cache.pin("large", 5, 0)
    assert caught.value.status == 409 and set(run.cache.pins._pins) == {"b"} and run.cached(C) == 3


def test_two_sessions_may_pin_one_prefix():
    run = Run()
    run.serve(A, "a")
    run.serve(A, "b")
    run.cache.pin("a", 5, 0)
    run.cache.pin("b", 10, 0)
    run.cache.pins.unpin("a")
    run.serve([4] * 12)
    assert run.cached(A) == 4
    run.cache.pins.unpin("b")
    run.serve([5] * 16)
    assert run.cached(A) == 0


@pytest.mark.parametrize("share", (0.0, 0.5))
def test_what_cannot_be_pinned(share):
    run = Run(share=share)
    with pytest.raises(RequestError, match="nothing of this session is cached") as caught:
        run.cache.pin("unknown", 5, 0)
    assert caught.value.status == 404
    run.serve(A, "a")
    if not share:
        with pytest.raises(RequestError, match="more than the 0 that all pins may hold"):
            run.cache.pin("a", 5, 0)
    run.cache.flush()
    with pytest.raises(RequestError, match="nothing of this session is cached"):
        run.cache.pin("a", 5, 0)


def test_a_flush_takes_pinned_pages_too():
    run = Run()
    run.serve(A, "a")
    run.cache.pin("a", 10, 0)
    assert run.cache.flush() == 4 and run.cached(A) == 0
    run.cache.tick(1.0)
    assert run.cache.pins.pages == 0


def test_sessions_are_bounded_and_forgotten_with_their_pages():
    run = Run()
    for i in range(SESSIONS + 10):
        run.serve([1], f"s{i}")
    assert len(run.cache.pins._last) == SESSIONS and "s9" not in run.cache.pins._last
    run.cache.flush()
    run.cache.tick(SWEEP)
    assert not run.cache.pins._last


class PinMachine(CacheMachine):
    """The cache's own machine, with pins set and ended in between: the ledger stays whole and all pages can be had."""

    @rule(pick=st.integers(0, 9), session=st.sampled_from("abc"), ends=st.booleans())
    def session_ends(self, pick: int, session: str, ends: bool) -> None:
        if self.live:
            owner = self._pick(pick)
            self._commit(owner, len(self.live[owner].tokens))
            self.cache.pins.ended(session, self.live[owner].node, ends, self.cache.now)
            self._finish(owner)

    @rule(session=st.sampled_from("abc"), ttl=st.integers(1, 5))
    def pin(self, session: str, ttl: int) -> None:
        try:
            pin = self.cache.pin(session, ttl, self.cache.now)
        except RequestError:
            return
        assert pin.pages == depth(pin.node) <= self.cache.pins.limit
        self.exact = False  # what is pinned goes after what was used later

    @rule(session=st.sampled_from("abc"))
    def unpin(self, session: str) -> None:
        self.cache.pins.unpin(session)

    @rule(seconds=st.integers(0, 3))
    def pass_time(self, seconds: int) -> None:
        self.cache.tick(self.cache.now + seconds)

    @invariant()
    def bounded(self) -> None:
        if hasattr(self, "cache"):
            pins = self.cache.pins
            assert pins.pages == sum(pin.pages for pin in pins._pins.values()) <= pins.limit
            assert {s for sessions in pins._by_node.values() for s in sessions} == set(pins._pins)


TestPins = PinMachine.TestCase
TestPins.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)


def test_a_rerun_pins_what_was_pinned(tmp_path):
    engine = make(tmp_path / "a")
    for i in range(40):
        prompt = [i % 8, *range(38 + i % 3)]
        engine.submit(Submit(f"r{i}", pack_ids(prompt), SamplingParams(max_tokens=4), hint=CacheHint(f"s{i % 6}")))
        while engine.has_work:
            engine.step()
        if i % 5 == 2:
            engine.command("pin", session=f"s{i % 6}", ttl=60.0)
        if i == 20:
            engine.command("unpin", session="s1")
            with pytest.raises(RequestError):
                engine.command("pin", session="unknown", ttl=1.0)
    engine.close()
    stats, outcome = engine.stats(), rerun(tmp_path / "a", looks=lambda step: True)
    names = (*DECIDED, "pins", "pages_pinned")
    assert not outcome.broken and {name: outcome.stats[name] for name in names} == {name: stats[name] for name in names}
    assert stats["pins"] > 0 and stats["evicted_pages"] > 0


# ---- over HTTP


@pytest.fixture
def made(monkeypatch):
    made = make_app()

    async def command(name, timeout=60.0, **arguments):
        made.commands.append((name, arguments))
        if arguments["session"] == "unknown":
            raise RequestError("nothing of this session is cached", status=404, code="session_not_found")
        return {"pages": 3}
    made.commands = []
    monkeypatch.setattr(made.client, "command", command)
    return SimpleNamespace(http=TestClient(made.app), commands=made.commands)


def test_a_pin_reaches_the_engine(made):
    answer = made.http.post("/v1/sessions/my%2Fsession/pin", json={"ttl": 30})
    assert answer.status_code == 200 and answer.json() == {"session_id": "my/session", "pages": 3}
    assert made.http.delete("/v1/sessions/a/pin").status_code == 200
    assert made.commands == [("pin", {"session": "my/session", "ttl": 30.0}), ("unpin", {"session": "a"})]


@pytest.mark.parametrize("body,param", [({}, "ttl"), ({"ttl": 0}, "ttl"), ({"ttl": -1}, "ttl"), ({"ttl": "5m"}, "ttl"),
                                        ({"ttl": MAX_PIN + 1}, "ttl")])
def test_a_wrong_pin_is_a_400(made, body, param):
    answer = made.http.post("/v1/sessions/a/pin", json=body)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == param and not made.commands


def test_a_session_with_too_long_a_name_is_a_400(made):
    answer = made.http.post(f"/v1/sessions/{'x' * 257}/pin", json={"ttl": 5})
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "session_id" and not made.commands


def test_an_unknown_session_is_a_404(made):
    answer = made.http.post("/v1/sessions/unknown/pin", json={"ttl": 30})
    assert answer.status_code == 404 and answer.json()["error"]["code"] == "session_not_found"


def test_tenants_pin_their_own_sessions(monkeypatch):
    made = make_app(server={"api_key": "one,two"})
    names = []

    async def command(name, timeout=60.0, **arguments):
        names.append(arguments["session"])
        return {}
    monkeypatch.setattr(made.client, "command", command)
    http = TestClient(made.app)
    for key in ("one", "two"):
        answer = http.post("/v1/sessions/s/pin", json={"ttl": 5}, headers={"authorization": f"Bearer {key}"})
        assert answer.status_code == 200
    assert len(set(names)) == 2 and all(name.endswith("/s") for name in names)
    assert http.post("/v1/sessions/s/pin", json={"ttl": 5}).status_code == 401


@pytest.mark.parametrize("words", ([], ["--in-process"]))
def test_a_real_server_keeps_a_pinned_session(tmp_path, words):
    model = str(tiny_llama_gguf(tmp_path / "tiny.gguf"))
    with Serving(model, *words, "--kv-cache-memory", "100KiB", "--pin-share", "0.7", temporary=tmp_path,
                 delay_ms=0) as server:
        def ask(method, path, body=None):
            answer = server.ask(method, path, body)
            return answer.status, json.loads(answer.read())

        def complete(prompt, **fields):
            asked = {"prompt": prompt, "max_tokens": 1, "temperature": 0, **fields}
            status, body = ask("POST", "/v1/completions", asked)
            assert status == 200, body
            return body["usage"]["prompt_tokens_details"]["cached_tokens"]

        prompt = "a conversation that goes on and on, with a tool that takes its time " * 2
        assert ask("POST", "/v1/sessions/s/pin", {"ttl": 60})[0] == 404
        complete(prompt, session_id="s")
        status, pin = ask("POST", "/v1/sessions/s/pin", {"ttl": 60})
        assert status == 200, pin
        assert pin["session_id"] == "s" and pin["tokens"] > 0 and pin["expires_in"] == 60
        stats = ask("GET", "/server_info")[1]["stats"]
        assert stats["pins"] == 1 and stats["pages_pinned"] == pin["pages"]
        for i in range(40):
            complete(f"{i} somebody else entirely, with other words")
        assert ask("GET", "/server_info")[1]["stats"]["evicted_pages"] > 0
        assert complete(prompt, session_id="s") >= pin["tokens"]
        assert ask("DELETE", "/v1/sessions/s/pin")[1] == {"session_id": "s", "unpinned": True}
        assert ask("DELETE", "/v1/sessions/s/pin")[1] == {"session_id": "s", "unpinned": False}
        for i in range(40):
            complete(f"{i} yet somebody else, with words of their own")
        assert complete(prompt, session_id="s") < pin["tokens"]
        assert "isthmus_kv_pins" in server.ask("GET", "/metrics").read().decode()


def test_the_share_is_a_setting():
    assert Config(cache=CacheSettings(pin_share=0.1)).cache.pin_share == 0.1
