"""Running an op case on a platform, through nothing but the neck, and comparing what comes out."""
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..core.plan import Batch, StepResult
from ..core.platform import Buckets, Manifest, RawTensor
from .case import Case, Context, Needs, Wrong
from .compare import LOGPROB_ERROR, check_result, check_values
from .fitting import fitted
from .opcase import OpCase, Run, Step

ASKED = ("attention", "moe", "act_mul")


class Launcher:
    """A case's run on a platform: weights placed and steps compiled once, launched as often as wanted.

    overwritten: the checkpoint's bytes are others as soon as `load` has returned.
    """

    def __init__(self, platform: Any, dtype: str, run: Run, buckets: Buckets | None = None, overwritten: bool = True):
        self.platform, self.run = platform, run
        weights = {}
        for name, (raws, spec, *own) in run.weights.items():
            copies = [_copy(raw) for raw in raws]
            weights[name] = platform.load(copies, spec, *(own or [dtype]))
            if overwritten:
                for part in (part for raw in copies for part in (raw, *raw.extra)):
                    part.data.view(np.uint8)[...] = 0xFF
        self.batches, self.steps, compiled = [], [], {}
        for step in run.steps:
            batch, bucket = fitted(step.batch, buckets)
            if (step.forward, bucket) not in compiled:
                compiled[step.forward, bucket] = platform.compile(step.forward, weights, bucket)
            self.batches.append(batch)
            self.steps.append(compiled[step.forward, bucket])

    def results(self, at_once: bool = True) -> list[StepResult | np.ndarray]:
        """What each step gives. at_once: launch every step, then collect, as no step may need a look at another."""
        state, outs = self.platform.alloc(self.run.state, self.run.pages), []
        for step, launch, batch in zip(self.run.steps, self.steps, self.batches, strict=True):
            if step.before is not None:
                state = step.before(self.platform, state)
            out, state = launch(state, batch)
            outs.append(out if at_once else out.collect())
        return [out.collect() for out in outs] if at_once else outs

    def watch(self) -> None:
        """Run the steps one by one; every page that a step does not write must keep its bytes."""
        state = self.platform.alloc(self.run.state, self.run.pages)
        for number, (step, launch, batch) in enumerate(zip(self.run.steps, self.steps, self.batches, strict=True)):
            if step.before is not None:
                state = step.before(self.platform, state)
            written = {0, *(step.batch.slots // self.run.state.page_size).tolist()}
            others = [page for page in range(self.run.pages) if page not in written]
            before = bytes(self.platform.export_pages(state, others)) if others else b""
            out, state = launch(state, batch)
            out.collect()
            if others and bytes(self.platform.export_pages(state, others)) != before:
                raise Wrong(f"launch {number} writes pages {sorted(written)} and changes also "
                            f"{self.changed(number, others)}")

    def unwritten(self) -> list[int]:
        """Pages that the first launch should write and that in the state it returned are as before."""
        state, batch = self.platform.alloc(self.run.state, self.run.pages), self.run.steps[0].batch
        pages = sorted(set((batch.slots[:batch.starts[-1]] // self.run.state.page_size).tolist()))
        before = {page: bytes(self.platform.export_pages(state, [page])) for page in pages}
        out, state = self.steps[0](state, self.batches[0])
        out.collect()
        return [page for page in pages if bytes(self.platform.export_pages(state, [page])) == before[page]]

    def changed(self, number: int, pages: Sequence[int]) -> list[int]:
        """Which of `pages` launch `number` changes: the whole run again, page by page."""
        bad: list[int] = []
        state = self.platform.alloc(self.run.state, self.run.pages)
        for at, (step, launch, batch) in enumerate(zip(self.run.steps, self.steps, self.batches, strict=True)):
            if step.before is not None:
                state = step.before(self.platform, state)
            before = {page: bytes(self.platform.export_pages(state, [page])) for page in pages}
            out, state = launch(state, batch)
            out.collect()
            if at == number:
                bad = [page for page in pages if bytes(self.platform.export_pages(state, [page])) != before[page]]
        return bad


def _copy(raw: RawTensor) -> RawTensor:
    return raw._replace(data=raw.data.copy(), extra=tuple(map(_copy, raw.extra)))


def check_step(got: Any, step: Step, launched: Batch, case: OpCase, what: str) -> None:
    """Compare what a launch gave, padding left out; there must be a row for all that was launched."""
    expected, rows = step.expected, len(launched.tokens)
    if isinstance(expected, StepResult):
        rows, count = len(launched.targets), len(step.batch.targets)
        if not isinstance(got, StepResult) or len(got.tokens) != rows:
            raise Wrong(f"{what}: collected {type(got).__name__}, not a StepResult of {rows} rows")
        got = StepResult(*(part if part is None else part[:count] for part in got))
        check_result(got, expected, step.batch, LOGPROB_ERROR[case.dtype])
        return
    if isinstance(got, np.ndarray) and got.shape[:1] != (rows,):
        raise Wrong(f"{what}: shape {got.shape} for {rows} tokens")
    placed = case.op in ("attention", "rope")
    check_values(got[:step.tokens] if isinstance(got, np.ndarray) else got, expected, case.nmse, what,
                 (lambda index: place(case, step.batch, index)) if placed else None)


def place(case: OpCase, batch: Batch, index: tuple[int, ...]) -> str:
    """What an index of a result [T, heads, d] is about."""
    token, head = index[:2]
    row, position = int(batch.rows[token]), int(batch.positions[token])
    told = (f"token {token} = row {row}, sequence slot {batch.seqs[row]}, position {position} of context "
            f"{batch.lengths[row]}")
    if case.op == "attention":
        shared = case.asks["heads"] // case.asks["kv_heads"]
        told += f", page {batch.pages[row, position // case.page_size]}, kv head {head // shared}"
    return f"{told}, head {head}"


def check_case(platform: Any, case: OpCase, seed: int = 0, manifest: Manifest | None = None) -> None:
    """Raises `Wrong` where the platform and the case disagree. manifest: of the platform; without one it is taken for
    a platform of any size that can do everything."""
    run = built(case, seed, manifest)
    try:
        check_run(platform, case, run, manifest, overwritten=True)
    except Wrong as error:
        try:
            check_run(platform, case, run, manifest, overwritten=False)
        except Wrong:
            raise error from None
        raise Wrong("right only while the checkpoint's bytes stay as they are: load keeps a view of them, and they may "
                    f"be read only until it returns. {error}", error.nmse, error.tolerance, error.index) from error


def built(case: OpCase, seed: int, manifest: Manifest | None) -> Run:
    """The case's run; where K and V do not matter, in a dtype that the platform keeps them in."""
    run = case.build(seed)
    if manifest is None or case.op == "attention" or run.state.dtype in manifest.kv_dtypes:
        return run
    return replace(run, state=replace(run.state, dtype=manifest.kv_dtypes[0]))


def check_run(platform: Any, case: OpCase, run: Run, manifest: Manifest | None, overwritten: bool) -> None:
    buckets, features = (manifest.buckets, manifest.features) if manifest else (None, frozenset({"overlap"}))
    launcher = Launcher(platform, case.dtype, run, buckets, overwritten)
    results = launcher.results("overlap" in features)
    for number, (step, batch, got) in enumerate(zip(run.steps, launcher.batches, results, strict=True)):
        try:
            check_step(got, step, batch, case, f"launch {number}")
        except Wrong as error:
            hint = hint_of(launcher, case, number, "export_pages" in features)
            raise Wrong(f"{error}{hint}", error.nmse, error.tolerance, error.index) from error
    if case.op == "attention" and "export_pages" in features:
        launcher.watch()


def hint_of(launcher: Launcher, case: OpCase, number: int, exports: bool) -> str:
    """Where else to look for what went wrong in launch `number`."""
    if (launcher.run.steps[number].batch.tokens < 0).any():
        return ("; its tokens of -1 stand for the last token that `sample` kept for the row's sequence slot in the "
                "State: is it looked up there, and is the state that the step returned the one it was kept in?")
    if case.op == "attention" and number and exports and (pages := launcher.unwritten()):
        return (f"; launch 0 should write pages {pages}, and in the state that it returned they are as before: is it "
                "the old state?")
    return ""


def as_case(case: OpCase, law: str = "ops", subject: str = "") -> Case:
    """The op case as a case of a law; `subject` is its row in the report's grid, the op unless given."""
    def check(context: Context) -> None:
        check_case(context.platform, case, context.seed, context.manifest)
    # Formats are not asked for: what has no kernel is expanded by `load`, and must be right too.
    asks = {name: value for name, value in case.asks.items() if name != "format"}
    needs = Needs(case.dtype, (case.kv or case.dtype) if case.op == "attention" else "", case.features,
                  ((case.op, asks),) if case.op in ASKED or "rotated" in asks else (), case.page_size)
    format = case.asks.get("format", "") if case.op == "linear" else ""
    return Case(case.id, law, subject or case.op, needs, check, case.nmse, format)
