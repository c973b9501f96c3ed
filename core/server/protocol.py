"""Request bodies as clients send them. Unknown fields are ignored, and known ones that cannot be honoured are refused.
Of unknown ones that look like a field the client is told (`Body.ignored`).

Both dialects of the field are understood: OpenAI's with the common extensions of vLLM, and SGLang's names.
Sources: OpenAI's OpenAPI description; `max_new_tokens` and its like from SGLang's native API.
"""
from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

from pydantic import (
    AliasChoices,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PrivateAttr,
    ValidationError,
    model_validator,
)

from ..errors import RequestError
from ..suggest import closest
from .errors import validation_error
from .limits import (
    MAX_ALLOWED,
    MAX_BAD_CHARS,
    MAX_BAD_WORDS,
    MAX_BIAS,
    MAX_NEXT_WITHIN,
    MAX_PIN,
    MAX_PROCESSORS,
    MAX_SESSION,
    MAX_STOP_CHARS,
    MAX_STOP_IDS,
    MAX_STOPS,
    MAX_TEXT,
    MAX_TTFT,
    parse_object,
)

INT64 = 2**63


@dataclass(frozen=True)
class _Shown:
    """What the API's description says of the entries of a list or object."""

    limit: int

    def __get_pydantic_json_schema__(self, core: Any, handler: Any) -> dict[str, Any]:
        schema = handler(core)
        return schema | {"maxProperties" if schema.get("type") == "object" else "maxItems": self.limit}


def _at_most(limit: int) -> tuple[BeforeValidator, _Shown]:
    """Counts the entries of a list or object before any of them is looked at."""
    def check(value: Any) -> Any:
        if isinstance(value, (list, dict)) and len(value) > limit:
            raise ValueError(f"has {len(value)} entries, at most {limit} are allowed")
        return value
    return BeforeValidator(check), _Shown(limit)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Count = Annotated[int, Field(ge=0, lt=10**20)]  # a message can repeat it
StopString = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_CHARS)]
ShortText = Annotated[str, Field(max_length=MAX_TEXT)]


class Body(BaseModel):
    """No coercion between types: "0.5" is not a number and true is not 1. null is the same as an absent field."""

    model_config = ConfigDict(strict=True, extra="ignore")
    _ignored: dict[str, str] = PrivateAttr(default_factory=dict)
    _sent: dict[str, str] = PrivateAttr(default_factory=dict)

    @property
    def ignored(self) -> dict[str, str]:
        """Fields that were sent and are none -> what was probably meant."""
        return self._ignored

    @property
    def sent(self) -> dict[str, str]:
        """Fields that were sent by another name than their own, or inside of another field -> that name."""
        return self._sent

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, data: Any) -> Any:
        return {key: value for key, value in data.items() if value is not None} if isinstance(data, dict) else data


AnyBody = TypeVar("AnyBody", bound=Body)


def spellings(model: type[Body]) -> frozenset[str]:
    """Every name under which a field of the model may be sent."""
    aliases = ((name, field.validation_alias) for name, field in model.model_fields.items())
    return frozenset(word for name, alias in aliases
                     for word in (alias.choices if isinstance(alias, AliasChoices) else (name,)))


def read(model: type[AnyBody], data: bytes) -> AnyBody:
    """A request from its bytes; raises the 400 that names the first fault."""
    fields = parse_object(data)
    known = spellings(model)
    refuse_unsupported(fields, known)
    if isinstance(fields.get("sampling_params"), dict):
        refuse_unsupported(fields["sampling_params"], known, "sampling_params.")
    try:
        body = model.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error) from None
    body._ignored, body._sent = lookalikes(fields, model), sent_names(fields, model)
    return body


def sent_names(fields: dict[str, Any], model: type[Body]) -> dict[str, str]:
    """`Body.sent`. Of several names of one field the first counts, as it does where they are read."""
    found = {}
    for name, field in model.model_fields.items():
        words = field.validation_alias.choices if isinstance(field.validation_alias, AliasChoices) else (name,)
        word = next((word for word in words if fields.get(word) is not None), name)
        if word != name:
            found[name] = word
    inner = fields.get("sampling_params") if "sampling_params" in model.model_fields else None
    if isinstance(inner, dict):
        others = sent_names(inner, SamplingFields)
        found |= {name: f"sampling_params.{others.get(name, name)}" for name in SamplingFields.model_fields}
    return found


# Of other APIs; what is spelled alike is found without them.
FOREIGN = {"repeat_penalty": "repetition_penalty", "num_predict": "max_tokens", "n_predict": "max_tokens",
           "max_length": "max_tokens", "stop_sequences": "stop", "random_seed": "seed"}
MAX_UNKNOWN = 32  # unknown fields that are looked at


def lookalikes(fields: dict[str, Any], model: type[Body]) -> dict[str, str]:
    """Unknown fields that look like one of the model's or like a sampling parameter -> that one."""
    known, found = spellings(model), {}
    plain = {word.replace("_", ""): word for word in (*known, *spellings(SamplingFields))}
    unknown = [name for name in fields if name not in known and name not in REFUSED and name not in NEUTRAL
               and fields[name] is not None]
    for name in unknown[:MAX_UNKNOWN]:
        word = closest(name.replace("_", "").replace("-", ""), plain, 0.8) if len(name) < 40 else None
        meant = FOREIGN.get(name) or (word and plain[word])
        if meant:
            found[name] = meant if meant in known else f"sampling_params.{meant}" if "sampling_params" in known else ""
    for field, kind in (("sampling_params", SamplingFields), ("cache_hint", CacheHintFields),
                        ("stream_options", StreamOptions)):
        if field in known and isinstance(fields.get(field), dict):
            found |= {f"{field}.{name}": f"{field}.{meant}" for name, meant in lookalikes(fields[field], kind).items()}
    return {name: meant for name, meant in found.items() if meant}


class StreamOptions(Body):
    """`stream_options`; `continuous_usage_stats` puts usage into every chunk."""

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(Body):
    """How to sample; None = the default. Ranges are OpenAI's where OpenAI has the field."""

    max_tokens: Count | None = Field(None, validation_alias=AliasChoices(
        "max_completion_tokens", "max_tokens", "max_new_tokens"))
    min_tokens: Count | None = Field(None, validation_alias=AliasChoices("min_tokens", "min_new_tokens"))
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, ge=0, le=1)
    top_k: int | None = Field(None, ge=-1, lt=INT64)
    min_p: float | None = Field(None, ge=0, le=1)
    seed: int | None = Field(None, ge=-INT64, lt=INT64, validation_alias=AliasChoices("seed", "sampling_seed"))
    repetition_penalty: float | None = Field(None, ge=0.01, le=10)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, Annotated[float, Field(ge=-100, le=100)]], *_at_most(MAX_BIAS)] | None = None
    stop: Annotated[list[StopString], *_at_most(MAX_STOPS), BeforeValidator(_as_list)] | None = None
    stop_token_ids: Annotated[list[int], *_at_most(MAX_STOP_IDS)] | None = None
    include_stop_str_in_output: bool | None = Field(None, validation_alias=AliasChoices(
        "include_stop_str_in_output", "no_stop_trim"))
    bad_words: Annotated[list[BadWord], *_at_most(MAX_BAD_WORDS)] | None = None
    allowed_token_ids: Annotated[list[int], *_at_most(MAX_ALLOWED)] | None = None
    logits_processors: Annotated[list[Any], *_at_most(MAX_PROCESSORS)] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    n: Count | None = Field(None, ge=1)
    # One of these at most; `core.server.structured` reads them.
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: Any = None
    guided_regex: Any = None
    guided_choice: Any = None
    guided_grammar: Any = None
    json_schema: Any = None
    regex: Any = None
    ebnf: Any = None
    grammar: Any = None
    structural_tag: Any = None


class CacheHintFields(Body):
    """`cache_hint`: what the client knows of the next use of this prefix. Advice: a wrong one costs little.

    next_within: seconds until the next request of the conversation, such as the time that a tool call may take.
    """

    end_of_session: bool | None = None
    next_within: float | None = Field(None, ge=0, le=MAX_NEXT_WITHIN)
    single_shot: bool | None = None


class TermFields(Body):
    """How a request is to be served, apart from its contents; `core.server.terms` reads them.

    session_id: the client's name for a conversation. ttft_target: seconds in which the first token is wanted.
    lora_path: the name of an adapter, where `model` does not say it.
    """

    priority: int | None = Field(None, ge=-2**31, lt=2**31)
    cache_salt: ShortText | None = Field(None, validation_alias=AliasChoices("cache_salt", "extra_key"))
    session_id: str | None = Field(None, min_length=1, max_length=MAX_SESSION)
    cache_hint: CacheHintFields | None = None
    ttft_target: float | None = Field(None, gt=0, le=MAX_TTFT)
    lora_path: ShortText | None = Field(None, validation_alias=AliasChoices("lora_path", "lora_adapter"))


class RequestFields(SamplingFields, TermFields):
    """What chat and completions have in common."""

    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class ChatRequest(RequestFields):
    """`POST /v1/chat/completions`; messages are checked by `core.server.conversation`."""

    messages: list[Any] = Field(min_length=1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Any] | None = None  # `core.server.tools` checks these three
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    separate_reasoning: bool | None = None
    include_reasoning: bool | None = None
    enable_thinking: bool | None = None
    reasoning_effort: ShortText | None = None
    thinking_token_budget: Count | None = None


class CompletionRequest(RequestFields):
    """`POST /v1/completions`; the forms of `prompt` are checked by `core.server.validate`."""

    prompt: Any = None
    echo: bool | None = None
    logprobs: int | None = Field(None, ge=0, le=20)
    best_of: Count | None = None
    add_special_tokens: bool | None = None


class GenerateRequest(TermFields):
    """`POST /generate`, the native call. The forms of `text` and `input_ids` are checked by `core.server.validate`."""

    text: Any = None
    input_ids: Any = None
    sampling_params: SamplingFields | None = None
    stream: bool | None = None
    return_logprob: bool | None = None
    logprob_start_len: int | None = Field(None, ge=-1)
    top_logprobs_num: int | None = Field(None, ge=0, le=20)
    rid: ShortText | None = Field(None, min_length=1)


class PinRequest(Body):
    """`POST /v1/sessions/{id}/pin`. ttl: seconds, counted anew with every request of the session."""

    ttl: float = Field(gt=0, le=MAX_PIN)


class TokenizeRequest(Body):
    """`POST /tokenize`: a text under any of its usual names, or a conversation."""

    text: str | None = Field(None, validation_alias=AliasChoices("prompt", "text", "content"))
    messages: list[Any] | None = Field(None, min_length=1)
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    return_token_strs: bool | None = None


class DetokenizeRequest(Body):
    """`POST /detokenize`; the ids are checked by `core.server.validate`."""

    tokens: list[Any]
    skip_special_tokens: bool | None = None


LATER = "is not supported yet"
REFUSED: dict[str, str] = {
    **dict.fromkeys(("stop_regex", "image_data", "audio_data", "video_data",
                     "truncate_prompt_tokens", "suffix", "return_hidden_states", "documents",
                     "moderation"), LATER),
    **dict.fromkeys(("tools", "thinking_token_budget"), "is for conversations; use /v1/chat/completions"),
    **dict.fromkeys(("functions", "function_call"), "is no longer supported; send tools and tool_choice"),
    "prompt_embeds": "is not supported: prompts are text or token ids",
    "chat_template": "is refused: the server decides the template (--chat-template)",
    "custom_logit_processor": "is refused: code from clients is never run",
    "use_beam_search": "is not supported; use n with sampling",
    "prompt_logprobs": "is not supported; use /v1/completions with echo and logprobs",
}

# Parameters of other servers and endpoints that change an output -> the value that changes nothing.
NEUTRAL: dict[str, float | bool] = {
    "no_repeat_ngram_size": 0, "encoder_no_repeat_ngram_size": 0, "encoder_repetition_penalty": 1, "length_penalty": 1,
    "diversity_penalty": 0, "penalty_alpha": 0, "guidance_scale": 1, "num_beams": 1, "typical_p": 1, "typical": 1,
    "tfs": 1, "tfs_z": 1, "top_a": 0, "epsilon_cutoff": 0, "eta_cutoff": 0, "xtc_probability": 0, "dry_multiplier": 0,
    "dynatemp_range": 0, "smoothing_factor": 0, "mirostat": 0, "mirostat_mode": 0, "top_n_sigma": -1, "nsigma": 0,
    "logit_processors": False, "watermark": False, "best_of": 1, "echo": False}


def _wanted(value: Any) -> bool:
    """Does this value of an optional field ask for something? 0 does where a number is meant."""
    return value is not None and value is not False and value not in ("", [], {})


def refuse_unsupported(body: dict[str, Any], known: frozenset[str] = frozenset(), within: str = "") -> None:
    """A 400 that names the first field which would be ignored although it asks for something. known: fields that the
    endpoint has, whatever others make of them. within: what the fields are in, as it stands before their names."""
    for field in (REFUSED.keys() & body.keys()) - known:
        if _wanted(body[field]):
            raise RequestError(f"{within}{field} {REFUSED[field]}", param=within + field,
                               code="unsupported_parameter")
    for field in (NEUTRAL.keys() & body.keys()) - known:
        if _wanted(body[field]) and body[field] != NEUTRAL[field]:
            raise RequestError(f"{within}{field} is not supported here; leave it out", param=within + field,
                               code="unsupported_parameter")
    if "tool_choice" not in known and body.get("tool_choice") not in (None, "none", "auto"):
        raise RequestError("tool_choice is for conversations; use /v1/chat/completions", param="tool_choice",
                           code="unsupported_parameter")
    if body.get("modalities") not in (None, [], ["text"]):
        raise RequestError(f"modalities other than ['text'] {LATER}", param="modalities", code="unsupported_parameter")
