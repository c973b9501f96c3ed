"""`isthmus run-batch`: OpenAI's batch files against a server and an engine of their own, errors by line, resumed."""
from __future__ import annotations

import json
import re
import socket
from pathlib import Path

import pytest
from isthmus.core.cli import run_batch
from isthmus.core.cli.main import main
from isthmus.core.cli.run_batch import Answers, list_requests
from isthmus.core.errors import ConfigError, Overloaded, RequestError

from .checkpoints import tiny_llama_gguf
from .fake_client import TEXT, make_app
from .live import listening

COST = 12  # seconds

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


@pytest.fixture
def live():
    made = make_app(server={"api_key": "sekret"})
    with listening(made.app) as made.url:
        yield made


def line(id: str, url: str = COMPLETIONS, **body) -> dict:
    body = {"prompt": id, "max_tokens": 4, "temperature": 0, **body} if url == COMPLETIONS else body
    return {"custom_id": id, "method": "POST", "url": url, "body": body}


def write(path: Path, *entries) -> Path:
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries))
    return path


def answers(path: Path) -> dict[str | None, dict]:
    entries = [json.loads(text) for text in path.read_text().splitlines()]
    assert all(set(e) == {"id", "custom_id", "response", "error"} for e in entries)
    assert len({e["id"] for e in entries}) == len(entries)
    return {e["custom_id"]: e for e in entries}


def go(live, source: Path, output: Path, *more: str) -> int:
    return main(["run-batch", "-i", str(source), "-o", str(output), "--url", live.url, "--key", "sekret", *more])


def test_every_line_has_its_answer_or_its_error(live, tmp_path, capsys):
    chat = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "temperature": 0}
    source = write(tmp_path / "in.jsonl", line("a"), "", line("b", CHAT, **chat), line("bad", CHAT, messages=[]),
                   line("url", "/v1/images"), line("stream", stream=True),
                   line("later", "/v1/responses", input="x", background=True), {"url": CHAT, "body": {}}, "{not json",
                   "[1]", line("a"), line("body") | {"body": 5}, line("get") | {"method": "GET"}, line("c" * 600),
                   line("last", max_tokens=2))
    assert go(live, source, tmp_path / "out.jsonl") == 1
    found = answers(tmp_path / "out.jsonl")
    assert found["a"]["response"]["body"]["choices"][0]["text"] == TEXT[:4] and found["a"]["error"] is None
    assert found["b"]["response"]["status_code"] == 200 and found["b"]["response"]["request_id"]
    assert found["b"]["response"]["body"]["choices"][0]["message"]["content"] == TEXT[:3]
    assert found["bad"]["response"]["status_code"] == 400
    assert found["bad"]["response"]["body"]["error"]["param"] == "messages" and found["bad"]["error"] is None
    for id, words in (("url", "there are: /v1/chat"), ("stream", "whole answers"), ("later", "background is true"),
                      ("body", "must be an object"), ("get", "only POST")):
        assert found[id]["response"] is None and words in found[id]["error"]["message"]
        assert found[id]["error"]["code"] == "invalid_request"
    entries = [json.loads(text) for text in (tmp_path / "out.jsonl").read_text().splitlines()]
    lost = [entry for entry in entries if entry["custom_id"] is None]
    assert [next(w for w in ("custom_id must", "not valid JSON", "JSON object", "twice") if w in e["error"]["message"])
            for e in sorted(lost, key=lambda e: int(e["error"]["message"].split()[1].strip(":")))] == [
        "custom_id must", "not valid JSON", "JSON object", "twice", "custom_id must"]
    assert found["last"]["response"]["status_code"] == 200
    said = capsys.readouterr().err
    assert "3 requests answered" in said and "11 failed" in said and "9 output tokens" in said
    assert re.search(r"; the first that failed: (\w+: |line \d+)\S", said), said


def test_a_run_is_taken_up_where_it_was_stopped(live, tmp_path):
    source, output = write(tmp_path / "in.jsonl", *(line(str(i)) for i in range(8))), tmp_path / "out.jsonl"
    assert go(live, write(tmp_path / "some.jsonl", *(line(str(i)) for i in range(3))), output) == 0
    first = answers(output)
    refused = {"status_code": 503, "request_id": "", "body": {}}
    unlucky = {"id": "x", "custom_id": "5", "response": refused, "error": None}
    gone = {"id": "y", "custom_id": "6", "response": None, "error": {"code": "no_answer", "message": ""}}
    with open(output, "a") as file:
        file.write(json.dumps(unlucky) + "\n" + json.dumps(gone) + "\n" + '{"id": "z", "custom_id": "7", "resp')
    before = len(live.client.submits)
    assert go(live, source, output) == 0
    found = answers(output)
    assert len(live.client.submits) - before == 5 and sorted(found) == [str(i) for i in range(8)]
    assert all(found[id] == first[id] for id in first) and not list(tmp_path.glob(".out*"))
    assert all(e["response"]["status_code"] == 200 for e in found.values())
    assert go(live, source, output) == 0 and len(live.client.submits) - before == 5, "nothing is left"
    assert go(live, source, output, "--overwrite") == 0 and len(live.client.submits) - before == 13


def test_who_finds_no_place_comes_again(live, tmp_path, monkeypatch):
    slept = []

    async def pause(seconds):
        slept.append(seconds)
        if len(slept) == 2:
            live.client.refuse = None

    monkeypatch.setattr(run_batch, "pause", pause)
    live.client.refuse = Overloaded("full")
    assert go(live, write(tmp_path / "in.jsonl", line("a")), tmp_path / "out.jsonl", "--concurrency", "1") == 0
    assert slept == [0.5, 1.0]


def test_connections_are_kept_and_a_request_is_sent_once(live, monkeypatch):
    """Also after a pause in which the server has closed the connection."""
    from isthmus.core.cli.posting import Poster
    poster, opened, connect = Poster(live.url, "sekret", 60), [], Poster._connect
    monkeypatch.setattr(Poster, "_connect", lambda self: opened.append(connect(self)) or opened[-1])
    body = json.dumps({"prompt": "x", "max_tokens": 2}).encode()
    for keep in (True, False, True):
        reply = poster.post(COMPLETIONS, body, keep)
        assert reply.status == 200 and bool(reply.body) is keep and 0 < reply.first <= reply.seconds
    assert len(opened) == 1 and len(live.client.submits) == 3
    opened[0].sock.shutdown(socket.SHUT_RDWR)
    assert poster.post(COMPLETIONS, body).status == 200 and len(opened) == 2 and len(live.client.submits) == 4


def test_a_server_that_is_not_there_is_every_lines_error(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", line("a"), line("b"))
    words = ["run-batch", "-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--url", "http://127.0.0.1:9"]
    assert main(words) == 1
    found = answers(tmp_path / "out.jsonl")
    assert all("no server answers" in entry["error"]["message"] for entry in found.values())
    assert all(entry["error"]["code"] == "no_answer" for entry in found.values())
    assert main(words) == 1 and len(answers(tmp_path / "out.jsonl")) == 2, "they are tried again"


def test_an_engine_of_its_own_with_nothing_listening(tmp_path, capsys, monkeypatch):
    """All kinds of calls through the application itself; a key that is set for servers is none for this."""
    monkeypatch.setenv("ISTHMUS_API_KEY", "sekret")
    model = tiny_llama_gguf(tmp_path / "tiny.gguf")
    source = write(tmp_path / "in.jsonl", line("a", max_tokens=5, ignore_eos=True),
                   line("t", "/tokenize", prompt="abc"),
                   line("g", "/generate", text="abc", sampling_params={"max_new_tokens": 3}),
                   line("e", "/v1/embeddings", input="abc"),
                   line("o", "/api/generate", model="tiny", prompt="abc", options={"num_predict": 3}))
    words = ["run-batch", str(model), "-i", str(source), "-o", str(tmp_path / "out.jsonl"), "--platform", "null",
             "--in-process"]
    assert main(words) == 1
    found = answers(tmp_path / "out.jsonl")
    assert found["a"]["response"]["body"]["usage"]["completion_tokens"] == 5
    assert found["t"]["response"]["body"]["count"] > 0 and found["g"]["response"]["status_code"] == 200
    assert found["o"]["response"]["body"]["done"] is True, "one answer, though streams are the default there"
    assert "null computes no hidden states" in found["e"]["response"]["body"]["error"]["message"]
    assert "4 requests answered" in capsys.readouterr().err


def test_words_that_cannot_be_taken(tmp_path, capsys):
    source, other = write(tmp_path / "in.jsonl", line("a")), write(tmp_path / "other.jsonl", {"a": 1})
    for words, reason in ((["-o", "x"], "which files"), (["-i", str(source)], "which files"),
                          (["-i", str(tmp_path / "no"), "-o", "x"], "no such file"),
                          (["-i", str(source), "-o", str(source)], "the input itself"),
                          (["-i", str(source), "-o", str(tmp_path)], "no regular file"),
                          (["-i", str(source), "-o", str(other)], "line 1: this is no answer of a batch"),
                          (["-i", str(source), "-o", str(tmp_path / "no" / "x")], "no such file"),
                          (["-i", str(source), "-o", str(tmp_path / "x"), "--key", "k"], "add --url"),
                          (["-i", str(source), "-o", str(tmp_path / "x"), "--concurrency", "0"], "--concurrency"),
                          (["-i", str(source), "-o", str(tmp_path / "x"), "--url", "ftp://x"], "--url")):
        assert main(["run-batch", *words]) == 2, words
        assert reason in capsys.readouterr().err, words
    assert other.read_text() == '{"a": 1}\n'


@pytest.mark.parametrize("text", [
    "some notes\n", "one line", "a\nb\nc\n", '{"custom_id": "a"', '{"id": "batch_req_1', ""])
@pytest.mark.parametrize("after", [False, True])
def test_only_the_beginning_of_an_answer_is_dropped_from_an_output(tmp_path, text, after):
    path, good = tmp_path / "out.jsonl", json.dumps(
        {"id": "batch_req_0", "custom_id": "x", "response": {"status_code": 200}, "error": None}) + "\n"
    path.write_text(before := (good + text if after else text))
    if text in ("", '{"id": "batch_req_1'):
        answers = Answers(path, False)
        answers.close()
        assert answers.done == ({"x"} if after else set()) and path.read_text() == (good if after else "")
    else:
        with pytest.raises(ConfigError, match=f"line {1 + after}: this is no answer of a batch; name another file"):
            Answers(path, False)
        assert path.read_text() == before


def test_a_line_without_end_is_no_batch(tmp_path, monkeypatch):
    monkeypatch.setattr("isthmus.core.cli.posting.MAX_LINE", 1000)
    file = write(tmp_path / "in.jsonl", line("a"), line("b", prompt="x" * 2000))
    with pytest.raises(ConfigError, match="line 2: it has more than 1000 bytes"):
        list(list_requests(file))


def test_lone_surrogates_of_an_answer_can_be_written(tmp_path):
    out = Answers(tmp_path / "out.jsonl", False)
    out.write(run_batch.Asked("a", "", b"", None), run_batch.Reply(200, b'{"x": "\\ud83d"}', "", 0, 0), None)
    out.write(run_batch.Asked("b", "", b"", None), None, RequestError("no"))
    out.close()
    assert Answers(tmp_path / "out.jsonl", False).done == {"a"}
