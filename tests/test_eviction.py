"""Eviction policies: their contract, their order on small cases, the tree's laws under each, and what is learned."""
from __future__ import annotations

from bisect import bisect_right
from collections import OrderedDict
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, run_state_machine_as_test
from isthmus.core.cache.eviction import EVICTION, EvictionRegistry, LeastRecentlyUsed, Unwatching
from isthmus.core.cache.eviction.learned import REBUILD, hint_kind
from isthmus.core.cache.eviction.reuse import BINS, EDGES, RING, ReuseModel, group
from isthmus.core.cache.eviction.shadow import LruShadow
from isthmus.core.cache.manager import CacheManager
from isthmus.core.messages import CacheHint
from isthmus.core.registry import RegistrationError

from .cache_machine import CacheMachine

COST = 15  # seconds


class Requests:
    """Runs prompts of one-token pages through a cache, one after the other."""

    def __init__(self, policy: str, pages: int):
        self.cache, self.now = CacheManager(pages + 1, 1, policy, strict=True), 0.0

    def run(self, *tokens: int, hint: CacheHint | None = None, priority: int = 0, after: float = 1.0) -> int:
        """How many tokens were cached."""
        self.now += after
        self.cache.tick(self.now)
        ids = np.array(tokens, np.int32)
        pages, node = self.cache.acquire(ids, b"")
        use = self.cache.admit(ids, len(pages), node, hint, priority)
        fresh = self.cache.take(len(ids) - len(pages), 1)
        row = np.concatenate([pages, fresh])
        shared, node = self.cache.commit(ids, row, len(pages), 1, b"", node, use)
        self.cache.release(row, shared, 1, node, use)
        return len(pages)

    def cached(self, *tokens: int) -> int:
        return self.cache.cached_tokens(np.array(tokens, np.int32), b"")


# ---- the contract

class NoEnd(Unwatching):
    def add(self, node): ...
    def pop(self): ...
    end = None


class NoWatches(LeastRecentlyUsed):
    watches = None


class Sticky(LeastRecentlyUsed):
    """Gives leaves in use too."""

    def __init__(self, capacity):
        super().__init__(capacity)
        self.nodes = []

    def add(self, node):
        self.nodes.append(node)

    def pop(self):
        return self.nodes.pop() if self.nodes else None


class Forgetful(LeastRecentlyUsed):
    def add(self, node):
        if node.stamp != 2:
            super().add(node)


class Broken(LeastRecentlyUsed):
    watches = True

    def drop(self, node, keep):
        raise KeyError("nothing here")


@pytest.mark.parametrize(("kind", "words"), [
    (NoEnd, "end"), (NoWatches, "`watches` is neither True nor False"), (Sticky, "pop() gave"),
    (Forgetful, "pop() gave"), (Broken, "nothing here"), (dict, "add")])
def test_a_policy_with_gaps_is_refused_when_it_is_registered(kind, words):
    registry = EvictionRegistry()
    with pytest.raises(RegistrationError, match="eviction policy 'mine'") as refusal:
        registry.register("mine", kind)
    assert words in str(refusal.value) and registry.names() == []


def test_a_name_of_ours_is_taken():
    with pytest.raises(RegistrationError, match="'arc' is registered already"):
        EVICTION.register("arc", LeastRecentlyUsed)


def test_a_whole_policy_is_taken_and_can_be_chosen(monkeypatch):
    monkeypatch.setitem(EVICTION._entries, "newest", Newest)
    assert EvictionRegistry().register("newest", Newest) is Newest
    requests = Requests("newest", 2)
    requests.run(1)
    requests.run(2)
    requests.run(3)
    assert (requests.cached(1), requests.cached(2), requests.cached(3)) == (1, 0, 1)


class Newest(Unwatching):
    def __init__(self, capacity):
        super().__init__(capacity)
        self.stack = []

    def add(self, node):
        self.stack.append(node)

    def pop(self):
        while self.stack:
            node = self.stack.pop()
            if node.evictable:
                return node
        return None


# ---- each policy's order

def evicted(policy: str, *runs: tuple, pages: int = 6) -> list[int]:
    """First tokens in the order in which their one-page prompts are evicted, after runs of (token, arguments)."""
    requests = Requests(policy, pages)
    for token, *more in runs:
        requests.run(token, **(more[0] if more else {}))
    gone, tokens = [], sorted({run[0] for run in runs})
    while requests.cache.tree.evictable:
        requests.cache.pool.release(requests.cache.tree.evict(1), -1)
        gone += [t for t in tokens if not requests.cached(t) and t not in gone]
    return gone


def test_order_of_lru():
    assert evicted("lru", (1,), (2,), (3,), (1,)) == [2, 3, 1]


def test_order_of_lfu_and_its_ageing():
    assert evicted("lfu", (1,), (1,), (2,), (3,)) == [2, 3, 1]
    requests = Requests("lfu", 2)
    for token in (1, 1, 1):
        requests.run(token)
    for token in range(10, 20):      # each comes in one count above the one that went before it
        requests.run(token)
    assert not requests.cached(1), "what was popular once stays for ever"


def test_order_of_slru():
    assert evicted("slru", (1,), (1,), (2,), (3,), (3,), (4,)) == [2, 4, 1, 3]
    requests = Requests("slru", 5)   # at most four of five pages are protected
    for token in (1, 2, 3, 4, 5):
        requests.run(token)
        requests.run(token)
    requests.run(6)
    assert not requests.cached(1) and requests.cached(2)


def test_order_of_arc_follows_what_is_asked_for():
    requests = Requests("arc", 4)
    for token in (1, 1, 2, 2, 3, 4):
        requests.run(token)
    requests.run(5)                  # pages used once go first: 3
    assert not requests.cached(3) and requests.cached(1)
    requests.run(3)                  # a ghost of those: they get a page, and 3 counts as used again
    assert requests.cache.tree.policy._target == 1.0
    assert requests.cached(3)
    requests.run(6)
    requests.run(7)
    assert requests.cached(7) and requests.cached(3)


def test_order_of_ttl():
    ends, soon, late = CacheHint(ends=True), CacheHint(next_within=10.0), CacheHint(next_within=1000.0)
    assert evicted("ttl", (1, {"hint": late}), (2,), (3, {"hint": soon}), (4, {"hint": ends})) == [4, 3, 2, 1]


def test_order_of_priority():
    assert evicted("priority", (1, {"priority": 2}), (2,), (3, {"priority": -1}), (4,)) == [3, 2, 4, 1]


def test_order_of_learned_before_there_is_data():
    assert evicted("learned", (1,), (2,), (3,), (1,)) == [2, 3, 1]


@pytest.mark.parametrize("policy", EVICTION.names())
def test_the_tail_goes_first_and_page_by_page(policy):
    requests = Requests(policy, 8)
    requests.run(1, 2, 3, 4, 5, 6)
    requests.run(7, 8, 9)            # one page short: one goes
    assert requests.cached(1, 2, 3, 4, 5, 6) == 5 and requests.cached(7, 8, 9) == 3


@pytest.mark.parametrize("policy", sorted(set(EVICTION) - {"lru"}))
def test_the_laws_of_the_tree_hold_under_any_policy(policy, monkeypatch):
    monkeypatch.setattr("isthmus.core.cache.eviction.learned.REBUILD", 3)

    class Machine(CacheMachine):
        @initialize(page=st.sampled_from([1, 2, 4]), pages=st.integers(6, 40), policy=st.just(policy))
        def begin(self, page: int, pages: int, policy: str) -> None:
            super().begin(page=page, pages=pages, policy=policy)
            assert type(self.cache.tree.policy) is type(EVICTION.create(policy, 1))

    run_state_machine_as_test(Machine, settings=settings(max_examples=30, stateful_step_count=25, deadline=None))


# ---- what is learned

def conversations(requests: Requests, count: int, hint: CacheHint | None, seed: int = 3) -> None:
    """Texts of four pages: half are asked for again ten requests later; the others never, and say so by `hint`."""
    draw, due = np.random.default_rng(seed), []
    for i in range(count):
        if due and due[0][0] <= i:
            requests.run(*due.pop(0)[1])
            continue
        text, dead = [10_000 + 4 * i + k for k in range(4)], draw.random() < 0.5
        requests.run(*text, hint=hint if dead else None)
        if not dead:
            due.append((i + 10, text))


def test_a_hinted_end_goes_before_what_is_older_once_that_was_learned():
    ends = CacheHint(ends=True)
    requests = Requests("learned", 36)          # less than LRU needs to have them when they come again
    conversations(requests, 400, ends)
    requests.run(1, 2, 3, 4)                # may come again
    for i in range(3):
        requests.run(5 + 4 * i, 6 + 4 * i, 7 + 4 * i, 8 + 4 * i, hint=ends)
    while any(requests.cached(5 + 4 * i) for i in range(3)):
        requests.cache.pool.release(requests.cache.tree.evict(1), -1)
    assert requests.cached(1, 2, 3, 4) == 4


def hits_of(policy: str, hint: CacheHint | None, lie: bool = False) -> int:
    requests = Requests(policy, 60)
    draw, due, hits = np.random.default_rng(5), [], 0
    for i in range(1500):
        if due and due[0][0] <= i:
            hits += requests.run(*due.pop(0)[1])
            continue
        text, dead = [10_000 + 4 * i + k for k in range(4)], draw.random() < 0.6
        requests.run(*text, hint=hint if dead != lie else None)
        if not dead:
            due.append((i + 25, text))
    return hits


def test_hints_help_and_wrong_hints_are_unlearned():
    ends = CacheHint(ends=True)
    lru, plain, told, lied = (hits_of("lru", None), hits_of("learned", None), hits_of("learned", ends),
                              hits_of("learned", ends, lie=True))
    assert told > max(lru, plain) * 1.2, (lru, plain, told)
    assert lied > max(lru, plain), "a hint that is always wrong tells as much as one that is right"


def test_hint_kinds():
    kinds = [hint_kind(h) for h in (None, CacheHint("s"), CacheHint(ends=True), CacheHint(single=True),
                                    CacheHint(next_within=1.0), CacheHint(next_within=30.0),
                                    CacheHint(next_within=300.0), CacheHint(next_within=3000.0))]
    assert kinds == [0, 0, 1, 2, 3, 4, 5, 6]


def test_learned_is_lru_while_lru_would_have_hit_more(monkeypatch):
    """An index that is upside down, which keeps what is worth least."""
    learn = ReuseModel.learn

    def upside_down(self, kinds, events):
        learn(self, kinds, events)
        self.index[:] = np.arange(BINS) + 1.0  # the older, the dearer

    def hits(policy):
        requests, draw = Requests(policy, 40), np.random.default_rng(1)
        found = [requests.run(*(int(t), int(t) + 1000)) for t in draw.zipf(1.3, 6000) % 200]
        return sum(found[:2000]), sum(found[3000:]), requests.cache.tree.policy

    lru = hits("lru")
    monkeypatch.setattr(ReuseModel, "learn", upside_down)
    wrong = hits("learned")
    assert wrong[1] > 0.97 * lru[1], (wrong[1], lru[1])
    for limit in ("LOST", "CREDIT"):
        monkeypatch.setattr(f"isthmus.core.cache.eviction.learned.{limit}", 9.0)
    wrong = hits("learned")
    assert wrong[2].plain, "it never noticed"
    assert wrong[1] > 0.93 * lru[1], (wrong[1], lru[1])
    monkeypatch.setattr("isthmus.core.cache.eviction.learned.BEHIND", 9.0)
    assert hits("learned")[1] < 0.9 * lru[1], "the index was not upside down"


@pytest.mark.parametrize("missing", [False, True])
def test_no_more_pages_are_out_than_lru_has_missed_and_learning_may_cost(missing, monkeypatch):
    """An index that is upside down, where LRU misses nothing and where it misses something all the time."""
    learn = ReuseModel.learn

    def upside_down(self, kinds, events):
        learn(self, kinds, events)
        self.index[:] = np.arange(BINS) + 1.0

    monkeypatch.setattr(ReuseModel, "learn", upside_down)
    requests, lru, draw = Requests("learned", 100), Requests("lru", 100), np.random.default_rng(2)
    policy, ours, best, grown = requests.cache.tree.policy, 0, 0, 0
    monkeypatch.setattr("isthmus.core.cache.eviction.learned.BEHIND", 9.0)  # it may not fall back to LRU altogether
    for i in range(3000):
        gap = int(draw.integers(1, 80 if missing and i < 1500 else 20))
        text = [2 * max(0, i - gap), 2 * max(0, i - gap) + 1] if i % 2 else [2 * i, 2 * i + 1]
        before, ours, best = policy.shadow.out, ours + requests.run(*text), best + lru.run(*text)
        grown += policy.shadow.out > before
        assert policy.shadow.out <= max(before, policy.spare + 2), "more than a text beyond what is allowed"
        assert policy._behind_ever == pytest.approx(best - ours), "LRU beside it is another LRU"
    assert grown > 2, "nothing was ever out"
    if not missing:
        assert best - ours <= 0.003 * 100 + 0.0015 * 6000 + 2, "pages were given up where nothing could be won by it"


def searched(policy, nodes) -> tuple[int, int] | None:
    """(last use, class) of the leaf that should go, by a search through all leaves; None when there is none."""
    firsts: dict[int, int] = {}
    for _, node in nodes:
        if node.evictable:
            kind = group(node.hits) * policy.model.kinds + policy._kind[node.mark % RING]
            firsts[kind] = min(node.mark, firsts.get(kind, node.mark))
    oldest = min(((mark, kind) for kind, mark in firsts.items()), default=None)
    if policy.plain or not firsts:
        return oldest
    worth = {kind: policy._index[kind][bisect_right(EDGES[1:BINS].tolist(), policy._used - mark)]
             for kind, mark in firsts.items()}
    least = min(firsts, key=lambda kind: (worth[kind], firsts[kind], kind))
    policy.shadow.settle(policy._used)
    bound = policy.shadow.bound
    if bound <= firsts[least] > oldest[0] and policy.shadow.out >= policy.spare:
        free = [kind for kind in firsts if firsts[kind] < bound]
        if not free:
            return oldest
        least = min(free, key=lambda kind: (worth[kind], firsts[kind], kind))
    return firsts[least], least


@pytest.mark.parametrize("seed", range(3))
def test_the_leaf_that_goes_is_the_one_that_a_search_finds(seed, monkeypatch):
    monkeypatch.setattr("isthmus.core.cache.eviction.learned.REBUILD", 20)
    requests, draw, texts, chosen = Requests("learned", 60), np.random.default_rng(seed), [[0]], set()
    tree = requests.cache.tree
    policy, pop = tree.policy, tree.policy.pop

    def checked():
        want = searched(policy, tree.nodes())
        node = pop()
        kind = node and group(node.hits) * policy.model.kinds + policy._kind[node.mark % RING]
        assert (node and (node.mark, kind)) == want
        chosen.add(kind)
        return node

    tree.choose_by(checked)
    for i in range(1200):
        text = texts[-1 - min(int(draw.pareto(1.0) * 5), len(texts) - 1)]
        text = text[:draw.integers(1, 12)] + [1000 + i] * int(draw.integers(0, 4))
        texts.append(text)
        requests.run(*text, hint=CacheHint(ends=True) if draw.random() < 0.3 else None)
        if i % 100 == 99:
            policy.plain = i % 200 == 99  # until it looks again
            for count in draw.integers(1, 20, 4).tolist():
                requests.cache.pool.release(tree.evict(count), -1)
    assert len(chosen) > 5


@pytest.mark.parametrize("seed", range(4))
def test_many_leaves_at_once_are_those_that_go_one_by_one(seed, monkeypatch):
    monkeypatch.setattr("isthmus.core.cache.eviction.learned.REBUILD", 20)
    draw, texts, runs = np.random.default_rng(seed), [[0]], []
    both = [Requests("learned", 150), Requests("learned", 150)]
    for requests, once in zip(both, (False, True), strict=True):
        tree = requests.cache.tree
        if once:
            tree.choose_by(tree.policy.pop)
        else:
            tree.run = lambda pages, run=tree.run: runs.append(run(pages)) or runs[-1]
    for i in range(1500):
        text = texts[-1 - min(int(draw.pareto(1.0) * 9), len(texts) - 1)]
        text = text[:draw.integers(0, 12)] + [1000 + i] * int(draw.integers(1, 4))
        texts.append(text)
        hint = CacheHint(ends=True) if draw.random() < 0.3 else None
        found = [requests.run(*text, hint=hint) for requests in both]
        if i % 25 == 24:
            gone = [requests.cache.tree.evict(int(i % 60)) for requests in both]
            assert gone[0].tolist() == gone[1].tolist()
            for requests, pages in zip(both, gone, strict=True):
                requests.cache.pool.release(pages, -1)
        assert found[0] == found[1]
        policies = [requests.cache.tree.policy for requests in both]
        assert policies[0].spare == policies[1].spare and policies[0].shadow.out == policies[1].shadow.out
        assert policies[0].ghosts.pages == policies[1].ghosts.pages
    longest = max(len(nodes) for nodes, _ in runs)
    assert longest > 2 and any(keep for _, keep in runs), longest


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 9)), min_size=1, max_size=120), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_pages_that_are_out_are_counted_until_lru_has_dropped_them_too(asked, room):
    """Pages one by one; the cache evicts any of its own, LRU the one that was used longest ago."""
    shadow, lru, last, held = LruShadow(), OrderedDict(), {}, []
    for use, (page, victim) in enumerate(asked, 1):
        there = page in held
        shadow.use(use, [last[page], 1, 1, use if there else -use] if page in last else [])
        if there:
            held.remove(page)
        elif len(held) == room:
            gone = held.pop(victim % room)
            shadow.shrank([SimpleNamespace(mark=last[gone], size=1)], 0, room - 1)
        if not there:
            shadow.grew(use, 1, len(held) + 1)
        held.append(page)
        last[page] = use
        lru[page] = None
        lru.move_to_end(page)
        if len(lru) > room:
            lru.popitem(last=False)
        shadow.settle(use)  # as whoever asks does first
        assert shadow.out == len(set(lru) - set(held))


@given(st.lists(st.integers(0, 12), min_size=1, max_size=120), st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_the_shadow_is_lru(asked, room):
    """Pages one by one, beside an ordered dict of `room` pages."""
    shadow, lru, last = LruShadow(), OrderedDict(), {}
    for use, page in enumerate(asked, 1):
        hit = shadow.use(use, [last[page], 1, 1, -use] if page in last else [])
        assert hit == (page in lru)
        shadow.grew(use, 1, room)
        last[page] = use
        lru[page] = None
        lru.move_to_end(page)
        if len(lru) > room:
            lru.popitem(last=False)


def test_the_model_counts_what_reached_an_age_and_what_was_used_at_it():
    """One kind, a page per use, each used again three uses later or never: a chance of one half at age 3."""
    model, events, marks = ReuseModel(1), [], {}
    for use in range(1, 4 * REBUILD + 1):
        events += [0, 0, 1, use]                          # a new page
        marks[use] = use
        before = use - 3
        if before > 0 and before % 2 == 0:
            events += [before, 1, 1, use]                 # that of three uses ago, if its number is even
        if use % REBUILD == 0:
            model.learn([0] * REBUILD, events)
            events = []
    at = int(np.searchsorted(EDGES, 3, "right")) - 1
    never = model.died[0] / np.maximum(model.reached[0], 1e-9)
    assert never[at] == pytest.approx(0.5, abs=0.02)
    assert never[:at].max() == 0 and never[at + 1:10].max() == 0
    best = int(model.index[0].argmax())
    assert best == at, "a page is worth most just before it is used"
    assert model.index[0, at] > 20 * model.index[0, at + 1]


def test_the_index_is_the_best_ratio_over_all_horizons():
    draw, model = np.random.default_rng(0), ReuseModel(2)
    model.reached[:3] = 1000 * draw.random((3, BINS)).cumsum(1)[:, ::-1]
    model.died[:3] = model.reached[:3] * draw.random((3, BINS)) * 0.3
    model._rebuild()
    prior = 10.0
    common = (model.died.sum(0) + 0.001 * prior) / (model.reached.sum(0) + 0.1 * prior)
    for kind in range(4):
        hazard = np.minimum(0.999, (model.died[kind] + prior * common) / (model.reached[kind] + prior))
        for age in (0, 5, BINS - 1):
            alive, used, held, best = 1.0, 0.0, 0.0, 0.0
            for k in range(age, BINS):
                ends = alive * hazard[k]
                used += ends
                held += (EDGES[k + 1] - EDGES[k]) * (alive - ends / 2)
                alive -= ends
                best = max(best, used / held)
            assert model.index[kind, age] == pytest.approx(best, rel=1e-9)


def test_what_was_evicted_and_comes_again_counts_as_used_again():
    requests = Requests("learned", 4)
    requests.run(1, 2, 3)
    requests.run(7, 8, 9)
    assert requests.cached(1, 2, 3) == 1
    requests.run(1, 2, 3, 4)                              # 2 and 3 are ghosts, 4 is new
    hits = {tuple(np.frombuffer(path, np.int32).tolist()): node.hits for path, node in requests.cache.tree.nodes()}
    assert hits[(1, 2, 3)] == 1 and hits[(1, 2, 3, 4)] == 0
