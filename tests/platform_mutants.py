"""Broken platforms: copies of the reference with one bug each. test_platform_mutants.py shows that the laws catch all.

A mutant edits lines of the copied files and is loaded as a platform of its own, so that the oracle stays whole. When
an edited line of the reference changes, the mutant says so and has to be written anew.
"""
from __future__ import annotations

import importlib
import shutil
import sys
from pathlib import Path
from typing import Any, NamedTuple

import isthmus.platforms
from isthmus.core.discovery import platform_root

MODEL = ("model[llama,*f32]",)


class Mutant(NamedTuple):
    """`law`: the law it breaks. only: the law's cases that are run. edits: (file, old, new), each `old` there once.
    told: what the message of the case that catches it says."""

    name: str
    law: str
    only: tuple[str, ...]
    edits: tuple[tuple[str, str, str], ...]
    told: str = ""

    def load(self, folder: Path) -> Any:
        """The class `Platform` of the broken copy, made inside `folder`."""
        package = f"mutant_{abs(hash((self.name, str(folder))))}"
        shutil.copytree(platform_root() / "reference", folder / package, ignore=shutil.ignore_patterns("__pycache__"))
        for file, old, new in self.edits:
            path = folder / package / (file if "." in file else f"{file}.py")
            source = path.read_text("utf-8")
            found = source.count(old)
            assert found == 1, f"mutant {self.name!r}: {old!r} is {found} times in {path.name}, write it anew"
            path.write_text(source.replace(old, new), "utf-8")
        isthmus.platforms.__path__.append(str(folder))
        try:
            importlib.invalidate_caches()
            return importlib.import_module(f"isthmus.platforms.{package}.platform").Platform
        finally:
            isthmus.platforms.__path__.remove(str(folder))

    @staticmethod
    def forget() -> None:
        """Take the broken modules out of memory."""
        for name in [name for name in sys.modules if ".mutant_" in name]:
            del sys.modules[name]


def op(name: str, subject: str, file: str, old: str, new: str, told: str = "") -> Mutant:
    """A mutant of one edit, looked for in the cases of one op in float32."""
    return Mutant(name, "ops", (f"{subject}[*f32]",), ((file, old, new),), told)


def state(name: str, cases: str, *edits: tuple[str, str, str], told: str = "") -> Mutant:
    return Mutant(name, "state", (f"state[{cases},f32]",), edits, told)


def claim(name: str, told: str, file: str, old: str, new: str, *more: tuple[str, str, str]) -> Mutant:
    """A mutant that no dtype is needed for."""
    return Mutant(name, "manifest", ("manifest",), ((file, old, new), *more), told)


SPLIT_SOFTMAX = '''half = len(k) // 2
    parts = []
    for piece in (slice(0, half), slice(half, None)):
        top = scores[..., piece].max(axis=-1, keepdims=True, initial=-np.inf)
        weights = np.exp(scores[..., piece] - top)
        parts.append((top, weights.sum(axis=-1, keepdims=True), weights, v[piece]))
    best = np.maximum(parts[0][0], parts[1][0])
    total = sum(np.exp(top - best) * mass for top, mass, _, _ in parts)
    return sum(np.einsum("hnm,mhd->nhd", np.exp(top - best) / total * w, value) for top, _, w, value in parts)'''

BIAS_AND_PENALTIES = """    if sampling.bias is not None:
        apply_bias(logits, sampling.bias)
    if sampling.penalties is not None:
        apply_penalties(logits, sampling.penalties, inputs)
"""
VIEW = """class View(Dense):
    raw = None

    def product(self, x):
        return x @ self.raw.data.view(np.float32).reshape(self.raw.shape).T.astype(x.dtype)


def load_weight(raws, spec, dtype):
    leaf = load_whole(raws, spec, dtype)
    if spec.role != "linear" or len(raws) > 1 or raws[0].dtype != "f32":
        return leaf
    kept = View(leaf.values)
    object.__setattr__(kept, "raw", raws[0])
    return kept


def load_whole("""

OPS = [
    op("the rotary base is another", "rope", "ops", "np.array(spec.inv_freq)", "np.array(spec.inv_freq) ** 1.01"),
    op("neighbours rotate instead of halves", "rope", "ops", "np.split(x, [half, 2 * half], axis=-1)",
       "(x[..., :2 * half:2], x[..., 1:2 * half:2], x[..., 2 * half:])"),
    op("the rotary factor is ignored", "rope", "ops", "spec.scale * np.cos(angles), spec.scale * np.sin(angles)",
       "np.cos(angles), np.sin(angles)"),
    op("positions start at one", "rope", "ops", "self.batch.positions[:, None, None]",
       "(self.batch.positions[:, None, None] + 1)"),
    op("the norm's epsilon is outside the root", "rms_norm", "ops", "axis=-1, keepdims=True) + eps)",
       "axis=-1, keepdims=True)) + eps"),
    op("the bias is dropped", "linear", "ops", "out if bias is None else out + bias.values", "out"),
    op("stacked parts in reverse", "linear", "quant", "np.concatenate([expand(raw).astype(DTYPES[dtype], copy=False) "
       "for raw in raws])", "np.concatenate([expand(raw).astype(DTYPES[dtype], copy=False) for raw in raws[::-1]])"),
    op("a group's minimum is forgotten", "linear", "quant", "* self.minimum[:, group]", "* 0"),
    op("groups take their neighbour's scale", "linear", "quant", "(x[:, part] @ codes.T) * self.scale[:, group]",
       "(x[:, part] @ codes.T) * self.scale[:, group - 1]"),
    op("gelu for gelu by tanh", "act_mul", "moe", "0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * "
       "(x + 0.044715 * x ** 3)))", "0.5 * x * (1 + erf(x / math.sqrt(2)))"),
    op("the window is one too wide", "attention", "attention", "age < spec.window", "age <= spec.window"),
    op("a token does not see itself", "attention", "attention", "(age >= 0) & (age < spec.window)",
       "(age > 0) & (age < spec.window)"),
    op("no soft cap", "attention", "attention", "spec.softcap * np.tanh(scores / spec.softcap)", "scores"),
    op("query heads share K and V in turn", "attention", "attention",
       "np.repeat(k, shared, axis=1), np.repeat(v, shared, axis=1)",
       "np.tile(k, (1, shared, 1)), np.tile(v, (1, shared, 1))"),
    op("large scores overflow", "attention", "attention", "np.exp(scores - scores.max(axis=-1, keepdims=True))",
       "np.exp(scores)"),
    op("two parts that are hidden merge to NaN", "attention", "attention",
       '''weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("hnm,mhd->nhd", weights, v)''', SPLIT_SOFTMAX),
    op("the wrong expert for tied scores", "moe", "moe", 'np.argsort(-values, axis=-1, kind="stable")[..., :count]',
       'np.argsort(values, axis=-1, kind="stable")[..., ::-1][..., :count]'),
    op("the bias leaks into the weights", "moe", "moe", "np.take_along_axis(scores, chosen, axis=-1)",
       "np.take_along_axis(choice, chosen, axis=-1)"),
    op("the bias is ignored", "moe", "moe", "scores if bias is None else scores + bias.values", "scores"),
    op("a group is told by its best score where there is a bias", "moe", "moe", "2 if corrected else 1", "1"),
    op("a group is told by its two best scores where there is no bias", "moe", "moe", "2 if corrected else 1", "2"),
    op("experts of other groups count 0 instead of nothing", "moe", "moe", "-np.inf, grouped", "0.0, grouped"),
    op("weights that are all 0 are divided by their sum", "moe", "moe", " + 1e-20", ""),
    op("the whole head rotates", "rope", "ops", "half = len(spec.inv_freq)",
       "half = x.shape[-1] // 2\n        cos, sin = (np.resize(turn, (*turn.shape[:2], half)) for turn in (cos, sin))"),
    op("the rotary factor is on what passes too", "rope", "ops", "first * sin, rest]",
       "first * sin, rest * spec.scale]"),
    op("chosen scores are not renormalised", "moe", "moe", "if spec.renormalize:", "if False:"),
    op("the experts' factor is dropped", "moe", "moe", "weights * spec.scale", "weights"),
    op("up is taken for gate", "moe", "moe", "gate, up = np.split(w13", "up, gate = np.split(w13"),
    op("each token keeps its best expert only", "moe", "moe", "out[tokens] +=", "out[tokens] ="),
    op("the highest id among equals", "sample", "sampling", 'np.argsort(-logits, axis=-1, kind="stable")[..., :count]',
       "(logits.shape[-1] - 1 - np.argsort(-logits[..., ::-1], axis=-1, kind='stable'))[..., :count]"),
    op("the presence penalty is ignored", "sample", "sampling", "penalties.presence[:, None] * (counts > 0) + ", ""),
    op("repetition divides negative logits too", "sample", "sampling", "np.where(logits > 0, logits / repetition, "
       "logits * repetition)", "logits / repetition"),
    op("a pending token is not penalised", "sample", "sampling", "counts[pending, inputs[pending]] += 1", "pass"),
    op("one bias for an id replaces another", "sample", "sampling",
       "np.add.at(logits, (bias.rows, bias.ids), bias.values)", "logits[bias.rows, bias.ids] += bias.values"),
    op("mask bits from the other end", "sample", "sampling", 'bitorder="little"', 'bitorder="big"'),
    op("top-k keeps one more", "sample", "sampling", "best[:sampling.top_k[row]]", "best[:sampling.top_k[row] + 1]"),
    op("top-p drops the token that crosses", "sample", "sampling", "best[:1 + np.searchsorted",
       "best[:max(1, -1 + 1) * np.searchsorted"),
    op("min-p before top-p", "sample", "sampling", "sampling.min_p[row] * weights[best[0]]",
       "sampling.min_p[row] * weights.max() * 1.5"),
    op("the draw goes from the best down", "sample", "sampling", "kept = np.sort(best)", "kept = best"),
    op("log-probabilities under the penalties", "sample", "ops", "log_softmax(logits).astype",
       "log_softmax(__import__('isthmus').platforms.reference.sampling.adjust(logits, sampling, inputs)).astype"),
    op("a scored token becomes the sampled one", "sample", "ops", "sampled = batch.targets == -1",
       "sampled = batch.targets > -2"),
    op("bias after penalties", "sample", "sampling", BIAS_AND_PENALTIES, "".join(BIAS_AND_PENALTIES.partition(
        "    if sampling.penalties")[i] for i in (1, 2, 0))),
    op("a uniform of 0 draws a banned token", "sample", "sampling", 'side="right"', 'side="left"', "expected 40"),
    op("tokens are float64", "sample", "sampling", "np.maximum(targets, 0).astype(np.int32)",
       "np.maximum(targets, 0).astype(np.float64)", "tokens is ndarray float64, not numpy int32"),
    op("-1 is taken for the last row of the table", "embed", "ops", "np.where(ids < 0, self.last, ids)", "ids",
       "tokens of -1 stand for the last token that `sample` kept for the row's sequence slot in the State"),
    op("load keeps a view of the checkpoint", "linear", "quant", "def load_weight(", VIEW,
       "load keeps a view of them"),
]

CLAIMS = [
    claim("a dtype is misspelt", "compute_dtypes: 'float32' is not known; there are f64, f32", "platform",
          "compute_dtypes=tuple(DTYPES)", 'compute_dtypes=("float32", "f32")'),
    claim("pages of no tokens", "page_sizes is (0, 16, 1, 4", "platform", "page_sizes=(16,", "page_sizes=(0, 16,"),
    claim("an unknown tier", "determinism is 'T9'; there are T0, T1, T2", "platform", '"T1"', '"T9"'),
    claim("an unknown feature", "features: 'exportpages' is not known", "platform", "frozenset(FEATURES)",
          'frozenset(FEATURES) | {"exportpages"}'),
    claim("an unknown format", "formats: 'int4' is not known", "platform", "formats=KEPT", 'formats=("int4",)'),
    claim("more than the file says", "determinism: T0, its file says T1", "platform", '"T1"', '"T0"'),
    claim("a file that cannot be read", "manifest.toml: ", "manifest.toml", "interface = 1", "interface = "),
    claim("a file with a word of its own", "unknown field `rnk`", "manifest.toml", "interface = 1",
          "interface = 1\nrnk = 1"),
    claim("yes for an answer", "returned True: None (it can) or a text", "platform", "        return None\n",
          "        return True\n"),
    claim("every op is known", "supports('no_such_op') returned None", "platform",
          "if op not in OPS and op not in FEATURES:", "if False:"),
    claim("what is claimed is refused", "supports('moe') says 'not today'", "platform",
          "if op not in OPS and op not in FEATURES:", 'if op == "moe":\n            return "not today"\n        '
          "if op not in OPS and op not in FEATURES:"),
    claim("no state comes back from a copy", "copy_pages returned None, a state is needed", "platform",
          "part[list(dst)] = part[list(src)]\n        return state", "part[list(dst)] = part[list(src)]"),
    claim("alloc returns nothing", "alloc returned None, a state is needed", "platform",
          "return State(spec, tuple(caches), np.zeros(spec.seqs, np.int32))",
          "State(spec, tuple(caches), np.zeros(spec.seqs, np.int32))"),
    claim("a step returns no pair", "the step returned a Finished, a pair is needed", "graph",
          "self.weights, batch)), state", "self.weights, batch))"),
    claim("ops with gaps", "are incomplete: rms_norm() takes its parameters in another order: x, eps, weight; "
          "all_reduce(self, x: 'Tensor') -> 'Tensor' is missing", "ops",
          "def rms_norm(self, x: np.ndarray, weight: Dense, eps: float)",
          "def rms_norm(self, x: np.ndarray, eps: float, weight: Dense)", ("ops", "def all_reduce", "def reduce")),
    Mutant("the forward is never called", "manifest", ("manifest[ops]",), (
        ("graph", "self.forward(Ops(state, batch), self.weights, batch)", "np.zeros((2, 32))"),),
        "its forward not called"),
    claim("compile returns nothing", "compile returned None, a step", "platform", "return EagerStep", "EagerStep"),
]

STATE = [
    state("K and V go to the neighbour page too", "neighbours,page4", ("attention", "self.k.put(at, k)",
          "self.k.put(at, k)\n        self.k.put((np.minimum(at[0] + 1, len(self.parts[0]) - 1), at[1]), k)")),
    state("what lies past a row's end is multiplied by zero", "left_nan,page4", ("attention",
          "np.concatenate(kept.get(used))[:length] for", "np.concatenate(kept.get(used)) for")),
    state("a copied page keeps its old V", "copied,page4", ("platform", """for part in cache.parts:
                part[list(dst)]""", """for part in cache.k.parts:
                part[list(dst)]""")),
    state("pages come back with K for V", "exported,page4", ("platform", """for part in cache.parts:
                shape""", """for part in cache.v.parts + cache.k.parts:
                shape""")),
    state("data of any length is taken", "import_of_wrong_size", ("platform", "if len(data) != expected:",
          "if len(data) < expected:")),
    state("the new state is dropped", "neighbours,page4",
          ("graph", "Ops(state, batch)", "Ops(__import__('copy').deepcopy(state), batch)"),
          told="is it the old state?"),
    state("all states are one", "two_states,pages", ("platform",
          "return State(spec, tuple(caches), np.zeros(spec.seqs, np.int32))",
          "self.one = getattr(self, 'one', None) or State(spec, tuple(caches), np.zeros(spec.seqs, np.int32))\n"
          "        return self.one")),
    state("padding is written to page 1", "page0,page4",
          ("attention", "at = np.divmod(slots, self.parts[0].shape[1])",
           "at = np.divmod(slots, self.parts[0].shape[1])\n        at = at[0] + (slots == 0), at[1]")),
    state("last tokens are kept by row", "slots_rest", ("ops", "self.last = state.last[self.seqs]",
          "self.last = state.last[self.batch.rows]")),
]

OTHERS = [
    Mutant("a batch's later rows are swallowed", "model", MODEL, (("attention", "np.flatnonzero(batch.lengths)",
           "np.flatnonzero(batch.lengths[:2])"),)),
    Mutant("a chunk forgets what came before it", "model", MODEL, (("attention", "seen = age >= 0 if",
           "seen = (age >= 0) & (age <= positions[:, None] - positions[0] if len(q) > 1 else age >= 0) if"),)),
    Mutant("results depend on the batch", "model", MODEL, (("ops", "out = weight.product(x)",
           "out = weight.product(x) * (1 + 1e-3 * len(x))"),)),
    Mutant("T0 is claimed for bits that depend on the batch", "model", ("model[llama,determinism,f32]",), (
        ("platform", '"T1"', '"T0"'),), "T0 is declared; in chunks beside another sequence"),
    Mutant("padding logit rows are kept as sampled", "compile", ("compile[*f32]",), (("ops",
           "sampled = batch.targets == -1", "sampled = batch.targets < 0"),)),
    Mutant("padding rows are attended", "compile", ("compile[padding*f32]",), (("attention",
           "np.flatnonzero(batch.lengths)", "range(len(batch.lengths))"),)),
    Mutant("a collected step gives the newest result", "compile", ("compile[launched*f32]",), (
        ("graph", "    error: Exception | None = None\n",
         "    error: Exception | None = None\n\n    def __post_init__(self):\n        Finished.newest = self.result\n"),
        ("graph", "return self.result", "return Finished.newest"))),
    Mutant("a failing step raises at launch", "compile", ("compile[failing*f32]",), (("graph", "except Exception as",
           "except ZeroDivisionError as"),)),
    Mutant("a hit reads the pages of another row", "scheduler", ("scheduler[prefix_hit,f32]",), (("attention",
           "cache.read(batch.pages[row]", "cache.read(batch.pages[row] if batch.positions[mine][0] == 0 else "
           "np.roll(batch.pages[row], 1)"),)),
    Mutant("a failing step spoils the pages of others", "compile", ("compile[failing*f32]",), (
        ("graph", "            return Finished(None, error), state",
         "            for cache in state.layers:\n                cache.k.fill(np.nan)\n"
         "            return Finished(None, error), state"),)),
]

# The reference in f16 as well, done right: what its mutants begin with.
HALF = (
    ("quant", '"f32": np.float32}', '"f32": np.float32, "f16": np.float16}'),
    ("quant", "return x @ self.values.T",
     "return (x.astype(np.float32) @ self.values.T.astype(np.float32)).astype(x.dtype)"),
    ("quant", "out = np.zeros((len(x), len(self.codes)), x.dtype)",
     "x = x.astype(np.float32)\n        out = np.zeros((len(x), len(self.codes)), x.dtype)"),
    ("ops", "out = weight.product(x)", "out = weight.product(x).astype(x.dtype)"),
    ("graph", "return self.result", "return self.result.astype(np.float32) if isinstance(self.result, np.ndarray) "
     "else self.result"))


def half(name: str, only: str, *edits: tuple[str, str, str], law: str = "ops") -> Mutant:
    """A mutant of a platform that computes in f16, looked for in the cases of f16."""
    return Mutant(name, law, (f"{only},f16]",), (*HALF, *edits))


HALVES = [
    half("squares in f16", "rms_norm[*", ("ops", "np.mean(wide ** 2, axis=-1, keepdims=True)",
         "np.mean(x ** 2, axis=-1, keepdims=True)")),
    half("scores in f16", "attention[large_products*", ("attention", 'np.einsum("nhd,mhd->hnm", q, k) * spec.scale',
         '(np.einsum("nhd,mhd->hnm", q, k).astype(np.float16) * spec.scale).astype(np.float64)')),
    half("exp of scores in f16", "attention[large_scores*", ("attention",
         "weights = np.exp(scores - scores.max(axis=-1, keepdims=True))",
         "weights = np.exp(scores.astype(np.float16)).astype(np.float64)")),
    half("sums in f16", "linear[large_sums*", ("ops", "out = weight.product(x)",
         "out = np.cumsum(x[:, None] * weight.values, axis=-1, dtype=np.float16)[..., -1]")),
    half("8 bits of 11", "act_mul[silu", ("ops", "return act_mul(gate, up, kind)",
         "wide = act_mul(gate, up, kind).astype(np.float32).view(np.uint32) & np.uint32(0xffff0000)\n"
         "        return wide.view(np.float32).astype(np.float16)")),
    half("angles in f16", "rope[*", ("ops", "self.batch.positions[:, None, None] * np.array(spec.inv_freq)",
         "(self.batch.positions[:, None, None] * np.array(spec.inv_freq)).astype(np.float16)")),
    half("matrix products in bf16", "model[llama,whole", ("ops", "out = weight.product(x).astype(x.dtype)",
         "out = weight.product(x).astype(np.float32).view(np.uint32) & np.uint32(0xffff0000)\n"
         "        out = out.view(np.float32).astype(np.float16)"), law="model"),
    half("K and V lose bits on their way to the host", "state[exported,page4", ("platform",
         "np.frombuffer(data, part.dtype, np.prod(shape), start)",
         "(np.frombuffer(data, part.dtype, np.prod(shape), start).view(np.uint16) & 0xfff8).view(np.float16)"),
         law="state"),
]

def kept(name: str, only: str, old: str, new: str, file: str = "kept", law: str = "ops") -> Mutant:
    """A mutant of how K and V are kept, looked for in a computation in f32."""
    return Mutant(name, law, (f"{only},f32]",), ((file, old, new),))


CODES = "np.rint(x / np.where(scale == 0, 1, scale)[..., None])"
KEEPERS = [
    kept("an exponent bit for one of the fraction", "attention[copied_pages,kv_f8_e4m3*",
         '"f8_e4m3": E4M3[:0x7F].astype(np.float64)', '"f8_e4m3": E5M2[:0x7C]'),
    kept("what is beyond the range is no number", "attention[beyond_range,kv_f8_e4m3*", "self.table[codes & 127]",
         "np.where((codes & 127) == len(self.table) - 1, np.nan, self.table[codes & 127])"),
    kept("one scale for all vectors", "attention[*,kv_i8*", "(np.abs(x).max(axis=-1) / 127)",
         "(np.full(x.shape[:-1], 8.0) / 127)"),
    kept("codes are cut off", "attention[copied_pages,kv_f8_e5m2*", "code = np.searchsorted(middles, size)",
         'code = np.maximum(np.searchsorted(self.table, size, side="right") - 1, 0)'),
    kept("scales stay where they were", "attention[copied_pages,kv_i8*", """for part in cache.parts:
                part[list(dst)]""", """for part in (cache.parts[0], cache.parts[-2]):
                part[list(dst)]""", "platform"),
    kept("4 bits of 8", "model[llama,kv_i8", CODES, f"16 * np.rint({CODES[8:-1]} / 16)", law="model"),
    kept("K and V in bf16 whatever is asked", "model[llama,whole", "self.values[at] = x",
         "self.values[at] = (x.astype(np.float32).view(np.uint32) & np.uint32(0xffff0000)).view(np.float32)",
         law="model"),
]

ALL = [*OPS, *CLAIMS, *STATE, *OTHERS, *HALVES, *KEEPERS]
