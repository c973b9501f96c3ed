"""From what a person calls a model to where its files are: a known name, a path, or an id of the Hugging Face hub."""
from __future__ import annotations

from collections.abc import Mapping
from difflib import SequenceMatcher
from pathlib import Path
from typing import Any, NamedTuple

from ..env import cache_dir
from ..errors import CheckpointError, ConfigError, cut
from ..files import is_there, named_path
from ..suggest import suggest
from . import hub, wheels
from .wheels import KNOWN, Progress

DEFAULT = "smollm2-135m-instruct"
LIKENESS = 0.7  # of what was typed to the name that was probably meant; 1 = the same
MAX_QUOTED = 300  # characters of a name in a message


class ModelEntry(NamedTuple):
    """A model that can be named. `size` of its files and of the `download` in bytes; `path` None = not downloaded yet;
    `source` is "registry" or "hub"."""

    name: str
    size: int
    path: Path | None
    source: str
    about: str
    download: int


def recommended_sampling(path: Path, generation: Mapping[str, Any]) -> dict[str, float]:
    """Sampling that a model's makers recommend: from its generation_config.json, or from the table of known models.

    Names as in a request: temperature, top_p, top_k, min_p, repetition_penalty. Empty when nothing is recommended.
    """
    for known in KNOWN.values():
        if path == known.path(cache_dir() / "models"):
            return dict(known.sampling)
    if generation.get("do_sample") is False:
        return {}
    limits = {"temperature": (0, 2), "top_p": (0, 1), "top_k": (0, 2**31), "min_p": (0, 1), 
              "repetition_penalty": (0.01, 10)}
    return {name: (int if name == "top_k" else float)(generation[name]) for name, (least, most) in limits.items()
            if isinstance(generation.get(name), int | float) and least <= generation[name] <= most}


def resolve_model(name: str | None = None, revision: str | None = None, progress: Progress | None = None) -> Path:
    """A path that `open_checkpoint` takes; downloads what is not here yet.

    name: None = the default model; a name of `list_models`; a path; `owner/repo`, `owner/repo:file.gguf` or
    `owner/repo:Q4_K_M` of the hub. revision: branch, tag or commit, for the hub only.
    progress: called with (stage, bytes done, bytes in all or None); the hub's own bars are shown without it.
    Raises `CheckpointError` when there is no such model or it cannot be had, and says what to do.
    """
    name = DEFAULT if name is None else name
    known, quoted = KNOWN.get(name.lower()), repr(cut(name, MAX_QUOTED))
    path = named_path(name)
    if known or is_there(path) or _looks_like_path(name):
        if revision is not None:
            raise ConfigError(f"--revision={revision} is for models of the hub, and {quoted} is not one: leave it out")
        if known:
            return wheels.fetch(known, cache_dir() / "models", progress or _silent)
        if not name or not is_there(path):
            raise CheckpointError(f"{quoted}: no such file or folder (from {Path.cwd()})")
        return path
    hub_name = hub.parse_name(name)
    if hub_name is None:
        raise CheckpointError(f"{quoted} is no known model ({', '.join(KNOWN)}), no existing path, and no hub id of "
                              f"the form owner/repo{_closest(name)}")
    return hub.fetch(hub_name, revision, progress)


def resolve_adapter(name: str, progress: Progress | None = None) -> Path:
    """The folder of an adapter, by its path or hub id; downloads what is not here yet. Raises `CheckpointError`."""
    found = find_adapter(name)
    return hub.fetch(hub.parse_name(name), None, progress) if found is None else found


def find_adapter(name: str) -> Path | None:
    """The folder of an adapter that is named by its path, None for a hub id. Raises `CheckpointError` for neither."""
    path = named_path(name)
    if name and is_there(path):
        return path
    if _looks_like_path(name) or hub.parse_name(name) is None:
        raise CheckpointError(f"{cut(name, MAX_QUOTED)!r}: no such folder (from {Path.cwd()}), and no hub id of "
                              "the form owner/repo")
    return None


def find_model(name: str | None = None) -> Path | None:
    """The path of a model if it is on this machine, None if it would have to be downloaded.

    Raises `CheckpointError`, as `resolve_model` does, for what is neither a name, a path nor a hub id.
    """
    name = DEFAULT if name is None else name
    for entry in list_models():
        if entry.name in (name, name.lower()):
            return entry.path
    to_download = hub.parse_name(name) and not _looks_like_path(name) and not is_there(named_path(name))
    return None if to_download else resolve_model(name)


def _closest(name: str) -> str:
    """"; did you mean x?" for the known model that is spelt much like `name`, or that begins so."""
    def likeness(known: str) -> float:
        return max(SequenceMatcher(None, name.lower(), text).ratio() for text in (known, known[:len(name)]))
    best = max(KNOWN, key=likeness)
    return f"; did you mean {best}?" if likeness(best) >= LIKENESS else ""


def _looks_like_path(name: str) -> bool:
    return name.startswith(("/", ".", "~")) or "\\" in name or name.count("/") > 1 and ":" not in name or \
        name.endswith((".gguf", ".safetensors")) and ":" not in name or not name


def _silent(stage: str, done: int, total: int | None) -> None:
    pass


def find_downloaded(name: str) -> ModelEntry:
    """The downloaded model of that name. Raises `CheckpointError` for what is none: a file of one's own is not deleted
    by its path, and of a model that is not here there is nothing to delete."""
    entries = list_models()
    for entry in entries:
        if entry.name.lower() == name.lower():
            if entry.path is None:
                raise CheckpointError(f"{entry.name} is not on this machine")
            return entry
    quoted = repr(cut(name, MAX_QUOTED))
    if is_there(named_path(name)):
        raise CheckpointError(f"{quoted} is a file or folder of your own, no download: delete it yourself")
    here = [entry.name for entry in entries if entry.path]
    raise CheckpointError(f"there is no downloaded model {quoted}{suggest(name, here)}; there are: "
                          f"{', '.join(here) or 'none'}")


def delete_model(entry: ModelEntry) -> int:
    """Delete the files of a model that `find_downloaded` gave; the bytes that are free now.

    Raises `CheckpointError` when the system refuses.
    """
    try:
        return hub.delete(entry.name) if entry.source == "hub" else wheels.delete(KNOWN[entry.name],
                                                                                  cache_dir() / "models")
    except OSError as error:
        raise CheckpointError(f"{entry.name} cannot be deleted: {error.strerror or error} ({error.filename})") from None


def list_models() -> list[ModelEntry]:
    """Known models, downloaded or not, then what the hub's cache holds."""
    root = cache_dir() / "models"
    entries = []
    for model in KNOWN.values():
        path = model.path(root)
        here = path.is_file() and path.stat().st_size == model.size
        entries.append(ModelEntry(model.name, model.size, path if here else None, "registry", model.about,
                                  model.download))
    return entries + [ModelEntry(repo, size, path, "hub", "", size) for repo, size, path in hub.cached()]
