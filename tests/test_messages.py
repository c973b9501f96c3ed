"""Messages on their way: the backlog of a reader, the detokenizer's core, and the wire."""
from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from isthmus.core.errors import EngineDead, Overloaded, RequestError
from isthmus.core.messages import (
    Abort,
    Logprobs,
    Reply,
    TextOutput,
    TextOutputs,
    TokenOutput,
    TokenOutputs,
    Watch,
    pack_ids,
    refused,
    request_error,
    unpack_ids,
)
from isthmus.core.processes.backlog import MERGE_BYTES, Backlog, joined
from isthmus.core.processes.detokenizer import DetokenizerState, first_logprobs
from isthmus.core.processes.wire import decode_to_api, decode_to_detokenizer, decode_to_scheduler, encode

from .clients import request
from .fake_engine import EOS, ByteTokenizer

# ---- what waits to be read


def some(i: int, k: int = 0, **more) -> TextOutput:
    scores = Logprobs(np.float32(i).tobytes(), k, pack_ids(range(i, i + k)), np.arange(k, dtype="<f4").tobytes())
    return TextOutput("a", chr(97 + i % 26), pack_ids([i]), completion_tokens=i + 1,
                      logprobs=scores if k else None, **more)


async def read_all(backlog: Backlog) -> list[TextOutput]:
    outputs = []
    while not outputs or outputs[-1].finish is None:
        outputs.append(await backlog.get())
    return outputs


@pytest.mark.parametrize("k,pieces", [(0, 4), (20, 84)])
def test_what_waits_is_read_in_a_few_bounded_pieces(k, pieces):
    async def main():
        backlog = Backlog()
        for i in range(1000):
            backlog.put(some(i, k, prompt_tokens=9 * (i == 0), finish="length" if i == 999 else None))
        return await read_all(backlog)
    outputs = asyncio.run(main())
    assert len(outputs) == pieces and all(len(o.tokens) <= MERGE_BYTES for o in outputs)
    assert joined(outputs) == joined([some(i, k, prompt_tokens=9 * (i == 0), finish="length" if i == 999 else None)
                                      for i in range(1000)])
    assert unpack_ids(joined(outputs).tokens).tolist() == list(range(1000)) and outputs[0].prompt_tokens == 9
    assert outputs[0].completion_tokens == len(outputs[0].tokens) // 4


def test_joined_logprobs_keep_their_rows():
    whole = joined([some(3, 2), some(4, 2), some(5, 2)])
    assert np.frombuffer(whole.logprobs.chosen, "<f4").tolist() == [3, 4, 5] and whole.logprobs.k == 2
    assert unpack_ids(whole.logprobs.top_ids).reshape(3, 2).tolist() == [[3, 4], [4, 5], [5, 6]]


def test_an_error_does_not_swallow_what_came_before_it():
    async def read(last):
        backlog = Backlog()
        for item in (some(0), some(1), last):
            backlog.put(item)
        first = await backlog.get()
        assert first.text == "ab"
        await backlog.get()
    with pytest.raises(EngineDead, match="killed"):
        asyncio.run(read(EngineDead("killed")))
    with pytest.raises(RequestError, match="bad"):
        asyncio.run(read(TextOutput("a", "", b"", "error", error="bad", status=400)))


def test_a_reader_that_is_behind_lets_others_have_the_loop():
    async def main():
        backlog, turns = Backlog(), 0
        for i in range(10_000):
            backlog.put(some(i, finish="length" if i == 9_999 else None))
        reading = asyncio.ensure_future(read_all(backlog))
        while not reading.done():
            turns += 1
            await asyncio.sleep(0)
        return turns, len(reading.result())
    turns, pieces = asyncio.run(main())
    assert turns >= pieces == 40


# ---- the detokenizer's core


def run_state(watch: Watch, batches: list[TokenOutput]):
    state = DetokenizerState(ByteTokenizer())
    state.watch(watch)
    texts, stops = [], []
    for output in batches:
        made, ended = state.handle(TokenOutputs([output]))
        texts += made.outputs
        stops += ended
    return texts, stops, len(state)


def test_a_stop_string_inside_a_batch_of_tokens_counts_up_to_its_last_token():
    logprobs = Logprobs(np.arange(6, dtype="<f4").tobytes(), 2, pack_ids(range(12)),
                        np.arange(12, dtype="<f4").tobytes())
    texts, stops, left = run_state(Watch("a", ("cd",)), [TokenOutput("a", pack_ids(list(b"abcdef")), logprobs=logprobs),
                                                        TokenOutput("a", pack_ids(list(b"gh")))])
    assert [(t.text, t.finish, t.stop_reason, t.completion_tokens) for t in texts] == [("ab", "stop", "cd", 4)]
    assert unpack_ids(texts[0].tokens).tolist() == list(b"abcd")
    assert texts[0].logprobs == first_logprobs(logprobs, 4) and len(texts[0].logprobs.top) == 4 * 4 * 2
    assert stops == ["a"] and left == 0


def test_a_stop_string_met_by_the_last_token_needs_no_abort():
    texts, stops, left = run_state(Watch("a", ("b",)), [TokenOutput("a", pack_ids(list(b"ab")), "length")])
    assert (texts[0].text, texts[0].finish, texts[0].stop_reason) == ("a", "stop", "b")
    assert stops == [] and left == 0


def test_held_back_text_comes_out_at_the_end():
    texts, _, _ = run_state(Watch("a", ("bcd",)), [TokenOutput("a", pack_ids(list(b"ab"))),
                                                  TokenOutput("a", pack_ids(list(b"c")), "length")])
    assert [t.text for t in texts] == ["a", "bc"]


def test_the_stop_id_is_counted_and_not_spoken_unless_asked_for():
    ended = TokenOutput("a", pack_ids([*b"ab", ord("!")]), "stop", stop_id=ord("!"))
    (hidden,), _, _ = run_state(Watch("a"), [ended])
    assert (hidden.text, hidden.completion_tokens, hidden.stop_reason) == ("ab", 3, 33)
    (spoken,), _, _ = run_state(Watch("a", include_stop=True), [ended])
    assert spoken.text == "ab!"


def test_a_character_over_two_outputs_appears_once_complete():
    emoji = list("🦊".encode())
    texts, _, _ = run_state(Watch("a"), [TokenOutput("a", pack_ids(emoji[:2])), TokenOutput("a", pack_ids(emoji[2:])),
                                         TokenOutput("a", pack_ids(emoji[:1]), "stop")])
    assert [t.text for t in texts] == ["", "🦊", "\ufffd"], "the model itself left it unfinished"


@pytest.mark.parametrize("stop", [(), ("zz",), ("a\ufffd",)])
@pytest.mark.parametrize("reason", ["length", "abort"])
@pytest.mark.parametrize("cut", range(5))
def test_a_character_that_a_limit_cuts_is_left_out_and_its_tokens_are_not(reason, cut, stop):
    ids = [97, *"🦊".encode()[:cut]]
    texts, _, _ = run_state(Watch("a", stop=stop), [*(TokenOutput("a", pack_ids([id])) for id in ids[:-1]),
                                                    TokenOutput("a", pack_ids(ids[-1:]), reason)])
    assert "".join(t.text for t in texts) == ("a🦊" if cut == 4 else "a")
    assert b"".join(t.tokens for t in texts) == pack_ids(ids) and texts[-1].completion_tokens == len(ids)
    assert texts[-1].finish == reason and texts[-1].stop_reason is None


def test_special_tokens_are_skipped_if_asked():
    output = TokenOutput("a", pack_ids([65, EOS, 66]), "length")
    (skipped,), _, _ = run_state(Watch("a"), [output])
    assert skipped.text == "AB"


def test_outputs_of_unknown_requests_are_dropped_and_one_bad_request_harms_no_other():
    class Poison(ByteTokenizer):
        def token_bytes(self, id):
            if id == 99:
                raise KeyError(id)
            return bytes([id])

    state = DetokenizerState(Poison())
    state.watch(Watch("good"))
    state.watch(Watch("bad"))
    texts, stops = state.handle(TokenOutputs([TokenOutput(id, pack_ids([n])) for id, n in
                                              (("unknown", 65), ("bad", 99), ("good", 65))]))
    assert [(t.id, t.finish) for t in texts.outputs] == [("bad", "error"), ("good", None)]
    assert stops == ("bad",) and request_error(texts.outputs[0]).status == 500 and len(state) == 1


# ---- messages


def test_messages_survive_the_wire():
    submit = request("a", b"xyz", stop=("s",), logit_bias={5: -1.5}, seed=7, logprobs=3)[0]
    assert decode_to_scheduler(encode(submit)) == submit
    assert decode_to_scheduler(encode(Abort(("a", "b"), "stop"))) == Abort(("a", "b"), "stop")
    outputs = TokenOutputs([refused("a", RequestError("no", status=422, param="p", code="c"))])
    assert decode_to_detokenizer(encode(outputs)) == outputs
    texts = TextOutputs([TextOutput("a", "é", pack_ids([1]), stop_reason="x")])
    assert decode_to_api(encode(texts)) == texts
    assert unpack_ids(pack_ids([1, 2**31 - 1])).tolist() == [1, 2**31 - 1]


def test_plain_tokens_travel_as_columns_under_the_handle_of_the_first_output():
    state = DetokenizerState(ByteTokenizer())
    for id, stop in (("a", ()), ("b", ("yz",)), ("c", ())):
        state.watch(Watch(id, stop))
    first = TokenOutputs([TokenOutput(id, pack_ids([ord("0") + n]), prompt_tokens=3, handle=n)
                          for n, id in enumerate("abc", 7)])
    assert [t.text for t in state.handle(first)[0].outputs] == ["7", "8", "9"]
    columns = decode_to_detokenizer(encode(TokenOutputs([], pack_ids([8, 7, 8, 5]), pack_ids(list(b"xAy?")))))
    texts, stops = state.handle(columns)
    assert [(t.id, t.text, t.tokens, t.completion_tokens) for t in texts.outputs] == [
        ("b", "x", pack_ids(list(b"x")), 2), ("a", "A", pack_ids(list(b"A")), 2), ("b", "", pack_ids(list(b"y")), 3)]
    assert stops == ()
    texts, stops = state.handle(TokenOutputs([TokenOutput("c", pack_ids(list(b"!")), "length", handle=9)],
                                             pack_ids([8]), pack_ids(list(b"z"))))
    assert [(t.id, t.text, t.finish) for t in texts.outputs] == [("b", "", "stop"), ("c", "!", "length")]
    assert stops == ("b",) and len(state) == 1
    assert state.handle(TokenOutputs([], pack_ids([8, 9]), pack_ids(list(b"zz"))))[0].outputs == []


def test_when_to_ask_again_reaches_the_client():
    output = refused("a", Overloaded("full", retry_after=7.0))
    (text,), _, _ = run_state(Watch("a"), [output])
    error = request_error(text)
    assert (error.status, error.retry_after) == (429, 7.0)


@pytest.mark.parametrize("data", [b"", b"\x80", b"garbage", b"\x81\xa4type\xa5Nosuch", encode(Reply("t", True))])
def test_what_is_no_message_is_refused(data):
    with pytest.raises(msgspec.DecodeError):
        decode_to_scheduler(data)


def test_a_refusal_comes_back_as_the_error_it_was():
    for error in (RequestError("m", status=400, param="p", code="c"), Overloaded("full"), Overloaded("bye", status=503),
                  RequestError("bug", status=500, kind="server_error")):
        again = request_error(TextOutput("a", "", b"", "error", **{f: getattr(refused("a", error), f) for f in
                                                                   ("error", "status", "code", "param")}))
        assert type(again) is type(error)
        assert (again.message, again.status, again.param, again.kind) == (error.message, error.status, error.param,
                                                                          error.kind)
