"""A trial of another's attention: beside the path composed of torch's operators, over pages whose memory beyond the
contexts is no number, as others may have left it."""
from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import torch

from ...core.platform import AttentionSpec, Batch, Sampling
from .attention import Backend, Composed, View
from .cache import LayerCache
from .device import Device
from .trial import difference

LIMITS = {torch.bfloat16: 5e-5, torch.float16: 2e-6, torch.float32: 1e-8}  # a few roundings of the weights of values


def rows_of(decode: bool, page: int) -> list[tuple[int, int]]:
    """(new tokens, context) of each row: within a page, over a page's end, over many; a row of padding at the end."""
    if decode:
        return [(1, 5), (1, page), (1, 2 * page + 1), (1, 700), (0, 0)]
    return [(1, 9), (1, 2 * page + 3), (17, 17), (page + 4, 2 * page + 4), (3, page + 2), (0, 0)]


def view_of(rows: list[tuple[int, int]], page: int, decode: bool, device: Device) -> View:
    """A step of these rows, pages one after the other from 1 on, and two more tokens of padding behind prompts."""
    counts, lengths = (np.array(column, np.int32) for column in zip(*rows, strict=True))
    starts = np.append(0, np.cumsum(counts)).astype(np.int32)
    pages = np.zeros((len(rows), -(-int(lengths.max()) // page) + 1), np.int32)
    used = 1
    for row, length in enumerate(lengths):
        held = -(-int(length) // page)
        pages[row, :held] = np.arange(used, used + held)
        used += held
    tokens = len(rows) if decode else int(starts[-1]) + 2
    zeros = np.zeros(tokens, np.int32)
    batch = Batch(tokens=zeros, positions=zeros, slots=zeros, rows=zeros, seqs=np.zeros(len(rows), np.int32),
                  starts=starts, lengths=lengths, pages=pages, logit_rows=zeros[:1], targets=zeros[:1],
                  sampling=Sampling())
    fed = {name: torch.from_numpy(getattr(batch, name)).to(device.torch) for name in ("starts", "lengths", "pages")}
    return View(batch, fed, None, page, decode)


def memory_for(view: View, like: LayerCache, random: torch.Generator, beyond: float = torch.nan) -> LayerCache:
    """Random K and V of the view's rows in memory as a layer's, the rest of it `beyond`; page 0 is padding's."""
    _, _, page, heads, dim = like.kv.shape
    kv = torch.full((int(view.host.pages.max()) + 2, 2, page, heads, dim), beyond)
    kv[0] = 0
    for pages, length in zip(view.host.pages, view.host.lengths, strict=True):
        for first in range(0, int(length), page):
            held = min(page, int(length) - first)
            kv[int(pages[first // page]), :, :held] = torch.randn(2, held, heads, dim, generator=random)
    return replace(like, kv=kv.to(like.kv.dtype).to(like.kv.device))


def reason_against(attend: Callable[[torch.Tensor, LayerCache, View], torch.Tensor], backend: Backend,
                   q: torch.Tensor, like: LayerCache, spec: AttentionSpec, decode: bool, device: Device,
                   beyond: float = torch.nan) -> str | None:
    """Why a backend may not attend steps of this kind, None = it gave the numbers. Raises what the backend raises.

    q [T, heads, head_dim] and `like`, a layer's memory, tell types and sizes; beyond: what lies where no row may read.
    """
    random = torch.Generator().manual_seed(q.shape[1] * q.shape[2])
    view = view_of(rows_of(decode, like.page_size), like.page_size, decode, device)
    cache = memory_for(view, like, random, beyond)
    some = torch.randn(len(view.host.tokens), *q.shape[1:], generator=random).to(q.dtype).to(q.device)
    view.fed |= {name: torch.from_numpy(backend.plan(view, name)).to(device.torch)
                 for name in backend.wants(some, cache, view)}
    got, want = attend(some, cache, view), Composed().attend(some.float(), cache, view, spec).to(q.dtype)
    device.wait()
    if not decode and not bool(got[int(view.host.starts[-1]):].isfinite().all()):
        return "padding tokens get what is no number"
    used = int(view.host.starts[-1]) if not decode else len(got)  # rows of padding must be zeros in a decode step
    return difference(got[:used], want[:used], torch.ones(used, dtype=torch.bool, device=q.device), LIMITS[q.dtype])
