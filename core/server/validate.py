"""From request fields to what the engine takes: prompts inside the vocabulary and the context, parameters in range."""
from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import RequestError, shown
from ..messages import SamplingParams
from .controls import control_of
from .protocol import INT64, SamplingFields
from .structured import grammar_of

COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions
SHAPING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
TINY_TOP_P = 1e-9       # OpenAI allows top_p 0: only the best token is left


@dataclass(frozen=True)
class Bounds:
    """What the running model and the configuration allow."""

    vocab_size: int
    max_model_len: int
    max_n: int
    sampling: Mapping[str, float] = field(default_factory=dict)  # what the model's makers recommend
    places: int = 2**31  # requests that may run and wait at once
    spell: Callable[[str], Sequence[int]] | None = None  # ids of a text in the middle of another
    processors: tuple[str, ...] = ()  # names of logits processors


def invalid(param: str, message: str, code: str = "invalid_value") -> RequestError:
    return RequestError(f"{param} {message}", param=param, code=code)


def check_ids(ids: Any, bounds: Bounds, param: str) -> np.ndarray:
    """A list of token ids as int32; raises 400 naming the first entry that is no integer or outside the vocabulary."""
    if not ids:
        raise invalid(param, "is empty: at least one token is needed")
    if not all(type(id) is int for id in ids):
        bad = next(id for id in ids if type(id) is not int)
        raise invalid(param, f"must hold integers only; got {shown(bad)}")
    if min(ids) < 0 or max(ids) >= bounds.vocab_size:
        bad = next(id for id in ids if not 0 <= id < bounds.vocab_size)
        raise invalid(param, f"holds token id {shown(bad)}; this model has the ids 0 to {bounds.vocab_size - 1}")
    return np.array(ids, np.int32)


def split_prompts(prompt: Any, param: str = "prompt") -> list[tuple[str, str | list[Any]]]:
    """Name and value of each prompt of a request: text, a list of texts, token ids, or a list of token id lists."""
    if prompt is None:
        raise invalid(param, "is required", "missing_required_parameter")
    if isinstance(prompt, str):
        return [(param, prompt)]
    if not isinstance(prompt, list) or not prompt:
        raise invalid(param, f"must be text, a list of texts, token ids or a list of them; got {shown(prompt)}")
    if isinstance(prompt[0], (str, list)):
        kind = type(prompt[0])
        if not all(type(part) is kind for part in prompt):
            raise invalid(param, "mixes texts, numbers and lists; send one kind")
        return [(f"{param}[{i}]", part) for i, part in enumerate(prompt)]
    return [(param, prompt)]


def check_choices(prompts: int, n: int, bounds: Bounds, param: str = "prompt") -> None:
    """At most `max_n` answers to one request, prompts times n, and no more than there ever are places for."""
    param = "n" if n > 1 else param
    if prompts * n > bounds.places:
        raise invalid(param, f"asks for {prompts} x {n} answers; at most {bounds.places} can run and wait at once "
                             "(--max-running-requests, --max-queued-requests)")
    if prompts * n > bounds.max_n:
        raise invalid(param, f"asks for {prompts} x {n} answers; at most {bounds.max_n} are allowed (--max-n)")


def too_long(bounds: Bounds, prompt: int, asked: int | None, param: str) -> RequestError:
    """OpenAI's error for a context that does not fit, with the numbers."""
    left = bounds.max_model_len - prompt
    wish, way = (f" and {asked} in the completion", "or the completion") if asked else ("", "")
    if asked and left > 0:
        way += f", of which {left} tokens are left for it"
    return RequestError(
        f"this model's maximum context length is {bounds.max_model_len} tokens, but {prompt + (asked or 0)} were "
        f"requested ({prompt} in the prompt{wish}); shorten the prompt {way}".rstrip(),
        param=param, code="context_length_exceeded")


def check_size(least: int, bounds: Bounds, param: str) -> None:
    """Refuse a text that cannot fit before it is tokenized; `least` is the smallest number of tokens it can have."""
    if least > bounds.max_model_len:
        raise RequestError(f"this model's maximum context length is {bounds.max_model_len} tokens, but the prompt has "
                           f"at least {least}; shorten it", param=param, code="context_length_exceeded")


def output_limit(asked: int | None, default: int | None, prompt: int, bounds: Bounds, param: str) -> int:
    """Tokens to generate. A default is cut to what the context leaves (None: all of it); a wish that does not fit
    is refused."""
    left = bounds.max_model_len - prompt
    if left < (0 if asked == 0 else 1):
        raise too_long(bounds, prompt, asked, param)
    if asked is None:
        return left if default is None else min(default, left)
    if asked > left:
        raise too_long(bounds, prompt, asked, "max_tokens")
    return asked


def _logit_bias(bias: dict[str, float] | None, bounds: Bounds) -> dict[int, float]:
    parsed = {}
    for key, value in (bias or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10 and int(key) < bounds.vocab_size):
            raise invalid("logit_bias", f"has the key {shown(key)}; keys are token ids 0 to {bounds.vocab_size - 1}")
        parsed[int(key)] = value
    return parsed


def _or(value: Any, default: Any) -> Any:
    return default if value is None else value


def sampling_params(fields: SamplingFields, bounds: Bounds, max_tokens: int, logprobs: int | None = None,
                    prompt_logprobs: int | None = None) -> SamplingParams:
    """The engine's parameters. A missing seed is drawn here, once, so that a request always has one.

    The model's recommended sampling holds as a whole, for requests that say nothing of how to sample.
    """
    if all(getattr(fields, name) is None for name in SHAPING):
        fields = fields.model_copy(update={k: v for k, v in bounds.sampling.items() if k in SHAPING})
    min_tokens = fields.min_tokens or 0
    if min_tokens > max_tokens:
        raise invalid("min_tokens", f"is {min_tokens}, more than the {max_tokens} tokens that may be generated")
    stop_ids = fields.stop_token_ids
    if stop_ids:
        check_ids(stop_ids, bounds, "stop_token_ids")
    top_k = max(_or(fields.top_k, 0), 0)
    return SamplingParams(
        max_tokens=max_tokens, min_tokens=min_tokens,
        temperature=_or(fields.temperature, 1.0), top_p=max(_or(fields.top_p, 1.0), TINY_TOP_P),
        top_k=top_k if top_k < bounds.vocab_size else 0, min_p=_or(fields.min_p, 0.0),
        seed=random.getrandbits(63) if fields.seed is None else fields.seed,
        repetition_penalty=_or(fields.repetition_penalty, 1.0), presence_penalty=_or(fields.presence_penalty, 0.0),
        frequency_penalty=_or(fields.frequency_penalty, 0.0), logit_bias=_logit_bias(fields.logit_bias, bounds),
        stop=tuple(dict.fromkeys(fields.stop or ())), stop_token_ids=tuple(stop_ids or ()),
        include_stop=bool(fields.include_stop_str_in_output), ignore_eos=bool(fields.ignore_eos),
        skip_special=_or(fields.skip_special_tokens, True), logprobs=logprobs, prompt_logprobs=prompt_logprobs,
        grammar=grammar_of(fields), controls=control_of(fields, bounds))


def nth_seed(seed: int, index: int) -> int:
    """The seed of choice `index`: the request's own for the first, then counting up within int64."""
    return (seed + index + INT64) % (2 * INT64) - INT64
