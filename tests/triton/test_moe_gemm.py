"""Grouped products and the whole sparse layer against float64, for every kind of expert."""
from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from .interpreter import prepare

DEVICE = prepare()
from isthmus.core.platform import MoESpec  # noqa: E402
from isthmus.platforms.triton_kit import fp4, linear_int4, linear_w8a8, moe_gemm, routing  # noqa: E402
from isthmus.platforms.triton_kit.launch import recording  # noqa: E402
from isthmus.platforms.triton_kit.linear_tiles import Matrix, Tile, grouped_tile  # noqa: E402

COST = 8  # seconds
TILE = Tile(32, 16, 32)
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
KINDS = ("dense", "int8", "fp8", "fp8 fnuz", "fp8_block", "fp8_weight", "fp8_block_weight", "fp8_weight cast",
         "affine4", "affine8", "mxfp4", "nvfp4")


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def float64(x: torch.Tensor) -> np.ndarray:
    return x.detach().cpu().float().double().numpy()


def made(kind: str, experts: int, rows: int, width: int, parts: int = 1, seed: int = 0) -> tuple[Matrix, np.ndarray]:
    """A weight of the kind, and its values [experts, rows, width]."""
    rng = np.random.default_rng(seed)
    shape = (experts, rows, width)
    if kind == "dense":
        w = (random(*shape, seed=seed) / 8).bfloat16()
        return moe_gemm.dense_experts(w.to(DEVICE)), float64(w)
    if kind == "int8":
        codes, scale = rng.integers(-128, 128, shape, dtype=np.int8), rng.uniform(5e-4, 1e-3, (experts, rows, 1))
        scale = scale.astype(np.float32)
        return linear_w8a8.int8_matrix(*(torch.from_numpy(a).to(DEVICE) for a in (codes, scale))), codes * scale.astype(
            float)
    if kind.startswith("fp8"):
        block = "block" in kind
        codes = random(*shape, seed=seed).to(torch.float8_e4m3fn)
        each = rows // parts
        scale = torch.from_numpy(rng.uniform(0.05, 0.2, (experts, parts * math.ceil(each / 128), math.ceil(width / 128))
                                             if block else (experts, rows, 1)).astype(np.float32))
        spread = float64(scale)
        if block:
            spread = spread.reshape(experts, parts, -1, scale.shape[2]).repeat(128, 2)[:, :, :each].reshape(
                experts, rows, -1).repeat(128, 2)[:, :, :width]
        unit = "none" if kind.endswith("weight") else kind.split()[-1] if " " in kind else "fn"
        return linear_w8a8.fp8_matrix(codes.to(DEVICE), scale.to(DEVICE), unit, block=block, parts=parts), float64(
            codes) * spread
    if kind.startswith("affine"):
        bits = int(kind[-1])
        codes = rng.integers(0, 1 << bits, shape, dtype=np.uint8)
        scale, minimum = (a.astype(np.float16).astype(np.float32) for a in (
            rng.uniform(0.5, 1, (experts, rows, width // 32)) / (4 << bits), rng.normal(-0.1, 0.1, (
                experts, rows, width // 32))))
        packed = linear_int4.pack_affine(*(torch.from_numpy(a).to(DEVICE) for a in (codes, scale, minimum)), bits)
        return packed, codes * scale.repeat(32, 2).astype(float) + minimum.repeat(32, 2)
    codes = rng.integers(0, 256, (experts, rows, width // 2), dtype=np.uint8)
    values = E2M1[np.stack([codes & 15, codes >> 4], -1).reshape(shape)]
    if kind == "mxfp4":
        scale = rng.integers(121, 124, (experts, rows, width // 32), dtype=np.uint8)
        packed = fp4.pack_fp4(torch.from_numpy(codes).to(DEVICE), torch.from_numpy(scale).to(DEVICE))
        return packed, values * 2.0 ** (scale.astype(float) - 127).repeat(32, 2)
    scale = torch.from_numpy(rng.uniform(1, 4, (experts, rows, width // 16)).astype(np.float32)).to(torch.float8_e4m3fn)
    total = torch.full((experts,), 1 / 64)
    packed = fp4.pack_fp4(torch.from_numpy(codes).to(DEVICE), scale.to(DEVICE), total.to(DEVICE))
    return packed, values * float64(scale).repeat(16, 2) / 64


def act(x: np.ndarray, kind: str) -> np.ndarray:
    if kind == "silu":
        return x / (1 + np.exp(-x))
    if kind == "sigmoid":
        return 1 / (1 + np.exp(-x))
    if kind == "gelu":
        return 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))
    return 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x ** 3)))


def layer(x: np.ndarray, logits: np.ndarray, w13: np.ndarray, w2: np.ndarray, spec: MoESpec,
          local: list[int] | None = None) -> np.ndarray:
    """The layer, token by token and expert by expert; with `local` only the experts of this rank, in its order."""
    out = np.zeros_like(x)
    for t, row in enumerate(logits):
        scores = np.exp(row - row.max())
        scores /= scores.sum()
        chosen = sorted(range(spec.experts), key=lambda e: (-scores[e], e))[:spec.top_k]
        for e in chosen:
            if local is None or e in local:
                at = e if local is None else local.index(e)
                gate, up = np.split(w13[at] @ x[t], 2)
                weight = scores[e] / (scores[chosen].sum() if spec.renormalize else 1)
                out[t] += weight * spec.scale * (w2[at] @ (act(gate, spec.act) * up))
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("activated", [False, True])
def test_grouped(kind, activated):
    """Ragged rows and width, an expert that nobody chose, and one with more than a block."""
    experts, tokens, top_k, rows, width = 3, 12, 2, 72, 160
    weight, w = made(kind, experts, rows, width, parts=2 if "block" in kind else 1)
    ids = torch.tensor([[0, 2]] * 9 + [[0, 0]] * 3, dtype=torch.int32)
    plan = routing.sort_by_expert(ids.to(DEVICE), experts, TILE.tokens)
    x = random(tokens, width, seed=2).bfloat16().to(DEVICE)
    values, scale = linear_w8a8.quantized_for(x, weight)
    out = moe_gemm.grouped_gemm(values, weight, plan, TILE, share=top_k, act="silu" if activated else None,
                                x_scale=scale, dtype=torch.float32)
    x64 = float64(values)
    if scale is not None:
        x64 = x64 * (float64(scale)[:, None] if scale.ndim == 1 else float64(scale).repeat(128, 1)[:, :width])
    flat = ids.flatten().numpy()
    right = np.einsum("erk,ek->er", w[flat], x64.repeat(top_k, 0))
    size = np.einsum("erk,ek->er", np.abs(w[flat]), np.abs(x64).repeat(top_k, 0))
    if activated:
        gate, up = np.split(right, 2, 1)
        size = size[:, :rows // 2] * (1 + np.abs(up)) + size[:, rows // 2:] * (1 + np.abs(gate))
        right = act(gate, "silu") * up
    error = np.abs(out.cpu().double().numpy() - right)
    assert (error <= 5e-6 * size + 1e-6).all(), error.max()


def close(out: torch.Tensor, right: np.ndarray, tolerance: float) -> None:
    """Error of each token below the tolerance, in units of the result's root mean square."""
    error = np.abs(out.cpu().double().numpy() - right).max()
    assert error <= tolerance * np.sqrt((right ** 2).mean()), error


@pytest.mark.parametrize("kind, tolerance", [
    ("dense", 0.03), ("affine4", 0.03), ("mxfp4", 0.03), ("fp8_weight", 0.03), ("int8", 0.1), ("fp8", 0.3),
    ("fp8_block", 0.3)])
def test_layer(kind, tolerance):
    experts, tokens, inner, width = 4, 5, 32, 64
    spec = MoESpec(experts, 2, scale=1.5)
    w13, v13 = made(kind, experts, 2 * inner, width, parts=2 if "block" in kind else 1, seed=1)
    w2, v2 = made(kind, experts, width, inner, seed=2)
    x, logits = random(tokens, width).bfloat16(), random(tokens, experts, seed=3)
    out = moe_gemm.moe(x.to(DEVICE), logits.to(DEVICE), w13, w2, spec, tile=TILE)
    assert out.dtype == torch.bfloat16
    close(out, layer(float64(x), float64(logits), v13, v2, spec), tolerance)


@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "gelu", "sigmoid"])
def test_activations_in_float32(kind):
    spec = MoESpec(2, 1, act=kind, renormalize=False)
    (w13, v13), (w2, v2) = made("dense", 2, 64, 32, seed=1), made("dense", 2, 32, 32, seed=2)
    w13, w2 = (w._replace(codes=w.codes.float()) for w in (w13, w2))
    x, logits = random(2, 32), random(2, 2, seed=3)
    out = moe_gemm.moe(x.to(DEVICE), logits.to(DEVICE), w13, w2, spec, tile=TILE)
    close(out, layer(float64(x), float64(logits), v13, v2, spec), 1e-5)


@pytest.mark.parametrize("tokens", [1, 40])
def test_all_tokens_to_one_expert(tokens):
    spec = MoESpec(5, 1)
    (w13, v13), (w2, v2) = made("dense", 5, 64, 32, seed=1), made("dense", 5, 32, 32, seed=2)
    logits = torch.zeros(tokens, 5)
    logits[:, 3] = 9
    x = random(tokens, 32).bfloat16()
    close(moe_gemm.moe(x.to(DEVICE), logits.to(DEVICE), w13, w2, spec, tile=TILE),
          layer(float64(x), float64(logits), v13, v2, spec), 0.03)


def test_ranks_add_up_to_the_whole():
    """Expert parallelism: each rank's share is that of its experts, and a rank without a token's experts adds 0."""
    spec = MoESpec(6, 2)
    (w13, v13), (w2, v2) = made("dense", 6, 64, 32, seed=1), made("dense", 6, 32, 32, seed=2)
    x, logits = random(7, 32).bfloat16(), random(7, 6, seed=3)
    logits[0] = torch.tensor([5.0, 4, 0, 0, 0, 0])
    for local in ([4, 0, 2], [1, 3, 5]):
        expert_map = torch.full((6,), -1, dtype=torch.int32)
        expert_map[local] = torch.arange(3, dtype=torch.int32)
        mine = [w._replace(codes=w.codes[local].contiguous(), experts=3) for w in (w13, w2)]
        out = moe_gemm.moe(x.to(DEVICE), logits.to(DEVICE), *mine, spec, tile=TILE, expert_map=expert_map.to(DEVICE))
        close(out, layer(float64(x), float64(logits), v13[local], v2[local], spec, local), 0.03)


def test_padding_tokens_disturb_nobody():
    """Dead rows become 0, not even a NaN of theirs spreads, and living rows keep their bits."""
    spec = MoESpec(4, 2)
    w13, w2 = made("dense", 4, 64, 32, seed=1)[0], made("dense", 4, 32, 32, seed=2)[0]
    x, logits = random(6, 32).bfloat16().to(DEVICE), random(6, 4, seed=3).to(DEVICE)
    right = moe_gemm.moe(x[:4], logits[:4], w13, w2, spec, tile=TILE)
    x[4:], logits[4:] = float("nan"), float("nan")
    live = torch.tensor([1, 1, 1, 1, 0, 0], dtype=torch.int32, device=DEVICE)
    out = moe_gemm.moe(x, logits, w13, w2, spec, tile=TILE, live=live)
    assert torch.equal(out[:4], right) and (out[4:] == 0).all()


def test_a_nan_token_stays_alone():
    spec = MoESpec(4, 2)
    w13, w2 = made("dense", 4, 64, 32, seed=1)[0], made("dense", 4, 32, 32, seed=2)[0]
    x, logits = random(4, 32).bfloat16().to(DEVICE), random(4, 4, seed=3).to(DEVICE)
    right = moe_gemm.moe(x, logits, w13, w2, spec, tile=TILE)
    x[2] = float("nan")
    out = moe_gemm.moe(x, logits, w13, w2, spec, tile=TILE)
    assert torch.isnan(out[2]).all() and torch.equal(out[[0, 1, 3]], right[[0, 1, 3]])


def test_no_tokens():
    spec = MoESpec(4, 2)
    w13, w2 = made("dense", 4, 64, 32)[0], made("dense", 4, 32, 32)[0]
    x = torch.zeros(0, 32, dtype=torch.bfloat16, device=DEVICE)
    assert moe_gemm.moe(x, torch.zeros(0, 4, device=DEVICE), w13, w2, spec).shape == (0, 32)


def test_launches_depend_on_shapes_alone():
    """So that a graph recorded with one batch replays with another: same kernels, grids and sizes for any routing."""
    spec = MoESpec(4, 2)
    w13, w2 = made("dense", 4, 64, 32, seed=1)[0], made("dense", 4, 32, 32, seed=2)[0]
    x = random(20, 32).bfloat16().to(DEVICE)
    one_sided = torch.zeros(20, 4)
    one_sided[:, 1:3] = 5
    seen = []
    for logits in (random(20, 4, seed=3), one_sided):
        launches = []
        with recording(lambda kernel, grid, args, meta, to=launches: to.append(
                (grid, [tuple(arg.shape) if isinstance(arg, torch.Tensor) else arg for arg in args], meta))):
            moe_gemm.moe(x, logits.to(DEVICE), w13, w2, spec, tile=TILE)
        seen.append(launches)
    assert len(seen[0]) == 5 and seen[0] == seen[1]


def test_mistakes_are_told():
    w13, w2 = made("dense", 4, 64, 32)[0], made("dense", 4, 32, 32)[0]
    x, logits = torch.zeros(2, 32, dtype=torch.bfloat16), torch.zeros(2, 4)
    with pytest.raises(ValueError, match="4 and 4 experts, 2 tokens"):
        moe_gemm.moe(x, torch.zeros(2, 6), w13, w2, MoESpec(6, 2))
    with pytest.raises(ValueError, match="activation 'relu'"):
        moe_gemm.moe(x.to(DEVICE), logits.to(DEVICE), w13, w2, MoESpec(4, 2, act="relu"), tile=TILE)
    with pytest.raises(ValueError, match="expert_map torch.int64"):
        moe_gemm.moe(x, logits, w13, w2, MoESpec(4, 2), expert_map=torch.zeros(4, dtype=torch.int64))
    with pytest.raises(ValueError, match="blocks of 16"):
        plan = routing.sort_by_expert(torch.zeros(2, 2, dtype=torch.int32, device=DEVICE), 4, 16)
        moe_gemm.grouped_gemm(x.to(DEVICE), w13, plan, Tile(32, 32, 32), share=2)
    with pytest.raises(ValueError, match="one type for both"):
        moe_gemm.moe(x.float().to(DEVICE), logits.to(DEVICE), w13, w2, MoESpec(4, 2), tile=TILE)
    with pytest.raises(ValueError, match="experts are"):
        moe_gemm.dense_experts(torch.zeros(4, 4))


def test_tiles_and_configurations():
    for family in ("sm_80", "sm_90", "sm_120", "gfx942", "gfx1100"):
        sizes = [grouped_tile("affine4", tokens, 8, 128, family).tokens for tokens in (1, 16, 512, 1024, 8192)]
        assert sizes == sorted(sizes) and sizes[0] == (8 if family[0] == "s" else 16) < sizes[-1]
    names = [s.name for s in moe_gemm.specializations()]
    assert len(names) == len(set(names))
