"""One rank's share of a tensor in its own format: the codes are cut, and what lies beside them alike.

Layouts: `core/quant/formats.py`. A cut through a word, a group or a block is refused, because both sides would have to
be computed anew; what is expanded first can be cut anywhere.
"""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import gcd, lcm

import numpy as np

from ..core.platform import RawTensor, Unsupported, WeightSpec
from .expand import CODECS, SCALED, expand
from .experts import by_expert

COLUMNS = ("awq", "gptq")  # that lie as [in, out], as their scales and zeros do


def cut(raw: RawTensor, axis: int, rank: int, world: int) -> RawTensor:
    """Part `rank` of `world` equal ones along `axis` (0 = out, 1 = in) of a matrix, of each expert's, or of a vector.

    Bytes are views where rows are cut. Raises `Unsupported` where the tensor cannot be cut.
    """
    if world == 1:
        return raw
    shape, at = [*raw.shape], -1 if len(raw.shape) == 1 else axis - 2
    unit = 1 if len(shape) == 1 else _units(raw)[axis]
    if shape[at] % (world * unit):
        raise Unsupported(f"{raw.dtype} tensor of shape {raw.shape} cannot be cut into {world} along axis {axis}: each "
                          f"part must be a multiple of {unit}")
    shape[at] //= world
    columns, ordered = raw.dtype.startswith(COLUMNS), raw.dtype.endswith("_act")
    side, rows = at, raw.shape[:-1]
    if columns:
        words = 1 if raw.dtype.startswith("awq") else 32 / SCALED[raw.dtype].bits
        side, rows = -1 - axis, (*raw.shape[:-2], int(raw.shape[-1] / words))
    beside = []
    for part in raw.extra:
        if ordered and part is raw.extra[-1]:  # the group of each input
            beside.append(_share(part, part.shape[:-1], -1, rank, world) if axis else part)
        elif len(part.shape) < len(shape) or part.shape[side] == 1 or (ordered and axis):
            beside.append(part)
        else:
            beside.append(_share(part, part.shape[:-1], side, rank, world))
    return _share(raw, rows, side, rank, world)._replace(shape=tuple(shape), extra=tuple(beside))


def shares(raws: Sequence[RawTensor], spec: WeightSpec, rank: int, world: int) -> list[RawTensor]:
    """One rank's share of every part of a weight, as `WeightSpec.cut` says; to be loaded as `rank_spec` says. What
    cannot be cut in its format is expanded to float32 first. Raises `Unsupported` where that does not help: sizes that
    `world` does not divide."""
    if world == 1 or spec.cut is None:
        return list(raws)
    if spec.cut == "expert":
        own = held(spec.experts, rank, world)
        return [raw for parts in by_expert(raws, spec)[own.start:own.stop] for raw in parts]
    if spec.role == "bias" and spec.cut == 1:  # rank 0 alone adds it
        return list(raws) if rank == 0 else [_f32(np.zeros(raw.shape, np.float32)) for raw in raws]
    try:
        return [cut(raw, spec.cut, rank, world) for raw in raws]
    except Unsupported:
        return [cut(_f32(expand(raw)), spec.cut, rank, world) for raw in raws]


def held(experts: int, rank: int, world: int) -> range:
    """Numbers of the experts that this rank has, where they are cut by "expert"."""
    return range(rank * experts // world, (rank + 1) * experts // world)


def rank_spec(spec: WeightSpec, rank: int, world: int) -> WeightSpec:
    """The spec of what `shares` gives: the same, of fewer experts where those are shared."""
    return replace(spec, experts=len(held(spec.experts, rank, world))) if spec.cut == "expert" else spec


def _f32(values: np.ndarray) -> RawTensor:
    return RawTensor("f32", values.shape, values.view(np.uint8).reshape(-1))


def _units(raw: RawTensor) -> tuple[int, int]:
    """What the outputs and the inputs of a share must be multiples of."""
    name = raw.dtype
    if name not in SCALED:
        return 1, CODECS[name].elements
    if name == "fp8_128":
        return 128, 128
    word = 32 // gcd(SCALED[name].bits, 32)  # codes that fill whole words
    groups = raw.extra[0].shape[-2 if name.startswith(COLUMNS) else -1]
    group = 1 if groups == 1 or name.endswith("_act") else raw.shape[-1] // groups
    inputs = {"mxfp4": 32, "nvfp4": 16, "nvfp4_div": 16}.get(name, word if name.startswith(("gptq", "pack")) else 1)
    return word if name.startswith(COLUMNS) or "_asym" in name else 1, lcm(inputs, group)


def _share(part: RawTensor, rows: tuple[int, ...], axis: int, rank: int, world: int) -> RawTensor:
    """Part `rank` of bytes [*rows, bytes] along an axis counted from the end."""
    data = np.frombuffer(part.data, np.uint8).reshape(*rows, -1)
    length = data.shape[axis] // world
    share = slice(rank * length, (rank + 1) * length)
    shape = [*part.shape]
    shape[axis] //= world
    return RawTensor(part.dtype, tuple(shape), (data[..., share] if axis == -1 else data[..., share, :]).reshape(-1))
