"""The base of the accelerator platforms on torch's CPU device: the laws, with steps replayed from recorded graphs; and
that the recorder refuses what a device would."""
from __future__ import annotations

import gc
import weakref
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from isthmus.conformance import Case, Context, Outcome, all_cases, run_case
from isthmus.conformance.driver import Driver
from isthmus.conformance.ledger import Ledger
from isthmus.conformance.oracle import placed, text
from isthmus.core.platform import Bias, Mask, Penalties, Sampling, Unavailable
from isthmus.platforms.accelerator.base import AcceleratorPlatform
from isthmus.platforms.accelerator.build import reason_against_build
from isthmus.platforms.accelerator.staging import Staging

from .emulation.composed.platform import Platform as ComposedPlatform
from .emulation.device import HostDevice
from .emulation.recorder import CaptureError, RecordedGraph

COST = 60  # seconds
CASES = [pytest.param(case, id=str(case), marks=[pytest.mark.slow] * (case.law == "ops"))
         for case in all_cases() if case.law != "manifest"]


@cache
def context(graphs: str) -> Context:
    def make() -> ComposedPlatform:
        return ComposedPlatform({"graphs": graphs})
    platform = make()
    return Context(platform, platform.probe(), make=make)


def hold(graphs: str, case: Case) -> None:
    result = run_case(context(graphs), case, Ledger())
    if result.outcome is Outcome.UNSUPPORTED:
        pytest.skip(result.reason)
    assert result.outcome is Outcome.PASSED, f"{result.outcome}: {result.reason}"


@pytest.mark.parametrize("case", CASES)
def test_law(case: Case) -> None:
    """Every step is captured at its first launch and replayed at later ones, where a recorder can hold it."""
    hold("first", case)


def test_decode_is_one_graph_and_a_small_prefill_has_attention_between_graphs() -> None:
    model = placed(context("first"), "llama", "f32")
    driver, tokens = Driver(model), text(40, 0, "graphs")
    driver.logits((1, tokens[:9]), (2, tokens[:7]))
    layers = len(model.loaded.state_layers)
    for count, graphs in ((5, layers + 1), (1, 1)):
        work = [(seq, tokens[9:9 + count]) for seq in (1, 2)]
        driver.logits(*work)  # captured here
        before = RecordedGraph.replayed
        driver.logits(*work)
        assert RecordedGraph.replayed - before == graphs


def test_graphs_are_captured_in_the_background_while_eager_serves() -> None:
    tokens, found = text(20, 0, "background"), {}
    for mode in ("off", "background"):
        platform = ComposedPlatform({"graphs": mode})
        driver = Driver(placed(Context(platform, platform.probe(), make=None), "llama", "f32"))
        before, rows = RecordedGraph.replayed, [driver.logits((1, tokens[:9]))[0]]
        for at in range(9, len(tokens)):
            rows.append(driver.logits((1, [tokens[at]]))[0])
            if at == 9 and mode == "background":
                assert RecordedGraph.replayed == before, "the first decode step waited for its graph"
                platform._runtime.background.submit(lambda: None).result()  # behind what is captured
        assert (RecordedGraph.replayed > before) == (mode == "background")
        found[mode] = np.stack([row.reshape(-1)[-rows[-1].size:] for row in rows])
    np.testing.assert_allclose(found["background"], found["off"], rtol=1e-5, atol=1e-6)


def test_a_graph_is_not_replayed_on_another_state() -> None:
    model = placed(context("first"), "llama", "f32")
    tokens, want = text(12, 0, "states"), None
    for _ in range(2):  # the second state has the pages of the first one's size, and other memory
        driver = Driver(model)
        driver.logits((1, tokens[:8]))
        for token in tokens[8:]:
            (got,) = driver.logits((1, [token]))
        want = got if want is None else want
        np.testing.assert_array_equal(got, want)


def test_a_rank_claims_the_device_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    monkeypatch.setattr(torch, "acme", SimpleNamespace(is_available=lambda: bool(count), device_count=lambda: count,
                                                       set_device=taken.append), raising=False)

    class Acme(AcceleratorPlatform):
        kind, unusable = "acme", "Acme: look at `acme-smi`"

        def device(self, rank: int) -> HostDevice:
            return HostDevice(torch.device("cpu"), f"Acme {rank}")
    count = 2
    assert Acme({}).claim(1, 2).name == "Acme 1" and taken == [1]
    with pytest.raises(Unavailable, match="rank 2 has no GPU: 2 are visible"):
        Acme({}).claim(2, 3)
    count = 0
    with pytest.raises(Unavailable, match="torch .* finds no usable Acme: look at `acme-smi`"):
        Acme({}).claim(0, 1)
    assert taken == [1]


def test_graphs_do_not_keep_a_state_that_is_no_more() -> None:
    platform = ComposedPlatform({"graphs": "first"})
    model = placed(Context(platform, platform.probe(), make=None), "llama", "f32")
    driver, tokens = Driver(model), text(9, 0, "given up")
    for token in tokens:
        driver.logits((1, [token]))
    cache, spec = weakref.ref(driver.state.caches[0].kv), driver.spec
    driver.state = None
    platform.alloc(spec, 8)
    gc.collect()
    assert cache() is None


@pytest.mark.parametrize("name, call", {
    "a value on the host": lambda x: x.sum().item(), "a branch": lambda x: bool((x > 0).any()),
    "a mask": lambda x: x[x > 0], "places": lambda x: x.nonzero(), "a list": lambda x: x.tolist(),
    "counts": lambda x: x.long().bincount(), "distinct": lambda x: x.unique()}.items())
def test_the_recorder_refuses_what_waits(name: str, call) -> None:
    graph = RecordedGraph()
    graph.capture_begin()
    with pytest.raises(CaptureError, match="waits|mask"):
        call(torch.ones(4))
    graph.capture_end()


def test_a_replay_computes_anew_from_the_same_memory() -> None:
    x, graph = torch.arange(4.0), RecordedGraph()
    graph.capture_begin()
    y = (x * 2).view(2, 2) + 1
    y[0] += x[:2]
    graph.capture_end()
    x += 1
    graph.replay()
    assert y.tolist() == [[4, 7], [7, 9]]


def test_a_step_that_cannot_be_captured_stays_eager() -> None:
    model = placed(context("first"), "mixtral", "f32")  # composed experts count on the host
    before = RecordedGraph.replayed
    driver = Driver(model)
    for _ in range(3):
        driver.logits((1, text(33, 0, "eager")))
    assert RecordedGraph.replayed == before


def test_sampling_waits_for_nothing() -> None:
    """Composed of torch operators, with all that a row may ask for."""
    two, some = np.arange(2, dtype=np.int32), np.array([0.5, 0.9], np.float32)
    sampling = Sampling(some, some, two + 5, some, some / 9, Penalties(two, two, two, two, some + 1, some, some),
                        Bias(two, two, some), Mask(two, np.full((2, 3), 2 ** 32 - 2, np.uint32)), two + 1)
    platform = ComposedPlatform({"graphs": "off"})
    platform.probe()
    kernels, targets = platform._runtime.kernels, np.array([-1, 3], np.int32)
    host = kernels.sampling_arrays(sampling, targets) | {"rows": two}
    fed, graph = platform._runtime.staging.feed(host), RecordedGraph()
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((2, 70)).astype(np.float32))
    graph.capture_begin()
    try:
        sampled = kernels.sample(logits, fed, torch.zeros(2, dtype=torch.int32), 2, True)
    finally:
        graph.capture_end()
    assert sampled.tokens[1] == 3 and sampled.tokens[0] > 0


def test_options_are_checked() -> None:
    with pytest.raises(Unavailable, match="graphs='sometimes': one of background, first, second, off"):
        ComposedPlatform({"graphs": "sometimes"}).probe()
    with pytest.raises(Unavailable, match="did you mean graphs"):
        ComposedPlatform({"graph": "off"}).probe()


def test_staging_keeps_what_is_still_being_copied() -> None:
    """More steps than the ring has buffers, each with its own values."""
    staging = Staging(HostDevice(torch.device("cpu")))
    fed = [staging.feed({"a": np.full(n + 1, n, np.int32), "b": np.full((2, 3), n / 2, np.float32)}) for n in range(9)]
    assert [part["a"].tolist() for part in fed] == [[n] * (n + 1) for n in range(9)]
    assert all((part["b"] == n / 2).all() for n, part in enumerate(fed))


def test_a_torch_for_the_host_alone_is_named() -> None:
    if torch.version.cuda is not None:
        pytest.skip("this torch was built for CUDA")
    assert "for host processors only, not for CUDA" in reason_against_build("cuda", "cuda", "CUDA")
