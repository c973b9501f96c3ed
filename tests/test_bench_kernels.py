"""`isthmus bench kernels`: every op of the neck through a platform, and what stands beside it."""
from __future__ import annotations

from functools import partial

import pytest
from isthmus.core.bench import ceilings, kernels, steps
from isthmus.core.bench.ceilings import Ceilings
from isthmus.core.bench.result import read_result
from isthmus.core.cli.main import main
from isthmus.core.discovery import load_platform, probe

COST = 8  # seconds
TINY = kernels.Shape(32, 2, 1, 16, 64, 50, 4, 2)
OPS = {"embed", "linear", "rms_norm", "rope", "attention", "act_mul", "moe", "sample"}


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for module, name, value in (
            (steps, "SPAN_S", 0.001), (steps, "FEWEST", 2), (steps, "DRAWN", 1 << 10), (kernels, "COUNTS", (2,)),
            (kernels, "PEER_S", 1e-4), (ceilings, "LEAST_BYTES", 1 << 14), (ceilings, "MANY", 8),
            (ceilings, "host_read", lambda nbytes: 1e9)):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setitem(kernels.SHAPES, "135m", TINY)
    monkeypatch.setattr(ceilings, "measure", partial(ceilings.measure, width=32))


def place(name: str, dtype: str) -> steps.Place:
    platform = load_platform(name)
    return steps.Place(platform, probe(name, platform), dtype)


def test_every_op_is_timed_through_the_neck():
    here, roof = place("reference", "f64"), Ceilings(1e9, 1e9, {})
    found = {}
    for case in kernels.cases(here, TINY, [1, 5], 20):
        run = kernels.measure(here, case, None, roof)
        assert run.figures["us"] > 0 and run.figures["roof_share"] > 0 and "peer_ratio" not in run.figures
        found[run.label] = run.detail["op"]
    assert set(found.values()) == OPS
    assert "linear qkv 64 x 32 q8_0, 1 token" in found and "attention, prefill, 5 tokens" in found


def test_what_an_op_must_read_and_do():
    cases = {case.label: case for case in kernels.cases(place("reference", "f64"), TINY, [3], 20)}
    qkv = cases["linear qkv 64 x 32 f64"]
    assert (qkv.nbytes, qkv.operations) == (8 * 64 * 32 + 8 * 3 * (64 + 32), 2 * 3 * 64 * 32)
    assert cases["linear qkv 64 x 32 q8_0"].nbytes == 34 * 64 + 8 * 3 * (64 + 32)
    decode, prefill = cases["attention, decode behind 20"], cases["attention, prefill"]
    assert (decode.nbytes, decode.operations) == (2 * 8 * 3 * 20 * 16, 4 * 3 * 20 * 32)
    assert (prefill.nbytes, prefill.operations) == (2 * 8 * 3 * 16, 4 * 3 * 2 * 32)


def test_torch_has_its_own_of_each_but_one():
    torch = pytest.importorskip("torch", reason="it is the library of this peer")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several would wait for each other on a busy machine
    try:
        beside_torch(kernels.find_peer("cpu"), place("reference", "f64"))
    finally:
        torch.set_num_threads(threads)


def beside_torch(peer, here):
    for case in kernels.cases(here, TINY, [5], 20):
        call = peer(case.op, "f32", **case.facts)
        if case.op == "moe":
            assert call is None
            continue
        assert kernels.time_peer(call) > 0
        run = kernels.measure(here, case, peer, Ceilings(1e9, 1e9, {}))
        assert run.figures["peer_ratio"] == pytest.approx(run.detail["peer_us"] / run.figures["us"])


def test_mlx_has_its_own():
    pytest.importorskip("mlx.core", reason="it is the library of this peer")
    peer = kernels.find_peer("mlx")
    for case in kernels.cases(place("reference", "f64"), TINY, [1, 5], 20):
        call = peer(case.op, "f32", **case.facts)
        assert (call is None) == (case.op == "moe") and (call is None or kernels.time_peer(call) > 0)


def test_a_platform_without_peers_is_timed_alone(capsys, tmp_path):
    assert kernels.find_peer("reference") is None
    path = tmp_path / "kernels.json"
    assert main(["bench", "kernels", "--platform", "reference", "--tokens", "3", "--behind", "9", "-o", str(path)]) == 0
    out, result = capsys.readouterr().out, read_result(path)
    assert {run.detail["op"] for run in result.runs} == OPS and "names no operators of its framework" in out
    assert result.subject["platform"] == "reference" and result.configuration["shape"]["hidden"] == 32


def test_one_op_that_fails_is_told_and_the_others_are_timed(capsys, monkeypatch):
    real = kernels.time_case

    def time_case(place, case):
        if case.op == "rope":
            raise RuntimeError("no such kernel")
        return real(place, case)
    monkeypatch.setattr(kernels, "time_case", time_case)
    assert main(["bench", "kernels", "--platform", "reference", "--tokens", "1", "--only", "r*"]) == 1
    out = capsys.readouterr().out
    assert "rope 2 x 16: failed: RuntimeError: no such kernel" in out and "rms_norm 32, 1 token" in out


@pytest.mark.parametrize("words, part", [
    (("--tokens", "0"), "--tokens 0"), (("--behind", "0"), "--behind 0"), (("--only", "nothing"), "no such op"),
    (("--dtype-of-ops", "f16"), "computes in f64"), (("--plot", "x.gif"), ".png or .html")])
def test_mistakes_are_told(words, part, capsys):
    assert main(["bench", "kernels", "--platform", "reference", *words]) == 2
    assert part in capsys.readouterr().err
