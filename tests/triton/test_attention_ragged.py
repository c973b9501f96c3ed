"""Ragged attention (prompts, chunks, decode rows among them) against float64: edges, poisoned memory, trees."""
from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from .attention_cases import TOLERANCE, Case, check
from .interpreter import prepare

COST = 10  # seconds
DEVICE = prepare()
from isthmus.platforms.triton_kit.attention_ragged import (  # noqa: E402
    plan_tiles,
    ragged_attention,
    tile_count,
    tokens_per_tile,
)
from isthmus.platforms.triton_kit.paged import PagedKV, paged_kv  # noqa: E402
from isthmus.platforms.triton_kit.tiles import Tile  # noqa: E402

SMALL = Tile(16, 16, 4, 1)


def run(case: Case, tile: Tile = SMALL, kv: PagedKV | None = None, **extra):
    kv = kv or PagedKV(case.k.to(DEVICE), case.v.to(DEVICE))
    lengths = np.array(case.lengths, np.int32)
    each = tokens_per_tile(tile, case.heads, case.kv_heads)
    tiles = plan_tiles(case.starts, lengths, len(case.q), each)
    lengths, starts, tiles = (torch.from_numpy(x).to(DEVICE) for x in (lengths, case.starts, tiles))
    extra = {key: value.to(DEVICE) if torch.is_tensor(value) else value for key, value in extra.items()}
    return ragged_attention(case.q.to(DEVICE), kv, case.table.to(DEVICE), lengths, starts, tiles,
                            scale=case.width ** -0.5, tile=tile, window=case.window, with_lse=True, **extra)


def agree(case: Case, tolerance: float | None = None, softcap=None, sinks=None, **extra) -> None:
    out, lse = run(case, softcap=softcap, sinks=None if sinks is None else torch.tensor(sinks), **extra)
    right, right_lse = case.right(case.width ** -0.5, softcap, sinks)
    check(out, right, tolerance or TOLERANCE[case.dtype])
    check(lse, right_lse, tolerance or 1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_decode_rows_prompts_and_chunks_in_one_launch(dtype):
    agree(Case([33, 1, 20, 17, 0], [1, 1, 20, 5, 0], 4, 2, 32, 8, dtype, padding=3))


def test_tokens_that_no_row_owns_give_zeros():
    case = Case([5, 0, 0], [5, 0, 0], 2, 1, 16, 4, padding=21)
    out, lse = run(case)
    assert not out[5:].any() and bool((lse[5:] == -torch.inf).all())
    case = Case([0, 0], [0, 0], 2, 1, 16, 4, padding=3)
    assert not run(case)[0].any()


@pytest.mark.parametrize("width", [64, 80, 96, 128, 192, 256])
def test_head_dims(width):
    agree(Case([9, 4], [5, 1], 2, 1, width, 4))


def test_v_narrower_than_k():
    agree(Case([19], [9], 4, 2, 48, 8, v_width=24))


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
@pytest.mark.parametrize("count", [1, 8, 9, 15])
def test_lengths_at_edges_of_tiles(length, count):
    agree(Case([length, 3], [min(count, length), 1], 2, 1, 16, 16))


@pytest.mark.parametrize("page_size", [1, 3, 16, 64])
def test_page_sizes(page_size):
    agree(Case([35, page_size], [17, page_size], 4, 2, 16, page_size))


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 1), (6, 2), (20, 1), (34, 2)])
def test_groups_of_heads(heads, kv_heads):
    agree(Case([12, 21], [1, 6], heads, kv_heads, 16, 8))


@pytest.mark.parametrize("window", [1, 3, 16, 17, 100])
@pytest.mark.parametrize("splits", [1, 3])
def test_windows_and_what_lies_before_them(window, splits):
    agree(Case([50, 20, 9], [3, 20, 1], 2, 1, 16, 4, window=window), splits=splits)


def test_softcap_and_sinks():
    agree(Case([24, 3, 0], [9, 1, 0], 4, 2, 16, 16, magnitude=8, padding=1), softcap=5.0)
    sinks = np.array([0.5, -30, 40, 3], np.float32)
    for splits in (1, 2):
        agree(Case([24, 3, 0], [9, 1, 0], 4, 2, 16, 16, padding=1), sinks=sinks, splits=splits)


def test_very_large_scores():
    agree(Case([24, 17], [9, 17], 2, 1, 16, 16, magnitude=1e4), tolerance=2e-3)


def test_long_contexts_are_shared_by_splits():
    agree(Case([90, 40], [1, 20], 2, 1, 16, 16), splits=4)


def test_fp8_and_int8():
    case = Case([25, 4], [7, 1], 4, 2, 32, 16, torch.bfloat16, stored=torch.float8_e4m3fn)
    stored = torch.stack([case.k, case.v], 1).to(DEVICE)
    case.v_dense = [x * 2.0 for x in case.v_dense]
    agree(case, kv=paged_kv(stored, v_scale=2.0), tolerance=4e-2)
    case = Case([25], [7], 4, 2, 32, 16)
    codes = (torch.arange(case.k.numel() * 2).reshape(-1, 2, *case.k.shape[1:]) * 37 % 255 - 127).to(torch.int8)
    scales = torch.full(codes.shape[:-1], 0.01) * (1 + torch.arange(16)[:, None] / 16)
    values = (codes.double() * scales[..., None].double()).numpy()
    for n in range(25):
        page = case.table[0, n // 16]
        case.k_dense[0][n], case.v_dense[0][n] = values[page, 0, n % 16], values[page, 1, n % 16]
    agree(case, kv=paged_kv(codes.to(DEVICE), scales.to(DEVICE)))


@pytest.mark.parametrize("window", [None, 2, 7])
def test_a_tree_beside_a_prompt(window):
    """Row 0 is a tree of 10 tokens (each one's parent is (i - 1) // 2) after 11, row 1 a prompt, row 2 one token."""
    count = 10
    seen, depth = np.eye(count, dtype=bool), np.zeros(count, np.int32)
    for i in range(1, count):
        seen[i] |= seen[(i - 1) // 2]
        depth[i] = depth[(i - 1) // 2] + 1
    words = [sum(1 << int(j) for j in np.flatnonzero(line)) for line in seen] + [0] * 13
    positions = np.concatenate([11 + depth, np.arange(3, 15), [18]]).astype(np.int32)
    case = Case([21, 15, 19], [count, 12, 1], 4, 2, 16, 4, window=window)
    right, right_lse = case.right(0.25, trees={0: seen}, positions=positions)
    for tile in (SMALL, Tile(64, 16, 4, 1)):
        out, lse = run(case, tile, tree=torch.tensor(words), positions=torch.tensor(positions))
        check(out, right, 2e-5)
        check(lse, right_lse, 1e-4)


def test_the_last_of_64_tree_tokens_is_seen():
    words = torch.tensor([(1 << i) | 1 for i in range(63)] + [-(1 << 63) | 1])
    case = Case([70], [64], 1, 1, 16, 16)
    seen = np.eye(64, dtype=bool)
    seen[:, 0] = True
    positions = np.array([6] + [7] * 63, np.int32)
    out, _ = run(case, Tile(64, 16, 4, 1), tree=words, positions=torch.tensor(positions))
    check(out, case.right(0.25, trees={0: seen}, positions=positions)[0], 2e-5)


@given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 24)), min_size=1, max_size=4), st.integers(1, 2),
       st.integers(1, 5), st.sampled_from([1, 5, 16, 32]), st.sampled_from([None, 1, 7, 20]), st.integers(0, 9),
       st.sampled_from([16, 32]))
@settings(max_examples=8, deadline=None, derandomize=True)
def test_any_rows(rows, kv_heads, group, page_size, window, padding, keys):
    rows = sorted(rows, key=lambda row: min(row))
    lengths, counts = [a for a, _ in rows], [min(row) for row in rows]
    agree(Case(lengths, counts, kv_heads * group, kv_heads, 16, page_size, padding=padding, window=window),
          tile=Tile(16, keys, 4, 1))


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 9)), max_size=6), st.integers(0, 20), st.integers(1, 17))
@settings(max_examples=100, deadline=None, derandomize=True)
def test_every_token_is_in_one_tile_and_the_map_has_its_static_size(rows, padding, each):
    counts = [count for count, _ in rows]
    lengths = np.array([count + before if count else 0 for count, before in rows], np.int32)
    starts = np.cumsum([0, *counts]).astype(np.int32)
    tokens = int(starts[-1]) + padding
    tiles = plan_tiles(starts, lengths, tokens, each)
    assert tiles.shape == (tile_count(tokens, len(rows), each), 2) and tiles.dtype == np.int32
    owner = np.append(np.repeat(np.arange(len(rows)), counts), np.full(padding, -1))
    covered = []
    for row, first in tiles:
        stop = starts[row + 1] if row >= 0 else tokens
        mine = range(first, min(first + each, stop))
        assert all(owner[t] == row for t in mine)
        covered += mine
    assert sorted(covered) == list(range(tokens))
    ends = [lengths[row] - (starts[row + 1] - first) for row, first in tiles if row >= 0]
    assert ends == sorted(ends, reverse=True)


def test_what_does_not_fit_is_told():
    case = Case([9], [5], 4, 2, 16, 8)
    kv, lengths = PagedKV(case.k.to(DEVICE), case.v.to(DEVICE)), torch.tensor([9], dtype=torch.int32, device=DEVICE)
    starts, table = torch.from_numpy(case.starts).to(DEVICE), case.table.to(DEVICE)
    wrong = torch.zeros(9, 2, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="plan_tiles' for 8 tokens a tile"):
        ragged_attention(case.q.to(DEVICE), kv, table, lengths, starts, wrong, scale=1.0, tile=SMALL)
    with pytest.raises(ValueError, match="starts must be int32"):
        ragged_attention(case.q.to(DEVICE), kv, table, lengths, starts[:1], wrong, scale=1.0, tile=SMALL)
