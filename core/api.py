"""The engine in a Python program: no server, no other process.

    with Engine("model.gguf", platform="cpu") as engine:
        print(engine.generate("The capital of France is", max_tokens=8, temperature=0).text)
"""
from __future__ import annotations

import itertools
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import msgspec
import numpy as np
from pydantic import Field, ValidationError

from .config import Config
from .engine import EngineCore
from .errors import ConfigError, EngineStopped, Overloaded, RequestError
from .messages import Logprobs, Submit, TextOutput, Watch, pack_ids, request_error, unpack_ids
from .processes.detokenizer import DetokenizerState
from .server.adapters import FIRST
from .server.errors import validation_error
from .server.protocol import CacheHintFields, SamplingFields, ShortText, TermFields, spellings
from .server.terms import Caller, terms
from .server.text_service import open_text
from .server.validate import (
    COMPLETION_TOKENS,
    Bounds,
    check_ids,
    check_size,
    invalid,
    nth_seed,
    output_limit,
    sampling_params,
    split_prompts,
)
from .settings import check, list_settings
from .suggest import suggest

Prompt = str | Sequence[int] | np.ndarray


class Parameters(SamplingFields, TermFields):
    """What `Engine.generate` takes by name. tenant: whose share the request counts against."""

    logprobs: int | None = Field(None, ge=0, le=20)
    prompt_logprobs: int | None = Field(None, ge=0, le=20)
    tenant: ShortText | None = None


@dataclass(frozen=True)
class TokenLogprobs:
    """Log-probabilities of n consecutive tokens: `chosen` float32 [n], and of the k best ones in each place `top_ids`
    int32 [n, k] and `top` float32 [n, k], best first."""

    chosen: np.ndarray
    top_ids: np.ndarray
    top: np.ndarray


@dataclass(frozen=True)
class Completion:
    """One finished output. finish: "stop" or "length"; stop: the stop string, or the id, that ended it.

    logprobs: of the output tokens, where asked for; prompt_logprobs: of the prompt's, from the second on.
    cached_tokens: prompt tokens found in the cache.
    """

    text: str
    tokens: list[int]
    finish: str
    stop: str | int | None
    prompt_tokens: int
    cached_tokens: int
    logprobs: TokenLogprobs | None = None
    prompt_logprobs: TokenLogprobs | None = None


class Engine:
    """A loaded model. Keyword arguments are settings by name, as `isthmus explain` lists them.

    Not for use from several threads at once: give it lists of prompts, which run concurrently. After `close` every use
    raises `EngineStopped`.
    """

    def __init__(self, model: str | None = None, *, progress: Callable[[str, int, int | None], None] | None = None,
                 **settings: Any):
        self.config = config_of(model=model, **settings)
        self.core = EngineCore(self.config, progress)
        self.info = self.core.info
        self.text = open_text(replace(self.config, model=replace(self.config.model, model=self.info.model_path)))
        self.tokenizer = self.text.tokenizer
        self._texts = DetokenizerState(self.tokenizer)
        self._arrived: dict[str, deque[TextOutput]] = {}
        self._closed = False
        self._numbers = itertools.count(FIRST)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{self.info.dtype}, {self.info.max_model_len} tokens of context"
        return f"<Engine {self.info.served_name} on {self.info.platform}, {state}>"

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Let the device go. May be called twice."""
        if not self._closed:
            self._closed = True
            self.core.close()

    def generate(self, prompts: Prompt | Sequence[Prompt], **params: Any) -> Completion | list[Completion]:
        """Complete one prompt (text or token ids), or a list of prompts together.

        Parameters as in `/v1/completions`: max_tokens, temperature, top_p, top_k, seed, stop, logprobs (the chosen
        token's and so many of the best), ...; prompt_logprobs is the same for the prompt. With n above 1 the answer is
        a list, the n answers to a prompt next to each other. Raises `RequestError` for a bad parameter or prompt.
        """
        asked = _read_parameters(params)
        parts = _split(prompts) if not isinstance(prompts, list) or prompts else []
        submits = [submit for name, part in parts
                   for submit in self._submits(self._ids(name, part), asked, COMPLETION_TOKENS)]
        done = self._collect(submits)
        return done[0] if len(done) == 1 and parts[0][0] == "prompt" else done

    def stream(self, prompt: Prompt, **params: Any) -> Iterator[str]:
        """The text of one completion, as it comes. Parameters as for `generate`, but those that ask for more."""
        asked = _read_parameters(params)
        for name, value in (("n", None if asked.n == 1 else asked.n), ("logprobs", asked.logprobs),
                            ("prompt_logprobs", asked.prompt_logprobs)):
            if value is not None:
                raise invalid(name, f"is {value}, but a stream is the text of one answer: use generate()")
        (name, part), *more = _split(prompt)
        if more:
            raise invalid("prompt", f"holds {len(more) + 1} prompts, but a stream is the text of one: use generate()")
        with closing(self._run(self._submits(self._ids(name, part), asked, COMPLETION_TOKENS))) as outputs:
            for output in outputs:
                if output.finish == "error":
                    raise request_error(output)
                if output.text:
                    yield output.text

    def chat(self, messages: Sequence[dict[str, Any]], **params: Any) -> Completion | list[Completion]:
        """The answer to a conversation, under the model's chat template; parameters as for `generate`. Without
        max_tokens it may be as long as the context leaves."""
        if self.text.template is None:
            raise RequestError("this model has no chat template: use generate(), or name a file as chat_template",
                               param="messages")
        ids = np.asarray(self.text.template.encode(messages), np.int32)
        done = self._collect(self._submits(ids, _read_parameters(params), None))
        return done[0] if len(done) == 1 else done

    def load_adapter(self, name: str, path: str, replace: bool = False) -> None:
        """Load a low-rank adapter in PEFT's form, a folder or a hub id, for `generate(..., lora_path=name)`; there must
        be room for it (`max_loras`). Raises `RequestError` with what is wrong with it."""
        asked = {"lora": name, "path": path, "replace": float(replace)}
        self.core.command("read_adapter", **asked)
        while self.core.command("add_adapter", **asked, number=next(self._numbers)).get("reading"):
            time.sleep(0.005)

    def unload_adapter(self, name: str) -> None:
        """Forget an adapter; outputs that use it go on. Raises `RequestError` where there is none of the name."""
        if not self.core.command("remove_adapter", lora=name)["found"]:
            raise RequestError(f"there is no adapter {name!r}", status=404, param="name")

    def _adapter(self, name: str | None) -> int:
        known = {known["name"]: known["number"] for known in self.core.adapters.list()}
        if name and name not in known:
            raise RequestError(f"lora_path {name!r} is no adapter that is loaded{suggest(name, known)}",
                               param="lora_path")
        return known[name] if name else 0

    def _ids(self, name: str, part: str | list[Any]) -> np.ndarray:
        bounds = self._bounds
        if isinstance(part, str):
            check_size(self.text.least_tokens(len(part)), bounds, name)
            part = self.text.encode(part).tolist()
        return check_ids(part, bounds, name)

    @property
    def _bounds(self) -> Bounds:
        return Bounds(self.info.vocab_size, self.info.max_model_len, 2**31, self.info.sampling_defaults,
                      spell=self.text.spell, processors=self.config.scheduler.logits_processors)

    def _submits(self, ids: np.ndarray, asked: Parameters, default: int | None) -> list[Submit]:
        """The engine's requests for one prompt, one for each of `n` answers. default: tokens, None = what is left."""
        limit = output_limit(asked.max_tokens, default, len(ids), self._bounds, "prompt")
        params = sampling_params(asked, self._bounds, limit, asked.logprobs, asked.prompt_logprobs)
        adapter = self._adapter(asked.lora_path)
        its = terms(asked, Caller(asked.tenant or ""), self.config.cache.cache_isolation == "key")
        return [Submit(uuid.uuid4().hex, pack_ids(ids), msgspec.structs.replace(params, seed=nth_seed(params.seed, i)),
                       its.domain, its.priority, 0.0, its.tenant, its.ttft, its.hint, adapter)
                for i in range(asked.n or 1)]

    def _collect(self, submits: list[Submit]) -> list[Completion]:
        """All answers, in the order of their requests."""
        parts: dict[str, list[TextOutput]] = {submit.id: [] for submit in submits}
        with closing(self._run(submits)) as outputs:
            for output in outputs:
                parts[output.id].append(output)
                if output.finish == "error":
                    raise request_error(output)
        return [_completion(found) for found in parts.values()]

    def _run(self, submits: list[Submit]) -> Iterator[TextOutput]:
        """Their texts until all have ended, as many at once as the queue takes; leaving early ends the rest."""
        waiting, running = deque(submits), set()
        try:
            while waiting or running:
                if self._closed:
                    raise EngineStopped("this engine is closed: make a new one")
                self._feed(waiting, running)
                if not any(self._arrived[id] for id in running):
                    if not self.core.has_work:  # KeyboardInterrupt in the middle of a step, of this or another call
                        raise RequestError("a step that was interrupted took the rest of this output: ask again",
                                           status=500, kind="server_error")
                    self._step()
                for id in [id for id in running if self._arrived[id]]:
                    for output in self._take(id):
                        if output.finish:
                            running.discard(id)
                        yield output
        finally:
            self.core.abort(running)
            for submit in submits:
                self._arrived.pop(submit.id, None)
                self._texts.forget(submit.id)

    def _feed(self, waiting: deque[Submit], running: set[str]) -> None:
        while waiting:
            submit = waiting[0]
            try:
                self.core.submit(submit)
            except Overloaded:
                if not self._arrived:  # nobody will make room
                    raise
                return
            params = submit.params
            self._texts.watch(Watch(submit.id, params.stop, params.include_stop, params.skip_special,
                                    params.min_tokens))
            self._arrived[submit.id] = deque()
            running.add(waiting.popleft().id)

    def _take(self, id: str) -> Iterator[TextOutput]:
        arrived = self._arrived[id]
        while arrived:
            yield arrived.popleft()

    def _step(self) -> None:
        texts, stops = self._texts.handle(self.core.step().message())
        self.core.abort(stops, "stop")
        for output in texts.outputs:
            if output.id in self._arrived:  # nobody waits for one that was left early
                self._arrived[output.id].append(output)


def config_of(**settings: Any) -> Config:
    """A configuration from settings by name, whatever their group. Raises `ConfigError` for an unknown name or a value
    that the command line would refuse."""
    known, config = list_settings(), Config()
    for name, value in settings.items():
        if name not in known:
            raise ConfigError(f"unknown setting {name!r}{suggest(name, known)} (`isthmus explain` lists them)")
        setting = known[name]
        if value is not None or setting.optional:
            group = replace(getattr(config, setting.group), **{name: check(setting, value, name)})
            config = replace(config, **{setting.group: group})
    return config


def _plain(value: Any) -> Any:
    """Arrays, tuples and numpy's integers as lists and integers."""
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, list | tuple):
        return [_plain(part) for part in value]
    return int(value) if isinstance(value, np.integer) else value


def _split(prompts: Any) -> list[tuple[str, str | list[Any]]]:
    """Name and value of each prompt; a list may hold texts and token ids."""
    prompts = _plain(prompts)
    if isinstance(prompts, list) and prompts and all(isinstance(part, str | list) for part in prompts):
        return [(f"prompt[{i}]", part) for i, part in enumerate(prompts)]
    return split_prompts(prompts)


def _read_parameters(params: dict[str, Any]) -> Parameters:
    known = spellings(Parameters)
    for name in params.keys() - known:
        hint = "; logprobs=K gives the K best too" if name == "top_logprobs" else suggest(name, known)
        raise RequestError(f"unknown parameter {name!r}{hint}", param=name)
    fields = {name: _plain(value) for name, value in params.items()}
    if isinstance(hints := fields.get("cache_hint"), dict):
        for name in hints.keys() - (words := spellings(CacheHintFields)):
            raise RequestError(f"cache_hint: unknown parameter {name!r}{suggest(str(name), words)}",
                               param=f"cache_hint.{name}")
    if isinstance(bias := fields.get("logit_bias"), dict):
        fields["logit_bias"] = {str(token): value for token, value in bias.items()}
    try:
        return Parameters.model_validate(fields)
    except ValidationError as error:
        raise validation_error(error) from None


def _completion(parts: list[TextOutput]) -> Completion:
    last = parts[-1]
    if last.finish not in ("stop", "length"):
        raise RequestError(f"the request ended with {last.finish!r}", status=503)
    scored = [p.logprobs for p in parts if p.logprobs is not None]
    prompt = [p.prompt_logprobs for p in parts if p.prompt_logprobs is not None]
    return Completion("".join(p.text for p in parts), [t for p in parts for t in unpack_ids(p.tokens).tolist()],
                      last.finish, last.stop_reason, max(p.prompt_tokens for p in parts),
                      max(p.cached_tokens for p in parts), _logprobs(scored), _logprobs(prompt))


def _logprobs(parts: list[Logprobs]) -> TokenLogprobs | None:
    if not parts:
        return None
    chosen, ids, top = (np.frombuffer(b"".join(getattr(p, name) for p in parts), dtype)
                        for name, dtype in (("chosen", "<f4"), ("top_ids", "<i4"), ("top", "<f4")))
    shape = len(chosen), parts[0].k
    return TokenLogprobs(chosen, ids.reshape(shape), top.reshape(shape))
