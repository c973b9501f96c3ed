"""Adapters in the compiled kernels of the host processor: one program, whose rows do not depend on their neighbours."""
from __future__ import annotations

import numpy as np
import pytest
from isthmus.conformance.adapted import AdaptedModel
from isthmus.conformance.driver import Driver, Model
from isthmus.conformance.oracle import text
from isthmus.conformance.tiny import tiny_model
from isthmus.core.discovery import load_platform

pytest.importorskip("torch")
COST = 6  # seconds
KIND = "llama"


@pytest.fixture(scope="module")
def model():
    platform = load_platform("cpu", {"kernels": "compiled", "threads": "2"})
    try:
        manifest = platform.probe()
    except Exception as error:
        pytest.skip(str(error))
    yield AdaptedModel(Model(platform, manifest, tiny_model(KIND, 0), "bf16", 16), KIND, 0)
    platform.close()


def driven(model, adapters: dict[int, int]) -> Driver:
    driver = Driver(model)
    driver.adapters = adapters
    return driver


def test_steps_with_adapters_are_programs(model):
    from isthmus.platforms.cpu.compiled.tape import LOW, UP
    driven(model, {1: 1}).logits((1, text(9, 0, "a")))
    (step,) = model._steps.values()
    (program,) = step.compiled.programs.values()
    kinds = program.ops["kind"].tolist()
    assert step.compiled.reason is None and kinds.count(LOW) == 8 and kinds.count(UP) > kinds.count(LOW)


@pytest.mark.parametrize("slot", [0, 1, 3, 4])
def test_a_row_has_the_same_bits_whatever_adapters_are_beside_it(model, slot):
    tokens = text(20, 0, "row")
    alone = driven(model, {1: slot, 2: 1} if slot == 0 else {1: slot})
    want = np.concatenate([alone.logits((1, tokens))[0], alone.logits((1, [7]))[0]])
    mixed = driven(model, {1: slot, 2: 1, 3: 3, 4: 4, 5: 0})
    others = {seq: text(30, 0, f"other {seq}") for seq in (2, 3, 4, 5)}
    got = [mixed.logits((1, tokens[:11]), *((seq, own[:13]) for seq, own in others.items()))[0],
           mixed.logits(*((seq, own[13:14]) for seq, own in others.items()), (1, tokens[11:]))[4],
           mixed.logits((1, [7]), *((seq, own[14:15]) for seq, own in others.items()))[0]]
    assert np.array_equal(np.concatenate(got), want)
