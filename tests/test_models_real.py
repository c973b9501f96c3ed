"""The real GGUF models on cpu give the greedy tokens of `transformers` with the same dequantized weights."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from isthmus.core.api import Engine
from isthmus.core.errors import CheckpointError
from isthmus.core.text.tokenizer import load_tokenizer
from isthmus.core.weights.checkpoint import Checkpoint, open_checkpoint
from isthmus.core.weights.sources import resolve_model
from isthmus.platforms.expand import expand

from .harness import Runner

COST = 60  # seconds

COUNT, PROMPT = 64, 8
LOGIT_ERROR = 5e-3  # float32 sums in another order, through 30 layers, on logits of up to 60
OPENINGS = ["The history of {} begins a long time ago, in", "Why {} matters, explained in one short paragraph:",
            "A guide to {} for those who know nothing:", "Scientists who studied {} for years found that",
            "Do people like {}? Most of them answer that", "Long before {} was known to anyone, there",
            "Three facts about {} are surprising: first,", "Suddenly {} cost more than ever, because the"]
TOPICS = ["bread", "chess", "steam engines", "the moon"]


def hf_from(checkpoint: Checkpoint) -> transformers.PreTrainedModel:
    """The checkpoint in `transformers`, every weight expanded to float32."""
    config = transformers.AutoConfig.for_model(**checkpoint.config)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            raw = checkpoint.tensor(name)
            one = 1 if checkpoint.norms_include_one and "norm" in name else 0
            weight.copy_(torch.from_numpy(expand(raw).reshape(raw.shape) - np.float32(one)))
    return model


def hf_greedy(model: transformers.PreTrainedModel, prompts: np.ndarray, count: int) -> np.ndarray:
    """[prompts, count] greedy tokens, all prompts in one batch; the end of a text ends nothing."""
    model.generation_config.eos_token_id = None
    ids = torch.from_numpy(prompts).long()
    out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return out[:, prompts.shape[1]:].numpy()


def logit_error(run: Runner, model: transformers.PreTrainedModel, ids: list[int], seq: int) -> tuple[float, np.ndarray]:
    """Largest difference over all positions of a text, and the last position's logits in `transformers`."""
    with torch.no_grad():
        want = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    have = run.logits((seq, ids))[0]
    return float(np.abs(have - want).max()), want[-1]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "gemma3-270m"])
def test_greedy_tokens(name):
    try:
        path = Path(resolve_model(name))
    except CheckpointError as error:
        pytest.skip(f"the model cannot be had here: {error}")
    with open_checkpoint(path) as checkpoint:
        model, tokenizer = hf_from(checkpoint), load_tokenizer(checkpoint)
    texts = [opening.format(topic) for opening in OPENINGS for topic in TOPICS]
    prompts = np.array([tokenizer.encode(text, add_special=True)[:PROMPT] for text in texts])
    assert len({tuple(prompt) for prompt in prompts.tolist()}) == 32
    run = Runner("cpu", path, "f32", pages=400, seqs=80, page_size=16)
    have, want = run.greedy(prompts, COUNT), hf_greedy(model, prompts, COUNT)
    error, _ = logit_error(run, model, [*prompts[0], *want[0, :-1]], seq=40)
    print(f"\n{name}: {(have == want).all(axis=1).sum()} of {len(texts)} texts equal, logit error {error:.1e}")
    assert error < LOGIT_ERROR
    for row in np.flatnonzero((have != want).any(axis=1)):
        at = int(np.argmax(have[row] != want[row]))
        error, logits = logit_error(run, model, [*prompts[row], *want[row, :at]], seq=41 + int(row))
        margin = float(logits[want[row, at]] - logits[have[row, at]])
        print(f"  text {row} parts at token {at}: margin {margin:.1e}, logit error {error:.1e}")
        assert error < LOGIT_ERROR and margin <= 2 * error, "no tie: the models differ"


@pytest.mark.slow
def test_a_seeded_text_is_the_same_alone_and_among_neighbours():
    """In the default dtype, with neighbours of other lengths that join and leave; contexts cross a vector's end."""
    prompt = "My favourite three animals are"
    neighbours = [f"Tell me about number {i}:" + " and" * 40 * i for i in range(3)]
    with Engine(platform="cpu", kv_cache_memory="200MiB") as engine:
        def text(prompts: list[str], seed: int) -> str:
            return engine.generate(prompts, max_tokens=40, temperature=0.8, seed=seed)[0].text
        same = [text([prompt], seed) == text([prompt, *neighbours], seed) for seed in range(20)]
    # All, where this was written; other processors' matrix kernels may round by the number of rows.
    assert sum(same) >= 18, f"{sum(same)} of 20 texts equal"
