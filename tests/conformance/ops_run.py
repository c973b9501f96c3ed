"""Running an op case on a platform, through nothing but the neck, and comparing what comes out."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..core.plan import Batch, StepResult
from ..core.platform import Buckets, Manifest
from .case import Case, Context, Needs, Wrong
from .compare import LOGPROB_ERROR, check_result, check_values
from .fitting import fitted
from .opcase import OpCase, Run, Step

ASKED = ("attention", "moe", "act_mul")


class Launcher:
    """A case's run on a platform: weights placed and steps compiled once, launched as often as wanted."""

    def __init__(self, platform: Any, dtype: str, run: Run, buckets: Buckets | None = None):
        self.platform, self.run = platform, run
        weights = {name: platform.load(raws, spec, dtype) for name, (raws, spec) in run.weights.items()}
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
    check_values(got[:step.tokens] if isinstance(got, np.ndarray) else got, expected, case.nmse, what)


def check_case(platform: Any, case: OpCase, seed: int = 0, manifest: Manifest | None = None) -> None:
    """Raises `Wrong` where the platform and the case disagree. manifest: of the platform; without one it is taken for
    a platform of any size that can do everything."""
    run = case.build(seed)
    buckets, features = (manifest.buckets, manifest.features) if manifest else (None, frozenset({"overlap"}))
    launcher = Launcher(platform, case.dtype, run, buckets)
    results = launcher.results("overlap" in features)
    for number, (step, batch, got) in enumerate(zip(run.steps, launcher.batches, results, strict=True)):
        check_step(got, step, batch, case, f"launch {number}")
    if case.op == "attention" and "export_pages" in features:
        launcher.watch()


def as_case(case: OpCase, law: str = "ops", subject: str = "") -> Case:
    """The op case as a case of a law; `subject` is its row in the report's grid, the op unless given."""
    def check(context: Context) -> None:
        check_case(context.platform, case, context.seed, context.manifest)
    # Formats are not asked for: what has no kernel is expanded by `load`, and must be right too.
    asks = {name: value for name, value in case.asks.items() if name != "format"}
    needs = Needs(case.dtype, case.op == "attention", case.features,
                  ((case.op, asks),) if case.op in ASKED else (), case.page_size)
    return Case(case.id, law, subject or case.op, needs, check, case.nmse)
