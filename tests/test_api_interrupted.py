"""`Engine` after a call that ended early: whatever was left, the next call is right and nothing of it is kept."""
from __future__ import annotations

import pytest
from isthmus.core.api import Engine
from isthmus.core.errors import RequestError

from .checkpoints import tiny_llama_gguf

GREEDY = {"temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    with Engine(str(tiny_llama_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")), platform="reference") as engine:
        yield engine


@pytest.fixture
def engine(loaded):
    yield loaded
    while loaded.core.has_work:
        loaded.core.step()
    assert (len(loaded._texts), len(loaded._arrived), loaded.core.scheduler.running) == (0, 0, 0)


def test_generate_while_a_stream_is_open(engine):
    alone = "".join(engine.stream([5, 6], max_tokens=12, **GREEDY))
    stream = engine.stream([5, 6], max_tokens=12, **GREEDY)
    first = next(stream)
    assert len(engine.generate([[7], [8]], max_tokens=30, **GREEDY)) == 2
    assert first + "".join(stream) == alone


def test_an_interrupt_leaves_a_usable_engine(engine, monkeypatch):
    alone = engine.generate([5], max_tokens=4, **GREEDY).tokens
    step = engine.core.step

    def interrupted():
        monkeypatch.setattr(engine.core, "step", step)
        step()
        raise KeyboardInterrupt

    monkeypatch.setattr(engine.core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate([5, 6], max_tokens=50, **GREEDY)
    assert engine.generate([5], max_tokens=4, **GREEDY).tokens == alone


def test_a_reader_whose_output_an_interrupt_lost_does_not_wait_for_ever(engine):
    stream = engine.stream([7], max_tokens=20, **GREEDY)
    next(stream)
    while engine.core.has_work:
        engine.core.step()
    with pytest.raises(RequestError, match="ask again"):
        list(stream)


def test_one_bad_prompt_of_several_leaves_none_running(engine):
    for _ in range(2):
        with pytest.raises(RequestError, match=r"prompt\[1\] holds token id 1000000"):
            engine.generate([[5, 6], [10**6]], max_tokens=100, **GREEDY)
        assert len(engine.generate([5], max_tokens=2, **GREEDY).tokens) == 2


@pytest.mark.parametrize("prompt", [[2**40], [-1], [1.5], [True], ["a", 5], [[1.5]], {"a": 1}, [10**4000]])
def test_a_bad_prompt_is_a_short_request_error(engine, prompt):
    for call in (engine.generate, lambda *a, **k: list(engine.stream(*a, **k))):
        with pytest.raises(RequestError) as caught:
            call(prompt, max_tokens=1)
        assert len(str(caught.value)) < 500
