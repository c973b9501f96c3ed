"""GGUF files, whole, split, damaged and hostile, and what their metadata means."""
import struct
import tracemalloc
from pathlib import Path

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.core.errors import CheckpointError
from isthmus.core.weights.checkpoint import open_checkpoint
from isthmus.core.weights.gguf import read_gguf

from .checkpoints import (
    HEADS,
    KV_HEADS,
    LAYERS,
    Stored,
    as_gguf,
    entry,
    gguf_bytes,
    interleaved,
    string,
    tensor_entry,
    tiny_llama_gguf,
    tiny_llama_metadata,
    tiny_weights,
    write_gguf,
)
from .effort import at_most

U64, MEBI = struct.Struct("<Q").pack, 1 << 20
LLAMA = {"general.architecture": "llama"}


def raw(entries=b"", keys=1, tensors=b"", n_tensors=0, data=b"", version=3, magic=b"GGUF") -> bytes:
    """A file with the counts as given, whatever it holds."""
    head = magic + struct.pack("<IQQ", version, n_tensors, keys) + entries + tensors
    return head + b"\0" * (-len(head) % 32) + data


def kv(key: str, kind: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", kind) + value


def array(kind: int, count: int, items: bytes = b"") -> bytes:
    return struct.pack("<IQ", kind, count) + items


def nested(depth: int) -> bytes:
    return array(9, 1, nested(depth - 1)) if depth > 1 else array(4, 1, b"\0" * 4)


ARCH = entry("general.architecture", "llama")
F32_4X2 = tensor_entry("t", (2, 4), 0, 0)
FLOATS = struct.pack("<8f", *range(8))

HOSTILE = {
    "metadata count 2**63": (raw(ARCH, 2**63), "number of metadata entries is 9223372036854775808"),
    "metadata count 2**40": (raw(ARCH, 2**40), "number of metadata entries"),
    "metadata count past the end": (raw(ARCH, 60000), "number of metadata entries 60000"),
    "tensor count 2**63": (raw(ARCH, 1, b"", 2**63), "number of tensors"),
    "tensor count past the end": (raw(ARCH, 1, b"", 1000), "number of tensors 1000"),
    "string length 2**63": (raw(kv("k", 8, U64(2**63) + b"abc")), "length of metadata 'k'"),
    "string length 1 GiB": (raw(kv("k", 8, U64(2**30) + b"abc")), "length of metadata 'k'"),
    "string past the end": (raw(kv("k", 8, U64(4000) + b"abc")), "cut short"),
    "key length 2**62": (raw(U64(2**62) + b"abc"), "length of a metadata key"),
    "array length 2**63": (raw(kv("k", 9, array(4, 2**63))), "array length of metadata 'k'"),
    "array length past the end": (raw(kv("k", 9, array(4, 1000))), "array length of metadata 'k'"),
    "string array 2**61": (raw(kv("k", 9, array(8, 2**61))), "array length of metadata 'k'"),
    "string array cut": (raw(kv("k", 9, array(8, 3, string("a") + U64(900) + b"b" * 16))), "string 1 of"),
    "nested arrays 2**62": (raw(kv("k", 9, array(9, 2**62, array(9, 2**62)))), "array length"),
    "nested arrays 5 deep": (raw(kv("k", 9, nested(5))), "more than 4 deep"),
    "array of an unknown type": (raw(kv("k", 9, array(77, 1) + b"\0" * 8)), "unknown type 77"),
    "value of an unknown type": (raw(kv("k", 99, b"\0" * 8)), "unknown type 99"),
    "boolean 2": (raw(kv("k", 7, b"\2")), "boolean"),
    "string that is not UTF-8": (raw(kv("k", 8, string(b"\xff\xfe"))), "not UTF-8"),
    "array string that is not UTF-8": (raw(kv("k", 9, array(8, 2, string("a") + string(b"\xff")))), "string 1 of"),
    "key twice": (raw(ARCH + ARCH, 2), "'general.architecture' appears twice"),
    "magic": (raw(ARCH, magic=b"GGUX"), "GGUX"),
    "version 0": (raw(ARCH, version=0), "version 0"),
    "version 99": (raw(ARCH, version=99), "version 99"),
    "big-endian": (raw(ARCH, version=3 << 24), "big-endian"),
    "empty": (b"", "empty"),
    "only the magic": (b"GGUF", "version"),
    "tensor past the end": (raw(ARCH, 1, F32_4X2, 1, FLOATS[:28]), "past the end"),
    "tensor offset 2**62": (raw(ARCH, 1, tensor_entry("t", (2, 4), 0, 2**62), 1, FLOATS), "past the end"),
    "tensor of 2**189 values": (raw(ARCH, 1, tensor_entry("t", (2**63,) * 3, 0, 0), 1, FLOATS), "past the end"),
    "tensor with 5 dimensions": (raw(ARCH, 1, tensor_entry("t", (1,) * 5, 0, 0), 1, FLOATS), "5 dimensions"),
    "tensor of a type nobody has": (raw(ARCH, 1, tensor_entry("t", (8,), 200, 0), 1, FLOATS), "type 200 .unknown"),
    "tensor of a type not read": (raw(ARCH, 1, tensor_entry("t", (8,), 23, 0), 1, FLOATS), "iq4_xs"),
    "tensor with half a block": (raw(ARCH, 1, tensor_entry("t", (2, 48), 2, 0), 1, FLOATS * 9), "multiple of the 32"),
    "tensor not aligned": (raw(ARCH, 1, tensor_entry("t", (4,), 0, 4), 1, FLOATS), "not aligned"),
    "tensor twice": (raw(ARCH, 1, F32_4X2 * 2, 2, FLOATS), "'t' appears twice"),
    "tensors overlap": (raw(ARCH, 1, tensor_entry("a", (16,), 0, 0) + tensor_entry("b", (4,), 0, 32), 2, FLOATS * 2),
                        "'a' and 'b' overlap"),
    "tensors share bytes": (raw(ARCH, 1, F32_4X2 + tensor_entry("u", (8,), 0, 0), 2, FLOATS), "overlap"),
    "alignment 0": (gguf_bytes({**LLAMA, "general.alignment": 0}), "general.alignment is 0"),
    "alignment 33": (gguf_bytes({**LLAMA, "general.alignment": 33}), "power of two"),
    "alignment of a word": (gguf_bytes({**LLAMA, "general.alignment": "32"}), "power of two"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_a_hostile_file_is_refused_at_once_with_what_is_wrong(case, tmp_path):
    data, words = HOSTILE[case]
    path = tmp_path / "bad.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    with at_most(1), pytest.raises(CheckpointError, match=words) as error:
        read_gguf(path)
    assert tracemalloc.get_traced_memory()[1] < MEBI
    tracemalloc.stop()
    assert "bad.gguf" in str(error.value)


def test_a_name_as_long_as_a_file_makes_no_long_message(tmp_path):
    path = tmp_path / "x.gguf"
    path.write_bytes(gguf_bytes({"a" * 50_000: "x"}).replace(b"a" + struct.pack("<I", 8), b"a" + struct.pack("<I", 99)))
    with pytest.raises(CheckpointError, match=r"metadata 'aaa.* \.\.\. .*has the unknown type 99") as caught:
        read_gguf(path)
    assert len(str(caught.value)) < 2100


def test_a_small_good_file(tmp_path):
    path = tmp_path / "good.gguf"
    path.write_bytes(raw(ARCH + entry("x.list", [1, -2, 3]) + entry("x.words", ["a", "", "ü"]), 3, F32_4X2, 1, FLOATS))
    file = read_gguf(path)
    assert file.metadata == {"general.architecture": "llama", "x.list": [1, -2, 3], "x.words": ["a", "", "ü"]}
    shape, dtype, offset = file.tensors["t"]
    assert (shape, dtype, offset % 32) == ((2, 4), "f32", 0) and file.map[offset:offset + 32] == FLOATS


@pytest.mark.parametrize("version", [2, 3])
@pytest.mark.parametrize("alignment", [8, 32, 256])
def test_versions_and_alignments(tmp_path, version, alignment):
    values = {"a": np.arange(3, dtype=np.float32), "b": np.arange(5, dtype=np.int8)}
    path = write_gguf(tmp_path / "m.gguf", {**LLAMA, "general.alignment": alignment}, values, version=version,
                      alignment=alignment)
    file = read_gguf(path)
    for name, value in values.items():
        offset = file.tensors[name].offset
        assert file.map[offset:offset + value.nbytes] == value.tobytes()


def test_every_value_type_reads_as_the_gguf_library_wrote_it(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    values = {"uint8": 200, "int8": -100, "uint16": 60000, "int16": -30000, "uint32": 2**32 - 1, "int32": -2**31,
              "uint64": 2**64 - 1, "int64": -2**63, "float32": 0.5, "float64": 0.1, "bool": True, "string": "é"}
    for kind, value in values.items():
        getattr(writer, f"add_{kind}")(f"x.{kind}", value)
    lists = {"x.ints": [1, 2, 3], "x.floats": [0.5, -1.0], "x.bools": [True, False], "x.words": ["a", "b"]}
    for key, value in lists.items():
        writer.add_array(key, value)
    writer.add_tensor("q", np.zeros((4, 34), np.uint8), raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    file = read_gguf(tmp_path / "m.gguf")
    assert {k: file.metadata[f"x.{k}"] for k in values} == values
    assert {k: file.metadata[k] for k in lists} == lists
    assert type(file.metadata["x.bool"]) is bool and type(file.metadata["x.uint8"]) is int
    assert file.tensors["q"][:2] == ((4, 32), "q8_0")


def test_the_gguf_library_reads_our_tiny_file_alike(tmp_path):
    path = tiny_llama_gguf(tmp_path / "tiny.gguf")
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert {t.name: (tuple(int(n) for n in t.shape[::-1]), t.tensor_type.name.lower(), t.data_offset)
            for t in theirs.tensors} == {name: tuple(info) for name, info in ours.tensors.items()}
    assert {k: f.contents() for k, f in theirs.fields.items() if not k.startswith("GGUF.")} == ours.metadata


@pytest.mark.parametrize("cut", [*range(0, 60), *range(60, 9000, 97)])
def test_a_truncated_file_is_refused(tmp_path, cut):
    whole = gguf_bytes(tiny_llama_metadata(), {"t": np.ones(4, np.float32)})
    path = tmp_path / "cut.gguf"
    path.write_bytes(whole[:min(cut, len(whole) - 1)])
    with pytest.raises(CheckpointError):
        read_gguf(path)


def test_a_vocabulary_of_262144_is_read_fast(tmp_path):
    tokens = [f"token{i}" for i in range(262144)]
    path = write_gguf(tmp_path / "v.gguf", {**LLAMA, "tokenizer.ggml.tokens": tokens})
    with at_most(2):
        assert read_gguf(path).metadata["tokenizer.ggml.tokens"] == tokens


SEED = gguf_bytes({**LLAMA, "b": True, "f": 1.5, "s": "text", "ints": [1, 2, 3], "words": ["x", "yz"],
                   "deep": [[1], [2]], "llama.block_count": 1, "llama.attention.head_count": 2,
                   "llama.embedding_length": 8},
                  {"blk.0.attn_q.weight": np.ones((8, 8), np.float32), "token_embd.weight": np.ones((4, 8), np.float32),
                   "rope_freqs.weight": np.ones(2, np.float32),
                   "output.weight": Stored("q8_0", (2, 32), bytes(68))})


@settings(max_examples=400)
@given(st.lists(st.tuples(st.integers(0, len(SEED) - 1), st.integers(0, 255)), max_size=6),
       st.integers(0, len(SEED)), st.booleans())
def test_random_damage_never_gives_anything_but_a_checkpoint_error(tmp_path_factory, flips, length, cut):
    data = bytearray(SEED)
    for place, value in flips:
        data[place] = value
    path = tmp_path_factory.getbasetemp() / "fuzz.gguf"
    path.write_bytes(data[:length] if cut else data)
    tracemalloc.start()
    try:
        with at_most(1), open_checkpoint(path) as checkpoint:
            for name in checkpoint.names:
                checkpoint.tensor(name)
    except CheckpointError as error:
        assert "fuzz.gguf" in str(error) or "general.architecture" in str(error) or "llama." in str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 2 * MEBI


# Split files


def split(folder: Path, parts: int) -> list[Path]:
    weights, metadata = list(as_gguf(tiny_weights()).items()), tiny_llama_metadata()
    paths = []
    for i in range(parts):
        extra = {"split.no": i, "split.count": parts, "split.tensors.count": len(weights)}
        paths.append(write_gguf(folder / f"tiny-{i + 1:05d}-of-{parts:05d}.gguf",
                                {**metadata, **extra} if i == 0 else {**LLAMA, **extra}, dict(weights[i::parts])))
    return paths


@pytest.mark.parametrize("named", [0, 2])
def test_a_split_model_is_one_checkpoint_whichever_part_is_named(tmp_path, named):
    whole = open_checkpoint(tiny_llama_gguf(tmp_path / "whole.gguf"))
    (tmp_path / "parts").mkdir()
    joined = open_checkpoint(split(tmp_path / "parts", 3)[named])
    assert joined.names == whole.names and joined.config == whole.config
    assert all(bytes(joined.tensor(n).data) == bytes(whole.tensor(n).data) for n in whole.names)
    assert open_checkpoint(tmp_path / "parts").names == whole.names


def test_a_missing_part_is_named(tmp_path):
    paths = split(tmp_path, 3)
    paths[1].unlink()
    with pytest.raises(CheckpointError, match="missing beside it: tiny-00002-of-00003.gguf"):
        open_checkpoint(paths[0])


def test_parts_that_were_renamed_or_mixed_are_refused(tmp_path):
    paths = split(tmp_path, 2)
    lone = tmp_path / "lone.gguf"
    lone.write_bytes(paths[0].read_bytes())
    with pytest.raises(CheckpointError, match="one of 2 parts"):
        open_checkpoint(lone)
    paths[1].write_bytes(paths[0].read_bytes())
    with pytest.raises(CheckpointError, match="says it is part 0"):
        open_checkpoint(paths[0])


def test_a_tensor_in_two_parts_and_a_part_that_lacks_one_are_refused(tmp_path):
    def part(i, tensors, total=2):
        write_gguf(tmp_path / f"m-{i + 1:05d}-of-00002.gguf",
                   {**LLAMA, "split.no": i, "split.count": 2, "split.tensors.count": total}, tensors)
    one = {"a": np.ones(1, np.float32)}
    part(0, one)
    part(1, one)
    with pytest.raises(CheckpointError, match="'a' is in m-00001-of-00002.gguf and in m-00002"):
        open_checkpoint(tmp_path)
    part(1, {"b": np.ones(1, np.float32)})
    assert open_checkpoint(tmp_path).names == {"a", "b"}
    part(1, {})
    with pytest.raises(CheckpointError, match="2 tensors are announced, the parts hold 1"):
        open_checkpoint(tmp_path)


# Rows of q and k


def test_weights_come_back_in_the_order_of_hugging_face(tmp_path):
    checkpoint, weights = open_checkpoint(tiny_llama_gguf(tmp_path / "tiny.gguf")), tiny_weights()
    assert checkpoint.names == set(weights)
    for name, value in weights.items():
        raw_tensor = checkpoint.tensor(name)
        assert (raw_tensor.dtype, raw_tensor.shape) == ("f32", value.shape) == checkpoint.describe(name)
        assert raw_tensor.data.tobytes() == value.tobytes(), name
    assert checkpoint.nbytes == sum(v.nbytes for v in weights.values())
    assert checkpoint.formats() == {"f32": len(weights)}
    assert checkpoint.census() == {"f32": sum(value.size for value in weights.values())}


@pytest.mark.parametrize("kind", ["Q4_1", "Q8_0", "Q5_0", "BF16"])
def test_rows_of_blocks_are_put_in_order_without_unpacking(tmp_path, kind):
    kind = gguf.GGMLQuantizationType[kind]
    rows = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    values = {}
    for name, heads in (("attn_q", HEADS), ("attn_k", KV_HEADS), ("attn_v", 1)):
        order = interleaved(rows, heads) if name != "attn_v" else rows
        data = gguf.quants.quantize(order, kind).tobytes()
        values[f"blk.0.{name}.weight"] = Stored(kind.name.lower(), (32, 64), data)
    with open_checkpoint(write_gguf(tmp_path / "m.gguf", tiny_llama_metadata(), values)) as checkpoint:
        for name in ("q_proj", "k_proj", "v_proj"):
            data = checkpoint.tensor(f"model.layers.0.self_attn.{name}.weight").data
            assert data.tobytes() == gguf.quants.quantize(rows, kind).tobytes()


def test_biases_are_put_in_order_too(tmp_path):
    bias = np.arange(32, dtype=np.float32)
    path = write_gguf(tmp_path / "m.gguf", tiny_llama_metadata(), {"blk.0.attn_q.bias": interleaved(bias, HEADS)})
    checkpoint = open_checkpoint(path)
    assert checkpoint.tensor("model.layers.0.self_attn.q_proj.bias").data.tobytes() == bias.tobytes()
    assert checkpoint.config["attention_bias"] is True


def test_other_architectures_keep_their_rows(tmp_path):
    rows = np.arange(32 * 4, dtype=np.float32).reshape(32, 4)
    metadata = {"general.architecture": "qwen2", "qwen2.attention.head_count": 4}
    checkpoint = open_checkpoint(write_gguf(tmp_path / "m.gguf", metadata, {"blk.0.attn_q.weight": rows}))
    assert checkpoint.tensor("model.layers.0.self_attn.q_proj.weight").data.tobytes() == rows.tobytes()


@pytest.mark.parametrize("shape, heads", [((30, 4), 4), ((32, 4), 0), ((4, 4), 4), ((), 4)])
def test_rows_that_heads_cannot_share_are_refused(tmp_path, shape, heads):
    metadata = {**LLAMA, "llama.attention.head_count": heads}
    path = write_gguf(tmp_path / "m.gguf", metadata, {"blk.0.attn_q.weight": np.ones(shape, np.float32)})
    with pytest.raises(CheckpointError, match=f"{heads} heads of an even size"):
        open_checkpoint(path)


# Life cycle


def test_views_outlive_the_checkpoint(tmp_path):
    checkpoint = open_checkpoint(tiny_llama_gguf(tmp_path / "tiny.gguf"))
    view = checkpoint.tensor("model.norm.weight").data
    checkpoint.close()
    assert view.view("<f4").tolist() == [1.0] * 32
    with pytest.raises(CheckpointError, match="has no tensor 'model.norm.weight'"):
        checkpoint.tensor("model.norm.weight")


def test_views_are_read_only_views_of_the_file(tmp_path):
    with open_checkpoint(tiny_llama_gguf(tmp_path / "tiny.gguf")) as checkpoint:
        data = checkpoint.tensor("model.embed_tokens.weight").data
        assert not data.flags.writeable and not data.flags.owndata
        del data


def test_two_names_of_one_tensor_are_refused(tmp_path):
    one = np.ones(1, np.float32)
    path = write_gguf(tmp_path / "m.gguf", LLAMA, {"blk.1.ffn_norm.weight": one, "blk.01.ffn_norm.weight": one})
    with pytest.raises(CheckpointError, match="model.layers.1.post_attention_layernorm.weight"):
        open_checkpoint(path)


def test_layers_of_the_tiny_model_are_all_there(tmp_path):
    names = open_checkpoint(tiny_llama_gguf(tmp_path / "tiny.gguf")).names
    assert sum("input_layernorm" in n for n in names) == LAYERS


# Real vocabularies, where the shared test data is at hand

VOCABULARIES = Path(__file__).parents[2] / "shared" / "data" / "llama_cpp_models" / "models"


@pytest.mark.parametrize("name, model, size", [("gpt-2", "gpt2", 50257), ("llama-spm", "llama", 32000),
                                               ("starcoder", "gpt2", 49152), ("phi-3", "llama", 32064)])
def test_real_vocabularies_are_read(name, model, size):
    path = VOCABULARIES / f"ggml-vocab-{name}.gguf"
    if not path.is_file():
        pytest.skip(f"no {path}")
    checkpoint = open_checkpoint(path)
    assert checkpoint.metadata["tokenizer.ggml.model"] == model and checkpoint.names == frozenset()
    assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == checkpoint.config["vocab_size"] == size
