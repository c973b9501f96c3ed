"""Seeded bugs: one line of the core each, changed in memory. test_mutants.py shows that every one is caught.

A mutant edits the source of one function and puts the result in its place. When that line of the core changes, the
mutant says so and has to be written anew.
"""
from __future__ import annotations

import inspect
import textwrap
from typing import Any, NamedTuple

import pytest
from isthmus.core.scheduler import batch, scheduler
from isthmus.core.scheduler.prefill import Prefills
from isthmus.core.scheduler.request import History, Request
from isthmus.core.scheduler.rows import Rows
from isthmus.core.scheduler.scheduler import Scheduler
from isthmus.core.scheduler.table import RequestTable
from isthmus.core.scheduler.waiting import Waiting


class Mutant(NamedTuple):
    """`old` becomes `new` in `owner.function`; `old` must be there once. seed: where the search for it starts."""

    name: str
    owner: Any
    function: str
    old: str
    new: str
    seed: int = 0

    def apply(self, patch: pytest.MonkeyPatch) -> None:
        """Put the broken function in place for as long as `patch` lasts."""
        function = inspect.getattr_static(self.owner, self.function)
        function = function.fget if isinstance(function, property) else function
        source = textwrap.dedent(inspect.getsource(function))
        found = source.count(self.old)
        assert found == 1, f"mutant {self.name!r}: {self.old!r} is {found} times in {self.function}, write it anew"
        code = compile(source.replace(self.old, self.new), f"<mutant: {self.name}>", "exec")
        names: dict[str, Any] = {}
        exec(code, function.__globals__, names)
        patch.setattr(self.owner, self.function, names[self.function])


SCHEDULER = [
    Mutant("two tokens share a slot", batch, "build_batch", "* page_size + last", "* page_size + last // 2 * 2"),
    Mutant("two tokens of a prompt share a slot", batch, "_chunk_slots", "+ np.arange(page_size)",
           "+ np.arange(page_size) // 2"),
    Mutant("a prompt is written one off", batch, "_chunk_slots",
           "[start % page_size:start % page_size + stop - start]", "[:stop - start]"),
    Mutant("padding writes to a real slot", batch, "pad_batch", "grow(batch.slots, tokens)",
           "grow(batch.slots, tokens, 1)"),
    Mutant("a page leaks at the end", Scheduler, "_vacate", ":table.page_count[slot]].copy()",
           ":max(table.tree_pages[slot], table.page_count[slot] - 1)].copy()"),
    Mutant("an aborted request keeps its slot", Scheduler, "_vacate", "table.give_back(slot)", "pass"),
    Mutant("an aborted request decodes on", Scheduler, "_vacate", "self._decoding[self._decoding != slot]",
           "self._decoding"),
    Mutant("a retracted request keeps its pages", Scheduler, "_vacate", ":table.page_count[slot]].copy()",
           ":table.page_count[slot] if request.finish else table.tree_pages[slot]].copy()"),
    Mutant("a retracted request is forgotten", Scheduler, "_send_back", "self.queue.add(victim)", "pass"),
    Mutant("a retracted request loses its output", Scheduler, "_send_back", ":self.table.known[victim.slot]]",
           ":victim.known]"),
    Mutant("pages not computed yet are cached", Scheduler, "_vacate",
           "int(min(table.length[slot] - 1, table.known[slot]))", "int(table.known[slot])"),
    Mutant("catching up rewrites the tree's pages", Prefills, "_catch_up",
           "self._table.computed[request.slot] = cached", "pass", seed=74),
    Mutant("the last prompt page is cached too early", Prefills, "chunk", "min(stop, known - 1)", "stop"),
    Mutant("an exact hit computes nothing", Scheduler, "_admit", "request.known - 1 if", "request.known if"),
    Mutant("scored prompts come from the cache", Scheduler, "_admit", "if not request.score else 0", ""),
    Mutant("the domain is lost", Request, "__init__", "params, submit.domain,", 'params, b"",'),
    Mutant("a token still on the device is not taken", batch, "build_batch",
           "np.where(table.known[decode] > last, table.last[decode], np.int32(-1))", "table.last[decode]"),
    Mutant("a token after the end is reported", Scheduler, "_take", "if request.finish:", "if False:"),
    Mutant("a stop is missed", Request, "finish_reason", "token in self.stop_ids and", "False and"),
    Mutant("a stop is not looked for", Scheduler, "_take_all", " | table.may_stop(tokens)", ""),
    Mutant("stop ids of one that left are forgotten", RequestTable, "give_back",
           "self._stops[stops] -= 1", "self._stops[stops] = 0"),
    Mutant("the last token is not the last", Scheduler, "_take_all", "known >= rows.end", "known > rows.end"),
    Mutant("a result goes to the slot's next request", Scheduler, "_take_all",
           "(table.generation[slots] != rows.generations)", "(slots < 0)", seed=40),
    Mutant("log-probabilities are told twice", Scheduler, "_take_all", "rows.scored, rows.plain",
           "rows.scored, rows.flags >= 0"),
    Mutant("penalties miss the output of most steps", Scheduler, "_take_all", "request.history.add(token)", "pass"),
    Mutant("one token too many", Scheduler, "_plan_decode", "length < table.end[slots]", "length <= table.end[slots]"),
    Mutant("a retracted request draws anew", RequestTable, "take", "ids[-1], request.prompt_len,",
           "ids[-1], count,"),
    Mutant("a retracted request loses its scores", Scheduler, "_send_back", "victim.score = False",
           "victim.scores = []", seed=18),
    Mutant("scores of a broken prefill stay", Scheduler, "_send_back", "victim.scores = []", "pass"),
    Mutant("penalties miss the pending token", batch, "_penalties", "tokens[penalised] == -1", "False"),
    Mutant("penalties miss the output", Scheduler, "_append", "request.history.add(token)", "pass"),
    Mutant("penalties lose a new token", History, "add", "self.size += 1", "pass"),
    Mutant("stop ids are banned one token too long", batch, "_bias", "< rows.min_tokens",
           "<= rows.min_tokens", seed=1),
    Mutant("stop ids are banned for as long as the rows stay", batch, "_bias", "rows.bias[0] != told", "False"),
    Mutant("a draw is that of another position", Rows, "uniform", "return self._draws[ahead]",
           "return self._draws[0]"),
    Mutant("logit bias reaches the wrong row", batch, "_make_bias", "Bias(some.repeat(sizes)",
           "Bias(some[:1].repeat(sum(sizes))"),
    Mutant("prompt tokens are scored one off", batch, "_logit_rows", "chunk.start + 1:chunk.start + 1 + chunk.scores]",
           "chunk.start:chunk.start + chunk.scores]"),
    Mutant("a chunk reads pages past its end", batch, "_page_table", "pages[row, -(-length // page_size):] = 0",
           "pass"),
    Mutant("a row keeps another's pages", RequestTable, "give_back", "self.pages[slot, :self.page_count[slot]] = 0",
           "pass"),
    Mutant("a page for each is one for all", RequestTable, "add_pages", "counts] = pages",
           "counts] = pages[0]"),
    Mutant("a failed step leaves its pages cached", Scheduler, "fail", "self.cache.flush()", "pass", seed=4),
    Mutant("the budget is not counted down", Prefills, "chunks", "budget -= chunks[-1].size", "pass"),
    Mutant("a prompt has two chunks in one step", Prefills, "go_on", "if r not in served", ""),
    Mutant("queued tokens are miscounted", Waiting, "remove", "self.tokens -= request.known", "pass"),
    Mutant("waiting requests never time out", scheduler, "overdue", "for request in waiting:", "for request in ():"),
    Mutant("retracted requests never time out", scheduler, "overdue",
           "*(r for r in waiting if r.attempts)]", "]", seed=100),
]
