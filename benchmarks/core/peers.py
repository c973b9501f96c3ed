"""SGLang's radix caches out of their own unpacked wheel, for radix.py. Nothing of theirs is kept in this tree.

    python -m pip download --no-deps sglang==0.5.23 -d wheels && python -m zipfile -e wheels/sglang-*.whl FOLDER

The wheel asks for a GPU and a hundred packages; the caches need torch alone. While this module imports them, every
other package, and every part of SGLang that has nothing to do with caches, is an empty stand-in.
"""
from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from array import array
from pathlib import Path
from typing import Any

REAL = {"sglang", "torch", "numpy", "msgspec", "packaging", "psutil", "typing_extensions"} | sys.stdlib_module_names
STAND_IN = tuple(f"sglang.{name}" for name in (
    "kernels", "srt.configs", "srt.constrained", "srt.distributed", "srt.function_call", "srt.layers", "srt.managers",
    "srt.model_executor", "srt.model_loader", "srt.models", "srt.multimodal", "srt.parser", "srt.server_args",
    "srt.session", "srt.speculative"))


class _AnyMeta(type):
    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything

    def __getitem__(cls, key: Any) -> Any:
        return cls

    __or__ = __ror__ = __getitem__


class Anything(metaclass=_AnyMeta):
    """Stands for any class, function or decorator of a package that is not there."""

    def __init_subclass__(cls, **kwargs: Any):
        pass

    def __init__(self, *args: Any, **kwargs: Any):
        pass

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return args[0] if args and callable(args[0]) else self

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything()


class _StandIn(types.ModuleType):
    __path__: list[str] = []
    __file__ = "a stand-in"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (Anything,), {})
        setattr(self, name, made)
        return made


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Answers imports that SGLang makes of anything but itself, the standard library and torch."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        root = name.split(".")[0]
        if not name.startswith(STAND_IN) and not isinstance(sys.modules.get(root), _StandIn):
            frame = sys._getframe(1)
            while frame is not None and "importlib" in frame.f_code.co_filename:
                frame = frame.f_back
            asks = frame.f_globals.get("__name__", "") if frame is not None else ""
            if root in REAL or not str(asks).startswith("sglang"):
                return None
        return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec: Any) -> types.ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


class _Frees:
    """In place of SGLang's allocator: counts the slots that it is given back, and does nothing else."""

    device = "cpu"

    def __init__(self) -> None:
        self.slots = 0

    def free_segment(self, slots: Any, start_pos: int = 0) -> None:
        self.slots += len(slots)

    def free(self, slots: Any) -> None:
        self.slots += len(slots)


class SGLang:
    """One of SGLang's caches, called with the key, parameter and result objects that its scheduler builds."""

    def __init__(self, name: str, cache: Any, frees: _Frees, made: types.SimpleNamespace):
        self.name, self.cache, self.frees, self._made = name, cache, frees, made
        self.size = cache.page_size

    def prompt(self, tokens: Any) -> array:
        """Token ids as a request of theirs holds them."""
        return array("q", tokens.astype("int64").tobytes())

    def slots(self, count: int, start: int) -> Any:
        """Slot numbers as a row of their request table has them, one a token."""
        return self._made.torch.arange(start, start + count, dtype=self._made.torch.int32)

    def match(self, prompt: array, domain: str) -> tuple[int, Any]:
        made = self._made
        result = self.cache.match_prefix(made.MatchPrefixParams(key=made.RadixKey(prompt, domain)))
        return result.device_prefix_len, result.last_device_node

    def insert(self, prompt: array, slots: Any, domain: str) -> int:
        """Key and values as their `checkpoint` makes them of a request's tokens and row."""
        made = self._made
        values = slots.to(dtype=made.torch.int64, copy=True)
        result = self.cache.insert(made.InsertParams(key=made.RadixKey(prompt, domain), value=values))
        return result.prefix_len

    def start(self, prompt: array, slots: Any, domain: str) -> Any:
        """A request that has locked its cached prefix and has slots for all its tokens."""
        found, node = self.match(prompt, domain)
        kv = types.SimpleNamespace(req_pool_idx=0, cache_protected_len=found, cache_inserted_len=0, swa_evict_floor=0)
        self.cache.req_to_token_pool.req_to_token[0, found:len(slots)] = slots[found:]
        self.cache.req_to_token_pool.req_to_token[0, :found] = self.path(node)
        return types.SimpleNamespace(
            full_untruncated_fill_ids=prompt, origin_input_ids=prompt, extra_key=domain, cache_salt=None, priority=0,
            session_id=None, kv_rotation_base=None, kv=kv, lock=self.lock(node), last_node=node, finished=lambda: False)

    def commit(self, request: Any) -> int:
        """All of a request's full pages into the tree, its lock with them: what a prefill ends with."""
        self.cache.checkpoint(request, up_to=len(request.full_untruncated_fill_ids))
        return request.kv.cache_protected_len

    def end(self, request: Any) -> None:
        self.unlock(request.lock)

    def lock(self, node: Any) -> Any:
        return self.cache.lock(node)

    def unlock(self, lock: Any) -> None:
        self.cache.unlock(lock)

    def path(self, node: Any) -> Any:
        return self.cache.path_device_indices(node)

    def evict(self, tokens: int) -> int:
        return self.cache.evict(self._made.EvictParams(num_tokens=tokens)).num_tokens_evicted


def load(folder: Path) -> types.SimpleNamespace:
    """Import what is needed from the unpacked wheel at `folder`. Raises ImportError that names what is missing."""
    package = folder / "sglang"
    if not (package / "srt" / "mem_cache").is_dir():
        raise ImportError(f"{folder} holds no unpacked sglang wheel: see the head of {Path(__file__).name}")
    import torch

    same = lambda f=None, *args, **kwargs: f if callable(f) else same  # noqa: E731
    torch.compile = torch.compiler.disable = torch.jit.script = same  # decorators, which would load a compiler
    bare = types.ModuleType("sglang")
    bare.__path__ = [str(package)]
    sys.modules["sglang"] = bare
    sys.meta_path.insert(0, _Finder())
    from sglang.srt.mem_cache import base_prefix_cache as base
    from sglang.srt.mem_cache import radix_cache, unified_radix_cache
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

    unified_radix_cache.StreamingSession = lambda cache: types.SimpleNamespace(
        try_match_prefix=lambda params: None, try_checkpoint=lambda *args, **kwargs: False, slots={})
    unified_radix_cache.is_virtual_node = lambda node: False
    return types.SimpleNamespace(
        torch=torch, RadixKey=radix_cache.RadixKey, MatchPrefixParams=base.MatchPrefixParams,
        InsertParams=base.InsertParams, EvictParams=base.EvictParams, RadixCache=radix_cache.RadixCache,
        UnifiedRadixCache=unified_radix_cache.UnifiedRadixCache, CacheInitParams=CacheInitParams,
        components=(ComponentType.FULL,))


def caches(made: types.SimpleNamespace, page_size: int) -> list[SGLang]:
    """Their three caches, empty: the default with its core in Rust, the same with its core in Python, the older one."""
    found, table = [], made.torch.zeros((1, 65536), dtype=made.torch.int32)
    rows = types.SimpleNamespace(req_to_token=table, write=table.__setitem__)
    for name, core in (("SGLang Rust", "rust"), ("SGLang unified py", "python"), ("SGLang RadixCache", None)):
        frees = _Frees()
        params = made.CacheInitParams(disable=False, req_to_token_pool=rows, token_to_kv_pool_allocator=frees,
                                      page_size=page_size, tree_components=made.components, tree_core_backend=core)
        cache = (made.UnifiedRadixCache if core else made.RadixCache)(params)
        if core and ("Rust" in type(cache.tree_core).__name__) != (core == "rust"):
            raise ImportError(f"asked for the {core} core, got {type(cache.tree_core).__name__}")
        found.append(SGLang(name, cache, frees, made))
    return found
