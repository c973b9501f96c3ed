"""The conformance kit's driver, for tests that name a platform and a checkpoint."""
from __future__ import annotations

from pathlib import Path

from isthmus.conformance.driver import Driver, Model
from isthmus.core.discovery import load_platform


class Runner(Driver):
    """A model on a platform of its own, and one state of it."""

    def __init__(self, platform_name: str, path: Path, dtype: str, kv_dtype: str | None = None, pages: int = 128,
                 seqs: int = 40, page_size: int | None = None, options: dict[str, str] | None = None):
        platform = load_platform(platform_name, options)
        manifest = platform.probe()
        super().__init__(Model(platform, manifest, path, dtype, page_size or manifest.page_sizes[0]), pages, seqs,
                         kv_dtype)
