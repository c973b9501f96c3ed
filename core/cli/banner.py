"""What `isthmus serve` prints when it is ready: at most fifteen lines, each under a hundred columns."""
from __future__ import annotations

import json
import shlex
import textwrap
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
MAX_NOTES = 3
MAX_REASON = 2  # lines
EVERYWHERE = {"0.0.0.0": "0.0.0.0", "::": "[::]"}
HELLO = "Hi"


def count(n: float, word: str) -> str:
    """"1 request", "2 requests", "2.5 requests"."""
    number = f"{n:.1f}".removesuffix(".0")
    return f"{number} {word}" + ("" if number == "1" else "s")


def base_url(host: str, port: int) -> str:
    """The address that clients on this machine use."""
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{local}:{port}"


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
    """A command to paste; lines but the last end with a backslash. The model is named where the line has room."""
    header = " -H \"Authorization: Bearer $OPENAI_API_KEY\"" if key else ""
    if body is None:
        return [f"curl {url}{path}{header}"]
    named, bare = (f"-d {shlex.quote(json.dumps(b))}" for b in ({"model": model, **body}, body))
    lines = [f"curl {url}{path} -H 'Content-Type: application/json'"] + ([header[1:]] if key else [])
    return [f"{line} \\" for line in lines] + [named if len(named) <= ROOM else bare]


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[:width - 4].rstrip() + " ..."


def listens(config: Config, url: str) -> str:
    """Where else than at `url` the server listens, or nothing."""
    wide = EVERYWHERE.get(config.server.host)
    return f" (on every address, {wide}:{url.rpartition(':')[2]})" if wide else ""


def _platform(info: Mapping[str, Any]) -> str:
    """Which, on what, and why."""
    device = f" on {info['device']}" if info.get("device") else ""
    ranks = f", {info['ranks']} ranks" if info.get("ranks", 1) > 1 else ""
    return f"{info['platform']}{device}{ranks}: {info['platform_reason']}"


def _memory(info: Mapping[str, Any], tokens: int) -> str:
    """Of the weights as all ranks have them, of K and V what each has."""
    among, each = (f" among {info['ranks']} ranks", " in each") if info.get("ranks", 1) > 1 else ("", "")
    return (f"{size(info['weight_bytes'])} of weights{among}, {size(info['kv_bytes'])} of KV cache{each} for "
            f"{count(tokens, 'token')}")


def banner(info: Mapping[str, Any], config: Config, url: str, seconds: float, text: Any) -> str:
    """The lines; `info` is the engine's, `seconds` what start-up took, `text` the model's `TextService`."""
    model, context = info["served_name"], info["max_model_len"]
    tokens = info["page_size"] * info["pages"]
    at_once = min(tokens / context, info["max_running"])
    key = config.server.api_key is not None
    advice = shown_options(info.get("sampling_defaults", {}))
    notes = list(info["report"])
    if len(notes) > MAX_NOTES:
        notes = [*notes[:MAX_NOTES - 1], f"and {len(notes) - MAX_NOTES + 1} more: see {url}/server_info"]
    rows = [
        ("model", f"{model}, computed in {DTYPES.get(info['dtype'], info['dtype'])}"),
        *((name, note) for name, note in zip(("weights", *[""] * MAX_NOTES), notes, strict=False)),
        *zip(("platform", *[""] * MAX_REASON), textwrap.wrap(_platform(info), ROOM,
             max_lines=MAX_REASON, placeholder=" ... (`isthmus doctor` has it all)"), strict=False),
        ("memory", _memory(info, tokens)),
        ("context", f"{context} tokens; {count(at_once, 'request')} of that length at once, at most "
                    f"{info['max_running']} of any length"),
        *([("sampling", f"{advice} as the model's makers advise, unless a request sets any")] if advice else []),
    ]
    lines = [f"  {name:{LABEL}}{_cut(value, ROOM)}" for name, value in rows]
    curl = _curl(url, model, key, *example(text, context))
    return "\n".join([
        f"isthmus {isthmus_version()} is ready after {seconds:.1f} s: {url}{listens(config, url)}", *lines,
        *(f"  {name:{LABEL}}{line}" for name, line in zip(("try", *[""] * 3), curl, strict=False)),
        f"  {'clients':{LABEL}}export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={'<your key>' if key else 'none'}",
    ])
