"""Ctrl-C and SIGTERM at any moment: real processes, ended without a word, and nothing left of them."""
from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import psutil
import pytest

from .checkpoints import tiny_llama_gguf
from .effort import SOON, until

COST = 45  # seconds

# Whoever runs the tests in the background ignores SIGINT, and what it starts does so too. The entry point is there when
# it imports: a moment earlier a signal would end this program, not the command.
START = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
class Entry:
    def find_spec(self, name, *_):
        if name == "isthmus.core.cli.process":
            print("-", flush=True)
sys.meta_path.insert(0, Entry())
from isthmus.core.cli.main import main
sys.exit(main())
"""
MOMENTS = (0, 0.05, 0.12, 0.3, 0.7, 1.5)  # seconds after the entry point is there
NULL = ("--platform", "null")


class Command:
    """A command in a session of its own, from its entry point on. before: a folder of modules that win over others."""

    def __init__(self, *words: str, before="", **environment):
        self.process = subprocess.Popen(
            [sys.executable, "-c", START, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, text=True, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(before), **environment})
        assert self.process.stdout.readline() == "-\n"

    def members(self) -> list[psutil.Process]:
        """What lives in the session."""
        found = []
        for process in psutil.process_iter(["status"]):
            try:
                if os.getsid(process.pid) == self.process.pid and process.info["status"] != psutil.STATUS_ZOMBIE:
                    found.append(process)
            except OSError:  # it has ended
                pass
        return found

    def end(self, number: int, all: bool = True) -> tuple[int, str]:
        """Send a signal, to all of the session as a terminal does, or to the command alone: exit code, and what was
        said. Nothing may be left."""
        (os.killpg if all else os.kill)(self.process.pid, number)
        said = self.process.communicate(timeout=SOON)[1]
        until(lambda: not self.members())
        return self.process.returncode, said


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_llama_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


@pytest.fixture
def slow_installer(tmp_path):
    """A pip that never ends."""
    (tmp_path / "modules" / "pip").mkdir(parents=True)
    (tmp_path / "modules" / "pip" / "__init__.py").touch()
    (tmp_path / "modules" / "pip" / "__main__.py").write_text("import time; time.sleep(10000)")
    return tmp_path / "modules"


@pytest.mark.parametrize("all", [True, False], ids=["group", "process"])
@pytest.mark.parametrize("words", [
    ["models"], ["pull"], ["doctor"], ["explain", *NULL], ["generate", "hello", *NULL], ["chat", *NULL],
    ["serve", *NULL, "--port", "0"], ["serve", *NULL, "--port", "0", "--in-process"]], ids=" ".join)
def test_ctrl_c_ends_every_command_at_once_and_without_a_word(words, all, tiny):
    model = [] if words[0] in ("models", "pull", "doctor") else ["--model", tiny]
    for moment in MOMENTS[not all::2]:  # each half of them is for one way
        command = Command(*words, *model)
        time.sleep(moment)
        code, said = command.end(signal.SIGINT, all)
        if words[0] == "serve":
            assert code == (0 if "is ready after" in said else 130), said
        assert code in (130, 0, -signal.SIGINT)  # the last two: it was done, and about to leave
        assert all_are_ours(said), (moment, said)


def all_are_ours(said: str) -> bool:
    """No traceback, no panic: only lines that the command has for people."""
    return not any(word in said for word in ("Traceback", "Interrupt", "ignored", "Error", "panic", "Fatal"))


@pytest.mark.parametrize("words", [["pull", "gemma3-270m"], ["chat", "gemma3-270m", *NULL],
                                   ["serve", "gemma3-270m", *NULL, "--port", "0"]], ids=" ".join)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_a_download_ends_with_its_command(words, number, slow_installer, tmp_path):
    command = Command(*words, before=slow_installer, ISTHMUS_CACHE=str(tmp_path / "cache"))
    until(lambda: len(command.members()) > 1)
    code, said = command.end(number, all=False)
    assert code in (130, 0, -number) and all_are_ours(said), said


@pytest.mark.parametrize("words", [["chat"], ["generate", "hello"]], ids=" ".join)
def test_ctrl_c_does_not_wait_for_a_server_that_is_silent(words):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        command = Command(*words, "--url", f"127.0.0.1:{silent.getsockname()[1]}")
        silent.accept()
        code, said = command.end(signal.SIGINT)
        assert code == 130 and all_are_ours(said), said


@pytest.mark.parametrize("words", [[], ["--in-process"]], ids=["processes", "in-process"])
@pytest.mark.parametrize("moment", MOMENTS[1::2])
def test_a_server_that_loads_is_stopped_in_order(words, moment, tiny):
    command = Command("serve", tiny, *NULL, "--port", "0", *words)
    time.sleep(moment)
    code, said = command.end(signal.SIGTERM)
    assert code in (0, -signal.SIGTERM) and all_are_ours(said), said


def test_ctrl_c_in_a_callback_where_python_loses_it_comes_again():
    script = START.replace("from isthmus.core.cli.main import main\nsys.exit(main())", """
import os, time, weakref
from isthmus.core.cli.process import run_process
def run(words):
    class Gone: pass
    gone = Gone()
    seen = weakref.ref(gone, lambda _: os.kill(os.getpid(), signal.SIGINT))
    del gone
    time.sleep(60)
print(run_process(run))""")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=SOON)
    assert done.stdout.split()[-1] == "130" and all_are_ours(done.stderr), done
