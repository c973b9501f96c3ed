"""Tiny models quantized with numpy and written as each scheme's published checkpoints are: names, dtypes, config."""
from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from isthmus.conformance.schemes import E2M1, awq_words, e4m3, words

from .checkpoints import Stored, write_safetensors

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, LAYERS, EXPERTS = 160, 288, 4, 2, 40, 2, 3  # none a multiple of 128
SIZES = dict(hidden_size=HIDDEN, intermediate_size=FFN, num_attention_heads=HEADS, num_key_value_heads=KV_HEADS,
             head_dim=HEAD_DIM, num_hidden_layers=LAYERS, vocab_size=131, max_position_embeddings=128,
             rms_norm_eps=1e-6, tie_word_embeddings=False, hidden_act="silu", eos_token_id=1, bos_token_id=2)
KINDS: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"]},
    "qwen3": {"architectures": ["Qwen3ForCausalLM"], "attention_bias": False},
    "qwen3_moe": {"architectures": ["Qwen3MoeForCausalLM"], "attention_bias": False, "num_experts": EXPERTS,
                  "num_experts_per_tok": 2, "moe_intermediate_size": 96, "norm_topk_prob": True,
                  "decoder_sparse_step": 1, "mlp_only_layers": []},
}
E4M3 = np.array([e4m3(code) for code in range(256)])
E4M3[[127, 255]] = np.inf
FP4 = np.array([*E2M1, *(-x for x in E2M1)])

Tensors = dict[str, np.ndarray | Stored]
# Values [out, in] -> the module's tensors by the ends of their names, and the values that those stand for.
Writer = Callable[[np.ndarray], tuple[Tensors, np.ndarray]]


def tiny_weights(kind: str, seed: int = 0) -> dict[str, np.ndarray]:
    draw = np.random.default_rng(seed)
    weights = {}
    for i in range(LAYERS):
        layer = f"model.layers.{i}."
        inner = {"q": (HEADS * HEAD_DIM, HIDDEN), "k": (KV_HEADS * HEAD_DIM, HIDDEN),
                 "v": (KV_HEADS * HEAD_DIM, HIDDEN), "o": (HIDDEN, HEADS * HEAD_DIM)}
        shapes = {f"self_attn.{part}_proj": shape for part, shape in inner.items()}
        sparse = kind == "qwen3_moe"
        width = 96 if sparse else FFN
        for prefix in [f"mlp.experts.{e}." for e in range(EXPERTS)] if sparse else ["mlp."]:
            shapes |= {f"{prefix}gate_proj": (width, HIDDEN), f"{prefix}up_proj": (width, HIDDEN),
                       f"{prefix}down_proj": (HIDDEN, width)}
        if sparse:
            shapes["mlp.gate"] = (EXPERTS, HIDDEN)
        weights |= {f"{layer}{name}.weight": draw.normal(0, shape[1] ** -0.5, shape) for name, shape in shapes.items()}
        norms = {"input_layernorm": HIDDEN, "post_attention_layernorm": HIDDEN}
        norms |= {} if kind == "llama" else {"self_attn.q_norm": HEAD_DIM, "self_attn.k_norm": HEAD_DIM}
        weights |= {f"{layer}{name}.weight": 1 + draw.normal(0, 0.1, size) for name, size in norms.items()}
    weights |= {"model.embed_tokens.weight": draw.normal(0, 1, (131, HIDDEN)), "model.norm.weight": np.ones(HIDDEN),
                "lm_head.weight": draw.normal(0, HIDDEN ** -0.5, (131, HIDDEN))}
    return {name: value.astype(np.float32) for name, value in weights.items()}


def bf16(values: np.ndarray) -> tuple[Stored, np.ndarray]:
    """As bf16, cut off, and the values."""
    top = np.ascontiguousarray(values, np.float32).view(np.uint32) >> 16
    return Stored("bf16", values.shape, top.astype("<u2").tobytes()), (top << 16).view(np.float32)


def nearest(values: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Codes of the nearest values of a table."""
    order = np.argsort(table, kind="stable")
    order = order[np.isfinite(table[order])]
    middle = (table[order][1:] + table[order][:-1]) / 2
    return order[np.searchsorted(middle, values)].astype(np.uint8)


def rounded(values: np.ndarray, bits: int, group: int, symmetric: bool, order: np.ndarray) -> tuple[np.ndarray, ...]:
    """Codes [out, in] from 0 up, scales [out, groups] float16, zeros [out, groups]; `order` [in] are the groups."""
    groups, top = int(order.max()) + 1, (1 << bits) - 1
    parts = [values[:, order == g] for g in range(groups)]
    low = np.stack([np.minimum(part.min(1), 0) for part in parts], 1)
    high = np.stack([np.maximum(part.max(1), 0) for part in parts], 1)
    if symmetric:
        high = np.maximum(-low, high)
        scale, zero = (2 * high / top).astype(np.float16), np.full(low.shape, (top + 1) // 2)
    else:
        scale = ((high - low) / top).astype(np.float16)
        zero = np.clip(np.rint(-low / scale.astype(np.float32)), 1, top).astype(int)
    codes = np.rint(values / scale.astype(np.float32)[:, order]).astype(int) + zero[:, order]
    return np.clip(codes, 0, top), scale, zero


def runs(width: int, group: int) -> np.ndarray:
    return (np.arange(width) // (width if group == -1 else group)).astype(np.int32)


def dense(codes: np.ndarray, scale: np.ndarray, zero: np.ndarray, order: np.ndarray) -> np.ndarray:
    return scale.astype(np.float32)[:, order] * (codes - zero[:, order]).astype(np.float32)


def awq(group: int) -> Writer:
    def write(values: np.ndarray) -> tuple[Tensors, np.ndarray]:
        order = runs(values.shape[1], group)
        codes, scale, zero = rounded(values, 4, group, False, order)
        return ({"qweight": awq_words(codes.T), "qzeros": awq_words(zero.T),
                 "scales": np.ascontiguousarray(scale.T)}, dense(codes, scale, zero, order))
    return write


def gptq(bits: int, group: int, symmetric: bool = True, act: bool = False, v2: bool = False) -> Writer:
    def write(values: np.ndarray) -> tuple[Tensors, np.ndarray]:
        order = runs(values.shape[1], group)
        if act:
            order = np.random.default_rng(len(values)).permutation(order)
        codes, scale, zero = rounded(values, bits, group, symmetric, order)
        tensors = {"qweight": words(codes.T, bits), "qzeros": np.ascontiguousarray(words(zero - (not v2), bits).T),
                   "scales": np.ascontiguousarray(scale.T), "g_idx": order, "bias": np.zeros(len(values), np.float16)}
        return tensors, dense(codes, scale, zero, order)
    return write


def pack(bits: int, group: int, symmetric: bool = True, act: bool = False) -> Writer:
    def write(values: np.ndarray) -> tuple[Tensors, np.ndarray]:
        order = runs(values.shape[1], group)
        if act:
            order = np.random.default_rng(len(values)).permutation(order)
        codes, scale, zero = rounded(values, bits, group, symmetric, order)
        tensors = {"weight_packed": np.ascontiguousarray(words(codes.T, bits).T), "weight_scale": scale,
                   "weight_shape": np.array(values.shape, np.int64)}
        tensors |= {} if symmetric else {"weight_zero_point": words(zero, bits)}
        tensors |= {"weight_g_idx": order} if act else {}
        return tensors, dense(codes, scale, zero, order)
    return write


def int8(values: np.ndarray) -> tuple[Tensors, np.ndarray]:
    stored, scale = bf16(np.abs(values).max(1, keepdims=True) / 127)
    codes = np.clip(np.rint(values / scale), -128, 127).astype(np.int8)
    return {"weight": codes, "weight_scale": stored, "input_scale": np.ones(1, np.float32)}, codes * scale


def fp8(height: int, width: int, name: str = "weight_scale", shape: Callable = np.shape,
        static: bool = False) -> Writer:
    """One scale for `height` rows and `width` columns, 0 = all of them."""
    def write(values: np.ndarray) -> tuple[Tensors, np.ndarray]:
        rows, columns = height or len(values), width or values.shape[1]
        scale = np.array([[np.abs(values[r:r + rows, c:c + columns]).max() / 448 for c in
                           range(0, values.shape[1], columns)] for r in range(0, len(values), rows)], np.float32)
        wide = np.repeat(np.repeat(scale, rows, 0), columns, 1)[:len(values), :values.shape[1]]
        codes = nearest(values / wide, E4M3)
        tensors = {"weight": Stored("f8_e4m3", codes.shape, codes.tobytes()), name: scale.reshape(shape(scale))}
        tensors |= {"input_scale": np.array(0.5, np.float32)} if static else {}
        tensors |= dict.fromkeys(("k_scale", "v_scale"), np.ones((), np.float32)) if static else {}
        return tensors, E4M3[codes].astype(np.float32) * wide
    return write


def fp4(packed: str, block: int, whole: str = "") -> Writer:
    """whole: the name of the scale of all values; mxfp4 has none."""
    def write(values: np.ndarray) -> tuple[Tensors, np.ndarray]:
        top = np.abs(values).reshape(len(values), -1, block).max(-1) / 6
        if whole:
            factor = np.float32(top.max() / 448)
            stored = nearest(top / factor, E4M3)
            scale = E4M3[stored].astype(np.float32) * factor
            if whole == "weight_global_scale":
                divisor = np.float32(1) / factor
                scale, factor = E4M3[stored].astype(np.float32) / divisor, np.array([divisor])
            extra = {"weight_scale": Stored("f8_e4m3", stored.shape, stored.tobytes()), whole: np.array(factor)}
        else:
            stored = np.clip(np.ceil(np.log2(top)) + 127, 0, 254).astype(np.uint8)
            scale, extra = np.exp2(stored.astype(np.float32) - 127), {"weight_scale": stored}
        wide = np.repeat(scale, block, 1)
        codes = nearest(values / wide, FP4)
        return ({packed: codes[:, 0::2] | codes[:, 1::2] << 4, **extra}, FP4[codes].astype(np.float32) * wide)
    return write


def compressed(format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                                                "group_size": None, "observer": "minmax", **weights},
             "input_activations": None, "output_activations": None}
    return {"quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
            "ignore": ["lm_head", "re:.*mlp.gate$"], "config_groups": {"group_0": group}, "kv_cache_scheme": None,
            "sparsity_config": {}, "transform_config": {}, "global_compression_ratio": None}


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm", "zero_point": True,
       "modules_to_not_convert": None}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True, "static_groups": False,
        "true_sequential": True, "damp_percent": 0.01, "lm_head": False}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128]}
MODELOPT = {"quant_method": "modelopt", "producer": {"name": "modelopt", "version": "0.29.0"}, "ignore": ["lm_head"],
            "config_groups": {"group_0": {"targets": ["Linear"]}}}
QUARK = {"quant_method": "quark", "layer_quant_config": {}, "exclude": ["lm_head"]}
CT8 = dict(num_bits=8, type="float", group_size=None)

# name -> (configuration, writer, the format that the matrices must have)
SCHEMES: dict[str, tuple[dict[str, Any], Writer, str]] = {
    "awq": (AWQ, awq(32), "awq4"),
    "awq-channel": (AWQ | {"group_size": -1}, awq(-1), "awq4"),
    "gptq4": (GPTQ, gptq(4, 32), "gptq4"),
    "gptq4-channel": (GPTQ | {"group_size": -1, "checkpoint_format": "gptq"}, gptq(4, -1), "gptq4"),
    "gptq4-act": (GPTQ | {"desc_act": True, "sym": False}, gptq(4, 32, False, act=True), "gptq4_act"),
    "gptq8-v2": (GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}, gptq(8, 32, v2=True), "gptq8_v2"),
    "gptq4-v2-act": (GPTQ | {"desc_act": True, "checkpoint_format": "gptq_v2"}, gptq(4, 32, act=True, v2=True),
                     "gptq4_v2_act"),
    "gptq3": (GPTQ | {"bits": 3, "sym": False}, gptq(3, 32, False), "gptq3"),
    "gptq2": (GPTQ | {"bits": 2}, gptq(2, 32), "gptq2"),
    "pack4": (compressed("pack-quantized", group_size=32), pack(4, 32), "pack4"),
    "pack4-asym": (compressed("pack-quantized", group_size=32, symmetric=False), pack(4, 32, False), "pack4_asym"),
    "pack4-act": (compressed("pack-quantized", group_size=32, actorder="group"), pack(4, 32, act=True), "pack4_act"),
    "pack8-channel": (compressed("pack-quantized", num_bits=8, strategy="channel"), pack(8, -1), "pack8"),
    "int8": (compressed("int-quantized", num_bits=8, strategy="channel"), int8, "int8"),
    "ct-fp8-tensor": (compressed("float-quantized", **CT8, strategy="tensor"), fp8(0, 0, shape=lambda s: (1,)), "fp8"),
    "ct-fp8-channel": (compressed("float-quantized", **CT8, strategy="channel"), fp8(1, 0), "fp8"),
    "ct-fp8-block": (compressed("float-quantized", **CT8, strategy="block", block_structure=[128, 128]),
                     fp8(128, 128), "fp8_128"),
    "ct-nvfp4": (compressed("nvfp4-pack-quantized", type="float", strategy="tensor_group", group_size=16),
                 fp4("weight_packed", 16, "weight_global_scale"), "nvfp4_div"),
    "ct-mxfp4": (compressed("mxfp4-pack-quantized", type="float", group_size=32), fp4("weight_packed", 32), "mxfp4"),
    "fp8": (FP8, fp8(128, 128, "weight_scale_inv"), "fp8_128"),
    "fp8-static": (FP8 | {"weight_block_size": None, "activation_scheme": "static"},
                   fp8(0, 0, shape=lambda s: (), static=True), "fp8"),
    "fbgemm": ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
               fp8(1, 0), "fp8"),
    "modelopt-fp8": (MODELOPT | {"quant_algo": "FP8"}, fp8(0, 0, shape=lambda s: (), static=True), "fp8"),
    "modelopt-nvfp4": (MODELOPT | {"quant_algo": "NVFP4"}, fp4("weight", 16, "weight_scale_2"), "nvfp4"),
    "quark-mxfp4": (QUARK | {"global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}}},
                    fp4("weight", 32), "mxfp4"),
}


def written(folder: Path, scheme: str, kind: str = "llama", changes: dict | None = None,
            tensors: Tensors | None = None) -> tuple[Path, dict[str, np.ndarray]]:
    """A model with all projections but the head's in `scheme`; and the values of all its weights. changes: of
    quantization_config; None for a tensor leaves it out."""
    folder.mkdir(exist_ok=True)
    config, write, _ = SCHEMES[scheme]
    stored, values = {}, {}
    for name, weight in tiny_weights(kind).items():
        stem = name.removesuffix(".weight")
        if stem.endswith("_proj"):
            parts, values[name] = write(weight)
            stored |= {f"{stem}.{end}": part for end, part in parts.items()}
        else:
            stored[name] = values[name] = weight
    stored = {name: part for name, part in (stored | (tensors or {})).items() if part is not None}
    write_config(folder, kind, config | (changes or {}))
    write_safetensors(folder / "model.safetensors", stored)
    return folder, values


def write_config(folder: Path, kind: str, quantization: Any = None) -> None:
    config = SIZES | KINDS[kind] | {"model_type": kind}
    config |= {} if quantization is None else {"quantization_config": quantization}
    (folder / "config.json").write_text(json.dumps(config))
