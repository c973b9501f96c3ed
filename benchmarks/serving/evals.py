"""The same scores as transformers on the same weights, through lm-eval: gsm8k, and which tool a request needs.

    python benchmarks/serving/evals.py --gguf FILE --weights FOLDER --data ../shared/data --questions 40 --only CASE

The server computes in float32 from the GGUF file; FOLDER has what transformers makes of that file in float32
(`--make` writes it). lm-eval, as it is, asks the server (`local-completions`, `local-chat-completions`) and
transformers (`hf`) the same questions. The server is asked twice, cold and with a warm cache, with 1 and with 16
requests at a time. `--json` collects the cases, `--table` prints them.

gsm8k: the first questions of its test set, one worked example before each, the last number of at most 80 tokens. Tools:
requests of BFCL ("multiple"), the functions that each may call as choices, by the probability of their names.
"""
from __future__ import annotations

import argparse
import json
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ("Question: Ann has 3 bags with 4 apples each and eats 2 apples. How many are left?\\nAnswer: There are 3 "
           "* 4 = 12 apples. After eating 2 there are 12 - 2 = 10. The answer is 10.\\n\\n")
HEAD = """task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
"""
WRITTEN = HEAD + """output_type: generate_until
doc_to_text: "{example}Question: {{{{question}}}}\\nAnswer:"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["Question:", "\\n\\n"], max_gen_toks: 80, do_sample: false, temperature: 0.0}}
filter_list:
  - name: last
    filter:
      - {{function: regex, regex_pattern: "(-?[0-9][0-9,]*)", group_select: -1}}
      - {{function: take_first}}
metric_list: [{{metric: exact_match, ignore_case: true, regexes_to_ignore: [","]}}]
"""
CHOSEN = HEAD + """output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc}}, {{metric: acc_norm}}]
"""


def write_tasks(data: Path, folder: Path, questions: int) -> None:
    """gsm8k, gsm8k_chat and tools as tasks of lm-eval over local files."""
    lines = (data / "gsm8k" / "test.jsonl").read_text("utf-8").splitlines()[:questions]
    rows = [json.loads(line) for line in lines]
    sums = [{"question": row["question"], "answer": row["answer"].rpartition("####")[2].strip()} for row in rows]
    bfcl = data / "bfcl" / "data"
    truth = {row["id"]: row["ground_truth"] for row in read(bfcl / "possible_answer" / "BFCL_v4_multiple.json")}
    tools = []
    for row in read(bfcl / "BFCL_v4_multiple.json"):
        names = [each["name"] for each in row["function"]]
        right = next(iter(truth[row["id"]][0]))
        if right in names and len(tools) < questions:
            told = "\n".join(f"- {each['name']}: {each['description'][:120]}" for each in row["function"])
            asked = row["question"][0][-1]["content"]
            tools.append({"question": f"Functions:\n{told}\nRequest: {asked}\nFunction to call:",
                          "choices": [f" {name}" for name in names], "answer": names.index(right)})
    for name, text, rows in (("gsm8k", WRITTEN, sums), ("gsm8k_chat", WRITTEN, sums), ("tools", CHOSEN, tools)):
        path = folder / f"{name}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        example = "" if name == "gsm8k_chat" else EXAMPLE
        (folder / f"{name}.yaml").write_text(text.format(task=name, data=path, example=example))


def read(path: Path) -> Iterator[dict[str, Any]]:
    for line in path.read_text("utf-8").splitlines():
        yield json.loads(line)


def make(gguf: Path, folder: Path) -> None:
    """What transformers makes of a GGUF file, in float32 (it needs accelerate)."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    where, name = str(gguf.parent), gguf.name
    read = AutoModelForCausalLM.from_pretrained(where, gguf_file=name, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain = AutoModelForCausalLM.from_config(config, dtype=torch.float32)  # a quantized one is not written
    plain.load_state_dict(read.state_dict())
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(where, gguf_file=name).save_pretrained(folder)


@contextmanager
def serving(gguf: Path) -> Iterator[str]:
    """The address of a server of this tree."""
    sys.path.insert(0, str(ROOT))
    from tests.soak import start_server
    process, url = start_server([str(gguf), "--platform=cpu", "--dtype=float32", "--max-model-len=2048"])
    try:
        yield url
    finally:
        process.terminate()
        process.wait(60)


def evaluate(program: str, tasks: Path, task: str, model: str, arguments: str, *words: str) -> dict[str, Any]:
    """Scores, their errors, the answers in order and the seconds of one run of lm-eval."""
    with tempfile.TemporaryDirectory() as out:
        began = time.monotonic()
        done = subprocess.run(
            [*shlex.split(program), "run", "--model", model, "--model_args", arguments, "--tasks", task,
             "--include_path", str(tasks), "--output_path", out, "--log_samples", *words],
            capture_output=True, text=True,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": "none"})
        if done.returncode:
            raise SystemExit(done.stdout[-2000:] + done.stderr[-4000:])
        result, = Path(out).rglob("results*.json")
        samples, = Path(out).rglob("samples*.jsonl")
        rows = sorted(read(samples), key=lambda row: row["doc_id"])
        scores = json.loads(result.read_text())["results"][task]
    return {"scores": {name: value for name, value in scores.items() if name.startswith(("acc", "exact"))},
            "answers": [row["resps"] for row in rows], "n": len(rows), "seconds": round(time.monotonic() - began, 1)}


def cases(given: argparse.Namespace, tasks: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and result of each case that was asked for."""
    wanted = [(task, at_once) for task in given.tasks.split(",") for at_once in map(int, given.at_once.split(","))]
    if "transformers" in given.only:
        for task in given.tasks.split(","):
            words = ["--batch_size", str(given.batch), "--device", "cpu"]
            words += ["--apply_chat_template"] if task == "gsm8k_chat" else []
            yield f"{task} transformers", evaluate(given.lm_eval, tasks, task, "hf",
                                                   f"pretrained={given.weights},dtype=float32", *words)
    if "server" in given.only:
        with serving(given.gguf) as url:
            for number, (task, at_once) in enumerate(wanted):
                chat = task == "gsm8k_chat"
                api, model = ("chat/completions", "local-chat-completions") if chat else ("completions",
                                                                                          "local-completions")
                arguments = (f"model={given.gguf.stem},base_url={url}/v1/{api},num_concurrent={at_once},"
                             f"max_retries=1,timeout=600,tokenizer_backend=huggingface,tokenizer={given.weights},tokenized_requests="
                             f"{not chat}")
                words = ["--apply_chat_template"] if chat else ["--batch_size", "1"]
                heat = "cold" if number == 0 else "warm"
                yield f"{task} server, {at_once} at once, {heat} cache", evaluate(given.lm_eval, tasks, task, model,
                                                                                 arguments, *words)


def table(found: dict[str, Any]) -> None:
    """One row a case: score, its standard error, and answers that are as those of transformers."""
    print("| case | questions | score | standard error | as transformers' answers | s |\n|---|---|---|---|---|---|")
    for name, case in found.items():
        peer = found.get(name.split(" ")[0] + " transformers", case)
        same = sum(agree(a, b) for a, b in zip(case["answers"], peer["answers"], strict=False))
        of = min(case["n"], peer["n"])
        score = {key: value for key, value in case["scores"].items() if "stderr" not in key}
        key = next(iter(score))
        error = next(value for name, value in case["scores"].items() if "stderr" in name)
        print(f"| {name} | {case['n']} | {score[key]:.3f} | {error:.3f} | {same} of {of} | {case['seconds']} |")


def agree(one: Any, other: Any) -> bool:
    """The same text, or the same choice."""
    if isinstance(one[0][0], list):
        scores = [[float(choice[0][0]) for choice in each] for each in (one, other)]
        return max(range(len(one)), key=scores[0].__getitem__) == max(range(len(other)), key=scores[1].__getitem__)
    return one == other


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gguf", type=Path)
    parser.add_argument("--weights", type=Path, required=True)
    parser.add_argument("--data", type=Path, default=ROOT.parent / "shared" / "data")
    parser.add_argument("--lm-eval", default="lm_eval", help="how it is started, with torch for hf")
    parser.add_argument("--make", action="store_true", help="write the folder of weights, and end")
    parser.add_argument("--questions", type=int, default=200)
    parser.add_argument("--tasks", default="gsm8k,gsm8k_chat,tools")
    parser.add_argument("--at-once", default="1,16", help="requests to the server")
    parser.add_argument("--batch", type=int, default=1, help="of transformers")
    parser.add_argument("--only", default="transformers,server")
    parser.add_argument("--json", type=Path, help="a file to which cases are added")
    parser.add_argument("--table", action="store_true", help="print what the file has, and end")
    given = parser.parse_args()
    if given.make:
        return make(given.gguf, given.weights)
    found = json.loads(given.json.read_text()) if given.json and given.json.exists() else {}
    if not given.table:
        with tempfile.TemporaryDirectory() as folder:
            write_tasks(given.data, Path(folder), given.questions)
            for name, case in cases(given, Path(folder)):
                found[name] = case
                print(name, case["n"], case["scores"], case["seconds"], flush=True)
                if given.json:
                    given.json.write_text(json.dumps(found))
    table(found)


if __name__ == "__main__":
    main()
