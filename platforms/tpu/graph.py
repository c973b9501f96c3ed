"""How a step is launched: two compiled programs, the model's and the sampler's, each fed with one array of the host.

A program is traced once for each layout of its input, which is the bucket (and, for the sampler, which parameters are
on). The State's memory is donated and comes back. Dispatch is asynchronous: a launch gives arrays that are not there
yet, and `collect` waits for them.
"""
from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from ...core.platform import Batch, Sampling, StepResult
from .ops import Logits, Ops, State
from .quant import RANKS
from .sampling import sample

Layout = tuple[tuple[str, tuple[int, ...], str], ...]  # name, shape and dtype of each array, in order
CACHE = PartitionSpec(None, None, RANKS)
WHOLE = PartitionSpec()
TOKENS = ("tokens", "positions", "slots", "rows", "seqs", "starts", "lengths", "pages", "logit_rows")


def pack(arrays: Mapping[str, np.ndarray]) -> tuple[np.ndarray, Layout]:
    """Arrays of 4-byte numbers as one int32 vector: one transfer instead of many."""
    layout = tuple((name, array.shape, array.dtype.name) for name, array in arrays.items())
    return np.concatenate([np.ascontiguousarray(array).reshape(-1).view(np.int32) for array in arrays.values()]), layout


def unpack(packed: jax.Array, layout: Layout) -> dict[str, jax.Array]:
    """What `pack` was given."""
    arrays, start = {}, 0
    for name, shape, dtype in layout:
        stop = start + int(np.prod(shape))
        part = packed[start:stop].reshape(shape)
        arrays[name] = part if dtype == "int32" else lax.bitcast_convert_type(part, jnp.dtype(dtype))
        start = stop
    return arrays


def pack_batch(batch: Batch) -> tuple[np.ndarray, Layout]:
    """All but sampling."""
    names = TOKENS if batch.adapters is None else (*TOKENS, "adapters")
    return pack({name: getattr(batch, name).astype(np.int32, copy=False) for name in names})


def pack_sampling(batch: Batch) -> tuple[np.ndarray, Layout]:
    """Sampling as `sampling.sample` takes it. Lists of any length are filled up to powers of two, which name a logit
    row past the last; a number of top logprobs likewise."""
    sampling, rows = batch.sampling, len(batch.targets)
    arrays = {"targets": batch.targets, "seqs": batch.seqs[batch.rows[batch.logit_rows]],
              "inputs": batch.tokens[batch.logit_rows]}
    if sampling.temperature is not None:
        arrays |= drawing(sampling)
    if sampling.top_logprobs is not None:
        arrays["top_logprobs"] = fill(sampling.top_logprobs)
    for name in ("penalties", "bias", "mask"):
        part = getattr(sampling, name)
        for field, values in part._asdict().items() if part is not None else ():
            if callable(values):
                continue
            listed = field not in ("pending", "repetition", "presence", "frequency")
            arrays[f"{name}.{field}"] = fill(values, rows if field == "rows" else 0) if listed else values
    return pack({name: array if array.dtype in (np.float32, np.uint32) else array.astype(np.int32, copy=False)
                 for name, array in arrays.items()})


def drawing(sampling: Sampling) -> dict[str, np.ndarray]:
    """How rows are drawn, with what is off spelled out, so that there are two variants: with a cut and without."""
    rows, cut = len(sampling.temperature), sampling.top_k is not None or sampling.top_p is not None
    off = {"min_p": np.zeros(rows, np.float32)}
    off |= {"top_k": np.zeros(rows, np.int32), "top_p": np.ones(rows, np.float32)} if cut else {}
    given = {name: getattr(sampling, name) for name in ("temperature", "uniform", *off)}
    return {name: off[name] if values is None else values for name, values in given.items()}


def fill(values: np.ndarray, value: int = 0) -> np.ndarray:
    """Lengthened to a power of two; nothing stays nothing."""
    size = 1 << (len(values) - 1).bit_length() if len(values) else 0
    return np.concatenate([values, np.full((size - len(values), *values.shape[1:]), value, values.dtype)])


@dataclass(frozen=True)
class Launched:
    """A step on its way: what the device will give, or the error that kept it from being launched."""

    result: Any
    top: int = 0
    error: Exception | None = None

    def collect(self) -> StepResult | np.ndarray:
        if self.error is not None:
            raise self.error
        result = jax.device_get(self.result)
        if not isinstance(result, dict):
            return np.asarray(result)
        parts = {name: values[:, :self.top] if name.startswith("top_") else values for name, values in result.items()}
        return StepResult(**parts)


class CompiledStep:
    """`forward` for one bucket, or for as many sizes as it is called with. `traces` counts how often it was traced."""

    def __init__(self, forward: Callable[[Ops, Any, Batch], Any], weights: Any, mesh: Mesh, mode: str) -> None:
        self.weights, tree = jax.tree.flatten(weights)
        self.traces = 0
        self.mesh = mesh

        def run(weights: list, layers: tuple, last: jax.Array, packed: jax.Array, layout: Layout) -> tuple:
            self.traces += 1
            batch = Batch(**unpack(packed, layout), targets=None, sampling=Sampling())
            ops = Ops(layers, last, batch, mode, mesh.size)
            out = forward(ops, jax.tree.unflatten(tree, weights), ops.batch)
            return out if isinstance(out, Logits) else out.astype(jnp.float32), tuple(ops.layers)

        def program(weights: list, layers: tuple, last: jax.Array, packed: jax.Array, layout: Layout) -> tuple:
            if mesh.size == 1:
                return run(weights, layers, last, packed, layout)
            shares = [leaf.sharding.spec for leaf in self.weights]
            return jax.shard_map(partial(run, layout=layout), mesh=mesh, in_specs=(shares, CACHE, WHOLE, WHOLE),
                                 out_specs=(WHOLE, CACHE), check_vma=False)(weights, layers, last, packed)

        self.program = jax.jit(program, static_argnums=4, donate_argnums=1)

    def __call__(self, state: State, batch: Batch) -> tuple[Launched, State]:
        try:
            result, layers = self.program(self.weights, state.layers, state.last, *self._sent(pack_batch(batch)))
            state = State(state.spec, layers, state.last)
            if isinstance(result, Logits):
                if batch.sampling.mask is not None:
                    batch.sampling.mask.ready()  # while the model's program runs
                result, last = _sampler(result.values, state.last, *self._sent(pack_sampling(batch)))
                state = State(state.spec, layers, last)
            for array in jax.tree.leaves(result):
                array.copy_to_host_async()
        except Exception as error:  # the contract: a step raises in `collect`, and the state stays usable
            return Launched(None, error=error), state
        top = batch.sampling.top_logprobs
        return Launched(result, 0 if top is None else len(top)), state

    def _sent(self, packed: tuple[np.ndarray, Layout]) -> tuple[jax.Array, Layout]:
        return jax.device_put(packed[0], NamedSharding(self.mesh, WHOLE)), packed[1]


@partial(jax.jit, static_argnums=3, donate_argnums=1)
def _sampler(logits: jax.Array, last: jax.Array, packed: jax.Array, layout: Layout) -> tuple[dict, jax.Array]:
    return sample(logits, last, unpack(packed, layout))
