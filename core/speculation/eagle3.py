"""EAGLE-3 heads as they are published, from their names and configurations to what is computed."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..models.config import ModelConfig
from ..models.eagle3 import BIAS, MATRIX, QKV, SOURCES, Eagle3, halves
from ..models.head_loader import Columns, Lacking, Made, Spread

ALIASES = {"midlayer.": "model.layers.0.", "layers.0.": "model.layers.0.", "lm_head.": "lm_head.", "d2t": "d2t",
           "t2d": "t2d"}
UNUSED = ("model.embed_tokens.", "t2d")  # the model's embedding, and what d2t says already


def canonical(name: str) -> str:
    """A tensor of a published head in the words that the layout has."""
    short = name.removeprefix("model.")
    return next((ours + short.removeprefix(theirs) for theirs, ours in ALIASES.items() if short.startswith(theirs)),
                f"model.{short}")


def eagle3_head(words: Mapping[str, Any], config: ModelConfig, target: ModelConfig, reduced: bool) -> Eagle3:
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
    return Eagle3(replace(config, first_state=target.layers), target, "model.fc.weight", False, False, tuple(taps),
                  reduced)


def made_of(head: Eagle3, names: Mapping[str, str], checkpoint: Any) -> dict[str, Made]:
    """What the layout has and the checkpoint has otherwise: parts of matrices, and the spread head."""
    found: dict[str, Made] = {name: Columns(names[head.combine], i, 3) for i, name in enumerate(SOURCES)}
    for name in QKV:
        found |= {f"{half}.weight": Columns(names[f"{name}.weight"], i, 2) for i, half in enumerate(halves(name))}
    size = head.config.vocab_size
    ids = _ids(checkpoint, names, size) if head.reduced else np.arange(size)
    found[MATRIX] = Spread(names["lm_head.weight"], ids, size)
    return found | {BIAS: Lacking(ids, size)} if head.reduced else found


def _ids(checkpoint: Any, names: Mapping[str, str], size: int) -> np.ndarray:
    """The model's token for each of the head's: int64."""
    dtype, shape = checkpoint.describe(names["d2t"])
    if dtype not in ("i64", "i32") or len(shape) != 1:
        raise CheckpointError(f"{names['d2t']} is {dtype} {list(shape)}; whole numbers, one for each token, are needed")
    data = np.frombuffer(checkpoint.tensor(names["d2t"]).data, f"<{dtype.replace('i64', 'i8').replace('i32', 'i4')}")
    ids = np.arange(len(data)) + data
    if len(np.unique(ids)) < len(ids) or ids.min(initial=0) < 0 or ids.max(initial=0) >= size:
        raise CheckpointError(f"{names['d2t']} says tokens twice or outside the vocabulary of {size}")
    return ids
