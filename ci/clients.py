"""Run the tests of unmodified clients in an environment that has them all: `python ci/clients.py [--venv FOLDER]`.

Each is installed by itself, since pip takes minutes to choose versions for all of them at once. Then their tests run,
those of OpenAI's package a second time with the major before, for which much still asks. What cannot be installed
fails the run: a test that is skipped shows nothing. guidellm has an environment of its own: it wants another `click`
than schemathesis and `llm`, and torch, which on Linux brings gigabytes unless pip is told of a smaller one.
"""
from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import job

# Distribution -> the module it brings. The first need nothing of each other; the last have most dependencies.
CLIENTS = {"openai>=3": "openai", "anthropic": "anthropic", "ollama": "ollama", "instructor": "instructor",
           "langchain-openai": "langchain_openai", "litellm": "litellm", "llm": "llm", "schemathesis": "schemathesis",
           "pydantic-ai-slim[openai,anthropic]": "pydantic_ai", "lm-eval[api]": "lm_eval"}
APART = ("guidellm", "tests/test_client_commands.py")  # its test is called after it
BASE = ["-e", ".", "pytest>=8", "hypothesis>=6.120", "jsonschema>=4.23"]
BEFORE = "openai>=2,<3"
OF_OPENAI = ["tests/test_client_openai.py", "tests/test_api_clients.py", "tests/test_server_stream.py"]


def install(python: Path, *words: str) -> bool:
    """Whether pip could."""
    print(f"installing {words[-1]}", flush=True)
    command = [python, "-m", "pip", "install", "-q", "--disable-pip-version-check", *words]
    return subprocess.run(command, cwd=job.ROOT).returncode == 0


def test(python: Path, paths: list[str], *words: str, **environment: str) -> int:
    """pytest's exit code, slow tests included; what is skipped is told."""
    command = [python, "-m", "pytest", "-q", "-rs", "-W", "ignore", "-m", "slow or not slow", *words, *paths]
    return subprocess.run(command, cwd=job.ROOT, env=os.environ | environment).returncode


def run(folder: Path) -> int:
    """1 when something could not be installed or a test failed."""
    python = job.make_environment(folder, BASE)
    missing = [name for name, module in CLIENTS.items() if not install(python, name)
               or subprocess.run([python, "-c", f"import {module}"]).returncode]
    files = sorted(str(path.relative_to(job.ROOT)) for path in job.ROOT.glob("tests/test_client_*.py"))
    codes = [test(python, [*files, "tests/test_api_clients.py"])]
    name, path = APART
    alone = job.make_environment(folder / name, BASE)
    if install(alone, name):
        codes.append(test(alone, [path], "-k", name))
    else:
        missing.append(name)
    older = folder / "before"
    if install(python, "--no-deps", "--target", str(older), BEFORE):
        codes.append(test(python, OF_OPENAI, "-k", "sdk or openai", PYTHONPATH=str(older)))
    else:
        missing.append(BEFORE)
    if missing:
        print("could not be installed: " + ", ".join(missing))
    return int(bool(missing) or any(codes))


def main(argv: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--venv", type=Path, metavar="FOLDER", help="where the environment is made, and stays")
    folder = parser.parse_args(argv).venv
    if folder is not None:
        return run(folder)
    with tempfile.TemporaryDirectory() as temporary:
        return run(Path(temporary))


if __name__ == "__main__":
    sys.exit(main())
