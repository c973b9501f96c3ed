"""`isthmus chat`: a conversation in the terminal."""
from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ..env import cache_dir
from ..errors import ConfigError, IsthmusError
from .backends import (
    Message,
    Turn,
    add_backend_arguments,
    add_sampling_arguments,
    given_options,
    make_backend,
    parse_option,
)
from .parser import add_model_argument
from .progress import ProgressLine
from .settings import Resolved, suggest

QUOTES = '"""'
DEFAULTS = {"temperature": 0.7, "top_p": 0.95}
HELP = """\
/help                this text
/clear               forget the conversation
/system [TEXT]       set or show the system message
/set [NAME VALUE]    set a sampling option (temperature, top_p, max_tokens, ...), or show them
/save FILE           write the conversation as JSON
/exit                leave (so does Ctrl-D)
Enter sends; Alt-Enter starts a new line; a text between \"\"\" and \"\"\" may have many. Ctrl-C stops an answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_backend_arguments(parser)
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    return asyncio.run(_chat(arguments, resolved))


async def _chat(arguments: argparse.Namespace, resolved: Resolved) -> int:
    backend = make_backend(arguments, resolved.config)
    try:
        with ProgressLine() as line:
            await backend.start(line)
        if not backend.can_chat:
            raise ConfigError(f"{backend.name} has no chat template: use `isthmus generate --raw`, or --chat-template")
        chat = Chat(backend, {**DEFAULTS, **given_options(arguments)}, arguments.system)
        await chat.talk(make_reader(backend.name))
        return 0
    finally:
        await backend.close()


def make_reader(name: str) -> Callable[[str], Any]:
    """An async function that asks for one line (or block) and raises EOFError at the end."""
    if not sys.stdin.isatty():
        async def read_pipe(prompt: str) -> str:
            line = await asyncio.to_thread(sys.stdin.readline)
            if not line:
                raise EOFError
            return line.rstrip("\n")
        return read_pipe
    from prompt_toolkit import PromptSession
    from prompt_toolkit.history import FileHistory
    from prompt_toolkit.key_binding import KeyBindings
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    cache_dir().mkdir(parents=True, exist_ok=True)
    history = cache_dir() / "chat_history"
    history.touch(mode=0o600)  # what people type is nobody else's business
    session: Any = PromptSession(history=FileHistory(str(history)), key_bindings=keys)
    print(f"{name}. /help lists the commands.")
    return session.prompt_async


class Chat:
    """The conversation and its commands. `options` are sampling options, `out` is where answers are printed."""

    def __init__(self, backend: Any, options: dict[str, Any], system: str | None = None, out: Any = None):
        self.backend, self.options, self.system = backend, options, system
        self.messages: list[Message] = []
        self.out = out or sys.stdout
        self.commands = {"/help": self._help, "/clear": self._clear, "/system": self._system, "/set": self._set,
                         "/save": self._save, "/exit": self._exit, "/quit": self._exit}

    async def talk(self, read: Callable[[str], Any]) -> None:
        """Read and answer until the end of input or /exit."""
        while True:
            try:
                text = await self._read(read)
            except KeyboardInterrupt:
                continue
            except EOFError:
                return
            try:
                if text.startswith("/"):
                    self.command(text)
                elif text:
                    await self.answer(text)
            except EOFError:
                return
            except IsthmusError as error:
                self._say(f"! {error}")

    async def _read(self, read: Callable[[str], Any]) -> str:
        text = (await read("> ")).strip()
        if text.startswith(QUOTES):
            lines = [text[len(QUOTES):]]
            while not lines[-1].rstrip().endswith(QUOTES):
                lines.append(await read("... "))
            text = "\n".join(lines).rstrip().removesuffix(QUOTES).strip()
        return text

    async def answer(self, text: str) -> None:
        """Stream the answer to one message. Ctrl-C stops it; what has been said stays in the conversation."""
        system = [{"role": "system", "content": self.system}] if self.system else []
        question = [*self.messages, {"role": "user", "content": text}]
        turn, said = Turn(time.monotonic()), []

        async def stream() -> None:
            async with aclosing(self.backend.stream([*system, *question], self.options, turn)) as pieces:
                async for piece in pieces:
                    said.append(piece)
                    print(piece, end="", file=self.out, flush=True)

        task = asyncio.ensure_future(stream())
        loop = asyncio.get_running_loop()
        before = signal.signal(signal.SIGINT, lambda *_: loop.call_soon_threadsafe(task.cancel))
        try:
            await task
        except asyncio.CancelledError:
            self._say("\n(stopped)")
        finally:
            signal.signal(signal.SIGINT, before)
        self.messages = [*question, {"role": "assistant", "content": "".join(said)}]
        self._say(f"\n({turn.summary()})", dim=True)

    def command(self, line: str) -> None:
        """Carry out a line that starts with /; EOFError means to leave."""
        word, _, rest = line.partition(" ")
        if word not in self.commands:
            raise ConfigError(f"there is no command {word}{suggest(word, self.commands)} (/help lists them)")
        self.commands[word](rest.strip())

    def _say(self, text: str, dim: bool = False) -> None:
        tty = dim and self.out.isatty()
        print(f"\x1b[2m{text}\x1b[0m" if tty else text, file=self.out, flush=True)

    def _help(self, rest: str) -> None:
        self._say(HELP)

    def _clear(self, rest: str) -> None:
        self.messages = []
        self._say("(cleared)")

    def _system(self, rest: str) -> None:
        self.system = rest or self.system
        self._say(f"(system: {self.system or 'none'})")

    def _set(self, rest: str) -> None:
        name, _, value = rest.replace("=", " ").partition(" ")
        if name and not value.strip():
            raise ConfigError(f"/set {name} needs a value")
        if name:
            self.options[name.replace("-", "_")] = parse_option(name, value.strip())
        self._say("(" + ", ".join(f"{k} {v}" for k, v in self.options.items()) + ")")

    def _save(self, rest: str) -> None:
        if not rest:
            raise ConfigError("/save needs a file name")
        system = [{"role": "system", "content": self.system}] if self.system else []
        record = {"model": self.backend.name, "messages": system + self.messages}
        text = json.dumps(record, ensure_ascii=False, indent=2)
        try:
            Path(rest).expanduser().write_text(text + "\n", encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{rest}: {error.strerror}") from None
        self._say(f"(saved {len(self.messages)} messages to {rest})")

    def _exit(self, rest: str) -> None:
        raise EOFError
