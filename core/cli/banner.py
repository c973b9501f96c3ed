"""What `isthmus serve` prints when it is ready: at most twelve lines, each under a hundred columns."""
from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from typing import Any

from ..config import Config
from ..config import shown_size as size
from ..errors import IsthmusError
from ..version import isthmus_version
from .sampling import shown_options

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64"}
WIDTH = 99
LABEL = 9
ROOM = WIDTH - 2 - LABEL
CUT = " ..."
EVERYWHERE = {"0.0.0.0": "0.0.0.0", "::": "[::]"}
TENSORS = "tensors: "
ALL = " (all: /server_info)"
HELLO = "Hi"


def count(n: float, word: str) -> str:
    """"1 request", "2 requests", "2.5 requests"."""
    number = f"{n:.1f}".removesuffix(".0")
    return f"{number} {word}" + ("" if number == "1" else "s")


def base_url(host: str, port: int, secure: bool = False) -> str:
    """The address that clients on this machine use."""
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http{'s' if secure else ''}://{local}:{port}"


def example(text: Any, context: int) -> tuple[str, dict[str, Any] | None]:
    """A path and a body that this model can answer within `context` tokens: a chat, a completion, or no body at all."""
    messages = [{"role": "user", "content": HELLO}]
    try:
        if text.template is not None and len(text.template.encode(messages)) < context:
            return "/v1/chat/completions", {"messages": messages}
    except IsthmusError:  # a template may demand what this conversation lacks
        pass
    prompts = ("Once upon a time", "A")
    fits = (p for p in prompts if 0 < len(text.tokenizer.encode(p, add_special=True)) < context)
    prompt = next(fits, None)
    return ("/v1/completions", {"prompt": prompt}) if prompt else ("/v1/models", None)


def _curl(url: str, model: str, key: bool, path: str, body: dict[str, Any] | None) -> list[str]:
    """A command to paste, in two lines at most. The model is named where the line has room."""
    header = '-H "x-api-key: $OPENAI_API_KEY" ' if key else ""
    if body is None:
        return [f"curl {header}{url}{path}"]
    named, bare = (f"{header}-d {shlex.quote(json.dumps(b))}" for b in ({"model": model, **body}, body))
    return [f"curl {url}{path} -H 'Content-Type: application/json' \\", named if len(named) <= ROOM else bare]


def _cut(text: str, mark: str = CUT) -> str:
    """A line of it; `mark` says where the rest is."""
    return text if len(text) <= ROOM else text[:ROOM - len(mark)].rstrip() + mark


def listens(config: Config, url: str) -> str:
    """Where else than at `url` the server listens, or nothing."""
    wide = EVERYWHERE.get(config.server.host)
    return f" (on every address, {wide}:{url.rpartition(':')[2]})" if wide else ""


def _platform(info: Mapping[str, Any]) -> str:
    """Which, on what, and why."""
    device = f" on {info['device']}" if info.get("device") else ""
    ranks = f", {info['ranks']} ranks" if info.get("ranks", 1) > 1 else ""
    which, reason, more = f"{info['platform']}{device}{ranks}: ", info["platform_reason"], " (why: `isthmus explain`)"
    if len(which + reason) <= ROOM:
        return which + reason
    return _cut(which + reason.partition(";")[0].partition(" (")[0] + more, CUT + more)


def _memory(info: Mapping[str, Any], tokens: int) -> str:
    """Of the weights as all ranks have them, of K and V what each has."""
    among, each = (f" among {info['ranks']} ranks", " in each") if info.get("ranks", 1) > 1 else ("", "")
    cache = "" if info.get("prefix_cache", True) else "; prefixes are not kept"
    return (f"{size(info['weight_bytes'])} of weights{among}, {size(info['kv_bytes'])} of KV cache{each} for "
            f"{count(tokens, 'token')}{cache}")


def _sampling(advice: str, config: Config) -> str:
    """What holds for requests that set nothing, and how drafts are made; "" where neither is to be told."""
    said = [f"{advice} as the model's makers advise, unless a request sets any"] if advice else []
    if config.speculation.speculative:
        from ..speculation.options import described  # with the drafter, which few servers have
        said.insert(0, f"drafts by {described(config.speculation.speculative)[0]}")
    return "; ".join(said)


def _weights(notes: list[str]) -> str:
    """The notes on one line; where they are too long for it, as many as there is room for, or part of the first."""
    notes = [TENSORS + notes[0], *notes[1:]]
    for told in range(len(notes), 0, -1):
        left = len(notes) - told
        rest = f"; {left} more{ALL}" if left else ""
        if len(line := "; ".join(notes[:told]) + rest) <= ROOM:
            return line
    rest = CUT + (rest or ALL)
    return notes[0][:ROOM - len(rest)].rstrip() + rest


def banner(info: Mapping[str, Any], config: Config, url: str, seconds: float, text: Any) -> str:
    """The lines; `info` is the engine's, `seconds` what start-up took, `text` the model's `TextService`."""
    model, context = info["served_name"], info["max_model_len"]
    tokens = info["page_size"] * info["pages"]
    at_once = min(tokens // context, info["max_running"])
    key = config.server.api_key is not None
    advice = shown_options(info.get("sampling_defaults", {}))
    sent = "'<your key>'" if key else "none"
    rows = [
        ("model", _cut(f"{model}, computed in {DTYPES.get(info['dtype'], info['dtype'])}")),
        *([("weights", _weights(list(info["report"])))] if info["report"] else []),
        ("platform", _platform(info)),
        ("memory", _cut(_memory(info, tokens))),
        ("context", f"{context} tokens; {count(at_once, 'request')} of that length at once, at most "
                    f"{info['max_running']} of any length"),
        *([("sampling", _cut(sampling))] if (sampling := _sampling(advice, config)) else []),
        ("page", f"open {url} in a browser to chat; /dashboard has the numbers"),
        *zip(("try", ""), _curl(url, model, key, *example(text, context)), strict=False),
        ("clients", f"export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={sent}"),
        ("", f"export ANTHROPIC_BASE_URL={url} ANTHROPIC_AUTH_TOKEN={sent}"),
    ]
    return "\n".join([f"isthmus {isthmus_version()} is ready after {seconds:.1f} s: {url}{listens(config, url)}",
                      *(f"  {name:{LABEL}}{value}" for name, value in rows)])
