"""Messages between the API, scheduler and detokenizer processes, and the sampling parameters they carry.

msgspec structs, encoded as msgpack; token ids travel as little-endian int32 bytes. Nothing here is ever pickled.
"""
from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

from .errors import Overloaded, RequestError

FinishReason = Literal["stop", "length", "abort", "error"]


def pack_ids(ids) -> bytes:
    """Token ids (any integer sequence) to little-endian int32 bytes."""
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()


def unpack_ids(data: bytes) -> np.ndarray:
    """The inverse of `pack_ids`; a read-only int32 view."""
    return np.frombuffer(data, dtype="<i4")


class GrammarSpec(msgspec.Struct, frozen=True, array_like=True):
    """What an output must follow. kind: a word of `core.grammar.contract.KINDS`, which also says what `source` is.
    field: of the client's request, for messages.
    """

    kind: str
    source: str
    field: str = "grammar"


class ThinkingSpec(msgspec.Struct, frozen=True, array_like=True):
    """How a model writes its thinking, for a grammar that holds behind it and for a budget.

    opened: the prompt ends inside it. begin: packed ids that open it. ends: texts of which each ends it. stop: packed
    ids that end it when `budget` tokens, -1 for no limit, are used up.
    """

    opened: bool
    begin: bytes
    ends: tuple[str, ...]
    stop: bytes
    budget: int = -1


class ControlSpec(msgspec.Struct, frozen=True, array_like=True):
    """What an output may not hold, beside its grammar. allowed, banned: packed ids, b"" = no such list. phrases: packed
    ids, of at least two tokens. processors: names and arguments as JSON, of `core.grammar.processors`."""

    allowed: bytes = b""
    banned: bytes = b""
    phrases: tuple[bytes, ...] = ()
    processors: tuple[tuple[str, str], ...] = ()

    @property
    def fields(self) -> str:
        """The client's names of what is set, for messages."""
        return ", ".join(name for name, value in (
            ("allowed_token_ids", self.allowed), ("bad_words", self.banned or self.phrases),
            ("logits_processors", self.processors)) if value)


class SamplingParams(msgspec.Struct, frozen=True, omit_defaults=True):
    """How one request samples; ranges are checked by `core.server.validate` before it gets here.

    temperature 0 = greedy; top_k 0, top_p 1, min_p 0, repetition_penalty 1, presence and frequency 0 = off.
    seed None = drawn by the API process, so that a request always has one.
    logprobs: None = none, K = the sampled token's and the K best. prompt_logprobs: the same for prompt tokens.
    stop: strings, matched on text by the detokenizer. stop_token_ids: extra ids that end the output.
    eos ids come from the model; ignore_eos switches them off. min_tokens bans every stop id before that many.
    grammar: the output is one of its sentences or, at max_tokens, the beginning of one. thinking: what may come before.
    controls: what it may not hold.
    """

    max_tokens: int = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] = {}
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop: bool = False
    ignore_eos: bool = False
    skip_special: bool = True
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: GrammarSpec | None = None
    thinking: ThinkingSpec | None = None
    controls: ControlSpec | None = None


class CacheHint(msgspec.Struct, frozen=True, array_like=True):
    """What a client knows of the next use of its cached prefix: advice for eviction, never a pin.

    session: its name for a conversation. ends: this is the session's last request. next_within: seconds until the next
    one, 0 = unknown. single: a request on its own, whose prefix nobody will ask for again.
    """

    session: str = ""
    ends: bool = False
    next_within: float = 0.0
    single: bool = False


class Submit(msgspec.Struct, frozen=True, tag=True):
    """A new request. `prompt`: packed ids. `domain` keeps cache entries apart (salt, images); b"" = shared.

    tenant: whose share it counts against. ttft: seconds in which its first token is wanted, 0 = no wish.
    adapter: number of the low-rank adapter that it is computed with, 0 = none. It keeps cache entries apart too.
    """

    id: str
    prompt: bytes
    params: SamplingParams
    domain: bytes = b""
    priority: int = 0
    arrival: float = 0.0
    tenant: str = ""
    ttft: float = 0.0
    hint: CacheHint | None = None
    adapter: int = 0


class Abort(msgspec.Struct, frozen=True, tag=True):
    """End these requests at once; an unknown id is ignored. `reason` is reported as the finish reason."""

    ids: tuple[str, ...]
    reason: FinishReason = "abort"


class Command(msgspec.Struct, frozen=True, tag=True):
    """An administrative call, answered by `Reply` with the same `token`. name: as `EngineCore.command` takes it."""

    token: str
    name: str
    arguments: dict[str, str | float] = {}


class Reply(msgspec.Struct, frozen=True, tag=True):
    """The answer to a `Command`: `data` is JSON bytes; where it is refused "error" and the fields of `RequestError`."""

    token: str
    ok: bool
    data: bytes = b"{}"


class Logprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of consecutive tokens: `chosen` float32 [n]; `top_ids` int32 and `top` float32 [n, k]."""

    chosen: bytes
    k: int
    top_ids: bytes
    top: bytes


class TokenOutput(msgspec.Struct, frozen=True, array_like=True):
    """New tokens of one request, with all that may be told of them.

    tokens: packed ids, stop ids included. finish: None while it runs. stop_id: the id that ended it, else -1.
    handle: the request's short name in `TokenOutputs` from its first output on, else -1.
    prompt_tokens and cached_tokens (those whose K and V came from the cache) are set on the first output.
    prompt_logprobs: of prompt tokens 1..n-1 (the first has none), on the first output, if asked.
    drafted, accepted: tokens of drafts that were proposed for the request, and kept, with its finish.
    queued: seconds from arrival until it was first computed, on the first output; -1 = not told.
    error, status, code, param, retry_after: what `RequestError` carries, when finish is "error".
    Every submitted request gets exactly one output with a finish, also when it is aborted.
    """

    id: str
    tokens: bytes
    finish: FinishReason | None = None
    stop_id: int = -1
    prompt_tokens: int = 0
    cached_tokens: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    error: str = ""
    status: int = 500
    code: str | None = None
    param: str | None = None
    retry_after: float = 0.0
    handle: int = -1
    queued: float = -1.0
    drafted: int = 0
    accepted: int = 0


def refused(id: str, error: RequestError) -> TokenOutput:
    """The output that ends request `id` with `error`."""
    return TokenOutput(id, b"", "error", error=error.message, status=error.status, code=error.code, param=error.param,
                       retry_after=error.retry_after or 0.0)


class TokenOutputs(msgspec.Struct, frozen=True, tag=True):
    """All outputs of one step: first ones, endings and what has log-probabilities or an error in `outputs`; of every
    other request just its new token, as two packed int32 columns. A request is in one of the two; what it has in the
    columns, in order, may be several tokens.
    """

    outputs: list[TokenOutput]
    handles: bytes = b""
    tokens: bytes = b""


class Watch(msgspec.Struct, frozen=True, tag=True):
    """Tells the detokenizer how to turn a request's ids into text.

    It travels as a second frame of `Submit`; the scheduler passes it on before the request's first output, on the same
    ordered socket, so that it is always known in time. min_tokens: stop strings within the first so many are ignored.
    shown: control tokens that leave their spelling although others are skipped: parsers of replies read them.
    """

    id: str
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    skip_special: bool = True
    min_tokens: int = 0
    shown: tuple[int, ...] = ()


class TextOutput(msgspec.Struct, frozen=True, array_like=True):
    """New text of one request, after stop strings.

    text: complete characters only; the one that a limit or an abort cuts is left out. tokens: packed ids behind it; a
    token that ends inside a stop string is counted.
    finish, logprobs, prompt_*, cached_tokens, error, queued, drafted, accepted: as in `TokenOutput`. completion_tokens:
    of all outputs so far.
    stop_reason: the stop string as text, or the stop id as a number.
    """

    id: str
    text: str
    tokens: bytes
    finish: FinishReason | None = None
    stop_reason: str | int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    error: str = ""
    status: int = 500
    code: str | None = None
    param: str | None = None
    retry_after: float = 0.0
    queued: float = -1.0
    drafted: int = 0
    accepted: int = 0


def request_error(output: TextOutput) -> RequestError:
    """The error that an output with finish "error" stands for."""
    if output.status in (429, 503):
        return Overloaded(output.error, status=output.status, retry_after=output.retry_after or 1.0)
    kind = "invalid_request_error" if output.status < 500 else "server_error"
    return RequestError(output.error, status=output.status, code=output.code, param=output.param, kind=kind)


class TextOutputs(msgspec.Struct, frozen=True, tag=True):
    """All texts of one batch of `TokenOutputs`."""

    outputs: list[TextOutput]


class Ready(msgspec.Struct, frozen=True, tag=True):
    """A worker process has started: `process` is its role, `info` JSON (banner lines, limits)."""

    process: str
    info: bytes = b"{}"


class Progress(msgspec.Struct, frozen=True, tag=True):
    """How far start-up is: `stage` for people ("load weights"), `done` of `total` bytes or steps; total 0 = unknown."""

    stage: str
    done: int = 0
    total: int = 0


class Failed(msgspec.Struct, frozen=True, tag=True):
    """A worker process cannot go on; `message` is for people."""

    process: str
    message: str


ToScheduler = Submit | Abort | Command | Ready
ToDetokenizer = Watch | TokenOutputs | Reply | Ready | Progress | Failed
ToApi = TextOutputs | Reply | Ready | Progress | Failed
