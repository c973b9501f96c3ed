"""What quantized checkpoints declare of their activations, in the configurations that are published."""
from __future__ import annotations

import pytest
from isthmus.core.quant.activations import declared

from .scheme_files import FP8, SCHEMES, written

COST = 3  # seconds
EIGHT = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}
FOUR = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}


def compressed(*groups: tuple[dict, dict | None]) -> dict:
    return {"quant_method": "compressed-tensors", "config_groups": {
        f"group_{i}": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}
        for i, (weights, inputs) in enumerate(groups)}}


@pytest.mark.parametrize("config, narrow", [
    (compressed((EIGHT, EIGHT)), True),                                          # FP8-dynamic, w8a8
    (compressed((EIGHT, EIGHT | {"dynamic": False, "strategy": "tensor"})), True),
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
    from isthmus.core.discovery import load_platform
    from isthmus.core.models.loader import load_model
    from isthmus.core.weights.checkpoint import open_checkpoint
    platform, seen = load_platform("reference", {}), {}
    load = platform.load
    platform.load = lambda raws, spec, dtype: seen.setdefault(spec, load(raws, spec, dtype))
    folder, _ = written(tmp_path, scheme)
    with open_checkpoint(folder) as checkpoint:
        load_model(checkpoint, platform, platform.probe(), "f64")
    assert seen and {spec.narrow for spec in seen} == {declared(SCHEMES[scheme][0])}
