"""ci/lanes.sh: lanes of work side by side, and what is told of those that failed."""
from __future__ import annotations

import re
import subprocess
import sys

import graph
import pytest

COST = 3  # seconds


def test_what_failed_in_a_lane_is_told_again_at_the_end_and_the_rest_still_ran(tmp_path):
    """The names of the failed come last, for often only the end of a long output is read."""
    (tmp_path / "tests").mkdir()
    test = tmp_path / "tests" / "test_it.py"
    test.write_text("def test_good():\n    pass\n\ndef test_bad():\n    assert 2 + 2 == 5\n")
    script = f"""set -euo pipefail
        work={tmp_path}; . {graph.ROOT}/ci/lanes.sh
        tests() {{ stage fast; cd {tmp_path}; {sys.executable} -m pytest -ra tests || missed
                  stage slow; echo ran too; stage style; (exit 3) || missed; }}
        other() {{ stage clone; echo no such remote; false; echo never; }}
        after() {{ stage never; }}
        fine() {{ stage fine; true; }}
        code=0
        for each in "one tests" "two other after" "three fine"; do lane $each & wait $! || code=$?; done
        echo "code $code, and again:"; again"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    began, _, again = done.stdout.partition("code 1, and again:\n")
    assert "[one] ran too" in began and "[three] === fine" in began and "never" not in began
    assert re.search(r"\[one\] _+ test_bad _+\n\[one\] E +assert", again) and "=== fine" not in again
    assert "[two] no such remote\n" in again
    assert re.search(r"\n\[one\] FAILED tests/test_it.py::test_bad.*\n\n"
                     r"\[one\] !!! exit code 1 at \d+ s: fast\n\[one\] !!! exit code 3 at \d+ s: style\n"
                     r"\[two\] !!! exit code 1 at \d+ s: clone\n$", again), again
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("bad, kind", [(0, "passed"), (8, "tried again"), (9, "failed")])
def test_a_few_tests_that_failed_are_to_be_tried_again_and_many_have_failed(tmp_path, bad, kind):
    (tmp_path / "test_it.py").write_text(f"import pytest\n\n@pytest.mark.parametrize('n', range(10))\n"
                                         f"def test_it(n):\n    assert n >= {bad}\n")
    script = f"""set -euo pipefail
        work={tmp_path}; . {graph.ROOT}/ci/lanes.sh
        tests() {{ stage tests; cd {tmp_path}; {sys.executable} -m pytest || unsteady; echo went on; }}
        lane one tests"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert "[one] went on" in done.stdout
    assert (tmp_path / "unsteady").exists() == (kind == "tried again"), done.stdout
    assert done.returncode == (kind == "failed") and ("!!! exit code 1" in done.stdout) == (kind == "failed")


def test_a_test_file_that_cannot_be_read_has_failed(tmp_path):
    (tmp_path / "test_it.py").write_text("import no_such_thing\n")
    script = f"""set -euo pipefail
        work={tmp_path}; . {graph.ROOT}/ci/lanes.sh
        tests() {{ stage tests; cd {tmp_path}; {sys.executable} -m pytest || unsteady; }}
        lane one tests"""
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True)
    assert done.returncode == 1 and "!!! exit code 2" in done.stdout and not (tmp_path / "unsteady").exists()
