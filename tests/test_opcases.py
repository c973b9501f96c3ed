"""The op cases are tested too: each of these broken copies of the reference platform must be caught."""
from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from isthmus.conformance.law_ops import op_cases
from isthmus.conformance.opcase import OpCase
from isthmus.conformance.ops_run import check_case
from isthmus.core import discovery

COST = 13  # seconds

# (ops that must notice, file, text, broken text)
MUTANTS = [
    ("embed", "ops.py", "np.where(ids < 0, self.last, ids)", "np.maximum(ids - 1, 0)"),
    ("linear", "ops.py", "else out + bias.values", "else out"),
    ("linear", "quant.py", "out += x[:, part].sum(axis=1, keepdims=True) * self.minimum[:, group]", "pass"),
    ("linear", "quant.py", "copy=False) for raw in raws]", "copy=False) for raw in raws[::-1]]"),
    ("rms_norm", "ops.py", "keepdims=True) + eps)", "keepdims=True))"),
    ("rms_norm", "ops.py", "wide ** 2, axis=-1, keepdims=True", "wide ** 2, keepdims=True"),
    ("rope", "ops.py", "second * cos + first * sin", "second * cos - first * sin"),
    ("rope", "ops.py", "np.array(spec.inv_freq)", "np.array(spec.inv_freq) * 1.001"),
    ("rope", "ops.py", "spec.scale * np.sin(angles)", "np.sin(angles)"),
    ("act_mul", "moe.py", "0.5 * x * (1 + erf(x / math.sqrt(2)))", "0.5 * x * (1 + np.tanh(0.8 * x))"),
    ("attention", "attention.py", "age < spec.window", "age <= spec.window"),
    ("attention", "attention.py", "age >= 0 if", "age >= -1 if"),
    ("attention", "attention.py", "* spec.scale", "* spec.scale * 1.01"),
    ("attention", "attention.py", "np.repeat(k, shared, axis=1)", "np.tile(k, (1, shared, 1))"),
    ("attention", "attention.py", "if spec.softcap is not None:", "if False:"),
    ("attention", "attention.py", "at = np.divmod(slots, self.parts[0].shape[1])",
     "at = np.divmod(slots, self.parts[0].shape[1]); "
     "at = np.minimum(at[0] + (at[1] == 0), len(self.parts[0]) - 1), at[1]"),
    ("attention", "attention.py", "np.flatnonzero(batch.lengths)", "np.flatnonzero(batch.lengths)[:-1]"),
    ("attention", "platform.py", "part[list(dst)] = part[list(src)]", "part[list(dst)[1:]] = part[list(src)[1:]]"),
    ("attention", "platform.py", "part[list(pages)] = np.frombuffer", "part[sorted(pages)] = np.frombuffer"),
    ("moe", "moe.py", 'np.argsort(-values, axis=-1, kind="stable")[..., :count]',
     'np.argsort(values, axis=-1, kind="stable")[..., ::-1][..., :count]'),
    ("moe", "moe.py", "if spec.renormalize:", "if True:"),
    ("moe", "moe.py", "weights * spec.scale", "weights"),
    ("moe", "moe.py", "gate, up = np.split", "up, gate = np.split"),
    ("sample", "sampling.py", 'np.argsort(-logits, axis=-1, kind="stable")',
     'np.argsort(logits, axis=-1, kind="stable")[..., ::-1]'),
    ("sample", "sampling.py", 'bitorder="little"', 'bitorder="big"'),
    ("sample", "sampling.py", "np.add.at(logits, (bias.rows, bias.ids), bias.values)",
     "logits[bias.rows, bias.ids] += bias.values"),
    ("sample", "sampling.py", "if sampling.penalties is not None:", "if False:"),
    ("sample", "sampling.py", "repetition = penalties.repetition.astype(np.float64)[:, None]",
     "repetition = penalties.repetition.astype(np.float64)[:, None] ** np.maximum(counts, 1)"),
    ("sample", "sampling.py", "np.where(logits > 0, logits / repetition, logits * repetition)", "logits / repetition"),
    ("sample", "sampling.py", "(counts > 0)", "seen"),
    ("sample", "sampling.py", "counts[pending, inputs[pending]] += 1", "counts[pending, inputs[pending]] = 1"),
    ("sample", "sampling.py", "seen[pending, inputs[pending]] = True", "pass"),
    ("sample", "sampling.py", "cumulative = np.cumsum(weights[best])", "cumulative = np.cumsum(weights[best][1:])"),
    ("sample", "sampling.py", "sampling.top_p[row] * cumulative[-1]", "sampling.top_p[row] * weights.sum()"),
    ("sample", "sampling.py", "sampling.min_p[row] * weights[best[0]]", "sampling.min_p[row] * weights[best].sum()"),
    ("sample", "sampling.py", "kept = np.sort(best)", "kept = best"),
    ("sample", "ops.py", "softcap * np.tanh(logits / softcap)", "logits"),
    ("sample", "ops.py", "sampled = batch.targets == -1", "sampled = batch.targets != -2"),
    ("sample", "ops.py", "[self.seqs[batch.logit_rows[sampled]]]", "[batch.rows[batch.logit_rows[sampled]]]"),
    ("sample", "ops.py", "logprobs = log_softmax(logits)", "logprobs = log_softmax(np.maximum(logits, -1))"),
]


def broken_copy(folder: Path, file: str, text: str, broken: str) -> Any:
    """The platform of a copy of the reference's folder with one change, outside the package as a vendor's would be."""
    name = f"broken_{folder.name}"
    package = folder / name
    package.mkdir()
    for source in (discovery.platform_root() / "reference").glob("*.py"):
        code = source.read_text("utf-8").replace("from ...core", "from isthmus.core")
        code = re.sub(r"from \.\.(\w)", r"from isthmus.platforms.\1", code)
        if source.name == file:
            assert code.count(text) == 1, f"{file} has {text!r} {code.count(text)} times"
            code = code.replace(text, broken)
        (package / source.name).write_text(code, "utf-8")
    sys.path.insert(0, str(folder))
    try:
        return importlib.import_module(f"{name}.platform").Platform({})
    finally:
        sys.path.remove(str(folder))


def cases_of(op: str) -> Iterator[OpCase]:
    return (case for case in op_cases() if case.op == op and case.dtype == "f64")


@pytest.mark.parametrize("op, file, text, broken", MUTANTS, ids=lambda value: value[:30])
def test_a_broken_platform_is_caught(op: str, file: str, text: str, broken: str, tmp_path: Path) -> None:
    platform = broken_copy(tmp_path, file, text, broken)
    for case in cases_of(op):
        try:
            check_case(platform, case)
        except (AssertionError, IndexError, ValueError):
            return
    pytest.fail(f"no {op} case notices {broken!r} in place of {text!r}")


def test_an_unchanged_copy_passes(tmp_path: Path) -> None:
    platform = broken_copy(tmp_path, "", "", "")
    for op in ("embed", "rms_norm", "sample"):
        for case in cases_of(op):
            check_case(platform, case)
