"""Decode rows among prompts: attended with their contexts shared, beside the prompts' tiles, as a step has them."""
from __future__ import annotations

import numpy as np
import pytest
import torch

from .attention_cases import TOLERANCE, Case, check
from .interpreter import prepare

COST = 6  # seconds
DEVICE = prepare()
from isthmus.core.platform import AttentionSpec, Batch, Sampling  # noqa: E402
from isthmus.platforms.accelerator.attention import View  # noqa: E402
from isthmus.platforms.accelerator.cache import LayerCache  # noqa: E402
from isthmus.platforms.accelerator.device import Device  # noqa: E402
from isthmus.platforms.triton_kit import attention_decode, kernels  # noqa: E402
from isthmus.platforms.triton_kit.launch import recording  # noqa: E402


def batch(case: Case) -> Batch:
    tokens, rows = len(case.q), len(case.lengths)
    zeros = np.zeros(tokens, np.int32)
    return Batch(tokens=zeros, positions=zeros, slots=zeros, rows=zeros, seqs=np.zeros(rows, np.int32),
                 starts=case.starts, lengths=np.array(case.lengths, np.int32), pages=case.table.numpy(),
                 logit_rows=zeros[:1], targets=zeros[:1], sampling=Sampling())


def attended(case: Case, backend: kernels.Attention, softcap: float | None = None) -> tuple[torch.Tensor, list[dict]]:
    """The result, and the constants of each launch."""
    cache = LayerCache(torch.stack([case.k, case.v], 1).to(DEVICE))
    view = View(batch(case), {}, None, case.page_size, False)
    q = case.q.to(DEVICE)
    arrays = {name: getattr(view.host, name) for name in ("starts", "lengths", "pages")}
    arrays |= {name: backend.plan(view, name) for name in backend.wants(q, cache, view)}
    view.fed = {name: torch.from_numpy(np.ascontiguousarray(a)).to(DEVICE) for name, a in arrays.items()}
    spec = AttentionSpec(case.width ** -0.5, window=case.window, softcap=softcap)
    launches: list[dict] = []

    def record(kernel, grid, args, meta):
        launches.append({"grid": grid} | meta)
        kernel[grid](*args, **meta)

    with recording(record):
        return backend.attend(q, cache, view, spec), launches


@pytest.fixture
def backend(monkeypatch) -> kernels.Attention:
    """As on a GPU with many multiprocessors, for short contexts."""
    monkeypatch.setattr(attention_decode, "LEAST_SHARE", 16)
    made = kernels.Attention(Device(torch.device(DEVICE), "test", "sm_90", 132))
    made.long = 32
    return made


@pytest.mark.parametrize("case", [
    Case([90, 1, 40, 20, 17], [1, 1, 1, 20, 5], 4, 2, 32, 8, torch.bfloat16, padding=3),
    Case([70, 33, 18], [1, 1, 18], 8, 1, 16, 16),
    Case([90, 25], [1, 9], 2, 1, 16, 4, window=20),
    Case([64, 12, 0, 0], [1, 12, 0, 0], 2, 2, 16, 4, padding=19),
    Case([64, 50], [1, 1], 2, 1, 16, 4, padding=30),  # no prompt, but padding tokens
], ids=["bf16", "groups", "window", "padding rows", "padding tokens"])
def test_long_contexts_of_decode_rows_are_shared(case, backend):
    out, launches = attended(case, backend)
    check(out, case.right(case.width ** -0.5)[0], TOLERANCE[case.dtype])
    decode = [one for one in launches if one.get("QUERIES") == 1]
    assert len(decode) == 1 and decode[0]["SPLIT"] and decode[0]["grid"][2] > 1
    assert decode[0]["grid"][0] == int((np.array(case.counts) == 1).cumprod().sum())


def test_with_a_soft_cap(backend):
    case = Case([50, 9], [1, 9], 2, 1, 16, 8, magnitude=8)
    check(attended(case, backend, softcap=5.0)[0], case.right(0.25, 5.0)[0], 2e-5)


def test_short_ones_stay_in_the_prompts_launch(backend):
    case = Case([32, 5, 20], [1, 1, 20], 2, 1, 16, 8)
    out, launches = attended(case, backend)
    check(out, case.right(0.25)[0], 2e-5)
    assert [one["QUERIES"] for one in launches] == [0]


def test_a_wrong_place_for_the_result_is_told(backend):
    case = Case([50], [1], 2, 1, 16, 8)
    cache = LayerCache(torch.stack([case.k, case.v], 1).to(DEVICE))
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="out must be contiguous"):
        backend._decode(case.q.to(DEVICE), cache, case.table.to(DEVICE), lengths, 8, AttentionSpec(0.25),
                        torch.zeros(1, 2, 8, device=DEVICE))
