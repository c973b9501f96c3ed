"""Adapters in the engine: each request as on a model with its adapter merged, whatever else is in batch and cache."""
from __future__ import annotations

import threading
from dataclasses import replace

import numpy as np
import pytest
from isthmus.conformance.tiny import VOCAB, tiny_model
from isthmus.core.config import (
    AdapterSettings,
    CacheSettings,
    Config,
    ModelSettings,
    PlatformSettings,
    SchedulerSettings,
)
from isthmus.core.engine import EngineCore
from isthmus.core.errors import RequestError
from isthmus.core.messages import SamplingParams, Submit, pack_ids, unpack_ids
from isthmus.core.recording.rerun import rerun

from .lora_files import ALL, KIND, QV, drawn, merged_model, write_adapter

COST = 8  # seconds
ADAPTERS = {"sql": (1, 8, ALL), "poem": (2, 4, QV), "law": (3, 20, ("o_proj", "down_proj"))}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Folders of the adapters, and of models that have them merged; "" is the base model."""
    root = tmp_path_factory.mktemp("lora")
    adapters, models = {}, {"": tiny_model(KIND, 0)}
    for name, (seed, rank, targets) in ADAPTERS.items():
        pairs = drawn(seed, rank, targets)
        adapters[name] = write_adapter(root / name, pairs)
        models[name] = merged_model(root / f"merged-{name}", pairs, 2.0)
    return adapters, models


def config(model, adapters=(), platform="reference", dtype="float64", cache="1MiB", scheduler=None,
           **settings) -> Config:
    small = {"chunked_prefill_size": 24, "max_running_requests": 8}
    return Config(model=ModelSettings(model=str(model), dtype=dtype), platform=PlatformSettings(platform=platform),
                  cache=CacheSettings(kv_cache_memory=cache, page_size=16),
                  scheduler=SchedulerSettings(**small | (scheduler or {})),
                  adapters=AdapterSettings(lora=tuple(f"{k}={v}" for k, v in dict(adapters).items()), **settings))


def numbers(engine: EngineCore) -> dict[str, int]:
    return {"": 0} | {known["name"]: known["number"] for known in engine.command("adapters")["adapters"]}


def submit(engine: EngineCore, id: str, prompt, name: str = "", tokens: int = 12, **params) -> None:
    engine.submit(Submit(id, pack_ids(prompt), SamplingParams(
        max_tokens=tokens, temperature=0.0, ignore_eos=True, **params), adapter=numbers(engine)[name]))


def run(engine: EngineCore, until=lambda: False) -> dict[str, list[int]]:
    """Tokens of each request; `errors` of those that ended with one are raised."""
    found: dict[str, list[int]] = {}
    while engine.has_work and not until():
        for output in engine.step():
            assert output.finish != "error", output.error
            found.setdefault(output.id, []).extend(unpack_ids(output.tokens).tolist())
    return found


def text(seed: int, count: int) -> list[int]:
    return np.random.default_rng(seed).integers(3, VOCAB, count).tolist()


WORK = {"a": ("sql", text(1, 40)), "b": ("", text(1, 40)), "c": ("poem", text(1, 40)), "d": ("law", text(2, 7)),
        "e": ("sql", text(3, 5)), "f": ("", text(4, 61)), "g": ("law", text(1, 40)), "h": ("poem", text(5, 1))}


@pytest.fixture(scope="module")
def right(files):
    """What each request of WORK says on the merged models, alone."""
    found = {}
    for name, model in files[1].items():
        engine = EngineCore(config(model))
        for id, (own, prompt) in WORK.items():
            if own == name:
                submit(engine, id, prompt)
                found |= run(engine)
        engine.close()
    assert len({tuple(found[id]) for id in "abcg"}) == 4, "the adapters change what is said"
    return found


def test_every_request_is_as_on_the_merged_model_in_one_batch(files, right):
    engine = EngineCore(config(files[1][""], files[0]))
    for id, (name, prompt) in WORK.items():
        submit(engine, id, prompt, name)
    assert run(engine) == right
    engine.scheduler.verify()
    for id, (name, prompt) in WORK.items():  # again, over a warm cache
        submit(engine, id, prompt, name)
    assert run(engine) == right
    assert engine.scheduler.stats.cached_tokens >= 4 * 32
    engine.close()


def test_three_adapters_take_turns_in_one_slot(files, right):
    """Nobody waits for ever, and who waits does not keep the base model's requests from running."""
    engine = EngineCore(config(files[1][""], files[0], max_loras=1))
    for id, (name, prompt) in WORK.items():
        submit(engine, id, prompt, name)
    assert run(engine) == right
    stats = engine.command("stats")
    assert (stats["lora_resident"], stats["lora_slots"], stats["lora_adapters"]) == (1, 1, 3)
    assert stats["lora_moves"] >= 3 and stats["lora_waiting_requests"] == 0
    engine.close()


def test_requests_that_gave_way_come_back_to_their_adapter(files, right):
    """Memory for two contexts or so: requests are retracted and computed anew, beside another adapter by then."""
    engine = EngineCore(config(files[1][""], files[0], cache="512KiB", max_loras=1,
                               scheduler={"schedule_policy": "fcfs"}))
    engine.scheduler.limits = replace(engine.scheduler.limits, foresight=0)
    for id, (name, prompt) in WORK.items():
        submit(engine, id, prompt, name)
    steps, found = 0, {}
    while engine.has_work:
        steps, landed = steps + 1, []
        if steps in (3, 9, 20):
            landed = engine._land()
            engine.scheduler.retract_all()
        for output in [*landed, *engine.step()]:
            assert output.finish != "error", output.error
            found.setdefault(output.id, []).extend(unpack_ids(output.tokens).tolist())
    assert found == right and engine.scheduler.stats.preemptions >= 3
    engine.scheduler.verify()
    engine.close()


def load(engine: EngineCore, name: str, path, number: int = 100, replaced: bool = False) -> None:
    words = {"lora": name, "path": str(path), "replace": float(replaced)}
    engine.command("read_adapter", **words)
    while engine.command("add_adapter", **words, number=number).get("reading"):
        pass


def test_an_adapter_that_is_replaced_shares_nothing_with_the_new_one(files, right):
    """While the old one's requests run on."""
    engine = EngineCore(config(files[1][""], {"x": files[0]["sql"]}, max_lora_rank=32))
    submit(engine, "a", WORK["a"][1], "x")
    old = run(engine, until=lambda: engine.steps >= 5)
    load(engine, "x", files[0]["law"], replaced=True)
    submit(engine, "g", WORK["g"][1], "x")  # the same prompt
    rest = run(engine)
    assert old["a"] + rest["a"] == right["a"] and rest["g"] == right["g"]
    assert engine.scheduler.stats.cached_tokens == 0 and [k["number"] for k in engine.adapters.list()] == [100]
    engine.close()


def test_an_unloaded_adapter_serves_its_requests_to_the_end_and_no_new_one(files, right):
    engine = EngineCore(config(files[1][""], {"sql": files[0]["sql"]}))
    submit(engine, "a", WORK["a"][1], "sql")
    submit(engine, "b", WORK["b"][1])
    begun = run(engine, until=lambda: engine.steps >= 4)
    answer = engine.command("remove_adapter", lora="sql")
    assert (answer["found"], answer["requests"], answer["adapters"]) == (True, 1, [])
    with pytest.raises(RequestError, match="unloaded") as refused:
        engine.submit(Submit("late", pack_ids([5]), SamplingParams(), adapter=1))
    assert refused.value.status == 404
    rest = run(engine)
    assert {id: begun.get(id, []) + rest[id] for id in "ab"} == {id: right[id] for id in "ab"}
    assert engine.command("remove_adapter", lora="sql") == {"found": False, "requests": 0, "adapters": []}
    submit(engine, "f", WORK["f"][1])
    assert run(engine)["f"] == right["f"] and engine.adapters.placed is None
    engine.close()


def test_a_batch_without_adapters_is_the_step_that_there_always_was(files):
    engine = EngineCore(config(files[1][""], files[0]))
    plain, seen = dict(engine._steps), []
    engine._steps = {bucket: lambda state, batch, step=step: (seen.append(batch.adapters), step(state, batch))[1]
                     for bucket, step in plain.items()}
    submit(engine, "b", WORK["b"][1])
    run(engine)
    assert seen and all(adapters is None for adapters in seen)
    engine.close()


def refuse(engine: EngineCore, name: str, monkeypatch) -> None:
    """From now on the device has no memory for leaves of all slots while this adapter is in one."""
    real, placing = engine.adapters._platform.load, []
    bad = next(known.adapter for known in engine.adapters._known.values() if known.name == name)

    def load(raws, spec, dtype):
        if any(adapter is bad for adapter in placing):
            raise MemoryError
        return real(raws, spec, dtype)

    def place(numbers, before=engine.adapters._place):
        placing[:] = [engine.adapters._known[number].adapter for number in numbers if number]
        before(numbers)
    monkeypatch.setattr(engine.adapters._platform, "load", load)
    monkeypatch.setattr(engine.adapters, "_place", place)


class Folders:
    """Reads adapters: those whose path has "hang" only when `free` is set."""

    def __init__(self, real):
        self.real, self.free, self.begun = real, threading.Event(), threading.Semaphore(0)

    def __call__(self, path: str):
        self.begun.release()
        if "hang" in path:
            assert self.free.wait(60)
            path = path.removeprefix("hang")
        return self.real(path)


def test_a_folder_that_hangs_holds_nobody_up_once_it_is_given_up(files, right):
    engine = EngineCore(config(files[1][""], max_loras=2, max_lora_adapters=2, max_lora_rank=32))
    engine.adapters._read = folders = Folders(engine.adapters._read)
    hangs, waits = ({"lora": name, "path": path, "replace": 0.0} for name, path in (
        ("law", f"hang{files[0]['law']}"), ("sql", str(files[0]["sql"]))))
    engine.command("read_adapter", **hangs)
    assert folders.begun.acquire(timeout=60)
    engine.command("read_adapter", **waits)
    with pytest.raises(RequestError, match="the limit is 2"):
        engine.command("read_adapter", lora="poem", path="x", replace=0.0)
    assert engine.command("add_adapter", **waits, number=5)["reading"], "there is one thread"
    assert engine.command("add_adapter", **hangs, number=4, give_up=1.0) == {"reading": False}
    while engine.command("add_adapter", **waits, number=5).get("reading"):
        pass
    submit(engine, "a", WORK["a"][1], "sql")
    assert run(engine)["a"] == right["a"]
    with pytest.raises(RequestError, match="is not being read"):
        engine.command("add_adapter", **hangs, number=4)
    folders.free.set()
    assert engine.command("add_adapter", **hangs, number=4, give_up=1.0) == {"reading": False}, "twice is once"
    load(engine, "law", files[0]["law"], 6)  # its room is free again
    submit(engine, "d", WORK["d"][1], "law")
    assert run(engine)["d"] == right["d"]
    engine.close()


def ends(engine: EngineCore) -> tuple[dict[str, list[int]], list[tuple[str, str]]]:
    """Tokens, and the errors of requests that ended with one."""
    found, errors = {}, []
    while engine.has_work:
        for output in engine.step():
            if output.finish == "error":
                errors.append((output.id, output.error))
            found.setdefault(output.id, []).extend(unpack_ids(output.tokens).tolist())
    return found, errors


def test_an_adapter_that_the_device_does_not_take_ends_its_requests_alone(files, right, monkeypatch):
    engine = EngineCore(config(files[1][""], {"sql": files[0]["sql"], "law": files[0]["law"]}, max_loras=1))
    refuse(engine, "law", monkeypatch)
    submit(engine, "d", WORK["d"][1], "law")
    submit(engine, "a", WORK["a"][1], "sql")
    found, errors = ends(engine)
    assert found["a"] == right["a"] and errors == [("d", "adapter 'law' cannot be placed: MemoryError")]
    assert [known["name"] for known in engine.adapters.list()] == ["sql"]
    engine.close()


def test_so_do_those_that_run_when_the_slots_change(files, right, monkeypatch):
    engine = EngineCore(config(files[1][""], files[0], max_loras=2))
    submit(engine, "a", WORK["a"][1], "sql")
    run(engine, until=lambda: engine.steps >= 4)
    refuse(engine, "sql", monkeypatch)
    submit(engine, "d", WORK["d"][1], "law")
    found, errors = ends(engine)
    assert found["d"] == right["d"] and errors == [("a", "adapter 'sql' cannot be placed: MemoryError")]
    engine.scheduler.verify()
    engine.close()


def test_what_went_alone_may_not_go_again(files, right, monkeypatch):
    """The device has no memory left when those that fitted one by one are placed for good: their requests end, and
    the engine serves the others."""
    engine = EngineCore(config(files[1][""], {"sql": files[0]["sql"], "law": files[0]["law"]}, max_loras=2))
    submit(engine, "b", WORK["b"][1])
    begun, tried = run(engine, until=lambda: engine.steps >= 2), []

    def place(numbers, real=engine.adapters._place):
        tried.append(tuple(numbers))
        if tried.count(tuple(numbers)) > 1 or len(tried) == 1:
            raise MemoryError
        real(numbers)
    monkeypatch.setattr(engine.adapters, "_place", place)
    engine.adapters.stale = True
    submit(engine, "a", WORK["a"][1], "sql")
    submit(engine, "d", WORK["d"][1], "law")
    found, errors = ends(engine)
    assert begun.get("b", []) + found["b"] == right["b"] and sorted(id for id, _ in errors) == ["a", "d"]
    assert all("cannot be placed: MemoryError" in why for _, why in errors) and engine.adapters.placed is None
    assert engine.adapters.list() == [] and len(tried) == 4
    monkeypatch.undo()
    load(engine, "law", files[0]["law"], 6)
    submit(engine, "g", WORK["g"][1], "law")
    assert run(engine)["g"] == right["g"]
    engine.scheduler.verify()
    engine.close()


@pytest.mark.parametrize("overlap", [True, False])
def test_a_recording_with_adapters_runs_again_without_their_files(files, tmp_path, overlap):
    made = config(files[1][""], {"sql": files[0]["sql"]}, max_loras=1, max_lora_rank=32, scheduler={
        "record": str(tmp_path / "record"), "overlap": overlap})
    engine = EngineCore(made)
    for id in "abe":
        submit(engine, id, WORK[id][1], WORK[id][0])
    run(engine, until=lambda: engine.steps >= 6)
    load(engine, "law", files[0]["law"], 7)
    submit(engine, "d", WORK["d"][1], "law")
    run(engine)
    engine.command("remove_adapter", lora="sql")
    submit(engine, "f", WORK["f"][1])
    run(engine)
    engine.close()
    outcome = rerun(tmp_path / "record")
    assert not outcome.broken and outcome.stats["lora_moves"] >= 2, outcome
