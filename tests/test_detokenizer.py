import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.core.text.detokenizer import Detokenizer, Utf8Stream

from .vocabularies import byte_level, sentencepiece, tokenizer_of

TEXT = "ok 🦊 👨\u200d👩\u200d👧 🇫🇷 end"
BYTES, SPM = tokenizer_of(byte_level()), tokenizer_of(sentencepiece())


def streamed(pieces):
    stream = Utf8Stream()
    return [*(stream.push(piece) for piece in pieces), stream.flush()]


def test_every_cut_of_a_text():
    data = TEXT.encode()
    for i in range(1, len(data)):
        for j in range(i, len(data)):
            out = streamed([data[:i], data[i:j], data[j:]])
            assert "".join(out) == TEXT and "\ufffd" not in "".join(out)


def test_a_character_comes_with_its_last_byte():
    out = streamed([bytes([byte]) for byte in TEXT.encode()])
    assert [piece for piece in out if piece] == list(TEXT) and out[-1] == ""


@settings(max_examples=300, deadline=None)
@given(st.lists(st.binary(max_size=5) | st.sampled_from(["🦊", "é", "北", "a"]).map(str.encode), max_size=8))
def test_any_bytes_come_out_as_their_decoding(pieces):
    out = streamed(pieces)
    assert "".join(out) == b"".join(pieces).decode(errors="replace")
    for i in range(len(pieces)):
        so_far = b"".join(pieces[:i + 1]).decode(errors="replace")
        assert so_far.startswith("".join(out[:i + 1])), "nothing is shown that later bytes can change"


def test_bad_bytes_do_not_freeze_the_stream():
    assert streamed([b"\xf0\x9f", b"a", b"\xff", b"b", b"\xf0"]) == ["", "\ufffda", "\ufffd", "b", "", "\ufffd"]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(-1, BYTES.vocab_size + 3), max_size=20), st.lists(st.integers(1, 5), max_size=20),
       st.booleans())
def test_pushed_pieces_join_to_the_decoded_whole(ids, sizes, skip_special):
    for tokenizer in (BYTES, SPM):
        detokenizer, text, rest = Detokenizer(tokenizer, skip_special, at_start=True), "", list(ids)
        for size in [*sizes, len(ids)]:
            text += detokenizer.push(np.array(rest[:size], dtype=np.int32))
            rest = rest[size:]
        assert text + detokenizer.flush() == tokenizer.decode(ids, skip_special)


def test_control_tokens_show_only_when_asked_for():
    ids = [1, *BYTES.encode("hello").tolist(), 2]
    assert Detokenizer(BYTES).push(ids) == "hello"
    assert Detokenizer(BYTES, skip_special=False).push(ids) == "<|im_start|>hello<|im_end|>"
    assert Detokenizer(BYTES, shown=frozenset([ids[0]])).push(ids) == "<|im_start|>hello"
    shown = Detokenizer(BYTES, shown=frozenset([ids[-1]]))
    assert "".join(shown.push([id]) for id in ids) == "hello<|im_end|>"


@pytest.mark.parametrize(("at_start", "text"), [(True, "hello hello"), (False, " hello hello")])
def test_the_leading_space_goes_only_at_the_start_of_a_text(at_start, text):
    detokenizer = Detokenizer(SPM, at_start=at_start)
    pieces = [detokenizer.push([id]) for id in [1, *SPM.encode("hello hello").tolist()]]
    assert "".join(pieces) + detokenizer.flush() == text
