"""`/v1/embeddings`, and Ollama's `/api/embed` and `/api/embeddings`: one vector of length 1 for each text."""
from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import numpy as np
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ..config import Config
from ..embedding import LAST, MEAN
from ..errors import ConfigError, RequestError
from ..messages import pack_ids
from .context import Server
from .protocol import Body, read
from .stream import json_response, unless_hung_up
from .validate import check_ids, check_size, invalid, split_prompts, too_long

MAX_INPUTS = 2048      # texts of a request, as OpenAI has it
STEP_TOKENS = 2048     # of texts that are computed at once; generation goes on after that
STEP_TEXTS = 64
PATIENCE = 600.0       # seconds for one such step
MAX_POOLING = 2**16    # characters of a 1_Pooling/config.json

class EmbeddingRequest(Body):
    """`POST /v1/embeddings`; the forms of `input` are checked by `core.server.validate`."""

    input: Any = None
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class OllamaEmbedBody(Body):
    """`POST /api/embed`, with `input`, and `/api/embeddings`, with `prompt`. truncate: cut texts that are too long, as
    there by default."""

    model: str | None = None
    input: Any = None
    prompt: str | None = None
    truncate: bool | None = None
    dimensions: Annotated[int, Field(ge=1, lt=2**31)] | None = None


class Texts(NamedTuple):
    """Texts to be embedded: ids, and how many numbers of each vector are wanted, None = all."""

    ids: list[np.ndarray]
    dimensions: int | None

    @property
    def tokens(self) -> int:
        return sum(map(len, self.ids))


async def embeddings(server: Server, request: Request) -> Response:
    """`POST /v1/embeddings`: a vector for each text."""
    server.require_ready()

    def start(body: bytes) -> tuple[EmbeddingRequest, Texts]:
        asked = read(EmbeddingRequest, body)
        server.require_model(asked.model, adapters=False)
        return asked, read_texts(server, asked.input, "input", asked.dimensions)

    asked, texts = await server.read(request, start, always=True)
    vectors = await unless_hung_up(request, embed(server, texts))

    def answer() -> Response:
        usage = {"prompt_tokens": texts.tokens, "total_tokens": texts.tokens}
        data = [{"object": "embedding", "index": i, "embedding": shown(vector, asked.encoding_format == "base64")}
                for i, vector in enumerate(vectors)]
        return json_response({"object": "list", "data": data, "model": server.model, "usage": usage})
    return await server.threads.run(answer, vectors.nbytes)


async def ollama_embed(server: Server, request: Request) -> Response:
    """a vector for each text; /api/embed takes lists, the older /api/embeddings a single one."""
    server.require_ready()
    old = request.scope["path"] == "/api/embeddings"

    def start(body: bytes) -> Texts:
        asked = read(OllamaEmbedBody, body)
        server.require_model((asked.model or "").removesuffix(":latest"), adapters=False)
        value, name = (asked.prompt, "prompt") if old else (asked.input, "input")
        return read_texts(server, value, name, asked.dimensions, asked.truncate is not False)

    texts = await server.read(request, start, always=True)
    vectors = await unless_hung_up(request, embed(server, texts))

    def answer() -> Response:
        if old:
            return json_response({"embedding": shown(vectors[0], False)})
        return json_response({"model": server.model, "embeddings": [shown(vector, False) for vector in vectors],
                              "prompt_eval_count": texts.tokens})
    return await server.threads.run(answer, vectors.nbytes)


ROUTES = (("POST", "/v1/embeddings", embeddings), ("POST", "/api/embed", ollama_embed),
          ("POST", "/api/embeddings", ollama_embed))


def shown(vector: np.ndarray, packed: bool) -> Any:
    """A vector as clients want it: numbers, or float32 in base64."""
    return base64.b64encode(vector.astype("<f4").tobytes()).decode() if packed else vector.tolist()


def read_texts(server: Server, value: Any, param: str, dimensions: int | None = None, cut: bool = False) -> Texts:
    """Ids of one text or several, of token ids or lists of them. cut: those that are too long. Raises the 400 that
    names the faulty one."""
    bounds, found = server.bounds, []
    if size := server.info.get("vector_size"):
        check_dimensions(dimensions, size, server.config.model.embedding_truncation)
    parts = split_prompts(value, param)
    if len(parts) > MAX_INPUTS:
        raise invalid(param, f"has {len(parts)} entries, at most {MAX_INPUTS} are allowed")
    for name, part in parts:
        if isinstance(part, str):
            if not cut:
                check_size(server.text.least_tokens(len(part)), bounds, name)
            ids = server.text.encode(part[:bounds.max_model_len * server.text.tokenizer.max_token_bytes])
            if not len(ids):
                raise invalid(name, "is empty: at least one token is needed")
        else:
            ids = check_ids(part, bounds, name)
        if len(ids) > bounds.max_model_len:
            if not cut:
                raise too_long(bounds, len(ids), None, name)
            ids = ids[:bounds.max_model_len]
        found.append(ids)
    return Texts(found, dimensions)


async def embed(server: Server, texts: Texts) -> np.ndarray:
    """float32 [texts, dimensions], each of length 1. A few texts at a time, between which others are served."""
    pooling, parts = pooling_of(server.config), []
    for group in groups([len(ids) for ids in texts.ids]):
        some = [texts.ids[i] for i in group]
        answer = await _computed(server.client, ids=base64.b64encode(b"".join(map(pack_ids, some))).decode(),
                                 lengths=",".join(str(len(ids)) for ids in some), pooling=pooling)
        vectors = np.frombuffer(base64.b64decode(answer["vectors"]), "<f4").reshape(-1, answer["size"])
        parts.append(vectors[:, :texts.dimensions])
    found = np.concatenate(parts)
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), 1e-12)


async def _computed(client: Any, **texts: str) -> dict[str, Any]:
    """The engine's answer, in as many turns as it takes; between two of them it serves others."""
    answer = await client.compute("embed", PATIENCE, **texts)
    while job := answer.get("job"):
        try:
            answer = await client.compute("embed", PATIENCE, job=job)
        except asyncio.CancelledError:  # who asked has hung up
            forget = asyncio.ensure_future(client.compute("embed", PATIENCE, job=job, pooling="none"))
            forget.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
    return answer


def check_dimensions(asked: int | None, size: int, may_cut: bool) -> None:
    """Raise 400 for a size of vectors that cannot be had."""
    if asked is None or asked == size or asked < size and may_cut:
        return
    why = "" if asked > size else (", and this server does not cut them, which only models that were trained for that "
                                   "stand (--embedding-truncation)")
    raise invalid("dimensions", f"is {asked}; this model's vectors have {size} numbers{why}", "unsupported_parameter")


def groups(lengths: Sequence[int]) -> list[list[int]]:
    """Which texts are computed together: in order, each group within the bounds, or a single long text."""
    found: list[list[int]] = []
    size = 0
    for i, length in enumerate(lengths):
        if not found or size + length > STEP_TOKENS or len(found[-1]) == STEP_TEXTS:
            found.append([])
            size = 0
        found[-1].append(i)
        size += length
    return found


def pooling_of(config: Config) -> str:
    """"last" or "mean": the setting, or what the model's folder says. Raises `RequestError` for what is neither."""
    if config.model.pooling != "auto":
        return config.model.pooling
    return _told(str(config.model.model or ""))


@lru_cache(maxsize=8)
def _told(model: str) -> str:
    file = Path(model) / "1_Pooling" / "config.json"
    try:
        with open(file, encoding="utf-8") as opened:
            told = json.loads(opened.read(MAX_POOLING))
    except OSError:
        return LAST
    except ValueError as error:
        raise ConfigError(f"{file} is not valid JSON: {error}") from None
    modes = {name for name, on in told.items() if name.startswith("pooling_mode_") and on is True}
    known = {"pooling_mode_lasttoken": LAST, "pooling_mode_mean_tokens": MEAN}
    if len(modes) != 1 or not modes <= known.keys():
        raise RequestError(f"the model's {file.name} asks for {', '.join(sorted(modes)) or 'no pooling'}, and there "
                           "are only the last token and the mean (--pooling)", status=501, code="unsupported_parameter")
    return known[modes.pop()]
