import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.core.errors import RequestError
from isthmus.core.text.stop import StopFilter

from .effort import at_most


def filtered(pieces, stops, include=False):
    """The texts passed on, the flush last, and the stop string."""
    stop, out = StopFilter(stops, include), []
    for piece in pieces:
        text, matched = stop.push(piece)
        out.append(text)
        if matched is not None:
            break
    return [*out, stop.flush()], stop.matched


def first_stop(text, stops, include):
    """What must come out, character by character."""
    for end in range(1, len(text) + 1):
        if found := [stop for stop in stops if text[:end].endswith(stop)]:
            longest = max(found, key=len)
            return text[:end] if include else text[:end - len(longest)], longest
    return text, None


def held(text, stops):
    """Length of the longest end of the text that begins a stop string."""
    return max((n for stop in stops for n in range(1, len(stop)) if text.endswith(stop[:n])), default=0)


@pytest.mark.parametrize("include", [False, True])
def test_every_cut_of_a_text(include):
    text = "one two STOP three"
    for i in range(len(text)):
        for j in range(i, len(text)):
            out, matched = filtered([text[:i], text[i:j], text[j:]], ["STOP"], include)
            assert ("".join(out), matched) == ("one two STOP" if include else "one two ", "STOP")


@settings(max_examples=500, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=5), max_size=4), st.lists(st.text("abc", max_size=5), max_size=8),
       st.booleans())
def test_any_stops_in_any_pieces(stops, pieces, include):
    out, matched = filtered(pieces, stops, include)
    assert ("".join(out), matched) == first_stop("".join(pieces), stops, include)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4), st.text("abc", max_size=20))
def test_holds_back_only_what_may_become_a_stop(stops, text):
    stop, passed = StopFilter(stops), ""
    for end in range(1, len(text) + 1):
        piece, matched = stop.push(text[end - 1])
        passed += piece
        if matched is not None:
            return
        assert len(passed) == end - held(text[:end], stops)


def test_nothing_passes_after_a_stop():
    stop = StopFilter(["x"])
    assert stop.push("axb") == ("a", "x")
    assert stop.push("more") == ("", "x") and stop.flush() == ""


def test_without_stops_all_passes_at_once():
    assert filtered(["a", "", "bc"], []) == (["a", "", "bc", ""], None)


def test_an_empty_stop_is_refused():
    with pytest.raises(RequestError, match="must not be empty"):
        StopFilter(["a", ""])


@pytest.mark.parametrize("stops", [["a" * 20_000 + "b"], ["a" * n + "b" for n in range(1, 200)],
                                   [f"a{n}" for n in range(5_000)]], ids=["long", "nested", "many"])
def test_hostile_stops_take_linear_time(stops):
    stop = StopFilter(stops)
    with at_most(3):
        for _ in range(20_000):
            stop.push("aaaa")
