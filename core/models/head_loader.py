"""From a checkpoint to a draft head on a platform."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import CheckpointError
from ..platform import Unsupported
from ..quant.formats import nbytes
from ..specs import RawTensor
from .draft_heads import PAIR, DraftHead
from .loader import DENSE, Place, entries, name_gaps, place_layout


class Made(Protocol):
    """A tensor that is made of those of a checkpoint."""

    def describe(self, checkpoint: Any) -> tuple[str, tuple[int, ...]]:
        """As of `Checkpoint`. Raises `CheckpointError` where it cannot be made."""

    def tensor(self, checkpoint: Any) -> RawTensor:
        """As of `Checkpoint`."""


class Columns(NamedTuple):
    """Part number `index` of `parts` equal ones of a matrix, by columns."""

    whole: str
    index: int
    parts: int

    def describe(self, checkpoint: Any) -> tuple[str, tuple[int, ...]]:
        dtype, shape = checkpoint.describe(self.whole)
        if dtype not in DENSE or len(shape) != 2 or shape[1] % self.parts:
            raise CheckpointError(f"{self.whole} is {dtype} {list(shape)}; it must be {', '.join(DENSE)} "
                                  f"[hidden, {self.parts} * hidden]")
        return dtype, (shape[0], shape[1] // self.parts)

    def tensor(self, checkpoint: Any) -> RawTensor:
        dtype, (rows, width) = self.describe(checkpoint)
        data = np.frombuffer(checkpoint.tensor(self.whole).data, np.uint8).reshape(rows, self.parts, -1)
        assert data.shape[2] == nbytes(dtype, (width,))
        return RawTensor(dtype, (rows, width), np.ascontiguousarray(data[:, self.index]).reshape(-1))


class Rows(NamedTuple):
    """Rows `ids` of the model's embedding `name`, from the model's own checkpoint."""

    model: Any
    name: str
    ids: np.ndarray

    def describe(self, checkpoint: Any) -> tuple[str, tuple[int, ...]]:
        dtype, shape = self.model.describe(self.name)
        return dtype, (len(self.ids), *shape[1:])

    def tensor(self, checkpoint: Any) -> RawTensor:
        raw = self.model.tensor(self.name)
        if any(part.shape[:1] != raw.shape[:1] for part in raw.extra):
            raise Unsupported("a head with a vocabulary of its own needs rows of the model's embedding, and "
                              f"{raw.dtype} keeps none by itself: take ngram, or the model in another format")
        return self._taken(raw)._replace(extra=tuple(map(self._taken, raw.extra)))

    def _taken(self, raw: RawTensor) -> RawTensor:
        data = np.frombuffer(raw.data, np.uint8).reshape(raw.shape[0], -1)
        return RawTensor(raw.dtype, (len(self.ids), *raw.shape[1:]), data[self.ids].reshape(-1))


class Remade:
    """A checkpoint that has further tensors. made: by name."""

    def __init__(self, checkpoint: Any, made: Mapping[str, Made]):
        self._checkpoint, self._made = checkpoint, made

    def __getattr__(self, name: str) -> Any:
        return getattr(self._checkpoint, name)

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """As of `Checkpoint`."""
        return self._made[name].describe(self._checkpoint) if name in self._made else self._checkpoint.describe(name)

    def tensor(self, name: str) -> RawTensor:
        """As of `Checkpoint`."""
        return self._made[name].tensor(self._checkpoint) if name in self._made else self._checkpoint.tensor(name)


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
    wholes = head.wholes()
    wanted = {wholes.get(entry.name, entry.name) for entry in entries(head.layout(), names)}
    extra = {name for name in names.keys() - wanted if not name.startswith(unused)}
    if gaps := name_gaps(wanted - names.keys(), extra):
        raise CheckpointError(f"this is no draft head of the kind asked for: it {gaps}")


def own_ids(checkpoint: Any, name: str, size: int) -> np.ndarray:
    """The model's token for each of a head's, of `size`: int64. Raises `CheckpointError`."""
    dtype, shape = checkpoint.describe(name)
    if dtype not in ("i64", "i32") or len(shape) != 1:
        raise CheckpointError(f"{name} is {dtype} {list(shape)}; whole numbers, one for each token, are needed")
    data = np.frombuffer(checkpoint.tensor(name).data, f"<{dtype.replace('i64', 'i8').replace('i32', 'i4')}")
    ids = np.arange(len(data)) + data
    if len(np.unique(ids)) < len(ids) or ids.min(initial=0) < 0 or ids.max(initial=0) >= size:
        raise CheckpointError(f"{name} says tokens twice or outside the vocabulary of {size}")
    return ids


def load_head(checkpoint: Any, names: Mapping[str, str], head: DraftHead, place: Place,
              made: Mapping[str, Made]) -> tuple[dict[str, Any], list[str], int]:
    """The head's weights, lines for people, and bytes. made: all that the layout has and the checkpoint has otherwise.
    Raises as `core.models.loader.load_model` does."""
    names = {**names, **{name: name for name in made}}
    return place_layout(Remade(checkpoint, made), names, head.layout(), head.config, place)
