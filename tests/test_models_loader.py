"""Loading: names, shapes and formats are checked before the first weight is placed, and each fault is named."""
from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import quantize
from isthmus.core.discovery import load_platform
from isthmus.core.errors import CheckpointError
from isthmus.core.models import loader
from isthmus.core.models.loader import LoadedModel, load_model, model_name
from isthmus.core.platform import Unsupported
from isthmus.core.specs import LayerState
from isthmus.core.weights.checkpoint import open_checkpoint
from safetensors.torch import load_file, save_file

from .checkpoints import Stored, as_gguf, tiny_llama_metadata, tiny_weights, write_gguf
from .tiny import tiny_model
from .tiny_gguf import tiny_gguf

COST = 15  # seconds


class Recorder:
    """The reference platform, which notes what it was asked and given; `refuses` maps an op to a reason."""

    def __init__(self, refuses: dict[str, str] | None = None):
        self.platform, self.refuses = load_platform("reference"), refuses or {}
        self.asked: list[tuple[str, dict]] = []
        self.loaded: list[tuple[str, ...]] = []
        self.dtypes: dict[tuple[str, ...], str] = {}

    def supports(self, op: str, **case) -> str | None:
        self.asked.append((op, case))
        return self.refuses.get(op)

    def load(self, raws, spec, dtype):
        self.loaded.append(spec.names)
        self.dtypes[spec.names] = dtype
        return self.platform.load(raws, spec, dtype)

    def describe(self, weight) -> str:
        return self.platform.describe(weight)


def load(path: Path, platform: Recorder | None = None, dtype: str = "f32", lacks: tuple[str, ...] = (),
         **kwargs) -> LoadedModel:
    platform = platform or Recorder()
    manifest = platform.platform.probe()
    manifest = replace(manifest, features=manifest.features - {*lacks})
    with open_checkpoint(path) as checkpoint:
        return load_model(checkpoint, platform, manifest, dtype, **kwargs)


def edited(kind: str, folder: Path, config: dict | None = None, **tensors: torch.Tensor | None) -> Path:
    """A copy of a tiny model with changed configuration keys and tensors (None = left out)."""
    source = tiny_model(kind)
    settings = json.loads((source / "config.json").read_text()) | (config or {})
    (folder / "config.json").write_text(json.dumps(settings))
    weights = load_file(source / "model.safetensors") | tensors
    save_file({name: w.contiguous() for name, w in weights.items() if w is not None}, folder / "model.safetensors")
    return folder


def test_tree_of_a_tied_model():
    platform = Recorder()
    model = load(tiny_model("llama3"), platform)
    assert model.weights["head"] is model.weights["embed"]
    assert model.state_layers == (LayerState(2, 16),) * 3 and model.dtype == "f32"
    assert model.config.name == "llama3" and model.config.eos_ids == (1,)
    q, k, v = (f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv")
    assert (q, k, v) in platform.loaded and sum(map(len, platform.loaded)) == 2 + 3 * 9
    assert model.report == ["22 x f32"]


def test_parts_of_different_formats_are_leaves_of_their_own():
    platform = Recorder()
    model = load(tiny_gguf("qwen2")[0], platform)
    layer = "model.layers.0.self_attn."
    assert (layer + "q_proj.weight", layer + "k_proj.weight") in platform.loaded
    assert (layer + "v_proj.weight",) in platform.loaded
    assert (layer + "q_proj.bias", layer + "k_proj.bias") in platform.loaded
    assert (layer + "v_proj.bias",) in platform.loaded
    assert [len(leaves) for leaves in model.weights["layers"][0]["qkv"].runs] == [2, 2]


def test_report_says_what_is_kept_and_what_is_expanded_and_why():
    report = load(tiny_gguf("llama3")[0]).report
    assert report[0] == "6 x q4_1 as codes of uint8, groups of 32" and "3 x f32" in report
    assert "4 x q8_0 as codes of int8, groups of 32" in report
    expanded = [line for line in report if line.endswith(" expanded to float32 (no kernel on reference)")]
    assert len(expanded) == 1 and expanded[0].startswith("3 x q5_0, ")


def test_a_report_begins_with_what_most_matrices_are():
    platform = Recorder({"linear": "only on Tuesdays"})
    report = load(tiny_gguf("llama3")[0], platform).report
    assert report[0].endswith(" expanded to float32 (only on Tuesdays)"), "a banner has room for the first alone"


def test_a_format_that_the_platform_declines_for_this_dtype_is_expanded_with_its_reason():
    report = "\n".join(load(tiny_gguf("llama3")[0], Recorder({"linear": "only on Tuesdays"})).report)
    assert "6 x q4_1, 4 x q8_0, 3 x q4_0 expanded to float32 (only on Tuesdays)" in report


@pytest.mark.parametrize("word", ["float32", "f32", "8 experts, float32"])
def test_what_the_platform_has_a_kernel_for_and_expands_all_the_same_is_reported_as_expanded(word):
    class Table(Recorder):
        def describe(self, weight) -> str:
            return word if self.loaded[-1] == ("model.embed_tokens.weight",) else "int4"

    kept, expanded = load(tiny_gguf("llama3")[0]), load(tiny_gguf("llama3")[0], Table())
    assert "6 x q4_1 as int4" in expanded.report and "3 x q8_0 as int4" in expanded.report
    assert "1 x q8_0 expanded to float32 (the embedding)" in expanded.report
    values = kept.config.vocab_size * kept.config.hidden
    assert expanded.nbytes - kept.nbytes == 4 * values - values // 32 * 34, "float32 in place of blocks of q8_0"


def test_strict_refuses_with_the_list():
    platform = Recorder()
    with pytest.raises(Unsupported, match="q5_0.*no kernel.*q5_1"):
        load(tiny_gguf("llama3")[0], platform, strict=True)
    assert not platform.loaded
    assert load(tiny_model("llama3"), strict=True).report == ["22 x f32"]


@pytest.mark.parametrize("weight, stored, reason", [("embed_tokens", "q8_0", "the embedding"),
                                                    ("layers.0.self_attn.o_proj", "q5_0", "its shape")])
def test_strict_refuses_what_the_platform_expands_though_it_has_the_kernel(weight, stored, reason, monkeypatch):
    class Picky(Recorder):
        def describe(self, leaf) -> str:
            return "float32" if self.loaded[-1] == (name,) else super().describe(leaf)

    name, path = f"model.{weight}.weight", tiny_gguf("llama3")[0]
    monkeypatch.setattr(loader, "_format_reasons", lambda *given, plain=loader._format_reasons: (
        dict.fromkeys(plain(*given))))  # it claims a kernel for every format
    with pytest.raises(Unsupported) as refused:
        load(path, Picky(), strict=True)
    assert str(refused.value) == f"--strict: {name} is stored as {stored} and would be expanded to float32 ({reason})"
    assert any(f" x {stored}" in line and line.endswith(f" expanded to float32 ({reason})")
               for line in load(path, Picky()).report)


def test_strict_on_a_platform_that_looks_its_embedding_up_as_values(tmp_path):
    """Its kernel for q8_0 serves matrices only, so a tied head is expanded too."""
    tensors, platform = as_gguf(tiny_weights()), load_platform("cpu", {"kernels": "torch"})
    values = tensors["token_embd.weight"]
    tensors["blk.0.attn_output.weight"] = matrix = stored_q8_0(tensors["blk.0.attn_output.weight"])
    paths = [write_gguf(tmp_path / "dense.gguf", tiny_llama_metadata(), tensors), write_gguf(
        tmp_path / "quantized.gguf", tiny_llama_metadata(), tensors | {"token_embd.weight": stored_q8_0(values)})]
    manifest = platform.probe()
    with open_checkpoint(paths[0]) as checkpoint:
        report = load_model(checkpoint, platform, manifest, "bf16", strict=True).report
    assert matrix.dtype == "q8_0" and "1 x q8_0 as int8" in report
    with open_checkpoint(paths[1]) as checkpoint:
        with pytest.raises(Unsupported, match=r"--strict: model.embed_tokens.weight.*q8_0.*bfloat16 \(the embedding\)"):
            load_model(checkpoint, platform, manifest, "bf16", strict=True)
    platform.close()


def stored_q8_0(values: np.ndarray) -> Stored:
    return Stored("q8_0", values.shape, quantize(values, GGMLQuantizationType.Q8_0).tobytes())


def test_attention_is_asked_once_for_each_case():
    platform = Recorder()
    load(tiny_model("gemma3"), platform, page_size=32)
    asked = [case for op, case in platform.asked if op == "attention"]
    assert [case["window"] for case in asked] == [6, None]
    assert asked[0] | {"window": None} == asked[1] == dict(
        head_dim=32, heads=4, kv_heads=2, page_size=32, window=None, softcap=None, dtype="f32")
    with pytest.raises(Unsupported, match="reference.*attention: heads too narrow"):
        load(tiny_model("gemma3"), Recorder({"attention": "heads too narrow"}))


def test_the_sparse_layer_is_asked_with_each_of_its_formats():
    platform = Recorder()
    model = load(tiny_gguf("qwen3-moe-every")[0], platform)
    asked = [case for op, case in platform.asked if op == "moe"]
    assert asked == [dict(experts=6, top_k=3, format=name, dtype="f32") for name in ("f32", "q4_0")]
    assert "9 x q4_0 as 6 experts, codes of uint8, groups of 32" in model.report
    with pytest.raises(Unsupported, match="reference.*sparse layers: too few"):
        load(tiny_model("mixtral"), Recorder({"moe": "too few"}))


def test_groups_a_bias_and_a_part_of_the_head_are_asked_of_those_who_have_the_feature():
    platform = Recorder()
    load(tiny_model("glm4-moe"), platform, "f64")
    routing = dict(experts=12, top_k=3, groups=4, top_groups=2, bias=True)
    assert [case for op, case in platform.asked if op == "moe"] == [routing | dict(format="f64", dtype="f64")]
    assert [case for op, case in platform.asked if op == "rope"] == [dict(head_dim=32, rotated=16, dtype="f64")]
    bias = tuple(name for name in platform.dtypes if "e_score_correction_bias" in name[0])
    assert len(bias) == 2 and {platform.dtypes[name] for name in bias} == {"f32"}
    for refuses, lacks, words in (({"moe": "no bias"}, (), "sparse layers: no bias"),
                                  ({"rope": "whole heads"}, (), "rotary embedding: whole heads"),
                                  ({}, ("moe",), "sparse layers: it has no sparse feed-forward"),
                                  ({}, ("expert_groups",), "sparse layers: it has no experts chosen in groups"),
                                  ({"partial_rope": "older"}, ("partial_rope",), "rotary embedding: older")):
        platform = Recorder(refuses)
        with pytest.raises(Unsupported, match=f"reference cannot do this model's {words}"):
            load(tiny_model("glm4-moe"), platform, lacks=lacks)
        assert not platform.loaded and not (lacks and any("groups" in case for _, case in platform.asked))
    asked = Recorder()
    load(tiny_model("mixtral"), asked, lacks=("expert_groups", "partial_rope"))
    assert not [case for op, case in asked.asked if op == "rope" or "groups" in case], "what no model needs"


def test_layers_that_draft_are_passed_over_where_the_configuration_has_them(tmp_path):
    spare = {f"model.layers.3.{name}": torch.zeros(4) for name in ("eh_proj.weight", "mlp.gate.weight")}
    load(edited("glm4-moe", tmp_path, **spare))
    with pytest.raises(CheckpointError, match=r"unknown model.layers.3.eh_proj.weight, model.layers.3.mlp.gate"):
        load(edited("glm4-moe", tmp_path, {"num_nextn_predict_layers": 0}, **spare))


def test_experts_one_by_one_come_with_their_number():
    class Noting(Recorder):
        def load(self, raws, spec, dtype):
            noted[spec.role, len(raws), spec.experts, spec.cut] += 1
            return super().load(raws, spec, dtype)

    noted = Counter()
    load(tiny_model("mixtral"), Noting())
    assert (noted["experts", 10, 5, 0], noted["experts", 5, 5, 1]) == (3, 3)
    noted.clear()
    load(tiny_gguf("mixtral")[0], Noting())
    assert (noted["experts", 2, 5, 0], noted["experts", 1, 5, 1]) == (3, 3)


def test_strict_refuses_experts_that_would_be_expanded():
    class NoExperts(Recorder):
        def supports(self, op: str, **case) -> str | None:
            return "one by one" if op == "moe" and case["format"] == "q4_0" else super().supports(op, **case)

    path, platform = tiny_gguf("qwen3-moe-every")[0], NoExperts()
    with pytest.raises(Unsupported, match=r"--strict: .*q4_0 \(one by one\)"):
        load(path, platform, strict=True)
    assert not platform.loaded
    assert "9 x q4_0 expanded to float32 (one by one)" in load(path, NoExperts()).report


def test_unknown_dtype():
    with pytest.raises(Unsupported, match="bf16.*f64, f32"):
        load(tiny_model("llama3"), dtype="bf16")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gemma_norms_get_their_one(tmp_path, dtype):
    stored = torch.linspace(-0.5, 0.5, 64).to(dtype)
    model = load(edited("gemma3", tmp_path, **{"model.norm.weight": stored}))
    np.testing.assert_array_equal(model.weights["norm"].values, stored.float().numpy() + np.float32(1))
    assert abs(load(tiny_model("llama2")).weights["norm"].values.mean() - 1) < 0.2


def test_gguf_norms_have_their_one_already():
    with open_checkpoint(tiny_gguf("gemma3")[0]) as checkpoint:
        stored = np.frombuffer(checkpoint.tensor("model.norm.weight").data, np.float32).copy()
    np.testing.assert_array_equal(load(tiny_gguf("gemma3")[0]).weights["norm"].values, stored)


def test_text_part_of_a_text_and_image_checkpoint(tmp_path):
    text = json.loads((tiny_model("gemma3") / "config.json").read_text())
    for i, style in enumerate(("language_model.model.", "model.language_model.")):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({"model_type": "gemma3", "text_config": text}))
        weights = load_file(tiny_model("gemma3") / "model.safetensors")
        renamed = {style + name.removeprefix("model."): w for name, w in weights.items()}
        save_file(renamed | {"vision_tower.patch.weight": torch.zeros(3)}, folder / "model.safetensors")
        plain, wrapped = load(tiny_model("gemma3")), load(folder)
        assert np.array_equal(plain.weights["embed"].values, wrapped.weights["embed"].values)


def test_generation_config_says_what_ends_a_text(tmp_path):
    folder = edited("llama3", tmp_path)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7, 5]}')
    assert load(folder).config.eos_ids == (5, 7)
    (folder / "generation_config.json").write_text('{"eos_token_id": "end"}')
    with pytest.raises(CheckpointError, match="eos_token_id.*'end'"):
        load(folder)


def test_progress_counts_bytes():
    seen: list[tuple[int, int]] = []
    load(tiny_model("llama3"), progress=lambda done, total: seen.append((done, total)))
    size = sum(w.numel() * 4 for w in load_file(tiny_model("llama3") / "model.safetensors").values())
    assert seen[-1] == (size, size) and seen == sorted(seen) and len(seen) > 10


E = "model.layers.2.mlp.experts.4.up_proj.weight"
NORM, Q = "model.layers.1.input_layernorm.weight", "model.layers.0.self_attn.q_proj.weight"


@pytest.mark.parametrize("kind,config,tensors,words", [
    ("llama3", {}, {NORM: None, Q: None}, ["lacks", NORM, Q, "'llama'"]),
    ("llama3", {}, {"model.layers.0.self_attn.q_proj.bias": torch.zeros(64)}, ["unknown", "q_proj.bias"]),
    ("llama3", {"num_hidden_layers": 2}, {}, ["unknown", "model.layers.2.", "and 1 more"]),
    ("llama3", {}, {Q: torch.zeros(64, 32)}, [Q, "[64, 32]", "[64, 64]"]),
    ("llama3", {"vocab_size": 500}, {}, ["embed_tokens", "[131, 64]", "[500, 64]"]),
    ("llama3", {"tie_word_embeddings": False}, {}, ["lacks", "lm_head.weight"]),
    ("gemma3", {}, {"model.norm.weight": torch.zeros(64, dtype=torch.int8)}, ["model.norm.weight", "i8"]),
    ("llama3", {}, {Q: torch.zeros(64, 64, dtype=torch.int8)}, [Q, "i8", "quantized"]),
    ("qwen3-moe", {}, {E: None}, ["lacks", E, "'qwen3_moe'"]),
    ("qwen3-moe", {}, {E: torch.zeros(32, 64)}, [E, "[32, 64]", "[64, 64]"]),
    ("qwen3-moe", {"num_local_experts": 5}, {}, ["unknown", "model.layers.0.mlp.experts.5.down_proj.weight"]),
    ("mixtral", {"num_local_experts": 6}, {}, ["lacks", "model.layers.0.mlp.experts.5.gate_proj.weight"]),
    ("qwen3-moe", {}, {"model.layers.0.mlp.experts.gate_up_proj": torch.zeros(2, 3, 4)}, ["[2, 3, 4]", "2 * n"]),
    ("qwen3-moe", {"mlp_only_layers": []}, {}, ["lacks", "model.layers.1.mlp.experts.0.", "unknown"]),
])
def test_faults_are_named_before_anything_is_loaded(tmp_path, kind, config, tensors, words):
    platform = Recorder()
    with pytest.raises(CheckpointError) as error:
        load(edited(kind, tmp_path, config, **tensors), platform)
    for word in words:
        assert word in str(error.value)
    assert not platform.loaded


def test_tensors_that_no_model_needs_are_passed_over(tmp_path):
    spare = {"lm_head.weight": torch.zeros(131, 64), "model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(8)}
    assert load(edited("llama3", tmp_path, **spare)).report == ["22 x f32"]


def test_model_name():
    assert model_name(Path("/x/SmolLM2-Q4_1.gguf")) == "SmolLM2-Q4_1"
    assert model_name(Path("/x/Qwen2.5-0.5B")) == "Qwen2.5-0.5B"
    assert model_name(Path("/c/hub/models--Qwen--Qwen3-0.6B/snapshots/abc")) == "Qwen/Qwen3-0.6B"
