"""The body of `/v1/responses`, and what of it has another name in a chat request. Source: OpenAI's description."""
from __future__ import annotations

from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field

from ...errors import RequestError, shown
from ..limits import MAX_TEXT
from ..protocol import Body, RequestFields, ShortText
from ..validate import invalid

MAX_METADATA = 16  # entries
MAX_ID = 128       # characters of an id
LOGPROBS = "message.output_text.logprobs"

MetadataText = Annotated[str, Field(max_length=512)]
Id = Annotated[str, Field(min_length=1, max_length=MAX_ID)]


class TextFields(Body):
    """`text`: what the answer's text must be like."""

    format: dict[str, Any] | None = None
    verbosity: ShortText | None = None


class ReasoningFields(Body):
    """`reasoning`. Nothing is summed up here, so that of a summary only the wish is known."""

    effort: ShortText | None = None
    summary: ShortText | None = None
    generate_summary: ShortText | None = None


class ResponsesRequest(RequestFields):
    """`POST /v1/responses`. Items are read by `core.server.responses.items`."""

    input: Any = None
    instructions: str | None = None
    previous_response_id: Id | None = None
    max_output_tokens: int | None = Field(None, ge=1, lt=10**20)
    store: bool | None = None
    background: bool | None = None
    include: list[ShortText] | None = Field(None, max_length=32)
    text: TextFields | None = None
    reasoning: ReasoningFields | None = None
    tools: list[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_tool_calls: int | None = Field(None, ge=0, lt=10**20)
    top_logprobs: int | None = Field(None, ge=0, le=20)
    truncation: Literal["auto", "disabled"] | None = None
    metadata: dict[Annotated[str, Field(max_length=64)], MetadataText] | None = Field(None, max_length=MAX_METADATA)
    user: str | None = Field(None, max_length=MAX_TEXT)
    safety_identifier: str | None = Field(None, max_length=MAX_TEXT)
    prompt_cache_key: str | None = Field(None, max_length=MAX_TEXT)
    service_tier: ShortText | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    # Known to OpenAI, and refused by name.
    conversation: Any = None
    prompt: Any = None


REFUSED = {"conversation": "is not supported; previous_response_id continues a conversation",
           "prompt": "is not supported: this server keeps no prompts; send instructions and input"}


def check(asked: ResponsesRequest) -> None:
    """Refuse what would be left out silently."""
    for field, why in REFUSED.items():
        if getattr(asked, field) is not None:
            raise RequestError(f"{field} {why}", param=field, code="unsupported_parameter")
    if asked.n not in (None, 1):
        raise invalid("n", f"is {asked.n}; a response has one answer")
    if asked.return_token_ids:
        raise RequestError("return_token_ids is not supported here; use /v1/chat/completions", param="return_token_ids",
                           code="unsupported_parameter")
    if asked.background and asked.store is False:
        raise invalid("store", "must be true with background: the response is asked for later")
    if asked.top_logprobs and LOGPROBS not in (asked.include or ()):
        raise invalid("top_logprobs", f"needs {LOGPROBS} in include")


def response_format(asked: ResponsesRequest) -> dict[str, Any] | None:
    """`text.format` as chat has it: a schema and what belongs to it one level deeper."""
    form = asked.text and asked.text.format
    if not form:
        return None
    if form.get("type") != "json_schema":
        return form
    if form.get("schema") is None:
        raise invalid("text.format.schema", "is required", "missing_required_parameter")
    return {"type": "json_schema", "json_schema": {key: value for key, value in form.items() if key != "type"}}


class Function(NamedTuple):
    """A function that the client runs. place: in the body. space: the namespace that it is in, "" for none."""

    place: str
    space: str
    tool: dict[str, Any]

    @property
    def name(self) -> str:
        """What the model calls it."""
        return joined(self.space, self.tool["name"])

    def for_chat(self) -> dict[str, Any]:
        """In chat's form, one level deeper."""
        more = {key: self.tool[key] for key in ("description", "parameters", "strict")
                if self.tool.get(key) is not None}
        return {"type": "function", "function": {"name": self.name, **more}}


def joined(space: str, name: str) -> str:
    """One name of a namespace and a name in it."""
    return f"{space}__{name}" if space else name


def functions(tools: list[Any] | None, within: str = "", space: str = "") -> list[Function]:
    """All functions, those in namespaces too. Tools that OpenAI itself would run are refused by name."""
    found = []
    for i, tool in enumerate(tools or ()):
        place = f"{within}tools[{i}]"
        kind = tool.get("type") if isinstance(tool, dict) else None
        if not isinstance(kind, str):
            raise invalid(place, f"must be an object with a type; got {shown(tool)}")
        if kind not in ("function", "namespace") or space and kind == "namespace":
            raise RequestError(f"{place}.type is {shown(kind)}: this server runs no tools itself; there are function, "
                               "which the client runs, and namespace of such", param=f"{place}.type",
                               code="unsupported_parameter")
        if not isinstance(tool.get("name"), str):
            raise invalid(f"{place}.name", f"must be a string; got {shown(tool.get('name'))}")
        if kind == "function":
            found.append(Function(place, space, tool))
        elif isinstance(tool.get("tools"), list):
            found += functions(tool["tools"], f"{place}.", tool["name"])
        else:
            raise invalid(f"{place}.tools", f"must be a list; got {shown(tool.get('tools'))}")
    return found


def check_tool_choice(choice: Any) -> None:
    """Refuse the choice of a tool that this server would have to run. All else has a form that chat takes."""
    kind = choice.get("type") if isinstance(choice, dict) else "function"
    if kind not in ("function", "allowed_tools"):
        raise RequestError(f"tool_choice.type is {shown(kind)}; there are function, allowed_tools, and the words none, "
                           "auto and required", param="tool_choice.type", code="unsupported_parameter")


def shown_tools(tools: list[Any] | None) -> list[dict[str, Any]]:
    """Tools as the response repeats them."""
    return [tool if tool["type"] == "namespace" else {
        "type": "function", "name": tool["name"], "description": tool.get("description"),
        "parameters": tool.get("parameters"), "strict": tool.get("strict")} for tool in tools or ()]
