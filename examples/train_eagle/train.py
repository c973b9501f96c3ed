"""Train a small EAGLE head on what a model says itself, on a processor: `python train.py --out FOLDER [--eagle3]`.

Three phases, each of which goes on where it was when the command is given again: the model writes texts, what goes on
inside it over them is kept, and the head learns from it. A head of EAGLE-1 learns the model's distribution of the next
token from the token at p and h(p - 1), and to guess h(p); one of EAGLE-3 (--eagle3) the same distribution from what
three layers say. Both learn it behind what they said themselves too, as they are used. FOLDER/head is the head, for
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
from head import Head, Head3, later
from isthmus.core.speculation.shipped import TRAINED_FOR, fingerprint
from isthmus.core.weights.checkpoint import open_checkpoint
from isthmus.core.weights.sources import resolve_model
from isthmus.platforms.expand import expand
from loss import cross_entropy
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from teacher import Trunk, write_states, write_texts

BATCH, WARM = 8, 30               # conversations of a step; steps until the rate is whole
RATE, SMALL_RATE = 3e-3, 1e-3     # of the layer's matrices (Muon), of all else (AdamW)
REGRESSION = 0.2                  # EAGLE-1: weight of the distance to h beside the cross entropy
PASSES, DECAY = 3, 0.8            # drafted tokens that are learned one behind the other, and how much less each counts
ALONE = 0.4                       # share of the time in which the first of them is learned alone, which is faster
VOCABULARY = 8192                 # tokens, the most frequent ones, that the head learns to say
HELD = 64                         # conversations at the end that are held out, at most one in eight
SAVE_EVERY = 120.0                # seconds


class Texts:
    """All conversations that have states."""

    def __init__(self, folder: Path):
        self.tokens, self.states, self.answers = [], [], []
        for path in sorted(folder.glob("states-*.npy"), key=lambda path: (len(path.name), path.name)):
            said = folder / path.name.replace("states", "text").replace("npy", "npz")
            with np.load(said, allow_pickle=False) as part:
                stops = np.cumsum(part["lengths"])[:-1]
                self.tokens += np.split(part["tokens"], stops)
                self.answers += part["answers"].tolist()
                self.states += np.split(np.load(path, mmap_mode="r"), stops)
        self.lengths = np.array([len(tokens) for tokens in self.tokens])
        held = min(HELD, len(self.tokens) // 8)
        # The first are of files that were drawn both ways, and are asked again by no other.
        self.held, self.used = np.arange(held), np.arange(held, len(self.tokens))
        spoken = np.concatenate([tokens[start:] for tokens, start in zip(self.tokens, self.answers, strict=True)])
        counts = np.bincount(spoken)
        self.frequent = np.sort(np.argsort(-counts, kind="stable")[:min(VOCABULARY, np.count_nonzero(counts))])

    def batch(self, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """tokens [B, T], states [B, T, .], and where the next token is said: bool [B, T]."""
        width = self.lengths[numbers].max()
        tokens = np.zeros((len(numbers), width), np.int64)
        states = np.zeros((len(numbers), width, self.states[0].shape[1]), np.int16)
        wanted = np.zeros((len(numbers), width), bool)
        for row, n in enumerate(numbers):
            count = self.lengths[n]
            tokens[row, :count], states[row, :count] = self.tokens[n], self.states[n]
            wanted[row, max(1, self.answers[n] - 1):count - 1] = True
        return torch.from_numpy(tokens), torch.from_numpy(states).view(torch.bfloat16), torch.from_numpy(wanted)

    def batches(self, step: int) -> Iterator[np.ndarray]:
        """Conversations of similar length from a step on, round after round in another order."""
        each = -(-len(self.used) // BATCH)
        while True:
            draw = np.random.default_rng(step // each)
            order = self.used[np.argsort(self.lengths[self.used] + draw.uniform(0, 16, len(self.used)))]
            for n in draw.permutation(each)[step % each:]:
                yield order[n * BATCH:(n + 1) * BATCH]
                step += 1


class Training:
    """The head, its optimizers, and how far it is; `save` and `load` keep all of it.

    embed, norm, matrix: the model's embedding [vocabulary, hidden], the weights of its last norm [hidden], and its
    head's matrix [vocabulary, hidden], bf16."""

    def __init__(self, out: Path, words: dict, embed: torch.Tensor, norm: torch.Tensor, matrix: torch.Tensor,
                 texts: Texts):
        torch.manual_seed(0)
        self.out, self.words, self.embed, self.norm, self.matrix, self.texts = out, words, embed, norm, matrix, texts
        self.frequent = torch.from_numpy(texts.frequent)
        self.few = matrix[self.frequent]
        self.head = self._new()
        wide = {name: value for name, value in self.head.named_parameters()
                if value.ndim == 2 and not name.startswith("lm_head")}
        rest = [value for name, value in self.head.named_parameters() if name not in wide]
        self.optimizers = [
            torch.optim.Muon(wide.values(), RATE, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
            *([torch.optim.AdamW(rest, SMALL_RATE, betas=(0.9, 0.95), weight_decay=0.0)] if rest else [])]
        self.rates = [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups]
        self.step, self.seconds, self.best = 0, 0.0, -math.inf

    def _new(self) -> torch.nn.Module:
        self.words |= {"draft_vocab_size": len(self.frequent)}
        head = Head(self.words)
        head.lm_head.weight.data.copy_(self.few)
        return head

    def _passes(self, numbers: np.ndarray, passes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What the head's matrix is multiplied with, drafted token after drafted token [passes, places, hidden]; the
        model's h there [places, hidden]; and where that is [B, T]."""
        tokens, h, wanted = self.texts.batch(numbers)
        h = h[..., -self.embed.shape[1]:]
        before, kept, found = later(h), [], []
        for _ in range(passes):
            guesses = self.head(self.embed[tokens], before, kept)
            found.append(guesses[wanted])
            before = later(guesses)
        return torch.stack(found), h[wanted], wanted

    def loss(self, numbers: np.ndarray, passes: int = PASSES) -> torch.Tensor:
        """The mean over the places that are wanted."""
        guesses, h, _ = self._passes(numbers, passes)
        weights = DECAY ** torch.arange(passes)
        return cross_entropy(guesses, self._matrix(), h, self.few, weights) + self._distance(guesses, h)

    def _matrix(self) -> torch.Tensor:
        return self.head.lm_head.weight

    def _distance(self, guesses: torch.Tensor, h: torch.Tensor) -> torch.Tensor | float:
        return REGRESSION * F.smooth_l1_loss(guesses.float(), h.float().expand(guesses.shape))

    @torch.no_grad()
    def accepted(self) -> list[float]:
        """Of what is held out: in which share of places the first, the second, ... drafted token is the model's
        likeliest, if those before are, and last the tokens that a step with PASSES drafted tokens would give."""
        counts = np.zeros((PASSES, 2))
        for part in np.array_split(self.texts.held, -(-len(self.texts.held) // BATCH)):
            with torch.autocast("cpu", torch.bfloat16):
                guesses, h, wanted = self._passes(part, PASSES)
                model = (h @ self.matrix.T).argmax(-1)
                right = torch.zeros(PASSES, *wanted.shape, dtype=torch.bool)
                right[:, wanted] = torch.stack([self.frequent[(x @ self._matrix().T).argmax(-1)] == model
                                                for x in guesses])
            alive = wanted
            for i in range(PASSES):
                # Pass number i at a place drafts behind i tokens that were right at the places before.
                counts[i] += (alive & right[i]).sum(), alive.sum()
                alive = later((alive & right[i])[..., None])[..., 0] & wanted
                alive[:, 0] = False
        shares = counts[:, 0] / counts[:, 1].clip(1)
        return [*shares.tolist(), 1 + np.cumprod(shares).sum()]

    def learn(self, numbers: np.ndarray, progress: float) -> float:
        """One step; progress from 0 to 1 takes the rate down."""
        share = min(1.0, (self.step + 1) / WARM) * (0.02 + 0.98 * (0.5 + 0.5 * math.cos(math.pi * min(1.0, progress))))
        groups = [group for optimizer in self.optimizers for group in optimizer.param_groups]
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate * share
        with torch.autocast("cpu", torch.bfloat16):
            loss = self.loss(numbers, 1 if progress < ALONE else PASSES)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        self.step += 1
        return loss.item()

    def save(self) -> list[float]:
        """Write how far it is, and the head if it is the best so far; -> what `accepted` says."""
        accepted = self.accepted()
        tensors = {f"head.{name}": value for name, value in self.head.state_dict().items()}
        for name, value in self.head.named_parameters():
            tensors |= {f"{key}.{name}": kept for key, kept in self._state(value).items()}
        if accepted[-1] > self.best:
            self.best = accepted[-1]
            self._publish()
        _write(self.out / "state.safetensors", tensors, {
            "step": str(self.step), "seconds": str(self.seconds), "best": str(self.best)})
        return accepted

    def _state(self, value: torch.nn.Parameter) -> dict:
        return next(optimizer.state[value] for optimizer in self.optimizers if value in optimizer.state)

    def _publish(self) -> None:
        folder = self.out / "head"
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.words, indent=1))
        _write(folder / "model.safetensors", {
            name: value.bfloat16() for name, value in self.head.state_dict().items()} | self._more())

    def _more(self) -> dict[str, torch.Tensor]:
        """What a checkpoint has beside the weights: which tokens its own are."""
        known = torch.zeros(len(self.matrix), dtype=torch.bool)
        known[self.frequent] = True
        return {"d2t": self.frequent - torch.arange(len(self.frequent)), "t2d": known}

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
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                for value in group["params"]:
                    name = next(name for name, own in self.head.named_parameters() if own is value)
                    optimizer.state[value] = {key.split(".")[0]: kept for key, kept in tensors.items()
                                              if key.endswith(f".{name}") and not key.startswith("head.")
                                              and key.split(".", 1)[1] == name}


class Training3(Training):
    """Of a head of EAGLE-3, that reads what three layers say."""

    def _new(self) -> torch.nn.Module:
        self.words |= {"draft_vocab_size": len(self.frequent)}
        head, width = Head3(self.words), self.words["hidden_size"]
        head.lm_head.weight.data.copy_(self.few)
        head.norm.weight.data.copy_(self.norm)
        # Some channels of the layers are a thousand times as large as others.
        said = self.texts.batch(self.texts.used[:BATCH])[1][..., :3 * width].float()
        head.fc.weight.data.div_(said.pow(2).mean((0, 1)).sqrt() + 1e-3)
        return head

    def _passes(self, numbers: np.ndarray, passes: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        tokens, states, wanted = self.texts.batch(numbers)
        width = self.embed.shape[1]
        before, kept, found = later(self.head.fc(states[..., :3 * width])), [], []
        for _ in range(passes):
            x = self.head(self.embed[tokens], before, kept)
            found.append(self.head.norm(x[wanted]))
            before = later(x)
        return torch.stack(found), states[..., 3 * width:][wanted], wanted

    def _matrix(self) -> torch.Tensor:
        return self.head.lm_head.weight

    def _distance(self, guesses: torch.Tensor, h: torch.Tensor) -> float:
        return 0.0


def _write(path: Path, tensors: dict[str, torch.Tensor], told: dict[str, str] | None = None) -> None:
    part = path.with_suffix(".part")
    save_file({name: value.contiguous() for name, value in tensors.items()}, part, told or {"format": "pt"})
    part.rename(path)


def bar(share: float, words: str) -> None:
    """One line that is written over."""
    full = int(30 * min(1.0, share))
    end = "\r" if sys.stderr.isatty() else "\n"
    print(f"[{'#' * full}{'.' * (30 - full)}] {words:<80}", end=end, file=sys.stderr, flush=True)


def model_parts(checkpoint: object) -> tuple[dict, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Words for the head's configuration, the model's embedding, last norm and matrix of its head, bf16."""
    words = {key: value for key, value in checkpoint.config.items() if isinstance(value, int | float | str | bool)}
    if words.get("model_type") != "llama" or checkpoint.config.get("rope_scaling"):
        raise SystemExit(f"this example trains heads for models of the Llama kind without scaled positions, not "
                         f"{words.get('model_type')!r}")
    tied = "lm_head.weight" not in checkpoint.names
    embed, norm, matrix = (
        torch.from_numpy(expand(checkpoint.tensor(f"{name}.weight"))).bfloat16()
        for name in ("model.embed_tokens", "model.norm", "model.embed_tokens" if tied else "lm_head"))
    words |= {"layers": words["num_hidden_layers"], "num_hidden_layers": 1}
    words |= {"rope_theta": float(checkpoint.config.get("rope_theta", 10000.0))}
    words |= {TRAINED_FOR: {"model": checkpoint.path.stem, "norm": fingerprint(checkpoint)}}
    return words, embed, norm, matrix


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", help="the default model unless given")
    parser.add_argument("--eagle3", action="store_true", help="a head of EAGLE-3")
    parser.add_argument("--taps", type=int, nargs=3, help="EAGLE-3: layers whose inputs it reads")
    parser.add_argument("--groups", type=int, default=48, help="of 128 conversations each (%(default)s)")
    parser.add_argument("--length", type=int, default=256, help="tokens of an answer at most (%(default)s)")
    parser.add_argument("--text-minutes", type=float, default=20, help="for texts, at most (%(default)s)")
    parser.add_argument("--minutes", type=float, default=35, help="of training in all, also over several runs")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()

    def go_on(done: int) -> bool:
        spent = (time.monotonic() - began) / 60
        bar(done / given.groups, f"texts: {done} of {given.groups} files, {spent:.1f} of {given.text_minutes:g} min")
        return spent < given.text_minutes or not done

    def go_through(done: int, total: int) -> bool:
        bar(done / total, f"states: {done} of {total} files")
        return True
    write_texts(given.out, given.model, given.groups, given.length, go_on)
    with open_checkpoint(resolve_model(given.model)) as checkpoint:
        words, *parts = model_parts(checkpoint)
        layers = words["layers"]
        taps = tuple(given.taps or (2, layers // 2, layers - 3))
        write_states(given.out, Trunk(checkpoint, words), taps, go_through)
    del words["layers"]
    if given.eagle3:
        words["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(taps)}
    training = (Training3 if given.eagle3 else Training)(given.out, words, *parts, Texts(given.out))
    training.load()
    learn(training, given.minutes)


def learn(training: Training, minutes: float) -> None:
    """Until that much time was spent, or Ctrl-C; what was learned is saved either way."""
    budget, saved, told = 60 * minutes, time.monotonic(), "not yet known"
    mean, recent = 0.0, saved
    try:
        for numbers in training.texts.batches(training.step):
            if training.seconds >= budget:
                break
            loss = training.learn(numbers, training.seconds / budget)
            now = time.monotonic()
            training.seconds, recent = training.seconds + now - recent, now
            mean = loss if not mean else 0.95 * mean + 0.05 * loss
            if now - saved > SAVE_EVERY:
                told = say(training.save())
                saved = recent = time.monotonic()
            bar(training.seconds / budget, f"step {training.step}: loss {mean:.3f}; held out: {told}")
    except KeyboardInterrupt:
        print(file=sys.stderr)
    if training.step:
        print(f"\nstep {training.step}, {training.seconds / 60:.1f} min; held out: {say(training.save())}; the best "
              f"head is {training.out / 'head'}")


def say(accepted: list[float]) -> str:
    *shares, tokens = accepted
    return f"{' '.join(f'{share:.0%}' for share in shares)} of drafted tokens are right, {tokens:.2f} tokens a step"


if __name__ == "__main__":
    main()
