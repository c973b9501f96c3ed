"""Thinking, budgets and layouts of calls through the whole engine: late masks, forced tokens, recordings."""
from __future__ import annotations

import json

import jsonschema
import pytest
from isthmus.core.api import config_of
from isthmus.core.engine import EngineCore
from isthmus.core.messages import GrammarSpec, SamplingParams, Submit, ThinkingSpec, pack_ids, unpack_ids
from isthmus.core.parsers.contract import CALLS, Tool
from isthmus.core.recording.rerun import rerun
from isthmus.core.text import load_tokenizer
from isthmus.core.weights import open_checkpoint

from .checkpoints import tiny_llama_gguf
from .test_parsers import parse

COST = 15  # seconds

SCHEMA = {"type": "object", "properties": {"kind": {"enum": ["one", "other"]}}, "required": ["kind"],
          "additionalProperties": False}
TOOLS = {"f": Tool("f", SCHEMA, True)}
END = "</think>"


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_llama_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


def run(model: str, platform: str, asked: dict[str, SamplingParams], **settings) -> dict[str, tuple[str, str, int]]:
    """Text, finish and number of tokens of each request."""
    engine = EngineCore(config_of(model=model, platform=platform, kv_cache_memory="8MiB", **settings))
    engine.cache.pool.strict = True
    tokenizer, found, ended = load_tokenizer(open_checkpoint(model)), {id: [] for id in asked}, {}
    try:
        for id, params in asked.items():
            engine.submit(Submit(id, pack_ids([5, 6, 7]), params))
        for _ in range(3000):
            if not engine.has_work:
                break
            for output in engine.step():
                assert not output.error, output.error
                found[output.id] += unpack_ids(output.tokens).tolist()
                ended[output.id] = output.finish
            engine.command("verify")
    finally:
        engine.close()
    return {id: (tokenizer.decode(tokens), ended[id], len(tokens)) for id, tokens in found.items()}


def params(model: str, budget: int, grammar: GrammarSpec, opened: bool = True, **more) -> SamplingParams:
    tokenizer = load_tokenizer(open_checkpoint(model))
    thinking = ThinkingSpec(opened, pack_ids(tokenizer.encode("<think>")), (END,), pack_ids(tokenizer.encode("\n"
        + END)),
                            budget)
    return SamplingParams(**{"max_tokens": 120, "temperature": 1.0, "seed": 3} | more, grammar=grammar,
        thinking=thinking)


@pytest.mark.parametrize("platform,overlap", [("null", False), ("reference", True)])
def test_thinking_within_its_budget_and_the_structure_behind_it(model, platform, overlap):
    json_spec = GrammarSpec("json_schema", json.dumps(SCHEMA), "response_format")
    layout = GrammarSpec("layout", json.dumps(CALLS.create("hermes").layout(TOOLS, 1, 1)), "tools")
    asked = {"json": params(model, 12, json_spec), "calls": params(model, 5, layout, seed=4),
             "free": params(model, 8, GrammarSpec("any", "")), "none": params(model, 0, json_spec),
             "choice": params(model, 6, json_spec, opened=False), "plain": SamplingParams(max_tokens=20, seed=1)}
    found = run(model, platform, asked, overlap=overlap)
    for id in ("json", "none", "choice"):
        text, finish, _ = found[id]
        assert finish == "stop", text
        thought, _, rest = text.rpartition(END)
        assert id == "choice" or END in text
        jsonschema.validate(json.loads(rest), SCHEMA)
        assert id != "none" or not thought.strip()
    text, finish, _ = found["calls"]
    content, _, calls, ended = parse(CALLS.create("hermes").bound_parser(TOOLS), [text.rpartition(END)[2]])
    assert finish == "stop" and not content and ended == len(calls) == 1
    jsonschema.validate(json.loads(calls[0][1]), SCHEMA)
    assert END in found["free"][0] and len(found["free"][0].partition(END)[0]) < 120
    assert found["plain"][2] == 20 or found["plain"][1] == "stop"


def test_a_recording_runs_again_without_grammars(model, tmp_path, monkeypatch):
    path = tmp_path / "recording"
    spec = GrammarSpec("json_schema", json.dumps(SCHEMA), "response_format")
    asked = {f"r{i}": params(model, i, spec, opened=bool(i % 2), seed=i) for i in range(6)}
    found = run(model, "null", asked | {"any": params(model, 4, GrammarSpec("any", ""))}, record=str(path))
    monkeypatch.setattr("isthmus.core.engine.Library", None)
    outcome = rerun(path)
    assert not outcome.broken, outcome.broken
    assert outcome.stats["generated_tokens"] == sum(tokens for _, _, tokens in found.values())
    assert outcome.stats["forced_tokens"] > 0
