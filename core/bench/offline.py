"""A whole list of prompts through the engine in this process: no server, no network, all of them there at once."""
from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np

from ..api import Engine
from ..errors import Overloaded, RequestError
from ..messages import SamplingParams, Submit, TokenOutput, pack_ids
from .recorder import Outcome, Recorder, Slo
from .workload import Ask, Workload


def ids_of(engine: Engine, ask: Ask) -> np.ndarray:
    """A prompt's tokens, whatever its form. Raises `RequestError` for messages where there is no chat template."""
    if isinstance(ask.prompt, str):
        return np.asarray(engine.text.encode(ask.prompt), np.int32)
    if ask.prompt and isinstance(ask.prompt[0], dict):
        if engine.text.template is None:
            raise RequestError("this model has no chat template, and the prompts are messages", param="messages")
        return np.asarray(engine.text.template.encode(ask.prompt), np.int32)
    return np.asarray(ask.prompt, np.int32)


class _Going:
    """A request on its way. Its tokens are those of the answer that were told so far."""

    def __init__(self, due: float):
        self.due, self.events, self.counts = due, [], []
        self.prompt, self.cached, self.tokens = 0, 0, 0

    def got(self, output: TokenOutput, now: float) -> None:
        self.prompt, self.cached = max(self.prompt, output.prompt_tokens), max(self.cached, output.cached_tokens)
        if count := len(output.tokens) // 4:
            self.tokens += count
            self.events.append(now)
            self.counts.append(count)

    def ended(self, output: TokenOutput, now: float) -> Outcome:
        failed = output.finish == "error"
        return Outcome(self.due, self.due, now, self.events, self.counts, self.prompt, self.cached, self.tokens,
                       "engine" if failed else "", output.error)


def run(engine: Engine, workload: Workload, slo: Slo, tell: Callable[[int, int], None]) -> Recorder:
    """All requests of the workload, due at once, fed as the queue takes them. A conversation's turns are left out after
    the first: they would need the answers. Raises `RequestError` for a prompt that the engine refuses."""
    core, recorder = engine.core, Recorder(slo, time.monotonic())
    asks = ((f"offline-{i}", ids_of(engine, session.asks[0]), session.asks[0].max_tokens)
            for i, session in enumerate(workload.sessions()))
    going: dict[str, _Going] = {}
    waiting = next(asks, None)
    while waiting is not None or going:
        while waiting is not None:
            id, ids, most = waiting
            params = SamplingParams(max_tokens=most, temperature=0.0, ignore_eos=True)
            try:
                core.submit(Submit(id, pack_ids(ids), params))
            except Overloaded:
                if not going:
                    raise
                break
            going[id] = _Going(recorder.start)
            waiting = next(asks, None)
        outputs, now = core.step(), time.monotonic()
        for output in outputs:
            request = going.get(output.id)
            if request is None:
                continue
            request.got(output, now)
            if output.finish is not None:
                recorder.add(going.pop(output.id).ended(output, now))
                tell(recorder.sent, workload.requests)
    return recorder


def warm_up(engine: Engine, vocab: int) -> None:
    """A short prompt to its end, so that nothing is built while the clock runs."""
    engine.generate([list(itertools.islice(itertools.cycle(range(min(vocab, 64))), 32))], max_tokens=8, temperature=0,
                    ignore_eos=True)
    engine.core.command("flush_cache")
