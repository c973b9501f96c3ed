"""`isthmus bench joint`: what a configuration answers stands beside how fast it does."""
from __future__ import annotations

import math

import pytest
from isthmus.core.bench import serving
from isthmus.core.bench.quality import Scores, beside, score
from isthmus.core.bench.result import Run, read_result
from isthmus.core.bench.text import PASSAGES, WORDS
from isthmus.core.cli import bench_joint
from isthmus.core.cli.main import main
from isthmus.core.discovery import load_platform, probe
from isthmus.core.errors import RequestError
from isthmus.core.platform import Unavailable

from .bench_stub import Stub
from .checkpoints import tiny_llama_gguf

COST = 30  # seconds, most of them in the slow one


def reason_of(name: str) -> str:
    try:
        probe(name, load_platform(name))
        return ""
    except Unavailable as error:
        return str(error)


def answer(text: str, value: float = -1.0, best: str = "x") -> dict:
    """A token for each word; the best in every place is `best`."""
    words = text.split()
    tops = [None, *({w: value, best: value / 2} for w in words[1:])]
    scores = {"tokens": [*words, "new"], "token_logprobs": [None, *[value] * (len(words) - 1), -9.0],
              "top_logprobs": [*tops, {"new": -9.0}]}
    return {"choices": [{"logprobs": scores}], "usage": {"prompt_tokens": len(words)}}


def test_scores_are_of_the_prompt_alone_without_its_first_token():
    found = score(lambda body: answer(body["prompt"], -2.0), "m", ["a b c", "d e"])
    assert found.tokens == ("b", "c", "e") and found.logprobs == (-2.0,) * 3 and found.best == ("x",) * 3
    assert found.perplexity == pytest.approx(math.exp(2)) and found.characters == 8


def test_a_text_that_is_too_long_is_scored_in_halves():
    asked = []

    def ask(body):
        asked.append(body["prompt"])
        if len(body["prompt"].split()) > 25:
            raise RequestError("too long for the context", status=400)
        return answer(body["prompt"])
    text = " ".join(f"word{i}" for i in range(80))
    assert len(score(ask, "m", [text]).tokens) == 80 - 4 and len(asked) == 7

    def never(body):
        raise RequestError("too long for the context", status=400)
    with pytest.raises(RequestError, match="too long"):
        score(never, "m", [text])
    with pytest.raises(RequestError, match="another"):
        score(lambda body: (_ for _ in ()).throw(RequestError("another", status=400)), "m", [text])


@pytest.mark.parametrize("wrong", [None, {}, {"choices": []}, {"choices": [{"logprobs": None}], "usage": {}},
                                   {"choices": [{"logprobs": {"tokens": []}}], "usage": {"prompt_tokens": 3}}])
def test_a_server_that_gives_no_scores_is_told(wrong):
    with pytest.raises(RequestError, match="gives no log-probabilities of a prompt"):
        score(lambda body: wrong, "m", ["a b"])


def test_figures_beside_a_reference():
    reference = Scores(("a", "b"), (-1.0, -3.0), ("a", "x"), 10)
    same = beside(Scores(("a", "b"), (-1.5, -3.1), ("a", "y"), 10), reference)
    assert same["perplexity"] == pytest.approx(math.exp(2.3)) and same["agreement"] == 0.5
    assert same["perplexity_delta"] == pytest.approx(math.exp(0.3) - 1) and same["logprob_error"] == pytest.approx(0.3)
    itself = beside(reference, reference)
    assert itself["perplexity_delta"] == 0 and itself["agreement"] == 1 and itself["logprob_error"] == 0
    other = beside(Scores(("ab",), (-4.5,), ("x",), 10), reference)
    assert set(other) == {"perplexity", "perplexity_delta"}, "other tokens are compared by character"
    assert other["perplexity_delta"] == pytest.approx(math.exp(0.05) - 1)


def test_the_text_that_is_shipped():
    assert len(PASSAGES) == 5 and all(200 < len(text) < 1200 for text in PASSAGES) and len(WORDS) > 200
    assert "\n" not in PASSAGES[0] and "\n    if not values:" in PASSAGES[4]


def test_a_speed_up_that_costs_answers_shows(monkeypatch, capsys, tmp_path):
    order = []

    async def measured(server, workload, load, slo, rows=None, tell=None):
        order.append(server.subject["url"])
        speed = 100.0 if order[-1] == first.url else 250.0
        return Run("x", {"output_tokens_per_s": speed, "failed": 0, "within_slo": 1.0}, {})

    def scored(server, key, texts):
        worse = 0.0 if server.subject["url"] == first.url else -0.5
        return Scores(("a", "b"), (-1.0, -2.0 + worse), ("a", "b" if not worse else "c"), 5)
    monkeypatch.setattr(serving, "measure", measured)
    monkeypatch.setattr(bench_joint, "_score", scored)
    path = tmp_path / "joint.json"
    with Stub() as first, Stub() as second:
        assert main(["bench", "joint", first.url, second.url, "--rounds", "2", "--requests", "2", "-o", str(path)]) == 0
        assert order == [first.url, second.url, second.url, first.url], "the order is turned about"
    out, runs = capsys.readouterr().out, read_result(path).runs
    assert "A: http" in out and "the reference" in out
    assert "2.50 times the reference's output; costs answers: its perplexity is +28.4%" in out
    assert [run.label for run in runs] == ["A", "B"] and runs[1].figures["agreement"] == 0.5


@pytest.mark.parametrize("words, part", [
    ((), "two to 26 configurations"), (("http://x:1",), "two to 26 configurations"),
    (("http://x:1", "http://x:1"), "named twice"), (("http://x:1", "http://x:2", "--rounds", "0"), "--rounds 0"),
    (("http://x:1", "http://x:2", "--allow", "-1"), "--allow -1"),
    (("http://x:1", "http://x:2", "--concurrency", "1,2"), "one load is measured"),
    (("http://x:1", "http://x:2", "--score-text", "no-such"), "no such file")])
def test_mistakes_are_told(words, part, capsys):
    assert main(["bench", "joint", *words]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.slow
def test_bfloat16_beside_float64(tmp_path, capsys):
    if reason_of("cpu"):
        pytest.skip("the cpu platform cannot run here")
    model, path = tiny_llama_gguf(tmp_path / "tiny.gguf"), tmp_path / "joint.json"
    servers = [f"isthmus serve {model} --platform {name} --in-process" for name in ("reference", "cpu")]
    assert main(["bench", "joint", *servers, "--requests", "4", "--prompt-tokens", "20", "--max-tokens", "5",
                 "--rounds", "1", "-o", str(path)]) == 0
    exact, rounded = read_result(path).runs
    assert exact.figures["agreement"] == 1 and exact.figures["logprob_error"] == 0
    assert 0.85 < rounded.figures["agreement"] <= 1 and 0 < rounded.figures["logprob_error"] < 0.2
    assert abs(rounded.figures["perplexity_delta"]) < 0.05
