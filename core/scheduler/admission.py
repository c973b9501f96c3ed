"""What a scheduler may do, and which requests can never run."""
from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..errors import RequestError
from ..messages import SamplingParams, Submit, unpack_ids

# What a request asks of the platform with any other value than the default: parameter -> word of `platform.FEATURES`.
ASKS = {"logprobs": "logprobs", "prompt_logprobs": "logprobs", "repetition_penalty": "penalties",
        "presence_penalty": "penalties", "frequency_penalty": "penalties", "logit_bias": "logit_bias",
        "min_tokens": "logit_bias",  # which bans the stop ids
        "grammar": "grammar_mask", "controls": "grammar_mask"}
_PLAIN = SamplingParams()


@dataclass(frozen=True)
class Limits:
    """Numbers that the scheduler keeps to.

    max_running: requests on the device.  max_queued: those beyond the free slots.  chunk: prompt tokens in one step.
    max_queued_tokens: tokens of waiting requests.  itl_target: seconds in which a step is to end, 0 = none.
    foresight: outputs that must have ended before admission counts on what running requests will need; 0 = never.
    max_model_len: prompt plus output of one request, in tokens.  score_rows: prompt tokens scored in one step.
    adapters: slots for low-rank adapters.
    waiting_timeout, running_timeout: seconds.  lacks: features that the platform `platform` has not, with its reasons.
    """

    max_running: int
    max_queued: int
    chunk: int
    page_size: int
    max_model_len: int
    vocab_size: int
    eos_ids: tuple[int, ...] = ()
    score_rows: int = 128
    max_queued_tokens: int = 2**23
    itl_target: float = 0.0
    foresight: int = 32
    max_top_logprobs: int = 20
    waiting_timeout: float = 600.0
    running_timeout: float = 3600.0
    adapters: int = 0
    platform: str = "the platform"
    lacks: Mapping[str, str] = field(default_factory=dict)

    @property
    def max_pages(self) -> int:
        """Pages of the longest request."""
        return -(-self.max_model_len // self.page_size)


def check_request(submit: Submit, limits: Limits) -> int:
    """The most output tokens the request can have. Raises `RequestError` that names the field and the number."""
    prompt, params = unpack_ids(submit.prompt), submit.params
    if not len(prompt):
        raise RequestError("the prompt is empty: at least one token is needed", param="prompt")
    low, high = int(prompt.min()), int(prompt.max())
    if low < 0 or high >= limits.vocab_size:
        bad = low if low < 0 else high
        raise RequestError(f"token id {bad} is outside the vocabulary of {limits.vocab_size}", param="prompt")
    for name, feature in ASKS.items():
        if feature in limits.lacks and getattr(params, name) != getattr(_PLAIN, name):
            if name == "controls":
                name = params.controls.fields
            elif name == "grammar":
                name = params.grammar.field
            raise RequestError(f"{name} is not available on {limits.platform}: {limits.lacks[feature]}", param=name,
                               code="unsupported_parameter")
    for name, ids in (("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
        for token in ids:
            if not 0 <= token < limits.vocab_size:
                raise RequestError(f"{name}: token id {token} is outside the vocabulary of {limits.vocab_size}",
                                   param=name)
    for name in ("logprobs", "prompt_logprobs"):
        asked = getattr(params, name)
        if asked is not None and not 0 <= asked <= limits.max_top_logprobs:
            raise RequestError(f"{name} {asked} is outside 0 to {limits.max_top_logprobs}, the most that "
                               f"{limits.platform} gives", param=name)
    if params.max_tokens < 0:
        raise RequestError(f"max_tokens {params.max_tokens} is below 0", param="max_tokens")
    room = limits.max_model_len - len(prompt)
    if room < min(1, params.max_tokens):
        raise RequestError(f"the prompt has {len(prompt)} tokens and the context is {limits.max_model_len} tokens: "
                           "shorten the prompt", param="prompt", code="context_length_exceeded")
    return min(params.max_tokens, room)
