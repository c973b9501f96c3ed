"""Safetensors files and Hugging Face folders, good, damaged and hostile."""
import json
import struct
import tracemalloc

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.core.errors import CheckpointError
from isthmus.core.weights.checkpoint import open_checkpoint
from isthmus.core.weights.files import read_json
from isthmus.core.weights.safetensors import open_safetensors, read_safetensors_header
from safetensors.numpy import load_file, save_file

from .checkpoints import (
    Stored,
    header_bytes,
    safetensors_bytes,
    tiny_llama_config,
    tiny_llama_folder,
    tiny_llama_gguf,
    tiny_weights,
    write_safetensors,
)
from .effort import at_most

Z, MEBI, INDEX = b"\0" * 16, 1 << 20, "model.safetensors.index.json"


def tensor(begin, end, shape=(2,), dtype="F32", **more) -> dict:
    return {"dtype": dtype, "shape": list(shape), "data_offsets": [begin, end], **more}


def file(header, data=b"") -> bytes:
    return header_bytes(header) + data


def raw(header: bytes, data=b"", length=None) -> bytes:
    return struct.pack("<Q", len(header) if length is None else length) + header + data


GOOD = json.dumps({"a": tensor(0, 8)}).encode()
HOSTILE = {
    "header length 2**63": (raw(GOOD, Z[:8], 2**63), "header's length is 9223372036854775808"),
    "header length past the end": (raw(GOOD, Z[:8], 10**6), "header's length is 1000000"),
    "header length 0": (raw(b"", length=0), "header's length is 0"),
    "empty": (b"", "empty"),
    "three bytes": (b"\1\0\0", "3 bytes"),
    "not JSON": (raw(b"{]"), "not valid JSON"),
    "not an object": (raw(b"[1]"), "must be a JSON object"),
    "not UTF-8": (raw(b'{"\xff": 1}'), "not valid JSON"),
    "nested 100,000 deep": (raw(b"[" * 100_000), "not valid JSON"),
    "four million values": (raw(b'{"a":[' + b"0," * 4_000_000 + b"0]}"), "more than 2097152 values"),
    "number of 5000 digits": (raw(b'{"a": ' + b"9" * 5000 + b"}"), "not valid JSON"),
    "key twice": (raw(b'{"a": %b, "a": %b}' % (GOOD[6:-1], GOOD[6:-1]), Z[:8]), "'a' appears twice"),
    "past the end": (file({"a": tensor(0, 4000, (1000,))}, Z), "take 4000 bytes, the file holds 16"),
    "reversed": (file({"a": tensor(8, 0)}, Z[:8]), "data_offsets .8, 0."),
    "alias": (file({"a": tensor(0, 8), "b": tensor(0, 8)}, Z[:8]), "'b' begins at byte 0, but tensor 'a' ends at 8"),
    "overlap": (file({"a": tensor(0, 8), "b": tensor(4, 12)}, Z[:12]), "overlap or leave a hole"),
    "hole": (file({"a": tensor(0, 8), "b": tensor(9, 16, (7,), "I8")}, Z), "overlap or leave a hole"),
    "bytes nobody owns": (file({"a": tensor(0, 8)}, Z), "take 8 bytes, the file holds 16"),
    "shape larger than the range": (file({"a": tensor(0, 8, (1000, 1000))}, Z[:8]), "takes 4000000 bytes"),
    "shape 2**62 twice": (file({"a": tensor(0, 8, (2**62, 2**62))}, Z[:8]), "takes"),
    "negative shape": (file({"a": tensor(0, 8, (-2, -1))}, Z[:8]), "shape must be a list"),
    "shape of booleans": (file({"a": tensor(0, 8, (True, 2))}, Z[:8]), "shape must be a list"),
    "shape of floats": (file({"a": tensor(0, 8, (2.0,))}, Z[:8]), "shape must be a list"),
    "negative offsets": (file({"a": tensor(-8, 0)}, Z[:8]), "data_offsets must be a list"),
    "three offsets": (raw(b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8, 8]}}', Z[:8]), "data_offsets"),
    "1000 dimensions": (file({"a": tensor(0, 4, (1,) * 1000)}, Z[:4]), "at most 8"),
    "dtype nobody has": (file({"a": tensor(0, 8, (2,), "F33")}, Z[:8]), "dtype 'F33'"),
    "dtype of a list": (file({"a": tensor(0, 8, (2,), ["F32"])}, Z[:8]), "dtype"),
    "no dtype": (file({"a": {"shape": [2], "data_offsets": [0, 8]}}, Z[:8]), "exactly dtype, shape"),
    "a further field": (file({"a": tensor(0, 8, x=1)}, Z[:8]), "exactly dtype, shape"),
    "a number for a tensor": (file({"a": 3}), "exactly dtype, shape"),
    "metadata of numbers": (file({"__metadata__": {"a": 1}}), "__metadata__"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_at_once_with_what_is_wrong(case, tmp_path):
    data, words = HOSTILE[case]
    path = tmp_path / "bad.safetensors"
    path.write_bytes(data)
    tracemalloc.start()
    with at_most(1), pytest.raises(CheckpointError, match=words) as error:
        read_safetensors_header(path)
    assert tracemalloc.get_traced_memory()[1] < MEBI + 3 * len(data)
    tracemalloc.stop()
    assert "bad.safetensors" in str(error.value)


def test_a_small_good_file(tmp_path):
    path = tmp_path / "good.safetensors"
    path.write_bytes(file({"__metadata__": {"format": "pt"}, "b": tensor(8, 12, (2,), "BF16"), "a": tensor(0, 8),
                           "none": tensor(8, 8, (0, 5)), "scalar": tensor(12, 16, ())}, Z))
    assert read_safetensors_header(path) == {"b": ("BF16", (2,), 8, 12), "a": ("F32", (2,), 0, 8),
                                             "none": ("F32", (0, 5), 8, 8), "scalar": ("F32", (), 12, 16)}


def test_the_safetensors_library_and_this_reader_agree(tmp_path):
    values = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.arange(5, dtype=np.int64),
              "c": np.array([True, False]), "d": np.ones((2, 2), np.float16)}
    save_file(values, tmp_path / "theirs.safetensors", {"format": "np"})
    ours = open_safetensors(tmp_path / "theirs.safetensors")
    for name, value in values.items():
        entry = ours.tensors[name]
        assert entry.shape == value.shape
        assert ours.map[ours.base + entry.begin:ours.base + entry.end] == value.tobytes()
    back = load_file(write_safetensors(tmp_path / "ours.safetensors", tiny_weights()))
    assert all((back[n] == w).all() for n, w in tiny_weights().items())


SEED = safetensors_bytes({"a": np.ones(4, np.float32), "b": Stored("bf16", (3, 2), bytes(12))}, {"format": "pt"})


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)), max_size=6),
       st.integers(0, len(SEED)), st.booleans())
def test_random_damage_never_gives_anything_but_a_checkpoint_error(tmp_path_factory, flips, length, cut):
    data = bytearray(SEED)
    for place, value in flips:
        data[place] = value
    folder = tmp_path_factory.getbasetemp() / "fuzz"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(data[:length] if cut else data)
    tracemalloc.start()
    try:
        with at_most(1), open_checkpoint(folder) as checkpoint:
            for name in checkpoint.names:
                checkpoint.tensor(name)
    except CheckpointError as error:
        assert "model.safetensors" in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < MEBI


# Folders


@pytest.mark.parametrize("shards", [1, 3])
def test_a_folder_in_one_file_or_in_shards(tmp_path, shards):
    folder, weights = tiny_llama_folder(tmp_path / "m", shards=shards), tiny_weights()
    (folder / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    with open_checkpoint(folder) as checkpoint:
        assert (checkpoint.kind, checkpoint.config, checkpoint.metadata) == ("safetensors", tiny_llama_config(), {})
        assert checkpoint.generation == {"eos_token_id": [2, 5]} and checkpoint.norms_include_one is False
        assert checkpoint.names == set(weights)
        for name, value in weights.items():
            raw_tensor = checkpoint.tensor(name)
            assert (raw_tensor.dtype, raw_tensor.shape) == ("f32", value.shape)
            assert raw_tensor.data.tobytes() == value.tobytes()
        assert checkpoint.formats() == {"f32": len(weights)}
        assert checkpoint.census() == {"f32": sum(value.size for value in weights.values())}
        del raw_tensor


def test_a_missing_shard_is_named(tmp_path):
    folder = tiny_llama_folder(tmp_path, shards=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(CheckpointError, match="lacks 1 of 3 shards: model-00002-of-00003.safetensors"):
        open_checkpoint(folder)


@pytest.mark.parametrize("shard", ["../outside.safetensors", "/etc/passwd", "a/b.safetensors", "..\\x.safetensors",
                                   "..", "", "model.bin", "a\0.safetensors"])
def test_a_shard_outside_the_folder_is_refused(tmp_path, shard):
    (tmp_path / "m").mkdir()
    write_safetensors(tmp_path / "outside.safetensors", {"a": np.ones(1, np.float32)})
    (tmp_path / "m" / "config.json").write_text("{}")
    (tmp_path / "m" / INDEX).write_text(json.dumps({"weight_map": {"a": shard}}))
    with pytest.raises(CheckpointError, match="not a .safetensors file beside it"):
        open_checkpoint(tmp_path / "m")


@pytest.mark.parametrize("weight_map", [None, [], {"a": 3}, "x"])
def test_an_index_without_a_map_is_refused(tmp_path, weight_map):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match="weight_map must map tensor names to file names"):
        open_checkpoint(tmp_path)


def test_a_tensor_that_its_shard_lacks_is_named(tmp_path):
    folder = tiny_llama_folder(tmp_path, shards=2)
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["ghost"] = "model-00001-of-00002.safetensors"
    (folder / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match="'ghost' in model-00001-of-00002.safetensors"):
        open_checkpoint(folder)


def test_a_folder_that_holds_one_gguf(tmp_path):
    tiny_llama_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "mmproj-tiny.gguf").write_bytes(b"a projector, not a model")
    assert open_checkpoint(tmp_path).kind == "gguf"
    tiny_llama_gguf(tmp_path / "other.gguf")
    with pytest.raises(CheckpointError, match="2 GGUF models, name one of them: other.gguf, tiny.gguf"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("files, words", [
    ([], "holds no model"), (["model.safetensors"], "no config.json"), (["config.json"], "holds no model"),
    (["config.json", "pytorch_model.bin"], "pickle can run code and is never loaded"),
    (["config.json", "a.safetensors", "b.safetensors"], "neither model.safetensors nor")])
def test_folders_without_a_model(tmp_path, files, words):
    for name in files:
        (tmp_path / name).write_bytes(b"{}")
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("name, words", [
    ("model.safetensors", "give its folder"), ("pytorch_model.bin", "never loaded"), ("model.pt", "never loaded"),
    ("notes.txt", "not a GGUF file")])
def test_files_that_are_no_model(tmp_path, name, words):
    (tmp_path / name).write_bytes(b"hello, world")
    with pytest.raises(CheckpointError, match=words):
        open_checkpoint(tmp_path / name)


def test_a_path_that_does_not_exist(tmp_path):
    with pytest.raises(CheckpointError, match="nowhere does not exist"):
        open_checkpoint(tmp_path / "nowhere")


def test_a_config_that_is_damaged_or_a_folder(tmp_path):
    folder = tiny_llama_folder(tmp_path)
    (folder / "config.json").write_text('{"a": 1, "a": 2}')
    with pytest.raises(CheckpointError, match="'a' appears twice"):
        open_checkpoint(folder)
    with pytest.raises(CheckpointError, match="is not a file"):
        read_json(folder)
