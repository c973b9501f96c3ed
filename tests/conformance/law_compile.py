"""Law 4, compile: padding changes nothing, a bucket is compiled once, launches may run ahead of their collection, and a
step that fails raises in `collect` and harms nobody else.
"""
from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from ..core.plan import Batch
from ..core.platform import Bucket, Unsupported
from ..core.scheduler.batch import pad_batch
from .case import Case, Context, Needs, Wrong
from .driver import Driver
from .fitting import fitted, sizes
from .law_model import length
from .opcase import DTYPES
from .oracle import LOGITS_NMSE, check_greedy, check_logits, placed, right, text

KIND = "llama"
PADDINGS = {"tokens": Bucket(5, 0, 0, 0), "rows": Bucket(0, 3, 0, 0), "pages": Bucket(0, 0, 4, 0),
            "logit_rows": Bucket(0, 0, 0, 6), "everything": Bucket(9, 2, 3, 7)}


class PaddedDriver(Driver):
    """Every batch is padded by `extra` before it is launched."""

    extra = Bucket(0, 0, 0, 0)

    def run(self, batch: Batch, bare: bool) -> Any:
        own = sizes(batch)
        return super().run(pad_batch(batch, Bucket(*(a + b for a, b in zip(
            vars(own).values(), vars(self.extra).values(), strict=True)))), bare)


def padded(context: Context, dtype: str, driver: Driver) -> None:
    """A prefill, chunks and decodes in one batch, then greedy decode from the State, all padded."""
    texts = {seq: text(length(driver.model), context.seed, f"padded {seq}") for seq in (1, 2, 3)}
    done = dict.fromkeys(texts, 0)
    for number, step in enumerate([{1: 9, 2: 4}, {1: 1, 3: 1, 2: 17}, {3: 8, 1: 1, 2: 1}]):
        got = driver.logits(*((seq, texts[seq][done[seq]:done[seq] + count]) for seq, count in step.items()))
        for (seq, count), values in zip(step.items(), got, strict=True):
            want = right(context, KIND, texts[seq])[done[seq]:done[seq] + count]
            check_logits(values, want, dtype, f"step {number}, sequence {seq}")
            done[seq] += count
    prompt = text(7, context.seed, "padded prompt")
    output = [driver.sample((4, prompt))[0], *(driver.sample((4, [-1]))[0] for _ in range(5))]
    check_greedy(context, KIND, prompt, output, dtype, "decode from the State")


def any_size(name: str) -> Any:
    """Padding beyond what a platform of any size would ever be given."""
    def check(context: Context, dtype: str) -> None:
        driver = PaddedDriver(placed(context, KIND, dtype))
        driver.extra = PADDINGS[name]
        padded(context, dtype, driver)
    return check


def larger_bucket(larger: int) -> Any:
    """Buckets above the one that fits."""
    def check(context: Context, dtype: str) -> None:
        padded(context, dtype, Driver(placed(context, KIND, dtype), larger=larger))
    return check


def traced_once(context: Context, dtype: str) -> None:
    """Batches of the same sizes, or of one bucket, do not compile again, where the platform counts in `traces`."""
    model = placed(context, KIND, dtype)
    if not isinstance(getattr(context.platform, "traces", None), int):
        raise Unsupported("the platform has no `traces` that counts how often it compiled")
    driver, tokens = Driver(model), text(40, context.seed, "traced")
    driver.logits((1, tokens[:8]), (2, tokens[:9]))
    driver.sample((3, tokens[:8]))
    driver.sample((3, [-1]))
    before = context.platform.traces
    driver.logits((4, tokens[8:16]), (5, tokens[11:20]))
    driver.sample((6, tokens[20:28]))
    driver.sample((6, [-1]))
    if context.platform.traces != before:
        raise Wrong(f"{context.platform.traces - before} traces more for sizes that were compiled already")


def ahead(context: Context, dtype: str) -> None:
    """Several launches before the first is collected give what one after another gives, logits and tokens."""
    model = placed(context, KIND, dtype)
    driver, tokens = Driver(model), text(length(model), context.seed, "ahead")
    want, parts, start = right(context, KIND, tokens), [], 0
    for count in (9, 1, 12, 1, 1, 6):
        parts.append((start, count, driver.launch((1, tokens[start:start + count]))))
        start += count
    for start, count, flight in parts:
        check_logits(flight.collect()[0], want[start:start + count], dtype, f"launch of {count} tokens from {start}")
    prompts = {2: text(8, context.seed, "ahead 2"), 3: text(11, context.seed, "ahead 3")}
    flights = [driver.launch_sampling(*prompts.items())]
    flights += [driver.launch_sampling((2, [-1]), (3, [-1])) for _ in range(5)]
    outputs = np.stack([flight.collect().tokens[:2] for flight in flights], axis=1)
    for prompt, output in zip(prompts.values(), outputs, strict=True):
        check_greedy(context, KIND, prompt, output, dtype, "launched ahead")


class Fault(Exception):
    """What the failing step raises."""


def failing(context: Context, dtype: str) -> None:
    """Writes K and V of its own row, then raises: in `collect`, not at launch; other sequences go on, then and later,
    and so does a step that was launched behind it."""
    model = placed(context, KIND, dtype)
    driver = Driver(model)
    texts = {seq: text(length(model), context.seed, f"failing {seq}") for seq in (1, 2, 3)}
    driver.logits((1, texts[1][:20]), (2, texts[2][:5]))

    def forward(ops: Any, weights: Any, batch: Batch) -> Any:
        model.loaded.forward(ops, weights, batch)
        raise Fault("this step fails by design")
    batch, bucket = fitted(driver.batch([(2, texts[2][5:12])], every=False), model.manifest.buckets)
    try:
        step = context.platform.compile(forward, model.loaded.weights, bucket)
        out, driver.state = step(driver.state, batch)
    except Exception as error:
        raise Wrong(f"a step that fails raised at launch ({type(error).__name__}: {error}), not in collect") from error
    behind = driver.launch((1, texts[1][20:24])) if "overlap" in model.manifest.features else None
    try:
        out.collect()
    except Exception as error:  # whatever the platform wraps it in
        told = str(error)
    else:
        raise Wrong("a step that failed was collected without an error")
    if "by design" not in told:
        raise Wrong(f"collect raised {told!r}, which does not tell what the step raised")
    got = behind.collect()[0] if behind else driver.logits((1, texts[1][20:24]))[0]
    check_logits(got, right(context, KIND, texts[1])[20:24], dtype, "the step behind")
    after = driver.logits((3, texts[3][:9]), (1, texts[1][24:30]))
    check_logits(after[0], right(context, KIND, texts[3])[:9], dtype, "a new sequence afterwards")
    check_logits(after[1], right(context, KIND, texts[1])[24:30], dtype, "an old sequence afterwards")


CHECKS = {**{f"padding_{name}": (any_size(name), Needs("")) for name in PADDINGS},
          "larger_bucket": (larger_bucket(1), Needs("", buckets=True)),
          "largest_bucket": (larger_bucket(99), Needs("", buckets=True)),
          "traced_once": (traced_once, Needs("")), "launched_ahead": (ahead, Needs("", features=("overlap",))),
          "failing_step": (failing, Needs(""))}


def cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for name, (check, needs) in CHECKS.items():
            needs = Needs(dtype, features=needs.features, buckets=needs.buckets)
            subject = name.partition("_")[0] if "bucket" not in name else "padding"
            yield Case(f"compile[{name},{dtype}]", "compile", subject, needs,
                       lambda context, check=check, dtype=dtype: check(context, dtype), LOGITS_NMSE[dtype])
