"""A platform on loan to an engine: probed already, not to be closed, watched, and broken at will."""
from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..core.plan import Batch
from ..core.platform import Bucket, Manifest, Step
from .case import Context


class Held:
    """Everything else is the platform's own.

    pages: page numbers that each sequence slot read or wrote since `watch`.  broken: the next step fails on the device.
    """

    def __init__(self, context: Context):
        self._platform, self._manifest = context.platform, context.manifest
        self.pages: dict[int, set[int]] = {}
        self.broken = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._platform, name)

    def probe(self, rank: int = 0, world: int = 1) -> Manifest:
        return self._manifest

    def close(self) -> None:
        """The platform lives on."""

    def compile(self, forward: Callable[..., Any], weights: Any, bucket: Bucket | None) -> Step:
        def fail(ops: Any, weights: Any, batch: Batch) -> Any:
            forward(ops, weights, batch)
            raise RuntimeError("this step fails by design")
        step = self._platform.compile(forward, weights, bucket)

        def run(state: Any, batch: Batch) -> tuple[Any, Any]:
            for seq, length, pages in zip(batch.seqs.tolist(), batch.lengths.tolist(), batch.pages, strict=True):
                if length:
                    self.pages.setdefault(seq, set()).update(set(pages.tolist()) - {0})
            if self.broken:
                self.broken = False
                return self._platform.compile(fail, weights, bucket)(state, batch)
            return step(state, batch)
        return run

    def watch(self) -> dict[int, set[int]]:
        """Begin to note pages anew."""
        self.pages = {}
        return self.pages
