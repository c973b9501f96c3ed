"""Text to token ids and back for the server. What takes long is called in a thread, see `core.server.threads`."""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..config import Config
from ..errors import RequestError
from ..files import read_template


class TextService:
    """A model's tokenizer and chat template.

    tokenizer: as `core.text.load_tokenizer` gives it. template: a `core.text.ChatTemplate`, or None for a base model.
    tool_template: the one for conversations with tools, where the model has two.
    """

    def __init__(self, tokenizer: Any, template: Any = None, tool_template: Any = None):
        self.tokenizer, self.template = tokenizer, template
        self.tool_template = template if tool_template is None else tool_template

    def least_tokens(self, characters: int) -> int:
        """So many tokens at least has a text of that many characters."""
        return -(-characters // self.tokenizer.max_token_bytes)

    def encode(self, text: str, add_special: bool = True, parse_special: bool = True) -> np.ndarray:
        """Ids of a raw prompt, int32. Control tokens written out in it count as such, as in any raw prompt; a BOS
        that the text already starts with is not doubled."""
        ids = np.asarray(self.tokenizer.encode(text, add_special, parse_special), np.int32)
        bos = self.tokenizer.bos_id
        return ids[1:] if add_special and len(ids) > 1 and ids[0] == ids[1] == bos else ids

    def spell(self, text: str) -> np.ndarray:
        """Ids of a piece of text, int32, of which nothing counts as a control token."""
        return np.asarray(self.tokenizer.encode(text, False, False), np.int32)

    def encode_chat(self, messages: Sequence[dict[str, Any]], **options: Any) -> np.ndarray:
        """Ids of a conversation under the chat template, int32. A template is a program: seconds may pass."""
        if self.template is None:
            raise RequestError("this model has no chat template; use /v1/completions, or start the server with "
                               "--chat-template", param="messages")
        with_tools = options.get("tools") or any("tool_calls" in m or m.get("role") == "tool" for m in messages)
        template = self.tool_template if with_tools else self.template
        return np.asarray(template.encode(list(messages), **options), np.int32)

    def control_ids(self, texts: Sequence[str]) -> tuple[int, ...]:
        """Ids of the control tokens among these that the model has."""
        wanted = {text.encode() for text in texts}
        if not wanted:
            return ()
        return tuple(id for id in self.tokenizer.special_ids if self.tokenizer.token_bytes(id) in wanted)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Text of ids that are inside the vocabulary."""
        return self.tokenizer.decode(ids, skip_special)

    def token_bytes(self, id: int) -> bytes:
        """Bytes of one token; b"" for ids that the model has and the tokenizer lacks (padding of the vocabulary)."""
        return self.tokenizer.token_bytes(id) if 0 <= id < self.tokenizer.vocab_size else b""


def open_text(config: Config) -> TextService:
    """The `TextService` of a model at a local path, with the user's chat template if one is set."""
    from ..text.template import ChatTemplate
    from ..text.tokenizer import load_tokenizer
    from ..weights.checkpoint import open_checkpoint
    with open_checkpoint(config.model.model) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    own = read_template(config.model.chat_template)
    sources = (own or tokenizer.chat_template, own or tokenizer.tool_template)
    return TextService(tokenizer, *(ChatTemplate(source, tokenizer) if source else None for source in sources))
