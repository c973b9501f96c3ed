"""The laws of the house: layering, sizes, packaging. A change of a number here is a change of the design."""
from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FRAMEWORKS = ("torch", "jax", "jaxlib", "mlx", "triton", "tensorflow", "flashinfer", "torch_npu", "transformers")
DEVICES = {"cpu", "cuda", "rocm", "hip", "xpu", "npu", "tpu", "mlx", "mps", "gpu", "metal", "nvidia", "amd", "intel",
           "ascend"}
COST = 15  # seconds
MAX_FILE, MAX_FUNCTION, MAX_CORE = 500, 60, 44_000
KIT = ROOT / "tests" / "conformance"
SOURCES = sorted(p for room in ("core", "platforms") for p in (ROOT / room).rglob("*.py"))
CORE = [p for p in SOURCES if p.is_relative_to(ROOT / "core")]


def tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def imported(node: ast.AST) -> list[str]:
    """Absolute module names that an import statement, or a call of an import function with a literal, brings in."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom) and not node.level:
        return [node.module or ""]
    if isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        called = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        if called in ("import_module", "__import__", "find_spec"):
            return [str(node.args[0].value)]
    return []


def test_core_imports_no_framework_in_its_syntax():
    found = [f"{name(p)}:{node.lineno} imports {module}" for p in CORE for node in ast.walk(tree(p))
             for module in imported(node) if module.split(".")[0] in FRAMEWORKS]
    assert not found, found


def test_core_imports_no_framework_when_run():
    """Every module of core, imported in a fresh process, leaves no framework in sys.modules."""
    modules = ["isthmus." + ".".join(p.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__") for p in CORE
               if p.name != "__main__.py"]
    code = (f"import importlib, sys\nfor m in {modules!r}: importlib.import_module(m)\n"
            f"print([m for m in {FRAMEWORKS!r} if m in sys.modules])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT / "tests")
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]", done.stdout


def test_the_conformance_kit_needs_no_framework_and_no_test_runner():
    banned = {*FRAMEWORKS, "pytest", "hypothesis", "gguf", "isthmus", "core", "platforms", "tests"}
    found = [f"{name(p)}:{node.lineno} imports {module}" for p in KIT.glob("*.py") for node in ast.walk(tree(p))
             for module in imported(node) if module.split(".")[0] in banned]
    assert not found, found


def test_platforms_import_only_the_neck_of_core():
    found = []
    for path in (p for p in SOURCES if p.is_relative_to(ROOT / "platforms")):
        for node in ast.walk(tree(path)):
            if isinstance(node, ast.ImportFrom) and node.level and (node.module or "").startswith("core"):
                if node.module != "core.platform":
                    found.append(f"{name(path)}:{node.lineno} imports {node.module}")
            found += [f"{name(path)}:{node.lineno} imports {m}" for m in imported(node) if m.startswith("isthmus")]
    assert not found, found


def test_one_platform_does_not_import_another():
    """But rocm is a subclass of cuda: torch calls AMD's GPUs by the same names."""
    found = []
    for path in (p for p in SOURCES if len(p.relative_to(ROOT).parts) > 2 and p.is_relative_to(ROOT / "platforms")):
        own = path.relative_to(ROOT).parts[1]
        others = {p.parent.name for p in (ROOT / "platforms").glob("*/platform.py")} - {own}
        found += [f"{name(path)}:{node.lineno} imports {node.module}" for node in ast.walk(tree(path))
                  if isinstance(node, ast.ImportFrom) and node.level == 2
                  and (node.module or "").split(".")[0] in others - ({"cuda"} if own == "rocm" else set())]
    assert not found, found


def test_core_compares_no_device_name():
    """No ==, !=, in, match or dictionary of core is about a device's name."""
    found = []
    for path in CORE:
        for node in ast.walk(tree(path)):
            operands = []
            if isinstance(node, ast.Compare):
                operands = [node.left, *node.comparators]
            elif isinstance(node, ast.MatchValue):
                operands = [node.value]
            elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                operands = node.args if node.func.attr in ("startswith", "endswith") else []
            words = {c.value.lower() for o in operands for c in ast.walk(o)
                     if isinstance(c, ast.Constant) and isinstance(c.value, str)}
            if words & DEVICES:
                found.append(f"{name(path)}:{node.lineno} compares {sorted(words & DEVICES)}")
    assert not found, found


def test_core_neither_pickles_nor_evaluates():
    banned = {"pickle", "marshal", "dill", "cloudpickle", "shelve"}
    found = []
    for path in CORE:
        for node in ast.walk(tree(path)):
            found += [f"{name(path)}:{node.lineno} imports {m}" for m in imported(node) if m.split(".")[0] in banned]
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("eval", "exec"):
                found.append(f"{name(path)}:{node.lineno} calls {node.func.id}")
    assert not found, found


def test_relative_imports_inside_the_package():
    found = [f"{name(p)}:{node.lineno} imports {m}" for p in SOURCES for node in ast.walk(tree(p))
             for m in imported(node) if m.split(".")[0] in ("isthmus", "core", "platforms")]
    assert not found, found


def test_no_circular_imports():
    """The graph of module-level relative imports inside the package has no cycle (type-checking imports excepted)."""
    graph: dict[str, set[str]] = {}
    for path in SOURCES:
        package = list(path.relative_to(ROOT).with_suffix("").parts)
        module = ".".join(package).removesuffix(".__init__")
        graph[module] = set()
        for node in tree(path).body:
            if not isinstance(node, ast.ImportFrom) or not node.level:
                continue
            base = package[:len(package) - node.level] if node.level else package
            target = ".".join(base + ((node.module or "").split(".") if node.module else []))
            graph[module] |= {f"{target}.{alias.name}" for alias in node.names} | ({target} if node.module else set())
    modules = set(graph)
    graph = {m: {t for t in targets if t in modules and t != m} for m, targets in graph.items()}
    while leaves := {m for m, targets in graph.items() if not targets}:
        graph = {m: targets - leaves for m, targets in graph.items() if m not in leaves}
    assert not graph, f"these modules import each other in a circle, or one that does: {sorted(graph)}"


@pytest.mark.parametrize("path", [*SOURCES, *sorted(KIT.glob("*.py"))], ids=name)
def test_sizes(path):
    lines = path.read_text().count("\n") + 1
    assert lines <= MAX_FILE, f"{lines} lines, at most {MAX_FILE}"
    functions = [node for node in ast.walk(tree(path)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    kernels = {node.name for node in functions if any("jit" in ast.unparse(each) for each in node.decorator_list)}
    sizes = {node.name: node.end_lineno - node.lineno + 1 for node in functions if node.name not in kernels}
    long = {function: size for function, size in sizes.items() if size > MAX_FUNCTION}
    assert not long, f"at most {MAX_FUNCTION}: {long}"


def test_core_stays_small():
    total = sum(p.read_text().count("\n") for p in CORE)
    assert total <= MAX_CORE, f"core has {total} lines, at most {MAX_CORE}"


def test_no_grab_bag_modules():
    assert not [name(p) for p in SOURCES if p.stem in ("utils", "util", "helpers", "common", "misc")]


def test_every_package_is_listed():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {"isthmus." + ".".join(p.parent.relative_to(ROOT).parts) for p in SOURCES} | {
        "isthmus", "isthmus.conformance"}
    assert listed == folders, f"not listed: {folders - listed}; listed without a module: {listed - folders}"


def test_no_test_asserts_that_something_took_little_time_on_the_clock():
    """On a busy machine all takes long. tests/effort.py bounds the work instead; it alone may wait no longer."""
    found = []
    for path in sorted((ROOT / "tests").glob("*.py")):
        if path.name in ("effort.py", "clients.py"):
            continue
        clocks = {name for node in ast.walk(tree(path)) if isinstance(node, ast.Assign) for target in node.targets
                  if _reads_clock(node.value) for name in _names(target)}
        found += [f"{name(path)}:{node.lineno} {ast.unparse(node)}" for stated in ast.walk(tree(path))
                  if isinstance(stated, ast.Assert) for node in ast.walk(stated.test) if isinstance(node, ast.Compare)
                  for left, op, right in zip([node.left, *node.comparators], node.ops, node.comparators, strict=False)
                  if isinstance(op, ast.Lt | ast.LtE) and (_reads_clock(left) or _names(left) & clocks)
                  or isinstance(op, ast.Gt | ast.GtE) and (_reads_clock(right) or _names(right) & clocks)]
    assert not found, found


def _reads_clock(node: ast.AST) -> bool:
    return any(isinstance(n, ast.Call) and ast.unparse(n.func) in (
        "time.monotonic", "time.perf_counter", "time.time", "perf_counter", "monotonic") for n in ast.walk(node))


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


def test_the_neck_is_as_narrow_as_designed():
    neck = tree(ROOT / "core" / "platform.py")
    methods = {node.name: [f.name for f in node.body if isinstance(f, ast.FunctionDef)] for node in neck.body
               if isinstance(node, ast.ClassDef) and node.name in ("Platform", "Ops")}
    assert len(methods["Platform"]) + len(methods["Ops"]) <= 15, methods


def test_readme_commands_are_what_ci_runs():
    readme, ci = (ROOT / "README.md").read_text(), (ROOT / "ci" / "run").read_text()
    for command in ('pip install -e ".[cpu]" && isthmus serve', 'pip install -e ".[cpu,test]" && pytest'):
        assert command in readme, f"the README lacks: {command}"
    assert 'pip install -e ".[cpu,test]" && pytest' in ci


def test_nothing_committed_names_a_registry_host_or_a_path_of_one_machine():
    tracked = subprocess.run(["git", "ls-files"], capture_output=True, text=True, cwd=ROOT)
    if tracked.returncode:
        pytest.skip("not a git checkout")
    hosts = re.compile(r"(pypi\.org|pythonhosted\.org|npmjs\.(org|com)|huggingface\.co|/(root|home/\w+)/)")
    found = []
    for line in tracked.stdout.splitlines():
        path = ROOT / line
        text = path.suffix in (".py", ".md", ".toml", ".sh", ".yml", ".yaml", "") and path.is_file()
        if text and path.name != "test_layout.py":
            found += [f"{line}: {m.group()}" for m in hosts.finditer(path.read_text(errors="replace"))]
    assert not found, found
