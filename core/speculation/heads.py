"""Drafts from the model's own hidden states: EAGLE heads, and MTP layers that a checkpoint carries."""
from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..errors import CheckpointError
from ..models.architectures import ARCHITECTURES, find_architecture
from ..models.config import parse_config
from ..models.draft_heads import EMBEDDED, HIDDEN, OWN_EMBED, OWN_IDS, DraftHead, mtp_config
from ..models.eagle3 import Eagle3
from ..models.head_loader import Columns, Made, Rows, check_head, load_head, own_ids
from ..models.loader import LoadedModel, Place, tensor_names
from ..weights.checkpoint import open_checkpoint
from .companion import Companion, DraftSteps, Loading, join
from .contract import DRAFTERS, Word
from .eagle3 import UNUSED as UNUSED_THIRD
from .eagle3 import canonical, eagle3_head, made_of
from .on_device import BRANCHES, ModelDrafter
from .shipped import shipped_head

THIRD = ("model.midlayer.", "model.layers.0.hidden_norm.")  # what only EAGLE-3's heads have
# The model's own, which a head's file may repeat, and what d2t says already.
UNUSED = ("model.embed_tokens.", "lm_head.", "model.lm_head.", "model.t2d")


class EagleDrafter(ModelDrafter):
    """A head in a checkpoint of its own."""

    options = {"model": Word("an EAGLE head that was trained for the model: its name or path; else the one that comes "
                             "with Isthmus", ""), **BRANCHES}

    @classmethod
    def beside(cls, loading: Loading, options: Mapping[str, Any]) -> Companion:
        return EagleHead(loading, options["model"])


class MtpDrafter(ModelDrafter):
    """The first of the layers behind the model's own, used for every place of a draft."""

    options = BRANCHES

    @classmethod
    def beside(cls, loading: Loading, options: Mapping[str, Any]) -> Companion:
        return MtpLayer(loading)


class Head(Companion):
    """A draft head that fits the model: `head`, and `names`, canonical -> in its checkpoint."""

    head: DraftHead
    names: Mapping[str, str]

    def __init__(self, loading: Loading):
        self.loading = loading
        self.place = Place(loading.platform, loading.manifest, loading.dtype, loading.strict, loading.page_size,
                           loading.tell)

    def load(self, model: LoadedModel, checkpoint: Any, what: str) -> LoadedModel:
        """The model with the head, whose weights are in an open checkpoint."""
        head, own = self.head, self.loading.checkpoint
        made: dict[str, Made] = made_of(head, self.names) if isinstance(head, Eagle3) else {
            name: Columns(self.names[head.combine], i, 2) for i, name in enumerate((EMBEDDED, HIDDEN))}
        if head.reduced:
            ids = own_ids(checkpoint, self.names[OWN_IDS], head.config.vocab_size)
            made[OWN_EMBED] = Rows(own, tensor_names(own.names)["model.embed_tokens.weight"], ids)
        weights, report, size = load_head(checkpoint, self.names, head, self.place, made)
        needed = {"embed": model.weights["embed"], "head": model.weights["head"], "draft": weights}
        steps = DraftSteps(head.draft, needed, {**needed, "embed": weights["embed"]}, ids) if head.reduced else (
            DraftSteps(head.draft, needed))
        return join(model, steps, head.keep, weights, self.layers, size,
                    [f"drafts come from {what}: {line}" for line in report], getattr(head, "taps", ()))


class EagleHead(Head):
    """Its files: `fc` and decoder layers in Llama's words, without the first one's attention norm and a norm behind; or
    those of EAGLE-3."""

    def __init__(self, loading: Loading, name: str):
        super().__init__(loading)
        target = loading.config
        self._path = loading.resolve(name) if name else shipped_head(loading.checkpoint, target.name)
        self._name = name or self._path.name
        with self._named(), open_checkpoint(self._path) as checkpoint:
            self.nbytes = checkpoint.nbytes
            names = {(n if n.startswith(("model.", "lm_head.")) else f"model.{n}"): real
                     for n, real in tensor_names(checkpoint.names).items()}
            config, unused = _eagle_config(checkpoint.config, target), UNUSED
            third = any(n.startswith(THIRD) for n in names)
            names = {canonical(name) if third else name.replace("model.d2t", OWN_IDS): real
                     for name, real in names.items()}
            own = (checkpoint.describe(names[OWN_IDS])[1] or (0,))[0] if OWN_IDS in names else (
                config.vocab_size if third else 0)
            if third:
                self.head, unused = eagle3_head(checkpoint.config, config, target, own), UNUSED_THIRD
            else:
                self.head = DraftHead(replace(config, first_state=target.layers), target, "model.fc.weight", False,
                                      "model.fc.bias" in names, own)
            check_head(names, self.head, self.place, unused)
        self.names, self.layers = names, self.head.state_layers

    def joined(self, model: LoadedModel) -> LoadedModel:
        with self._named(), open_checkpoint(self._path) as checkpoint:
            return self.load(model, checkpoint, f"the EAGLE head {Path(self._path).name}")

    @contextmanager
    def _named(self) -> Iterator[None]:
        try:
            yield
        except CheckpointError as error:
            raise CheckpointError(f"--speculative model={self._name}: {error}") from error


def _eagle_config(words: Mapping[str, Any], target: Any) -> Any:
    """That of a head. Raises `CheckpointError` where it was made for another model."""
    architecture, settings = find_architecture(words)
    if architecture.hidden is not ARCHITECTURES["llama"].hidden:
        raise CheckpointError("config: a head's layers are Llama's, with or without biases and norms on q and k")
    config = parse_config(settings, architecture.family, "head")
    for what, theirs, own in (("hidden_size", target.hidden, config.hidden),
                              ("vocab_size", target.vocab_size, config.vocab_size)):
        if theirs != own:
            raise CheckpointError(f"config: {what} = {own}, and {target.name} has {theirs}: this head was trained for "
                                  "another model")
    return config


class MtpLayer(Head):
    """The layer behind the model's last one in the same checkpoint, as DeepSeek-V3 and GLM-4.5 name it."""

    def __init__(self, loading: Loading):
        super().__init__(loading)
        target = loading.config
        prefix, ours = f"model.layers.{target.layers}.", "model.layers.0."
        self.names = {ours + name.removeprefix(prefix): real
                      for name, real in tensor_names(loading.checkpoint.names).items() if name.startswith(prefix)}
        if not self.names:
            raise CheckpointError(f"{target.name} has no MTP layer, which would be called {prefix}* "
                                  "(some publishers leave it out); ngram and suffix need none")
        self.head = DraftHead(mtp_config(target, target.layers), target, ours + "eh_proj.weight", True)
        # Embedding and head are copies of the model's.
        check_head(self.names, self.head, self.place, (ours + "embed_tokens.", ours + "shared_head.head."))
        self.layers = self.head.state_layers

    def joined(self, model: LoadedModel) -> LoadedModel:
        return self.load(model, self.loading.checkpoint, "its MTP layer")


DRAFTERS.register("eagle", EagleDrafter)
DRAFTERS.register("mtp", MtpDrafter)
