"""Cross entropy of a head's distribution to the model's over some thousand tokens, a piece of the places at a time, so
that no matrix of logits leaves the cache."""
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

PIECE = 256


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, matrix: Tensor, h: Tensor, model: Tensor, weights: Tensor) -> Tensor:
        x, matrix, total = x.bfloat16(), matrix.bfloat16(), torch.zeros(())
        dx, dmatrix = torch.empty_like(x), torch.zeros(matrix.shape)
        for start in range(0, len(h), PIECE):
            piece = slice(start, start + PIECE)
            said = (h[piece] @ model.T).float().softmax(-1)
            for i, weight in enumerate(weights.tolist()):
                logits = (x[i, piece] @ matrix.T).float().log_softmax(-1)
                total -= weight * (said * logits).sum()
                wrong = (logits.exp_().sub_(said)).mul_(weight / len(h)).bfloat16()
                dx[i, piece] = wrong @ matrix
                dmatrix += wrong.T @ x[i, piece]
        ctx.save_for_backward(dx, dmatrix)
        return total / len(h)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        dx, dmatrix = ctx.saved_tensors
        return dx * grad, dmatrix * grad, None, None, None


def cross_entropy(x: Tensor, matrix: Tensor, h: Tensor, model: Tensor, weights: Tensor) -> Tensor:
    """x [passes, places, hidden] against h [places, hidden], behind the matrices of head and model, [tokens, hidden]
    each: the sum over passes, times their weights, of the mean over places."""
    return _CrossEntropy.apply(x, matrix, h, model, weights)
