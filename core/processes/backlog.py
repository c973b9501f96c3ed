"""What has arrived for one request and waits to be read."""
from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence

import msgspec

from ..messages import Logprobs, TextOutput, request_error

Tap = Callable[[TextOutput], bool]

MERGE_BYTES = 1024  # ids read as one output: 256 tokens, or 12 with 20 alternatives each


def output_size(output: TextOutput) -> int:
    """Bytes of ids in an output, alternatives included: a measure of the work that it makes."""
    size = len(output.tokens)
    for scores in (output.logprobs, output.prompt_logprobs):
        if scores is not None:
            size += len(scores.chosen) + len(scores.top_ids)
    return size


def joined(outputs: Sequence[TextOutput]) -> TextOutput:
    """Consecutive outputs of one request as one."""
    if len(outputs) == 1:
        return outputs[0]
    if not any([output.finish or output.logprobs or output.prompt_logprobs or output.prompt_tokens
                for output in outputs]):
        return TextOutput(outputs[-1].id, "".join([output.text for output in outputs]),
                          b"".join([output.tokens for output in outputs]),
                          completion_tokens=outputs[-1].completion_tokens)
    scored = [output.logprobs for output in outputs if output.logprobs is not None]
    return msgspec.structs.replace(
        outputs[-1], text="".join([output.text for output in outputs]),
        tokens=b"".join([output.tokens for output in outputs]),
        prompt_tokens=max(output.prompt_tokens for output in outputs),
        cached_tokens=max(output.cached_tokens for output in outputs),
        queued=max(output.queued for output in outputs),
        logprobs=_joined_logprobs(scored) if scored else None,
        prompt_logprobs=next((o.prompt_logprobs for o in outputs if o.prompt_logprobs is not None), None))


def _joined_logprobs(parts: Sequence[Logprobs]) -> Logprobs:
    return Logprobs(b"".join([part.chosen for part in parts]), parts[0].k,
                    b"".join([part.top_ids for part in parts]), b"".join([part.top for part in parts]))


class Backlog:
    """Outputs of one request for one reader. A reader that has fallen behind gets what waits in few large pieces, and
    never holds up the event loop: `get` gives the others a turn each time.

    tap: is offered what comes while the reader waits, all but the last output and what is long to work on; True = it
    has taken it, and the reader is not woken. ended: the last output has arrived, though it may wait.
    """

    def __init__(self, tap: Tap | None = None) -> None:
        self._items: deque[TextOutput | Exception] = deque()
        self._arrived = asyncio.Event()
        self._tap, self._waits = tap, False
        self.ended = False

    @property
    def unread(self) -> int:
        """Outputs that wait."""
        return len(self._items)

    def put(self, item: TextOutput | Exception) -> None:
        """Add an output, or the error that ends them."""
        if self._waits and self._tap is not None and not self._items and _is_short(item):
            try:
                if self._tap(item):
                    return
            except Exception as error:  # the reader's, though the engine knows nothing of it
                self._add(error)
                return
        self.ended = self.ended or isinstance(item, Exception) or item.finish is not None
        self._add(item)

    def put_all(self, outputs: Sequence[TextOutput]) -> None:
        """Add outputs that came together."""
        if not self._items and all(map(_is_short, outputs)) and output_size(whole := joined(outputs)) <= MERGE_BYTES:
            self.put(whole)
        else:
            for output in outputs:
                self.put(output)

    def _add(self, item: TextOutput | Exception) -> None:
        self._items.append(item)
        self._arrived.set()

    async def get(self) -> TextOutput:
        """The next output, with those that wait behind it up to `MERGE_BYTES`. Raises the error that ends them, which
        an output with finish "error" is as well."""
        if self._items:
            await asyncio.sleep(0)
        else:
            self._arrived.clear()
            self._waits = True
            try:
                await self._arrived.wait()
            finally:
                self._waits = False
        first = self._items.popleft()
        if isinstance(first, Exception):
            raise first
        if first.finish == "error":
            raise request_error(first)
        outputs, size = [first], output_size(first)
        while size < MERGE_BYTES and self._items and _is_text(self._items[0]):
            outputs.append(self._items.popleft())
            size += output_size(outputs[-1])
        return joined(outputs)


def _is_text(item: TextOutput | Exception) -> bool:
    return isinstance(item, TextOutput) and item.finish != "error"


def _is_short(item: TextOutput | Exception) -> bool:
    """Whether it is in the middle of a text, and little work."""
    return isinstance(item, TextOutput) and item.finish is None and item.prompt_logprobs is None
