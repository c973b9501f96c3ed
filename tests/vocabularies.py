"""Small vocabularies as GGUF metadata, for tests of tokenizers and chat templates."""
from __future__ import annotations

from typing import Any

from isthmus.core.text.gguf_vocab import gguf_vocab
from isthmus.core.text.tokenizer import Tokenizer, byte_characters

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
CHATML = ("{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' "
          "+ '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


def byte_level(**more: Any) -> dict[str, Any]:
    """Byte-level BPE of the SmolLM2 kind: 3 control tokens, all bytes, a few merges, one user-defined token."""
    characters = {byte: chr(code) for code, byte in byte_characters().items()}
    merges = ["h e", "l l", "he ll", "hell o", "Ġ hello", "Ġ Ġ", "< |"]
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *(characters[byte] for byte in range(256)),
              *(merge.replace(" ", "") for merge in merges), "<think>"]
    types = [CONTROL] * 3 + [NORMAL] * (len(tokens) - 4) + [USER]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm", "tokenizer.ggml.tokens": tokens,
            "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges, "tokenizer.ggml.bos_token_id": 1,
            "tokenizer.ggml.eos_token_id": 2, "tokenizer.chat_template": CHATML} | key(more)


def sentencepiece(pieces: str = "▁ h e l o he ll hell hello ▁hello a aa aaa aaaa", **more: Any) -> dict[str, Any]:
    """SentencePiece BPE of the Llama 2 kind: pieces by falling score, bytes for all other characters."""
    normal = pieces.split()
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *normal]
    types = [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [NORMAL] * len(normal)
    scores = [0.0] * 259 + [-float(i) for i in range(len(normal))]
    return {"tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types,
            "tokenizer.ggml.scores": scores, "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2,
            "tokenizer.ggml.unknown_token_id": 0} | key(more)


def key(more: dict[str, Any]) -> dict[str, Any]:
    return {f"tokenizer.ggml.{name}": value for name, value in more.items()}


def tokenizer_of(metadata: dict[str, Any]) -> Tokenizer:
    return Tokenizer(gguf_vocab(metadata))
