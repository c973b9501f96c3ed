"""The adapters in the slots as leaves of the weight tree, and the forward that applies them.

y = x W' + ((x A') * columns) B', where A holds the rows of all slots, B their columns beside each other, and `columns`
is 1 where a column belongs to the adapter of the token's row: exact for each row, in ops that every platform has. It
costs as many columns as all slots together have; a step without adapters is another step, and knows nothing of them.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ..manifests import OPS
from ..models.blocks import Layout, Projections, Stack
from ..models.loader import LoadedModel
from ..platform import Batch, Ops, Tensor, Weight
from ..specs import RawTensor, WeightSpec
from .peft import Adapter, Shape

ALIGN = 16  # columns of one slot are a multiple of this, as kernels like them
COLUMNS = "adapter_columns"


class AdaptedStack(NamedTuple):
    """A stack of projections that adapters change. down: A of each changed one, stacked; ups: B of each, None for those
    that no adapter changes."""

    plain: Stack
    down: Weight
    ups: tuple[Weight | None, ...]

    def outputs(self, ops: AdaptedOps, x: Tensor, widths: Sequence[int]) -> list[Tensor]:
        """As of `Stack`."""
        outputs, start = self.plain.outputs(ops, x, widths), 0
        low, width = ops.linear(x, self.down), ops.columns.shape[1]
        for i, up in enumerate(self.ups):
            if up is not None:
                outputs[i] = outputs[i] + ops.linear(low[:, start:start + width] * ops.columns, up)
                start += width
        return outputs


class AdaptedOps:
    """A platform's ops, and which columns count for each token, [T, columns of all slots]."""

    def __init__(self, ops: Ops, columns: Tensor) -> None:
        vars(self).update({name: getattr(ops, name) for name in OPS if hasattr(ops, name)})
        self.columns = columns


def adapted_forward(forward: Any, ops: Ops, weights: Mapping[str, Any], batch: Batch) -> Tensor:
    """`forward` with adapters: what a step is compiled of whose batches have them."""
    return forward(AdaptedOps(ops, ops.embed(batch.adapters, weights[COLUMNS])), weights, batch)


def adaptable(layout: Layout) -> dict[str, Shape]:
    """The modules that an adapter may change: every projection, by name without ".weight"."""
    return {entry.name.removesuffix(".weight"): Shape(*entry.shape) for layer in layout["layers"]
            for stack in layer.values() if isinstance(stack, Projections) for entry in stack.weights}


def most_bytes(shapes: Mapping[str, Shape], rank: int, slots: int, value: int) -> int:
    """What full slots of this rank take on the device if every module is changed. value: bytes of one number."""
    return sum(shape.inputs + shape.outputs for shape in shapes.values()) * padded(rank) * slots * value


def padded(rank: int) -> int:
    return -(-rank // ALIGN) * ALIGN


class Placed(NamedTuple):
    """A forward with adapters and its weights, to be compiled; `nbytes` of what the adapters add."""

    forward: Any
    weights: dict[str, Any]
    nbytes: int


def place(model: LoadedModel, platform: Any, slots: Sequence[Adapter | None], value: int) -> Placed | None:
    """The model with the adapters of slots 1, 2 ... on the device; None when all are empty. Its own leaves are shared.

    value: bytes of one number of the model's dtype. Raises what `Platform.load` raises.
    """
    widths = [padded(adapter.rank) if adapter else 0 for adapter in slots]
    if not sum(widths):
        return None
    placer = _Placer(platform, model.dtype, [(a, sum(widths[:i])) for i, a in enumerate(slots) if a], sum(widths),
                     value)
    owners = np.repeat(np.arange(1, len(slots) + 1), widths)
    columns = (np.arange(len(slots) + 1)[:, None] == owners).astype(np.float32)
    layers = [{**layer, **dict(placer.changed(layer, entries))}
              for layer, entries in zip(model.weights["layers"], model.layout["layers"], strict=True)]
    weights = {**model.weights, "layers": layers, COLUMNS: placer.load(COLUMNS, columns, "embed", None)}
    return Placed(partial(adapted_forward, model.forward), weights, placer.nbytes)


class _Placer:
    """Loads leaf after leaf. adapters: each with its first column; width: columns of all."""

    def __init__(self, platform: Any, dtype: str, adapters: Sequence[tuple[Adapter, int]], width: int,
                 value: int) -> None:
        self.platform, self.dtype, self.adapters, self.width, self.value = platform, dtype, adapters, width, value
        self.nbytes = 0

    def load(self, name: str, values: np.ndarray, role: Any, cut: Any) -> Weight:
        self.nbytes += values.size * self.value
        data = np.ascontiguousarray(values, np.float32)
        return self.platform.load([RawTensor("f32", data.shape, data.view(np.uint8).reshape(-1))],
                                  WeightSpec((name,), role, cut), self.dtype)

    def changed(self, layer: Mapping[str, Any], entries: Layout) -> Iterator[tuple[str, AdaptedStack]]:
        """The stacks of one layer that some adapter changes."""
        for key, stack in entries.items():
            if isinstance(stack, Projections) and (found := self._stack(stack, layer[key])) is not None:
                yield key, found

    def _stack(self, stack: Projections, plain: Stack) -> AdaptedStack | None:
        """Where the weights are cut along their outputs, so is B; along their inputs, so is A: the sum over the ranks
        that follows is of the adapters' parts too."""
        names = [entry.name.removesuffix(".weight") for entry in stack.weights]
        used = [any(name in adapter.modules for adapter, _ in self.adapters) for name in names]
        if not any(used):
            return None
        cut, inputs = stack.weights[0].cut, stack.weights[0].shape[1]
        down = np.zeros((sum(used) * self.width, inputs), np.float32)
        ups: list[Weight | None] = []
        for name, entry, wanted in zip(names, stack.weights, used, strict=True):
            if not wanted:
                ups.append(None)
                continue
            first, up = (len(ups) - ups.count(None)) * self.width, np.zeros((entry.shape[0], self.width), np.float32)
            for adapter, column in self.adapters:
                if (pair := adapter.modules.get(name)) is not None:
                    a, b = pair.factors()
                    down[first + column:first + column + pair.rank] = a
                    up[:, column:column + pair.rank] = b
            ups.append(self.load(f"{name}.lora_B", up, "linear", 0 if cut == 0 else None))
        return AdaptedStack(plain, self.load(f"{names[0]}.lora_A", down, "linear", 1 if cut == 1 else None), tuple(ups))
