"""What an engine speculates with, from its settings."""
from __future__ import annotations

from typing import Any

from ..config import Config
from ..errors import ConfigError
from ..scheduler.admission import Limits
from ..startup import Loaded
from .contract import Drafter, Setup
from .options import asked, options_of
from .speculation import Drafting


def drafting(config: Config, loaded: Loaded, limits: Limits, tree: Any, recorder: Any,
             device: Any) -> Drafting | None:
    """The drafter that `--speculative` names, made; None without one. Raises `ConfigError` with the way out.

    device: the engine, for a drafter that computes with a model.
    """
    setting = asked(config.speculation.speculative)
    if setting is None:
        return None
    kind, options = options_of(setting)

    def make() -> Drafter:
        return kind(Setup(setting.tokens, limits.vocab_size, limits.max_model_len, limits.page_size,
                          limits.max_running + 1, options, tree, *(
                              (device, loaded.model.draft) if kind.on_device else ())))
    buckets, branches = loaded.manifest.buckets, options.get("branches", 0)
    if branches and kind.on_device and "logprobs" in limits.lacks:
        raise ConfigError(f"--speculative branches={branches}: branches are the likeliest tokens beside the drafted "
                          f"ones, and {limits.platform} gives no log-probabilities: {limits.lacks['logprobs']}; leave "
                          "branches away")
    return Drafting(setting.drafter, recorder.drafter(make), setting.tokens, setting.adaptive, recorder.drafted,
                    buckets.tokens[-1] if buckets else 0, kind.on_device, branches, buckets.rows[-1] if buckets else 0)
