"""The engine in a Python program: no server, no other process.

    with Engine("model.gguf", platform="cpu") as engine:
        print(engine.generate("The capital of France is", max_tokens=8, temperature=0).text)
"""
from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from pydantic import ValidationError

from .config import Config
from .engine import EngineCore
from .errors import ConfigError, RequestError
from .messages import Submit, TextOutput, TokenOutputs, Watch, pack_ids, request_error, unpack_ids
from .processes.detokenizer import DetokenizerState
from .scheduler.request import cache_domain
from .server.protocol import SamplingFields
from .server.validate import Bounds, sampling_params
from .text import ChatTemplate, load_tokenizer
from .weights import open_checkpoint

Prompt = str | Sequence[int]
EXTRA = ("logprobs", "prompt_logprobs", "cache_salt", "priority")  # parameters that are no SamplingFields


@dataclasses.dataclass(frozen=True)
class Completion:
    """One finished output. finish: "stop" or "length"; stop: the stop string or id that ended it.

    logprobs: of each output token, float32 [n], where asked for. cached_tokens: prompt tokens found in the cache.
    """

    text: str
    tokens: list[int]
    finish: str
    stop: str | None
    prompt_tokens: int
    cached_tokens: int
    logprobs: np.ndarray | None = None


class Engine:
    """A loaded model. Keyword arguments are settings by name, as `isthmus explain` lists them.

    Not for use from several threads at once: give it lists of prompts, which run concurrently.
    """

    def __init__(self, model: str | None = None, *, progress: Callable[[str, int, int | None], None] | None = None,
                 **settings: Any):
        self.config = config_of(model=model, **settings)
        self.core = EngineCore(self.config, progress)
        self.info = self.core.info
        with open_checkpoint(self.info.model_path) as checkpoint:
            self.tokenizer = load_tokenizer(checkpoint)
        self._texts = DetokenizerState(self.tokenizer)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the device go."""
        self.core.close()

    def generate(self, prompts: Prompt | Sequence[Prompt], **params: Any) -> Completion | list[Completion]:
        """Complete one prompt (text or token ids), or a list of prompts together. Parameters as in `/v1/completions`:
        max_tokens, temperature, top_p, top_k, seed, stop, logprobs, ... Raises `RequestError` for a bad one."""
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int | np.integer))
        queue = [prompts] if single else list(prompts)
        ids = [self._submit(self._encode(prompt), params) for prompt in queue]
        parts: dict[str, list[TextOutput]] = {id: [] for id in ids}
        try:
            for output in self._run(set(ids)):
                parts[output.id].append(output)
        finally:
            self.core.abort(ids)
        done = [_completion(parts[id]) for id in ids]
        return done[0] if single else done

    def stream(self, prompt: Prompt, **params: Any) -> Iterator[str]:
        """The text of one completion, as it comes."""
        id = self._submit(self._encode(prompt), params)
        try:
            for output in self._run({id}):
                if output.finish == "error":
                    raise request_error(output)
                if output.text:
                    yield output.text
        finally:
            self.core.abort([id])

    def chat(self, messages: Sequence[dict[str, Any]], **params: Any) -> Completion:
        """The answer to a conversation, under the model's own chat template."""
        if not self.tokenizer.chat_template:
            raise RequestError("this model has no chat template: use generate()", param="messages")
        template = ChatTemplate(self.tokenizer.chat_template, self.tokenizer)
        return self.generate(np.asarray(template.encode(list(messages)), np.int32).tolist(), **params)

    def _encode(self, prompt: Prompt) -> np.ndarray:
        if isinstance(prompt, str):
            return self.tokenizer.encode(prompt, add_special=True, parse_special=True)
        return np.asarray(prompt, np.int32)

    def _submit(self, ids: np.ndarray, params: dict[str, Any]) -> str:
        bounds = Bounds(self.info.vocab_size, self.info.max_model_len, 1, self.info.sampling_defaults)
        fields = {k: v for k, v in params.items() if k not in EXTRA}
        if "logit_bias" in fields:
            fields["logit_bias"] = {str(k): v for k, v in fields["logit_bias"].items()}
        unknown = set(fields) - set(SamplingFields.model_fields)
        if unknown:
            raise RequestError(f"unknown parameter {sorted(unknown)[0]!r}", param=sorted(unknown)[0])
        try:
            parsed = SamplingFields.model_validate(fields)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            raise RequestError(f"{name}: {first['msg']}; got {first['input']!r}", param=name) from error
        limit = 16 if parsed.max_tokens is None else parsed.max_tokens
        sampling = sampling_params(parsed, bounds, limit, params.get("logprobs"), params.get("prompt_logprobs"))
        id = uuid.uuid4().hex
        self._texts.watch(Watch(id, sampling.stop, sampling.include_stop, sampling.skip_special, sampling.min_tokens))
        self.core.submit(Submit(id, pack_ids(ids), sampling, cache_domain(salt=params.get("cache_salt")),
                                params.get("priority", 0)))
        return id

    def _run(self, ids: set[str]) -> Iterator[TextOutput]:
        """Texts of these requests until all have ended."""
        while ids:
            texts, stops = self._texts.handle(TokenOutputs(self.core.step()))
            self.core.abort(stops, "stop")
            for output in texts.outputs:
                if output.finish:
                    ids.discard(output.id)
                yield output


def config_of(**settings: Any) -> Config:
    """A configuration from settings by name, whatever their group. Raises `ConfigError` for an unknown name."""
    groups = {}
    for group in dataclasses.fields(Config):
        names = {f.name for f in dataclasses.fields(group.default_factory)}
        groups[group.name] = group.default_factory(**{k: settings.pop(k) for k in names & settings.keys()})
    if settings:
        raise ConfigError(f"unknown setting {sorted(settings)[0]!r}; `isthmus explain` lists them")
    return Config(**groups)


def _completion(parts: list[TextOutput]) -> Completion:
    last = parts[-1]
    if last.finish == "error":
        raise request_error(last)
    logprobs = [np.frombuffer(p.logprobs.chosen, np.float32) for p in parts if p.logprobs is not None]
    return Completion("".join(p.text for p in parts), [t for p in parts for t in unpack_ids(p.tokens).tolist()],
                      last.finish, last.stop_reason, max(p.prompt_tokens for p in parts),
                      max(p.cached_tokens for p in parts), np.concatenate(logprobs) if logprobs else None)
