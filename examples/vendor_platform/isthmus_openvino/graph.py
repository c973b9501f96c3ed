"""A forward pass is traced into one OpenVINO graph with axes of any size, which is compiled once."""
from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import openvino
from isthmus.core.platform import Batch, StepResult
from openvino import opset15 as opset

from .layout import State, lay_out
from .sampling import sample

KEEP = 0  # how an axis of any size shows in a shape; in a reshape OpenVINO reads it as "as it was"
Fill = Callable[[State, dict[str, np.ndarray]], np.ndarray]


class Tensor:
    """A node of the graph with what model definitions may use on a tensor, and a few things for the ops."""

    def __init__(self, node: Any) -> None:
        self.node = node

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(KEEP if d.is_dynamic else d.get_length() for d in self.node.output(0).get_partial_shape())

    def reshape(self, *shape: int) -> Tensor:
        return Tensor(opset.reshape(self.node, integers(shape), special_zero=True))

    def transpose(self, *order: int) -> Tensor:
        return Tensor(opset.transpose(self.node, integers(order)))

    def __getitem__(self, index: Any) -> Tensor:
        """Integers [...] on axis 0, or slices."""
        if isinstance(index, Tensor):
            return Tensor(opset.gather(self.node, index.node, integers(0)))
        parts = index if isinstance(index, tuple) else (index,)
        bounds = [(p.start or 0, 2**31 - 1 if p.stop is None else p.stop, p.step or 1, i) for i, p in enumerate(parts)]
        return Tensor(opset.slice(self.node, *map(integers, zip(*bounds, strict=True))))

    def where(self, condition: Tensor, other: Tensor | float) -> Tensor:
        """This where the condition holds, the other elsewhere; no NaN of what is not chosen gets through."""
        return Tensor(opset.select(condition.node, self.node, node_of(other)))

    def _joined(operation: Callable[[Any, Any], Any]) -> Callable[[Tensor, Tensor | float], Tensor]:
        return lambda self, other: Tensor(operation(self.node, node_of(other)))

    __add__ = __radd__ = _joined(opset.add)
    __mul__ = __rmul__ = _joined(opset.multiply)
    __sub__, __rsub__ = _joined(opset.subtract), _joined(lambda one, other: opset.subtract(other, one))


def integers(values: Any) -> Any:
    return opset.constant(np.array(values, np.int32))


def node_of(value: Tensor | float | np.ndarray) -> Any:
    """Of a number a constant, of a weight one that reads its memory in place."""
    if isinstance(value, Tensor):
        return value.node
    return opset.constant(np.asarray(value, np.float32), shared_memory=isinstance(value, np.ndarray))


@dataclass
class Trace:
    """A graph in the making, then compiled.

    feeds: its inputs by name, each with what fills it in a step.  written: (layer, 0 for K or 1 for V) -> what goes to
    the step's slots.  sampled: are the result logits to sample from?
    """

    feeds: dict[Any, tuple[Any, Fill]] = field(default_factory=dict)
    written: dict[tuple[int, int], Any] = field(default_factory=dict)
    sampled: bool = False

    def feed(self, name: Any, shape: Sequence[int], dtype: type = np.int32, fill: Fill | None = None) -> Tensor:
        """An input, -1 for an axis of any size; made once. Without `fill` it is the array of that name."""
        if name not in self.feeds:
            self.feeds[name] = opset.parameter(list(shape), dtype), fill or (lambda state, arrays: arrays[name])
        return Tensor(self.feeds[name][0])

    def compile(self, result: Tensor, core: openvino.Core, settings: dict[str, str]) -> Trace:
        model = openvino.Model([result.node, *self.written.values()], [node for node, _ in self.feeds.values()])
        self.request = core.compile_model(model, "CPU", settings).create_infer_request()
        return self

    def run(self, state: State, batch: Batch) -> StepResult | np.ndarray:
        """One step. K and V are written when all is computed, so that a step that fails changes nothing."""
        arrays = lay_out(batch, state)
        filled = [np.require(fill(state, arrays), node.get_element_type().to_dtype(), "C")
                  for node, fill in self.feeds.values()]
        for index, array in enumerate(filled):  # `filled` keeps alive what the tensors only point to
            self.request.set_input_tensor(index, openvino.Tensor(array, shared_memory=True))
        self.request.infer()
        result, *written = (tensor.data for tensor in self.request.output_tensors)
        for (layer, which), values in zip(self.written, written, strict=True):
            state.layers[layer][which][batch.slots] = values
        return sample(result, state, batch, arrays["tokens"]) if self.sampled else np.array(result)


@dataclass(frozen=True)
class Launched:
    """A step that waits, runs or is done."""

    future: Future

    def collect(self) -> StepResult | np.ndarray:
        return self.future.result()
