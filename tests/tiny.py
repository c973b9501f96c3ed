"""Tiny random models made by `transformers`, saved once per session as Hugging Face folders."""
from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from pathlib import Path

import torch
import transformers

BASE = dict(vocab_size=131, hidden_size=64, intermediate_size=112, num_hidden_layers=3, num_attention_heads=4,
            num_key_value_heads=2, max_position_embeddings=256, rms_norm_eps=1e-5, eos_token_id=1, bos_token_id=2,
            pad_token_id=0, attn_implementation="eager")
LLAMA3_ROPE = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
               "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
YARN_ROPE = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64}
PARTIAL_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
DEEPSEEK = dict(n_routed_experts=12, num_experts_per_tok=3, moe_intermediate_size=64, n_shared_experts=2,
                first_k_dense_replace=1)
MOE = dict(num_experts=6, num_experts_per_tok=3, moe_intermediate_size=64)

# name -> (configuration class, what differs from BASE)
KINDS: dict[str, tuple[str, dict]] = {
    "llama2": ("LlamaConfig", dict(num_key_value_heads=4)),
    "llama3": ("LlamaConfig", dict(rope_parameters=LLAMA3_ROPE, tie_word_embeddings=True)),
    "llama-bias": ("LlamaConfig", dict(attention_bias=True, mlp_bias=True, rope_parameters=YARN_ROPE)),
    "mistral": ("MistralConfig", dict(sliding_window=7, head_dim=24)),
    "qwen2": ("Qwen2Config", dict(tie_word_embeddings=True)),
    "qwen2-window": ("Qwen2Config", dict(use_sliding_window=True, sliding_window=6, max_window_layers=1)),
    "qwen3": ("Qwen3Config", dict(head_dim=32)),
    "mixtral": ("MixtralConfig", dict(num_local_experts=5, sliding_window=9)),
    "qwen2-moe": ("Qwen2MoeConfig", dict(
        num_hidden_layers=4, **MOE, norm_topk_prob=False, decoder_sparse_step=2, shared_expert_intermediate_size=80,
        use_sliding_window=True, sliding_window=6)),
    "qwen3-moe": ("Qwen3MoeConfig", dict(head_dim=32, **MOE, norm_topk_prob=True, mlp_only_layers=[1])),
    "qwen3-moe-raw": ("Qwen3MoeConfig", dict(head_dim=32, **MOE, norm_topk_prob=False, tie_word_embeddings=True,
                                             use_sliding_window=True, sliding_window=7)),
    "glm4-moe": ("Glm4MoeConfig", dict(
        head_dim=32, **DEEPSEEK, n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=1.7,
        use_qk_norm=True, attention_bias=True, rope_parameters=PARTIAL_ROPE)),
    "glm4-moe-air": ("Glm4MoeConfig", dict(
        **DEEPSEEK, norm_topk_prob=False, tie_word_embeddings=True,
        rope_parameters=YARN_ROPE | {"partial_rotary_factor": 0.25})),
    "dots1": ("Dots1Config", dict(
        **DEEPSEEK, n_group=3, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.5, sliding_window=7,
        max_window_layers=1)),
    "gemma3": ("Gemma3TextConfig", dict(
        head_dim=32, num_hidden_layers=4, sliding_window=6, query_pre_attn_scalar=24, final_logit_softcapping=20.0,
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters={"full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}})),
}
# Sparse in every layer, as GGUF files have it.
GGUF_KINDS: dict[str, tuple[str, dict]] = {
    "qwen2-moe-every": ("Qwen2MoeConfig", dict(**MOE, norm_topk_prob=False, shared_expert_intermediate_size=64)),
    "qwen3-moe-every": ("Qwen3MoeConfig", dict(head_dim=32, **MOE, norm_topk_prob=True)),
}


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="isthmus-tiny-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def tiny_model(kind: str) -> Path:
    """Folder of the model called `kind` in `KINDS`, with config.json and model.safetensors in float32."""
    hf_model(kind).save_pretrained(_root() / kind)
    return _root() / kind


@functools.cache
def hf_model(kind: str) -> transformers.PreTrainedModel:
    """The same model in `transformers`, float32. Every weight is random, norms and biases too: nothing cancels out."""
    class_name, changes = (KINDS | GGUF_KINDS)[kind]
    config = getattr(transformers, class_name)(**BASE | changes)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    draw = torch.Generator().manual_seed(sum(map(ord, kind)))
    with torch.no_grad():
        biases = [pair for pair in model.named_buffers() if pair[0].endswith("e_score_correction_bias")]
        for name, weight in [*model.named_parameters(), *biases]:
            if "norm" in name:
                weight.add_(torch.randn(weight.shape, generator=draw) * 0.2)
            elif weight.ndim == 1:
                weight.copy_(torch.randn(weight.shape, generator=draw) * 0.5)
            elif "embed" not in name:
                weight.copy_(torch.randn(weight.shape, generator=draw) * 1.5 * weight.shape[1] ** -0.5)
            else:
                weight.copy_(torch.randn(weight.shape, generator=draw) * 0.5)
    return model


@torch.no_grad()
def hf_logits(kind: str, tokens: list[int]) -> torch.Tensor:
    """Logits of every position, float32 [len(tokens), vocabulary], from one whole prefill without a cache."""
    return hf_model(kind)(torch.tensor([tokens]), use_cache=False).logits[0]
