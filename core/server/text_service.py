"""Text to token ids and back for the server; long texts are handled off the event loop."""
from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

import numpy as np

from ..errors import RequestError

T = TypeVar("T")

OFFLOAD_CHARS = 2000  # about 0.3 ms of tokenizing: longer texts would hold up the streams of others
THREADS = 2


class TextService:
    """A model's tokenizer and chat template.

    tokenizer: as `core.text.load_tokenizer` gives it. template: a `core.text.ChatTemplate`, or None for a base model.
    """

    def __init__(self, tokenizer: Any, template: Any = None):
        self.tokenizer, self.template = tokenizer, template
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="text")

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def least_tokens(self, characters: int) -> int:
        """So many tokens at least has a text of that many characters."""
        return -(-characters // self.tokenizer.max_token_bytes)

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size <= OFFLOAD_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> np.ndarray:
        """Ids of a raw prompt, int32. Control tokens written out in it count as such, as in any raw prompt; a BOS
        that the text already starts with is not doubled."""
        ids = await self._run(len(text), lambda: self.tokenizer.encode(text, add_special, parse_special))
        ids = np.asarray(ids, np.int32)
        bos = self.tokenizer.bos_id
        return ids[1:] if add_special and len(ids) > 1 and ids[0] == ids[1] == bos else ids

    async def encode_chat(self, messages: Sequence[dict[str, Any]], size: int, **options: Any) -> np.ndarray:
        """Ids of a conversation under the chat template, int32; `size` is the number of characters in it."""
        template = self.template
        if template is None:
            raise RequestError("this model has no chat template; use /v1/completions, or start the server with "
                               "--chat-template", param="messages")
        ids = await self._run(size, lambda: template.encode(list(messages), **options))
        return np.asarray(ids, np.int32)

    async def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Text of ids that are inside the vocabulary."""
        return await self._run(len(ids), lambda: self.tokenizer.decode(ids, skip_special))

    def token_bytes(self, id: int) -> bytes:
        """Bytes of one token; b"" for ids that the model has and the tokenizer lacks (padding of the vocabulary)."""
        return self.tokenizer.token_bytes(id) if 0 <= id < self.tokenizer.vocab_size else b""
