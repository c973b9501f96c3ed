"""Angular frequencies against `transformers`, against the formulas, and both spellings of a configuration."""
from __future__ import annotations

import math

import numpy as np
import pytest
from isthmus.core.errors import CheckpointError
from isthmus.core.models.rope import rope_inv_freq
from transformers import Gemma3TextConfig, Glm4MoeConfig, LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeRotaryEmbedding

LLAMA_3_2 = {"head_dim": 64, "hidden_size": 2048, "num_attention_heads": 32, "rope_theta": 500000.0,
             "max_position_embeddings": 131072}
LLAMA3 = {"factor": 32.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0, "original_max_position_embeddings": 8192}
BASE = 500000.0 ** -(np.arange(0, 64, 2) / 64)
RULES = {
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "llama3": LLAMA3,
    "yarn": {"factor": 16.0, "original_max_position_embeddings": 8192},
    "yarn-untruncated": {"factor": 16.0, "original_max_position_embeddings": 8192, "truncate": False,
                         "beta_fast": 24, "beta_slow": 2},
    "yarn-mscale": {"factor": 40.0, "original_max_position_embeddings": 4096, "mscale": 0.8, "mscale_all_dim": 1.0},
    "yarn-given": {"factor": 4.0, "original_max_position_embeddings": 32768, "attention_factor": 0.9},
    "longrope": {"factor": 32.0, "original_max_position_embeddings": 4096,
                 "short_factor": [1.0 + i / 32 for i in range(32)], "long_factor": [4.0] * 32},
}


def test_default():
    inv_freq, factor = rope_inv_freq(LLAMA_3_2)
    assert inv_freq.dtype == np.float64 and factor == 1.0
    np.testing.assert_allclose(inv_freq, BASE, rtol=1e-12)


def test_theta_defaults_to_10000_and_head_dim_to_hidden_by_heads():
    inv_freq, _ = rope_inv_freq({"hidden_size": 64, "num_attention_heads": 8})
    np.testing.assert_allclose(inv_freq, [1, 0.1, 0.01, 0.001], rtol=1e-12)


@pytest.mark.parametrize("key", ["rope_type", "type"])
@pytest.mark.parametrize("place", ["rope_scaling", "rope_parameters"])
def test_llama3_has_three_regions(key, place):
    inv_freq, factor = rope_inv_freq(LLAMA_3_2 | {place: LLAMA3 | {key: "llama3"}})
    wavelength = 2 * math.pi / BASE
    smooth = (8192 / wavelength - 1) / (4 - 1)
    blended = (1 - smooth) * BASE / 32 + smooth * BASE
    want = np.where(wavelength < 2048, BASE, np.where(wavelength > 8192, BASE / 32, blended))
    np.testing.assert_allclose(inv_freq, want, rtol=1e-9)
    np.testing.assert_allclose(inv_freq[:15], BASE[:15], rtol=1e-9)
    np.testing.assert_allclose(inv_freq[18:] * 32, BASE[18:], rtol=1e-9)
    assert BASE[16] / 32 < inv_freq[16] < BASE[16] and factor == 1.0


@pytest.mark.parametrize("rule", RULES)
def test_rules_match_transformers(rule):
    params = {"rope_type": rule.partition("-")[0], "rope_theta": 500000.0} | RULES[rule]
    config = LlamaConfig(**LLAMA_3_2, rope_parameters=dict(params))
    want, want_factor = ROPE_INIT_FUNCTIONS[params["rope_type"]](config)
    inv_freq, factor = rope_inv_freq(LLAMA_3_2 | {"rope_parameters": params})
    np.testing.assert_allclose(inv_freq, want.double().numpy(), rtol=2e-6)
    assert factor == pytest.approx(want_factor, rel=1e-12)
    assert rule == "dynamic" or not np.allclose(inv_freq, BASE), "the rule changes nothing: it could be ignored unseen"


GEMMA_NEW = {"head_dim": 256, "max_position_embeddings": 32768, "rope_parameters": {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4}}}
GEMMA_OLD = {"head_dim": 256, "max_position_embeddings": 32768, "rope_theta": 1e6, "rope_local_base_freq": 1e4,
             "rope_scaling": {"rope_type": "linear", "factor": 8.0}}


@pytest.mark.parametrize("config", [GEMMA_NEW, GEMMA_OLD])
def test_gemma_layers_have_two_sets(config):
    rotary = Gemma3RotaryEmbedding(Gemma3TextConfig(**config))
    for kind in ("full_attention", "sliding_attention"):
        inv_freq, factor = rope_inv_freq(config, kind)
        np.testing.assert_allclose(inv_freq, getattr(rotary, f"{kind}_inv_freq").double().numpy(), rtol=2e-6)
        assert factor == 1.0


def test_gguf_factors_divide():
    factors = [1.0 + i for i in range(32)]
    inv_freq, _ = rope_inv_freq(LLAMA_3_2 | {"rope_freq_factors": factors})
    np.testing.assert_allclose(inv_freq, BASE / factors, rtol=1e-12)


@pytest.mark.parametrize("rule", ["default", "yarn", "llama3", "linear"])
def test_a_part_of_the_head_rotates_where_the_type_knows_it(rule):
    params = {"rope_type": rule, "rope_theta": 500000.0, "partial_rotary_factor": 0.25} | RULES.get(rule, {})
    config = Glm4MoeConfig(**LLAMA_3_2, rope_parameters=dict(params))
    want = Glm4MoeRotaryEmbedding(config)
    inv_freq, factor = rope_inv_freq(LLAMA_3_2 | {"rope_parameters": params}, partial=True)
    assert len(inv_freq) == 8 and factor == pytest.approx(want.attention_scaling, rel=1e-12)
    np.testing.assert_allclose(inv_freq, want.inv_freq.double().numpy(), rtol=2e-6)
    np.testing.assert_array_equal(rope_inv_freq(LLAMA_3_2 | {"partial_rotary_factor": 0.25}, partial=True)[0],
                                  500000.0 ** -(np.arange(0, 16, 2) / 16))


@pytest.mark.parametrize("share", [0.3, 0.02, 1.5, 0])
def test_a_part_that_is_no_even_number_of_elements_is_refused(share):
    with pytest.raises(CheckpointError, match=f"partial_rotary_factor = {share}"):
        rope_inv_freq(LLAMA_3_2 | {"head_dim": 64, "partial_rotary_factor": share}, partial=True)


@pytest.mark.parametrize("change,words", [
    ({"rope_scaling": {"rope_type": "mrope"}}, ["rope_type", "'mrope'", "llama3", "yarn"]),
    ({"rope_scaling": {"type": 3}}, ["type", "3"]),
    ({"rope_scaling": {"rope_type": "linear"}}, ["factor"]),
    ({"rope_scaling": {"rope_type": "linear", "factor": -2.0}}, ["factor", "-2.0"]),
    ({"rope_scaling": LLAMA3 | {"rope_type": "llama3", "high_freq_factor": 1.0}}, ["high_freq_factor", "1.0"]),
    ({"rope_scaling": {"rope_type": "longrope", "short_factor": [1.0] * 3}}, ["short_factor", "32"]),
    ({"rope_scaling": "linear"}, ["rope_scaling", "'linear'"]),
    ({"rope_theta": math.nan}, ["rope_theta", "nan"]),
    ({"rope_theta": 0}, ["rope_theta", "0"]),
    ({"head_dim": 63}, ["head_dim", "63", "even"]),
    ({"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
    ({"rope_freq_factors": [1.0] * 31}, ["rope_freq_factors", "32"]),
    ({"rope_freq_factors": [0.0] * 32}, ["rope_freq_factors", "0.0"]),
    ({"rope_parameters": {"sliding_attention": {"rope_type": "default"}}}, ["full_attention"]),
])
def test_errors_name_key_and_value(change, words):
    with pytest.raises(CheckpointError) as error:
        rope_inv_freq(LLAMA_3_2 | change, "full_attention")
    for word in words:
        assert word in str(error.value)
