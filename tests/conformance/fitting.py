"""Batches in the sizes that a platform takes: its buckets where it has some, exact ones otherwise."""
from __future__ import annotations

from ..core.plan import Batch
from ..core.platform import Bucket, Buckets, Unsupported
from ..core.scheduler.batch import pad_batch


def sizes(batch: Batch) -> Bucket:
    """The batch's own sizes."""
    return Bucket(len(batch.tokens), len(batch.seqs), batch.pages.shape[1], len(batch.targets))


def offered(buckets: Buckets) -> Bucket:
    """For each dimension all sizes that the engine may ask for, in the place of one size."""
    return Bucket(buckets.tokens, buckets.rows, buckets.pages, tuple(sorted({*buckets.rows, *buckets.tokens})))


def choose(batch: Batch, buckets: Buckets, larger: int = 0) -> Bucket:
    """The bucket that the engine would choose, or with each dimension `larger` steps up, as far as there are any."""
    chosen = {}
    for name, ladder in vars(offered(buckets)).items():
        need = getattr(sizes(batch), name)
        fitting = [size for size in ladder if size >= need]
        if not fitting:
            raise Unsupported(f"{need} {name} in one step; the largest bucket has {ladder[-1]}")
        chosen[name] = fitting[min(larger, len(fitting) - 1)]
    return Bucket(**chosen)


def fitted(batch: Batch, buckets: Buckets | None, larger: int = 0) -> tuple[Batch, Bucket | None]:
    """The batch as the engine would launch it, and the bucket to compile for."""
    if buckets is None:
        return batch, None
    bucket = choose(batch, buckets, larger)
    return pad_batch(batch, bucket), bucket
