"""`isthmus bench compare`: the statistics with known answers, pairs in turn, and no winner inside the noise."""
from __future__ import annotations

import json
import os
import random
import re
import sys

import pytest
from isthmus.core.bench import serving
from isthmus.core.bench.evidence import bootstrap_interval, judge, judge_all, sign_interval, without_ratio
from isthmus.core.bench.output import LINE, LINES, TAIL, Output
from isthmus.core.bench.result import Result, Run, write_result
from isthmus.core.bench.servers import Started, words_of
from isthmus.core.cli import bench_compare
from isthmus.core.cli.main import main
from isthmus.core.errors import ConfigError

from .bench_stub import Stub

COST = 6  # seconds


# ---- statistics

@pytest.mark.parametrize("count, found", [(1, None), (5, None), (6, (1, 6)), (7, (1, 7)), (8, (1, 8)), (9, (2, 8)),
                                          (20, (6, 15)), (25, (8, 18))])
def test_the_sign_interval_is_that_of_the_tables(count, found):
    values = list(range(1, count + 1))
    random.Random(0).shuffle(values)
    assert sign_interval(values) == found


def test_the_bootstrap_holds_the_ratio_and_is_the_same_again():
    draw = random.Random(1)
    a, b = [draw.gauss(120, 5) for _ in range(12)], [draw.gauss(100, 5) for _ in range(12)]
    low, high = bootstrap_interval(a, b)
    assert low < 1.2 < high and high - low < 0.2 and (low, high) == bootstrap_interval(a, b)


def noise(draw: random.Random, center: float, count: int) -> list[float]:
    """As a shared machine has it: a drift that both of a pair see, and a tail."""
    return [center * draw.lognormvariate(0, 0.1) for _ in range(count)]


@pytest.mark.parametrize("paired", [True, False])
def test_a_winner_is_hardly_ever_named_where_there_is_none(paired):
    draw = random.Random(2)
    named = sum(judge("output_tokens_per_s", noise(draw, 100, 9), noise(draw, 100, 9), paired).winner != "none"
                for _ in range(200 if paired else 12))
    assert named <= (200 * 0.09 if paired else 4)


@pytest.mark.parametrize("paired", [True, False])
def test_a_real_difference_is_found_whichever_way_the_figure_counts(paired):
    draw = random.Random(3)
    high, low = noise(draw, 200, 12), noise(draw, 100, 12)
    assert judge("output_tokens_per_s", high, low, paired).winner == "A"
    assert judge("output_tokens_per_s", low, high, paired).winner == "B"
    lower = judge("ttft_p50", low, high, paired)
    assert lower.winner == "A" and 1.7 < lower.ratio < 2.3 and lower.a < lower.b
    assert judge("ttft_p50", low, high, paired, margin=1.5).winner == "none"


def test_a_drift_that_both_see_is_no_noise_in_pairs():
    drift = [1, 5, 2, 8, 3, 9, 4]
    verdict = judge("output_tokens_per_s", [11.0 * d for d in drift], [10.0 * d for d in drift], True)
    assert verdict.winner == "A" and verdict.low == pytest.approx(1.1) == verdict.high
    assert judge("output_tokens_per_s", [11.0 * d for d in drift], [10.0 * d for d in drift], False).winner == "none"


def test_few_runs_and_figures_without_a_ratio_win_nothing():
    few = judge("ttft_p50", [1.0] * 5, [9.0] * 5, True)
    assert few.winner == "none" and "5 pairs are too few to tell, 6 are the least" in few.reason
    assert "4 runs are too few" in judge("ttft_p50", [1.0] * 4, [9.0] * 9, False).reason
    assert judge("hit_rate", [0.0, 0.5], [0.5, 0.5], True) is None and judge("requests", [1.0], [2.0], True) is None
    assert [v.figure for v in judge_all([{"ttft_p50": 1.0, "seconds": 1.0}], [{"ttft_p50": 2.0, "e2e_p50": 1.0}],
                                        True)] == ["ttft_p50"]


def test_figures_without_a_ratio_are_told_where_the_sides_differ():
    a, b = ([{"failed": failed, "ttft_p50": 1.0, "hit_rate": 0.0}] * 2 for failed in (0.0, 5.0))
    assert without_ratio(a, b) == {"failed": (0.0, 5.0)} and without_ratio(a, a) == {}
    lines = bench_compare._lines([], without_ratio(a, b))
    assert re.search(r"failed +0 +5 +- +- +no ratio: a run has 0", lines[1])


# ---- the command

def test_pairs_are_measured_in_turn_and_a_difference_names_the_winner(monkeypatch, capsys):
    order, calm = [], iter([1.0, 1.02, 0.98] * 10)

    async def measured(server, workload, load, slo, rows=None, tell=None):
        order.append(server.subject["url"])
        slow = 2.0 if order[-1] == second.url else 1.0
        assert [s.asks[0].prompt for s in workload.sessions()] not in seen or len(order) % 2 == 0
        seen.append([s.asks[0].prompt for s in workload.sessions()])
        return Run("x", {"output_tokens_per_s": 100 / slow, "ttft_p50": next(calm), "failed": 0}, {})
    seen: list = []
    monkeypatch.setattr(serving, "measure", measured)
    with Stub() as first, Stub() as second:
        code = main(["bench", "compare", first.url, second.url, "--rounds", "6", "--requests", "2", "--json"])
        a, b = first.url, second.url
    found = json.loads(capsys.readouterr().out)
    assert code == 0 and order == [a, b, b, a, a, b, b, a, a, b, b, a]
    assert [r["label"] for r in found["runs"][:4]] == ["A 1", "B 1", "B 2", "A 2"]
    verdicts = {v["figure"]: v for v in found["configuration"]["verdicts"]}
    assert verdicts["output_tokens_per_s"]["winner"] == "A" and verdicts["output_tokens_per_s"]["ratio"] == 2.0
    assert verdicts["ttft_p50"]["winner"] == "none" and verdicts["ttft_p50"]["reason"] == "inside the noise"


def test_real_servers_in_turn(capsys):
    with Stub() as first, Stub() as second:
        assert main(["bench", "compare", first.url, second.url, "--rounds", "2", "--requests", "2"]) == 0
    out = capsys.readouterr().out
    assert "2 pairs, in turn" in out and "no winner: 2 pairs are too few to tell" in out


def result(path, speeds, kind="serving", seed=0) -> str:
    runs = [Run("8 at once", {"output_tokens_per_s": speed, "failed": 0}) for speed in speeds]
    write_result(Result(kind, {"model": "m"}, {"seed": seed}, runs), path)
    return str(path)


def test_results_are_compared_and_told_not_to_have_been_in_turn(tmp_path, capsys):
    a = result(tmp_path / "a.json", [100, 101, 99, 100, 102])
    b = result(tmp_path / "b.json", [50, 51, 49, 50, 52], seed=1)
    assert main(["bench", "compare", a, b]) == 0
    out = capsys.readouterr().out
    assert "2.000" in out and "not measured in turn" in out and "not asked the same: seed" in out
    assert main(["bench", "compare", a, result(tmp_path / "c.json", [50])]) == 0
    assert "no winner: 1 runs are too few to tell, 5 of each" in capsys.readouterr().out


def test_what_cannot_be_compared_is_refused(tmp_path, capsys):
    a, other = result(tmp_path / "a.json", [1]), result(tmp_path / "b.json", [1], kind="startup")
    for words, part in (((), "two are compared"), ((a,), "two are compared"), ((a, "http://x:1"), "with a result file"),
                        ((a, other), "no figures in common"), ((a, str(tmp_path / "none.json")), "no such file"),
                        ((a, a, "--margin", "-1"), "--margin -1"),
                        (("http://x:1", "http://x:2", "--rounds", "0"), "--rounds 0"),
                        (("http://x:1", "http://x:2", "--concurrency", "1,2"), "one load is compared"),
                        (("serve me", "http://x:2"), "say where the server takes its port")):
        assert main(["bench", "compare", *words]) == 2, words
        assert part in capsys.readouterr().err, words


# ---- servers that are started

def test_the_words_of_a_command():
    assert words_of("isthmus serve m", 7) == [sys.executable, "-m", "isthmus", "serve", "m", "--port", "7"]
    assert words_of("isthmus serve --port {port}", 7)[-2:] == ["--port", "7"]
    assert words_of("'my server' -p{port}", 7) == ["my server", "-p7"]
    for bad, part in (("x 'y", "is no command"), (" ", "empty command"), ("x --port 3", "takes its port")):
        with pytest.raises(ConfigError, match=part):
            words_of(bad, 1)


def test_a_server_that_ends_or_is_not_there_is_told_with_its_words():
    with pytest.raises(ConfigError, match="exit code 3: why not"):
        Started(f"{sys.executable} -c \"print('why not', flush=True); raise SystemExit(3)\" {{port}}")
    with pytest.raises(ConfigError, match="cannot be started: no such file"):
        Started("/no/such/program {port}")
    with pytest.raises(ConfigError, match="was not ready in 0.2 s"):
        Started(f"{sys.executable} -c 'import time; time.sleep(60)' {{port}}", timeout=0.2)


def test_a_server_is_measured_and_ended():
    code = ("import http.server, sys; print('loading'); sys.stdout.flush(); "
            "h = type('H', (http.server.BaseHTTPRequestHandler,), "
            "{'do_GET': lambda s: (s.send_response(200), s.end_headers())}); "
            "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), h).serve_forever()")
    with Started(f'{sys.executable} -c "{code}" {{port}}') as server:
        assert server.resident() > 2**20 and server.cpu_seconds() > 0 and server.ready_s > 0
        assert server.stages[0][1] == "loading"
    assert server.process.poll() is not None


def test_what_a_server_says_takes_no_more_memory_than_is_shown():
    reading, writing = os.pipe()
    output = Output(open(reading, "rb"), 0.0)  # which closes it
    with open(writing, "wb", buffering=0) as out:
        out.write(b"first\n\n" + b"x" * 5000 + b"\n")
        for i in range(3000):
            out.write(b"line %d\n" % i)
        out.write(b"y" * 10**6 + b"\nthe end \xc3\xa9\x1b")
    while "the end" not in output.said():
        pass
    assert len(output.lines) == LINES and [line for _, line in output.lines[:3]] == ["first", "x" * LINE, "line 0"]
    assert output.said().endswith("y\nthe end \u00e9?") and len(output.said()) <= TAIL
    assert len(output._tail) <= 4 * TAIL and len(output._line) <= LINE


def test_a_server_that_says_much_is_not_held_up():
    code = ("import http.server, sys; print('x' * 2**22, flush=True); "
            "h = type('H', (http.server.BaseHTTPRequestHandler,), "
            "{'do_GET': lambda s: (s.send_response(200), s.end_headers())}); "
            "http.server.HTTPServer(('127.0.0.1', int(sys.argv[1])), h).serve_forever()")
    with Started(f'{sys.executable} -c "{code}" {{port}}') as server:
        assert server.ready_s > 0
