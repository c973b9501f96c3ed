"""Attention over pages, each of the platform's ways by itself, beside torch's SDPA on K and V that lie in a row.

Decode's floor is the bytes of K and V over the measured bandwidth; a prefill's the causal half of its products over the
measured rate.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from batches import batch, pages_of
from ceilings import bytes_a_second, flops_a_second
from isthmus.core.platform import AttentionSpec
from isthmus.platforms.accelerator.attention import Backend, Composed, View, only_decodes
from isthmus.platforms.accelerator.cache import LayerCache
from place import Place, figure, main, share, timed
from torch.nn import functional as F

HEADS, KV_HEADS, DIM = 32, 8, 128
DECODES = ((1, 32768), (16, 4096), (16, 32768), (64, 4096), (256, 1024))  # rows, tokens of context
PREFILLS = ((1, 8192), (4, 2048), (16, 512))                              # rows, new tokens of each


def ways(q: torch.Tensor, cache: LayerCache, spec: AttentionSpec, place: Place) -> Iterator[Backend]:
    """Every backend that takes the case, the composed one only where there is no other."""
    made = [make(q, cache, spec) for make in place.kernels.makers]
    rest = [b for b in place.kernels.backends if place.kernels.takes(b, q, cache, spec)]
    found = [backend for backend in (*made, *rest) if backend is not None]
    yield from [b for b in found if not isinstance(b, Composed)] or found


def attending(backend: Backend, q: torch.Tensor, cache: LayerCache, view: View, spec: AttentionSpec,
              place: Place) -> Callable[[], torch.Tensor]:
    names = ("starts", "lengths", "pages", "rows", "positions")
    view.fed = place.staging.feed({name: getattr(view.host, name) for name in names})
    wanted = {name: backend.plan(view, name) for name in backend.wants(q, cache, view)}
    if wanted:
        view.fed |= place.staging.feed(wanted)
    return lambda: backend.attend(q, cache, view, spec)


def contiguous(q: torch.Tensor, rows: int, tokens: int, context: int, place: Place) -> Callable[[], torch.Tensor]:
    """SDPA of as many tokens over K and V of as many."""
    k, v = (place.random(rows, KV_HEADS, context, DIM) for _ in "kv")
    q = q.view(rows, tokens, HEADS, DIM).transpose(1, 2)
    return lambda: F.scaled_dot_product_attention(q, k, v, is_causal=tokens > 1, enable_gqa=True)


def measure(place: Place, ceilings: dict[str, Any], rows: int, tokens: int, context: int,
            kv: torch.dtype) -> Iterator[dict[str, Any]]:
    page_size = place.manifest.page_sizes[0]
    made = batch(rows, tokens, context, page_size)
    spec, q = AttentionSpec(DIM ** -0.5), place.random(rows * tokens, HEADS, DIM)
    cache = LayerCache(place.random(pages_of(made), 2, page_size, KV_HEADS, DIM).to(kv))
    nbytes = 2 * rows * context * KV_HEADS * DIM * kv.itemsize
    flops = 2 * rows * tokens * context * HEADS * DIM * (2 if tokens == 1 else 1)
    about = {"what": "decode" if tokens == 1 else "prefill", "rows": rows, "tokens": tokens, "context": context,
             "kv": str(kv).removeprefix("torch.")}
    calls: dict[str, Callable[[], Callable[[], torch.Tensor]]] = {}
    for backend in ways(q, cache, spec, place):
        view = View(made, {}, None, page_size, only_decodes(made))
        calls[backend.name] = lambda backend=backend, view=view: attending(backend, q, cache, view, spec, place)
    if kv == q.dtype:
        calls["torch SDPA, contiguous"] = lambda: contiguous(q, rows, tokens, context, place)
    for name, prepare in calls.items():
        try:
            seconds, how = timed([prepare()], place)
        except Exception as error:  # one way's failure is a row of its own
            yield about | {"by": name, "error": f"{type(error).__name__}: {error}"[:300]}
            continue
        row = about | {"by": name, "us": figure(1e6 * seconds), "how": how}
        if tokens == 1:
            yield row | {"GB/s": figure(nbytes / seconds / 1e9),
                         "of bandwidth": share(nbytes / seconds, bytes_a_second(ceilings))}
        else:
            yield row | {"TFLOP/s": figure(flops / seconds / 1e12),
                         "of products": share(flops / seconds, flops_a_second(ceilings))}


def run(place: Place, ceilings: dict[str, Any]) -> Iterator[dict[str, Any]]:
    for rows, context in place.pick(DECODES, ((2, 33),)):
        yield from measure(place, ceilings, rows, 1, context, torch.bfloat16)
    for rows, tokens in place.pick(PREFILLS, ((2, 20),)):
        yield from measure(place, ceilings, rows, tokens, tokens, torch.bfloat16)
    if "f8_e4m3" in place.manifest.kv_dtypes:
        yield from measure(place, ceilings, *place.pick((16, 1, 32768), (2, 1, 33)), torch.float8_e4m3fn)


if __name__ == "__main__":
    main(__doc__, run)
