"""Checkpoints of MLX: what is read, what is refused, and the same logits as `mlx_lm` where that is installed."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from isthmus.core.api import Engine
from isthmus.core.discovery import load_platform
from isthmus.core.errors import CheckpointError
from isthmus.core.models.loader import load_model
from isthmus.core.weights.checkpoint import open_checkpoint
from isthmus.platforms.expand import expand

from .checkpoints import LAYERS, Stored, tiny_llama_config, tiny_weights, write_safetensors
from .harness import Runner
from .tiny_mlx import pack_codes

COST = 8  # seconds
QUANTIZATION = {"group_size": 32, "bits": 4, "mode": "affine", "model.layers.0.mlp.gate_proj": False,
                "model.layers.0.mlp.up_proj": {"group_size": 32, "bits": 8}}


def quantize(values: np.ndarray, bits: int, group: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Codes, scales and biases, rounded to the nearest between each group's extremes."""
    groups = values.reshape(*values.shape[:-1], -1, group)
    low, high = groups.min(-1), groups.max(-1)
    scale = ((high - low) / ((1 << bits) - 1)).astype(np.float16)
    codes = np.clip(np.rint((groups - low[..., None]) / scale[..., None].astype(np.float32)), 0, (1 << bits) - 1)
    return codes.astype(np.uint8).reshape(values.shape), scale, low.astype(np.float16)


def written(folder: Path, changes: dict | None = None, tensors: dict | None = None) -> tuple[Path, dict]:
    """A Llama as MLX would store it, and the values of its matrices."""
    folder.mkdir(exist_ok=True)
    stored, values = {}, {}
    for name, weight in tiny_weights().items():
        stem = name.removesuffix(".weight")
        settings = QUANTIZATION.get(stem, QUANTIZATION)
        if weight.ndim == 1 or not settings or weight.shape[1] % 32:
            stored[name] = values[name] = weight
            continue
        bits, group = settings["bits"], settings["group_size"]
        codes, scale, bias = quantize(weight, bits, group)
        words = pack_codes(codes, bits)
        stored[name] = Stored("u32", words.shape, words.tobytes())
        stored[f"{stem}.scales"], stored[f"{stem}.biases"] = scale, bias
        wide = (np.repeat(part.astype(np.float32), group, -1) for part in (scale, bias))
        values[name] = codes * next(wide) + next(wide)
    config = tiny_llama_config() | {"quantization": QUANTIZATION, "quantization_config": QUANTIZATION} | (changes or {})
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    stored |= tensors or {}
    write_safetensors(folder / "model.safetensors", {n: t for n, t in stored.items() if t is not None})
    return folder, values


def test_quantized_tensors_are_described_as_one_with_their_logical_shape(tmp_path):
    folder, values = written(tmp_path)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.names == values.keys() and "quantization" not in checkpoint.config
        assert checkpoint.formats() == {"affine4_32": 6 * LAYERS - 1, "f32": 2 * LAYERS + 4, "affine8_32": 1}
        for name, want in values.items():
            assert checkpoint.describe(name)[1] == want.shape
            np.testing.assert_array_equal(expand(checkpoint.tensor(name)), want)
        size = sum(checkpoint.tensor(name).data.nbytes + sum(part.data.nbytes for part in checkpoint.tensor(name).extra)
                   for name in values)
        assert checkpoint.nbytes == size


def test_progress_counts_scales_and_biases(tmp_path):
    seen, platform = [], load_platform("reference")
    with open_checkpoint(written(tmp_path)[0]) as checkpoint:
        load_model(checkpoint, platform, platform.probe(), "f64", progress=lambda *at: seen.append(at))
        assert seen[-1] == (checkpoint.nbytes, checkpoint.nbytes)


@pytest.mark.parametrize("platform, dtype", [("reference", "f64"), ("cpu", "bf16")])
def test_a_model_runs_as_its_values_do(tmp_path, platform, dtype):
    if platform == "cpu":
        pytest.importorskip("torch", reason="the cpu platform needs torch")
    folder, values = written(tmp_path / "mlx")
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(tiny_llama_config()))
    write_safetensors(dense / "model.safetensors", values)
    work = (1, [5, 9, 3, 200, 7, 7])
    have, want = Runner(platform, folder, dtype), Runner("reference", dense, "f64")
    got, expected = have.logits(work)[0], want.logits(work)[0]
    assert np.mean((got - expected) ** 2) < (1e-10 if dtype == "f64" else 1e-3) * np.mean(expected ** 2)
    kept = {line.split(" x ")[1].split(" as ")[0] for line in have.model.loaded.report if " as " in line}
    assert kept >= {"affine4_32", "affine8_32"}
    assert have.model.loaded.nbytes < want.model.loaded.nbytes / 3


O = "model.layers.0.self_attn.o_proj"  # noqa: E741


@pytest.mark.parametrize("changes, tensors, words", [
    ({"mode": "mxfp4"}, {}, ["mode mxfp4", "bits 4", "affine8_128"]),
    ({"bits": 7}, {}, ["bits 7", "affine2_32"]), ({"group_size": 16}, {}, ["group_size 16"]),
    ({"bits": None}, {}, ["bits None"]), ({"bits": True}, {}, ["bits True"]), ({"bits": "4" * 99}, {}, ["bits 4444"]),
    ({"bits": 8}, {}, ["8 bits in groups of 32", "weight u32 [", "scales f16 ["]),
    ({"group_size": 64}, {}, ["4 bits in groups of 64"]),
    ({O: {"group_size": 32, "bits": 2}}, {}, [O, "2 bits in groups of 32", "[32, 4]"]),
    ({O: 7}, {}, [f"quantization of {O} is 7; a mapping with bits and group_size is needed, or false", "correct"]),
    ({O: "no"}, {}, [f"{O} is 'no'"]), ({O: []}, {}, [f"{O} is []"]), ({O: 1.5}, {}, [f"{O} is 1.5"]),
    ({O: None}, {}, [f"{O} is None"]), ({O: False}, {}, [f"{O} is false, and its tensors are quantized"]),
    ({"lm_head": 3}, {"lm_head.weight": np.zeros((256, 64), np.float32)}, ["lm_head is 3"]),
    ({"model.layers.99.x": 3}, {}, ["model.layers.99.x is 3"]),
    ({"model.layers.99.x": {"bits": 7, "group_size": 0}}, {}, ["model.layers.99.x", "bits 7, group_size 0"]),
    ({}, {f"{O}.scales": None}, [O, "is quantized, but has no scales: download"]),
    ({}, {f"{O}.scales": None, f"{O}.biases": None}, [O, "is quantized, but has no scales and no biases: download"]),
    ({}, {f"{O}.biases": None}, [O, "no biases"]), ({}, {f"{O}.weight": None}, [O, "no weight"]),
    ({}, {f"{O}.weight": np.zeros((32, 4), np.int32)}, [O, "weight i32"]),
    ({}, {f"{O}.biases": np.zeros((32, 2), np.float16)}, [O, "biases f16 [32, 2]"]),
    ({}, {f"{O}.scales": np.zeros((32, 1), np.uint8)}, [O, "scales u8"]),
    ({}, {f"{O}.weight": np.zeros(0, np.float32), f"{O}.scales": np.zeros((), np.float32)}, [O, "weight f32 [0]"]),
])
def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path, changes, tensors, words):
    folder, _ = written(tmp_path, {"quantization": QUANTIZATION | changes}, tensors)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    for word in words:
        assert word in str(error.value)


def test_quantization_must_be_a_mapping(tmp_path):
    with pytest.raises(CheckpointError, match="must be a mapping with bits and group_size, not 7: correct config.json"):
        open_checkpoint(written(tmp_path, {"quantization": 7})[0])


def test_entries_that_say_nothing_of_a_matrix_are_allowed(tmp_path):
    """As `mlx_lm` reads them: true is the same as no entry, and modules may have been left out of the file."""
    others = {O: True, "vision_tower.0.fc": {"bits": 4, "group_size": 64}, "visual.merger": False, "quant_method": 3}
    with open_checkpoint(written(tmp_path, {"quantization": QUANTIZATION | others})[0]) as checkpoint:
        assert checkpoint.describe(f"{O}.weight")[0] == "affine4_32"


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_scales_that_are_no_numbers_are_refused_at_load(tmp_path, value):
    folder, _ = written(tmp_path, tensors={f"{O}.scales": np.full((32, 1), value, np.float16)})
    with pytest.raises(CheckpointError, match="not a number|no finite numbers"):
        Engine(str(folder), platform="reference")


SIZES = dict(hidden_size=64, num_hidden_layers=2, intermediate_size=96, num_attention_heads=4, num_key_value_heads=2,
             rms_norm_eps=1e-6, vocab_size=131, rope_theta=1e4, max_position_embeddings=256, tie_word_embeddings=False)
SPARSE = dict(num_experts=6, num_experts_per_tok=2, decoder_sparse_step=1, moe_intermediate_size=64)
# One group: of several, mlx_lm counts the experts outside the best with 0, which a negative bias makes a good score.
DEEPSEEK = dict(n_routed_experts=6, num_experts_per_tok=2, moe_intermediate_size=64, n_shared_experts=2, n_group=1,
                topk_group=1, first_k_dense_replace=1, norm_topk_prob=True, routed_scaling_factor=1.5,
                attention_bias=True, rope_scaling=None)
MODELS = {
    "llama": SIZES | dict(head_dim=16, tie_word_embeddings=True),
    "mixtral": SIZES | dict(num_local_experts=4, num_experts_per_tok=2),
    "qwen2_moe": SIZES | SPARSE | dict(shared_expert_intermediate_size=96, norm_topk_prob=False),
    "qwen3_moe": SIZES | SPARSE | dict(head_dim=32, norm_topk_prob=True, mlp_only_layers=[1]),
    "glm4_moe": SIZES | DEEPSEEK | dict(head_dim=32, use_qk_norm=True, partial_rotary_factor=0.5),
    "dots1": SIZES | DEEPSEEK | dict(head_dim=16, attention_bias=False),
}


@pytest.mark.parametrize("bits", [3, 4, 8])
@pytest.mark.parametrize("kind", MODELS)
def test_the_same_logits_as_mlx_lm(tmp_path, kind, bits):
    utils = pytest.importorskip("mlx_lm.utils", reason="mlx_lm is not installed here")
    import mlx.core as mx
    from mlx.utils import tree_map
    config = MODELS[kind] | {"model_type": kind}
    model_class, args_class = utils._get_classes(config)
    model = model_class(args_class.from_dict(config))
    mx.random.seed(3)
    model.update(tree_map(lambda w: mx.random.normal(w.shape) * (1.5 * w.shape[-1] ** -0.5 if w.ndim > 1 else 1),
                          model.parameters()))
    model, config = utils.quantize_model(model, config, 32, bits)
    utils.save_model(tmp_path, model)
    utils.save_config(config, tmp_path / "config.json")
    tokens = np.random.default_rng(0).integers(0, 131, 24).tolist()
    want = np.array(model(mx.array([tokens]))[0])
    got = Runner("reference", tmp_path, "f64").logits((1, tokens))[0]
    assert np.abs(want).max() > 1 and np.abs(got - want).max() < 1e-3
