"""The null platform: what it computes, and that it notices every kind of broken batch."""
from __future__ import annotations

import time

import numpy as np
import pytest
from isthmus.core.cache.pool import PagePool
from isthmus.core.plan import Batch, Sampling
from isthmus.core.platform import Unavailable
from isthmus.core.specs import Bucket, LayerState, RawTensor, StateSpec, WeightSpec
from isthmus.platforms.null.platform import Platform, next_token

from .scheduling import WriteOnce

VOCAB = 50


def i32(*values) -> np.ndarray:
    return np.array(values, np.int32)


def batch(**changes) -> Batch:
    """A row that decodes in slot 2 of page 1, and a prompt of three tokens in page 2, of 4 tokens each."""
    good = Batch(tokens=i32(5, 7, 8, 9), positions=i32(0, 0, 1, 2), slots=i32(4, 8, 9, 10), rows=i32(0, 1, 1, 1),
                 seqs=i32(1, 2), starts=i32(0, 1, 4), lengths=i32(1, 3), pages=i32([1], [2]), logit_rows=i32(0, 3),
                 targets=i32(-1, -1), sampling=Sampling())
    return good._replace(**changes)


def launch(*batches: Batch, bucket: Bucket | None = None, **options: str):
    platform = Platform({"vocab": str(VOCAB), **options})
    state = platform.alloc(StateSpec((LayerState(1, 1),), "f32", 4, 4), 8)
    step = platform.compile(None, None, bucket)
    outs = []
    for b in batches:
        out, state = step(state, b)
        outs.append(out)
    results = [out.collect() for out in outs]
    platform.close()
    return results, state


def test_the_next_token_is_a_function_of_the_whole_context():
    assert [next_token(i32(*c), VOCAB) for c in ((5,), (7, 8, 9), (7, 9, 8), (0, 7, 8, 9))] == [
        next_token(i32(*c), VOCAB) for c in ((5,), (7, 8, 9), (7, 9, 8), (0, 7, 8, 9))]
    tokens = [next_token(i32(*c), 2**31 - 1) for c in ((5,), (7, 8, 9), (7, 9, 8), (0, 7, 8, 9), (7, 8, 9, 0), (0,))]
    assert len(set(tokens)) == len(tokens)
    counts = np.bincount([next_token(i32(i, i * i), VOCAB) for i in range(5000)], minlength=VOCAB)
    assert counts.min() > 60 and counts.max() < 140


def test_a_step_reads_its_context_through_the_page_table():
    decode = batch(tokens=i32(-1, -1), positions=i32(1, 3), slots=i32(5, 11), rows=i32(0, 1), starts=i32(0, 1, 2),
                   lengths=i32(2, 4), logit_rows=i32(0, 1))
    (first, second), state = launch(batch(), decode)             # the second is launched before the first is collected
    a, b = next_token(i32(5), VOCAB), next_token(i32(7, 8, 9), VOCAB)
    assert first.tokens.tolist() == [a, b] and first.logprobs is None
    assert second.tokens.tolist() == [next_token(i32(5, a), VOCAB), next_token(i32(7, 8, 9, b), VOCAB)]
    assert state.last[1:3].tolist() == second.tokens.tolist()
    assert state.tokens[4:6].tolist() == [5, a] and (state.tokens[:4] == -1).all()


def test_targets_are_given_back_and_logprobs_come_when_asked():
    scored = batch(logit_rows=i32(1, 2, 3), targets=i32(8, 9, -2), sampling=Sampling(top_logprobs=i32(0, 0)))
    (result,), state = launch(scored)
    assert result.tokens[:2].tolist() == [8, 9] and result.logprobs.shape == (3,)
    assert result.top_ids.shape == result.top_logprobs.shape == (3, 2) and (state.last == -1).all()


GOOD = batch()
PADDED = batch(tokens=i32(5, 7, 8, 9, 0), positions=i32(0, 0, 1, 2, 0), slots=i32(4, 8, 9, 10, 0),
               rows=i32(0, 1, 1, 1, 2), seqs=i32(1, 2, 0), starts=i32(0, 1, 4, 4), lengths=i32(1, 3, 0),
               pages=i32([1, 0], [2, 0], [0, 0]), logit_rows=i32(0, 3, 0, 0), targets=i32(-1, -1, -2, -2))


@pytest.mark.parametrize(("broken", "words"), [
    (GOOD._replace(slots=i32(4, 8, 8, 10)), "a slot is not its position's"),
    (GOOD._replace(pages=i32([2], [2]), slots=i32(8, 8, 9, 10)), "two tokens are written to one slot"),
    (GOOD._replace(pages=i32([0], [2]), slots=i32(0, 8, 9, 10)), "written to page 0"),
    (GOOD._replace(pages=i32([1, 3], [2, 0])), "page table is longer"),
    (GOOD._replace(seqs=i32(1, 1)), "sequence slots \\[1, 1\\] repeat"),
    (GOOD._replace(seqs=i32(0, 1)), "sequence slot 0"),
    (GOOD._replace(lengths=i32(1, 4)), "length is not its last position"),
    (GOOD._replace(rows=i32(0, 1, 0, 1)), "tokens of a row are not together"),
    (GOOD._replace(starts=i32(0, 3, 4), rows=i32(0, 0, 0, 1), positions=i32(0, 1, 2, 0), slots=i32(4, 5, 6, 8),
                   lengths=i32(3, 1)), "a row of one token follows a longer one"),
    (GOOD._replace(tokens=i32(-1, 7, 8, 9)), "a sequence slot that has sampled none"),
    (GOOD._replace(tokens=i32(5, VOCAB, 8, 9)), "token 50 is outside the vocabulary of 50"),
    (GOOD._replace(positions=i32(1, 0, 1, 2), slots=i32(5, 8, 9, 10), lengths=i32(2, 3)),
     "row 0 reads position 0 from slot 4, which holds position -1"),
    (PADDED._replace(slots=i32(4, 8, 9, 10, 11)), "a padding token is written outside slot 0"),
    (PADDED._replace(targets=i32(-1, -1, -1, -2), logit_rows=i32(0, 3, 4, 0)), "logits of a padding token"),
])
def test_a_broken_batch_is_noticed(broken, words):
    with pytest.raises(AssertionError, match=words):
        launch(broken)


def test_padding_must_fit_the_bucket():
    launch(PADDED, bucket=Bucket(5, 3, 2, 4))
    with pytest.raises(AssertionError, match="\\(5, 3, 2, 4\\) in Bucket"):
        launch(PADDED, bucket=Bucket(6, 3, 2, 4))


def test_copied_pages_are_the_original():
    platform = Platform({"vocab": str(VOCAB)})
    state = platform.alloc(StateSpec((LayerState(1, 1),), "f32", 4, 4), 8)
    _, state = platform.compile(None, None, None)(state, batch())
    state = platform.copy_pages(state, [2], [5])
    out, state = platform.compile(None, None, None)(state, batch(
        tokens=i32(6), positions=i32(3), slots=i32(23), rows=i32(0), seqs=i32(3), starts=i32(0, 1), lengths=i32(4),
        pages=i32([5]), logit_rows=i32(0), targets=i32(-1)))
    assert out.collect().tokens.tolist() == [next_token(i32(7, 8, 9, 6), VOCAB)]
    platform.close()


def test_without_checks_it_answers_at_once():
    unchecked = GOOD._replace(slots=i32(0, 0, 0, 0), targets=i32(-1, 9))
    (result,), _ = launch(unchecked, check="0")
    (elsewhere,), _ = launch(unchecked._replace(positions=GOOD.positions + 1), check="0")
    assert result.tokens[1] == 9 and result.tokens[0] != elsewhere.tokens[0]


def test_a_step_can_take_time():
    began = time.monotonic()
    launch(GOOD, delay_ms="20")
    assert time.monotonic() - began >= 0.02


def test_options_and_vocabulary():
    with pytest.raises(Unavailable, match="has no option speed; it has check, delay_ms, vocab"):
        Platform({"speed": "9"})
    platform = Platform({})
    platform.load([RawTensor("f32", (300, 8), b""), RawTensor("f32", (20, 8), b"")], WeightSpec(("e",), "embed"), "f32")
    assert platform._vocab == 320
    assert platform.probe().rank < 0                          # never chosen unless named
    assert platform.supports("attention", head_dim=64) is None


# ---- the shadow that the scheduler's tests keep must bite too

def test_the_shadow_notices_misused_pages():
    def pool_and_shadow():
        pool = PagePool(8)
        pool.alloc(1, 1)
        pool.alloc(1, 2)
        return pool, WriteOnce(32, 4)

    pool, once = pool_and_shadow()
    once.launch(batch(), pool, [b"", b""])
    with pytest.raises(AssertionError, match="slot 4 is written twice in generation 0"):
        once.launch(batch(), pool, [b"", b""])
    pool, once = pool_and_shadow()
    pool.release(i32(1), 1)
    with pytest.raises(AssertionError, match="slot 4 of owner 0 is written for 1"):  # a write after release
        once.launch(batch(), pool, [b"", b""])
    decode = batch(tokens=i32(1), positions=i32(1), slots=i32(5), rows=i32(0), seqs=i32(1), starts=i32(0, 1),
                   lengths=i32(2), pages=i32([1]), logit_rows=i32(0), targets=i32(-1))
    pool, once = pool_and_shadow()
    once.launch(batch(), pool, [b"", b""])
    pool.release(i32(1), 1)
    assert pool.alloc(1, 1).tolist() == [1]
    with pytest.raises(AssertionError, match="row 0 reads slot 4, written in a generation that is gone"):
        once.launch(decode, pool, [b""])
    pool, once = pool_and_shadow()
    once.launch(batch(), pool, [b"", b""])
    with pytest.raises(AssertionError, match="row 0 of domain b'x' reads another domain's slots"):
        once.launch(decode, pool, [b"x"])
