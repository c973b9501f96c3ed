"""`isthmus explain`: each setting and who set it, and what the engine will decide from them."""
from __future__ import annotations

import argparse
import json
import os
from typing import TYPE_CHECKING

from ..config import Config, shown_size
from ..env import VARIABLES, cache_dir
from ..errors import IsthmusError
from ..files import read_template
from ..registry import RegistrationError
from ..settings import SECRET, Resolved, list_settings, shown, value_of
from .banner import DTYPES
from .parser import add_model_argument
from .sampling import shown_options
from .session import platform_warning

if TYPE_CHECKING:
    from ..manifests import Claim
    from ..platform import Manifest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """0, or 2 when the settings cannot work on this machine; the reason is among the decisions."""
    import msgspec  # --help can do without it and those that it imports

    from ..manifests import Claim, lines
    made, failed = decisions(resolved.config)
    claim = _claim(resolved.config, made)
    settings = list_settings().values()
    if arguments.json:
        values = {s.name: {"group": s.group, "set_by": resolved.origin[s.name], "variable": s.variable,
                           "value": "(hidden)" if s.name in SECRET and value_of(resolved.config, s) is not None
                           else value_of(resolved.config, s)} for s in settings}
        print(json.dumps({"settings": values, "environment": {name: os.environ.get(name) for name in VARIABLES},
                          "decisions": [{"what": w, "value": v, "why": y} for w, v, y in made],
                          "manifest": msgspec.to_builtins(claim) if isinstance(claim, Claim) else None,
                          "manifest_problem": str(claim) if isinstance(claim, RegistrationError) else None},
                         ensure_ascii=False))
        return 2 if failed else 0
    width = max(len(s.flag) for s in settings)
    wide = max(len(shown(resolved.config, s)) for s in settings)
    group = ""
    for setting in settings:
        if setting.group != group:
            group = setting.group
            print(f"{group}")
        print(f"  {setting.flag:{width}}  {shown(resolved.config, setting):{wide}}  {resolved.origin[setting.name]}")
    print("environment")
    for name, meaning in VARIABLES.items():
        print(f"  {name:{width}}  {shown_variable(name):{wide}}  {meaning}")
    if isinstance(claim, RegistrationError):
        print(f"manifest\n  problem  {claim}")
    elif claim is not None:
        print("manifest: what the platform offers at its best, wherever it runs")
        for what, value in lines(claim):
            print(f"  {what:{width}}  {value}")
    print("decisions")
    for what, value, why in made:
        print(f"  {what:{width}}  {value}" + (f"  ({why})" if why else ""))
    return 2 if failed else 0


def _claim(config: Config, made: list[tuple[str, str, str]]) -> Claim | RegistrationError | None:
    """The manifest file of the platform asked for, or else of the one chosen; or what is wrong with it."""
    from ..manifests import read_claims
    name = config.platform.platform
    if name == "auto":
        name = next((value for what, value, _ in made if what == "platform"), "")
    return read_claims().get(name)


def shown_variable(name: str) -> str:
    """Its value for people, or what holds without it."""
    return os.environ.get(name) or (str(cache_dir()) if name == "ISTHMUS_CACHE" else "-")


def decisions(config: Config) -> tuple[list[tuple[str, str, str]], bool]:
    """(what, value, why) of each choice that follows, and whether one of them cannot be made here."""
    from ..platform import Unavailable, Unsupported
    from ..startup import choose_page_size, claim_platform, compute_dtype
    made: list[tuple[str, str, str]] = []
    try:
        read_template(config.model.chat_template)
        platform, manifest, why = claim_platform(config)
        getattr(platform, "close", lambda: None)()
        warning = platform_warning(manifest.name, manifest.rank)
        made.append(("platform", manifest.name, f"{why}; {warning}" if warning else why))
        dtype = compute_dtype(config, manifest)
        made.append(("dtype", DTYPES.get(dtype, dtype),
                     "asked for" if config.model.dtype != "auto" else f"{manifest.name} computes best in it"))
        page = choose_page_size(config, manifest)
        made.append(("page size", f"{page} tokens", "asked for" if config.cache.page_size else "its default"))
        made += _sizes(config, manifest, dtype, page)
    except (IsthmusError, Unavailable, Unsupported, RegistrationError) as error:
        return [*made, ("problem", str(error), "")], True
    return made, False


def _sizes(config: Config, manifest: Manifest, dtype: str, page: int) -> list[tuple[str, str, str]]:
    """What depends on the model, if it is on this machine."""
    from ..models.loader import read_config
    from ..parsers.choose import parsers_of
    from ..speculation.options import described
    from ..startup import check_weights, fit_memory, named
    from ..text.tokenizer import load_tokenizer
    from ..weights.checkpoint import open_checkpoint
    from ..weights.sources import find_model, recommended_sampling
    path = find_model(config.model.model)
    if path is None:
        return [("model", config.model.model or "the default", "not on this machine yet: `isthmus pull` fetches it")]
    with named(path), open_checkpoint(path) as checkpoint:
        model, weights = read_config(checkpoint)[1], checkpoint.nbytes
        check_weights(model.name, weights, manifest, config.parallel.tensor_parallel_size)
        sampling = shown_options(recommended_sampling(path, checkpoint.generation))
        tokenizer = load_tokenizer(checkpoint, encodes=False)
        parsers = parsers_of(config, tokenizer.tool_template or tokenizer.chat_template)
    drafts = described(config.speculation.speculative)
    sizes, notes = fit_memory(config, manifest, model, dtype, page, max(0, manifest.memory_free - weights))
    asked = config.cache.kv_cache_memory
    budget = f"{asked} asked for" if asked else f"at most {manifest.kv_share:.0%} of free memory"
    return [("model", model.name, str(path)),
            ("weights", shown_size(weights), "in the file; formats without a kernel take more"),
            ("K and V", shown_size(sizes.pages * sizes.state.page_bytes()),
             f"{sizes.pages - 1} pages of {page} tokens in {sizes.state.dtype}; {budget}"),
            ("context", f"{sizes.max_model_len} tokens", "; ".join(notes)),
            ("running requests", f"{sizes.max_running} at most", ""),
            ("prefill chunk", f"{sizes.chunk} tokens", ""),
            ("speculation", *drafts),
            ("tool parser", *parsers.calls), ("reasoning parser", *parsers.thinking),
            ("sampling", sampling or "temperature 1", "recommended by the model's makers; holds for requests that set "
             "nothing of it" if sampling else "nothing is recommended by the model's makers")]
