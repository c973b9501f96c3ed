"""`isthmus generate`: one prompt in, one answer out."""
from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import aclosing
from typing import Any

from ..errors import ConfigError
from ..settings import Resolved
from .backends import Turn, add_backend_arguments, make_backend
from .progress import ProgressLine
from .sampling import add_sampling_arguments, given_options
from .terminal import harmless, read_input

MAX_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - or nothing reads standard input")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--raw", action="store_true", help="continue the text instead of answering it; always so for "
                        "a model without a chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object with text, finish reason and usage")
    add_backend_arguments(parser)
    add_sampling_arguments(parser, f"{MAX_TOKENS}, or what the context leaves")


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    import asyncio  # --help can do without
    options = given_options(arguments)
    if arguments.raw and arguments.system is not None:
        raise ConfigError("--system is for an answer, and --raw continues the text as it is: leave one of them out")
    backend = make_backend(arguments, resolved)
    return asyncio.run(_generate(arguments, backend, options, _read_prompt(arguments.prompt)))


def _read_prompt(prompt: str | None) -> str:
    if prompt in (None, "-"):
        if sys.stdin.isatty():
            raise ConfigError("a prompt is needed: isthmus generate 'Why is the sky blue?'")
        prompt = read_input(sys.stdin.read)
    if not prompt.strip():
        raise ConfigError("the prompt is empty: isthmus generate 'Why is the sky blue?'")
    return prompt


async def _generate(arguments: argparse.Namespace, backend: Any, options: dict[str, Any], prompt: str) -> int:
    try:
        with ProgressLine() as line:
            await backend.open(line)
            if not backend.can_chat and arguments.system is not None:
                raise ConfigError(f"{backend.name} has no chat template, so --system has no place: leave it out")
            await backend.load(line)
        for note in (backend.warning, _raw_note(arguments, backend)):
            if note:
                print(f"isthmus: {note}", file=sys.stderr, flush=True)
        system = [{"role": "system", "content": arguments.system}] if arguments.system else []
        chat = not arguments.raw and backend.can_chat
        question = [*system, {"role": "user", "content": prompt}] if chat else prompt
        turn = Turn(time.monotonic())
        text = await _print(backend.stream(question, options, turn, MAX_TOKENS), arguments.json)
        if arguments.json:
            print(json.dumps({"text": text, "finish_reason": turn.finish, "usage": {
                "prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.completion_tokens,
                "cached_tokens": turn.cached_tokens}}, ensure_ascii=False))
        elif cut := turn.cut(options.get("max_tokens", MAX_TOKENS)):
            print(f"isthmus: {cut}", file=sys.stderr)
        return 0
    finally:
        await backend.close()


def _raw_note(arguments: argparse.Namespace, backend: Any) -> str:
    if arguments.raw or backend.can_chat:
        return ""
    return f"{backend.name} has no chat template: the text is continued as it is, as with --raw"


async def _print(stream: Any, collect: bool) -> str:
    """The whole text, printed as it comes unless it is to be collected. A program that reads it gets it unchanged."""
    text, shown = [], harmless if sys.stdout.isatty() else str
    async with aclosing(stream) as pieces:
        async for piece in pieces:
            text.append(piece)
            if not collect:
                print(shown(piece), end="", flush=True)
    if not collect:
        print()
    return "".join(text)
