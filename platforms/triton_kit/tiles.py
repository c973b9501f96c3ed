"""Tile sizes of the attention kernels, by device family and shape. A platform may pass its own `Tile` instead.

Families are the architecture names of the compilers: "sm_80" ... "sm_120", "gfx90a" ... "gfx1201". A tile is bound by
the shared memory of K and V in flight (64 KB on AMD but gfx950, 99 KB on sm_86, sm_89 and sm_120) and by the registers
of the accumulator (rows x head_dim float32). A page's number is loaded before its K and V, so Triton's pipeline needs
5 stages on NVIDIA to have two blocks of K and V in flight; with 4 it has one, and waits for it.
"""
from __future__ import annotations

from typing import NamedTuple

import triton

INTEL = ("pvc", "bmg", "lnl", "dg2", "mtl", "ptl", "xe")  # the xpu platform's families
DOUBLE = 5  # stages of a pipeline with two blocks in flight behind the page table


class Tile(NamedTuple):
    """rows: query heads x tokens in a program.  keys: tokens of K and V in one iteration.  warps, stages: Triton's."""

    rows: int
    keys: int
    warps: int
    stages: int

    @property
    def label(self) -> str:
        return f"{self.rows}x{self.keys} w{self.warps} s{self.stages}"


def packed_rows(group: int, queries: int, most: int) -> int:
    """Rows of a tile for `queries` tokens times `group` query heads of one KV head: 16 (the least a dot takes) to
    `most`."""
    return min(max(16, triton.next_power_of_2(group * queries)), most)


def is_amd(family: str) -> bool:
    return family.startswith("gfx")


def is_intel(family: str) -> bool:
    """Pages are read through one pointer for each element, which fill the registers first: blocks of 16 tokens, many
    warps, and no wide heads (`refusal`). Tuned by what Intel's offline compiler spills, not by time."""
    return family in INTEL


def is_rdna(family: str) -> bool:
    """Waves of 32 lanes: half the registers of the data centre's waves of 64, and gfx11 holds each operand twice."""
    return family.startswith("gfx1")


def refusal(family: str, head_dim: int, element_bytes: int, stored_bytes: int = 2) -> str | None:
    """Why attention does not run as a kernel on this family, or None.

    element_bytes: of q.  stored_bytes: of K and V.  For MLA head_dim is the latent's width.
    """
    if is_intel(family) and head_dim > (128 if min(element_bytes, stored_bytes) == 4 else 64):
        return f"pointers to a page's heads of {head_dim} numbers do not fit the registers of {family}"
    if is_rdna(family) and element_bytes == 4:
        return f"{family} has no matrix unit for float32: the operands would not fit the registers"
    if head_dim > 256 and is_rdna(family) or head_dim > 128 and family.startswith("gfx11"):
        return f"a head of {head_dim} numbers does not fit the registers of {family}"
    if stored_bytes == 1 and is_rdna(family) and head_dim > (64 if family.startswith("gfx11") else 128):
        return f"K and V of one byte with heads of {head_dim} numbers do not fit the registers of {family}"
    return None


def converts_fp8(family: str) -> bool:
    """Whether the device converts OCP's fp8 types itself (`paged_kv(native_fp8=)`); elsewhere integers do it."""
    if family.startswith("sm_"):
        return int(family[3:]) >= 89
    return family.startswith(("gfx950", "gfx12"))


def shared_budget(family: str) -> int:
    """Bytes of shared memory (LDS) that K and V of one program may fill, so that two programs fit a multiprocessor."""
    if is_amd(family):
        return 32 * 1024
    return 64 * 1024 if family in ("sm_80", "sm_87", "sm_90", "sm_100", "sm_103") else 40 * 1024


def fitting_keys(family: str, keys: int, width: int, element_bytes: int) -> int:
    """`keys` halved until the blocks of K and V in flight fit the budget; 16 at least."""
    blocks = 2 if is_amd(family) else 4
    while keys > 16 and blocks * keys * width * element_bytes > shared_budget(family):
        keys //= 2
    return keys


def decode_tile(family: str, group: int, queries: int, head_dim: int, element_bytes: int) -> Tile:
    """Tile for one to a few query tokens a row: bound by memory, so many bytes in flight and few rows.

    element_bytes: of stored K and V.
    """
    width = max(16, triton.next_power_of_2(head_dim))
    if is_intel(family):
        return Tile(packed_rows(group, queries, 32), 16, 8 if width > 64 else 16, 2)
    if is_rdna(family):
        ahead = width <= 128 and element_bytes > 1  # registers left for K and V of the next block
        return Tile(packed_rows(group, queries, 32), 32 if width <= 64 else 16, 4, 2 if ahead else 1)
    rows = packed_rows(group, queries, 64 if width <= 128 else 32)
    most = 64 if element_bytes < 4 else 32 if width <= 64 else 16
    keys = fitting_keys(family, most, width, max(2, element_bytes))
    return Tile(rows, keys, 4 if rows * width <= 32 * 128 else 8, 2 if is_amd(family) else DOUBLE)


def ragged_tile(family: str, head_dim: int, element_bytes: int, stored_bytes: int = 2) -> Tile:
    """Tile for prompts: bound by arithmetic, so as many rows as the accumulator's registers allow.

    element_bytes: of q, in whose type the products are made.  stored_bytes: of K and V; those of one byte are decoded
    in registers, which takes some.
    """
    width = max(16, triton.next_power_of_2(head_dim))
    if is_intel(family):
        return Tile(64 if element_bytes < 4 else 32, 16, 16, 2)
    if element_bytes == 4:
        return Tile(32 if width <= 128 else 16, 16, 4, 2)
    if is_rdna(family):
        return Tile(64 if width <= 128 else 32, 32 if width <= 64 else 16, 4, 2 if width <= 64 else 1)
    rows = 128 if width <= 128 else 64
    if is_amd(family):
        return Tile(rows, 64 if width <= 128 and stored_bytes > 1 else 32, 4, 2)
    if width <= 64:
        return Tile(rows, 64, 8, DOUBLE)
    if family in ("sm_90", "sm_100", "sm_103"):
        return Tile(rows, 64 if width == 128 and stored_bytes > 1 else 32, 8, DOUBLE)
    if family in ("sm_80", "sm_87"):
        return Tile(rows, 32, 8, DOUBLE)
    return Tile(64, 32, 4, DOUBLE) if width == 128 else Tile(64, 16, 8, DOUBLE)


def latent_tile(family: str, heads: int, element_bytes: int) -> Tile:
    """Tile for MLA: the accumulator is rows x 512, and K and V are the same 576 numbers a token."""
    rows = packed_rows(heads, 1, 16 if is_amd(family) or element_bytes == 4 else 32)
    keys = 32 if element_bytes == 2 and shared_budget(family) >= 64 * 1024 else 16
    return Tile(rows, keys, 4 if rows == 16 else 8, 1 if is_amd(family) else DOUBLE)
