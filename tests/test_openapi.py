"""`/openapi.json` describes what the server does: paths, bodies and refusals."""
from __future__ import annotations

import json
import re

import jsonschema
import pytest
from isthmus.core.server.app import ROUTES
from isthmus.core.server.field_help import WORDS
from isthmus.core.server.openapi import BODIES, describe
from starlette.testclient import TestClient

from .fake_client import make_app

COST = 6  # seconds


@pytest.fixture(scope="module")
def spec():
    return describe(ROUTES, True)


def test_every_route_is_there_and_every_body_belongs_to_one(spec):
    paths = {re.sub(r":\w+\}", "}", path) for _, path, _ in ROUTES if not path.startswith("/page/")}
    assert set(spec["paths"]) == paths and set(BODIES) <= paths
    for path in BODIES:
        assert "requestBody" in spec["paths"][path]["post"]
    posts = {path for path, methods in spec["paths"].items() if "post" in methods}
    assert posts - set(BODIES) == {"/abort_request", "/flush_cache", "/v1/responses/{id}/cancel"}, "have a body that is"


def test_references_lead_somewhere_and_schemas_are_json_schemas(spec):
    text = json.dumps(spec)
    names = set(re.findall(r'"#/components/schemas/(\w+)"', text))
    assert names <= set(spec["components"]["schemas"]) and "$defs" not in text
    for schema in spec["components"]["schemas"].values():
        jsonschema.Draft202012Validator.check_schema(schema)


def test_every_spelling_of_a_field_is_there(spec):
    chat, sampling = ({name: {**field, "description": ""} for name, field in spec["components"]["schemas"][model][
        "properties"].items()} for model in ("ChatRequest", "SamplingFields"))
    assert chat["max_tokens"] == chat["max_completion_tokens"] == chat["max_new_tokens"]
    assert sampling["sampling_seed"] == sampling["seed"]


def test_every_field_says_what_it_means_and_every_meaning_has_a_field(spec):
    schemas = {name: schema["properties"] for name, schema in spec["components"]["schemas"].items()
               if "properties" in schema and name != "Error"}
    for model in ("ChatRequest", "CompletionRequest", "GenerateRequest", "EmbeddingRequest", "RerankRequest"):
        silent = [name for name, field in schemas[model].items() if not field.get("description")]
        assert not silent, f"core/server/field_help.py has no words for {model}: {silent}"
    known = {name for fields in schemas.values() for name in fields}
    known |= {f"{model}.{name}" for model, fields in schemas.items() for name in fields}
    assert not set(WORDS) - known


def test_operations_have_names_of_their_own_and_words(spec):
    operations = [about for methods in spec["paths"].values() for about in methods.values()]
    ids = [about["operationId"] for about in operations]
    assert len(set(ids)) == len(ids)
    assert all(about["summary"].count(" ") > 1 and "`GET" not in about["summary"] for about in operations)
    assert spec["security"] == [{"key": []}] and "security" not in describe(ROUTES, False)


def test_what_the_schema_takes_the_server_takes_and_what_it_refuses_is_refused(spec):
    schema = {**spec["paths"]["/v1/completions"]["post"]["requestBody"]["content"]["application/json"]["schema"],
              "components": spec["components"]}
    http = TestClient(make_app().app)
    for body, good in (({"prompt": "x", "max_tokens": 3}, True), ({"prompt": "x", "temperature": 3}, False),
                       ({"prompt": "x", "top_p": "1"}, False), ({"prompt": "x", "n": 0}, False),
                       ({"prompt": ["x", "y"], "max_tokens": 2, "stop": None}, True)):
        valid = jsonschema.Draft202012Validator(schema).is_valid(body)
        status = http.post("/v1/completions", json=body).status_code
        assert valid == good == (status == 200), (body, status)


def test_it_is_served_with_the_key_and_the_page_about_it_without():
    http = TestClient(make_app(server={"api_key": "sekret"}).app)
    assert http.get("/openapi.json").status_code == 401 and http.get("/docs").status_code == 200
    found = http.get("/openapi.json", headers={"authorization": "Bearer sekret"})
    assert found.status_code == 200 and found.json()["openapi"] == "3.1.0"


PLACES = {"ChatRequest": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}, {"logprobs": True}),
          "CompletionRequest": ("/v1/completions", {"prompt": "a"}, {}),
          "SamplingFields": ("/generate", {"text": "a"}, {}),
          "ResponsesRequest": ("/v1/responses", {"input": "a"}, {"include": ["message.output_text.logprobs"]}),
          "MessagesRequest": ("/v1/messages", {"max_tokens": 4, "messages": [{"role": "user", "content": "a"}]}, {})}


@pytest.mark.parametrize("name", PLACES)
def test_bounds_that_are_shown_are_those_that_hold(name):
    made = make_app(server={"max_n": 3})
    path, body, beside = PLACES[name]
    with TestClient(made.app) as http:
        fields = http.get("/openapi.json").json()["components"]["schemas"][name]["properties"]
        told = 0
        for field, about in fields.items():
            for kind in about.get("anyOf", [about]):
                beyond = [kind["minimum"] - 1] if "minimum" in kind else []
                beyond += [kind["maximum"] + 1] if "maximum" in kind else []
                beyond += [kind["exclusiveMaximum"]] if "exclusiveMaximum" in kind else []
                beyond += [["a"] * (kind["maxItems"] + 1)] if "maxItems" in kind else []
                for value in beyond:
                    wrong = {field: value}
                    sent = body | beside | ({"sampling_params": wrong} if path == "/generate" else wrong)
                    assert http.post(path, json=sent).status_code == 400, (field, value)
                    told += 1
        assert told > 20 and not made.client.submits
    if name in ("ChatRequest", "CompletionRequest", "SamplingFields"):
        assert {kind.get("maximum") for kind in fields["n"]["anyOf"]} == {3, None}


def test_what_the_platform_bounds_is_shown():
    made = make_app()
    made.client.info["max_top_logprobs"] = 5
    with TestClient(made.app) as http:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
    shown = [kind["maximum"] for model, field in (
        ("ChatRequest", "top_logprobs"), ("CompletionRequest", "logprobs"), ("GenerateRequest", "top_logprobs_num"))
        for kind in schemas[model]["properties"][field]["anyOf"] if kind["type"] == "integer"]
    assert shown == [5, 5, 5]


@pytest.mark.parametrize(("may_cut", "least"), [(False, 64), (True, 1)])
def test_dimensions_that_are_shown_are_those_that_there_are(may_cut, least):
    made = make_app(model={"embedding_truncation": may_cut})
    made.client.info["vector_size"] = 64
    with TestClient(made.app) as http:
        schemas = http.get("/openapi.json").json()["components"]["schemas"]
        for model, path in (("EmbeddingRequest", "/v1/embeddings"), ("OllamaEmbedBody", "/api/embed")):
            shown = next(kind for kind in schemas[model]["properties"]["dimensions"]["anyOf"]
                         if kind["type"] == "integer")
            assert (shown["minimum"], shown["maximum"], "exclusiveMaximum" in shown) == (least, 64, False)
            for wrong in (least - 1, 65):
                assert http.post(path, json={"input": "a", "dimensions": wrong}).status_code == 400
