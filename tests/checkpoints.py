"""Small checkpoints written by hand, byte by byte, so that tests can also write broken ones."""
from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from isthmus.core.quant.formats import GGUF_TYPES, SAFETENSORS_TYPES

GGUF_NUMBERS = {name: number for number, name in GGUF_TYPES.items()}
SAFETENSORS_NAMES = {name: word for word, name in SAFETENSORS_TYPES.items()}
_NUMPY = {"float32": "f32", "float64": "f64", "float16": "f16", "int8": "i8", "int32": "i32", "int64": "i64",
          "uint8": "u8"}
CHAT_TEMPLATE = ("{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
                 "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


class Stored(NamedTuple):
    """A tensor as it goes into a file: format, logical shape, bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


def stored(value: np.ndarray | Stored) -> Stored:
    if isinstance(value, Stored):
        return value
    return Stored(_NUMPY[value.dtype.name], value.shape, np.ascontiguousarray(value).tobytes())


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def typed(value: Any) -> tuple[int, bytes]:
    """A metadata value's GGUF type number and bytes: bool, uint32 (int64 when negative), float32, string, or array."""
    if isinstance(value, bool):
        return 7, bytes([value])
    if isinstance(value, int):
        return (4, struct.pack("<I", value)) if 0 <= value < 2**32 else (11, struct.pack("<q", value))
    if isinstance(value, float):
        return 6, struct.pack("<f", value)
    if isinstance(value, (str, bytes)):
        return 8, string(value)
    if any(isinstance(v, int) and v < 0 for v in value):
        return 9, struct.pack(f"<IQ{len(value)}q", 11, len(value), *value)
    items = [typed(v) for v in value]
    kind = items[0][0] if items else 4
    return 9, struct.pack("<IQ", kind, len(items)) + b"".join(raw for _, raw in items)


def entry(key: str, value: Any) -> bytes:
    """One metadata entry."""
    kind, raw = typed(value)
    return string(key) + struct.pack("<I", kind) + raw


def tensor_entry(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    """One tensor entry; `shape` is logical, the file has it reversed."""
    return string(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *reversed(shape), kind, offset)


def gguf_bytes(metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray | Stored] | None = None, *,
               version: int = 3, alignment: int = 32) -> bytes:
    """A whole GGUF file."""
    entries, data = b"", b""
    for name, value in (tensors or {}).items():
        tensor = stored(value)
        data += b"\0" * (-len(data) % alignment)
        entries += tensor_entry(name, tensor.shape, GGUF_NUMBERS[tensor.dtype], len(data))
        data += tensor.data
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors or {}), len(metadata))
    head += b"".join(entry(k, v) for k, v in metadata.items()) + entries
    return head + b"\0" * (-len(head) % alignment) + data


def write_gguf(path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, np.ndarray | Stored] | None = None,
               **options: int) -> Path:
    path.write_bytes(gguf_bytes(metadata, tensors, **options))
    return path


def safetensors_bytes(tensors: Mapping[str, np.ndarray | Stored], metadata: Mapping[str, str] | None = None) -> bytes:
    """A whole safetensors file."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    data = b""
    for name, value in tensors.items():
        tensor = stored(value)
        header[name] = {"dtype": SAFETENSORS_NAMES[tensor.dtype], "shape": list(tensor.shape),
                        "data_offsets": [len(data), len(data) + len(tensor.data)]}
        data += tensor.data
    return header_bytes(header) + data


def header_bytes(header: Any) -> bytes:
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw


def write_safetensors(path: Path, tensors: Mapping[str, np.ndarray | Stored],
                      metadata: Mapping[str, str] | None = None) -> Path:
    path.write_bytes(safetensors_bytes(tensors, metadata))
    return path


HIDDEN, LAYERS, HEADS, KV_HEADS, FFN = 32, 2, 4, 2, 48


def byte_alphabet() -> list[str]:
    """GPT-2's printable stand-in for each byte, in byte order."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = iter(range(256, 512))
    return [chr(b if b in plain else next(others)) for b in range(256)]


def tiny_vocabulary() -> tuple[list[str], list[int], list[str]]:
    """Tokens, their types (1 normal, 3 control) and merges: three control tokens, 256 bytes, "he" and "hel"."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    tokens = control + byte_alphabet() + ["he", "hel"]
    return tokens, [3] * len(control) + [1] * (len(tokens) - len(control)), ["h e", "he l"]


def tiny_weights(seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 weights of a tied Llama under Hugging Face names, small enough for milliseconds."""
    draw, dim = np.random.default_rng(seed), HIDDEN // HEADS
    shapes = {"self_attn.q_proj": (HIDDEN, HIDDEN), "self_attn.k_proj": (KV_HEADS * dim, HIDDEN),
              "self_attn.v_proj": (KV_HEADS * dim, HIDDEN), "self_attn.o_proj": (HIDDEN, HIDDEN),
              "mlp.gate_proj": (FFN, HIDDEN), "mlp.up_proj": (FFN, HIDDEN), "mlp.down_proj": (HIDDEN, FFN)}
    weights = {"model.embed_tokens.weight": draw.normal(0, 0.5, (len(tiny_vocabulary()[0]), HIDDEN))}
    for layer in range(LAYERS):
        for name, shape in shapes.items():
            weights[f"model.layers.{layer}.{name}.weight"] = draw.normal(0, 0.3, shape)
        for name in ("input_layernorm", "post_attention_layernorm"):
            weights[f"model.layers.{layer}.{name}.weight"] = 1 + draw.normal(0, 0.1, HIDDEN)
    weights["model.norm.weight"] = np.ones(HIDDEN)
    return {name: value.astype(np.float32) for name, value in weights.items()}


_GGUF_NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
               "self_attn.o_proj": "attn_output", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
               "mlp.down_proj": "ffn_down", "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
               "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def interleaved(rows: np.ndarray, heads: int) -> np.ndarray:
    """Rows of q or k as GGUF files of Llama have them: halves of each head become pairs."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def as_gguf(weights: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Hugging Face weights of `tiny_weights` under GGUF names and in GGUF row order."""
    out = {}
    for name, value in weights.items():
        stem, end = name.rsplit(".", 1)
        if "q_proj" in stem or "k_proj" in stem:
            value = interleaved(value, HEADS if "q_proj" in stem else KV_HEADS)
        prefix = ""
        if stem.startswith("model.layers."):
            _, _, layer, stem = stem.split(".", 3)
            prefix = f"blk.{layer}."
        out[f"{prefix}{_GGUF_NAMES[stem]}.{end}"] = value
    return out


def tiny_llama_metadata() -> dict[str, Any]:
    tokens, types, merges = tiny_vocabulary()
    return {
        "general.architecture": "llama", "general.name": "tiny", "llama.block_count": LAYERS,
        "llama.context_length": 256, "llama.embedding_length": HIDDEN, "llama.feed_forward_length": FFN,
        "llama.attention.head_count": HEADS, "llama.attention.head_count_kv": KV_HEADS,
        "llama.attention.layer_norm_rms_epsilon": 1e-5, "llama.rope.freq_base": 10000.0,
        "llama.rope.dimension_count": HIDDEN // HEADS, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.bos_token_id": 1, "tokenizer.ggml.eos_token_id": 2, "tokenizer.ggml.add_bos_token": False,
        "tokenizer.chat_template": CHAT_TEMPLATE,
    }


def tiny_llama_gguf(path: Path, seed: int = 0) -> Path:
    """A whole Llama in one file: random float32 weights, byte-level tokenizer, chat template."""
    return write_gguf(path, tiny_llama_metadata(), as_gguf(tiny_weights(seed)))


def tiny_llama_config() -> dict[str, Any]:
    return {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": HIDDEN,
            "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
            "intermediate_size": FFN, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "max_position_embeddings": 256,
            "vocab_size": len(tiny_vocabulary()[0]), "tie_word_embeddings": True, "hidden_act": "silu",
            "bos_token_id": 1, "eos_token_id": 2}


def tiny_llama_folder(folder: Path, seed: int = 0, shards: int = 1) -> Path:
    """The same model as a Hugging Face folder (no tokenizer), in one file or in shards with an index."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(tiny_llama_config()))
    weights = tiny_weights(seed)
    if shards == 1:
        write_safetensors(folder / "model.safetensors", weights, {"format": "pt"})
        return folder
    names = [f"model-{i + 1:05d}-of-{shards:05d}.safetensors" for i in range(shards)]
    place = {name: names[i % shards] for i, name in enumerate(weights)}
    for file in names:
        write_safetensors(folder / file, {n: w for n, w in weights.items() if place[n] == file})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": place}))
    return folder
