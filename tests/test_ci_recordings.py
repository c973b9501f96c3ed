"""Cases added to a recording of conformance (ci/recordings.py): each says of which run it is."""
from __future__ import annotations

import json

import cells
import job
import pytest
import recordings

COST = 2  # seconds
ABOUT = {"job": "tpu", "platform": "tpu", "device": "d", "date": "2026-01-01", "commit": "old", "tests": "unverified"}


def case(id: str, outcome: str, law: str = "ops") -> dict:
    return {"id": id, "law": law, "op": "x", "needs": ["bf16"], "outcome": outcome, "reason": "", "seconds": 1.0}


def run(started: str, *cases: dict, **more) -> dict:
    return {"platform": "tpu", "seed": 0, "started": started, "seconds": 2.0, "versions": {"jax": "1"}, "stale": [],
            "machine": "m", "unproved": [], "ok": True, "manifest": {}, "cases": list(cases),
            "counts": {"passed": 1, "wrong": 0}} | more


@pytest.fixture
def recording(tmp_path):
    """A recording of a run that was ended: one case passed, one was not run."""
    path = tmp_path / "tpu.json"
    path.write_text(job.record(ABOUT, run("2026-01-01T10", case("a", "passed"), case("b", "not run"), ok=False)))
    return path


def add(path, found: dict, *words: str) -> tuple[int, dict]:
    taken = path.with_name("run.taken")
    taken.write_text(json.dumps(found))
    code = job.main(["tpu", f"--report={path}", f"--taken={taken}", "--missing", *words])
    return code, cells.checked(path)


def test_added_cases_say_of_which_run_they_are_and_the_others_stay_as_they_were(recording):
    before = cells.checked(recording)
    code, after = add(recording, run("2026-01-02T10", case("b", "passed"), case("c", "passed", "drafts"),
                                     of={"commit": "c0ffee123"}))
    first, second, third = after["cases"]
    assert code == 0 and after["ok"] and first == before["cases"][0]
    assert [(c["id"], c["date"], c["commit"]) for c in (second, third)] == [
        ("b", "2026-01-02", "c0ffee123"), ("c", "2026-01-02", "c0ffee123")]
    assert (after["date"], after["commit"], after["seconds"]) == ("2026-01-01", "old", 2.0)
    assert after["counts"]["passed"] == 3 and not after["counts"].get("not run") and not after["unproved"]
    assert recordings.told(before) == "" and recordings.told(after) == "; ops (1), drafts (1) 2026-01-02 at c0ffee1"
    assert after["added"][0]["cases"] == 2 and after["added"][0]["versions"] == {"jax": "1"}


@pytest.mark.parametrize("outcome", ["wrong", "error", "unexpected pass"])
def test_a_recording_holds_no_more_once_an_added_case_does_not(recording, outcome):
    code, after = add(recording, run("2026-01-02T10", case("b", "passed"), case("a", outcome)))
    assert code == 1 and not after["ok"] and [c["outcome"] for c in after["cases"]] == [outcome, "passed"]


def test_a_machine_without_the_platform_adds_nothing(recording):
    before = recording.read_text()
    for cases in ([case("a", "unavailable")], []):
        with pytest.raises(SystemExit, match="not available in the run"):
            add(recording, run("2026-01-02T10", *cases))
    assert recording.read_text() == before


def test_a_recording_in_which_something_still_was_not_run_does_not_hold(recording):
    code, after = add(recording, run("2026-01-02T10", case("c", "passed")))
    assert code == 1 and not after["ok"] and after["unproved"] == ["1 cases were not run"]


@pytest.mark.parametrize("change, why", [
    ({"platform": "cpu"}, "platform 'cpu'"), ({"seed": 3}, "seed 3"), ({"manifest": {"device": "x"}}, "device 'x'"),
    ({"started": "2026-01-01T10"}, "has one of 2026-01-01T10"), ({"started": "2025-12-31"}, "started at 2025-12-31")])
def test_a_run_that_is_not_of_the_recording_is_refused_and_changes_nothing(recording, change, why):
    text = recording.read_text()
    with pytest.raises(SystemExit, match=why):
        add(recording, run("2026-01-02T10", case("b", "passed")) | change)
    assert recording.read_text() == text


def test_what_lacks_is_what_is_run(recording, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(job, "check_absent", lambda *_: None)
    monkeypatch.setattr(job, "conformance", lambda *words: asked.append(words[-1]))
    with pytest.raises(SystemExit, match="gave no report"):
        job.main(["tpu", f"--report={recording}", f"--python={tmp_path}", "--missing", "drafts"])
    assert asked == [("drafts", "b")]
    with pytest.raises(SystemExit, match="is of the job tpu, not of cpu"):
        job.main(["cpu", f"--report={recording}", "--missing"])
    with pytest.raises(SystemExit, match="adds to a recording"):
        job.main(["tpu", "--missing"])
