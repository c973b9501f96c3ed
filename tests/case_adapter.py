"""What the handed library cases call (`../shared/cases/ADAPTER.md`): thin wrappers over the engine's own components.

Functions missing here make their cases skip: merge_states (no split-KV yet), make_allocator (pages have one
owner here, not a count; tests/test_pool.py), page_keys (images).
"""
from __future__ import annotations

import msgspec
import numpy as np
from isthmus.core.cache.radix import RadixTree
from isthmus.core.errors import RequestError as ClientError
from isthmus.core.messages import pack_ids
from isthmus.core.models.rope import rope_inv_freq
from isthmus.core.parsers.choose import CALLS
from isthmus.core.parsers.contract import CallArguments, CallBegin, Content, Tool
from isthmus.core.platform import AttentionSpec, Penalties
from isthmus.core.scheduler.request import History
from isthmus.core.server.chat import delta
from isthmus.core.server.protocol import ChatRequest
from isthmus.core.text import ChatTemplate, StopFilter, Tokenizer, Utf8Stream
from isthmus.core.text import load_tokenizer as _load_tokenizer
from isthmus.core.weights import open_checkpoint
from isthmus.core.weights.gguf import read_gguf
from isthmus.core.weights.safetensors import read_safetensors_header
from isthmus.platforms.reference import sampling
from isthmus.platforms.reference.attention import attend

__all__ = ["ClientError", "read_gguf", "read_safetensors_header", "rope_inv_freq"]


def detok_stream(pieces: list[bytes]) -> list[str]:
    stream = Utf8Stream()
    return [stream.push(piece) for piece in pieces] + [stream.flush()]


def stop_stream(pieces: list[str], stops: list[str], include: bool = False) -> tuple[list[str], str | None]:
    stop, out = StopFilter(stops, include), []
    for piece in pieces:
        text, matched = stop.push(piece)
        out.append(text)
        if matched is not None:
            return out, matched
    return [*out, stop.flush()], None


def render_chat(template, messages, tools=None, add_generation_prompt=True, continue_final_message=False, bos_token="",
                eos_token="", **kwargs) -> str:
    chat = ChatTemplate(template, None, {"bos_token": bos_token, "eos_token": eos_token})
    return chat.render(messages, tools, add_generation_prompt, continue_final_message, **kwargs)


class AnyTools(dict):
    """The cases name no tools: any name counts."""

    def __contains__(self, name) -> bool:
        return True

    def get(self, name, default=None) -> Tool:
        return Tool(name, {})


def _events(fmt: str, chunks: list[str]) -> list:
    parser = CALLS.create(fmt).parser(AnyTools())
    return [event for chunk in chunks for event in parser.feed(chunk)] + parser.finish()


def parse_tools(fmt: str, text: str) -> tuple[str, list[tuple[str, str]]]:
    content, calls = "", []
    for event in _events(fmt, [text]):
        if isinstance(event, Content):
            content += event.text
        elif isinstance(event, CallBegin):
            calls.append((event.name, ""))
        elif isinstance(event, CallArguments):
            calls[event.index] = (calls[event.index][0], calls[event.index][1] + event.text)
    return content, calls


def stream_tools(fmt: str, chunks: list[str]) -> list[dict]:
    made = (delta(event, ChatRequest.model_construct()) for event in _events(fmt, chunks))
    return [msgspec.to_builtins(one) for one in made if one is not None]


def load_vocab(path) -> Tokenizer:
    return _load_tokenizer(open_checkpoint(path))


def encode_chat(vocab_path, template, messages, bos_token, eos_token) -> list[int]:
    chat = ChatTemplate(template, load_vocab(vocab_path), {"bos_token": bos_token, "eos_token": eos_token})
    return [int(id) for id in chat.encode(messages)]


def window_mask(n: int, window: int) -> np.ndarray:
    """Read off the reference's attention: with V the identity, a row of the output is its softmax weights."""
    heads = np.zeros((n, 1, 1))
    weights = attend(heads, heads, np.eye(n)[:, None, :], np.arange(n), AttentionSpec(1.0, window))
    return weights[:, 0, :] > 0


def apply_penalties(logits, prompts, outputs, repetition, presence, frequency) -> np.ndarray:
    histories = [History(np.asarray(prompt, np.int32)) for prompt in prompts]
    for history, output in zip(histories, outputs, strict=True):
        for token in output:
            history.add(token)
    rows = np.concatenate([np.full(h.size, i, np.int32) for i, h in enumerate(histories)])
    numbers = [np.asarray(values, np.float32) for values in (repetition, presence, frequency)]
    ids, counts = np.concatenate([h.ids for h in histories]), np.concatenate([h.counts for h in histories])
    penalties = Penalties(rows, ids, counts, np.zeros(len(logits), np.int32), *numbers)
    out = np.asarray(logits, np.float64).copy()
    sampling.apply_penalties(out, penalties, np.zeros(len(out), np.int32))
    return out


class make_radix:  # the name that the cases call
    """Slot indices in and out; the tree knows a page by its first slot."""

    def __init__(self, page_size: int):
        self.size, self.tree = page_size, RadixTree(page_size)

    def _slots(self, pages: np.ndarray) -> list[int]:
        return (pages[:, None] + np.arange(self.size)).ravel().tolist()

    def match(self, key, extra=None):
        _, node = self.tree.match(pack_ids(key), (extra or "").encode())
        return self._slots(self.tree.path(node)), node

    def insert(self, key, indices, extra=None) -> int:
        pages = np.asarray(indices[::self.size], np.int32)
        return self.tree.insert(pack_ids(key), pages, (extra or "").encode())[0] * self.size

    def lock(self, node) -> None:
        self.tree.lock(node)

    def unlock(self, node) -> None:
        self.tree.unlock(node)

    def evict(self, count: int) -> list[int]:
        return self._slots(self.tree.evict(-(-count // self.size)))

    def sizes(self) -> tuple[int, int]:
        return self.tree.evictable * self.size, self.tree.protected * self.size
