"""MLA decode on the latent against float64: heads, edges, splits, poisoned memory, fp8."""
from __future__ import annotations

import pytest
import torch

from .attention_cases import TOLERANCE, Case, check
from .interpreter import prepare

COST = 5  # seconds
DEVICE = prepare()
from isthmus.platforms.triton_kit.mla import mla_decode  # noqa: E402
from isthmus.platforms.triton_kit.tiles import Tile  # noqa: E402

LATENT, ROPE, SCALE, SMALL = 32, 16, 0.11, Tile(16, 16, 4, 1)


def agree(lengths: list[int], heads: int, splits: int = 1, queries: int = 1, dtype: torch.dtype = torch.float32,
          page_size: int = 16, stored: torch.dtype | None = None, cache_scale: float = 1.0, latent: int = LATENT,
          rope: int = ROPE, tolerance: float | None = None) -> None:
    """One latent KV head, whose first `latent` numbers are the value."""
    case = Case(lengths, [queries] * len(lengths), heads, 1, latent + rope, page_size, dtype, stored=stored)
    case.k_dense = [k * cache_scale for k in case.k_dense]
    case.v_dense, case.v_width = [k[:, :, :latent] for k in case.k_dense], latent
    out, lse = mla_decode(case.q.to(DEVICE), case.k[:, :, 0].to(DEVICE), case.table.to(DEVICE),
                          torch.tensor(lengths, dtype=torch.int32, device=DEVICE), scale=SCALE, tile=SMALL,
                          latent=latent, splits=splits, queries=queries, cache_scale=cache_scale, with_lse=True)
    right, right_lse = case.right(SCALE)
    check(out, right, tolerance or TOLERANCE[dtype])
    check(lse, right_lse, 1e-4 if tolerance is None else tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 3])
def test_types(dtype, splits):
    agree([37, 5], 4, splits, dtype=dtype)


def test_the_shape_of_deepseek():
    agree([18], 16, 2, dtype=torch.bfloat16, latent=512, rope=64)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 32, 33])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_lengths_at_edges(length, splits):
    agree([length, 1, 0], 2, splits)


@pytest.mark.parametrize("heads", [1, 3, 16, 20])
def test_heads(heads):
    agree([19], heads, 2)


@pytest.mark.parametrize("page_size", [1, 3, 64])
def test_page_sizes(page_size):
    agree([35, page_size], 2, 1, page_size=page_size)


@pytest.mark.parametrize("heads", [3, 20])
def test_several_tokens_a_row(heads):
    agree([19, 3], heads, 2, queries=3)


def test_fp8():
    agree([21, 4], 4, 2, dtype=torch.float16, stored=torch.float8_e4m3fn, cache_scale=0.5, tolerance=1e-2)


def test_what_does_not_fit_is_told():
    q, cache = torch.zeros(1, 2, 48, device=DEVICE), torch.zeros(2, 4, 48, device=DEVICE)
    pages, lengths = (torch.zeros(shape, dtype=torch.int32, device=DEVICE) for shape in ((1, 1), (1,)))
    with pytest.raises(ValueError, match="latent 24 and rope 24 must be powers of two"):
        mla_decode(q, cache, pages, lengths, scale=1.0, tile=SMALL, latent=24)
    with pytest.raises(ValueError, match="cache must be"):
        mla_decode(q, cache[..., :32], pages, lengths, scale=1.0, tile=SMALL, latent=32)
    with pytest.raises(ValueError, match="1 x 2 tokens"):
        mla_decode(q, cache, pages, lengths, scale=1.0, tile=SMALL, latent=32, queries=2)
    with pytest.raises(ValueError, match="must be int32"):
        mla_decode(q, cache, pages, lengths.long(), scale=1.0, tile=SMALL, latent=32)
