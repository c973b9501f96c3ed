"""Token ids to text, request by request. `DetokenizerState` knows no socket; `serve` is the process."""
from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import zmq

from ..messages import (
    Abort,
    Logprobs,
    Ready,
    TextOutput,
    TextOutputs,
    TokenOutput,
    TokenOutputs,
    Watch,
    pack_ids,
    unpack_ids,
)
from ..text.detokenizer import Detokenizer
from ..text.stop import StopFilter
from .wire import Report, Start, decode_to_detokenizer, encode, read_socket, resolve, run_worker, write_socket

log = logging.getLogger(__name__)


def first_logprobs(logprobs: Logprobs | None, n: int) -> Logprobs | None:
    """Those of the first `n` tokens."""
    if logprobs is None:
        return None
    wide = 4 * n * logprobs.k
    return Logprobs(logprobs.chosen[:4 * n], logprobs.k, logprobs.top_ids[:wide], logprobs.top[:wide])


class _Request:
    """One request's way from ids to text."""

    def __init__(self, tokenizer: Any, watch: Watch):
        self.watch = watch
        self.handle = -1
        self.count = 0
        self.detokenizer = Detokenizer(tokenizer, watch.skip_special, shown=frozenset(watch.shown))
        stops = tuple(filter(None, watch.stop))
        self.filter = StopFilter(stops, watch.include_stop) if stops else None

    def push_token(self, token: int) -> TextOutput:
        """The text of one token of which there is nothing more to tell."""
        if self.filter is not None:
            return self.push(TokenOutput(self.watch.id, pack_ids([token])))
        self.count += 1
        return TextOutput(self.watch.id, self.detokenizer.push((token,)), token.to_bytes(4, "little"),
                          completion_tokens=self.count)

    def push(self, output: TokenOutput) -> TextOutput:
        """The text of one output; its finish is "stop" as soon as a stop string is complete."""
        ids = unpack_ids(output.tokens)
        ends_by_id = output.stop_id >= 0
        text, used, matched = self._read(ids[:-1] if ends_by_id and not self.watch.include_stop else ids)
        if matched is None:
            used = len(ids)
            if output.finish is not None:
                tail, matched = self._flush(whole=output.finish == "stop")
                text += tail
        self.count += used
        reason = matched if matched is not None else output.stop_id if ends_by_id else None
        return TextOutput(
            output.id, text, output.tokens if used == len(ids) else pack_ids(ids[:used]),
            finish=output.finish if matched is None else "stop", stop_reason=reason,
            prompt_tokens=output.prompt_tokens, cached_tokens=output.cached_tokens, completion_tokens=self.count,
            logprobs=output.logprobs if used == len(ids) else first_logprobs(output.logprobs, used),
            prompt_logprobs=output.prompt_logprobs,
            error=output.error, status=output.status, code=output.code, param=output.param,
            retry_after=output.retry_after, queued=output.queued, drafted=output.drafted, accepted=output.accepted)

    def _read(self, ids: Any) -> tuple[str, int, str | None]:
        """Text, number of ids used, stop string met. With stop strings id by id, to find the one that ends."""
        if self.filter is None:
            return self.detokenizer.push(ids), len(ids), None
        text = ""
        for i in range(len(ids)):
            piece, matched = self.detokenizer.push(ids[i:i + 1]), None
            if self.count + i >= self.watch.min_tokens:
                piece, matched = self.filter.push(piece)
            text += piece
            if matched is not None:
                return text, i + 1, matched
        return text, len(ids), None

    def _flush(self, whole: bool) -> tuple[str, str | None]:
        """What was held back. A character that was cut in the middle is left out; `whole`: nobody cut it, so it is
        broken for good."""
        tail = self.detokenizer.flush() if whole else ""
        if self.filter is None:
            return tail, None
        tail, matched = self.filter.push(tail)
        return (tail, matched) if matched is not None else (tail + self.filter.flush(), None)


class DetokenizerState:
    """All running requests. One that has ended is forgotten, and what still arrives for it is dropped."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        self._requests: dict[str, _Request] = {}
        self._handles: dict[int, _Request] = {}

    def __len__(self) -> int:
        return len(self._requests)

    def watch(self, watch: Watch) -> None:
        """Know a request; must come before its first output."""
        self._requests[watch.id] = _Request(self.tokenizer, watch)

    def forget(self, id: str) -> None:
        """Drop a request that nobody reads any more. An unknown id is ignored."""
        request = self._requests.pop(id, None)
        if request is not None:
            self._handles.pop(request.handle, None)

    def handle(self, batch: TokenOutputs) -> tuple[TextOutputs, tuple[str, ...]]:
        """Texts of a step, and the ids of requests that a stop string ended, which the scheduler must be told."""
        texts: list[TextOutput] = []
        stops: list[str] = []
        for handle, token in zip(unpack_ids(batch.handles).tolist(), unpack_ids(batch.tokens).tolist(), strict=True):
            request = self._handles.get(handle)
            if request is not None:
                self._turn(request, request.push_token, token, texts, stops)
        for output in batch.outputs:
            request = self._requests.get(output.id)
            if request is not None:
                if output.handle >= 0:
                    request.handle = output.handle
                    self._handles[output.handle] = request
                self._turn(request, request.push, output, texts, stops)
        return TextOutputs(texts), tuple(stops)

    def _turn(self, request: _Request, push: Callable[[Any], TextOutput], item: Any, texts: list[TextOutput],
              stops: list[str]) -> None:
        """Add the text of an output or a token, and the id of a request that it ends although the scheduler goes on."""
        id, goes_on = request.watch.id, getattr(item, "finish", None) is None
        try:
            text = push(item)
        except Exception as error:  # one request's odd ids must not end everybody's
            log.exception("request %s cannot be turned into text", id)
            tokens = pack_ids([item]) if isinstance(item, int) else item.tokens
            text = TextOutput(id, "", tokens, finish="error", error=f"tokens cannot be turned into text: {error}")
        if text.finish is not None:
            self.forget(id)
            if goes_on:
                stops.append(id)
        texts.append(text)


def load_tokenizer_of(config: Any) -> Any:
    """The tokenizer of the configured model, without its encoder, which a detokenizer does not need."""
    from ..text.tokenizer import load_tokenizer
    from ..weights.checkpoint import open_checkpoint
    from ..weights.sources import resolve_model
    with open_checkpoint(resolve_model(config.model.model, config.model.revision)) as checkpoint:
        return load_tokenizer(checkpoint, encodes=False)


def serve(start: Start, context: zmq.Context, api: zmq.Socket, report: Report) -> None:
    """Turn ids into text until the process is told to leave."""
    inbox = read_socket(context, start.directory, "detokenizer")
    scheduler = write_socket(context, start.directory, "scheduler")
    load = resolve(start.tokenizer) if start.tokenizer else load_tokenizer_of
    state = DetokenizerState(load(start.config))
    report.tail = lambda: f"detokenizer: {len(state)} requests"
    # Takes the way through the scheduler, so that its arrival proves that every socket is connected.
    scheduler.send(encode(Ready("detokenizer")))
    while True:
        message = decode_to_detokenizer(inbox.recv())
        if isinstance(message, TokenOutputs):
            texts, stops = state.handle(message)
            if stops:
                scheduler.send(encode(Abort(stops, "stop")))
            if texts.outputs:
                api.send(encode(texts))
        elif isinstance(message, Watch):
            state.watch(message)
        else:
            api.send(encode(message))


if __name__ == "__main__":
    run_worker("detokenizer", "api", serve)
