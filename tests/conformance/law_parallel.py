"""Law 5, parallel: two ranks of tensor parallelism compute what one does, where a platform runs them in one process."""
from __future__ import annotations

from collections.abc import Iterator

from ..core.discovery import probe
from ..core.errors import said
from ..core.platform import Unavailable, Unsupported
from .case import Case, Context, Needs, NotClaimed
from .law_model import Check, batched, greedy, moved, whole
from .opcase import DTYPES
from .oracle import LOGITS_NMSE
from .tiny import KINDS, MODEL_FEATURES, in_dtypes

RANKS = 2
CHECKS: dict[str, Check] = {"whole": whole, "batched": batched, "copied_pages": moved(False),
                            "decode_from_state": greedy}


def ranks(context: Context) -> Context:
    """A fresh platform with two ranks; raises `NotClaimed` with the reason where there is none."""
    if context.make is None:
        raise Unsupported("a second platform cannot be made: the suite was given an object")
    platform = context.make()
    try:
        manifest = probe(context.name or context.manifest.name, platform, 0, RANKS)
    except Unavailable as error:
        raise NotClaimed(said(error)) from error
    if manifest.local_ranks != RANKS:
        getattr(platform, "close", lambda: None)()
        raise NotClaimed("one rank in each process: engines of several processes are not held to laws here")
    return Context(platform, manifest, context.seed, context.make)


def parallel(check: Check, kind: str, dtype: str, context: Context) -> None:
    check(context.once("ranks", lambda: ranks(context)), kind, dtype)


def cases() -> Iterator[Case]:
    for kind in KINDS:
        for dtype in in_dtypes(kind, DTYPES):
            for name, check in CHECKS.items():
                yield Case(f"parallel[{kind},{name},{dtype}]", "parallel", kind,
                           Needs(dtype, features=MODEL_FEATURES.get(kind, ()), ranks=RANKS),
                           lambda context, check=check, kind=kind, dtype=dtype: parallel(check, kind, dtype, context),
                           LOGITS_NMSE[dtype])
