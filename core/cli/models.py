"""`isthmus models`: what can be named, and what is on this machine."""
from __future__ import annotations

import argparse
import json
from typing import Any

from ..config import shown_size


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, resolved: Any) -> int:
    from ..weights.sources import DEFAULT, list_models
    entries = list_models()
    if arguments.json:
        print(json.dumps([{"name": e.name, "size": e.size, "download": e.download, "source": e.source, "about": e.about,
                           "path": str(e.path) if e.path else None, "default": e.name == DEFAULT} for e in entries],
                         ensure_ascii=False))
        return 0
    places = ["here" if e.path else f"not here, {shown_size(e.download)} to download" for e in entries]
    width, wide = max(len(e.name) for e in entries), max(map(len, places))
    for entry, place in zip(entries, places, strict=True):
        about = (entry.about + " (the default)") if entry.name == DEFAULT else entry.about
        print(f"{entry.name:{width}}  {shown_size(entry.size):>8}  {place:{wide}}  {about or entry.path}".rstrip())
    print("\nAny GGUF file, model folder or hub id (owner/name) can be named too; `isthmus pull NAME` downloads one.")
    return 0
