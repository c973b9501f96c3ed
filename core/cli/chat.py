"""`isthmus chat`: a conversation in the terminal."""
from __future__ import annotations

import argparse
import json
import re
import signal
import sys
import time
from collections.abc import Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any

from ..errors import ConfigError, IsthmusError, RequestError
from ..settings import Resolved
from ..suggest import suggest
from .backends import TOO_LONG, Message, Turn, add_backend_arguments, make_backend
from .parser import add_model_argument
from .progress import ProgressLine
from .sampling import OPTIONS, add_sampling_arguments, given_options, parse_option, shown_options
from .terminal import QUOTES, Reader, WordWrap, harmless, make_reader, quiet_terminal

DEFAULT, NONE = "default", "none"
HELP = f"""\
/help                this text
/clear               forget the conversation
/system [TEXT]       set or show the system message; `{NONE}` removes it
/set [NAME VALUE]    set a sampling option, or show them; the value `{DEFAULT}` unsets it
                     {', '.join(list(OPTIONS)[:6])},
                     {', '.join(list(OPTIONS)[6:])}
/save FILE           write the conversation as JSON
/exit                leave (so does Ctrl-D)
Enter sends; Alt-Enter starts a new line; a text between \"\"\" and \"\"\" may have many. Ctrl-C stops an answer."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_backend_arguments(parser)
    add_sampling_arguments(parser, "what the context leaves")


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    import asyncio  # --help can do without
    options = given_options(arguments)
    return asyncio.run(_chat(make_backend(arguments, resolved), options, arguments.system))


async def _chat(backend: Any, options: dict[str, Any], system: str | None) -> int:
    """0, or 1 when a line of a pipe could not be answered or carried out."""
    try:
        with ProgressLine() as line:
            await backend.open(line)
            if not backend.can_chat:
                raise ConfigError(f"{backend.name} has no chat template: `isthmus generate` continues a text, and "
                                  "--chat-template gives the model a template where it is loaded")
            await backend.load(line)
        if backend.warning:
            print(f"isthmus: {backend.warning}", file=sys.stderr, flush=True)
        chat = Chat(backend, options, system)
        reader = make_reader()
        chat.cut_short = getattr(reader, "cut_short", chat.cut_short)
        if sys.stdin.isatty():
            print(f"{backend.name}. /help lists the commands.")
        with quiet_terminal(sys.stdin):
            await chat.talk(reader)
        return 1 if chat.failed and not sys.stdin.isatty() else 0
    finally:
        await backend.close()


class Chat:
    """The conversation and its commands. `options` are sampling options, `out` is where answers are printed."""

    def __init__(self, backend: Any, options: dict[str, Any], system: str | None = None, out: Any = None):
        self.backend, self.options, self.system = backend, options, system
        self.messages: list[Message] = []
        self.failed = 0
        self.cut_short: Callable[[], bool] = lambda: False  # whether Ctrl-C was typed right behind the question
        self.out = out or sys.stdout
        self._saved: set[Path] = set()
        self.commands = {"/help": self._help, "/clear": self._clear, "/system": self._system, "/set": self._set,
                         "/save": self._save, "/exit": self._exit, "/quit": self._exit}

    async def talk(self, read: Reader) -> None:
        """Read and answer until the end of input or /exit."""
        while True:
            try:
                text = await self._read(read)
            except KeyboardInterrupt:
                self._say("(Ctrl-D or /exit leaves)")
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
                self.failed += 1
                too_long = isinstance(error, RequestError) and error.code == TOO_LONG
                self._say(f"! {error}" + (" (/clear forgets the conversation)" if too_long else ""))

    async def _read(self, read: Reader) -> str:
        text = (await read("> ")).strip()
        if text.startswith(QUOTES):
            lines = [text[len(QUOTES):]]
            while not lines[-1].rstrip().endswith(QUOTES):
                lines.append(await read("... "))
            text = "\n".join(lines).rstrip().removesuffix(QUOTES).strip()
        return text

    async def answer(self, text: str) -> None:
        """Stream the answer to one message. Ctrl-C stops it; what has been said stays in the conversation."""
        import asyncio
        system = [{"role": "system", "content": self.system}] if self.system else []
        question = [*self.messages, {"role": "user", "content": text}]
        turn, said = Turn(time.monotonic()), []
        wrap = WordWrap().feed if self.out.isatty() else str

        async def stream() -> None:
            async with aclosing(self.backend.stream([*system, *question], self.options, turn)) as pieces:
                async for piece in pieces:
                    said.append(piece)
                    print(wrap(harmless(piece)), end="", file=self.out, flush=True)

        task = asyncio.ensure_future(stream())
        loop = asyncio.get_running_loop()
        before = signal.signal(signal.SIGINT, lambda *_: loop.call_soon_threadsafe(task.cancel))
        if self.cut_short():
            task.cancel()
        stopped = ""
        try:
            await task
        except asyncio.CancelledError:
            stopped = "stopped"
        finally:
            signal.signal(signal.SIGINT, before)
        self.messages = [*question, {"role": "assistant", "content": "".join(said)}]
        early = stopped or turn.cut(self.options.get("max_tokens"))
        self._say(f"\n({early + '; ' if early else ''}{turn.summary()})", dim=True)

    def command(self, line: str) -> None:
        """Carry out a line that starts with /; EOFError means to leave."""
        word, _, rest = line.partition(" ")
        command, rest = self.commands.get(word.lower()), rest.strip()
        if command is None:
            raise ConfigError(f"there is no command {word}{suggest(word, self.commands)} (/help lists them)")
        if rest and command in (self._help, self._clear, self._exit):
            raise ConfigError(f"{word} takes nothing after it, but got {rest!r}")
        command(rest)

    def _say(self, text: str, dim: bool = False) -> None:
        if self.out.isatty():
            text = WordWrap().feed(text)
            text = f"\x1b[2m{text}\x1b[0m" if dim else text
        print(text, file=self.out, flush=True)

    def _help(self, rest: str) -> None:
        self._say(HELP)

    def _clear(self, rest: str) -> None:
        self.messages = []
        self._say("(cleared)")

    def _system(self, rest: str) -> None:
        self.system = None if rest.lower() == NONE else rest or self.system
        self._say(f"(system: {self.system or NONE})")

    def _set(self, rest: str) -> None:
        name, value = re.fullmatch(r"([^\s=]*)[\s=]?(.*)", rest, re.DOTALL).groups()
        name, value = name.replace("-", "_"), value.strip()
        if name and not value:
            raise ConfigError(f"/set {name} needs a value; `/set {name} {DEFAULT}` unsets it")
        if value.lower() == DEFAULT and name in OPTIONS:
            self.options.pop(name, None)
        elif name:
            self.options[name] = parse_option(name, value)
        recommended = shown_options(self.backend.defaults)
        unset = "none is set" + (f"; this model's own are {recommended}" if recommended else "")
        self._say(f"({shown_options(self.options) or unset})")

    def _save(self, rest: str) -> None:
        if not rest:
            raise ConfigError("/save needs a file name")
        system = [{"role": "system", "content": self.system}] if self.system else []
        record = {"model": self.backend.name, "messages": system + self.messages}
        text, path = json.dumps(record, ensure_ascii=False, indent=2), Path(rest).expanduser()
        try:
            # A file of this conversation may be written again, any other stays as it is.
            with open(path, "w" if path in self._saved else "x", encoding="utf-8") as file:
                file.write(text + "\n")
        except FileExistsError:
            raise ConfigError(f"{rest} exists already: name another file") from None
        except OSError as error:
            raise ConfigError(f"{rest}: {(error.strerror or str(error)).lower()}") from None
        self._saved.add(path)
        self._say(f"(saved {len(self.messages)} messages to {rest})")

    def _exit(self, rest: str) -> None:
        raise EOFError
