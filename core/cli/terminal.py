"""The terminal of a chat: words are wrapped whole, keys pressed during an answer stay out of it, lines are edited."""
from __future__ import annotations

import shutil
import sys
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, TextIO

from ..env import cache_dir
from ..errors import ConfigError
from .session import in_thread

QUOTES = '"""'
TAB = 8  # columns
MAX_INPUT = 1 << 24  # characters of a prompt or line from a pipe
Reader = Callable[[str], Awaitable[str]]


# A model's text may not move the cursor, set the title or hide what is before it: control characters, and those that
# turn the direction of writing, are shown as a box. What joins letters and emoji stays.
_STEERING = {code: "\ufffd" for code in (*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A))
             if chr(code) not in "\n\t"} | {ord("\r"): None}


def harmless(text: str) -> str:
    """The text without what steers a terminal."""
    return text.translate(_STEERING)


class WordWrap:
    """Breaks streamed text between words; nothing is held back. `width`: columns of the terminal."""

    def __init__(self, width: int | None = None):
        # The last column stays free: terminals differ in where the cursor is once it is filled.
        self._room = (width or shutil.get_terminal_size().columns) - 1
        self._column, self._word, self._word_width = 0, "", 0

    def feed(self, text: str) -> str:
        """What to write for `text`: a word that turns out too long for its line moves to the next one."""
        return "".join(map(self._letter, text))

    def _letter(self, letter: str) -> str:
        from prompt_toolkit.utils import get_cwidth
        if letter == "\n":
            self._column, self._word, self._word_width = 0, "", 0
            return letter
        size = TAB - self._column % TAB if letter == "\t" else get_cwidth(letter)
        before = ""
        if self._column + size > self._room:
            if letter.isspace():  # the line's end stands for it
                return self._letter("\n")
            before = self._break()
        self._column += size
        if letter.isspace() or size > 1:  # between East Asian letters every place will do
            self._word, self._word_width = "", 0
        else:
            self._word, self._word_width = self._word + letter, self._word_width + size
        return before + letter

    def _break(self) -> str:
        """A new line, and the word that was begun goes with it unless it fills the line."""
        if 0 < self._word_width < self._column:
            self._column = self._word_width
            return f"\x1b[{self._word_width}D\x1b[K\n{self._word}"
        self._column, self._word, self._word_width = 0, "", 0
        return "\n"


@contextmanager
def quiet_terminal(stream: TextIO) -> Iterator[None]:
    """Keys are not echoed meanwhile: what is typed waits for the next prompt. No effect where there is no terminal."""
    try:
        import termios
        before = termios.tcgetattr(stream.fileno()) if stream.isatty() else None
    except ImportError:  # Windows
        before = None
    if before is None:
        yield
        return
    quiet = before.copy()
    quiet[3] &= ~termios.ECHO
    termios.tcsetattr(stream.fileno(), termios.TCSADRAIN, quiet)
    try:
        yield
    finally:
        termios.tcsetattr(stream.fileno(), termios.TCSADRAIN, before)


def is_open_block(text: str) -> bool:
    """Does the text begin a block between triple quotes and not end it?"""
    text = text.strip()
    return text.startswith(QUOTES) and not text.removeprefix(QUOTES).endswith(QUOTES)


def make_reader() -> Reader:
    """An async function that asks for one line (or block) and raises EOFError at the end."""
    return LineEditor() if sys.stdin.isatty() else _read_pipe


def read_input(read: Callable[[int], str]) -> str:
    """What `sys.stdin.read` or `sys.stdin.readline` gives. `ConfigError` for what is no text or too long."""
    try:
        text = read(MAX_INPUT + 1)
    except UnicodeDecodeError as error:
        raise ConfigError(f"standard input is not a text in {error.encoding}") from None
    if len(text) > MAX_INPUT:
        raise ConfigError(f"standard input has more than {MAX_INPUT} characters, which no model can take")
    return text


async def _read_pipe(prompt: str) -> str:
    line = await in_thread(read_input, sys.stdin.readline)
    if not line:
        raise EOFError
    return line.rstrip("\n")


class LineEditor:
    """Asks for a line, or a block of them, at the terminal. Lines can be edited, and earlier ones be had again."""

    def __init__(self) -> None:
        from prompt_toolkit import PromptSession
        from prompt_toolkit.history import FileHistory
        cache_dir().mkdir(parents=True, exist_ok=True)
        history = cache_dir() / "chat_history"
        history.touch(mode=0o600)  # what people type is nobody else's business
        self._session: Any = PromptSession(history=FileHistory(str(history)), key_bindings=_keys(),
                                           prompt_continuation="  ")

    async def __call__(self, prompt: str) -> str:
        return await self._session.prompt_async(prompt)

    def cut_short(self) -> bool:
        """Was Ctrl-C typed right behind the line? While the editor has the terminal that is a key, and no signal. What
        was typed after it waits for the next prompt."""
        from prompt_toolkit.input.typeahead import get_typeahead, store_typeahead
        from prompt_toolkit.keys import Keys
        terminal = self._session.app.input
        keys = get_typeahead(terminal)
        if sys.platform != "win32":  # there to read is to wait
            keys += terminal.read_keys()
        rest = next((i + 1 for i, key in enumerate(keys) if key.key == Keys.ControlC), 0)
        store_typeahead(terminal, keys[rest:])
        return rest > 0


def _keys() -> Any:
    from prompt_toolkit.key_binding import KeyBindings
    keys = KeyBindings()

    @keys.add("escape", "enter")
    def _(event: Any) -> None:
        event.current_buffer.insert_text("\n")

    @keys.add("enter")
    def _(event: Any) -> None:
        if is_open_block(event.current_buffer.text):
            event.current_buffer.insert_text("\n")
        else:
            event.current_buffer.validate_and_handle()

    return keys
