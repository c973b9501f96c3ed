"""The compiled kernels of the cpu platform: what they compute, that a row's bits depend on the row alone, and which
models have programs."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="the cpu platform needs torch")

from isthmus.conformance.formats import quantized  # noqa: E402
from isthmus.core.models.loader import load_model  # noqa: E402
from isthmus.core.plan import Batch, Sampling  # noqa: E402
from isthmus.core.platform import StateSpec, Unavailable, WeightSpec  # noqa: E402
from isthmus.core.weights.checkpoint import open_checkpoint  # noqa: E402
from isthmus.platforms.cpu import quant  # noqa: E402
from isthmus.platforms.cpu.compiled import library  # noqa: E402
from isthmus.platforms.cpu.compiled.step import Runner  # noqa: E402
from isthmus.platforms.cpu.compiled.tape import ACTS, Tape, Untraceable, trace  # noqa: E402
from isthmus.platforms.cpu.compiled.weights import Packed, pack_codes  # noqa: E402
from isthmus.platforms.cpu.platform import Platform, has_amx  # noqa: E402

COST = 60  # seconds
PAGE = 16
RUNS = library.builds_for(torch.backends.cpu.get_cpu_capability())  # that this processor may run
BUILT = [name for name in RUNS if isinstance(library.open_library(name), library.Library)]
DENSE = ("llama2", "llama3", "llama-bias", "qwen2", "qwen2-window", "qwen3", "gemma3")

pytestmark = pytest.mark.skipif(not BUILT, reason=str(library.open_library(RUNS[-1])))


@pytest.fixture(scope="module", params=BUILT)
def runner(request) -> Any:
    made = Runner(library.open_library(request.param), 2)
    yield made
    made.close()


def started(**options: str) -> Platform:
    platform = Platform({"threads": "2"} | options)
    platform.probe()
    return platform


def relative(got: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(got - expected) / np.linalg.norm(expected))


# ---- products

def taken(runner: Any, name: str, x: torch.Tensor) -> np.ndarray:
    """Values as products of this format take them: the matrix unit has bf16 of them, others have them whole."""
    return (x.bfloat16() if runner.library.name == "amx" and name == "bf16" else x).double().numpy()


@pytest.mark.parametrize("name", ["bf16", *quant.KEPT])
@pytest.mark.parametrize("shape", [(192, 256), (40, 512), (8, 256), (136, 1280)])
def test_products_are_those_of_the_expanded_values(runner, name, shape):
    raw, values = quantized(np.random.default_rng(1), name, shape)
    leaf = quant.load_weight([raw], WeightSpec(("w",), "linear"), "bf16", runner)
    assert isinstance(leaf, Packed)
    x = torch.from_numpy(np.random.default_rng(2).normal(size=(40, shape[1]))).float()
    bias = torch.arange(shape[0]).float()
    with torch.inference_mode():
        whole = leaf.product(x, bias)
        expected = taken(runner, name, x) @ values.T + bias.double().numpy()
        assert relative(whole.double().numpy(), expected) < 6e-4
        for rows in (slice(0, 1), slice(1, 3), slice(5, 10), slice(3, 26)):
            assert torch.equal(leaf.product(x[rows], bias), whole[rows])


def test_many_rows_that_do_not_fit_the_cache_have_the_bits_of_each_alone(runner):
    raw, values = quantized(np.random.default_rng(1), "bf16", (56, 1280))
    leaf = quant.load_weight([raw], WeightSpec(("w",), "linear"), "bf16", runner)
    x = torch.from_numpy(np.random.default_rng(2).normal(size=(345, 1280))).float()
    whole = leaf.product(x)
    assert relative(whole.double().numpy(), taken(runner, "bf16", x) @ values.T) < 6e-4
    for row in (0, 143, 144, 158, 159, 160, 300, 343, 344):
        assert torch.equal(leaf.product(x[row:row + 1]), whole[row:row + 1])


def test_rows_are_looked_up_in_their_own_format(runner):
    for name in ("bf16", "q4_1", "q8_0", "q4_k"):
        raw, values = quantized(np.random.default_rng(3), name, (50, 256))
        leaf = quant.load_weight([raw], WeightSpec(("w",), "embed"), "bf16", runner)
        ids = torch.tensor([49, 0, 17, 17])
        assert relative(leaf.rows(ids).double().numpy(), values[ids.numpy()]) < 5e-3


def test_scales_that_half_precision_is_too_coarse_for_are_not_kept(runner):
    codes, ones = np.zeros((16, 32), np.uint8), np.ones((16, 1), np.float32)
    assert pack_codes(runner, codes, ones, -8 * ones, 4) is not None
    for scale, minimum in ((1e-6 * ones, 0 * ones), (1e6 * ones, 0 * ones), (ones, 1e9 * ones), (ones, np.nan * ones)):
        assert pack_codes(runner, codes, scale, minimum, 4) is None


# ---- models

def batch(rows: list[tuple[int, np.ndarray, int]], pages: int = 8) -> Batch:
    """Rows of (first position, tokens, sequence): a sequence has `pages` pages of its own. Every token's logits."""
    tokens = np.concatenate([part for _, part, _ in rows]).astype(np.int32)
    counts = [len(part) for _, part, _ in rows]
    positions = np.concatenate([np.arange(at, at + len(part)) for at, part, _ in rows]).astype(np.int32)
    row = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    table = np.array([np.arange(pages) + 1 + pages * seq for _, _, seq in rows], np.int32)
    starts = np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)
    return Batch(tokens, positions, (table[row, positions // PAGE] * PAGE + positions % PAGE).astype(np.int32), row,
                 np.array([seq + 1 for _, _, seq in rows], np.int32), starts,
                 np.array([at + len(part) for at, part, _ in rows], np.int32), table,
                 np.arange(len(tokens), dtype=np.int32), np.full(len(tokens), -2, np.int32), Sampling())


class Logits:
    """Every op of the step's own, but `sample` gives the logits back."""

    def __init__(self, ops: Any) -> None:
        self._ops = ops

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def sample(self, logits: Any, softcap: float | None = None) -> Any:
        return logits


def run(platform: Platform, model: Any, batches: list[Batch], pages: int = 64) -> tuple[list[np.ndarray], Any]:
    """Logits of each batch, one after the other over the same state, and the step."""
    state = platform.alloc(StateSpec(model.state_layers, "bf16", PAGE, 8), pages)
    step = platform.compile(lambda ops, weights, b: model.forward(Logits(ops), weights, b), model.weights, None)
    found = []
    for one in batches:
        out, state = step(state, one)
        found.append(out.collect())
    return found, step


@pytest.fixture(scope="module", params=DENSE)
def cases(request) -> Any:
    """A tiny model in bf16 by compiled kernels and by torch, and in float32 by torch."""
    from .tiny import tiny_model
    made = []
    for options, dtype in (({"kernels": "compiled"}, "bf16"), ({"kernels": "torch"}, "bf16"), ({}, "f32")):
        platform = started(**options)
        with open_checkpoint(tiny_model(request.param)) as checkpoint:
            made.append((platform, load_model(checkpoint, platform, platform.probe(), dtype)))
    yield made
    for platform, _ in made:
        platform.close()


def test_models_have_programs_and_lose_less_than_bfloat16_does(cases):
    tokens = np.random.default_rng(0).integers(3, 131, 90)
    (compiled, by_torch, exact), steps = zip(*(run(p, m, [batch([(0, tokens, 0)])]) for p, m in cases), strict=True)
    assert steps[0].compiled.reason is None and steps[0].compiled.programs
    assert relative(compiled[0], exact[0]) < 0.9 * relative(by_torch[0], exact[0]) < 0.1


def test_bits_do_not_depend_on_batch_chunk_or_threads(cases):
    platform, model = cases[0]
    a, b = (np.random.default_rng(seed).integers(3, 131, 100) for seed in (1, 2))
    whole = run(platform, model, [batch([(0, a, 0)])])[0][0]
    parts = [batch([(0, a[:37], 0)]), batch([(37, a[37:38], 0), (0, b[:50], 1)]),
             batch([(38, a[38:39], 0), (50, b[50:51], 1), (0, b[:1], 2)]), batch([(0, b[:9], 3), (39, a[39:], 0)])]
    got = run(platform, model, parts)[0]
    cut = np.concatenate([got[0], got[1][:1], got[2][:1], got[3][9:]])
    np.testing.assert_array_equal(cut, whole)
    for threads in ("1", "3"):
        other = started(kernels="compiled", threads=threads)
        np.testing.assert_array_equal(run_on(other, platform, model, batch([(0, a, 0)])), whole)
        other.close()


def run_on(other: Platform, platform: Platform, model: Any, one: Batch) -> np.ndarray:
    """By the threads of another platform, over the weights of this one."""
    state = platform.alloc(StateSpec(model.state_layers, "bf16", PAGE, 8), 64)
    step = other.compile(lambda ops, weights, b: model.forward(Logits(ops), weights, b), model.weights, None)
    return step(state, one)[0].collect()


def test_a_long_context_is_cut_at_fixed_places(cases):
    """Decode beyond several cuts equals the same positions of one prefill."""
    platform, model = cases[0]
    tokens = np.random.default_rng(4).integers(3, 131, 230)
    pages = 20
    whole = run(platform, model, [batch([(0, tokens, 0)], pages)])[0][0]
    got = run(platform, model, [batch([(0, tokens[:200], 0)], pages)]
              + [batch([(at, tokens[at:at + 1], 0)], pages) for at in range(200, 230)])[0]
    np.testing.assert_array_equal(np.concatenate(got), whole)


def test_decode_rows_behind_shared_pages_have_the_bits_of_each_alone(cases):
    """Three share twelve pages, one of them and another eleven; one has nothing of that."""
    platform, model = cases[0]
    tokens = np.random.default_rng(5).integers(3, 131, 200)
    first = batch([(0, tokens, 0), (0, tokens[::-1].copy(), 1)], 20)
    own, tables = 41, []
    for shared, seq in ((12, 0), (11, 0), (12, 0), (12, 0), (0, 1)):
        tables.append([1 + 20 * seq + page if page < shared else own + page - shared for page in range(20)])
        own += 20 - shared
    tables[4] = [21 + page for page in range(20)]
    lengths = (195, 179, 193, 200, 200)

    def decode(rows: list[int]) -> list[Batch]:
        """Every token of the rows' own pages, and then one more of each row at once."""
        before = [batch([(PAGE * (12, 11, 12, 12, 12)[r], tokens[PAGE * (12, 11, 12, 12, 12)[r]:lengths[r]], r)], 20)
                  for r in rows]
        last = batch([(lengths[r] - 1, tokens[r:r + 1], r) for r in rows], 20)
        made = []
        for one, which in (*zip(before, ([r] for r in rows), strict=True), (last, rows)):
            table = np.array([tables[r] for r in which], np.int32)
            slots = table[one.rows, one.positions // PAGE] * PAGE + one.positions % PAGE
            made.append(one._replace(pages=table, slots=slots.astype(np.int32)))
        return made
    together = run(platform, model, [first, *decode([0, 1, 2, 3, 4])], pages=200)[0][-1]
    for row in range(5):
        alone = run(platform, model, [first, *decode([row])], pages=200)[0][-1]
        np.testing.assert_array_equal(together[row:row + 1], alone)


def test_sparse_models_and_other_dtypes_of_k_and_v_go_by_torch(caplog):
    from .tiny import tiny_model
    platform = started(kernels="compiled")
    with open_checkpoint(tiny_model("qwen3-moe")) as checkpoint:
        model = load_model(checkpoint, platform, platform.probe(), "bf16")
    _, step = run(platform, model, [batch([(0, np.arange(3, 20), 0)])])
    assert step.compiled.reason == "sparse layers" and not step.compiled.programs
    assert "the compiled kernels have nothing for: sparse layers" in caplog.text
    with open_checkpoint(tiny_model("qwen3")) as checkpoint:
        model = load_model(checkpoint, platform, platform.probe(), "bf16")
    state = platform.alloc(StateSpec(model.state_layers, "i8", PAGE, 8), 64)
    step = platform.compile(lambda ops, weights, b: model.forward(Logits(ops), weights, b), model.weights, None)
    assert np.isfinite(step(state, batch([(0, np.arange(3, 20), 0)]))[0].collect()).all()
    assert step.compiled.reason is None and not step.compiled.programs
    assert caplog.text.count("the compiled kernels have nothing for: K and V in i8") == 1
    platform.close()


# ---- writing down

ROW_BY_ROW = ("embed", "norm", "turns", "rope", "write", "add", "scale", "act_mul")
KINDS = ("embed", "linear", "norm", "turns", "rope", "write", "plan", "attend", "add", "scale", "gather", "act_mul")


def touched(op: np.ndarray, threads: int) -> list[tuple[int, int, bool, int]]:
    """(first byte, last byte, written, thread or -1 for any) of the tensors of an op."""
    kind, rows, found = KINDS[op["kind"]], int(op["rows"]), []
    for name in "xyz":
        at, stride, head = (int(op[name][field]) for field in ("at", "row", "head"))
        if not at:
            continue
        width = max(int(op["heads"]) - 1, 0) * head + max(int(op["width"]), int(op["w"]["inputs"]), head)
        written = name == "z"
        for thread in range(threads if kind in ROW_BY_ROW else 1):
            first, stop = (rows * (thread + n) // threads for n in (0, 1)) if kind in ROW_BY_ROW else (0, rows)
            if stop > first:
                found.append((at + 4 * first * stride, at + 4 * ((stop - 1) * stride + min(width, stride)), written,
                              thread if kind in ROW_BY_ROW else -1))
    return found


def raced(program: np.ndarray, threads: int) -> list[str]:
    """Pairs of ops without a barrier between in which two threads touch the same bytes and one writes them."""
    found, since = [], []
    for number, op in enumerate(program):
        since = [] if op["barrier"] else since
        now = touched(op, threads)
        for low, high, written, thread in now:
            found += [f"{before} {KINDS[program[before]['kind']]} and {number} {KINDS[op['kind']]}"
                      for before, other_low, other_high, other_written, other in since
                      if low < other_high and other_low < high and (written or other_written)
                      and (thread == -1 or other == -1 or thread != other)]
        since += [(number, *touch) for touch in now]
    return found


def test_threads_meet_wherever_they_touch_the_same_bytes(cases):
    platform, model = cases[0]
    for tokens, logits in ((1, 1), (3, 3), (9, 2), (10, 10), (37, 1)):
        tape = Tape(tokens, logits)
        fields = dict.fromkeys(Batch._fields) | {"tokens": tape.tokens, "logit_rows": tape.logit_rows}
        program = trace(model.forward, model.weights, Batch(**fields), tape)
        assert program["barrier"].sum() > 10
        for threads in (2, 3, 7):
            assert not raced(program, threads)
    program["barrier"] = 0
    assert raced(program, 2), "this check sees what it is for"


def test_memory_that_is_used_again_for_shorter_rows_is_waited_for(runner):
    """Row 5 of the shorter ones lies where another thread may still read row 2 of the longer ones."""
    raw, _ = quantized(np.random.default_rng(1), "bf16", (64, 64))
    weight = quant.load_weight([raw], WeightSpec(("w",), "linear"), "bf16", runner)
    tape = Tape(10, 1)
    x = tape.embed(tape.tokens, weight) * 2.0
    y = x * 2.0
    z = y * 2.0
    place = y.memory.start
    del y
    short = z[:, :40] * 2.0
    assert short.memory.start == place and short.stride == 40
    assert [int(op["barrier"]) for op in tape.ops] == [0, 0, 0, 0, 1]
    assert not raced(np.array(tape.ops, library.OP), 2)


def traced(forward: Any) -> np.ndarray:
    tape = Tape(4, 1)
    fields = dict.fromkeys(Batch._fields) | {"tokens": tape.tokens, "logit_rows": tape.logit_rows}
    return trace(forward, None, Batch(**fields), tape)


@pytest.mark.parametrize("kind", ACTS)
def test_activations_are_torchs(runner, kind):
    from isthmus.platforms.cpu.moe import act_mul
    gate, up = (torch.linspace(-9, 9, 3 * 24).reshape(3, 24) * factor for factor in (1, -0.7))
    memory = np.zeros((4, 3, 24), np.float32)
    memory[0], memory[1] = gate, up
    op = np.zeros((), library.OP)
    op["kind"], op["act"], op["rows"], op["width"] = 11, ACTS.index(kind), 3, 24
    for name, at in zip("xyz", memory, strict=False):
        op[name] = at.ctypes.data, 24, 0
    runner.library.run(runner._engine, op.ctypes.data, 1, np.zeros((), library.STEP).ctypes.data)
    np.testing.assert_allclose(memory[2], act_mul(gate, up, kind), rtol=2e-6, atol=2e-6)


def test_a_tensor_that_became_part_of_another_is_no_more(runner):
    raw, _ = quantized(np.random.default_rng(1), "bf16", (64, 64))
    weight = quant.load_weight([raw], WeightSpec(("w",), "linear"), "bf16", runner)

    def forward(ops: Any, _: Any, b: Batch) -> Any:
        x = ops.embed(b.tokens, weight)
        y = ops.linear(x, weight)
        return (x + y) + y
    with pytest.raises(Untraceable, match="has become part of another"):
        traced(forward)


def test_what_has_no_kernel_is_said(runner):
    raw, _ = quantized(np.random.default_rng(1), "bf16", (64, 64))
    weight = quant.load_weight([raw], WeightSpec(("w",), "linear"), "bf16", runner)
    for forward in (lambda ops, _, b: ops.embed(b.tokens, weight) * ops.embed(b.tokens, weight),
                    lambda ops, _, b: ops.embed(b.tokens, weight)[:, ::2],
                    lambda ops, _, b: ops.embed(b.tokens, weight).reshape(2, 2, 64),
                    lambda ops, _, b: ops.act_mul(ops.embed(b.tokens, weight), ops.embed(b.tokens, weight), "relu"),
                    lambda ops, _, b: ops.embed(b.positions, weight), lambda ops, _, b: 5):
        with pytest.raises(Untraceable):
            traced(forward)


def test_options_say_which_kernels():
    with pytest.raises(Unavailable, match="compiled or torch"):
        started(kernels="fast")
    assert "compiled" in started(kernels="compiled").probe().details["kernels"]
    assert ("compiled" in started().probe().details["kernels"]) == (BUILT[0] == "amx" or not has_amx())
    assert started(kernels="torch").probe().details["kernels"] == "torch's, asked for"
