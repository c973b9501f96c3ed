"""Replay: what is out of range is refused by its name before anything is run."""
from __future__ import annotations

import json
from dataclasses import replace

import pytest
from isthmus.core.cli.main import main
from isthmus.core.errors import ConfigError
from isthmus.core.replay.formats import read_trace
from isthmus.core.replay.latency import LatencyModel, read_latency_model
from isthmus.core.replay.served import MAX_LENGTH, check_lengths
from isthmus.core.replay.trace import TraceError, make_trace

COST = 5  # seconds


@pytest.mark.parametrize(("row", "words"), [
    ({"input_length": 512, "output_length": 2**31 - 1, "hash_ids": [1]}, "an output of 2147483647"),
    ({"input_tokens": 2**31 - 1, "block": 2**31 - 1, "blocks": [1]}, "a prompt of 2147483647"),
    ({"input_tokens": 1, "output_tokens": MAX_LENGTH, "blocks": []}, f"than the {MAX_LENGTH} together")])
def test_a_request_that_no_scheduler_has_a_place_for_is_named(capsys, tmp_path, row, words):
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps(row | {"timestamp": 1000}) + "\n" + json.dumps(
        row | {"timestamp": 0, "input_length": 1, "input_tokens": 1, "output_length": 1, "output_tokens": 1,
               "blocks": [], "hash_ids": [2]}))
    flags = ["--block-tokens", "512"] if "hash_ids" in row else []
    assert main(["replay", str(file), "--policy", "lru", "--latency", "cpu", *flags]) == 2
    said = capsys.readouterr().err
    assert "request 2 by arrival" in said and words in said and len(said.splitlines()) == 1
    assert main(["replay", str(file), "--policy", "lru", *flags]) == 0, "hit rates need no places"


def test_places_are_of_all_that_run_at_once():
    trace = make_trace("t", 4, [(0.0, 4, 100_000, "", "a", False)])
    model = LatencyModel(100.0, 1000.0)
    check_lengths(trace, model)
    with pytest.raises(TraceError, match=r"than the 32767 together that --latency runs with max_running 65536"):
        check_lengths(trace, replace(model, max_running=2**16))


@pytest.mark.parametrize(("row", "words"), [
    ({"input_length": -16, "hash_ids": [1]}, "request 1: its input is -16, no number from 0"),
    ({"input_length": 10**20, "hash_ids": [1]}, "its input is 100000000000000000000"),
    ({"input_length": "x", "hash_ids": [1]}, "its input is 'x'"),
    ({"tokens": [1, 2**63]}, "its tokens go from 1 to 9223372036854775808, from 0 to"),
    ({"tokens": [-1, 5]}, "its tokens go from -1 to 5")])
def test_a_number_out_of_range_is_named(tmp_path, row, words):
    file = tmp_path / "t.jsonl"
    file.write_text(json.dumps({"timestamp": 0, "output_length": 1} | row))
    with pytest.raises(TraceError, match=words):
        read_trace(file)


@pytest.mark.parametrize(("line", "words"), [
    ("max_running: 0.5", "max_running is 0.5, no number above 0"), ("chunk: 0", "chunk is 0, no number above 0"),
    ("max_running: 1000000", "max_running is 1000000, at most 65536 is possible"),
    ("chunk: 99999999999", "chunk is 99999999999, at most")])
def test_a_latency_model_that_takes_too_much_is_refused(tmp_path, line, words):
    file = tmp_path / "mine.yaml"
    file.write_text(f"prefill_tokens_per_s: 1\nstep_ms: 8\n{line}\n")
    with pytest.raises(ConfigError, match=words):
        read_latency_model(str(file))


@pytest.mark.parametrize("names", ["", ","])
def test_no_policy_is_none_to_run(capsys, names):
    assert main(["replay", "t.jsonl", "--policy", names]) == 2
    assert "--policy names none" in capsys.readouterr().err
