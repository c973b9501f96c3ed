"""The fuzzer finds what it is to find, and nothing in its first cases; a night has an hour of each (tests/fuzz.py)."""
from __future__ import annotations

import time
from contextlib import contextmanager

import pytest

from . import fuzz

COST = 12  # seconds


@pytest.mark.parametrize("what", sorted(fuzz.TARGETS))
def test_the_first_cases(what):
    found = fuzz.fuzz(what, seed=0, seconds=60, most=40)
    assert found["cases"] == 40


def failing(case):
    @contextmanager
    def target():
        yield case
    return target


def test_a_fault_is_told_with_its_case(monkeypatch, capsys):
    def case(rng):
        if rng.random() < 0.2:
            raise KeyError("x")
    monkeypatch.setitem(fuzz.TARGETS, "gguf", failing(case))
    assert fuzz.main(["--what", "gguf", "--seed", "4"]) == 1
    said = capsys.readouterr().out
    assert said.startswith("gguf --seed 4 --only ") and "KeyError" in said
    number = said.split()[4].rstrip(":")
    assert fuzz.main(["--what", "gguf", "--seed", "4", "--only", number]) == 1


def test_what_computes_for_long_and_what_grows_are_faults(monkeypatch):
    def slow(rng):
        end = time.process_time() + 0.05
        while time.process_time() < end:
            pass
    monkeypatch.setattr(fuzz, "COMPUTES", 0.02)
    monkeypatch.setitem(fuzz.TARGETS, "gguf", failing(slow))
    with pytest.raises(fuzz.Fault, match="computed for"):
        fuzz.fuzz("gguf", 0, 9)
    kept = []
    monkeypatch.setattr(fuzz, "GROWS", 1 << 20)
    monkeypatch.setattr(fuzz.gc, "collect", lambda: 0)  # of all that other tests have left it takes long
    grow = failing(lambda rng: (time.sleep(0.002), kept.append(bytearray(b"x" * 400_000))))
    monkeypatch.setitem(fuzz.TARGETS, "gguf", grow)
    with pytest.raises(fuzz.Fault, match="MiB more"):
        fuzz.fuzz("gguf", 0, 1)
