"""Draft heads that come with Isthmus, and which of them was trained for a model."""
from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import CheckpointError
from ..models.loader import tensor_names

FOLDER = Path(__file__).parent / "shipped"
TRAINED_FOR = "trained_for"  # of a head's config.json: {"model": for people, "norm": its `fingerprint`}


def fingerprint(checkpoint: Any) -> str:
    """Of a model, in whatever format its matrices are: SHA-256 of its last norm in float32, which quantized files keep
    to the bit. "" for one without such a norm in floats."""
    names = tensor_names(checkpoint.names)
    if "model.norm.weight" not in names:
        return ""
    raw = checkpoint.tensor(names["model.norm.weight"])
    data = np.frombuffer(raw.data, np.uint8)
    if raw.dtype == "bf16":
        values = (data.view("<u2").astype("<u4") << 16).view("<f4")
    elif raw.dtype in ("f16", "f32"):
        values = data.view(f"<f{raw.dtype[1:].replace('16', '2').replace('32', '4')}").astype("<f4")
    else:
        return ""
    return hashlib.sha256(values.tobytes()).hexdigest()


def shipped_head(checkpoint: Any, model: str) -> Path:
    """The folder of the head that was trained for an open checkpoint, which people call `model`. Raises
    `CheckpointError` where none comes with Isthmus."""
    own, known = fingerprint(checkpoint), []
    for path in sorted(FOLDER.glob("*/config.json")):
        trained_for = json.loads(path.read_text())[TRAINED_FOR]
        if own and trained_for["norm"] == own:
            return path.parent
        known.append(trained_for["model"])
    raise CheckpointError(f"--speculative eagle: isthmus has a head for {', '.join(known) or 'no model'} and none for "
                          f"{model}: name one, model=HEAD, or train one (docs/speculation.md); ngram and suffix need "
                          "none")
