"""Is what a platform hands to a forward all of `Ops`? Seen in one step that only looks, so that nothing is wrapped in
the steps that compute, and nothing is compiled for it. And is what a step gives back what `StepResult` says?
"""
from __future__ import annotations

from contextlib import suppress
from typing import Any

import numpy as np

from .manifests import OPS
from .plan import Batch, Out, Sampling, StepResult
from .platform import FEATURES, Manifest, Ops, State
from .registry import RegistrationError, signature_gaps
from .scheduler.batch import fit, pad_batch
from .specs import Bucket

# Parameters that only a platform with the feature is given.
GIVEN_WITH = {"moe.bias": "expert_groups"}


class _Looked(Exception):
    """How the step ends."""


def check_ops(platform: Any, manifest: Manifest, state: State, page_size: int) -> tuple[bool, State]:
    """Raises `RegistrationError` with every method that the platform's ops lack or take other parameters in.

    state: of two pages and two sequence slots at least; nothing in it is changed. -> did the platform call the forward
    at all, and the state to go on with.
    """
    found: list[tuple[type, list[str]]] = []

    def forward(ops: Any, weights: Any, batch: Batch) -> Any:
        found.append((type(ops), ops_gaps(ops, manifest)))
        raise _Looked("this step only looks at its ops")
    batch, bucket = _one_token(page_size), None
    if ladders := manifest.buckets:
        logits = tuple(sorted({*ladders.rows, *ladders.tokens}))
        bucket = Bucket(*(fit(1, sizes, "of each") for sizes in (*vars(ladders).values(), logits)))
        batch = pad_batch(batch, bucket)
    with suppress(Exception):  # it ends with one, in whatever the platform wraps it and wherever it raises it
        out, state = platform.compile(forward, {}, bucket)(state, batch)
        out.collect()
    for kind, gaps in found[:1]:
        if gaps:
            raise RegistrationError(f"platform {manifest.name!r}: its ops ({kind.__module__}.{kind.__qualname__}) are "
                                    f"incomplete: {'; '.join(gaps)}")
    return bool(found), state


def ops_gaps(ops: Any, manifest: Manifest) -> list[str]:
    """What an object that a forward is called with lacks of `Ops`; the op "moe" may be absent as the feature is."""
    required = tuple(op for op in OPS if op not in FEATURES or op in manifest.features)
    optional = [name for name, feature in GIVEN_WITH.items() if feature not in manifest.features]
    return signature_gaps(ops, Ops, required, optional)


class Checked:
    """A launched step, whose result is looked at before anybody believes it. batch: that it was launched with."""

    __slots__ = ("_out", "_rows", "_scored")

    def __init__(self, out: Out, batch: Batch):
        self._out, self._rows = out, len(batch.targets)
        self._scored = batch.sampling.top_logprobs is not None

    def collect(self) -> StepResult:
        """Raises `TypeError` that names what is not as promised, and what the step raised."""
        result = self._out.collect()
        _hold(result, "tokens", "iu", self._rows, 1)
        if self._scored:
            for name, kinds, axes in (("logprobs", "f", 1), ("top_ids", "iu", 2), ("top_logprobs", "f", 2)):
                _hold(result, name, kinds, self._rows, axes)
        return result


def _hold(result: StepResult, name: str, kinds: str, rows: int, axes: int) -> None:
    """kinds: of its numbers, as numpy's `dtype.kind` spells them."""
    value = getattr(result, name, None)
    if not isinstance(value, np.ndarray) or value.dtype.kind not in kinds or value.ndim != axes or len(value) < rows:
        said = f"{value.dtype} {list(value.shape)}" if isinstance(value, np.ndarray) else type(value).__name__
        wanted = f"{'int32' if 'i' in kinds else 'float32'} [{rows}{', K' * (axes - 1)}]"
        raise TypeError(f"collect() gave {name} as {said}, it must be an array of {wanted}: a fault of the platform, "
                        "please report it there")


def _one_token(page_size: int) -> Batch:
    """Token 0 of sequence slot 1, on page 1; nothing is sampled."""
    def ints(*values: int) -> np.ndarray:
        return np.array(values, np.int32)
    return Batch(tokens=ints(0), positions=ints(0), slots=ints(page_size), rows=ints(0), seqs=ints(1),
                 starts=ints(0, 1), lengths=ints(1), pages=ints(1)[None], logit_rows=ints(0), targets=ints(-2),
                 sampling=Sampling())
