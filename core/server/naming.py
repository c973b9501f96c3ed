"""Errors in the words of who asked: fields by the names under which they were sent."""
from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from ..errors import RequestError
from .protocol import Body

# Pattern of a field's path from its beginning -> what the caller calls that, as `re.sub` takes it.
Names = Sequence[tuple[str, str | Callable[[re.Match[str]], str]]]


# What the engine calls log-probabilities -> the first of these fields that was sent. Of a platform that has none those
# count that ask for them: without how many the request would be refused again.
SCORES = {r"(prompt_)?logprobs(?!\w)": ("top_logprobs", "top_logprobs_num", "return_logprob", "logprobs", "include")}
HOW_MANY = ("top_logprobs", "top_logprobs_num")


def as_sent(asked: Body, *own: str) -> Names:
    """Names of the fields that were sent under another one. own: fields that keep theirs, whatever is said later."""
    found = [(rf"{name}(?!\w)", word) for name, word in {**asked.sent, **{name: name for name in own}}.items()]
    for pattern, fields in SCORES.items():
        found += [(pattern, field) for field in fields if getattr(asked, field, None)]
    return found


def new_name(path: str, names: Names) -> str:
    """What the caller calls a field."""
    for pattern, name in names:
        if re.match(pattern, path):
            return re.sub(pattern, name, path, count=1)
    return path


@contextmanager
def renamed(names: Names) -> Iterator[None]:
    """Raises errors about fields with the caller's names of them."""
    try:
        yield
    except RequestError as error:
        if error.code == "unsupported_parameter":
            names = [(pattern, name) for pattern, name in names if name not in HOW_MANY]
        if error.param and (name := new_name(error.param, names)) != error.param:
            if error.message.startswith(error.param):
                error.message = name + error.message.removeprefix(error.param)
                error.args = (error.message,)
            error.param = name
        raise
