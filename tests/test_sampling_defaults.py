"""What a model's makers recommend is used by requests that say nothing of how to sample."""
from __future__ import annotations

import pytest
from isthmus.core import env
from isthmus.core.server.protocol import SamplingFields
from isthmus.core.server.validate import Bounds, sampling_params
from isthmus.core.weights.sources import recommended_sampling
from isthmus.core.weights.wheels import KNOWN

BOUNDS = Bounds(1000, 100, 1, {"temperature": 0.2, "top_p": 0.9, "top_k": 40})


def shaped(**fields) -> tuple[float, float, int]:
    params = sampling_params(SamplingFields(**fields), BOUNDS, 8)
    return params.temperature, params.top_p, params.top_k


def test_a_request_that_says_nothing_gets_the_recommendation():
    assert shaped() == (0.2, 0.9, 40)
    assert shaped(seed=3, max_tokens=5, presence_penalty=1.0) == (0.2, 0.9, 40)


@pytest.mark.parametrize(("fields", "expected"), [
    ({"temperature": 0.7}, (0.7, 1.0, 0)), ({"temperature": 0.0}, (0.0, 1.0, 0)), ({"top_p": 0.5}, (1.0, 0.5, 0)),
    ({"top_k": 3}, (1.0, 1.0, 3)), ({"repetition_penalty": 1.1}, (1.0, 1.0, 0))])
def test_a_request_that_says_something_is_taken_at_its_word(fields, expected):
    assert shaped(**fields) == expected


def test_where_recommendations_come_from(tmp_path):
    known = KNOWN["smollm2-135m-instruct"].path(env.cache_dir() / "models")
    assert recommended_sampling(known, {}) == {"temperature": 0.2, "top_p": 0.9}
    elsewhere = tmp_path / known.name
    assert recommended_sampling(elsewhere, {}) == {}
    generation = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "do_sample": True, "max_length": 4096}
    assert recommended_sampling(elsewhere, generation) == {"temperature": 0.6, "top_k": 20, "top_p": 0.95}
    assert recommended_sampling(elsewhere, {**generation, "do_sample": False}) == {}


@pytest.mark.parametrize("odd", [{"temperature": -1}, {"temperature": "hot"}, {"top_p": 7}, {"top_k": None}])
def test_odd_recommendations_are_left_out(tmp_path, odd):
    assert recommended_sampling(tmp_path / "m", odd) == {}
