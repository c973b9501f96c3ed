"""The commands, as data: `main` imports only the module of the one that runs."""
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Command:
    """A command: its module has `add_arguments(parser)` and `run(arguments, resolved) -> exit code`.

    groups: groups of settings that it takes as flags, in the order of its help.  words: what comes after its name.
    notes: paragraphs at the end of its help.  shown: the settings in its help, () = all; it takes the others too.
    extra: what a word too many probably means.  rest: words after -- are another program's.
    parts: commands whose names begin with this one's; without such a word it is the first of them.
    """

    name: str
    help: str
    groups: tuple[str, ...] = ()
    examples: tuple[str, ...] = ()
    words: str = "[options]"
    notes: tuple[str, ...] = ()
    shown: tuple[str, ...] = ()
    extra: str = ""
    rest: bool = False
    parts: tuple[Command, ...] = ()

    @property
    def module(self) -> str:
        return f".{self.name.replace('-', '_').replace(' ', '_')}"


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
LAUNCH = """\
The tool gets the server's address, the model's name and the key in its environment and its
arguments; no file of it is changed. The server is the one that runs here, or --url. With several
keys in --api-key the first is sent."""
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

RUN_BATCH = """\
A line is {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {...}}, with
the url of any call that answers: chat, completions, responses, messages, embeddings, rerank,
score. Answers come in OpenAI's form, in the order in which they are done, each with its
custom_id; a request that fails has its error there, and the others go on. A run that was stopped
is taken up again: what the output has is not asked for a second time. Without --url the model is
loaded here, and nothing listens."""
REPLAY_REQUESTS = """\
Requests are sent at the times at which they came, or --speed times as fast, and answers are read
to their end and thrown away. The server is the one that --host and --port name, unless --url is
given; the key is --api-key or ISTHMUS_API_KEY. A dump holds prompts: private data."""

EXPLAIN = """\
The exit code is 2 when these settings cannot work on this machine, such as a platform whose
device is not here: then all that can be told is printed, with the problem at its end."""

ENGINE = ("model", "platform", "parallel", "adapters", "cache", "scheduler", "speculation")
ONE_USER = ("model", "revision", "dtype", "max_model_len", "chat_template", "platform", "platform_option",
            "kv_cache_memory")
MORE = "The other settings of the engine that `isthmus serve --help` lists are taken too."

TUNE = """\
Each value is tried on a server of its own: on a quarter of the requests, then on all, then again on
other prompts beside the best so far; only one that is better each time is taken. A run that takes
twice as long as the best is stopped. The search ends when no neighbour of any setting is better, or
after --minutes; run the same command again to go on where it was stopped. What changes answers, such
as --kv-cache-dtype, is tried only if --knob names it; `isthmus bench joint` shows what it costs."""

SERVING = """\
A closed loop (--concurrency) keeps so many requests running. An open loop (--rate) sends them when
they are due, whether or not the server keeps up, and every time counts from then: a server that
stalls pays for all who would have come meanwhile. itl is the pause between two events of a stream;
in --slo it means a request's longest. Token hit rate is from the usage that the server tells.
The exit code is 1 when a request failed. docs/benchmarks.md has more, with examples."""

COMPARE = """\
Runs alternate, A B, B A, A B, on the same prompts, so that what changes on the machine changes both.
Told is the median of the pairs' ratios, above 1 where A is better, and an interval that holds the
true one with 95 % (by the sign test, whatever the noise is like). A winner is named only if the
interval leaves 1 out: for that at least 6 pairs are needed. Result files hold runs that were not
made in turn; of those 5 each are needed (`bench serving --repeat 5 -o FILE`)."""

BATCH = """\
The roof is the least time in which this device could read the bytes and do the operations that the
step needs, counted from the model's configuration: weights once, K and V of all that is seen, the
products of all weights that a token meets. Memory and products are measured first, with products of
one token and of many through the same interface (and by numpy where the memory is the host's)."""

STARTUP = """\
Warm and cold starts in turn, after one that does not count. Ready is the first 200 of /v1/models. A
cold start is one whose model files were dropped from the system's cache; what else the system keeps
it keeps. Stages are what `isthmus serve` writes as it loads. Memory is of all its processes, what
they share counted once (PSS) where the system tells."""

KERNELS = """\
An op is repeated within one step and a step with one of it is taken off. The framework's own is
what the platform names in its module `peers` (docs/adding_a_platform.md), in the compute dtype;
"times as fast" is its time over the platform's. Attention's peer has K and V in a row, not in pages.
The exit code is 1 when an op failed."""

JOINT = """\
A speed-up that costs answers shows: beside throughput and the share of requests within the SLO stand
perplexity on a text, how often the best token is the reference's, and the mean error of
log-probabilities. The servers score the text themselves (/v1/completions with echo and logprobs).
Tell a difference of speed with `bench compare`, which knows the noise; here stand medians."""

BENCHES = (
    Command("bench serving", "put a load on a server, and tell its speed and its users' waits", ("server",), (
        "isthmus bench serving                                  # the server that runs here, 16 requests at once",
        "isthmus bench serving --concurrency 1,4,16,64 --plot load.html -o load.json",
        "isthmus bench serving --rate 2,4,8 --slo ttft=500ms,itl=100ms --requests 200",
        "isthmus bench serving --shared-tokens 900 --prompt-tokens 1024 --prefixes 4",
        "isthmus bench serving --turns 4 --concurrency 8 --max-tokens 48",
        "isthmus bench serving --trace mooncake.jsonl --arrivals trace --speed 0.1 --longest 8000",
        "isthmus bench serving --prompts questions.jsonl --url http://10.0.0.5:8000"), notes=(SERVING,),
            shown=("host", "port", "api_key")),
    Command("bench compare", "measure two servers in turn, and tell whether one is really better", ("server",), (
        "isthmus bench compare http://127.0.0.1:8000 http://127.0.0.1:9000",
        "isthmus bench compare 'isthmus serve --chunked-prefill-size 256' 'isthmus serve' --concurrency 8",
        "isthmus bench compare 'isthmus serve' 'llama-server -m model.gguf --port {port}' --rounds 11",
        "isthmus bench compare before.json after.json"), "A B [options]", (COMPARE,), ("api_key",)),
    Command("bench batch", "time one batch on a platform, beside what memory and products allow", ENGINE, (
        "isthmus bench batch", "isthmus bench batch ./model.gguf --rows 1,8,32 --context 256,2048",
        "isthmus bench batch --prefill 128,512,2048 --platform cpu -o batch.json"), "[MODEL] [options]", (BATCH, MORE),
            ONE_USER),
    Command("bench offline", "run a whole list of prompts through the engine in this process", ENGINE, (
        "isthmus bench offline --requests 256 --prompt-tokens 512 --max-tokens 64",
        "isthmus bench offline ./model.gguf --prompts questions.jsonl -o offline.json"), "[MODEL] [options]", (MORE,),
            ONE_USER),
    Command("bench startup", "time a server from its command to its first token, and weigh it", ("server",), (
        "isthmus bench startup", "isthmus bench startup 'isthmus serve ./model.gguf --dtype float32' --repeat 5",
        "isthmus bench startup 'llama-server -m model.gguf --port {port}' --cold model.gguf"),
            "[COMMAND] [options]", (STARTUP,), ("api_key",)),
    Command("bench kernels", "time each op of a platform, beside its framework's own", ("platform",), (
        "isthmus bench kernels --platform=cpu", "isthmus bench kernels --platform=cpu --only 'linear*' --tokens 1,32",
        "isthmus bench kernels --platform=cpu --shape 8b --tokens 1,64,4096 -o kernels.json"), notes=(KERNELS,)),
    Command("bench joint", "speed, share within the SLO and accuracy of configurations, in one table", ("server",), (
        "isthmus bench joint 'isthmus serve --dtype float32' 'isthmus serve' --slo ttft=500ms,itl=100ms",
        "isthmus bench joint 'isthmus serve' 'isthmus serve --kv-cache-dtype int8' 'isthmus serve small.gguf'"),
            "REFERENCE SERVER [SERVER ...] [options]", (JOINT,), ("api_key",)),
)

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
    Command("ps", "list the servers of yours that run here", (), ("isthmus ps", "isthmus ps --json")),
    Command("stop", "end a server that runs here", (), (
        "isthmus stop 8000", "isthmus stop smollm2-135m-instruct --now", "isthmus stop --all"), "NAME|PORT [options]"),
    Command("launch", "start a coding tool (claude, codex, opencode, aider) on a server", ("server",), (
        "isthmus launch claude", "isthmus launch codex --print", "isthmus launch aider --port 8001 -- --no-git"),
            "TOOL [options] [-- words for the tool]", (LAUNCH,), ("host", "port", "api_key"), rest=True),
    Command("ls", "list the models on this machine, with their sizes", (), ("isthmus ls",)),
    Command("bench", "measure servers, batches, start-up and kernels, and compare (docs/benchmarks.md)", ("server",), (
        "isthmus bench                          # a load on the server that runs here",
        "isthmus bench compare A B --help"), "[PART] [options]", (), ("host", "port", "api_key"), parts=BENCHES),
    Command("tune", "search the settings that serve a workload best, and write them to a file", ENGINE, (
        "isthmus tune --minutes 20 --slo ttft=500ms,itl=100ms --rate 4",
        "isthmus tune ./model.gguf --concurrency 32 --knob chunked_prefill_size=128,256,512,1024 -o fast.yaml",
        "isthmus serve --config tuned.yaml"), "[MODEL] [options]", (TUNE, MORE), ONE_USER),
    Command("models", "list the models that are known and those on this machine", (), ("isthmus models --json",)),
    Command("pull", "download a model", (), ("isthmus pull gemma3-270m", "isthmus pull org/name --revision main"),
            "[MODEL] [options]"),
    Command("rm", "delete models that were downloaded", (), ("isthmus rm gemma3-270m",), "MODEL [MODEL ...]"),
    Command("doctor", "say which platforms can run here, and why others cannot", ("platform",),
            ("isthmus doctor --json", "isthmus doctor --bug-report")),
    Command("conformance", "hold a platform to the laws that all must keep, op by op and law by law", ("platform",), (
        "isthmus conformance --platform=reference", "isthmus conformance --platform=cpu --only attention --seed 7",
        "isthmus conformance --platform=cpu --json report.json --markdown report.md",
        "isthmus conformance --list --only 'sample[top_*'"), notes=(CONFORMANCE,)),
    Command("replay", "tell what a trace of requests would find in the cache, policy by policy", (), (
        "isthmus replay trace.jsonl", "isthmus replay trace.jsonl --policy default,lru,arc --capacity 5,200000",
        "isthmus replay trace.jsonl --latency h200 --plot hits.html",
        "isthmus replay trace.csv --convert trace.jsonl"), "TRACE [options]", (REPLAY,)),
    Command("run-batch", "answer a batch file of OpenAI's form", (*ENGINE, "server"), (
        "isthmus run-batch -i requests.jsonl -o answers.jsonl", "isthmus run-batch org/name -i in.jsonl -o out.jsonl",
        "isthmus run-batch -i in.jsonl -o out.jsonl --url http://10.0.0.5:8000 --concurrency 64"),
            "[MODEL] -i FILE -o FILE [options]", (RUN_BATCH, MORE), (*ONE_USER, "in_process", "log_level")),
    Command("replay-requests", "send the requests of `serve --dump-requests` again, and tell how long answers took",
            ("server",), (
        "isthmus replay-requests requests.jsonl", "isthmus replay-requests requests.jsonl --speed 0 --concurrency 64",
        "isthmus replay-requests requests.jsonl --url http://10.0.0.5:8000 --json"), "FILE [options]",
            (REPLAY_REQUESTS,), ("host", "port", "api_key")),
    Command("explain", "print every setting, who set it and what follows from it", (*ENGINE, "server"), (
        "isthmus explain --config server.yaml", "isthmus explain --platform cpu --json"), "[MODEL] [options]",
            (EXPLAIN, FILE)),
    Command("rerun", "run a recording of `serve --record` again, without its model and hardware", (), (
        "isthmus rerun steps.rec", "isthmus rerun steps.rec --until 4711", "isthmus rerun steps.rec --bisect",
        "isthmus rerun steps.rec --against other.rec"), "FILE [options]", (RERUN,)),
    Command("version", "print the version"),
)}
