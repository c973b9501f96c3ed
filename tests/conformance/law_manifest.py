"""Law 0, manifest: what a platform claims is in words that core knows, within its file, and what its methods return is
of the right kind. It needs no dtype. What is claimed and not shown by other laws fails a whole run (`Report.unproved`).
"""
from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..core import contract, manifests
from ..core.platform import FEATURES, SERVED, Buckets, Manifest, Unsupported
from ..core.quant.formats import FORMATS
from ..core.registry import RegistrationError
from .case import ANY, Case, Context, Needs, Wrong, asked
from .compare import check_values
from .formats import BLOCKS
from .opcase import DTYPES, PAGE, Run, Step, state, table, token_batch
from .ops_run import Launcher

KEPT = {**FORMATS, **BLOCKS}
# What each op is asked with; a platform takes words that it does not know.
ASKED = {"attention": {"head_dim": 64, "heads": 4, "kv_heads": 2, "window": None, "softcap": None},
         "moe": {"experts": 8, "top_k": 2, "format": "f32"}}


def check_words(context: Context) -> None:
    """Every word is known, every number possible; all that is not is told at once."""
    wrong = problems(context.manifest)
    if context.name not in ("", context.manifest.name):
        wrong.append(f"name is {context.manifest.name!r}, the platform is installed as {context.name!r}")
    if wrong:
        raise Wrong("; ".join(wrong))


def problems(manifest: Manifest) -> list[str]:
    """What cannot be in a manifest."""
    found = []
    for name, known in (("compute_dtypes", DTYPES), ("kv_dtypes", [f for f in FORMATS if FORMATS[f].block == 1]),
                        ("formats", KEPT), ("features", FEATURES)):
        words = getattr(manifest, name)
        if isinstance(words, str) or not words and name.endswith("dtypes"):
            found.append(f"{name} is {words!r}, some words are needed")
            continue
        found += [f"{name}: {word!r} is not known; there are {', '.join(known)}" for word in words if word not in known]
    sizes = manifest.page_sizes
    if not sizes or not all(isinstance(size, int) and size > 0 for size in sizes):
        found.append(f"page_sizes is {sizes!r}, whole numbers above 0 are needed")
    if manifest.determinism not in manifests.TIERS:
        found.append(f"determinism is {manifest.determinism!r}; there are {', '.join(manifests.TIERS)}")
    if manifest.interface not in SERVED:
        found.append(f"interface is {manifest.interface!r}, this core serves {', '.join(map(str, SERVED))}")
    if not 0 <= manifest.memory_free <= manifest.memory_total:
        found.append(f"memory_free is {manifest.memory_free} of memory_total {manifest.memory_total}")
    if manifest.local_ranks != 1:
        found.append(f"local_ranks is {manifest.local_ranks!r}, it was probed with a world of 1")
    if manifest.max_top_logprobs < 0:
        found.append(f"max_top_logprobs is {manifest.max_top_logprobs}, below 0")
    if not 0 <= manifest.memory_floor < 1:
        found.append(f"memory_floor is {manifest.memory_floor}, at least 0 and less than 1 is needed")
    if not 0 < manifest.kv_share <= 1:
        found.append(f"kv_share is {manifest.kv_share}, more than 0 and at most 1 is needed")
    if manifest.buckets is not None:
        found += bad_buckets(manifest.buckets)
    return found


def bad_buckets(buckets: Buckets) -> list[str]:
    return [f"buckets.{name} is {sizes!r}, rising whole numbers above 0 are needed"
            for name, sizes in vars(buckets).items()
            if not sizes or list(sizes) != sorted({size for size in sizes if size > 0})]


def check_file(context: Context) -> None:
    """manifest.toml beside the platform's module is well-formed, and the probe claims nothing beyond it."""
    path = Path(inspect.getfile(context.kind)).with_name(manifests.FILE)
    if not path.is_file():
        raise Wrong(f"there is no {path}: every platform has one beside its module (in a package: `package-data`)")
    try:
        claim = manifests.read_file(path)
    except RegistrationError as error:
        raise Wrong(str(error)) from error
    if context.manifest.determinism not in manifests.TIERS:
        raise Wrong(f"determinism is {context.manifest.determinism!r}; there are {', '.join(manifests.TIERS)}")
    beyond = manifests.excess(claim, context.manifest)
    if beyond:
        raise Wrong(f"the probe claims more than {path}: {'; '.join(beyond)}")


def check_supports(context: Context) -> None:
    """Answers are None or a reason; unknown ops are refused, unknown words ignored; what is claimed is not refused."""
    platform, manifest = context.platform, context.manifest
    for op in ("no_such_op", "no_such_feature"):
        if asked(platform, op, dtype=manifest.compute_dtypes[0]) is None:
            raise Wrong(f"supports({op!r}) returned None: what it does not know a platform refuses with a reason, "
                        "so that a newer core can ask")
    for feature in FEATURES:
        if (reason := asked(platform, feature)) and feature in manifest.features:
            raise Wrong(f"{feature} is among the features, and supports({feature!r}) says {reason!r}")
    for dtype in manifest.compute_dtypes:
        for op, words in ASKED.items():
            asked(platform, op, **words, page_size=manifest.page_sizes[0], dtype=dtype, no_such_word=1)
        if reason := asked(platform, "linear", format=dtype, dtype=dtype, no_such_word=1):
            raise Wrong(f"{dtype} is among the compute_dtypes, and supports('linear', format={dtype!r}, "
                        f"dtype={dtype!r}) says {reason!r}")
    for name in manifest.formats:
        reasons = [asked(platform, "linear", format=name, dtype=dtype) for dtype in manifest.compute_dtypes]
        if all(reasons):
            raise Wrong(f"{name} is among the formats, and supports('linear', format={name!r}, "
                        f"dtype={manifest.compute_dtypes[0]!r}) says {reasons[0]!r}")


def check_returns(context: Context) -> None:
    """What `memory` says; a step, a copy of pages and what is collected, each looked at (by `Guarded`, in all other
    cases too)."""
    if callable(memory := getattr(context.platform, "memory", None)):
        answer = memory()
        good = isinstance(answer, tuple) and len(answer) == 2 and all(isinstance(n, int) for n in answer)
        if not good or not 0 <= answer[1] <= answer[0]:
            raise Wrong(f"memory() returned {answer!r}, (total, free) in bytes is needed, whole numbers")
    dtype = next((dtype for dtype in context.manifest.compute_dtypes if dtype in DTYPES), None)
    if dtype is None:
        raise Unsupported(f"no cases in {', '.join(context.manifest.compute_dtypes)}")
    values = np.arange(64.0).reshape(2, 32)
    step = Step(lambda ops, w, batch: ops.embed(batch.tokens, w["x"]), token_batch(2), values, 2)
    kept = dtype if dtype in context.manifest.kv_dtypes else context.manifest.kv_dtypes[0]
    run = Run({"x": table(values)}, [step], state(kept, 3), 3)
    if PAGE not in context.manifest.page_sizes:
        raise Unsupported(f"pages of {PAGE} tokens are not offered")
    launcher = Launcher(context.platform, dtype, run, context.manifest.buckets)
    memory = context.platform.copy_pages(context.platform.alloc(run.state, run.pages), [1], [2])
    out, _ = launcher.steps[0](memory, launcher.batches[0])
    got = out.collect()
    check_values(got[:2] if isinstance(got, np.ndarray) else got, values, 1e-4, "collect")


def check_forward_ops(context: Context) -> None:
    """The object that a forward is called with has every op, with the parameters that models pass."""
    manifest = context.manifest
    page = context.page_size()
    memory = context.platform.alloc(replace(state(manifest.kv_dtypes[0], 2), page_size=page), 2)
    try:
        called, _ = contract.check_ops(context.platform, manifest, memory, page)
    except RegistrationError as error:
        raise Wrong(str(error)) from error
    if not called:
        raise Wrong("a step of one token was launched and collected, and its forward not called")


CHECKS: dict[str, Callable[[Context], None]] = {
    "words": check_words, "file": check_file, "supports": check_supports, "returns": check_returns,
    "ops": check_forward_ops}


def cases() -> Iterator[Case]:
    for name, check in CHECKS.items():
        yield Case(f"manifest[{name}]", "manifest", name, Needs(ANY), check)
