"""Programs that people run against a server: `llm`, schemathesis, lm-eval, guidellm; skipped where they are not."""
from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sysconfig
from pathlib import Path

import pytest

from .scripted import CALL, CITY, KEY, SCHEMA, THOUGHT, talking, whole_server

COST = 3  # seconds; some 20 where all of them are installed


@pytest.fixture(scope="module")
def live():
    with talking() as made:
        yield made


def command(name: str, module: str) -> str:
    """The path of a program of this environment; the test is skipped where there is none."""
    path = Path(sysconfig.get_path("scripts"), name)
    if importlib.util.find_spec(module) is None or not path.is_file():
        pytest.skip(f"the command {name} is not installed")
    return str(path)


def run(words: list[str], folder: Path, timeout: float = 600, **environment: str) -> subprocess.CompletedProcess:
    """In a folder of the test's own, where they may leave what they like."""
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    return subprocess.run(words, capture_output=True, text=True, timeout=timeout, stdin=subprocess.DEVNULL,
                          cwd=folder, env=kept | environment)


@pytest.fixture
def llm(live, tmp_path):
    """Runs the command with words, in a folder of its own in which this server's models are."""
    path = command("llm", "llm")
    entry = {"model_name": "tiny", "api_base": live.url + "/v1", "api_key_name": "mine", "supports_tools": True,
             "supports_schema": True}
    entries = [{"model_id": "chat", **entry}, {"model_id": "texts", **entry, "completion": True}]
    (tmp_path / "extra-openai-models.yaml").write_text(json.dumps(entries))  # which is YAML
    (tmp_path / "keys.json").write_text(json.dumps({"mine": KEY}))

    def started(*words: str) -> str:
        done = run([path, *words], tmp_path, LLM_USER_PATH=str(tmp_path), LLM_LOAD_PLUGINS="")
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout
    return started


@pytest.mark.slow
def test_llm_prompts_goes_on_and_streams(live, llm):
    live.says(THOUGHT, "And more.", "whole", "text")
    assert llm("-m", "chat", "Hi") == "so be it\n"
    assert llm("-c", "And?") == "And more.\n" and "so be it" in live.script.prompts[-1]
    assert llm("-m", "chat", "--no-stream", "Hi") == "whole\n"
    assert llm("-m", "texts", "Hi") == "text\n"


@pytest.mark.slow
def test_llm_has_schemas_and_tools(live, llm):
    live.says(CITY, CALL, "Rain.")
    assert json.loads(llm("-m", "chat", "--schema", json.dumps(SCHEMA), "Hi")) == {"city": "Oslo"}
    code = 'def weather(city: str) -> str:\n    "Of a city."\n    return city + " has rain"'
    assert llm("-m", "chat", "--functions", code, "Hi").endswith("Rain.\n")
    assert "Oslo has rain" in live.script.prompts[-1]


@pytest.fixture
def whole(tmp_path):
    with whole_server(tmp_path) as url:
        yield url


@pytest.mark.slow
def test_schemathesis_finds_no_server_error(whole, tmp_path):
    """What it makes of `/openapi.json` is answered below 500, whatever it is; `SCHEMATHESIS_EXAMPLES`: bodies for each
    operation, beside the thousands that cover the schema."""
    st = command("st", "schemathesis")
    words = ["run", whole + "/openapi.json", "--url", whole, "--header", f"Authorization: Bearer {KEY}",
             "--checks", "not_a_server_error", "--max-examples", os.environ.get("SCHEMATHESIS_EXAMPLES", "5"),
             "--phases", "examples,coverage,fuzzing", "--no-color", "--seed", "1", "--request-timeout", "60"]
    done = run([st, *words], tmp_path, timeout=3600)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]


TASK = """task: tiny
dataset_path: json
dataset_kwargs: {data_files: {test: FILE}}
test_split: test
output_type: KIND
doc_to_text: "{{question}}"
doc_to_target: "{{answer}}"
"""
CHOICES = TASK.replace("KIND", "multiple_choice") + 'doc_to_choice: "{{choices}}"\nmetric_list: [{metric: acc}]\n'
WRITTEN = TASK.replace("KIND", "generate_until") + """generation_kwargs: {until: ["\\n"], max_gen_toks: 40}
metric_list: [{metric: exact_match}]
"""


@pytest.fixture
def lm_eval(live, tmp_path):
    """The results of a task of these lines by a model of lm-eval's, without a hub."""
    path = command("lm_eval", "lm_eval")

    def evaluated(task: str, lines: list[dict], model: str, api: str, *words: str) -> dict:
        data = tmp_path / "tiny.jsonl"
        data.write_text("".join(json.dumps(line) + "\n" for line in lines))
        (tmp_path / "tiny.yaml").write_text(task.replace("FILE", str(data)))
        done = run([path, "--model", model, "--tasks", "tiny", "--include_path", str(tmp_path), "--output_path",
                    str(tmp_path / "out"), "--model_args", f"model=tiny,base_url={live.url}/v1/{api},auth_token={KEY},"
                    "num_concurrent=1,max_retries=1", *words], tmp_path,
                   OPENAI_API_KEY=KEY, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
        found, = (tmp_path / "out").rglob("results*.json")
        return json.loads(found.read_text())["results"]["tiny"]
    return evaluated


@pytest.mark.slow
@pytest.mark.parametrize("batch", ["1", "3"])
def test_lm_eval_asks_for_the_probability_of_texts(live, lm_eval, batch):
    """Tokens of this model are bytes and all as likely: of two answers the shorter is its choice."""
    lines = [{"question": f"{i} or", "choices": ["more of it", "less"], "answer": i % 4 and 1} for i in range(8)]
    found = lm_eval(CHOICES, lines, "local-completions", "completions", "--batch_size", batch)
    assert found["acc,none"] == 0.75


@pytest.mark.slow
def test_lm_eval_has_conversations(live, lm_eval):
    live.says("Oslo", "Bergen")
    lines = [{"question": "Capital?", "answer": "Oslo"}, {"question": "And?", "answer": "Oslo"}]
    found = lm_eval(WRITTEN, lines, "local-chat-completions", "chat/completions", "--apply_chat_template")
    assert found["exact_match,none"] == 0.5


@pytest.mark.slow
def test_guidellm_measures(whole, tmp_path):
    """It sends conversations as parts, asks for usage in every chunk and for exactly so many tokens."""
    path = command("guidellm", "guidellm")
    (tmp_path / "prompts.jsonl").write_text("".join(
        json.dumps({"prompt": f"Count to {i}.", "output_tokens_count": 8}) + "\n" for i in range(6)))
    done = run([path, "run", "--backend", f"kind=openai_http,target={whole},api_key={KEY}",
                "--profile", "kind=concurrent,streams=2", "--constraint", "kind=max_requests,count=6",
                "--data", "kind=json_file,path=prompts.jsonl", "--disable-console", "--output",
                "kind=json,path=found.json"], tmp_path, HF_HUB_OFFLINE="1", HF_HOME=str(tmp_path / "hub"))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-6000:]
    found, = json.loads((tmp_path / "found.json").read_text())["benchmarks"]
    assert found["metrics"]["request_totals"] == {"successful": 6, "errored": 0, "incomplete": 0, "total": 6}
    assert [each["output_tokens"] for each in found["requests"]["successful"]] == [8] * 6
