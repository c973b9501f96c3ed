"""How long a step takes on a platform, as a formula: enough to compare policies, no promise of a device."""
from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path

import yaml

from ..errors import ConfigError, shown
from ..suggest import suggest


@dataclass(frozen=True)
class LatencyModel:
    """A step takes step_ms + prompt tokens / prefill_tokens_per_s + decoding requests * request_us
    + tokens of their contexts * context_ns.

    max_running, chunk: the scheduler's limits there.
    """

    prefill_tokens_per_s: float
    step_ms: float
    request_us: float = 0.0
    context_ns: float = 0.0
    max_running: int = 128
    chunk: int = 2048

    def seconds(self, prompt: int, decoding: int, context: int) -> float:
        """A step with so many prompt tokens and so many decoding requests, whose contexts have `context` tokens."""
        return (self.step_ms * 1e-3 + prompt / self.prefill_tokens_per_s + decoding * self.request_us * 1e-6
                + context * self.context_ns * 1e-9)


# An 8B model in bf16: prefill at about half the peak of matrix units, a step that reads the weights once, contexts of
# 128 KiB a token (8 KV heads) read at memory speed. "cpu" is SmolLM2-135M on two cores.
LATENCY_MODELS = {
    "h200": LatencyModel(30_000, 4.5, 10, 30),
    "h200x8": LatencyModel(180_000, 2.5, 10, 5, 512, 8192),
    "a100": LatencyModel(10_000, 10.0, 15, 70),
    "mi300x": LatencyModel(25_000, 5.0, 12, 28),
    "m4-max": LatencyModel(800, 30.0, 200, 250, 16, 512),
    "cpu": LatencyModel(600, 25.0, 4000, 500, 16, 256),
}


MOST = {"max_running": 2**16, "chunk": 2**30}  # of what the scheduler has places for


def read_latency_model(name: str) -> LatencyModel:
    """A built-in one, or a YAML or JSON file with its fields. Raises `ConfigError` that names the field."""
    if name in LATENCY_MODELS:
        return LATENCY_MODELS[name]
    path = Path(name)
    if not path.is_file():
        raise ConfigError(f"--latency {name}: neither a file nor one of {', '.join(LATENCY_MODELS)}"
                          f"{suggest(name, LATENCY_MODELS)}")
    try:
        text = path.read_text(encoding="utf-8")
        given = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"--latency {name}: {error}") from error
    names = [field.name for field in fields(LatencyModel)]
    if not isinstance(given, dict) or not {"prefill_tokens_per_s", "step_ms"} <= set(given):
        raise ConfigError(f"--latency {name}: it must give prefill_tokens_per_s and step_ms; it may give "
                          f"{', '.join(names[2:])}")
    for key, value in given.items():
        if key not in names:
            raise ConfigError(f"--latency {name}: there is no {key}{suggest(str(key), names)}")
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf") \
                or not value and key == "prefill_tokens_per_s" or value < 1 and key in MOST:
            raise ConfigError(f"--latency {name}: {key} is {shown(value)}, no number above 0")
        if key in MOST and value > MOST[key]:
            raise ConfigError(f"--latency {name}: {key} is {shown(value)}, at most {MOST[key]} is possible")
    return LatencyModel(**{k: int(v) if k in MOST else float(v) for k, v in given.items()})
