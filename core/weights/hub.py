"""Models of the Hugging Face hub, through `huggingface_hub`: weights, configuration and tokenizer files, never code."""
from __future__ import annotations

import io
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase as fnmatch
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

from ..errors import CheckpointError
from .checkpoint import PICKLES, SIDECARS
from .gguf import split_paths
from .wheels import Progress

FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model")
_ID = re.compile(r"(?P<repo>[\w.-]{1,96}/[\w.-]{1,96})(?::(?P<choice>[\w./-]+))?")


class HubName(NamedTuple):
    """`owner/repo`, with `choice` one GGUF of it: a file name or a quantization such as Q4_K_M."""

    repo: str
    choice: str | None


def parse_name(name: str) -> HubName | None:
    """`owner/repo` or `owner/repo:choice`; None for anything else."""
    match = _ID.fullmatch(name)
    return HubName(match["repo"], match["choice"]) if match else None


def fetch(name: HubName, revision: str | None, progress: Progress | None) -> Path:
    """A folder with the model, or the path of its GGUF file, in the hub's own cache.

    Without a network the cached copy is used. Raises `CheckpointError` saying what to do: not found, wrong revision,
    gated, offline, several models to choose from, or weights only as pickles.
    """
    files = _list_files(name, revision)
    if files is None:
        folder = _cached_snapshot(name, revision)
        _, model = choose_files(name, [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()])
    else:
        wanted, model = choose_files(name, files)
        folder = _download(name, revision, wanted, progress)
    return folder / model if model else folder


def choose_files(name: HubName, files: Sequence[str]) -> tuple[list[str], str | None]:
    """Which files to download, and which of them is the model when it is a GGUF. Raises `CheckpointError`."""
    gguf = [f for f in files if f.endswith(".gguf") and not PurePosixPath(f).name.startswith(SIDECARS)]
    # "consolidated" files hold the same weights again, under other names.
    plain = [f for f in files if "/" not in f and not f.startswith("consolidated")
             and any(fnmatch(f, pattern) for pattern in FILES)]
    if name.choice is None and any(f.endswith(".safetensors") for f in plain):
        return plain, None
    first = {str(split_paths(Path(f))[0]): f for f in gguf}
    models = sorted(f for f in first if _matches(f, name.choice))
    if len(models) != 1:
        raise CheckpointError(_choice_error(name, files, sorted(first), models))
    return [f for f in gguf if str(split_paths(Path(f))[0]) == models[0]], models[0]


def _matches(file: str, choice: str | None) -> bool:
    """`choice` is the file's path, its name, or a whole word of its name, in any case."""
    base = PurePosixPath(file).name
    if choice is None or choice in (file, base):
        return True
    return bool(re.search(rf"(?<![a-z0-9]){re.escape(choice.lower())}(?![a-z0-9_])", base.lower()))


def _choice_error(name: HubName, files: Sequence[str], models: Sequence[str], matching: Sequence[str]) -> str:
    listed = ", ".join(f"{name.repo}:{m}" for m in (matching or models)[:8])
    if len(matching) > 1:
        which = f" that match {name.choice!r}" if name.choice else ""
        return f"{name.repo} holds {len(matching)} GGUF models{which}, name one: {listed}"
    if models:
        return f"{name.repo} has no GGUF model that matches {name.choice!r}; it has: {listed}"
    if any(f.endswith(PICKLES) for f in files):
        return f"{name.repo} has its weights only as pickle files, which are never loaded: look for a safetensors copy"
    return f"{name.repo} holds neither safetensors nor {'a GGUF model' if name.choice is None else repr(name.choice)}"


def _list_files(name: HubName, revision: str | None) -> list[str] | None:
    """The repository's files; None when the hub cannot be reached."""
    import huggingface_hub  # slow to import, and not needed for local models
    try:
        info = huggingface_hub.HfApi().model_info(name.repo, revision=revision, timeout=10)
    except Exception as error:  # the client's transport errors share no base class over its versions
        _raise_refusal(error, name, revision)
        return None
    return [sibling.rfilename for sibling in info.siblings or ()]


def _download(name: HubName, revision: str | None, files: Sequence[str], progress: Progress | None) -> Path:
    """The folder of the repository's snapshot, with `files` in it."""
    import huggingface_hub
    exact = [re.sub(r"([\[*?])", r"[\1]", f) for f in files]
    try:
        return Path(huggingface_hub.snapshot_download(name.repo, revision=revision, allow_patterns=exact,
                                                      tqdm_class=_bar(progress) if progress else None))
    except Exception as error:
        _raise_refusal(error, name, revision)
        raise CheckpointError(f"{name.repo}: the download failed ({str(error)[:300]}); try again, it goes on where it "
                              "stopped") from error


def _cached_snapshot(name: HubName, revision: str | None) -> Path:
    """The folder that an earlier download left. The client's own offline mode wants every file of the repository."""
    for repo in _scan():
        if repo.repo_id == name.repo:
            for found in repo.revisions:
                if found.commit_hash == revision or (revision or "main") in found.refs:
                    return Path(found.snapshot_path)
    at = f" at revision {revision!r}" if revision else ""
    raise CheckpointError(f"the hub cannot be reached, and {name.repo}{at} is not in the local cache: connect and try "
                          "again, or name a local model; `isthmus models` lists those that are here")


def _scan() -> list[Any]:
    """The models in the hub's cache."""
    import huggingface_hub
    from huggingface_hub import errors
    try:
        return [r for r in huggingface_hub.scan_cache_dir().repos if r.repo_type == "model"]
    except errors.CacheNotFound:
        return []


def _raise_refusal(error: Exception, name: HubName, revision: str | None) -> None:
    """Raise the hub's refusal in the user's terms; return when the network failed; raise anything else as it is."""
    from huggingface_hub import errors
    advice = {
        errors.GatedRepoError: f"{name.repo} is gated: accept its terms on its page of the hub, then log in with "
                               "`hf auth login` or set HF_TOKEN",
        errors.RevisionNotFoundError: f"{name.repo} has no revision {revision!r}: name a branch, tag or commit of it",
        errors.RepositoryNotFoundError: f"the hub has no model {name.repo!r}, or it is private: check the spelling, or "
                                        "log in with `hf auth login`",
        errors.HFValidationError: f"{name.repo!r} is not a valid hub id: expected owner/repo",
    }
    for kind, text in advice.items():
        if isinstance(error, kind):
            raise CheckpointError(text) from error
    library = type(error).__module__.partition(".")[0]
    if not isinstance(error, OSError) and library not in ("httpx", "httpx2", "requests"):
        raise error


def _bar(progress: Progress) -> type:
    """A progress bar of the hub's client that draws nothing and tells `progress` the bytes."""
    from huggingface_hub.utils import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **{**kwargs, "disable": False, "file": io.StringIO()})

        def display(self, *args: Any, **kwargs: Any) -> None:
            if self.unit == "B":
                progress("downloading from the hub", int(self.n), int(self.total) if self.total else None)

    return Bar


def delete(repo_id: str) -> int:
    """Delete all of a repository from the hub's cache; the bytes that were freed."""
    import huggingface_hub
    hashes = [found.commit_hash for repo in _scan() if repo.repo_id == repo_id for found in repo.revisions]
    plan = huggingface_hub.scan_cache_dir().delete_revisions(*hashes)
    plan.execute()
    return plan.expected_freed_size


def cached() -> list[tuple[str, int, Path]]:
    """Models in the hub's cache: id, bytes, folder."""
    return sorted((repo.repo_id, repo.size_on_disk, Path(repo.repo_path)) for repo in _scan())
