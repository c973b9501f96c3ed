"""Vectors of texts: the model's hidden states after its last norm, through the same definitions and the same neck.

A forward may return another tensor than `Ops.sample`'s, which a step then collects (`Platform.compile`): here the rows
that the head would get. They are computed between two steps of generation, at most a step's tokens at a time while
others wait, in pages that are given back at once: K and V of a text that is half done are kept outside meanwhile.
"""
from __future__ import annotations

import base64
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from .cache.pool import TRANSFER
from .errors import EngineDead, Overloaded, RequestError
from .messages import unpack_ids
from .plan import Batch, Sampling
from .scheduler.batch import fit, pad_batch
from .specs import Bucket

if TYPE_CHECKING:
    from .engine import EngineCore
    from .startup import Loaded

LAST, MEAN = "last", "mean"
POOLING = (LAST, MEAN)  # of the last token; the mean over all
NO_PAGES = np.empty(0, np.int32)
SLICE_S = 0.05  # that one command computes while no request is known to wait
LEASE_S = 60.0  # for which K and V of a text are kept whose client does not go on
MAX_JOBS = 4    # that are kept at once


class Headless:
    """A platform's ops for a forward whose head is left out."""

    def __init__(self, ops: Any, head: Any):
        self._ops, self._head = ops, head

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def linear(self, x: Any, weight: Any, *more: Any) -> Any:
        return x if weight is self._head else self._ops.linear(x, weight, *more)

    def sample(self, rows: Any, softcap: float | None = None) -> Any:
        return rows


def headless(forward: Callable[..., Any]) -> Callable[..., Any]:
    """The same forward, which returns what goes into the head: [L, hidden], of the batch's logit rows."""
    return lambda ops, weights, batch: forward(Headless(ops, weights["head"]), weights, batch)


class Text(NamedTuple):
    """One text on its way. done: tokens computed. place: where it stands among the texts."""

    place: int
    ids: np.ndarray
    done: int = 0
    pages: np.ndarray = NO_PAGES


@dataclass
class Job:
    """Texts whose vectors are computed in several commands, so that generation goes on in between.

    left: what is not computed, the first perhaps in part. sums: of the rows of each text so far. kept: K and V of the
    first one's tokens that are done, as the platform exports them. touched: seconds, when the last command for it came.
    """

    pooling: str
    lengths: list[int]
    left: list[Text]
    sums: list[np.ndarray | None]
    kept: Any = None
    touched: float = 0.0

    def vectors(self) -> np.ndarray:
        """float32 [texts, hidden]."""
        sums = np.stack(self.sums)
        return (sums / [[length] for length in self.lengths] if self.pooling == MEAN else sums).astype(np.float32)


class Embedder:
    """Computes vectors for an engine, a few texts at a time, while nothing else is on the device."""

    def __init__(self, engine: EngineCore, loaded: Loaded, world: int):
        self._engine, self._platform = engine, loaded.platform
        self._manifest, self._model = loaded.manifest, loaded.model
        apart = world > loaded.manifest.local_ranks
        self._reason = "the model is divided among processes, which know no other step" if apart else ""
        self._steps: dict[Bucket | None, Any] = {}
        self._jobs: dict[str, Job] = {}

    def embed(self, ids: str = "", lengths: str = "", pooling: str = "", job: str = "") -> dict[str, Any]:
        """The vectors of some texts. ids: of all of them, packed, as base64; lengths: of each, with commas between.

        -> "vectors", float32 [texts, hidden] as base64, and "size", hidden. Or "job": others wait, and the same command
        with that alone goes on; with `pooling` "none" as well it forgets the job. Raises `RequestError` for what this
        platform or model cannot do, `Overloaded` while there are not enough pages.
        """
        now = time.monotonic()
        self._jobs = {name: one for name, one in self._jobs.items() if now - one.touched < LEASE_S}
        if job:
            work = self._jobs.pop(job, None)
            if pooling == "none":
                return {}
            if work is None:
                raise Overloaded("the engine has forgotten these inputs: send them again", status=503, retry_after=1)
        else:
            work = self._begin(ids, lengths, pooling)
        rows = self._go_on(work, now)
        if rows is None:
            self._jobs[name := secrets.token_hex(8)] = work  # an engine that is started anew must not have it too
            return {"job": name}
        if not np.isfinite(rows).all():
            raise RequestError("the model gives no numbers for this input", status=500, kind="server_error")
        return {"vectors": base64.b64encode(rows.tobytes()).decode(), "size": rows.shape[1]}

    def _begin(self, ids: str, lengths: str, pooling: str) -> Job:
        if self._reason:
            raise RequestError(f"embeddings are not available here: {self._reason}", code="unsupported_parameter")
        if pooling not in POOLING:
            raise ValueError(f"pooling {pooling!r} is none of {', '.join(POOLING)}")
        parts = np.split(unpack_ids(base64.b64decode(ids)), np.cumsum([int(n) for n in lengths.split(",")])[:-1])
        limits = self._engine.scheduler.limits
        for part in parts:
            if not 0 < len(part) <= limits.max_model_len or part.min() < 0 or part.max() >= limits.vocab_size:
                raise RequestError("an input is empty, too long or outside the vocabulary", param="input")
        return Job(pooling, [len(part) for part in parts], [Text(i, part) for i, part in enumerate(parts)],
                   [None] * len(parts))

    def _go_on(self, job: Job, began: float) -> np.ndarray | None:
        """Compute what is left of it: the vectors, or None where the rest is for later commands."""
        engine, size = self._engine, self._engine.scheduler.limits.page_size
        counts = [-(-len(text.ids) // size) for text in job.left]
        engine.recorder.commanded("make_room", {"pages": sum(counts)})
        pages = self._take(sum(counts))
        try:
            job.left = [text._replace(pages=own) for text, own in zip(
                job.left, np.split(pages, np.cumsum(counts)[:-1]), strict=True)]
            if job.kept is not None:
                engine._state = self._platform.import_pages(engine._state, self._used(job.left[0]), job.kept)
                job.kept = None
            while job.left:
                self._step(job)
                if job.left and self._others_wait(began):
                    if job.left[0].done:
                        job.kept = self._platform.export_pages(engine._state, self._used(job.left[0]))
                    job.touched = time.monotonic()
                    return None
        except (EngineDead, RequestError):
            raise
        except Exception as error:
            raise RequestError(f"the step failed: {error}", status=500, kind="server_error") from error
        finally:
            engine.cache.pool.release(pages, TRANSFER)
        return job.vectors()

    def _used(self, text: Text) -> list[int]:
        """The pages that hold what is done of a text."""
        return text.pages[:-(-text.done // self._engine.scheduler.limits.page_size)].tolist()

    def _others_wait(self, began: float) -> bool:
        """Is it another's turn: a request's that runs, or one's that may have come meanwhile? Some platforms cannot
        keep K and V elsewhere, and only so many jobs may be kept."""
        able = "export_pages" in self._manifest.features and len(self._jobs) < MAX_JOBS
        return able and (self._engine.has_work or time.monotonic() - began > SLICE_S)

    def make_room(self, pages: int) -> dict[str, Any]:
        """What `embed` did to the cache, in a rerun."""
        self._engine.cache.pool.release(self._take(int(pages)), TRANSFER)
        return {}

    def _take(self, count: int) -> np.ndarray:
        """So many pages, once the step in flight is over."""
        engine = self._engine
        for output in engine._land():
            engine.scheduler.report(output)
        pages = engine.cache.take(count, TRANSFER)
        if pages is None:
            raise Overloaded(f"the inputs take {count} pages of K and V and {engine.cache.available} are free; send "
                             "them again later, or fewer at once", status=503, retry_after=1)
        return pages

    def _step(self, job: Job) -> None:
        """Compute as many tokens as a step may have."""
        chosen, left = self._choose(job.left)
        batch, wanted = self._batch(chosen, job.pooling)
        rows = self._run(batch)
        for (text, _), (first, last) in zip(chosen, wanted, strict=True):
            if last > first:
                part, before = rows[first:last].sum(0, dtype=np.float64), job.sums[text.place]
                job.sums[text.place] = part if before is None else before + part
        rest = [text._replace(done=text.done + count) for text, count in chosen]
        job.left = [text for text in rest if text.done < len(text.ids)] + left

    def _choose(self, texts: list[Text]) -> tuple[list[tuple[Text, int]], list[Text]]:
        """Texts for the next step with how many tokens of each, those of one token first; and what is left."""
        limits, chosen, budget = self._engine.scheduler.limits, [], self._engine.scheduler.limits.chunk
        while texts and budget and len(chosen) < limits.max_running:
            count = min(budget, len(texts[0].ids) - texts[0].done)
            chosen.append((texts.pop(0), count))
            budget -= count
        return sorted(chosen, key=lambda one: one[1] > 1), texts

    def _batch(self, chosen: list[tuple[Text, int]], pooling: str) -> tuple[Batch, list[tuple[int, int]]]:
        """The step's arrays, and for each text which of the wanted rows are its."""
        size = self._engine.scheduler.limits.page_size
        counts = [count for _, count in chosen]
        starts = np.concatenate([[0], np.cumsum(counts)])
        places = [np.arange(text.done, text.done + count) for text, count in chosen]
        lengths = [text.done + count for text, count in chosen]
        table = np.zeros((len(chosen), -(-max(lengths) // size)), np.int32)
        for row, (text, _), length in zip(table, chosen, lengths, strict=True):
            used = -(-length // size)
            row[:used] = text.pages[:used]
        slots = [row[place // size] * size + place % size for row, place in zip(table, places, strict=True)]
        if pooling == MEAN:
            wanted, spans = np.arange(starts[-1]), list(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True))
        else:
            ends = [length == len(text.ids) for (text, _), length in zip(chosen, lengths, strict=True)]
            wanted, after = starts[1:][ends] - 1, np.cumsum(ends).tolist()
            spans = [(stop - end, stop) for stop, end in zip(after, ends, strict=True)]
        if not len(wanted):
            wanted = np.zeros(1)
        arrays = (np.concatenate([text.ids[text.done:text.done + count] for text, count in chosen]),
                  np.concatenate(places), np.concatenate(slots), np.repeat(np.arange(len(chosen)), counts),
                  np.arange(1, len(chosen) + 1), starts, lengths, table, wanted, np.full(len(wanted), -2))
        return Batch(*(np.asarray(array, np.int32) for array in arrays), Sampling()), spans

    def _run(self, batch: Batch) -> np.ndarray:
        """float [L, hidden] of a batch."""
        engine, wanted, bucket = self._engine, len(batch.logit_rows), None
        if (ladders := self._manifest.buckets) is not None:
            logits = tuple(sorted({*ladders.rows, *ladders.tokens}))
            bucket = Bucket(fit(len(batch.tokens), ladders.tokens, "tokens"),
                            fit(len(batch.seqs), ladders.rows, "rows"),
                            fit(batch.pages.shape[1], ladders.pages, "pages a row"), fit(wanted, logits, "rows"))
            batch = pad_batch(batch, bucket)
        step = self._steps.get(bucket)
        if step is None:
            forward = headless(self._model.forward)
            step = self._steps[bucket] = self._platform.compile(forward, self._model.weights, bucket)
        out, engine._state = step(engine._state, batch)
        rows = out.collect()
        if not isinstance(rows, np.ndarray) or rows.ndim != 2:
            raise RequestError(f"embeddings are not available here: {self._manifest.name} computes no hidden states",
                               code="unsupported_parameter")
        return rows[:wanted]
