"""`isthmus rm`: delete a model that was downloaded."""
from __future__ import annotations

import argparse
from typing import Any

from ..config import shown_size
from ..errors import ConfigError
from .running import list_running


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", nargs="*", metavar="MODEL", help="a name that `isthmus ls` lists")


def run(arguments: argparse.Namespace, resolved: Any) -> int:
    from ..weights.sources import delete_model, find_downloaded
    if not arguments.model:
        raise ConfigError("say which model: `isthmus rm NAME` (`isthmus ls` lists them)")
    entries = [find_downloaded(name) for name in dict.fromkeys(arguments.model)]  # all are looked at before one goes
    for entry in entries:
        for server in list_running():
            if server.path and (server.path == str(entry.path) or server.path.startswith(f"{entry.path}/")):
                raise ConfigError(f"{entry.name} is served at port {server.port}: `isthmus stop {server.port}` first")
    for entry in entries:
        print(f"deleted {entry.name}, {shown_size(delete_model(entry))}", flush=True)
    return 0
