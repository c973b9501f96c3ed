"""From logits to tokens on the device, in the order that `core.plan.Sampling` states, without waiting for anything.

`host_arrays` turns a `Sampling` into flat arrays, which a platform copies to the device as it likes; `sample` takes the
copies. A draw is that of float64 up to the rounding of a weight to float32 and of their sum to 2^-27.
"""
from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
import triton

from ...core.platform import Bias, Penalties, Sampling
from . import sampling_kernel as kernels
from .launch import Specialization, launch

MAX_VOCAB = 1 << 18  # weights of 2^-44 fill 63 bits


class Tiles(NamedTuple):
    """block: logits that a program reads at once.  capacity: candidates of top-k and top-p that are collected; rows
    that may keep more look at all logits at every step of their search.  warps: of a program for a whole row."""

    block: int = 4096
    capacity: int = 4096
    warps: int = 16


TILES = Tiles()


class Sampled(NamedTuple):
    """On the device: tokens [L] int32; where asked for, logprobs [L] float32, top_ids [L, K] int32 and top_logprobs
    [L, K] float32."""

    tokens: torch.Tensor
    logprobs: torch.Tensor | None = None
    top_ids: torch.Tensor | None = None
    top_logprobs: torch.Tensor | None = None


# On the host

def by_row(rows: np.ndarray, count: int, *columns: np.ndarray) -> tuple[np.ndarray, ...]:
    """Offsets [count + 1] int32 of each row's entries, and the columns in the order of rows."""
    if (rows[1:] < rows[:-1]).any():
        order = np.argsort(rows, kind="stable")
        rows, columns = rows[order], tuple(column[order] for column in columns)
    return np.searchsorted(rows, np.arange(count + 1)).astype(np.int32), *columns


def bias_arrays(bias: Bias, rows: int) -> dict[str, np.ndarray]:
    """Entries of one row and id added up, so that no two programs add to the same logit."""
    pairs = (bias.rows.astype(np.int64) << 32) | bias.ids
    distinct, place = np.unique(pairs, return_inverse=True)
    values = np.bincount(place, bias.values.astype(np.float64), len(distinct)).astype(np.float32)
    offsets, ids, values = by_row(distinct >> 32, rows, (distinct & 0xFFFFFFFF).astype(np.int32), values)
    return {"bias_offsets": offsets, "bias_ids": ids, "bias_values": values}


def penalty_arrays(penalties: Penalties, rows: int) -> dict[str, np.ndarray]:
    offsets, ids, counts = by_row(penalties.rows, rows, penalties.ids, penalties.counts)
    return {"penalty_offsets": offsets, "penalty_ids": ids, "penalty_counts": counts, "pending": penalties.pending,
            "repetition": penalties.repetition, "presence": penalties.presence, "frequency": penalties.frequency}


def host_arrays(sampling: Sampling, rows: int) -> dict[str, np.ndarray]:
    """What `sample` needs of a `Sampling` for `rows` logit rows, by name; what is off has no array."""
    arrays = {name: values for name in ("temperature", "uniform", "top_k", "top_p", "min_p")
              if (values := getattr(sampling, name)) is not None}
    if sampling.mask is not None:
        place = np.full(rows, -1, np.int32)
        place[sampling.mask.rows] = np.arange(len(sampling.mask.rows))
        arrays |= {"mask_rows": place, "mask_bits": sampling.mask.bits.astype(np.uint32, copy=False).view(np.int32)}
    if sampling.bias is not None:
        arrays |= bias_arrays(sampling.bias, rows)
    if sampling.penalties is not None:
        arrays |= penalty_arrays(sampling.penalties, rows)
    return arrays


# On the device

def sample(logits: torch.Tensor, targets: torch.Tensor, arrays: Mapping[str, torch.Tensor], *,
           inputs: torch.Tensor | None = None, top_logprobs: int | None = None, softcap: float | None = None,
           last: torch.Tensor | None = None, slots: torch.Tensor | None = None, tiles: Tiles = TILES) -> Sampled:
    """[L, V] logits of any float type -> a token a row: its target where that is >= 0, 0 for -2, for -1 as sampled.

    arrays:       of `host_arrays`, on the device.  inputs [L] int32: the token that each row follows; for penalties.
    top_logprobs: how many of the best to tell beside the chosen one's log-probability; None = neither.
    last, slots:  where given, last[slots[l]] becomes row l's sampled token; slots [L] int32, last int32.
    """
    rows, vocab = logits.shape
    if vocab > MAX_VOCAB:
        raise ValueError(f"a vocabulary of {vocab}; at most {MAX_VOCAB}, for which weights of 2^-44 fit 63 bits")
    if logits.stride(1) != 1:
        raise ValueError(f"logits of strides {logits.stride()}: the last axis must be contiguous")
    get, device = arrays.get, logits.device
    block = min(tiles.block, triton.next_power_of_2(vocab))
    splits = triton.cdiv(vocab, block)
    sparse = "bias_offsets" in arrays or "penalty_offsets" in arrays
    changed = sparse or softcap is not None or "mask_rows" in arrays

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device=device)

    def scan(source: torch.Tensor, cap: float | None, **some: torch.Tensor | None) -> None:
        launch(kernels.scan_kernel, (rows, splits), source, some.get("out"), some.get("mask_rows"),
               some.get("mask_bits"), some.get("best"), some.get("raw_max"), some.get("raw_sum"), vocab,
               source.stride(0), some["mask_bits"].shape[1] if some.get("mask_bits") is not None else 0, splits,
               cap or 1.0, CAPPED=cap is not None, BLOCK=block, num_warps=8)

    x = empty(rows, vocab) if changed else logits
    best = empty(rows, splits, dtype=torch.int64)
    raw_max, raw_sum = (empty(rows, splits), empty(rows, splits)) if top_logprobs is not None else (None, None)
    scan(logits, softcap, out=x if changed else None, best=None if sparse else best, raw_max=raw_max, raw_sum=raw_sum,
         mask_rows=get("mask_rows"), mask_bits=get("mask_bits"))
    if sparse:
        change(x, arrays, inputs, tiles)
        scan(x, None, best=best)
    tokens = draw(x, best, targets, arrays, last, slots, block, tiles)
    if top_logprobs is None:
        return Sampled(tokens)
    wanted = min(top_logprobs, vocab)
    return Sampled(tokens, *score(logits, tokens, raw_max, raw_sum, wanted, softcap, block))


def change(x: torch.Tensor, arrays: Mapping[str, torch.Tensor], inputs: torch.Tensor | None, tiles: Tiles) -> None:
    """Bias, then penalties, in place."""
    rows, vocab = x.shape
    block = min(tiles.block, 1024)
    if "bias_offsets" in arrays:
        launch(kernels.bias_kernel, (rows,), x, arrays["bias_offsets"], arrays["bias_ids"], arrays["bias_values"],
               vocab, BLOCK=block, num_warps=4)
    if "penalty_offsets" in arrays:
        if inputs is None:
            raise ValueError("penalties need `inputs`, the token that each logit row follows")
        names = ("penalty_offsets", "penalty_ids", "penalty_counts", "pending")
        launch(kernels.penalty_kernel, (rows,), x, *(arrays[name] for name in names), inputs, arrays["repetition"],
               arrays["presence"], arrays["frequency"], vocab, BLOCK=block, num_warps=4)


def draw(x: torch.Tensor, best: torch.Tensor, targets: torch.Tensor, arrays: Mapping[str, torch.Tensor],
         last: torch.Tensor | None, slots: torch.Tensor | None, block: int, tiles: Tiles) -> torch.Tensor:
    """[L] tokens of changed logits, whose blocks' best are known."""
    (rows, vocab), splits, get = x.shape, best.shape[1], arrays.get
    meta = {"CAPACITY": tiles.capacity, "SPLITS": triton.next_power_of_2(splits), "BLOCK": block,
            "num_warps": tiles.warps}
    values = ids = counts = floors = totals = None
    if get("temperature") is not None and (get("top_k") is not None or get("top_p") is not None):
        values, ids = (torch.empty(rows, tiles.capacity, dtype=kind, device=x.device)
                       for kind in (torch.float32, torch.int32))
        counts, floors, totals = (torch.empty(rows, dtype=kind, device=x.device)
                                  for kind in (torch.int32, torch.float32, torch.int64))
        launch(kernels.narrow_kernel, (rows,), x, best, targets, arrays["temperature"], get("top_k"), get("top_p"),
               values, ids, counts, floors, totals, vocab, x.stride(0), splits, **meta)
    tokens = torch.empty(rows, dtype=torch.int32, device=x.device)
    launch(kernels.draw_kernel, (rows,), x, best, targets, get("temperature"), get("uniform"), get("top_k"),
           get("top_p"), get("min_p"), values, ids, counts, floors, totals, tokens, last, slots, vocab, x.stride(0),
           splits, **meta)
    return tokens


def score(logits: torch.Tensor, tokens: torch.Tensor, raw_max: torch.Tensor, raw_sum: torch.Tensor, wanted: int,
          softcap: float | None, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Log-probabilities of the tokens, and ids and log-probabilities of the `wanted` best."""
    (rows, vocab), splits = logits.shape, raw_max.shape[1]
    logprobs = torch.empty(rows, dtype=torch.float32, device=logits.device)
    top_ids = torch.empty(rows, wanted, dtype=torch.int32, device=logits.device)
    top_logprobs = torch.empty(rows, wanted, dtype=torch.float32, device=logits.device)
    found = None
    if wanted:
        found = torch.empty(rows, splits, wanted, dtype=torch.int64, device=logits.device)
        launch(kernels.top_kernel, (rows, splits), logits, found, vocab, logits.stride(0), splits, wanted,
               softcap or 1.0, CAPPED=softcap is not None, BLOCK=block, num_warps=8)
    launch(kernels.logprob_kernel, (rows,), logits, tokens, raw_max, raw_sum, found, logprobs, top_ids, top_logprobs,
           logits.stride(0), splits, wanted, softcap or 1.0, CAPPED=softcap is not None,
           SPLITS=triton.next_power_of_2(splits), BLOCK=triton.next_power_of_2(max(1, splits * wanted)), num_warps=4)
    return logprobs, top_ids, top_logprobs


# Ahead of time

TYPES = {"mask_rows": "*i32", "mask_bits": "*i32", "best": "*i64", "raw_max": "*fp32", "raw_sum": "*fp32",
         "out": "*fp32", "targets": "*i32", "temperature": "*fp32", "uniform": "*fp32", "top_k": "*i32",
         "top_p": "*fp32", "min_p": "*fp32", "values": "*fp32", "ids": "*i32", "counts": "*i32", "floors": "*fp32",
         "totals": "*i64", "tokens": "*i32", "last": "*i32", "slots": "*i32", "found": "*i64", "logprobs": "*fp32",
         "top_ids": "*i32", "top_logprobs": "*fp32", "x": "*fp32", "offsets": "*i32", "pending": "*i32",
         "inputs": "*i32", "repetition": "*fp32", "presence": "*fp32", "frequency": "*fp32"}
SCALARS = {"vocab": "i32:16", "row_stride": "i32:16", "words": "i32", "splits": "i32", "wanted": "i32", "cap": "fp32"}


def specializations() -> list[Specialization]:
    """Logits in bf16 and f32 of 131,072 (32 blocks of 4096) and 262,144 tokens, with what batches ask for together."""
    def special(name: str, kernel: object, parameters: str, constants: dict[str, object], warps: int, absent: str = "",
                **types: str) -> Specialization:
        signature = {p: SCALARS.get(p) or f"{types.get(p) or TYPES[p]}:16" for p in parameters.split()}
        return Specialization(name, kernel, signature, constants | dict.fromkeys(absent.split()), warps=warps)

    found = []
    for type_ in ("bf16", "fp32"):
        logits, block = {"logits": f"*{type_}", "x": f"*{type_}"}, {"BLOCK": 4096}
        numbers = "vocab row_stride words splits cap"
        found += [
            special(f"scan {type_}", kernels.scan_kernel, f"logits best {numbers}", {**block, "CAPPED": False}, 8,
                    "out mask_rows mask_bits raw_max raw_sum", **logits),
            special(f"scan {type_} cap, mask, logprobs", kernels.scan_kernel,
                    f"logits out mask_rows mask_bits best raw_max raw_sum {numbers}", {**block, "CAPPED": True}, 8,
                    **logits),
            special(f"top {type_}", kernels.top_kernel, "logits found vocab row_stride splits wanted cap",
                    {**block, "CAPPED": False}, 8, **logits),
            special(f"logprob {type_} 20", kernels.logprob_kernel, "logits tokens raw_max raw_sum found logprobs "
                    "top_ids top_logprobs row_stride splits wanted cap",
                    {"CAPPED": False, "SPLITS": 32, "BLOCK": 1024}, 4, **logits)]
        for splits in (32, 64):
            whole = {**block, "SPLITS": splits, "CAPACITY": TILES.capacity}
            row, list_ = "x best targets temperature", "values ids counts floors totals"
            numbers = "vocab row_stride splits"
            found += [
                special(f"narrow {type_} {splits} blocks", kernels.narrow_kernel,
                        f"{row} top_k top_p {list_} {numbers}", whole, TILES.warps, **logits),
                special(f"draw {type_} {splits} blocks, cut", kernels.draw_kernel,
                        f"{row} uniform top_k top_p min_p {list_} tokens last slots {numbers}", whole, TILES.warps,
                        **logits),
                special(f"draw {type_} {splits} blocks, whole", kernels.draw_kernel,
                        f"{row} uniform tokens last slots {numbers}", whole, TILES.warps, f"top_k top_p min_p {list_}",
                        **logits),
                special(f"draw {type_} {splits} blocks, greedy", kernels.draw_kernel,
                        f"x best targets tokens last slots {numbers}", whole, TILES.warps,
                        f"temperature uniform top_k top_p min_p {list_}", **logits)]
    found += [special("bias", kernels.bias_kernel, "x offsets ids values vocab", {"BLOCK": 1024}, 4),
              special("penalties", kernels.penalty_kernel, "x offsets ids counts pending inputs repetition presence "
                      "frequency vocab", {"BLOCK": 1024}, 4)]
    return found
