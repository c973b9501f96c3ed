"""Tokenizers from strangers' files: a clear error before any large allocation, whatever the file says."""
from __future__ import annotations

import json
import os

import pytest
from isthmus.core.errors import CheckpointError, IsthmusError, RequestError
from isthmus.core.files import is_there, named_path, read_text
from isthmus.core.text.folder_vocab import MAX_TEMPLATE, MAX_UNUSED, folder_vocab
from isthmus.core.text.gguf_vocab import gguf_vocab
from isthmus.core.text.library import library_call
from isthmus.core.text.tokenizer import Tokenizer
from isthmus.core.weights.checkpoint import open_checkpoint
from isthmus.core.weights.gguf_config import translate

from .test_tokenizer import make_folder
from .vocabularies import byte_level, sentencepiece

BACKTRACKING = {"type": "Sequence", "pretokenizers": [
    {"type": "Split", "pattern": {"Regex": "(x+x+)+y"}, "behavior": "Isolated", "invert": False},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}
PADDING = {"direction": "Right", "pad_to_multiple_of": None, "pad_id": 0, "pad_type_id": 0, "pad_token": "x"}


def changed(folder, **parts):
    """The folder with other parts in its tokenizer.json."""
    path = make_folder(folder) / "tokenizer.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **parts}))
    return folder


def with_token(folder, id):
    path = make_folder(folder) / "tokenizer.json"
    value = json.loads(path.read_text())
    value["model"]["vocab"]["zzz"] = id
    path.write_text(json.dumps(value))
    return folder


@pytest.mark.parametrize("id", [4_000_000_000, 100_000_000, MAX_UNUSED + 1000])
def test_an_id_far_beyond_the_vocabulary_is_refused(tmp_path, id):
    with pytest.raises(CheckpointError, match=f"the id {id}"):
        folder_vocab(with_token(tmp_path, id))


def test_a_hole_in_the_vocabulary_is_none_of_our_business(tmp_path):
    tokenizer = Tokenizer(folder_vocab(with_token(tmp_path, 5000)))
    assert tokenizer.vocab_size == 5001 and tokenizer.id_to_token(4000) is None and tokenizer.encode("hell").size == 1


@pytest.mark.parametrize("parts", [
    {"padding": {"strategy": {"Fixed": 10**9}, **PADDING}}, {"padding": {"strategy": {"Fixed": 64}, **PADDING}},
    {"truncation": {"max_length": 1, "strategy": "LongestFirst", "stride": 0, "direction": "Right"}}])
def test_padding_and_truncation_of_the_file_are_left_alone(tmp_path, parts):
    plain = Tokenizer(folder_vocab(make_folder(tmp_path)))
    odd = Tokenizer(folder_vocab(changed(tmp_path, **parts)))
    assert odd.encode("hello", True).tolist() == plain.encode("hello", True).tolist()
    assert odd.add_bos == plain.add_bos


def test_a_rule_that_cannot_split_a_text_is_that_requests_error(tmp_path):
    tokenizer = Tokenizer(folder_vocab(changed(tmp_path, pre_tokenizer=BACKTRACKING)))
    tokenizer.prepare()
    with pytest.raises(RequestError, match="the model's tokenizer cannot read this text"):
        tokenizer.encode("x" * 40)
    assert tokenizer.decode(tokenizer.encode("hello")) == "hello"


class PanicException(BaseException):
    """Bears the name of what pyo3 raises."""


@pytest.mark.parametrize("failure, kind", [
    (PanicException("boom"), CheckpointError), (Exception("boom"), CheckpointError), (ValueError(), CheckpointError),
    (RequestError("ours"), RequestError), (KeyboardInterrupt(), KeyboardInterrupt), (SystemExit(3), SystemExit)])
def test_which_failures_of_the_library_become_ours(failure, kind):
    with pytest.raises(kind) as caught, library_call(CheckpointError, "the file"):
        raise failure
    assert (caught.value is failure) == (kind is not CheckpointError)


def test_a_reason_is_cut():
    with pytest.raises(CheckpointError) as caught, library_call(CheckpointError, "the file"):
        raise Exception("x" * 10**6)
    assert len(str(caught.value)) < 600


# ---- GGUF

ODD = [["gpt2"], {"a": 1}, 5, 2.5, True, b"gpt2", [], "", ["x" * 100] * 10_000]


@pytest.mark.parametrize("make", [byte_level, sentencepiece])
@pytest.mark.parametrize("odd", ODD, ids=lambda v: str(v)[:12])
def test_every_value_of_a_gguf_tokenizer_is_checked(make, odd):
    for key in {**make(), **dict.fromkeys(f"tokenizer.ggml.{name}_token_id" for name in ("eot", "unknown", "padding")),
                **dict.fromkeys(f"tokenizer.ggml.{name}" for name in ("add_space_prefix", "add_bos_token"))}:
        try:
            Tokenizer(gguf_vocab({**make(), key: odd})).prepare()
        except IsthmusError as error:
            assert isinstance(error, CheckpointError) and len(str(error)) < 1000, key


@pytest.mark.parametrize("key", ["model", "pre"])
@pytest.mark.parametrize("odd", [["gpt2"], {"a": 1}, 5])
def test_kinds_are_strings(key, odd):
    with pytest.raises(CheckpointError, match=f"tokenizer.ggml.{key} must be a string"):
        gguf_vocab(byte_level(**{key: odd}))


@pytest.mark.parametrize("odd", ODD, ids=lambda v: str(v)[:12])
def test_every_value_of_a_gguf_configuration_is_checked(odd):
    arch = "gemma3" if isinstance(odd, bool) else "llama"
    keys = ("context_length", "block_count", "attention.head_count", "expert_count", "attention.sliding_window",
            "rope.freq_base", "rope.scaling.type", "rope.scaling.factor", "rope.dimension_count",
            "attention.sliding_window_pattern", "rope.scaling.attn_factor")
    plain = {"general.architecture": arch, f"{arch}.block_count": 2, f"{arch}.attention.head_count": 2,
             f"{arch}.embedding_length": 8, f"{arch}.rope.scaling.factor": 2.0}
    for key in ["general.architecture", "tokenizer.ggml.tokens", *(f"{arch}.{key}" for key in keys)]:
        try:
            translate({**plain, key: odd}, {})
        except CheckpointError as error:
            assert len(str(error)) < 1000, key


# ---- text files

def test_a_template_file_is_bounded(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("x" * (MAX_TEMPLATE + 1))
    with pytest.raises(CheckpointError, match="chat_template.jinja: the file has more than"):
        folder_vocab(tmp_path)


def test_text_files_are_regular_short_and_utf8(tmp_path):
    path = tmp_path / "text"
    path.write_bytes("aé\r\nb".encode())
    assert read_text(path, 5) == "aé\nb"
    with pytest.raises(ValueError, match="more than 3 characters"):
        read_text(path, 3)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="not a text in UTF-8"):
        read_text(path, 10)
    with pytest.raises(ValueError, match="folder"):
        read_text(tmp_path, 10)
    with pytest.raises(FileNotFoundError):
        read_text(tmp_path / "none", 10)
    if hasattr(os, "mkfifo"):
        os.mkfifo(tmp_path / "pipe")
        for odd in (tmp_path / "pipe", tmp_path.__class__("/dev/zero")):
            with pytest.raises(ValueError, match="not a regular file"):
                read_text(odd, 10)


def test_names_that_no_file_can_have(tmp_path):
    assert not is_there(tmp_path / ("x" * 300)) and is_there(tmp_path)
    assert str(named_path("~nobody-of-that-name/x")) == "~nobody-of-that-name/x"
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    shard = "x" * 300 + ".safetensors"
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match="lacks 1 of 1 shards"):
        open_checkpoint(tmp_path)
