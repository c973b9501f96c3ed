"""The arithmetic of the bench suite, with known answers: percentiles, arrivals, goodput, the timeline, workloads."""
from __future__ import annotations

import math
import random
import statistics
from itertools import islice, pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.core.bench.arrivals import arrivals
from isthmus.core.bench.percentiles import Sketch, Timeline, nearest_rank, summary
from isthmus.core.bench.picture import charts_of, draw
from isthmus.core.bench.recorder import Outcome, Recorder, read_slo
from isthmus.core.bench.result import Result, Run, shown_figure
from isthmus.core.bench.workload import Shape, conversations, drawn_prompts, from_file, traced
from isthmus.core.errors import ConfigError

COST = 5  # seconds
TRACES = Path(__file__).parent / "traces"


def outcome(due=0.0, sent=0.0, events=(1.0, 2.0, 3.0), **more) -> Outcome:
    return Outcome(due, sent, events[-1] if events else 1.0, list(events), [1] * len(events), 10,
                   completion=len(events), **more)


def test_percentiles_are_values_that_occurred():
    found = summary([float(v) for v in range(100, 0, -1)])
    assert found == {"mean": 50.5, "p50": 50, "p90": 90, "p95": 95, "p99": 99, "max": 100}
    assert summary([3.0]) == {"mean": 3, "p50": 3, "p90": 3, "p95": 3, "p99": 3, "max": 3} and summary([]) == {}
    assert nearest_rank([1, 2, 3, 4], 50) == 2 and nearest_rank([1, 2, 3, 4], 50.1) == 3


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(1e-6, 1e4), min_size=1, max_size=300))
def test_a_sketch_is_right_within_its_error(values):
    sketch = Sketch()
    for value in values:
        sketch.add(value)
    for q in (1, 50, 90, 99, 100):
        true = nearest_rank(sorted(values), q)
        assert sketch.quantile(q) == pytest.approx(true, rel=1.01 * Sketch.ERROR)
    assert sketch.summary()["max"] == max(values)
    assert sketch.summary()["mean"] == pytest.approx(statistics.fmean(values))


def test_a_sketch_takes_what_is_out_of_its_range():
    sketch = Sketch()
    for value in (0.0, 1e9):
        sketch.add(value)
    assert sketch.quantile(1) == pytest.approx(Sketch.LEAST, rel=0.01) and sketch.summary()["max"] == 1e9


def test_a_timeline_keeps_all_amounts_while_its_spans_grow():
    line = Timeline(span=1.0)
    for second in range(1000):
        line.add(second, 2.0)
    assert line.span == 8 and sum(line.amounts) == 2000 and len(line.amounts) == Timeline.PLACES
    assert line.rates(1000.0)[:-1] == [2.0] * 124 and len(line.rates(1000.0)) == 125
    short = Timeline(span=1.0)
    short.add(2.2, 1.0)
    assert short.rates(2.5) == [0, 0, pytest.approx(2.0)], "the last span counts by the part that the run had of it"


def test_arrivals_come_as_often_as_they_should():
    assert list(islice(arrivals("constant", 4.0, 0), 5)) == [0, 0.25, 0.5, 0.75, 1.0]
    times = list(islice(arrivals("poisson", 10.0, 7), 20_001))
    gaps = [b - a for a, b in pairwise(times)]
    assert times[0] == 0 and statistics.fmean(gaps) == pytest.approx(0.1, rel=0.03)
    assert statistics.stdev(gaps) == pytest.approx(0.1, rel=0.05), "of an exponential distribution both are the same"
    assert sum(gap > 0.1 for gap in gaps) / len(gaps) == pytest.approx(math.exp(-1), abs=0.02)
    assert times == list(islice(arrivals("poisson", 10.0, 7), 20_001))
    assert times != list(islice(arrivals("poisson", 10.0, 8), 20_001))


def test_times_count_from_when_a_request_was_due():
    late = outcome(due=1.0, sent=5.0, events=(6.0, 7.0, 9.0))
    assert (late.ttft, late.tpot, late.e2e, late.longest_gap) == (5.0, 1.5, 8.0, 2.0)
    assert outcome(events=(1.0,)).tpot is None and outcome(events=(1.0,)).longest_gap == 0.0


@pytest.mark.parametrize("slo, good", [
    ("", 2), ("ttft=1s", 2), ("ttft=999ms", 0), ("itl=1s", 1), ("itl=2s", 2), ("tpot=1.5,ttft=2", 2), ("e2e=3s", 1)])
def test_goodput_counts_those_within_every_limit_and_failures_never(slo, good):
    recorder = Recorder(read_slo(slo))
    for one in (outcome(), outcome(events=(1.0, 2.0, 4.0)), outcome(events=(), error="timeout", message="no answer")):
        recorder.add(one)
    assert recorder.good == good
    figures = recorder.figures()
    assert figures["failed"] == 1 and figures["seconds"] == 4.0 and figures["output_tokens_per_s"] == 6 / 4
    if slo:
        assert figures["within_slo"] == good / 3 and figures["goodput_per_s"] == good / 4
    else:
        assert "within_slo" not in figures


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=-1ms", "speed=3", "ttft=5min", "itl=nan", "ttft=0"])
def test_a_limit_that_is_none_is_refused(text):
    with pytest.raises(ConfigError, match="--slo .*ttft, tpot, itl, e2e"):
        read_slo(text)


def test_errors_are_kept_by_kind_with_some_of_their_words():
    recorder = Recorder({})
    for i in range(10):
        recorder.add(outcome(events=(), error="http 429", message=f"full {i}"))
    recorder.add(outcome(events=(), error="cut off", message="no end"))
    detail = recorder.detail()
    assert detail["errors"] == {"http 429": 10, "cut off": 1}
    assert detail["error_examples"] == {"http 429": ["full 0", "full 1", "full 2"], "cut off": ["no end"]}
    assert "ttft_p50" not in recorder.figures() and "hit_rate" not in recorder.figures()


def test_the_hit_rate_is_of_those_who_tell():
    recorder = Recorder({})
    recorder.add(outcome(cached=4))
    recorder.add(outcome(cached=0))
    assert recorder.figures()["hit_rate"] == 4 / 20


# ---- pictures

def result(kind: str, runs: list[Run]) -> Result:
    return Result(kind, {"model": "<m>"}, {}, runs)


def served(label: str, amount: float) -> Run:
    recorder = Recorder({})
    recorder.add(outcome())
    return Run(label, recorder.figures(), {"load": {"concurrency": amount}, **recorder.detail()})


@pytest.mark.parametrize("runs, titles", [
    ([served("1 at once", 1)], ["time to first token", "time per output token", "whole answer", "output over time"]),
    ([served("1 at once", 1), served("4 at once", 4)], [
        "output by load", "first token p99 by load", "time to first token", "time per output token", "whole answer",
        "output over time"]),
    ([Run(f"{side} {i}", {"ttft_p50": 1.0}, {"side": side, "round": i, "timeline": {}})
      for i in range(3) for side in "AB"], ["first token p50"]),
    ([Run(f"op {i}", {"us": 1.0, "roof_share": 0.5}) for i in range(9)], ["share of the roof"]),
    ([Run("8 at once", {}, {"verdicts": []})], [])])
def test_every_kind_of_result_can_be_drawn(runs, titles, tmp_path):
    assert [chart.title for chart in charts_of(runs)] == titles
    draw(result("x", runs), tmp_path / "x.html")
    page = (tmp_path / "x.html").read_text()
    assert page.count("<svg") == len(titles) and "&lt;m&gt;" in page and "<m>" not in page
    assert all(run.label in page for run in runs)


def test_what_has_nothing_to_draw_has_no_png(tmp_path, monkeypatch):
    monkeypatch.setattr("isthmus.core.bench.picture.write_charts", lambda *_: pytest.fail("it draws nothing"))
    with pytest.raises(ConfigError, match="nothing to draw"):
        draw(result("compare", [Run("8 at once", {})]), tmp_path / "x.png")


def test_figures_are_told_with_their_units():
    assert [shown_figure(*pair) for pair in (
        ("ttft_p50", 0.0123), ("ttft_p50", 12.3), ("hit_rate", 0.256), ("output_tokens_per_s", 1234.5), ("failed", 3.0),
        ("gb_per_s", 0.0123), ("resident_bytes", 2**30), ("perplexity", 12.345))] == [
        "12.3 ms", "12.30 s", "25.6 %", "1,234 tokens/s", "3", "0.0123 GB/s", "1.00 GiB", "12.35"]


# ---- workloads

def shape(**more) -> Shape:
    return Shape(**{"requests": 20, "prompt_tokens": 10, "max_tokens": 5, "seed": 1, "vocab": 50} | more)


def test_drawn_prompts_are_their_own_behind_shared_prefixes_and_the_same_by_seed():
    load = drawn_prompts(shape(shared=4, groups=2))
    prompts = [session.asks[0].prompt for session in load.sessions()]
    assert load.name == "shared-prefix" and len(prompts) == load.requests == 20
    assert len({tuple(p[:4]) for p in prompts}) == 2 and len({tuple(p) for p in prompts}) == 20
    assert all(len(p) == 10 and max(p) < 50 for p in prompts)
    assert prompts == [session.asks[0].prompt for session in load.sessions()]
    other = drawn_prompts(shape(shared=4, groups=2, seed=2))
    assert prompts != [session.asks[0].prompt for session in other.sessions()]


def test_lengths_are_drawn_around_their_size():
    load = drawn_prompts(shape(requests=400, prompt_tokens=100, spread=0.5))
    lengths = [len(s.asks[0].prompt) for s in load.sessions()]
    assert 50 <= min(lengths) < 60 and 140 < max(lengths) <= 150
    assert statistics.fmean(lengths) == pytest.approx(100, rel=0.05)
    words = next(drawn_prompts(shape(as_text=True)).sessions()).asks[0].prompt
    assert isinstance(words, str) and len(words.split()) == 10


def test_conversations_have_their_turns_and_no_more_requests_than_asked_for():
    load = conversations(shape(requests=7, shared=3), 3, 0.5)
    sessions = list(load.sessions())
    assert [len(s.asks) for s in sessions] == [3, 3, 1] and all(s.think == 0.5 for s in sessions)
    roles = [[m["role"] for m in ask.prompt] for ask in sessions[0].asks]
    assert roles == [["system", "user"], ["user"], ["user"]]
    assert len({s.asks[0].prompt[0]["content"] for s in sessions}) == 1, "all have the same system prompt"


def test_a_trace_keeps_its_lengths_times_and_sharing():
    load = traced(TRACES / "chat.jsonl", 50, 1000, 0, speed=2.0)
    from isthmus.core.replay.formats import read_trace
    trace = read_trace(TRACES / "chat.jsonl").head(50)
    sessions = list(load.sessions())
    assert load.timed and [len(s.asks[0].prompt) for s in sessions] == trace.inputs.tolist()
    assert [s.due for s in sessions] == [at / 2 for at in trace.arrival.tolist()]
    for a, b in random.Random(0).sample([(i, j) for i in range(50) for j in range(i)], 200):
        common = sum(1 for x, y in zip(trace.request(a), trace.request(b), strict=False) if x == y) * trace.block
        ours = next((k for k, (x, y) in enumerate(zip(sessions[a].asks[0].prompt, sessions[b].asks[0].prompt,
                                                      strict=False)) if x != y), common)
        assert ours >= common
    cut = list(traced(TRACES / "chat.jsonl", 50, 1000, 0, most=40).sessions())
    assert max(len(s.asks[0].prompt) + s.asks[0].max_tokens for s in cut) <= 40
    words = [s.asks[0].prompt.split() for s in traced(TRACES / "chat.jsonl", 50, 9, 0, as_text=True).sessions()]
    assert [len(w) for w in words] == trace.inputs.tolist()


def test_prompts_of_a_file_in_any_of_its_forms():
    rows = [{"prompt": "one"}, {"prompt": [1, 2], "max_tokens": 3}, {"body": {"messages": [{"role": "user"}]}}]
    load = from_file(Path("x"), iter(enumerate(rows, 1)), None, 9)
    assert [(s.asks[0].prompt, s.asks[0].max_tokens) for s in load.sessions()] == [
        ("one", 9), ([1, 2], 3), ([{"role": "user"}], 9)]
    for row in ({}, {"prompt": ""}, {"prompt": [1, "a"]}, {"prompt": "x", "max_tokens": 0}, {"body": 3}, {"prompt": 5}):
        with pytest.raises(ConfigError, match="x, line 7: "):
            from_file(Path("x"), iter([(7, row)]), None, 9)
    with pytest.raises(ConfigError, match="there is no prompt"):
        from_file(Path("x"), iter(()), None, 9)
