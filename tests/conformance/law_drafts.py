"""Law 7, drafts: a step with several sampled rows of a sequence draws what a token at a time draws, also where the
sequence has several rows: branches, which share the pages of what is before them.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from ..core.plan import Sampling
from .case import Case, Context, Needs, Wrong, random_source
from .driver import Driver, Model
from .opcase import DTYPES
from .oracle import LOGITS_NMSE, check_logits, margin, right, text
from .tiny import MODEL_FEATURES, tiny_model

KINDS, PAGES = ("llama", "gemma3"), (1, 16)
TEMPERATURE = 0.7
BRANCH = 100  # key of a slot's branch number b in a driver: slot + b * BRANCH


class Drafted:
    """Rows of several tokens in a driver, each with the tokens before it, and what is to be drawn after each of them.

    seeded: tokens are drawn by numbers that lie in the middle of a likely token's share; else greedy.
    """

    def __init__(self, context: Context, kind: str, dtype: str, page: int, seeded: bool):
        self.context, self.kind, self.dtype, self.seeded = context, kind, dtype, seeded
        self.model: Model = context.once(("drafts", kind, dtype, page), lambda: Model(
            context.platform, context.manifest, tiny_model(kind, context.seed), dtype, page))
        self.driver = Driver(self.model, pages=3 * 64 // page + 40)
        self.rng = random_source(context.seed, f"drafts {kind} {seeded}")
        self.known: dict[int, list[int]] = {}  # of each slot, the last one not computed

    def begin(self, slot: int, count: int) -> None:
        """A sequence with a prompt of so many tokens and one drawn after it."""
        prompt = text(count, self.context.seed, f"{self.kind} {slot}")
        self.known[slot] = [*prompt, int(self.driver.sample((slot, prompt))[0])]

    def logits(self, slot: int, tokens: Sequence[int] = ()) -> np.ndarray:
        """The right ones after a sequence's known tokens and some more: [1 + more, V]."""
        before = len(self.known[slot]) - 1
        return right(self.context, self.kind, [*self.known[slot], *tokens])[before:]

    def draft(self, slot: int, count: int, wrong: int) -> tuple[list[int], list[float]]:
        """Tokens that are right but for one of them, and the numbers that all are drawn by, one more."""
        tokens: list[int] = []
        numbers = []
        for place in range(count + 1):
            token, number = self._aimed(self.logits(slot, tokens)[-1])
            numbers.append(number)
            if place < count:
                tokens.append(token if place != wrong else 3 + (token + 1) % 100)
        return tokens, numbers

    def step(self, *rows: tuple[int, list[int], list[float]]) -> list[list[int]]:
        """What is drawn after each token of the rows: (key, tokens behind the last known one, numbers)."""
        work = [(key, [self.known[key % BRANCH][-1], *tokens]) for key, tokens, _ in rows]
        batch = self.driver.batch(work, every=True)
        drawn = self.driver.run(batch._replace(
            seqs=batch.seqs % BRANCH, sampling=self._sampling(sum((numbers for *_, numbers in rows), []))), bare=False)
        return [part.tolist() for part in np.split(drawn.collect().tokens[:batch.starts[-1]], batch.starts[1:-1])]

    def check(self, slot: int, tokens: list[int], numbers: list[float], drawn: list[int], what: str) -> int:
        """Is it right after each token? How many of the drafted ones are kept."""
        for place, (want, number, token) in enumerate(zip(self.logits(slot, tokens), numbers, drawn, strict=True)):
            low, high = self._bounds(want, token)
            if not low <= number <= high:
                raise Wrong(f"{what}: after {place} drafted tokens {token} is drawn, which is so from {low:.6f} to "
                            f"{high:.6f} with what rounding explains, by {number:.6f}", index=(place,))
        same = [a == b for a, b in zip(tokens, drawn, strict=False)]
        return same.index(False) if False in same else len(tokens)

    def keep(self, slot: int, tokens: list[int], kept: int, drawn: list[int]) -> None:
        """Go on behind the tokens that are kept: what was written beyond them is overwritten."""
        self.driver.lengths[slot] = len(self.known[slot]) + kept
        self.known[slot] += [*tokens[:kept], drawn[kept]]

    def branch(self, slot: int, number: int) -> int:
        """The key of a branch: the pages before that of the last known token are the sequence's, the others its own."""
        key, driver, size = slot + number * BRANCH, self.driver, self.model.page_size
        computed = driver.lengths[slot]
        table, shared = driver.tables[slot], computed // size
        driver.tables[key], driver.lengths[key] = [*table[:shared], *driver.fresh(1)], computed
        if computed % size:
            driver.state = self.model.platform.copy_pages(driver.state, [table[shared]], [driver.tables[key][shared]])
        return key

    def go_on(self, *slots: int) -> None:
        """A token more of each, from what was kept: are the logits right?"""
        got = self.driver.logits(*((slot, self.known[slot][-1:]) for slot in slots))
        for slot, values in zip(slots, got, strict=True):
            check_logits(values, self.logits(slot), self.dtype, f"sequence {slot} behind its draft")

    # ---- inside

    def _sampling(self, numbers: list[float]) -> Sampling:
        if not self.seeded:
            return Sampling()
        return Sampling(np.full(len(numbers), TEMPERATURE, np.float32), np.array(numbers, np.float32))

    def _ends(self, want: np.ndarray) -> np.ndarray:
        """Where each token's share ends: [V]."""
        share = np.exp((want - want.max()) / TEMPERATURE)
        return np.cumsum(share / share.sum())

    def _aimed(self, want: np.ndarray) -> tuple[int, float]:
        """A token to draw, and the number that draws it; 0 where nothing is drawn by numbers."""
        if not self.seeded:
            return int(want.argmax()), 0.0
        ends = self._ends(want)
        shares = np.diff(ends, prepend=0.0)
        token = int(self.rng.choice(np.flatnonzero(shares >= min(0.1, shares.max()))))
        return token, float(ends[token] - shares[token] / 2)

    def _bounds(self, want: np.ndarray, token: int) -> tuple[float, float]:
        """The numbers that may draw a token, when logits are off as they may be."""
        off = margin(want, self.dtype)
        if not self.seeded:
            return (0.0, 0.0) if want.max() - want[token] <= off else (np.inf, -np.inf)
        ends, off = self._ends(want), min(1.0, off / TEMPERATURE + 1e-5)
        return float(ends[token - 1] if token else 0.0) - off, float(ends[token]) + off


def rows(context: Context, kind: str, dtype: str, page: int, seeded: bool) -> None:
    """Sequences with drafts beside one without, then the same a token at a time, then on from what is kept."""
    both = [Drafted(context, kind, dtype, page, seeded) for _ in range(2)]
    for each in both:
        for slot, count in ((1, 7), (2, 15), (3, 31)):
            each.begin(slot, count)
            each.known[slot] = both[0].known[slot]  # the second goes on behind what the first has drawn
    together, alone = both
    alone.known = {slot: [*tokens] for slot, tokens in together.known.items()}
    drafts = {slot: together.draft(slot, count, wrong) for slot, count, wrong in ((1, 0, 0), (2, 5, 5), (3, 4, 2))}
    drawn = dict(zip(drafts, together.step(*((slot, *draft) for slot, draft in drafts.items())), strict=True))
    for slot, (tokens, numbers) in drafts.items():
        kept = together.check(slot, tokens, numbers, drawn[slot], f"sequence {slot}")
        one: list[int] = []
        for place, number in enumerate(numbers):
            one += alone.step((slot, [], [number]))[0]
            alone.known[slot] += tokens[place:place + 1]
        if context.manifest.determinism == "T0" and one != drawn[slot]:
            raise Wrong(f"T0 is declared; sequence {slot} draws {drawn[slot]} with drafts and {one} a token at a time")
        together.keep(slot, tokens, kept, drawn[slot])
    together.go_on(1, 2, 3)


def branches(context: Context, kind: str, dtype: str, page: int, seeded: bool) -> None:
    """Sequences that draft two ways at once beside one without a draft; one goes on in its branch, one does not."""
    run = Drafted(context, kind, dtype, page, seeded)
    for slot, count in ((1, 9), (2, 16), (3, 21)):
        run.begin(slot, count)
    main = {2: run.draft(2, 3, 0), 3: run.draft(3, 4, 3)}
    other = {2: run.draft(2, 3, 2), 3: run.draft(3, 1, 0)}
    keys = {slot: run.branch(slot, 1) for slot in other}
    drawn = run.step((1, [], [0.0 if not seeded else 0.5]), (2, *main[2]), (keys[2], *other[2]), (3, *main[3]),
                     (keys[3], *other[3]))
    run.keep(1, [], 0, drawn[0])
    for slot, at in ((2, 1), (3, 3)):
        kept = [run.check(slot, *draft[slot], drawn[at + i], f"sequence {slot}, {what}")
                for i, (draft, what) in enumerate(((main, "its first row"), (other, "its branch")))]
        if kept[1] > kept[0]:
            run.driver.tables[slot] = run.driver.tables[keys[slot]]
        best = int(kept[1] > kept[0])
        run.keep(slot, (main, other)[best][slot][0], kept[best], drawn[at + best])
    run.go_on(1, 2, 3)


CHECKS: dict[str, tuple[Callable[[Context, str, str, int, bool], None], bool]] = {
    "rows": (rows, False), "rows_seeded": (rows, True), "branches": (branches, False),
    "branches_seeded": (branches, True)}


def cases() -> Iterator[Case]:
    for kind in KINDS:
        for dtype in DTYPES:
            for page in PAGES:
                for name, (check, seeded) in CHECKS.items():
                    yield Case(f"drafts[{kind},{name},page{page},{dtype}]", "drafts", kind,
                               Needs(dtype, features=MODEL_FEATURES.get(kind, ()), page_size=page),
                               lambda context, check=check, kind=kind, dtype=dtype, page=page, seeded=seeded: check(
                                   context, kind, dtype, page, seeded), LOGITS_NMSE[dtype])
