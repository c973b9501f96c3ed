"""The ownership ledger of a running server: what it does when a page is not whose it should be."""
from __future__ import annotations

import json
import re
import signal
import stat

import pytest
from isthmus.core.cache.pool import PagePool
from isthmus.core.config import CacheSettings, Config, ModelSettings, PlatformSettings, SchedulerSettings
from isthmus.core.engine import AUDIT, EngineCore
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.recording.rerun import rerun

from .checkpoints import tiny_llama_gguf
from .effort import SOON
from .serving import Serving

COST = 40  # seconds

# In the engine's process, when the file FIRE appears: the ledger gives the last page of a running request to the tree.
FAULT = """
import os
import isthmus.core.engine as engine
step = engine.EngineCore.step
def faulty(self):
    table = self.scheduler.table
    slots = [slot for slot in range(1, table.pages.shape[0]) if table.page_count[slot] > table.tree_pages[slot]]
    if slots and os.path.exists(FIRE):
        os.unlink(FIRE)
        self.cache.pool.owner[table.pages[slots[0], table.page_count[slots[0]] - 1]] = -1
    return step(self)
engine.EngineCore.step = faulty
"""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_llama_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


def metric(server: Serving, name: str) -> float:
    text = server.ask("GET", "/metrics").read().decode()
    return float(re.search(rf"^{name}\{{.*\}} (.*)$", text, re.MULTILINE)[1])


def test_a_violation_is_told_with_both_owners_and_costs_one_page(tiny, tmp_path):
    fire = tmp_path / "fire"
    (tmp_path / "sitecustomize.py").write_text(FAULT.replace("FIRE", repr(str(fire))))
    with Serving(tiny, "--record", str(tmp_path / "steps"), temporary=tmp_path, delay_ms=30,
                 PYTHONPATH=str(tmp_path)) as server:
        stream = server.stream(100)  # takes 3 s
        fire.touch()
        rest = stream.read()
        assert b'"finish_reason":"length"' in rest and b"[DONE]" in rest, "its request ends as if nothing had been"
        assert not fire.exists() and metric(server, "isthmus_kv_ownership_violations_total") == 1
        assert json.loads(server.ask("POST", "/flush_cache").read())["success"], "which lets go of the page once more"
        assert metric(server, "isthmus_kv_ownership_violations_total") == 1
        assert metric(server, "isthmus_kv_pages_quarantined") == 1
        assert server.ask("GET", "/health").status == 200
        later = server.ask("POST", "/v1/completions", {"prompt": "hello", "max_tokens": 3, "ignore_eos": True})
        assert json.loads(later.read())["usage"]["completion_tokens"] == 3
        stats = json.loads(server.ask("GET", "/server_info").read())["stats"]
        assert stats["pages_free"] + stats["pages_cached"] + 1 == stats["pages_total"], "no other page is lost"
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SOON) == 0
        said = "".join(server.rest())
    assert re.search(r"ERROR isthmus.core.cache.pool: page \d+ \(generation \d+\) .* by request in slot \d+: its owner "
                     r"is tree, not request in slot \d+; quarantined, 1 pages in all", said), said
    assert said.count(" 1 ownership violations; the last ") == 1 and "launch " in said, "with the recording's tail"
    assert stat.S_IMODE((tmp_path / "steps").stat().st_mode) == 0o600
    outcome = rerun(tmp_path / "steps")
    assert outcome.steps > 100 and (not outcome.broken or outcome.step > 3), "without the fault it may differ"


def make(tmp_path, tiny, now) -> EngineCore:
    return EngineCore(Config(
        model=ModelSettings(tiny), cache=CacheSettings(kv_cache_memory="1MiB"), platform=PlatformSettings("null"),
        scheduler=SchedulerSettings(record=str(tmp_path / "a"))), clock=lambda: now[0])


def test_a_page_that_nobody_holds_is_noticed_while_the_engine_has_nothing_to_do(tmp_path, tiny, caplog):
    now = [100.0]
    engine = make(tmp_path, tiny, now)
    engine.command("ping")
    engine.submit(Submit("a", pack_ids([5, 6, 7]), SamplingParams(max_tokens=4)))
    while engine.has_work:
        engine.step()
    engine.cache.pool.alloc(2, 1)  # and nobody remembers
    now[0] += AUDIT - 1
    engine.command("ping")
    assert engine.stats()["ownership_violations"] == 0, "it looks now and then"
    now[0] += 1
    engine.command("ping")
    assert engine.stats()["ownership_violations"] == 1
    assert "the ledger of pages is broken" in caplog.text and "submit a: 3 prompt tokens" in caplog.text
    caplog.clear()
    for _ in range(3):
        now[0] += AUDIT
        engine.command("ping")
    assert caplog.text.count("the ledger of pages is broken") == 3
    assert caplog.text.count("the last") == 2, "a report for the first, the second and the fourth"


def test_an_engine_at_work_is_not_audited(tmp_path, tiny, monkeypatch):
    now = [100.0]
    engine = make(tmp_path, tiny, now)
    looked = []
    monkeypatch.setattr(PagePool, "verify", lambda *given: looked.append(given) or 0)
    engine.submit(Submit("a", pack_ids([5, 6, 7]), SamplingParams(max_tokens=4)))
    engine.step()
    now[0] += 10 * AUDIT
    engine.command("ping")
    assert not looked
    while engine.has_work:
        engine.step()
    engine.close()
