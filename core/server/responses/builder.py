"""The output of a response as it grows: items, and the events that tell of them."""
from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from ...parsers.contract import CallArguments, CallBegin, CallEnd, Content, Event, Reasoning
from ..stream import JsonList
from .wire import Events

MAX_REPEATED = 2**20  # bytes of log-probabilities that events of the end repeat before the item itself has them

Item = dict[str, Any]


class Builder:
    """One response. response: the object, filled in as events come. Methods return the encoded events of the stream,
    which whoever sends none throws away. spaces: functions by the name that the model uses -> namespace and name.

    Items come one after another: reasoning, a message, calls, in the model's order.
    """

    def __init__(self, response: Item, spaces: Mapping[str, tuple[str, str]] = MappingProxyType({})):
        self.response, self._spaces = response, spaces
        self.events = Events()
        self._id = response["id"].removeprefix("resp_")
        self._text: list[str] = []
        self._logprobs = JsonList()  # a large answer would be a million objects at once
        self._unsaid: list[Any] = []

    @property
    def output(self) -> list[Item]:
        return self.response["output"]

    def state(self, kind: str) -> bytes:
        """An event with the whole response: created, queued, in_progress, completed, incomplete or failed."""
        return self.events.of(f"response.{kind}", response=self.response)

    def add(self, events: list[Event], logprobs: list[Any]) -> bytes:
        """More of the reply. logprobs: of the tokens behind it, in OpenAI's form. Content has those of all tokens since
        the content, reasoning or call before it: some may have been held back until it was clear what they are."""
        data = b""
        self._unsaid += logprobs
        for event in events:
            scored, self._unsaid = self._unsaid, []
            if isinstance(event, Content):
                data += self._say(event.text, scored)
            elif isinstance(event, Reasoning):
                data += self._think(event.text)
            elif isinstance(event, CallBegin):
                data += self._begin_call(event)
            elif isinstance(event, CallArguments):
                self._text.append(event.text)
                data += self.events.arguments(self._open["id"], self._index, event.text)
            elif isinstance(event, CallEnd):
                data += self._close("completed")
        return data

    def end(self, status: str, **fields: Any) -> bytes:
        """The response has ended: completed, incomplete, failed or cancelled; `fields` are filled in."""
        data = self._close("completed" if status == "completed" else "incomplete")
        self.response.update(status=status, **fields)
        return data + (b"" if status == "cancelled" else self.state(status))

    @property
    def _index(self) -> int:
        return len(self.output) - 1

    @property
    def _open(self) -> Item:
        """The item that is being written; {} for none."""
        return self.output[-1] if self.output and self.output[-1]["status"] == "in_progress" else {}

    def _begin(self, prefix: str, kind: str, **fields: Any) -> bytes:
        data = self._close("completed")
        self._text, self._logprobs = [], JsonList()
        item = {"type": kind, "id": f"{prefix}_{self._id}{len(self.output):02x}", "status": "in_progress", **fields}
        self.output.append(item)
        return data + self.events.of("response.output_item.added", output_index=self._index, item=item)

    def _say(self, text: str, logprobs: list[Any]) -> bytes:
        data = b""
        if self._open.get("type") != "message":
            data = self._begin("msg", "message", role="assistant", content=[])
            data += self._part("added", {"type": "output_text", "text": "", "annotations": [], "logprobs": []})
        self._text.append(text)
        self._logprobs.extend(logprobs)
        return data + self.events.text("response.output_text.delta", self._open["id"], self._index, text, logprobs)

    def _think(self, text: str) -> bytes:
        data = b""
        if self._open.get("type") != "reasoning":
            data = self._begin("rs", "reasoning", summary=[], content=[])
            data += self._part("added", {"type": "reasoning_text", "text": ""})
        self._text.append(text)
        return data + self.events.text("response.reasoning_text.delta", self._open["id"], self._index, text)

    def _begin_call(self, call: CallBegin) -> bytes:
        space, name = self._spaces.get(call.name, ("", call.name))
        more = {"namespace": space} if space else {}
        return self._begin("fc", "function_call", call_id=call.id, name=name, arguments="", **more)

    def _part(self, what: str, part: Item) -> bytes:
        return self.events.of(f"response.content_part.{what}", item_id=self._open["id"], output_index=self._index,
                              content_index=0, part=part)

    def _close(self, status: str) -> bytes:
        """The end of the item that is being written, if there is one."""
        item = self._open
        if not item:
            return b""
        text, place = "".join(self._text), {"item_id": item["id"], "output_index": self._index}
        if item["type"] == "function_call":
            item["arguments"] = text
            data = self.events.of("response.function_call_arguments.done", **place, name=item["name"], arguments=text)
        elif item["type"] == "message":
            scores = self._logprobs.value()
            again = scores if memoryview(scores).nbytes <= MAX_REPEATED else []
            part = {"type": "output_text", "text": text, "annotations": [], "logprobs": again}
            data = self.events.of("response.output_text.done", **place, content_index=0, text=text, logprobs=again)
            data += self._part("done", part)
            item["content"] = [part | {"logprobs": scores}]
        else:
            part = {"type": "reasoning_text", "text": text}
            data = self.events.of("response.reasoning_text.done", **place, content_index=0, text=text)
            data += self._part("done", part)
            item["content"] = [part]
        item["status"] = status
        return data + self.events.of("response.output_item.done", output_index=self._index, item=item)
