"""Decode attention against float64: shapes, types, edges, poisoned memory, splits."""
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
from isthmus.platforms.triton_kit import attention_decode, attention_ragged, kv_write, merge, mla  # noqa: E402
from isthmus.platforms.triton_kit.attention_decode import decode_attention, plan_splits  # noqa: E402
from isthmus.platforms.triton_kit.paged import PagedKV, paged_kv  # noqa: E402
from isthmus.platforms.triton_kit.tiles import Tile  # noqa: E402

SMALL = Tile(16, 16, 4, 1)


def run(case: Case, splits: int = 1, tile: Tile = SMALL, kv: PagedKV | None = None, **extra):
    kv = kv or PagedKV(case.k.to(DEVICE), case.v.to(DEVICE))
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    extra = {key: value.to(DEVICE) if torch.is_tensor(value) else value for key, value in extra.items()}
    return decode_attention(case.q.to(DEVICE), kv, case.table.to(DEVICE), lengths, scale=case.width ** -0.5, tile=tile,
                            splits=splits, window=case.window, with_lse=True, **extra)


def agree(case: Case, splits: int = 1, tolerance: float | None = None, softcap=None, sinks=None, **extra) -> None:
    out, lse = run(case, splits, softcap=softcap, sinks=None if sinks is None else torch.tensor(sinks), **extra)
    right, right_lse = case.right(case.width ** -0.5, softcap, sinks)
    check(out, right, tolerance or TOLERANCE[case.dtype])
    check(lse, right_lse, 1e-4 if tolerance is None else tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("splits", [1, 3])
def test_types(dtype, splits):
    agree(Case([37, 5], [1, 1], 4, 2, 64, 16, dtype), splits)


@pytest.mark.parametrize("width", [16, 80, 96, 128, 192, 256])
def test_head_dims(width):
    agree(Case([19], [1], 2, 1, width, 8), 1)


def test_v_narrower_than_k():
    agree(Case([19, 3], [1, 1], 4, 2, 48, 8, v_width=24), 2)


@pytest.mark.parametrize("page_size", [1, 2, 3, 16, 64, 128])
def test_page_sizes(page_size):
    agree(Case([page_size, 2 * page_size + 1, 40], [1, 1, 1], 2, 1, 16, page_size), 2)


@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 1), (6, 2), (3, 3), (24, 1), (40, 2)])
def test_groups_of_heads(heads, kv_heads):
    agree(Case([21], [1], heads, kv_heads, 16, 8), 2)


@pytest.mark.parametrize("length", [0, 1, 15, 16, 17, 31, 32, 33, 48, 64])
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_lengths_at_edges_of_pages_tiles_and_splits(length, splits):
    agree(Case([length, 1, 0], [1, 1, 1], 2, 1, 16, 16), splits)


@pytest.mark.parametrize("window", [1, 3, 8, 16, 17, 100])
@pytest.mark.parametrize("splits", [1, 4])
def test_windows_and_what_lies_before_them(window, splits):
    agree(Case([50, 9, 16, 1], [1] * 4, 2, 1, 16, 4, window=window), splits)


@pytest.mark.parametrize("splits", [1, 3])
def test_softcap_and_sinks(splits):
    agree(Case([40, 3, 0], [1, 1, 1], 4, 2, 16, 16, magnitude=8), splits, softcap=5.0)
    agree(Case([40, 3, 0], [1, 1, 1], 4, 2, 16, 16), splits, sinks=np.array([0.5, -30, 40, 3], np.float32))
    agree(Case([40, 3], [1, 1], 4, 2, 16, 16, window=4), splits, sinks=np.array([-np.inf, 0, 1, 2], np.float32))


@pytest.mark.parametrize("splits", [1, 3])
def test_very_large_scores(splits):
    agree(Case([40, 17], [1, 1], 2, 1, 16, 16, magnitude=1e4), splits, tolerance=2e-3)
    agree(Case([40, 17], [1, 1], 2, 1, 16, 16, magnitude=1e15), splits, softcap=30.0)


@pytest.mark.parametrize(("kind", "native"), [
    (torch.float8_e4m3fn, False), (torch.float8_e4m3fn, True), (torch.float8_e5m2, False), (torch.float8_e5m2, True),
    (torch.float8_e4m3fnuz, True)])
def test_fp8(kind, native):
    case = Case([33, 4], [1, 1], 4, 2, 32, 16, torch.float16, stored=kind)
    stored = torch.stack([case.k, case.v], 1).to(DEVICE)
    case.k_dense = [x * 0.5 for x in case.k_dense]
    case.v_dense = [x * 3.0 for x in case.v_dense]
    agree(case, 2, kv=paged_kv(stored, k_scale=0.5, v_scale=3.0, native_fp8=native), tolerance=1e-2)


def test_every_fp8_number_is_read_exactly():
    """One key a row, so that the output is V itself: all finite codes of both types."""
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        codes = torch.arange(256, dtype=torch.uint8).view(kind)
        codes = torch.where(torch.isfinite(codes.float()), codes.float(), 0.0).to(kind)
        case = Case([1], [1], 16, 16, 16, 1)
        memory = torch.zeros(3, 2, 1, 16, 16).to(kind)
        memory[case.table[0, 0], 1, 0] = codes.reshape(16, 16)
        out, _ = run(case, kv=paged_kv(memory.to(DEVICE)))
        assert torch.equal(out.cpu().reshape(256), codes.float())


def test_int8():
    case = Case([33, 4], [1, 1], 4, 2, 32, 16)
    generator = torch.Generator().manual_seed(3)
    codes = torch.randint(-127, 128, (*case.k.shape[:1], 2, *case.k.shape[1:]), generator=generator).to(torch.int8)
    scales = torch.rand(codes.shape[:-1], generator=generator) * 0.02 + 0.005
    values = codes.double() * scales[..., None].double()
    poisoned = torch.full_like(scales, float("nan"))
    for row, length in enumerate(case.lengths):
        for n in range(length):
            page, offset = case.table[row, n // 16].item(), n % 16
            poisoned[page, :, offset] = scales[page, :, offset]
            case.k_dense[row][n], case.v_dense[row][n] = values[page, 0, offset], values[page, 1, offset]
    for splits in (1, 2):
        agree(case, splits, kv=paged_kv(codes.to(DEVICE), poisoned.to(DEVICE)))


@pytest.mark.parametrize(("group", "splits"), [(1, 1), (2, 3), (6, 1)])
def test_several_tokens_a_row(group, splits):
    agree(Case([40, 3, 17, 0], [3] * 4, 2 * group, 2, 16, 16), splits, queries=3)
    agree(Case([40, 3, 17], [3] * 3, 2 * group, 2, 16, 4, window=5), splits, queries=3)


@pytest.mark.parametrize("window", [None, 3, 9])
@pytest.mark.parametrize("splits", [1, 2])
def test_trees(window, splits):
    """A root with two branches of depth two and one: 0 - (1 - 3, 2)."""
    parents = [-1, 0, 0, 1]
    seen = np.eye(4, dtype=bool)
    for i, parent in enumerate(parents[1:], 1):
        seen[i] |= seen[parent]
    words = torch.tensor([sum(int(bit) << j for j, bit in enumerate(line)) for line in seen] + [0] * 4)
    case = Case([22, 19], [4, 4], 4, 2, 16, 4, window=window)
    positions = np.array([18, 19, 19, 20, 15, 16, 17, 18], np.int32)
    out, lse = run(case, splits, queries=4, tree=words, positions=torch.tensor(positions))
    right, right_lse = case.right(0.25, trees={0: seen}, positions=positions)
    check(out, right, 2e-5)
    check(lse, right_lse, 1e-4)


@given(st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.sampled_from([16, 24, 64]),
       st.sampled_from([1, 5, 16, 32]), st.sampled_from([None, 1, 7, 20]), st.data())
@settings(max_examples=8, deadline=None, derandomize=True)
def test_any_shapes(rows, kv_heads, group, width, page_size, window, data):
    lengths = data.draw(st.lists(st.integers(0, 50), min_size=rows, max_size=rows))
    splits = data.draw(st.integers(1, 5))
    keys = data.draw(st.sampled_from([16, 32]))
    case = Case(lengths, [1] * rows, kv_heads * group, kv_heads, width, page_size, window=window, seed=rows)
    agree(case, splits, tile=Tile(16, keys, 4, 1))


def test_what_does_not_fit_is_told():
    case = Case([9], [1], 4, 2, 16, 8)
    with pytest.raises(ValueError, match="contiguous last axis"):
        run(case, kv=PagedKV(case.k[..., :8], case.v))
    with pytest.raises(ValueError, match="not a multiple of 2"):
        case.q = case.q[:, :3]
        run(case)
    case = Case([9], [1], 4, 2, 16, 8)
    with pytest.raises(ValueError, match="2 for each of 1 rows"):
        run(case, queries=2)
    with pytest.raises(ValueError, match="needs positions"):
        run(case, tree=torch.zeros(1, dtype=torch.int64))
    with pytest.raises(ValueError, match="int32 table"):
        case.table = case.table.long()
        run(case)
    with pytest.raises(ValueError, match="need float32 scales"):
        paged_kv(torch.zeros(2, 2, 4, 1, 16, dtype=torch.int8))


def test_splits_from_sizes_fill_the_device():
    assert plan_splits(16, 8, 2048, 16, 132) == 2        # 128 tiles, 264 places
    assert plan_splits(1, 8, 2048, 16, 132) == 30        # 8 tiles: 240 programs, nearly one full wave
    assert plan_splits(256, 8, 2048, 16, 132) == 1       # enough without
    assert plan_splits(1, 8, 16, 16, 132) == 1           # 256 keys are one program's work
    assert plan_splits(1, 1, 100_000, 16, 304) <= attention_decode.MOST_SPLITS


@pytest.mark.parametrize("module", [attention_decode, attention_ragged, kv_write, merge, mla])
def test_specializations_name_every_parameter_once(module):
    made = module.specializations()
    assert len({one.name for one in made}) == len(made)
    for one in made:
        assert not set(one.signature) & set(one.constants), one.name
        assert set(one.signature) | set(one.constants) == set(one.kernel.arg_names), one.name
