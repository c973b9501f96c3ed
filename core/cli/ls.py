"""`isthmus ls`: the models on this machine."""
from __future__ import annotations

import argparse
import json
from typing import Any

from ..config import shown_size
from .table import print_table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, resolved: Any) -> int:
    from ..weights.sources import list_models
    from .running import list_running
    entries = [entry for entry in list_models() if entry.path]
    ports = {entry.name: [s.port for s in list_running() if s.path and _inside(s.path, entry.path)]
             for entry in entries}
    if arguments.json:
        print(json.dumps([{"name": e.name, "size": e.size, "source": e.source, "path": str(e.path),
                           "ports": ports[e.name]} for e in entries], ensure_ascii=False))
    elif not entries:
        print("No model is here yet: `isthmus pull` fetches the default one, `isthmus models` lists others.")
    else:
        print_table(("name", "size", "from", "served at", "path"), (
            (e.name, shown_size(e.size), e.source, ", ".join(map(str, ports[e.name])) or "-", str(e.path))
            for e in entries), right=(1,))
        print(f"\n{shown_size(sum(e.size for e in entries))} in all; `isthmus rm NAME` deletes one.")
    return 0


def _inside(path: str, place: Any) -> bool:
    return path == str(place) or path.startswith(f"{place}/")
