"""xgrammar as a grammar backend, where it is installed: it allows what the rules allow, and is bounded."""
from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys

import jsonschema
import numpy as np
import pytest
from isthmus.core.errors import IsthmusError
from isthmus.core.grammar.contract import COMPLETE, GOES_ON, REFUSED, GrammarError
from isthmus.core.grammar.library import Library, open_backend
from isthmus.core.grammar.vocabulary import Vocabulary
from isthmus.core.messages import GrammarSpec

from .effort import at_most
from .json_schema_suite import END, Bytes, Group, allows, judge, next_tokens, read_groups, sentence, tool_schemas
from .test_ebnf import OPEN
from .test_grammar import allowed, generate, spelled
from .test_json_schema import CHECKER, DRAFTS, OWN, SUITE, TOOLS
from .vocabularies import byte_level, sentencepiece, tokenizer_of

COST = 3  # seconds; some 30 where xgrammar is installed

FOUND = importlib.util.find_spec("xgrammar") is not None
needs_xgrammar = pytest.mark.skipif(not FOUND, reason="xgrammar is not installed; pip install isthmus[xgrammar]")


@pytest.fixture(scope="module")
def backend():
    return open_backend("xgrammar", Bytes())


@needs_xgrammar
@pytest.mark.parametrize("number", range(len(OWN)))
def test_our_own_sample(backend, number):
    schema, valid, invalid = OWN[number]
    tests = [("valid", each, True) for each in valid] + [("invalid", each, False) for each in invalid]
    verdict = judge(backend, Group("", "", schema, tests))
    if not verdict.refused:
        assert verdict == ("", [], [])
        grammar, rng = backend.compile("json_schema", json.dumps(schema)), random.Random(number)
        for text in filter(None, (sentence(grammar, rng) for _ in range(4))):
            jsonschema.validate(json.loads(text), schema, format_checker=CHECKER)


@needs_xgrammar
@pytest.mark.parametrize("draft", DRAFTS)
def test_the_suite(backend, draft):
    """No invalid instance of any schema that is taken."""
    if not (SUITE / draft).is_dir():
        pytest.skip(f"no {SUITE / draft}")
    verdicts = [(group, judge(backend, group)) for group in read_groups(SUITE / draft)]
    assert [(group.file, group.name, name) for group, verdict in verdicts for name in verdict.wrong] == []
    assert sum(not verdict.refused for _, verdict in verdicts) >= 0.3 * len(verdicts)


@needs_xgrammar
def test_real_tools(backend):
    if not TOOLS.is_dir():
        pytest.skip(f"no {TOOLS}")
    taken, rng = 0, random.Random(1)
    schemas = list(tool_schemas(TOOLS, 150))
    for schema in schemas:
        try:
            grammar = backend.compile("json_schema", json.dumps(schema))
        except GrammarError:
            continue
        taken += 1
        text = sentence(grammar, rng, 800)
        if text is not None:
            jsonschema.Draft202012Validator(schema, format_checker=CHECKER).validate(json.loads(text))
    assert taken >= 0.95 * len(schemas)


@needs_xgrammar
@pytest.mark.parametrize("tokens", [byte_level, sentencepiece])
def test_masks_of_a_vocabulary(tokens):
    """What a mask allows is accepted and nothing else is; an end is allowed where the text is whole."""
    tokenizer = tokenizer_of(tokens())
    backend = open_backend("xgrammar", Vocabulary(tokenizer, tokenizer.vocab_size + 40, tokenizer.eos_ids))
    for text in ("naïve café", "\U0001F98A fox", 'say "hi"'):
        assert generate(backend, "choice", json.dumps([text]), random.Random(1)) == text
    matcher = backend.compile("json_schema", json.dumps(OPEN)).start()
    for token in spelled(backend, '{"b": [1, "x'):
        mask = set(allowed(backend, matcher))
        ordinary = set(range(tokenizer.vocab_size)) - {*backend.vocabulary.special}
        assert {i for i in ordinary if matcher.clone().accept(i)} == mask and token in mask
        assert matcher.accept(token)
    assert not mask & {*backend.vocabulary.eos, *backend.vocabulary.special}


@needs_xgrammar
def test_a_matcher_goes_back_and_is_copied(backend):
    grammar = backend.compile("choice", '["ab", "ac"]')
    matcher, other = grammar.start(), grammar.start()
    assert matcher.accept(ord("a")) and matcher.forced() == [] and not matcher.is_complete()
    copy = matcher.clone()
    assert copy.accept(ord("c")) and copy.is_complete() and not matcher.is_complete()
    matcher.rollback(1)
    assert next_tokens(matcher) == next_tokens(other) == [ord("a")]
    assert backend.accept([matcher, other], [ord("a"), ord("b")]).tolist() == [GOES_ON, REFUSED]
    assert backend.accept([matcher], [ord("b")]).tolist() == [COMPLETE]
    assert next_tokens(matcher) == [END] and matcher.accept(END) and matcher.is_complete()
    assert next_tokens(matcher) == [END] and not matcher.accept(END)
    bits = np.zeros((2, 9), np.uint32)
    backend.fill([copy, grammar.start()], bits)
    assert np.unpackbits(bits.view(np.uint8), axis=1, bitorder="little").sum(1).tolist() == [1, 1]


HOSTILE = [
    {"type": "string", "maxLength": 10**8}, {"type": "string", "minLength": 4000}, {"pattern": "x{200}y{200}"},
    {"type": "array", "items": {"type": "integer"}, "maxItems": 10**6}, {"pattern": ".*a" * 30},
    {"pattern": "(a|aa)+$"},
    {"type": "array", "items": {"type": "object"}, "minItems": 200}, {"enum": [f"word {i}" for i in range(3000)]},
    {"anyOf": [{"type": "string", "maxLength": i + 1} for i in range(60)]}, {"pattern": "((a+)+)+b"},
    {"type": "object", "properties": {f"p{i}": {"type": "string", "pattern": "^[a-z]+@"} for i in range(60)}},
    {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [
        {"type": "array", "items": {"$ref": "#/$defs/a"}, "maxItems": i} for i in range(9)]}}}]


@needs_xgrammar
@pytest.mark.parametrize("schema", HOSTILE, ids=lambda schema: json.dumps(schema)[:40])
def test_hostile_schemas_are_bounded(backend, schema):
    """Compiled, filled and followed for a while, or refused."""
    rng = random.Random(0)
    with at_most(3):
        try:
            matcher = backend.compile("json_schema", json.dumps(schema)).start()
        except GrammarError:
            return
        for _ in range(40):
            if matcher.is_complete() or not matcher.accept(rng.choice(next_tokens(matcher))):
                break


@needs_xgrammar
@pytest.mark.parametrize("kind", ["regex", "grammar", "layout", "structural_tag"])
def test_what_it_is_not_given_is_refused_with_the_way_out(kind):
    tokenizer = tokenizer_of(byte_level())
    library = Library("xgrammar", lambda: Vocabulary(tokenizer, tokenizer.vocab_size, tokenizer.eos_ids))
    with pytest.raises(GrammarError, match=f"xgrammar cannot enforce .*{kind}.*--grammar-backend llguidance"):
        library.ask(GrammarSpec(kind, '"a"', "one")).result()
    library.close()


@needs_xgrammar
def test_nothing_imports_it_or_a_framework_until_it_is_chosen():
    code = ("import sys; import isthmus.core.engine; from isthmus.core.grammar import library, ebnf; "
            "sys.exit('torch' in sys.modules or 'xgrammar' in sys.modules)")
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.skipif(FOUND, reason="xgrammar is installed")
def test_where_it_is_not_installed_it_says_so():
    with pytest.raises(IsthmusError, match=r"xgrammar is not installed.*pip install"):
        open_backend("xgrammar", Bytes())


@needs_xgrammar
def test_an_instance_is_allowed_in_every_order_of_what_is_further(backend):
    grammar = backend.compile("json_schema", json.dumps(OPEN))
    assert allows(backend, grammar, {"b": 1, "x": 2, "c": 3}) and not allows(backend, grammar, {"x": 2, "b": 1})
