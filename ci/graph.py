"""What the sources say without being imported: which file imports which, what a test file needs, what it costs."""
from __future__ import annotations

import ast
import re
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EMULATION = Path("tests/emulation")  # platforms that stand in for those whose device is not there
DEFAULT_COST = 3  # seconds of a test file that declares none
# Distribution -> the module it brings, where their names differ.
MODULES = {"pyzmq": "zmq", "pyyaml": "yaml", "huggingface-hub": "huggingface_hub", "prometheus-client":
           "prometheus_client"}


@cache
def project() -> dict:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


@cache
def package_folders() -> dict[str, str]:
    """Dotted name -> folder of every package root of the repository."""
    return {**project()["tool"]["setuptools"]["package-dir"], "tests": "tests", "benchmarks": "benchmarks",
            "examples": "examples"}


@cache
def stand_ins() -> dict[str, str]:
    """Name -> module of each platform that the emulations' package registers; none is known by its folder."""
    file = ROOT / EMULATION / "pyproject.toml"
    entries = tomllib.loads(file.read_text("utf-8"))["project"]["entry-points"] if file.is_file() else {}
    return {name: ".".join((*EMULATION.parts, *value.partition(":")[0].split(".")[1:]))
            for group in entries.values() for name, value in group.items()}


@cache
def sources() -> tuple[Path, ...]:
    """Python files that the graph is about, relative to the root."""
    folders = ("core", "platforms", "tests", "benchmarks", "examples", "ci")
    return tuple(sorted(p.relative_to(ROOT) for folder in folders for p in (ROOT / folder).rglob("*.py")))


@cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text("utf-8"), str(path))


def dotted(path: Path) -> str:
    """The name that `path`'s relative imports start from; of a folder of several names, the deepest."""
    fits = [(name, folder) for name, folder in package_folders().items() if path.is_relative_to(folder)]
    if not fits:
        return path.stem
    name, folder = max(fits, key=lambda fit: len(fit[1]))
    return ".".join((name, *path.relative_to(folder).with_suffix("").parts))


@cache
def find(module: str) -> Path | None:
    """The file of a module of this repository, or None."""
    for name, folder in package_folders().items():
        if module == name or module.startswith(name + "."):
            base = Path(folder, *module[len(name):].split(".")[1:])
            for candidate in (base.with_suffix(".py"), base / "__init__.py"):
                if (ROOT / candidate).is_file():
                    return candidate
    script = Path("ci", f"{module}.py")  # of this folder, whose files import each other by their bare names
    return script if "." not in module and (ROOT / script).is_file() else None


def _named(path: Path, node: ast.AST) -> Iterator[str]:
    """Modules that a node may bring in: what it imports, and strings that are names of this package's modules, or of a
    platform that stands in."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = ".".join(dotted(path).split(".")[:-node.level]) if node.level else ""
        base = ".".join(filter(None, (base, node.module)))
        yield base
        yield from (f"{base}.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.Constant) and isinstance(node.value, str):
        if node.value in stand_ins():
            yield stand_ins()[node.value]
        if not node.value.startswith("isthmus."):
            return
        parts = node.value.partition(":")[0].split(".")
        yield from (".".join(parts[:n]) for n in range(2, len(parts) + 1))


def _local(modules: Iterator[str]) -> Iterator[Path]:
    for module in modules:
        path = find(module)
        if path is not None:
            yield path
            yield from (parent / "__init__.py" for parent in path.parents[:-1]
                        if (ROOT / parent / "__init__.py").is_file())


@cache
def imports(path: Path) -> frozenset[Path]:
    """Files of this repository that a file imports, anywhere in it."""
    return frozenset(_local(m for node in ast.walk(tree(path)) for m in _named(path, node))) - {path}


def reach(roots: Iterator[Path] | set[Path]) -> set[Path]:
    """The roots and all that they import, directly or not."""
    found, waiting = set(), set(roots)
    while waiting:
        path = waiting.pop()
        found.add(path)
        waiting |= imports(path) - found
    return found


def _top_level(path: Path) -> Iterator[ast.AST]:
    """Nodes that run when the file is imported: no function bodies, no imports for type checkers."""
    waiting: list[ast.AST] = list(tree(path).body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        yield node
        waiting += ast.iter_child_nodes(node)


def _skips_without(node: ast.AST) -> str | None:
    """The module of a `pytest.importorskip("module")`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "importorskip":
        return node.args[0].value if isinstance(node.args[0], ast.Constant) else None
    return None


def _outside(module: str) -> str | None:
    """The outermost name of a module that neither this repository nor Python has."""
    top = module.split(".")[0]
    return None if top in sys.stdlib_module_names or top in ("isthmus", *package_folders()) or find(top) else top


@cache
def _brought(path: Path) -> tuple[frozenset[str], frozenset[Path]]:
    """Modules of other distributions, and files of this repository, without which a file cannot be imported."""
    outside, files = set(), set()
    for node in _top_level(path):
        named = list(_named(path, node)) if isinstance(node, ast.Import | ast.ImportFrom) else []
        named += filter(None, [_skips_without(node)])
        whole = named[:1] if isinstance(node, ast.ImportFrom) else named  # without the names taken from it
        outside |= set(filter(None, map(_outside, whole)))
        files |= set(_local(iter(named)))
    return frozenset(outside), frozenset(files)


@cache
def libraries(path: Path) -> frozenset[str]:
    """Modules of other distributions without which a file cannot be imported, its own imports' too."""
    found, seen, waiting = set(), set(), {path}
    while waiting:
        current = waiting.pop()
        seen.add(current)
        outside, files = _brought(current)
        found |= outside
        waiting |= files - seen
    return frozenset(found)


def optional_libraries(path: Path) -> set[str]:
    """Modules without which single tests of a file are skipped."""
    return {top for node in ast.walk(tree(path)) if (module := _skips_without(node)) and (top := _outside(module))}


def needs(path: Path) -> list[frozenset[str]]:
    """The words of each `needs(...)` mark of a test file: capabilities of a platform that it is tried on."""
    return [frozenset(a.value for a in node.args if isinstance(a, ast.Constant)) for node in ast.walk(tree(path))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "needs"
            and ast.unparse(node.func).endswith("mark.needs")]


def cost(path: Path) -> float:
    """Seconds on two cores that a test file declares, as a literal `COST = 12` at its top."""
    for node in tree(path).body:
        if isinstance(node, ast.Assign) and [ast.unparse(t) for t in node.targets] == ["COST"]:
            if not isinstance(node.value, ast.Constant) or not isinstance(node.value.value, int | float):
                raise ValueError(f"{path}:{node.lineno}: COST is a number of seconds, as a literal")
            return node.value.value
    return DEFAULT_COST


def test_files() -> list[Path]:
    return [p for p in sources() if p.parts[0] == "tests" and p.name.startswith("test_")]


def whole_suite(foreign: set[str]) -> list[Path]:
    """Test files that can be imported without the libraries of other platforms."""
    return [path for path in test_files() if not libraries(path) & foreign]


def installed_by(words: tuple[str, ...] | list[str]) -> set[str]:
    """Modules that `pip install WORDS` asks for by name: core's dependencies, those of the extras named, and others."""
    extras = {extra.strip() for word in words if "[" in word for extra in word.partition("[")[2].strip("]").split(",")}
    wanted = [*project()["project"]["dependencies"], *(word for word in words if word[0].isalpha() and "/" not in word)]
    for extra in extras:
        wanted += project()["project"]["optional-dependencies"][extra]
    names = [re.match(r"[\w.-]+", w)[0].lower() for w in wanted]
    return {MODULES.get(name, name.replace("-", "_")) for name in names}
