"""Law 3, state: memory is what was written to it, wherever it came from; the state passed in is gone, only the returned
one counts; sequence slots keep their last token. (The whole suite keeps to the second: it never uses a state twice.)
"""
from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np

from ..core.plan import Batch, Mask, Sampling
from ..core.platform import LayerState, StateSpec
from .case import Case, Context, Needs, Wrong
from .opcase import DTYPES, NMSE, OpCase, Run
from .ops_attention import Shape
from .ops_run import Launcher, as_case, built, check_step
from .ops_sampling import VOCAB, Row, chain_batch, chain_run
from .ops_slots import Memory

PAGE_SIZES = (1, 4, 16)
PATIENCE = 60  # seconds for a step
Story = Callable[[Memory], None]


def dirt(value: float) -> Story:
    """Pages full of what others left, or of what was in the memory when it was allocated: it must not matter."""
    def tell(m: Memory) -> None:
        page = m.page
        m.fill(1, [1, 2, 3, 4, 5, 6], value=value)
        m.launch((2, [4], 0, 1), (3, [6, 2], 0, page + 1), (4, [5], 0, max(1, page // 2)), padding=3)
        m.launch((2, [4, 3], 1, 1), (3, [6, 2, 1], page + 1, 1), padding=2, wider=2)
    return tell


def neighbours(m: Memory) -> None:
    """Rows end inside a page whose other slots, and the pages around, are somebody's."""
    page, whole = m.page, [1, 2, 3, 4, 5, 6, 7]
    m.fill(1, whole[:6])
    m.launch((3, [5], page // 2, 1), (2, [3], 0, page // 2 + 1), padding=3)
    m.launch((1, whole, 6 * page, 1))
    m.launch((3, [5], page - 1, 1), (4, [2, 4], page - 1, 1))
    m.launch((1, [*whole[:6], 8], 6 * page, 1), padding=1)


def copies(m: Memory) -> None:
    """Copies in another order, onto pages that hold something, twice, and one page to two."""
    page = m.page
    m.fill(1, [1, 2, 3, 4, 5, 6])
    m.copy([5, 1, 3], [8, 9, 7])
    m.launch((2, [9, 7, 8, 10], 3 * page, 1), (1, [1, 2, 3, 4, 5, 6, 11], 6 * page, 1))
    m.copy([9, 2], [4, 6])
    m.copy([4], [1])
    m.launch((3, [1, 2, 4, 6, 7, 8, 12], 6 * page, 1), (4, [3, 5, 9, 10, 13], 3 * page + 1, 1))


def exports(m: Memory) -> None:
    """Taken to the host and put back elsewhere, in another order; what was there before is gone, the rest stays."""
    page = m.page
    m.fill(1, [1, 2, 3, 4, 5, 6])
    m.export([6, 2, 3], [7, 9, 8])
    m.export([7], [1])
    m.launch((2, [9, 8, 7, 1, 10], 4 * page, 1), (1, [1, 2, 3, 4, 5, 6, 11], 6 * page, 1))


def page0(m: Memory) -> None:
    """Page 0 takes what padding writes, NaN too; table entries past a context are 0 and never read."""
    page = m.page
    m.launch((1, [3], 0, 1), (2, [5, 1], 0, page + 1), padding=4, wider=3)
    m.launch((1, [3, 2], 1, 1), (2, [5, 1, 4], page + 1, 1), padding=7, wider=2, padded=1e30)
    m.launch((3, [6], 0, 1), padding=1, padded=math.inf, wider=5)


STORIES: dict[str, tuple[Story, tuple[str, ...]]] = {
    "left_large": (dirt(1e4), ()), "left_nan": (dirt(math.nan), ()), "neighbours": (neighbours, ()),
    "copied": (copies, ()), "exported": (exports, ("export_pages",)), "page0": (page0, ())}


def memory_run(name: str, story: Story, page: int, dtype: str, seed: int) -> Run:
    memory = Memory(name, Shape(4, 2, 32, page), dtype, seed, pages=16, seqs=6)
    story(memory)
    return memory.run()


def memory_case(name: str, page: int, dtype: str) -> OpCase:
    story, features = STORIES[name]
    asks = {"head_dim": 32, "heads": 4, "kv_heads": 2, "page_size": page, "window": None, "softcap": None,
            "dtype": dtype}
    return OpCase(f"state[{name},page{page},{dtype}]", "attention", dtype,
                  lambda seed: memory_run(name, story, page, dtype, seed), asks, features, NMSE[dtype], page)


def two_states(case: OpCase, subject: str) -> Case:
    """Two states of one platform share nothing: the same steps with other numbers on both, in turn."""
    def check(context: Context) -> None:
        runs = [built(case, context.seed + which, context.manifest) for which in (0, 1)]
        launchers = [Launcher(context.platform, case.dtype, run, context.manifest.buckets) for run in runs]
        states = [context.platform.alloc(run.state, run.pages) for run in runs]
        for number in range(len(runs[0].steps)):
            for which, (run, launcher) in enumerate(zip(runs, launchers, strict=True)):
                step, batch = run.steps[number], launcher.batches[number]
                if step.before is not None:
                    states[which] = step.before(context.platform, states[which])
                out, states[which] = launcher.steps[number](states[which], batch)
                check_step(out.collect(), step, batch, case, f"launch {number} on state {which}")
    base = as_case(case, "state", subject)
    return replace(base, id=f"state[two_states,{subject},{case.dtype}]", check=check)


def rested() -> list[Batch]:
    """Slots that rest while others go on, one of them with a new sequence; padding beside."""
    lengths: dict[int, int] = {}

    def launch(*rows: Row, padding: int = 0) -> Batch:
        return chain_batch(list(rows), lengths, Sampling(), padding)
    first = [launch(*((seq, [seq + 10], {0: -1}) for seq in (1, 2, 3, 4, 5)))]
    busy = [launch((2, [-1], {0: -1}), (4, [-1], {0: -1}), padding=i % 3) for i in range(4)]
    lengths.pop(4)
    anew = [launch((2, [-1], {0: -1}), (4, [7, 9, 3], {2: -1}))]
    last = [launch(*((seq, [-1], {0: -1}) for seq in (5, 4, 3, 2, 1)), padding=2) for _ in range(2)]
    return [*first, *busy, *anew, *last]


def rested_run(dtype: str, seed: int) -> Run:
    """Pages are copied meanwhile, which is no business of the slots'."""
    run = chain_run(dtype, rested(), seed)
    run.steps[4] = replace(run.steps[4], before=lambda platform, state: platform.copy_pages(state, [1, 2], [5, 4]))
    return run


def wrong_size(context: Context, dtype: str) -> None:
    """Data of another number of pages, cut short or too long, is refused with ValueError, and nothing changes."""
    platform = context.platform
    spec = StateSpec((LayerState(2, 32),) * 2, dtype, context.page_size(), 2)
    state = platform.alloc(spec, 6)
    before = bytes(platform.export_pages(state, [1, 2, 3]))
    for pages, data in (([1, 2], before), ([1, 2, 3, 4], before), ([1, 2, 3], before[:-1]), ([3, 4, 5], before + b"0"),
                        ([1], b"")):
        try:
            platform.import_pages(state, pages, data)
        except ValueError:
            continue
        raise Wrong(f"{len(data)} bytes were taken for {len(pages)} pages, {len(before)} are those of 3 pages")
    if bytes(platform.export_pages(state, [1, 2, 3])) != before:
        raise Wrong("a refused import changed pages")


def late_mask(context: Context, dtype: str) -> None:
    """A launch whose masks are made of what the launch before it sampled, which is collected meanwhile. Row 0 is free,
    the others may have one token each."""
    lengths: dict[int, int] = {}
    batches = [chain_batch([(seq, [token or -1], {0: -1}) for seq in (1, 2, 3)], lengths, Sampling())
               for token in (5, 0)]
    run = chain_run(dtype, batches, context.seed)
    launcher = Launcher(context.platform, dtype, run, context.manifest.buckets)
    state = context.platform.alloc(run.state, run.pages)
    first, state = launcher.steps[0](state, launcher.batches[0])
    bits, filled, here, calls = np.zeros((2, 3), np.uint32), threading.Event(), threading.get_ident(), []
    wanted: list[int] = []

    def fill() -> None:
        if not filled.is_set():
            wanted.extend((first.collect().tokens[1:3] + (1, 7)) % VOCAB)
            for row, token in zip(bits, wanted, strict=True):
                row[token // 32] = 1 << token % 32
            filled.set()

    def ready() -> None:
        calls.append(threading.get_ident())
        fill() if calls[-1] == here else filled.wait(PATIENCE)

    sampling = Sampling(mask=Mask(np.array([1, 2], np.int32), bits, ready))
    second, state = launcher.steps[1](state, launcher.batches[1]._replace(sampling=sampling))
    fill()
    tokens, free = second.collect().tokens[:3].tolist(), run.steps[1].expected.tokens[0]
    if not calls:
        raise Wrong("the masks were read, and nobody called ready() of them")
    if tokens != [free, *wanted]:
        raise Wrong(f"sampled were {tokens}; row 0 without a mask gives {free}, rows 1 and 2 may only be {wanted}")


def cases() -> Iterator[Case]:
    for dtype in DTYPES:
        for page in PAGE_SIZES:
            yield from (as_case(memory_case(name, page, dtype), "state", "pages") for name in STORIES)
        yield two_states(memory_case("neighbours", 4, dtype), "pages")
        slots = OpCase(f"state[slots_rest,{dtype}]", "sample", dtype, lambda seed, dtype=dtype: rested_run(dtype, seed))
        yield as_case(slots, "state", "slots")
        yield two_states(slots, "slots")
        yield Case(f"state[late_mask,{dtype}]", "state", "masks", Needs(dtype, "", ("grammar_mask", "late_mask")),
                   lambda context, dtype=dtype: late_mask(context, dtype))
        yield Case(f"state[import_of_wrong_size,{dtype}]", "state", "pages", Needs(dtype, dtype, ("export_pages",)),
                   lambda context, dtype=dtype: wrong_size(context, dtype))
