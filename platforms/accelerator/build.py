"""Which torch is installed, read without importing it: an answer about a missing device should not take seconds."""
from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path

INDEXED = "cuda"  # what torch from a package index is built for, on Linux


def torch_build() -> dict[str, str] | None:
    """What torch says of its build: "__version__" and, where it was built for them, "cuda", "hip" and "xpu" with their
    versions. None = torch is not installed. Source: the assignments in torch/version.py."""
    spec = find_spec("torch")
    if spec is None or not spec.submodule_search_locations:
        return None
    try:
        tree = ast.parse((Path(spec.submodule_search_locations[0]) / "version.py").read_text("utf-8"))
    except (OSError, SyntaxError):
        return {"__version__": "unknown"}
    found = {}
    for node in tree.body:
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0] if isinstance(
            node, ast.Assign) else None
        if isinstance(target, ast.Name) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            found[target.id] = node.value.value
    return found


def reason_against_build(platform: str, kind: str, device: str) -> str | None:
    """Why the installed torch cannot drive this kind of device ("cuda", "hip", "xpu"), and the way out."""
    build = torch_build()
    wanted = f"install the build of torch for {device} that its selector at pytorch.org names"
    if build is None:
        extra = f"pip install 'isthmus[{platform}]'"
        return f"torch is not installed: {extra if kind == INDEXED else f'first {wanted}, then {extra}'}"
    if kind in build:
        return None
    others = next((name for name in ("cuda", "hip", "xpu") if name in build), "host processors only")
    return f"torch {build.get('__version__', 'unknown')} was built for {others}, not for {device}: {wanted}"
