"""Weights that give no numbers: told at load where all are so, and by a request's own log-probabilities."""
from __future__ import annotations

import numpy as np
import pytest
from isthmus.core.api import Engine
from isthmus.core.errors import CheckpointError, RequestError

from .checkpoints import as_gguf, tiny_llama_gguf, tiny_llama_metadata, tiny_weights, write_gguf

ODD = 7  # the token whose embedding is broken


PLATFORMS = {"reference": {"platform": "reference"}, "cpu": {"platform": "cpu"},
             "cpu by torch": {"platform": "cpu", "platform_option": ("kernels=torch",)}}


@pytest.fixture(scope="module", params=PLATFORMS)
def platform(request):
    """What `Engine` is asked for."""
    if request.param != "reference":
        pytest.importorskip("torch")
    return PLATFORMS[request.param]


def test_a_model_of_nothing_else_is_refused_at_load(tmp_path, platform):
    weights = {name: np.full_like(value, np.nan) for name, value in tiny_weights().items()}
    path = write_gguf(tmp_path / "nan.gguf", tiny_llama_metadata(), as_gguf(weights))
    with pytest.raises(CheckpointError, match="is not a number"):
        Engine(str(path), **platform)


@pytest.fixture(scope="module")
def engine(tmp_path_factory, platform):
    """A model that is broken for one token of a prompt only: its output layer is its own, and sound."""
    weights = tiny_weights()
    embedding = "model.embed_tokens.weight"
    weights["lm_head.weight"] = weights[embedding].copy()
    weights[embedding] = weights[embedding].copy()
    weights[embedding][ODD] = np.nan
    path = write_gguf(tmp_path_factory.mktemp("odd") / "odd.gguf", tiny_llama_metadata(), as_gguf(weights))
    with Engine(str(path), **platform) as engine:
        yield engine


def test_a_request_that_asks_for_log_probabilities_ends_with_the_error(engine):
    for params in ({"logprobs": 0}, {"prompt_logprobs": 1}):
        with pytest.raises(RequestError, match="is not a number") as caught:
            engine.generate([5, ODD, 6], max_tokens=3, **params)
        assert caught.value.status == 500
    assert np.isfinite(engine.generate([5, 6], max_tokens=3, logprobs=0, ignore_eos=True).logprobs.chosen).all()


def test_others_at_the_same_time_are_served(engine):
    sound, = engine.generate([[5, 6]], max_tokens=3, temperature=0, ignore_eos=True, logprobs=0)
    stream = engine.stream([5, 6], max_tokens=3, temperature=0, ignore_eos=True)
    text = next(stream)
    with pytest.raises(RequestError):
        engine.generate([5, ODD, 6], max_tokens=3, logprobs=0)
    assert text + "".join(stream) == sound.text


def test_the_file_of_these_tests_is_sound_without_the_fault(tmp_path, platform):
    with Engine(str(tiny_llama_gguf(tmp_path / "sound.gguf")), **platform) as engine:
        assert engine.generate([5, ODD, 6], max_tokens=2, logprobs=0).logprobs is not None
