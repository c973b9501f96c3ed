"""The commands, as data: `main` imports only the module of the one that runs."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command: its module has `add_arguments(parser)` and `run(arguments, resolved) -> exit code`.

    groups: groups of settings that it takes as flags, in the order of its help.  words: what comes after its name.
    """

    name: str
    help: str
    groups: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    words: str = "[options]"

    @property
    def module(self) -> str:
        return f".{self.name}"


ENGINE = ("model", "platform", "cache", "scheduler")

COMMANDS = {c.name: c for c in (
    Command("serve", "answer OpenAI clients over HTTP", (*ENGINE, "server"), (
        "isthmus serve                          # a small model, the best platform found",
        "isthmus serve ./model.gguf --port 9000",
        "isthmus serve org/name --max-model-len 8192 --api-key secret"), "[MODEL] [options]"),
    Command("chat", "talk to a model in the terminal", ENGINE, (
        "isthmus chat", "isthmus chat ./model.gguf --system 'Be brief.'", "isthmus chat --url http://127.0.0.1:8000"),
            "[MODEL] [options]"),
    Command("generate", "print the answer to one prompt", ENGINE, (
        "isthmus generate 'Why is the sky blue?'", "isthmus generate --raw 'Once upon a time' --max-tokens 50",
        "cat question.txt | isthmus generate --json"), "[PROMPT] [options]"),
    Command("models", "list the models that are known and those on this machine", (), ("isthmus models --json",)),
    Command("pull", "download a model", (), ("isthmus pull gemma3-270m", "isthmus pull org/name --revision main"),
            "[MODEL] [options]"),
    Command("doctor", "say which platforms can run here, and why others cannot", ("platform",),
            ("isthmus doctor --json",)),
    Command("explain", "print every setting, who set it and what follows from it", (*ENGINE, "server"), (
        "isthmus explain --config server.yaml", "isthmus explain --platform cpu --json"), "[MODEL] [options]"),
    Command("version", "print the version"),
)}
