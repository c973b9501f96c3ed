"""Calls of the `tokenizers` library, which fails in more ways than one."""
from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from ..errors import IsthmusError, cut

MAX_REASON = 500  # characters of the library's own message


@contextmanager
def library_call(error: Callable[[str], IsthmusError], what: str) -> Iterator[None]:
    """Whatever the library raises inside becomes `error` with `what` and the reason; our own errors pass.

    It raises bare `Exception` for bad files. What its Rust code did not foresee is a `PanicException`, a
    `BaseException` without a public name, which no `except Exception` would catch.
    """
    try:
        yield
    except IsthmusError:
        raise
    except BaseException as found:
        if not isinstance(found, Exception) and type(found).__name__ != "PanicException":
            raise
        raise error(f"{what}: {cut(str(found) or type(found).__name__, MAX_REASON)}") from found
