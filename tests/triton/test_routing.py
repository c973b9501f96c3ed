"""Routing and sorting by expert against the rule written out in numpy."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from .interpreter import prepare

DEVICE = prepare()
from isthmus.core.platform import MoESpec  # noqa: E402
from isthmus.platforms.triton_kit import routing  # noqa: E402

COST = 5  # seconds


def rule(logits: np.ndarray, spec: MoESpec, bias: np.ndarray | None):
    """Ids and weights of one token after another, as `Ops.moe` has them."""
    ids, weights = [], []
    for row in logits.astype(np.float64):
        scores = 1 / (1 + np.exp(-row)) if spec.scoring == "sigmoid" else np.exp(row - row.max())
        if spec.scoring == "softmax":
            scores /= scores.sum()
        choice = scores if bias is None else scores + bias
        groups = choice.reshape(spec.groups, -1)
        told = np.sort(groups, 1)[:, -(1 if bias is None else 2):].sum(1)
        kept = sorted(range(spec.groups), key=lambda g: (-told[g], g))[:spec.top_groups]
        size = groups.shape[1]
        allowed = [e for e in range(spec.experts) if e // size in kept]
        chosen = sorted(allowed, key=lambda e: (-choice[e], e))[:spec.top_k]
        weight = scores[chosen]
        if spec.renormalize:
            weight = weight / (weight.sum() + 1e-20)
        ids.append(chosen)
        weights.append(weight * spec.scale)
    return np.array(ids), np.array(weights)


def check(logits: torch.Tensor, spec: MoESpec, bias: torch.Tensor | None = None) -> None:
    ids, weights = routing.route(logits.to(DEVICE), spec, None if bias is None else bias.to(DEVICE))
    right_ids, right_weights = rule(logits.float().numpy(), spec, None if bias is None else bias.numpy())
    assert ids.dtype == torch.int32 and weights.dtype == torch.float32
    assert np.array_equal(ids.cpu().numpy(), right_ids)
    assert np.allclose(weights.cpu().numpy(), right_weights, rtol=2e-6, atol=0)


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("experts, top_k, groups, top_groups", [
    (8, 2, 1, 1), (60, 4, 1, 1), (512, 10, 1, 1), (4, 4, 1, 1), (32, 6, 4, 2), (160, 6, 8, 3), (12, 3, 3, 1)])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("corrected", [False, True])
def test_the_rule(experts, top_k, groups, top_groups, scoring, corrected):
    spec = MoESpec(experts, top_k, scoring, renormalize=top_k != 4, scale=2.5 if groups > 1 else 1.0, groups=groups,
                   top_groups=top_groups)
    check(random(5, experts, seed=experts), spec, random(experts, seed=1) if corrected else None)


@pytest.mark.parametrize("groups", [1, 4])
def test_ties_go_to_the_lower_expert(groups):
    spec = MoESpec(16, 4, "softmax", groups=groups, top_groups=2 if groups > 1 else 1)
    logits = torch.zeros(4, 16)
    logits[1] = torch.tensor([0.0, 1.0] * 8)
    logits[2, 7:11] = 3
    logits[3] = torch.tensor([2.0] * 3 + [-1.0] * 10 + [2.0] * 3)
    check(logits, spec)
    check(logits, spec, torch.zeros(16))
    assert routing.route(logits.to(DEVICE), spec)[0][0].tolist() == [0, 1, 2, 3]


def test_a_bias_below_zero_lets_no_hidden_group_in():
    spec = MoESpec(8, 3, "sigmoid", groups=4, top_groups=2)
    check(random(4, 8), spec, torch.full((8,), -5.0))


def test_half_precision_logits_and_strides():
    logits = random(3, 24).bfloat16()
    check(logits[:, 4:20], MoESpec(16, 2))


def test_extreme_logits():
    logits = torch.tensor([[-1e4, 1e4, 0.0, 3e38], [-3e38, -3e38, -3e38, -1e30], [float("-inf"), 1.0, 2.0, 0.5]])
    ids, weights = routing.route(logits.to(DEVICE), MoESpec(4, 2))
    assert ids[0].tolist() == [3, 0] and weights[0].tolist() == [1, 0]
    assert ids[2].tolist() == [2, 1] and torch.isfinite(weights).all()
    ids, weights = routing.route(torch.full((1, 4), -200.0, device=DEVICE), MoESpec(4, 2, "sigmoid"))
    assert ids.tolist() == [[0, 1]] and torch.isfinite(weights).all()


def test_what_is_no_number_stays_in_its_row():
    logits = random(3, 6)
    logits[1, 2] = float("nan")
    ids, weights = routing.route(logits.to(DEVICE), MoESpec(6, 3))
    assert ((ids >= 0) & (ids < 6)).all() and len(set(ids[1].tolist())) == 3
    assert torch.isnan(weights[1]).any() and torch.isfinite(weights[[0, 2]]).all()


def test_padding_tokens_have_no_expert():
    ids, weights = routing.route(random(3, 6).to(DEVICE), MoESpec(6, 2), None,
                                 torch.tensor([True, False, True]).to(DEVICE))
    assert ids[1].tolist() == [-1, -1] and weights[1].tolist() == [0, 0] and (ids[[0, 2]] >= 0).all()


def sorted_right(plan: routing.Sorted, local: np.ndarray, experts: int) -> None:
    """`local` [entries]: each entry's expert here, -1 for none. Every field, entry by entry."""
    entries = [[i for i, e in enumerate(local) if e == expert] for expert in range(experts)]
    order, blocks, offsets = [], [], [0]
    for expert, mine in enumerate(entries):
        count = -(-len(mine) // plan.block)
        order += mine + [plan.entries] * (count * plan.block - len(mine))
        blocks += [expert] * count
        offsets.append(len(order))
    assert plan.counts.tolist() == [len(mine) for mine in entries]
    assert plan.offsets.tolist() == offsets
    assert len(blocks) <= len(plan.experts) and len(plan.order) == len(plan.experts) * plan.block
    assert plan.experts.tolist() == blocks + [-1] * (len(plan.experts) - len(blocks))
    assert plan.order.tolist() == order + [plan.entries] * (len(plan.order) - len(order))


@pytest.mark.parametrize("tokens, top_k, experts, block", [
    (1, 1, 1, 1), (1, 8, 128, 16), (7, 2, 5, 4), (40, 4, 8, 16), (150, 4, 16, 32), (3, 2, 512, 16), (1024, 1, 7, 64)])
def test_sort(tokens, top_k, experts, block):
    ids = torch.randint(0, experts, (tokens, top_k), generator=torch.Generator().manual_seed(tokens)).int()
    plan = routing.sort_by_expert(ids.to(DEVICE), experts, block)
    sorted_right(plan, ids.flatten().numpy(), experts)


@pytest.mark.parametrize("expert", [0, 3, 6])
def test_all_tokens_to_one_expert(expert):
    ids = torch.full((300, 1), expert, dtype=torch.int32)
    sorted_right(routing.sort_by_expert(ids.to(DEVICE), 7, 16), ids.flatten().numpy(), 7)


def test_the_worst_case_fits():
    """One token more than whole blocks for every expert."""
    ids = torch.arange(5).repeat_interleave(9).int().reshape(-1, 1)
    plan = routing.sort_by_expert(ids.to(DEVICE), 5, 8)
    assert plan.experts.tolist() == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4]
    sorted_right(plan, ids.flatten().numpy(), 5)


def test_foreign_experts_and_padding_are_left_out():
    ids = torch.randint(-1, 12, (90, 4), generator=torch.Generator().manual_seed(0)).int()
    expert_map = torch.full((12,), -1, dtype=torch.int32)
    expert_map[[9, 2, 5]] = torch.tensor([0, 1, 2], dtype=torch.int32)
    plan = routing.sort_by_expert(ids.to(DEVICE), 3, 16, expert_map.to(DEVICE))
    flat = ids.flatten().numpy()
    sorted_right(plan, np.where(flat < 0, -1, expert_map.numpy()[flat]), 3)
    nobody = routing.sort_by_expert(torch.full((4, 2), -1, dtype=torch.int32, device=DEVICE), 3, 16)
    sorted_right(nobody, np.full(8, -1), 3)


def test_mistakes_are_told():
    with pytest.raises(ValueError, match="beside"):
        routing.route(torch.zeros(2, 6), MoESpec(8, 2))
    with pytest.raises(ValueError, match="top_k 4 of 1 groups of 3"):
        routing.route(torch.zeros(2, 6), MoESpec(6, 4, groups=2))
    with pytest.raises(ValueError, match="a bias of torch.float32"):
        routing.route(torch.zeros(2, 6), MoESpec(6, 2), torch.zeros(5))
    with pytest.raises(ValueError, match="blocks of 12"):
        routing.sort_by_expert(torch.zeros(2, 2, dtype=torch.int32), 4, 12)
    with pytest.raises(ValueError, match="int64"):
        routing.sort_by_expert(torch.zeros(2, 2, dtype=torch.int64), 4, 16)


def test_configurations_are_named_apart():
    names = [s.name for s in routing.specializations()]
    assert len(names) == len(set(names))
