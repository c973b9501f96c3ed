"""`isthmus bench serving`: against a stub that stalls, spares and breaks, and against a server."""
from __future__ import annotations

import dataclasses
import json
import re

import pytest
from isthmus.core.bench import client, drive
from isthmus.core.bench.drive import Load, run_loop
from isthmus.core.bench.result import FIGURES, command, hidden, read_result
from isthmus.core.bench.serving import told_of_client, warm_up
from isthmus.core.bench.workload import Ask, Shape, drawn_prompts
from isthmus.core.cli.bench_server import find_server, watched
from isthmus.core.cli.main import main
from isthmus.core.errors import ConfigError, RequestError

from .bench_stub import Reply, Stub
from .checkpoints import tiny_llama_gguf
from .serving import Serving

COST = 8  # seconds
STALL, EVERY = 0.5, 0.01


@pytest.fixture(scope="module")
def serving(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    with Serving(str(tiny_llama_gguf(folder / "tiny.gguf")), "--in-process", temporary=folder) as server:
        yield server


def said(capsys, *words: str) -> tuple[int, str, str]:
    code = main(["bench", *words])
    return code, *capsys.readouterr()


def driven(stub: Stub, load: Load, requests: int = 20):
    server = find_server(stub.url, None, None)
    stub.asked.clear()
    workload = drawn_prompts(Shape(requests, 4, 3, 0, 100))
    return run_loop(drive.drive(workload, load, server.target, {}))


# ---- accounting

@pytest.mark.parametrize("limit", [1, 4096])
def test_who_would_have_come_while_the_server_stalled_has_waited(limit):
    """No coordinated omission: with one connection, which hides the stall from a naive client, as with many."""
    with Stub() as stub:
        server = find_server(stub.url, None, None)
        first = len(stub.asked)
        stub.answer = lambda number, body: Reply(stall=STALL if number == first else 0.0)
        recorder, _ = run_loop(drive.drive(drawn_prompts(Shape(20, 4, 3, 0, 100)),
                                           Load(rate=1 / EVERY, arrivals="constant", limit=limit), server.target, {}))
    waited = sorted(recorder.times["ttft"], reverse=True)
    assert len(waited) == 20 and all(ttft >= STALL - i * EVERY - 0.01 for i, ttft in enumerate(waited))
    assert limit > 1 or max(recorder.times["late"]) >= STALL - 2 * EVERY, "what waited here is told"


def test_a_closed_loop_waits_for_the_answer():
    with Stub() as stub:
        recorder, _ = driven(stub, Load(concurrency=2), 10)
        assert stub.connections <= 2 + 1 + 2, "two to ask what it is, one what it takes, and two that are kept"
    assert recorder.sent == 10 and set(recorder.times["late"]) == {0.0}
    figures = recorder.figures()
    assert recorder.completion == 30 and recorder.prompt == 100 and figures["failed"] == 0 and "hit_rate" not in figures


@pytest.mark.parametrize("reply, kind, words", [
    (Reply(status=429, error="too many"), "http 429", "too many"), (Reply(status=500, error="oh"), "http 500", "oh"),
    (Reply(pieces=()), "no token", "no token"), (Reply(hang_up=True), "connection", "closed the connection"),
    (Reply(raw=b'data: {"error": {"message": "died"}}\n\n'), "error in stream", "died"),
    (Reply(raw=b"data: {]\n\n"), "bad answer", "{]"), (Reply(raw=b"data: [1]\n\n"), "bad answer", "[1]"),
    (Reply(raw=b": nothing\n\n"), "cut off", "[DONE]")])
def test_what_goes_wrong_is_counted_by_its_kind(reply, kind, words):
    with Stub() as stub:
        server = find_server(stub.url, None, None)
        first = len(stub.asked)
        stub.answer = lambda number, body: reply if (number - first) % 2 else Reply(cached=5)
        recorder, _ = run_loop(drive.drive(drawn_prompts(Shape(6, 4, 3, 0, 100)), Load(concurrency=1), server.target,
                                           {"ttft": 1e5}))
    detail = recorder.detail()
    assert detail["errors"] == {kind: 3} and words in detail["error_examples"][kind][0]
    assert recorder.figures()["hit_rate"] == 0.5 and recorder.figures()["within_slo"] == 0.5


def test_an_event_without_end_is_no_answer(monkeypatch):
    monkeypatch.setattr(client, "MAX_EVENT", 1000)
    with Stub() as stub:
        server = find_server(stub.url, None, None)
        stub.answer = lambda number, body: Reply(raw=b"data: " + b"x" * 200_000)
        workload = drawn_prompts(Shape(1, 4, 3, 0, 100))
        recorder, _ = run_loop(drive.drive(workload, Load(concurrency=1), server.target, {}))
    assert recorder.detail()["errors"] == {"bad answer": 1}


def test_what_a_server_does_not_take_is_left_out_and_told():
    def plain(number, body):
        wrong = "ignore_eos" in body or isinstance(body["prompt"], list)
        return Reply(status=400, error="unknown field") if wrong else Reply()
    with Stub(plain) as stub:
        server = find_server(stub.url, None, None)
        assert not server.takes_ids and server.target.extras == {} and server.vocab == 256
        assert "answers may be shorter" in server.notes[0] and "no token ids" in server.notes[1]
    with Stub(lambda number, body: Reply() if "messages" in body else Reply(status=404, error="no such page")) as stub:
        server = find_server(stub.url, None, None)
        assert not server.takes_ids and server.target.chat and "messages of words" in server.notes[0]
        run_loop(warm_up(server, 1))
        assert stub.asked[-1][0] == "/v1/chat/completions" and stub.asked[-1][1]["messages"][0]["role"] == "user"
    with Stub(lambda number, body: Reply(status=403, error="go away")) as stub, \
            pytest.raises(RequestError, match="http 403: go away"):
        find_server(stub.url, None, None)


def test_a_later_turn_has_what_was_answered_and_one_that_fails_ends_its_conversation(capsys):
    with Stub() as stub:
        code, out, _ = said(capsys, "serving", "--url", stub.url, "--turns", "3", "--requests", "3", "--prompt-tokens",
                            "2", "--warmup", "0", "--json")
        path, body = stub.asked[-1]
        assert code == 0 and path == "/v1/chat/completions"
        assert [m["role"] for m in body["messages"]] == ["user", "assistant", "user", "assistant", "user"]
        assert body["messages"][1]["content"] == "abc"
        first = len(stub.asked) + 1  # one more is asked for what it takes
        stub.answer = lambda number, body: Reply(status=503, error="away") if number == first + 1 else Reply()
        code, out, _ = said(capsys, "serving", "--url", stub.url, "--turns", "3", "--requests", "3", "--json",
                            "--warmup", "0")
    found = json.loads(out)["runs"][0]
    assert code == 1 and found["detail"]["errors"] == {"http 503": 1, "turn before failed": 1}
    assert found["figures"]["requests"] == 3, "a turn that could not be asked is not forgotten"


def test_a_client_that_is_too_slow_says_so():
    with Stub() as stub:
        _, watched = driven(stub, Load(concurrency=2), 4)
    from isthmus.core.bench.result import Run
    assert "slow" in told_of_client(Run("x", {}, {"client": {**watched, "bottleneck": True}}))
    assert told_of_client(Run("x", {}, {"client": {**watched, "bottleneck": False}})) == ""
    watch = drive.Watch()
    for lag in (0.001, 0.5):
        watch.lag.add(lag)
    assert watch.report()["bottleneck"]


# ---- the command

def test_a_load_is_told_in_figures_and_a_picture(serving, capsys):
    code, out, _ = said(capsys, "--url", serving.address, "--requests", "8", "--concurrency", "4", "--prompt-tokens",
                        "40", "--shared-tokens", "32", "--max-tokens", "6", "--slo", "ttft=1000s")
    assert code == 0
    title, first, *rest = out.splitlines()
    assert title.startswith("shared-prefix on tiny at http://")
    assert re.fullmatch(r"8 requests, 4 at once, in \d+\.\d s: 0 failed", first)
    names = [line[2:15].strip() for line in rest]
    assert names == ["output", "prompts", "goodput", "first token", "per token", "between", "whole answer", "over time"]
    assert "100.0% of all" in rest[2] and "p50 " in rest[3] and " ms" in rest[4] and "tokens/s" in rest[7]


def test_a_result_has_all_that_is_needed_to_do_it_again(serving, capsys, tmp_path):
    files = {name: tmp_path / name for name in ("load.json", "load.html", "rows.jsonl")}
    words = ("serving", "--url", serving.address, "--requests", "6", "--concurrency", "1,2", "--prompt-tokens", "40",
             "--shared-tokens", "32", "--max-tokens", "5", "--seed", "7", "-o", str(files["load.json"]), "--plot",
             str(files["load.html"]), "--save-requests", str(files["rows.jsonl"]), "--api-key", "hush")
    code, out, _ = said(capsys, *words)
    result = read_result(files["load.json"])
    assert code == 0 and [run.label for run in result.runs] == ["1 at once", "2 at once"] and "1 at once" in out
    assert result.kind == "serving" and result.configuration["seed"] == 7 and result.configuration["shared"] == 32
    assert result.subject["server"]["platform"] == "null" and result.made["machine"]["cores"]
    figures = result.runs[0].figures
    assert figures["failed"] == 0 and figures["hit_rate"] >= 5 * 32 / 240 and set(figures) <= set(FIGURES)
    assert figures["output_tokens_per_s"] == pytest.approx(30 / figures["seconds"])
    page = files["load.html"].read_text()
    assert "<svg" in page and "http://127" in page and not re.search(r"<(script|link|img)|src=", page)
    rows = [json.loads(line) for line in files["rows.jsonl"].read_text().splitlines()]
    assert len(rows) == 12 and all(row["completion"] == 5 and row["ttft"] > 0 for row in rows)
    assert command(["x", "bench", "--api-key", "k", "--admin-api-key=k", "--rate"]) == [
        "isthmus", "bench", "--api-key", "(hidden)", "--admin-api-key=(hidden)", "--rate"]
    words = ["isthmus serve m.gguf --api-key hush --max-tokens 5", "ISTHMUS_API_KEY=hush x --port {port}",
             "env HF_TOKEN='hu sh' x", "x --Admin-Api-Key=hush,hush", 'x --token "hush" --tls-key hush',
             "https://me:hush@host:8/v1", "--key", "hush", "--url=http://hush@h"]
    told = command(["x", *words])
    assert "hu" not in " ".join(told).replace("isthmus", "") and len(told) == len(words) + 1
    assert told[1] == "isthmus serve m.gguf --api-key (hidden) --max-tokens 5"
    assert told[6] == "https://(hidden)@host:8/v1" and told[2] == "ISTHMUS_API_KEY=(hidden) x --port {port}"
    plain = "isthmus serve m --max-tokens 5 --prompt-tokens 8 --speculative draft,tokens=4 --keys"
    assert hidden(plain) == plain


def test_a_png_needs_matplotlib(serving, capsys, tmp_path):
    pytest.importorskip("matplotlib", reason="the extra `bench` is not installed")
    path = tmp_path / "load.png"
    assert said(capsys, "--url", serving.address, "--requests", "2", "--prompt-tokens", "8", "--max-tokens", "3",
                "--plot", str(path))[0] == 0
    assert path.read_bytes().startswith(b"\x89PNG")


def test_an_open_loop_and_a_trace_at_its_times(serving, capsys, tmp_path):
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps({"arrival": i / 100, "prompt": [5] * 20, "output_tokens": 3}) + "\n"
                             for i in range(5)))
    for words in (("--rate", "50", "--requests", "5", "--prompt-tokens", "20", "--max-tokens", "3"),
                  ("--trace", str(trace), "--arrivals", "trace", "--speed", "2"),
                  ("--trace", str(trace), "--rate", "100", "--arrivals", "constant", "--requests", "5")):
        code, out, _ = said(capsys, "serving", "--url", serving.address, "--json", *words)
        found = json.loads(out)
        assert code == 0 and found["runs"][0]["figures"]["requests"] == 5, words
        assert found["configuration"]["loads"][0]["loop"] == "open"
        assert found["runs"][0]["detail"]["completion_tokens"] == 15


def test_requests_that_fail_are_counted_with_their_reasons(serving, capsys):
    code, out, _ = said(capsys, "--url", serving.address, "--requests", "3", "--prompt-tokens", "100000",
                        "--max-tokens", "5")
    assert code == 1 and "3 failed" in out and "maximum context length" in out and "first token" not in out


@pytest.mark.parametrize("words, part", [
    (("--requests", "0"), "--requests 0: it must be between 1"), (("--shared-tokens", "-1"), "--shared-tokens -1"),
    (("--shared-tokens", "256"), "at least one of them is their own"), (("--concurrency", "0"), "--concurrency 0"),
    (("--concurrency", "1,x"), "--concurrency x"), (("--rate", "0"), "--rate 0"), (("--rate", "nan"), "--rate nan"),
    (("--concurrency", "2", "--rate", "3"), "leave one out"), (("--arrivals", "poisson"), "needs --rate"),
    (("--arrivals", "trace"), "--trace FILE"), (("--slo", "ttft=soon"), "--slo 'ttft=soon'"),
    (("--trace", "no-such"), "there is no such file"), (("--prompts", "a", "--trace", "b"), "name one of them"),
    (("--trace", "x", "--turns", "2"), "--turns is for drawn prompts"), (("--plot", "x.gif"), ".png or .html"),
    (("-o", "/no/such/folder/x"), "there is no such folder"), (("--repeat", "0"), "--repeat 0"),
    (("--spread", "2"), "--spread 2"), (("serve",), "did you mean serving?"),
    (("--url", "http://127.0.0.1:9"), "no server answers"), (("--model", "nothing"), "--model nothing: ")])
def test_mistakes_are_told_before_anything_is_sent(serving, words, part, capsys):
    code, _, err = said(capsys, *words, *(() if "--url" in words else ("--url", serving.address)))
    assert code == 2 and part in err


def test_a_result_that_is_none_is_refused(tmp_path):
    for text in ("", "{}", "[]", '{"isthmus_bench": 1}', '{"isthmus_bench": 2}'):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(ConfigError, match="x.json: "):
            read_result(tmp_path / "x.json")
    with pytest.raises(ConfigError, match="no such file"):
        read_result(tmp_path / "y.json")


def test_a_server_that_never_answers_is_told_after_its_time(capsys):
    with Stub(lambda number, body: Reply(stall=3600)) as stub:
        code, _, err = said(capsys, "--url", stub.url, "--requests", "1", "--timeout", "0.05")
    assert code == 2 and "no whole answer in 0.05 s" in err and "for a token" in err


def test_one_that_stops_answering_ends_too():
    with Stub(lambda number, body: Reply(stall=3600 if number else 0.0)) as stub:
        server = find_server(stub.url, None, None)
        server = dataclasses.replace(server, target=dataclasses.replace(server.target, timeout=0.05))
        with pytest.raises(RequestError, match="before the measured ones: no whole answer in 0.05 s .--timeout"):
            run_loop(warm_up(server, 1))
        outcome = run_loop(drive.Client(server.target).ask(Ask("a", 1)))
        assert (outcome.error, outcome.message) == ("timeout", "no whole answer in 0.05 s")


def test_files_are_looked_at_before_the_server_is(capsys, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"prompt": "a"}\n{"nothing": 1}\n')
    for option, words in (("--prompts", "line 2: neither a prompt"), ("--trace", "bad.jsonl")):
        code, _, err = said(capsys, "--url", "http://127.0.0.1:9", option, str(tmp_path / "bad.jsonl"))
        assert code == 2 and words in err and "no server answers" not in err
    code, _, err = said(capsys, "--url", "http://127.0.0.1:9", "--timeout", "0")
    assert code == 2 and "--timeout 0: it must be above 0" in err


def test_who_stops_it_is_told_how_far_it_was(capsys, monkeypatch):
    def stopped(*_):
        raise KeyboardInterrupt
    with Stub() as stub:
        monkeypatch.setattr(drive, "run_loop", lambda work: (work.close(), stopped()))
        assert main(["bench", "serving", "--url", stub.url, "--requests", "2"]) == 130
    assert f"stopped at: ask {stub.url} for a token; there is no result" in capsys.readouterr().err
    with pytest.raises(KeyboardInterrupt), watched() as line:
        line("send requests", 3, 8)
        stopped()
    assert "stopped at: send requests, 3 of 8; there is no result" in capsys.readouterr().err
