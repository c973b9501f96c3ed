"""`isthmus ps`: the servers of this user that run here."""
from __future__ import annotations

import argparse
import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from typing import Any

from ..config import shown_size
from .running import State, list_running, look
from .table import print_table
from .top import duration

MOST_AT_ONCE = 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, resolved: Any) -> int:
    found = list_running()
    with ThreadPoolExecutor(MOST_AT_ONCE) as pool:  # one that does not answer holds up no other
        states = list(pool.map(look, found))
    if arguments.json:
        import msgspec
        print(json.dumps([{**asdict(s), "server": msgspec.to_builtins(s.server)} for s in states]))
    elif not states:
        print("No server of yours runs on this machine; `isthmus serve` starts one.")
    else:
        print_table(("model", "port", "state", "in use", "weights", "KV at most", "platform", "since", "pid"),
                    map(_row, states), right=(1, 3, 4, 5, 8))
    return 0


def _row(state: State) -> tuple[str, ...]:
    server = state.server
    sizes = ("-" if not size or state.state == "idle" else shown_size(size)
             for size in (server.weight_bytes, server.kv_bytes))
    return (server.model, str(server.port), state.state, shown_size(state.memory), *sizes, server.platform or "-",
            duration(time.time() - server.started), str(server.pid))
