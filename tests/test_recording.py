"""Step recordings: what is in the file, and that a rerun decides the same, or says where it does not."""
from __future__ import annotations

import itertools
import json
import os
import signal
import stat
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import numpy as np
import pytest
from isthmus.core.cache.eviction import EVICTION
from isthmus.core.config import (
    CacheSettings,
    Config,
    ModelSettings,
    PlatformSettings,
    SchedulerSettings,
    ServerSettings,
)
from isthmus.core.engine import EngineCore
from isthmus.core.errors import ConfigError
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.plan import StepResult
from isthmus.core.recording.entries import Commanded, Now, Planned, Result, Submitted, pack_result, unpack_result
from isthmus.core.recording.file import CHECK, HEAD, LENGTHS, MAGIC, Recording, RecordingError, RecordingFile
from isthmus.core.recording.recorder import TAIL
from isthmus.core.recording.rerun import against, bisect, rerun
from isthmus.core.scheduler.policy import POLICIES
from isthmus.core.scheduler.scheduler import Scheduler
from isthmus.platforms.null.platform import Platform as Null

from .checkpoints import tiny_llama_gguf
from .effort import SOON
from .serving import Serving
from .tiny import tiny_model

COST = 60  # seconds


def make(path, platform="null", options=(), memory="200KiB", eviction="lru", **settings) -> EngineCore:
    settings = {"max_running_requests": 4, "chunked_prefill_size": 32, "max_queued_requests": 6} | settings
    return EngineCore(Config(
        model=ModelSettings(str(tiny_model("llama3"))),
        cache=CacheSettings(kv_cache_memory=memory, eviction_policy=eviction),
        platform=PlatformSettings(platform, options), server=ServerSettings(api_key="a secret of somebody"),
        scheduler=SchedulerSettings(record=path and str(path), **settings)))


def load(engine: EngineCore, requests: int = 30, seed: int = 0) -> None:
    """Random requests with shared prefixes, aborts, commands and refusals; then all of them end."""
    rng = np.random.default_rng(seed)
    for i in range(requests):
        shared, own = np.arange(rng.integers(1, 60)) % 100, rng.integers(5, 100, rng.integers(1, 80))
        params = SamplingParams(max_tokens=int(rng.integers(0, 20)), temperature=1.0, seed=i,
                                logprobs=2 if i % 5 == 0 else None, prompt_logprobs=1 if i % 9 == 0 else None)
        try:
            engine.submit(Submit(f"r{i}", pack_ids(np.concatenate([shared, own])), params, tenant=f"t{i % 3}"))
        except ValueError:
            assert engine.scheduler.waiting >= 6 or i == 12
        engine.step()
        if i % 7 == 3:
            engine.abort([f"r{i - 1}", "unknown"])
        if i == 12:
            with pytest.raises(ValueError):
                engine.submit(Submit("bad", pack_ids([999]), params))
            with pytest.raises(ValueError):
                engine.command("unknown")
            engine.command("flush_cache")
            engine.command("ping")
    while engine.has_work:
        engine.step()


def record(path, **settings) -> dict:
    engine = make(path, **settings)
    load(engine)
    engine.close()
    return engine.stats()


def entries(path) -> list:
    with Recording(path) as recording:
        return list(recording.entries())


DECIDED = ("requests", "cached_tokens", "generated_tokens", "preemptions", "evicted_pages", "finish_reasons", "steps",
           "pages_free", "queue_seconds", "reprefill_tokens")


PAIRS = list(itertools.zip_longest(POLICIES, EVICTION, fillvalue="lru"))


@pytest.mark.parametrize("policy, eviction", PAIRS)
def test_every_policy_decides_the_same_again(tmp_path, policy, eviction):
    """Also in another process, where Python hashes texts otherwise."""
    engine = make(tmp_path / "a", eviction=eviction, schedule_policy=policy if policy in POLICIES else "lpm")
    load(engine, 120, 3)
    engine.close()
    assert engine.info.eviction_policy == eviction
    done = subprocess.run([sys.executable, "-m", "isthmus", "rerun", str(tmp_path / "a"), "--json"],
                          capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    stats, again = engine.stats(), json.loads(done.stdout)["stats"]
    assert {name: again[name] for name in DECIDED} == {name: stats[name] for name in DECIDED}
    assert stats["evicted_pages"] > 50


@pytest.mark.parametrize("overlap", [True, False])
def test_a_rerun_decides_what_was_decided(tmp_path, overlap):
    stats = record(tmp_path / "a", overlap=overlap)
    outcome = rerun(tmp_path / "a", looks=bool)
    assert not outcome.broken and not outcome.cut
    assert {name: outcome.stats[name] for name in DECIDED} == {name: stats[name] for name in DECIDED}
    assert outcome.steps > 60 and stats["evicted_pages"] > 10 and stats["cached_tokens"] > 100


def test_a_recording_of_another_platform_is_run_on_the_null_platform(tmp_path):
    stats = record(tmp_path / "a", platform="reference", memory="800KiB")
    outcome = rerun(tmp_path / "a")
    assert not outcome.broken
    assert {name: outcome.stats[name] for name in DECIDED} == {name: stats[name] for name in DECIDED}


def test_failures_and_memory_that_runs_short_are_inputs_too(tmp_path, monkeypatch):
    plain, failing = Null._checked, [False]

    def run(self, *given):
        if failing[0]:
            failing[0] = False
            raise RuntimeError("out of memory")
        return plain(self, *given)
    monkeypatch.setattr(Null, "_checked", run)
    engine = make(tmp_path / "a")
    for i in range(3):
        engine.submit(Submit(f"r{i}", pack_ids([5, 6, 7 + i]), SamplingParams(max_tokens=9)))
    engine.step()
    failing[0] = True
    ended = []
    while engine.has_work:
        ended += [o for o in engine.step() if o.finish]
    assert {o.finish for o in ended} == {"error"}
    load(engine, 10)
    engine.close()
    outcome = rerun(tmp_path / "a", looks=bool)
    assert not outcome.broken and outcome.stats["finish_reasons"]["error"] == 3


def test_the_file_is_its_owners_and_holds_no_secret(tmp_path):
    record(tmp_path / "a")
    assert stat.S_IMODE(os.stat(tmp_path / "a").st_mode) == 0o600
    data = (tmp_path / "a").read_bytes()
    assert data.startswith(MAGIC) and b"a secret of somebody" not in data
    found = entries(tmp_path / "a")
    assert isinstance(found[0], Submitted) and found[0].request.id == "warm-up"
    assert sum(isinstance(e, Planned) for e in found) == sum(isinstance(e, Result) for e in found) > 60
    assert all(isinstance(e, Now) and e.at > 0 for e in found if isinstance(e, Now))


def test_results_come_back_bit_for_bit():
    rng = np.random.default_rng(1)
    result = StepResult(rng.integers(0, 99, 5, np.int32), rng.random(5, np.float32),
                        rng.integers(0, 99, (5, 3), np.int32), rng.random((5, 3), np.float32))
    back = unpack_result(pack_result(result))
    assert all(a.shape == b.shape and (a == b).all() and a.dtype == b.dtype for a, b in zip(result, back, strict=True))
    none = unpack_result(pack_result(StepResult(result.tokens, result.logprobs, *(np.zeros((5, 0), t)
                                                for t in (np.int32, np.float32)))))
    assert none.top_ids.shape == none.top_logprobs.shape == (5, 0)


def test_a_line_for_people_counts_the_rows_that_decode(tmp_path):
    engine = make(tmp_path / "a")
    for i in range(3):
        engine.submit(Submit(f"r{i}", pack_ids([5, 6, 7 + i]), SamplingParams(max_tokens=8, ignore_eos=True)))
    while engine.has_work:
        engine.step()
    engine.close()
    assert any(": 3 decode, 0 chunks " in str(entry) for entry in entries(tmp_path / "a"))


def test_the_first_difference_is_named(tmp_path, monkeypatch):
    record(tmp_path / "a")
    plain = Scheduler.plan

    def plan(self, now):
        if self._step == 40:
            self.cache.flush()
        return plain(self, now)
    monkeypatch.setattr(Scheduler, "plan", plan)
    outcome = rerun(tmp_path / "a")
    assert outcome.broken and outcome.step >= 41 and "differs: recorded" in outcome.broken
    assert not rerun(tmp_path / "a", until=40).broken


def test_a_difference_within_a_command_names_it(tmp_path, monkeypatch):
    record(tmp_path / "a")
    ping = EngineCore._ping
    monkeypatch.setattr(EngineCore, "_ping", lambda self: (ping(self), self.recorder.now())[0])
    outcome = rerun(tmp_path / "a")
    assert outcome.broken.startswith("in `command ping`: recorded is `")
    assert outcome.broken.endswith("`, the engine now asks for the clock")


def test_bisection_finds_the_step_that_breaks_the_ledger(tmp_path, monkeypatch):
    plain, at = Scheduler.settle, 70

    def settle(self, plan, result):
        outputs = plain(self, plan, result)
        if plan.step == at:
            self.cache.pool.owner[self.cache.pool._free[0]] = 3  # a page that nobody gave to slot 3
        return outputs
    monkeypatch.setattr(Scheduler, "settle", settle)
    record(tmp_path / "a")
    outcome = bisect(tmp_path / "a")
    # With overlap the next step is launched before this one is settled.
    assert outcome.step == at + 1 and "the ledger says request in slot 3" in outcome.broken
    monkeypatch.undo()
    assert rerun(tmp_path / "a").step > at, "sound code decides otherwise, once the damage counts"
    record(tmp_path / "b")
    assert not bisect(tmp_path / "b").broken


def test_two_recordings_are_compared(tmp_path, monkeypatch):
    record(tmp_path / "a")
    record(tmp_path / "b")
    same = against(tmp_path / "a", tmp_path / "b")
    assert not same.broken and same.steps > 60, "times do not count"
    record(tmp_path / "c", options=("vocab=131",), chunked_prefill_size=16)
    other = against(tmp_path / "a", tmp_path / "c")
    assert "sizes" in other.broken
    plain, steps = Null._checked, [0]

    def run(self, *given):
        steps[0] += 1
        result = plain(self, *given)
        return result._replace(tokens=(result.tokens + 1) % 131) if steps[0] == 50 else result
    monkeypatch.setattr(Null, "_checked", run)
    record(tmp_path / "d")
    other = against(tmp_path / "a", tmp_path / "d")
    assert "tokens of `result` differs" in other.broken and 40 < other.step <= 50


def test_a_recording_ends_at_its_limit_and_serving_goes_on(tmp_path, caplog):
    engine = make(tmp_path / "a", record_limit="64KiB")
    for seed in range(4):
        load(engine, 30, seed)
    engine.close()
    assert 50_000 < (tmp_path / "a").stat().st_size <= 65536 and engine.stats()["requests"] > 50
    assert sum("--record-limit" in r.message for r in caplog.records) == 1
    assert not rerun(tmp_path / "a").broken


def test_earlier_recordings_are_kept_and_only_so_many(tmp_path):
    for _ in range(7):
        RecordingFile(tmp_path / "a", "header", 10**6).close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "a.1", "a.2", "a.3", "a.4"]
    with pytest.raises(ConfigError, match="--record .*: no such file or directory"):
        make(tmp_path / "none" / "a")


def test_only_regular_files_are_moved(tmp_path):
    """A folder, a device, a pipe or a link is left where it is, also under the names of earlier recordings."""
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    (tmp_path / "gone").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_bytes(MAGIC)
    (tmp_path / "file.1").mkdir()
    (tmp_path / "model").write_text("GGUF")
    (tmp_path / "old").write_bytes(b"isthmus recording 1\n")
    (tmp_path / "old.1").touch()
    (tmp_path / "old.2").write_text("x")
    before = sorted(p.name for p in tmp_path.iterdir())
    for name, words in (("folder", "folder is a folder"), ("pipe", "pipe is a named pipe"),
                        ("link", "link is a symbolic link"), ("gone", "gone is a symbolic link"),
                        ("file", "file.1, a name of earlier recordings, is a folder"),
                        ("model", "model is a file that is no recording"), ("file/x", "not a directory"),
                        ("old", "old.2, a name of earlier recordings, is a file that is no recording"),
                        ("", "is a folder"), ("..", "is a folder")):
        with pytest.raises(ConfigError, match=f"--record .*{words}"):
            RecordingFile(tmp_path / name, "header", 10**6)
        with pytest.raises(ConfigError, match=f"--record .*{words}"):
            make(tmp_path / name)
    with pytest.raises(ConfigError, match="--record /dev/null is a device"):
        RecordingFile(Path("/dev/null"), "header", 10**6)
    assert sorted(p.name for p in tmp_path.iterdir()) == before and stat.S_ISCHR(os.stat("/dev/null").st_mode)


def test_the_recording_of_a_running_engine_is_not_moved(tmp_path):
    first = RecordingFile(tmp_path / "a", "header", 10**6)
    with pytest.raises(ConfigError, match="--record .*a is the recording of a server that is running"):
        RecordingFile(tmp_path / "a", "header", 10**6)
    first.close()
    RecordingFile(tmp_path / "a", "header", 10**6).close()
    assert (tmp_path / "a.1").exists()


def test_what_is_no_place_for_a_recording_is_told_before_the_model_loads(monkeypatch, tmp_path):
    monkeypatch.setattr("isthmus.core.startup.load", lambda *_: pytest.fail("it loads"))
    with pytest.raises(ConfigError, match="is a folder"):
        make(tmp_path)


def test_what_is_cut_off_is_told_and_what_is_broken_is_refused(tmp_path):
    record(tmp_path / "a")
    data = (tmp_path / "a").read_bytes()
    (tmp_path / "b").write_bytes(data[:-9])
    outcome = rerun(tmp_path / "b")
    assert outcome.cut and not outcome.broken
    with Recording(tmp_path / "a") as recording:
        first = recording._file.tell()
    (tmp_path / "b").write_bytes(data[:first + 90])
    outcome = rerun(tmp_path / "b")
    assert outcome.cut and not outcome.broken and outcome.stats is None, "within the warm-up"
    for at in (len(data) // 2, len(MAGIC) + HEAD + 3):
        bad = bytearray(data)
        bad[at] ^= 1
        (tmp_path / "c").write_bytes(bad)
        with pytest.raises(RecordingError, match="is broken at byte"):
            rerun(tmp_path / "c")
    huge = LENGTHS.pack(2**31, 0)
    (tmp_path / "d").write_bytes(data[:len(MAGIC)] + huge + CHECK.pack(zlib.crc32(huge)))
    with pytest.raises(RecordingError, match="2147483648 bytes"):
        rerun(tmp_path / "d")
    for content, words in ((b"", "is empty"),
                           (b"something else", "is no recording, which begins with the words 'isthmus recording': "),
                            (MAGIC[:-1], "is no recording"),
                           (data[:len(MAGIC) + 4], "ends before its first step")):
        (tmp_path / "e").write_bytes(content)
        with pytest.raises(RecordingError, match=words):
            rerun(tmp_path / "e")
    (tmp_path / "e").write_bytes(data.replace(MAGIC, b"isthmus recording 1\n"))
    with pytest.raises(RecordingError, match="of form 1, this version of Isthmus reads form 2"):
        rerun(tmp_path / "e")


def test_no_flipped_bit_passes(tmp_path):
    """Wherever it is: in a payload, a checksum, or a length, which would look as if the process had ended there."""
    file = RecordingFile(tmp_path / "a", "no header", 10**6)
    for i in range(3):
        file.write([Commanded("ping", {"n": float(i)})])
    file.close()
    data = (tmp_path / "a").read_bytes()

    def read(content: bytes) -> list:
        (tmp_path / "b").write_bytes(content)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Recording, "_decode", lambda self, data, kind, decoder=None: [data])
            with Recording(tmp_path / "b") as recording:
                return [*recording.entries(), recording.cut]
    assert len(read(data)) == 4 and not read(data)[-1]
    for bit in range(8 * len(data)):
        bad = bytearray(data)
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(RecordingError, match="is broken at byte" if bit >= 8 * len(MAGIC) else "recording"):
            read(bytes(bad))
    starts = [i for i in range(len(data)) if data[i + HEAD:].startswith(b"\x91")]
    for size in range(starts[-1] + 1, len(data)):
        assert read(data[:size])[-1], "the last frame is cut off"


@pytest.mark.parametrize("change", [
    *({"sizes": {name: value}} for name in ("page_size", "pages", "max_model_len", "max_running", "chunk")
      for value in (0, -1, 2**40)), {"config": {"cache": 5}}, {"model": {"vocab_size": -1}}, {"weight_bytes": "x"}])
def test_a_header_that_no_engine_has_is_told(tmp_path, change):
    record(tmp_path / "a")
    with Recording(tmp_path / "a") as recording:
        header = msgspec.to_builtins(recording.header)
    for name, value in change.items():
        header[name] = header[name] | value if isinstance(value, dict) else value
    file = RecordingFile(tmp_path / "b", header, 10**7)
    file.write(entries(tmp_path / "a"))
    file.close()
    with pytest.raises(RecordingError, match="is broken"):
        rerun(tmp_path / "b")


def test_pipes_and_devices_are_no_recordings(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    for path, words in ((tmp_path / "pipe", "a named pipe"), (tmp_path, "a folder"), (Path("/dev/null"), "a device")):
        with pytest.raises(RecordingError, match=f"it is {words}, no regular file"):
            rerun(path)


def test_what_an_idle_engine_did_is_in_the_file(tmp_path):
    """Nothing is held back once there is nothing to do, and what another thread writes is whole."""
    engine = make(tmp_path / "a")
    load(engine)
    engine.save()
    outcome = rerun(tmp_path / "a")
    assert not outcome.cut and outcome.stats["running"] == 0
    assert outcome.stats["generated_tokens"] == engine.stats()["generated_tokens"]
    engine.close()


def test_the_tail_is_bounded_and_shows_nothing_private():
    engine = make(None)
    load(engine)
    secret = Submit("private", pack_ids([77] * 20), SamplingParams(max_tokens=2))
    engine.submit(secret)
    while engine.has_work:
        engine.step()
    text = engine.recorder.tail(60)
    assert "submit private: 20 prompt tokens, at most 2 more" in text and "77, 77" not in text and "\\x00" not in text
    assert "launch " in text and "result of 1 rows" in text and " s  step" in text
    assert len(engine.recorder._tail) <= TAIL and len(text.splitlines()) <= 61


def test_the_command_tells_what_it_found(tmp_path, monkeypatch):
    record(tmp_path / "a")

    def ask(*words):
        return subprocess.run([sys.executable, "-m", "isthmus", "rerun", *map(str, words)], capture_output=True,
                              text=True)
    done = ask(tmp_path / "a", "--verify")
    assert done.returncode == 0 and done.stdout.startswith("as recorded: ") and "pages_free" in done.stdout
    steps = int(done.stdout.split()[2])
    assert f"; the ledger of pages held, proved after {steps - 3} steps\n" in done.stdout, "all but the warm-up's"
    done = ask(tmp_path / "a", "--until", 20, "--json")
    assert json.loads(done.stdout)["steps"] == 20 and json.loads(done.stdout)["proved"] == 0
    assert ask(tmp_path / "a", "--until", steps).returncode == 0
    done = ask(tmp_path / "a", "--until", steps + 1)
    assert done.returncode == 2 and f"--until {steps + 1}: {tmp_path / 'a'} ends at step {steps}\n" in done.stderr
    done = ask(tmp_path / "a", "--bisect", "--fast")
    assert done.returncode == 0 and "; the ledger of pages held, proved after " in done.stdout
    done = ask(tmp_path / "a", "--against", tmp_path / "a")
    assert done.returncode == 0 and "no difference" in done.stdout and "ledger" not in done.stdout
    assert ask(tmp_path / "a", "--against", tmp_path / "a", "--verify").returncode == 2
    done = ask(tmp_path / "missing")
    assert done.returncode == 2 and "no such file" in done.stderr
    assert ask(tmp_path / "a", "--bisect", "--verify").returncode == 2


@pytest.mark.parametrize("form", ["three processes", "one process"])
def test_a_server_that_is_stopped_leaves_a_complete_recording(tmp_path, form):
    """SIGTERM as soon as the last answer is there."""
    words = [str(tiny_llama_gguf(tmp_path / "tiny.gguf")), "--record", str(tmp_path / "a")]
    words += ["--in-process"] if form == "one process" else []
    with Serving(*words, temporary=tmp_path, delay_ms=1) as server:
        for _ in range(3):
            answer = server.ask("POST", "/v1/completions", {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True})
            assert json.loads(answer.read())["usage"]["completion_tokens"] == 100
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(SOON) == 0
    outcome = rerun(tmp_path / "a")
    assert not outcome.broken and not outcome.cut
    assert outcome.stats["generated_tokens"] == 300 and outcome.stats["running"] == 0


def test_a_server_leaves_what_is_no_regular_file_alone(tmp_path):
    (tmp_path / "data").mkdir()
    model = str(tiny_llama_gguf(tmp_path / "tiny.gguf"))
    done = subprocess.run([sys.executable, "-m", "isthmus", "serve", model, "--platform", "null", "--port", "0",
                           "--record", str(tmp_path / "data")], capture_output=True, text=True, timeout=SOON)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert f"--record {tmp_path / 'data'} is a folder" in done.stderr.splitlines()[-1]
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "tiny.gguf"]
