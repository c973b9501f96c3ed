"""`/v1/rerank` and `/score`: how well texts fit a query, by a language model that generates.

rerank: the model is asked whether a document answers the query, and the score is the probability of yes beside no.
score: of two texts the cosine of their vectors, or, as SGLang has it, the probabilities of given next tokens. A token's
log-probability is that of an answer of one token for which no other is allowed: those are of the model's raw logits.
"""
from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ..errors import RequestError
from ..messages import ControlSpec, SamplingParams, pack_ids
from .context import Server
from .embeddings import embed, read_texts
from .generation import Generation, Prompt, new_id
from .logprobs import read as read_floats
from .protocol import TermFields, read
from .stream import json_response, unless_hung_up
from .terms import Terms, terms
from .validate import check_ids, check_size, invalid, too_long

MAX_DOCUMENTS = 1000
MAX_LABELS = 64
AT_ONCE = 64       # answers of one token that are asked for together
INSTRUCTION = "Does the document answer the query?"
QUESTION = "{instruction} Reply with yes or no only.\n\nQuery: {query}\n\nDocument: {document}"
PLAIN = QUESTION + "\n\nReply:"  # for a model without a chat template

Text = Annotated[str, Field(min_length=1)]


class RerankRequest(TermFields):
    """`POST /v1/rerank`, as Jina's, Cohere's and vLLM's clients send it. instruction: what makes a document fit."""

    query: Text
    documents: list[Any] = Field(min_length=1, max_length=MAX_DOCUMENTS)
    model: str | None = None
    top_n: Annotated[int, Field(ge=1, lt=2**31)] | None = None
    return_documents: bool | None = None
    instruction: Text | None = None


class ScoreRequest(TermFields):
    """`POST /score`: pairs of `text_1` and `text_2`, or a `query` with `items` and the labels that may follow."""

    model: str | None = None
    text_1: Any = None
    text_2: Any = None
    query: Any = None
    items: Any = None
    label_token_ids: list[int] | None = Field(None, max_length=MAX_LABELS)
    apply_softmax: bool | None = None
    item_first: bool | None = None


async def rerank(server: Server, request: Request) -> Response:
    """Documents by how well they answer a query, best first."""
    server.require_ready()
    caller = server.caller(request)

    def start(body: bytes) -> tuple[RerankRequest, list[str], list[int], Terms]:
        asked = read(RerankRequest, body)
        server.require_model(asked.model, adapters=False)
        documents = [_document(entry, f"documents[{i}]") for i, entry in enumerate(asked.documents)]
        return asked, documents, _yes_and_no(server), terms(asked, caller, server.isolates)

    asked, documents, labels, its = await server.read(request, start, always=True)
    words = len(asked.query) + len(asked.instruction or "")  # which each document has again
    prompts = await unless_hung_up(request, server.threads.read(
        lambda: [_question(server, asked, text, f"documents[{i}]") for i, text in enumerate(documents)],
        sum(map(len, documents)) + len(documents) * words, text=True))
    scores, tokens = await unless_hung_up(request, label_logprobs(server, request, prompts, labels, its))
    yes = 1 / (1 + np.exp(np.clip(scores[:, 1] - scores[:, 0], -700, 700)))
    order = np.argsort(-yes, kind="stable")[:asked.top_n].tolist()
    results = [{"index": i, **({} if asked.return_documents is False else {"document": {"text": documents[i]}}),
                "relevance_score": float(yes[i])} for i in order]
    return json_response({"id": new_id("rerank"), "model": server.model, "results": results,
                          "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})


async def score(server: Server, request: Request) -> Response:
    """Pairs of texts, or labels after a query and items."""
    server.require_ready()
    asked = await server.read(request, lambda body: read(ScoreRequest, body), always=True)
    server.require_model(asked.model, adapters=False)
    if asked.label_token_ids is not None:
        return await _score_labels(server, request, asked)
    if asked.text_1 is None or asked.text_2 is None:
        raise invalid("text_1", "and text_2 are required, or query, items and label_token_ids",
                      "missing_required_parameter")
    first, second = (value if isinstance(value, list) else [value] for value in (asked.text_1, asked.text_2))
    if len(first) not in (1, len(second)) or not all(isinstance(text, str) for text in first + second):
        raise invalid("text_1", "must be one text, or as many as text_2, and both texts or lists of texts")
    texts = read_texts(server, first + second, "text_2")
    vectors = await unless_hung_up(request, embed(server, texts))
    values = (vectors[:len(first)] * vectors[len(first):]).sum(1).tolist()
    return json_response({
        "id": new_id("score"), "object": "list", "created": int(time.time()), "model": server.model,
        "data": [{"index": i, "object": "score", "score": value} for i, value in enumerate(values)],
        "usage": {"prompt_tokens": texts.tokens, "total_tokens": texts.tokens}})


ROUTES = (*(("POST", path, rerank) for path in ("/rerank", "/v1/rerank", "/v2/rerank")),
          *(("POST", path, score) for path in ("/score", "/v1/score")))


async def _score_labels(server: Server, request: Request, asked: ScoreRequest) -> Response:
    labels = check_ids(asked.label_token_ids, server.bounds, "label_token_ids").tolist()
    query, items = asked.query, asked.items if isinstance(asked.items, list) else [asked.items]
    if not isinstance(query, str) or not 0 < len(items) <= MAX_DOCUMENTS or not all(isinstance(i, str) for i in items):
        raise invalid("items", f"must be 1 to {MAX_DOCUMENTS} texts, and query a text")
    prompts = await unless_hung_up(request, server.threads.read(
        lambda: [_ids(server, item + query if asked.item_first else query + item, f"items[{i}]")
                 for i, item in enumerate(items)], sum(map(len, items)) + len(items) * len(query), text=True))
    its = terms(asked, server.caller(request), server.isolates)
    scores, tokens = await unless_hung_up(request, label_logprobs(server, request, prompts, labels, its))
    if asked.apply_softmax:
        scores = scores - np.logaddexp.reduce(scores, axis=1, keepdims=True)
    return json_response({"object": "scoring", "model": server.model, "scores": np.exp(scores).tolist(),
                          "usage": {"prompt_tokens": tokens, "total_tokens": tokens}})


async def label_logprobs(server: Server, request: Request, prompts: Sequence[np.ndarray], labels: Sequence[int],
                         its: Terms) -> tuple[np.ndarray, int]:
    """The log-probability of each label right after each prompt, float64 [prompts, labels], and the prompts' tokens."""
    params = [SamplingParams(max_tokens=1, temperature=0.0, logprobs=0, ignore_eos=True, skip_special=False,
                             controls=ControlSpec(allowed=pack_ids([label]))) for label in labels]
    asked = [Prompt(ids, its_params) for ids in prompts for its_params in params]
    found: list[float] = []
    for start in range(0, len(asked), AT_ONCE):
        generation = Generation(server, new_id("score"), asked[start:start + AT_ONCE], 1, its)
        request.state.generation = generation
        for choice in await generation.collect():
            if not choice.scored:
                raise RequestError("the model gave no score", status=500, kind="server_error")
            found.append(read_floats(choice.scored[0][1].chosen)[0])
    return np.array(found).reshape(len(prompts), len(labels)), sum(map(len, prompts))


def _document(entry: Any, path: str) -> str:
    text = entry.get("text") if isinstance(entry, dict) else entry
    if not isinstance(text, str) or not text:
        raise invalid(path, "must be a text that is not empty, or an object with one as text")
    return text


def _question(server: Server, asked: RerankRequest, document: str, path: str) -> np.ndarray:
    words = {"instruction": asked.instruction or INSTRUCTION, "query": asked.query, "document": document}
    if server.text.template is None:
        return _ids(server, PLAIN.format(**words), path)
    check_size(server.text.least_tokens(sum(map(len, words.values()))), server.bounds, path)
    ids = server.text.encode_chat([{"role": "user", "content": QUESTION.format(**words)}],
                                  add_generation_prompt=True, enable_thinking=False)
    return _checked(server, ids, path)


def _ids(server: Server, text: str, path: str) -> np.ndarray:
    check_size(server.text.least_tokens(len(text)), server.bounds, path)
    return _checked(server, server.text.encode(text), path)


def _checked(server: Server, ids: np.ndarray, path: str) -> np.ndarray:
    if not len(ids):
        raise invalid(path, "is empty: at least one token is needed")
    if len(ids) >= server.bounds.max_model_len:
        raise too_long(server.bounds, len(ids), 1, path)
    return ids


def _yes_and_no(server: Server) -> list[int]:
    """First tokens of the two replies."""
    space = "" if server.text.template is not None else " "
    found = [server.text.spell(space + word) for word in ("yes", "no")]
    if not all(map(len, found)) or found[0][0] == found[1][0]:
        raise RequestError("this model's tokenizer does not tell yes from no by their first tokens, so nothing can be "
                           "ranked with it", status=501, code="unsupported_parameter")
    return [int(ids[0]) for ids in found]
