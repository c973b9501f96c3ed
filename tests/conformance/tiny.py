"""Tiny random models as Hugging Face folders, written by numpy; every weight is random, so that nothing cancels out.

Weights are values that bf16 holds, so that every compute dtype has the same ones.
"""
from __future__ import annotations

import atexit
import functools
import json
import shutil
import struct
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from .case import random_source
from .formats import rounded

VOCAB = 131
BASE = {"vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-5, "eos_token_id": 1, "bos_token_id": 2, "tie_word_embeddings": False, "hidden_act": "silu"}
# What differs from BASE; layers differ where the type allows it.
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"model_type": "llama", "rope_scaling": {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32}},
    "qwen2": {"model_type": "qwen2", "tie_word_embeddings": True, "head_dim": 16},
    "qwen3": {"model_type": "qwen3", "tie_word_embeddings": True},
    "gemma3": {"model_type": "gemma3_text", "num_hidden_layers": 3, "sliding_window": 6, "query_pre_attn_scalar": 24,
               "final_logit_softcapping": 20.0, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": True,
               "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "rope_theta": 1e6,
               "rope_local_base_freq": 1e4},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2_moe": {"model_type": "qwen2_moe", "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2,
                  "moe_intermediate_size": 64, "shared_expert_intermediate_size": 32, "norm_topk_prob": False},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 32,
                  "norm_topk_prob": True, "mlp_only_layers": [0], "tie_word_embeddings": True},
    "glm4_moe": {"model_type": "glm4_moe", "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                 "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "routed_scaling_factor": 1.5,
                 "first_k_dense_replace": 1, "use_qk_norm": True, "partial_rotary_factor": 0.5},
}
SPARSE = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe")
MODEL_FEATURES = {"gemma3": ("sliding_window",)} | dict.fromkeys(SPARSE, ("moe",)) | {
    "glm4_moe": ("moe", "expert_groups", "partial_rope")}


def in_dtypes(kind: str, dtypes: tuple[str, ...]) -> tuple[str, ...]:
    """Those in which the model can be compared: in 16 bits rounding chooses other experts, whose output is another."""
    return tuple(dtype for dtype in dtypes if dtype not in ("f16", "bf16") or kind not in SPARSE)


def config_of(kind: str) -> dict[str, Any]:
    """The model's config.json."""
    return BASE | KINDS[kind]


def shapes(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of the tensors that a checkpoint of this configuration has."""
    hidden, wide, dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    rows = {"q": config["num_attention_heads"] * dim, "k": config["num_key_value_heads"] * dim,
            "v": config["num_key_value_heads"] * dim}
    kind = config["model_type"]
    norms = ["input_layernorm", "post_attention_layernorm"]
    norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"] * (kind == "gemma3_text")
    yield "model.embed_tokens.weight", (config["vocab_size"], hidden)
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        for name, count in rows.items():
            yield f"{prefix}self_attn.{name}_proj.weight", (count, hidden)
            if kind in ("qwen2", "qwen2_moe"):
                yield f"{prefix}self_attn.{name}_proj.bias", (count,)
        yield f"{prefix}self_attn.o_proj.weight", (hidden, rows["q"])
        if kind in ("qwen3", "qwen3_moe", "gemma3_text") or config.get("use_qk_norm"):
            yield f"{prefix}self_attn.q_norm.weight", (dim,)
            yield f"{prefix}self_attn.k_norm.weight", (dim,)
        if kind == "mixtral":
            yield from mixtral_shapes(config, f"{prefix}block_sparse_moe.")
        elif "num_experts" in config and layer not in config.get("mlp_only_layers", ()):
            yield from expert_shapes(config, f"{prefix}mlp.")
        elif layer >= config.get("first_k_dense_replace", layer + 1):
            yield from grouped_shapes(config, f"{prefix}mlp.")
        else:
            yield from gated_shapes(f"{prefix}mlp.", hidden, wide)
        yield from ((f"{prefix}{norm}.weight", (hidden,)) for norm in norms)
    yield "model.norm.weight", (hidden,)
    if not config["tie_word_embeddings"]:
        yield "lm_head.weight", (config["vocab_size"], hidden)


def gated_shapes(prefix: str, hidden: int, wide: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    yield f"{prefix}gate_proj.weight", (wide, hidden)
    yield f"{prefix}up_proj.weight", (wide, hidden)
    yield f"{prefix}down_proj.weight", (hidden, wide)


def mixtral_shapes(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    hidden, wide = config["hidden_size"], config["intermediate_size"]
    yield f"{prefix}gate.weight", (config["num_local_experts"], hidden)
    for expert in range(config["num_local_experts"]):
        for name, shape in (("w1", (wide, hidden)), ("w3", (wide, hidden)), ("w2", (hidden, wide))):
            yield f"{prefix}experts.{expert}.{name}.weight", shape


def expert_shapes(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A sparse layer: router, experts one by one, and the shared expert behind its gate where there is one."""
    hidden, shared = config["hidden_size"], config.get("shared_expert_intermediate_size", 0)
    yield f"{prefix}gate.weight", (config["num_experts"], hidden)
    for expert in range(config["num_experts"]):
        yield from gated_shapes(f"{prefix}experts.{expert}.", hidden, config["moe_intermediate_size"])
    if shared:
        yield f"{prefix}shared_expert_gate.weight", (1, hidden)
        yield from gated_shapes(f"{prefix}shared_expert.", hidden, shared)


def grouped_shapes(config: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, tuple[int, ...]]]:
    """A sparse layer whose router has a bias of scores, and whose shared experts have no gate."""
    hidden, width, experts = config["hidden_size"], config["moe_intermediate_size"], config["n_routed_experts"]
    yield f"{prefix}gate.weight", (experts, hidden)
    yield f"{prefix}gate.e_score_correction_bias", (experts,)
    for expert in range(experts):
        yield from gated_shapes(f"{prefix}experts.{expert}.", hidden, width)
    yield from gated_shapes(f"{prefix}shared_experts.", hidden, width * config["n_shared_experts"])


def weights_of(kind: str, seed: int) -> dict[str, np.ndarray]:
    """float32 weights: norms around what they stand for, matrices that keep the size of what they multiply."""
    rng, config = random_source(seed, kind), config_of(kind)
    base = 0.0 if config["model_type"] == "gemma3_text" else 1.0  # Gemma's norms are stored without their 1
    out = {}
    for name, shape in shapes(config):
        if "norm" in name:
            values = base + rng.normal(size=shape) * 0.2
        else:
            values = rng.normal(size=shape) * (1.5 * shape[1] ** -0.5 if len(shape) > 1 else 0.5)
        if "embed" in name:
            values = rng.normal(size=shape) * 0.5
        out[name] = rounded(values, "bf16").astype(np.float32)
    return out


def safetensors(tensors: Mapping[str, np.ndarray]) -> bytes:
    """A safetensors file of float32 tensors."""
    header, data = {}, b""
    for name, value in tensors.items():
        raw = np.ascontiguousarray(value, "<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": list(value.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    head = json.dumps(header).encode()
    return struct.pack("<Q", len(head)) + head + data


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="isthmus-conformance-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def folder_of(name: str) -> Path:
    """A new folder for as long as this process runs."""
    (_root() / name).mkdir()
    return _root() / name


@functools.cache
def tiny_model(kind: str, seed: int) -> Path:
    """The folder of the model called `kind` in `KINDS`, with config.json and model.safetensors."""
    folder = folder_of(f"{kind}-{seed}")
    (folder / "config.json").write_text(json.dumps(config_of(kind)), "utf-8")
    (folder / "model.safetensors").write_bytes(safetensors(weights_of(kind, seed)))
    return folder
