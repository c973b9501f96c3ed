"""`POST /generate`, `/tokenize` and `/detokenize`: token ids in and out. Form of `/generate`: SGLang's native API."""
from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from ..errors import RequestError
from ..messages import unpack_ids
from ..scheduler.request import cache_domain
from .context import Server
from .conversation import generation_prompt, parse_messages, template_kwargs
from .generation import Choice, Generation, Prompt, new_id
from .limits import read_object
from .logprobs import native_logprobs, native_top
from .protocol import DetokenizeRequest, GenerateRequest, SamplingFields, TokenizeRequest, refuse_unsupported
from .stream import EventStream, event, json_response, unless_hung_up
from .validate import check_choices, check_ids, check_size, invalid, output_limit, sampling_params, split_prompts

GENERATE_TOKENS = 128  # SGLang's default for max_new_tokens


async def generate(server: Server, request: Request) -> Response:
    """Continue prompts; one prompt and n = 1 gives an object, anything else a list."""
    server.require_ready()
    body = await read_object(request, server.max_body)
    refuse_unsupported(body)
    if isinstance(body.get("sampling_params"), dict):
        refuse_unsupported(body["sampling_params"])
    asked = GenerateRequest.model_validate(body)
    generation = request.state.generation = await start(server, asked)
    answer = NativeAnswer(server, asked, generation)
    if asked.stream:
        return EventStream(answer.events(), server.config.server.sse_ping)
    choices = await unless_hung_up(request, generation.collect())
    answers = [answer.one(i, choice) for i, choice in enumerate(choices)]
    return json_response(answers if answer.many else answers[0])


async def start(server: Server, asked: GenerateRequest) -> Generation:
    """Check everything and prepare the engine requests; nothing runs yet."""
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
    prompts = [await read_prompt(server, asked, fields, name, part) for name, part in parts]
    return Generation(server, asked.rid or new_id("gen"), prompts, n, cache_domain(salt=asked.cache_salt),
                      asked.priority or 0)


async def read_prompt(server: Server, asked: GenerateRequest, fields: SamplingFields, param: str,
                      part: str | list[Any]) -> Prompt:
    """One prompt's ids and parameters."""
    bounds = server.bounds
    if isinstance(part, str):
        check_size(server.text.least_tokens(len(part)), bounds, param)
        part = (await server.text.encode(part)).tolist()
    check_size(len(part), bounds, param)
    ids = check_ids(part, bounds, param)
    if fields.max_tokens == 0:
        raise invalid("sampling_params.max_new_tokens", "must be at least 1")
    limit = output_limit(fields.max_tokens, GENERATE_TOKENS, len(ids), bounds, param)
    top = asked.top_logprobs_num or 0 if asked.return_logprob else None
    from_prompt = asked.logprob_start_len is not None and asked.logprob_start_len >= 0
    return Prompt(ids, sampling_params(fields, bounds, limit, top, top if from_prompt else None))


class NativeAnswer:
    """Turns the outputs of a generation into the native response or its events."""

    def __init__(self, server: Server, asked: GenerateRequest, generation: Generation):
        self.server, self.asked, self.generation = server, asked, generation
        self.started = time.perf_counter()
        self.many = isinstance(asked.text, list) or generation.n > 1 or len(generation.prompts) > 1

    async def events(self) -> AsyncIterator[bytes]:
        """Each event holds the whole answer so far, as this API's clients expect."""
        async with aclosing(self.generation.outputs()) as outputs:
            async for index, output in outputs:
                choice = self.generation.choices[index]
                choice.add(output)
                value = self.one(index, choice)
                yield event({"index": index, **value} if self.many else value)

    def one(self, index: int, choice: Choice) -> dict[str, Any]:
        """One answer."""
        tokens = b"".join(choice.tokens)
        return {"text": "".join(choice.text), "output_ids": unpack_ids(tokens).tolist(),
                "meta_info": self._meta(index, choice)}

    def _meta(self, index: int, choice: Choice) -> dict[str, Any]:
        id = self.generation.id
        meta: dict[str, Any] = {
            "id": f"{id}-{index}" if self.many else id, "finish_reason": self._finish(choice),
            "prompt_tokens": len(choice.prompt.ids), "completion_tokens": choice.completion,
            "cached_tokens": choice.cached, "e2e_latency": time.perf_counter() - self.started}
        if self.asked.return_logprob:
            meta.update(self._logprobs(choice))
        return meta

    def _finish(self, choice: Choice) -> dict[str, Any] | None:
        if choice.finish == "length":
            return {"type": "length", "length": choice.completion}
        if choice.finish == "stop":
            reason = choice.stop_reason
            is_id = reason is not None and reason not in choice.prompt.params.stop and reason.isdecimal()
            return {"type": "stop", "matched": int(reason) if is_id else reason}
        return None if choice.finish is None else {"type": choice.finish}

    def _logprobs(self, choice: Choice) -> dict[str, Any]:
        text = self.server.text
        found = {"output_token_logprobs": [row for tokens, values in choice.scored
                                           for row in native_logprobs(text, unpack_ids(tokens).tolist(), values)]}
        if self.asked.top_logprobs_num:
            found["output_top_logprobs"] = [row for _, values in choice.scored for row in native_top(text, values)]
        if choice.prompt_logprobs is not None:
            first = self.asked.logprob_start_len or 0
            rows = native_logprobs(text, choice.prompt.ids.tolist(), choice.prompt_logprobs)
            found["input_token_logprobs"] = rows[first:]
            if self.asked.top_logprobs_num:
                found["input_top_logprobs"] = [None, *native_top(text, choice.prompt_logprobs)][first:]
        return found


async def tokenize(server: Server, request: Request) -> Response:
    """Ids of a text or of a conversation under the chat template."""
    body = await read_object(request, server.max_body)
    asked = TokenizeRequest.model_validate(body)
    if asked.messages is not None:
        messages, size = parse_messages(asked.messages)
        ids = await server.text.encode_chat(
            messages, size, **generation_prompt(asked.add_generation_prompt, asked.continue_final_message),
            **template_kwargs(asked.chat_template_kwargs))
    elif asked.text is not None:
        ids = await server.text.encode(asked.text, asked.add_special_tokens is not False)
    else:
        raise invalid("prompt", "or messages is required", "missing_required_parameter")
    answer = {"tokens": ids.tolist(), "count": len(ids), "max_model_len": server.info.get("max_model_len")}
    if asked.return_token_strs:
        answer["token_strs"] = [server.text.tokenizer.id_to_token(id) for id in answer["tokens"]]
    return json_response(answer)


async def detokenize(server: Server, request: Request) -> Response:
    """Text of token ids, under both names that clients look for."""
    server.require_ready()
    asked = DetokenizeRequest.model_validate(await read_object(request, server.max_body))
    ids = check_ids(asked.tokens, server.bounds, "tokens") if asked.tokens else []
    text = await server.text.decode(ids, bool(asked.skip_special_tokens))
    return json_response({"prompt": text, "text": text})


async def abort_request(server: Server, request: Request) -> Response:
    """End a request by the id of its response (or its `rid`), or all with `abort_all`."""
    body = await read_object(request, server.max_body)
    if body.get("abort_all") is True:
        ids = [id for group in server.running.values() for id in group]
    elif isinstance(body.get("rid"), str):
        ids = list(server.running.get(body["rid"], ()))
    else:
        raise RequestError("rid (a string) or abort_all (true) is required", param="rid")
    for id in ids:
        await server.client.abort(id)
    return json_response({"aborted": len(ids)})
