"""The tree without its accelerator platforms is whole: core neither names them nor misses them."""
from __future__ import annotations

import io
import json
import re
import shutil
import subprocess
import sys
import tokenize
from pathlib import Path

import pytest

COST = 40  # seconds
ROOT = Path(__file__).resolve().parent.parent
FOUR = ("cuda", "rocm", "xpu", "npu")
THEIRS = (*FOUR, "accelerator", "triton_kit")  # with what they share


@pytest.fixture(scope="module")
def tree(tmp_path_factory) -> Path:
    """This repository without those folders, and `site`, from which the package is imported."""
    root = tmp_path_factory.mktemp("without")
    for name in ("core", "package", "ci", "platforms", "tests/conformance"):
        shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns(
            "__pycache__", *(THEIRS if name == "platforms" else ())))
    for name in ("README.md", "tests/test_layout.py"):
        shutil.copy(ROOT / name, root / name)
    listed = (ROOT / "pyproject.toml").read_text("utf-8")
    for name in THEIRS:
        listed = listed.replace(f' "isthmus.platforms.{name}",', "")
    (root / "pyproject.toml").write_text(listed, "utf-8")
    site = root / "site" / "isthmus"
    shutil.copytree(root / "package", site)
    for name, folder in (("core", "core"), ("platforms", "platforms"), ("conformance", "tests/conformance")):
        (site / name).symlink_to(root / folder)
    return root


def run(tree: Path, *words: str) -> str:
    """What a Python of that tree prints."""
    code = f"import sys\nsys.path[:0] = [{str(tree / 'site')!r}]\nsys.argv[1:] = {list(words[1:])!r}\n{words[0]}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tree)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_core_has_none_of_their_names():
    """In what is executed; a comment may say whom a hint is for."""
    found, names = [], re.compile(rf"(?i)\b({'|'.join(FOUR)})\b")
    for path in (ROOT / "core").rglob("*.py"):
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline):
            if token.type in (tokenize.NAME, tokenize.STRING) and names.search(token.string):
                found.append(f"{path.relative_to(ROOT)}:{token.start[0]} {token.string[:60]}")
    assert not found, found


def test_the_others_register_and_are_listed(tree):
    told = json.loads(run(tree, """
import json, isthmus
from isthmus.core import discovery, manifests
from isthmus.core.platform import Manifest
own = [name for name, found in discovery.list_platforms().items() if found.source == "folder"]
answers = discovery.probe_all(names=own)
try:
    discovery.load_platform("cuda")
except discovery.Unavailable as error:
    gone = str(error)
print(json.dumps({"from": isthmus.__file__, "own": own, "gone": gone,
                  "claims": [name for name in own if isinstance(manifests.read_claims()[name], manifests.Claim)],
                  "mistakes": [str(a) for a in answers.values() if isinstance(a, discovery.RegistrationError)],
                  "usable": [name for name, answer in answers.items() if isinstance(answer, Manifest)]}))"""))
    assert Path(told["from"]).is_relative_to(tree)
    left = sorted(path.parent.name for path in (tree / "platforms").glob("*/platform.py"))
    assert sorted(told["own"]) == sorted(told["claims"]) == left and not set(left) & set(FOUR)
    assert {"reference", "null"} <= set(told["usable"]) and not told["mistakes"]
    assert "platform 'cuda' is not installed; there are:" in told["gone"]


def test_it_computes(tree):
    said = run(tree, "from isthmus.core.cli.main import main\nraise SystemExit(main())",
               "conformance", "--platform=reference", "--only=rms_norm")
    assert " passed" in said and " 0 passed" not in said


@pytest.mark.slow
def test_the_laws_of_the_house_hold(tree):
    run(tree, "import os, pytest\nos.environ['PYTHONPATH'] = sys.path[0]\nraise SystemExit(pytest.main())", "-q",
        "-p", "no:cacheprovider", "--import-mode=importlib", "--rootdir=.", "tests/test_layout.py")
