"""From a plan to a batch: every array by value, with and without padding."""
from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from isthmus.core.plan import Batch, StepResult
from isthmus.core.scheduler.batch import build_batch, fit
from isthmus.core.scheduler.scheduler import Plan
from isthmus.core.scheduler.table import uniforms
from isthmus.core.specs import Bucket, Buckets

from .scheduling import EOS, Run

NO_EOS = {"ignore_eos": True}


class Bench:
    """A scheduler whose device is this test: it says which tokens come back."""

    def __init__(self, page: int = 4, buckets: Buckets | None = None, **limits: Any):
        self.run, self.page, self.buckets = Run(page, **limits), page, buckets
        self.bucket: Bucket | None = None

    def submit(self, prompt: list[int], **params: Any) -> None:
        self.run.submit(prompt, **{"max_tokens": 20, **NO_EOS, **params})

    def launch(self) -> tuple[Plan, Batch]:
        plan = self.run.scheduler.plan(0.0)
        batch, self.bucket = build_batch(plan, self.run.scheduler.table, self.page, self.buckets)
        self.run.scheduler.advance(plan)
        return plan, batch

    def settle(self, plan: Plan, *tokens: int) -> None:
        zeros = np.zeros((len(tokens), 20), np.float32)
        result = StepResult(np.array(tokens, np.int32), zeros[:, 0], zeros.astype(np.int32), zeros)
        self.run.scheduler.settle(plan, result)


def same(array: np.ndarray | None, values: Any, dtype: type = np.int32) -> None:
    assert array is not None and array.dtype == dtype, array
    np.testing.assert_array_equal(array, np.array(values, dtype))


def test_decode_and_prefill_in_one_token_axis():
    bench = Bench()
    bench.submit([5, 6, 7])
    first, batch = bench.launch()
    same(batch.tokens, [5, 6, 7])
    same(batch.slots, [4, 5, 6])                             # page 1; page 0 is nobody's
    same(batch.logit_rows, [2])
    same(batch.targets, [-1])
    bench.submit([10, 11, 12, 13, 14])
    second, batch = bench.launch()                           # the first token is still on the device
    same(batch.tokens, [-1, 10, 11, 12, 13, 14])
    same(batch.positions, [3, 0, 1, 2, 3, 4])
    same(batch.slots, [7, 8, 9, 10, 11, 12])
    same(batch.rows, [0, 1, 1, 1, 1, 1])
    same(batch.seqs, [1, 2])
    same(batch.starts, [0, 1, 6])
    same(batch.lengths, [4, 5])
    same(batch.pages, [[1, 0], [2, 3]])
    same(batch.logit_rows, [0, 5])
    same(batch.targets, [-1, -1])
    assert batch.sampling == (None,) * 9                     # greedy, and nothing else asked for
    bench.settle(first, 33)
    third, batch = bench.launch()                            # the second token is on the device, both rows decode
    same(batch.tokens, [-1, -1])
    same(batch.positions, [4, 5])
    same(batch.slots, [16, 13])                              # the first request got page 4
    same(batch.pages, [[1, 4], [2, 3]])
    bench.settle(second, 34, 20)
    bench.settle(third, 35, 21)
    _, batch = bench.launch()                                # without overlap the tokens are known
    same(batch.tokens, [35, 21])


def test_a_chunk_that_ends_early_asks_for_nothing():
    bench = Bench(chunk=4)
    bench.submit([1, 2, 3, 4, 5, 6])
    _, batch = bench.launch()
    same(batch.lengths, [4])
    same(batch.logit_rows, [0])                              # a lone padding row
    same(batch.targets, [-2])
    _, batch = bench.launch()
    same(batch.tokens, [5, 6])
    same(batch.positions, [4, 5])
    same(batch.logit_rows, [1])
    same(batch.targets, [-1])


def test_scored_prompt_tokens_have_targets():
    bench = Bench(score_rows=3)
    bench.submit([1, 2, 3, 4, 5], prompt_logprobs=2)
    _, batch = bench.launch()
    same(batch.tokens, [1, 2, 3])
    same(batch.logit_rows, [0, 1, 2])
    same(batch.targets, [2, 3, 4])
    same(batch.sampling.top_logprobs, [0, 0])
    _, batch = bench.launch()
    same(batch.tokens, [4, 5])
    same(batch.logit_rows, [0, 1])
    same(batch.targets, [5, -1])


def test_sampling_columns_and_what_is_off():
    bench = Bench(chunk=40)
    bench.submit([1], temperature=0.0, top_k=9, top_p=0.5, min_p=0.5, seed=3)  # greedy: the rest is of no use
    bench.submit([2], temperature=0.5, seed=11)
    bench.submit([3], temperature=1e-6, seed=12)             # so cold that it is greedy
    plan, batch = bench.launch()
    s = batch.sampling
    same(s.temperature, [0, 0.5, 0], np.float32)
    assert s.uniform[1] == uniforms(np.array([11], np.uint64), np.array([0], np.int32))[0]
    assert (s.top_k, s.top_p, s.min_p, s.penalties, s.bias, s.mask, s.top_logprobs) == (None,) * 7
    bench.submit([4], temperature=2.0, seed=2**64 - 1, top_k=5, top_p=0.75, min_p=0.25, logprobs=0)
    _, batch = bench.launch()
    s = batch.sampling
    same(s.temperature, [0, 0.5, 0, 2], np.float32)
    assert s.uniform[1] == uniforms(np.array([11], np.uint64), np.array([1], np.int32))[0]
    assert s.uniform[3] == uniforms(np.array([2**64 - 1], np.uint64), np.array([0], np.int32))[0]
    assert s.top_k[[1, 3]].tolist() == [0, 5] and s.top_p[[1, 3]].tolist() == [1, 0.75]
    assert s.min_p[[1, 3]].tolist() == [0, 0.25] and len(s.top_logprobs) == 0


def test_draws_do_not_depend_on_the_batch():
    alone, together = Bench(), Bench(chunk=40)
    for prompt in ([4], [5], [6]):
        together.submit(prompt, temperature=1.0, seed=prompt[0])
    alone.submit([6], temperature=1.0, seed=6)
    for _ in range(3):
        assert alone.launch()[1].sampling.uniform[0] == together.launch()[1].sampling.uniform[2]


def test_scored_rows_are_greedy_in_a_sampled_batch():
    bench = Bench()
    bench.submit([1, 2, 3], prompt_logprobs=0, temperature=1.0, top_p=0.5, seed=1, presence_penalty=0.5)
    s = bench.launch()[1].sampling
    same(s.temperature, [0, 0, 1], np.float32)
    same(s.top_p, [1, 1, 0.5], np.float32)
    same(s.penalties.presence, [0, 0, 0.5], np.float32)
    same(s.penalties.repetition, [1, 1, 1], np.float32)
    assert set(s.penalties.rows.tolist()) == {2}


def test_penalties_count_the_output_and_flag_what_is_pending():
    bench = Bench()
    bench.submit([1, 2])
    bench.submit([7, 8, 7], repetition_penalty=1.5, frequency_penalty=0.25)
    first, batch = bench.launch()
    p = batch.sampling.penalties
    same(p.rows, [1, 1])
    same(p.ids, [7, 8])
    same(p.counts, [0, 0])                                   # in the prompt only
    same(p.pending, [0, 0])
    same(p.repetition, [1, 1.5], np.float32)
    same(p.presence, [0, 0], np.float32)
    same(p.frequency, [0, 0.25], np.float32)
    second, batch = bench.launch()
    same(batch.sampling.penalties.counts, [0, 0])
    same(batch.sampling.penalties.pending, [0, 1])           # only where penalties are on
    bench.settle(first, 30, 8)
    third, batch = bench.launch()
    same(batch.sampling.penalties.counts, [0, 1])
    bench.settle(second, 30, 9)
    bench.settle(third, 30, 9)
    p = bench.launch()[1].sampling.penalties
    same(p.ids, [7, 8, 9])
    same(p.counts, [0, 1, 2])
    same(p.pending, [0, 0])                                  # the last token is known


def test_bias_and_the_ban_on_stop_ids():
    bench = Bench()
    bench.submit([1, 2], ignore_eos=False, stop_token_ids=(9,), min_tokens=2, logit_bias={7: -1.5, EOS: 2.0})
    bench.submit([3, 4], stop_token_ids=(9,))                # no minimum: no ban
    inf = float("inf")
    for ids, values in (([7, EOS, EOS, 9], [-1.5, 2, -inf, -inf]),) * 2 + (([7, EOS], [-1.5, 2]),):
        plan, batch = bench.launch()
        same(batch.sampling.bias.rows, [0] * len(ids))
        same(batch.sampling.bias.ids, ids)
        same(batch.sampling.bias.values, values, np.float32)
        bench.settle(plan, 30, 30)


def test_padding_fills_the_bucket_and_asks_for_nothing():
    bench = Bench(buckets=Buckets(tokens=(8, 32), rows=(4, 8), pages=(2, 16)))
    bench.submit([1, 2, 3, 4, 5], presence_penalty=0.5, temperature=1.0, top_p=0.5)
    bench.submit([6], top_k=3, temperature=1.0, min_p=0.5)
    _, batch = bench.launch()
    assert bench.bucket == Bucket(tokens=8, rows=4, pages=2, logits=4)
    same(batch.tokens, [6, 1, 2, 3, 4, 5, 0, 0])
    same(batch.slots, [12, 4, 5, 6, 7, 8, 0, 0])
    same(batch.rows, [0, 1, 1, 1, 1, 1, 3, 3])               # padding belongs to the last row, which is padding
    same(batch.seqs, [2, 1, 0, 0])
    same(batch.starts, [0, 1, 6, 6, 6])
    same(batch.lengths, [1, 5, 0, 0])
    same(batch.pages, [[3, 0], [1, 2], [0, 0], [0, 0]])
    same(batch.logit_rows, [0, 5, 0, 0])
    same(batch.targets, [-1, -1, -2, -2])
    s = batch.sampling
    same(s.temperature, [1, 1, 0, 0], np.float32)
    same(s.top_k, [3, 0, 0, 0])
    same(s.top_p, [1, 0.5, 1, 1], np.float32)
    same(s.min_p, [0.5, 0, 0, 0], np.float32)
    same(s.penalties.presence, [0, 0.5, 0, 0], np.float32)
    same(s.penalties.repetition, [1, 1, 1, 1], np.float32)
    same(s.penalties.pending, [0, 0, 0, 0])


def test_the_batch_is_no_view_of_the_table():
    bench = Bench()
    bench.submit([1, 2, 3, 4, 5], temperature=1.0, repetition_penalty=2.0, logit_bias={1: 1.0})
    _, batch = bench.launch()
    _, batch = bench.launch()
    table, request = bench.run.scheduler.table, next(iter(bench.run.scheduler._running.values()))
    ours = [v for v in vars(table).values() if isinstance(v, np.ndarray)]
    ours += [request.ids, request.history._ids, request.history._counts, request.bias_ids, request.bias_values]
    theirs = [*batch[:-1], *batch.sampling, *batch.sampling.penalties, *(batch.sampling.bias or ())]
    for array in theirs:
        if isinstance(array, np.ndarray):
            assert not any(np.shares_memory(array, other) for other in ours)


def test_a_plan_is_recorded_as_integers():
    bench = Bench()
    bench.submit([5, 6, 7])
    bench.launch()
    bench.submit([1, 2, 3])
    plan = bench.run.scheduler.plan(0.0)
    assert plan.record() == (2, ((1, 3, 4, True), (2, 0, 3, True)))


def test_no_bucket_is_large_enough():
    assert fit(5, (4, 8), "tokens") == 8 and fit(8, (4, 8), "tokens") == 8
    with pytest.raises(ValueError, match="9 tokens exceed the largest bucket, 8"):
        fit(9, (4, 8), "tokens")
