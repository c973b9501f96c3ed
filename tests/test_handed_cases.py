"""The acceptance cases that were handed to the project, where they are at hand; users have none and skip them."""
from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from .soak import start_server

COST = 120  # seconds

ROOT = Path(__file__).resolve().parent.parent
CASES = Path(os.environ.get("ISTHMUS_CASES", ROOT.parent / "shared" / "cases"))
KEY = "handed-cases-key"
CONTEXT = 2048

pytestmark = pytest.mark.skipif(not CASES.is_dir(), reason=f"no handed cases in {CASES}")


def run_cases(environment: dict[str, str], seconds: int, *more: str) -> str:
    """pytest over the cases in a process of its own; its output."""
    files = sorted(f.name for f in CASES.glob("H_*.py"))
    command = [sys.executable, "-m", "pytest", "-q", "-rfs", "-p", "no:cacheprovider", *more, *files]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1", **environment}
    done = subprocess.run(command, cwd=CASES, env=environment,
                          capture_output=True, text=True, timeout=seconds)
    return done.stdout + done.stderr


def missing_data() -> list[str]:
    """Cases whose input was not handed over with them."""
    templates = CASES.parent / "data" / "llama_cpp_models" / "models" / "templates"
    if (templates / "mistralai-Mistral-Nemo-Instruct-2407.jinja").exists():
        return []
    return ["--deselect=H_16_template_raises.py::test_raises", "--deselect=H_16_template_raises.py::test_renders"]


def passed(output: str) -> int:
    found = re.search(r"(\d+) passed", output)
    return int(found[1]) if found and not re.search(r"\d+ (failed|error)", output) else -1


def test_library_cases():
    sources = {"ENGINE_ADAPTER": "tests.case_adapter", "ENGINE_SRC": str(ROOT / "core"), "BASE_URL": "", "SLOW": "3"}
    output = run_cases(sources, 1500, *missing_data())
    assert passed(output) >= 40, output[-6000:]


@pytest.mark.slow
def test_server_cases():
    pytest.importorskip("torch")
    flags = ["--platform=cpu", f"--api-key={KEY}", f"--max-model-len={CONTEXT}"]
    process, url = start_server(flags)
    try:
        output = run_cases({"BASE_URL": url + "/v1", "API_KEY": KEY, "CTX": str(CONTEXT), "PAGE": "16", "SLOW": "6",
                            "MODEL": "smollm2-135m-instruct"}, 3600, *missing_data())
        assert passed(output) >= 140, output[-6000:]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(300)
