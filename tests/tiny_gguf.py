"""The tiny models of `tiny` as GGUF files in mixed formats, and as `transformers` models with the same weights."""
from __future__ import annotations

import copy
import functools
from pathlib import Path

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Type

from .tiny import hf_model, tiny_model

ARCHS = {"llama3": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3": "gemma3", "mixtral": "llama",
         "qwen2-moe-every": "qwen2moe", "qwen3-moe-every": "qwen3moe"}
BLOCKS = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
}
GEMMA_BLOCKS = BLOCKS | {"post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
                         "post_feedforward_layernorm": "post_ffw_norm"}
WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
# Neighbours that are stacked get different formats, some of which platforms keep and some not.
FORMATS = {"q_proj": Type.Q4_1, "k_proj": Type.Q4_1, "v_proj": Type.Q8_0, "o_proj": Type.Q5_0, "gate_proj": Type.Q4_0,
           "up_proj": Type.Q5_1, "down_proj": Type.Q8_0, "embed_tokens": Type.Q8_0, "lm_head": Type.F16}


@functools.cache
def tiny_gguf(kind: str) -> tuple[Path, transformers.PreTrainedModel]:
    """The file, and the model with the dequantized weights in float32."""
    arch, config = ARCHS[kind], hf_model(kind).config
    path = tiny_model(kind).parent / f"{kind}.gguf"
    writer = gguf.GGUFWriter(path, arch)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_key_length(_head_dim(config))
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_eos_token_id(1)
    if getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        _add_experts(writer, config)
    if arch == "gemma3":
        writer.add_sliding_window(config.sliding_window)
        writer.add_uint32("gemma3.attention.sliding_window_pattern", 2)
        writer.add_float32("gemma3.final_logit_softcapping", config.final_logit_softcapping)
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(8.0)
    else:
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if kind == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(hf_model(kind)))
    model = copy.deepcopy(hf_model(kind))
    if arch == "gemma3":  # files do not store it: for a model of this depth it is the head's size
        for layer in model.model.layers:
            layer.self_attn.scaling = _head_dim(config) ** -0.5
    with torch.no_grad():
        for name, weight in model.named_parameters():
            parts = [_add(writer, part, value, config, arch) for part, value in _unfused(name, weight.numpy())]
            weight.copy_(torch.from_numpy(np.concatenate(parts, -2) if len(parts) > 1 else parts[0]))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path, model


def _add_experts(writer: gguf.GGUFWriter, config: transformers.PreTrainedConfig) -> None:
    writer.add_expert_count(getattr(config, "num_local_experts", None) or config.num_experts)
    writer.add_expert_used_count(config.num_experts_per_tok)
    if config.model_type != "mixtral":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if config.model_type == "qwen2_moe":
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)


def _unfused(name: str, value: np.ndarray) -> list[tuple[str, np.ndarray]]:
    """Experts as files have them: gate and up apart."""
    if name.endswith("gate_up_proj"):
        return [(name.replace("gate_up", part) + ".weight", half)
                for part, half in zip(("gate", "up"), np.split(value, 2, axis=1), strict=True)]
    return [(name if name.endswith(("weight", "bias")) else name + ".weight", value)]


def _head_dim(config: transformers.PreTrainedConfig) -> int:
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def _llama3_factors(model: transformers.PreTrainedModel) -> np.ndarray:
    rotary = model.model.rotary_emb
    half = len(rotary.inv_freq)
    base = model.config.rope_parameters["rope_theta"] ** -(np.arange(half) / half)
    return (base / rotary.inv_freq.numpy()).astype(np.float32)


def _add(writer: gguf.GGUFWriter, name: str, value: np.ndarray, config: transformers.PreTrainedConfig,
         arch: str) -> np.ndarray:
    """Write one parameter the way converters do; what it is after dequantizing."""
    stem, _, end = name.rpartition(".")
    part = stem.rpartition(".")[2]
    kind = FORMATS.get(part, Type.F32) if value.ndim > 1 and value.shape[-1] % 32 == 0 else Type.F32
    if value.ndim == 3 and kind != Type.F32:
        kind = Type.Q4_0  # the parts of an expert share a format
    stored = value + 1 if arch == "gemma3" and "norm" in part else value
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(part, 0)
    if arch == "llama" and heads:
        stored = stored.reshape(heads, 2, -1, stored.shape[1]).swapaxes(1, 2).reshape(stored.shape)
    if part == "shared_expert_gate":
        stored = stored[0]  # a vector
    data = gguf.quants.quantize(stored, kind)
    if stem in WHOLE:
        target = WHOLE[stem]
    else:
        _, _, layer, block = stem.split(".", 3)
        target = f"blk.{layer}.{(GEMMA_BLOCKS if arch == 'gemma3' else BLOCKS)[block]}"
    writer.add_tensor(f"{target}.{end}", data, raw_dtype=kind)
    back = gguf.quants.dequantize(data, kind).astype(np.float32).reshape(value.shape)
    if arch == "llama" and heads:
        back = back.reshape(heads, -1, 2, back.shape[1]).swapaxes(1, 2).reshape(back.shape)
    return back - 1 if arch == "gemma3" and "norm" in part else back
