"""Adapters that PEFT itself writes: the engine says what PEFT's model says, in float64 token for token."""
from __future__ import annotations

import copy

import pytest
from isthmus.core.engine import EngineCore

from .test_lora_engine import config, run, submit

COST = 40  # seconds
CASES = {
    "plain": dict(r=8, lora_alpha=16, target_modules=["q_proj", "v_proj"]),
    "all": dict(r=4, lora_alpha=4, target_modules="all-linear"),
    "root": dict(r=8, lora_alpha=8, use_rslora=True, target_modules=["q_proj", "k_proj", "o_proj", "down_proj"]),
    "patterns": dict(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj", "gate_proj"],
                     alpha_pattern={"gate_proj": 32}, rank_pattern={"q_proj": 12, "layers.1.self_attn.v_proj": 2}),
    "expression": dict(r=4, lora_alpha=8, target_modules=r".*\.(q_proj|up_proj)")}
PROMPTS = [list(range(5, 35)), [9, 8, 7, 6] * 3]


def write(model, settings, seed: int, folder):
    """PEFT's model with random weights, saved."""
    peft, torch = pytest.importorskip("peft"), pytest.importorskip("torch")
    adapted = peft.get_peft_model(copy.deepcopy(model).double(), peft.LoraConfig(task_type="CAUSAL_LM", **settings))
    draw = torch.Generator().manual_seed(seed)
    for name, weight in adapted.named_parameters():
        if "lora_" in name:
            weight.data = torch.randn(weight.shape, generator=draw).double() * weight.shape[1] ** -0.5
    adapted.save_pretrained(folder)
    return adapted.eval()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama3", "qwen3"])
def test_as_peft_computes_it(kind, tmp_path):
    pytest.importorskip("peft")
    torch = pytest.importorskip("torch")
    from .tiny import hf_model, tiny_model
    want = {}
    for seed, (name, settings) in enumerate(CASES.items()):
        model = write(hf_model(kind), settings, seed, tmp_path / name)
        for i, prompt in enumerate(PROMPTS):
            ids = list(prompt)
            with torch.no_grad():
                for _ in range(8):
                    ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
            want[f"{name}{i}"] = ids[len(prompt):]
    engine = EngineCore(config(tiny_model(kind), {name: tmp_path / name for name in CASES}, cache="4MiB", max_loras=3))
    for name in CASES:
        for i, prompt in enumerate(PROMPTS):
            submit(engine, f"{name}{i}", prompt, name, tokens=8)
    assert run(engine) == want
    engine.close()
