"""Rows of running requests: page tables that grow, stop ids that several rows share."""
from __future__ import annotations

import numpy as np
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.scheduler.request import Request
from isthmus.core.scheduler.table import SOME_PAGES, RequestTable


def request(id: str, *stops: int) -> Request:
    made = Request(Submit(id, pack_ids([4, 5]), SamplingParams(stop_token_ids=stops)), (2,), 8)
    made.prepare()
    return made


def test_page_rows_grow_with_the_longest_and_keep_what_they_hold():
    table = RequestTable(4, 10 * SOME_PAGES, 64, 100)
    a, b = table.take(request("a")), table.take(request("b"))
    for page in range(1, 3 * SOME_PAGES):
        table.add_pages(np.array([a, b], np.int32), np.array([page, 1000 + page], np.int32))
    assert table.pages.shape == (4, 4 * SOME_PAGES)
    count = 3 * SOME_PAGES - 1
    assert table.page_count[[a, b]].tolist() == [count, count]
    assert table.pages[a].tolist() == [*range(1, count + 1), *[0] * (4 * SOME_PAGES - count)]
    assert table.pages[b, :count].tolist() == [*range(1001, 1001 + count)]
    table.reserve(10 * SOME_PAGES)
    assert table.pages.shape[1] == 10 * SOME_PAGES, "the longest request there may be"
    table.give_back(a)
    assert not table.pages[a].any() and table.pages[b].any()


def test_a_stop_id_counts_until_the_last_row_that_has_it_is_gone():
    table, tokens = RequestTable(4, 4, 64, 100), np.array([2, 7, 9, 50], np.int32)
    assert not table.may_stop(tokens).any()
    a, b = table.take(request("a", 7, 7)), table.take(request("b", 7, 9))
    assert table.may_stop(tokens).tolist() == [True, True, True, False]
    table.give_back(b)
    assert table.may_stop(tokens).tolist() == [True, True, False, False]
    table.give_back(a)
    assert not table.may_stop(tokens).any()
    assert not table.may_stop(np.array([2**31 - 1], np.int32)).any(), "what a broken device gives is no crash"


def test_a_slot_that_changes_hands_has_another_generation():
    table = RequestTable(2, 4, 64, 100)
    slot = table.take(request("a"))
    before = table.generation[slot]
    table.give_back(slot)
    assert table.take(request("b")) == slot and table.generation[slot] != before
    assert table.owner[slot].id == "b" and table.tokens[slot, :2].tolist() == [4, 5]
