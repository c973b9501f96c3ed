"""Every setting there is, in typed groups. One flag, environment variable and YAML key is derived from each field.

A field's metadata: `help` (one sentence), `choices` (a tuple, or the function that lists what is registered), `unit`
("bytes" = a size such as 4GiB), `least`, `most`, `needs` (what a text that is set must hold), `aliases` (other words
for some of the choices), `endpoint` (True: it is an address for ZMQ), `metavar` (of a list, in its help), `client`
(its help where a command asks a server).
Resolution and who set what is the business of `core.settings`; `None` or "auto" means that the engine decides at
start and reports it.
"""
from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from .errors import shown

SIZE_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12,
              "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def setting(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field with its help text and optional `choices`, `unit`, `least`, `most`, `needs`, `aliases`."""
    return field(default=default, metadata={"help": help, **more})


def size_bytes(text: str) -> int:
    """"4GiB" -> 4294967296. Raises ValueError for what is not a number with one of `SIZE_UNITS`."""
    match = re.fullmatch(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*([A-Za-z]*)\s*", text)
    if not match or match[2].upper() not in SIZE_UNITS:
        raise ValueError(f"{shown(text)} is not a size, such as 512MiB, 4GiB or 4GB")
    return int(float(match[1]) * SIZE_UNITS[match[2].upper()])


def shown_size(n: float) -> str:
    """Bytes for people, in the units of memory: "1.25 GiB", "84 MiB", "3.5 KiB"."""
    for unit, size in (("GiB", 2**30), ("MiB", 2**20)):
        if n >= size:
            return f"{n / size:.2f} {unit}" if unit == "GiB" else f"{n / size:.{0 if n >= 10 * size else 1}f} {unit}"
    return f"{n / 2**10:.1f} KiB"


def _eviction_policies() -> tuple[str, ...]:
    from .cache.eviction import EVICTION
    return tuple(EVICTION)


def _tool_parsers() -> tuple[str, ...]:
    from .parsers import CALL_ORDER, NOT_ASKED
    return ("auto", "none", *_registered("parsers.contract", "CALLS", (*CALL_ORDER, *NOT_ASKED)))


def _reasoning_parsers() -> tuple[str, ...]:
    from .parsers import THINKING_ORDER
    return ("auto", "none", *_registered("parsers.contract", "THINKING", THINKING_ORDER))


def _grammar_backends() -> tuple[str, ...]:
    from .grammar import PACKAGES
    return tuple(PACKAGES)


def _metric_families() -> tuple[str, ...]:
    from .server.metric_names import FAMILIES
    return tuple(FAMILIES)


def _schedule_policies() -> tuple[str, ...]:
    from .scheduler import SCHEDULE_POLICIES
    return _registered("scheduler.policy", "POLICIES", SCHEDULE_POLICIES)


def _registered(module: str, registry: str, own: Iterable[str]) -> tuple[str, ...]:
    """This tree's own names and what a program has added to a registry, which is not imported for its names."""
    loaded = sys.modules.get(f"{__package__}.{module}")
    return tuple(sorted({*own, *getattr(loaded, registry, ())}))


@dataclass(frozen=True)
class ModelSettings:
    """Which model, and how it is loaded."""

    model: str | None = setting(None, "GGUF file, model folder, hub id, or a name that `isthmus models` lists")
    served_model_name: str | None = setting(None, "name that clients use; the model's own name by default")
    revision: str | None = setting(None, "branch, tag or commit of a hub model")
    dtype: str = setting("auto", "compute dtype", choices=("auto", "float32", "bfloat16", "float16"), aliases={
        "bf16": "bfloat16", "f32": "float32", "fp32": "float32", "f16": "float16", "fp16": "float16"})
    max_model_len: int | None = setting(None, "longest prompt plus output, in tokens; the model's own limit by default",
                                        least=2)
    chat_template: str | None = setting(None, "file with a Jinja chat template that replaces the model's own")
    tool_parser: str = setting("auto", "how the model writes tool calls; by default what its chat template shows "
                               "(docs/tools.md)", choices=_tool_parsers)
    reasoning_parser: str = setting("auto", "how the model writes its thinking; by default what its chat template "
                                    "shows", choices=_reasoning_parsers)
    template_kwargs: tuple[str, ...] = setting((), "the only chat_template_kwargs that clients may send, such as "
                                               "enable_thinking; any name unless set", metavar="NAME,...")
    pooling: str = setting("auto", "how /v1/embeddings makes one vector of a text: last (token), mean, or auto: what "
                           "the model's 1_Pooling/config.json says, or last", choices=("auto", "last", "mean"))
    embedding_truncation: bool = setting(False, "dimensions of embeddings may be fewer than the model's, for models "
                                         "trained for that (Matryoshka)")
    strict: bool = setting(False, "refuse to start when a quantized weight, the embedding included, would be expanded")


@dataclass(frozen=True)
class CacheSettings:
    """Pages of K and V, and the prefix cache over them."""

    page_size: int | None = setting(None, "tokens in a page; the platform's default unless set", least=1)
    kv_cache_memory: str | None = setting(None, "memory for K and V, such as 4GiB, prefix cache included; by default a "
                                          "share of free memory, at most what running requests can use", unit="bytes")
    prefix_cache: bool = setting(True, "reuse K and V of prompts that share a prefix")
    eviction_policy: str = setting("learned", "which cached pages go first when memory is short (docs/core.md)",
                                   choices=_eviction_policies)
    pin_share: float = setting(0.25, "largest share of the cache that pinned sessions may keep; 0 refuses pins",
                               least=0, most=1)
    cache_isolation: str = setting("none", "who shares cached prefixes: none = everybody, key = only those with the "
                                   "same API key, so that response times tell nobody of others' prompts",
                                   choices=("none", "key"))
    kv_events: str | None = setting(None, "address such as tcp://127.0.0.1:5557 at which routers may follow what is "
                                    "cached (ZMQ PUB, the events of vLLM); off unless set", needs="address",
                                    endpoint=True)
    kv_events_replay: str | None = setting(None, "address at which they may ask for events that they missed (ZMQ "
                                           "ROUTER)", needs="address", endpoint=True)
    kv_events_topic: str = setting("", "topic of the events; llm-d expects kv@POD@MODEL")
    kv_cache_dtype: str = setting("auto", "dtype of K and V; by default the compute dtype, or the platform's own",
                                  choices=("auto", "float32", "bfloat16", "float16", "fp8_e4m3", "fp8_e5m2", "int8"),
                                  aliases={"bf16": "bfloat16", "f32": "float32", "fp32": "float32", "f16": "float16",
                                           "fp16": "float16", "fp8": "fp8_e4m3", "i8": "int8"})


@dataclass(frozen=True)
class AdapterSettings:
    """Low-rank adapters of the model (docs/lora.md)."""

    lora: tuple[str, ...] = setting((), "NAME=PATH of an adapter in PEFT's form, a folder or a hub id; may be "
                                    "repeated; requests choose one by its name as `model`")
    max_loras: int | None = setting(None, "adapters on the device at once, others wait for a place; 4 where --lora "
                                    "names some, else none", least=0, most=256)
    max_lora_rank: int | None = setting(None, "largest rank, for which memory is kept; by default that of the adapters "
                                        "named at start, at least 16", least=1, most=512)
    max_lora_adapters: int = setting(64, "adapters known at once, on the device or not", least=1, most=4096)


@dataclass(frozen=True)
class SchedulerSettings:
    """How requests share the device."""

    max_running_requests: int = setting(256, "requests computed at once", least=1, most=8192)
    max_queued_requests: int = setting(2048, "requests waiting while none can start; one more is answered 429", least=1,
                                       most=1_000_000)
    chunked_prefill_size: int = setting(512, "prompt tokens computed in one step at most", least=1,
                                        most=131_072)
    max_queued_tokens: int = setting(2**23, "tokens of waiting requests; once there are so many, a further request is "
                                     "answered 429", least=1)
    schedule_policy: str = setting("lpm", "order of waiting requests: lpm (longest cached prefix first), fcfs, "
                                   "shortest-first, priority, fair (by tenant), deadline or dfs-weight",
                                   choices=_schedule_policies)
    itl_target: float = setting(0.0, "milliseconds between tokens at most: prompts are computed in pieces so small "
                                "that a step ends in time; 0 = no limit", least=0)
    grammar_backend: str = setting("llguidance", "library that compiles grammars of structured output",
                                   choices=_grammar_backends)
    logits_processors: tuple[str, ...] = setting((), "logits processors of installed packages that clients may ask for "
                                                 "by name", metavar="NAME,...")
    overlap: bool = setting(True, "plan the next step while the device computes the current one")
    waiting_timeout: float = setting(600.0, "a request that waits longer is answered 503", unit="seconds", least=0)
    running_timeout: float = setting(3600.0, "a request that runs longer is ended", unit="seconds", least=0)
    step_timeout: float = setting(120.0, "an engine with requests that finishes no step for so long has hung and "
                                  "is ended; after half of it stacks are logged", unit="seconds", least=1)
    restart: int = setting(3, "how often within 10 minutes an engine that has died is started anew before the server "
                           "ends; 0 = never", least=0, most=1000)
    idle_unload: float = setting(0.0, "after so long without a request weights, K and V leave the memory, and the next "
                                 "request waits until they are loaded again; 0 = never", unit="seconds", least=0)
    record: str | None = setting(None, "file for a recording of everything that enters the engine, prompts included: "
                                 "private data, readable by its owner alone; `isthmus rerun` runs it again")
    record_limit: str = setting("1GiB", "largest recording; it ends there and serving goes on", unit="bytes",
                                least=65536)


@dataclass(frozen=True)
class SpeculationSettings:
    """Tokens that are guessed and checked several at once (docs/speculation.md)."""

    speculative: tuple[str, ...] = setting((), "a drafter that guesses next tokens, such as ngram, and its options: "
                                           "ngram,tokens=4; the outputs are the same", metavar="DRAFTER,KEY=N,...")


@dataclass(frozen=True)
class PlatformSettings:
    """Which hardware."""

    platform: str = setting("auto", "platform to run on; auto takes the best that is found")
    platform_option: tuple[str, ...] = setting((), "key=value for the platform, such as threads=8; may be repeated")


@dataclass(frozen=True)
class ParallelSettings:
    """How many devices share a model."""

    tensor_parallel_size: int = setting(1, "devices that share every layer of the model", least=1, most=1024)
    expert_parallel: bool = setting(False, "each device has some of a sparse model's experts, whole, instead of a part "
                                    "of every one: larger products, but tokens may crowd on one device; experts must "
                                    "be a multiple of the devices")


@dataclass(frozen=True)
class ServerSettings:
    """HTTP."""

    host: str = setting("127.0.0.1", "address to listen on", needs="address", client="address of the server")
    port: int = setting(8000, "port to listen on; 0 takes a free one", least=0, most=65535,
                        client="port of the server")
    api_key: str | None = setting(None, "key that clients must send, or several separated by commas, one for each "
                                  "tenant; better set as ISTHMUS_API_KEY than typed",
                                  needs="key", client="key of the server; better set as ISTHMUS_API_KEY than typed")
    admin_api_key: str | None = setting(None, "key for what concerns everybody, such as flushing the cache and loading "
                                        "adapters (docs/security.md); better set as ISTHMUS_ADMIN_API_KEY",
                                        needs="key")
    tls_cert: str | None = setting(None, "file with the certificate and its chain in PEM: serve HTTPS; read again on "
                                   "SIGHUP and when it changes", needs="file")
    tls_key: str | None = setting(None, "file with its private key, unless --tls-cert has it too", needs="file")
    cors_origins: tuple[str, ...] = setting((), "origins of web pages that may use the server, such as "
                                            "https://app.example.com, or *; none unless set", metavar="ORIGIN,...")
    allowed_hosts: tuple[str, ...] = setting((), "host names that the server answers to, beside IP addresses and "
                                             "localhost, or *; unless set any, but none where it listens on this "
                                             "machine only and wants no key", metavar="HOST,...")
    metric_names: tuple[str, ...] = setting(("isthmus", "vllm"), "whose names /metrics has, so that dashboards and "
                                            "autoscalers made for them work: isthmus, vllm, sglang", metavar="NAME,...",
                                            choices=_metric_families)
    log_contents: bool = setting(False, "the log of requests has the beginnings of prompts and answers: private data")
    otlp_endpoint: str | None = setting(None, "where traces go, such as http://127.0.0.1:4318/v1/traces (OTLP over "
                                        "HTTP); none unless set; needs isthmus[otel]", needs="address")
    dump_requests: str | None = setting(None, "file to which every request's body is appended: private data, readable "
                                        "by its owner alone; `isthmus replay-requests` sends them again", needs="file")
    dump_limit: str = setting("1GiB", "largest size of that file; nothing is appended after that", unit="bytes",
                              least=65536)
    max_body: str = setting("16MiB", "largest request body; a larger one is answered 413", unit="bytes",
                            least=1024)
    max_n: int = setting(128, "largest n, and most prompts in one completion request", least=1)
    in_process: bool = setting(False, "run everything in one process, for small machines")
    drain_timeout: float = setting(30.0, "how long running requests may finish after SIGTERM; /ready is 503 meanwhile, "
                                   "/health stays 200", unit="seconds", least=0)
    sse_ping: float = setting(15.0, "comment line after this much silence in a stream; 0 = never", unit="seconds",
                              least=0)
    response_store: str = setting("temporary", "SQLite file that keeps answers of /v1/responses, prompts included: "
                                  "private data, readable by its owner alone; temporary = one that ends with the "
                                  "server, off = none", needs="file")
    response_store_rows: int = setting(10_000, "responses that are kept; beyond that the oldest goes", least=1)
    response_store_size: str = setting("256MiB", "largest size of their contents together", unit="bytes", least=65536)
    log_level: str = setting("info", "least important messages that are printed",
                             choices=("debug", "info", "warning", "error"))
    log_format: str = setting("text", "form of all that the server writes on standard error", choices=("text", "json"))


@dataclass(frozen=True)
class Config:
    """All groups. Immutable once resolved: no platform and no model rewrites it."""

    model: ModelSettings = field(default_factory=ModelSettings)
    cache: CacheSettings = field(default_factory=CacheSettings)
    adapters: AdapterSettings = field(default_factory=AdapterSettings)
    scheduler: SchedulerSettings = field(default_factory=SchedulerSettings)
    speculation: SpeculationSettings = field(default_factory=SpeculationSettings)
    platform: PlatformSettings = field(default_factory=PlatformSettings)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    server: ServerSettings = field(default_factory=ServerSettings)
