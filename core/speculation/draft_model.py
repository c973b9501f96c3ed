"""Drafts by a smaller model with the same vocabulary.

Source: Leviathan et al. 2023, Fast Inference from Transformers via Speculative Decoding.
"""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from ..errors import CheckpointError
from ..models.loader import LoadedModel, load_model, read_config
from ..platform import Batch, Ops, Tensor
from ..text.tokenizer import load_tokenizer
from ..weights.checkpoint import Checkpoint, open_checkpoint
from .companion import Companion, DraftSteps, Loading, join
from .contract import DRAFTERS, Word
from .on_device import BRANCHES, ModelDrafter


class DraftModelDrafter(ModelDrafter):
    """Another model, whole, on the same device."""

    options = {"model": Word("a smaller model with the same vocabulary: its name or path"), **BRANCHES}

    @classmethod
    def beside(cls, loading: Loading, options: Mapping[str, Any]) -> Companion:
        return SmallerModel(loading, options["model"])


class SmallerModel(Companion):
    """A draft model that fits the target."""

    def __init__(self, loading: Loading, name: str):
        self._loading, self._name, self._path = loading, name, loading.resolve(name)
        with self._named(), open_checkpoint(self._path) as checkpoint:
            self.nbytes, config = checkpoint.nbytes, read_config(checkpoint)[1]
            self.layers = config.state_layers
            _check_vocabulary(loading, checkpoint, config.vocab_size)
        self._config = config

    def joined(self, model: LoadedModel) -> LoadedModel:
        given = self._loading
        with self._named(), open_checkpoint(self._path) as checkpoint:
            own = load_model(checkpoint, given.platform, given.manifest, given.dtype, given.strict, given.tell,
                             given.page_size, first_state=len(model.state_layers))

        def follow(ops: Ops, weights: Any, batch: Batch, x: Tensor) -> None:
            own.hidden(ops, weights["draft"], batch)
        report = [f"drafts come from {own.config.name}: {line}" for line in own.report]
        if own.config.max_position < model.config.max_position:
            report.append(f"drafts come from {own.config.name}, made for {own.config.max_position} positions: fewer of "
                          "them will be right in longer texts")
        return join(model, DraftSteps(own.forward, own.weights), follow, own.weights, own.state_layers, own.nbytes,
                    report)

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"--speculative model={self._name}: {error}") from error


def _check_vocabulary(loading: Loading, checkpoint: Checkpoint, size: int) -> None:
    """A token must mean the same in both. A model without a tokenizer, which is used by ids alone, has sizes only."""
    if size < loading.config.vocab_size:
        raise CheckpointError(f"its vocabulary has {size} tokens and that of {loading.config.name} "
                              f"{loading.config.vocab_size}: a draft model must know all of them")
    theirs, own = (_tokens(each) for each in (loading.checkpoint, checkpoint))
    if theirs is None:
        return
    if own is None:
        raise CheckpointError(f"it has no tokenizer, so that nobody can tell whether its tokens are those of "
                              f"{loading.config.name}: put that model's tokenizer.json into its folder if they are")
    different = [i for i, (a, b) in enumerate(zip(theirs, own, strict=False)) if a != b]
    if different:
        first = different[0]
        raise CheckpointError(f"its tokens are not those of {loading.config.name}: {len(different)} differ, the first "
                              f"is {first}, {own[first]!r} here and {theirs[first]!r} there; a draft model needs the "
                              "same tokenizer")


def _tokens(checkpoint: Checkpoint) -> list[str | None] | None:
    """The spelling of each token; None where there is no tokenizer."""
    try:
        tokenizer = load_tokenizer(checkpoint, encodes=False)
    except CheckpointError:
        return None
    return [tokenizer.id_to_token(i) for i in range(tokenizer.vocab_size)]


DRAFTERS.register("draft", DraftModelDrafter)
