"""Trees of drafts: what is said never changes, whichever way through a tree is right, and no page is lost."""
from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from isthmus.core.errors import ConfigError
from isthmus.core.recording.rerun import rerun
from isthmus.core.scheduler import batch, scheduler
from isthmus.core.scheduler.plans import Drafts
from isthmus.core.speculation import branches, settle, speculation
from isthmus.core.speculation.contract import Ways
from isthmus.core.speculation.speculation import Speculation
from isthmus.platforms.reference.platform import Platform
from safetensors.torch import load_file, save_file

from .drafting import SAMPLED, drafted, engine, outputs, same_outputs, without_drafts
from .mutants import Mutant
from .scheduling import Run, random_run
from .test_speculation_pairs import drive
from .tiny import tiny_model

COST = 45  # seconds


# ---- the scheduler

def test_random_runs_with_trees():
    """Every token, page, slot and output against the oracle; requests go on in their branches too."""
    runs = [random_run(seed, 40, grammars=seed % 2 == 1, drafts=(1, 3, 4, 6)[seed % 4], branches=1 + seed % 3)
            for seed in range(4)]
    assert not any(run.scheduler.speculation.broken for run in runs)
    assert sum(run.taken for run in runs) > 4, [run.taken for run in runs]


@pytest.mark.parametrize("page", [1, 2, 4, 16])
def test_a_tree_takes_fewer_steps_than_its_first_way_alone(page):
    steps = []
    for ways in (0, 3):
        run = Run(page, 400 // page + 4, drafts=4, branches=ways)
        for i in range(3):
            run.submit([i, 1, 2, 3], max_tokens=40, ignore_eos=True)
        run.finish()
        assert bool(run.taken) == bool(ways)
        steps.append(run.launched)
    assert steps[1] < steps[0], steps


def test_branches_take_no_page_that_anybody_has_a_use_for():
    """In memory for exactly what the requests end with nobody is sent back, and nothing cached goes for a branch."""
    run = Run(page=1, pages=4 * 12 + 1, max_model_len=12, drafts=3, branches=3, foresight=0)
    for i in range(4):
        run.submit([i, 1, 2, 3], max_tokens=8, ignore_eos=True)
    run.finish()
    assert run.scheduler.stats.preemptions == 0
    proposals = Ways(np.array([2, 2, 1], np.int32), np.arange(5, dtype=np.int32), np.array([0, 0, 1]))
    lengths = np.array([4, 4])
    for tokens, rows, pages, kept in ((3, 1, 3, 3), (2, 1, 3, 2), (3, 0, 3, 2), (3, 1, 2, 2)):
        assert len(branches.fitting(proposals, lengths, 1, tokens, rows, pages).counts) == kept


@pytest.mark.parametrize("owners, words", [
    ([0, 0, 0, 0], "each of 1 may have 3"), ([1], "chains for the requests"), ([-1], "chains for the requests")])
def test_what_a_drafter_must_not_propose(owners, words):
    run = Run(drafts=4, branches=2)
    run.scheduler.speculation.drafter.propose = lambda view: Ways(
        np.ones(len(owners), np.int32), np.ones(len(owners), np.int32), np.array(owners))
    run.submit([1, 2, 3], max_tokens=30, ignore_eos=True)
    run.finish()
    assert words in run.scheduler.speculation.broken and len(run.tracks["r0"].out) == 30


# ---- engines

@pytest.fixture(scope="module")
def plain():
    return without_drafts()


@pytest.fixture(scope="module")
def near(tmp_path_factory) -> Path:
    """The model "llama3" with some noise: often right, and more often with its second guess."""
    folder = tmp_path_factory.mktemp("near")
    shutil.copytree(tiny_model("llama3"), folder, dirs_exist_ok=True)
    draw, tensors = torch.Generator().manual_seed(1), load_file(folder / "model.safetensors")
    save_file({name: w + torch.randn(w.shape, generator=draw) * 0.15 * w.std() for name, w in tensors.items()},
              folder / "model.safetensors", {"format": "pt"})
    return folder


def count_taken(monkeypatch) -> list[int]:
    """Grows by what each settled step goes on with that is a branch."""
    found: list[int] = []
    take_over = settle.take_over

    def counted(table, drafts: Drafts, size: int) -> None:
        found.append(int(np.count_nonzero(drafts.shifts)))
        take_over(table, drafts, size)
    monkeypatch.setattr(settle, "take_over", counted)
    return found


@pytest.mark.parametrize("platform, page", [("reference", 1), ("reference", 16), ("cpu", 1), ("cpu", 16)])
def test_outputs_are_those_without_drafts(plain, near, platform, page, monkeypatch):
    """Greedy, sampled, and from a warm cache; three requests at once."""
    taken = count_taken(monkeypatch)
    share = same_outputs(plain, "draft", f"model={near}", "tokens=3", "branches=2", platform=platform, page=page)
    assert share > 0.1 and sum(taken) > 3, (share, sum(taken))


@pytest.mark.slow
@pytest.mark.parametrize("page", [1, 16])
@pytest.mark.parametrize("count, most", [(1, 24), (4, 12), (16, 5)])
def test_outputs_of_batches(near, count, most, page, monkeypatch):
    taken = count_taken(monkeypatch)
    given = {"max_running_requests": 16, "page": page, "memory": "8MiB"}
    cores = [engine(**given), engine("draft", f"model={near}", "tokens=4", "branches=3", "adaptive=0", **given)]
    for params in ({}, SAMPLED, {})[:3 - count // 16]:
        without, tree = (outputs(core, count, most, **params) for core in cores)
        assert tree == without
    assert drafted(cores[1]) > 0.05 and sum(taken) > 0
    for core in cores:
        core.close()


def test_a_tree_takes_more_than_its_first_way_alone(near):
    """Of the same drafts: tokens that a step with a draft gives."""
    lengths = []
    for ways in ("branches=0", "branches=3"):
        core = engine("draft", f"model={near}", "tokens=3", ways, "adaptive=0")
        outputs(core, most=24)
        stats = core.command("stats")
        lengths.append(stats["accepted_tokens"] / stats["drafts"])
        core.close()
    assert lengths[1] > lengths[0], lengths


def test_a_recording_has_the_tree_and_is_run_again_without_a_drafter(near, tmp_path, monkeypatch):
    path, taken = tmp_path / "tree.rec", count_taken(monkeypatch)
    core = engine("draft", f"model={near}", "branches=2", "adaptive=0", page=4, record=str(path))
    outputs(core)
    stats = core.command("stats")
    core.close()
    assert sum(taken) > 0
    outcome = rerun(path)
    assert not outcome.broken and outcome.stats["accepted_tokens"] == stats["accepted_tokens"]


def test_a_platform_without_log_probabilities_is_told(near, monkeypatch):
    probe = Platform.probe

    def without(self, rank=0, world=1):
        manifest = probe(self, rank, world)
        return replace(manifest, features=manifest.features - {"logprobs"})
    monkeypatch.setattr(Platform, "probe", without)
    with pytest.raises(ConfigError, match="--speculative branches=2: .* no log-probabilities: .*; leave branches"):
        engine("draft", f"model={near}", "branches=2")


# ---- seeded bugs

MUTANTS = [
    Mutant("a branch is written to the request's pages", batch, "_more_rows", "page + drafts.shifts[drafts.rows]",
           "page"),
    Mutant("a branch reads the request's pages", batch, "_branch", "columns[own & ~beyond] +=",
           "columns[own & ~beyond] += 0 *"),
    Mutant("a branch shares a page too many", batch, "_branch", "(drafts.lengths - 1) // page_size,",
           "drafts.lengths // page_size + 1,"),
    Mutant("a row reads pages past its context", batch, "_branch", "np.where(beyond, 0, table",
           "np.where(False, 0, table"),
    Mutant("a branch begins with nothing", branches, "place", "if last % size:", "if False:"),
    Mutant("a branch begins with another page", branches, "place", "last // size]), int(pages",
           "last // size - 1]), int(pages"),
    Mutant("the way with least tokens is taken", branches, "best", "-kept", "kept"),
    Mutant("a branch that is taken leaves its pages behind", settle, "take_over",
           "pages[ours], pages[theirs] = pages[theirs], pages[ours]", "pass"),
    Mutant("a page has two places", settle, "take_over", "pages[ours], pages[theirs] = pages[theirs], pages[ours]",
           "pages[ours] = pages[theirs]"),
    Mutant("draws are those of the first way", scheduler, "settle_drafts", "np.isin(drafts.rows, chosen)",
           "np.isin(drafts.rows, np.flatnonzero(drafts.shifts == 0))"),
    Mutant("a logit row is another way's", scheduler, "settle_drafts", "starts[chosen]",
           "starts[np.flatnonzero(drafts.shifts == 0)]"),
    Mutant("the first way has too few pages", Speculation, "_drafts", "self._grow(slots, lengths + ways)",
           "self._grow(slots, lengths + np.minimum(ways, 1))"),
    Mutant("branches take cached pages", branches, "fitting", "need <= pages", "True"),
]


def look_for(mutant: Mutant) -> None:
    """Runs that find a seeded bug of trees."""
    for on in (("tree",), ("tree", "logprobs"), ("tree", "grammar"), ("tree", "penalties", "sampling"),
               ("tree", "small_pages"), ("tree", "buckets")):
        for seed in range(3):
            run = drive(frozenset(on), seed, requests=6)
            assert not run.scheduler.speculation.broken
    test_branches_take_no_page_that_anybody_has_a_use_for()
    test_a_tree_takes_fewer_steps_than_its_first_way_alone(4)


def test_the_search_for_seeded_bugs_finds_none_where_none_is():
    look_for(MUTANTS[0])


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda m: m.name)
def test_every_mutant_is_caught(mutant, monkeypatch):
    mutant.apply(monkeypatch)
    if mutant.function in ("best", "take_over"):
        monkeypatch.setattr(settle, mutant.function, getattr(mutant.owner, mutant.function))
    if mutant.owner is branches and mutant.function in ("place", "fitting"):
        monkeypatch.setattr(speculation, mutant.function, getattr(branches, mutant.function))
    with pytest.raises((AssertionError, IndexError, ValueError)):
        look_for(mutant)
