"""One model file, one definition, the same greedy text on every platform that can run here.

The texts are the cpu platform's in float32, which are those of `transformers` with the same weights (test_models_real).
"""
from __future__ import annotations

from pathlib import Path

import pytest
from isthmus.core.errors import CheckpointError
from isthmus.core.platform import Unavailable
from isthmus.core.weights.sources import resolve_model

from .harness import Runner

COST = 60  # seconds
TIE = 1e-2  # logits this close are a tie: float32 sums in another order are 5e-3 off at most (test_models_real)
# Prompts and their continuations by SmolLM2-135M-Instruct Q4_1, as tokens.
TEXTS = [
    ([504, 3575, 282, 4649, 314],
     [7042, 30, 198, 198, 504, 2988, 314, 42, 216, 34, 32, 33, 40, 29, 32, 33, 29, 34, 34, 216]),
    ([6403, 1980, 253, 655, 665, 436, 253],
     [1165, 3102, 32047, 826, 827, 8718, 30, 378, 3102, 436, 3365, 990, 253, 4248, 8201, 3365, 8957, 17801, 15903, 30]),
    ([12615, 36411, 645],
     [260, 913, 314, 1147, 3380, 28, 357, 523, 17663, 690, 284, 1464, 9403, 30, 669, 416, 325, 253, 1732, 281]),
    ([1604, 3987, 46477, 24, 94, 727],
     [472, 585, 304, 1758, 216, 32, 42, 448, 1003, 216, 33, 472, 1003, 304, 1672, 3987, 46477, 24, 94, 731]),
    ([504, 1296, 3003, 14797, 359],
     [260, 3003, 14797, 282, 260, 1205, 3323, 42, 2382, 28, 4461, 28, 284, 5724, 30, 1216, 359, 260, 805, 1296]),
    ([35097, 8957, 355, 7473, 332, 28],
     [339, 5248, 441, 2090, 732, 288, 1643, 30, 339, 5248, 253, 3241, 282, 253, 2026, 365, 10905, 6176, 28, 3012]),
]


@pytest.mark.slow
@pytest.mark.needs("f32", "kv f32", "pages of 16")
def test_greedy_text(platform_name: str):
    try:
        path = Path(resolve_model("smollm2-135m-instruct"))
        run = Runner(platform_name, path, "f32", pages=60, seqs=20, page_size=16)
    except (CheckpointError, Unavailable) as error:
        pytest.skip(str(error))
    if run.model.manifest.rank < 0:
        pytest.skip(f"{platform_name} computes nothing")
    prompts, wanted = [prompt for prompt, _ in TEXTS], [text for _, text in TEXTS]
    got = run.greedy(prompts, len(wanted[0])).tolist()
    for i, (have, want) in enumerate(zip(got, wanted, strict=True)):
        if have != want:
            at = next(at for at, pair in enumerate(zip(have, want, strict=True)) if pair[0] != pair[1])
            logits = run.logits((len(prompts) + 1 + i, prompts[i] + want[:at]))[0][-1]
            margin = float(logits[have[at]] - logits[want[at]])
            assert margin <= TIE, f"text {i} parts at token {at}: {have[at]} is {margin:.1e} above {want[at]}, no tie"
