"""What the model says, in files of some conversations each, and what goes on inside it meanwhile."""
from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from head import turned
from isthmus.core.api import Engine
from isthmus.platforms.expand import expand
from questions import questions

GROUP = 128
TOGETHER = 8192  # tokens that go through the model at once


def write_texts(folder: Path, model: str | None, groups: int, length: int, go_on: Callable[[int], bool]) -> None:
    """Files `text-N.npz` for N below `groups` that are not there yet: tokens int32, the length of each conversation
    and where its answer starts. go_on(number of files there) is asked before each."""
    left = [n for n in range(groups) if not (folder / f"text-{n}.npz").is_file()]
    if not left or not go_on(groups - len(left)):
        return
    asked = questions(0)
    with Engine(model, max_running_requests=64, max_model_len=1024) as engine:
        for number in left:
            if not go_on(len(list(folder.glob("text-*.npz")))):
                return
            chosen = [asked[(number * GROUP + i) % len(asked)] for i in range(GROUP)]
            prompts = [engine.text.template.encode([{"role": "user", "content": text}]) for text in chosen]
            # Half of the files are what the model says if nothing is left to chance.
            answers = engine.generate(prompts, max_tokens=length, temperature=number % 2 * 0.8, seed=number)
            texts = [np.concatenate([prompt, answer.tokens]).astype(np.int32)
                     for prompt, answer in zip(prompts, answers, strict=True)]
            part = folder / f"part-{number}.npz"
            np.savez(part, tokens=np.concatenate(texts), lengths=[len(text) for text in texts],
                     answers=[len(prompt) for prompt in prompts])
            part.rename(folder / f"text-{number}.npz")


def write_states(folder: Path, trunk: Trunk, taps: tuple[int, ...], go_on: Callable[[int, int], bool]) -> None:
    """For each file of texts `states-N.npy`, bf16 as int16 [tokens, (taps + 1) * hidden]: the inputs of these layers
    and the hidden state, side by side. go_on(files done, files in all) is asked before each."""
    files = sorted(folder.glob("text-*.npz"), key=lambda path: (len(path.name), path.name))
    for done, path in enumerate(files):
        out = folder / path.name.replace("text", "states").replace("npz", "npy")
        if out.is_file():
            continue
        if not go_on(done, len(files)):
            return
        with np.load(path, allow_pickle=False) as part:
            tokens, lengths = part["tokens"], part["lengths"]
        starts = np.cumsum(lengths) - lengths
        states = np.zeros((len(tokens), (len(taps) + 1) * trunk.width), np.int16)
        order = np.argsort(lengths)
        for some in np.array_split(order, -(-len(tokens) // TOGETHER)):
            rows = np.zeros((len(some), lengths[some].max()), np.int64)
            for row, n in enumerate(some):
                rows[row, :lengths[n]] = tokens[starts[n]:starts[n] + lengths[n]]
            found = torch.cat(trunk(torch.from_numpy(rows), taps), -1).view(torch.int16).numpy()
            for row, n in enumerate(some):
                states[starts[n]:starts[n] + lengths[n]] = found[row, :lengths[n]]
        part = folder / "part.npy"
        np.save(part, states)
        part.rename(out)


class Trunk:
    """A model of the Llama kind in torch, without its head, in bf16."""

    def __init__(self, checkpoint: Any, words: dict):
        self.words, self.width = words, words["hidden_size"]
        self._weights = {name: torch.from_numpy(expand(checkpoint.tensor(name))).bfloat16()
                         for name in checkpoint.names if name != "lm_head.weight"}

    @torch.no_grad()
    def __call__(self, tokens: torch.Tensor, taps: tuple[int, ...]) -> list[torch.Tensor]:
        """Tokens [B, T]: the inputs of the layers `taps`, and behind the last norm, [B, T, hidden] each."""
        words, (batch, count) = self.words, tokens.shape
        size = self.width // words["num_attention_heads"]
        angles = torch.arange(count)[:, None] * words["rope_theta"] ** (-torch.arange(0, size, 2) / size)
        x, found = self._weights["model.embed_tokens.weight"][tokens], {}
        for i in range(words["layers"]):
            def linear(y: torch.Tensor, name: str, layer: int = i) -> torch.Tensor:
                return F.linear(y, self._weights[f"model.layers.{layer}.{name}_proj.weight"])
            found[i] = x
            y = self._norm(x, f"layers.{i}.input_layernorm")
            q, k, v = (linear(y, f"self_attn.{part}").view(batch, count, -1, size).transpose(1, 2) for part in "qkv")
            y = F.scaled_dot_product_attention(turned(q, angles), turned(k, angles), v, is_causal=True, enable_gqa=True)
            x = x + linear(y.transpose(1, 2).reshape(x.shape), "self_attn.o")
            y = self._norm(x, f"layers.{i}.post_attention_layernorm")
            x = x + linear(F.silu(linear(y, "mlp.gate")) * linear(y, "mlp.up"), "mlp.down")
        return [*(found[tap] for tap in taps), self._norm(x, "norm")]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x.float(), (self.width,), self._weights[f"model.{name}.weight"].float(),
                          self.words["rms_norm_eps"]).bfloat16()
