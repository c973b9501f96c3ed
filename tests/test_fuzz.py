"""The fuzzer finds what it is to find, and nothing in its first cases; a night has an hour of each (tests/fuzz.py)."""
from __future__ import annotations

import time
from contextlib import contextmanager
from itertools import count
from types import SimpleNamespace

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
    kept, clock = [], count()
    monkeypatch.setattr(fuzz, "GROWS", 1 << 20)
    monkeypatch.setattr(fuzz, "memory", lambda: sum(map(len, kept)))
    monkeypatch.setattr(fuzz, "time", SimpleNamespace(monotonic=lambda: next(clock), process_time=lambda: 0))
    monkeypatch.setitem(fuzz.TARGETS, "gguf", failing(lambda rng: kept.append(bytes(400_000))))
    with pytest.raises(fuzz.Fault, match="MiB more"):
        fuzz.fuzz("gguf", 0, 30)


def test_memory_that_is_kept_counts():
    before = fuzz.memory()
    kept = bytearray(1 << 30)
    assert fuzz.memory() - before > len(kept) // 2
