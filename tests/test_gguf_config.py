"""What GGUF metadata means in the words of a Hugging Face configuration."""
import math

import numpy as np
import pytest
from isthmus.core.errors import CheckpointError
from isthmus.core.weights.checkpoint import open_checkpoint
from isthmus.core.weights.gguf_config import arch_of, canonical_name, translate

from .checkpoints import tiny_llama_config, tiny_llama_gguf, write_gguf

ONE = np.ones(1, np.float32)


def base(arch: str, **more) -> dict:
    """Metadata of a small model; keys of `more` are `__` for a dot."""
    keys = {"block_count": 12, "embedding_length": 640, "context_length": 4096, "feed_forward_length": 2048,
            "attention.head_count": 4, "attention.head_count_kv": 1, "rope.freq_base": 1e6,
            "attention.layer_norm_rms_epsilon": float(np.float32(1e-6))}
    keys |= {k.replace("__", "."): v for k, v in more.items()}
    return {"general.architecture": arch} | {f"{arch}.{k}": v for k, v in keys.items() if v is not None}


def test_the_tiny_llama_says_what_its_folder_says(tmp_path):
    config = open_checkpoint(tiny_llama_gguf(tmp_path / "tiny.gguf")).config
    want = tiny_llama_config() | {"head_dim": 8, "attention_bias": False, "mlp_bias": False}
    assert config == want


def test_a_float32_becomes_the_decimal_that_was_meant():
    config = translate(base("llama", rope__freq_base=float(np.float32(0.1))), {})
    assert (config["rms_norm_eps"], config["rope_theta"]) == (1e-6, 0.1)


def test_gemma3_gets_what_its_files_lack():
    config = translate(base("gemma3", attention__key_length=256, attention__sliding_window=512), {})
    assert config["model_type"] == "gemma3_text"
    assert (config["head_dim"], config["query_pre_attn_scalar"]) == (256, 256)  # not 640 / 4
    assert (config["rope_theta"], config["rope_local_base_freq"]) == (1e6, 1e4)
    assert config["layer_types"] == (["sliding_attention"] * 5 + ["full_attention"]) * 2
    assert (config["sliding_window"], config["hidden_activation"]) == (512, "gelu_pytorch_tanh")


def test_gemma3_27b_scales_attention_by_its_width_per_head():
    config = translate(base("gemma3", block_count=62, embedding_length=5376, attention__head_count=32,
                            attention__key_length=128), {})
    assert config["query_pre_attn_scalar"] == 168


def test_gemma3_files_that_do_store_pattern_and_bases_are_believed():
    config = translate(base("gemma3", block_count=4, attention__sliding_window_pattern=2, rope__freq_base_swa=500.0,
                            rope__scaling__type="linear", rope__scaling__factor=8.0), {})
    assert config["layer_types"] == ["sliding_attention", "full_attention"] * 2
    assert config["rope_local_base_freq"] == 500.0
    assert config["rope_scaling"] == {"rope_type": "linear", "factor": 8.0}


def test_norms_that_include_one_are_gemmas_only(tmp_path):
    for arch, expected in (("gemma3", True), ("llama", False), ("qwen3", False)):
        path = write_gguf(tmp_path / f"{arch}.gguf", base(arch), {"output_norm.weight": ONE})
        assert open_checkpoint(path).norms_include_one is expected


def test_llama_3_factors_become_a_list_and_are_no_tensor(tmp_path):
    factors = np.array([1, 1, 2.5, 8], np.float32)
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", base("llama", embedding_length=32),
                                            {"rope_freqs.weight": factors, "output.weight": ONE}))
    assert checkpoint.config["rope_freq_factors"] == [1.0, 1.0, 2.5, 8.0]
    assert checkpoint.names == {"lm_head.weight"}
    assert checkpoint.config["tie_word_embeddings"] is False


@pytest.mark.parametrize("factors", [np.ones((2, 2), np.float32), np.array([0, 1], np.float32),
                                     np.array([np.nan], np.float32), np.ones(4, np.float16)])
def test_impossible_factors_are_refused(tmp_path, factors):
    path = write_gguf(tmp_path / "m.gguf", base("llama"), {"rope_freqs.weight": factors})
    with pytest.raises(CheckpointError, match="rope_freqs.weight"):
        open_checkpoint(path)


@pytest.mark.parametrize("keys, want", [
    ({}, None),
    ({"rope__scale_linear": 4.0}, {"rope_type": "linear", "factor": 4.0}),
    ({"rope__scaling__type": "none", "rope__scaling__factor": 4.0}, None),
    ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__original_context_length": 32768},
     {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}),
    ({"rope__scaling__type": "yarn", "rope__scaling__factor": 4.0, "rope__scaling__attn_factor": 0.5,
      "rope__scaling__yarn_beta_fast": 16.0},
     {"rope_type": "yarn", "factor": 4.0, "beta_fast": 16.0, "attention_factor": 0.5 * (1 + 0.1 * math.log(4))}),
])
def test_rope_scaling(keys, want):
    assert translate(base("qwen2", **keys), {}).get("rope_scaling") == want


def test_partial_rotary_dimensions():
    assert translate(base("llama", rope__dimension_count=40), {})["partial_rotary_factor"] == 0.25
    assert "partial_rotary_factor" not in translate(base("llama", rope__dimension_count=160), {})


@pytest.mark.parametrize("arch, keys, model_type", [
    ("llama", {}, "llama"), ("llama", {"attention__sliding_window": 4096}, "mistral"),
    ("llama", {"attention__sliding_window": 0}, "llama"), ("llama", {"expert_count": 8}, "mixtral"),
    ("llama", {"expert_count": 0}, "llama"), ("qwen2", {}, "qwen2"), ("qwen3", {}, "qwen3"),
    ("qwen3moe", {}, "qwen3_moe"), ("gemma3", {}, "gemma3_text"), ("falcon", {}, "falcon")])
def test_model_types(arch, keys, model_type):
    config = translate(base(arch, **keys), {})
    assert config["model_type"] == model_type == arch_of(base(arch, **keys)).model_type
    assert config.get("sliding_window") != 0


def test_experts():
    keys = {"expert_count": 8, "expert_used_count": 2}
    mixtral = translate(base("llama", **keys), {})
    assert (mixtral["num_local_experts"], mixtral["num_experts_per_tok"]) == (8, 2)
    qwen = translate(base("qwen3moe", expert_feed_forward_length=96, **keys), {})
    assert (qwen["num_experts"], qwen["moe_intermediate_size"], qwen["norm_topk_prob"]) == (8, 96, True)


def test_ids_that_end_a_text_are_collected_once():
    ids = {f"tokenizer.ggml.{k}_token_id": v for k, v in {"bos": 1, "eos": 2, "eot": 7, "eom": 2, "padding": 0}.items()}
    config = translate(base("llama") | ids, {})
    assert (config["bos_token_id"], config["eos_token_id"], config["pad_token_id"]) == (1, [2, 7], 0)


def test_the_vocabulary_is_as_large_as_the_embedding():
    tokens = {"tokenizer.ggml.tokens": ["a", "b", "c"]}
    assert translate(base("llama") | tokens, {})["vocab_size"] == 3
    assert translate(base("llama") | tokens, {"token_embd.weight": (64, 8)})["vocab_size"] == 64


def test_equal_values_per_layer_count_and_differing_ones_are_refused():
    assert translate(base("llama", attention__head_count=[4, 4, 4]), {})["num_attention_heads"] == 4
    with pytest.raises(CheckpointError, match="llama.attention.head_count is a list of 2 differing values"):
        translate(base("llama", attention__head_count=[4, 8]), {})


@pytest.mark.parametrize("keys, words", [
    ({"block_count": 2**40}, "llama.block_count is 1099511627776"), ({"block_count": 5000}, "at most 4096"),
    ({"embedding_length": "wide"}, "'wide'; it must be an integer"), ({"attention__head_count": True}, "True"),
    ({"rope__freq_base": math.inf}, "inf; it must be a finite number"), ({"embedding_length": -1}, "-1"),
    ({"context_length": []}, "context_length")])
def test_impossible_values_are_refused(keys, words):
    with pytest.raises(CheckpointError, match=words):
        translate(base("llama", **keys), {})


@pytest.mark.parametrize("metadata", [{}, {"general.architecture": 3}, {"general.architecture": ""}])
def test_a_file_without_architecture_is_refused(metadata):
    with pytest.raises(CheckpointError, match="general.architecture"):
        translate(metadata, {})


@pytest.mark.parametrize("name, model_type, want", [
    ("token_embd.weight", "llama", "model.embed_tokens.weight"), ("output_norm.weight", "llama", "model.norm.weight"),
    ("output.weight", "llama", "lm_head.weight"),
    ("blk.11.attn_q.bias", "qwen2", "model.layers.11.self_attn.q_proj.bias"),
    ("blk.0.attn_k_norm.weight", "qwen3", "model.layers.0.self_attn.k_norm.weight"),
    ("blk.0.attn_output.weight", "llama", "model.layers.0.self_attn.o_proj.weight"),
    ("blk.3.ffn_norm.weight", "llama", "model.layers.3.post_attention_layernorm.weight"),
    ("blk.3.ffn_norm.weight", "gemma3_text", "model.layers.3.pre_feedforward_layernorm.weight"),
    ("blk.3.post_attention_norm.weight", "gemma3_text", "model.layers.3.post_attention_layernorm.weight"),
    ("blk.3.post_ffw_norm.weight", "gemma3_text", "model.layers.3.post_feedforward_layernorm.weight"),
    ("blk.2.ffn_gate_exps.weight", "qwen3_moe", "model.layers.2.mlp.experts.gate_proj.weight"),
    ("blk.2.ffn_down_exps.weight", "mixtral", "model.layers.2.block_sparse_moe.experts.w2.weight"),
    ("blk.2.ffn_gate_inp.weight", "mixtral", "model.layers.2.block_sparse_moe.gate.weight"),
    ("blk.2.something.weight", "llama", "blk.2.something.weight"), ("odd", "llama", "odd")])
def test_canonical_names(name, model_type, want):
    assert canonical_name(name, model_type) == want
