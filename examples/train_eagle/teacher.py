"""What the model says, and its hidden states over it, in files of some conversations each."""
from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from isthmus.core.api import Engine
from isthmus.core.config import Config, ModelSettings, PlatformSettings
from isthmus.core.embedding import headless
from isthmus.core.plan import Batch, Sampling
from isthmus.core.platform import StateSpec
from isthmus.core.startup import load
from questions import questions

GROUP, PAGE = 16, 16


def write_texts(folder: Path, model: str | None, groups: int, length: int, go_on: Callable[[int], bool],
                taps: tuple[int, ...] = ()) -> None:
    """Files `text-N.npz` for N below `groups` that are not there yet: tokens int32, hidden states float16, the inputs
    of the layers `taps` side by side, and of each conversation its length and where its answer starts. go_on(number of
    files there) is asked before each."""
    left = [n for n in range(groups) if not (folder / f"text-{n}.npz").is_file()]
    if not left or not go_on(groups - len(left)):
        return
    asked = questions(0)
    with Engine(model, max_running_requests=GROUP, max_model_len=1024) as engine, Teacher(model) as teacher:
        for number in left:
            if not go_on(len(list(folder.glob("text-*.npz")))):
                return
            # Later rounds ask the same again and draw other answers.
            chosen = [asked[(number * GROUP + i) % len(asked)] for i in range(GROUP)]
            prompts = [engine.text.template.encode([{"role": "user", "content": text}]) for text in chosen]
            answers = engine.generate(prompts, max_tokens=length, temperature=0.6, seed=number)
            texts = [np.concatenate([prompt, answer.tokens]).astype(np.int32)
                     for prompt, answer in zip(prompts, answers, strict=True)]
            hidden = [teacher.hidden(text) for text in texts]
            tapped = {"taps": np.concatenate([teacher.tapped(text, taps) for text in texts])} if taps else {}
            part = folder / f"part-{number}.npz"
            np.savez(part, tokens=np.concatenate(texts), hidden=np.concatenate(hidden),
                     lengths=[len(text) for text in texts], answers=[len(prompt) for prompt in prompts], **tapped)
            part.rename(folder / f"text-{number}.npz")


class Teacher:
    """The model once more, for what goes into its head."""

    def __init__(self, model: str | None):
        self._loaded: Any = load(Config(model=ModelSettings(model), platform=PlatformSettings("cpu")))
        self._platform, loaded = self._loaded.platform, self._loaded.model
        spec = StateSpec(loaded.state_layers, self._loaded.sizes.state.dtype, PAGE, 2)
        self._state = self._platform.alloc(spec, 1024 // PAGE + 1)
        self._step = self._platform.compile(headless(loaded.forward), loaded.weights, None)
        self._taps: dict[int, Any] = {}

    def hidden(self, tokens: np.ndarray) -> np.ndarray:
        """float16 [T, hidden]."""
        return self._run(self._step, tokens)

    def tapped(self, tokens: np.ndarray, taps: tuple[int, ...]) -> np.ndarray:
        """The inputs of some layers, side by side: float16 [T, taps * hidden]."""
        loaded = self._loaded.model
        for tap in taps:
            if tap not in self._taps:
                self._taps[tap] = self._platform.compile(partial(_input_of, tap, loaded.hidden), loaded.weights, None)
        return np.concatenate([self._run(self._taps[tap], tokens) for tap in taps], 1)

    def _run(self, step: Any, tokens: np.ndarray) -> np.ndarray:
        count = len(tokens)
        places, zeros = np.arange(count, dtype=np.int32), np.zeros(count, np.int32)
        pages = np.arange(1, -(-count // PAGE) + 1, dtype=np.int32)[None]
        out, self._state = step(self._state, Batch(
            tokens, places, places + PAGE, zeros, zeros[:1] + 1, np.array([0, count], np.int32),
            np.array([count], np.int32), pages, places, zeros - 2, Sampling()))
        return out.collect().astype(np.float16)

    def __enter__(self) -> Teacher:
        return self

    def __exit__(self, *exception: object) -> None:
        self._platform.close()


def _input_of(tap: int, hidden: Callable[..., Any], ops: Any, weights: Any, batch: Batch) -> Any:
    seen = {tap: None}
    hidden(ops, weights, batch, seen)
    return seen[tap]
