"""Law 1, ops: each op against float64 in plain loops, with pages around every write of K and V that must stay."""
from __future__ import annotations

from collections.abc import Iterator

from .case import Case
from .opcase import DTYPES, OpCase
from .ops_attention import attention_cases
from .ops_dense import dense_cases
from .ops_moe import moe_cases
from .ops_run import as_case
from .ops_sampling import sampling_cases

OPS = ("embed", "linear", "rms_norm", "rope", "attention", "act_mul", "moe", "all_reduce", "sample")


def op_cases() -> Iterator[OpCase]:
    """Every op case, as what it builds."""
    for dtype in DTYPES:
        yield from dense_cases(dtype)
        yield from moe_cases(dtype)
        yield from attention_cases(dtype)
        yield from sampling_cases(dtype)


def cases() -> Iterator[Case]:
    yield from map(as_case, op_cases())
