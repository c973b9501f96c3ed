"""A step as a program: the forward runs once over descriptions of tensors, and what it asks for is written down.

A program holds for a number of tokens and of logit rows. Tensors are float32 rows in one arena; an op's memory is given
to others as soon as the forward has let go of it. An op waits for all threads where it touches what others wrote.
"""
from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from typing import Any

import numpy as np
import torch

from ....core.platform import AttentionSpec, MoESpec, RopeSpec
from .library import ADAPTERS, OP
from .weights import BF16, LANES, Packed

# `Kind` of step.h
EMBED, LINEAR, NORM, TURNS, ROPE, WRITE, PLAN, ATTEND, ADD, SCALE, GATHER, ACT_MUL, LOW, UP = range(14)
ACTS = ("silu", "gelu_tanh", "gelu", "sigmoid")
FEW = 8          # rows up to which each thread computes a norm before a product for itself
ALIGN = 64       # bytes
WIDEST = 256     # head_dim, and QUERIES of attention.h
SHARERS = 24


Touch = tuple[Hashable, int, bool, int]  # a place, floats from row to row, is it written, rows by which work is divided


class Untraceable(Exception):
    """The forward asks for something that is not among the compiled kernels."""


class Memory:
    """Bytes of the arena, given back when no tensor names them any more. last: the op that made what is there, while
    nothing has read it: what follows may be done by that op too. low: it is a low-rank product of adapters, masked."""

    __slots__ = ("arena", "start", "size", "last", "low")

    def __init__(self, arena: Arena, start: int, size: int) -> None:
        self.arena, self.start, self.size, self.last, self.low = arena, start, size, None, False

    def __del__(self) -> None:
        self.arena.free.append((self.start, self.size))


class Arena:
    """Where tensors lie, by byte. Begins behind 0, which stands for no tensor."""

    def __init__(self) -> None:
        self.end, self.free = ALIGN, []

    def take(self, nbytes: int) -> Memory:
        """The smallest free piece that is not much too large, or fresh bytes."""
        size = -(-nbytes // ALIGN) * ALIGN
        fitting = [piece for piece in self.free if size <= piece[1] <= 2 * size]
        if fitting:
            piece = min(fitting, key=lambda piece: piece[1])
            self.free.remove(piece)
            return Memory(self, *piece)
        self.end += size
        return Memory(self, self.end - size, size)


class Rows:
    """A tensor: float32 [rows, width] or [rows, heads, width]. stride: floats from row to row. norm: it is what a norm
    makes of another tensor, and not computed yet."""

    __slots__ = ("tape", "memory", "offset", "shape", "stride", "norm")

    def __init__(self, tape: Tape, memory: Memory | None, offset: int, shape: tuple[int, ...], stride: int,
                 norm: tuple[Rows, Any, float] | None = None) -> None:
        self.tape, self.memory, self.offset, self.shape, self.stride = tape, memory, offset, shape, stride
        self.norm = norm

    def reshape(self, *shape: int) -> Rows:
        """Other axes behind the first."""
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple) else shape
        total = int(np.prod(self.shape))
        if sizes.count(-1) == 1:
            sizes = tuple(total // -int(np.prod(sizes)) if size == -1 else size for size in sizes)
        if sizes[0] != self.shape[0] or int(np.prod(sizes)) != total or len(sizes) not in (2, 3):
            raise Untraceable(f"reshape of {self.shape} to {sizes}")
        at = self.computed()
        return Rows(self.tape, at.memory, at.offset, sizes, at.stride)

    def __getitem__(self, key: Any) -> Rows:
        if key is self.tape.logit_rows:
            return self.tape.gather(self)
        if not (isinstance(key, tuple) and len(key) == len(self.shape) == 2 and key[0] == slice(None)
                and isinstance(key[1], slice) and key[1].step in (None, 1)):
            raise Untraceable(f"index {key}")
        start, stop, _ = key[1].indices(self.shape[1])
        at = self.computed()
        return Rows(self.tape, at.memory, at.offset + start, (self.shape[0], stop - start), at.stride)

    def __add__(self, other: Any) -> Rows:
        return self.tape.add(self, other)

    def __mul__(self, other: Any) -> Rows:
        return self.tape.masked(self, other) if isinstance(other, Columns) else self.tape.scale(self, other)

    __radd__, __rmul__ = __add__, __mul__

    def computed(self) -> Rows:
        """Itself, its norm applied."""
        if self.norm is None and self.memory is None:
            raise Untraceable("a tensor is used after it has become part of another")
        if self.norm is not None:
            source, weight, eps = self.norm
            made = self.tape.normed(source, weight, eps)
            self.memory, self.offset, self.stride, self.norm = made.memory, made.offset, made.stride, None
        return self

    def view(self) -> tuple[int, int, int]:
        """As `VIEW`, relative to the arena."""
        return self.memory.start + 4 * self.offset, self.stride, self.shape[-1]


class Columns:
    """Which columns of low-rank products count for each token, [tokens, columns]: those of its adapter. Nothing is
    computed: the products themselves leave the others out."""

    def __init__(self, tokens: int, weight: Packed) -> None:
        self.shape = tokens, weight.inputs
        table = weight.rows(torch.arange(weight.outputs)).float().numpy()
        blocks = table[:, ::LANES].argmax(0).astype(np.int32)
        if weight.inputs % LANES or weight.format != BF16 or (
                table != (np.arange(weight.outputs)[:, None] == blocks.repeat(LANES))).any():
            raise Untraceable("columns of adapters that are no whole blocks")
        self._owners, self._active, self._blocks = (np.zeros(tokens, np.int32), np.zeros(weight.outputs, np.int32),
                                                    blocks)
        self.record = np.zeros((), ADAPTERS)
        self.record["owners"], self.record["active"] = self._owners.ctypes.data, self._active.ctypes.data
        self.record["blocks"], self.record["count"] = blocks.ctypes.data, len(blocks)

    def fill(self, adapters: np.ndarray) -> None:
        """Before a run: each token's adapter, int32 [tokens]."""
        self._owners[:] = adapters
        self._active[:] = 0
        self._active[adapters] = 1
        self._active[0] = 0


class Tape:
    """Stands for `Ops` while a forward is written down. `tokens` and `logit_rows` stand for the batch's."""

    def __init__(self, tokens: int, logits: int) -> None:
        self.count, self.logits = tokens, logits
        self.tokens, self.logit_rows, self.adapters = object(), object(), object()
        self.columns: Columns | None = None
        self.arena, self.ops, self.kept = Arena(), [], []
        self.turns: dict[RopeSpec, Rows] = {}
        self.plans: dict[tuple[Any, ...], int] = {}
        self.output: Rows | None = None
        self.sampled, self.softcap = False, None
        self._touched: list[Touch] = []  # since all threads met
        self._before: list[Touch] = []   # of these, before the last op

    # ---- the ops of the neck

    def embed(self, ids: Any, weight: Packed) -> Rows | Columns:
        if ids is self.adapters:
            self.columns = Columns(self.count, weight)
            return self.columns
        if ids is not self.tokens:
            raise Untraceable("look-up of other ids than the batch's")
        z = self.new(self.count, weight.inputs)
        weight.fill(self.emit(EMBED, writes=[z], z=z)["w"])
        return z

    def linear(self, x: Rows, weight: Packed, bias: Any = None) -> Rows:
        if not isinstance(weight, Packed) or len(x.shape) != 2:
            raise Untraceable(f"product with {type(weight).__name__}")
        if x.memory is not None and x.memory.low:
            return self._up(x, weight, bias)
        rows, fused = x.shape[0], x.norm if x.norm is not None and x.shape[0] <= FEW else None
        source = x.computed() if fused is None else fused[0]
        z = self.new(rows, weight.outputs)
        op = self.emit(LINEAR, reads=[source], writes=[z], shared=0, rows=rows, x=source, z=z)
        weight.fill(op["w"])
        if fused is not None:
            op["norm"], op["eps"] = self.pointer(fused[1]), fused[2]
        if bias is not None:
            op["bias"] = self.pointer(bias)
        z.memory.last = op
        return z

    def rms_norm(self, x: Rows, weight: Any, eps: float) -> Rows:
        if len(x.shape) == 2:
            return Rows(self, None, 0, x.shape, 0, (x.computed(), weight, eps))
        return self.normed(x.computed(), weight, eps)

    def rope(self, x: Rows, spec: RopeSpec) -> Rows:
        if spec not in self.turns:
            frequencies = np.array(spec.inv_freq, np.float64)
            self.kept.append(frequencies)
            turns = self.turns[spec] = self.new(self.count, 2 * len(frequencies))
            self.emit(TURNS, writes=[turns], z=turns, bias=frequencies.ctypes.data, width=len(frequencies),
                      scale=spec.scale)
        turns, z = self.turns[spec], self.new(*x.shape)
        self.emit(ROPE, reads=[x, turns], writes=[z], x=x, y=turns, z=z, heads=x.shape[1], width=x.shape[2],
                  index=len(spec.inv_freq))
        return z

    def attention(self, q: Rows, k: Rows, v: Rows, layer: int, spec: AttentionSpec) -> Rows:
        heads, kv_heads, width = q.shape[1], *k.shape[1:]
        if width % 16 or width > WIDEST or heads > SHARERS * kv_heads:
            raise Untraceable(f"{heads} heads of {width} over {kv_heads}")
        cache = ("cache", layer)
        self.emit(WRITE, reads=[k, v], writes=[cache], x=k, y=v, layer=layer)
        case = ("plan", spec.window, heads, kv_heads, width)
        fields = {"heads": heads, "layer": layer, "window": spec.window or 0}
        if case not in self.plans:
            self.plans[case] = len(self.plans)
            self.emit(PLAN, writes=[case], shared=0, index=self.plans[case], **fields)
        z = self.new(self.count, heads, width)
        self.emit(ATTEND, reads=[q, cache], writes=[z, case], shared=0, x=q, z=z, index=self.plans[case],
                  scale=spec.scale, softcap=spec.softcap or 0, **fields)
        return z

    def act_mul(self, gate: Rows, up: Rows, kind: str) -> Rows:
        if kind not in ACTS:
            raise Untraceable(f"activation {kind}")
        gate, up, width = gate.computed(), up.computed(), gate.shape[1]
        op = gate.memory.last
        if (op is not None and up.memory is gate.memory and (gate.offset, up.offset) == (0, width)
                and op["w"]["outputs"] == 2 * width and width % 16 == 0):
            op["act"], op["z"]["row"] = ACTS.index(kind), width
            return self.instead(gate, up, shape=gate.shape, stride=width)
        z = self.new(*gate.shape)
        self.emit(ACT_MUL, reads=[gate, up], writes=[z], rows=gate.shape[0], x=gate, y=up, z=z, width=width,
                  act=ACTS.index(kind))
        return z

    def moe(self, x: Rows, router_logits: Rows, w13: Any, w2: Any, spec: MoESpec, bias: Any = None) -> Rows:
        raise Untraceable("sparse layers")

    def all_reduce(self, x: Rows) -> Rows:
        return x

    def sample(self, logits: Rows, softcap: float | None = None) -> Rows:
        self.output, self.sampled, self.softcap = logits.computed(), True, softcap
        return logits

    # ---- what tensors do

    def add(self, a: Rows, b: Any) -> Rows:
        if not isinstance(b, Rows) or a.shape != b.shape or len(a.shape) != 2:
            raise Untraceable("a sum of other than two tensors of one shape")
        a, b = a.computed(), b.computed()
        for made, other in ((b, a), (a, b)):
            op = made.memory.last
            if op is not None and op is self.ops[-1] and made.shape[1] == op["w"]["outputs"] and not made.offset:
                op["y"] = other.view()
                self._also_reads(op, other)
                return self.instead(made, shape=made.shape, stride=made.stride)
        z = self.new(*a.shape)
        self.emit(ADD, reads=[a, b], writes=[z], rows=a.shape[0], x=a, y=b, z=z, width=a.shape[1])
        return z

    def scale(self, x: Rows, factor: Any) -> Rows:
        if not isinstance(factor, int | float) or len(x.shape) != 2:
            raise Untraceable("a product with other than a number")
        x, z = x.computed(), self.new(*x.shape)
        self.emit(SCALE, reads=[x], writes=[z], rows=x.shape[0], x=x, z=z, width=x.shape[1], scale=factor)
        return z

    def masked(self, x: Rows, columns: Columns) -> Rows:
        """What is left of a low-rank product, or of some of its columns. The product itself leaves the rest out."""
        op = x.memory.last if x.memory is not None else None
        if op is not None and op["kind"] == LINEAR and op["w"]["format"] == BF16 and not (
                op["w"]["outputs"] % columns.shape[1] or op["bias"] or op["y"]["at"]):
            op["kind"], op["bias"], x.memory.low = LOW, columns.record.ctypes.data, True
            x.memory.last = None
        if x.memory is None or not x.memory.low or x.offset % columns.shape[1] or x.shape != columns.shape:
            raise Untraceable("a product with other than a number")
        return x

    def _up(self, x: Rows, weight: Packed, bias: Any) -> Rows:
        """The second of two low-rank products."""
        if bias is not None or self.columns is None or x.shape != self.columns.shape or weight.format != BF16:
            raise Untraceable("a low-rank product of another form")
        z = self.new(x.shape[0], weight.outputs)
        op = self.emit(UP, reads=[x], writes=[z], shared=0, rows=x.shape[0], x=x, z=z,
                       bias=self.columns.record.ctypes.data)
        weight.fill(op["w"])
        z.memory.last = op
        return z

    def gather(self, x: Rows) -> Rows:
        """The rows whose logits are wanted."""
        x, z = x.computed(), self.new(self.logits, x.shape[1])
        self.emit(GATHER, reads=[x], writes=[z], shared=0, rows=self.logits, x=x, z=z, width=x.shape[1])
        return z

    def normed(self, x: Rows, weight: Any, eps: float) -> Rows:
        z, heads = self.new(*x.shape), x.shape[1] if len(x.shape) == 3 else 1
        self.emit(NORM, reads=[x], writes=[z], rows=x.shape[0], x=x, z=z, norm=self.pointer(weight), eps=eps,
                  heads=heads, width=x.shape[-1])
        return z

    # ---- writing down

    def new(self, *shape: int) -> Rows:
        width = int(np.prod(shape[1:]))
        return Rows(self, self.arena.take(4 * shape[0] * width), 0, shape, width)

    def instead(self, *gone: Rows, shape: tuple[int, ...], stride: int) -> Rows:
        """Another tensor in the memory of these, which are no more."""
        memory = gone[0].memory
        memory.last = None
        for rows in gone:
            rows.memory = None
        return Rows(self, memory, 0, shape, stride)

    def pointer(self, vector: Any) -> int:
        self.kept.append(vector)
        return vector.values.data_ptr()

    def emit(self, kind: int, reads: Iterable[Any] = (), writes: Iterable[Any] = (), shared: int | None = None,
             **fields: Any) -> np.ndarray:
        """Write an op down. shared: by how many rows its work is divided among the threads, 0 = in another way."""
        op = np.zeros((), OP)
        op["kind"], op["act"], op["rows"] = kind, -1, self.count
        for name, value in fields.items():
            op[name] = value.computed().view() if isinstance(value, Rows) else value
        by = int(op["rows"]) if shared is None else shared
        now = [(*self._place(what), False, by) for what in reads] + [(*self._place(what), True, by) for what in writes]
        # A thread has the same bytes in both ops only where the rows are as many and as long.
        op["barrier"] = any(place == before and (writing or written) and not (by and (by, stride) == (same, length))
                            for place, stride, writing, _ in now for before, length, written, same in self._touched)
        self._before = [] if op["barrier"] else self._touched
        self._touched = self._before + now
        self.ops.append(op)
        return op

    def _also_reads(self, op: np.ndarray, rows: Rows) -> None:
        """The last op reads another tensor too."""
        place, stride = self._place(rows)
        if any(before == place and written for before, _, written, _ in self._before):
            op["barrier"], self._touched, self._before = True, self._touched[len(self._before):], []
        self._touched.append((place, stride, False, 0))

    def _place(self, what: Any) -> tuple[Hashable, int]:
        if not isinstance(what, Rows):
            return what, 0
        what.memory.last = None
        return what.memory.start, what.stride


def trace(forward: Callable[[Any, Any, Any], Any], weights: Any, batch: Any, tape: Tape) -> np.ndarray:
    """The program of `forward`, `OP` records with places relative to the arena, and `tape.output`. Raises
    `Untraceable`."""
    result = forward(tape, weights, batch)
    if tape.output is None:
        if not isinstance(result, Rows) or len(result.shape) != 2:
            raise Untraceable("a forward that ends with other than `sample` or a matrix")
        tape.output = result.computed()
    return np.array(tape.ops, OP)
