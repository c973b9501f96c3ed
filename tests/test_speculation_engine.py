"""Speculation through the whole engine: grammars, tools, adapters, log-probabilities, stop strings, recordings."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from isthmus.conformance.tiny import tiny_model
from isthmus.core.api import Engine, config_of
from isthmus.core.chart import write_charts
from isthmus.core.config import SpeculationSettings
from isthmus.core.engine import EngineCore
from isthmus.core.messages import GrammarSpec, SamplingParams, Submit, pack_ids
from isthmus.core.recording.rerun import rerun

from .checkpoints import tiny_llama_gguf
from .lora_files import KIND, QV, drawn, write_adapter
from .test_grammar_engine import FORMAT
from .test_lora_engine import WORK, config
from .test_lora_engine import run as run_adapted
from .test_lora_engine import submit as submit_adapted

COST = 15  # seconds
SPECULATIVE = ("suffix", "tokens=6", "adaptive=0")

# What is asked for by itself, and with each of the others that it can be asked for with.
ASKS = {"sampled": {"temperature": 1.0, "top_p": 0.9, "top_k": 50, "seed": 3},
        "several": {"n": 2, "temperature": 0.8, "seed": 3},
        "logprobs": {"logprobs": 2}, "prompt_logprobs": {"prompt_logprobs": 1},
        "penalties": {"presence_penalty": 0.6, "frequency_penalty": 0.3, "repetition_penalty": 1.2},
        "logit_bias": {"logit_bias": {"40": 3.0}}, "min_tokens": {"min_tokens": 12}, "stop": {"stop": ["lo", "e"]},
        "schema": {"response_format": FORMAT}, "choice": {"guided_choice": ["hello-hello-hello", "hello-hello-you"]},
        "bad_words": {"bad_words": ["hel"]}}
APART = {frozenset(("schema", "choice")), frozenset(("choice", "bad_words"))}


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_llama_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def as_told(completion) -> tuple:
    """All of it, arrays as bytes."""
    def flat(scores):
        return scores and tuple(np.asarray(part).tobytes() for part in (scores.chosen, scores.top_ids, scores.top))
    return (completion.text, completion.tokens, completion.finish, completion.stop, flat(completion.logprobs),
            flat(completion.prompt_logprobs))


def every_pair() -> list[dict]:
    names = list(ASKS)
    pairs = [frozenset((a, b)) for i, a in enumerate(names) for b in names[i:]]
    return [{key: value for name in sorted(pair) for key, value in ASKS[name].items()} for pair in pairs
            if pair not in APART]


def test_answers_are_the_same_to_the_bit_whatever_is_asked_for_together(model):
    """Each pair of parameters, twice: the second time what the first has said is drafted. In float64, where a token
    does not depend on what is computed beside it."""
    settings = {"model": model, "platform": "reference", "kv_cache_memory": "8MiB"}
    with Engine(**settings) as plain, Engine(**settings, speculative=SPECULATIVE) as drafting:
        for asked in every_pair():
            told = []
            for engine in (plain, drafting, drafting):
                answers = engine.generate(["hello a"], max_tokens=12, **{"temperature": 0.0} | asked)
                told.append([*map(as_told, answers if isinstance(answers, list) else [answers])])
            assert told[0] == told[1] == told[2], asked
            drafting.core.command("verify")
        stats = drafting.core.stats()
        assert stats["accepted_tokens"] > 300 and stats["draft_state"] == "on", stats
        assert stats["steps"] < 2 * plain.core.stats()["steps"]


def test_adapters_draft_from_their_own_text(tmp_path):
    """Requests with different adapters, and none, in one batch."""
    adapters = {name: write_adapter(tmp_path / name, drawn(seed, 8, QV)) for seed, name in enumerate(
        ("sql", "poem", "law"))}
    base = config(tiny_model(KIND, 0), adapters, max_loras=3)
    told = {}
    for speculative in ((), SPECULATIVE):
        engine = EngineCore(replace(base, speculation=SpeculationSettings(speculative)))
        for _ in range(2):
            for id, (name, prompt) in WORK.items():
                submit_adapted(engine, id, prompt, name)
            told[speculative] = run_adapted(engine)
            engine.command("verify")
        if speculative:
            assert engine.stats()["accepted_tokens"] > 30
        engine.close()
    assert told[()] == told[SPECULATIVE]


def test_a_recording_of_drafts_with_grammars_is_run_again_bit_for_bit(model, tmp_path):
    path = tmp_path / "pairs.rec"
    engine = EngineCore(config_of(model=model, platform="null", kv_cache_memory="8MiB", record=str(path),
                                  speculative=("suffix", "tokens=6")))
    for turn in range(3):
        for i in range(6):
            grammar = GrammarSpec("regex", "(hello-)*", "it") if i % 2 else None
            params = SamplingParams(max_tokens=20, temperature=float(i % 3), seed=i, grammar=grammar, ignore_eos=True,
                                    logprobs=1 if i == 4 else None)
            engine.submit(Submit(f"r{turn}-{i}", pack_ids([5, 6, 7, i]), params))
        for step in range(3000):
            if not engine.has_work:
                break
            engine.step()
            if step == 6:
                engine.abort([f"r{turn}-5"])
    stats = engine.stats()
    engine.close()
    assert stats["accepted_tokens"] > 20
    outcome = rerun(path, looks=lambda step: step % 5 == 0)
    assert not outcome.broken and outcome.proved > 5, outcome.broken
    same = ("accepted_tokens", "drafted_tokens", "drafts", "generated_tokens", "steps", "draft_state", "pages_cached")
    assert {name: outcome.stats[name] for name in same} == {name: stats[name] for name in same}


@pytest.mark.parametrize("platform", ["cpu"])
def test_answers_follow_their_grammar_where_bits_may_differ(model, platform):
    pytest.importorskip("torch")
    with Engine(model=model, platform=platform, kv_cache_memory="8MiB", speculative=SPECULATIVE) as engine:
        for _ in range(3):
            answer = engine.generate("x", max_tokens=30, temperature=1.0, seed=1, guided_choice=["yes", "no", "hello"])
            assert answer.text in ("yes", "no", "hello") and answer.finish == "stop"


def test_forced_tokens_and_drafts_go_together(model):
    """A grammar that forces a run takes its request out of the drafts for a step; nothing is said twice."""
    with Engine(model=model, platform="null", kv_cache_memory="8MiB", speculative=SPECULATIVE) as engine:
        asked = {"max_tokens": 60, "temperature": 1.0, "seed": 4, "response_format": FORMAT, "n": 3}
        first, second = (engine.generate("hello", **asked) for _ in range(2))
        assert [*map(as_told, first)] == [*map(as_told, second)]
        stats = engine.core.stats()
        assert stats["forced_tokens"] > 0 and stats["accepted_tokens"] > 0
        tokens = sum(len(answer.tokens) for answer in (*first, *second))
        assert stats["generated_tokens"] == tokens


def test_the_benchmark_draws_what_drafts_came_to(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks" / "core"))
    from speculation import charts_of, row_of, table_of
    counted = {"drafts": 10, "accepted_tokens": 15, "drafted_tokens": 30, "drafted_at": [10, 10, 10],
               "accepted_at": [9, 5, 1]}
    speeds = {"plain": [10.0, 10.0], "ngram": [20.0, 22.0]}
    rows = [row_of(1, "edit", name, speeds, {}, stats) for name, stats in (("plain", {}), ("ngram", counted))]
    assert (rows[1]["length"], rows[1]["to_plain"], rows[1]["accepted_at"]) == (2.5, 2.1, [0.9, 0.5, 0.1])
    charts, table = charts_of(rows), table_of(rows)
    assert charts[0].curves == {"ngram": [(1, 0.9), (2, 0.5), (3, 0.1)]}
    assert table.rows == [["plain", "1 (1 x)"], ["ngram", "2.5 (2.1 x)"]]
    write_charts(tmp_path / "drafts.html", "Drafts", charts, [table])
    assert "<svg" in (tmp_path / "drafts.html").read_text()
