"""Quantized Hugging Face checkpoints in their real layouts: the logits of their dequantized selves, and refusals."""
from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from isthmus.core.errors import CheckpointError
from isthmus.core.weights.checkpoint import open_checkpoint
from isthmus.platforms.expand import expand

from .checkpoints import Stored, write_safetensors
from .harness import Runner
from .scheme_files import LAYERS, SCHEMES, tiny_weights, write_config, written

COST = 60  # seconds
TOKENS = [5, 9, 3, 120, 7, 7, 44]
KINDS = [(scheme, "llama") for scheme in SCHEMES] + [
    (scheme, kind) for kind in ("qwen3", "qwen3_moe") for scheme in ("awq", "gptq4-act", "int8", "fp8", "ct-nvfp4")]
KEPT = ("awq4", "gptq", "pack", "int8")  # by cpu, without act order
LIBRARIES = {"reference": "numpy", "cpu": "torch", "mlx": "mlx.core", "tpu": "jax"}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_each_matrix_is_one_tensor_with_the_values_of_the_scheme(tmp_path, scheme):
    folder, values = written(tmp_path, scheme)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.names - {n for n in checkpoint.names if n.endswith(".bias")} == values.keys()
        assert checkpoint.formats()[SCHEMES[scheme][2]] == 7 * LAYERS and "quantization_config" not in checkpoint.config
        for name, want in values.items():
            assert checkpoint.describe(name)[1] == want.shape
            np.testing.assert_allclose(expand(checkpoint.tensor(name)), want, rtol=1e-6, atol=1e-9)


def dense_folder(folder: Path, kind: str, values: dict) -> Path:
    folder.mkdir(exist_ok=True)
    write_config(folder, kind)
    write_safetensors(folder / "model.safetensors", values, {"format": "pt"})
    return folder


@cache
def library_logits(folder: Path) -> np.ndarray:
    torch = pytest.importorskip("torch", reason="transformers needs torch")
    transformers = pytest.importorskip("transformers", reason="transformers is not installed here")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return model(torch.tensor([TOKENS])).logits[0].double().numpy()


@pytest.mark.parametrize("scheme, kind", KINDS)
def test_the_logits_of_the_dequantized_model_in_transformers(tmp_path, scheme, kind):
    folder, values = written(tmp_path / "quantized", scheme, kind)
    want = library_logits(dense_folder(tmp_path / "dense", kind, values))
    for platform, dtype, limit in (("reference", "f64", 2e-5), ("cpu", "f32", 2e-5)):
        got = Runner(platform, folder, dtype).logits((1, TOKENS))[0]
        assert np.abs(want).max() > 1 and np.abs(got - want).max() < limit * np.abs(want).max()


@pytest.mark.parametrize("platform, dtype", [("cpu", "bf16"), ("mlx", "f32"), ("tpu", "f32")])
@pytest.mark.parametrize("scheme, kind", KINDS[::2])
def test_every_platform_runs_them(tmp_path, platform, dtype, scheme, kind):
    pytest.importorskip(LIBRARIES[platform], reason=f"the {platform} platform needs its library")
    folder, values = written(tmp_path / "quantized", scheme, kind)
    runner = Runner(platform, folder, dtype)
    got = runner.logits((1, TOKENS))[0]
    want = Runner("reference", dense_folder(tmp_path / "dense", kind, values), "f64").logits((1, TOKENS))[0]
    assert np.mean((got - want) ** 2) < (1e-3 if dtype == "bf16" else 1e-9) * np.mean(want ** 2)
    name = SCHEMES[scheme][2]
    if platform == "cpu" and name.startswith(KEPT) and not name.endswith("_act"):
        assert any(f"x {name} as int" in line for line in runner.model.loaded.report), runner.model.loaded.report


# Bit orders, restated from the libraries' documents: AutoAWQ's order 0 2 4 6 1 3 5 7, AutoGPTQ's packing of 3 bits over
# word borders and its zeros less one, compressed-tensors' codes up by half the range, low halves of bytes first.

def one_matrix(folder: Path, quantization: dict, tensors: dict) -> np.ndarray:
    write_config(folder, "llama", quantization)
    write_safetensors(folder / "model.safetensors", {f"a.{end}": part for end, part in tensors.items()})
    with open_checkpoint(folder) as checkpoint:
        return expand(checkpoint.tensor("a.weight"))


def test_known_words_of_awq(tmp_path):
    word = np.array([[0x76543210 - (1 << 32) * (0x76543210 >> 31)]], np.int32)
    got = one_matrix(tmp_path, SCHEMES["awq-channel"][0], {
        "qweight": np.repeat(word, 2, 0), "qzeros": np.array([[0x11111111]], np.int32),
        "scales": np.arange(1, 9, dtype=np.float16)[None]})
    digits = np.array([0, 4, 1, 5, 2, 6, 3, 7])  # 4-bit digit i of a word is of output (0, 2, 4, 6, 1, 3, 5, 7)[i]
    np.testing.assert_array_equal(got, np.repeat(((digits - 1) * np.arange(1, 9))[:, None], 2, 1))


@pytest.mark.parametrize("version, less", [("gptq", 1), ("gptq_v2", 0)])
def test_known_words_of_gptq(tmp_path, version, less):
    # 3 bits: codes i % 8 of 32 inputs. The stream's first 24 bits are 0xFAC688, and again; 8 codes are 3 bytes.
    words = np.frombuffer(bytes.fromhex("88c6fa") * 4, "<i4").reshape(3, 1)
    got = one_matrix(tmp_path, SCHEMES["gptq3"][0] | {"checkpoint_format": version}, {
        "qweight": words, "qzeros": np.array([[0b011]], np.int32), "scales": np.full((1, 1), 2, np.float16),
        "g_idx": np.zeros(32, np.int32)})
    np.testing.assert_array_equal(got, [2 * (np.arange(32) % 8 - 3 - less)])


def test_known_words_of_compressed_tensors(tmp_path):
    shape = {"weight_shape": np.array([1, 8], np.int64), "weight_scale": np.full((1, 1), 0.5, np.float16)}
    packed = {"weight_packed": np.array([[0x76543210]], np.int32), **shape}
    np.testing.assert_array_equal(one_matrix(tmp_path, SCHEMES["pack8-channel"][0], packed), [(np.arange(8) - 8) / 2])
    zero = {"weight_zero_point": np.array([[3]], np.int32)}
    got = one_matrix(tmp_path, SCHEMES["pack4-asym"][0], packed | zero)
    np.testing.assert_array_equal(got, [(np.arange(8) - 3) / 2])


def test_known_bytes_of_four_bit_floats(tmp_path):
    codes = np.frombuffer(bytes.fromhex("1032547698badcfe") * 2, np.uint8)[None]  # 0, 1, 2, ..., 15, low halves first
    values = np.array([0, .5, 1, 1.5, 2, 3, 4, 6, -0., -.5, -1, -1.5, -2, -3, -4, -6] * 2)[None]
    mx = one_matrix(tmp_path, SCHEMES["quark-mxfp4"][0], {"weight": codes, "weight_scale": np.array([[129]], np.uint8)})
    np.testing.assert_array_equal(mx, 4 * values)
    scale = Stored("f8_e4m3", (1, 2), bytes([0x38, 0xc0]))  # 1 and -2
    nv = one_matrix(tmp_path, SCHEMES["modelopt-nvfp4"][0], {
        "weight": codes, "weight_scale": scale, "weight_scale_2": np.array(0.25, np.float32)})
    np.testing.assert_array_equal(nv, values * np.repeat([0.25, -0.5], 16))


# What is refused.

Q = "model.layers.0.self_attn.q_proj"
I32, F16 = np.int32, np.float16
CT = lambda **weights: {"config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}}}  # noqa: E731


@pytest.mark.parametrize("scheme, changes, tensors, said", [
    ("awq", {"quant_method": "bitsandbytes"}, {}, ["'bitsandbytes'", "awq, gptq, compressed-tensors, fp8", "GGUF"]),
    ("awq", {"quant_method": ["awq"]}, {}, ["quant_method = ['awq']"]),
    ("awq", {"quant_method": None}, {}, ["quant_method = 'none'"]),
    ("awq", {"version": "gemv"}, {}, ["version = 'gemv'", "gemm"]),
    ("awq", {"bits": 3}, {}, ["bits = 3", "it must be 4"]),
    ("awq", {"zero_point": False}, {}, ["zero_point"]),
    ("awq", {"version": None, "format": "gemv_fast"}, {}, ["format = 'gemv_fast'"]),
    ("awq", {"group_size": 64}, {}, ["scales", "[5, 160]", "groups of 64"]),
    ("awq", {"group_size": 0}, {}, ["group_size = 0"]), ("awq", {"group_size": "x" * 999}, {}, ["group_size = 'xxx"]),
    ("awq", {}, {f"{Q}.qzeros": None}, [Q, "no qzeros"]), ("awq", {}, {f"{Q}.qweight": None}, [Q, "no qweight"]),
    ("awq", {}, {f"{Q}.scales": np.ones((7, 160), F16)}, ["scales", "[7, 160]"]),
    ("awq", {"group_size": None}, {f"{Q}.scales": np.ones((7, 160), F16)}, ["160 inputs", "evenly"]),
    ("awq", {}, {f"{Q}.scales": np.ones((5, 8), F16)}, ["[5, 8]", "[5, 160]"]),
    ("awq", {}, {f"{Q}.qweight": np.ones((160, 20), F16)}, ["qweight is f16", "i32"]),
    ("awq", {}, {f"{Q}.qzeros": np.ones((5, 160), I32)}, ["qzeros", "[5, 20]"]),
    ("awq", {}, {f"{Q}.qweight": np.zeros((0, 20), I32)}, ["q_proj"]),
    ("gptq4-act", {}, {f"{Q}.g_idx": None}, [Q, "no g_idx"]),
    ("pack4-act", {}, {f"{Q}.weight_g_idx": None}, [Q, "no weight_g_idx"]),
    ("gptq4", {"bits": 9}, {}, ["bits = 9"]), ("gptq4", {"bits": 8}, {f"{Q}.g_idx": None}, ["q_proj", "[5, 160]"]),
    ("gptq4", {"checkpoint_format": "marlin"}, {}, ["checkpoint_format = 'marlin'", "gptq_v2"]),
    ("gptq4", {}, {f"{Q}.g_idx": np.full(160, 5, I32)}, ["g_idx", "from 0 to 4", "from 5 to 5"]),
    ("gptq4", {}, {f"{Q}.g_idx": np.full(160, -1, I32)}, ["g_idx", "from -1"]),
    ("gptq4", {}, {f"{Q}.g_idx": np.zeros((160, 1), I32)}, ["g_idx", "1 axes"]),
    ("gptq4", {}, {f"{Q}.g_idx": np.zeros(120, I32)}, ["q_proj"]),
    ("gptq4", {"group_size": None}, {f"{Q}.g_idx": None, f"{Q}.scales": np.ones((7, 160), F16)}, ["evenly"]),
    ("gptq3", {}, {f"{Q}.g_idx": np.roll(np.arange(160, dtype=I32) // 32, 1)}, ["gptq3_act"]),
    ("pack4", {"format": "marlin-24"}, {}, ["format = 'marlin-24'", "pack-quantized"]),
    ("pack4", {"sparsity_config": {"format": "sparse-24-bitmask"}}, {}, ["sparse-24-bitmask"]),
    ("pack4", {"transform_config": {"config_groups": {"R1": {}}}}, {}, ["transform_config"]),
    *[("pack4", CT(group_size=size), {}, ["group_size = "]) for size in (0, -2, 2 ** 70, float("nan"), "x", [], 1.5)],
    ("pack4", CT(group_size=64), {}, ["weight_scale", "groups of 64, as group_size says, not of 32"]),
    ("pack4", CT(), {}, ["160 inputs in groups of all of them, as group_size says, not of 32"]),
    ("pack4-act", CT(group_size=64), {}, ["groups of 64", "not of 32"]),
    ("pack8-channel", CT(group_size=32), {}, ["groups of 32, as group_size says, not of 160"]),
    ("ct-mxfp4", CT(group_size=16), {}, ["groups of 16", "not of 32"]),
    ("ct-nvfp4", CT(group_size=32), {}, ["groups of 32", "not of 16"]),
    ("awq", {"group_size": 33}, {}, ["scales", "160 inputs in groups of 33, as group_size says"]),
    ("gptq4", {"group_size": 33}, {f"{Q}.g_idx": None}, ["160 inputs in groups of 33"]),
    ("gptq4-act", {"group_size": 33}, {}, ["g_idx", "groups of 33 inputs, as group_size says, not of 32"]),
    ("gptq4", {"bits": 5}, {}, ["bits = 5", "2, 3, 4 or 8"]),
    ("gptq4", {"bits": 3}, {}, ["qweight is i32 [20, 160]", "160 inputs of 3 bits, as the configuration", "not of 4"]),
    ("pack4", {"config_groups": [1]}, {}, ["config_groups must be a mapping"]),
    ("pack4", {}, {f"{Q}.weight_shape": None}, ["no weight_shape"]),
    ("pack4", {}, {f"{Q}.weight_shape": np.array([160, 2**62])}, ["weight_shape", "4611686018427387904"]),
    ("pack4", {}, {f"{Q}.weight_shape": np.array([160, 0])}, ["weight_shape"]),
    ("pack4", {}, {f"{Q}.weight_shape": np.array([160, 107])}, ["q_proj"]),
    ("pack4", {}, {f"{Q}.weight_scale": np.ones((160, 7), F16)}, ["weight_scale", "160 inputs"]),
    ("pack4", {}, {f"{Q}.weight_scale": np.ones((160, 5), I32)}, ["weight_scale is i32"]),
    ("pack4-asym", {}, {f"{Q}.weight_zero_point": None}, ["no weight_zero_point"]),
    ("pack4-asym", {}, {f"{Q}.weight_zero_point": np.ones((160, 5), I32)}, ["weight_zero_point", "[20, 5]"]),
    ("pack4-act", {}, {f"{Q}.weight_g_idx": np.full(160, 2**31 - 1, I32)}, ["weight_g_idx", "2147483647"]),
    ("int8", {}, {f"{Q}.weight_scale": None}, [Q, "no weight_scale"]),
    ("int8", {}, {f"{Q}.weight_zero_point": np.ones((160, 1), np.int8)}, ["weight_zero_point", "zeros"]),
    ("int8", {}, {f"{Q}.weight_scale": np.ones((2, 2), F16)}, ["weight_scale", "[2, 2]"]),
    ("fp8", {"weight_block_size": [64, 64]}, {}, ["weight_block_size = [64, 64]", "[128, 128]"]),
    ("fp8", {"fmt": "e5m2"}, {}, ["fmt = 'e5m2'"]),
    ("fp8", {}, {f"{Q}.weight_scale_inv": np.ones((2, 3), np.float32)}, ["weight_scale_inv", "[2, 3]"]),
    ("fp8", {}, {f"{Q}.weight_scale_inv": None}, [Q, "no weight_scale"]),
    ("ct-fp8-block", {"config_groups": {"group_0": {"weights": {"block_structure": [64, 64]}}}}, {}, ["[64, 64]"]),
    ("modelopt-nvfp4", {"quant_algo": "INT4_AWQ"}, {}, ["INT4_AWQ", "NVFP4"]),
    ("modelopt-nvfp4", {}, {f"{Q}.weight_scale_2": np.array(0, np.float32)}, ["weight_scale_2", "above 0"]),
    ("modelopt-nvfp4", {}, {f"{Q}.weight_scale_2": np.array(np.nan, np.float32)}, ["weight_scale_2", "nan"]),
    ("modelopt-nvfp4", {}, {f"{Q}.weight_scale_2": None}, ["weight_scale", "f8_e4m3"]),
    ("ct-nvfp4", {}, {f"{Q}.weight_scale": np.ones((160, 10), F16)}, ["weight_scale is f16", "f8_e4m3"]),
    ("ct-mxfp4", {}, {f"{Q}.weight_scale": np.ones((160, 4), np.uint8)}, ["[160, 4]", "[160, 5]"]),
    ("quark-mxfp4", {"global_quant_config": {"weight": {"dtype": "int4"}}}, {}, ["dtype = 'int4'"]),
])
def test_what_does_not_fit_is_refused_with_the_numbers(tmp_path, scheme, changes, tensors, said):
    folder, _ = written(tmp_path, scheme, changes=changes, tensors=tensors)
    with pytest.raises(CheckpointError) as error:
        open_checkpoint(folder)
    for word in said:
        assert word in str(error.value), str(error.value)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize("value", [7, "awq", [1]])
def test_quantization_config_must_be_a_mapping(tmp_path, value):
    folder, _ = written(tmp_path, "awq")
    write_config(folder, "llama", value)
    with pytest.raises(CheckpointError, match="quantization_config must be a mapping"):
        open_checkpoint(folder)


@pytest.mark.parametrize("scheme, end, scale", [
    ("awq", "scales", np.full((5, 160), np.nan, np.float16)),
    ("gptq4", "scales", np.full((5, 160), np.inf, np.float16)),
    ("fp8", "weight_scale_inv", np.full((2, 2), np.nan, np.float32)),
    ("int8", "weight_scale", Stored("bf16", (160, 1), b"\xc0\x7f" * 160)),
    ("ct-nvfp4", "weight_scale", Stored("f8_e4m3", (160, 10), b"\xff" * 1600)),
    ("ct-mxfp4", "weight_scale", np.full((160, 5), 255, np.uint8)),
    ("ct-mxfp4", "weight_scale", np.full((160, 5), 254, np.uint8)),  # 2**127: twice that is beyond f32
    ("ct-mxfp4", "weight_scale", np.full((160, 5), 246, np.uint8)),
    ("int8", "weight_scale", np.full((160, 1), 2.0 ** 119, np.float32)),
])
def test_scales_that_are_no_numbers_are_refused_when_they_are_read(tmp_path, scheme, end, scale):
    with open_checkpoint(written(tmp_path, scheme, tensors={f"{Q}.{end}": scale})[0]) as checkpoint:
        checkpoint.tensor("model.layers.1.self_attn.q_proj.weight")
        with pytest.raises(CheckpointError, match="q_proj.weight has scales that are no finite numbers"):
            checkpoint.tensor(f"{Q}.weight")


def test_the_largest_scale_of_exponents_gives_finite_numbers(tmp_path):
    scale = np.full((160, 5), 245, np.uint8)
    with open_checkpoint(written(tmp_path, "ct-mxfp4", tensors={f"{Q}.weight_scale": scale})[0]) as checkpoint:
        values = expand(checkpoint.tensor(f"{Q}.weight"))
    assert np.isfinite(values).all() and np.abs(values).max() == 6 * 2.0 ** 118


def test_groups_of_several_sizes_may_be_stated_and_a_matrix_narrower_than_one(tmp_path):
    several = {f"group_{at}": {"targets": ["Linear"], "weights": weights} for at, weights in enumerate(
        ({"group_size": 64}, {"group_size": None, "strategy": "channel"}, {"group_size": 32}))}
    for scheme, groups in (("pack4", several), ("pack8-channel", several), ("pack8-channel", CT(group_size=512))):
        with open_checkpoint(written(tmp_path / f"{scheme}{len(groups)}", scheme, changes={
                "config_groups": groups.get("config_groups", groups)})[0]) as checkpoint:
            assert 7 * LAYERS in checkpoint.formats().values()


def test_patterns_of_a_configuration_are_never_run(tmp_path):
    folder, _ = written(tmp_path, "pack4", changes={"ignore": ["re:(a+)+$", "re:(("], "quant_method": None})
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.formats()["pack4"] == 7 * LAYERS


def test_a_quantized_head_and_modules_left_as_they_are(tmp_path):
    weights = tiny_weights("llama")
    head, values = SCHEMES["gptq4"][1](weights["lm_head.weight"])
    plain = weights[f"{Q}.weight"]
    left = {f"{Q}.{end}": None for end in ("qweight", "qzeros", "scales", "g_idx", "bias")}
    tensors = left | {f"{Q}.weight": plain, "lm_head.weight": None} | {f"lm_head.{e}": part for e, part in head.items()}
    folder, _ = written(tmp_path, "gptq4", changes={"lm_head": True}, tensors=tensors)
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.describe("lm_head.weight") == ("gptq4", values.shape)
        assert checkpoint.describe(f"{Q}.weight") == ("f32", plain.shape)
    assert Runner("reference", folder, "f64").model.loaded.nbytes > 0


def test_a_bias_that_is_something_is_not_dropped(tmp_path):
    folder, _ = written(tmp_path, "gptq4", tensors={f"{Q}.bias": np.ones(160, np.float16)})
    with pytest.raises(CheckpointError, match="has unknown.*q_proj.bias"):
        Runner("reference", folder, "f64")


def test_modelopt_says_it_in_a_file_of_its_own(tmp_path):
    folder, _ = written(tmp_path, "modelopt-nvfp4")
    write_config(folder, "llama")
    said = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16,
                                                               "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    with open_checkpoint(folder) as checkpoint:
        assert checkpoint.formats()["nvfp4"] == 7 * LAYERS
