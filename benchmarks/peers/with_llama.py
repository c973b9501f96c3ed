"""llama.cpp's probabilities of a given text, by its Python binding over the same libraries that llama-server uses: the
server itself does not tell them."""
from __future__ import annotations

import numpy as np
from llama_cpp import Llama


class Scorer:
    def __init__(self, model: str):
        self._model = Llama(model, n_ctx=2048, n_batch=512, logits_all=True, verbose=False)

    def logprobs(self, prompt: list[int]) -> list[float]:
        self._model.reset()
        self._model.eval(prompt)
        logits = np.array(self._model.scores[:len(prompt) - 1], np.float64)
        top = logits.max(1, keepdims=True)
        total = top[:, 0] + np.log(np.exp(logits - top).sum(1))
        return (logits[np.arange(len(prompt) - 1), prompt[1:]] - total).tolist()
