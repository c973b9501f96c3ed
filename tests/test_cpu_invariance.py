"""On the cpu platform in bf16 a token's result has the same bits in any batch, chunk and cache hit, so that a seeded
text depends only on itself and its seed. torch's orders of sums were measured on processors with AVX-512 and no matrix
unit."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the cpu platform needs torch")

from isthmus import Engine  # noqa: E402
from isthmus.conformance.formats import quantized  # noqa: E402
from isthmus.core.errors import CheckpointError  # noqa: E402
from isthmus.core.plan import Batch  # noqa: E402
from isthmus.core.platform import AttentionSpec, LayerState, StateSpec, WeightSpec  # noqa: E402
from isthmus.core.weights.sources import resolve_model  # noqa: E402
from isthmus.platforms.cpu import quant  # noqa: E402
from isthmus.platforms.cpu.attention import AttentionPlan  # noqa: E402
from isthmus.platforms.cpu.compiled.library import open_best  # noqa: E402
from isthmus.platforms.cpu.kept import LayerCache  # noqa: E402

COST = 30  # seconds
PAGE = 16

by_torch = pytest.mark.skipif(
    not torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported(),
    reason="torch's products were measured on processors that multiply bf16 and have no matrix unit")


@by_torch
@pytest.mark.parametrize("name", ["bf16", "q4_1", "q8_0", "affine4_128"])
@pytest.mark.parametrize("outputs, inputs", [(192, 640), (128, 1536), (64, 5504), (64, 7040)])
def test_products(name: str, outputs: int, inputs: int):
    """5504 is the most that oneDNN was seen to sum without a break, 7040 is more."""
    rng = np.random.default_rng(outputs)
    x = torch.from_numpy(rng.normal(size=(600, inputs))).bfloat16()
    with torch.inference_mode():
        leaf = quant.load_weight([quantized(rng, name, (outputs, inputs))[0]], WeightSpec(("w",), "linear"), "bf16")
        whole = leaf.product(x)
        for rows in (1, 2, 3, 31, 33, 64, quant.MANY - 1, quant.MANY, quant.MANY + 1, 511):
            assert torch.equal(leaf.product(x[:rows]), whole[:rows]), f"{rows} rows"


@by_torch
def test_large_products_are_expanded_where_the_orders_agree():
    for inputs in (576, 1536):
        assert quant.orders_agree(inputs, 32, 1)


def attention(spec: AttentionSpec, heads: int, layer: LayerState, length: int) -> Callable[..., list[torch.Tensor]]:
    """Attention over four sequences whose K and V are in memory: takes rows (sequence, start, stop)."""
    random, rng = torch.Generator().manual_seed(1), np.random.default_rng(0)
    pages = -(-length // PAGE)
    tables = (rng.permutation(4 * pages) + 1).astype(np.int32).reshape(4, pages)
    tables[3].sort()
    cache = LayerCache.allocate(4 * pages + 1, StateSpec((layer,), "bf16", PAGE, 4), layer)
    q = torch.randn(4, length, heads, layer.head_dim, generator=random).bfloat16()
    places = np.arange(length)
    for table in tables:
        k, v = torch.randn(2, length, layer.kv_heads, layer.head_dim, generator=random).bfloat16()
        cache.write(torch.from_numpy(table[places // PAGE].astype(np.int64) * PAGE + places % PAGE), k, v)

    def run(*rows: tuple[int, int, int]) -> list[torch.Tensor]:
        starts = np.cumsum([0, *(stop - start for _, start, stop in rows)]).astype(np.int32)
        batch = Batch(*[None] * len(Batch._fields))._replace(
            slots=np.zeros(starts[-1], np.int32), starts=starts, pages=np.stack([tables[seq] for seq, _, _ in rows]),
            lengths=np.array([stop for _, _, stop in rows], np.int32))
        out = AttentionPlan(batch, PAGE).attend(torch.cat([q[seq, a:b] for seq, a, b in rows]), cache, spec)
        return list(out.split(np.diff(starts).tolist()))
    return run


@by_torch
@pytest.mark.parametrize("heads, kv_heads, dim, window", [
    (9, 3, 64, None), (4, 4, 64, None), (4, 1, 256, 512), (6, 3, 80, 200)])
def test_attention(heads: int, kv_heads: int, dim: int, window: int | None):
    """Positions around every edge of blocks, vectors and halves: alone, beside others, in chunks of many sizes."""
    length = 1500
    run = attention(AttentionSpec(dim ** -0.5, window), heads, LayerState(kv_heads, dim), length)
    with torch.inference_mode():
        base = torch.cat([run((0, start, start + 20))[0] for start in range(0, length, 20)])

        def check(got: torch.Tensor, start: int, how: str) -> None:
            differs = (got != base[start:start + len(got)]).flatten(1).any(1).nonzero().flatten().tolist()
            assert not differs, f"{how}: {len(differs)} of {len(got)} differ, the first is {start + differs[0]}"

        for size in (2, 33, 65, 129, 193, 257, 400, 512, 513, 800):
            for start in (0, 5, 300, 383, 512, 650):
                check(run((0, start, start + size))[0], start, f"{size} tokens from {start}")
        for at in [*range(0, length, 61), 383, 384, 385, 511, 512, 895, 896, 897]:
            check(run((0, at, at + 1))[0], at, f"decode at {at}")
            beside = (1, min(at + 40, length - 1)), (2, 900), (3, max(at - 9, 0))
            rows = [(seq, start, start + 1) for seq, start in beside]
            check(run(rows[0], (0, at, at + 1), *rows[1:], (2, 100, 300))[1], at, f"decode at {at} beside others")


@pytest.mark.slow
@pytest.mark.parametrize("kernels", ["compiled", pytest.param("torch", marks=by_torch)])
def test_a_seeded_text_depends_only_on_itself_and_its_seed(kernels: str):
    """Cold and alone, from the cache, and cold among neighbours with long prompts: the same tokens from the same
    log-probabilities."""
    try:
        path = resolve_model("smollm2-135m-instruct")
    except CheckpointError as error:
        pytest.skip(str(error))
    library = open_best(torch.backends.cpu.get_cpu_capability())
    if kernels == "compiled" and isinstance(library, str):
        pytest.skip(library)
    rng, options = np.random.default_rng(5), (f"kernels={kernels}",)
    with Engine(str(path), platform="cpu", dtype="bfloat16", kv_cache_memory="400MiB",
                platform_option=options) as engine:
        prompts = [engine.text.encode("My favourite three animals are").tolist(),
                   rng.integers(20, 49_000, 420).tolist()]
        for seed, prompt in enumerate(prompts):
            asked: dict[str, Any] = dict(max_tokens=8, temperature=0.8, seed=seed, ignore_eos=True, logprobs=0)
            engine.core.command("flush_cache")
            alone, cached = engine.generate(prompt, **asked), engine.generate(prompt, **asked)
            engine.core.command("flush_cache")
            neighbours = [rng.integers(20, 49_000, rng.integers(50, 300)).tolist() for _ in range(6)]
            among = engine.generate([*neighbours[:3], prompt, *neighbours[3:]], **asked)[3]
            for how, other in (("from the cache", cached), ("among neighbours", among)):
                assert alone.tokens == other.tokens, f"seed {seed}, {len(prompt)} tokens, {how}"
                assert np.array_equal(alone.logprobs.chosen, other.logprobs.chosen), f"seed {seed}, {how}: other bits"
