"""ci/triton_aot.py: its committed table is of today's sources, and what is too much for a target fails."""
from __future__ import annotations

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import graph
import pytest
import triton_aot

COST = 5
FINE = {"registers": 40, "spills": 0, "shared": 4096, "size": 9000, "matrix": ["mma.sync"]}


def table_of(*results: dict, target: str = "sm_90") -> dict:
    kernels = {f"k{i}": dict.fromkeys(triton_aot.TARGETS, FINE) | {target: r} for i, r in enumerate(results)}
    return {"triton": "3", "modules": {"m": {"source": "x", "kernels": kernels}}}


def test_the_committed_table_is_of_these_sources_and_passes():
    table = json.loads(triton_aot.TABLE.read_text("utf-8"))
    assert not triton_aot.stale(table), "run: python ci/triton_aot.py --changed, in an environment with Triton"
    assert not triton_aot.complaints(table)
    assert triton_aot.PAGE.read_text("utf-8") == triton_aot.page(table)
    for entry in table["modules"].values():
        assert all(list(cells) == list(triton_aot.TARGETS) for cells in entry["kernels"].values())


@pytest.mark.parametrize(("change", "why"), [
    ({"spills": 8}, "spills 8 bytes"), ({"shared": 228 << 10}, "shared memory"), ({"error": "ValueError: no"}, "no"),
    ({}, None), ({"shared": 227 << 10}, None)])
def test_a_spill_too_large_a_tile_and_an_error_fail(change, why):
    found = triton_aot.complaints(table_of(FINE | change))
    assert (not found) if why is None else (len(found) == 1 and why in found[0] and "k0 on sm_90" in found[0])
    page = triton_aot.page(table_of(FINE | change))
    assert ("9 compiled" in page) == (why is None) and ("1 failed" in page) == (why is not None)


def test_each_target_has_its_own_limit():
    tile = FINE | {"shared": 100 << 10}
    over = {t for t in triton_aot.TARGETS if triton_aot.complaints(table_of(tile, target=t))}
    assert over == {"sm_120", "gfx90a", "gfx942", "gfx1100", "gfx1201"}


def test_a_target_that_is_declared_unsupported_passes_with_its_reason_told():
    table = table_of({"unsupported": "no e4m3 there"}, {"unsupported": "no e4m3 there"})
    assert not triton_aot.complaints(table)
    page = triton_aot.page(table)
    assert page.count("-(1)") == 2 and page.count("1. no e4m3 there") == 1 and "2 unsupported" in page


def test_a_changed_a_new_and_a_removed_module_are_stale(monkeypatch):
    table = table_of(FINE)
    monkeypatch.setattr(triton_aot, "modules", lambda: {"m": "x"})
    assert triton_aot.stale(table) == []
    monkeypatch.setattr(triton_aot, "modules", lambda: {"m": "y", "new": "z"})
    assert triton_aot.stale(table) == ["m", "new"]
    monkeypatch.setattr(triton_aot, "modules", lambda: {})
    assert triton_aot.stale(table) == ["m"]


def test_a_module_s_hash_covers_what_it_imports_of_the_kit(monkeypatch, tmp_path):
    before = triton_aot.modules()
    imported = graph.ROOT / triton_aot.KIT / "fp8.py"
    copy = tmp_path / triton_aot.KIT
    copy.mkdir(parents=True)
    for path in (graph.ROOT / triton_aot.KIT).glob("*.py"):
        (copy / path.name).write_bytes(path.read_bytes() + (b"# x\n" if path == imported else b""))
    monkeypatch.setattr(graph, "ROOT", tmp_path)
    after = triton_aot.modules()
    changed = {name for name in before if before[name] != after[name]}
    assert "norm" in changed and "rope" not in changed


def test_signatures_must_fit_the_kernel():
    kernel = SimpleNamespace(arg_names=["x", "n", "B"])
    fits = SimpleNamespace(name="k", kernel=kernel, signature={"n": "i32", "x": "*bf16:16"}, constants={"B": 4})
    assert triton_aot.arguments(fits) == ({"x": "*bf16", "n": "i32", "B": "constexpr"},
                                          {(0,): [["tt.divisibility", 16]]})
    for signature, constants in (({"x": "*bf16"}, {"B": 4}), ({"x": "*bf16", "n": "i32", "y": "i32"}, {"B": 4}),
                                 ({"x": "*bf16", "n": "i32", "B": "i32"}, {"B": 4})):
        with pytest.raises(ValueError, match="^k: "):
            triton_aot.arguments(SimpleNamespace(name="k", kernel=kernel, signature=signature, constants=constants))


def test_the_check_alone_needs_no_triton():
    code = "import sys; sys.modules['triton'] = None; import triton_aot; sys.exit(triton_aot.main(['--check']))"
    done = subprocess.run([sys.executable, "-c", code], cwd=graph.ROOT / "ci", capture_output=True, text=True)
    assert done.returncode == 0 and "modules pass" in done.stdout, done.stdout + done.stderr


SPILLING = """
import io, os, sys
os.environ.update(TRITON_INTERPRET="0", TRITON_DUMP_PTXAS_LOG="1", TRITON_CACHE_DIR=sys.argv[1])
import contextlib, triton, triton.language as tl, triton_aot
from isthmus.platforms.triton_kit.launch import Specialization

@triton.jit
def kernel(a, b, c, N: tl.constexpr):
    at = tl.arange(0, N)
    places = at[:, None] * N + at[None, :]
    tl.store(c + places, tl.dot(tl.load(a + places), tl.load(b + places)))

for size in (32, 128):
    spec = Specialization("k", kernel, dict.fromkeys("ab", "*fp16:16") | {"c": "*fp32:16"}, {"N": size}, warps=1)
    for target in ("sm_80", "gfx90a"):
        log = io.StringIO()
        with contextlib.redirect_stdout(log):
            result = triton_aot.measure(spec, target, log)
        print(size, target, triton_aot.complaint(result, target), result)
"""


@pytest.mark.slow
def test_a_kernel_that_spills_is_seen_to(tmp_path):
    """Triton compiles here, for devices that are not there, in a process that interprets nothing."""
    pytest.importorskip("triton")
    script = tmp_path / "spilling.py"
    script.write_text(SPILLING)
    done = subprocess.run([sys.executable, script, tmp_path], capture_output=True, text=True,
                          env=os.environ | {"PYTHONPATH": str(graph.ROOT / "ci")})
    assert done.returncode == 0, done.stderr
    lines = dict(zip(("small sm", "small gfx", "large sm", "large gfx"), done.stdout.splitlines(), strict=True))
    assert "None" in lines["small sm"] and "mma" in lines["small sm"], done.stdout
    assert "None" in lines["small gfx"] and "v_mfma" in lines["small gfx"], done.stdout
    assert "spills" in lines["large sm"] and "spills" in lines["large gfx"], done.stdout
