"""What is decided once, at start: platform, model, dtype, and how much memory goes to K and V.

A platform answers questions (its manifest); it never changes a setting. Every choice leaves a line for people.
"""
from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .adapters.store import Prepared, prepared
from .config import Config, shown_size, size_bytes
from .discovery import choose_platform, load_platform, probe, told
from .errors import CheckpointError, ConfigError
from .models.config import ModelConfig
from .models.loader import LoadedModel, load_model, read_config
from .platform import Manifest
from .platform_options import platform_options
from .specs import LayerState, StateSpec
from .speculation.companion import Companion, Loading, companion
from .speculation.options import LABEL as DRAFTER
from .weights.checkpoint import open_checkpoint
from .weights.sources import recommended_sampling, resolve_adapter, resolve_model

log = logging.getLogger(__name__)

DTYPES = {"float64": "f64", "float32": "f32", "bfloat16": "bf16", "float16": "f16"}
KV_DTYPES = DTYPES | {"fp8_e4m3": "f8_e4m3", "fp8_e5m2": "f8_e5m2", "int8": "i8"}
MAX_KV_DEFAULT = 4 * 2**30  # bytes; more must be asked for, so that a laptop keeps its memory
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class Sizes:
    """Pages and limits that fit the memory. `pages` counts page 0."""

    state: StateSpec
    page_size: int
    pages: int
    max_model_len: int
    max_running: int
    chunk: int


@dataclass(frozen=True)
class Loaded:
    """A probed platform with a model on it. `sampling` is what the model's makers recommend; `notes` tell what was
    decided beyond the settings; `stored` how many weights the checkpoint has in which format."""

    platform: Any
    manifest: Manifest
    reason: str
    path: Path
    model: LoadedModel
    dtype: str
    sizes: Sizes
    overlap: bool
    sampling: dict[str, float]
    notes: tuple[str, ...]
    adapters: Prepared | None = None
    stored: Mapping[str, int] = field(default_factory=dict)


def load(config: Config, progress: Progress | None = None, platform: Any = None) -> Loaded:
    """Do all of it. Raises `Unavailable`, `Unsupported`, `ConfigError` or `CheckpointError` with the way out.

    platform: an object that was not probed yet, in place of the one that the settings name.
    """
    tell = progress or (lambda stage, done, total: None)
    if config.parallel.tensor_parallel_size > 1:
        _check_ranks(config, tell)
    platform, manifest, reason = claim_platform(config, platform)
    try:
        return _load_on(platform, manifest, reason, config, tell)
    except BaseException:
        getattr(platform, "close", lambda: None)()
        raise


def _check_ranks(config: Config, tell: Progress) -> None:
    """Raises `CheckpointError` where the model cannot be shared so, before processes are started for it."""
    world, path = config.parallel.tensor_parallel_size, Path(resolve_model(config.model.model, config.model.revision,
                                                                           tell))
    with named(path), open_checkpoint(path) as checkpoint:
        settings = read_config(checkpoint)[1]
        (settings.experts_apart(world) if config.parallel.expert_parallel else settings).per_rank(world)


def _load_on(platform: Any, manifest: Manifest, reason: str, config: Config, tell: Progress) -> Loaded:
    world, apart = config.parallel.tensor_parallel_size, config.parallel.expert_parallel
    dtype = compute_dtype(config, manifest)
    page_size = choose_page_size(config, manifest)
    path = Path(resolve_model(config.model.model, config.model.revision, tell))
    with named(path), open_checkpoint(path) as checkpoint:
        # What cannot fit is refused before the weights are read; the real figures count afterwards.
        settings = read_config(checkpoint)[1]
        drafts = _drafter(config, Loading(
            checkpoint, settings, platform, manifest, dtype, page_size, world, config.model.strict,
            lambda name: Path(resolve_model(name, None, tell)), lambda done, total: tell("load drafter", done, total)))
        check_weights(settings.name + (" with its drafter" if drafts.nbytes else ""),
                      checkpoint.nbytes + drafts.nbytes, manifest, world)
        shared = (settings.experts_apart(world) if apart else settings).per_rank(world)
        fit_memory(config, manifest, shared, dtype, page_size,
                   max(0, manifest.memory_free - (checkpoint.nbytes + drafts.nbytes) // world),
                   shared.state_layers + drafts.layers)
        model = load_model(checkpoint, platform, manifest, dtype, config.model.strict,
                           lambda done, total: tell("load weights", done, total), page_size, world, apart)
        model = drafts.joined(model)
        sampling, stored = recommended_sampling(path, checkpoint.generation), checkpoint.census()
    adapters = prepared(config.adapters, model, manifest, lambda name: resolve_adapter(name, tell))
    free = max(0, _free_memory(platform, manifest, model.nbytes // world) - adapters.nbytes // world)
    sizes, notes = fit_memory(config, manifest, model.config.per_rank(world), dtype, page_size, free,
                              model.state_layers)
    overlap = config.scheduler.overlap and "overlap" in manifest.features
    if config.scheduler.overlap and not overlap:
        notes.append(f"overlap is off: {manifest.name} finishes each step before the next can be launched")
    if "penalties" not in manifest.features and sampling.pop("repetition_penalty", None):
        notes.append(f"the model's recommended repetition penalty is left out: {manifest.name} has no penalties")
    if adapters.limits.slots:
        notes.append(f"{shown_size(adapters.nbytes)} are kept for {adapters.limits.slots} adapters of rank "
                     f"{adapters.limits.rank} at once")
    return Loaded(platform, manifest, reason, path, model, dtype, sizes, overlap, sampling, tuple(notes), adapters,
                  stored)


def _drafter(config: Config, loading: Loading) -> Companion:
    """What `--speculative` names; what is wrong with its files is told of it, and not of the model."""
    items = config.speculation.speculative
    try:
        return companion(items, loading)
    except CheckpointError as error:
        if str(error).startswith(DRAFTER):
            raise
        raise CheckpointError(f"{DRAFTER} {','.join(items)}: {error}") from error


@contextmanager
def named(path: Path) -> Iterator[None]:
    """A `CheckpointError` from inside names the file or folder."""
    try:
        yield
    except CheckpointError as error:
        if str(path) in str(error) or str(error).startswith(DRAFTER):
            raise
        raise CheckpointError(f"{path}: {error}") from error


def claim_platform(config: Config, platform: Any = None) -> tuple[Any, Manifest, str]:
    """The platform given or asked for, or the best there is, probed: (platform, manifest, why this one)."""
    name, reason = "given", "given by the caller"
    if platform is None:
        options = platform_options(config.platform.platform_option)
        name, reason = config.platform.platform, "named by the user"
        if name == "auto":
            name, reason = choose_platform(options)
        platform = load_platform(name, options)
    world = config.parallel.tensor_parallel_size
    if config.parallel.expert_parallel and world == 1:
        raise ConfigError("--expert-parallel: one rank has all experts; say how many with --tensor-parallel-size")
    manifest = probe(name, platform, 0, world)
    if manifest.local_ranks == 1 < world:
        from .processes.ranks import Ranks
        platform = Ranks(platform, config, world)
    elif manifest.local_ranks != world:
        raise ConfigError(f"--tensor-parallel-size {world}: {manifest.name} runs {manifest.local_ranks} ranks")
    return platform, manifest, reason


def load_rank(config: Config, rank: int, world: int) -> tuple[Any, LoadedModel]:
    """Another rank's platform with its share of the model on it, as rank 0 has its own."""
    options = platform_options(config.platform.platform_option)
    name = config.platform.platform
    name = choose_platform(options)[0] if name == "auto" else name
    platform = load_platform(name, options)
    manifest = probe(name, platform, rank, world)
    path = Path(resolve_model(config.model.model, config.model.revision))
    with named(path), open_checkpoint(path) as checkpoint:
        return platform, load_model(checkpoint, platform, manifest, compute_dtype(config, manifest),
                                    config.model.strict, None, choose_page_size(config, manifest), world,
                                    config.parallel.expert_parallel)


def compute_dtype(config: Config, manifest: Manifest) -> str:
    """The neck's name of the dtype to compute in: the platform's best unless the user chose."""
    if config.model.dtype == "auto":
        return manifest.compute_dtypes[0]
    dtype = DTYPES[config.model.dtype]
    if dtype not in manifest.compute_dtypes:
        flags = {neck: name for name, neck in DTYPES.items()}
        raise ConfigError(f"--dtype {config.model.dtype}: {manifest.name} computes in "
                          f"{', '.join(flags.get(each, each) for each in manifest.compute_dtypes)}")
    return dtype


def choose_kv_dtype(config: Config, manifest: Manifest, dtype: str) -> str:
    """The neck's name of the dtype of K and V: that of the computation where the platform keeps them in it, else its
    default, unless the user chose."""
    asked = config.cache.kv_cache_dtype
    if asked == "auto":
        return dtype if dtype in manifest.kv_dtypes else manifest.kv_dtypes[0]
    if KV_DTYPES[asked] not in manifest.kv_dtypes:
        raise ConfigError(f"--kv-cache-dtype {asked}: {manifest.name} keeps K and V in {', '.join(manifest.kv_dtypes)}")
    return KV_DTYPES[asked]


def choose_page_size(config: Config, manifest: Manifest) -> int:
    """Tokens in a page: the platform's default unless the user chose one that it offers."""
    size = config.cache.page_size or manifest.page_sizes[0]
    if size not in manifest.page_sizes:
        offered = ", ".join(map(str, sorted(manifest.page_sizes)))
        raise ConfigError(f"--page-size {size}: {manifest.name} offers {offered}")
    return size


def check_weights(model: str, nbytes: int, manifest: Manifest, world: int) -> None:
    """Raises `ConfigError` with the numbers and the ways out for weights that no device has the memory for. nbytes: of
    the checkpoint; formats without a kernel take more."""
    share, free = nbytes // world, manifest.memory_free
    if share >= free:
        each = f" on each of {world} devices" if world > 1 else ""
        left = f"{shown_size(free)} of {shown_size(manifest.memory_total)} are free on {manifest.device}"
        raise ConfigError(f"{model} does not fit: its weights need {shown_size(share)}{each}, and {left}. A smaller "
                          f"quantization of it (such as Q4_K_M or int4) needs less, --tensor-parallel-size {2 * world} "
                          "shares it among more devices, and what else holds memory can be ended (`isthmus ps` lists "
                          "servers)")


def _free_memory(platform: Any, manifest: Manifest, weight_bytes: int) -> int:
    """Bytes left on one device after its weights: measured where the platform can, else computed."""
    if callable(getattr(platform, "memory", None)):
        try:
            return max(0, int(platform.memory()[1]))
        except Exception as error:
            log.warning("%s cannot say how much memory is free (%s): it is taken from its probe", manifest.name,
                        told(error))
    return max(0, manifest.memory_free - weight_bytes)


def fit_memory(config: Config, manifest: Manifest, model: ModelConfig, dtype: str, page_size: int, free: int,
               layers: tuple[LayerState, ...] = ()) -> tuple[Sizes, list[str]]:
    """How many pages there are, and the limits that follow. Raises `ConfigError` with the numbers when none fit.
    layers: the caches of all layers, where they are not just the model's."""
    notes: list[str] = []
    settings = config.scheduler
    chunk = settings.chunked_prefill_size
    running = settings.max_running_requests
    if manifest.buckets:
        running = min(running, manifest.buckets.rows[-1])
        chunk = max(1, min(chunk, manifest.buckets.tokens[-1] - running))
    state = StateSpec(layers or model.state_layers, choose_kv_dtype(config, manifest, dtype), page_size, running + 1)
    limit = config.model.max_model_len or model.max_position
    if limit > model.max_position:
        raise ConfigError(f"--max-model-len {limit}: {model.name} was made for "
                          f"{model.max_position} positions")
    longest = manifest.buckets.pages[-1] * page_size if manifest.buckets else limit
    if limit > longest:
        words = f"{manifest.name} is compiled for contexts of {longest} tokens at most in pages of {page_size}"
        if config.model.max_model_len:
            raise ConfigError(f"--max-model-len {limit}: {words}")
        notes.append(f"context {longest} tokens instead of {limit}: {words}")
        limit = longest
    pages, budget = _pages(config, manifest, state, running * -(-limit // page_size) + 1, free, notes)
    room = (pages - 1) * page_size
    if limit > room:
        if config.model.max_model_len:
            need = (-(-limit // page_size) + 1) * state.page_bytes()
            ways = [f"--max-model-len {room} fits", *_smaller_dtypes(manifest, state, limit, budget)]
            if need <= free:
                ways.append(f"--kv-cache-memory {-(-need // 2**20)}MiB is enough, {shown_size(free)} are free")
            raise ConfigError(f"--max-model-len {limit} needs {shown_size(need)} for K and V, {shown_size(budget)} "
                              f"are given: {'; '.join(ways)}")
        notes.append(f"context {room} tokens instead of {limit}: {shown_size(budget)} of K and V hold no more")
        limit = room
    return Sizes(state, page_size, pages, limit, running, chunk), notes


def _smaller_dtypes(manifest: Manifest, state: StateSpec, limit: int, budget: int) -> list[str]:
    """What to say of a dtype of K and V in which `limit` tokens would fit: nothing, or the flag."""
    flags = {neck: name for name, neck in KV_DTYPES.items()}
    for dtype in manifest.kv_dtypes:
        pages = -(-limit // state.page_size) + 1
        if pages * replace(state, dtype=dtype).page_bytes() <= budget:
            return [f"--kv-cache-dtype {flags[dtype]} makes it fit"]
    return []


def _pages(config: Config, manifest: Manifest, state: StateSpec, useful: int, free: int,
           notes: list[str]) -> tuple[int, int]:
    """(pages, bytes given for them): what was asked for, prefix cache included, or else a share of the free memory and
    no more than the `useful` pages that requests can fill at once."""
    asked, page = config.cache.kv_cache_memory, state.page_bytes()
    if asked:
        budget = size_bytes(asked)
        if budget > free:
            raise ConfigError(f"--kv-cache-memory {asked}: {shown_size(free)} are free beside the weights; give less, "
                              "or leave it out")
        pages = budget // page
    else:
        budget = min(int(free * manifest.kv_share), MAX_KV_DEFAULT if manifest.kv_share < 0.5 else free)
        pages = min(useful, budget // page)
        if pages < budget // page:
            notes.append(f"K and V take {shown_size(pages * page)}, all that {state.seqs - 1} requests can fill; "
                         "--kv-cache-memory gives prefixes more")
    if pages < 2 + 16 // state.page_size:
        tokens = max(0, pages - 1) * state.page_size
        least = (2 + 16 // state.page_size) * page
        way = f"; --kv-cache-memory {-(-least // 2**20)}MiB is the least" if least <= free else (
            "; a smaller model or quantization leaves more")
        raise ConfigError(f"--kv-cache-memory {asked or '(not set)'}: {shown_size(budget)} for K and V hold no more "
                          f"than {tokens} tokens, too few to serve; {shown_size(free)} are free{way}")
    return pages, budget
