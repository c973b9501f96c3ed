"""Bind every FlashInfer call that the cuda platform makes to the real library's signatures, with no GPU.

    python ci/flashinfer_signatures.py [--record]

Needs an environment of its own: torch for host processors, isthmus, `pip install --no-deps flashinfer-python==VERSION`
and what the library imports (apache-tvm-ffi click einops ninja packaging requests tabulate tqdm nvidia-ml-py). Fails
when the signatures are no longer those of ci/flashinfer_signatures.json, to which tests/test_flashinfer.py binds on
every machine; --record writes them. Then the library's own wrappers plan and run the platform's steps, its Python as
it is, with a stand-in for its compiled modules alone.
"""
from __future__ import annotations

import argparse
import datetime
import inspect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TABLE = Path(__file__).with_suffix(".json")
WRAPPERS = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
METHODS = ("__init__", "plan", "_plan_impl", "run")  # decode's `plan` hands any keyword on to `_plan_impl`
KINDS = inspect._ParameterKind

Parameters = list[list[Any]]  # name, kind, whether it has a default


def recorded(call: Any) -> Parameters:
    return [[p.name, p.kind.name, p.default is not p.empty] for p in inspect.signature(call).parameters.values()]


def signature(parameters: Parameters) -> inspect.Signature:
    """That a call is bound to."""
    return inspect.Signature([
        inspect.Parameter(name, KINDS[kind], default=None if optional else inspect.Parameter.empty)
        for name, kind, optional in parameters])


def of_library(library: Any) -> dict[str, Parameters]:
    return {f"{wrapper}.{method}": recorded(getattr(getattr(library, wrapper), method))
            for wrapper in WRAPPERS for method in METHODS if hasattr(getattr(library, wrapper), method)}


def read_table() -> dict[str, Any]:
    return json.loads(TABLE.read_text("utf-8"))


def write_table(version: str, signatures: dict[str, Parameters], wrappers: dict[str, int]) -> None:
    """wrappers: what the real ones took, see `run_steps`."""
    today = datetime.date.today().isoformat()
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in signatures.items())
    about = {"library": "flashinfer-python", "version": version, "date": today, "wrappers": wrappers}
    head = json.dumps(about, indent=1)
    TABLE.write_text(head.removesuffix("\n}") + ',\n "signatures": {\n' + lines + "\n }\n}\n", "utf-8")


class Modules:
    """In the place of the library's compiled modules: their plans and runs are counted, and compute nothing."""

    def __init__(self) -> None:
        self.planned = self.ran = 0

    def module(self, *_: Any, **__: Any) -> Modules:
        return self

    def plan(self, *_: Any) -> list[int]:
        self.planned += 1
        return []

    def run(self, *_: Any) -> None:
        self.ran += 1

    paged_run = run


@contextmanager
def without_a_device(modules: Modules) -> Iterator[None]:
    """The library's Python on a machine that can neither pin memory nor run a kernel."""
    from unittest import mock

    import torch  # noqa: TID251
    from flashinfer import decode, prefill
    empty = torch.empty

    def pageable(*args: Any, pin_memory: bool = False, **more: Any) -> torch.Tensor:
        return empty(*args, **more)

    with mock.patch.object(torch, "empty", pageable), \
            mock.patch.object(decode, "get_batch_decode_module", modules.module), \
            mock.patch.object(decode, "get_batch_prefill_module", modules.module), \
            mock.patch.object(prefill, "get_batch_prefill_module", modules.module), \
            mock.patch.object(decode, "get_compute_capability", lambda _: (9, 0)), \
            mock.patch.object(decode, "device_support_pdl", lambda _: False), \
            mock.patch.object(prefill, "device_support_pdl", lambda _: False), \
            mock.patch.object(decode, "determine_attention_backend", lambda *_, **__: "fa2"), \
            mock.patch.object(prefill, "determine_attention_backend", lambda *_, **__: "fa2"):
        yield


def run_steps(library: Any) -> int:
    """Decode eagerly and as for a graph, and prefill, for each kind of case; the number of cases."""
    import torch  # noqa: TID251
    from isthmus.core.platform import AttentionSpec
    from isthmus.platforms.accelerator.cache import LayerCache
    from isthmus.platforms.accelerator.device import Device
    from isthmus.platforms.cuda.flashinfer_attention import FlashInfer, Scratch
    from isthmus.platforms.cuda.flashinfer_library import Case, Limits
    device, half = Device(torch.device("cpu")), torch.bfloat16
    cases = [Case(heads, 2, dim, page, half, kv, spec) for heads in (2, 4, 8, 14) for dim in (64, 128, 256)
             for page in (1, 16) for kv in (half, torch.float8_e4m3fn, torch.float8_e5m2)
             for spec in (AttentionSpec(0.1), AttentionSpec(0.1, window=1), AttentionSpec(0.1, 9, 30.0))]
    scratch = Scratch(device)
    for case in cases:
        assert Limits().reason_against(case) is None, case
        backend = FlashInfer(library, device, case, scratch)
        kv = torch.zeros((2, 2, case.page_size, case.kv_heads, case.head_dim), dtype=case.kv_dtype)
        cache = LayerCache(kv) if kv.dtype == half else LayerCache(kv, None, 0.5, 0.25)
        q = torch.zeros((1, case.heads, case.head_dim), dtype=case.dtype)
        for decode, whole in ((True, False), (False, False), (True, True)):
            view = backend.lone_token(decode)
            view.whole = whole
            for _ in range(2 if whole else 1):
                if whole:
                    backend.prepare(view)
                assert backend.attend(q, cache, view, case.spec).shape == q.shape
    return len(cases)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write ci/flashinfer_signatures.json")
    given = parser.parse_args()
    import flashinfer
    found = of_library(flashinfer)
    modules = Modules()
    with without_a_device(modules):
        cases = run_steps(flashinfer)
    if given.record:
        taken = {"cases": cases, "plans": modules.planned, "runs": modules.ran}
        write_table(flashinfer.__version__, found, taken)
    expected = read_table()
    changed = sorted(name for name in found.keys() | expected["signatures"].keys()
                     if found.get(name) != expected["signatures"].get(name))
    if changed:
        print(f"other signatures in {flashinfer.__version__} than {expected['version']}: {', '.join(changed)}")
        return 1
    print(f"flashinfer {flashinfer.__version__}: {len(found)} signatures as recorded; its wrappers took {cases} cases, "
          f"{modules.planned} plans and {modules.ran} runs, to the door of the compiled modules")
    return 0 if modules.ran >= 4 * cases else 1


if __name__ == "__main__":
    raise SystemExit(main())
