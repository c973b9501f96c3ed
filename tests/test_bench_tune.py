"""`isthmus tune`: a search that finds what is there to find, in its time, and goes on where it was stopped."""
from __future__ import annotations

import random

import pytest
import yaml
from isthmus.core.bench.tune import Knob, Log, OutOfTime, Search, Trial, merged, yaml_text
from isthmus.core.cli import tune
from isthmus.core.cli.main import main
from isthmus.core.config import Config
from isthmus.core.errors import ConfigError
from isthmus.core.settings import list_settings, read_file, resolve, value_of

from .checkpoints import tiny_llama_gguf

COST = 40  # seconds, most of them in the slow one
KNOBS = [Knob("chunk", (64, 128, 256, 512, 1024)), Knob("running", (8, 16, 32, 64))]
START = {"chunk": 256, "running": 8}


class Machine:
    """Settings have a true score; a measurement takes a second and is off by some noise. `made`: measurements."""

    def __init__(self, score, noise=0.0, seconds=1000.0, seed=0):
        self.score, self.noise, self.time, self.made = score, noise, seconds, []
        self.draw = random.Random(seed)

    def measure(self, changes, part, number, limit):
        self.made.append((dict(changes), part, number))
        self.time -= 1
        value = self.score({**START, **changes})
        if isinstance(value, str):
            return Trial(dict(changes), part, number, 0.0, 1.0, {}, value)
        return Trial(dict(changes), part, number, value * self.draw.lognormvariate(0, self.noise), 1.0)

    def search(self, path, **more) -> Search:
        search = Search(Log(path, {"goal": "x"}), self.measure, lambda: self.time, **more)
        search.run(lambda platform: KNOBS, dict(START))
        search.log.close()
        return search


def hill(settings) -> float:
    return 100 - abs(settings["chunk"] - 1024) / 20 - abs(settings["running"] - 32) / 2


def test_it_climbs_to_the_best_in_both_directions(tmp_path):
    found = Machine(hill).search(tmp_path / "log")
    assert found.best == {"chunk": 1024, "running": 32} and found.finished and found.score == 100
    down = Machine(lambda s: 100 - s["chunk"] / 10).search(tmp_path / "other")
    assert down.best == {"chunk": 64}


def test_in_noise_it_stays_where_it_is(tmp_path):
    taken = [bool(Machine(lambda s: 100.0, noise=0.03, seed=seed).search(tmp_path / str(seed)).best)
             for seed in range(20)]
    assert sum(taken) <= 4, "a value must win on each of three sets of prompts"


def test_what_wins_once_by_luck_is_not_taken(tmp_path):
    def search(*scores):
        found, at = Machine(hill), iter(scores)
        found.measure = lambda changes, part, number, limit: Trial(
            changes, part, number, 100.0 if not changes or part == "screen" else next(at, 50.0), 1.0)
        search = Search(Log(tmp_path / str(scores), {"goal": "x"}), found.measure, lambda: 9.0)
        search.run(lambda platform: [Knob("running", (8, 16))], {"running": 8})
        return search.best
    assert search(110.0, 99.0) == search(110.0, 104.0, 100.0) == search(110.0, 101.0, 102.0) == search(102.0) == {}
    assert search(110.0, 101.0, 104.0) == {"running": 16}


def test_what_is_far_behind_is_given_up_after_a_part(tmp_path):
    machine = Machine(lambda s: 10.0 if s["chunk"] != 256 else 100.0)
    machine.search(tmp_path / "log")
    assert not [m for m in machine.made if m[0].get("chunk") and m[1] == "whole"]


def test_what_fails_is_no_end(tmp_path):
    found = Machine(lambda s: "out of memory" if s["running"] > 16 else hill(s)).search(tmp_path / "log")
    assert found.best == {"chunk": 1024, "running": 16}
    assert any(t.reason == "out of memory" for t in found.tried())
    with pytest.raises(ConfigError, match="to begin with cannot be measured: no model"):
        Machine(lambda s: "no model").search(tmp_path / "none")


def test_it_ends_with_its_time_and_goes_on_from_its_log_without_measuring_twice(tmp_path):
    whole = Machine(hill)
    whole.search(tmp_path / "whole")
    made: list = []
    for _ in range(100):
        machine = Machine(hill, seconds=4.5)
        found = machine.search(tmp_path / "parts")
        assert len(machine.made) <= 4
        made += machine.made
        if found.finished:
            break
    assert found.best == {"chunk": 1024, "running": 32}
    assert len({str(m) for m in made}) == len(made) and made == whole.made


def test_no_run_may_take_much_longer_than_the_best(tmp_path):
    limits = []
    machine = Machine(hill)
    real = machine.measure
    machine.measure = lambda changes, part, number, limit: (limits.append(limit), real(changes, part, number, limit))[1]
    machine.search(tmp_path / "log")
    assert limits[0] == 1000 and {limit for limit in limits[3:]} == {7.0}


def test_a_log_that_was_cut_is_taken_and_another_is_refused(tmp_path):
    path = tmp_path / "log"
    Machine(hill, seconds=6.5).search(path)
    whole = path.read_text()
    path.write_text(whole[:-20])
    again = Log(path, {"goal": "x"})
    assert len(again.known) == len(whole.splitlines()) - 2
    again.close()
    with pytest.raises(ConfigError, match="of another search .goal differ"):
        Log(path, {"goal": "y"})
    for text in ("what\n", '{"isthmus_tune": 1, "goal": "x"}\n{"a": 1}\n'):
        path.write_text(text)
        with pytest.raises(ConfigError, match="no log of `isthmus tune`"):
            Log(path, {"goal": "x"})
    assert issubclass(OutOfTime, Exception)


@pytest.mark.parametrize("text", [
    "one line without an end", "what\n", "a\nb", '{"not": "ours"}', '{"not": "ours"}\n{"x": 1}\ncut', "[1]\n", "5\ncut",
    '{"isthmus_tune": 1, "goal": "y"}\ncut', '{"isthmus_tune": 1, "goal": "x"}\n{"a": 1}\ncut', "\n", "\x00"])
def test_a_file_of_another_stays_as_it_is(tmp_path, text):
    path = tmp_path / "log"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--state"):
        Log(path, {"goal": "x"})
    assert path.read_text() == text


def test_a_log_that_was_cut_in_its_first_line_begins_anew(tmp_path):
    for text in ("", '{"isthmus_tu'):
        path = tmp_path / "log"
        path.write_text(text)
        Log(path, {"goal": "x"}).close()
        assert path.read_text() == '{"isthmus_tune": 1, "goal": "x"}\n'


def test_the_file_is_one_that_serve_takes(tmp_path):
    settings = merged({"model": "m.gguf", "platform_option": {"kernels": "torch"}},
                      {"chunked_prefill_size": 128, "platform_option:threads": "4", "overlap": False})
    text = yaml_text(settings, ["a comment", "and: more"])
    (tmp_path / "x.yaml").write_text(text)
    assert yaml.safe_load(text) == {"model": "m.gguf", "chunked_prefill_size": 128, "overlap": False,
                                    "platform_option": {"kernels": "torch", "threads": "4"}}
    assert read_file(tmp_path / "x.yaml")["chunked_prefill_size"] in (128, "128")
    assert merged({"model": "m"}, {}) == {"model": "m"}
    (tmp_path / "y.yaml").write_text(yaml_text({"speculative": ("ngram", "tokens=4")}, ()))
    assert resolve({}, {}, tmp_path / "y.yaml").config.speculation.speculative == ("ngram", "tokens=4")
    (tmp_path / "y.yaml").write_text(yaml_text({"speculative": ()}, ()))
    assert resolve({}, {}, tmp_path / "y.yaml").config.speculation.speculative == ()


def test_trials_write_no_files_and_obey_no_variables(tmp_path):
    """Those of the server that the settings are for; and a variable would win over the values that are tried."""
    given = {name: "x" for name in tune.KEPT}
    settings = tune.trial_settings(given | {"model": "m", "chunked_prefill_size": 64}, {"chunked_prefill_size": 128})
    assert settings == {"model": "m", "chunked_prefill_size": 128}
    (tmp_path / "x.yaml").write_text(yaml_text(settings, ()))
    variables = {"ISTHMUS_CHUNKED_PREFILL_SIZE": "64", "ISTHMUS_DUMP_REQUESTS": "x", "ISTHMUS_API_KEY": "k"}
    quiet = resolve({}, variables | tune.quiet_environment(), tmp_path / "x.yaml").config
    assert (quiet.scheduler.chunked_prefill_size, quiet.server.dump_requests) == (128, None)
    assert quiet.server.api_key == "k", "the trials are asked with it"
    known = list_settings()
    assert not set(tune.KEPT) - known.keys() and all(
        value_of(Config(), known[name]) in (None, "temporary") for name in tune.KEPT)


def test_knobs_that_people_name():
    assert tune.read_knob("--max-running-requests=8, 16") == Knob("max_running_requests", (8, 16))
    assert tune.read_knob("platform_option:threads=1,2") == Knob("platform_option:threads", ("1", "2"))
    assert tune.read_knob("overlap=true,false").values == (True, False)
    drafts = tune.read_knob("speculative=off;ngram,tokens=2;ngram,tokens=4")
    assert drafts.values == ((), ("ngram", "tokens=2"), ("ngram", "tokens=4"))
    assert tune.shown_changes({"speculative": drafts.values[1], "overlap": True}) == (
        "speculative ngram,tokens=2, overlap True")
    assert tune.shown_changes({"speculative": []}) == "speculative off"
    for text, part in (("chunk", "at least two values"), ("overlap=true", "at least two values"),
                       ("chunked_prefil_size=1,2", "did you mean chunked_prefill_size"), ("api_key=a,b", "no setting"),
                       ("port=1,2", "keys, addresses and certificates stay"),
                       ("nope=1,2", "has this name; `isthmus serve --help` lists"),
                       ("chunked_prefill_size=1,x", "'x' is not a whole number")):
        with pytest.raises(ConfigError, match=part):
            tune.read_knob(text)


def test_without_knobs_what_there_is_is_tried_around_the_values_now():
    start = {"chunked_prefill_size": 300, "max_running_requests": 256, "itl_target": 0.0, "overlap": True,
             "schedule_policy": "lpm", "speculative": ("suffix",)}
    knobs = {knob.name: knob.values for knob in tune.default_knobs("null", start)}
    assert 300 in knobs["chunked_prefill_size"] and knobs["chunked_prefill_size"] == tuple(
        sorted(knobs["chunked_prefill_size"]))
    assert all(start[name] in values for name, values in knobs.items())


def test_the_default_beginning_is_among_the_default_values():
    start = tune._start(resolve({}, {}), [])
    for platform in ("cpu", "null", ""):
        assert all(start[knob.name] in knob.values for knob in tune.default_knobs(platform, start))


@pytest.mark.parametrize("words, part", [
    (("--minutes", "0"), "--minutes 0"), (("--gain", "1"), "--gain 1"), (("--goal", "speed"), "--goal speed"),
    (("--concurrency", "1,2"), "one load is tuned for"), (("--knob", "x=1,2"), "no setting that can be tuned"),
    (("--knob", "chunked_prefill_size=1,2"), "its value now, 512, is not among those"),
    (("-o", "/no/such/folder/x.yaml"), "no such folder"),
    (("-o", "x.trials"), "--state and --output are both x.trials")])
def test_mistakes_are_told(words, part, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["tune", *words]) == 2
    assert part in capsys.readouterr().err


@pytest.mark.slow
def test_real_servers_are_tried(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = str(tiny_llama_gguf(tmp_path / "tiny.gguf"))
    words = ("tune", model, "--platform", "null", "--platform-option", "delay_ms=5", "--requests", "32",
             "--concurrency", "16", "--prompt-tokens", "20", "--max-tokens", "20", "--max-running-requests", "2",
             "--minutes", "5", "--knob", "max_running_requests=2,16")
    assert main(words) == 0
    out = capsys.readouterr().out
    found = yaml.safe_load((tmp_path / "tuned.yaml").read_text())
    assert found["max_running_requests"] == 16 and found["model"] == model and "taken" in out
    assert found["platform_option"] == {"delay_ms": "5"}
    assert main(words) == 0 and "no neighbour is better" in capsys.readouterr().out
