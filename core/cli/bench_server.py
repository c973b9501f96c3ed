"""The server that a bench is put on, and the files that its result goes to."""
from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from ..errors import ConfigError, RequestError
from ..files import check_written
from ..logs import announce
from .backends import RemoteBackend
from .bench_load import ANSWER_S
from .progress import ProgressLine

if TYPE_CHECKING:
    from ..bench.result import Result
    from ..bench.serving import Server

ASK_S = 30.0          # for what it says of itself
DEFAULT_VOCAB = 256   # where the server does not say: ids of bytes are in every vocabulary
KEPT = ("model", "platform", "device", "dtype", "kv_dtype", "page_size", "pages", "max_model_len", "max_running",
        "model_path", "policy", "eviction_policy", "overlap", "prefix_cache", "determinism", "weight_bytes", "kv_bytes")


def find_server(url: str, model: str | None, key: str | None, chat: bool = False, timeout: float = ANSWER_S) -> Server:
    """Ask the server what it is and what it takes. timeout: seconds for a whole answer. Raises `ConfigError` and
    `RequestError` with the way out."""
    from ..bench.client import Target
    from ..bench.drive import run_loop
    from ..bench.result import hidden
    from ..bench.serving import look
    backend = RemoteBackend(url, model, key, ASK_S)
    served = backend.served()
    if model not in (None, *served):
        raise ConfigError(f"--model {model}: {backend.address} has {', '.join(served[:8])}")
    info = _info(backend)
    parts = urlsplit(backend.root)
    target = Target(parts.hostname or "", parts.port or (443 if backend.secure else 80), backend.secure,
                    backend.root_path, backend.headers, model or served[0], {}, timeout)
    vocab = info.get("vocab_size")
    subject = {"url": hidden(backend.root), "model": target.model, "server": {k: info[k] for k in KEPT if k in info}}
    return run_loop(look(target, vocab if isinstance(vocab, int) and 0 < vocab < 2**31 else DEFAULT_VOCAB, subject,
                         chat))


def _info(backend: RemoteBackend) -> dict[str, Any]:
    """What a server of ours tells of itself; {} of another."""
    try:
        found = backend.get_json("GET", backend.root_path + "/server_info")["info"]
    except RequestError as error:
        if error.status in (401, 403):
            raise
        return {}
    except (ValueError, LookupError, TypeError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def watched() -> Iterator[Callable[..., None]]:
    """A line that shows progress. Who ends the command with Ctrl-C is told how far it was."""
    at: tuple[str, int, int] = ("", 0, 0)
    try:
        with ProgressLine(sys.stderr) as line:
            def tell(stage: str, done: int = 0, total: int | None = 0) -> None:
                nonlocal at
                at = stage, done, total or 0
                line(stage, done, total)
            yield tell
    except KeyboardInterrupt:
        stage, done, total = at
        count = f", {done} of {total}" if total else ""
        announce(f"isthmus: stopped at: {stage or 'the beginning'}{count}; there is no result")
        raise


def add_result_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-o", "--output", type=Path, metavar="FILE", help="write the whole result as JSON")
    parser.add_argument("--plot", type=Path, action="append", default=[], metavar="FILE",
                        help="a .html file (needs nothing) or a .png file; may be repeated")
    parser.add_argument("--json", action="store_true", help="print JSON instead of words")


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """What several servers, measured in turn, have beside their workload."""
    parser.add_argument("--warmup", type=int, default=2, metavar="N", help="requests before, that do not count [2]")
    parser.add_argument("--ready-timeout", type=float, default=600.0, metavar="SECONDS",
                        help="for a server to be ready [600]")
    add_result_arguments(parser)


def check_result_files(arguments: argparse.Namespace) -> None:
    """Can they be written? Before the run, which may take long."""
    from ..chart import check_plot
    for option, path in (("--output", arguments.output), *(("--plot", path) for path in arguments.plot)):
        if path is not None:
            check_written(path, option)
            if option == "--plot":
                check_plot(path)


def give(result: Result, words: list[str], arguments: argparse.Namespace) -> None:
    """Write, draw and print the result as the flags say."""
    from ..bench.picture import draw
    from ..bench.result import write_result
    if arguments.output is not None:
        with written("--output", arguments.output):
            write_result(result, arguments.output)
    for path in arguments.plot:
        with written("--plot", path):
            draw(result, path)
    print(json.dumps(result.as_dict(), ensure_ascii=False) if arguments.json else "\n".join(words))
    sys.stdout.flush()


@contextmanager
def written(option: str, path: Path) -> Iterator[None]:
    """What the system says when the file cannot be written, for people."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: {(error.strerror or str(error)).lower()}") from None
