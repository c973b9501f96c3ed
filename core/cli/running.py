"""The servers of this user on this machine: each writes a file in a private folder, and whoever looks asks the system
whether its process still lives."""
from __future__ import annotations

import http.client
import json
import os
import socket
import ssl
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec

from ..config import Config
from ..env import cache_dir
from ..errors import ConfigError, cut, printable

MAX_FILE = 2**16      # bytes
ASK_S = 2.0           # how long a server may take to say how it is
SAME_START_S = 2.0    # two clocks of one start differ by less
MAX_STATE = 60        # characters


class Running(msgspec.Struct, frozen=True):
    """A server as it describes itself. started: of its process, seconds since 1970. weight_bytes, kv_bytes: 0 until the
    model is there."""

    pid: Annotated[int, msgspec.Meta(gt=0)]
    started: float
    machine: str
    host: str
    port: int
    url: str
    model: str
    path: str = ""
    platform: str = ""
    weight_bytes: int = 0
    kv_bytes: int = 0


@dataclass(frozen=True)
class State:
    """How a server is now. memory: bytes that its processes have."""

    server: Running
    state: str
    memory: int


def folder() -> Path:
    """Where the files are; need not exist."""
    return cache_dir() / "run"


def _process_start(pid: int) -> float | None:
    import psutil
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None


def alive(server: Running) -> bool:
    """Whether its process is the one that wrote the file; the number may be another's by now."""
    start = _process_start(server.pid)
    return start is not None and abs(start - server.started) < SAME_START_S


def list_running() -> list[Running]:
    """The servers that live, by port. Files of those that ended without a word are removed, what is no file of ours is
    left alone."""
    found = []
    for path in sorted(folder().glob("*.json")):
        server = _read(path)
        if server is None or server.machine != socket.gethostname():  # a home folder may be shared
            continue
        if alive(server):
            found.append(server)
        else:
            with suppress(OSError):
                path.unlink(missing_ok=True)
    return sorted(found, key=lambda server: server.port)


def _read(path: Path) -> Running | None:
    """None for what is gone meanwhile, or no file of ours. A pipe is not waited for, a link not followed."""
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
    try:
        with open(os.open(path, flags), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                return None
            return msgspec.json.decode(file.read(MAX_FILE), type=Running)
    except (OSError, ValueError, RecursionError):
        return None


@contextmanager
def registered(config: Config, url: str, port: int) -> Iterator[Callable[[dict[str, Any]], None]]:
    """This server is in the list meanwhile; call what is yielded with the engine's description once there is one.

    A folder that cannot be written leaves it out of the list, and is no reason not to serve.
    """
    pid = os.getpid()
    path = folder() / f"{pid}.json"
    server = Running(pid, _process_start(pid) or time.time(), socket.gethostname(), config.server.host, port, url,
                     config.model.served_model_name or config.model.model or "(the default)")

    def write(server: Running) -> None:
        with suppress(OSError):
            folder().mkdir(mode=0o700, parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            with open(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(msgspec.json.encode(server))
            os.replace(part, path)

    def tell(info: dict[str, Any]) -> None:
        write(msgspec.structs.replace(server, model=info["served_name"], path=info.get("model_path", ""),
                                      platform=info["platform"], weight_bytes=info["weight_bytes"],
                                      kv_bytes=info["kv_bytes"]))

    with suppress(OSError):
        list_running()  # whoever was killed left a file
    write(server)
    try:
        yield tell
    finally:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def look(server: Running) -> State:
    """Ask it how it is: ready, idle (its model is unloaded), loading, or why it cannot serve."""
    return State(server, _ask(server), _memory(server.pid))


def _ask(server: Running) -> str:
    try:
        parts = urlsplit(server.url)
        if parts.scheme == "https":  # it is this machine: whose name the certificate has does not matter
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            connection: Any = http.client.HTTPSConnection(parts.netloc, timeout=ASK_S, context=context)
        else:
            connection = http.client.HTTPConnection(parts.netloc, timeout=ASK_S)
        try:
            connection.request("GET", "/health")
            found = json.loads(connection.getresponse().read(MAX_FILE))
        finally:
            connection.close()
        status, reason = str(found.get("status")), str(found.get("reason", ""))
    except (OSError, http.client.HTTPException, ValueError, AttributeError):
        return "gives no answer"
    words = reason if status == "unavailable" and reason else {"ok": "ready"}.get(status, status)
    return cut(printable(words.removeprefix("the model is ")).replace("\n", " "), MAX_STATE)


def _memory(pid: int) -> int:
    """Of its processes; what they share counts for each."""
    import psutil
    total = 0
    with suppress(psutil.Error):
        server = psutil.Process(pid)
        for process in (server, *server.children(recursive=True)):
            with suppress(psutil.Error):
                total += process.memory_info().rss
    return total


def choose(name: str, found: list[Running]) -> list[Running]:
    """Those that a port or a model's name means. Raises `ConfigError` with what there is when none or several are."""
    matching = [s for s in found if name == str(s.port)] or [s for s in found if s.model.lower() == name.lower()]
    if not found:
        raise ConfigError(f"{name}: no server of yours runs on this machine")
    listed = ", ".join(f"{s.model} at port {s.port}" for s in found)
    if not matching:
        from ..suggest import suggest
        hint = suggest(name, [str(s.port) for s in found] + [s.model for s in found])
        raise ConfigError(f"{name}: no such server runs here{hint}; there are: {listed}")
    if len(matching) > 1:
        ports = ", ".join(str(s.port) for s in matching)
        raise ConfigError(f"{name}: {len(matching)} servers have this model, name one by its port: {ports}")
    return matching
