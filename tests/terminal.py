"""A command in a terminal of its own, driven by a test: what it prints, what the screen shows, keys."""
from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator

from .effort import SOON

KEYS = {"enter": "\r", "alt-enter": "\x1b\r", "ctrl-c": "\x03", "ctrl-d": "\x04", "up": "\x1b[A"}
STEP = re.compile(r"\x1b\[([?\d;]*)([A-Za-z])|\x1b[()].|\x1b\][^\x07]*\x07|\x1b.|\r|\n|\x08|[^\x1b\r\n\x08]+",
                  re.DOTALL)


class Terminal:
    """`isthmus WORDS`, 100 columns wide. `before` is Python that runs there first. seen: all that was printed."""

    def __init__(self, *words: str, before: str = "", columns: int = 100, **environment: str):
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        code = f"import sys\n{before}\nfrom isthmus.core.cli.main import main\nsys.exit(main())"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code, *words], stdin=slave, stdout=slave, stderr=slave, start_new_session=True,
            preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**os.environ, "TERM": "xterm-256color", "PROMPT_TOOLKIT_NO_CPR": "1", **environment})
        os.close(slave)
        self.seen = ""

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.master)

    def read(self, seconds: float = 0.1) -> bool:
        """Take what is printed within that time; False at the end."""
        if not select.select([self.master], [], [], seconds)[0]:
            return True
        try:
            data = os.read(self.master, 65536)
        except OSError:  # the other end is closed
            return False
        self.seen += data.decode(errors="replace")
        return bool(data)

    def expect(self, words: str, after: int = 0) -> int:
        """Wait until the words are printed, at `after` or later; where they end."""
        tries = self._tries()
        while (found := self.seen.find(words, after)) < 0:
            assert next(tries, False) and self.read(), f"{words!r} is not printed: {self.seen[-3000:]!r}"
        return found + len(words)

    def _tries(self) -> Iterator[bool]:
        """True again and again, for as long as is waited for anything."""
        end = time.monotonic() + SOON
        while time.monotonic() < end:
            yield True

    def send(self, *keys: str) -> None:
        """Type keys, by name or as text."""
        for key in keys:
            os.write(self.master, KEYS.get(key, key).encode())

    def end(self) -> int:
        """The exit code, once all that it prints is read."""
        tries = self._tries()
        while self.read() and self.process.poll() is None:
            assert next(tries, False), f"it does not end: {self.seen[-3000:]!r}"
        while self.read(0.05) and select.select([self.master], [], [], 0)[0]:
            pass
        return self.process.wait(SOON)

    def screen(self) -> list[str]:
        """The lines that a terminal shows after all that was printed, scrolled out or not."""
        return screen(self.seen)


def screen(text: str) -> list[str]:
    """What of a terminal's control sequences moves or clears is followed; colours are left out."""
    lines, row, column = [""], 0, 0
    for step in STEP.finditer(text):
        word, number, kind = step[0], int(re.sub(r"\D", "", step[1] or "") or 0), step[2]
        if word == "\r":
            column = 0
        elif word == "\n":
            row += 1
            lines += [""] * (row + 1 - len(lines))
        elif word == "\x08":
            column = max(0, column - 1)
        elif kind == "A":
            row = max(0, row - max(1, number))
        elif kind == "D":
            column = max(0, column - max(1, number))
        elif kind == "C":
            column += max(1, number)
        elif kind == "K":
            lines[row] = "" if number == 2 else lines[row][:column]
        elif kind == "J":
            lines[row] = lines[row][:column]
            del lines[row + 1:]
        elif not word.startswith("\x1b"):
            lines[row] = lines[row].ljust(column)[:column] + word + lines[row][column + len(word):]
            column += len(word)
    return [line.rstrip() for line in lines]
