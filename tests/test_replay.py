"""Replay of traces: formats, small traces by hand, the peers, the optimum as a bound, latency by hand, the command."""
from __future__ import annotations

import gzip
import json
import os
import struct
import sys
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.core.cache.eviction import EVICTION
from isthmus.core.cli.main import main
from isthmus.core.errors import ConfigError
from isthmus.core.recording.file import MAGIC
from isthmus.core.replay.cached import cached_blocks
from isthmus.core.replay.formats import read_trace, write_binary, write_jsonl
from isthmus.core.replay.latency import LATENCY_MODELS, LatencyModel, read_latency_model
from isthmus.core.replay.peers import PEERS
from isthmus.core.replay.run import COMPARED, Capacity, Order, hinted, replay
from isthmus.core.replay.served import serve
from isthmus.core.replay.trace import Trace, TraceError, _chained, _numbered, make_trace

COST = 15  # seconds
HERE = Path(__file__).parent / "traces"
AZURE = b"TIMESTAMP,ContextTokens,GeneratedTokens\n"


def quiet(*_: object) -> None:
    pass


def trace_of(*prompts: str, block: int = 10, outputs: int = 1, every: float = 1.0) -> Trace:
    """A letter is a block; one request a second."""
    return make_trace("letters", block, ((i * every, len(p) * block, outputs, "", p, False)
                                         for i, p in enumerate(prompts)))


def found(trace: Trace, capacity: int, policy: str, ends: np.ndarray | None = None) -> list[int]:
    if policy in PEERS:
        return PEERS[policy](trace, capacity, quiet).tolist()
    ends = np.zeros(len(trace), bool) if ends is None else ends
    return cached_blocks(trace, capacity, quiet, policy, ends).tolist()


# ---- by hand

def test_a_small_trace_by_hand():
    """Four blocks of room. abc, then abd: c is one of four. xyz needs three and drops the two least recently used."""
    trace = trace_of("abc", "abd", "xyz", "abc", "xyz")
    # LRU by block: after abd: a b c d. xyz: c goes (used first), then d (the tail of abd), then b: a x y z.
    # abc: finds a; drops z, y: a b c x. xyz: finds x.
    assert found(trace, 4, "lru-block") == [0, 2, 0, 1, 1]
    assert found(trace, 4, "lru") == [0, 2, 0, 1, 1]
    # By leaf: abd split ab|c and d. xyz: leaf c, leaf d, leaf ab all go. abc: leaf xyz goes whole. xyz: all again.
    assert found(trace, 4, "lru-leaf") == [0, 2, 0, 0, 0]
    # The optimum never keeps d; c, a and b are used before x, y and z, of which one fits beside them.
    assert found(trace, 4, "optimal") == [0, 2, 0, 3, 1]


def test_a_request_that_does_not_fit_leaves_its_front():
    trace = trace_of("abcdef", "abcdef", "x", "abcdef")
    for policy in ("lru", "lru-block", "lru-leaf", "learned"):
        assert found(trace, 4, policy)[:2] == [0, 4], policy
    assert found(trace, 4, "lru-block") == [0, 4, 0, 3]
    assert found(trace, 4, "lru-leaf") == [0, 4, 0, 0]
    assert found(trace, 4, "optimal") == [0, 4, 0, 4]


def test_token_rates_by_hand():
    trace = make_trace("t", 10, [(0.0, 25, 1, "", "ab", False), (1.0, 25, 1, "", "ab", False),
                                 (2.0, 10, 1, "", "q", False)])
    report = replay(trace, Order(("lru", "optimal"), (Capacity(100, True), Capacity(20, False))), quiet)
    rates = {(r["policy"], r["capacity"]): r["token_hit_rate"] for r in report["results"]}
    assert rates == {key: pytest.approx(20 / 60) for key in (("lru", 100), ("lru", 20), ("optimal", 100),
                                                             ("optimal", 20))}
    assert [r["capacity_tokens"] for r in report["results"]] == [30, 30, 20, 20]
    assert report["working_set_tokens"] == 30 and report["input_tokens"] == 60
    assert report["token_hit_rate_of_endless_cache"] == pytest.approx(20 / 60)


def test_window_and_counter_differ_once_the_first_thousand_are_past():
    cold = [(float(i), 10, 1, "", f"{i}", False) for i in range(500)]
    warm = [(500.0 + i, 10, 1, "", "s", False) for i in range(1000)]
    trace = make_trace("t", 10, ((t, n, o, s, [ids], h) for t, n, o, s, ids, h in cold + warm))
    (result,) = replay(trace, Order(("lru",), (Capacity(100, True),)), quiet)["results"]
    assert result["token_hit_rate"] == pytest.approx(999 / 1500)
    assert result["token_hit_rate_window"] == pytest.approx(999 / 1000)
    assert result["token_hit_rate_second_half"] == 1.0


# ---- the peers and the bound

traces = st.lists(st.lists(st.sampled_from("ab"), min_size=0, max_size=7), min_size=1, max_size=40)


@given(traces, st.integers(1, 12))
@settings(max_examples=80, deadline=None)
def test_no_policy_beats_the_optimum_and_lru_is_lru(prompts, capacity):
    trace = trace_of(*map("".join, prompts))
    best = sum(found(trace, capacity, "optimal"))
    assert best == naive_optimum(trace, capacity)
    for policy in ("lru-leaf", "lru-block", *EVICTION):
        assert sum(found(trace, capacity, policy)) <= best, policy
    assert found(trace, capacity, "lru") == found(trace, capacity, "lru-block") == naive_lru(trace, capacity)


def naive_optimum(trace: Trace, capacity: int) -> int:
    """Block by block, looking ahead each time."""
    paths, inside, hits = [trace.request(i).tolist() for i in range(len(trace))], set(), 0
    for i, path in enumerate(paths):
        for block in path:
            if block not in inside:
                break
            hits += 1
        due = {b: next((j for j in range(i + 1, len(paths)) if b in paths[j]), None) for b in inside | set(path)}
        depth = {b: p.index(b) for p in paths for b in p}
        kept = sorted((due[b], depth[b], b) for b in due if due[b] is not None)
        inside = {b for *_, b in kept[:capacity]}
    return hits


def naive_lru(trace: Trace, capacity: int) -> list[int]:
    inside: dict[int, tuple[int, int]] = {}
    hits = []
    for i in range(len(trace)):
        path = trace.request(i).tolist()
        hits.append(next((k for k, b in enumerate(path) if b not in inside), len(path)))
        used = path[:hits[-1]]
        for block in path[hits[-1]:]:
            if len(inside) == capacity:
                free = [b for b in inside if b not in used]
                if not free:
                    break
                del inside[min(free, key=inside.__getitem__)]
            inside[block] = (i, 0)
            used.append(block)
        for depth, block in enumerate(used):
            inside[block] = (i, -depth)
    return hits


@given(traces)
@settings(max_examples=60, deadline=None)
def test_segments_cover_every_request(prompts):
    trace = trace_of(*map("".join, prompts))
    cut = trace.segments
    assert [sum(int(cut.weight[s]) for s in path) for path in cut.paths] == np.diff(trace.starts).tolist()
    assert int(cut.weight.sum()) == trace.unique


@given(st.lists(st.lists(st.integers(0, 5), max_size=5), min_size=1, max_size=12))
@settings(max_examples=100, deadline=None)
def test_blocks_are_numbered_alike_one_by_one_and_at_once(ids):
    starts = np.concatenate([[0], np.cumsum([len(part) for part in ids])])
    at_once = _numbered(ids, starts)
    one_by_one = _chained(ids, [""] * len(ids))
    behind = {}
    told_apart = all(behind.setdefault(i, part[:k][-1:]) == part[:k][-1:] for part in ids for k, i in enumerate(part))
    assert (at_once is not None) == told_apart
    if at_once is not None:
        assert at_once.tolist() == one_by_one.tolist()


def test_the_first_requests_alone():
    trace = read_trace(HERE / "chat.jsonl")
    head = trace.head(10)
    assert len(head) == 10 and head.blocks.tolist() == trace.blocks[:len(head.blocks)].tolist()
    assert head.unique < trace.unique and (head.arrival == trace.arrival[:10]).all()


# ---- hints

def test_hinted_requests_are_ends_that_nobody_asks_for_again():
    trace = trace_of("ab", "abc", "xy", "ab", "xyz")
    assert trace.dead_ends().tolist() == [False, True, False, True, True]
    assert hinted(trace, 0.0, 0).sum() == 0 and hinted(trace, 1.0, 0).tolist() == trace.dead_ends().tolist()
    many = trace_of(*[chr(300 + i) for i in range(400)])
    half = hinted(many, 0.5, 1)
    assert 150 < half.sum() < 250 and (half == hinted(many, 0.5, 1)).all() and (half != hinted(many, 0.5, 2)).any()


# ---- formats

def test_mooncake_lines():
    trace = read_trace(HERE / "chat.jsonl")
    lines = [json.loads(line) for line in (HERE / "chat.jsonl").read_text().splitlines()]
    assert trace.block == 512 and trace.inputs.tolist() == [line["input_length"] for line in lines]
    first = lines[0]["timestamp"]
    assert trace.arrival.tolist() == pytest.approx([(line["timestamp"] - first) / 1e3 for line in lines])
    whole = [line["input_length"] // 512 for line in lines]
    assert np.diff(trace.starts).tolist() == whole
    assert trace.unique == len({i for line, n in zip(lines, whole, strict=True) for i in line["hash_ids"][:n]})


def test_binary_and_what_is_wrong_with_it(tmp_path):
    trace = read_trace(HERE / "agent.bin")
    assert trace.block == 64 and len(trace) == 49 and trace.outputs.sum() == 0
    data = (HERE / "agent.bin").read_bytes()
    for bad, words in ((data[:-8], "ids follow"), (data[:10], "no header"), (data + b"\0" * 8, "ids follow"),
                       (struct.pack("<4i", 0x4B56, 2**31 - 1, 64, 1), "the header says"),
                       (struct.pack("<4i", 0x4B56, 1, 0, 1) + data[16:], "blocks of 0 tokens"),
                       (b"\xff\xfe\x00", "neither a binary trace"), (b"", "is empty"),
                       (gzip.compress(b"{}"), "packed by gzip: unpack it first"),
                       (MAGIC + b"\x93\xff", "a recording of an engine's steps, no trace of requests: isthmus rerun "),
                       (AZURE + b"1,2,x\n", "line 2: its GeneratedTokens is 'x', no number"),
                       (AZURE + b"1,,2\n", "line 2: its ContextTokens is '', no number"),
                       (AZURE + b"1,2\n", "line 2: its GeneratedTokens is None, no"),
                       (b"hello,world\n1,2\n", "TIMESTAMP")):
        (tmp_path / "bad").write_bytes(bad)
        with pytest.raises(TraceError, match=words):
            read_trace(tmp_path / "bad")
    with pytest.raises(TraceError, match="no such file"):
        read_trace(tmp_path / "none")


@pytest.mark.parametrize(("text", "form"), [
    ('{"timestamp": 0, "input_length": 600, "hash_ids": [1, 2]}', "blocks as Mooncake's traces have them"),
    ('{"timestamp": 0, "input_length": 20, "chat_id": 1, "hash_ids": [1, 2]}', "blocks as Qwen's traces have them"),
    ('{"t": 0, "blocks": [1], "block": 32}', "JSON lines of blocks"),
    ('{"t": 0, "prompt": "hello"}', "JSON lines of prompts"),
    ('{"turns": [["u", 80], ["a", 8]]}', "JSON lines of turns"),
    (AZURE.decode() + "1,2,3", "Azure CSV"),
    (None, "binary")])
def test_it_is_said_what_a_file_was_taken_for(tmp_path, capsys, text, form):
    file = tmp_path / "trace"
    file.write_bytes((HERE / "agent.bin").read_bytes() if text is None else text.encode())
    trace = read_trace(file)
    assert trace.form.endswith(form) and trace.head(1).form == trace.form
    assert main(["replay", str(file), "--policy", "lru", "--capacity", "50"]) == 0
    said = f"trace, {trace.form}, blocks of {trace.block} tokens: {len(trace)} requests"
    assert capsys.readouterr().out.startswith(said)


def test_a_block_counts_with_all_before_it(tmp_path):
    """Ids that name the text of one block only: the same id after another prefix is another block."""
    head = np.array([(0.0, 0, 8, 2), (1.0, 0, 8, 2), (2.0, 1, 8, 2)],
                    [("t", "<f8"), ("ns", "<i4"), ("in", "<i4"), ("n", "<i4")])
    ids = np.array([5, 6, 7, 6, 5, 6], "<i8")
    (tmp_path / "t").write_bytes(struct.pack("<4i", 0x4B56, 3, 4, 0) + head.tobytes() + ids.tobytes())
    assert read_trace(tmp_path / "t").unique == 6


def test_plain_lines_of_tokens_texts_and_blocks(tmp_path):
    file = tmp_path / "t.jsonl"
    tokens = list(range(40))
    file.write_text("\n".join(json.dumps(row) for row in (
        {"arrival": 2.5, "prompt": tokens, "output_tokens": 7, "ends": True},
        {"arrival": 1.0, "prompt": tokens[:32] + [99] * 20})))
    trace = read_trace(file)
    assert trace.block == 16 and trace.arrival.tolist() == [0.0, 1.5] and trace.inputs.tolist() == [52, 40]
    assert trace.hinted.tolist() == [False, True] and trace.outputs.tolist() == [1, 7]
    assert trace.request(0)[:2].tolist() == trace.request(1).tolist()
    file.write_text('{"t": 0, "text": "' + "x" * 64 + '"}\n{"t": 1, "text": "' + "x" * 70 + '"}')
    trace = read_trace(file, block=8)
    assert trace.inputs.tolist() == [16, 18] and trace.request(1).tolist() == trace.request(0).tolist()
    file.write_text('{"t": 0, "blocks": [4, 5], "block": 32}\n{"t": 1, "blocks": [4, 6], "input_tokens": 70}')
    trace = read_trace(file)
    assert trace.block == 32 and trace.inputs.tolist() == [64, 70] and trace.unique == 3


@pytest.mark.parametrize(("line", "words"), [
    ('{"t": 0', "line 1 is no JSON"), ('{"t": 0}', "request 1: it has no field prompt"), ('{"x": 1}', "no field"),
    ('{"t": 0, "prompt": [1]}\n[1]', "line 2 is no object"), ('{"t": "soon", "prompt": [1]}', "soon"),
    ('{"t": NaN, "prompt": [1]}', "the time is nan"), ('{"t": 0, "prompt": ["a"]}', "request 1"),
    ('{"timestamp": 0, "input_length": 99, "hash_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9]}', "--block-tokens"),
    ('{"t": 0, "prompt": [1], "max_tokens": -1}', "its output is -1"),
    ('{"t": 0, "prompt": [1], "max_tokens": 2.5}', "its output is 2.5"),
    ('{"t": 1e300, "prompt": [1]}', r"request 1: the time is 1e\+300 s, from -1e\+11"),
    ('{"t": 1' + "0" * 400 + ', "prompt": [1]}', "request 1: int too large"),
    ('{"t": 0, "prompt": [1], "ends": "false"}', "request 1: its ends is 'false', neither true nor false"),
    ('{"t": 0, "blocks": [1], "ends": 1}', "request 1: its ends is 1, neither"),
    ('{"t": 0, "prompt": [1.5]}', "request 1: 1.5 is among its tokens"),
    ('{"t": 0, "prompt": [[1], [2]]}', r"request 1: \[1\] is among its tokens"),
    ('{"t": 0, "prompt": [18446744073709551616]}', "request 1: its tokens go from 18446744073709551616"),
    ('{"t": 0, "prompt": [4294967296]}', "request 1: its tokens go from 4294967296"),
    ('{"t": 0, "prompt": {"a": 1}}', "request 1: its tokens are {'a': 1}, no list"),
    ('{"t": 0, "prompt": [1], "block": 0}', "request 1: its block is 0, no number of tokens above 0"),
    ('{"t": 0, "prompt": [1], "block": 16}\n{"t": 0, "prompt": [1], "block": 2.0}', "request 2: its block is 2.0, no"),
    ('{"t": 0, "blocks": [1], "block": 16}\n{"t": 0, "blocks": [1], "block": 32}',
     "request 2: its block is 32, that of the first request 16"),
    ('{"t": 0, "prompt": [1]}\n{"t": 0, "prompt": [1], "block": 32}', "request 2: .* first request not said"),
    ('{"t": 0, "blocks": [1, 2], "block": 16, "input_tokens": 2147483647}',
     "request 1: 2 blocks of 16 tokens are not what a prompt of 2147483647 tokens has"),
    ('{"t": 0, "blocks": [1, 2], "block": 16, "input_tokens": 2147483648}', "request 1: its input is 2147483648"),
    ('{"t": 0, "blocks": [1, 2, 3], "block": 16, "input_tokens": 20}', "request 1: 3 blocks .* more than a prompt"),
    ('{"t": 0, "blocks": 5, "block": 16}', "request 1: its blocks are 5, no list"),
    ('{"t": 0, "blocks": [[1]], "block": 16}', r"request 1: \[1\] is among its blocks"),
    ('{"timestamp": 0, "input_length": "x", "hash_ids": [1]}', "request 1: its input is 'x'"),
    ("[" * 9 + '{"t": 0', "neither JSON lines"), ('{"t": ' + "[" * 200_000, "line 1 is no JSON"),
    ('{"turns": [["u", 1e12], ["a", 3]]}', r"conversation 1: the length of turn 1 is 1000000000000.0, no number"),
    ('{"turns": [["u", 5]]}\n{"turns": [["u", -5], ["a", 3]]}', "conversation 2: the length of turn 1 is -5"),
    ('{"turns": [["u", 5], ["a", 1e30]]}', "conversation 1: the length of turn 2 is 1e"),
    ('{"turns": [["u", 1000000000000]]}', "conversation 1: the length of turn 1 is 1000000000000"),
    ('{"turns": [' + ", ".join(['["u", 2147483647]'] * 5) + "]}", "conversation 1: up to turn 5 it has 2684354559 tok"),
    ('{"turns": [["u", true]]}', "conversation 1: the length of turn 1 is True"),
    ('{"turns": [["u"]]}', r"conversation 1: turn 1 is \['u'\]"), ('{"turns": [5]}', "conversation 1: 5 is among its"),
    ('{"turns": 5}', "conversation 1: its turns are 5, no list"),
    ('{"turns": []}\n{"t": 0}', "conversation 2: it has no field turns"),
    ("\n".join(['{"turns": [["u", 2147483647]]}'] * 5), "request 5: more than 134,217,728 blocks"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n1,2,3\n1,99999999999,3", "line 3: its ContextTokens is 99999999999"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n1", "line 2"),
    ("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "9" * 30 + ",2,3", r"request 1: the time is 1e\+30"),
    ("TIMESTAMP," + "x" * 200_000, "line 1: field larger")])
def test_lines_that_are_wrong_are_named(tmp_path, line, words):
    (tmp_path / "t").write_text(line)
    with pytest.raises(TraceError, match=words) as caught:
        read_trace(tmp_path / "t")
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(("row", "words"), [
    ((1e300, 0, 8, 2), "request 1: the time"), ((0.0, 0, 8, 3), "request 1: 3 blocks"),
    ((0.0, 0, 99, 2), "request 1: 2 blocks"), ((float("nan"), 0, 8, 2), "request 1: the time is nan")])
def test_binary_rows_that_cannot_be_are_named(tmp_path, row, words):
    head = np.array([row], [("t", "<f8"), ("ns", "<i4"), ("in", "<i4"), ("n", "<i4")])
    (tmp_path / "t").write_bytes(struct.pack("<4i", 0x4B56, 1, 4, 0) + head.tobytes() + b"\0" * 8 * row[3])
    with pytest.raises(TraceError, match=words):
        read_trace(tmp_path / "t")


def test_a_text_may_hold_any_sign(tmp_path):
    """Only a line feed ends a row."""
    (tmp_path / "t").write_text('{"t": 0, "text": "a\u2028b\u0085c"}\r\n{"t": 1, "text": "d"}\r\n', "utf-8", newline="")
    assert len(read_trace(tmp_path / "t")) == 2


def test_what_is_no_regular_file_is_told(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for path, words in ((tmp_path / "pipe", "it is a named pipe, no regular file"), (tmp_path, "it is a folder"),
                        (Path("/dev/null"), "it is a device"), (tmp_path / "none", "there is no such file")):
        assert main(["replay", str(path)]) == 2
        said = capsys.readouterr().err
        assert f"isthmus: {path}: {words}" in said and len(said.splitlines()) == 1
    if Path("/proc/self/mem").exists():
        assert main(["replay", "/proc/self/mem"]) == 2


def test_azure_lengths(tmp_path):
    file = tmp_path / "t.csv"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:17:03.9799600,40,10\n"
                    "2023-11-16 18:17:05.0000000,33,8\n")
    trace = read_trace(file)
    assert trace.inputs.tolist() == [40, 33] and trace.outputs.tolist() == [10, 8] and trace.unique == 4
    assert trace.arrival.tolist() == pytest.approx([0.0, 1.02004], abs=1e-4)
    assert not trace.seen_before().any(), "nothing says that two prompts share anything"
    file.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\nyesterday,40,10\n")
    with pytest.raises(TraceError, match="line 2"):
        read_trace(file)


def test_turn_lengths_become_conversations(tmp_path):
    file = tmp_path / "t.jsonl"
    file.write_text('{"i": 0, "turns": [["u", 128, 2], ["a", 64, 9], ["u", 64, 1]]}\n'
                    '{"i": 1, "turns": [["u", 400, 3]]}\n')
    trace = read_trace(file, seed=1)
    assert sorted(trace.inputs.tolist()) == [32, 64, 100] and sorted(trace.outputs.tolist()) == [0, 0, 16]
    assert trace.seen_before().max() == 2
    assert (read_trace(file, seed=1).arrival == trace.arrival).all()
    assert (read_trace(file, seed=2).arrival != trace.arrival).any()


@pytest.mark.parametrize(("write", "name"), [(write_binary, "t.bin"), (write_jsonl, "t.jsonl")])
def test_what_is_written_is_read_again(tmp_path, write, name):
    trace = read_trace(HERE / "chat.jsonl")
    write(trace, tmp_path / name)
    again = read_trace(tmp_path / name)
    assert again.block == trace.block and again.unique == trace.unique
    assert again.arrival == pytest.approx(trace.arrival) and (again.inputs == trace.inputs).all()
    assert (again.blocks == trace.blocks).all() and (again.starts == trace.starts).all()
    assert (again.outputs == trace.outputs).all() == (name == "t.jsonl")


# ---- the scheduler and its clock

SLOW = LatencyModel(prefill_tokens_per_s=100.0, step_ms=1000.0, request_us=0.0, context_ns=0.0, max_running=2, chunk=64)


def test_latency_by_hand():
    """A second a step and 10 ms a prompt token. Ten tokens: 1.1 s to the first one; the other two 1.0 s each."""
    trace = make_trace("t", 10, [(0.0, 10, 3, "", "a", False), (10.0, 20, 2, "", "ab", False)])
    served = serve(trace, 100, quiet, "lru", np.zeros(2, bool), SLOW, "fcfs")
    assert served.ttft.tolist() == pytest.approx([1.1, 1.1])  # the second finds the first's block
    assert served.itl.tolist() == pytest.approx([1.0, 1.0, 1.0]) and served.tpot.tolist() == pytest.approx([1.0, 1.0])
    assert served.counters["hit_rate_total"] == pytest.approx(10 / 30) and served.seconds == pytest.approx(12.1)
    assert served.goodput(1.2, 1.5) == (pytest.approx(2 / 12.1), 1.0) and served.goodput(1.0, 1.5)[1] == 0.0
    assert served.goodput(1.2, 0.5)[1] == 0.0


def test_preempted_requests_are_counted_apart():
    """Memory for one of two long outputs: one is retracted, and finds its own pages when it comes again."""
    trace = make_trace("t", 4, [(0.0, 8, 24, "", "ab", False), (0.0, 8, 24, "", "cd", False)])
    served = serve(trace, 12, quiet, "lru", np.zeros(2, bool), SLOW, "fcfs")
    counted = served.counters
    assert counted["preemptions"] >= 1 and served.refused == 0
    assert counted["prompt_tokens"] == 16 and counted["cached_tokens"] == 0, "the first attempts found nothing"
    assert counted["reprefill_tokens"] > 8 and counted["reprefill_cached_tokens"] > 0
    assert counted["hit_rate_total"] == counted["hit_rate_window"] == 0.0
    naive = counted["reprefill_cached_tokens"] / (counted["prompt_tokens"] + counted["reprefill_tokens"])
    assert naive > 0.1, "counted together, retractions would pass for hits"


def test_a_request_larger_than_memory_is_refused_and_counted():
    trace = make_trace("t", 4, [(0.0, 40, 2, "", "abcdefghij", False), (1.0, 4, 2, "", "x", False)])
    served = serve(trace, 5, quiet, "lru", np.zeros(2, bool), SLOW, "fcfs")
    assert served.refused == 1 and np.isnan(served.ttft[0]) and served.ttft[1] > 0


def test_latency_models(tmp_path):
    assert read_latency_model("h200") is LATENCY_MODELS["h200"]
    file = tmp_path / "mine.yaml"
    file.write_text("prefill_tokens_per_s: 5000\nstep_ms: 8\nmax_running: 32\n")
    assert read_latency_model(str(file)) == LatencyModel(5000.0, 8.0, max_running=32)
    for text, words in (("step_ms: 8", "must give"), ("prefill_tokens_per_s: 1\nstep_ms: 8\nchunks: 2", "mean chunk"),
                        ("prefill_tokens_per_s: 0\nstep_ms: 8", "no number above 0"), ("{", "mine.yaml")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=words):
            read_latency_model(str(file))
    with pytest.raises(ConfigError, match="mean h200"):
        read_latency_model("h20")


# ---- the command

def test_the_command_prints_json(capsys):
    assert main(["replay", str(HERE / "chat.jsonl"), "--capacity", "5,25,20480", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {(r["policy"], r["capacity"]): r["token_hit_rate"] for r in report["results"]}
    assert set(rows) == {(p, c) for p in COMPARED for c in (5, 25, 20480)}
    assert all(rows["optimal", c] >= rows[p, c] for p, c in rows) and rows["optimal", 25] > 0.1


def test_the_command_prints_a_table_and_serves(capsys, tmp_path):
    page = tmp_path / "hits.html"
    code = main(["replay", str(HERE / "chat.jsonl"), "--policy", "default,lru-block", "--capacity", "25",
                 "--latency", "h200", "--hint-endings", "0.5", "--plot", str(page)])
    text = capsys.readouterr().out
    assert code == 0 and "requests are hinted to end" in text and "goodput" in text and "lru-block" in text
    tags: list[str] = []
    parser = HTMLParser()
    parser.handle_starttag = lambda tag, attrs: tags.append(tag)
    parser.feed(page.read_text())
    assert tags.count("polyline") == 2 and "script" not in tags and "http" not in page.read_text()


def test_a_png_needs_matplotlib(capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    assert main(["replay", str(HERE / "agent.bin"), "--plot", str(tmp_path / "hits.png")]) == 0
    assert (tmp_path / "hits.png").read_bytes().startswith(b"\x89PNG")


def test_what_cannot_be_written_is_told_before_the_run(capsys, tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.html")
    (tmp_path / "folder.png").mkdir()
    trace = tmp_path / "t.jsonl"
    trace.write_bytes((HERE / "chat.jsonl").read_bytes())
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr("isthmus.core.replay.formats.read_trace", lambda *_: pytest.fail("it is read"))
    for option, name, words in (("--plot", "pipe.html", "is a named pipe"), ("--plot", "folder.png", "is a folder"),
                                ("--plot", "x.png", "matplotlib is not installed"), ("--plot", "no/x.html", "no such"),
                                ("--convert", "t.jsonl", "is the trace itself")):
        assert main(["replay", str(trace), option, str(tmp_path / name)]) == 2
        said = capsys.readouterr().err
        assert f"{option} {tmp_path / name}" in said and words in said and len(said.splitlines()) == 1
    assert trace.read_bytes() == (HERE / "chat.jsonl").read_bytes()


def test_the_table_is_there_even_if_the_picture_cannot_be_written(capsys, monkeypatch):
    def write_plot(report, path):
        raise OSError(28, "No space left on device")
    monkeypatch.setattr("isthmus.core.replay.plot.write_plot", write_plot)
    assert main(["replay", str(HERE / "agent.bin"), "--policy", "lru", "--plot", "x.html"]) == 2
    told = capsys.readouterr()
    assert "token hit rate" in told.out and "--plot x.html: no space left" in told.err


def test_the_command_converts(capsys, tmp_path):
    assert main(["replay", str(HERE / "chat.jsonl"), "--convert", str(tmp_path / "t.bin")]) == 0
    assert len(read_trace(tmp_path / "t.bin")) == len(read_trace(HERE / "chat.jsonl"))


@pytest.mark.parametrize(("flags", "words"), [
    (["--policy", "lru-leave"], "did you mean lru-leaf?"), (["--capacity", "x"], "--capacity x"),
    (["--capacity", "0"], "--capacity 0"), (["--capacity", "200%"], "--capacity 200%"), (["--capacity", ","], "none"),
    (["--hint-endings", "2"], "outside 0 to 1"), (["--seed", "-1"], "--seed -1"),
    (["--plot", "x.gif"], ".png or .html"), (["--convert", "x.txt"], ".jsonl or .bin"),
    (["--schedule-policy", "none"], "not one of"),
    (["--block-tokens", "4294967296"], "--block-tokens 4294967296: fewer than"),
    (["--requests", "0"], "--requests 0"), (["--latency", "abacus"], "neither a file")])
def test_the_command_names_what_is_wrong(capsys, flags, words):
    assert main(["replay", str(HERE / "chat.jsonl"), *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_trace_must_be_named(capsys):
    assert main(["replay"]) == 2 and "no trace is named" in capsys.readouterr().err
