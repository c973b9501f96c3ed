"""Bad words, allowed tokens, logits processors and allowed template arguments: through the engine and over HTTP."""
from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import msgspec
import numpy as np
import pytest
from isthmus.core.api import config_of
from isthmus.core.engine import EngineCore
from isthmus.core.errors import ConfigError, RequestError
from isthmus.core.grammar import processors as processors_module
from isthmus.core.grammar.controls import ALL, Controlled, Phrases, forbid
from isthmus.core.grammar.processors import PROCESSORS, LogitsProcessor, load_processors
from isthmus.core.grammar.thinking import Anything
from isthmus.core.messages import ControlSpec, GrammarSpec, SamplingParams, Submit, pack_ids, unpack_ids
from isthmus.core.recording.rerun import rerun
from isthmus.core.scheduler.masks import Masks
from isthmus.platforms.null.platform import nearest, next_token
from starlette.testclient import TestClient

from .checkpoints import tiny_llama_gguf
from .fake_client import VOCAB, make_app

COST = 12  # seconds

PROMPT = [5, 6, 7]


class NotTwice(LogitsProcessor):
    """Forbids the last `count` tokens of the output, and biases one token."""

    def __init__(self, arguments, prompt, vocabulary):
        self.count, self.token = arguments.get("count", 1), arguments.get("token")
        self.value = arguments.get("value", 0)
        if not isinstance(self.count, int) or self.count < 0:
            raise ValueError("count must be a number of tokens")
        self.size = vocabulary().size if arguments.get("size") else 0

    def narrow(self, output, row):
        if self.count:
            forbid(row, output[-self.count:])

    def bias(self):
        return {} if self.token is None else {self.token: self.value}


class Broken(LogitsProcessor):
    """Fails at the third token."""

    def __init__(self, arguments, prompt, vocabulary):
        if arguments.get("at_once"):
            raise KeyError("private")

    def narrow(self, output, row):
        if len(output) == 2:
            raise KeyError("private")


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(PROCESSORS, "_entries", {"not-twice": NotTwice, "broken": Broken})


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> str:
    return str(tiny_llama_gguf(tmp_path_factory.mktemp("model") / "tiny.gguf"))


@pytest.fixture
def core(model):
    made = []

    def make(**settings) -> EngineCore:
        settings = {"model": model, "platform": "null", "kv_cache_memory": "8MiB",
                    "logits_processors": ("not-twice", "broken")} | settings
        made.append(EngineCore(config_of(**settings)))
        made[-1].cache.pool.strict = True
        return made[-1]
    yield make
    for engine in made:
        engine.close()


def submit(engine: EngineCore, id: str, controls: ControlSpec | None, prompt=PROMPT, **params) -> None:
    params = {"max_tokens": 24, "temperature": 0.0, "ignore_eos": True} | params
    engine.submit(Submit(id, pack_ids(prompt), SamplingParams(**params, controls=controls)))


def run(engine: EngineCore) -> dict[str, SimpleNamespace]:
    found: dict[str, SimpleNamespace] = {}
    while engine.has_work:
        for output in engine.step():
            one = found.setdefault(output.id, SimpleNamespace(ids=[], last=None))
            one.ids += unpack_ids(output.tokens).tolist()
            one.last = output
    return found


def oracle(vocab: int, allowed, count: int = 24, prompt=PROMPT) -> list[int]:
    """The null platform's greedy output where `allowed(output)` gives bool [vocab] at each step."""
    context = list(prompt)
    for _ in range(count):
        context.append(nearest(next_token(np.array(context), vocab), allowed(context[len(prompt):])))
    return context[len(prompt):]


def without(vocab: int, ids) -> np.ndarray:
    mask = np.ones(vocab, bool)
    mask[list(ids)] = False
    return mask


@pytest.mark.parametrize("overlap", [True, False])
def test_outputs_are_those_of_the_allowed_tokens_alone(core, overlap):
    """Requests of all kinds in one batch, each equal to what it would be with its own rule."""
    engine = core(overlap=overlap)
    vocab, eos = engine.info.vocab_size, set(engine.info.eos_ids)
    free = oracle(vocab, lambda _: without(vocab, eos))
    few = np.arange(20, 60)
    pair = (free[3], free[4])
    rules = {
        "free": (None, lambda _: without(vocab, eos)),
        "few": (ControlSpec(allowed=pack_ids(few)), lambda _: ~without(vocab, few)),
        "words": (ControlSpec(banned=pack_ids(free[:2])), lambda _: without(vocab, {*eos, *free[:2]})),
        "pair": (ControlSpec(phrases=(pack_ids(pair), pack_ids([1, 2, 3]))),
                 lambda out: without(vocab, {*eos, *([pair[1]] if out[-1:] == [pair[0]] else []),
                                             *([3] if out[-2:] == [1, 2] else [])})),
        "processor": (ControlSpec(banned=pack_ids([9]), processors=(("not-twice", '{"count": 5}'),)),
                      lambda out: without(vocab, {9, *eos, *out[-5:]}))}
    for id, (controls, _) in rules.items():
        submit(engine, id, controls)
    found = run(engine)
    for id, (_, allowed) in rules.items():
        assert found[id].ids == oracle(vocab, allowed), id
        assert found[id].last.finish == "length"
    assert found["pair"].ids != free and found["free"].ids == free


def test_a_request_that_is_computed_anew_goes_on_as_it_was(core):
    """Memory for a few: requests lose their pages, and their controls have the output so far."""
    engine = core(kv_cache_memory="24KiB", max_running_requests=4, page_size=16)
    vocab, eos = engine.info.vocab_size, set(engine.info.eos_ids)
    for i in range(6):
        submit(engine, str(i), ControlSpec(processors=(("not-twice", '{"count": 30}'),)), [5 + i, 6, 7], max_tokens=40)
    found = run(engine)
    assert engine.scheduler.stats.preemptions > 0
    for i in range(6):
        expected = oracle(vocab, lambda out: without(vocab, {*eos, *out[-30:]}), 40, [5 + i, 6, 7])
        assert found[str(i)].ids == expected


def test_controls_hold_inside_a_grammar(core):
    engine = core()
    text = SamplingParams(max_tokens=30, temperature=0.0, grammar=GrammarSpec("regex", "[a-d]{8}", "regex"))
    tokens = engine.grammars.backend.vocabulary.tokens
    a, b = tokens.index(b"a"), tokens.index(b"b")
    for id, spec in (("plain", None), ("narrow", ControlSpec(banned=pack_ids([a, b]))),
                     ("none", ControlSpec(allowed=pack_ids([tokens.index(b"z")])))):
        engine.submit(Submit(id, pack_ids(PROMPT), msgspec.structs.replace(text, controls=spec)))
    found = run(engine)
    assert found["plain"].last.finish == found["narrow"].last.finish == "stop"
    said = b"".join(tokens[i] for i in found["narrow"].ids if i < len(tokens) and i not in engine.info.eos_ids)
    assert len(said) == 8 and set(said) <= set(b"cd")
    last = found["none"].last
    assert (last.finish, last.status, last.param) == ("error", 400, "allowed_token_ids")
    assert "none of the tokens that regex allows is left as token 1" in last.error


def test_what_is_left_of_nothing_is_the_clients_fault_and_nobody_elses(core):
    engine = core()
    submit(engine, "nothing", ControlSpec(allowed=pack_ids([7]), banned=pack_ids([7])))
    submit(engine, "fails", ControlSpec(processors=(("broken", "{}"),)))
    submit(engine, "good", ControlSpec(banned=pack_ids([7])))
    found = run(engine)
    assert found["nothing"].last.status == 400 and "none of all tokens is left" in found["nothing"].last.error
    last = found["fails"].last
    assert (last.finish, last.status, last.param) == ("error", 500, "logits_processors")
    assert last.error == "the logits processor broken failed at token 3 of the output"
    assert len(found["good"].ids) == 24 and 7 not in found["good"].ids


def test_arguments_that_a_processor_refuses(core):
    engine = core()
    for name, arguments, status, words in (
            ("not-twice", '{"count": -1}', 400, r"logits_processors\[0\]: count must be"),
            ("broken", '{"at_once": 1}', 500, "processor broken failed$"), ("no-such", "{}", 400, "unknown")):
        with pytest.raises(RequestError, match=words) as error:
            submit(engine, "x", ControlSpec(processors=((name, arguments),)))
        assert error.value.status == status and "private" not in error.value.message
    assert not engine.has_work


def test_a_bias_of_a_processor_adds_to_the_clients(core, monkeypatch):
    engine, seen = core(), []
    scheduled = engine.scheduler.submit
    monkeypatch.setattr(engine.scheduler, "submit", lambda s, *more: (seen.append(s.params.logit_bias),
                                                                      scheduled(s, *more)))
    spec = ControlSpec(processors=(("not-twice", '{"token": 9, "value": 2.5, "size": 1}'),))
    submit(engine, "x", spec, logit_bias={9: 1.0, 4: -1.0}, max_tokens=2)
    run(engine)
    assert seen == [{9: 3.5, 4: -1.0}]
    with pytest.raises(RequestError, match="outside the vocabulary"):
        submit(engine, "y", ControlSpec(processors=(("not-twice", '{"token": 999999, "value": 1}'),)))


def test_a_recording_with_controls_runs_again(core, tmp_path):
    engine = core(record=str(tmp_path / "steps.rec"))
    for i in range(3):
        submit(engine, str(i), ControlSpec(banned=pack_ids([i + 3]), processors=(("not-twice", '{"count": 3}'),)))
    run(engine)
    engine.close()
    outcome = rerun(tmp_path / "steps.rec")
    assert not outcome.broken and outcome.steps > 20


# ---- the parts

def test_phrases_are_found_as_a_loop_would_find_them():
    rng = np.random.default_rng(0)
    for _ in range(200):
        parts = [rng.integers(0, 4, rng.integers(2, 6)).tolist() for _ in range(rng.integers(1, 6))]
        output = rng.integers(0, 4, rng.integers(0, 9)).astype(np.int32)
        expected = {part[-1] for part in parts if len(output) >= len(part) - 1
                    and output[len(output) - len(part) + 1:].tolist() == part[:-1]}
        assert set(Phrases([pack_ids(part) for part in parts]).forbidden(output).tolist()) == expected


def test_bits_are_cleared_also_of_ids_that_are_there_twice():
    row = np.full(3, ALL)
    forbid(row, np.array([0, 31, 32, 95, 31], np.int32))
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    assert np.flatnonzero(bits == 0).tolist() == [0, 31, 32, 95]


def test_a_matcher_goes_back_and_has_copies_of_its_own():
    matcher = Controlled(Anything(), ControlSpec(phrases=(pack_ids([1, 2]),)), {})
    for token in range(200):
        matcher.accept(token)
    row = np.empty(8, np.uint32)

    def forbidden(some: Controlled) -> list[int]:
        some.fill(row)
        return np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little") == 0).tolist()

    assert forbidden(matcher) == []
    matcher.rollback(198)
    assert forbidden(matcher) == [2]
    other = matcher.clone()
    other.accept(5)
    assert forbidden(matcher) == [2] and forbidden(other) == []
    assert matcher.forced() == [] and not matcher.is_complete()


def test_no_backend_is_made_for_requests_without_a_grammar():
    class Grammars:
        @property
        def backend(self):
            raise AssertionError("nobody needs it")

    masks = Masks(None, 2, 64, Grammars())
    requests = [SimpleNamespace(matcher=Controlled(Anything(), ControlSpec(banned=pack_ids([i])), {}), goes_on=False,
                                stop_ids=(), ahead=[], stuck=None) for i in range(2)]
    bits = np.zeros((2, 2), np.uint32)
    assert masks._fill(requests, bits, [0, 1]) == [] and bits[0, 0] == ALL - 1 and bits[1, 0] == ALL - 2
    assert masks._accept(requests, [5, 6]) == b"\1\1"


# ---- which there are

def offer(monkeypatch, **offers):
    def load(target):
        if isinstance(target, Exception):
            raise target
        return target
    entries = [SimpleNamespace(name=name.replace("_", "-"), load=lambda target=target: load(target))
               for name, target in offers.items()]
    monkeypatch.setattr(processors_module, "entry_points", lambda group: entries if "logits" in group else [])


def test_processors_are_let_in_by_name(monkeypatch):
    monkeypatch.setattr(PROCESSORS, "_entries", {})
    offer(monkeypatch, not_twice=NotTwice, half=type("Half", (LogitsProcessor,), {}), bad=ImportError("no module x"))
    load_processors(())
    assert PROCESSORS.names() == []
    load_processors(("not-twice", "not-twice"))
    assert PROCESSORS.names() == ["not-twice"]
    for name, words in (("not-twise", "no package offers it; did you mean not-twice?; there are: bad, half, not-twice"),
                        ("half", "narrow"), ("bad", "no module x")):
        with pytest.raises(ConfigError) as error:
            load_processors((name,))
        assert str(error.value).startswith(f"--logits-processors {name}: ") and words in str(error.value)
    offer(monkeypatch)
    with pytest.raises(ConfigError, match="none is installed"):
        load_processors(("x",))


def test_an_engine_without_the_package_does_not_start(monkeypatch, core):
    monkeypatch.setattr(PROCESSORS, "_entries", {})
    offer(monkeypatch)
    with pytest.raises(ConfigError, match="--logits-processors not-twice"):
        core()


# ---- over HTTP

@pytest.fixture
def made():
    return make_app(scheduler={"logits_processors": ("not-twice",)}, model={"template_kwargs": ("enable_thinking",)})


@pytest.fixture
def http(made):
    with TestClient(made.app) as client:
        yield client


def controls_of(made, http, **fields) -> ControlSpec:
    answer = http.post("/v1/completions", json={"prompt": "x", "max_tokens": 1, **fields})
    assert answer.status_code == 200, answer.text
    return made.client.submits[-1].params.controls


def test_words_are_spelled_as_they_stand_in_a_text(made, http):
    found = controls_of(made, http, bad_words=["a", "ab", " cd"])
    assert unpack_ids(found.banned).tolist() == [ord("a")]
    assert [bytes(unpack_ids(phrase).tolist()) for phrase in found.phrases] == [b" a", b"ab", b" ab", b" cd"]
    marks = controls_of(made, http, bad_words=["<|im_end|>"])
    assert len(marks.phrases[0]) == 4 * len("<|im_end|>"), "a text, and no control token"
    assert controls_of(made, http) is None and controls_of(made, http, bad_words=[]) is None


def test_tokens_that_alone_are_allowed(made, http):
    assert unpack_ids(controls_of(made, http, allowed_token_ids=[9, 7, 9]).allowed).tolist() == [7, 9]
    answer = http.post("/generate", json={"text": "x", "sampling_params": {"allowed_token_ids": [3], "bad_words": ["q"],
                                                                            "max_new_tokens": 1}})
    assert answer.status_code == 200
    assert made.client.submits[-1].params.controls.fields == "allowed_token_ids, bad_words"
    chat = http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "x"}], "max_tokens": 1,
                                                   "bad_words": ["q"]})
    assert chat.status_code == 200 and made.client.submits[-1].params.controls.banned == pack_ids([ord("q")])


def test_processors_by_name(made, http):
    assert controls_of(made, http, logits_processors=["not-twice"]).processors == (("not-twice", "{}"),)
    given = controls_of(made, http, logits_processors=[{"name": "not-twice", "args": {"count": 2}}])
    assert given.processors == (("not-twice", '{"count": 2}'),)


@pytest.mark.parametrize("fields, param, words", [
    ({"bad_words": "x"}, "bad_words", "list"), ({"bad_words": [""]}, "bad_words[0]", "at least 1"),
    ({"bad_words": ["x"] * 200}, "bad_words", "at most 128"), ({"bad_words": ["x" * 100]}, "bad_words[0]", "tokens"),
    ({"bad_words": [5]}, "bad_words[0]", "string"), ({"allowed_token_ids": []}, "allowed_token_ids", "at least one"),
    ({"allowed_token_ids": [VOCAB]}, "allowed_token_ids", f"0 to {VOCAB - 1}"),
    ({"allowed_token_ids": [1, -1]}, "allowed_token_ids", "-1"),
    ({"allowed_token_ids": [2**63 - 1]}, "allowed_token_ids", "922"),
    ({"allowed_token_ids": [True]}, "allowed_token_ids[0]", "integer"),
    ({"logits_processors": ["os.system"]}, "logits_processors[0]", "there are: not-twice"),
    ({"logits_processors": [{"name": "not-twice", "code": "x"}]}, "logits_processors[0]", "name and args"),
    ({"logits_processors": ["not-twice"] * 2}, "logits_processors[1]", "second time"),
    ({"logits_processors": [{"name": "not-twice", "args": {"x": "y" * 5000}}]}, "logits_processors[0].args", "4096"),
    ({"logits_processors": [{"name": "not-twice", "args": [1]}]}, "logits_processors[0].args", "an object"),
    ({"logits_processors": ["not-twice"] * 9}, "logits_processors", "at most 8")])
def test_what_cannot_be_meant_is_a_400_that_names_it(made, http, fields, param, words):
    answer = http.post("/v1/completions", json={"prompt": "x", **fields})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == param and words in error["message"], error
    assert not made.client.submits


def test_an_id_beyond_64_bits_is_a_400(http):
    assert http.post("/v1/completions", json={"prompt": "x", "allowed_token_ids": [10**30]}).status_code == 400


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize"])
def test_template_arguments_against_the_list(http, path):
    messages = [{"role": "user", "content": "x"}]
    good = http.post(path, json={"messages": messages, "chat_template_kwargs": {"enable_thinking": False}})
    assert good.status_code == 200
    answer = http.post(path, json={"messages": messages, "chat_template_kwargs": {"x": 1}})
    error = answer.json()["error"]
    assert answer.status_code == 400 and error["param"] == "chat_template_kwargs.x"
    assert "enable_thinking" in error["message"] and "--template-kwargs" in error["message"]
    with TestClient(make_app().app) as open_http:
        assert open_http.post(path, json={"messages": messages, "chat_template_kwargs": {"x": 1}}).status_code == 200


def test_the_processor_of_the_page_works():
    page = (Path(__file__).resolve().parent.parent / "docs/sampling.md").read_text()
    source = page.split("```python\n")[1].split("```")[0]
    names: dict = {}
    exec(source, names)
    processor = names["NoRepeat"]({"window": 2}, np.zeros(0, np.int32), None)
    row = np.full(2, ALL)
    processor.narrow(np.array([1, 2, 3], np.int32), row)
    assert np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little") == 0).tolist() == [2, 3]
    with pytest.raises(ValueError, match="between 1 and 1000"):
        names["NoRepeat"]({"window": 0}, None, None)
