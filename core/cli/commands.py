"""The commands, as data: `main` imports only the module of the one that runs."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command: its module has `add_arguments(parser)` and `run(arguments, resolved) -> exit code`.

    groups: groups of settings that it takes as flags, in the order of its help.  words: what comes after its name.
    notes: paragraphs at the end of its help.  shown: the settings in its help, () = all; it takes the others too.
    extra: what a word too many probably means.
    """

    name: str
    help: str
    groups: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    words: str = "[options]"
    notes: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    extra: str = ""

    @property
    def module(self) -> str:
        return f".{self.name}"


FILE = """\
settings in a YAML file (--config FILE or ISTHMUS_CONFIG=FILE), flat or in groups:
  model: ./model.gguf
  port: 9000
  scheduler:
    max-running-requests: 64
  platform-option:
    threads: 8
Each may also be a variable, such as ISTHMUS_PORT=9000. Flags win over variables,
variables over the file. ISTHMUS_CACHE=FOLDER is where downloaded models are kept."""
HEALTH = """\
GET /health is 200 as long as the engine lives, also while a stopping server lets
running requests finish. GET /ready is 200 only when a new request would be taken.
When the engine dies both are 503 until it has been started anew. After --restart times in
10 minutes the server ends with exit code 1, or 71 if the engine finished no step for
--step-timeout (docs/operations.md)."""
TOP = """\
The server is the one that --host and --port name, unless --url is given. Numbers come from
its /server_info. On a terminal the page renews itself until Ctrl-C; into a pipe one page
follows the other. With several keys in --api-key the first is sent."""
CONFORMANCE = """\
Outcomes: passed, unsupported (declared, with the reason; "not claimed" where it is a
matter of choice, such as a dtype), expected failure (in the platform's ledger.toml),
unexpected pass, wrong, error. Ctrl-C and SIGTERM print what was done. The exit code is
0 only if nothing is wrong, in error or unexpected; 2 if the platform cannot run here,
or the report cannot be written. The platform runs in a process of its own: what ends
that early is named, and is no success."""

RERUN = """\
The scheduler and the cache get the recorded requests, times and results, and decide again;
every plan and every page written must be as recorded. A recording made on any platform is
run on the null platform, which checks the batches. It holds prompts: private data."""

REPLAY = """\
default is the eviction policy of this engine; lru-leaf drops the least recently used
leaf whole, as SGLang does, lru-block single blocks, as vLLM does, and optimal knows the
future (Belady). Formats of traces and latency models: docs/replay.md."""

EXPLAIN = """\
The exit code is 2 when these settings cannot work on this machine, such as a platform whose
device is not here: then all that can be told is printed, with the problem at its end."""

ENGINE = ("model", "platform", "parallel", "cache", "scheduler")
ONE_USER = ("model", "revision", "dtype", "max_model_len", "chat_template", "platform", "platform_option",
            "kv_cache_memory")
MORE = "The other settings of the engine that `isthmus serve --help` lists are taken too."

COMMANDS = {c.name: c for c in (
    Command("serve", "answer OpenAI clients over HTTP", (*ENGINE, "server"), (
        "isthmus serve                          # a small model, the best platform found",
        "isthmus serve ./model.gguf --port 9000",
        "isthmus serve org/name --max-model-len 8192 --api-key secret"), "[MODEL] [options]", (HEALTH, FILE)),
    Command("chat", "talk to a model in the terminal", ENGINE, (
        "isthmus chat", "isthmus chat ./model.gguf --system 'Be brief.'", "isthmus chat --url http://127.0.0.1:8000"),
            "[MODEL] [options]", (MORE,), ONE_USER),
    Command("generate", "print the answer to one prompt", ENGINE, (
        "isthmus generate 'Why is the sky blue?'", "isthmus generate --raw 'Once upon a time' --max-tokens 50",
        "cat question.txt | isthmus generate --json"), "[PROMPT] [options]", (MORE,), ONE_USER,
            "one prompt is taken: put quotes around it, and name a model with --model"),
    Command("top", "watch what a running server is doing", ("server",), (
        "isthmus top                            # the server at 127.0.0.1:8000",
        "isthmus top --url http://10.0.0.5:8000", "isthmus top --once --json | jq .generated_per_s"),
            notes=(TOP,), shown=("host", "port", "api_key")),
    Command("models", "list the models that are known and those on this machine", (), ("isthmus models --json",)),
    Command("pull", "download a model", (), ("isthmus pull gemma3-270m", "isthmus pull org/name --revision main"),
            "[MODEL] [options]"),
    Command("doctor", "say which platforms can run here, and why others cannot", ("platform",),
            ("isthmus doctor --json",)),
    Command("conformance", "hold a platform to the laws that all must keep, op by op and law by law", ("platform",), (
        "isthmus conformance --platform=reference", "isthmus conformance --platform=cpu --only attention --seed 7",
        "isthmus conformance --platform=cpu --json report.json --markdown report.md",
        "isthmus conformance --list --only 'sample[top_*'"), notes=(CONFORMANCE,)),
    Command("replay", "tell what a trace of requests would find in the cache, policy by policy", (), (
        "isthmus replay trace.jsonl", "isthmus replay trace.jsonl --policy default,lru,arc --capacity 5,200000",
        "isthmus replay trace.jsonl --latency h200 --plot hits.html",
        "isthmus replay trace.csv --convert trace.jsonl"), "TRACE [options]", (REPLAY,)),
    Command("explain", "print every setting, who set it and what follows from it", (*ENGINE, "server"), (
        "isthmus explain --config server.yaml", "isthmus explain --platform cpu --json"), "[MODEL] [options]",
            (EXPLAIN, FILE)),
    Command("rerun", "run a recording of `serve --record` again, without its model and hardware", (), (
        "isthmus rerun steps.rec", "isthmus rerun steps.rec --until 4711", "isthmus rerun steps.rec --bisect",
        "isthmus rerun steps.rec --against other.rec"), "FILE [options]", (RERUN,)),
    Command("version", "print the version"),
)}
