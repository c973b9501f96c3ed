"""Law 2, model: whole models against the reference's logits, however the work is cut, shared, moved or batched."""
from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from ..core.specs import KV_FORMATS
from . import adapted
from .case import Case, Context, Needs, Wrong
from .compare import check_values
from .driver import Driver, Model
from .formats import rounding
from .kept import BITS
from .opcase import DTYPES
from .oracle import LOGITS_NMSE, check_greedy, check_logits, placed, right, text
from .tiny import KINDS, MODEL_FEATURES, in_dtypes

KV_KIND = "llama"
Check = Callable[[Context, str, str], None]  # (context, kind, dtype)


def length(model: Model) -> int:
    """A text that fills two pages and begins a third, at least 45 tokens."""
    return max(45, 2 * model.page_size + 13)


def start(context: Context, kind: str, dtype: str) -> tuple[Driver, list[int], np.ndarray]:
    """A driver, a text, and the right logits."""
    model = placed(context, kind, dtype)
    tokens = text(length(model), context.seed, kind)
    return Driver(model), tokens, right(context, kind, tokens)


def whole(context: Context, kind: str, dtype: str) -> None:
    """One prefill, then a token at a time."""
    driver, tokens, want = start(context, kind, dtype)
    cut = len(tokens) - 6
    check_logits(driver.logits((1, tokens[:cut]))[0], want[:cut], dtype, "prefill")
    for i in range(cut, len(tokens)):
        check_logits(driver.logits((1, tokens[i:i + 1]))[0], want[i:i + 1], dtype, f"decode at position {i}")


def chunked(size: int) -> Check:
    """Chunks that end inside pages, or one token at a time."""
    def check(context: Context, kind: str, dtype: str) -> None:
        driver, tokens, want = start(context, kind, dtype)
        for i in range(0, len(tokens), size):
            got = driver.logits((1, tokens[i:i + size]))[0]
            check_logits(got, want[i:i + size], dtype, f"chunk of {size} from position {i}")
    return check


def batched(context: Context, kind: str, dtype: str) -> None:
    """Prefills, chunks and decodes of several sequences in one batch, each as if alone."""
    model = placed(context, kind, dtype)
    driver, size = Driver(model), length(model)
    texts = {seq: text(size, context.seed, f"{kind} {seq}") for seq in (1, 2, 3, 4)}
    done = dict.fromkeys(texts, 0)
    plan = [{1: 11, 2: 5, 4: 1}, {3: size - 13, 1: 1, 2: size - 20, 4: 1}, {4: 7, 2: 1, 3: 1, 1: 19},
            {seq: 1 for seq in texts}]
    for number, step in enumerate(plan):
        got = driver.logits(*((seq, texts[seq][done[seq]:done[seq] + count]) for seq, count in step.items()))
        for (seq, count), values in zip(step.items(), got, strict=True):
            want = right(context, kind, texts[seq])[done[seq]:done[seq] + count]
            check_logits(values, want, dtype, f"step {number}, sequence {seq}")
            done[seq] += count


def prefix(context: Context, kind: str, dtype: str) -> None:
    """A hit in the prefix cache: two sequences go on from one's pages, at once, and so does their owner."""
    driver, tokens, want = start(context, kind, dtype)
    page = driver.page_size
    driver.logits((1, tokens))
    shared = len(tokens) // page * page
    for seq, kept in ((2, shared), (3, page)):
        driver.share(1, seq, kept)
    others = {seq: tokens[:driver.lengths[seq]] + text(9, context.seed, f"branch {seq}") for seq in (2, 3)}
    mine = tokens + text(5, context.seed, "owner")
    got = driver.logits((2, others[2][shared:]), (3, others[3][page:]), (1, mine[len(tokens):]))
    for (seq, all_tokens, begin), values in zip(
            [(2, others[2], shared), (3, others[3], page), (1, mine, len(tokens))], got, strict=True):
        check_logits(values, right(context, kind, all_tokens)[begin:], dtype, f"sequence {seq} from position {begin}")


def moved(by_export: bool) -> Check:
    """Pages that were copied, or taken to the host and back: their new owner goes on as the old one would, and the
    old one too, on other tokens."""
    def check(context: Context, kind: str, dtype: str) -> None:
        driver, tokens, want = start(context, kind, dtype)
        cut = len(tokens) - 7
        driver.logits((1, tokens[:cut]))
        mine = driver.tables[1]
        copies = driver.fresh(len(mine))
        platform = driver.model.platform
        if by_export:
            data = platform.export_pages(driver.state, mine)
            driver.state = platform.import_pages(driver.state, copies, data)
        else:
            driver.state = platform.copy_pages(driver.state, mine, copies)
        driver.tables[2], driver.lengths[2] = copies, cut
        other = tokens[:cut] + text(3, context.seed, "elsewhere")
        got = driver.logits((1, other[cut:]), (2, tokens[cut:]))
        check_logits(got[1], want[cut:], dtype, "on the copies")
        check_logits(got[0], right(context, kind, other)[cut:], dtype, "on the originals")
    return check


def greedy(context: Context, kind: str, dtype: str) -> None:
    """Decode by -1, the token that the State keeps: as good as given tokens, also in K and V."""
    model = placed(context, kind, dtype)
    driver = Driver(model)
    prompts = [text(9, context.seed, "first"), text(14, context.seed, "second")]
    have = driver.greedy(prompts, 8)
    for number, (prompt, row) in enumerate(zip(prompts, have, strict=True)):
        check_greedy(context, kind, prompt, row, dtype, f"prompt {number}, decoded by tokens of -1")
    got = driver.logits(*((seq, [int(row[-1])]) for seq, row in enumerate(have, 1)))
    for number, (prompt, row, values) in enumerate(zip(prompts, have, got, strict=True)):
        want = right(context, kind, [*prompt, *row.tolist()])[-1:]
        check_logits(values, want, dtype, f"prompt {number} after {len(row)} tokens from the State")


def determinism(context: Context, kind: str, dtype: str) -> None:
    """What the manifest promises. T0: a position's logits have the same bits however the work is batched and cut. T1:
    the same batch twice gives the same bits. T2: no more than the tolerance that the other cases hold it to."""
    model = placed(context, kind, dtype)
    tokens = text(length(model), context.seed, kind)
    first = Driver(model).logits((1, tokens))[0]
    if context.manifest.determinism in ("T0", "T1"):
        again = Driver(model).logits((1, tokens))[0]
        if not np.array_equal(first, again):
            raise Wrong(f"{context.manifest.determinism} is declared; the same batch twice gives other logits, off by "
                        f"{np.abs(first - again).max():.1e}")
    if context.manifest.determinism == "T0":
        driver = Driver(model)
        other = text(11, context.seed, "beside")
        parts = [driver.logits((2, other[i:i + 1]), (1, tokens[i * 5:i * 5 + 5]))[1] for i in range(len(other))
                 if tokens[i * 5:i * 5 + 5]]
        parts.append(driver.logits((1, tokens[5 * len(parts):]))[0] if tokens[5 * len(parts):] else first[:0])
        got = np.concatenate(parts)
        differs = np.flatnonzero((got != first).any(axis=1))
        if len(differs):
            at = int(differs[0])
            raise Wrong(f"T0 is declared; in chunks beside another sequence {len(differs)} of {len(first)} positions "
                        f"have other logits than alone, the first is {at}, off by "
                        f"{np.abs(got[at] - first[at]).max():.1e}", index=(at,))


def kept_in(kv: str) -> Check:
    """Chunks and decodes of two sequences on K and V of another dtype than is computed in."""
    def check(context: Context, kind: str, dtype: str) -> None:
        model = placed(context, kind, dtype)
        driver, size = Driver(model, kv_dtype=kv), length(model)
        texts = {seq: text(size, context.seed, f"{kind} {seq}") for seq in (1, 2)}
        parts = [driver.logits(*((seq, tokens[start:stop]) for seq, tokens in texts.items()))
                 for start, stop in ((0, 20), (20, 21), (21, size))]
        for tokens, *got in zip(texts.values(), *parts, strict=True):
            check_values(np.concatenate(got), right(context, kind, tokens), kv_logits_nmse(dtype, kv), "logits")
    return check


def kv_logits_nmse(dtype: str, kv: str) -> float:
    """K and V alone are rounded to the dtype, of all that a model in bf16 rounds to bf16."""
    return max(LOGITS_NMSE[dtype], rounding(LOGITS_NMSE["bf16"] / 32, BITS[kv]))


CHECKS: dict[str, tuple[Check, tuple[str, ...]]] = {
    "whole": (whole, ()), "chunks_of_3": (chunked(3), ()), "chunks_of_16": (chunked(16), ()), "batched": (batched, ()),
    "prefix_hit": (prefix, ()), "copied_pages": (moved(False), ()), "exported_pages": (moved(True), ("export_pages",)),
    "decode_from_state": (greedy, ()), "determinism": (determinism, ())}


def cases() -> Iterator[Case]:
    for kind in KINDS:
        for dtype in in_dtypes(kind, DTYPES):
            for name, (check, features) in CHECKS.items():
                needs = Needs(dtype, features=features + MODEL_FEATURES.get(kind, ()))
                yield Case(f"model[{kind},{name},{dtype}]", "model", kind, needs,
                           lambda context, check=check, kind=kind, dtype=dtype: check(context, kind, dtype),
                           LOGITS_NMSE[dtype])
    for kind in adapted.KINDS:
        for dtype in in_dtypes(kind, DTYPES):
            yield Case(f"model[{kind},adapters,{dtype}]", "model", kind,
                       Needs(dtype, features=("adapters", *MODEL_FEATURES.get(kind, ()))),
                       lambda context, kind=kind, dtype=dtype: adapted.mixed(context, kind, dtype),
                       adapted.tolerance(dtype))
    for dtype in DTYPES:
        for kv in KV_FORMATS:
            if kv != dtype:
                yield Case(f"model[{KV_KIND},kv_{kv},{dtype}]", "model", KV_KIND, Needs(dtype, kv),
                           lambda context, kv=kv, dtype=dtype: kept_in(kv)(context, KV_KIND, dtype),
                           kv_logits_nmse(dtype, kv))
