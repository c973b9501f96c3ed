"""A platform in a package of its own: the example in examples/vendor_platform, the guide, and the promise to packages
that were written for the interface version before. The example's library is needed by the slow test only.
"""
from __future__ import annotations

import ast
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
import venv
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from isthmus.conformance import Outcome, all_cases, run_suite
from isthmus.conformance.ledger import read_ledger
from isthmus.core import discovery, manifests, platform
from isthmus.core.discovery import check_platform
from isthmus.core.platform import INTERFACE_VERSION, SERVED, Ops, Platform, Sampling
from isthmus.core.registry import RegistrationError
from isthmus.platforms.reference import ops as reference_ops
from isthmus.platforms.reference.platform import Platform as Reference
from isthmus.platforms.reference.sampling import draw

COST = 120  # seconds, 5 of them without the slow test
ROOT = Path(__file__).resolve().parent.parent
VENDOR, GUIDE = ROOT / "examples" / "vendor_platform", ROOT / "docs" / "adding_a_platform.md"
PACKAGE = VENDOR / "isthmus_openvino"
PUBLIC = {"isthmus.core.platform", *(f"isthmus.platforms.{name}" for name in (
    "expand", "experts", "cut", "collective", "options"))}
LIBRARIES = {"numpy", "openvino", "psutil"}
MAX_LINES = 500
ENTRY = tomllib.loads((VENDOR / "pyproject.toml").read_text())["project"]["entry-points"]["isthmus.platforms"]


def sources() -> list[Path]:
    return sorted(VENDOR.rglob("*.py"))


def imported(path: Path) -> set[str]:
    nodes = list(ast.walk(ast.parse(path.read_text())))
    return ({alias.name for node in nodes if isinstance(node, ast.Import) for alias in node.names}
            | {node.module for node in nodes if isinstance(node, ast.ImportFrom) and not node.level})


def constant(path: Path, name: str) -> set[str]:
    """The strings in what is assigned to `name`."""
    found = next(node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Assign)
                 and ast.unparse(node.targets[0]) == name)
    return {node.value for node in ast.walk(found) if isinstance(node, ast.Constant)}


# ---- the example, without its library

def test_it_is_short():
    lines = {path.name: len(path.read_text().splitlines()) for path in sources()}
    print(f"{sum(lines.values())} lines: {lines}")
    assert sum(lines.values()) < MAX_LINES


def test_it_imports_only_what_is_public():
    for path in sources():
        ours = {name for name in imported(path) if name.startswith("isthmus.")}
        assert ours <= PUBLIC, path
        others = {name.partition(".")[0] for name in imported(path) - ours} - sys.stdlib_module_names
        assert others <= LIBRARIES, path


def test_nothing_outside_it_names_it():
    shipped = [path for room in ("core", "platforms", "tests/conformance") for path in (ROOT / room).rglob("*.*")
               if path.suffix in (".py", ".toml")]
    assert len(shipped) > 100 and not [path for path in shipped if "openvino" in path.read_text().lower()]


def test_its_entry_point_leads_to_a_whole_platform():
    (name, value), = ENTRY.items()
    module, _, attribute = value.partition(":")
    path = VENDOR.joinpath(*module.split(".")).with_suffix(".py")
    tree = next(node for node in ast.parse(path.read_text()).body if getattr(node, "name", "") == attribute)
    methods = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert name not in discovery.list_platforms() or discovery.list_platforms()[name].entry is not None
    assert methods >= {*discovery.REQUIRED, "export_pages", "import_pages", "memory", "describe", "close"}
    assert "interface_version = 1" in path.read_text()  # a literal of its own
    ops = next(node for node in ast.parse((PACKAGE / "ops.py").read_text()).body if getattr(node, "name", "") == "Ops")
    assert {node.name for node in ops.body if isinstance(node, ast.FunctionDef)} >= set(manifests.OPS)


def test_its_files_have_the_names_of_every_platform():
    expected = {"platform.py", "ops.py", "attention.py", "moe.py", "quant.py", "graph.py", "sampling.py",
                "manifest.toml", "ledger.toml"}
    assert {path.name for path in PACKAGE.iterdir()} >= expected
    assert (VENDOR / "README.md").is_file()


def test_its_manifest_and_ledger_are_sound():
    claim = manifests.read_file(PACKAGE / manifests.FILE)
    assert set(claim.features) == constant(PACKAGE / "platform.py", "FEATURES")
    assert claim.interface == 1 and claim.library == "openvino"
    ledger = read_ledger(PACKAGE / "ledger.toml")
    assert not ledger.xfail and not ledger.stale(all_cases())


def test_its_draws_over_a_large_vocabulary_are_the_references(monkeypatch):
    monkeypatch.syspath_prepend(str(VENDOR))
    from isthmus_openvino.sampling import choose
    rng, rows = np.random.default_rng(3), 40
    logits = np.round(rng.normal(size=(rows, 3000)) * 3, 2)  # with equals
    logits[5] = -np.inf

    def column(*values: float) -> np.ndarray:
        return np.resize(np.array(values, np.float32), rows)
    sampling = Sampling(column(1, 0.7, 1.5, 0), rng.random(rows, dtype=np.float32),
                        column(0, 0, 50, 5).astype(np.int32), column(1, 0.9, 0.95), column(0, 0, 0.05, 0, 1))
    np.testing.assert_array_equal(choose(logits, sampling), [draw(row, i, sampling) for i, row in enumerate(logits)])


# ---- the guide

def blocks() -> list[str]:
    return re.findall(r"```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)


def test_the_guide_names_all_that_is_asked_for():
    text = GUIDE.read_text()
    methods = {*discovery.REQUIRED, *manifests.OPS}
    assert len(methods) == 15
    optional = {"export_pages", "import_pages", "memory", "describe", "close"}
    assert not [name for name in methods | optional if f"`{name}(" not in text]
    assert not [outcome for outcome in Outcome if f"| {outcome} |" not in text]
    assert not [name for name in PUBLIC if name not in text]
    assert "SERVED" in text


def test_every_pattern_that_the_guide_tells_to_run_names_cases():
    patterns = re.findall(r'--only="?([^\s"`]+)', GUIDE.read_text())
    assert len(set(patterns)) >= 6
    for pattern in patterns:
        assert all_cases([pattern]), pattern


def test_the_guides_first_hour_makes_a_platform_that_holds(tmp_path, monkeypatch):
    script, = (block for block in blocks() if block.startswith('"""new_platform.py'))
    (tmp_path / "new_platform.py").write_text(script)
    subprocess.run([sys.executable, "new_platform.py", "acme"], cwd=tmp_path, check=True)
    package = tmp_path / "isthmus-acme" / "isthmus_acme"
    for path in package.glob("*.py"):
        assert not any(name.startswith("isthmus.") and name not in PUBLIC for name in imported(path)), path
    texts = "".join(path.read_text() for path in package.iterdir() if path.is_file())
    assert not re.search(r"[Rr]eference|[Oo]racle|f64|INTERFACE_VERSION|\[\[ci\]\]", texts)
    claim = manifests.read_file(package / manifests.FILE)
    assert (claim.rank, claim.formats, claim.compute_dtypes, claim.lacks) == (1, (), ("f32",), {})
    about = tomllib.loads((package.parent / "pyproject.toml").read_text())["project"]
    assert about["entry-points"]["isthmus.platforms"] == {"acme": "isthmus_acme.platform:Platform"}
    monkeypatch.syspath_prepend(str(package.parent))
    from isthmus_acme.platform import Platform as Acme
    check_platform("acme", Acme)
    report = run_suite(Acme, only=["manifest", "rope", "model[llama,whole,f32]", "state"])
    assert report.ok and report.platform == "acme" and report.counts()[Outcome.PASSED] > 10


def test_the_guides_way_to_one_case_works():
    code, = (block for block in blocks() if "check(" in block)
    exec(code.replace('"acme"', '"reference"'), {})


# ---- the promise

def without(method: str) -> type:
    """The reference, of interface version 1, without one method."""
    body = {name: value for name, value in vars(Reference).items() if name != method}
    return type("Platform", (), body | {"interface_version": 1})


def test_this_core_serves_its_own_version_and_the_one_before():
    assert list(SERVED) == [version for version in (INTERFACE_VERSION - 1, INTERFACE_VERSION) if version > 0]


@pytest.fixture
def version_2(monkeypatch):
    """A core of interface version 2, which brought a method `drain`."""
    monkeypatch.setattr(Platform, "drain", lambda self, state: None, raising=False)
    monkeypatch.setattr(discovery, "REQUIRED", discovery.REQUIRED | {"drain": 2})
    monkeypatch.setattr(discovery, "SERVED", range(1, 3))


def test_a_platform_of_the_version_before_is_served_and_need_not_have_what_came_later(version_2):
    check_platform("acme", Reference)
    assert not hasattr(Reference, "drain")


def test_a_platform_of_todays_version_must_have_it(version_2):
    with pytest.raises(RegistrationError, match=r"is incomplete: drain\(self, state\) is missing$"):
        check_platform("acme", type("Platform", (Reference,), {"interface_version": 2}))


def test_what_its_own_version_asks_for_is_missed_in_both(version_2):
    with pytest.raises(RegistrationError, match=r"is incomplete: alloc\(self, spec.*is missing$"):
        check_platform("acme", without("alloc"))


@pytest.mark.parametrize("version", [0, 3, None, "1"])
def test_other_versions_are_refused_by_name(version_2, version):
    with pytest.raises(RegistrationError, match=f"interface_version is {version!r}, this core serves 1 and 2"):
        check_platform("acme", type("Platform", (Reference,), {"interface_version": version}))


def test_an_op_or_a_feature_of_a_later_version_is_answered_with_a_reason():
    for word in ("latent_attention", "telepathy"):
        assert "no op or feature" in Reference({}).supports(word, dtype="f32", novel=1)
    assert not hasattr(Ops, "latent_attention") and "telepathy" not in platform.FEATURES


def test_a_platform_from_before_a_feature_was_added_needs_no_change(monkeypatch):
    """It takes no bias of scores, knows no groups and rotates whole heads: what needs more is refused, all else runs.
    """
    class Before(Reference):
        def probe(self, rank: int = 0, world: int = 1) -> platform.Manifest:
            return replace(super().probe(rank, world), features=frozenset(platform.FEATURES) - {*platform.LATER})

    def moe(self, x, router_logits, w13, w2, spec):
        return today(self, x, router_logits, w13, w2, spec)
    today = reference_ops.Ops.moe
    monkeypatch.setattr(reference_ops.Ops, "moe", moe)
    report = run_suite(Before, only=["moe[*f32]", "rope[*f32]", "model[mixtral,whole,f32]",
                                     "model[glm4_moe,whole,f32]"])
    left = {result.case.id for result in report.results if result.outcome is not Outcome.PASSED}
    assert report.ok and left >= {"moe[bias,sigmoid,f32]", "moe[groups,softmax,f32]", "model[glm4_moe,whole,f32]"}
    assert all(set(result.case.needs.features) & {*platform.LATER} for result in report.results
               if result.case.id in left)


# ---- with its library

def test_its_graphs_hold_where_the_library_is(monkeypatch):
    pytest.importorskip("openvino")
    monkeypatch.syspath_prepend(str(VENDOR))
    from isthmus_openvino.platform import Platform as Vendor
    report = run_suite(Vendor, {"threads": "1"}, only=["rope", "moe", "compile", "model[gemma3,*"])
    assert report.ok and report.counts()[Outcome.PASSED] > 25, report.as_markdown()


def python_with_the_example(folder: Path) -> str:
    """An interpreter that has the example and no other framework; skips with the reason where none can be had."""
    if importlib.util.find_spec("isthmus_openvino") is not None:
        return sys.executable
    venv.create(folder, with_pip=True)
    python = str(folder / ("Scripts" if sys.platform == "win32" else "bin") / "python")
    done = subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", "-e", str(ROOT),
                           "-e", str(VENDOR)], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"the example cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return python


@pytest.mark.slow
def test_it_holds_in_an_environment_of_its_own(tmp_path):
    python = python_with_the_example(tmp_path / "venv")
    for module in ("torch", "jax", "mlx"):
        assert subprocess.run([python, "-I", "-c", f"import {module}"], capture_output=True).returncode, module
    done = subprocess.run([python, "-m", "isthmus.core.cli.main", "conformance", "--platform=openvino", "--json",
                           str(tmp_path / "report.json")], cwd=tmp_path, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert {word for word, count in report["counts"].items() if count} == {"passed", "unsupported"}
    left = [case for case in report["cases"] if case["dtype"] == "f32" and case["outcome"] != "passed"]
    later = {"no adapters"}  # a word that is newer than the example, whose law says that it is lacking
    assert left and not any(case["claimed"] and case["reason"] not in later for case in left), left  # else only ranks,
    #                                                                buckets, other K and V, some page sizes are left
    passed = [case for case in report["cases"] if case["outcome"] == "passed"]
    assert {case["law"] for case in passed} == {"manifest", "ops", "model", "state", "compile", "scheduler", "drafts"}
