"""Rows of one batch with different low-rank adapters: each as if its adapter were merged into the weights."""
from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..core.adapters.peft import Adapter, Pair, Shape
from ..core.adapters.stacks import adaptable, place
from ..core.platform import RawTensor
from ..core.specs import KV_FORMATS
from .case import Context, random_source
from .compare import check_values
from .driver import Driver, Model
from .formats import rounded
from .oracle import LOGITS_NMSE, placed, right, right_of, text
from .tiny import config_of, folder_of, safetensors, weights_of

KINDS = ("llama", "qwen2_moe")
RANKS = (4, 0, 24, 1)  # of slots 1 to 4; 0 = an empty one
SCALES = (2.0, 0.0, 0.75, -1.5)
# What each adapter changes: parts of modules' names. The last one knows one projection of one layer.
TARGETS = (("q_proj", "v_proj"), (), ("_proj", ".gate"), ("layers.1.self_attn.o_proj",))


@functools.cache
def adapter(kind: str, seed: int, slot: int) -> Adapter:
    """Values that bf16 holds. A of one module goes far beyond 1."""
    rng, rank = random_source(seed, f"{kind} adapter {slot}"), RANKS[slot - 1]
    modules = {}
    for name, shape in sorted(_shapes(kind).items()):
        if any(target in name for target in TARGETS[slot - 1]):
            high = 64.0 if name.endswith("layers.0.self_attn.v_proj") else 1.0
            a = rng.normal(size=(rank, shape.inputs)) * shape.inputs ** -0.5 * high
            b = rng.normal(size=(shape.outputs, rank)) * rank ** -0.5 / high
            modules[name] = Pair(_raw(a), _raw(b), SCALES[slot - 1])
    return Adapter(Path("."), rank, modules)


def _raw(values: np.ndarray) -> RawTensor:
    data = rounded(values, "bf16").astype(np.float32)
    return RawTensor("f32", data.shape, data.view(np.uint8).reshape(-1))


@functools.cache
def _shapes(kind: str) -> dict[str, Shape]:
    """Every matrix of the attention and the feed-forward, but those of experts."""
    return {name.removesuffix(".weight"): Shape(*value.shape) for name, value in weights_of(kind, 0).items()
            if value.ndim == 2 and (".self_attn." in name or ".mlp." in name) and ".experts." not in name}


@functools.cache
def merged(kind: str, seed: int, slot: int) -> Path:
    """A folder with the tiny model, the adapter of a slot added to its weights in float64."""
    tensors = {name: value.astype(np.float64) for name, value in weights_of(kind, seed).items()}
    for name, pair in adapter(kind, seed, slot).modules.items():
        a, b = (np.frombuffer(raw.data, np.float32).reshape(raw.shape).astype(np.float64) for raw in (pair.a, pair.b))
        tensors[f"{name}.weight"] += pair.scale * (b @ a)
    folder = folder_of(f"{kind}-{seed}-merged{slot}")
    (folder / "config.json").write_text(json.dumps(config_of(kind)), "utf-8")
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder


def tolerance(dtype: str) -> float:
    """The merged weights are stored in float32."""
    return max(LOGITS_NMSE[dtype], 1e-12)


class AdaptedModel(Model):
    """A tiny model with the adapters in their slots."""

    def __init__(self, model: Model, kind: str, seed: int) -> None:
        vars(self).update(vars(model))
        self._steps = {}
        assert adaptable(model.loaded.layout) == _shapes(kind)
        slots = [adapter(kind, seed, slot) if rank else None for slot, rank in enumerate(RANKS, 1)]
        found = place(model.loaded, model.platform, slots, KV_FORMATS[model.dtype].value)
        self.loaded = replace(model.loaded, forward=found.forward, weights=found.weights)


def mixed(context: Context, kind: str, dtype: str) -> None:
    """Prefills, chunks and decodes of rows with three adapters and of one without, in one batch."""
    model = context.once(("adapted", kind, dtype), lambda: AdaptedModel(placed(context, kind, dtype), kind,
                                                                        context.seed))
    driver = Driver(model)
    driver.adapters = {1: 3, 2: 1, 3: 0, 4: 4, 5: 3}
    texts = {seq: text(30, context.seed, f"{kind} {seq}") for seq in driver.adapters}
    texts[3] = texts[1]
    want = {seq: right_of(merged(kind, context.seed, slot), tuple(texts[seq])) if slot else
            right(context, kind, texts[seq]) for seq, slot in driver.adapters.items()}
    done = dict.fromkeys(texts, 0)
    for number, step in enumerate(({1: 7, 2: 19, 4: 1}, {3: 23, 5: 30, 2: 1, 1: 1}, {4: 2, 1: 5, 2: 1, 3: 1},
                                   {1: 1, 2: 1, 3: 1, 4: 1})):
        got = driver.logits(*((seq, texts[seq][done[seq]:done[seq] + count]) for seq, count in step.items()))
        for (seq, count), values in zip(step.items(), got, strict=True):
            check_values(values, want[seq][done[seq]:done[seq] + count], tolerance(dtype),
                         f"step {number}, sequence {seq}, adapter {driver.adapters[seq]}")
            done[seq] += count
