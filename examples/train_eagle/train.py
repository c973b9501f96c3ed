"""Train a small EAGLE head on what a model says itself, on a processor: `python train.py --out FOLDER [--eagle3]`.

Two phases, each of which goes on where it was when the command is given again: texts with the model's hidden states are
written, then the head learns to guess h(p) from the token at p and h(p - 1); one of EAGLE-3 (--eagle3) learns the
token after, from what three layers say. FOLDER/head is the head, for
`--speculative eagle,model=FOLDER/head`; it is written whenever there is a better one.
"""
from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from head import Head, Head3
from isthmus.core.weights.checkpoint import open_checkpoint
from isthmus.core.weights.sources import resolve_model
from isthmus.platforms.expand import expand
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from teacher import write_texts

BATCH, RATE, WARM = 8, 1e-3, 30
REGRESSION, NOISE = 0.2, 0.02     # weight of the distance to h beside the cross entropy; of the noise on what is given
VOCABULARY = 8192                 # tokens, the most frequent ones, over which the cross entropy is computed
SAVE_EVERY = 60.0                 # seconds


class Texts:
    """All conversations. One in 16 is held out."""

    def __init__(self, folder: Path):
        self.tokens, self.hidden, self.answers, self.taps = [], [], [], []
        for path in sorted(folder.glob("text-*.npz"), key=lambda path: (len(path.name), path.name)):
            with np.load(path, allow_pickle=False) as part:
                stops = np.cumsum(part["lengths"])[:-1]
                self.tokens += np.split(part["tokens"], stops)
                self.hidden += np.split(part["hidden"], stops)
                self.answers += part["answers"].tolist()
                self.taps += np.split(part["taps"], stops) if "taps" in part else []
        numbers = np.arange(len(self.tokens))
        self.held, self.used = numbers[numbers % 16 == 15], numbers[numbers % 16 != 15]
        spoken = np.concatenate([tokens[start:] for tokens, start in zip(self.tokens, self.answers, strict=True)])
        counts = np.bincount(spoken)
        self.frequent = np.sort(np.argsort(-counts, kind="stable")[:min(VOCABULARY, np.count_nonzero(counts))])

    def taps_of(self, numbers: np.ndarray) -> torch.Tensor:
        """What three layers say: [B, T, 3 * D]."""
        found = np.zeros((len(numbers), max(len(self.tokens[n]) for n in numbers), self.taps[0].shape[1]), np.float32)
        for row, n in enumerate(numbers):
            found[row, :len(self.taps[n])] = self.taps[n]
        return torch.from_numpy(found)

    def batch(self, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens [B, T], hidden [B, T, D], and where h is to be guessed, bool [B, T]: where the next token is said."""
        width = max(len(self.tokens[n]) for n in numbers)
        tokens = np.zeros((len(numbers), width), np.int64)
        hidden = np.zeros((len(numbers), width, self.hidden[0].shape[1]), np.float32)
        wanted = np.zeros((len(numbers), width), bool)
        for row, n in enumerate(numbers):
            count = len(self.tokens[n])
            tokens[row, :count], hidden[row, :count] = self.tokens[n], self.hidden[n]
            wanted[row, max(1, self.answers[n] - 1):count - 1] = True
        return torch.from_numpy(tokens), torch.from_numpy(hidden), torch.from_numpy(wanted)


class Training:
    """The head, its optimizer, and how far it is; `save` and `load` keep all of it."""

    def __init__(self, out: Path, words: dict, embed: torch.Tensor, matrix: torch.Tensor, texts: Texts):
        torch.manual_seed(0)
        self.out, self.words, self.embed, self.matrix, self.texts = out, words, embed, matrix, texts
        self.frequent = torch.from_numpy(texts.frequent)
        self.head = self._new()
        self.optimizer = torch.optim.AdamW(self.head.parameters(), RATE, betas=(0.9, 0.95), weight_decay=0.01)
        self.step, self.seconds, self.best = 0, 0.0, math.inf

    def _new(self) -> torch.nn.Module:
        return Head(self.words)

    def loss(self, numbers: np.ndarray, noise: float = 0.0) -> torch.Tensor:
        """The mean over the places that are wanted."""
        guesses, h = self._guessed(numbers, noise)
        few = self.matrix[self.frequent]
        with torch.no_grad():
            said = (h @ few.T).softmax(-1)
        return F.cross_entropy(guesses @ few.T, said) + REGRESSION * F.smooth_l1_loss(guesses, h)

    @torch.no_grad()
    def right(self, numbers: np.ndarray) -> float:
        """In which share of places head and model agree about the likeliest token of all."""
        guesses, h = self._guessed(numbers)
        return ((guesses @ self.matrix.T).argmax(-1) == (h @ self.matrix.T).argmax(-1)).float().mean().item()

    def _guessed(self, numbers: np.ndarray, noise: float = 0.0) -> tuple[torch.Tensor, torch.Tensor]:
        """Guesses of h, and h, [places, D]."""
        tokens, hidden, wanted = self.texts.batch(numbers)
        before = torch.cat([hidden[:, :1], hidden[:, :-1]], 1)
        if noise:
            before = before * (1 + noise * torch.randn_like(before))
        return self.head(self.embed[tokens], before)[wanted], hidden[wanted]

    def learn(self, numbers: np.ndarray, progress: float) -> float:
        """One step; progress from 0 to 1 takes the rate down."""
        rate = RATE * min(1.0, (self.step + 1) / WARM) * max(0.02, 1 - progress)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        loss = self.loss(numbers, NOISE)
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        self.optimizer.step()
        self.step += 1
        return loss.item()

    def save(self) -> tuple[float, float]:
        """Write how far it is, and the head if it is the best so far; -> loss and agreement on what is held out."""
        with torch.no_grad():
            held = [self.loss(part).item() for part in _parts(self.texts.held)]
        loss, right = sum(held) / len(held), self.right(self.texts.held[:BATCH])
        tensors = {f"head.{name}": value for name, value in self.head.state_dict().items()}
        for name, value in self.head.named_parameters():
            tensors |= {f"{key}.{name}": self.optimizer.state[value][key] for key in ("exp_avg", "exp_avg_sq")}
        if loss < self.best:
            self.best = loss
            self._publish()
        _write(self.out / "state.safetensors", tensors, {
            "step": str(self.step), "seconds": str(self.seconds), "best": str(self.best)})
        return loss, right

    def _publish(self) -> None:
        folder = self.out / "head"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.words, indent=1))
        _write(folder / "model.safetensors", {
            name: value.bfloat16() for name, value in self.head.state_dict().items()} | self._more())

    def _more(self) -> dict[str, torch.Tensor]:
        """What a checkpoint has beside the weights."""
        return {}

    def load(self) -> None:
        """Go on from what was saved, if anything was."""
        path = self.out / "state.safetensors"
        if not path.is_file():
            return
        with safe_open(path, "pt") as file:
            told = file.metadata()
        tensors = load_file(path)
        self.head.load_state_dict({name.removeprefix("head."): value for name, value in tensors.items()
                                   if name.startswith("head.")})
        self.step, self.seconds, self.best = int(told["step"]), float(told["seconds"]), float(told["best"])
        for name, value in self.head.named_parameters():
            self.optimizer.state[value] = {"step": torch.tensor(float(self.step)), **{
                key: tensors[f"{key}.{name}"] for key in ("exp_avg", "exp_avg_sq")}}


class Training3(Training):
    """Of a head of EAGLE-3, whose vocabulary are the tokens that the model says most."""

    def _new(self) -> torch.nn.Module:
        if not self.texts.taps:
            raise SystemExit(f"{self.out} has texts without what three layers say of them: name another folder")
        self.words |= {"draft_vocab_size": len(self.frequent)}
        head = Head3(self.words)
        head.lm_head.weight.data.copy_(self.matrix[self.frequent])
        return head

    def loss(self, numbers: np.ndarray, noise: float = 0.0) -> torch.Tensor:
        """The mean over the places that are wanted, behind what the model says and behind what the head says itself."""
        first, second, said = self._both(numbers, noise)
        return F.cross_entropy(first, said) + F.cross_entropy(second, said)

    @torch.no_grad()
    def right(self, numbers: np.ndarray) -> float:
        first, _, said = self._both(numbers)
        return (first.argmax(-1) == said.argmax(-1)).float().mean().item()

    def _both(self, numbers: np.ndarray, noise: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Logits of a first and a second drafted token, and what the model says there, [places, vocabulary]."""
        tokens, hidden, wanted = self.texts.batch(numbers)
        given, embedded = self.head.fc(self.texts.taps_of(numbers)), self.embed[tokens]
        if noise:
            given = given * (1 + noise * torch.randn_like(given))
        first = self.head(embedded, torch.cat([given[:, :1], given[:, :-1]], 1))
        second = self.head(embedded, torch.cat([first[:, :1], first[:, :-1]], 1))
        with torch.no_grad():
            said = (hidden[wanted] @ self.matrix[self.frequent].T).softmax(-1)
        return self.head.logits(first[wanted]), self.head.logits(second[wanted]), said

    def _more(self) -> dict[str, torch.Tensor]:
        known = torch.zeros(len(self.matrix), dtype=torch.bool)
        known[self.frequent] = True
        return {"d2t": self.frequent - torch.arange(len(self.frequent)), "t2d": known}


def _write(path: Path, tensors: dict[str, torch.Tensor], told: dict[str, str] | None = None) -> None:
    part = path.with_suffix(".part")
    save_file({name: value.contiguous() for name, value in tensors.items()}, part, told or {"format": "pt"})
    part.rename(path)


def _parts(numbers: np.ndarray) -> list[np.ndarray]:
    return [numbers[i:i + BATCH] for i in range(0, len(numbers), BATCH)]


def _rounds(used: np.ndarray, step: int) -> Iterator[np.ndarray]:
    """Batches from a step on, round after round in another order."""
    each = -(-len(used) // BATCH)
    while True:
        order = np.random.default_rng(step // each).permutation(used)
        for part in _parts(order)[step % each:]:
            yield part
            step += 1


def bar(share: float, words: str) -> None:
    """One line that is written over."""
    full = int(30 * min(1.0, share))
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"[{'#' * full}{'.' * (30 - full)}] {words:<80}", end=end, file=sys.stderr, flush=True)


def model_parts(model: str | None) -> tuple[dict, torch.Tensor, torch.Tensor]:
    """Words for the head's configuration, the model's embedding and the matrix of its head, float32."""
    with open_checkpoint(resolve_model(model)) as checkpoint:
        words = {key: value for key, value in checkpoint.config.items() if isinstance(value, int | float | str | bool)}
        if words.get("model_type") != "llama":
            raise SystemExit(f"this example trains heads for models of the Llama kind, not {words.get('model_type')!r}")
        embed = torch.from_numpy(expand(checkpoint.tensor("model.embed_tokens.weight")))
        tied = "lm_head.weight" not in checkpoint.names
        matrix = embed if tied else torch.from_numpy(expand(checkpoint.tensor("lm_head.weight")))
        words |= {"layers": words["num_hidden_layers"], "num_hidden_layers": 1}
        words |= {"rope_theta": float(checkpoint.config.get("rope_theta", 10000.0))}
    return words, embed, matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="the default model unless given")
    parser.add_argument("--eagle3", action="store_true", help="a head of EAGLE-3")
    parser.add_argument("--groups", type=int, default=72, help="of 16 conversations each (%(default)s)")
    parser.add_argument("--length", type=int, default=160, help="tokens of an answer at most (%(default)s)")
    parser.add_argument("--text-minutes", type=float, default=15, help="for texts, at most (%(default)s)")
    parser.add_argument("--minutes", type=float, default=35, help="of training in all, also over several runs")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def go_on(done: int) -> bool:
        spent = (time.monotonic() - began) / 60
        bar(done / given.groups, f"texts: {done} of {given.groups} files, {spent:.1f} of {given.text_minutes:g} min")
        return spent < given.text_minutes or not done
    parts = model_parts(given.model)
    layers = parts[0].pop("layers")
    write_texts(given.out, given.model, given.groups, given.length, go_on,
                (2, layers // 2, layers - 3) if given.eagle3 else ())
    training = (Training3 if given.eagle3 else Training)(given.out, *parts, Texts(given.out))
    training.load()
    learn(training, given.minutes)


def learn(training: Training, minutes: float) -> None:
    """Until that much time was spent, or Ctrl-C; what was learned is saved either way."""
    budget, saved, told = 60 * minutes, time.monotonic(), "not yet known"
    mean, recent = 0.0, saved
    try:
        for numbers in _rounds(training.texts.used, training.step):
            if training.seconds >= budget:
                break
            loss = training.learn(numbers, training.seconds / budget)
            now = time.monotonic()
            training.seconds, recent = training.seconds + now - recent, now
            mean = loss if not mean else 0.95 * mean + 0.05 * loss
            if now - saved > SAVE_EVERY:
                told = "loss {:.3f}, {:.0%} right".format(*training.save())
                saved = recent = time.monotonic()
            bar(training.seconds / budget, f"step {training.step}: loss {mean:.3f}; held out: {told}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
    if training.step:
        loss, right = training.save()
        print(f"\nstep {training.step}, {training.seconds / 60:.1f} min: loss {loss:.3f} and {right:.0%} right on what "
              f"was held out; the best head is {training.out / 'head'}")


if __name__ == "__main__":
    main()
