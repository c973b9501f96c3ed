"""How the replies to one request are read, and what the engine must hold them to: calls, content, thinking."""
from __future__ import annotations

import json
import re
from typing import Any

import msgspec
import numpy as np

from ..errors import RequestError
from ..messages import GrammarSpec, SamplingParams, ThinkingSpec, pack_ids
from ..parsers.choose import GENERIC
from ..parsers.contract import CALLS, CallFormat, Parser, Plain, Thinking
from ..parsers.harmony import HarmonyCalls
from .context import Server
from .conversation import fault
from .protocol import ChatRequest
from .tools import Toolset

TAIL = 64  # tokens at the end of a prompt in which its thinking may be opened
# What gpt-oss was trained with, of the words that clients send.
HARMONY_EFFORT = {"none": "low", "minimal": "low", "xhigh": "high", "max": "high"}
_THINKING = re.compile(r"\bif\s+(?:not\s+)?thinking\b|\bthinking\s+is\s+(?:not\s+)?defined")


class Reading:
    """Made for the ids of a prompt. `bind` comes before `shown` and `parser`: it may choose another notation."""

    def __init__(self, server: Server, asked: ChatRequest, toolset: Toolset, ids: np.ndarray):
        self._server, self._asked, self._toolset = server, asked, toolset
        self._thinking: Thinking | None = server.parsers.reasoning
        self._format: CallFormat | None = server.parsers.format if toolset.tools else None
        self._layout: Any = None
        self._opened, self._closed = self._state(ids) if self._thinking is not None else (False, True)

    @property
    def shown(self) -> tuple[int, ...]:
        """Control tokens that parsers have to see."""
        used = (self._format, self._thinking)
        return self._server.text.control_ids([text for each in used if each is not None for text in each.controls])

    def parser(self) -> Parser:
        """For one reply."""
        calls: Parser = Plain()
        if self._format is not None:
            make = self._format.parser if self._layout is None else self._format.bound_parser
            calls = make(self._toolset.tools)
        if self._thinking is None or self._asked.separate_reasoning is False and not self._thinking.always:
            return calls
        return self._thinking.parser(self._opened, calls, self._toolset.tools)

    def bind(self, params: SamplingParams) -> SamplingParams:
        """The parameters with the grammar of the whole reply. Raises the 400 of what cannot be together."""
        grammar = params.grammar
        if self._toolset.bound or grammar is not None and self._format is not None:
            grammar = self._bound(grammar)
        thinking = self._spec(grammar)
        if grammar is None and thinking is not None:
            grammar = GrammarSpec("any", "", "thinking_token_budget")
        return msgspec.structs.replace(params, grammar=grammar, thinking=thinking)

    def _bound(self, grammar: GrammarSpec | None) -> GrammarSpec:
        """Calls, and content that follows `grammar` where they may be left out."""
        toolset, content = self._toolset, None
        if grammar is not None and grammar.kind not in ("json_object", "json_schema"):
            raise _apart(grammar, "tools cannot be combined: beside tools there is only JSON")
        if grammar is not None and toolset.least and not grammar.field.startswith("response_format"):
            raise _apart(grammar, "a forced call cannot be combined: a call follows its tool's schema")
        if grammar is not None and not toolset.least:
            schema = json.loads(grammar.source) if grammar.source else {"type": "object"}
            content = {"json": schema, "name": grammar.field, "strict": True}
        format = self._format or CALLS.create(GENERIC)
        layout = format.layout(toolset.tools, toolset.least, toolset.most, content)
        if layout is None and toolset.least:  # in another notation, which can be enforced
            format = CALLS.create(GENERIC)
            layout = format.layout(toolset.tools, toolset.least, toolset.most, content)
        if layout is None:
            raise fault("tools", f"cannot be enforced in this notation, {self._server.parsers.calls.name}: leave "
                        "out strict, or pattern, format, const, allOf and lengths of strings, or send tool_choice "
                        "required", "unsupported_parameter")
        self._format, self._layout = format, layout
        return GrammarSpec("layout", json.dumps(layout), "tools")

    def _spec(self, grammar: GrammarSpec | None) -> ThinkingSpec | None:
        """What the engine must know of the thinking: where a grammar begins behind it, or a budget ends it."""
        thinking, budget = self._thinking, self._asked.thinking_token_budget
        if thinking is None or grammar is None and budget is None or not thinking.always and self._closed:
            return None
        if isinstance(self._format, HarmonyCalls) and self._toolset.tools:
            if budget is not None:
                raise fault("thinking_token_budget", "and tools cannot be combined for this model, whose calls are "
                            "channels among those of its thinking", "unsupported_parameter")
            return None  # the layout has it
        encode = self._server.text.encode
        begin, stop = (pack_ids(encode(text, False)) for text in (thinking.begin, thinking.stop))
        return ThinkingSpec(self._opened or thinking.always, begin, thinking.ends, stop,
                            -1 if budget is None else min(budget, 2**31 - 1))

    def _state(self, ids: np.ndarray) -> tuple[bool, bool]:
        """Whether a prompt ends inside the thinking, with what opens it or in a message that does not close it, and
        whether it ends with the end of the thinking."""
        thinking, asked = self._thinking, self._asked
        if asked.continue_final_message and asked.add_generation_prompt is not True:
            content = asked.messages[-1].get("content")
            text = content if isinstance(content, str) else ""
            opened = text.rfind(thinking.begin) > max(map(text.rfind, thinking.ends))
            return opened, not opened
        tail = self._server.text.decode(ids[-TAIL:], skip_special=False).rstrip()
        return tail.endswith(thinking.begin.rstrip()), tail.endswith(thinking.ends)


def _apart(grammar: GrammarSpec, why: str) -> RequestError:
    return RequestError(f"{grammar.field} and {why}", param=grammar.field, code="unsupported_parameter")


def thinking_kwargs(asked: ChatRequest, template: str) -> dict[str, Any]:
    """`enable_thinking` and `reasoning_effort` of a request, as variables that the chat template knows."""
    effort, wanted, found = asked.reasoning_effort, asked.enable_thinking, {}
    if wanted is None and effort is not None:
        wanted = effort != "none"
    if wanted is not None:
        if "enable_thinking" in template:
            found["enable_thinking"] = wanted
        elif _THINKING.search(template):
            found["thinking"] = wanted
    if effort is not None and "reasoning_effort" in template:
        found["reasoning_effort"] = HARMONY_EFFORT.get(effort, effort) if "<|channel|>" in template else effort
    return found
