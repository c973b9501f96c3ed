"""Steps of whole models through the platform's own `compile`: decode with graphs and without, and prefill.

A decode step's floor is the bytes of the weights that it reads and of its K and V over the measured bandwidth, a
prefill's the products of the weights that a token meets over the measured rate. Which experts a batch reads is taken as
even chance has it.
"""
from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Iterator
from typing import Any

from batches import batch, pages_of
from ceilings import bytes_a_second, flops_a_second
from generated import LLAMA, QWEN, TINY, TINY_EXPERTS, place_model
from isthmus.conformance.fitting import fitted
from isthmus.core.models.loader import LoadedModel
from isthmus.core.plan import Batch
from isthmus.core.platform import Bucket, StateSpec, Unsupported
from place import Place, figure, main

MODELS = {"llama": ("Llama-3-8B-shaped", LLAMA, TINY), "qwen": ("Qwen3-30B-A3B-shaped", QWEN, TINY_EXPERTS)}
ROWS, CONTEXT, PREFILL = (1, 16, 64, 256), 1024, 8192  # rows of a batch; a decode's context; a prefill's tokens in all
SETTLE, STEPS = 3, 16


class Sizes:
    """What a step must read and multiply, from the configuration."""

    def __init__(self, config: dict[str, Any]) -> None:
        hidden, dim, self.layers = config["hidden_size"], config["head_dim"], config["num_hidden_layers"]
        self.kv = 2 * config["num_key_value_heads"] * dim * self.layers  # values of K and V of a token
        projections = hidden * dim * (2 * config["num_attention_heads"] + 2 * config["num_key_value_heads"])
        self.experts, self.top_k = config.get("num_experts", 1), config.get("num_experts_per_tok", 1)
        self.expert = 3 * hidden * config.get("moe_intermediate_size", config["intermediate_size"])
        self.head = hidden * config["vocab_size"]
        self.rest = projections * self.layers

    def weights(self, tokens: int) -> float:
        """Values of weights that a step of so many tokens reads; the head for all, the embedding not at all."""
        met = self.experts * (1 - (1 - self.top_k / self.experts) ** tokens)
        return self.rest + self.layers * self.expert * met + self.head

    def products(self, tokens: int, sampled: int) -> float:
        """Multiplications of a step, attention's left out."""
        return tokens * (self.rest + self.layers * self.expert * self.top_k) + sampled * self.head


def timed_steps(place: Place, model: LoadedModel, made: Batch, bucket: Bucket | None) -> dict[str, Any]:
    """"ms", the median from one step's result to the next's, each launched before the one before it is collected;
    "first ms", of the first step with all that is built in it; and whether the steps came from a graph."""
    gc.collect()  # the memory of the step before
    spec = StateSpec(model.state_layers, "bf16", place.manifest.page_sizes[0], len(made.seqs) + 1)
    state = place.platform.alloc(spec, pages_of(made))
    step = place.platform.compile(model.forward, model.weights, bucket)
    began = time.perf_counter()
    out, state = step(state, made)
    out.collect()
    first = time.perf_counter() - began
    for _ in range(SETTLE):
        out, state = step(state, made)
        out.collect()
    times, (out, state) = [], step(state, made)
    began = time.perf_counter()
    for _ in range(place.pick(STEPS, 2)):
        following, state = step(state, made)
        out.collect()
        times.append(time.perf_counter() - began)
        began, out = time.perf_counter(), following
    out.collect()
    return {"ms": figure(1e3 * statistics.median(times)), "first ms": round(1e3 * first), "captured": bool(step.graphs)}


def measure(place: Place, ceilings: dict[str, Any], model: LoadedModel, sizes: Sizes, rows: int, tokens: int,
            graphs: bool) -> dict[str, Any]:
    """One row of results; rows of one token each are a decode."""
    context = place.pick(CONTEXT, 24) if tokens == 1 else tokens
    made = batch(rows, tokens, context, place.manifest.page_sizes[0])
    if graphs:
        made, bucket = fitted(made, place.manifest.buckets)
    else:
        bucket = None  # of any size, and so launched
    row = {"what": "decode" if tokens == 1 else "prefill", "rows": rows, "tokens": tokens, "context": context,
           "graphs": graphs}
    row |= timed_steps(place, model, made, bucket)
    seconds = row["ms"] / 1e3
    row["tokens/s"] = figure(rows * tokens / seconds)
    floors = {}
    if (rate := bytes_a_second(ceilings)) is not None:
        kept = rows * (context if tokens == 1 else 0) * sizes.kv
        floors["bytes"] = 2 * (sizes.weights(rows * tokens) + kept) / rate
    if (rate := flops_a_second(ceilings)) is not None:
        floors["products"] = 2 * sizes.products(rows * tokens, rows) / rate
    if floors:
        floor = max(floors, key=floors.__getitem__)
        row |= {"floor ms": figure(1e3 * floors[floor]), "floor": floor,
                "times floor": round(seconds / floors[floor], 2)}
    return row


def run(place: Place, ceilings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    name, config, tiny = MODELS[CHOSEN]
    config = config | place.pick({}, tiny)
    began = time.perf_counter()
    model, shared = place_model(config, name, place)
    yield {"model": name, "report": model.report, "weights": model.nbytes, "weights that share memory": shared,
           "placed in s": round(time.perf_counter() - began, 1)}
    sizes = Sizes(config)
    steps = [(rows, tokens, graphs) for rows in place.pick(ROWS, (1, 3))
             for tokens, graphs in ((1, True), (1, False), (max(2, place.pick(PREFILL, 24) // max(rows, 16)), True))]
    for rows, tokens, graphs in steps:
        try:
            yield {"model": name} | measure(place, ceilings, model, sizes, rows, tokens, graphs)
        except (RuntimeError, Unsupported) as error:  # of one size: memory that does not do, say
            yield {"model": name, "rows": rows, "tokens": tokens, "graphs": graphs,
                   "error": f"{type(error).__name__}: {error}"[:300]}


if __name__ == "__main__":
    CHOSEN = sys.argv.pop(1)
    main(__doc__, run)
