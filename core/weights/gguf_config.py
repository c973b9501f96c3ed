"""What a GGUF file says about its model, in the words of a Hugging Face config.json, and its tensors' canonical names.

Sources: the GGUF document (keys, tensor names) and, for what files do not store, the defaults of each architecture's
published configuration. Keys that are absent stay absent: the model definitions say what they miss.
"""
from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError, shown

MAX_LAYERS = 4096
_INT_MAX = 2**31 - 1


class Arch(NamedTuple):
    """How one GGUF architecture appears as a Hugging Face model.

    permuted:   rows of q and k are interleaved pairs and must be put back into halves.
    norms_include_one: norm weights are stored as 1 + w.
    """

    model_type: str
    architecture: str
    permuted: bool = False
    norms_include_one: bool = False


ARCHS: dict[str, Arch] = {
    "llama": Arch("llama", "LlamaForCausalLM", permuted=True),
    "qwen2": Arch("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Arch("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": Arch("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": Arch("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma3": Arch("gemma3_text", "Gemma3ForCausalLM", norms_include_one=True),
}
# The architecture name "llama" also covers models whose Hugging Face type differs.
_MIXTRAL = Arch("mixtral", "MixtralForCausalLM", permuted=True)
_MISTRAL = Arch("mistral", "MistralForCausalLM", permuted=True)

# GGUF key after "<arch>." -> (config key, kind of value)
_KEYS = {
    "context_length": ("max_position_embeddings", int), "embedding_length": ("hidden_size", int),
    "block_count": ("num_hidden_layers", int), "feed_forward_length": ("intermediate_size", int),
    "attention.head_count": ("num_attention_heads", int), "attention.head_count_kv": ("num_key_value_heads", int),
    "attention.key_length": ("head_dim", int), "attention.layer_norm_rms_epsilon": ("rms_norm_eps", float),
    "attention.sliding_window": ("sliding_window", int), "rope.freq_base": ("rope_theta", float),
    "rope.freq_base_swa": ("rope_local_base_freq", float),
    "attn_logit_softcapping": ("attn_logit_softcapping", float),
    "final_logit_softcapping": ("final_logit_softcapping", float),
    "expert_count": ("num_experts", int), "expert_used_count": ("num_experts_per_tok", int),
    "expert_feed_forward_length": ("moe_intermediate_size", int),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size", int),
}

_WHOLE = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.experts.gate_proj", "ffn_up_exps": "mlp.experts.up_proj",
    "ffn_down_exps": "mlp.experts.down_proj", "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj", "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_BLOCK_OF = {
    "gemma3_text": {"post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
                    "post_ffw_norm": "post_feedforward_layernorm"},
    "mixtral": {"ffn_gate_inp": "block_sparse_moe.gate", "ffn_gate_exps": "block_sparse_moe.experts.w1",
                "ffn_down_exps": "block_sparse_moe.experts.w2", "ffn_up_exps": "block_sparse_moe.experts.w3"},
}
_NAME = re.compile(r"(?:blk\.(?P<layer>\d{1,4})\.)?(?P<part>\w+)\.(?P<end>weight|bias)")


def arch_of(metadata: Mapping[str, Any]) -> Arch:
    """The architecture; one that is not in `ARCHS` keeps its own name as the model type."""
    name = metadata.get("general.architecture")
    if not isinstance(name, str) or not name:
        raise CheckpointError(f"general.architecture is {shown(name)}: this GGUF file does not say which model it "
                              "holds")
    if name != "llama":
        return ARCHS.get(name, Arch(name, name))
    if metadata.get("llama.expert_count"):
        return _MIXTRAL
    return _MISTRAL if metadata.get("llama.attention.sliding_window") else ARCHS["llama"]


def canonical_name(name: str, model_type: str) -> str:
    """Hugging Face name of a GGUF tensor; a name without one stays as it is. Stacked experts stay stacked."""
    match = _NAME.fullmatch(name)
    if not match:
        return name
    part, end = match["part"], match["end"]
    if match["layer"] is None:
        return f"{_WHOLE[part]}.{end}" if part in _WHOLE else name
    new = _BLOCK_OF.get(model_type, {}).get(part) or _BLOCK.get(part)
    return f"model.layers.{int(match['layer'])}.{new}.{end}" if new else name


def heads_key(name: str) -> str | None:
    """The config key with the number of heads that share the rows of q or k; None for other tensors."""
    match = _NAME.fullmatch(name)
    if not match or match["layer"] is None:
        return None
    return {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}.get(match["part"])


def translate(metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]],
              factors: np.ndarray | None = None) -> dict[str, Any]:
    """Metadata -> config.

    shapes: of the tensors by GGUF name, as far as there are any.
    factors: `rope_freqs.weight`, divisors of the angular frequencies (float32 [head_dim / 2]), where there is one.
    Raises `CheckpointError` for a value of the wrong type or out of range.
    """
    arch, prefix = arch_of(metadata), metadata["general.architecture"]
    config: dict[str, Any] = {"model_type": arch.model_type, "architectures": [arch.architecture]}
    for key, (word, kind) in _KEYS.items():
        value = metadata.get(f"{prefix}.{key}")
        if value is not None:
            config[word] = _checked(f"{prefix}.{key}", value, kind)
    if not config.get("sliding_window", 1):  # 0 is how files say that there is none
        del config["sliding_window"]
    layers = config.get("num_hidden_layers", 0)
    if layers > MAX_LAYERS:
        raise CheckpointError(f"{prefix}.block_count is {layers}, at most {MAX_LAYERS} is possible")
    heads = config.get("num_attention_heads")
    if heads:
        config.setdefault("num_key_value_heads", heads)
        if "hidden_size" in config:
            config.setdefault("head_dim", config["hidden_size"] // heads)
    _vocabulary(config, metadata, shapes)
    if shapes:
        config["tie_word_embeddings"] = "output.weight" not in shapes
        config["attention_bias"] = "blk.0.attn_q.bias" in shapes
        config["mlp_bias"] = "blk.0.ffn_gate.bias" in shapes
    _rope(config, metadata, prefix)
    if factors is not None:
        config["rope_freq_factors"] = [_decimal(x) for x in factors.tolist()]
    _DEFAULTS.get(arch.model_type, _silu)(config, metadata)
    return config


def _checked(key: str, value: Any, kind: type) -> Any:
    """An int from 0 up, or a finite float; a per-layer list counts when all its values are equal."""
    if isinstance(value, list) and value and all(v == value[0] for v in value):
        value = value[0]
    if kind is int and type(value) is int and 0 <= value <= _INT_MAX:
        return value
    if kind is float and type(value) in (int, float) and math.isfinite(value):
        return _decimal(value)
    found = shown(value) if not isinstance(value, list) else f"a list of {len(value)} differing values"
    raise CheckpointError(f"{key} is {found}; it must be " +
                          (f"an integer from 0 to {_INT_MAX}" if kind is int else "a finite number"))


def _decimal(value: float) -> float:
    """The shortest decimal that rounds to the stored float32: 1e-06 was written, not 9.999999974752427e-07."""
    return float(str(np.float32(value))) if float(np.float32(value)) == value else float(value)


def _vocabulary(config: dict[str, Any], metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Vocabulary size (rows of the embedding, padding included) and special ids."""
    tokens = metadata.get("tokenizer.ggml.tokens")
    if shapes.get("token_embd.weight"):
        config["vocab_size"] = shapes["token_embd.weight"][0]
    elif isinstance(tokens, list):
        config["vocab_size"] = len(tokens)
    for key, word in (("bos", "bos_token_id"), ("padding", "pad_token_id"), ("eos", "eos_token_id")):
        value = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if value is not None:
            config[word] = _checked(f"tokenizer.ggml.{key}_token_id", value, int)
    ends = [metadata.get(f"tokenizer.ggml.{key}_token_id") for key in ("eos", "eot", "eom")]
    ends = list(dict.fromkeys(i for i in ends if type(i) is int and 0 <= i <= _INT_MAX))
    if len(ends) > 1:
        config["eos_token_id"] = ends


def _rope(config: dict[str, Any], metadata: Mapping[str, Any], prefix: str) -> None:
    """`rope_scaling` and `partial_rotary_factor`, where the file has them."""
    def read(key: str, kind: type = float) -> Any:
        value = metadata.get(f"{prefix}.rope.{key}")
        return None if value is None else _checked(f"{prefix}.rope.{key}", value, kind)

    size, head_dim = read("dimension_count", int), config.get("head_dim")
    if size and head_dim and size != head_dim:
        config["partial_rotary_factor"] = size / head_dim
    factor = read("scaling.factor") or read("scale_linear")
    kind = metadata.get(f"{prefix}.rope.scaling.type", "linear" if factor else "none")
    if not isinstance(kind, str):
        raise CheckpointError(f"{prefix}.rope.scaling.type must be a string, not {shown(kind)}")
    if kind in ("none", "") or not factor:
        return
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    for key, word, of in (("original_context_length", "original_max_position_embeddings", int),
                          ("yarn_beta_fast", "beta_fast", float), ("yarn_beta_slow", "beta_slow", float)):
        if read(f"scaling.{key}", of) is not None:
            scaling[word] = read(f"scaling.{key}", of)
    sharpen = read("scaling.attn_factor") or read("scaling.yarn_attn_factor")
    if kind == "yarn" and sharpen and factor > 1:
        # ggml multiplies YaRN's own factor by this one; a config's attention_factor replaces it.
        scaling["attention_factor"] = sharpen * (1 + 0.1 * math.log(factor))
    config["rope_scaling"] = scaling


def _silu(config: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    config.setdefault("hidden_act", "silu")


def _mixtral(config: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    _silu(config, metadata)
    config["num_local_experts"] = config.pop("num_experts")


def _qwen3_moe(config: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    _silu(config, metadata)
    config.setdefault("norm_topk_prob", True)


def _gemma3(config: dict[str, Any], metadata: Mapping[str, Any]) -> None:
    """Files lack the activation, the local RoPE base, the window pattern and the attention scale."""
    config["hidden_activation"] = "gelu_pytorch_tanh"
    config.setdefault("rope_theta", 1_000_000.0)
    config.setdefault("rope_local_base_freq", 10_000.0)
    pattern = _checked("gemma3.attention.sliding_window_pattern",
                       metadata.get("gemma3.attention.sliding_window_pattern", 6), int) or 1
    layers = config.get("num_hidden_layers", 0)
    config["layer_types"] = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(layers)]
    # The 27B model (62 layers) divides by the width per head, all others by the head's own size.
    wide = layers == 62 and config.get("hidden_size") and config.get("num_attention_heads")
    scalar = config["hidden_size"] // config["num_attention_heads"] if wide else config.get("head_dim")
    if scalar:
        config["query_pre_attn_scalar"] = scalar


_DEFAULTS: dict[str, Callable[[dict[str, Any], Mapping[str, Any]], None]] = {
    "gemma3_text": _gemma3, "mixtral": _mixtral, "qwen3_moe": _qwen3_moe,
}
