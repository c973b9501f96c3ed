"""Grammar backends by themselves: masks, ends, forced tokens and refusals, on real and on small vocabularies."""
from __future__ import annotations

import json
import random
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import llguidance
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from isthmus.core.errors import IsthmusError
from isthmus.core.grammar import library as library_module
from isthmus.core.grammar.contract import (
    BACKENDS,
    COMPLETE,
    FAILED,
    GOES_ON,
    KINDS,
    REFUSED,
    GrammarBackend,
    GrammarError,
)
from isthmus.core.grammar.library import Library, open_backend
from isthmus.core.grammar.schema import check
from isthmus.core.grammar.vocabulary import Vocabulary
from isthmus.core.messages import GrammarSpec
from isthmus.core.registry import RegistrationError
from isthmus.core.text import load_tokenizer
from isthmus.core.weights import open_checkpoint

from .vocabularies import byte_level, sentencepiece, tokenizer_of

COST = 20  # seconds

DATA = Path(__file__).resolve().parent.parent.parent / "shared" / "data"
AWKWARD = ['say "hi"', "back\\slash", "tab\tnew\nline", "\U0001F98A fox", "na\u00efve caf\u00e9", "\u65e5\u672c", "a/b",
           "{}", "\u2028sep", "", "<|im_end|>"]


@pytest.fixture(scope="module", params=["byte_level", "sentencepiece"])
def backend(request) -> GrammarBackend:
    tokenizer = tokenizer_of(byte_level() if request.param == "byte_level" else sentencepiece())
    return open_backend("llguidance", Vocabulary(tokenizer, tokenizer.vocab_size + 40, tokenizer.eos_ids))


def allowed(backend: GrammarBackend, matcher) -> list[int]:
    row = np.full(-(-backend.vocabulary.size // 32), 0xFFFFFFFF, np.uint32)
    matcher.fill(row)
    return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()


def spelled(backend: GrammarBackend, text: str) -> list[int]:
    """One byte a token."""
    single = {piece: id for id, piece in reversed(list(enumerate(backend.vocabulary.tokens)))
              if id not in backend.vocabulary.special}
    return [single[bytes([byte])] for byte in text.encode()]


def accepts(backend: GrammarBackend, kind: str, source: str, text: str) -> bool:
    """Whether a text is a whole sentence, spelled byte by byte. Masks may allow less: of a forced text one spelling."""
    matcher, ends = backend.compile(kind, source).start(), set(backend.vocabulary.eos)
    for token in spelled(backend, text):
        fits = token in allowed(backend, matcher)
        if not matcher.accept(token):
            assert not fits
            return False
    return bool(ends & set(allowed(backend, matcher)))


def generate(backend: GrammarBackend, kind: str, source: str, rng: random.Random, most: int = 400) -> str | None:
    """A random sentence; None when it has not ended in time."""
    matcher, out, ends = backend.compile(kind, source).start(), [], set(backend.vocabulary.eos)
    for _ in range(most):
        choices = allowed(backend, matcher)
        assert choices, "nothing may follow"
        token = rng.choice([t for t in choices if t in ends] * 3 + choices)
        if token in ends:
            return b"".join(backend.vocabulary.tokens[t] for t in out).decode()
        assert matcher.accept(token)
        out.append(token)
        if matcher.is_complete():
            return b"".join(backend.vocabulary.tokens[t] for t in out).decode()
    return None


# ---- sentences

@pytest.mark.parametrize(("kind", "source", "right", "wrong"), [
    ("regex", "[ab]{2,3}", ["ab", "aba"], ["a", "abab", "ac", ""]),
    ("regex", "^(yes|no)$", ["yes", "no"], ["yesno", "y"]),
    ("regex", r"\d", ["7"], ["\U0001FBF8", "\u0663", "a"]), ("regex", r"\w", ["a", "Z", "0", "_"], ["\xe9", "-"]),
    ("regex", r"\s", [" ", "\n", "\v"], ["\xa0", "\u2003"]),
    ("regex", r"\D\W\S", ["\u0663\xe9\xa0"], ["7-a", "aaa", "a- "]),
    ("regex", r"[+-\d\\d]", ["+", "-", "7", "d", "\\"], ["\u0663", "[", "]", ","]),
    ("regex", r"[\w--\d]", ["a"], ["7", "-"]),
    ("regex", r"[^\d\s]-\d", ["a-7"], ["7-7", " -7", "a-\u0663"]), ("regex", r"\\d\--\d", ["\\d--7"], ["7--7"]),
    ("choice", '["a", "ab", "b"]', ["a", "ab", "b"], ["", "ba", "abb"]),
    ("json_object", "", ['{"a": [1, null, {"b": "c"}]}', "{}", '{\n  "a": 1.5e3\n}'],
     ["[]", "1", "{", '{"a":}', "{}}"]),
    ("json_schema", '{"type": "integer", "minimum": 3}', ["3", "44"], ["2", "-3", "4.5", '"4"']),
    ("json_schema", r'{"type": "string", "pattern": "^[+-\\s]\\d\\w$"}', ['"+7a"', '"-7a"', '"\xa07a"'],
     ['"\x2c7a"', '"[7a"', '"+\u0663a"', '"+7\xe9"']),
    ("json_schema", '{"type": "string", "pattern": "^a\\\\sb$"}', ['"a b"', '"a\ufeffb"'], ['"ab"', '"a\u0085b"']),
    ("json_schema", '{"format": "date"}', ['"2024-02-29"', "5"], ['"2023-02-29"', '"0000-01-01"', '"2024-13-01"']),
    ("json_schema", '{"type": "string", "format": "date-time"}',
     ['"2024-02-29T23:59:59.5Z"', '"2024-01-01T00:00:00+01:30"'],
     ['"2024-01-01"', '"2024-01-01T23:59:60Z"', '"2024-01-01T24:00:00Z"']),
    ("json_schema", '{"type": "string", "format": "hostname"}', ['"a-b.example"'], ['"-a"', '"xn--a"', '"a..b"']),
    ("grammar", 'root ::= "a" ("," root)?', ["a", "a,a"], ["", "a,", ",a"]),
    ("grammar", 'root ::= ("a"*)* [)*]? # "(a*)*\n', ["", "a", "aaa*", ")"], ["b", "a**"]),
    ("grammar", 'root ::= (("a"+ )?) {2} b\nb ::= ("c"{1,2}\n)+ "\\"*)*"', ['c"*)*', 'aacccc"*)*'], ["a", '"*)*']),
    ("json_schema", '{"type": "string", "minLength": 1.0, "maxLength": 2.0}', ['"a"', '"ab"'], ['""', '"abc"']),
    ("grammar", 'start: "a" ("," start)?', ["a", "a,a"], ["", "a,", ",a"]),
    ("structural_tag", json.dumps({"triggers": ["<f"], "structures": [
        {"begin": "<f=a>", "schema": {"type": "boolean"}, "end": "</f>"}]}),
     ["", "free text", "x <f=a>true</f> y <f=a>false</f>"], ["<f=b>", "<f=a>1", "<f=a>true</g>"])],
    ids=lambda v: v if isinstance(v, str) and len(v) < 20 else "")
def test_sentences(backend, kind, source, right, wrong):
    assert [accepts(backend, kind, source, text) for text in right] == [True] * len(right)
    assert [accepts(backend, kind, source, text) for text in wrong] == [False] * len(wrong)


@pytest.mark.parametrize("text", AWKWARD)
def test_awkward_words_are_themselves(backend, text):
    rng = random.Random(1)
    assert generate(backend, "choice", json.dumps([text]), rng) == text
    schema = {"type": "object", "properties": {"x": {"enum": [text]}}, "required": ["x"], "additionalProperties": False}
    assert json.loads(generate(backend, "json_schema", json.dumps(schema), rng)) == {"x": text}


def test_every_sentence_that_is_made_is_valid(backend):
    schema = {"type": "object", "required": ["id", "when", "tags"], "additionalProperties": False, "properties": {
        "id": {"type": "integer", "minimum": -5, "maximum": 12}, "when": {"type": "string", "format": "date"},
        "tags": {"type": "array", "items": {"enum": AWKWARD[:6]}, "maxItems": 3},
        "more": {"oneOf": [{"type": "null"}, {"type": "string", "maxLength": 3}]}}}
    rng = random.Random(7)
    made = [generate(backend, "json_schema", json.dumps(schema), rng) for _ in range(12)]
    assert sum(text is not None for text in made) > 6
    for text in filter(None, made):
        jsonschema.validate(json.loads(text), schema, format_checker=jsonschema.FormatChecker())
    for text in filter(None, (generate(backend, "regex", r"(\d{1,3}\.){3}\d{1,3}", rng) for _ in range(5))):
        assert re.fullmatch(r"(\d{1,3}\.){3}\d{1,3}", text)


def test_the_end_is_allowed_exactly_where_the_grammar_may_end(backend):
    matcher, ends = backend.compile("regex", "a(bc)?").start(), set(backend.vocabulary.eos)
    seen = []
    for token in spelled(backend, "abc"):
        seen.append(bool(ends & set(allowed(backend, matcher))))
        matcher.accept(token)
    assert seen == [False, True, False] and matcher.is_complete()
    assert set(allowed(backend, matcher)) == ends


def test_no_control_token_and_no_id_past_the_vocabulary_is_ever_allowed(backend):
    vocabulary = backend.vocabulary
    may = set(allowed(backend, backend.compile("regex", "(.|\n)*").start()))
    assert may & vocabulary.special == set(vocabulary.eos) and max(may) < len(vocabulary.tokens)


# ---- matchers

def test_rollback_clone_and_forced_tokens(backend):
    matcher = backend.compile("regex", "(hello|hallo) there").start()
    start = allowed(backend, matcher)
    assert matcher.forced() in ([], spelled(backend, "h"))
    for token in spelled(backend, "he"):
        assert matcher.accept(token)
    copy = matcher.clone()
    run = matcher.forced()
    assert allowed(backend, matcher) == run[:1]
    assert b"".join(backend.vocabulary.tokens[t] for t in run).startswith(b"llo")
    for token in run:
        assert token in allowed(backend, copy) and copy.accept(token)
    matcher.rollback(2)
    assert allowed(backend, matcher) == start
    with pytest.raises(ValueError, match="cannot be taken back"):
        matcher.rollback(5)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_batch_is_as_its_rows(backend, threads, monkeypatch):
    if threads > 1:
        monkeypatch.setattr("isthmus.core.grammar.guidance.ROWS", 2)
        monkeypatch.setattr(backend, "_threads", llguidance.LLExecutor(threads))
    sources = [("regex", "[ab]{3}"), ("json_object", ""), ("choice", '["x", "yy"]'), ("regex", "[ab]{3}")]
    matchers = [backend.compile(*each).start() for each in sources]
    alone = [m.clone() for m in matchers]
    for _ in range(6):
        bits = np.zeros((4, -(-backend.vocabulary.size // 32)), np.uint32)
        backend.fill(matchers, bits)
        rows = [np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist() for row in bits]
        assert rows == [allowed(backend, m) for m in alone]
        tokens = [row[-1] if row[-1] not in backend.vocabulary.eos else row[0] for row in rows]
        said = backend.accept(matchers, tokens)
        assert said.dtype == np.int8
        for matcher, token, word in zip(alone, tokens, said.tolist(), strict=True):
            assert matcher.accept(token) == (word != REFUSED)
            assert word == REFUSED or matcher.is_complete() == (word == COMPLETE)
        going = [i for i, word in enumerate(said.tolist()) if word == GOES_ON]
        if len(going) < 4:
            break
    refused = backend.accept([backend.compile("regex", "a").start()], spelled(backend, "b"))
    assert refused.tolist() == [REFUSED]


def test_a_matcher_in_a_bad_way_allows_nothing(backend):
    matcher = backend.compile("regex", "ab").start()
    assert not matcher.accept(spelled(backend, "z")[0])
    assert allowed(backend, matcher) == [] and not matcher.is_complete()
    bits = np.full((2, -(-backend.vocabulary.size // 32)), 7, np.uint32)
    backend.fill([matcher, backend.compile("regex", "ab").start()], bits)
    assert not bits[0].any() and bits[1].any()


# ---- refusals

@pytest.mark.parametrize(("kind", "source", "words"), [
    ("json_schema", '{"type": "strng"}', "strng"), ("json_schema", '{"pattern": "[a-z"}', "unclosed"),
    ("json_schema", '{"properties": {"a": {"items": {"not": {}}}}}', "$.properties.a.items: the keyword not"),
    ("json_schema", '{"anyOf": [{}, {"if": {}}]}', "$.anyOf[1]: the keyword if"),
    ("json_schema", '{"$defs": {"x": {"contains": {}}}}', "$.$defs.x: the keyword contains"),
    ("json_schema", '{"x-guidance": {"lenient": true}}', "x-guidance"), ("json_schema", "false", "false"),
    ("json_schema", '{"$defs": {"x": {"$id": "y"}}}', "$id"), ("json_schema", "[]", "an object or a boolean"),
    ("json_schema", "{", "not valid JSON"), ("json_schema", '{"format": "made-up"}', "made-up"),
    ("json_schema", '{"properties": {"k": {"oneOf": [{"type": "string"}, {"minLength": 2}]}}}',
     "$.properties.k: oneOf is"),
    ("json_schema", '{"items": {"anyOf": [{"type": "null"}, {"type": "integer", "multipleOf": 0}]}}',
     "$.items.anyOf[1]: multipleOf must"),
    ("json_schema", '{"items": {"type": "integer", "multipleOf": 2147483648}}', "$.items: multipleOf 2147483648"),
    ("grammar", 'start: %json {"type": "integer", "multiple\\u004ff": 2147483648}', "multipleOf inside of %json"),
    ("json_schema", '{"type": "integer", "allOf": [{"multipleOf": 9973}, {"multipleOf": 9967}]}',
     "]: multipleOf 99"), ("json_schema", '{"type": "number", "multipleOf": 1e-300}', "$: multipleOf has more digits"),
    ("json_schema", '{"type": "number", "minimum": 1e-300, "maximum": 1e300}',
     "$: minimum and maximum are too far apart"),
    ("json_schema", '{"properties": {"z": {"$ref": "#/$defs/a"}}, "$defs": {"a": {"multipleOf": 0}}}',
     "(in #/$defs/a)"),
    ("json_schema", '{"properties": {"z": {"maxLength": -3}}}', "$.properties.z: a whole number"),
    ("structural_tag", '{"structures": [{"begin": "<a>"}, {"begin": "<b>", "schema": {"items": {"multipleOf": 0}}}], '
     '"triggers": ["<"]}', "structures[1].schema: $.items: multipleOf must"),
    ("json_schema", '{"enum": []}', "nsatisfiable"),
    ("json_schema", '{"prefixItems": [{"$ref": "https://example.com/a"}]}',
     "$.prefixItems[0]: $ref 'https://example.com/a' leads to another document"),
    ("json_schema", '{"type": "integer", "minimum": 5, "maximum": 3}', "minimum (5)"),
    ("json_schema", '{"items": ' * 80 + "{}" + "}" * 80, "too large"),
    ("json_schema", json.dumps({"properties": {str(i): {} for i in range(2000)}}), "properties has 2000 entries"),
    ("regex", "a{2}{3", "repetition"), ("regex", "(?=a)", "look-around"),
    ("regex", r"\bword\b", "not supported"),
    ("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000, "nested too deeply"),
    ("grammar", "root ::= [^]", "unclosed character class"), ("grammar", "root ::= root", "no text satisfies it"),
    ("regex", "((((((a{10}){10}){10}){10}){10}){10}){10}", "it is too complex"),
    ("regex", "a{1000000}", "it is too complex"),
    ("grammar", "root ::= missing", "missing"), ("grammar", "nothing", ""), ("structural_tag", "{}", "structures"),
    ("structural_tag", '{"structures": [{"begin": "<a>", "schema": {"not": {}}}], "triggers": ["<"]}',
     "structures[0].schema: $: the keyword not"),
    ("structural_tag", '{"structures": [{"begin": "<a>"}], "triggers": []}', "triggers"),
    ("novel", "", "novel")], ids=lambda v: v[:40])
def test_what_cannot_be_honoured_is_refused_in_words(backend, kind, source, words):
    with pytest.raises(GrammarError) as caught:
        backend.compile(kind, source)
    assert words in str(caught.value) and len(str(caught.value)) < 800
    assert kind != "regex" or "start:" not in str(caught.value) and not str(caught.value).startswith("at ")
    for inside in ("backtrace", "option", "limits.", "Lark", "llguidance", "registry", "fuel", "recursion", "Some("):
        assert inside not in str(caught.value)
    assert caught.value.status == 400


@pytest.mark.parametrize(("kind", "source"), [
    ("regex", "a*" * 4000), ("grammar", "root ::= " + "[" * 16000),
    ("grammar", "\n" * 16000), ("grammar", "\n" * 16000 + 'root ::= "a"'),
    ("regex", "((a{1,100}){1,100}){1,100}"), ("regex", "(a|b|ab)*" * 300), ("regex", "(" * 5000 + "a" + ")" * 5000),
    ("grammar", "root ::= " + "(" * 3000 + '"a"' + ")" * 3000), ("grammar", 'root ::= root root | "a"'),
    ("grammar", "\n".join(f'r{i} ::= r{i + 1} r{i + 1} | "a"' for i in range(2000)) + '\nr2000 ::= "b"\nroot ::= r0'),
    ("grammar", "start: " + " | ".join(f'"{i}"' for i in range(20000))),
    ("json_schema", json.dumps({"type": "string", "pattern": "^" + "(a?){200}" + "a{200}$"})),
    ("json_schema", json.dumps({"anyOf": [{"properties": {f"p{i}": {"type": "string"}}} for i in range(300)]})),
    ("json_schema", json.dumps({"type": "array", "minItems": 10**6, "items": {"type": "integer"}})),
    ("json_schema", json.dumps({"type": "string", "maxLength": 10**8}))], ids=lambda v: v[:30])
def test_hostile_grammars_are_bounded(backend, kind, source):
    """Compiled, filled and followed for a while, or refused; none takes the process with it."""
    try:
        matcher = backend.compile(kind, source).start()
    except GrammarError:
        return
    rng = random.Random(0)
    for _ in range(20):
        choices = allowed(backend, matcher)
        if not choices or matcher.is_complete():
            break
        if not matcher.accept(rng.choice(choices)):
            break


@pytest.mark.parametrize("source", ['root ::= "a" root', 'start: "a" start', 'root ::= "a"{1000000}'])
def test_a_text_that_is_forced_without_end_can_be_followed(backend, source):
    matcher = backend.compile("grammar", source).start()
    for _ in range(300):
        assert allowed(backend, matcher) and matcher.accept(spelled(backend, "a")[0])


def test_what_is_too_complex_from_the_second_token_on_is_found_when_it_is_compiled(backend, monkeypatch):
    filled, inner = [], llguidance.LLMatcher.unsafe_compute_mask_ptr
    backend.compile("regex", "[a-f]{9}")

    def fill(self, row):
        inner(self.state, row.ctypes.data, row.nbytes)
        filled.append(row)
        if len(filled) > 2:
            row[:] = 0
    monkeypatch.setattr("isthmus.core.grammar.guidance.Guided.fill", fill)
    with pytest.raises(GrammarError):
        backend.compile("regex", "[a-f]{9}")


def test_a_token_that_a_limit_does_not_let_pass_is_told_from_a_wrong_one(backend):
    spells = {token: spelled(backend, token)[0] for token in "abz"}
    matcher = backend.compile("grammar", 'root ::= "z" | "b" inner\ninner ::= "a" inner').start()
    wrong = backend.accept([matcher.clone()], [spells["a"]])
    assert backend.accept([matcher], [spells["b"]]).tolist() == [GOES_ON]
    matcher.forced()  # without end
    failed = backend.accept([matcher], [spells["a"]])
    assert wrong.tolist() == [REFUSED] and failed.tolist() == [FAILED]


PIECES = st.sampled_from([*"ab(){}[]|*+?.^$\\-,:=\"'/ \n", "::=", "root", "start:", "a{1,9}", "\\d", "%json", "<[1]>",
                          "(?i)", "\ud800"])
KEYWORDS = ("type", "properties", "items", "enum", "pattern", "minLength", "maximum", "required", "anyOf", "$ref",
            "format", "additionalProperties", "prefixItems", "const", "multipleOf", "patternProperties", "allOf",
            "oneOf", "$defs")
WORDS = st.sampled_from(["object", "string", "array", "integer", "date", "a+", "#", "#/$defs/a", "a", "", "\ud800"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-9, 99) | st.floats() | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from([*KEYWORDS, "a"]), inner, max_size=4),
    max_leaves=12)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(kind=st.sampled_from(["regex", "grammar"]), pieces=st.lists(PIECES, max_size=30))
def test_any_text_is_a_grammar_or_refused(backend, kind, pieces):
    follow(backend, kind, "".join(pieces))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(schema=st.dictionaries(st.sampled_from(KEYWORDS), VALUES, max_size=4))
def test_any_object_is_a_schema_or_refused(backend, schema):
    follow(backend, "json_schema", json.dumps(schema))


def follow(backend, kind, source):
    """Some tokens of a grammar, if it is one."""
    try:
        matcher = backend.compile(kind, source).start()
    except GrammarError as error:
        assert len(str(error)) < 1000
        return
    for place in range(12):
        choices = allowed(backend, matcher)
        if not choices or matcher.is_complete() or not matcher.accept(choices[7 * place % len(choices)]):
            break


def test_schemas_are_made_exact():
    assert check('{"format": "date", "allOf": [{}]}')["allOf"][1]["pattern"].startswith("^(([1-9]")
    assert "\\s" not in check('{"pattern": "\\\\s"}')["pattern"]
    assert check('{"pattern": "a\\\\\\\\s"}')["pattern"] == "a\\\\s"
    assert check("true") == {} and check('{"items": {"multipleOf": 12e30}, "multipleOf": 0.07}')


# ---- vocabularies and the library

@pytest.mark.parametrize("name", ["gpt-2", "llama-spm", "starcoder", "phi-3"])
def test_real_vocabularies(name):
    path = DATA / "llama_cpp_models" / "models" / f"ggml-vocab-{name}.gguf"
    if not path.exists():
        pytest.skip(f"no {path}")
    with open_checkpoint(path) as checkpoint:
        tokenizer = load_tokenizer(checkpoint)
    vocabulary = Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids)
    assert vocabulary.spells
    backend = open_backend("llguidance", vocabulary)
    schema = {"type": "object", "properties": {"a_rather_long_name": {"enum": AWKWARD}, "n": {"type": "integer"}},
              "required": ["a_rather_long_name", "n"], "additionalProperties": False}
    rng, forced = random.Random(3), 0
    for _ in range(5):
        matcher, out = backend.compile("json_schema", json.dumps(schema)).start(), []
        while not matcher.is_complete() and len(out) < 300:
            run = matcher.forced()
            forced += len(run)
            token = run[0] if run else rng.choice([t for t in allowed(backend, matcher) if t not in vocabulary.eos])
            assert token in allowed(backend, matcher) and matcher.accept(token)
            out.append(token)
        text = tokenizer.join_bytes(out).decode()
        if matcher.is_complete():
            jsonschema.validate(json.loads(text), schema)
    assert forced > 10


def test_a_model_that_names_no_end_is_told():
    tokenizer = tokenizer_of(byte_level())
    with pytest.raises(GrammarError, match="needs a token that ends an output"):
        open_backend("llguidance", Vocabulary(tokenizer, tokenizer.vocab_size, ()))


def make_library(**more) -> Library:
    tokenizer = tokenizer_of(byte_level())
    return Library("llguidance", lambda: Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids))


def test_the_library_keeps_what_is_asked_for_again_and_no_more(monkeypatch):
    library = make_library()
    first = library.ask(GrammarSpec("regex", "a", "one")).result()
    assert library.ask(GrammarSpec("regex", "a", "other")).result() is first and library.compiled == 1
    bad = GrammarSpec("regex", "(a")
    for _ in range(2):
        with pytest.raises(GrammarError):
            library.ask(bad).result()
    assert library.compiled == 3
    monkeypatch.setattr(library_module, "KEPT", 4)
    for i in range(10):
        library.ask(GrammarSpec("regex", "b" * (i + 1))).result()
    assert len(library._kept) == 4 and library._bytes == sum(len(source) for _, source in library._kept)
    monkeypatch.setattr(library_module, "KEPT_BYTES", 30)
    library.ask(GrammarSpec("regex", "c" * 25)).result()
    assert library._bytes <= 30
    library.close()


def test_what_is_forgotten_is_compiled_anew():
    library, spec = make_library(), GrammarSpec("regex", "ab")
    first = library.ask(spec).result()
    for _ in range(2):
        library.forget(spec)
    assert not library._kept and library._bytes == 0
    assert library.ask(spec).result() is not first and library.compiled == 2


def test_a_backend_that_is_not_installed_says_how(monkeypatch):
    monkeypatch.setitem(library_module.PACKAGES, "other", ".no_such_module")
    with pytest.raises(IsthmusError, match="other is not installed: .*pip install other"):
        open_backend("other", None)
    with pytest.raises(RegistrationError, match="unknown grammar backend 'novel'"):
        open_backend("novel", None)


def test_a_registered_backend_must_compile():
    class Hollow(GrammarBackend):
        kinds = ("regex",)
    with pytest.raises(RegistrationError, match="compile"):
        BACKENDS.register("hollow", Hollow)
    assert "llguidance" in BACKENDS.names() and set(open_backend.__globals__["PACKAGES"]) >= {"llguidance"}
    assert set(KINDS) == {"json_object", "json_schema", "regex", "grammar", "choice", "structural_tag", "layout", "any"}


def test_nothing_of_it_is_imported_before_it_is_needed():
    code = ("import sys, isthmus.core.engine, isthmus.core.server.app, isthmus.core.cli.serve\n"
            "assert 'llguidance' not in sys.modules")
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", ["arithmetic", "c", "chess", "english", "japanese", "json", "json_arr", "list",
                                  "vllm-sql"])
def test_sample_grammars_of_others_are_taken(backend, name):
    path = DATA / "gbnf_samples" / f"{name}.gbnf"
    if not path.exists():
        pytest.skip(f"no {path}")
    matcher = backend.compile("grammar", path.read_text()).start()
    assert allowed(backend, matcher)
