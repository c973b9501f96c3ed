"""`isthmus generate`: one prompt in, one answer out."""
from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from contextlib import aclosing
from typing import Any

from ..errors import ConfigError
from .backends import Turn, add_backend_arguments, add_sampling_arguments, given_options, make_backend
from .progress import ProgressLine
from .settings import Resolved

MAX_TOKENS = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("prompt", nargs="?", metavar="PROMPT", help="the prompt; - or nothing reads standard input")
    parser.add_argument("--system", metavar="TEXT", help="system message")
    parser.add_argument("--raw", action="store_true", help="continue the text instead of answering it")
    parser.add_argument("--json", action="store_true", help="print one JSON object with text, finish reason and usage")
    add_backend_arguments(parser)
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    prompt = arguments.prompt
    if prompt in (None, "-"):
        if sys.stdin.isatty():
            raise ConfigError("a prompt is needed: isthmus generate 'Why is the sky blue?'")
        prompt = sys.stdin.read()
    return asyncio.run(_generate(arguments, resolved, prompt))


async def _generate(arguments: argparse.Namespace, resolved: Resolved, prompt: str) -> int:
    options: dict[str, Any] = {"max_tokens": MAX_TOKENS, **given_options(arguments)}
    backend = make_backend(arguments, resolved.config)
    try:
        with ProgressLine() as line:
            await backend.start(line)
        system = [{"role": "system", "content": arguments.system}] if arguments.system else []
        chat = not arguments.raw and backend.can_chat
        question = [*system, {"role": "user", "content": prompt}] if chat else prompt
        turn, text = Turn(time.monotonic()), []
        async with aclosing(backend.stream(question, options, turn)) as pieces:
            async for piece in pieces:
                text.append(piece)
                if not arguments.json:
                    print(piece, end="", flush=True)
        if arguments.json:
            print(json.dumps({"text": "".join(text), "finish_reason": turn.finish, "usage": {
                "prompt_tokens": turn.prompt_tokens, "completion_tokens": turn.completion_tokens,
                "cached_tokens": turn.cached_tokens}}, ensure_ascii=False))
        else:
            print()
        return 0
    finally:
        await backend.close()
