"""Keys, host names, web pages of others, and what CVEs of other servers were about (docs/security.md)."""
from __future__ import annotations

import asyncio
import http.server
import json
import logging
import re
import threading
from pathlib import Path
from urllib.parse import unquote

import pytest
from isthmus.core.cli.serve import check_security
from isthmus.core.config import Config, ModelSettings, ServerSettings
from isthmus.core.errors import ConfigError, IsthmusError, RequestError
from isthmus.core.server import access
from isthmus.core.server.access import Access, access_of, host_name
from isthmus.core.server.limits import MAX_TOKENIZE
from starlette.testclient import TestClient

from .fake_client import drive, make_app

COST = 10  # seconds

ROOT = Path(__file__).resolve().parent.parent
CHAT = "/v1/chat/completions"
HI = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def asked(method: str, path: str, **headers: str) -> dict:
    fields = [(key.replace("_", "-").encode(), value.encode()) for key, value in headers.items()]
    return {"type": "http", "method": method, "path": path, "headers": fields}


def code(answer) -> tuple[int, str]:
    return answer.status_code, answer.json()["error"]["code"]


# ---- who may do what concerns everybody

@pytest.mark.parametrize("server, sent, flush", [
    ({}, None, 200), ({"api_key": "a"}, "a", 200), ({"api_key": "a"}, None, 401), ({"api_key": "a,b"}, "a", 403),
    ({"admin_api_key": "root"}, None, 401), ({"admin_api_key": "root"}, "root", 200),
    ({"admin_api_key": "root"}, "x", 401), ({"api_key": "a", "admin_api_key": "root"}, "a", 403),
    ({"api_key": "a", "admin_api_key": "root"}, "root", 200), ({"api_key": "a,b", "admin_api_key": "root"}, "b", 403)])
def test_who_may_flush_the_cache(server, sent, flush):
    with TestClient(make_app(server=server).app) as http:
        for method in ("GET", "POST"):
            answer = http.request(method, "/flush_cache", headers=bearer(sent) if sent else {})
            assert answer.status_code == flush, answer.text
            if flush != 200:
                error = answer.json()["error"]
                assert error["code"] == {401: "invalid_api_key", 403: "admin_key_required"}[flush]


def test_the_admin_key_opens_the_rest_too_and_nobody_else_without_a_key():
    with TestClient(make_app(server={"api_key": "a", "admin_api_key": "root"}).app) as http:
        for key, status in (("a", 200), ("root", 200), ("roo", 401), ("", 401)):
            assert http.post(CHAT, json=HI, headers=bearer(key)).status_code == status
    with TestClient(make_app(server={"admin_api_key": "root"}).app) as http:  # for users there is no key
        assert http.post(CHAT, json=HI, headers=bearer("whatever")).status_code == 200


@pytest.mark.parametrize("path", sorted(access.GUARDED_PATHS))
def test_what_reads_files_that_the_caller_names_is_off_without_an_admin_key(path):
    for keys in ({}, {"api_key": "a"}):
        with TestClient(make_app(server=keys).app) as http:
            assert code(http.post(path, json={}, headers=bearer("a"))) == (403, "endpoint_off")
    with TestClient(make_app(server={"api_key": "a", "admin_api_key": "root"}).app) as http:
        assert code(http.post(path, json={}, headers=bearer("a"))) == (403, "admin_key_required")
        assert http.post(path, json={}, headers=bearer("root")).status_code in (200, 400, 404, 409)


def test_a_tenant_ends_only_its_own_requests():
    made = make_app(server={"api_key": "a,b", "admin_api_key": "root"})
    server, ended = made.app.state.server, []

    async def abort(id):
        ended.append(id)

    made.client.abort = abort
    with TestClient(made.app) as http:
        def end(key, **body):
            return http.post("/abort_request", json=body, headers=bearer(key))

        caller = server.caller(type("R", (), {"scope": asked("POST", "/", authorization="Bearer a")}))
        server.running[caller.tenant, "r"] = ("r",)
        assert end("b", rid="r").json() == {"aborted": 0} and not ended
        assert code(end("a", abort_all=True)) == (403, "admin_key_required")
        assert end("a", rid="r").json() == {"aborted": 1}
        assert end("root", rid="r").json() == {"aborted": 1}
        assert end("root", abort_all=True).json() == {"aborted": 1}
        server.running.clear()


def test_server_info_tells_users_no_paths_where_there_is_an_admin_key():
    made = make_app(server={"api_key": "a", "admin_api_key": "root"})
    with TestClient(made.app) as http:
        mine, theirs = (http.get("/server_info", headers=bearer(key)).json() for key in ("root", "a"))
        assert mine["info"]["model"] == "/models/tiny" and "model" not in theirs["info"]
        assert theirs["info"]["max_model_len"] == mine["info"]["max_model_len"]
        assert "/models/tiny" not in http.get("/v1/models", headers=bearer("a")).text


def test_the_time_of_a_comparison_tells_nothing_of_a_key():
    text = (ROOT / "core/server/access.py").read_text()
    assert "hmac.compare_digest" in text and " == good" not in text


# ---- names of the server: pages that have turned their own name to this machine

@pytest.mark.parametrize("host, status", [
    ("127.0.0.1:8000", 200), ("localhost", 200), ("LOCALHOST:8000", 200), ("[::1]:8000", 200), ("192.168.0.7", 200),
    ("app.localhost:1", 200), ("host.docker.internal:8000", 200), ("box:8000", 200), ("evil.example", 403),
    ("127.0.0.1.evil.example", 403), ("localhost.evil.example:8000", 403), ("evil.example/127.0.0.1", 403),
    ("", 403), ("box.evil.example", 403), ("127.0.0.1:8000@evil.example", 403)])
def test_a_local_server_without_a_key_answers_to_local_names_only(host, status, monkeypatch):
    monkeypatch.setattr(access.socket, "gethostname", lambda: "Box")
    rules = access_of(ServerSettings(), lambda: "Box")
    error = rules.refusal(asked("POST", CHAT, host=host))
    assert (200 if error is None else error.status) == status
    if error:
        assert error.code == "host_not_allowed" and "--allowed-hosts" in error.message


def test_host_names_that_are_set_are_the_only_ones():
    rules = access_of(ServerSettings(host="0.0.0.0", api_key="k",
                                     allowed_hosts=("Llm.example.com", "*.in.example.com")))
    for host, good in (("llm.example.com:443", True), ("a.b.in.example.com", True), ("in.example.com", False),
                       ("example.com", False), ("10.0.0.1", True), ("localhost", True), ("llm.example.com.", True)):
        error = rules.refusal(asked("GET", "/health", host=host))
        assert (error is None) is good, host
    two = asked("GET", "/health", host="localhost")
    two["headers"].append((b"host", b"evil.example"))
    assert rules.refusal(two).status == 403
    for settings in (ServerSettings(host="0.0.0.0"), ServerSettings(api_key="k"), ServerSettings(allowed_hosts=("*",))):
        assert access_of(settings).hosts == ()


def test_a_refused_name_is_an_answer_in_the_usual_form():
    made = make_app(server={"allowed_hosts": ()})
    sent = asyncio.run(drive(made.app, CHAT, json.dumps(HI).encode(), headers={"host": "evil.example"}))
    assert sent[0]["status"] == 403 and not made.client.submits
    assert json.loads(sent[1]["body"])["error"]["type"] == "permission_error"


@pytest.mark.parametrize("value", ["a b", "a:b:c", "é", "a/b", "[::1", "x" * 10 + "\n", "@"])
def test_what_is_no_host(value):
    assert host_name(value) is None


# ---- web pages of others

@pytest.mark.parametrize("method, path, headers, good", [
    ("POST", "/flush_cache", {}, True), ("POST", "/flush_cache", {"origin": "http://evil.example"}, False),
    ("GET", "/flush_cache", {"sec_fetch_site": "cross-site"}, False),
    ("GET", "/flush_cache", {"sec_fetch_site": "same-site"}, False),
    ("GET", "/flush_cache", {"sec_fetch_site": "none"}, True),
    ("POST", CHAT, {"origin": "http://localhost:8000"}, True), ("POST", CHAT, {"origin": "null"}, False),
    ("POST", CHAT, {"origin": "https://llm.example", "sec_fetch_site": "same-origin"}, True),
    ("POST", CHAT, {"origin": "http://localhost:3000", "sec_fetch_site": "same-site"}, False),
    ("DELETE", "/v1/sessions/x/pin", {"origin": "http://localhost:80"}, False),
    ("GET", "/v1/models", {"origin": "http://evil.example", "sec_fetch_site": "cross-site"}, True)])
def test_a_page_of_another_origin_changes_nothing(method, path, headers, good):
    error = Access().refusal(asked(method, path, host="localhost:8000", **headers))
    assert (error is None) is good
    if error:
        assert (error.status, error.code) == (403, "origin_not_allowed") and "--cors-origins" in error.message


def test_no_page_may_read_an_answer_unless_its_origin_is_named():
    page = {"Origin": "https://app.example.com"}
    preflight = {**page, "Access-Control-Request-Method": "POST",
                 "Access-Control-Request-Headers": "authorization,content-type"}
    with TestClient(make_app(server={"api_key": "k"}).app) as http:
        answers = (http.options(CHAT, headers=preflight), http.get("/v1/models", headers={**page, **bearer("k")}))
        assert not [name for answer in answers for name in answer.headers if name.startswith("access-control")]
    with TestClient(make_app(server={"api_key": "k", "cors_origins": ("https://app.example.com",)}).app) as http:
        allowed = http.options(CHAT, headers=preflight)
        assert allowed.status_code == 200, "a browser sends no key with it"
        assert allowed.headers["access-control-allow-origin"] == page["Origin"]
        assert "authorization" in allowed.headers["access-control-allow-headers"]
        assert "access-control-allow-credentials" not in allowed.headers
        answer = http.post(CHAT, json=HI, headers={**page, **bearer("k"), "Sec-Fetch-Site": "cross-site"})
        assert answer.status_code == 200 and answer.headers["access-control-allow-origin"] == page["Origin"]
        wrong = http.post(CHAT, json=HI, headers=page)
        assert wrong.status_code == 401 and wrong.headers["access-control-allow-origin"] == page["Origin"]
        other = {**preflight, "Origin": "https://evil.example"}
        assert "access-control-allow-origin" not in http.options(CHAT, headers=other).headers


@pytest.mark.parametrize("settings", [
    {"cors_origins": ("app.example.com",)}, {"cors_origins": ("https://a.example/",)}, {"cors_origins": ("https://",)},
    {"allowed_hosts": ("a.example:80",)}, {"allowed_hosts": ("http://a.example",)}, {"allowed_hosts": ("a*.example",)},
    {"tls_key": "key.pem"}, {"tls_cert": "/nowhere/cert.pem"}])
def test_rules_that_cannot_be_meant_are_refused_before_the_model_loads(settings):
    with pytest.raises(ConfigError, match="|".join(name.replace("_", "-") + "|TLS" for name in settings)):
        check_security(Config(server=ServerSettings(**settings)))


# ---- kinds of holes that others had

@pytest.fixture
def spy():
    """A server of whose every visitor is told."""
    visits = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            visits.append(self.path)
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    server.visits = visits
    yield server
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize("url", [
    "http://127.0.0.1:{port}/a.png", "http://localhost:{port}/a.png", "//127.0.0.1:{port}/a",
    "http://example.com\\@127.0.0.1:{port}/", "file:///etc/passwd", "data:image/png;base64,AA"])
def test_no_address_of_a_request_is_ever_visited(url, spy):
    place = url.format(port=spy.server_address[1])
    parts = [{"type": "image_url", "image_url": {"url": place}}, {"type": "input_image", "image_url": place},
             {"type": "input_audio", "input_audio": {"data": place}},
             {"type": "video_url", "video_url": {"url": place}},
             {"type": "file", "file": {"file_id": place}}]
    with TestClient(make_app().app) as http:
        for part in parts:
            answer = http.post(CHAT, json={"messages": [{"role": "user", "content": [part]}]})
            assert code(answer) == (400, "unsupported_parameter")
        for field in ("image_data", "audio_data", "video_data"):
            assert http.post("/generate", json={"text": "x", field: place}).status_code == 400
        text = f"![x]({place}) {place}"  # as in a text that one server searched for images
        body = {"messages": [{"role": "user", "content": text}], "max_tokens": 1}
        assert http.post(CHAT, json=body).status_code == 200
    assert spy.visits == []


@pytest.mark.parametrize("field, value", [
    ("custom_logit_processor", "gASVIAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAJpZJSFlFKULg=="), ("prompt_embeds", "AAAA"),
    ("chat_template", "{{ ''.__class__.__mro__ }}"), ("logits_processors", ["os.system"])])
def test_code_and_tensors_from_clients_are_refused(field, value):
    made = make_app()
    with TestClient(made.app) as http:
        # There is no processor of that name.
        expected = "invalid_value" if field == "logits_processors" else "unsupported_parameter"
        assert code(http.post(CHAT, json={**HI, field: value})) == (400, expected)
    assert not made.client.submits


def test_nothing_is_unpickled_or_evaluated():
    """Neither from a socket nor from a file: there is no such call in the engine."""
    forbidden = re.compile(r"^\s*(import|from) (pickle|cPickle|dill|cloudpickle|marshal|shelve|joblib)\b|recv_pyobj|"
                           r"send_pyobj|(?<![\w.])(eval|exec)\(|torch\.load\(|trust_remote_code=True|allow_pickle=True",
                           re.MULTILINE)
    found = [f"{path.relative_to(ROOT)}: {match[0].strip()}" for folder in ("core", "platforms", "package")
             for path in (ROOT / folder).rglob("*.py") for match in forbidden.finditer(path.read_text())]
    assert found == []


def test_no_shell_is_started():
    found = [str(path.relative_to(ROOT)) for path in (ROOT / "core").rglob("*.py")
             if re.search(r"shell=True|os\.system\(|os\.popen\(", path.read_text())]
    assert found == []


@pytest.mark.parametrize("body", [{"n": 10**12}, {"n": 10**30}, {"n": 129}, {"max_tokens": -1}, {"min_tokens": -5},
                                  {"temperature": float("nan")}, {"top_k": -2}, {"seed": 2**70}, {"logprobs": -1},
                                  {"logit_bias": {"-1": 1}}, {"logit_bias": {"999999999": 1}}, {"stop_token_ids": [-1]},
                                  {"chat_template_kwargs": {"chat_template": "{{ 7 * 7 }}"}},
                                  {"chat_template_kwargs": {"tokenize": False}}])
def test_numbers_out_of_range_reach_no_engine(body):
    made = make_app()
    with TestClient(made.app) as http:
        text = json.dumps({**HI, **body})
        answer = http.post(CHAT, content=text, headers={"content-type": "application/json"})
        assert 400 <= answer.status_code < 500 and not made.client.submits, answer.text


def test_the_log_has_no_keys_at_any_level(caplog):
    caplog.set_level(logging.DEBUG)
    keys = ("sekret-user-key", "sekret-admin-key", "sekret-wrong-key")
    made = make_app(server={"api_key": keys[0], "admin_api_key": keys[1]})
    with TestClient(made.app) as http:
        for key in keys:
            for path in (CHAT, "/flush_cache", "/nowhere", f"/v1/models?api_key={key}"):
                http.post(path, json={**HI, "user": "x"}, headers={**bearer(key), "x-session-id": "s"})
                http.get(path, headers={"x-api-key": key})
        everything = "".join(record.getMessage() for record in caplog.records if record.name.startswith("isthmus"))
        everything += http.get("/server_info", headers=bearer(keys[1])).text
        everything += http.get("/metrics", headers=bearer(keys[1])).text
    assert "sekret" not in everything


def test_no_setting_with_a_key_is_shown_or_recorded(tmp_path):
    from isthmus.core.recording.recorder import make_header
    from isthmus.core.settings import SECRET, list_settings, shown
    secret = {name for name in list_settings() if "api_key" in name or "password" in name or "token" == name}
    assert secret == set(SECRET)
    config = Config(server=ServerSettings(api_key="sekret", admin_api_key="sekret2"))
    assert all(shown(config, list_settings()[name]) == "(hidden)" for name in SECRET)
    loaded = type("L", (), {name: None for name in ("manifest", "sizes", "dtype", "overlap", "reason", "path")})()
    loaded.model = type("M", (), {"config": None, "nbytes": 0})()
    assert "sekret" not in str(make_header(config, loaded))


@pytest.mark.parametrize("host", ["localhost/health?", "localhost/health#", "x/dashboard?", "[::1]/health?", ""])
def test_no_host_name_goes_around_the_key(host):
    """What a key is asked for is the path of the request line, and not one that is put together with a header."""
    made = make_app(server={"api_key": "k"})
    for headers in ({"host": host}, {"host": host, "x-forwarded-path": "/health", "x-original-url": "/health"}):
        sent = asyncio.run(drive(made.app, CHAT, json.dumps(HI).encode(), headers=headers))
        assert sent[0]["status"] == 401 and not made.client.submits


def test_no_code_of_a_model_is_run(tmp_path):
    from isthmus.core.models.loader import read_config
    from isthmus.core.server.text_service import open_text
    from isthmus.core.weights.checkpoint import open_checkpoint

    from .checkpoints import tiny_llama_folder
    folder = tiny_llama_folder(tmp_path / "model")
    marker = tmp_path / "marker"
    code = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass Tokenizer: pass\nConfig = Tokenizer\n"
    for name in ("configuration_x.py", "tokenization_x.py", "modeling_x.py", "__init__.py", "setup.py"):
        (folder / name).write_text(code)
    for name, entry in (("config.json", {"AutoConfig": "configuration_x.Config", "AutoModel": "modeling_x.Tokenizer"}),
                        ("tokenizer_config.json", {"AutoTokenizer": ["tokenization_x.Tokenizer", None]})):
        file = folder / name
        found = json.loads(file.read_text()) if file.exists() else {}
        file.write_text(json.dumps({**found, "auto_map": entry, "trust_remote_code": True}))
    with open_checkpoint(str(folder)) as checkpoint:
        read_config(checkpoint)
    try:
        open_text(Config(model=ModelSettings(str(folder))))
    except IsthmusError:  # this folder has no tokenizer
        pass
    assert not marker.exists()


@pytest.mark.parametrize("path", [
    "/../../etc/passwd", "/page/../../pyproject.toml", "/page/%2e%2e/app.py", "/dashboard/../x",
    "/page/..%2f..%2fetc%2fpasswd", "/v1/models/../../etc/passwd", "/page//etc/passwd"])
def test_paths_of_requests_open_no_file(path):
    made = make_app()
    raw = {"type": "http", "method": "GET", "scheme": "http", "http_version": "1.1", "query_string": b"",
           "root_path": "", "server": ("localhost", 80), "headers": [(b"host", b"localhost")]}
    for form in (path, unquote(path)):
        sent = []

        async def send(message, sent=sent):
            sent.append(message)

        asyncio.run(made.app({**raw, "path": form, "raw_path": path.encode()}, None, send))
        body = b"".join(m.get("body", b"") for m in sent)
        assert sent[0]["status"] in (400, 404) and b"root:" not in body and b"[project]" not in body


def test_a_redirect_is_not_followed_with_the_key(spy):
    from isthmus.core.cli.backends import RemoteBackend
    asked = []

    class Elsewhere(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.headers["Authorization"])
            self.send_response(302)
            self.send_header("Location", f"http://127.0.0.1:{spy.server_address[1]}/steal")
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with pytest.raises(RequestError, match="302"):
            RemoteBackend(f"http://127.0.0.1:{server.server_address[1]}", None, "k").get_json("GET", "/v1/models")
    finally:
        server.shutdown()
        server.server_close()
    assert asked == ["Bearer k"] and spy.visits == []


@pytest.mark.parametrize("path, body", [
    ("/v1/completions", {"prompt": ""}), ("/v1/completions", {"prompt": []}), ("/v1/completions", {"prompt": [[]]}),
    ("/v1/completions", {"prompt": [""]}), ("/generate", {"text": ""}), ("/generate", {"input_ids": []}),
    ("/v1/chat/completions", {"messages": []})])
def test_an_empty_prompt_is_a_400(path, body):
    made = make_app()
    with TestClient(made.app) as http:
        assert http.post(path, json=body).status_code == 400 and not made.client.submits


def test_texts_to_tokenize_are_bounded():
    with TestClient(make_app().app) as http:
        assert http.post("/tokenize", json={"prompt": "x" * (MAX_TOKENIZE + 1)}).status_code == 413
        assert http.post("/v1/completions", json={"prompt": "x" * MAX_TOKENIZE}).status_code == 400


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "zstd"])
def test_packed_bodies_are_not_unpacked(encoding):
    import gzip
    body = gzip.compress(b'{"prompt": "' + b"x" * 10**7 + b'"}')
    with TestClient(make_app().app) as http:
        answer = http.post("/v1/completions", content=body, headers={"content-type": "application/json",
                                                                     "content-encoding": encoding})
        assert code(answer) == (400, "invalid_json")


def test_the_tests_that_the_page_names_exist():
    page = (ROOT / "docs/security.md").read_text()
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", page))
    assert len(named) > 30
    missing = [f"{file}::{name}" for file, name in sorted(named)
               if f"def {name}(" not in (ROOT / "tests" / file).read_text()]
    assert missing == []
    rows = [line for line in page.splitlines() if re.search(r"CVE-\d{4}-\d+|GHSA-|GO-\d{4}", line) and line[0] == "|"]
    assert len(rows) > 20 and not [row for row in rows if "`test_" not in row]
