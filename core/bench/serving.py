"""A load on a server: learn what it takes, warm it up, measure, and make a `Run` of it."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TextIO

from ..errors import RequestError
from .client import Client, Target
from .drive import Load, Tell, drive
from .recorder import Slo
from .result import Run
from .workload import Ask, Shape, Workload, drawn_prompts

WARM_PROMPT, WARM_ANSWER = 64, 8
EXTRAS = {"ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}
IDS, TEXT, MESSAGES = [1, 2, 3], "hello", [{"role": "user", "content": "hello"}]
WARM_SEED = 2**31  # of prompts that are none of the workload's
FIRST_S = 300.0    # for the single token that a server is first asked for


@dataclass(frozen=True)
class Server:
    """A server that was looked at. vocab: ids below it are in its model.  takes_ids: prompts may be token ids.
    subject: as it describes itself.  notes: what it does not take, and what follows from it."""

    target: Target
    vocab: int
    takes_ids: bool
    subject: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


async def look(target: Target, vocab: int, subject: Mapping[str, Any], chat: bool = False) -> Server:
    """Ask for single tokens until the server takes what is asked. chat: only messages will be sent.

    Raises `RequestError` with its words when it takes nothing.
    """
    problem = None
    for extras in (EXTRAS, {}):
        for form in (MESSAGES,) if chat else (IDS, TEXT, MESSAGES):
            asking = replace(target, extras=extras, chat=form is MESSAGES)
            client = Client(replace(asking, timeout=min(FIRST_S, target.timeout)))
            outcome = await client.ask(Ask(form, 1))
            client.close()
            # One token that is the end, or a part of a character, brings no text; that it was answered is enough.
            if outcome.error in ("", "no token"):
                notes = [] if extras else ["the server takes no ignore_eos: answers may be shorter than asked for"]
                if not chat and form is not IDS:
                    kind = "words" if form is TEXT else "messages of words"
                    notes.append(f"the server takes no token ids: prompts are {kind}, about as many")
                return Server(asking, vocab, form is IDS, subject, tuple(notes))
            if not outcome.error.startswith("http 4"):
                raise RequestError(f"{target.host}:{target.port}: {outcome.message}", status=502)
            problem = problem or outcome
    raise RequestError(f"{target.host}:{target.port} answers a request of one token with {problem.error}: "
                       f"{problem.message}", status=502)


async def warm_up(server: Server, requests: int) -> None:
    """So many requests that count for nothing, one after the other. Raises `RequestError` for one that has no answer in
    its time."""
    shape = Shape(requests, WARM_PROMPT, WARM_ANSWER, WARM_SEED, server.vocab, as_text=not server.takes_ids)
    client = Client(server.target)
    for session in drawn_prompts(shape).sessions():
        outcome = await client.ask(session.asks[0])
        if outcome.error == "timeout":
            raise RequestError(f"{server.target.host}:{server.target.port}, a request before the measured ones: "
                               f"{outcome.message} (--timeout)", status=504)
    client.close()


async def measure(server: Server, workload: Workload, load: Load, slo: Slo, rows: TextIO | None = None,
                  tell: Tell = lambda done, total: None) -> Run:
    """One run of the workload under the load."""
    recorder, watched = await drive(workload, load, server.target, slo, rows, tell)
    return Run(str(load), recorder.figures(), {"load": load.facts, **recorder.detail(), "client": watched})


def told_of_client(run: Run) -> str:
    """A warning where the client's own slowness is in the figures, "" where it is not."""
    watched = run.detail["client"]
    if not watched["bottleneck"]:
        return ""
    return (f"the client itself was slow: its event loop ran {1e3 * watched['loop_lag'].get('p99', 0):.0f} ms late at "
            f"the 99th percentile and used {watched['busy']:.0%} of a core; times include that. Ask from another "
            "machine, or for less")
