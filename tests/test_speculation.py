"""Speculation: outputs are those of an engine without it, whatever is drafted and whatever else is on."""
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.core.config import (
    CacheSettings,
    Config,
    ModelSettings,
    PlatformSettings,
    SchedulerSettings,
    SpeculationSettings,
)
from isthmus.core.engine import EngineCore
from isthmus.core.errors import ConfigError
from isthmus.core.messages import SamplingParams, Submit, pack_ids, unpack_ids
from isthmus.core.recording.rerun import rerun
from isthmus.core.registry import RegistrationError
from isthmus.core.server.metrics import Metrics
from isthmus.core.server.wire import drafts_of, usage
from isthmus.core.speculation import contract
from isthmus.core.speculation.accept import accepted
from isthmus.core.speculation.contract import DRAFTERS, Drafter, Drafters, Option, Proposals, Setup, View, load_drafter
from isthmus.core.speculation.lengths import Lengths
from isthmus.core.speculation.ngram import NgramDrafter
from isthmus.core.speculation.options import asked, described, options_of
from isthmus.core.speculation.stats import DraftStats
from isthmus.core.speculation.suffix import SuffixDrafter

from .scheduling import MAX_LEN, Run, random_run
from .tiny import tiny_model

COST = 15  # seconds


# ---- the rule

@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 2), max_size=5), max_size=6), st.randoms(use_true_random=False))
def test_a_drafted_token_is_kept_where_it_is_the_one_drawn(drafts, random):
    drawn = [[random.randrange(3) for _ in range(len(draft) + 1)] for draft in drafts]
    right = []
    for draft, tokens in zip(drafts, drawn, strict=True):
        same = [a == b for a, b in zip(draft, tokens, strict=False)]
        right.append(same.index(False) if False in same else len(draft))
    flat = [np.array(sum(lists, []), np.int32) for lists in (drafts, drawn)]
    assert accepted(np.array([*map(len, drafts)], np.int32), *flat).tolist() == right


# ---- the scheduler

def test_random_runs_with_drafts():
    """Every token, page, slot and output against the oracle; a drafter that is right four times out of five."""
    runs = [random_run(seed, 40, grammars=seed % 2 == 1, drafts=(1, 2, 4, 7)[seed % 4]) for seed in range(4)]
    total = {name: sum(run.scheduler.speculation.snapshot()[name] for run in runs)
             for name in ("drafts", "drafted_tokens", "accepted_tokens")}
    assert total["drafts"] > 60 and 0.3 < total["accepted_tokens"] / total["drafted_tokens"] < 0.95, total
    assert not any(run.scheduler.speculation.broken for run in runs)
    assert all(run.scheduler.speculation.drafter.left_slots > 0 for run in runs)


def test_fewer_steps_for_the_same_tokens():
    steps = {}
    for drafts in (0, 4):
        run = Run(drafts=drafts)
        run.submit([1, 2, 3], max_tokens=40, ignore_eos=True)
        run.finish()
        steps[drafts] = run.launched
        assert len(run.tracks["r0"].out) == 40
    assert steps[0] >= 40 and steps[4] < 32, steps


def test_a_short_memory_takes_drafts_before_requests():
    """In memory for exactly what four requests end with, none is sent back for the sake of a draft."""
    retracted = []
    for drafts in (0, 7):
        run = Run(page=1, pages=4 * 12 + 1, max_model_len=12, drafts=drafts, foresight=0)
        for i in range(4):
            run.submit([i, 1, 2, 3], max_tokens=8, ignore_eos=True)
        run.finish()
        retracted.append(run.scheduler.stats.preemptions)
    assert retracted == [0, 0]


def test_a_drafter_that_fails_ends_speculation_and_nothing_else(caplog):
    run = Run(drafts=4)
    run.submit([1, 2, 3], max_tokens=30, ignore_eos=True)
    for _ in range(6):
        run.step()
    run.scheduler.speculation.drafter.fault = True
    run.finish()
    assert len(run.tracks["r0"].out) == 30
    assert run.scheduler.speculation.broken == "the drafter guess failed: the drafter gave up"
    assert [record.message for record in caplog.records].count(
        "speculation ends, requests go on without it: the drafter guess failed: the drafter gave up") == 1


@pytest.mark.parametrize("counts, tokens, words", [
    ([9], [1] * 9, "at most"), ([2], [1], "counts 2"), ([1], [99], "outside the vocabulary"),
    ([1, 1], [1, 1], "at most"), ([-1], [], "at most")])
def test_what_a_drafter_must_not_propose(counts, tokens, words):
    run = Run(drafts=4)
    run.scheduler.speculation.drafter.propose = lambda view: Proposals(np.array(counts), np.array(tokens, np.int64))
    run.submit([1, 2, 3], max_tokens=30, ignore_eos=True)
    run.finish()
    assert words in run.scheduler.speculation.broken and len(run.tracks["r0"].out) == 30


def test_a_row_never_drafts_beyond_its_end():
    run = Run(drafts=7)
    most = []
    propose = run.scheduler.speculation.drafter.propose
    run.scheduler.speculation.drafter.propose = lambda view: most.append(int(view.most[0])) or propose(view)
    run.submit([1] * (MAX_LEN - 8), max_tokens=40, ignore_eos=True)
    run.finish()
    assert len(run.tracks["r0"].out) == 8 and max(most) == 6 and min(most) >= 1


# ---- engines

def engine(speculative: tuple[str, ...] = (), platform: str = "cpu", page: int | None = None, options=(),
           memory: str = "1MiB", **scheduler) -> EngineCore:
    return EngineCore(Config(
        model=ModelSettings(str(tiny_model("llama3"))), cache=CacheSettings(page_size=page, kv_cache_memory=memory),
        speculation=SpeculationSettings(speculative), platform=PlatformSettings(platform, options),
        scheduler=SchedulerSettings(**{"max_running_requests": 8} | scheduler)))


def outputs(core: EngineCore, count: int = 4, **params) -> dict[str, list[int]]:
    """What requests with repetitive prompts get, request by request."""
    for i in range(count):
        given = {"max_tokens": 48, "temperature": 0.0, "ignore_eos": True, "seed": i} | params
        core.submit(Submit(f"r{i}", pack_ids([5 + i, *[6, 7, 8] * 5]), SamplingParams(**given)))
    found: dict[str, list[int]] = {}
    while core.has_work:
        for output in core.step():
            found.setdefault(output.id, []).extend(unpack_ids(output.tokens).tolist())
        core.scheduler.verify()
    return found


@pytest.fixture(scope="module")
def plain():
    """(platform, parameters) -> outputs without speculation."""
    found = {}

    def look(platform: str, **params) -> dict[str, list[int]]:
        key = (platform, *sorted(params.items()))
        if key not in found:
            core = engine((), platform)
            found[key] = outputs(core, **params)
            core.close()
        return found[key]
    return look


@pytest.mark.parametrize("platform, page, overlap", [
    ("cpu", 16, True), ("cpu", 1, True), ("reference", 16, True), ("reference", 1, False)])
def test_greedy_outputs_are_the_same(plain, platform, page, overlap):
    core = engine(("ngram", "tokens=5", "adaptive=0"), platform, page, overlap=overlap)
    assert outputs(core) == plain(platform)
    stats = core.command("stats")
    assert stats["accepted_tokens"] > 20 and stats["pages_used"] == 0
    again = outputs(core)  # from a warm cache
    assert again == plain(platform)
    core.close()


def test_sampled_outputs_are_the_same_draws(plain):
    params = {"temperature": 0.3, "top_p": 0.9, "top_k": 20}
    core = engine(("ngram", "tokens=3", "adaptive=0"))
    assert outputs(core, **params) == plain("cpu", **params)
    assert core.command("stats")["accepted_tokens"] > 0
    core.close()


def test_the_null_platform_checks_every_number_of_a_batch_with_drafts():
    class Copies(Drafter):
        def __init__(self, setup): ...

        def propose(self, view):
            return Proposals(view.most, np.zeros(int(view.most.sum()), np.int32))
    core = engine(("ngram", "adaptive=0"), "null")
    core.scheduler.speculation.drafter = Copies(None)
    right = engine((), "null")
    assert outputs(core) == outputs(right)
    assert core.command("stats")["drafted_tokens"] > 300
    core.close()
    right.close()


def test_a_recording_has_the_drafts_and_is_run_again_without_a_drafter(tmp_path):
    path = tmp_path / "speculation.rec"
    core = engine(("ngram", "adaptive=0"), record=str(path))
    outputs(core, max_tokens=20)
    stats = core.command("stats")
    core.close()
    assert stats["accepted_tokens"] > 0
    outcome = rerun(path)
    assert not outcome.broken and outcome.steps == stats["steps"] + 3  # those of warming up
    assert outcome.stats["accepted_tokens"] == stats["accepted_tokens"]


# ---- drafters

def view(rows: list[list[int]], most: int, width: int = 64) -> View:
    tokens = np.zeros((len(rows) + 1, width), np.int32)
    for slot, row in enumerate(rows, 1):
        tokens[slot, :len(row)] = row
    return View(np.arange(1, len(rows) + 1), np.array([*map(len, rows)], np.int32),
                np.full(len(rows), most, np.int32), tokens, np.zeros((len(rows) + 1, 1), np.int32), [b""] * len(rows))


def ngram(**options: int) -> NgramDrafter:
    own = {name: option.default for name, option in NgramDrafter.options.items()} | options
    return NgramDrafter(Setup(8, 100, 64, 16, 5, own))


def proposed(drafter: Drafter, rows: list[list[int]], most: int) -> list[list[int]]:
    counts, tokens = drafter.propose(view(rows, most))
    return [part.tolist() for part in np.split(tokens, np.cumsum(counts)[:-1])]


def test_ngram_takes_the_latest_place_of_the_longest_run():
    drafter = ngram()
    rows = [[1, 2, 3, 9, 2, 3, 8, 1, 2, 3], [1, 2, 3, 4, 5], [7, 8, 7, 8], [5], [3, 3, 3]]
    assert proposed(drafter, rows, 3) == [[9, 2, 3], [], [7, 8, 7], [], [3, 3, 3]]
    assert proposed(ngram(least=3), rows, 2) == [[9, 2], [], [], [], []]
    assert proposed(ngram(window=3), rows, 2) == [[], [], [], [], [3, 3]]
    assert proposed(ngram(least=1, longest=1), rows, 2) == [[8, 1], [], [7, 8], [], [3, 3]]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=30), st.integers(1, 4), st.integers(1, 6))
def test_ngram_is_what_a_search_finds(text, least, longest):
    longest = max(least, longest)
    best = (0, 0)
    for place in range(len(text) - 1):
        run = 0
        while run < min(longest, place + 1) and text[place - run] == text[len(text) - 1 - run]:
            run += 1
        best = max(best, (run, place))
    want = []
    if best[0] >= least:
        for i in range(4):
            want.append((text + want)[best[1] + 1 + i])
    assert proposed(ngram(least=least, longest=longest), [text], 4) == [want]


# ---- the registry and the setting

def test_the_whole_contract_is_checked_at_registration():
    class Bad:
        options = {"tokens": Option(1, 1, 2, "x"), "ok": Option(3, 1, 2, "x"), "kind": 1}
        on_device = 1

        def propose(self, rows): ...

        def left(self): ...

    with pytest.raises(RegistrationError) as error:
        Drafters("drafter", Drafter, ("propose",)).register("bad", Bad)
    for words in ("propose() lacks the parameters view", "requires parameters that nobody passes: rows", "on_device is",
                  "'tokens' is reserved", "'ok' is no `Option` whose default", "'kind' is no `Option`",
                  "left() lacks the parameters slot, tokens, cached, domain"):
        assert words in str(error.value)
    for name in ("ngram", "auto", "none", "off", "a b"):
        load_drafter("ngram")
        with pytest.raises(RegistrationError, match="registered already|reserved or not a word"):
            DRAFTERS.register(name, NgramDrafter)


class Entry:
    """An entry point of another package."""

    def __init__(self, name, loaded):
        self.name, self.loaded = name, loaded

    def load(self):
        if isinstance(self.loaded, Exception):
            raise self.loaded
        return self.loaded


def test_a_drafter_of_another_package(monkeypatch):
    class Theirs(NgramDrafter):
        options = {"depth": Option(2, 1, 9, "how deep")}

    entries = [Entry("theirs", Theirs), Entry("broken", ImportError("no such thing")), Entry("twice", 1),
               Entry("twice", 2)]
    monkeypatch.setattr(contract, "entry_points", lambda group: entries if group == "isthmus.drafters" else [])
    monkeypatch.setattr(DRAFTERS, "_entries", dict(DRAFTERS._entries))
    assert options_of(asked(("theirs", "depth=4"))) == (Theirs, {"depth": 4})
    for name, words in (("broken", "cannot be loaded: no such thing"), ("twice", "2 packages offer"),
                        ("their", "did you mean theirs")):
        with pytest.raises(ConfigError, match=words):
            load_drafter(name)


@pytest.mark.parametrize("items, words", [
    (("tokens=4",), "no drafter is named"), (("ngram", "tokens"), "'tokens' is not name=value"),
    (("ngram", "tokens=0"), "tokens=0 is no whole number from 1 to 32"), (("ngram", "tokens=x"), "no whole number"),
    (("ngram", "drafter=ngram"), "given twice"), (("ngram", "leest=2"), "did you mean least"),
    (("ngran",), "did you mean ngram"), (("ngram", "least=99"), "least=99 is no whole number from 1 to 16"),
    (("ngram", "least=9", "longest=3"), "least=9 is more than longest=3"),
    (("suffix", "longest=1"), "least=2 is more than longest=1")])
def test_settings_that_cannot_be(items, words):
    with pytest.raises(ConfigError, match=words):
        options_of(asked(items))


def test_settings_that_can():
    assert asked(()) is None and asked(("none",)) is None
    assert asked(("ngram",)) == asked(("drafter=ngram", "tokens=4"))
    kind, options = options_of(asked(("drafter=ngram", "tokens=7", "least=3")))
    assert kind is NgramDrafter and options == {"least": 3, "longest": 8, "window": 32_768}


def test_every_drafter_of_this_tree_is_in_its_module():
    folder = Path(contract.__file__).parent
    assert all((folder / f"{module.removeprefix('.')}.py").is_file() for module in contract.PACKAGES.values())


# ---- the suffix drafter

def suffix(**options: int) -> SuffixDrafter:
    own = {name: option.default for name, option in SuffixDrafter.options.items()} | {"corpus": 1024} | options
    return SuffixDrafter(Setup(8, 100, 64, 16, 5, own))


def leave(drafter: Drafter, tokens: list[int], cached: int = 0, domain: bytes = b"") -> None:
    drafter.left(1, np.array(tokens, np.int32), cached, domain)


def test_suffix_goes_on_as_a_text_in_the_cache_did():
    drafter = suffix()
    leave(drafter, [1, 2, 3, 4, 5, 6, 7])
    assert proposed(drafter, [[9, 2, 3, 4, 5], [9, 3, 4, 5], [4, 5, 6, 7]], 3) == [[6, 7], [], []]
    leave(drafter, [2, 3, 4, 5, 8, 8])
    assert proposed(drafter, [[2, 3, 4, 5]], 3) == [[8, 8]]  # the latest
    own = [2, 3, 7, 0, 2, 3]
    assert proposed(drafter, [own], 2) == [[7, 0]]
    long = list(range(20, 40))
    leave(drafter, long)
    assert proposed(drafter, [[38, 39, *long[:14]]], 2) == [[34, 35]]


def test_suffix_shows_no_text_of_another_domain_nor_of_a_flushed_cache():
    drafter = suffix()
    leave(drafter, [1, 2, 3, 4, 5, 6], domain=b"x")
    assert proposed(drafter, [[1, 2, 3, 4]], 2) == [[]]
    found = drafter.propose(view([[1, 2, 3, 4]], 2)._replace(domains=[b"x"]))
    assert found.tokens.tolist() == [5, 6]
    drafter.flushed()
    assert not len(drafter.propose(view([[1, 2, 3, 4]], 2)._replace(domains=[b"x"])).tokens)


def test_suffix_keeps_the_newest_text_that_has_room():
    rng, drafter, texts = np.random.default_rng(1), suffix(), []
    for _ in range(60):
        texts.append(rng.integers(0, 100, 50).tolist())
        leave(drafter, texts[-1])
    found = [proposed(drafter, [text[:20]], 4)[0] == text[20:24] for text in texts]
    assert sum(found[-19:]) >= 10 and all(found[-4:]) and not any(found[:39])  # newer text takes older one's places
    leave(drafter, rng.integers(0, 100, 5000).tolist())  # longer than all there is
    assert sum(len(p) for p in proposed(drafter, [t[:20] for t in texts[-4:]], 4)) == 0


def test_suffix_takes_in_only_what_the_cache_did_not_have():
    drafter = suffix()
    leave(drafter, list(range(60)))
    at = drafter._at
    leave(drafter, list(range(64)), cached=48)
    assert drafter._at - at == 64 - 48 + 12 + 1


def test_suffix_in_an_engine_repeats_an_answer_at_once(plain):
    core, right = engine(("suffix", "tokens=8", "adaptive=0")), plain("cpu", temperature=1.5)["r0"]
    accepted = []
    for flushed in (False, False, True):
        if flushed:
            core.command("flush_cache")
        before = core.command("stats")
        assert outputs(core, 1, temperature=1.5) == {"r0": right}
        after = core.command("stats")
        accepted.append(after["accepted_tokens"] - before["accepted_tokens"])
        assert after["steps"] - before["steps"] <= 48 + 1 - accepted[-1]
    assert accepted[0] == accepted[2] < 10 and accepted[1] >= 40
    core.close()


# ---- lengths

def lengths(right: float, extra: float, rows: int = 1, host: float = 0.0, steps: int = 600) -> tuple[float, Lengths]:
    """(tokens per second to those without drafts, what it came to) of `rows` requests whose drafted tokens are right
    so often, on a device whose step takes 1 + `extra` a drafted token, and `host` more where overlap is given up."""
    rng, adapt, slots = np.random.default_rng(0), Lengths(9, 8), np.arange(1, rows + 1)
    tokens = seconds = 0.0
    for _ in range(steps):
        waits = adapt.soon(slots)
        most = adapt.most(slots)
        counts = most * waits
        drafted = int(counts.sum())
        kept = np.array([next((i for i in range(c) if rng.random() > right), c) for c in counts])
        if drafted:
            adapt.asked(slots[counts > 0], counts[counts > 0])
            adapt.settled(slots[counts > 0], counts[counts > 0], kept[counts > 0])
        took = 1 + extra * drafted + host * waits
        adapt.stepped(rows, drafted, rows + int(kept.sum()), took, waits)
        tokens, seconds = tokens + rows + kept.sum(), seconds + took
    return tokens / seconds / rows, adapt


@pytest.mark.parametrize("right, extra, rows, host, least", [
    (0.9, 0.05, 1, 0.02, 3.0), (0.5, 0.05, 1, 0.02, 1.3), (0.0, 0.05, 1, 0.02, 0.97), (0.2, 0.5, 1, 0.02, 0.97),
    (0.9, 0.2, 8, 0.02, 0.97), (0.0, 0.05, 8, 0.1, 0.96), (0.05, 0.3, 4, 0.2, 0.95)])
def test_drafts_are_as_long_as_they_pay(right, extra, rows, host, least):
    """Faster where there is something to win, and next to nothing lost where there is not."""
    found, adapt = lengths(right, extra, rows, host)
    assert found >= least, (found, adapt.state)


def test_speculation_that_loses_says_so(caplog):
    with caplog.at_level("INFO"):
        _, adapt = lengths(0.1, 0.01, 2, host=0.5, steps=60)
    assert len(caplog.records) == 1 and adapt.state in caplog.text
    assert adapt.state.startswith("paused for 64 steps: ") and "tokens/s with drafts" in adapt.state


# ---- what is told

def test_places_and_requests_are_counted():
    stats = DraftStats(4, 5)
    stats.count(np.array([1, 2]), np.array([4, 2]), np.array([3, 0]))
    stats.count(np.array([1]), np.array([1]), np.array([1]))
    found = stats.snapshot()
    assert (found["drafts"], found["drafted_tokens"], found["accepted_tokens"]) == (3, 7, 4)
    assert (found["drafted_at"], found["accepted_at"]) == ([3, 2, 1, 1], [2, 1, 1, 0])
    assert (stats.of(1), stats.of(2), stats.of(1)) == ((5, 4), (2, 0), (0, 0))


def test_a_request_ends_with_what_was_drafted_for_it_and_the_metrics_have_the_sums(plain):
    core = engine(("ngram", "adaptive=0"))
    params = SamplingParams(max_tokens=48, temperature=0.0, ignore_eos=True)
    core.submit(Submit("a", pack_ids([5, *[6, 7, 8] * 5]), params))
    ends = []
    while core.has_work:
        ends += [output for output in core.step() if output.finish or output.drafted]
    stats, metrics = core.command("stats"), Metrics(("isthmus", "vllm", "sglang"))
    core.close()
    assert [(e.drafted, e.accepted) for e in ends] == [(stats["drafted_tokens"], stats["accepted_tokens"])]
    text = metrics.export("m", {}, stats).decode()
    for name, value in (("isthmus_accepted_draft_tokens_total", stats["accepted_tokens"]),
                        ("vllm:spec_decode_num_draft_tokens_total", stats["drafted_tokens"]),
                        ("sglang:spec_accept_length", 1 + stats["accepted_tokens"] / stats["drafts"])):
        assert any(line.startswith(name) and float(line.rsplit(" ", 1)[1]) == value for line in text.splitlines()), name
    assert 'isthmus_accepted_draft_tokens_at_total{model_name="m",place="0"}' in text
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="m",position="3"}' in text
    numbers = usage(5, 48, 0, 0, ends[0].drafted, ends[0].accepted)
    assert drafts_of(numbers) == (ends[0].drafted, ends[0].accepted) and drafts_of(usage(1, 1, 0, 2)) == (0, 0)
    details = numbers.completion_tokens_details
    assert (details.accepted_prediction_tokens, details.rejected_prediction_tokens) == (
        ends[0].accepted, ends[0].drafted - ends[0].accepted)


def test_the_setting_in_words():
    assert described(("ngram", "adaptive=0")) == ("ngram, 4 tokens", "always, least 2, longest 8, window 32768")
    assert described(("suffix",))[0] == "suffix, up to 4 tokens" and described(()) == ("off", "")
