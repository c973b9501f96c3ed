"""EAGLE-3 heads as they are published, from their names and configurations to what is computed."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..errors import CheckpointError
from ..models.config import ModelConfig
from ..models.eagle3 import QKV, SOURCES, Eagle3, halves
from ..models.head_loader import Columns, Made

ALIASES = {"midlayer.": "model.layers.0.", "layers.0.": "model.layers.0.", "lm_head.": "lm_head.", "d2t": "d2t",
           "t2d": "t2d"}
UNUSED = ("model.embed_tokens.", "t2d")  # the model's embedding, and what d2t says already


def canonical(name: str) -> str:
    """A tensor of a published head in the words that the layout has."""
    short = name.removeprefix("model.")
    return next((ours + short.removeprefix(theirs) for theirs, ours in ALIASES.items() if short.startswith(theirs)),
                f"model.{short}")


def eagle3_head(words: Mapping[str, Any], config: ModelConfig, target: ModelConfig, own: int) -> Eagle3:
    """The head of a configuration. Raises `CheckpointError` for layers that the model does not have."""
    if config.layers != 1 or config.qk_norm or config.qkv_bias:
        raise CheckpointError("config: an EAGLE-3 head has one layer of Llama's kind, without norms on q and k and "
                              "without biases")
    inner = words.get("eagle_config")
    taps = (inner if isinstance(inner, Mapping) else words).get("eagle_aux_hidden_state_layer_ids")
    if taps is None:
        taps = [2, target.layers // 2, target.layers - 3]
    if (not isinstance(taps, list) or len(set(map(str, taps))) != 3
            or not all(type(i) is int and 0 <= i < target.layers for i in taps)):
        raise CheckpointError(f"the head reads the inputs of the layers {taps}, and {target.name} has the layers 0 to "
                              f"{target.layers - 1}: three different ones of them are needed, config's "
                              "eagle_aux_hidden_state_layer_ids names them")
    return Eagle3(replace(config, first_state=target.layers), target, "model.fc.weight", False, False, own,
                  tuple(taps))


def made_of(head: Eagle3, names: Mapping[str, str]) -> dict[str, Made]:
    """Parts of matrices that the layout has and the checkpoint has otherwise."""
    found: dict[str, Made] = {name: Columns(names[head.combine], i, 3) for i, name in enumerate(SOURCES)}
    for name in QKV:
        found |= {f"{half}.weight": Columns(names[f"{name}.weight"], i, 2) for i, half in enumerate(halves(name))}
    return found
