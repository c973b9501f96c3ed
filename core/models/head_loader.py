"""From a checkpoint to a draft head on a platform."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..platform import Unsupported
from ..quant.formats import nbytes
from ..specs import RawTensor
from .draft_heads import EMBEDDED, HIDDEN, PAIR, DraftHead
from .loader import DENSE, Place, entries, name_gaps, place_layout


class Halved:
    """A checkpoint in which the two halves of the combining matrix, by columns, are tensors of their own."""

    def __init__(self, checkpoint: Any, whole: str):
        self._checkpoint, self._whole = checkpoint, whole

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """As of `Checkpoint`. Raises `CheckpointError` for a matrix that cannot be halved."""
        if name not in (EMBEDDED, HIDDEN):
            return self._checkpoint.describe(name)
        dtype, shape = self._checkpoint.describe(self._whole)
        if dtype not in DENSE or len(shape) != 2 or shape[1] % 2:
            raise CheckpointError(f"{self._whole} is {dtype} {list(shape)}; it must be {', '.join(DENSE)} "
                                  "[hidden, 2 * hidden]")
        return dtype, (shape[0], shape[1] // 2)

    def tensor(self, name: str) -> RawTensor:
        """As of `Checkpoint`."""
        if name not in (EMBEDDED, HIDDEN):
            return self._checkpoint.tensor(name)
        dtype, (rows, width) = self.describe(name)
        data = np.frombuffer(self._checkpoint.tensor(self._whole).data, np.uint8).reshape(rows, 2, -1)
        assert data.shape[2] == nbytes(dtype, (width,))
        return RawTensor(dtype, (rows, width), np.ascontiguousarray(data[:, int(name == HIDDEN)]).reshape(-1))


def check_head(names: Mapping[str, str], head: DraftHead, place: Place, unused: tuple[str, ...] = ()) -> None:
    """Is all of a head there, and can the platform do it? names: canonical -> in the checkpoint. unused: beginnings of
    names that are not read. Raises `CheckpointError` or `Unsupported`."""
    target = head.target
    if target.hidden % target.head_dim:
        raise Unsupported(f"hidden states of {target.hidden} are not kept in heads of {target.head_dim}: a draft head "
                          "needs a multiple")
    heads = target.hidden // target.head_dim
    reason = place.platform.supports(
        "attention", head_dim=target.head_dim, heads=heads, kv_heads=heads, window=PAIR.window, softcap=None,
        page_size=place.page_size or place.manifest.page_sizes[0], dtype=place.dtype)
    if reason is not None:
        raise Unsupported(f"{place.manifest.name} cannot keep hidden states for a draft head: {reason}")
    wanted = {entry.name for entry in entries(head.layout(), names)} - {EMBEDDED, HIDDEN} | {head.combine}
    extra = {name for name in names.keys() - wanted if not name.startswith(unused)}
    if gaps := name_gaps(wanted - names.keys(), extra):
        raise CheckpointError(f"this is no draft head of the kind asked for: it {gaps}")


def load_head(checkpoint: Any, names: Mapping[str, str], head: DraftHead,
              place: Place) -> tuple[dict[str, Any], list[str], int]:
    """The head's weights, lines for people, and bytes. Raises as `core.models.loader.load_model` does."""
    names = {**names, EMBEDDED: EMBEDDED, HIDDEN: HIDDEN}
    return place_layout(Halved(checkpoint, names[head.combine]), names, head.layout(), head.config, place)
