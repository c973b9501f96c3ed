import json
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from isthmus.core.errors import CheckpointError, RequestError
from isthmus.core.text.folder_vocab import folder_vocab
from isthmus.core.text.tokenizer import GUARD, Tokenizer, load_tokenizer
from isthmus.core.weights.gguf import read_gguf
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Library

from .effort import at_most
from .vocabularies import CONTROL, USER, byte_level, sentencepiece, tokenizer_of

COST = 12  # seconds

VECTORS = Path(__file__).resolve().parent.parent.parent / "shared/data/llama_cpp_models/models"
MARK = "<|im_end|>"
SHARED, SHARED_SPM = tokenizer_of(byte_level()), tokenizer_of(sentencepiece())
TEXT = st.text(st.sampled_from("helo \n1é北🦊<|\x00")) | st.text(st.characters(exclude_characters="▁", codec="utf-8"))


@pytest.fixture(scope="module")
def tokenizer():
    return SHARED


@pytest.fixture(scope="module")
def spm():
    return SHARED_SPM


# ---- text and bytes ----

@settings(max_examples=200, deadline=None)
@given(TEXT)
def test_any_text_survives_the_round_trip(text):
    for tokenizer in (SHARED, SHARED_SPM):
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_leave_as_int32_arrays(tokenizer):
    ids = tokenizer.encode("hello")
    assert isinstance(ids, np.ndarray) and ids.dtype == np.int32 and ids.ndim == 1
    assert tokenizer.encode("").tolist() == [] and tokenizer.encode("").dtype == np.int32


def test_a_process_that_only_decodes_builds_no_encoder():
    metadata = byte_level(merges=["q zz"])
    checkpoint = SimpleNamespace(kind="gguf", metadata=metadata)
    assert load_tokenizer(checkpoint, encodes=False).decode([3 + ord("a")]) == "a"
    with pytest.raises(CheckpointError, match="malformed"):
        load_tokenizer(checkpoint)


def test_merges_and_digits_follow_the_named_split(tokenizer):
    spelled = [tokenizer.id_to_token(id) for id in tokenizer.encode("hello hello  12")]
    assert spelled == ["hello", "Ġhello", "ĠĠ", "1", "2"]


def test_every_byte_has_its_token(tokenizer, spm):
    for byte in range(256):
        assert tokenizer.token_bytes(3 + byte) == bytes([byte]) == spm.token_bytes(3 + byte)


def test_bytes_are_exact(tokenizer, spm):
    text = "hello 🦊 北\n"
    assert tokenizer.join_bytes(tokenizer.encode(text)) == text.encode()
    assert spm.join_bytes(spm.encode(text)) == b" " + text.encode()
    assert spm.token_bytes(spm.encode("hello")[0]) == b" hello"
    assert tokenizer.token_bytes(2) == MARK.encode()


def test_parts_of_characters_show_as_replacement(tokenizer):
    assert tokenizer.token_texts(tokenizer.encode("é")) == ["\ufffd", "\ufffd"]
    assert tokenizer.token_texts([2]) == [MARK]


def test_ids_outside_the_vocabulary(tokenizer):
    assert tokenizer.decode([tokenizer.vocab_size + 5, -1]) == ""
    for id in (-1, tokenizer.vocab_size):
        with pytest.raises(RequestError, match=f"token id {id} is out of range"):
            tokenizer.token_bytes(id)


def test_batch_equals_one_by_one(tokenizer):
    texts = ["hello", "", "🦊 " * 50, MARK]
    for parse in (False, True):
        rows = tokenizer.encode_batch(texts, parse_special=parse)
        assert [row.tolist() for row in rows] == [tokenizer.encode(t, parse_special=parse).tolist() for t in texts]


@pytest.mark.parametrize("text", ["cut \ud83d here", "\ude00", "\ude00\ud83d"])
def test_lone_surrogates_are_refused(tokenizer, text):
    with pytest.raises(RequestError, match="lone surrogate"):
        tokenizer.encode(text)


def test_the_longest_token_bounds_a_text(tokenizer):
    assert tokenizer.max_token_bytes == len("<|endoftext|>")


@pytest.mark.parametrize("text", ["a" * 100_000, " " * 100_000, "é" * 50_000, MARK * 10_000])
@pytest.mark.parametrize("parse", [False, True])
def test_long_texts_take_linear_time(tokenizer, spm, text, parse):
    def seconds(subject, text):
        start = time.process_time()  # in the library's threads too
        subject.encode(text, parse_special=parse)
        return time.process_time() - start

    for subject in (tokenizer, spm):
        short = min(seconds(subject, text[:len(text) // 10]) for _ in range(3))
        assert min(seconds(subject, text) for _ in range(2)) < 40 * short + 0.2


# ---- control tokens ----

def test_control_tokens_are_read_only_on_request(tokenizer):
    assert tokenizer.encode(MARK, parse_special=True).tolist() == [2]
    literal = tokenizer.encode(MARK)
    assert not set(literal.tolist()) & tokenizer.special_ids and tokenizer.decode(literal) == MARK


def test_user_defined_tokens_are_text(tokenizer):
    last = tokenizer.vocab_size - 1
    for parse in (False, True):
        assert tokenizer.encode("<think>", parse_special=parse).tolist() == [last]
    assert tokenizer.decode([last]) == "<think>" and last not in tokenizer.special_ids


def test_an_end_token_is_special_whatever_its_type():
    metadata = byte_level()
    metadata["tokenizer.ggml.token_type"][2] = USER
    tokenizer = tokenizer_of(metadata)
    assert 2 in tokenizer.special_ids and 2 not in tokenizer.encode(MARK)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.sampled_from([MARK, "<|im_start|>", "<|im_", "end|>", "<", "hello", " ", "<think>", "<<|im_end|>"]),
                max_size=8).map("".join))
def test_guarded_text_reads_as_literal_text_inside_a_prompt(text):
    tokenizer = SHARED
    guarded = tokenizer.guard(text)
    assert guarded.replace(GUARD, "") == text
    assert tokenizer.encode(guarded, parse_special=True).tolist() == tokenizer.encode(text).tolist()
    around = tokenizer.encode(f"<|im_start|>{guarded}<|im_end|>", parse_special=True)
    assert around.tolist() == [1, *tokenizer.encode(text).tolist(), 2]


def test_guard_leaves_other_text_alone(tokenizer):
    for text in ("", "hello", "<|im_", "<think>", "a < b | c"):
        assert tokenizer.guard(text) is text
    with pytest.raises(RequestError, match="FDD0"):
        tokenizer.guard(f"a{GUARD}b")


def test_a_control_token_of_one_character_is_never_read_from_text():
    metadata = byte_level()
    metadata["tokenizer.ggml.tokens"].append("\u2402")
    metadata["tokenizer.ggml.token_type"].append(CONTROL)
    tokenizer = tokenizer_of(metadata)
    last = tokenizer.vocab_size - 1
    for parse in (False, True):
        assert last not in tokenizer.encode(tokenizer.guard("a\u2402b"), parse_special=parse)


def test_guard_is_linear_in_hostile_text():
    metadata = byte_level()
    count = 5000
    metadata["tokenizer.ggml.tokens"] += [f"<|unused{i}|>" for i in range(count)]
    metadata["tokenizer.ggml.token_type"] += [CONTROL] * count
    tokenizer = tokenizer_of(metadata)
    tokenizer.guard("")
    with at_most(2):
        assert tokenizer.guard("<|" * 50_000) == "<|" * 50_000
    assert tokenizer.encode(tokenizer.guard("<|unused77|>"), parse_special=True).tolist() == \
        tokenizer.encode("<|unused77|>").tolist()


def test_skipping_control_tokens(tokenizer):
    ids = [1, *tokenizer.encode("hello").tolist(), 2]
    assert tokenizer.decode(ids) == "hello"
    assert tokenizer.decode(ids, skip_special=False) == "<|im_start|>hello<|im_end|>"


# ---- bos, eos, the leading space ----

def test_bos_and_eos_as_the_file_says(spm, tokenizer):
    assert spm.add_bos and spm.encode("hello", add_special=True)[0] == 1 and 1 not in spm.encode("hello")
    assert not tokenizer.add_bos and 1 not in tokenizer.encode("hello", add_special=True)
    both = tokenizer_of(byte_level(add_bos_token=True, add_eos_token=True))
    assert both.encode("", add_special=True).tolist() == [1, 2]
    assert both.encode("", add_special=True).dtype == np.int32


def test_end_ids_come_from_the_metadata_or_from_known_names():
    assert tokenizer_of(byte_level(eos_token_id=0)).eos_ids == (0, 2)
    assert tokenizer_of(byte_level(eos_token_id=0, eot_token_id=1)).eos_ids == (0, 1)
    assert tokenizer_of(byte_level()).eos_ids == (2,)


def test_the_space_that_sentencepiece_adds_goes_at_the_start_of_a_text_only(spm):
    assert spm.decode(spm.encode("hello hello")) == "hello hello"
    assert spm.decode(spm.encode("  hello")) == "  hello"
    assert spm.decode([1, *spm.encode("hello").tolist()]) == "hello"
    plain = tokenizer_of(sentencepiece(add_space_prefix=False))
    assert plain.decode(plain.encode(" hello")) == " hello" and plain.decode(plain.encode("hello")) == "hello"


def best_score_first(text: str, scores: dict[str, float]) -> list[str]:
    """SentencePiece's BPE as its paper states it, in quadratic time: join the best pair, the leftmost of equals."""
    symbols = list(text)
    while True:
        joined = [a + b for a, b in zip(symbols, symbols[1:], strict=False)]
        pairs = [(scores[whole], -i) for i, whole in enumerate(joined) if whole in scores]
        if not pairs:
            return symbols
        place = -max(pairs)[1]
        symbols[place:place + 2] = [symbols[place] + symbols[place + 1]]


@settings(max_examples=300, deadline=None)
@given(st.text("aheloxy ", max_size=24))
def test_scores_decide_as_in_sentencepiece(text):
    pieces = "a h e l o x y ▁ el he ll ▁h lo hel aa ▁he hello llo ▁hello aaaa xy yx xyx aha"
    tokenizer = tokenizer_of(sentencepiece(pieces, add_space_prefix=False))
    expected = best_score_first(text.replace(" ", "▁"), {piece: -i for i, piece in enumerate(pieces.split())})
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode(text)] == expected


# ---- files that are wrong ----

@pytest.mark.parametrize(("change", "message"), [
    ({"model": "t5"}, "unknown tokenizer 't5'"),
    ({"model": None}, "unknown tokenizer None"),
    ({"pre": "no-such-split"}, "unknown pre-tokenizer 'no-such-split'.*qwen2"),
    ({"pre": None}, "no tokenizer.ggml.pre"),
    ({"tokens": None}, "tokens must be a non-empty array"),
    ({"tokens": [1, 2]}, "tokens must be a non-empty array of str"),
    ({"merges": None}, "merges must be a non-empty array"),
    ({"merges": ["he"]}, "'he', which is not two tokens"),
    ({"merges": ["q zz"]}, "malformed"),
    ({"token_type": [1, 2, 3]}, "token_type has 3 entries for"),
    ({"eos_token_id": 10**6}, "eos_token_id is 1000000, but there are"),
    ({"bos_token_id": -1}, "bos_token_id is -1"),
    ({"add_bos_token": "yes"}, "add_bos_token must be true or false, not 'yes'"),
])
def test_bad_metadata_is_refused_by_name(change, message):
    metadata = {k: v for k, v in byte_level(**change).items() if v is not None}
    with pytest.raises(CheckpointError, match=message):
        tokenizer_of(metadata).prepare()


def test_endless_tokens_are_refused():
    with pytest.raises(CheckpointError, match="one of 2000 characters"):
        tokenizer_of(sentencepiece("a " + "b" * 2000)).prepare()


def test_sentencepiece_needs_scores():
    metadata = sentencepiece()
    del metadata["tokenizer.ggml.scores"]
    with pytest.raises(CheckpointError, match="scores is missing"):
        tokenizer_of(metadata).prepare()


@pytest.mark.skipif(not VECTORS.is_dir(), reason=f"no published test vectors in {VECTORS}")
@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "starcoder", "phi-3"])
def test_published_vectors(name):
    file = VECTORS / f"ggml-vocab-{name}.gguf"
    tokenizer = tokenizer_of(read_gguf(file).metadata)
    texts = (VECTORS / f"{file.name}.inp").read_bytes().decode().split("\n__ggml_vocab_test__\n")
    rows = (VECTORS / f"{file.name}.out").read_text().split("\n")
    assert len(texts) > 40
    for text, row in zip(texts, rows, strict=False):
        assert tokenizer.encode(text).tolist() == [int(id) for id in row.split()], text
        assert tokenizer.decode(tokenizer.encode(text)) == text


# ---- Hugging Face folders ----

def make_folder(path: Path, **settings_) -> Path:
    """A byte-level tokenizer whose added tokens lie beyond the model's vocabulary, as in Llama 3 and Qwen."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {text: i for i, text in enumerate([*alphabet, "he", "ll", "hell"])}
    library = Library(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l"), ("he", "ll")]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    for text, special in (("<s>", True), ("<think>", False), ("</s>", True), ("</think>", False)):
        library.add_tokens([AddedToken(text, special=special, normalized=not special)])
    bos = library.token_to_id("<s>")
    library.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    library.save(str(path / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"},
              "chat_template": "{{ messages[0].content }}", "tokenizer_class": "PreTrainedTokenizerFast"} | settings_
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [library.token_to_id("</s>"), 3]}))
    return path


def test_folder_equals_transformers(tmp_path):
    from transformers import AutoTokenizer
    folder = make_folder(tmp_path)
    theirs, ours = AutoTokenizer.from_pretrained(folder), Tokenizer(folder_vocab(folder))
    assert ours.vocab_size == len(theirs) and ours.bos_id == theirs.bos_token_id
    for text in ("hello hell", "<s>hello</s>", "a<think>b</think> c", "🦊\n"):
        ids = ours.encode(text, add_special=True, parse_special=True).tolist()
        assert ids == theirs(text).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)


def test_folder_keeps_control_tokens_out_of_plain_text(tmp_path):
    tokenizer = Tokenizer(folder_vocab(make_folder(tmp_path)))
    text = "<s></s><think>x</think>"
    literal, parsed = tokenizer.encode(text), tokenizer.encode(text, parse_special=True)
    ids = {name: tokenizer.vocab.texts.index(name) for name in ("<s>", "</s>", "<think>", "</think>")}
    assert parsed.tolist() == [ids["<s>"], ids["</s>"], ids["<think>"], tokenizer.encode("x")[0], ids["</think>"]]
    assert not set(literal.tolist()) & tokenizer.special_ids
    assert {ids["<think>"], ids["</think>"]} <= set(literal.tolist()) and tokenizer.decode(literal) == text


@pytest.mark.parametrize("odd", [-5, 10**12, 2**63, [2**80, True, None], "two", {}])
def test_odd_end_ids_are_left_out(tmp_path, odd):
    folder = make_folder(tmp_path)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": odd}))
    vocab = folder_vocab(folder)
    assert set(vocab.eos_ids) <= {vocab.texts.index("</s>"), 1}


def test_folder_settings(tmp_path):
    tokenizer = Tokenizer(folder_vocab(make_folder(tmp_path)))
    assert tokenizer.add_bos and not tokenizer.add_eos
    assert tokenizer.eos_ids == (tokenizer.vocab.texts.index("</s>"), 3)
    assert tokenizer.chat_template == "{{ messages[0].content }}"
    assert tokenizer.special_texts == {"bos_token": "<s>", "eos_token": "</s>"}
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert folder_vocab(tmp_path).chat_template == "from the file"
    assert not Tokenizer(folder_vocab(make_folder(tmp_path, add_bos_token=False))).add_bos
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "chat_template.jinja").unlink()
    assert folder_vocab(make_folder(tmp_path, chat_template=named)).chat_template == "D"
    assert folder_vocab(tmp_path).tool_template == "T"


def test_folder_of_the_sentencepiece_kind(tmp_path):
    vocab = {text: i for i, text in enumerate(["<unk>", "<s>", *(f"<0x{b:02X}>" for b in range(256)), "▁", "h", "▁h"])}
    library = Library(models.BPE(vocab=vocab, merges=[("▁", "h")], byte_fallback=True, unk_token="<unk>"))
    library.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    library.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                         decoders.Strip(" ", 1, 0)])
    library.add_special_tokens([AddedToken("<s>", normalized=True)])
    library.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(folder_vocab(tmp_path))
    assert [tokenizer.id_to_token(i) for i in tokenizer.encode("h hé")] == ["▁h", "▁h", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("h hé")) == "h hé"
    assert tokenizer.encode("<s>h", parse_special=True).tolist() == [1, *tokenizer.encode("h").tolist()]
    assert 1 not in tokenizer.encode(tokenizer.guard("<s>"), parse_special=True)


@pytest.mark.parametrize(("file", "content", "message"), [
    ("tokenizer.json", None, "no tokenizer.json"), ("tokenizer.json", "{", "tokenizer.json"),
    ("tokenizer_config.json", "[]", "must be a JSON object"), ("tokenizer_config.json", "{", "not valid JSON"),
])
def test_bad_folders_are_refused_by_name(tmp_path, file, content, message):
    make_folder(tmp_path)
    if content is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(content)
    with pytest.raises(CheckpointError, match=message):
        folder_vocab(tmp_path)


def test_an_unknown_decoder_is_refused(tmp_path):
    library = Library(models.WordPiece({"[UNK]": 0, "a": 1}, unk_token="[UNK]"))
    library.decoder = decoders.WordPiece()
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="the decoder WordPiece is of no known kind; known: ByteLevel"):
        folder_vocab(tmp_path)
    library.decoder = None
    library.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match="there is no decoder; known: ByteLevel"):
        folder_vocab(tmp_path)
