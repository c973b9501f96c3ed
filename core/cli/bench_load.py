"""Flags of the commands that put a load on a server, and what they mean."""
from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from .posting import check_file, json_lines

if TYPE_CHECKING:
    from ..bench.drive import Load
    from ..bench.workload import Workload

MOST = {"requests": 1_000_000, "prompt_tokens": 1_000_000, "shared_tokens": 1_000_000, "max_tokens": 100_000,
        "prefixes": 100_000, "turns": 1000}
LEAST = {"shared_tokens": 0}
MAX_RATE = 100_000.0
LEAST_VOCAB = 2
ANSWER_S, MAX_ANSWER_S = 3600.0, 86400.0  # for a whole answer


def add_workload_arguments(parser: argparse.ArgumentParser, requests: int = 64, prompt: int = 256,
                           answer: int = 64) -> None:
    """What is asked. Prompts are random unless a file is named."""
    group = parser.add_argument_group("what is asked")
    for name, default, what in (("requests", requests, "requests in all"),
                                ("prompt-tokens", prompt, "tokens of a prompt, or of each message with --turns"),
                                ("shared-tokens", 0, "of these, tokens that all prompts begin with"),
                                ("prefixes", 1, "different such beginnings, drawn evenly"),
                                ("max-tokens", answer, "tokens of an answer"),
                                ("turns", 1, "turns of a conversation; above 1 the answers stay in the context"),
                                ("seed", 0, "of all that is drawn")):
        group.add_argument(f"--{name}", type=int, metavar="N", help=f"{what} [{default}]")
    parser.set_defaults(defaults={"requests": requests, "prompt_tokens": prompt, "shared_tokens": 0, "prefixes": 1,
                                  "max_tokens": answer, "turns": 1, "seed": 0})
    group.add_argument("--think", type=float, default=0.0, metavar="SECONDS",
                       help="between an answer and the next turn [0]")
    group.add_argument("--spread", type=float, default=0.0, metavar="SHARE",
                       help="lengths are drawn evenly from so much below to so much above [0]")
    group.add_argument("--text", action="store_true", help="prompts of words, not of token ids")
    group.add_argument("--trace", type=Path, metavar="FILE",
                       help="lengths, sharing and times of a trace (docs/replay.md has the formats)")
    group.add_argument("--speed", type=float, default=1.0, metavar="X", help="of the trace: 2 = twice as fast [1]")
    group.add_argument("--longest", type=int, metavar="N", help="cut a trace's requests to so many tokens")
    group.add_argument("--prompts", type=Path, metavar="FILE",
                       help="JSON lines with a prompt or messages each; batch files and dumps of requests too")


def add_load_arguments(parser: argparse.ArgumentParser, several: bool = True) -> None:
    """How it is asked."""
    more = "; several, separated by commas, are measured in turn" if several else ""
    group = parser.add_argument_group("how it is asked")
    group.add_argument("--concurrency", metavar="N", help=f"closed loop: so many at once{more} [16]")
    group.add_argument("--rate", metavar="X", help=f"open loop: so many a second whatever the server does{more}")
    group.add_argument("--arrivals", choices=("poisson", "constant", "trace"),
                       help="of an open loop; trace: at the times of --trace [poisson]")
    group.add_argument("--max-in-flight", type=int, default=4096, metavar="N",
                       help="most requests at once in an open loop; others wait here, and that counts [4096]")
    group.add_argument("--timeout", type=float, default=ANSWER_S, metavar="SECONDS",
                       help=f"for a whole answer; one that takes longer has failed [{ANSWER_S:g}]")
    group.add_argument("--slo", default="", metavar="LIMITS",
                       help="such as ttft=200ms,itl=50ms (also tpot, e2e): what counts as goodput")


def check_workload(arguments: argparse.Namespace) -> None:
    """Raises `ConfigError` for what is out of range or does not go together; fills in what was not given."""
    files = [f"--{name}" for name in ("trace", "prompts") if getattr(arguments, name)]
    if len(files) > 1:
        raise ConfigError("--trace and --prompts: name one of them")
    arguments.asked_requests = arguments.requests
    own = {"trace": ("requests", "seed"), "prompts": ("requests", "max_tokens")}[files[0][2:]] if files else ()
    for name, default in arguments.defaults.items():
        value = getattr(arguments, name)
        if value is None:
            setattr(arguments, name, default)
        elif files and name not in own:
            raise ConfigError(f"{flag(name)} is for drawn prompts, and {files[0]} has its own: leave one out")
        elif name in MOST and not LEAST.get(name, 1) <= value <= MOST[name]:
            raise ConfigError(f"{flag(name)} {value}: it must be between {LEAST.get(name, 1)} and {MOST[name]}")
    if arguments.seed < 0:
        raise ConfigError(f"--seed {arguments.seed} is below 0")
    if arguments.turns == 1 and arguments.shared_tokens >= arguments.prompt_tokens:
        raise ConfigError(f"--shared-tokens {arguments.shared_tokens}: prompts have --prompt-tokens "
                          f"{arguments.prompt_tokens}, and at least one of them is their own")
    for name, least, most in (("spread", 0.0, 0.99), ("think", 0.0, 3600.0), ("speed", 1e-6, 1e6)):
        if not least <= getattr(arguments, name) <= most:
            raise ConfigError(f"--{name} {getattr(arguments, name):g}: it must be between {least:g} and {most:g}")
    if arguments.longest is not None and arguments.longest < 2:
        raise ConfigError(f"--longest {arguments.longest}: at least 2 tokens, one of the prompt and one of the answer")
    if files:
        make_workload(arguments, LEAST_VOCAB)  # what is wrong with it is told before anything is started or sent


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def make_workload(arguments: argparse.Namespace, vocab: int, as_text: bool = False, more_seed: int = 0) -> Workload:
    """The workload that the flags describe. vocab: ids below it are in the model. as_text: the server takes no ids."""
    from ..bench.workload import Shape, conversations, drawn_prompts, from_file, traced
    seed = arguments.seed + more_seed
    if arguments.trace:
        path = check_file(arguments.trace, "which trace?")
        return traced(path, arguments.asked_requests, vocab, seed, arguments.speed, None, arguments.longest,
                      as_text or arguments.text)
    if arguments.prompts:
        path = check_file(arguments.prompts, "which prompts?")
        return from_file(path, json_lines(path, "prompts"), arguments.asked_requests, arguments.max_tokens)
    shape = Shape(arguments.requests, arguments.prompt_tokens, arguments.max_tokens, seed, vocab, arguments.spread,
                  arguments.shared_tokens, arguments.prefixes, as_text or arguments.text)
    return conversations(shape, arguments.turns, arguments.think) if arguments.turns > 1 else drawn_prompts(shape)


def make_loads(arguments: argparse.Namespace) -> list[Load]:
    """The loads that the flags describe, in the order in which they were given."""
    from ..bench.drive import MAX_AT_ONCE, Load
    if not 0 < arguments.timeout <= MAX_ANSWER_S:
        raise ConfigError(f"--timeout {arguments.timeout:g}: it must be above 0 and at most {MAX_ANSWER_S:g}")
    if arguments.concurrency and (arguments.rate or arguments.arrivals):
        raise ConfigError("--concurrency is a closed loop, --rate and --arrivals an open one: leave one out")
    if not 1 <= arguments.max_in_flight <= MAX_AT_ONCE:
        raise ConfigError(f"--max-in-flight {arguments.max_in_flight}: it must be between 1 and {MAX_AT_ONCE}")
    common: dict[str, Any] = {"limit": arguments.max_in_flight, "seed": arguments.seed}
    if arguments.arrivals == "trace":
        if arguments.rate or not arguments.trace:
            raise ConfigError("--arrivals trace takes the times of --trace FILE, without --rate; --speed makes it "
                              "faster")
        return [Load(arrivals="trace", **common)]
    if arguments.arrivals and not arguments.rate:
        raise ConfigError(f"--arrivals {arguments.arrivals} needs --rate, requests a second")
    if arguments.rate:
        return [Load(rate=rate, arrivals=arguments.arrivals or "poisson", **common)
                for rate in numbers("--rate", arguments.rate, 1e-3, MAX_RATE)]
    return [Load(concurrency=int(n), **common)
            for n in numbers("--concurrency", arguments.concurrency or "16", 1, MAX_AT_ONCE, whole=True)]


def numbers(name: str, text: str, least: float, most: float, whole: bool = False) -> list[float]:
    """The numbers of a list with commas. Raises `ConfigError` that names the flag and the number."""
    found = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not least <= value <= most or whole and value != int(value):
            raise ConfigError(f"{name} {part.strip()}: a {'whole ' if whole else ''}number from {least:g} to {most:g} "
                              "is needed")
        found.append(value)
    return found
