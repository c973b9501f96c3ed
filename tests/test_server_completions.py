"""`/v1/completions` over planned outputs: forms of the prompt, echo and scoring, log-probabilities, the context."""
from __future__ import annotations

import json

import pytest
from openai.types import Completion

from .fake_client import CONTEXT, END, START, TEXT, VOCAB, fixtures

made, http = fixtures()


def complete(http, prompt, **body):
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, **body}
    return http.post("/v1/completions", json=body)


def answer(http, prompt, **body):
    response = complete(http, prompt, **body)
    assert response.status_code == 200, response.text
    return response.json()


def events(http, prompt, **body):
    response = complete(http, prompt, stream=True, **body)
    assert response.status_code == 200, response.text
    frames = response.text.split("\n\n")
    assert frames[-2:] == ["data: [DONE]", ""]
    return [json.loads(frame.removeprefix("data: ")) for frame in frames[:-2]]


def text_of(chunks, index=0):
    return "".join(c["text"] for e in chunks for c in e["choices"] if c["index"] == index)


def refusal(response, param):
    assert response.status_code == 400, response.text
    error = response.json()["error"]
    assert error["param"] == param, error
    return error


def prompts(made):
    return [list(memoryview(s.prompt).cast("i")) for s in made.client.submits]


def test_whole_answer(http):
    value = answer(http, "hello")
    Completion.model_validate(value, strict=True)
    assert value["choices"] == [{"index": 0, "text": TEXT[:8], "logprobs": None, "finish_reason": "length"}]
    assert value["object"] == "text_completion" and value["id"].startswith("cmpl-")
    assert value["usage"] == {"prompt_tokens": 5, "completion_tokens": 8, "total_tokens": 13,
                              "prompt_tokens_details": {"cached_tokens": 4}}


def test_stream_joins_to_the_answer_with_one_finish(http):
    chunks = events(http, "hello", stream_options={"include_usage": True})
    assert text_of(chunks) == TEXT[:8]
    assert [c["finish_reason"] for e in chunks for c in e["choices"]] == [None] * 7 + ["length"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["total_tokens"] == 13
    assert all(c["usage"] is None for c in chunks[:-1])


@pytest.mark.parametrize("prompt,ids", [
    ("ab", [[97, 98]]), (["ab", "c"], [[97, 98], [99]]), ([97, 98], [[97, 98]]), ([[97, 98], [99]], [[97, 98], [99]]),
    (["ab"], [[97, 98]]), ([[97]], [[97]]), ("a<|im_end|>", [[97, END]])])
def test_forms_of_the_prompt(made, http, prompt, ids):
    value = answer(http, prompt, max_tokens=3)
    assert prompts(made) == ids and [c["index"] for c in value["choices"]] == list(range(len(ids)))
    assert value["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert value["usage"]["completion_tokens"] == 3 * len(ids)


def test_choices_are_prompt_major(made, http):
    made.client.texts = {"a": "AAA", "b": "BBB"}
    body = {"n": 2, "max_tokens": 7, "seed": 10, "temperature": 1}
    value = answer(http, ["a", "b"], **body)
    assert [c["text"] for c in value["choices"]] == ["010 AAA", "011 AAA", "010 BBB", "011 BBB"]
    chunks = events(http, ["a", "b"], **body)
    assert [text_of(chunks, i) for i in range(4)] == [c["text"] for c in value["choices"]]


@pytest.mark.parametrize("prompt,param", [
    ([-1], "prompt"), ([2**63], "prompt"), ([2**64 - 1], "prompt"), ([1.5], "prompt"), ([True], "prompt"),
    (["1", 2], "prompt"), ([1, "2"], "prompt"), ([], "prompt"), ([[]], "prompt[0]"), ([[1], []], "prompt[1]"),
    ([[1], 2], "prompt"), ({}, "prompt"), (5, "prompt"), (None, "prompt"), ("", "prompt"), ([""], "prompt[0]"),
    ([VOCAB], "prompt"), ([1, VOCAB + 5, 2], "prompt"), ([[1], [10**9]], "prompt[1]"), ([None], "prompt")])
def test_bad_prompts_are_refused_by_name(made, http, prompt, param):
    error = refusal(complete(http, prompt), param)
    assert not made.client.submits
    if prompt == [1, VOCAB + 5, 2]:
        assert str(VOCAB + 5) in error["message"] and str(VOCAB - 1) in error["message"]


def test_an_absent_prompt_is_refused(http):
    refusal(http.post("/v1/completions", json={"model": "tiny"}), "prompt")


def test_number_of_prompts_times_n_is_bounded(made, http):
    refusal(complete(http, ["hi"] * 3000, n=100, echo=True), "n")
    refusal(complete(http, ["hi"] * 129), "prompt")
    refusal(complete(http, ["hi"] * 65, n=2), "n")
    assert not made.client.submits
    assert len(answer(http, ["hi"] * 64, n=2, max_tokens=1)["choices"]) == 128


@pytest.mark.parametrize("best_of,n,good", [(1, 1, True), (None, 2, True), (2, 2, True), (0, 1, False), (3, 2, False),
                                            (10**8, 1, False)])
def test_best_of_is_n_or_nothing(http, best_of, n, good):
    response = complete(http, "hi", best_of=best_of, n=n)
    assert response.status_code == 200 if good else refusal(response, "best_of")


def test_echo(made, http):
    made.client.text = "é!"
    assert answer(http, "hello ", echo=True)["choices"][0]["text"] == "hello é!"
    assert text_of(events(http, "hello ", echo=True)) == "hello é!"
    assert answer(http, list(b"abc"), echo=True)["choices"][0]["text"] == "abcé!"
    both = answer(http, ["a", "b"], echo=True, n=2, max_tokens=1, temperature=0)
    assert [c["text"][0] for c in both["choices"]] == ["a", "a", "b", "b"]


@pytest.mark.parametrize("limit", [0, 1])
@pytest.mark.parametrize("stream", [False, True])
def test_scoring_a_prompt(made, http, limit, stream):
    prompt = "Pâris"
    body = {"max_tokens": limit, "echo": True, "logprobs": 1}
    if stream:
        chunks = events(http, prompt, stream_options={"include_usage": True}, **body)
        parts = [c["logprobs"] for e in chunks for c in e["choices"] if c["logprobs"]]
        scores = {k: sum((p[k] for p in parts), []) for k in parts[0]}
        text, usage = text_of(chunks), chunks[-1]["usage"]
    else:
        value = answer(http, prompt, **body)
        scores, text, usage = value["choices"][0]["logprobs"], value["choices"][0]["text"], value["usage"]
        assert value["choices"][0]["finish_reason"] == "length"
    assert text == prompt + TEXT[:limit]
    assert usage["prompt_tokens"] == 6 and usage["completion_tokens"] == limit
    assert len(scores["tokens"]) == len(scores["token_logprobs"]) == len(scores["top_logprobs"]) == 6 + limit
    assert scores["token_logprobs"] == [None] + [-0.25] * (5 + limit) and scores["top_logprobs"][0] is None
    assert "".join(scores["tokens"]) == text
    assert scores["text_offset"] == [0, 1, 1, 2, 3, 4, 5][:6 + limit]
    assert made.client.submits[0].params.max_tokens == limit
    assert made.client.submits[0].params.prompt_logprobs == 1


@pytest.mark.parametrize("k", [0, 1, 5, 20])
def test_logprob_arrays_are_aligned(http, k):
    choice = answer(http, "hi", max_tokens=10, logprobs=k)["choices"][0]
    scores = choice["logprobs"]
    assert "".join(scores["tokens"]) == choice["text"] == TEXT[:10]
    assert scores["text_offset"] == list(range(10)) and scores["token_logprobs"] == [-0.25] * 10
    for token, value, top in zip(scores["tokens"], scores["token_logprobs"], scores["top_logprobs"], strict=True):
        assert max(k, 1) <= len(top) <= k + 1 and top[token] == value == max(top.values())
    chunks = events(http, "hi", max_tokens=10, logprobs=k)
    streamed = [c["logprobs"] for e in chunks for c in e["choices"]]
    assert {key: sum((s[key] for s in streamed), []) for key in scores} == scores


@pytest.mark.parametrize("k", [-1, 21, 10**6, True, "1"])
def test_logprobs_range(http, k):
    refusal(complete(http, "hi", logprobs=k), "logprobs")


def test_logprobs_of_split_characters_and_marks(made, http):
    made.client.text = "a\U0001F98Ab"
    choice = answer(http, "hi", max_tokens=20, logprobs=2)["choices"][0]
    scores = choice["logprobs"]
    assert choice["text"] == "a\U0001F98Ab" and choice["finish_reason"] == "stop"
    assert scores["tokens"] == ["a", "", "", "", "\U0001F98A", "b", "<|im_end|>"]
    assert scores["text_offset"] == [0, 1, 1, 1, 1, 2, 3]
    assert scores["top_logprobs"][1] == {"": -0.25, "bytes:\\xf1": -1.25}
    assert scores["top_logprobs"][0] == {"a": -0.25, "b": -1.25}


@pytest.mark.parametrize("stream", [False, True])
def test_a_character_cut_by_the_limit_is_in_no_text_and_its_tokens_are_there(made, http, stream):
    made.client.text = "a\U0001F98A"
    more = {"max_tokens": 3, "logprobs": 0, "return_token_ids": True}
    if stream:
        choices = [c for e in events(http, "hi", **more) for c in e["choices"]]
    else:
        choices = answer(http, "hi", **more)["choices"]
    assert "".join(c["text"] for c in choices) == "a"
    assert sum((c["logprobs"]["tokens"] for c in choices), []) == ["a", "", ""]
    assert sum((c["token_ids"] for c in choices), []) == [97, 0xF0, 0x9F]
    assert sum((c["logprobs"]["text_offset"] for c in choices), []) == [0, 1, 1]


def test_hidden_marks_take_no_room_in_the_text(made, http):
    scores = answer(http, [START, 97], echo=True, logprobs=0, max_tokens=1)["choices"][0]
    assert scores["text"] == "ao" and scores["logprobs"]["text_offset"] == [0, 0, 1]
    assert scores["logprobs"]["tokens"] == ["<|im_start|>", "a", "o"]
    shown = answer(http, [START, 97], echo=True, logprobs=0, max_tokens=1, skip_special_tokens=False)["choices"][0]
    assert shown["text"] == "<|im_start|>ao" and shown["logprobs"]["text_offset"] == [0, 12, 13]


def test_ids_that_the_tokenizer_lacks_have_no_text(http):
    choice = answer(http, [97, VOCAB - 1], echo=True, logprobs=1, max_tokens=1)["choices"][0]
    assert choice["text"] == "ao" and choice["logprobs"]["tokens"] == ["a", "", "o"]


def test_stop_cut_with_logprobs(http):
    choice = answer(http, "hi", max_tokens=30, logprobs=0, stop=["two"])["choices"][0]
    assert (choice["text"], choice["finish_reason"], choice["stop_reason"]) == ("one ", "stop", "two")
    tokens = choice["logprobs"]["tokens"]
    assert "".join(tokens).startswith("one ") and len(tokens) == len(choice["logprobs"]["text_offset"]) == 7


def test_a_stop_string_of_digits_is_not_the_end_token_of_that_number(http):
    for stop in (["zz"], [str(END)]):
        choice = answer(http, "hi", max_tokens=400, stop=stop)["choices"][0]
        assert choice["finish_reason"] == "stop" and "stop_reason" not in choice
    assert answer(http, "hi", max_tokens=400, stop=[str(END)], stop_token_ids=[END])["choices"][0]["stop_reason"] == END


def test_token_ids_of_prompt_and_output(http):
    choice = answer(http, ["ab"], max_tokens=2, return_token_ids=True)["choices"][0]
    assert choice["prompt_token_ids"] == [97, 98] and choice["token_ids"] == list(b"on")
    chunks = events(http, ["ab"], max_tokens=2, return_token_ids=True)
    assert [c.get("prompt_token_ids") for e in chunks for c in e["choices"]] == [[97, 98], None]


def test_default_is_16_tokens_or_what_is_left(made, http):
    answer(http, "hi", max_tokens=None)
    answer(http, "x" * (CONTEXT - 5), max_tokens=None)
    assert [s.params.max_tokens for s in made.client.submits] == [16, 5]


@pytest.mark.parametrize("length,limit,good", [
    (CONTEXT - 8, 8, True), (CONTEXT - 7, 8, False), (CONTEXT, 1, False), (CONTEXT, None, False), (CONTEXT, 0, True),
    (CONTEXT + 1, 0, False), (2 * CONTEXT, 4, False), (20 * CONTEXT, 4, False), (1, 10**12, False), (1, 2**63, False)])
@pytest.mark.parametrize("stream", [False, True])
def test_context(made, http, length, limit, good, stream):
    response = complete(http, "w" * length, max_tokens=limit, stream=stream, ignore_eos=True)
    if good:
        assert response.status_code == 200
        return
    error = refusal(response, "max_tokens" if length < CONTEXT and limit else "prompt")
    assert error["code"] == "context_length_exceeded"
    counted = length if length <= CONTEXT * 12 else -(-length // 12)
    assert str(CONTEXT) in error["message"] and str(counted) in error["message"]
    assert not made.client.submits


def test_bos_is_not_doubled(made, http):
    tokenizer = made.app.state.server.text.tokenizer
    tokenizer.bos_id, plain = START, tokenizer.encode
    tokenizer.encode = lambda text, add=False, parse=False: [START] * add + plain(text, add, parse)
    for prompt, body in (("a", {}), ("<|im_start|>a", {}), ("a", {"add_special_tokens": False})):
        answer(http, prompt, **body)
    assert prompts(made) == [[START, 97], [START, 97], [97]]


def test_long_texts_are_tokenized_off_the_loop(made, http):
    import threading
    tokenizer, threads = made.app.state.server.text.tokenizer, []
    plain = tokenizer.encode
    tokenizer.encode = lambda *args: threads.append(threading.current_thread().name) or plain(*args)
    answer(http, "short")
    complete(http, "long " * 1000)
    assert not threads[0].startswith("server") and threads[1].startswith("server")
