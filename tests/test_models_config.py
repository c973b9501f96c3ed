"""What a configuration becomes, and what is refused."""
from __future__ import annotations

import pytest
from isthmus.core.errors import CheckpointError
from isthmus.core.models.architectures import ARCHITECTURES, find_architecture
from isthmus.core.models.config import ModelConfig, Sparse, parse_config
from isthmus.core.specs import LayerState, MoESpec

LLAMA = {"model_type": "llama", "vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "max_position_embeddings": 512,
         "hidden_act": "silu", "eos_token_id": 3}
# The published Gemma 3 1B configuration, where it differs from the type's defaults.
GEMMA = {"model_type": "gemma3_text", "hidden_size": 1152, "intermediate_size": 6912, "num_hidden_layers": 26,
         "num_attention_heads": 4, "num_key_value_heads": 1, "sliding_window": 512, "vocab_size": 262144,
         "max_position_embeddings": 32768, "rope_theta": 1000000, "rope_local_base_freq": 10000}


def parse(config: dict) -> ModelConfig:
    architecture, settings = find_architecture(config)
    return parse_config(settings, architecture.family, "name")


def windows(config: dict) -> list[int | None]:
    return [spec.window for spec in parse(config).attention]


def test_llama():
    config = parse(LLAMA)
    assert (config.layers, config.hidden, config.head_dim, config.max_position) == (2, 64, 16, 512)
    assert config.state_layers == (LayerState(2, 16),) * 2
    assert config.attention[0].scale == 0.25 and config.attention[0].softcap is None
    assert config.eos_ids == (3,) and not config.tied and config.embed_scale == 1.0
    assert windows(LLAMA | {"sliding_window": 8}) == [None, None], "transformers ignores the key for this type"


def test_layers_alike_share_their_descriptions():
    config = parse(GEMMA)
    assert len({id(r) for r in config.rope}) == 2 and len({id(a) for a in config.attention}) == 2


def test_gemma():
    config = parse(GEMMA)
    assert windows(GEMMA) == ([512] * 5 + [None]) * 4 + [512] * 2
    assert config.head_dim == 256 and config.attention[0].scale == 1 / 16
    assert config.tied and config.act == "gelu_tanh" and config.embed_scale == 1152**0.5
    assert config.rope[0].inv_freq[1] == pytest.approx(10000 ** (-1 / 128))
    assert config.rope[5].inv_freq[1] == pytest.approx(1e6 ** (-1 / 128))
    assert config.norms_add_one and config.qk_norm


def test_gemma_of_text_and_images_is_read_from_its_text_part():
    text = {k: v for k, v in GEMMA.items() if k not in ("vocab_size", "num_attention_heads", "num_key_value_heads")}
    config = parse({"model_type": "gemma3", "text_config": text, "eos_token_id": [1, 106]})
    assert (config.heads, config.kv_heads, config.vocab_size) == (8, 4, 262208), "defaults of the type"
    assert config.eos_ids == (1, 106)


def test_mistral_windows_everywhere_or_nowhere():
    mistral = LLAMA | {"model_type": "mistral"}
    assert windows(mistral | {"sliding_window": 8}) == [8, 8]
    assert windows(mistral | {"sliding_window": None}) == [None, None]


def test_qwen_windows_from_a_layer_on():
    qwen = LLAMA | {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 1}
    assert windows(qwen | {"use_sliding_window": True}) == [None, 8]
    assert windows(qwen | {"use_sliding_window": False}) == [None, None]
    assert windows(qwen) == [None, None]
    assert windows(qwen | {"layer_types": ["sliding_attention", "full_attention"]}) == [8, None]


SPARSE = LLAMA | {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 48,
                  "shared_expert_intermediate_size": 80, "norm_topk_prob": True}


def test_routing_by_type():
    mixtral = parse(LLAMA | {"model_type": "mixtral", "num_local_experts": 4, "sliding_window": 8})
    assert mixtral.sparse == Sparse(MoESpec(4, 2), (True, True), 96, 0) and mixtral.attention[0].window == 8
    qwen2 = parse(SPARSE | {"model_type": "qwen2_moe", "norm_topk_prob": None})
    assert qwen2.sparse == Sparse(MoESpec(8, 3, renormalize=False), (True, True), 48, 80) and qwen2.qkv_bias
    qwen3 = parse(SPARSE | {"model_type": "qwen3_moe"})
    assert qwen3.sparse == Sparse(MoESpec(8, 3), (True, True), 48, 0) and qwen3.qk_norm
    assert parse(SPARSE | {"model_type": "llama"}).sparse is None


DEEPSEEK = {"n_routed_experts": 12, "num_experts_per_tok": 4, "moe_intermediate_size": 48, "n_shared_experts": 2}


def test_routing_in_groups_by_scores_with_a_bias():
    glm = parse(LLAMA | DEEPSEEK | {"model_type": "glm4_moe", "n_group": 3, "topk_group": 2,
                                    "routed_scaling_factor": 2.5})
    assert glm.sparse == Sparse(MoESpec(12, 4, "sigmoid", scale=2.5, groups=3, top_groups=2), (False, True), 48, 96,
                                gated=False, bias=True)
    assert len(glm.rope[0].inv_freq) == 4 and glm.head_dim == 16 and glm.rope[0].inv_freq[1] == 10000 ** -0.25
    assert glm.drafts == 1 and glm.eps == 1e-5 and glm.per_rank(2).sparse.shared == 48
    dots = parse(LLAMA | DEEPSEEK | {"model_type": "dots1", "n_group": None, "sliding_window": 8,
                                     "max_window_layers": 1, "scoring_func": "noaux_tc"})
    assert dots.sparse == Sparse(MoESpec(12, 4, "sigmoid", False), (True, True), 48, 96, gated=False, bias=True)
    assert [spec.window for spec in dots.attention] == [None, 8] and len(dots.rope[0].inv_freq) == 8


@pytest.mark.parametrize("keys, layers", [
    ({}, [0, 1, 2, 3, 4, 5]), ({"decoder_sparse_step": 2}, [1, 3, 5]), ({"decoder_sparse_step": 7}, []),
    ({"mlp_only_layers": [0, 5, 9]}, [1, 2, 3, 4]), ({"decoder_sparse_step": 3, "mlp_only_layers": [2]}, [5])])
def test_which_layers_are_sparse(keys, layers):
    sparse = parse(SPARSE | {"model_type": "qwen3_moe", "num_hidden_layers": 6} | keys).sparse
    assert [i for i, yes in enumerate(sparse.layers) if yes] == layers


def test_windows_of_sparse_qwen():
    qwen = SPARSE | {"num_hidden_layers": 5, "sliding_window": 8, "max_window_layers": 4, "use_sliding_window": True}
    assert windows(qwen | {"model_type": "qwen2_moe"}) == [8, None, 8, None, None]
    assert windows(qwen | {"model_type": "qwen3_moe"}) == [8] * 5
    for kind in ("qwen2_moe", "qwen3_moe"):
        assert windows(qwen | {"model_type": kind, "use_sliding_window": False}) == [None] * 5


def test_one_rank_of_many():
    config = parse(SPARSE | {"model_type": "qwen2_moe", "decoder_sparse_step": 2})
    rank = config.per_rank(2)
    assert (rank.heads, rank.kv_heads, rank.intermediate, rank.sparse.width, rank.sparse.shared) == (2, 1, 48, 24, 40)
    assert rank.state_layers == (LayerState(1, 16),) * 2 and rank.sparse.spec.experts == 8
    assert (rank.hidden, rank.head_dim, rank.vocab_size) == (64, 16, 128) and config.per_rank(1) == config


@pytest.mark.parametrize("kind, change, world, words", [
    ("llama", {}, 3, "attention heads, 4,"), ("llama", {}, 4, "key and value heads, 2,"),
    ("llama", {"intermediate_size": 97}, 2, "feed-forward's width, 97,"),
    ("qwen3_moe", {"moe_intermediate_size": 49}, 2, "an expert's width, 49,"),
    ("qwen2_moe", {"shared_expert_intermediate_size": 81}, 2, "the shared expert's width, 81,"),
    ("qwen3_moe", {"intermediate_size": 97, "mlp_only_layers": [1]}, 2, "feed-forward's width, 97,")])
def test_what_ranks_cannot_share_is_named_with_its_number(kind, change, world, words):
    with pytest.raises(CheckpointError, match=f"--tensor-parallel-size {world}: .*{words} cannot be shared evenly"):
        parse(SPARSE | {"model_type": kind} | change).per_rank(world)
    every = parse(SPARSE | {"model_type": "qwen3_moe", "intermediate_size": 97})
    assert every.per_rank(2).sparse.width == 24, "no layer uses the dense width"


@pytest.mark.parametrize("heads, kv_heads, width, words", [
    (9, 3, 1536, "attention heads, 9, cannot be shared evenly; 3 would do"),
    (12, 6, 96, "attention heads, 12, cannot be shared evenly; 2, 3 or 6 would do"),
    (8, 4, 96, "attention heads, 8, cannot be shared evenly; 2 or 4 would do"),
    (7, 1, 96, "attention heads, 7, cannot be shared evenly; leave it out: no number of ranks can share this model")])
def test_which_numbers_of_ranks_would_do(heads, kv_heads, width, words):
    config = parse(LLAMA | {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 16,
                            "intermediate_size": width})
    with pytest.raises(CheckpointError, match=f"--tensor-parallel-size 5: {words}$"):
        config.per_rank(5)


def test_biases_and_norms_by_type():
    flags = {name: (c.qkv_bias, c.o_bias, c.qk_norm) for name, c in
             ((name, parse(SPARSE | DEEPSEEK | {"model_type": name, "attention_bias": True}))
              for name in ARCHITECTURES)}
    assert flags == {"llama": (True, True, False), "mistral": (False, False, False), "qwen2": (True, False, False),
                     "qwen3": (True, True, True), "gemma3_text": (True, True, True), "mixtral": (False, False, False),
                     "qwen2_moe": (True, False, False), "qwen3_moe": (True, True, True),
                     "glm4_moe": (True, False, False), "dots1": (True, True, True)}
    assert not parse(LLAMA).qkv_bias
    assert parse(LLAMA | DEEPSEEK | {"model_type": "glm4_moe", "use_qk_norm": True}).qk_norm


def test_longrope_is_limited_to_the_length_where_its_short_factors_hold():
    scaling = {"rope_type": "longrope", "factor": 4.0, "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
    assert parse(LLAMA | {"original_max_position_embeddings": 128, "rope_scaling": scaling}).max_position == 128


def test_eos_ids_outside_the_vocabulary_are_dropped():
    assert parse(LLAMA | {"eos_token_id": [5, 3, 3, 128, -1]}).eos_ids == (3, 5)
    assert parse(LLAMA | {"eos_token_id": None}).eos_ids == ()


def test_unknown_model_type_lists_the_known():
    with pytest.raises(CheckpointError, match="'gpt2'.*dots1, gemma3_text, glm4_moe, llama, mistral, mixtral, qwen2"):
        parse(LLAMA | {"model_type": "gpt2"})
    with pytest.raises(CheckpointError, match="None"):
        parse({})


@pytest.mark.parametrize("change,words", [
    ({"vocab_size": None}, ["vocab_size"]),
    ({"hidden_size": "64"}, ["hidden_size", "'64'"]),
    ({"hidden_size": 64.5}, ["hidden_size", "64.5"]),
    ({"hidden_size": True}, ["hidden_size", "True"]),
    ({"num_hidden_layers": 0}, ["num_hidden_layers", "0"]),
    ({"num_hidden_layers": 10**9}, ["num_hidden_layers", "4096"]),
    ({"vocab_size": 10**12}, ["vocab_size", "1000000000000"]),
    ({"max_position_embeddings": 10**400}, ["max_position_embeddings", "1000000"]),
    ({"rms_norm_eps": 10**400}, ["rms_norm_eps", "1000000"]),
    ({"num_key_value_heads": 3}, ["num_key_value_heads", "3", "4"]),
    ({"num_attention_heads": 5, "num_key_value_heads": 5}, ["num_attention_heads", "5", "64"]),
    ({"hidden_act": "relu"}, ["hidden_act", "'relu'", "silu"]),
    ({"rms_norm_eps": -1e-5}, ["rms_norm_eps", "-1e-05"]),
    ({"rms_norm_eps": float("inf")}, ["rms_norm_eps", "inf"]),
    ({"tie_word_embeddings": 1}, ["tie_word_embeddings", "1"]),
    ({"layer_types": ["full_attention"]}, ["layer_types", "2"]),
    ({"layer_types": ["full_attention", "linear_attention"]}, ["layer_types[1]", "'linear_attention'"]),
    ({"layer_types": ["full_attention", "sliding_attention"]}, ["sliding_window"]),
    ({"eos_token_id": "2"}, ["eos_token_id", "'2'"]),
    ({"use_bidirectional_attention": True}, ["use_bidirectional_attention"]),
    ({"max_position_embeddings": -4}, ["max_position_embeddings", "-4"]),
    ({"query_pre_attn_scalar": 0}, ["query_pre_attn_scalar", "0"]),
    ({"model_type": "mixtral"}, ["lacks 'num_experts'"]),
    ({"model_type": "mixtral", "num_local_experts": 10**9}, ["num_local_experts", "1000000000", "4096"]),
    ({"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 3}, ["num_experts_per_tok", "1 to 2"]),
    ({"model_type": "qwen3_moe", "num_experts": 4}, ["lacks 'moe_intermediate_size'"]),
    ({"model_type": "qwen3_moe", "num_experts": 4, "mlp_only_layers": 3}, ["mlp_only_layers", "3", "list"]),
    ({"model_type": "qwen3_moe", "num_experts": 4, "decoder_sparse_step": 0}, ["decoder_sparse_step", "0"]),
    ({"model_type": "qwen2_moe", "num_experts": 4, "moe_intermediate_size": 8}, ["shared_expert_intermediate_size"]),
    ({"model_type": "dots1"}, ["lacks 'n_routed_experts'"]),
    (DEEPSEEK | {"model_type": "dots1", "n_shared_experts": None}, ["lacks 'n_shared_experts'"]),
    (DEEPSEEK | {"model_type": "dots1", "n_group": 5}, ["n_group", "5", "divisor of n_routed_experts = 12"]),
    (DEEPSEEK | {"model_type": "dots1", "n_group": 12}, ["n_group", "12", "2 or more in a group"]),
    (DEEPSEEK | {"model_type": "dots1", "n_group": 3, "topk_group": 4}, ["topk_group", "4", "1 to 3"]),
    (DEEPSEEK | {"model_type": "glm4_moe", "n_group": 4, "topk_group": 1}, ["num_experts_per_tok", "4", "1 to 3"]),
    (DEEPSEEK | {"model_type": "glm4_moe", "scoring_func": "softmax"}, ["scoring_func", "'softmax'", "sigmoid"]),
    (DEEPSEEK | {"model_type": "dots1", "topk_method": "greedy"}, ["topk_method", "'greedy'", "noaux_tc"]),
    (DEEPSEEK | {"model_type": "glm4_moe", "first_k_dense_replace": -1}, ["first_k_dense_replace", "-1"]),
    (DEEPSEEK | {"model_type": "glm4_moe", "partial_rotary_factor": 0.2}, ["partial_rotary_factor", "0.2", "even"]),
    (DEEPSEEK | {"model_type": "dots1", "partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5", "must be 1"]),
    (DEEPSEEK | {"model_type": "glm4_moe", "num_nextn_predict_layers": "one"}, ["num_nextn_predict_layers", "'one'"]),
])
def test_errors_name_key_and_value(change, words):
    with pytest.raises(CheckpointError) as error:
        parse(LLAMA | change)
    for word in words:
        assert word in str(error.value)
