"""What structured output costs: a token's mask and step in its grammar in a batch, and compiling schemas.

    python benchmarks/core/grammar.py --batch 32 --vocabulary MODEL.gguf

Masking: a batch of requests of four schemas goes through valid documents token by token, as the scheduler does it:
masks of all rows into one array, forced tokens where one is allowed, then one token each. Times are a row's, in a step,
of the processor (all threads), since the clock tells of other programs too; `wall` is the clock's. Compiling: every
schema once, on one thread, with nothing cached.
"""
from __future__ import annotations

import argparse
import json
import random
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
from isthmus.core.grammar.contract import GrammarError
from isthmus.core.grammar.library import open_backend
from isthmus.core.grammar.vocabulary import Vocabulary
from isthmus.core.scheduler.masks import Masks
from isthmus.core.text import load_tokenizer
from isthmus.core.weights import open_checkpoint

ROOT = Path(__file__).resolve().parent.parent.parent
DATA = ROOT.parent / "shared" / "data"
SCHEMAS = [
    {"type": "object", "required": ["name", "age", "tags"], "additionalProperties": False, "properties": {
        "name": {"type": "string"}, "age": {"type": "integer"},
        "tags": {"type": "array", "items": {"type": "string"}}}},
    {"type": "object", "required": ["kind", "items"], "additionalProperties": False, "properties": {
        "kind": {"enum": ["invoice", "credit note", "reminder"]}, "items": {"type": "array", "items": {
            "type": "object", "required": ["article", "amount"], "additionalProperties": False, "properties": {
                "article": {"type": "string"}, "amount": {"type": "number"}, "note": {"type": "string"}}}}}},
    {"type": "object"},
    {"type": "array", "items": {"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}},
]
WORDS = "the quick brown fox jumps over a lazy dog while reading about structured output of language models".split()


def document(number: int, rng: random.Random) -> Any:
    """An instance of schema `number`."""
    text = lambda: " ".join(rng.choices(WORDS, k=rng.randint(2, 12)))  # noqa: E731
    if number == 0:
        return {"name": text(), "age": rng.randint(0, 99), "tags": [text() for _ in range(3)]}
    if number == 1:
        return {"kind": rng.choice(["invoice", "reminder"]), "items": [
            {"article": text(), "amount": rng.randint(1, 999) / 4, "note": text()} for _ in range(3)]}
    if number == 2:
        return {text(): {"a": [1, 2.5, None, True], "b": text()}, "x": text()}
    return [f"{rng.choice('ABC')}{rng.choice('XYZ')}-{rng.randint(0, 9999):04}" for _ in range(8)]


def percentiles(values: list[float], unit: float) -> dict[str, float]:
    return {f"p{q}": round(float(np.percentile(values, q)) * unit, 2) for q in (50, 90, 99)}


def masking(backend: Any, vocabulary: Vocabulary, batch: int, rounds: int) -> dict[str, Any]:
    """Processor time of a step over all rows, divided by rows."""
    rng = random.Random(0)
    grammars = [backend.compile("json_schema", json.dumps(schema)) for schema in SCHEMAS]
    masks = Masks(None, batch, vocabulary.size, SimpleNamespace(backend=backend))
    fill, accept, steps, wall = [], [], [], []
    for _ in range(rounds):
        rows = []
        for i in range(batch):
            number = i % len(SCHEMAS)
            text = json.dumps(document(number, rng))
            rows.append((grammars[number].start(), vocabulary.encode(text)))
        for place in range(max(len(tokens) for _, tokens in rows)):
            live = [(matcher, tokens[place]) for matcher, tokens in rows if place < len(tokens)]
            if len(live) < batch // 2:
                break
            requests = [SimpleNamespace(matcher=matcher, stuck=False, goes_on=False, ahead=[]) for matcher, _ in live]
            bits = np.empty((len(live), -(-vocabulary.size // 32)), np.uint32)
            clock, began = time.perf_counter(), time.process_time()
            masks._fill(requests, bits, list(range(len(live))))
            filled = time.process_time()
            masks._accept(requests, [token for _, token in live])
            ended = time.process_time()
            wall.append((time.perf_counter() - clock) / len(live))
            fill.append((filled - began) / len(live))
            accept.append((ended - filled) / len(live))
            steps.append((ended - began) / len(live))
    return {"steps": len(steps), "mask_us": percentiles(fill, 1e6), "accept_us": percentiles(accept, 1e6),
            "both_us": percentiles(steps, 1e6) | {"mean": round(float(np.mean(steps)) * 1e6, 2)},
            "wall_us": percentiles(wall, 1e6)}


def compiling(backend: Any) -> dict[str, Any]:
    """Seconds for each schema of real tools and of an API."""
    sys.path.insert(0, str(ROOT))
    from tests.json_schema_suite import api_schemas, tool_schemas
    found = {}
    for name, schemas in (("tools", tool_schemas(DATA / "bfcl" / "data", 1000)),
                          ("api", api_schemas(DATA / "openai_openapi" / "openapi.json", 400))):
        taken, refused = [], 0
        for schema in schemas:
            source = json.dumps(schema)
            began = time.perf_counter()
            try:
                backend.compile("json_schema", source)
                taken.append(time.perf_counter() - began)
            except GrammarError:
                refused += 1
        found[name] = {"taken": len(taken), "refused": refused, "compile_ms": percentiles(taken, 1e3)}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--vocabulary", type=Path, help="a model folder or a GGUF file",
                        default=DATA / "llama_cpp_models" / "models" / "ggml-vocab-gpt-2.gguf")
    parser.add_argument("--backend", default="llguidance")
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    with open_checkpoint(args.vocabulary) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    began = time.perf_counter()
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    backend = open_backend(args.backend, vocabulary)
    result = {"vocabulary": vocabulary.size, "batch": args.batch, "prepare_s": round(time.perf_counter() - began, 2),
              "masking": masking(backend, vocabulary, args.batch, args.rounds), **compiling(backend)}
    print(json.dumps(result, indent=1))
    if args.json:
        args.json.write_text(json.dumps(result))


if __name__ == "__main__":
    main()
