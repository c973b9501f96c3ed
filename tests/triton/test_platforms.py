"""The cuda and rocm platforms on the interpreter, beyond the conformance kit: quantized checkpoints as they are
published, a whole engine with graphs, what is kept by which kernel."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from .interpreter import prepare

if prepare().type != "cpu":
    pytest.skip("an emulation of the device that is here", allow_module_level=True)

from isthmus.conformance.driver import Driver, Model
from isthmus.core.config import CacheSettings, Config, ModelSettings
from isthmus.core.discovery import load_platform
from isthmus.core.engine import EngineCore
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.platform import Unavailable
from isthmus.platforms.triton_kit import moe_gemm

from ..checkpoints import tiny_llama_gguf, write_safetensors
from ..emulation.cuda.platform import Platform as Cuda
from ..emulation.recorder import RecordedGraph
from ..emulation.rocm.platform import Platform as Rocm
from ..harness import Runner
from ..scheme_files import write_config, written

COST = 20  # seconds
TOKENS = [5, 9, 3, 120, 7, 7, 44]


def runner(kind: type, folder, dtype: str, **options: str) -> Driver:
    platform = kind(options)
    manifest = platform.probe()
    return Driver(Model(platform, manifest, folder, dtype, manifest.page_sizes[0]))


@pytest.fixture(scope="module")
def dense(tmp_path_factory):
    """Logits of a scheme's dequantized values on the reference, by scheme and kind of model."""
    def logits(scheme: str, kind: str, values: dict) -> np.ndarray:
        folder = tmp_path_factory.mktemp(f"dense-{scheme}-{kind}")
        write_config(folder, kind)
        write_safetensors(folder / "model.safetensors", values, {"format": "pt"})
        return Runner("reference", folder, "f64").logits((1, TOKENS))[0]
    return logits


CHECKPOINTS = [("awq", "llama", "int4"), ("gptq4", "llama", "int4"), ("gptq8-v2", "llama", "int8"),
               ("fp8", "llama", "fp8"), ("int8", "llama", "int8"), ("ct-nvfp4", "llama", "nvfp4"),
               ("quark-mxfp4", "llama", "mxfp4"),
               ("awq", "qwen3_moe", "int4"), ("fp8", "qwen3_moe", "fp8")]


@pytest.mark.parametrize("scheme, kind, label", CHECKPOINTS)
def test_a_quantized_checkpoint_gives_the_logits_of_its_dequantized_self(tmp_path, dense, scheme, kind, label):
    folder, values = written(tmp_path, scheme, kind)
    made, want = runner(Cuda, folder, "f32"), dense(scheme, kind, values)
    assert any(label in line for line in made.model.loaded.report), made.model.loaded.report
    assert np.mean((made.logits((1, TOKENS))[0] - want) ** 2) < 1e-9 * np.mean(want ** 2)


@pytest.mark.parametrize("kind", [Cuda, Rocm])
@pytest.mark.parametrize("scheme", ["int8", "fp8"])
def test_narrow_activations_are_close_and_asked_for(tmp_path, dense, scheme, kind):
    folder, values = written(tmp_path, scheme, "llama")
    made, want = runner(kind, folder, "bf16", activations="8bit"), dense(scheme, "llama", values)
    assert any("8-bit activations" in line for line in made.model.loaded.report), made.model.loaded.report
    error = np.mean((made.logits((1, TOKENS))[0] - want) ** 2) / np.mean(want ** 2)
    assert 1e-6 < error < 2e-2


@pytest.mark.parametrize("scheme, option, dtype, narrow", [
    ("fp8", None, "bf16", True), ("fp8", "16bit", "bf16", False), ("fp8", None, "f32", False),
    ("int8", None, "bf16", False), ("int8", "8bit", "bf16", True), ("int8 of both", None, "bf16", True)])
def test_the_checkpoint_decides_on_activations(tmp_path, scheme, option, dtype, narrow):
    eight = {"num_bits": 8, "type": "int", "symmetric": True}
    both = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": eight | {"strategy": "channel"},
                                          "input_activations": eight | {"strategy": "token", "dynamic": True}}}}
    folder, _ = written(tmp_path, scheme.split()[0], "llama", both if "both" in scheme else None)
    made = runner(Cuda, folder, dtype, **({"activations": option} if option else {}))
    assert any("8-bit activations" in line for line in made.model.loaded.report) == narrow, made.model.loaded.report


INT8 = {"num_bits": 8, "type": "int", "symmetric": True}
INT8_STATIC = {"config_groups": {"group_0": {"targets": ["Linear"], "weights": INT8 | {"strategy": "channel"},
                                             "input_activations": INT8 | {"strategy": "tensor", "dynamic": False}}}}


@pytest.mark.parametrize("kind", [Cuda, Rocm])
@pytest.mark.parametrize("scheme, changes", [("fp8-static", {}), ("modelopt-fp8", {}), ("int8", INT8_STATIC)])
def test_a_calibrated_scale_of_activations_is_used(tmp_path, kind, scheme, changes):
    """The products are those of the dequantized weights and of activations in whole codes of the file's scale."""
    scale, layer = 0.03, "model.layers.0.mlp."
    stored = {f"{layer}{part}_proj.input_scale": np.array([value], np.float32)
              for part, value in (("gate", scale), ("up", scale / 2))}
    folder, values = written(tmp_path, scheme, "llama", changes, stored)
    made = runner(kind, folder, "bf16")
    assert "calibrated scales of activations: used for 14 of 14 weights" in made.model.loaded.report
    assert any("static 8-bit activations" in line for line in made.model.loaded.report), made.model.loaded.report
    x = torch.randn(3, 160, generator=torch.Generator().manual_seed(0)).bfloat16()
    x[0, 0] = 300  # beyond the scale
    largest = 127 if scheme == "int8" else 448
    codes = torch.clamp(x.float() / np.float32(scale), -largest, largest)
    codes = codes.round() if scheme == "int8" else codes.to(torch.float8_e4m3fn).float()
    weight = np.concatenate([values[f"{layer}{part}_proj.weight"] for part in ("gate", "up")])
    want = (codes.double().numpy() * scale) @ weight.T.astype(np.float64)
    ((leaf,),) = made.model.loaded.weights["layers"][0]["gate_up"].runs
    got = leaf.product(x).double().numpy()
    assert np.mean((got - want) ** 2) < 1e-5 * np.mean(want ** 2)


@pytest.mark.parametrize("option, used", [("declared", 14), ("8bit", 0), ("16bit", 0)])
def test_a_calibrated_scale_may_be_left_alone(tmp_path, option, used):
    folder, _ = written(tmp_path, "fp8-static", "llama")
    report = runner(Cuda, folder, "bf16", activations=option).model.loaded.report
    assert any(f"used for {used} of 14 weights" in line for line in report), report


def test_another_word_for_activations_is_refused():
    with pytest.raises(Unavailable, match="declared, 8bit, 16bit"):
        Cuda({"activations": "4bit"}).probe()


def test_an_engine_gives_the_text_of_cpu(tmp_path):
    """Prompts of several lengths together, one behind another's prefix, greedy and drawn, over replayed graphs."""
    path = tiny_llama_gguf(tmp_path / "tiny.gguf")
    texts = {}
    for name in ("cpu", "cuda"):
        config = Config(model=ModelSettings(model=str(path), dtype="float32"),
                        cache=CacheSettings(kv_cache_memory="1MiB"))
        engine = EngineCore(config, platform=Cuda({}) if name == "cuda" else load_platform("cpu", {"threads": "1"}))
        before = RecordedGraph.replayed
        for i, (prompt, more) in enumerate([([5, 6, 7], {}), (list(range(3, 40)), {}), (list(range(3, 36)), {}),
                                            ([9, 9], {"temperature": 0.8, "seed": 4, "top_p": 0.9, "top_k": 40})]):
            engine.submit(Submit(str(i), pack_ids(prompt), SamplingParams(
                **{"max_tokens": 6, "temperature": 0.0, "ignore_eos": True, **more})))
        found: dict[str, list[int]] = {}
        while engine.has_work:
            for output in engine.step():
                assert output.finish != "error", output.error
                found.setdefault(output.id, []).extend(np.frombuffer(output.tokens, np.int32).tolist())
        engine.command("verify")
        assert (RecordedGraph.replayed > before) == (name == "cuda")
        engine.close()
        texts[name] = found
    assert texts["cuda"] == texts["cpu"]


def test_padding_tokens_of_a_bucket_reach_no_expert(tmp_path, monkeypatch):
    folder, _ = written(tmp_path, "fp8", "qwen3_moe")
    made, seen, route = runner(Cuda, folder, "f32"), [], moe_gemm.route

    def spy(logits, spec, bias=None, live=None):
        ids, weights = route(logits, spec, bias, live)
        seen.append((len(ids), int((ids >= 0).any(1).sum())))
        return ids, weights

    monkeypatch.setattr(moe_gemm, "route", spy)
    made.logits((1, TOKENS))
    assert seen and all(size > living for size, living in seen)
    assert {living for _, living in seen} == {len(TOKENS)}
