"""Checkpoints that were calibrated for K and V in 8-bit floats: their scales as each exporter names them, and the
logits that come of them."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from isthmus.conformance.driver import Driver, Model
from isthmus.core.errors import CheckpointError
from isthmus.core.weights.checkpoint import open_checkpoint

from .checkpoints import Stored
from .harness import Runner
from .scheme_files import KV_HEADS, LAYERS, SCHEMES, bf16, tiny_weights, written

COST = 6  # seconds
SIZE = 2.0 ** -14  # of K and V, which are nothing in e4m3 at that
K, V = 0.021 * SIZE, 0.013 * SIZE
ROUNDING = (2 ** -4) ** 2 / 3  # of e4m3: at most a sixteenth of a value, evenly spread
TOKENS = [5, 9, 3, 120, 7, 7, 44, 81, 2, 60]
FLOAT = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False, "symmetric": True}
F32 = lambda value, shape: np.full(shape, value, np.float32)  # noqa: E731
BF16 = lambda value, shape: bf16(np.full(shape, value))[0]    # noqa: E731
# exporter -> scheme of its weights, changes of its configuration, and each layer's tensors
LAYOUTS = {
    "compressed-tensors": ("ct-fp8-channel", {"kv_cache_scheme": FLOAT}, {"k_scale": BF16(K, (1,)),
                                                                           "v_scale": BF16(V, (1,))}),
    "of each head": ("ct-fp8-channel", {"kv_cache_scheme": FLOAT | {"strategy": "attn_head"}},
                     {"k_scale": F32([[[K / 4]], [[K]]], (KV_HEADS, 1, 1)), "v_scale": F32(V, (KV_HEADS, 1, 1))}),
    "ModelOpt": ("modelopt-fp8", {"kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"}},
                 {"k_proj.k_scale": F32(K, ()), "v_proj.v_scale": F32(V, ())}),
    "Quark": ("quark-mxfp4", {}, {"k_proj.output_scale": F32(K, ()), "v_proj.output_scale": F32(V, ())}),
    "AutoFP8": ("fp8-static", {}, {"kv_scale": F32(K, (1,))}),
}


def folder_of(tmp_path: Path, scheme: str, changes: dict | None = None, scales: dict | None = None) -> Path:
    """A model whose K and V are next to 0, and whose queries and outputs make up for it."""
    write, tensors = SCHEMES[scheme][1], {}
    for name, weight in tiny_weights("llama").items():
        factor = {"q": 1 / SIZE, "k": SIZE, "v": SIZE, "o": 1 / SIZE}.get(name.rpartition("_proj")[0][-1:])
        if factor and "self_attn" in name:
            stem = name.removesuffix(".weight")
            tensors |= {f"{stem}.{end}": part for end, part in write(weight * np.float32(factor))[0].items()}
            tensors |= {f"{stem}.{end}": None for end in ("k_scale", "v_scale") if end in write(weight)[0]}  # 1
    for layer in range(LAYERS):
        tensors |= {f"model.layers.{layer}.self_attn.{end}": part for end, part in (scales or {}).items()}
    return written(tmp_path, scheme, changes=changes, tensors=tensors)[0]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_scales_are_found_where_each_exporter_leaves_them(tmp_path, layout):
    with open_checkpoint(folder_of(tmp_path, *LAYOUTS[layout])) as checkpoint:
        pair = (K, K) if layout == "AutoFP8" else (K, V)
        assert checkpoint.kv_scales.keys() == set(range(LAYERS))
        for scales in checkpoint.kv_scales.values():
            np.testing.assert_allclose(scales, pair, rtol=2 ** -7 if layout == "compressed-tensors" else 1e-6)
        assert not any(name.endswith("_scale") for name in checkpoint.names)


def error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.mean((got - want) ** 2) / np.mean(want ** 2))


def accelerator(folder: Path) -> Driver:
    pytest.importorskip("torch", reason="the accelerators need torch")
    from .emulation.composed.platform import Platform
    platform = Platform({"graphs": "off"})
    platform.kv_dtypes = (*platform.kv_dtypes, "f8_e4m3")
    manifest = platform.probe()
    return Driver(Model(platform, manifest, folder, "f32", manifest.page_sizes[0]), kv_dtype="f8_e4m3")


@pytest.mark.parametrize("platform, dtype", [("reference", "f64"), ("cpu", "f32"), ("cpu", "bf16"),
                                             ("accelerator", "f32")])
def test_k_and_v_are_kept_divided_by_them(tmp_path, platform, dtype):
    scheme, changes, scales = LAYOUTS["compressed-tensors"]
    if platform == "cpu":
        pytest.importorskip("torch", reason="the cpu platform needs torch")

    def logits(folder: Path) -> np.ndarray:
        made = accelerator(folder) if platform == "accelerator" else Runner(platform, folder, dtype, "f8_e4m3")
        return np.concatenate([made.logits((1, part))[0] for part in (TOKENS[:7], TOKENS[7:8], TOKENS[8:])])
    folder = folder_of(tmp_path / "scaled", scheme, changes, scales)
    want = Runner("reference", folder, "f64", "f64").logits((1, TOKENS))[0]
    assert error(logits(folder), want) < ROUNDING
    assert error(logits(folder_of(tmp_path / "bare", scheme)), want) > 0.3  # without them nothing is left


def test_the_banner_tells_of_them(tmp_path):
    scheme, changes, scales = LAYOUTS["ModelOpt"]
    loaded = Runner("reference", folder_of(tmp_path, scheme, changes, scales), "f64").model.loaded
    assert loaded.report[-1] == "scales of K and V in 8-bit floats (--kv-cache-dtype fp8) for 2 layers"
    assert [(state.k_scale, state.v_scale) for state in loaded.state_layers] == [
        (pytest.approx(K), pytest.approx(V))] * LAYERS


@pytest.mark.parametrize("value, words", [
    (F32(0, ()), ["layers.0.self_attn.k_scale has 0", "above 0"]), (F32(np.nan, (1,)), ["has nan"]),
    (F32(-1, (1,)), ["has -1"]), (np.ones(1, np.int32), ["k_scale is i32 [1]", "f16, bf16 or f32"]),
    (F32(1, (2000,)), ["k_scale is f32 [2000]", "1024"]), (F32(1, (0,)), ["k_scale is f32 [0]"]),
    (Stored("bf16", (1,), b"\x80\x7f"), ["has inf"]),
    (F32(1e-45, (1,)), ["has 1.4013e-45", "from 2**-40 to 2**40"]), (F32(1e38, (1,)), ["has 1e+38", "2**40"]),
    (F32([1, 1, 1e-38][-KV_HEADS:], (KV_HEADS,)), ["has 1e-38"]),
    (F32(1, (KV_HEADS + 1,)), [f"k_scale has {KV_HEADS + 1} numbers", f"each of the {KV_HEADS} heads"]),
    (F32(1, (KV_HEADS, 5)), [f"k_scale has {5 * KV_HEADS} numbers"])])
def test_what_is_no_scale_is_refused(tmp_path, value, words):
    refused(tmp_path, {"k_scale": value, "v_scale": F32(1, (1,))}, words)


@pytest.mark.parametrize("scales, words", [
    ({"k_scale": 1}, ["layers.0.self_attn.k_scale has no scale of V beside it", "both or neither"]),
    ({"v_proj.output_scale": 1}, ["v_proj.output_scale has no scale of K beside it"]),
    ({"k_scale": 1, "v_scale": 1, "k_proj.k_scale": 2}, ["k_scale is 1", "k_proj.k_scale is 2", "scale of K in layer"]),
    ({"kv_scale": 1, "k_scale": 1, "v_scale": 4}, ["kv_scale is 1", "v_scale is 4", "scale of V in layer 0"])])
def test_scales_that_do_not_agree_are_refused(tmp_path, scales, words):
    refused(tmp_path, {name: F32(value, (1,)) for name, value in scales.items()}, words)


def refused(folder: Path, scales: dict, words: list[str]) -> None:
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(folder_of(folder, "fp8", scales=scales))
    assert all(word in str(caught.value) for word in words), caught.value


@pytest.mark.parametrize("value", [2.0 ** -40, 2.0 ** 40])
def test_the_least_and_the_most_scale_and_two_names_of_the_same(tmp_path, value):
    scales = dict.fromkeys(("kv_scale", "k_scale", "v_proj.v_scale"), F32(value, (1,)))
    with open_checkpoint(folder_of(tmp_path, "fp8", scales=scales)) as checkpoint:
        assert checkpoint.kv_scales == dict.fromkeys(range(LAYERS), (value, value))


@pytest.mark.parametrize("scheme", [FLOAT | {"num_bits": 4, "type": "int"}, FLOAT | {"strategy": "token"}, 7, [], "x",
                                    FLOAT | {"dynamic": True}, FLOAT | {"type": "bogus"}])
def test_a_scheme_that_is_not_read_is_told_and_its_scales_are_not_used(tmp_path, scheme):
    folder = folder_of(tmp_path, "ct-fp8-channel", {"kv_cache_scheme": scheme}, {"k_scale": F32(K, (1,))})
    loaded = Runner("reference", folder, "f64").model.loaded
    assert loaded.report[-1].startswith("kv_cache_scheme ") and "is left alone: only 8-bit floats" in loaded.report[-1]
    assert {(state.k_scale, state.v_scale) for state in loaded.state_layers} == {(1.0, 1.0)}


def test_a_scheme_without_scales_is_told(tmp_path):
    folder = folder_of(tmp_path, "ct-fp8-channel", {"kv_cache_scheme": FLOAT})
    loaded = Runner("reference", folder, "f64").model.loaded
    assert loaded.report[-1] == "kv_cache_scheme, but no scales of K and V: taken as 1"
