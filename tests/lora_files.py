"""Adapters in PEFT's form, written by hand, so that tests can also write broken ones; and models that have them merged.
"""
from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from isthmus.conformance.tiny import config_of, safetensors, weights_of

from .checkpoints import safetensors_bytes

KIND = "llama"
QV, ALL = ("q_proj", "v_proj"), ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
Pairs = dict[str, tuple[np.ndarray, np.ndarray]]


def drawn(seed: int, rank: int, targets: tuple[str, ...] = ALL, kind: str = KIND, strength: float = 1.0) -> Pairs:
    """A and B of every module that ends in one of `targets`: large enough to change what the model says."""
    rng, pairs = np.random.default_rng(seed), {}
    for name, value in sorted(weights_of(kind, 0).items()):
        module = name.removesuffix(".weight")
        if module.endswith(targets) and value.ndim == 2 and ".experts." not in name:
            out, wide = value.shape
            pairs[module] = (rng.normal(size=(rank, wide)).astype(np.float32) * wide ** -0.5,
                             rng.normal(size=(out, rank)).astype(np.float32) * rank ** -0.5 * strength)
    return pairs


def write_adapter(folder: Path, pairs: Pairs, tensors: Mapping[str, Any] | None = None, prefix="base_model.model.",
                  **config: Any) -> Path:
    """tensors: more or others, by their names in the file. config: of adapter_config.json, besides the usual."""
    folder.mkdir(parents=True, exist_ok=True)
    ranks = {a.shape[0] for a, _ in pairs.values()} or {8}
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "tiny", "r": min(ranks),
            "lora_alpha": 2 * min(ranks), "target_modules": sorted({name.rpartition(".")[2] for name in pairs}),
            "bias": "none", "lora_dropout": 0.1, "modules_to_save": None, "init_lora_weights": True} | config
    files = {f"{prefix}{name}.lora_{side}.weight": value for name, pair in pairs.items()
             for side, value in zip("AB", pair, strict=True)}
    (folder / "adapter_config.json").write_text(json.dumps(said))
    (folder / "adapter_model.safetensors").write_bytes(safetensors_bytes(files | dict(tensors or {})))
    return folder


def merged_model(folder: Path, pairs: Pairs, scale: float | Mapping[str, float], kind: str = KIND) -> Path:
    """The tiny model with the adapter added to its weights in float64."""
    tensors = {name: value.astype(np.float64) for name, value in weights_of(kind, 0).items()}
    for name, (a, b) in pairs.items():
        factor = scale if isinstance(scale, float) else scale[name]
        tensors[f"{name}.weight"] += factor * (b.astype(np.float64) @ a.astype(np.float64))
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config_of(kind)))
    (folder / "model.safetensors").write_bytes(safetensors(tensors))
    return folder


def drawn_for(model: Path, seed: int, rank: int, strength: float = 1.0) -> Pairs:
    """A and B of every projection of a checkpoint's model."""
    from isthmus.core.adapters.stacks import adaptable
    from isthmus.core.models.loader import read_config
    from isthmus.core.weights.checkpoint import open_checkpoint
    with open_checkpoint(model) as checkpoint:
        architecture, config = read_config(checkpoint)
    rng = np.random.default_rng(seed)
    return {name: (rng.normal(size=(rank, shape.inputs)).astype(np.float32) * shape.inputs ** -0.5,
                   rng.normal(size=(shape.outputs, rank)).astype(np.float32) * rank ** -0.5 * strength)
            for name, shape in adaptable(architecture.layout(config)).items()}
