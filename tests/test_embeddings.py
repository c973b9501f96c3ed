"""Vectors of texts, ranking and scores: the engine against transformers, and the calls over HTTP."""
from __future__ import annotations

import asyncio
import base64
import json
import random

import numpy as np
import pytest
from isthmus.core.api import config_of
from isthmus.core.cache.pool import TRANSFER
from isthmus.core.config import CacheSettings, Config, ModelSettings, PlatformSettings, ServerSettings
from isthmus.core.embedding import MAX_JOBS, Headless, headless
from isthmus.core.engine import EngineCore
from isthmus.core.errors import Overloaded, RequestError
from isthmus.core.messages import SamplingParams, Submit, pack_ids, unpack_ids
from isthmus.core.processes.in_process import InProcessClient
from isthmus.core.recording.rerun import rerun
from isthmus.core.server import embeddings
from isthmus.core.server.app import create_app
from isthmus.core.server.embeddings import STEP_TEXTS, STEP_TOKENS, groups, pooling_of
from isthmus.core.server.text_service import open_text

from .checkpoints import tiny_llama_gguf
from .fake_client import drive
from .tiny import hf_model, tiny_model

COST = 20  # seconds

RNG = np.random.default_rng(0)
PROMPTS = [RNG.integers(5, 90, n).tolist() for n in (1, 5, 40, 100, 1, 17)]


def begin(engine: EngineCore, prompts, pooling: str = "last") -> dict:
    return engine.command("embed", ids=base64.b64encode(b"".join(map(pack_ids, prompts))).decode(),
                          lengths=",".join(str(len(p)) for p in prompts), pooling=pooling)


def embed(engine: EngineCore, prompts, pooling: str = "last", between=lambda: None) -> np.ndarray:
    answer = begin(engine, prompts, pooling)
    while "job" in answer:
        between()
        answer = engine.command("embed", job=answer["job"])
    return np.frombuffer(base64.b64decode(answer["vectors"]), np.float32).reshape(-1, answer["size"])


@pytest.fixture
def core():
    made = []

    def make(kind="llama3", platform="reference", **settings) -> EngineCore:
        settings = {"model": str(tiny_model(kind)), "platform": platform, "kv_cache_memory": "8MiB",
                    "chunked_prefill_size": 32, "dtype": "float32"} | settings
        made.append(EngineCore(config_of(**settings)))
        made[-1].cache.pool.strict = True
        return made[-1]
    yield make
    for engine in made:
        engine.close()


@pytest.mark.parametrize("kind, platform, chunk", [("llama3", "reference", 8), ("llama3", "cpu", 32),
                                                   ("gemma3", "cpu", 32), ("qwen3", "cpu", 32)])
def test_hidden_states_are_those_of_transformers(core, kind, platform, chunk):
    """Whatever the length and the cut into steps; and the head is left out, not undone."""
    torch = pytest.importorskip("torch")
    engine, reference = core(kind, platform, chunked_prefill_size=chunk), hf_model(kind)
    prompts = PROMPTS if chunk == 32 else [PROMPTS[1], PROMPTS[0], PROMPTS[5]]  # the reference is slow
    for pooling in ("last", "mean"):
        expected = []
        for prompt in prompts:
            with torch.no_grad():
                states = reference.model(torch.tensor([prompt])).last_hidden_state[0].double().numpy()
            expected.append(states[-1] if pooling == "last" else states.mean(0))
        assert np.abs(embed(engine, prompts, pooling) - np.stack(expected)).max() < 1e-4
    engine.scheduler.verify()
    assert engine.cache.pool.free == engine.cache.pool.capacity


def test_generation_goes_on_as_if_nothing_had_been(core):
    """Vectors between any two steps of requests that run: the same tokens, and nothing is left."""
    def texts(engine: EngineCore, disturb: bool) -> dict[str, list[int]]:
        draws, found = random.Random(1), {}
        for i in range(4):
            engine.submit(Submit(str(i), pack_ids(PROMPTS[2][:20 + i]), SamplingParams(max_tokens=12, temperature=1.0,
                                                                                        seed=i, ignore_eos=True)))
        while engine.has_work:
            if disturb and draws.random() < 0.7:
                embed(engine, PROMPTS[:draws.randint(1, 5)])
            for output in engine.step():
                found.setdefault(output.id, []).extend(unpack_ids(output.tokens).tolist())
        engine.scheduler.verify()
        return found

    quiet, disturbed = texts(core(), False), texts(core(), True)
    assert quiet == disturbed and all(len(tokens) == 12 for tokens in quiet.values())


@pytest.mark.parametrize("platform, pooling", [
    ("cpu", "last"), ("cpu", "mean"), pytest.param("reference", "mean", marks=pytest.mark.slow)])
def test_a_long_text_takes_no_more_than_a_step_at_a_time(core, platform, pooling):
    """While requests run, which get a step after each; the vectors are those of one go, and nothing is left."""
    pytest.importorskip("torch")
    long = [RNG.integers(5, 90, 150).tolist(), PROMPTS[0], PROMPTS[3]]
    expected = embed(core(platform=platform, chunked_prefill_size=512), long, pooling)
    engine, sizes, tokens = core(platform=platform), [], []
    run = engine.embedder._run
    engine.embedder._run = lambda batch: (sizes.append(len(batch.tokens)), run(batch))[1]
    engine.submit(Submit("x", pack_ids(PROMPTS[2][:20]), SamplingParams(max_tokens=30, temperature=0.0,
                                                                        ignore_eos=True)))

    def between() -> None:
        assert not (engine.cache.pool.owner == TRANSFER).any()
        steps.append(len(sizes))
        for output in engine.step():
            tokens.extend(unpack_ids(output.tokens).tolist())

    steps: list[int] = []
    assert np.abs(embed(engine, long, pooling, between) - expected).max() < 1e-4
    assert steps == list(range(1, len(sizes))) and max(sizes) <= 32 and len(sizes) == 8, "a command is a step"
    assert len(tokens) >= 5 and not engine.embedder._jobs
    while engine.has_work:
        engine.step()
    engine.scheduler.verify()
    engine.command("flush_cache")
    assert engine.cache.pool.free == engine.cache.pool.capacity


def test_what_is_half_done_is_forgotten_in_the_end(core, monkeypatch):
    pytest.importorskip("torch")
    engine = core(platform="cpu")
    engine.submit(Submit("x", pack_ids(PROMPTS[2]), SamplingParams(max_tokens=9, temperature=0.0, ignore_eos=True)))
    jobs = [begin(engine, [PROMPTS[3]])["job"] for _ in range(MAX_JOBS)]
    assert "vectors" in begin(engine, [PROMPTS[3]]), "no more are kept: it is computed in one go"
    assert engine.command("embed", job=jobs[0], pooling="none") == {} and len(engine.embedder._jobs) == MAX_JOBS - 1
    with pytest.raises(Overloaded, match="forgotten these inputs"):
        engine.command("embed", job=jobs[0])
    monkeypatch.setattr("isthmus.core.embedding.LEASE_S", 0.0)
    with pytest.raises(Overloaded, match="forgotten these inputs"):
        engine.command("embed", job=jobs[1])
    assert not engine.embedder._jobs


def test_who_hangs_up_in_between_leaves_nothing_behind():
    asked = []

    class Client:
        async def compute(self, name, timeout, **arguments):
            asked.append(arguments)
            if arguments.get("pooling") != "none":
                await asyncio.sleep(0 if "ids" in arguments else 60)
            return {"job": "a"}

    async def run() -> None:
        work = asyncio.ensure_future(embeddings._computed(Client(), ids="", lengths="1", pooling="last"))
        while len(asked) < 2:
            await asyncio.sleep(0)
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await asyncio.sleep(0)
    asyncio.run(run())
    assert asked[1:] == [{"job": "a"}, {"job": "a", "pooling": "none"}]


def test_too_little_memory_is_said_and_cached_pages_make_room(core):
    engine = core(kv_cache_memory="40KiB", page_size=16, max_running_requests=2)
    engine.submit(Submit("x", pack_ids(PROMPTS[2][:20]), SamplingParams(max_tokens=1, temperature=0.0)))
    while engine.has_work:
        engine.step()
    assert engine.cache.tree.evictable
    many = engine.cache.pool.capacity
    assert len(embed(engine, [[7] * 16] * many)) == many and not engine.cache.tree.evictable
    with pytest.raises(Overloaded, match=f"take {many + 1} pages"):
        embed(engine, [[7] * 16] * (many + 1))
    engine.scheduler.verify()


@pytest.mark.parametrize("prompts", [[[]], [[5], []], [[10**6]], [[5] * 10**5]])
def test_inputs_that_cannot_be(core, prompts):
    engine = core()
    with pytest.raises(RequestError, match="empty, too long or outside"):
        embed(engine, prompts)
    with pytest.raises(ValueError, match="pooling"):
        embed(engine, [[5]], "max")


def test_a_step_that_fails_gives_its_pages_back(core):
    engine = core()
    engine.embedder._model = type("M", (), {"forward": staticmethod(lambda *_: 1 / 0), "weights": {"head": None}})()
    with pytest.raises(RequestError, match="the step failed"):
        embed(engine, [[5]])
    assert engine.cache.pool.free == engine.cache.pool.capacity
    engine.scheduler.verify()


def test_what_a_platform_lacks_is_said(core, tmp_path):
    with pytest.raises(RequestError, match="null computes no hidden states"):
        embed(core(platform="null"), [[5, 6]])


def test_a_recording_holds_no_text_of_it_and_runs_again(core, tmp_path):
    engine = core(record=str(tmp_path / "steps.rec"), kv_cache_memory="80KiB", page_size=16, max_running_requests=2)
    secret = [77] * 33
    for i in range(6):
        engine.submit(Submit(str(i), pack_ids(PROMPTS[2][:20 + i]), SamplingParams(max_tokens=5, temperature=0.0)))
        embed(engine, [secret, PROMPTS[1]])
        while engine.has_work:
            engine.step()
            embed(engine, [secret[:5]])
    engine.close()
    data = (tmp_path / "steps.rec").read_bytes()
    assert b"make_room" in data
    assert pack_ids([77] * 4) not in data and base64.b64encode(pack_ids([77] * 3)) not in data
    outcome = rerun(tmp_path / "steps.rec")
    assert not outcome.broken, outcome


def test_only_the_head_is_left_out():
    class Ops:
        other = 5

        def linear(self, x, weight, *more):
            return (x, weight, *more)

    head = object()
    ops = Headless(Ops(), head)
    assert ops.linear("x", head) == "x" and ops.linear("x", "w", "b") == ("x", "w", "b") and ops.other == 5
    forward = headless(lambda ops, weights, batch: ops.sample(ops.linear(batch, weights["head"]), 30.0))
    assert forward(Ops(), {"head": head}, "rows") == "rows"


def test_groups_are_bounded_and_in_order():
    lengths = [RNG.integers(1, 3000) for _ in range(300)] + [1] * 300
    found = groups(lengths)
    assert [i for group in found for i in group] == list(range(600))
    assert all(len(group) <= STEP_TEXTS and (len(group) == 1 or sum(lengths[i] for i in group) <= STEP_TOKENS)
               for group in found)


# ---- over HTTP

def serve(tmp_path, *requests, model=None, **settings) -> list[tuple[int, dict]]:
    """Answers to (path, body) pairs of a server over the reference platform."""
    path = str(model or tiny_llama_gguf(tmp_path / "tiny.gguf"))
    config = Config(model=ModelSettings(path, served_model_name="tiny", **settings),
                    platform=PlatformSettings("reference"), cache=CacheSettings(kv_cache_memory="4MiB"),
                    server=ServerSettings(allowed_hosts=("*",)))

    async def run() -> list[tuple[int, dict]]:
        client = InProcessClient(config)
        await client.start()
        try:
            app, found = create_app(client, open_text(config), config), []
            for where, body in requests:
                sent = await drive(app, where, json.dumps(body).encode())
                found.append((sent[0]["status"], json.loads(b"".join(m.get("body", b"") for m in sent[1:]))))
            return found
        finally:
            await client.close()
    return asyncio.run(run())


def vector(entry: dict) -> np.ndarray:
    value = entry["embedding"]
    return np.frombuffer(base64.b64decode(value), "<f4") if isinstance(value, str) else np.array(value)


E = "/v1/embeddings"


def test_every_form_of_an_input(tmp_path):
    texts = ["hello", "a longer text of words", "x"]
    plain, packed, one, ids, lists, tokens = serve(
        tmp_path, (E, {"input": texts, "model": "tiny"}), (E, {"input": texts, "encoding_format": "base64"}),
        (E, {"input": "hello"}), (E, {"input": [5, 6, 7]}), (E, {"input": [[5, 6, 7], [8]]}),
        ("/tokenize", {"prompt": "hello"}))
    assert plain[0] == 200 and [entry["index"] for entry in plain[1]["data"]] == [0, 1, 2]
    assert plain[1]["object"] == "list" and plain[1]["data"][0]["object"] == "embedding"
    vectors = [vector(entry) for entry in plain[1]["data"]]
    assert all(np.linalg.norm(v) == pytest.approx(1, abs=1e-5) for v in vectors)
    assert plain[1]["model"] == "tiny" and abs(vectors[0] @ vectors[1]) < 0.999
    for other in (packed[1]["data"], one[1]["data"]):
        for entry, expected in zip(other, vectors, strict=False):
            assert np.abs(vector(entry) - expected).max() < 1e-6
    assert np.abs(vector(ids[1]["data"][0]) - vector(lists[1]["data"][0])).max() < 1e-6 and len(lists[1]["data"]) == 2
    assert one[1]["usage"] == {"prompt_tokens": tokens[1]["count"], "total_tokens": tokens[1]["count"]}


def test_dimensions_are_cut_only_where_that_is_allowed(tmp_path):
    whole, cut, same = serve(tmp_path, (E, {"input": "hi"}), (E, {"input": "hi", "dimensions": 8}),
                             (E, {"input": "hi", "dimensions": 64}))
    size = len(whole[1]["data"][0]["embedding"])
    assert cut[0] == 400 and cut[1]["error"]["param"] == "dimensions" and f"have {size} numbers" in str(cut[1])
    assert same[0] == (200 if size == 64 else 400)
    short, long = serve(tmp_path, (E, {"input": "hi", "dimensions": 8}), (E, {"input": "hi", "dimensions": size + 1}),
                        embedding_truncation=True)
    expected = vector(whole[1]["data"][0])[:8]
    assert np.abs(vector(short[1]["data"][0]) - expected / np.linalg.norm(expected)).max() < 1e-5
    assert long[0] == 400 and "--embedding-truncation" not in str(long[1])


def test_what_cannot_be_embedded_is_a_400_that_names_it(tmp_path):
    bodies = ({}, {"input": ""}, {"input": []}, {"input": ["a", ""]}, {"input": ["a", 5]}, {"input": [10**6]},
              {"input": "a" * 10**6}, {"input": ["a"] * 3000}, {"input": "a", "encoding_format": "int8"},
              {"input": "a", "dimensions": 0}, {"input": {"text": "a"}})
    params = ("input", "input", "input", "input[1]", "input", "input", "input", "input", "encoding_format",
              "dimensions", "input")
    for (status, answer), param in zip(serve(tmp_path, *((E, body) for body in bodies)), params, strict=True):
        assert status == 400 and answer["error"]["param"] == param, answer
    (status, _), = serve(tmp_path, (E, {"input": "a", "model": "other"}))
    assert status == 404


def test_ollamas_calls(tmp_path):
    many, one, old, cut, whole = serve(
        tmp_path, ("/api/embed", {"model": "tiny:latest", "input": ["hello", "x"]}),
        ("/api/embed", {"model": "tiny", "input": "hello"}), ("/api/embeddings", {"model": "tiny", "prompt": "hello"}),
        ("/api/embed", {"model": "tiny", "input": "a b " * 2000}),
        ("/api/embed", {"model": "tiny", "input": "a b " * 2000, "truncate": False}))
    assert len(many[1]["embeddings"]) == 2 and many[1]["prompt_eval_count"] > 1
    assert np.allclose(many[1]["embeddings"][0], one[1]["embeddings"][0], atol=1e-5)
    assert np.allclose(old[1]["embedding"], one[1]["embeddings"][0], atol=1e-5)
    assert cut[0] == 200 and whole[0] == 400 and isinstance(whole[1]["error"], str)


def test_pooling_is_what_the_models_folder_says(tmp_path):
    def told(**modes) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        (folder / "1_Pooling").mkdir(parents=True)
        (folder / "1_Pooling" / "config.json").write_text(json.dumps({"word_embedding_dimension": 64, **modes}))
        return pooling_of(Config(model=ModelSettings(str(folder))))
    assert told(pooling_mode_lasttoken=True) == "last" and told(pooling_mode_mean_tokens=True) == "mean"
    for modes in ({"pooling_mode_cls_token": True}, {},
                  {"pooling_mode_lasttoken": True, "pooling_mode_max_tokens": True}):
        with pytest.raises(RequestError, match="only the last token and the mean"):
            told(**modes)
    assert pooling_of(Config(model=ModelSettings(str(tmp_path / "model.gguf")))) == "last"
    assert pooling_of(Config(model=ModelSettings("x", pooling="mean"))) == "mean"
    assert embeddings.PATIENCE > 60


def test_documents_are_ranked_by_yes_beside_no(tmp_path):
    documents = ["the sky is blue", {"text": "water is wet"}, "x", "the sky is blue"]
    body = {"query": "why is the sky blue?", "documents": documents, "model": "tiny"}
    whole, two, other = serve(
        tmp_path, ("/v1/rerank", body), ("/rerank", {**body, "top_n": 2, "return_documents": False}),
        ("/v2/rerank", {**body, "instruction": "Is the document short?"}))
    assert whole[0] == 200, whole
    results = whole[1]["results"]
    scores = [result["relevance_score"] for result in results]
    assert scores == sorted(scores, reverse=True) and all(0 < score < 1 for score in scores)
    assert sorted(result["index"] for result in results) == [0, 1, 2, 3]
    assert all(result["document"]["text"] in str(documents[result["index"]]) for result in results)
    by_index = {result["index"]: result["relevance_score"] for result in results}
    assert by_index[0] == pytest.approx(by_index[3], abs=1e-6)
    assert [r["index"] for r in two[1]["results"]] == [r["index"] for r in results[:2]]
    assert "document" not in str(two[1])
    assert [r["relevance_score"] for r in other[1]["results"]] != scores and whole[1]["usage"]["total_tokens"] > 0


def test_scores_are_cosines_or_probabilities_of_labels(tmp_path):
    labels = {"query": "ab", "items": ["c", "d"], "label_token_ids": [5, 6, 7]}
    pairs, one, bare, soft, first, scored = serve(
        tmp_path, ("/score", {"text_1": "hello", "text_2": ["hello", "other words"]}),
        ("/v1/score", {"text_1": ["a", "b"], "text_2": ["a", "b"]}), ("/v1/score", labels),
        ("/v1/score", {**labels, "apply_softmax": True}), ("/score", {**labels, "item_first": True}),
        ("/v1/completions", {"prompt": "abc", "max_tokens": 1, "logprobs": 1, "temperature": 0,
                             "allowed_token_ids": [6]}))
    data = pairs[1]["data"]
    assert data[0]["score"] == pytest.approx(1, abs=1e-5) and data[1]["score"] < 0.999 and data[1]["index"] == 1
    assert [entry["score"] for entry in one[1]["data"]] == pytest.approx([1, 1], abs=1e-5)
    scores, shares = np.array(bare[1]["scores"]), np.array(soft[1]["scores"])
    assert scores.shape == (2, 3) and (scores > 0).all() and (scores.sum(1) < 1).all()
    assert np.allclose(shares, scores / scores.sum(1, keepdims=True)) and np.array(first[1]["scores"]).shape == (2, 3)
    assert not np.allclose(first[1]["scores"], scores)
    logprob = scored[1]["choices"][0]["logprobs"]["token_logprobs"][0]
    assert scores[0, 1] == pytest.approx(np.exp(logprob), rel=1e-4)


def test_what_cannot_be_ranked_or_scored(tmp_path):
    rank = {"query": "q", "documents": ["d"]}
    bodies = (("/v1/rerank", {**rank, "query": ""}, "query"), ("/v1/rerank", {**rank, "documents": []}, "documents"),
              ("/v1/rerank", {**rank, "documents": ["a", 5]}, "documents[1]"),
              ("/v1/rerank", {**rank, "documents": [{"image": "x"}]}, "documents[0]"),
              ("/v1/rerank", {**rank, "top_n": 0}, "top_n"),
              ("/v1/rerank", {**rank, "documents": ["d", "a b " * 5000]}, "documents[1]"),
              ("/score", {"text_1": "a"}, "text_1"), ("/score", {"text_1": ["a", "b"], "text_2": "c"}, "text_1"),
              ("/score", {"query": "a", "items": ["b"], "label_token_ids": [10**7]}, "label_token_ids"),
              ("/score", {"query": "a", "items": [], "label_token_ids": [5]}, "items"),
              ("/score", {"query": "a", "items": ["b"], "label_token_ids": [5] * 100}, "label_token_ids"))
    answers = serve(tmp_path, *((path, body) for path, body, _ in bodies))
    for (status, answer), (_, _, param) in zip(answers, bodies, strict=True):
        assert status == 400 and answer["error"]["param"] == param, answer
