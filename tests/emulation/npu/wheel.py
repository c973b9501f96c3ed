"""What `ci/npu_schemas.py` shows with torch_npu loaded: its schemas and shape functions against the platform's calls.

    python -m isthmus_emulation.npu.wheel REPORT
"""
from __future__ import annotations

import inspect
import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch_npu
from isthmus.conformance import Context, all_cases, run_case
from isthmus.conformance.ledger import Ledger
from isthmus.conformance.ops_attention import Shape, case
from isthmus.conformance.ops_run import as_case
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

from . import operators, platform

DTYPES = ("bf16", "f16")


def differences(schemas: dict[str, str]) -> list[str]:
    """What the wheel registers under these names and is written otherwise in `operators.txt`."""
    wheel = {schema.name + ("." + schema.overload_name if schema.overload_name else ""): str(schema)
             for schema in torch._C._jit_get_all_schemas()}
    return [f"{name}: {wheel.get('npu::' + name, 'not registered')}" for name, schema in schemas.items()
            if wheel.get("npu::" + name) != schema]


def shapes(results: Any) -> list[tuple[str, tuple[int, ...]]]:
    return [(str(part.dtype), tuple(part.shape)) for part in tree_flatten(results)[0] if isinstance(part, torch.Tensor)]


class AgainstMeta(TorchDispatchMode):
    """Each call of an npu operator on the CPU is made on "meta" too, and the results compared.

    seen: calls by operator.  wrong: what differed.  without: operators that the wheel has no shape function of.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.without: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = str(func).removesuffix(".default").removeprefix("npu.")
        if not str(func).startswith("npu.") or name in self.without:
            return result
        there = tree_map(lambda part: part.to("meta") if isinstance(part, torch.Tensor) else part, (args, kwargs))
        try:
            expected = shapes(func(*there[0], **there[1]))
        except NotImplementedError:
            self.without.add(name)
            return result
        self.seen[name] += 1
        if expected != (got := shapes(result)):
            self.wrong.append(f"{name}: {got}, the wheel says {expected}")
        return result


def chosen_cases() -> Iterator[Any]:
    """Conformance cases that make every call: ops in 16 bits, and attention of the shapes that the kit has not."""
    ops = ("linear", "rms_norm", "rope", "moe", "act_mul")
    yield from (found for found in all_cases() if found.law == "ops" and str(found).startswith(ops)
                and str(found).endswith(tuple(f"{dtype}]" for dtype in DTYPES)))
    for dtype in DTYPES:
        yield as_case(case("packed", Shape(4, 2, 128, 16), dtype))
        yield as_case(case("rows", Shape(4, 2, 64, 128), dtype))
        yield as_case(case("window", Shape(4, 2, 32, 128), dtype, window=200))


def hold(options: dict[str, str], cases: Iterator[Any]) -> Counter[str]:
    """Outcomes of these cases on the emulated platform with these options."""
    held, outcomes = platform.Platform(options), Counter()
    context = Context(held, held.probe(), make=lambda: platform.Platform(options))
    for held_to in cases:
        result = run_case(context, held_to, Ledger())
        outcomes[result.outcome.name.lower()] += 1
        if result.outcome.name in ("WRONG", "ERROR"):
            print(f"{held_to}: {result.reason}", flush=True)
    return outcomes


def refused() -> dict[str, bool]:
    """Calls that must fail, on "meta"."""
    x, gamma = torch.empty(4, 8, device="meta"), torch.empty(8, device="meta")
    calls: dict[str, Callable[[], Any]] = {
        "a wrong keyword": lambda: torch.ops.npu.npu_rms_norm(x, gamma, eps=1e-6),
        "a missing argument": lambda: torch.ops.npu.npu_swiglu(),
        "a list for a tensor": lambda: torch.ops.npu.npu_rms_norm([x], gamma),
        "a shape that does not fit": lambda: torch.ops.npu.npu_quant_matmul(*(
            torch.empty(shape, dtype=torch.int8, device="meta") for shape in ((4, 8), (16, 8))), gamma)}
    found = {}
    for name, call in calls.items():
        try:
            call()
            found[name] = False
        except (RuntimeError, TypeError):
            found[name] = True
    return found


def unbound() -> list[str]:
    """What the platform asks of torch.npu, beyond operators, and this torch_npu does not take."""
    npu, device = torch_npu.npu, torch.device("npu", 0)
    graph = npu.NPUGraph
    asked: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (graph.capture_begin, (None,), {"pool": None, "capture_error_mode": "thread_local"}),
        (graph.capture_end, (None,), {}), (graph.replay, (None,), {}), (graph.pool, (None,), {}), (npu.Event, (), {}),
        *((getattr(npu, name), (device,), {}) for name in (
            "mem_get_info", "memory_reserved", "memory_allocated", "synchronize")),
        *((getattr(npu, name), (0,), {}) for name in ("set_device", "get_device_name")),
        *((getattr(npu, name), (), {}) for name in ("empty_cache", "is_available", "device_count"))]
    found = []
    for function, args, kwargs in asked:
        try:
            inspect.signature(function).bind(*args, **kwargs)
        except TypeError as error:
            found.append(f"{function.__qualname__}: {error}")
    return found


def check(report: Path) -> int:
    """Write the report -> exit code."""
    pinned, schemas = operators.schemas()
    different, negatives, calls, mode = differences(schemas), refused(), unbound(), AgainstMeta()
    with mode:
        outcomes = hold({"graphs": "off"}, chosen_cases())
        outcomes += hold({"graphs": "off", "activations": "8bit"}, (
            case for case in chosen_cases() if str(case).startswith("linear[int8") and str(case).endswith("bf16]")))
    uncalled = sorted(set(schemas) - {*mode.seen, *mode.without})
    bad = different or mode.wrong or uncalled or calls or outcomes["wrong"] or outcomes["error"]
    ok = not bad and all(negatives.values())
    found = {"ok": ok, "date": datetime.now(UTC).date().isoformat(), "torch_npu": torch_npu.__version__,
             "torch": str(torch.__version__), "schemas_of": pinned,
             "schemas": {"same": len(schemas) - len(different), "different": different},
             "calls": dict(sorted(mode.seen.items())), "wrong_shapes": mode.wrong[:20],
             "without_shape_function": sorted(mode.without), "never_called": uncalled, "cases": dict(outcomes),
             "unbound": calls, "refused": negatives}
    report.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
    print(json.dumps(found, indent=1))
    return int(not ok)


if __name__ == "__main__":
    sys.exit(check(Path(sys.argv[1])))
