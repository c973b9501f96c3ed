"""Adapter files: what PEFT writes is read as PEFT means it, and all else is refused with its name and the way out."""
from __future__ import annotations

import json
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.conformance.tiny import weights_of
from isthmus.core.adapters.peft import CONFIG, REFUSED, WEIGHTS, Pair, Shape, floats, read_adapter
from isthmus.core.adapters.store import check_name, named
from isthmus.core.errors import CheckpointError, ConfigError, RequestError
from isthmus.core.platform import RawTensor
from isthmus.core.weights import hub
from isthmus.core.weights.sources import resolve_adapter

from .checkpoints import Stored
from .lora_files import ALL, KIND, QV, drawn, write_adapter

COST = 4  # seconds
SHAPES = {name.removesuffix(".weight"): Shape(*value.shape) for name, value in weights_of(KIND, 0).items()
          if "_proj" in name}
Q0, V1 = "model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.v_proj"


def read(folder, rank=64, **more):
    return read_adapter(folder, SHAPES, rank, **more)


def delta(pair: Pair) -> np.ndarray:
    a, b = pair.factors()
    return b.astype(np.float64) @ a


def test_what_is_read_is_what_was_written(tmp_path):
    pairs = drawn(1, 8, ALL)
    adapter = read(write_adapter(tmp_path / "a", pairs))
    assert adapter.modules.keys() == pairs.keys() == SHAPES.keys() and (adapter.rank, adapter.base) == (8, "tiny")
    for name, (a, b) in pairs.items():
        assert np.allclose(delta(adapter.modules[name]), 2.0 * b.astype(np.float64) @ a, rtol=1e-6)


@pytest.mark.parametrize(("config", "scale"), [
    ({"lora_alpha": 4}, 0.5), ({"lora_alpha": 4, "use_rslora": True}, 4 / math.sqrt(8)),
    ({"lora_alpha": -3.5}, -3.5 / 8),
    ({"alpha_pattern": {"q_proj": 24}}, 3.0), ({"alpha_pattern": {f"^{Q0}": 24}}, 3.0),
    ({"alpha_pattern": {"layers.0.self_attn.q_proj": 24, "q_proj": 1}}, 3.0),
    ({"alpha_pattern": {"layers.1.self_attn.q_proj": 24, "proj": 1}}, 2.0),
    ({"alpha_pattern": {"^layers.0.self_attn.q_proj": 24}}, 2.0)])
def test_scales(tmp_path, config, scale):
    adapter = read(write_adapter(tmp_path / "a", drawn(1, 8, QV), **config))
    assert adapter.modules[Q0].scale == pytest.approx(scale)


def test_ranks_by_pattern(tmp_path):
    pairs = drawn(1, 4, ("v_proj",)) | drawn(2, 12, ("q_proj",))
    adapter = read(write_adapter(tmp_path / "a", pairs, r=4, rank_pattern={"q_proj": 12}, lora_alpha=6))
    assert (adapter.rank, adapter.modules[Q0].scale, adapter.modules[V1].scale) == (12, 0.5, 1.5)
    with pytest.raises(CheckpointError, match=r"q_proj has rank 12, its adapter_config.json says 4"):
        read(write_adapter(tmp_path / "b", pairs, r=4))


@pytest.mark.parametrize("targets", [
    "all-linear", None, r".*\.(q|v)_proj", ["q_proj", "v_proj"], [Q0.replace("0", "1")]])
def test_targets(tmp_path, targets):
    folder = write_adapter(tmp_path / "a", drawn(1, 8, QV), target_modules=targets)
    if targets and targets[0].startswith("model"):
        with pytest.raises(CheckpointError, match="target_modules of its adapter_config.json names no such module"):
            read(folder)
    else:
        assert len(read(folder).modules) == 4


@pytest.mark.parametrize("prefix", ["base_model.model.", "base_model.model.language_model.", ""])
def test_names_as_models_of_text_and_images_have_them(tmp_path, prefix):
    assert Q0 in read(write_adapter(tmp_path / "a", drawn(1, 8, QV), prefix=prefix)).modules


@pytest.mark.parametrize("dtype", ["f32", "f16", "bf16", "f64"])
def test_dtypes(tmp_path, dtype):
    def as_stored(values):
        if dtype == "bf16":
            return Stored("bf16", values.shape, (values.view(np.uint32) >> 16).astype("<u2").tobytes())
        return values.astype({"f32": "f4", "f16": "f2", "f64": "f8"}[dtype])
    pairs = drawn(1, 8, QV)
    stored = {f"base_model.model.{name}.lora_{side}.default.weight": as_stored(value) for name, pair in pairs.items()
              for side, value in zip("AB", pair, strict=True)}
    (tmp_path / "a").mkdir()
    adapter = read(write_adapter(tmp_path / "a", {}, stored, r=8, lora_alpha=8, target_modules=list(QV)))
    a, b = pairs[Q0]
    assert np.allclose(delta(adapter.modules[Q0]), b @ a, atol=0.05)
    assert floats(adapter.modules[Q0].a).dtype == np.float32


def test_factors_keep_what_others_see_small():
    """A token of another adapter is multiplied with A too, before the mask: no A may make much of it."""
    a = np.array([[300.0, -7.0], [0.25, 0.5], [0.0, 0.0]], np.float32)
    b = np.arange(6, dtype=np.float32).reshape(2, 3)
    raw = [RawTensor("f32", x.shape, x.view(np.uint8).reshape(-1)) for x in (a, b)]
    small, large = Pair(*raw, 1.5).factors()
    assert np.abs(small).max() <= 1 and (small[1:] == a[1:]).all()
    assert (large.astype(np.float64) @ small == 1.5 * b.astype(np.float64) @ a).all()


def edited(folder, change):
    """The weights' header, changed."""
    data = (folder / WEIGHTS).read_bytes()
    (length,) = struct.unpack_from("<Q", data)
    header = json.loads(data[8:8 + length])
    change(header)
    head = json.dumps(header).encode()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", len(head)) + head + data[8 + length:])


NAN, INF = np.full((8, 64), np.nan, np.float32), np.full((128, 8), np.inf, np.float32)
CASES = {
    "truncated": (lambda f: (f / WEIGHTS).write_bytes((f / WEIGHTS).read_bytes()[:-9]), "cut short"),
    "no header": (lambda f: (f / WEIGHTS).write_bytes(b"PK\3\4" + bytes(99)), "not a safetensors file"),
    "empty": (lambda f: (f / WEIGHTS).write_bytes(b""), "empty"),
    "no config": (lambda f: (f / CONFIG).unlink(), "no adapter in PEFT's form"),
    "a model": (lambda f: ((f / CONFIG).unlink(), (f / "config.json").write_text("{}")), "served by itself"),
    "no weights": (lambda f: (f / WEIGHTS).unlink(), "lacks adapter_model.safetensors"),
    "pickle": (lambda f: (f / WEIGHTS).rename(f / "adapter_model.bin"), "pickle can run code and is never loaded"),
    "deep config": (lambda f: (f / CONFIG).write_text("[" * 100_000), "not valid JSON"),
    "config is a list": (lambda f: (f / CONFIG).write_text("[]"), "must be a JSON object"),
    "one side": (lambda f: edited(f, lambda h: h.__setitem__(
        f"base_model.model.{Q0}.lora_C.weight", h.pop(f"base_model.model.{Q0}.lora_A.weight"))), "no part of a plain"),
    "nan": (lambda f: write_adapter(f, drawn(1, 8, QV) | {Q0: (NAN, drawn(1, 8, QV)[Q0][1])}), "no finite numbers"),
    "inf": (lambda f: write_adapter(f, drawn(1, 8, QV) | {Q0: (drawn(1, 8, QV)[Q0][0], INF)}), "no finite numbers"),
    "other model": (lambda f: write_adapter(f, {Q0: (np.ones((8, 48), "f4"), np.ones((128, 8), "f4"))}),
                    r"A \[8, 48\] and B \[128, 8\]; the model's weight is \[128, 64\]"),
    "three axes": (lambda f: write_adapter(f, {Q0: (np.ones((8, 8, 8), "f4"), np.ones((128, 8), "f4"))}), "must be"),
    "no rank": (lambda f: write_adapter(f, {Q0: (np.ones((0, 64), "f4"), np.ones((128, 0), "f4"))}), "must be"),
    "huge rank": (lambda f: write_adapter(f, drawn(1, 65, QV)), r"rank 65, the limit is 64 \(--max-lora-rank\)"),
    "integers": (lambda f: write_adapter(f, {Q0: (np.ones((8, 64), "i4"), np.ones((128, 8), "f4"))}), "stored as I32"),
    "layer 9": (lambda f: write_adapter(f, {Q0.replace("0", "9"): drawn(1, 8, QV)[Q0]}), "the model does not have"),
    "head": (lambda f: write_adapter(f, {"lm_head": drawn(1, 8, QV)[Q0]}), "the head or the embedding"),
    "embedding": (lambda f: write_adapter(f, drawn(1, 8, QV), {
        "base_model.model.model.embed_tokens.lora_embedding_A": np.ones((8, 131), "f4")}), "adapter of the embedding"),
    "bias": (lambda f: write_adapter(f, drawn(1, 8, QV), {f"base_model.model.{Q0}.bias": np.ones(128, "f4")}),
             "a trained bias"),
    "escapes": (lambda f: write_adapter(f, {"\x1b[2J\u202ex": drawn(1, 8, QV)[Q0]}),
                r"changes '\\x1b\[2J\\u202ex', which"),
    "escapes in patterns": (lambda f: write_adapter(f, drawn(1, 8, QV), rank_pattern={"\x1b[2J": 3}), "rank_pattern"),
    "many digits": (lambda f: (f / CONFIG).write_text('{"r": ' + "1" * 5001 + "}"), "thousands of digits"),
    "nothing": (lambda f: write_adapter(f, {}), "would change nothing"),
}


@pytest.mark.parametrize("case", CASES)
def test_hostile_files(tmp_path, case):
    folder = write_adapter(tmp_path / "a", drawn(1, 8, QV))
    change, words = CASES[case]
    change(folder)
    with pytest.raises(CheckpointError, match=words) as caught:
        read(folder)
    assert str(caught.value).isprintable()


def test_what_a_message_quotes_of_a_file_steers_no_terminal():
    assert str(CheckpointError("a\x1b[2J\u202eb\x07")) == "a?[2J?b?"


@pytest.mark.parametrize("key", REFUSED)
def test_what_computes_something_else_is_refused_by_name(tmp_path, key):
    folder = write_adapter(tmp_path / "a", drawn(1, 8, QV), **{key: "all" if key == "bias" else ["x"]})
    with pytest.raises(CheckpointError, match=f"{key} = .*, which is not supported"):
        read(folder)
    assert read(write_adapter(tmp_path / "b", drawn(1, 8, QV), **{key: None})).rank == 8


@pytest.mark.parametrize(("config", "words"), [
    ({"r": 0}, "r = 0"), ({"r": True}, "r = True"), ({"lora_alpha": "x"}, "lora_alpha"),
    ({"lora_alpha": 1e999}, "lora_alpha"),
    ({"peft_type": "IA3"}, "peft_type"), ({"rank_pattern": {"(a+)+$": 3}}, "no regular expressions"),
    ({"rank_pattern": {f"x{i}": 1 for i in range(5000)}}, "at most 4096"), ({"target_modules": [1]}, "target_modules"),
    ({"init_lora_weights": "pissa_niter_4"}, "changes the base"), ({"use_rslora": "yes"}, "use_rslora")])
def test_settings_out_of_range(tmp_path, config, words):
    with pytest.raises(CheckpointError, match=words):
        read(write_adapter(tmp_path / "a", drawn(1, 8, QV), **config))


def test_values_beyond_the_compute_dtype(tmp_path):
    folder = write_adapter(tmp_path / "a", drawn(1, 8, QV), lora_alpha=1e6)
    assert read(folder, largest=3e38).rank == 8
    with pytest.raises(CheckpointError, match="beyond 65504, the most that the compute dtype holds"):
        read(folder, largest=65504.0)


@settings(max_examples=150, deadline=None)
@given(at=st.integers(0, 400), byte=st.integers(0, 255), config=st.booleans())
def test_a_damaged_file_is_an_adapter_or_an_error_that_says_so(tmp_path_factory, at, byte, config):
    folder = tmp_path_factory.getbasetemp() / "damaged"
    write_adapter(folder, {Q0: drawn(1, 8, QV)[Q0]})
    path = folder / (CONFIG if config else WEIGHTS)
    data = bytearray(path.read_bytes())
    data[at % len(data)] = byte
    path.write_bytes(data)
    try:
        read(folder)
    except CheckpointError as error:
        assert str(folder) in str(error)


def test_paths_and_names(tmp_path):
    assert named(["a=/x", "b/c=owner/repo"]) == {"a": "/x", "b/c": "owner/repo"}
    for wrong in (["a"], ["=x"], ["a="], ["a=x", "a=y"], ["a b=x"], ["default=x"]):
        with pytest.raises(ConfigError, match="--lora"):
            named(wrong)
    for wrong in ("", "a b", "../x", "x" * 129, "é", "base"):
        with pytest.raises(RequestError):
            check_name(wrong, ("base",))
    assert resolve_adapter(str(tmp_path)) == tmp_path
    for wrong in ("/nowhere", "a/b/c", "", "no-slash"):
        with pytest.raises(CheckpointError, match="no such folder"):
            resolve_adapter(wrong)


def test_an_adapter_of_the_hub_is_fetched_as_models_are():
    name = hub.parse_name("owner/adapter")
    files, model = hub.choose_files(name, [CONFIG, WEIGHTS, "README.md", "optimizer.pt"])
    assert sorted(files) == [CONFIG, WEIGHTS] and model is None
    with pytest.raises(CheckpointError, match="pickle"):
        hub.choose_files(name, [CONFIG, "adapter_model.bin"])
