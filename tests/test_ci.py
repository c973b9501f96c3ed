"""The scripts of ci/: the import graph, jobs that a change needs, cells that claim no more than was run."""
from __future__ import annotations

import json
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import affected
import cells
import graph
import job
import matrix
import pytest
import tables
import yaml
from isthmus.core.registry import RegistrationError

COST = 60  # seconds
JOBS = dict(sorted(matrix.matrix()["jobs"].items()))  # the order of the file
ABOUT = {"job": "j", "platform": "p", "device": "d", "date": "2026-01-01", "commit": "c", "tests": "passed"}


# ---- generated files

def test_the_matrix_and_the_workflow_are_fresh():
    assert not matrix.stale(matrix.outputs()), "run: python ci/matrix.py"


def test_the_tables_are_fresh():
    assert tables.main(["--check"]) == 0, "run: python ci/tables.py"


def test_every_platform_with_a_library_has_a_job_that_shows_it_needs_no_other():
    """Of the frameworks that another platform computes with, none can be imported there."""
    claims = matrix.claims()
    for name, claim in claims.items():
        own = [j for j in JOBS.values() if j["platform"] == name and j["hosted"]]
        assert own or not claim.library, f"{name} has no job on an ordinary machine"
        others = {claims[p.parent.name].library for p in graph.sources() if p.match("platforms/*/platform.py")}
        others -= {claim.library, ""}
        for j in own:  # the whole suite compares with other frameworks too
            assert j["whole"] or others <= set(j["without"]), f"{name}: {others}"


def test_the_workflow_has_each_job_with_its_machine_and_condition():
    flow = yaml.safe_load(matrix.workflow(matrix.matrix()))
    assert set(flow["jobs"]) == {"plan", "light", "cells", *JOBS}
    for name, data in JOBS.items():
        entry = flow["jobs"][name]
        assert entry["runs-on"] == list(data["runner"]) and f"'{name}'" in entry["if"]
        assert ("ISTHMUS_RUNNERS" in entry["if"]) == (not data["hosted"])
        assert any(f"ci/job.py {name} " in step.get("run", "") for step in entry["steps"])
        assert 0 < entry["timeout-minutes"] <= 360
    assert flow["jobs"]["cells"]["if"] == "always()" and set(flow["jobs"]["cells"]["needs"]) == {"plan", *JOBS}


def test_two_jobs_of_one_name_are_refused(monkeypatch):
    claim = matrix.claims()["reference"]
    monkeypatch.setattr(matrix, "claims", lambda: {"cpu": claim, "null": claim})
    with pytest.raises(ValueError, match="two jobs have the name reference: cpu's and null's"):
        matrix.matrix()


# ---- the import graph

@pytest.fixture
def files(tmp_path, monkeypatch):
    """files({path: text}): a repository of these files with this one's pyproject.toml."""
    def make(texts: dict[str, str]) -> None:
        (tmp_path / "pyproject.toml").write_text((graph.ROOT / "pyproject.toml").read_text())
        for path, text in texts.items():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        monkeypatch.setattr(graph, "ROOT", tmp_path)
    cached = [f for f in vars(graph).values() if hasattr(f, "cache_clear")]
    for function in cached:
        function.cache_clear()
    yield make
    for function in cached:
        function.cache_clear()


def paths(found) -> set[str]:
    return set(map(str, found))


def test_imports_are_followed_in_every_form(files):
    files({"core/__init__.py": "", "core/a.py": "from . import b\n", "core/b.py": "", "core/deep/__init__.py": "",
           "core/deep/c.py": "def f():\n    from ..a import thing\n", "platforms/x/p.py": "from ...core.a import T\n",
           "tests/conformance/k.py": "from ..core.b import y\nfrom . import m\n", "tests/conformance/m.py": "",
           "tests/help.py": "import isthmus.core.deep.c as c\n", "tests/test_t.py": "from .help import x\n",
           "tests/test_s.py": "patch('isthmus.core.b.name')\nfrom .conformance.k import z\n"})
    assert paths(graph.imports(Path("core/a.py"))) == {"core/b.py", "core/__init__.py"}
    assert paths(graph.imports(Path("core/deep/c.py"))) == {"core/a.py", "core/__init__.py"}
    assert "core/a.py" in paths(graph.imports(Path("platforms/x/p.py")))
    assert {"core/b.py", "tests/conformance/m.py"} <= paths(graph.imports(Path("tests/conformance/k.py")))
    assert {"core/b.py", "tests/conformance/k.py"} <= paths(graph.imports(Path("tests/test_s.py")))
    reached = paths(graph.reach({Path("tests/test_t.py")}))
    assert {"tests/help.py", "core/deep/c.py", "core/a.py", "core/b.py"} <= reached
    assert "platforms/x/p.py" not in reached


def test_what_a_file_needs_is_read_without_importing_it(files):
    files({"platforms/x/p.py": "try:\n    import torch\nexcept ImportError:\n    raise\n",
           "tests/help.py": "import os, numpy\n",
           "tests/test_a.py": "raise RuntimeError('imported')\nimport pytest\nfrom typing import TYPE_CHECKING\n"
                              "from isthmus.platforms.x import p\nfrom .help import x\n"
                              "if TYPE_CHECKING:\n    import wx\n"
                              "mlx = pytest.importorskip('mlx.core')\nCOST = 12  # seconds\n"
                              "@pytest.mark.needs('bf16', 'moe')\ndef test_x():\n    import jax\n"
                              "    pytest.importorskip('gguf')\n",
           "tests/test_b.py": "COST = 3 * 4\n", "tests/test_c.py": ""})
    a = Path("tests/test_a.py")
    assert graph.libraries(a) == {"pytest", "torch", "mlx", "numpy"}
    assert graph.optional_libraries(a) == {"mlx", "gguf"}
    assert graph.needs(a) == [{"bf16", "moe"}]
    assert graph.cost(a) == 12 and graph.cost(Path("tests/test_c.py")) == graph.DEFAULT_COST
    with pytest.raises(ValueError, match="test_b.py:1: COST is a number of seconds, as a literal"):
        graph.cost(Path("tests/test_b.py"))


def test_extras_are_known_by_their_modules():
    assert {"numpy", "zmq", "yaml", "torch"} <= graph.installed_by(["-e", ".[cpu]"])
    assert "torch" not in graph.installed_by(["-e", ".[platform-test]"])


def test_every_declared_cost_is_a_literal():
    assert all(graph.cost(path) > 0 for path in graph.test_files())


# ---- which jobs a change needs

def jobs_of(*platforms: str) -> list[str]:
    return [name for name in affected.jobs() if JOBS[name]["platform"] in platforms]


def test_a_change_of_core_needs_every_job():
    for path in ("core/plan.py", "core/api.py", "core/cli/serve.py", "platforms/reference/ops.py", "pyproject.toml",
                 "tests/conformance/case.py", "ci/run", "ci/graph.py", "platforms/expand.py", "something.new"):
        assert affected.affected([path]) == list(JOBS), path
    assert affected.affected(["tests/conftest.py"]) == [name for name, j in JOBS.items() if j["tests"]]


@pytest.mark.parametrize("platform", sorted({j["platform"] for j in JOBS.values() if j["library"]}))
def test_a_change_of_a_platform_needs_its_jobs_only(platform):
    for file in (matrix.folders()[platform][1].with_name(name) for name in ("ops.py", "ledger.toml", "manifest.toml")):
        assert affected.affected([str(file)]) == jobs_of(platform), file


@pytest.mark.parametrize("file, platforms", [
    ("platforms/npu/moe.py", ["npu"]), ("platforms/xpu/moe.py", ["xpu"]), ("tests/test_npu_platform.py", ["npu"]),
    ("platforms/cuda/kernels.py", ["cuda", "rocm"]), ("platforms/triton_kit/merge.py", ["cuda", "rocm", "xpu"])])
def test_a_change_of_an_accelerator_does_not_need_the_whole_suite(file, platforms):
    hosted = [name for name in affected.affected([file]) if JOBS[name]["hosted"]]
    assert hosted == [name for name in jobs_of(*platforms) if JOBS[name]["hosted"]], file


STAND_INS = [name for name, j in JOBS.items() if j["hosted"] and j["stand_in"]]


def test_what_stand_ins_share_is_run_by_one_of_their_jobs():
    """And each file that names an accelerator or a kernel by some of them: none is left to the whole suite alone."""
    run = Counter(test for name in STAND_INS for test in JOBS[name]["tests"])
    several = {test for test, times in run.items() if times > 1}
    for test in several:
        stands = [name for name in STAND_INS if test in JOBS[name]["tests"]]
        assert all(any(p.is_relative_to(graph.EMULATION / JOBS[name]["stand_in"].removesuffix(matrix.END))
                       for p in graph.imports(Path(test))) for name in stands), test
    for path in graph.test_files():
        if any(p.is_relative_to(folder) for p in graph.imports(path)
               for folder in ("platforms/accelerator", "platforms/triton_kit", "tests/emulation")):
            assert run[str(path)], path


def test_what_stand_ins_run_the_whole_suite_leaves_to_them():
    whole = next(j for j in JOBS.values() if j["whole"])
    left = job.elsewhere(whole)
    assert set(left) == {test for name in STAND_INS for test in JOBS[name]["tests"]}
    assert "tests/test_radix.py" not in left


def test_a_job_runs_of_its_tests_those_that_a_change_is_in():
    def ran(name: str, *files: str) -> tuple[bool, list[str]]:
        suite, tests = affected.shard(name, [*files, "README.md"])
        return suite, [test.removeprefix("tests/") for test in tests]

    name = next(n for n in STAND_INS if "tests/triton/test_sampling.py" in JOBS[n]["tests"])
    suite, tests = ran(name, "platforms/triton_kit/sampling.py")
    assert suite and {"triton/test_sampling.py", "triton/test_platforms.py"} <= set(tests)
    assert "triton/test_attention_decode.py" not in tests
    assert ran(name, "tests/triton/test_sampling.py") == (False, ["triton/test_sampling.py"])
    for changed in ("core/plan.py", "tests/conftest.py"):
        assert set(ran(name, changed)[1]) == {test.removeprefix("tests/") for test in JOBS[name]["tests"]}, changed
    for unknown in ("ci/run", "platforms/cuda/manifest.toml", "something.new"):
        assert affected.shard(name, [unknown]) == (True, JOBS[name]["tests"]), unknown
    assert ran("cpu", "tests/test_radix.py") == (False, ["test_radix.py"])
    assert ran("cpu", "platforms/cpu/ops.py") == (True, ["tests"]), "loaded by its name: no file says who does"
    assert ran("cpu", "core/plan.py") == (True, ["tests"])


def test_a_platform_that_a_test_loads_by_the_name_of_its_stand_in_is_in_it(files):
    files({"tests/emulation/pyproject.toml": "[project.entry-points.x]\nx_emulated = 'isthmus_emulation.x.p:P'\n",
           "tests/emulation/x/p.py": "import isthmus.platforms.x.ops\n", "platforms/x/ops.py": "",
           "tests/test_a.py": "load_platform('x_emulated')\n", "tests/test_b.py": "load_platform('x')\n"})
    assert Path("platforms/x/ops.py") in graph.reach({Path("tests/test_a.py")})
    assert Path("platforms/x/ops.py") not in graph.reach({Path("tests/test_b.py")})


def test_laws_are_not_held_twice(monkeypatch):
    """Where the suite has just run all of its cases, the tests that are the same cases are left out, and else not."""
    commands: list[list[str]] = []
    monkeypatch.setattr(job.subprocess, "run",
                        lambda words, **_: commands.append(words) or SimpleNamespace(returncode=0))
    for held in (True, False):
        assert job.test(Path("python"), "npu", JOBS["npu-emulated"], held) == "passed"
    assert ["not laws" in " ".join(map(str, words)) for words in commands] == [True, False]


def test_each_commit_has_a_part_of_the_cases_and_all_have_them_all():
    assert {job.part_of(f"{n:08x}" + "0" * 32, 10) for n in range(40)} == set(range(10))
    assert job.part_of("unknown", 10) == job.part_of("", 10) == 0


def test_a_job_of_which_nothing_has_changed_makes_no_environment(monkeypatch, capsys):
    monkeypatch.setattr(affected, "changed_since", lambda commit: ["tests/test_radix.py"])
    monkeypatch.setattr(job, "make_environment", lambda *_: pytest.fail("an environment was made"))
    assert job.main([STAND_INS[0], "--since", "HEAD"]) == 0
    assert "nothing of it has changed" in capsys.readouterr().out


@pytest.mark.parametrize("name", JOBS)
def test_a_job_that_is_to_run_no_tests_runs_none(monkeypatch, name):
    monkeypatch.setattr(job.subprocess, "run", lambda *_, **__: pytest.fail("pytest without files runs all there are"))
    assert job.test(Path("python"), JOBS[name]["platform"], JOBS[name] | {"tests": []}) == "unverified"


def test_a_job_without_conformance_is_judged_by_its_tests(tmp_path, capsys):
    for tests, code in (("passed", 0), ("failed", 1)):
        assert job.keep(tmp_path / "j.json", "j", {"platform": "p", "device": "d"}, job.NOT_ASKED, tests) == code
        assert "conformance not asked for" in capsys.readouterr().out
        assert cells.read_reports(tmp_path)["j"]["tests"] == tests
    assert cells.main([str(tmp_path)]) == 0 and "| tests |" in capsys.readouterr().out


def test_prose_needs_no_job_and_a_test_needs_those_that_run_it():
    assert affected.affected(["README.md", "docs/platforms.md", "platforms/cpu/README.md", "LICENSE"]) == []
    assert affected.affected(["tests/test_radix.py"]) == jobs_of("cpu")
    assert affected.affected(["README.md", "tests/test_cpu_platform.py"]) == jobs_of("cpu")


def test_the_command_line_prints_names_or_json_and_takes_a_commit(capsys):
    assert affected.main(["core/plan.py"]) == 0 and capsys.readouterr().out.split() == list(JOBS)
    assert affected.main(["--json", "README.md"]) == 0 and json.loads(capsys.readouterr().out) == []
    affected.main(["--json", "--since", "0" * 40])
    assert json.loads(capsys.readouterr().out) == list(JOBS), "git cannot say, so all"


def test_affected_runs_without_anything_installed():
    done = subprocess.run([sys.executable, "-S", "ci/affected.py", "platforms/cpu/ops.py"], cwd=graph.ROOT,
                          capture_output=True, text=True)
    assert done.stdout.split() == jobs_of("cpu"), done.stderr


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """repository(*words): git in a repository of its own, in which the scripts look for changes."""
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")

    def git(*words: str) -> None:
        subprocess.run(["git", "-c", "user.name=a", "-c", "user.email=a@b", *words], cwd=tmp_path, check=True,
                       capture_output=True)
    git("init", "-q")
    for name in ("core/env.py", "platforms/mlx/moe.py", "tests/tiny_mlx.py", "docs/index.md"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(f"{name}\n" * 20)
    git("add", ".")
    git("commit", "-qm", "a")
    monkeypatch.setattr(affected, "graph", type("Graph", (), {"ROOT": tmp_path, "sources": graph.sources}))
    return git


@pytest.mark.parametrize("old, new", [("core/env.py", "docs/env.md"), ("platforms/mlx/moe.py", "docs/moe.py"),
                                      ("tests/tiny_mlx.py", "docs/a \N{LATIN SMALL LETTER U WITH DIAERESIS}\n.md")])
def test_what_was_moved_counts_under_both_its_names(repository, old, new):
    repository("mv", old, new)
    repository("commit", "-qm", "b")
    assert sorted(affected.changed_since("HEAD~1")) == sorted([old, new])


def test_a_checkout_with_changes_that_no_commit_has_needs_every_job(repository, tmp_path):
    assert affected.changed_since("HEAD") == []
    (tmp_path / "new.py").write_text("")
    assert affected.changed_since("HEAD") is None, "a new file"
    (tmp_path / "new.py").unlink()
    (tmp_path / "core/env.py").write_text("other")
    assert affected.changed_since("HEAD") is None
    repository("add", ".")
    assert affected.changed_since("HEAD") is None, "staged"


@pytest.mark.parametrize("commit", ["", "no-such-commit", "0" * 40, "--output=FILE"])
def test_a_commit_that_is_none_needs_every_job(repository, tmp_path, commit):
    assert affected.changed_since(commit.replace("FILE", str(tmp_path / "x"))) is None
    assert not list(tmp_path.glob("x*")), "git took an option for a commit"


def test_without_git_every_job_is_needed(repository, monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert affected.changed_since("HEAD") is None


@pytest.mark.parametrize("arguments", [[], [""], ["--since", ""], ["README.md", ""], ["."]])
def test_what_says_nothing_needs_every_job(arguments, capsys):
    assert affected.main(arguments) == 0
    assert capsys.readouterr().out.split() == list(JOBS)


@pytest.mark.parametrize("text", [None, "{", "{}", "[]", '{"jobs": 3}', "[" * 100_000])
def test_a_broken_matrix_is_told_in_one_line(tmp_path, monkeypatch, text):
    (tmp_path / "ci").mkdir()
    if text is not None:
        (tmp_path / "ci" / "matrix.json").write_text(text)
    monkeypatch.setattr(cells, "ROOT", tmp_path)
    affected.jobs.cache_clear()
    try:
        for script in (affected, job):
            with pytest.raises(SystemExit, match="matrix.json: .*; python ci/matrix.py writes it"):
                script.main(["core/plan.py"])
    finally:
        affected.jobs.cache_clear()


# ---- cells

@pytest.mark.parametrize("text", ["{", "[]", '{"cases": 5}', json.dumps({**ABOUT, "cases": 5}),
                                  json.dumps({**ABOUT, "cases": ["x"]}), json.dumps({**ABOUT, "cases": [{"id": "a"}]}),
                                  json.dumps({**ABOUT, "cases": [], "counts": {}})])
def test_a_broken_report_is_told_with_its_file(tmp_path, text):
    (tmp_path / "j.json").write_text(text)
    with pytest.raises(SystemExit, match="j.json: .*; python ci/job.py NAME --report FILE writes one"):
        cells.read_reports(tmp_path)


@pytest.mark.parametrize("arguments, code", [(["--help"], 0), (["--chek"], 2), (["x"], 2)])
def test_the_tables_are_written_only_when_that_is_asked_for(arguments, code, monkeypatch, capsys):
    monkeypatch.setattr(tables, "page", lambda: pytest.fail("the page was made"))
    with pytest.raises(SystemExit) as ended:
        tables.main(arguments)
    assert ended.value.code == code and capsys.readouterr()


@pytest.mark.parametrize("script", [tables, matrix])
def test_a_broken_manifest_is_told_in_one_line(script, monkeypatch):
    def claims():
        raise RegistrationError("x/manifest.toml: title is missing")
    monkeypatch.setattr(matrix, "claims", claims)
    with pytest.raises(SystemExit, match="^x/manifest.toml: title is missing$"):
        script.main(["--check"])


def case(outcome: str, id: str = "linear[q4_0+q4_1,T3,bf16]", **more) -> dict:
    op = id.partition("[")[0]
    return {"id": id, "law": "ops", "op": op, "needs": ["bf16"], "outcome": outcome, "reason": "", **more}


@pytest.mark.parametrize("outcomes, state", [
    ((), "unverified"), (("unavailable",), "unverified"), (("passed",), "passed"),
    (("passed", "unsupported"), "passed"),
    (("unsupported", "unsupported"), "unsupported"), (("unsupported", "unavailable"), "unverified"),
    (("passed", "wrong"), "failed"), (("error",), "failed"), (("passed", "expected failure"), "failed"),
    (("passed", "unexpected pass"), "failed"), (("unheard of",), "unverified")])
def test_a_cell_is_passed_only_if_something_passed_and_nothing_failed(outcomes, state):
    assert cells.judge([case(outcome) for outcome in outcomes]).state == state


def test_cells_follow_reports_and_manifests():
    data = cells.read_matrix()
    name = next(n for n, j in data["jobs"].items() if j["platform"] == "cpu")
    other = next(n for n in data["jobs"] if n != name)
    data["jobs"][name] |= {"lacks": {"softcap": "no | caps"}, "capabilities": ["bf16", "q4_0"], "expands": False}
    found = [case("passed"), case("wrong", "moe[top2,bf16]", needs=["bf16", "moe"], reason="NMSE 1"),
             case("passed", "rope[2x4,bf16]"), case("passed", "hit[bf16]", law="state"),
             case("passed", "embed[3,f64]", needs=["f64"])]
    report = {"job": name, "tests": "failed", "cases": found}
    tables = cells.sections(data, {name: report})
    state = {(section, row): cells_[name].state for section, rows in tables.items() for row, cells_ in rows.items()}
    assert state["op", "rope"] == "passed" and state["op", "moe"] == "failed" and state["op", "embed"] == "unverified"
    assert state["feature", "moe"] == "failed" and state["feature", "softcap"] == "unsupported"
    assert state["feature", "logprobs"] == "unverified" and state["law", "state"] == "passed"
    assert state["format", "q4_0"] == "passed" and state["format", "q4_1"] == "unsupported"
    assert state["tests", "tests of its own"] == "failed"
    assert {row[other].state for rows in tables.values() for row in rows.values()} <= {"unverified", "unsupported"}
    text = cells.markdown(tables, cells.plain)
    assert "failed: NMSE 1" in text and "unsupported: no \\| caps" in text and ", q5_0, q5_1, " in text


def test_the_page_tells_kept_from_expanded_and_never_what_was_not_run():
    job = {"capabilities": ["q4_0", "bf16"], "limits": {"linear": "in bf16"}, "shown": "runs here", "device": "d"}
    passed, part = cells.Cell("passed", "", 3, 3), cells.Cell("passed", "", 2, 3)

    def told(section: str, row: str, cell: cells.Cell, **more: bool) -> str:
        return tables.word(job, {"on": "NVIDIA H|200", "date": "2026-12-01"}, section, row, cell, **more)
    assert told("format", "q4_0", passed) == told("format", "f16", passed) == "runs here"
    assert told("format", "q6_k", passed) == "runs here (expanded)"
    assert told("op", "linear", part) == "runs here (in bf16; 2 of 3)"
    assert told("op", "linear", part, counts=False) == "runs here (in bf16)", "the third is unsupported"
    assert told("op", "moe", cells.Cell("passed", "", 2, 3, 1), counts=False) == "runs here (2 of 3)", "it was not run"
    job["shown"] = "verified on"
    assert told("op", "moe", passed) == "verified on (NVIDIA H\\|200, 2026-12-01)"
    assert told("op", "moe", cells.Cell("unverified")) == "unverified"
    assert told("op", "moe", cells.Cell("unsupported", "no |")) == "unsupported (no \\|)"
    assert told("op", "moe", cells.Cell("failed", "NMSE 1")) == "**failed**: NMSE 1"


@pytest.mark.parametrize("states, name", [
    (("unverified", "passed", "passed"), "interpreted"), (("passed", "passed", "passed"), "device"),
    (("unverified", "unsupported", "unverified"), "device"), (("unverified", "unsupported", "passed"), "signatures"),
    (("unsupported", "unsupported", "unsupported"), "device"), (("passed", "failed", "passed"), "interpreted")])
def test_the_strongest_run_counts_and_a_failure_before_all(states, name):
    jobs = {"device": "verified on", "interpreted": "compiled and interpreted", "signatures": "signature-checked"}
    by_job = {job: cells.Cell(state) for job, state in zip(jobs, states, strict=True)}
    assert tables.strongest({job: {"shown": shown} for job, shown in jobs.items()}, by_job) == name


def test_every_cell_of_the_page_is_one_of_the_words():
    words = "|".join((*tables.EVIDENCE, "unsupported", "unverified", r"\*\*failed\*\*"))
    page = (graph.ROOT / tables.PAGE).read_text("utf-8")
    assert {job["shown"] for job in JOBS.values()} <= set(tables.EVIDENCE)
    for known, after in (("What is known of each platform", "What each claims"), ("Each run by itself", None)):
        part = page.partition(f"## {known}")[2].partition(f"## {after}")[0]
        rows = [line.split(" | ")[1:] for line in part.splitlines() if line.startswith("| ")]
        told = [cell.rstrip(" |") for row in rows if not set(row) & {"cpu"} for cell in row]
        assert len(told) > 100
        assert not [cell for cell in told if not re.fullmatch(rf"({words})( \(.+\))?(: .+)?", cell)]


def test_a_recorded_report_is_read_back(tmp_path):
    found = {"ok": True, "counts": {"passed": 1}, "versions": {"isthmus": "1"}, "seconds": 2.0, "manifest": {"x": 1},
             "cases": [case("passed", tolerance=1.0, numbers={})]}
    (tmp_path / "j.json").write_text(job.record(ABOUT, found))
    (tmp_path / "k.json").write_text(job.record({**ABOUT, "job": "k"}, None))
    reports = cells.read_reports(tmp_path)
    assert reports["j"]["date"] == "2026-01-01" and reports["j"]["ok"] and reports["k"]["cases"] == []
    assert "the suite gave no report" in tables._runs({"jobs": {"k": {"platform": "p", "device": "d"}}}, reports)
    assert reports["j"]["cases"] == [{k: v for k, v in case("passed").items() if v != ""}]


# ---- a job

@pytest.mark.parametrize("report, code, ok", [('{"ok": true}', 0, True), ('{"ok": true}', 1, False), (None, 0, None)])
def test_conformance_is_ok_only_if_report_and_exit_code_say_so(tmp_path, report, code, ok):
    """Any program that takes the arguments of Python, in its place."""
    fake = tmp_path / "python"
    fake.write_text(f"#!{sys.executable}\nimport sys\n" + (
        f"open(sys.argv[-1].partition('=')[2], 'w').write({report!r})\n" if report else "") + f"sys.exit({code})\n")
    fake.chmod(0o755)
    found = job.conformance(fake, "acme")
    assert found is None if report is None else found["ok"] is ok


def test_a_module_that_must_be_absent_fails_the_job():
    job.check_absent(Path(sys.executable), ["no_such_framework"])
    with pytest.raises(SystemExit, match="numpy can be imported, and this job is to show that nothing needs it"):
        job.check_absent(Path(sys.executable), ["numpy"])


def test_jobs_of_ordinary_machines_are_listed(capsys):
    assert job.main(["--list"]) == 0
    assert capsys.readouterr().out.split() == [n for n, j in JOBS.items() if j["hosted"] and not j["whole"]]


def test_a_report_of_a_device_is_taken_over_and_no_other(tmp_path, capsys):
    """As ci/device_check.sh leaves it, or `isthmus conformance --json`."""
    found = {"platform": "cuda", "ok": True, "started": "2026-12-01T10:00:00", "seconds": 2.0, "counts": {"passed": 1},
             "versions": {}, "cases": [case("passed")], "manifest": {"device": "NVIDIA H200"},
             "of": {"emulated": False, "commit": "c0ffee"}}
    taken, kept = tmp_path / "conformance.json", tmp_path / "reports" / "cuda-device.json"
    taken.write_text(json.dumps(found))
    assert job.main(["cuda-device", f"--taken={taken}", f"--report={kept}"]) == 0
    report = cells.read_reports(kept.parent)["cuda-device"]
    assert (report["on"], report["date"], report["commit"]) == ("NVIDIA H200", "2026-12-01", "c0ffee")
    assert "cuda-device: conformance ok, tests unverified" in capsys.readouterr().out
    for change, why in (({"platform": "cpu"}, "is of cpu, not of cuda"), ({"cases": 3}, "'cases' is 3"),
                        ({"of": {"emulated": True}}, "is of cuda emulated")):
        taken.write_text(json.dumps(found | change))
        with pytest.raises(SystemExit, match=why):
            job.main(["cuda-device", f"--taken={taken}"])


def test_an_unknown_job_is_refused_with_those_there_are(capsys):
    with pytest.raises(SystemExit):
        job.main(["quantum"])
    assert "there is no job quantum; there are: cpu" in capsys.readouterr().err
