"""From a checkpoint to a draft head on a platform."""
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from ..errors import CheckpointError
from ..platform import Unsupported
from ..quant.formats import nbytes
from ..specs import RawTensor
from .draft_heads import EMBEDDED, HIDDEN, PAIR, DraftHead
from .loader import DENSE, Place, entries, name_gaps, place_layout

UNLIKELY = -1e4  # a logit; float16 holds it


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


class Spread(NamedTuple):
    """A matrix whose rows are those of tokens `ids`, as one of `size` rows, the others 0."""

    whole: str
    ids: np.ndarray
    size: int

    def describe(self, checkpoint: Any) -> tuple[str, tuple[int, ...]]:
        dtype, shape = checkpoint.describe(self.whole)
        if dtype not in DENSE or len(shape) != 2 or shape[0] != len(self.ids):
            raise CheckpointError(f"{self.whole} is {dtype} {list(shape)}; it must be {', '.join(DENSE)} "
                                  f"[{len(self.ids)}, hidden]")
        return dtype, (self.size, shape[1])

    def tensor(self, checkpoint: Any) -> RawTensor:
        dtype, shape = self.describe(checkpoint)
        data = np.zeros((self.size, nbytes(dtype, shape[1:])), np.uint8)
        data[self.ids] = np.frombuffer(checkpoint.tensor(self.whole).data, np.uint8).reshape(len(self.ids), -1)
        return RawTensor(dtype, shape, data.reshape(-1))


class Lacking(NamedTuple):
    """What makes tokens other than `ids` unlikely: a bias."""

    ids: np.ndarray
    size: int

    def describe(self, checkpoint: Any) -> tuple[str, tuple[int, ...]]:
        return "f32", (self.size,)

    def tensor(self, checkpoint: Any) -> RawTensor:
        values = np.full(self.size, UNLIKELY, "<f4")
        values[self.ids] = 0
        return RawTensor("f32", (self.size,), values.view(np.uint8))


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


def load_head(checkpoint: Any, names: Mapping[str, str], head: DraftHead, place: Place,
              made: Mapping[str, Made] | None = None) -> tuple[dict[str, Any], list[str], int]:
    """The head's weights, lines for people, and bytes. made: all that the layout has and the checkpoint has otherwise,
    the halves of the combining matrix unless given. Raises as `core.models.loader.load_model` does."""
    if made is None:
        made = {name: Columns(names[head.combine], i, 2) for i, name in enumerate((EMBEDDED, HIDDEN))}
    names = {**names, **{name: name for name in made}}
    return place_layout(Remade(checkpoint, made), names, head.layout(), head.config, place)
