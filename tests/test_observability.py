"""What a server tells of itself: metrics under everybody's names, traces, logs with contents, dumps of requests."""
from __future__ import annotations

import json
import logging
import os
import re
import sys
from pathlib import Path

import pytest
from isthmus.core.config import Config, ModelSettings, PlatformSettings, ServerSettings
from isthmus.core.errors import ConfigError
from isthmus.core.logs import JsonFormatter
from isthmus.core.processes.in_process import InProcessClient
from isthmus.core.server.app import create_app
from isthmus.core.server.metric_names import ENGINE, FAMILIES, MEASURED
from isthmus.core.server.metrics import Metrics
from isthmus.core.server.request_dump import RequestDump, open_dump
from isthmus.core.server.text_service import TextService
from isthmus.core.settings import resolve
from prometheus_client.parser import text_string_to_metric_families
from starlette.testclient import TestClient

from .checkpoints import tiny_llama_gguf
from .fake_client import ByteTokenizer, ChatMarks, drive, make_app
from .live import listening

COST = 8  # seconds

ROOT = Path(__file__).resolve().parent.parent
CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SECRET = "the launch code is 0000"


def samples(text: str) -> dict[str, list]:
    found: dict[str, list] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append(sample)
    return found


# ---- metrics

@pytest.fixture(scope="module")
def exported(tmp_path_factory) -> str:
    """/metrics of a real engine on the platform without a device, under all names, after some requests."""
    model = str(tiny_llama_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))
    server = ServerSettings(metric_names=("isthmus", "vllm", "sglang"), allowed_hosts=("*",))
    config = Config(model=ModelSettings(model), platform=PlatformSettings("null", ("delay_ms=1",)), server=server)

    async def run() -> str:
        client = InProcessClient(config)
        await client.start()
        try:
            app = create_app(client, TextService(ByteTokenizer(), ChatMarks()), config)
            body = json.dumps({"prompt": [[5, 6, 7, 8]] * 3, "max_tokens": 6, "ignore_eos": True}).encode()
            for _ in range(2):
                sent = await drive(app, COMPLETIONS, body)
                assert sent[0]["status"] == 200, sent
            got = []

            async def send(message):
                got.append(message)
            scope = {"type": "http", "method": "GET", "path": "/metrics", "headers": [(b"host", b"localhost")],
                     "query_string": b"", "root_path": "", "scheme": "http", "server": ("localhost", 80)}
            await app(scope, None, send)
            return b"".join(m.get("body", b"") for m in got).decode()
        finally:
            await client.close()

    import asyncio
    return asyncio.run(run())


# What autoscalers, routers and shipped dashboards read: vLLM 0.33, SGLang 0.5.23, and older names that live on.
READ = {
    "vllm:": ("num_requests_running num_requests_waiting num_requests_waiting_by_reason kv_cache_usage_perc "
              "gpu_cache_usage_perc cache_config_info e2e_request_latency_seconds_bucket engine_sleep_state "
              "time_to_first_token_seconds_bucket inter_token_latency_seconds_bucket time_per_output_token_seconds_sum "
              "request_time_per_output_token_seconds_bucket request_queue_time_seconds_sum "
              "request_prefill_time_seconds_sum request_decode_time_seconds_sum request_inference_time_seconds_bucket "
              "request_prompt_tokens_bucket request_generation_tokens_bucket request_max_num_generation_tokens_sum "
              "request_params_n_sum request_params_max_tokens_bucket iteration_tokens_total_sum prompt_tokens_total "
              "generation_tokens_total request_success_total num_preemptions_total prefix_cache_queries_total "
              "prefix_cache_hits_total prompt_tokens_cached_total"),
    "sglang:": ("num_running_reqs num_queue_reqs token_usage num_used_tokens page_size num_pages cache_config_info "
                "gen_throughput cache_hit_rate e2e_request_latency_seconds_bucket time_to_first_token_seconds_bucket "
                "inter_token_latency_seconds_bucket queue_time_seconds_bucket prompt_tokens_total "
                "generation_tokens_total cached_tokens_total num_requests_total num_aborted_requests_total "
                "num_retracted_reqs")}


@pytest.mark.parametrize("prefix", READ)
def test_what_others_read_is_there_with_their_labels(exported, prefix):
    found = samples(exported)
    assert [name for name in READ[prefix].split() if prefix + name not in found] == []
    labels = {"vllm:": {"model_name", "engine"},
              "sglang:": {"model_name", "engine_type", "tp_rank", "pp_rank", "moe_ep_rank"}}[prefix]
    assert all(labels <= set(s.labels) for name, many in found.items() if name.startswith(prefix) for s in many)


def test_every_number_of_the_tables_is_one_that_the_engine_gives(exported):
    """A key that nobody fills would be a name that is never there."""
    found = samples(exported)
    rare = {"restarts", "step_age", "stats_age"}
    rare |= {"drafts", "drafted_tokens", "accepted_tokens", "draft_length", "drafting"}  # test_speculation has them
    for key, _, *names, _ in (row for row in ENGINE if row[0] not in rare):
        for family in FAMILIES.values():
            if names[family.column]:
                name = family.prefix + names[family.column]
                assert name in found or name + "_total" in found, key
    for _, _, *names, _ in MEASURED:
        assert all(f.prefix + names[f.column] + "_count" in found for f in FAMILIES.values() if names[f.column])


def test_times_of_a_request_add_up(exported):
    found = samples(exported)
    value = {name: found[f"vllm:{name}_sum"][0].value for name in (
        "e2e_request_latency_seconds", "request_queue_time_seconds", "request_prefill_time_seconds",
        "request_decode_time_seconds", "request_inference_time_seconds", "request_params_n",
        "request_params_max_tokens")}
    assert found["vllm:request_queue_time_seconds_count"][0].value == 6
    parts = [value[f"request_{part}_time_seconds"] for part in ("queue", "prefill", "decode")]
    assert all(part >= 0 for part in parts) and 0 < sum(parts) <= value["e2e_request_latency_seconds"] * 1.001
    assert value["request_inference_time_seconds"] <= value["e2e_request_latency_seconds"]
    assert (value["request_params_n"], value["request_params_max_tokens"]) == (2, 36)


def test_names_are_those_that_were_asked_for():
    for names, there in ((("isthmus",), {"isthmus_"}), (("vllm",), {"vllm:"}),
                         (("sglang", "isthmus"), {"isthmus_", "sglang:"})):
        made = make_app(server={"metric_names": names})
        made.client.stats = {"running": 1, "waiting": 0, "pages_total": 4, "pages_used": 1, "page_size": 16}
        with TestClient(made.app) as http:
            text = http.get("/metrics").text
        assert {re.match(r"[a-z]+[:_]", name)[0] for name in samples(text)} == there
    with pytest.raises(ConfigError, match="--metric-names: 'vlm' is not one of isthmus, vllm, sglang; did you mean"):
        resolve({"metric_names": "isthmus,vlm"}, {})
    assert resolve({}, {"ISTHMUS_METRIC_NAMES": "sglang"}).config.server.metric_names == ("sglang",)


def test_a_rate_is_over_some_seconds_however_often_somebody_asks(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("isthmus.core.server.metrics.time.monotonic", lambda: now[0])
    metrics = Metrics(("sglang",))

    def rate(tokens: int) -> float:
        return samples(metrics.export("m", {}, {"generated_tokens": tokens}).decode())["sglang:gen_throughput"][0].value

    assert rate(1000) == 0
    now[0] += 10
    assert rate(1500) == 50
    now[0] += 0.1
    assert rate(1600) == 50
    now[0] += 9.9
    assert rate(2500) == 100
    now[0] += 10
    assert rate(5) == 0, "an engine that was started anew"


# ---- traces

@pytest.fixture
def traced(monkeypatch):
    """An app with traces, and the spans that it has made."""
    pytest.importorskip("opentelemetry.sdk")
    from isthmus.core.server.traces import Traces
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr("isthmus.core.server.context.open_traces", lambda endpoint: Traces(provider))

    def make(**more):
        made = make_app(**more)
        made.spans = exporter.get_finished_spans
        return made
    return make


PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_parts_and_without_its_contents(traced, stream):
    made = traced(text=SECRET, delay=0.002)
    with TestClient(made.app) as http:
        body = {"messages": [{"role": "user", "content": SECRET}], "max_tokens": 8, "temperature": 0, "stream": stream}
        assert http.post(CHAT, json=body, headers={"traceparent": PARENT, "x-request-id": "mine"}).status_code == 200
        http.get("/health")
        http.post(CHAT, json={"messages": []})
    *parts, root = made.spans()
    assert root.name == "chat tiny" and root.kind.name == "SERVER"
    assert f"{root.context.trace_id:032x}" == PARENT[3:35] and f"{root.parent.span_id:016x}" == PARENT[36:52]
    assert {part.parent.span_id for part in parts} == {root.context.span_id}
    said = dict(root.attributes)
    assert said["gen_ai.operation.name"] == "chat" and said["gen_ai.usage.output_tokens"] == 8
    assert said["gen_ai.usage.input_tokens"] > len(SECRET) and said["gen_ai.usage.cache_read.input_tokens"] == 4
    assert said["gen_ai.response.finish_reasons"] == ("length",) and said["gen_ai.request.id"] == "mine"
    assert said["http.response.status_code"] == 200 and said["gen_ai.request.max_tokens"] == 8
    assert 0 < said["gen_ai.latency.time_to_first_token"] < 60
    event, = root.events
    assert event.name == "gen_ai.first_token" and root.start_time < event.timestamp < root.end_time
    assert all(root.start_time <= part.start_time <= part.end_time <= root.end_time for part in parts)
    assert "launch" not in str([span.to_json() for span in made.spans()])


def test_queue_prefill_and_decode_follow_each_other():
    from isthmus.core.server.metrics import Clock
    from isthmus.core.server.traces import parts
    clock = Clock(Metrics(), 5)
    clock.start, clock.queued, clock.first, clock.last = 10.0, 2.0, 15.0, 20.0
    assert parts(clock, 21.0) == [("queue", 10.0, 12.0), ("prefill", 12.0, 15.0), ("decode", 15.0, 20.0)]
    clock.first = None
    assert parts(clock, 21.0) == [("queue", 10.0, 12.0), ("prefill", 12.0, 21.0)]
    clock.queued = None
    assert parts(clock, 21.0) == [("queue", 10.0, 21.0)]


def test_a_trace_that_fails_harms_no_request(traced, caplog, monkeypatch):
    made = traced()
    monkeypatch.setattr("isthmus.core.server.traces.attributes", lambda *_: 1 / 0)
    with TestClient(made.app) as http:
        assert http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2}).status_code == 200
    assert "a trace was lost" in caplog.text


@pytest.mark.parametrize("header", ["", "00-0-0-0", "ff-" + "0" * 32 + "-" + "0" * 16 + "-01", "x" * 5000])
def test_a_parent_that_is_none_is_left_aside(traced, header):
    made = traced()
    with TestClient(made.app) as http:
        answer = http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2}, headers={"traceparent": header})
    assert answer.status_code == 200 and made.spans()[-1].parent is None


def test_traces_without_the_package_say_what_to_install(monkeypatch):
    from isthmus.core.server.traces import open_traces
    assert open_traces(None) is None
    for name in [name for name in sys.modules if name.startswith("opentelemetry")] + ["opentelemetry"]:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ConfigError, match=r"isthmus\[otel\]"):
        open_traces("http://127.0.0.1:4318/v1/traces")


def test_spans_reach_a_collector():
    """Over HTTP, with the name of the service that OpenTelemetry's own variable gives."""
    pytest.importorskip("opentelemetry.sdk")
    import http.server
    import threading
    bodies = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            bodies.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        address = f"http://127.0.0.1:{server.server_address[1]}/v1/traces"
        with TestClient(make_app(server={"otlp_endpoint": address}).app) as client:
            client.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2})
    finally:
        server.shutdown()
        server.server_close()
    (path, body), = bodies
    assert path == "/v1/traces" and b"text_completion tiny" in body and b"service.name" in body


# ---- logs

@pytest.mark.parametrize("contents", [False, True])
@pytest.mark.parametrize("stream", [False, True])
def test_contents_are_logged_only_where_that_was_asked_for(caplog, contents, stream):
    caplog.set_level(logging.DEBUG, logger="isthmus")
    made = make_app(server={"log_contents": contents}, text=SECRET + "\n" + "x" * 400)
    with TestClient(made.app) as http:
        http.post(COMPLETIONS, json={"prompt": "what is " + SECRET, "max_tokens": 30, "temperature": 0,
                                     "stream": stream})
    record, = [r for r in caplog.records if r.name == "isthmus.request"]
    line = record.getMessage()
    assert ("launch" in caplog.text) is contents and "\n" not in line
    if contents:
        assert 'output_text="the launch code is 0000\\n' in line and 'prompt_text="what is the launch' in line
        assert json.loads(JsonFormatter().format(record))["output_text"].startswith("the launch code is 0000\n")


# ---- dumps

def lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_requests_are_kept_without_keys_and_only_if_understood(tmp_path):
    file = tmp_path / "requests.jsonl"
    made = make_app(server={"dump_requests": str(file), "api_key": "sekret"})
    headers = {"Authorization": "Bearer sekret", "x-request-id": "mine", "content-type": "application/json"}
    with TestClient(made.app) as http:
        http.post(CHAT, content=b'{ "messages":\n [{"role": "user", "content": "a\\nb"}], "api_key": "sekret",'
                                b'"max_tokens": 2, "metadata": {"n": 1e5}}', headers=headers)
        http.post(COMPLETIONS, json={"prompt": "x", "max_tokens": 2, "stream": True}, headers=headers)
        http.post(COMPLETIONS, json={"prompt": "x"}, headers={"Authorization": "Bearer no"})
        http.post(COMPLETIONS, content=b"{not json", headers=headers)
        http.post(COMPLETIONS, json={"prompt": 5}, headers=headers)
    kept = lines(file)
    assert [(line["path"], line["id"]) for line in kept] == [(CHAT, "mine"), (COMPLETIONS, "mine")]
    assert kept[0]["body"] == {"messages": [{"role": "user", "content": "a\nb"}], "max_tokens": 2,
                               "metadata": {"n": 1e5}}
    assert "sekret" not in file.read_text() and file.stat().st_mode & 0o777 == 0o600
    assert kept[0]["time"] <= kept[1]["time"] and kept[0]["method"] == "POST"


def test_no_field_that_is_called_like_a_key_is_kept_wherever_it_is(tmp_path):
    file = tmp_path / "requests.jsonl"
    dump = open_dump(ServerSettings(dump_requests=str(file)))
    secrets = {name: "sekret" for name in (
        "api_key", "api-key", "apiKey", "x-api-key", "openai_api_key", "Authorization", "proxy-authorization", "bearer",
        "Token", "access_token", "HF_TOKEN", "password", "client_secret", "aws_secret_access_key", "Cookie")}
    plain = {"max_tokens": 5, "prompt_cache_key": "k", "stop_token_ids": [1], "add_special_tokens": True, "n": 10**30}
    tool = {"name": "log_in", "parameters": {"properties": {"token": {"type": "string"}, "headers": {"type": "object"}},
                                             "required": ["token"]}}
    body = {**plain, **secrets, "extra_headers": {"X-Mine": "sekret"}, "tools": [tool],
            "metadata": {**secrets, "deep": [[secrets, plain]]}, "properties": secrets,
            "chat_template_kwargs": {"bos_token": "<s>"}}
    dump.add("POST", CHAT, "", json.dumps(body).encode())
    dump.add("POST", CHAT, "", b'{"metadata": {"api\\u005fkey": "sekret", "\\u0061uth": "sekret"},'
                               b'"x": [1e5, "\\ud83d\\ude00"]}')
    dump.close()
    assert "sekret" not in file.read_text()
    assert [line["body"] for line in lines(file)] == [
        {**plain, "metadata": {"deep": [[{}, plain]]}, "tools": [tool], "properties": {},
         "chat_template_kwargs": {"bos_token": "<s>"}}, {"metadata": {}, "x": [1e5, "\U0001f600"]}]


def test_a_dump_is_bounded_and_goes_on_where_it_was(tmp_path, caplog):
    file = tmp_path / "requests.jsonl"
    for _ in range(2):
        dump = open_dump(ServerSettings(dump_requests=str(file), dump_limit="64KiB"))
        for i in range(100):
            dump.add("POST", CHAT, str(i), b'{"prompt": "' + b"x" * 500 + b'"}')
        dump.close()
    size = file.stat().st_size
    assert 65536 - 700 < size <= 65536 and len(lines(file)) == len(file.read_text().splitlines()) > 100
    assert caplog.text.count("--dump-limit") == 1


def test_a_slow_disk_loses_lines_and_delays_nobody(monkeypatch, caplog):
    monkeypatch.setattr("isthmus.core.server.request_dump.MAX_WAITING", 1000)
    read, write = os.pipe()
    os.set_blocking(write, True)
    dump = RequestDump(write, 0, 2**30)
    for i in range(400):
        dump.add("POST", CHAT, str(i), b'{"prompt": "' + b"x" * 500 + b'"}')
    assert dump._waiting <= 1000 and "too slow" in caplog.text
    os.close(read)  # the writer gets an error, and ends
    dump.close()


def test_a_dump_that_cannot_be_written_is_told_once_and_as_what_it_is(caplog):
    """A full disk is no --dump-limit: a pipe that nobody reads fails as a disk does."""
    read, write = os.pipe()
    os.close(read)
    dump = RequestDump(write, 0, 2**30)
    dump.add("POST", CHAT, "a", b'{"prompt": "x"}')
    dump._thread.join(60)  # the writer gets an error, and ends
    dump.add("POST", CHAT, "b", b'{"prompt": "x"}')
    assert "nothing more is kept: Broken pipe" in caplog.text and "--dump-limit" not in caplog.text


@pytest.mark.skipif(sys.platform == "win32", reason="modes of files")
def test_places_that_are_no_place_for_a_dump(tmp_path):
    public, link = tmp_path / "public", tmp_path / "link"
    public.touch(mode=0o644)
    public.chmod(0o644)
    link.symlink_to(tmp_path / "elsewhere")
    for path in (tmp_path, public, link, tmp_path / "no" / "folder", Path("/dev/null")):
        with pytest.raises(ConfigError, match="--dump-requests"):
            open_dump(ServerSettings(dump_requests=str(path)))
    assert open_dump(ServerSettings()) is None


# ---- a dashboard

def test_the_dashboard_shows_numbers_that_there_are(exported):
    """Every metric that a panel of the Grafana dashboard asks for, with the labels that it uses."""
    board = json.loads((ROOT / "docs/dashboards/isthmus.json").read_text())
    found, asked = samples(exported), set()
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    variables = [v["definition"] for v in board["templating"]["list"] if v["type"] == "query"]
    for text in expressions + variables:
        names = re.findall(r"\b(isthmus_\w+)", text)
        asked.update(names)
        used = set(re.findall(r"by \((\w+)\)", text)) - {"le"} | set(re.findall(r"\{(\w+)=~", text))
        assert names and all(used <= set(found[name][0].labels) for name in names if name in found), text
        assert text.count("(") == text.count(")") and text.count("{") == text.count("}")
    assert sorted(name for name in asked if name not in found) == []
    assert len(asked) > 25 and not any("://" in text for text in expressions)
    assert len({panel["id"] for panel in board["panels"]}) == len(board["panels"])


# ---- replay of requests

@pytest.fixture
def live():
    made = make_app(server={"api_key": "sekret"})
    with listening(made.app) as made.url:
        yield made


def write_dump(path: Path, *entries: dict | str) -> str:
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries))
    return str(path)


def test_a_dump_is_sent_again(live, tmp_path, capsys, monkeypatch):
    from isthmus.core.cli.main import main
    file = tmp_path / "requests.jsonl"
    with TestClient(make_app(server={"dump_requests": str(file)}).app) as http:
        for i in range(4):
            http.post(COMPLETIONS, json={"prompt": f"p{i}", "max_tokens": 3, "stream": i % 2 == 0, "seed": i})
    monkeypatch.setenv("ISTHMUS_API_KEY", "sekret")
    assert main(["replay-requests", str(file), "--url", live.url, "--speed", "0", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["requests"] == 4 and report["statuses"] == {"200": 4} and report["whole_answer"]["p50"] > 0
    assert sorted(s.params.seed for s in live.client.submits) == [0, 1, 2, 3]
    assert main(["replay-requests", str(file), "--url", live.url, "--limit", "2", "--api-key", "wrong"]) == 1
    said = capsys.readouterr().out
    assert "2 requests" in said and "2 failed" in said and "401" in said


def test_requests_come_at_their_times(monkeypatch):
    from isthmus.core.cli.posting import Reply
    from isthmus.core.cli.replay_requests import Kept, Replay, quantiles, text
    now, slept = [0.0], []
    monkeypatch.setattr("isthmus.core.cli.replay_requests.time.monotonic", lambda: now[0])
    monkeypatch.setattr("isthmus.core.cli.replay_requests.time.sleep", slept.append)
    poster = type("P", (), {"post": lambda self, *_, keep: Reply(200, b"", "", 0.5, 1.0)})()
    replay = Replay(poster, 2.0, 2)
    replay.send(Kept(10.0, CHAT, b"{}"))
    now[0] = 9.0
    replay.send(Kept(11.0, CHAT, b"{}"))
    assert slept == [5.0, 0.0] and replay.late == 3.5
    assert "3.5 s later" in text(replay.report())
    assert replay.report()["first_byte"] == {"p50": 0.5, "p90": 0.5, "p99": 0.5}
    assert quantiles([]) == {} and quantiles(range(1, 101)) == {"p50": 50, "p90": 90, "p99": 99}


@pytest.mark.parametrize("entry", [
    "nonsense", "[1]", {"time": "x", "path": CHAT, "body": {}}, {"path": CHAT, "body": {}},
    {"time": 10**400, "path": CHAT, "body": {}},
    {"time": 1, "path": "http://evil/", "body": {}}, {"time": 1, "path": CHAT, "body": 5},
    {"time": 1, "path": CHAT + "\r\nx: y", "body": {}}, {"time": 1, "path": CHAT, "body": {}, "method": "DELETE"}])
def test_what_is_no_dump_is_named_by_its_line(entry, tmp_path):
    from isthmus.core.cli.replay_requests import list_requests
    good = {"time": 1.0, "id": "a", "method": "POST", "path": CHAT, "body": {"messages": []}}
    file = write_dump(tmp_path / "d.jsonl", good, "", entry)
    with pytest.raises(ConfigError, match="line 3: this is no request"):
        list(list_requests(Path(file), None))
    assert [kept.path for kept in list_requests(Path(file), 1)] == [CHAT]


def test_words_that_replay_cannot_take(tmp_path, capsys):
    from isthmus.core.cli.main import main
    file = write_dump(tmp_path / "d.jsonl")
    for words, reason in (([], "which dump"), ([str(tmp_path / "no")], "no such file"), ([str(tmp_path)], "regular"),
                          ([file, "--speed", "-1"], "--speed"), ([file, "--speed", "nan"], "--speed"),
                          ([file, "--concurrency", "0"], "--concurrency"), ([file, "--limit", "0"], "--limit"),
                          ([file, "--url", "ftp://x"], "--url")):
        assert main(["replay-requests", *words]) == 2
        assert reason in capsys.readouterr().err
    assert main(["replay-requests", file, "--url", "http://127.0.0.1:9"]) == 0, "nothing to send"
