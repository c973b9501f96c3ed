"""`isthmus bench batch`, `offline` and `startup`: what is counted, with known answers, and the commands."""
from __future__ import annotations

import json
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from isthmus.core.bench import batch, ceilings, offline, startup, steps
from isthmus.core.bench.ceilings import Ceilings
from isthmus.core.bench.result import read_result
from isthmus.core.bench.workload import Ask, Session, Workload
from isthmus.core.cli.main import main
from isthmus.core.discovery import load_platform, probe
from isthmus.core.models.config import Sparse
from isthmus.core.platform import AttentionSpec, MoESpec, StateSpec
from isthmus.core.specs import LayerState

from .checkpoints import tiny_llama_gguf

COST = 25  # seconds, half of them in the slow one


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(steps, "SPAN_S", 0.01)
    monkeypatch.setattr(ceilings, "LEAST_BYTES", 1 << 16)
    monkeypatch.setattr(ceilings, "MANY", 32)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_llama_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


# ---- what is counted

def config(**more) -> SimpleNamespace:
    """Two layers: hidden 8, two heads of 4, one of K and V, feed-forward 16, vocabulary 10."""
    return SimpleNamespace(**{"vocab_size": 10, "hidden": 8, "heads": 2, "kv_heads": 1, "head_dim": 4, "layers": 2,
                              "intermediate": 16, "tied": False, "sparse": None, "qkv_widths": (8, 4, 4),
                              "attention": (AttentionSpec(1.0), AttentionSpec(1.0, window=3))} | more)


ATTENTION, DENSE, HEAD = 8 * (2 * 8 + 4 + 4), 3 * 8 * 16, 80


def test_what_a_dense_step_reads_and_multiplies():
    counts = batch.Counts(config())
    layers = 2 * (ATTENTION + DENSE)
    assert counts.share_read(1) == (layers + HEAD) / (layers + 2 * HEAD) == counts.share_read(1000)
    assert batch.Counts(config(tied=True)).share_read(1) == 1
    # One token that sees 5: the layer with a window sees 3 of them.
    assert counts.operations(1, 1, 5) == 2 * layers + 2 * HEAD + 4 * 2 * 4 * (5 + 3)
    # Three tokens of a prompt see 1, 2 and 3; two rows are twice as much.
    assert counts.operations(2, 3, 3) == 2 * (3 * 2 * layers + 2 * HEAD + 2 * 4 * 2 * 4 * (1 + 2 + 3))
    assert counts.tokens_kept(5) == (5 + 3) / 2


def test_of_experts_only_those_that_are_met_are_read():
    spec = MoESpec(4, 1)
    counts = batch.Counts(config(sparse=Sparse(spec, (True, False), 5, 0)))
    router, expert = 8 * 4, 3 * 8 * 5
    whole = 2 * ATTENTION + router + 4 * expert + DENSE + 2 * HEAD
    assert counts.share_read(1) == pytest.approx((2 * ATTENTION + router + expert + DENSE + HEAD) / whole)
    assert counts.share_read(10_000) == pytest.approx((whole - HEAD) / whole)
    assert counts.operations(1, 1, 1) == 2 * (2 * ATTENTION + router + expert + DENSE + HEAD) + 2 * 4 * 2 * 4


def test_the_roof_is_the_slower_of_both():
    roof = Ceilings(100.0, 1000.0, {})
    assert roof.seconds(50, 100) == 0.5 and roof.bound(50, 100) == "memory"
    assert roof.seconds(50, 1000) == 1.0 and roof.bound(50, 1000) == "products"


@pytest.mark.parametrize("rows, tokens, context", [(3, 1, 33), (2, 20, 20), (1, 5, 37)])
def test_a_batch_is_one_that_the_engine_would_make(rows, tokens, context):
    """The null platform checks every number of it."""
    platform = load_platform("null")
    manifest = probe("null", platform)
    platform.load([steps.raw_tensor((50, 4), "f32")], SimpleNamespace(role="embed"), "f32")
    made = steps.make_batch(rows, tokens, context, 16, 50)
    assert made.positions.tolist() == list(range(context - tokens, context)) * rows
    assert (made.lengths == context).all() and len(set(made.slots.tolist())) == rows * tokens
    fresh = steps.make_batch(rows, context, context, 16, 50)  # what came before, so that nothing unwritten is read
    spec = StateSpec((LayerState(1, 4),), "f32", 16, rows + 1)
    state = platform.alloc(spec, steps.pages_of(made))
    step = platform.compile(lambda *_: None, None, None)
    step(state, fresh)[0].collect()
    assert len(step(state, made)[0].collect().tokens) == rows
    timing = steps.time_steps(step, state, made, "overlap" in manifest.features, 7)
    assert len(timing.steps) == 7 and timing.median > 0 and timing.spread >= 0


@pytest.mark.parametrize("form", ["f32", "bf16", "q8_0", "q4_0"])
def test_random_weights_keep_the_size_of_what_they_meet(form):
    platform = load_platform("reference")
    place = steps.Place(platform, probe("reference", platform), "f64")
    leaf = place.weight((64, 64), form=form)
    x = np.random.default_rng(0).normal(size=(5, 64))
    y = platform.compile(lambda ops, w, b: ops.linear(x, w), leaf, None)(
        platform.alloc(ceilings.plain_state(place, 1), 2), steps.make_batch(1, 5, 5, place.page_size, 8))[0].collect()
    assert 0.3 < np.linalg.norm(y) / np.linalg.norm(x) < 3


@pytest.mark.parametrize("host, told", [(0.0, "64 x 64"), (1e30, "numpy")])
def test_ceilings_are_measured_through_the_neck(monkeypatch, host, told):
    platform = load_platform("reference")
    monkeypatch.setattr(ceilings, "host_read", lambda nbytes: host)  # which is more depends on the machine
    found = ceilings.measure(steps.Place(platform, probe("reference", platform), "f64"), 0, width=64)
    assert found.bytes_per_s > 0 and found.operations_per_s > 0 and told in found.how["bytes"]


def test_a_rate_leaves_out_what_steps_cost_beside_their_products():
    assert ceilings.host_read(1 << 20) > 0
    assert [ceilings.rate_of(5, 5.0, one) for one in (1.0, 3.0, 4.9, 6.0)] == [1.0, 2.0, 1.0, 1.0]


# ---- the commands

def test_a_batch_beside_its_roof(model, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(ceilings, "measure", partial(ceilings.measure, width=64))
    path = tmp_path / "batch.json"
    words = ("bench", "batch", model, "--platform", "reference", "--rows", "1,2", "--context", "20,100000", "--prefill",
             "16", "--steps", "3", "-o", str(path), "--products", "1")
    assert main(words) == 0
    out, runs = capsys.readouterr().out, read_result(path).runs
    assert [run.label for run in runs] == ["decode 1 x 20", "decode 2 x 20", "prefill 1 x 16"]
    assert all(run.figures["ms"] > 0 and run.figures["roof_share"] > 0 for run in runs)
    assert "products 1.000 TFLOP/s (given)" in out and "bound by memory" in out
    assert "not measured: 1 rows of 100000 tokens" in out


def test_prompts_through_the_engine_are_recorded_like_those_of_a_server(model, capsys):
    words = ("bench", "offline", model, "--platform", "null", "--requests", "12", "--prompt-tokens", "40",
             "--shared-tokens", "32", "--max-tokens", "5", "--repeat", "2", "--max-queued-requests", "3", "--json")
    assert main(words) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["runs"]) == 2 and found["configuration"]["settings"]["max_queued_requests"] == 3
    for run in found["runs"]:
        assert run["figures"]["requests"] == 12 and run["figures"]["failed"] == 0
        assert run["detail"]["completion_tokens"] == 60 and run["figures"]["hit_rate"] == pytest.approx(11 * 32 / 480)


def test_prompts_of_every_form_are_tokens_in_the_end(model):
    from isthmus import Engine
    prompts = ([1, 2], "ab", [{"role": "user", "content": "ab"}])
    load = Workload("x", 3, lambda: iter([Session((Ask(prompt, 2),)) for prompt in prompts]))
    with Engine(model, platform="null") as engine:
        recorder = offline.run(engine, load, {}, lambda done, total: None)
        lengths = [len(offline.ids_of(engine, Ask(prompt, 1))) for prompt in prompts]
    assert recorder.sent == 3 and recorder.prompt == sum(lengths) and lengths[0] == 2 < lengths[2]


def test_stages_last_until_the_next_begins():
    lines = [(0.5, "isthmus: load weights, 92 MiB ..."), (0.6, "a warning"), (1.5, "isthmus: warm up ..."),
             (9.0, "isthmus: later ...")]
    assert startup.stages_of(lines, 2.0) == [("start the program", 0.5), ("load weights", 1.0), ("warm up", 0.5)]
    assert startup.stages_of([(1.0, "hello")], 2.0) == []


def test_files_are_dropped_from_the_cache_where_the_system_can(tmp_path):
    (tmp_path / "a").write_bytes(b"x" * 5000)
    (tmp_path / "b").write_bytes(b"x" * 100)
    asked = startup.forget_files(tmp_path)
    assert asked in (0, 5100) and startup.forget_files(tmp_path / "a") in (0, 5000)


@pytest.mark.slow
def test_a_start_is_told_by_stages(model, capsys):
    assert main(["bench", "startup", f"isthmus serve {model} --platform null", "--repeat", "1"]) == 0
    out = capsys.readouterr().out
    assert "warm: start the program" in out and "cold: start the program" in out and "warm up" in out


@pytest.mark.parametrize("words, part", [
    (("batch", "--rows", "0"), "--rows 0"), (("batch", "--products", "-1"), "--products -1"),
    (("batch", "--steps", "1"), "--steps 1"), (("offline", "--turns", "2"), "bench serving"),
    (("offline", "--repeat", "0"), "--repeat 0"), (("startup", "--repeat", "0"), "--repeat 0"),
    (("startup", "--cold", "no-such"), "no such file"), (("startup", "x"), "takes its port")])
def test_mistakes_are_told(words, part, capsys):
    assert main(["bench", *words]) == 2
    assert part in capsys.readouterr().err
