"""Experts divided among ranks: the parts add up to the whole layer, two ranks give the logits of one, and refusals."""
from __future__ import annotations

import importlib.util

import numpy as np
import pytest
from isthmus.conformance.opcase import plain, state, table, token_batch
from isthmus.conformance.tiny import tiny_model
from isthmus.core.config import CacheSettings, Config, ModelSettings, ParallelSettings, PlatformSettings
from isthmus.core.discovery import load_platform
from isthmus.core.engine import EngineCore
from isthmus.core.errors import CheckpointError, ConfigError
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.models.loader import load_model
from isthmus.core.platform import MoESpec, Unsupported, WeightSpec
from isthmus.core.weights.checkpoint import open_checkpoint
from isthmus.platforms.cut import held, rank_spec, shares
from isthmus.platforms.experts import by_expert

torch = pytest.importorskip("torch", reason="the torch platforms need torch")

COST = 12  # seconds


def engine(path, ranks: int, apart: bool = False) -> EngineCore:
    return EngineCore(Config(model=ModelSettings(model=str(path), dtype="float32"),
                             platform=PlatformSettings(platform="cpu", platform_option=("threads=1",)),
                             cache=CacheSettings(kv_cache_memory="4MiB"),
                             parallel=ParallelSettings(tensor_parallel_size=ranks, expert_parallel=apart)))


def told(made: EngineCore) -> tuple[dict[str, list[int]], dict[str, np.ndarray]]:
    """Tokens, and log-probabilities of the best ones at each, of two requests."""
    for name, prompt in (("a", [5, 6, 7]), ("b", list(range(3, 60)))):
        made.submit(Submit(name, pack_ids(prompt), SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True,
                                                                  logprobs=8)))
    tokens: dict[str, list[int]] = {}
    values: dict[str, list[np.ndarray]] = {}
    while made.has_work:
        for output in made.step():
            assert output.finish != "error", output.error
            tokens.setdefault(output.id, []).extend(np.frombuffer(output.tokens, np.int32).tolist())
            if output.logprobs is not None:
                values.setdefault(output.id, []).append(np.frombuffer(output.logprobs.top, np.float32))
    made.close()
    return tokens, {name: np.concatenate(parts) for name, parts in values.items()}


@pytest.mark.parametrize("kind", ["qwen3_moe", "glm4_moe"])
def test_two_ranks_with_half_of_the_experts_each_give_the_logits_of_one(kind):
    path = tiny_model(kind, 0)
    tokens, values = told(engine(path, 1))
    made = engine(path, 2, apart=True)
    assert "4 experts, float32" in " ".join(map(str, made._model.weights["layers"][1].values()))
    found, others = told(made)
    assert found == tokens
    for name, want in values.items():
        np.testing.assert_allclose(others[name], want, rtol=1e-4, atol=1e-5)


def part(platform, rank: int, world: int, tokens: int) -> np.ndarray:
    """What one rank's experts add to the layer's sum, of tokens that choose 2 of 8 experts."""
    rng = np.random.default_rng(7)
    x, router = rng.normal(size=(tokens, 32)), rng.normal(size=(8, 32))
    w13, w2 = rng.normal(size=(8, 2 * 16, 32)), rng.normal(size=(8, 32, 16))
    spec = MoESpec(8, 2)
    platform.probe()
    weights = {"x": platform.load(*table(x), "f32"),
               "router": platform.load([plain(router)], WeightSpec(("router",), "linear"), "f32")}
    platform._rank, platform._world = rank, world  # loads as that rank, and steps alone
    for name, values in (("w13", w13), ("w2", w2)):
        weights[name] = platform.load([plain(values)], WeightSpec((name,), "experts", "expert", 8), "f32")
    platform._rank, platform._world = 0, 1

    def forward(ops, w, batch):
        rows = ops.embed(batch.tokens, w["x"])
        return ops.moe(rows, ops.linear(rows, w["router"]), w["w13"], w["w2"], spec)
    step = platform.compile(forward, weights, None)
    out, _ = step(platform.alloc(state("f32", tokens + 1), tokens + 1), token_batch(tokens))
    values = np.asarray(out.collect(), np.float64)
    platform.close()
    return values


def composed():
    from .emulation.composed.platform import Platform
    return Platform({"graphs": "off"})


def interpreted():
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed")
    return load_platform("cuda_emulated", {"graphs": "off"})


@pytest.mark.parametrize("tokens", [3, 30])  # a few go another way on the accelerators
@pytest.mark.parametrize("make", [lambda: load_platform("cpu", {"threads": "1"}), composed, interpreted],
                         ids=["cpu", "composed", "interpreted"])
def test_the_parts_of_all_ranks_are_the_layer(make, tokens):
    whole = part(make(), 0, 1, tokens)
    for world in (2, 8):  # with 8 ranks many have nothing to do
        parts = [part(make(), rank, world, tokens) for rank in range(world)]
        np.testing.assert_allclose(sum(parts), whole, rtol=1e-4, atol=1e-4)
        assert max(np.abs(values - whole).max() for values in parts) > 0.1


def test_experts_go_to_ranks_whole_and_in_order():
    with open_checkpoint(tiny_model("qwen3_moe", 0)) as checkpoint:
        names = tuple(f"model.layers.1.mlp.experts.{n}.{end}_proj.weight" for n in range(8) for end in ("gate", "up"))
        raws, spec = [checkpoint.tensor(name) for name in names], WeightSpec(names, "experts", "expert", 8)
        for rank in range(4):
            mine = by_expert(shares(raws, spec, rank, 4), rank_spec(spec, rank, 4))
            assert held(8, rank, 4) == range(2 * rank, 2 * rank + 2) and len(mine) == 2
            for number, parts in zip(held(8, rank, 4), mine, strict=True):
                want = raws[2 * number:2 * number + 2]
                assert [bytes(raw.data) for raw in parts] == [bytes(raw.data) for raw in want]


@pytest.mark.parametrize("kind, ranks, error, words", [
    ("qwen3_moe", 1, ConfigError, "--expert-parallel: one rank has all experts"),
    ("llama", 2, CheckpointError, "this model has no experts"),
    ("qwen2_moe", 4, CheckpointError, "6 experts cannot be shared evenly by 4 ranks")])
def test_what_cannot_be_divided_is_refused(kind, ranks, error, words):
    with pytest.raises(error, match=words):
        engine(tiny_model(kind, 0), ranks, apart=True)


def test_a_platform_that_has_all_experts_everywhere_says_so():
    platform = load_platform("reference")
    manifest = platform.probe()
    with open_checkpoint(tiny_model("qwen3_moe", 0)) as checkpoint, \
            pytest.raises(Unsupported, match="--expert-parallel: reference cannot have some experts on each rank: "):
        load_model(checkpoint, platform, manifest, "f32", world=2, expert_parallel=True)
