"""Every architecture against `transformers` on a tiny random model: prefill, chunks, decode and mixed batches."""
from __future__ import annotations

import copy
import functools
import random

import numpy as np
import pytest
import torch
from isthmus.core.weights.checkpoint import open_checkpoint

from .harness import Runner
from .tiny import KINDS, hf_logits, hf_model, tiny_model
from .tiny_gguf import ARCHS, tiny_gguf

COST = 60  # seconds
TOLERANCE = 1e-4
CASES = [(kind, *target) for kind in KINDS for target in (("reference", "f64"), ("reference", "f32"), ("cpu", "f32"))]


def tokens(count: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(range(131), k=count)


@functools.cache
def expected(kind: str, count: int, seed: int = 0) -> np.ndarray:
    return hf_logits(kind, tokens(count, seed)).numpy()


def runner(kind: str, platform: str, dtype: str) -> Runner:
    return Runner(platform, tiny_model(kind), dtype, page_size=4)


def close(have: np.ndarray, want: np.ndarray) -> None:
    assert have.shape == want.shape
    assert np.abs(want).max() > 1, "the model says nothing: a wrong answer would pass"
    assert np.abs(have - want).max() < TOLERANCE


@pytest.mark.parametrize("kind,platform,dtype", CASES)
def test_whole_prefill_then_decode(kind, platform, dtype):
    run, text, want = runner(kind, platform, dtype), tokens(45), expected(kind, 45)
    close(run.logits((1, text[:37]))[0], want[:37])
    for i in range(37, 45):
        close(run.logits((1, text[i:i + 1]))[0], want[i:i + 1])


@pytest.mark.parametrize("size", [3, 16])
@pytest.mark.parametrize("kind,platform,dtype", CASES)
def test_chunked_prefill(kind, platform, dtype, size):
    run, text = runner(kind, platform, dtype), tokens(45)
    have = [run.logits((1, text[i:i + size]))[0] for i in range(0, 45, size)]
    close(np.concatenate(have), expected(kind, 45))


@pytest.mark.parametrize("kind,platform,dtype", CASES)
def test_ragged_prefill_and_decode_in_one_batch(kind, platform, dtype):
    run = runner(kind, platform, dtype)
    a, b, c = (tokens(30, seed) for seed in (1, 2, 3))
    want_a, want_b, want_c = (expected(kind, 30, seed) for seed in (1, 2, 3))
    first = run.logits((1, a[:11]), (2, b[:5]))
    close(first[0], want_a[:11])
    close(first[1], want_b[:5])
    mixed = run.logits((3, c[:17]), (1, a[11:12]), (2, b[5:19]))
    close(mixed[0], want_c[:17])
    close(mixed[1], want_a[11:12])
    close(mixed[2], want_b[5:19])
    last = run.logits((2, b[19:20]), (3, c[17:18]), (1, a[12:30]))
    close(last[0], want_b[19:20])
    close(last[1], want_c[17:18])
    close(last[2], want_a[12:30])


@pytest.mark.parametrize("kind,platform,dtype", [c for c in CASES if c[1:] != ("reference", "f64")])
def test_greedy_from_state(kind, platform, dtype):
    """Decode steps whose input token is -1 (taken from the State) continue as the logits say."""
    run = runner(kind, platform, dtype)
    prompts = [tokens(9, 4), tokens(14, 5)]
    have = run.greedy(prompts, 8)
    for prompt, row in zip(prompts, have, strict=True):
        want = hf_logits(kind, prompt + row.tolist()).numpy()[len(prompt) - 1:-1]
        assert np.array_equal(row, want.argmax(-1))


@pytest.mark.parametrize("platform", ["reference", "cpu"])
@pytest.mark.parametrize("kind", ARCHS)
def test_gguf_in_mixed_formats(kind, platform):
    """Kept and expanded formats side by side in one stack, permuted rows, norms stored as 1 + w, rope factors."""
    path, model = tiny_gguf(kind)
    with torch.no_grad():
        want = model(torch.tensor([tokens(45)]), use_cache=False).logits[0].numpy()
    run = Runner(platform, path, "f32", page_size=4)
    close(run.logits((1, tokens(45)[:20]))[0], want[:20])
    close(run.logits((1, tokens(45)[20:]))[0], want[20:])


@pytest.mark.parametrize("kind", KINDS)
def test_bfloat16_is_as_close_as_its_digits_allow(kind):
    run, text, want = Runner("cpu", tiny_model(kind), "bf16", page_size=4), tokens(45), expected(kind, 45)
    steps = [text[:40]] + [[token] for token in text[40:]]
    have = np.concatenate([run.logits((1, step))[0] for step in steps])
    with torch.no_grad():
        model = copy.deepcopy(hf_model(kind)).bfloat16()
        theirs = model(torch.tensor([text]), use_cache=False).logits[0].float().numpy()
    # Rounding may choose another expert, whose output is wholly different: transformers shows how often.
    limit = max(3e-3 * np.mean(want ** 2), 1.5 * np.mean((theirs - want) ** 2))
    assert np.mean((have - want) ** 2) < limit
    assert run.model.loaded.config.sparse or limit < 4e-3 * np.mean(want ** 2)


@pytest.mark.parametrize("kind", ["glm4-moe", "glm4-moe-air", "dots1"])
def test_the_bias_of_scores_changes_the_choice(kind):
    """Otherwise the comparisons above would pass without it."""
    model, chosen = copy.deepcopy(hf_model(kind)), []
    for bias in (True, False):
        for layer in model.model.layers[1:]:
            gate = layer.mlp.gate
            gate.e_score_correction_bias *= bias
            states = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
            chosen.append([set(row) for row in gate(states)[2].tolist()])
    with_it, without = chosen[:2], chosen[2:]
    for one, other in zip(with_it, without, strict=True):
        assert np.mean([a != b for a, b in zip(one, other, strict=True)]) > 0.3


@pytest.mark.parametrize("kind", ["mixtral", "qwen2-moe"])
def test_experts_as_transformers_holds_them(kind, tmp_path):
    """Fused in one tensor of all experts, gate above up, which few checkpoints are."""
    hf_model(kind).save_pretrained(tmp_path, save_original_format=False)
    with open_checkpoint(tmp_path) as checkpoint:
        assert any(name.endswith("experts.0.up_proj.weight") for name in checkpoint.names)
    run = Runner("reference", tmp_path, "f64", page_size=4)
    close(run.logits((1, tokens(45)))[0], expected(kind, 45))
