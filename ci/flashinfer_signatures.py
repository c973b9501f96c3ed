"""Bind every FlashInfer call that the cuda platform makes to the real library's signatures, with no GPU.

    python ci/flashinfer_signatures.py [--record]

Needs an environment of its own: torch for host processors, Triton, isthmus, `pip install --no-deps
flashinfer-python==VERSION` and what the library imports (apache-tvm-ffi click einops ninja packaging requests tabulate
tqdm nvidia-ml-py). Fails when the signatures are no longer those of ci/flashinfer_signatures.json, to which the tests
bind on every machine; --record writes them. Then the library's own wrappers plan and run the platform's steps, and its
products and fused experts are called, its Python as it is, with a stand-in for its compiled modules alone.
"""
from __future__ import annotations

import argparse
import datetime
import inspect
import json
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import graph

TABLE = Path(__file__).with_suffix(".json")
WRAPPERS = ("BatchDecodeWithPagedKVCacheWrapper", "BatchPrefillWithPagedKVCacheWrapper")
FUNCTIONS = ("gemm.fp8_blockscale_gemm_sm90", "gemm.gemm_base.fp8_gemm_sm100", "gemm.mm_bf16_fp4",
             "fused_moe.cutlass_fused_moe")
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
            for wrapper in WRAPPERS for method in METHODS if hasattr(getattr(library, wrapper), method)} | {
                name: recorded(attrgetter(name)(library)) for name in FUNCTIONS}


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
    from isthmus.platforms.accelerator.attention_trial import rows_of, view_of
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
        for decode, whole in ((True, False), (False, False), (True, True)):
            view = view_of(rows_of(decode, case.page_size), case.page_size, decode, device)
            view.whole = whole
            view.fed[backend.pages] = torch.from_numpy(backend.plan(view, backend.pages))
            q = torch.zeros((len(view.host.tokens), case.heads, case.head_dim), dtype=case.dtype)
            for _ in range(2 if whole else 1):
                if whole:
                    backend.prepare(view)
                assert backend.attend(q, cache, view, case.spec).shape == q.shape
    return len(cases)


class Compiled:
    """In the place of every compiled module of products: counts what reaches it, by name, and computes nothing."""

    def __init__(self) -> None:
        self.reached: Counter[str] = Counter()

    def __getattr__(self, name: str) -> Any:
        def call(*_: Any, **__: Any) -> int:
            self.reached[name] += 1
            return 128
        return call


@contextmanager
def products_without_a_device(arch: tuple[int, int], compiled: Compiled) -> Iterator[None]:
    """The library's Python of products and experts, to the door of its compiled modules."""
    from contextlib import ExitStack, nullcontext
    from unittest import mock

    import torch  # noqa: TID251
    from flashinfer import utils
    from flashinfer.fused_moe import core
    from flashinfer.gemm import gemm_base, gemm_bf16_fp4_blackwell
    from flashinfer.jit import blackwell_bf16_fp4
    runner = SimpleNamespace(cublas_fp8_gemm_runner=lambda: compiled.cublas)
    tuner = SimpleNamespace(choose_one=lambda name, runners, config, inputs: (runners[0], -1))
    with ExitStack() as stack:
        for place, name, value in (
                (gemm_base, "_match_sm_version", lambda *_: True), (utils, "get_compute_capability", lambda _: arch),
                (gemm_base, "get_fp8_blockscale_gemm_runner_sm90", lambda: compiled),
                (gemm_base, "get_gemm_module", lambda: runner),
                (gemm_base, "AutoTuner", SimpleNamespace(get=lambda: tuner)),
                (core, "get_cutlass_fused_moe_module", lambda _: compiled),
                (core, "get_compute_capability", lambda _: arch), (core, "device_support_pdl", lambda _: False),
                (core, "is_cuda_version_at_least", lambda _: True),
                (gemm_bf16_fp4_blackwell, "get_compute_capability", lambda _: arch),
                (gemm_bf16_fp4_blackwell, "_device_index", lambda _: 0),
                (gemm_bf16_fp4_blackwell, "_device_arch", lambda _: "sm_100a"),
                (gemm_bf16_fp4_blackwell, "_sm_count", lambda _: 132),
                (blackwell_bf16_fp4, "load_module", lambda *_: compiled),
                (torch.cuda, "device", lambda _: nullcontext())):
            stack.enter_context(mock.patch.object(place, name, value))
        yield


def run_products(library: Any) -> dict[str, int]:
    """Every product and sparse layer that the platform offers, at one token and at more; what reached the compiled
    modules."""
    import torch  # noqa: TID251
    from isthmus.core.platform import RawTensor
    from isthmus.platforms.accelerator.device import Device
    from isthmus.platforms.cuda.flashinfer_experts import FusedExperts
    from isthmus.platforms.cuda.flashinfer_products import BlockProducts, Nvfp4Products, TensorProducts
    from isthmus.platforms.triton_kit.linear_tiles import Matrix
    from isthmus.platforms.triton_kit.weights import Kept
    device, half, compiled = Device(torch.device("cpu")), torch.bfloat16, Compiled()
    codes = torch.zeros(256, 256).to(torch.float8_e4m3fn)
    for tokens in (1, 24):
        x = torch.zeros(tokens, 256, dtype=half)
        with products_without_a_device((9, 0), compiled):
            for offer, kept in (
                    (BlockProducts(library, "sm_90"), Kept(Matrix("fp8_block", codes, 256, 256, torch.ones(2, 2)),
                                                           device, "")),
                    (TensorProducts(library, "sm_90"), Kept(Matrix("fp8", codes, 256, 256, torch.ones(256)), device, "",
                                                            torch.ones(1)))):
                assert offer.reason_against(kept, half) is None
                assert offer.product(x, kept).shape == x.shape
            ids, weights = torch.zeros(tokens, 2, dtype=torch.int32), torch.zeros(tokens, 2)
            for blocks, like in ((False, x), (True, codes)):
                scales = [torch.ones(3, 4, 2), torch.ones(3, 2, 2)] if blocks else [None, None]
                w13, w2 = (Matrix("fp8_block" if blocks else "dense", torch.zeros(3, rows, 256).to(like.dtype), rows,
                                  256, scale, experts=3) for rows, scale in zip((512, 256), scales, strict=True))
                offer = FusedExperts(library, "sm_90", blocks)
                assert offer.reason_against(w13, 256, 256, half) is None
                assert offer.moe(x, ids, weights, offer.pack(w13, True), w2, "silu").shape == x.shape
        with products_without_a_device((10, 0), compiled):
            zeros = torch.zeros(1 << 16, dtype=torch.uint8).numpy()
            raw = RawTensor("nvfp4", (256, 256), zeros[:256 * 128], (
                RawTensor("f8_e4m3", (256, 16), zeros[:256 * 16]), RawTensor("f32", (1,), zeros[:4])))
            offer = Nvfp4Products(library, "sm_100")
            assert offer.product(x, offer.pack([raw], device.torch)).shape == x.shape
    return dict(compiled.reached)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--record", action="store_true", help="write ci/flashinfer_signatures.json")
    given = parser.parse_args()
    sys.path.insert(0, str(graph.ROOT))
    from tests.emulation.interpreter import interpret
    interpret()
    import flashinfer
    found = of_library(flashinfer)
    modules = Modules()
    with without_a_device(modules):
        cases = run_steps(flashinfer)
    reached = run_products(flashinfer)
    from flashinfer.jit import core
    from isthmus.platforms.cuda.flashinfer_library import NO_COMPILER
    assert f'os.environ.get("{NO_COMPILER}")' in inspect.getsource(core), "it compiles whatever is said"
    if given.record:
        taken = {"cases": cases, "plans": modules.planned, "runs": modules.ran, "products": reached}
        write_table(flashinfer.__version__, found, taken)
    expected = read_table()
    changed = sorted(name for name in found.keys() | expected["signatures"].keys()
                     if found.get(name) != expected["signatures"].get(name))
    if changed:
        print(f"other signatures in {flashinfer.__version__} than {expected['version']}: {', '.join(changed)}")
        return 1
    print(f"flashinfer {flashinfer.__version__}: {len(found)} signatures as recorded; its wrappers took {cases} cases, "
          f"{modules.planned} plans and {modules.ran} runs, to the door of the compiled modules, where products came "
          f"as {reached}")
    return 0 if modules.ran >= 4 * cases else 1


if __name__ == "__main__":
    raise SystemExit(main())
