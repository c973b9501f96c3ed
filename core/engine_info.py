"""What an engine has chosen, for those who ask."""
from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from .config import Config
from .startup import Loaded


@dataclass(frozen=True)
class EngineInfo:
    """What was chosen and why, for banners, `/server_info` and the other processes. Sizes in bytes: of the weights as
    all ranks have them, of K and V those of each. parameters: weights of the checkpoint. format: that most of them are
    stored in there, "" where nothing is known. vector_size: numbers of an embedding."""

    model: str
    model_path: str
    served_name: str
    platform: str
    platform_reason: str
    platform_rank: int
    ranks: int
    device: str
    dtype: str
    kv_dtype: str
    page_size: int
    pages: int
    max_model_len: int
    vocab_size: int
    max_running: int
    kv_bytes: int
    weight_bytes: int
    determinism: str
    policy: str
    eviction_policy: str
    overlap: bool
    prefix_cache: bool
    max_top_logprobs: int
    eos_ids: tuple[int, ...]
    sampling_defaults: dict[str, float]
    features: tuple[str, ...]
    report: tuple[str, ...]
    load_seconds: float
    adapters: tuple[dict[str, Any], ...] = ()
    max_loras: int = 0
    max_lora_rank: int = 0
    model_type: str = ""
    parameters: int = 0
    format: str = ""
    vector_size: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def engine_info(config: Config, loaded: Loaded, seconds: float) -> EngineInfo:
    """Of an engine that took `seconds` to load; what its adapters add comes later."""
    manifest, model, sizes = loaded.manifest, loaded.model, loaded.sizes
    return EngineInfo(
        model=model.config.name, model_path=str(loaded.path),
        served_name=config.model.served_model_name or model.config.name,
        platform=manifest.name, platform_reason=loaded.reason, platform_rank=manifest.rank, device=manifest.device,
        ranks=config.parallel.tensor_parallel_size,
        dtype=loaded.dtype, kv_dtype=sizes.state.dtype, page_size=sizes.page_size, pages=sizes.pages - 1,
        max_model_len=sizes.max_model_len, vocab_size=model.config.vocab_size, max_running=sizes.max_running,
        kv_bytes=sizes.pages * sizes.state.page_bytes(), weight_bytes=model.nbytes,
        determinism=manifest.determinism, policy=config.scheduler.schedule_policy,
        eviction_policy=config.cache.eviction_policy, overlap=loaded.overlap,
        prefix_cache=config.cache.prefix_cache, max_top_logprobs=manifest.max_top_logprobs,
        eos_ids=model.config.eos_ids, sampling_defaults=loaded.sampling, features=tuple(sorted(manifest.features)),
        report=tuple(model.report) + loaded.notes, load_seconds=seconds,
        model_type=model.config.model_type, parameters=sum(loaded.stored.values()),
        format=max(loaded.stored, key=loaded.stored.__getitem__, default=""), vector_size=model.config.hidden)
