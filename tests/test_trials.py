"""Trials of vendors' operators: what is noticed of wrong numbers, in a result, in a replayed graph and in memory that
nobody may read. Those of the operators themselves are tests/test_flashinfer.py and tests/triton/test_libraries.py."""
from __future__ import annotations

from typing import Any

import pytest
import torch
from isthmus.core.platform import AttentionSpec
from isthmus.platforms.accelerator.attention import Composed
from isthmus.platforms.accelerator.attention_trial import reason_against
from isthmus.platforms.accelerator.cache import LayerCache
from isthmus.platforms.accelerator.device import Device
from isthmus.platforms.accelerator.trial import Inputs, Trials, activations, difference, told

from .emulation.recorder import RecordedGraph

COST = 8  # seconds
DEVICE = Device(torch.device("cpu"))
WEIGHT = torch.randn(48, 32, generator=torch.Generator().manual_seed(0))


def ours(x: torch.Tensor) -> torch.Tensor:
    return x @ WEIGHT


def inputs(tokens: int, seed: int) -> Inputs:
    return activations(tokens, 48, torch.float32, DEVICE.torch, seed)


def tried(theirs: Any, graph: Any = RecordedGraph, sizes: tuple[int, ...] = (1, 8, 200), limit: float = 1e-6) -> Trials:
    trials = Trials(DEVICE, sizes, lambda: graph)
    trials.verdict(("theirs", "48x32"), theirs, ours, inputs, limit)
    return trials


@pytest.mark.parametrize("graph", [RecordedGraph, "there are none"])
def test_what_gives_the_numbers_serves(graph: Any) -> None:
    (found,) = tried(lambda x: (x.double() @ WEIGHT.double()).float(), graph).verdicts.values()
    assert found.everywhere and found.faster == found.right == {1, 8, 200} and found.reason is None


def test_a_verdict_is_kept_and_told() -> None:
    calls: list[int] = []

    def theirs(x: torch.Tensor) -> torch.Tensor:
        calls.append(len(x))
        return ours(x)
    trials, before = tried(theirs), len(calls)
    trials.verdict(("theirs", "48x32"), theirs, ours, inputs, 0)
    assert len(calls) == before
    assert told(*next(iter(trials.verdicts.items())), 3) == (
        "theirs 48x32: our numbers at 3 of 3 sizes, no slower at 3, on average 1.00 of our time")


def leaking(x: torch.Tensor) -> torch.Tensor:
    """Padding that is no number reaches all rows."""
    return ours(x) + 0 * x.sum()


def last_lost(x: torch.Tensor) -> torch.Tensor:
    out = ours(x)
    out[-2] = 0
    return out


@pytest.mark.parametrize("theirs, why", [
    (lambda x: ours(x) * 1.01, "row 0 of 1 differs by an NMSE of 0.0001"), (leaking, "NMSE of nan"),
    (last_lost, "row 6 of 8"), (lambda x: ours(x).half(), "gives torch.float16 [1, 32] in the place of torch.float32"),
    (lambda x: ours(x)[:, :-1], "[1, 31]"), (lambda x: None, "NoneType"),
    (lambda x: ours(x) + 1e-20 * (len(x) > 1), "row 0 of 8"),
    (lambda x: ours(x) if len(x) < 200 else ours(x).roll(1, 0), "of 96 by more than")])
def test_wrong_numbers_once_are_enough(theirs: Any, why: str) -> None:
    (found,) = tried(theirs).verdicts.values()
    assert why in found.reason and not found.right and not found.everywhere
    assert "left to Triton" in told("x", found, 3)


def test_what_raises_is_left_where_it_raises() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if len(x) == 1:
            raise RuntimeError("m % 8 must be 0" + "!" * 1000)
        return ours(x)
    (found,) = tried(picky).verdicts.values()
    assert found.right == {8, 200} and not found.everywhere and len(found.reason) < 350
    (found,) = tried(lambda x: 1 / 0).verdicts.values()
    assert not found.right and found.reason == "ZeroDivisionError: division by zero (at 1 tokens)"


def test_what_cannot_be_captured_or_keeps_its_first_inputs_is_noticed() -> None:
    def waits(x: torch.Tensor) -> torch.Tensor:
        return ours(x) * float(x.isnan().logical_not().any())
    (found,) = tried(waits).verdicts.values()
    assert "waits for the device" in found.reason and not found.right
    kept: dict[int, torch.Tensor] = {}

    def stale(x: torch.Tensor) -> torch.Tensor:
        return ours(kept.setdefault(len(x), x.clone()))
    (found,) = tried(stale).verdicts.values()
    assert found.reason.startswith("replayed from a graph, row 0 of 1") and not found.right


def test_rows_that_are_not_live_do_not_count() -> None:
    want = torch.randn(4, 3)
    got = want.clone()
    got[3] = torch.nan
    assert difference(got, want, torch.tensor([True, True, True, False]), 0) is None
    assert "row 3 of 4" in difference(got, want, torch.ones(4, dtype=torch.bool), 0)


class Attention(Composed):
    """With something wrong."""

    def __init__(self, fault: str) -> None:
        self.fault = fault

    def attend(self, q: torch.Tensor, cache: LayerCache, view: Any, spec: AttentionSpec) -> torch.Tensor:
        if self.fault == "window" and spec.window:
            spec = AttentionSpec(spec.scale, spec.window + 1, spec.softcap)
        out = super().attend(q, cache, view, spec)
        if self.fault == "tail":  # all of a row's last page is read
            last = (view.fed["lengths"][view.fed["lengths"] > 0] - 1) // view.page_size
            out = out + 0 * cache.kv[view.fed["pages"][0, last[0]]].float().sum().to(out.dtype)
        if self.fault == "padding":
            out[int(view.host.starts[-1]):] = torch.nan
        return out


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kept", [None, torch.float8_e4m3fn])
@pytest.mark.parametrize("decode", [True, False])
def test_attention_is_tried_beside_the_composed_path(dtype: Any, kept: torch.dtype | None, decode: bool) -> None:
    like = LayerCache(torch.zeros(2, 2, 16, 2, 32, dtype=kept or dtype), None, *((0.5, 0.25) if kept else ()))
    q, spec = torch.zeros(1, 4, 32, dtype=dtype), AttentionSpec(0.2, 9, 30.0)
    unread = "NMSE of nan" if decode else "no number"  # padding rows of a decode step are to be zeros
    for fault, why in (("", None), ("tail", unread), ("padding", unread), ("window", "differs")):
        backend = Attention(fault)
        reason = reason_against(lambda *step, backend=backend: backend.attend(*step, spec), backend, q, like, spec,
                                decode, DEVICE)
        assert reason is None if why is None else why in reason, (fault, reason)
