"""What `isthmus serve` prints when it is ready: at most twelve lines."""
from __future__ import annotations

import json
import shlex
import textwrap
from collections.abc import Mapping
from typing import Any

from ..config import Config
from .version import isthmus_version

DTYPES = {"f32": "float32", "bf16": "bfloat16", "f16": "float16", "f64": "float64"}
MAX_NOTES = 4
MAX_REASON = 120  # characters of why this platform was taken


def size(n: float) -> str:
    """Bytes for people: "1.25 GB", "84 MB"."""
    return f"{n / 1e9:.2f} GB" if n >= 1e9 else f"{n / 1e6:.0f} MB"


def base_url(host: str, port: int) -> str:
    """The address that clients on this machine use."""
    local = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
    return f"http://{local}:{port}"


def banner(info: Mapping[str, Any], config: Config, url: str, seconds: float) -> str:
    """The lines; `info` is the engine's, `seconds` what start-up took."""
    model = info["served_name"]
    tokens = info["page_size"] * info["pages"]
    at_once = min(tokens / info["max_model_len"], info["max_running"])
    body = shlex.quote(json.dumps({"model": model, "messages": [{"role": "user", "content": "Hello!"}]}))
    key = config.server.api_key is not None
    header = " -H \"Authorization: Bearer $OPENAI_API_KEY\"" if key else ""
    notes = list(info["report"])
    if len(notes) > MAX_NOTES:
        notes = [*notes[:MAX_NOTES - 1], f"and {len(notes) - MAX_NOTES + 1} more: see {url}/server_info"]
    reason = textwrap.shorten(info["platform_reason"], MAX_REASON, placeholder=" ...")
    return "\n".join([
        f"isthmus {isthmus_version()} is ready after {seconds:.1f} s: {url}",
        f"  model     {model}, {DTYPES.get(info['dtype'], info['dtype'])}",
        *(f"            {note}" for note in notes),
        f"  platform  {info['platform']}: {reason}",
        f"  memory    weights {size(info['weight_bytes'])}, K and V {size(info['kv_bytes'])} "
        f"({tokens} tokens in pages of {info['page_size']})",
        f"  context   {info['max_model_len']} tokens; {at_once:.1f} requests of that length fit at once, "
        f"{info['max_running']} run at most",
        f"  try       curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d {body}",
        f"  clients   export OPENAI_BASE_URL={url}/v1 OPENAI_API_KEY={'<your key>' if key else 'none'}",
    ])
