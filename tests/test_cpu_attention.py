"""Attention by the compiled kernels beside the definition in float64: shapes that no model of the tests has, and what
is no number, which must come out wherever it was seen and nowhere else."""
from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the cpu platform needs torch")

from isthmus.core.plan import Batch, Sampling  # noqa: E402
from isthmus.core.platform import AttentionSpec, LayerState, StateSpec  # noqa: E402
from isthmus.platforms.cpu.compiled import library  # noqa: E402
from isthmus.platforms.cpu.compiled.step import Program, Runner, cache_records  # noqa: E402
from isthmus.platforms.cpu.compiled.tape import Tape, trace  # noqa: E402
from isthmus.platforms.cpu.compiled.weights import pack_values  # noqa: E402
from isthmus.platforms.cpu.kept import LayerCache  # noqa: E402
from isthmus.platforms.reference.attention import attend  # noqa: E402

COST = 20  # seconds
RUNS = library.builds_for(torch.backends.cpu.get_cpu_capability())
BUILT = [name for name in RUNS if isinstance(library.open_library(name), library.Library)]

pytestmark = pytest.mark.skipif(not BUILT, reason="the compiled kernels are not built")


@pytest.fixture(scope="module", params=BUILT)
def runner(request) -> Any:
    made = Runner(library.open_library(request.param), 2)
    yield made
    made.close()


class Shape(NamedTuple):
    heads: int
    kv_heads: int
    d: int
    page: int = 16
    window: int | None = None
    softcap: float | None = None

    def spec(self) -> AttentionSpec:
        return AttentionSpec(self.d ** -0.5, self.window, self.softcap)


SHAPES = [Shape(4, 4, 80), Shape(9, 3, 96, 1), Shape(24, 1, 16, 4), Shape(2, 2, 256, 128, window=70),
          Shape(6, 2, 48, 8, softcap=5.0), Shape(3, 3, 64, 32, 1), Shape(8, 1, 112, 64, 200, 30.0),
          Shape(5, 5, 32, 1, 64), Shape(24, 1, 64, 8)]


def rounded(values: np.ndarray) -> np.ndarray:
    return torch.from_numpy(values.astype(np.float32)).bfloat16().float().numpy()


class Sequences:
    """Tokens' q, k and v are rows of a table, so that a step's tokens say what is attended."""

    def __init__(self, runner: Runner, shape: Shape, count: int, length: int) -> None:
        self.runner, self.shape, self.length = runner, shape, length
        rng = np.random.default_rng(shape.d)
        self.widths = [heads * shape.d for heads in (shape.heads, shape.kv_heads, shape.kv_heads)]
        self.table = rounded(rng.normal(size=(count * length, sum(self.widths))))
        pages = -(-length // shape.page)
        self.pages = (rng.permutation(count * pages) + 1).astype(np.int32).reshape(count, pages)
        self.cache = LayerCache.allocate(count * pages + 1, StateSpec((), "bf16", shape.page, count),
                                         LayerState(shape.kv_heads, shape.d))
        self.cache.pages.fill_(torch.nan)  # nobody reads what nobody wrote

    def run(self, *rows: tuple[int, int, int]) -> np.ndarray:
        """Rows (sequence, first position, stop) in one step -> [tokens, heads, d]."""
        tokens = np.concatenate([seq * self.length + np.arange(first, stop) for seq, first, stop in rows])
        positions, page = tokens % self.length, self.shape.page
        row = np.repeat(np.arange(len(rows)), [stop - first for _, first, stop in rows])
        table = self.pages[[seq for seq, _, _ in rows]]
        starts = np.concatenate([[0], np.cumsum([stop - first for _, first, stop in rows])])
        arrays = dict(tokens=tokens, positions=positions, rows=row, starts=starts, pages=table,
                      slots=table[row, positions // page] * page + positions % page,
                      lengths=np.array([stop for _, _, stop in rows]), logit_rows=np.arange(len(tokens)))
        given = {name: part.astype(np.int32) for name, part in arrays.items()} | {"sampling": Sampling()}
        batch = Batch(**dict.fromkeys(Batch._fields) | given)
        weight = pack_values(self.runner, torch.from_numpy(self.table).bfloat16())
        tape, n = Tape(len(tokens), len(tokens)), len(tokens)

        def forward(ops: Any, _: Any, b: Batch) -> Any:
            x, at, parts = ops.embed(b.tokens, weight), 0, []
            for width in self.widths:
                parts.append(x[:, at:at + width].reshape(n, -1, self.shape.d))
                at += width
            return ops.attention(*parts, 0, self.shape.spec()).reshape(n, -1)
        traced = batch._replace(tokens=tape.tokens, logit_rows=tape.logit_rows)
        program = Program(tape, trace(forward, None, traced, tape))
        out = self.runner.run(program, cache_records([self.cache]), page, batch, batch.tokens)
        return out.copy().reshape(n, self.shape.heads, self.shape.d)

    def expected(self, seq: int) -> np.ndarray:
        """Of a whole sequence, where what is not seen counts nothing, whatever it is."""
        mine = self.table[seq * self.length:(seq + 1) * self.length].astype(np.float64)
        q, k, v = (part.reshape(self.length, -1, self.shape.d)
                   for part in np.split(mine, np.cumsum(self.widths)[:2], axis=1))
        out = np.empty((self.length, self.shape.heads, self.shape.d))
        for at in range(self.length):
            first = 0 if self.shape.window is None else max(0, at + 1 - self.shape.window)
            seen = slice(first, at + 1)
            out[at] = attend(q[at:at + 1], k[seen], v[seen], np.array([at - first]), self.shape.spec())[0]
        return out


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_shape_gives_the_definition_in_chunks_and_in_decode(runner, shape):
    made = Sequences(runner, shape, 2, 200)
    expected = made.expected(0)
    got = made.run((1, 0, 131), (0, 0, 150))[131:]
    np.testing.assert_allclose(got, expected[:150], atol=2e-3)
    for at in range(150, 200):
        np.testing.assert_allclose(made.run((1, 131 + at - 150, 132 + at - 150), (0, at, at + 1))[1], expected[at],
                                   atol=2e-3)
    np.testing.assert_array_equal(made.run((0, 149, 200)), made.run((0, 0, 200))[149:])


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("part", ["q", "k", "v"])
def test_what_is_no_number_comes_out_wherever_it_was_seen_and_nowhere_else(runner, shape, part):
    made = Sequences(runner, shape, 1, 200)
    number = "qkv".index(part)
    width, at = made.widths[number], sum(made.widths[:number])
    made.table[67, at + width // 2] = np.nan
    with np.errstate(invalid="ignore"):
        expected = made.expected(0)
    assert np.isnan(expected).any() and np.isfinite(expected).any()
    whole = made.run((0, 0, 200))
    np.testing.assert_allclose(whole, expected, atol=2e-3)  # which has no number where the other has none
    for stop in (64, 68, 129, 150, 200):
        np.testing.assert_array_equal(made.run((0, stop - 1, stop))[0], whole[stop - 1])
    np.testing.assert_array_equal(made.run((0, 60, 140)), whole[60:140])


def test_a_score_that_is_no_number_is_not_the_least(runner):
    """Every key a query sees is none: the first block's largest score is none either."""
    made = Sequences(runner, SHAPES[0], 1, 70)
    made.table[:, made.widths[0]:made.widths[0] + made.widths[1]] = np.nan
    assert np.isnan(made.run((0, 0, 70))).all()
    assert np.isnan(made.run((0, 69, 70))).all()
