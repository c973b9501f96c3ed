"""`isthmus bench`: without the name of a part it is `isthmus bench serving`."""
from __future__ import annotations

from .bench_serving import add_arguments, run

__all__ = ["add_arguments", "run"]
