"""A server whose model says what a test wrote down, for unmodified clients: they see nothing but a socket."""
from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec

from .checkpoints import as_gguf, tiny_llama_metadata, tiny_weights, write_gguf
from .fake_client import make_app
from .live import listening
from .serving import Serving

KEY = "sekret"
CITY = '{"city": "Oslo"}'
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>hm</think>\n\nso be it"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"],
          "additionalProperties": False}
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a city.", "parameters": SCHEMA}}


class Script:
    """What the model says next, whatever it was asked; a test that asks for more than was written fails."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.prompts: list[str] = []

    def get(self, prompt: str, _: str) -> str:
        self.prompts.append(prompt)
        return self.lines.pop(0) if self.lines else "(nothing more was written)"


def greedy(plan: Any) -> Any:
    """A fake client's `_plan` for clients that do not say a temperature."""
    def planned(submit: Any, prompt: str) -> Any:
        return plan(msgspec.structs.replace(submit, params=msgspec.structs.replace(submit.params, temperature=0.0)),
                    prompt)
    return planned


@contextmanager
def talking(context: int = 16384) -> Iterator[SimpleNamespace]:
    """`.url`, `.says(text, ...)` for the next answers, `.script.prompts` that they were asked with, `.client`."""
    made = make_app(server={"api_key": KEY}, model={"reasoning_parser": "think", "tool_parser": "hermes"})
    made.client.info["max_model_len"] = context
    script = made.client.texts = Script()
    made.client._plan = greedy(made.client._plan)

    def says(*lines: str) -> None:
        script.lines, script.prompts = list(lines), []

    with listening(made.app) as url:
        yield SimpleNamespace(url=url, says=says, script=script, client=made.client)


@contextmanager
def whole_server(folder: Path, context: int = 16384) -> Iterator[str]:
    """The address of a real server with its engine, on the platform that computes nothing: its model says anything,
    but where a grammar holds it. `KEY` may do everything."""
    metadata = tiny_llama_metadata() | {"llama.context_length": context}
    model = write_gguf(folder / "tiny.gguf", metadata, as_gguf(tiny_weights(0)))
    with Serving(str(model), "--admin-api-key", KEY, temporary=folder, delay_ms=0) as server:
        reader = threading.Thread(target=server.process.stderr.read)  # a full pipe would hold it up
        reader.start()
        yield "http://" + server.address
        server.process.kill()
        reader.join()
