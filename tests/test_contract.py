"""A platform's ops are looked at once, whole, before the first step that computes."""
from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from isthmus.conformance.tiny import tiny_model
from isthmus.core.config import CacheSettings, Config, ModelSettings
from isthmus.core.contract import check_ops
from isthmus.core.engine import EngineCore
from isthmus.core.platform import Buckets, LayerState, StateSpec
from isthmus.core.registry import RegistrationError
from isthmus.platforms.reference.ops import Ops
from isthmus.platforms.reference.platform import Platform as Reference

STATE = StateSpec((LayerState(1, 32),), "f32", 16, 2)


class Incomplete(Ops):
    """rope is missing, rms_norm has its parameters in another order, linear asks for more, sample for less."""

    rope = None

    def rms_norm(self, x, eps, weight):
        return super().rms_norm(x, weight, eps)

    def linear(self, x, weight, bias, scale):
        return super().linear(x, weight, bias)

    def sample(self, logits):
        return super().sample(logits)


class OldMoe(Ops):
    """As of before a bias was added."""

    def moe(self, x, router_logits, w13, w2, spec):
        return super().moe(x, router_logits, w13, w2, spec)


class Given(Reference):
    """The reference with other ops, without the features that are told; counts what it compiles."""

    def __init__(self, ops: type, without: tuple[str, ...] = (), buckets: Buckets | None = None):
        super().__init__({})
        self.ops, self.without, self.buckets, self.forwards = ops, without, buckets, []

    def probe(self, rank: int = 0, world: int = 1) -> Any:
        manifest = super().probe(rank, world)
        return replace(manifest, features=manifest.features - set(self.without), buckets=self.buckets)

    def compile(self, forward: Any, weights: Any, bucket: Any) -> Any:
        self.forwards.append((forward, bucket))
        ops = self.ops
        return super().compile(lambda given, w, batch: forward(ops(given.state, batch), w, batch), weights, bucket)


def look(platform: Any) -> bool:
    manifest = platform.probe()
    state = platform.alloc(STATE, 2)
    before = [cache.k.values.copy() for cache in state.layers]
    called, after = check_ops(platform, manifest, state, 16)
    kept = [cache.k.values for cache in after.layers]
    assert after is state and all(map(np.array_equal, before, kept))
    return called


def test_every_gap_of_the_ops_is_named_at_once():
    with pytest.raises(RegistrationError) as caught:
        look(Given(Incomplete))
    told = str(caught.value)
    assert told.startswith("platform 'reference': its ops (") and "test_contract.Incomplete) are incomplete: " in told
    for gap in ("rope(self, x: 'Tensor', spec: 'RopeSpec') -> 'Tensor' is missing",
                "linear() requires parameters that nobody passes: scale",
                "linear() requires what may be left out: bias",
                "rms_norm() takes its parameters in another order: x, eps, weight",
                "sample() lacks the parameters softcap"):
        assert gap in told, told


def test_whole_ops_are_let_through_with_buckets_too():
    assert look(Given(Ops))
    platform = Given(Ops, buckets=Buckets((8, 64), (4, 8), (2, 4)))
    assert look(platform)
    [(_, bucket)] = platform.forwards
    assert vars(bucket) == {"tokens": 8, "rows": 4, "pages": 2, "logits": 4}


def test_what_a_feature_brought_is_asked_of_those_that_have_it():
    assert look(Given(OldMoe, without=("expert_groups",)))
    assert look(Given(type("Dense", (Ops,), {"moe": None}), without=("moe", "expert_groups")))
    with pytest.raises(RegistrationError, match=r"moe\(\) lacks the parameters bias"):
        look(Given(OldMoe))


def test_a_platform_that_calls_no_forward_is_not_asked():
    class Silent(Given):
        def compile(self, forward: Any, weights: Any, bucket: Any) -> Any:
            return lambda state, batch: (None, state)
    assert not look(Silent(Ops))


def core(platform: Any, path: Path) -> EngineCore:
    return EngineCore(Config(ModelSettings(str(path)), CacheSettings(kv_cache_memory="1MiB")), platform=platform)


def test_the_engine_looks_before_it_computes_and_wraps_nothing():
    path = tiny_model("llama", 0)
    incomplete = Given(Incomplete)
    with pytest.raises(RegistrationError, match="are incomplete: linear"):
        core(incomplete, path)
    assert len(incomplete.forwards) == 1, "no step of the model was compiled"
    whole = Given(Ops)
    engine = core(whole, path)
    first, then = (forward for forward, _ in whole.forwards)
    assert then is engine._model.forward and first is not then
    engine.close()
