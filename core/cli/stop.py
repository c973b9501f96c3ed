"""`isthmus stop`: end servers that run here, as SIGTERM does: running requests may finish."""
from __future__ import annotations

import argparse
import time
from contextlib import suppress
from typing import Any

from ..errors import ConfigError
from .running import Running, alive, choose, list_running

WAIT_S = 60.0   # --drain-timeout is 30
LOOK_S = 0.05
AGAIN_S = 0.3   # between two signals, so that they count as two


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("server", nargs="?", metavar="NAME|PORT", help="the served model's name, or the port")
    parser.add_argument("--port", type=int, metavar="N", help="the same as PORT")
    parser.add_argument("--all", action="store_true", help="every server of yours on this machine")
    parser.add_argument("--now", action="store_true", help="running requests are not waited for")
    parser.add_argument("--timeout", type=float, default=WAIT_S, metavar="X",
                        help=f"seconds to wait for the end [{WAIT_S:g}]")


def run(arguments: argparse.Namespace, resolved: Any) -> int:
    if sum(map(bool, (arguments.server, arguments.port, arguments.all))) != 1:
        raise ConfigError("say which server: `isthmus stop NAME` or `isthmus stop PORT` (`isthmus ps` lists them), or "
                          "--all")
    if not 0 <= arguments.timeout <= 86400:
        raise ConfigError(f"--timeout {arguments.timeout:g}: it must be between 0 and 86400 seconds")
    found = list_running()
    chosen = found if arguments.all else choose(arguments.server or str(arguments.port), found)
    if not chosen:
        print("No server of yours runs on this machine.")
        return 0
    for server in chosen:
        _signal(server)
    if arguments.now:
        time.sleep(AGAIN_S)
        for server in chosen:
            _signal(server)
    end, left = time.monotonic() + arguments.timeout, list(chosen)
    while left and time.monotonic() < end:
        for server in [server for server in left if not alive(server)]:
            print(f"stopped {server.model} at port {server.port}", flush=True)
            left.remove(server)
        time.sleep(LOOK_S)
    for server in left:
        print(f"{server.model} at port {server.port} has not ended yet: its requests still run; --now ends them")
    return 1 if left else 0


def _signal(server: Running) -> None:
    import psutil
    with suppress(psutil.NoSuchProcess):
        if alive(server):
            psutil.Process(server.pid).terminate()
