"""`POST /generate` in the form of SGLang's native API, and what tokenizes: token ids in and out."""
from __future__ import annotations

import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..errors import RequestError
from ..messages import Logprobs, TextOutput, unpack_ids
from .answer import GenerationAnswer, respond
from .context import Server
from .conversation import generation_prompt, parse_messages, template_kwargs
from .generation import Choice, Generation, Prompt, new_id
from .limits import MAX_TOKENIZE, parse_object
from .logprobs import native_logprobs, native_top
from .naming import as_sent, renamed
from .protocol import DetokenizeRequest, GenerateRequest, SamplingFields, TokenizeRequest, read
from .stream import JsonList, event, json_response
from .terms import Caller
from .text_service import TextService
from .validate import check_choices, check_ids, check_size, invalid, output_limit, sampling_params, split_prompts

GENERATE_TOKENS = 128    # SGLang's default for max_new_tokens
FREE_BYTES = 2**16       # events of a stream up to this size may come with every token
BYTES_PER_S = 4_000_000  # of larger ones: each repeats all the others, so that they would grow without bounds
NO_LOGPROBS = Logprobs(b"", 0, b"", b"")


async def generate(server: Server, request: Request) -> Response:
    """Continue prompts; one prompt and n = 1 gives an object, anything else a list."""
    return await respond(server, request, start)


def start(server: Server, caller: Caller, body: bytes) -> NativeAnswer:
    """Check everything and prepare the engine requests; nothing runs yet."""
    asked = read(GenerateRequest, body)
    with renamed(as_sent(asked)):
        return prepare(server, caller, asked)


def prepare(server: Server, caller: Caller, asked: GenerateRequest) -> NativeAnswer:
    """The same of a body that was read."""
    if (asked.text is None) == (asked.input_ids is None):
        raise invalid("text", "or input_ids is required, and only one of them")
    param = "text" if asked.input_ids is None else "input_ids"
    parts = split_prompts(getattr(asked, param), param)
    if isinstance(parts[0][1], str) is not (param == "text"):
        form = "text or a list of texts" if param == "text" else "token ids or a list of token id lists"
        raise invalid(param, f"must be {form}")
    fields = asked.sampling_params or SamplingFields()
    n = fields.n or 1
    check_choices(len(parts), n, server.bounds, param)
    prompts = [read_prompt(server, asked, fields, name, part) for name, part in parts]
    generation = Generation(server, asked.rid or new_id("gen"), prompts, n, server.terms(asked, caller))
    return NativeAnswer(server, asked, generation)


def read_prompt(server: Server, asked: GenerateRequest, fields: SamplingFields, param: str,
                part: str | list[Any]) -> Prompt:
    """One prompt's ids and parameters."""
    bounds = server.bounds
    if isinstance(part, str):
        check_size(server.text.least_tokens(len(part)), bounds, param)
        part = server.text.encode(part).tolist()
    check_size(len(part), bounds, param)
    ids = check_ids(part, bounds, param)
    if fields.max_tokens == 0:
        raise invalid("max_tokens", "must be at least 1")
    limit = output_limit(fields.max_tokens, GENERATE_TOKENS, len(ids), bounds, param)
    top = asked.top_logprobs_num or 0 if asked.return_logprob else None
    from_prompt = asked.logprob_start_len is not None and asked.logprob_start_len >= 0
    return Prompt(ids, sampling_params(fields, bounds, limit, top, top if from_prompt else None))


class NativeChoice:
    """One answer as it grows: what has been encoded is not encoded again."""

    def __init__(self, text: TextService, asked: GenerateRequest, prompt: Prompt):
        self.text, self.asked, self.prompt = text, asked, prompt
        self.answer = ""
        self.ids = JsonList()
        self.lists: dict[str, JsonList] = {}
        self.due = 0.0  # when the next event may come, by `time.perf_counter`

    def add(self, part: Choice) -> None:
        """What is new."""
        self.answer += "".join(part.text)
        self.ids.extend(unpack_ids(b"".join(part.tokens)).tolist())
        if self.asked.return_logprob:
            for tokens, values in part.scored or [(b"", NO_LOGPROBS)]:
                self._extend("output", native_logprobs(self.text, unpack_ids(tokens).tolist(), values),
                             native_top(self.text, values))
        if part.prompt_logprobs is not None:
            first = self.asked.logprob_start_len or 0
            rows = native_logprobs(self.text, self.prompt.ids.tolist(), part.prompt_logprobs)
            self._extend("input", rows[first:], [None, *native_top(self.text, part.prompt_logprobs)][first:])

    def _extend(self, side: str, rows: list[Any], top: list[Any]) -> None:
        self.lists.setdefault(f"{side}_token_logprobs", JsonList()).extend(rows)
        if self.asked.top_logprobs_num:
            self.lists.setdefault(f"{side}_top_logprobs", JsonList()).extend(top)


class NativeAnswer(GenerationAnswer):
    """The native response, or its events: each holds a whole answer so far, as this API's clients expect."""

    def __init__(self, server: Server, asked: GenerateRequest, generation: Generation):
        super().__init__(server, generation, asked, as_sent(asked))
        self.started = time.perf_counter()
        self.many = isinstance(asked.text, list) or generation.n > 1 or len(generation.prompts) > 1
        self.choices = [NativeChoice(server.text, asked, choice.prompt) for choice in generation.choices]

    def whole(self, choices: list[Choice]) -> Any:
        for native, choice in zip(self.choices, choices, strict=True):
            native.add(choice)
        answers = [self._one(i, choice) for i, choice in enumerate(choices)]
        return answers if self.many else answers[0]

    def chunk(self, index: int, output: TextOutput) -> bytes:
        """An event, or none while the last large one is still on its way: the next will have the same and more."""
        choice, native, part = self.generation.choices[index], self.choices[index], Choice(self.choices[index].prompt)
        choice.count(output)
        part.add(output)
        native.add(part)
        now = time.perf_counter()
        if now < native.due and output.finish is None:
            return b""
        value = self._one(index, choice)
        data = event({"index": index, **value} if self.many else value)
        native.due = now + max(0, len(data) * len(self.choices) - FREE_BYTES) / BYTES_PER_S
        return data

    def _one(self, index: int, choice: Choice) -> dict[str, Any]:
        native, id = self.choices[index], self.generation.id
        meta = {"id": f"{id}-{index}" if self.many else id, "finish_reason": self._finish(choice),
                "prompt_tokens": len(choice.prompt.ids), "completion_tokens": choice.completion,
                "cached_tokens": choice.cached, "e2e_latency": time.perf_counter() - self.started,
                **{name: values.value() for name, values in native.lists.items()}}
        return {"text": native.answer, "output_ids": native.ids.value(), "meta_info": meta}

    def _finish(self, choice: Choice) -> dict[str, Any] | None:
        if choice.finish == "length":
            return {"type": "length", "length": choice.completion}
        if choice.finish == "stop":
            return {"type": "stop", "matched": choice.stop_reason}
        return None if choice.finish is None else {"type": choice.finish}


async def tokenize(server: Server, request: Request) -> Response:
    """Ids of a text or of a conversation under the chat template."""
    return await server.read(request, lambda body: json_response(tokenized(server, read(TokenizeRequest, body))),
                             always=True, text=True)


def tokenized(server: Server, asked: TokenizeRequest) -> dict[str, Any]:
    """The answer of `/tokenize`."""
    if asked.messages is not None:
        messages, size = parse_messages(asked.messages)
        check_characters(size, "messages")
        ids = server.text.encode_chat(
            messages, **generation_prompt(asked.add_generation_prompt, asked.continue_final_message),
            **template_kwargs(asked.chat_template_kwargs, server.config.model.template_kwargs))
    elif asked.text is not None:
        check_characters(len(asked.text), "prompt")
        ids = server.text.encode(asked.text, asked.add_special_tokens is not False)
    else:
        raise invalid("prompt", "or messages is required", "missing_required_parameter")
    answer = {"tokens": ids.tolist(), "count": len(ids), "max_model_len": server.info.get("max_model_len")}
    if asked.return_token_strs:
        answer["token_strs"] = [server.text.tokenizer.id_to_token(id) for id in answer["tokens"]]
    return answer


def check_characters(size: int, param: str) -> None:
    """Refuse a text that would take seconds to tokenize."""
    if size > MAX_TOKENIZE:
        raise RequestError(f"{param} has {size} characters; at most {MAX_TOKENIZE} are tokenized at once, send it in "
                           "parts", status=413, param=param)


async def tokenizer_info(server: Server, request: Request) -> Response:
    """`GET /tokenizer_info`: its marks and the chat template, by which lm-eval tokenizes here and needs no files.

    Names of the fields: a Hugging Face tokenizer's configuration, as vLLM gives it.
    """
    tokenizer = server.text.tokenizer
    bos, eos = tokenizer.bos_id, next(iter(tokenizer.eos_ids), None)
    return json_response({
        "bos_token": None if bos is None else tokenizer.id_to_token(bos),
        "eos_token": None if eos is None else tokenizer.id_to_token(eos), "pad_token": None,
        "add_bos_token": tokenizer.add_bos, "model_max_length": server.info.get("max_model_len"),
        "chat_template": getattr(server.text.template, "source", None)})


async def detokenize(server: Server, request: Request) -> Response:
    """Text of token ids, under both names that clients look for."""
    server.require_ready()
    return await server.read(request, lambda body: json_response(detokenized(server, read(DetokenizeRequest, body))),
                             text=True)


def detokenized(server: Server, asked: DetokenizeRequest) -> dict[str, str]:
    """The answer of `/detokenize`."""
    check_size(len(asked.tokens), server.bounds, "tokens")
    ids = check_ids(asked.tokens, server.bounds, "tokens") if asked.tokens else []
    text = server.text.decode(ids, bool(asked.skip_special_tokens))
    return {"prompt": text, "text": text}


async def abort_request(server: Server, request: Request) -> Response:
    """End a request by the id of its response (or its `rid`), or all with `abort_all`.

    Who holds a key ends only requests made with that key; those of others are as if there were none.
    """
    body = await server.read(request, parse_object)
    if body.get("abort_all") is True:
        if (error := server.access.not_admin(request.scope["headers"], "abort_all")) is not None:
            raise error
        ids = [id for ids in server.running.values() for id in ids]
    elif isinstance(body.get("rid"), str):
        mine, admin = server.caller(request).tenant, server.access.is_admin(request.scope["headers"])
        ids = [id for (tenant, rid), ids in server.running.items() for id in ids
               if rid == body["rid"] and (admin or tenant == mine)]
    else:
        raise RequestError("rid (a string) or abort_all (true) is required", param="rid")
    for id in ids:
        await server.client.abort(id)
    return json_response({"aborted": len(ids)})
