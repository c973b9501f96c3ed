"""What quantized checkpoints declare of their activations, in the configurations that are published."""
from __future__ import annotations

import numpy as np
import pytest
from isthmus.core.discovery import load_platform
from isthmus.core.errors import CheckpointError
from isthmus.core.models.loader import load_model
from isthmus.core.quant.activations import calibrated, declared
from isthmus.core.weights.checkpoint import open_checkpoint

from .checkpoints import Stored
from .scheme_files import FP8, SCHEMES, written

COST = 3  # seconds
EIGHT = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
STATIC = EIGHT | {"dynamic": False, "strategy": "tensor"}
FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def compressed(*groups: tuple[dict, dict | None]) -> dict:
    return {"quant_method": "compressed-tensors", "config_groups": {
        f"group_{i}": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        for i, (weights, inputs) in enumerate(groups)}}


def quark(dtype: str, dynamic: bool) -> dict:
    return {"quant_method": "quark", "global_quant_config": {"input_tensors": {"dtype": dtype, "is_dynamic": dynamic}}}


@pytest.mark.parametrize("config, narrow", [
    (compressed((EIGHT, EIGHT)), True),                                          # FP8-dynamic, w8a8
    (compressed((EIGHT, STATIC)), True),
    (compressed((EIGHT, None)), False),                                          # w8a16
    (compressed((FOUR, None), (EIGHT, EIGHT)), True),                            # of two kinds of modules, 8 bits count
    (compressed((EIGHT, None), (EIGHT, EIGHT)), False),                          # and must agree
    (compressed((FOUR, None)), False), (compressed(), False),
    ({"config_groups": compressed((EIGHT, EIGHT))["config_groups"]}, True),      # early files have no quant_method
    (FP8, True), (FP8 | {"activation_scheme": "static"}, True), ({"quant_method": "fp8"}, True),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, True),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
    ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, True),
    ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, False),
    ({"quant_method": "quark", "global_quant_config": {
        "weight": {"dtype": "fp8_e4m3"}, "input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": False}}}, True),
    ({"quant_method": "quark", "global_quant_config": {"weight": {"dtype": "fp8_e4m3"}, "input_tensors": None}}, False),
    ({"quant_method": "awq", "bits": 4}, False), ({"quant_method": "gptq", "bits": 8}, False),
])
def test_declared(config, narrow):
    assert declared(config) is narrow


@pytest.mark.parametrize("scheme", ["fp8", "awq"])
def test_it_reaches_the_platform(tmp_path, scheme):
    platform, seen = load_platform("reference", {}), {}
    load = platform.load
    platform.load = lambda raws, spec, dtype: seen.setdefault(spec, load(raws, spec, dtype))
    folder, _ = written(tmp_path, scheme)
    with open_checkpoint(folder) as checkpoint:
        load_model(checkpoint, platform, platform.probe(), "f64")
    assert seen and {spec.narrow for spec in seen} == {declared(SCHEMES[scheme][0])}


@pytest.mark.parametrize("config, static", [
    (compressed((EIGHT, EIGHT)), False), (compressed((EIGHT, STATIC)), True), (compressed((EIGHT, None)), False),
    (compressed((FOUR, None), (EIGHT, STATIC)), True), (compressed((EIGHT, None), (EIGHT, STATIC)), False),
    (compressed((EIGHT, STATIC | {"dynamic": "local", "strategy": "tensor_group"})), False),
    (FP8, False), (FP8 | {"activation_scheme": "static"}, True),
    ({"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0}, False),
    ({"quant_method": "modelopt", "quant_algo": "FP8"}, True),
    ({"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"}, False),
    (quark("fp8_e4m3", False), True), (quark("fp8_e4m3", True), False), (quark("fp4", False), False),
    ({"quant_method": "awq", "bits": 4}, False)])
def test_calibrated(config, static):
    assert calibrated(config) is static


def f32(value: float | list[float]) -> np.ndarray:
    return np.array(value, np.float32)


LAYER = "model.layers.1.self_attn."
BOTH = compressed((EIGHT | {"type": "int", "strategy": "channel"}, STATIC | {"type": "int"}))


@pytest.mark.parametrize("scheme, changes, tensors, want", [
    ("fp8-static", {}, {}, 0.5), ("modelopt-fp8", {}, {}, 0.5),
    ("fp8-static", {}, {f"{LAYER}q_proj.input_scale": f32([0.25]), f"{LAYER}k_proj.input_scale": f32([2.0])}, 2.0),
    ("fp8-static", {}, {f"{LAYER}q_proj.input_scale": Stored("bf16", (2,), b"\x80\x3f\x40\x40")}, 3.0),  # 1 and 3
    ("fp8-static", {}, {f"{LAYER}q_proj.input_scale": None}, None),     # not calibrated whole
    ("fp8-static", {}, {f"{LAYER}q_proj.input_scale": f32(0.0)}, None),  # never met
    ("fp8-static", {"activation_scheme": "dynamic"}, {}, None),         # what was left in the file
    ("int8", {}, {}, None), ("int8", BOTH, {}, 1.0),
    ("int8", BOTH, {f"{LAYER}v_proj.input_zero_point": np.zeros(1, np.int8)}, 1.0),
    ("int8", BOTH, {f"{LAYER}v_proj.input_zero_point": np.ones(1, np.int8)}, None),
    ("fp8", {}, {}, None), ("awq", {}, {}, None)])
def test_calibrated_scales_reach_the_platform_the_largest_of_what_is_stacked(tmp_path, scheme, changes, tensors, want):
    platform, seen = load_platform("reference", {}), {}
    load = platform.load
    platform.load = lambda raws, spec, dtype: seen.setdefault(spec.names, (load(raws, spec, dtype), spec))[0]
    folder, _ = written(tmp_path, scheme, changes=changes, tensors=tensors)
    with open_checkpoint(folder) as checkpoint:
        report = load_model(checkpoint, platform, platform.probe(), "f64").report
    (spec,) = [spec for names, (_, spec) in seen.items() if f"{LAYER}q_proj.weight" in names]
    assert len(spec.names) == 3 and spec.input_scale == want
    told = [line for line in report if "calibrated scales" in line]
    assert bool(told) == any(spec.input_scale for _, spec in seen.values())
    assert all("used for 0 of 1" in line for line in told), "the reference has no products in 8 bits"


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), 1e30, 1e-30])
def test_a_scale_that_is_none_is_refused(tmp_path, value):
    folder, _ = written(tmp_path, "fp8-static", tensors={f"{LAYER}q_proj.input_scale": f32(value)})
    with pytest.raises(CheckpointError, match=r"q_proj\.input_scale has .*from 2\*\*-40 to 2\*\*40"):
        open_checkpoint(folder)
