"""Models of a real one's shape with random weights: placed by the platform from tensors that no file holds, or written
as a checkpoint where something else is to read it too."""
from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from isthmus.conformance.tiny import shapes
from isthmus.core.models.loader import LoadedModel, load_model
from isthmus.core.platform import RawTensor, WeightSpec
from place import Place

NEAR = {"rms_norm_eps": 1e-5, "hidden_act": "silu", "tie_word_embeddings": False, "eos_token_id": 2, "bos_token_id": 1}
LLAMA = NEAR | {
    "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128,
    "max_position_embeddings": 8192, "rope_theta": 500000.0}
QWEN = NEAR | {
    "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "max_position_embeddings": 40960, "rope_theta": 1000000.0, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "mlp_only_layers": [], "decoder_sparse_step": 1}
SMALL = NEAR | {  # what an engine and its peer serve
    "model_type": "llama", "vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 22,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 64, "max_position_embeddings": 2048,
    "rope_theta": 10000.0}
TINY = {"vocab_size": 131, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": 512}
TINY_EXPERTS = TINY | {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
RESERVE = 0.25  # share of the device's memory that is left for K and V, and for what steps need
BLOCK, BLOCKS = (1 << 20) - 3, 8  # random values that are repeated, out of step with any width; and how many such


@cache
def normal_block(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=BLOCK).astype(np.float32)


def random_bits(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """bf16 as uint16: norms around 1, matrices that keep the size of what they multiply."""
    block = normal_block(seed % BLOCKS)
    block = 1 + block * np.float32(0.1) if len(shape) == 1 else block * np.float32(shape[-1] ** -0.5)
    return np.resize((block.view(np.uint32) >> 16).astype("<u2"), shape)


class Unwritten:
    """As `core.weights`' Checkpoint: every tensor of the configuration, none of them anywhere."""

    norms_include_one, narrow, kv_scales, kv_note, input_scales = False, False, {}, "", {}
    generation, metadata, kind = {}, {}, "safetensors"

    def __init__(self, config: dict[str, Any], name: str) -> None:
        self.config, self.path = config, Path(name)
        self.tensors = dict(shapes(config))
        self.names = frozenset(self.tensors)
        self.nbytes = sum(2 * int(np.prod(shape)) for shape in self.tensors.values())

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return "bf16", self.tensors[name]

    def tensor(self, name: str) -> RawTensor:
        return RawTensor("bf16", self.tensors[name], np.zeros(0, np.uint8))


class Repeating:
    """A platform that is given each kind of weight once; the others are copies on the device, or, where memory is
    short, the same: a layer is larger than a cache, so reading it again takes as long as reading another."""

    def __init__(self, platform: Any) -> None:
        self.platform, self.made, self.shared = platform, {}, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.platform, name)

    def load(self, raws: Sequence[RawTensor], spec: WeightSpec, dtype: str) -> Any:
        key = spec.role, spec.cut, spec.experts, dtype, tuple(raw.shape for raw in raws)
        if key not in self.made:
            full = [RawTensor("bf16", raw.shape, random_bits(raw.shape, at).reshape(-1).view(np.uint8))
                    for at, raw in enumerate(raws)]
            self.made[key] = self.platform.load(full, spec, dtype)
            return self.made[key]
        total, free = self.platform.memory()
        if free < RESERVE * total + 4 * sum(int(np.prod(raw.shape)) for raw in raws):
            self.shared += 1
            return self.made[key]
        return deepcopy(self.made[key])


def place_model(config: dict[str, Any], name: str, place: Place) -> tuple[LoadedModel, int]:
    """The model on the device, and how many weights had to be the same memory as others."""
    platform = Repeating(place.platform)
    return load_model(Unwritten(config, name), platform, place.manifest, "bf16"), platform.shared


def write_checkpoint(config: dict[str, Any], folder: Path) -> Path:
    """config.json and model.safetensors in bf16."""
    folder.mkdir(parents=True)
    known = {"architectures": ["LlamaForCausalLM"], "torch_dtype": "bfloat16"}
    (folder / "config.json").write_text(json.dumps(config | known), "utf-8")
    header, end = {}, 0
    tensors = {name: random_bits(shape, at) for at, (name, shape) in enumerate(shapes(config))}
    for name, values in tensors.items():
        header[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [end, end + values.nbytes]}
        end += values.nbytes
    head = json.dumps(header).encode()
    with open(folder / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head)
        for values in tensors.values():
            file.write(values.tobytes())
    return folder
