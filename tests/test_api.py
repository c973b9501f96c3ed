"""`Engine`: the model in a Python program."""
from __future__ import annotations

import os
import subprocess
import sys

import numpy as np
import pytest
from isthmus import Engine
from isthmus.core.api import config_of
from isthmus.core.errors import ConfigError, EngineStopped, Overloaded, RequestError

from .checkpoints import tiny_llama_gguf

COST = 8  # seconds
SETTINGS = {"platform": "reference", "kv_cache_memory": "4MiB"}
MESSAGES = [{"role": "user", "content": "hello"}]
GREEDY = {"temperature": 0, "max_tokens": 6, "ignore_eos": True}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return tiny_llama_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf")


@pytest.fixture(scope="module")
def engine(tiny):
    with Engine(tiny, **SETTINGS) as engine:
        yield engine


def test_the_package_has_what_a_program_needs_and_imports_nothing_before():
    code = ("import sys, isthmus\nassert isthmus.__version__ and 'numpy' not in sys.modules\n"
            "from isthmus import Engine, Completion\nimport isthmus.core.api as api\n"
            "assert Engine is api.Engine and Completion is api.Completion\n"
            "try: isthmus.Motor\nexcept AttributeError as error: assert 'it has Completion, Engine' in str(error)\n")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    done = subprocess.run([sys.executable, "-m", "isthmus", "version"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith("isthmus ")


def test_one_prompt_gives_one_answer_and_a_list_gives_a_list(engine):
    one = engine.generate("hello", **GREEDY)
    ids = engine.text.encode("hello")
    assert len(one.tokens) == 6 and one.finish == "length" and one.prompt_tokens == len(ids)
    for prompt in (ids, ids.tolist(), tuple(ids), list(ids)):  # int32 array, integers, numpy's integers
        assert engine.generate(prompt, **GREEDY).tokens == one.tokens
    many = engine.generate([ids, "a"], **GREEDY)
    assert [c.tokens for c in many] == [one.tokens, engine.generate("a", **GREEDY).tokens]
    assert engine.generate(["hello"], **GREEDY)[0].tokens == one.tokens and engine.generate([]) == []
    assert "".join(engine.stream("hello", **GREEDY)) == one.text


def test_n_answers_stand_next_to_each_other_and_each_has_its_seed(engine):
    params = {"max_tokens": 8, "temperature": 1.5, "ignore_eos": True}
    answers = engine.generate("hello", n=3, seed=7, **params)
    alone = [engine.generate("hello", seed=7 + i, **params).tokens for i in range(3)]
    assert [c.tokens for c in answers] == alone and len({tuple(a) for a in alone}) == 3
    pairs = engine.generate(["hello", "a"], n=2, seed=7, **params)
    assert [c.tokens for c in pairs[:2]] == alone[:2] and len(pairs) == 4
    assert len(engine.chat(MESSAGES, n=2, max_tokens=2)) == 2


def test_logprobs_are_there_in_full(engine):
    answer = engine.generate("hello", logprobs=3, prompt_logprobs=2, **GREEDY)
    scores = answer.logprobs
    assert scores.chosen.shape == (6,) and scores.top.shape == scores.top_ids.shape == (6, 3)
    assert scores.top_ids[:, 0].tolist() == answer.tokens and np.array_equal(scores.top[:, 0], scores.chosen)
    assert (np.diff(scores.top) <= 0).all() and (scores.chosen < 0).all()
    prompt = answer.prompt_logprobs
    assert prompt.chosen.shape == (answer.prompt_tokens - 1,) and prompt.top.shape == (answer.prompt_tokens - 1, 2)
    bare = engine.generate("hello", logprobs=0, **GREEDY).logprobs
    assert np.allclose(bare.chosen, scores.chosen) and bare.top.shape == (6, 0)
    assert engine.generate("hello", **GREEDY).logprobs is None


@pytest.mark.parametrize("prompt, params, words", [
    (5, {}, "prompt must be text, a list of texts, token ids or a list of them; got 5"),
    (None, {}, "prompt is required"), (b"x", {}, "got b'x'"), ("", {}, "empty"),
    ([[]], {}, r"prompt\[0\] is empty"), (["a", 5], {}, "mixes"),
    ([1, 2.5], {}, "integers only; got 2.5"), ([10**6], {}, "token id 1000000"),
    ("a", {"top_logprobs": 5}, "unknown parameter 'top_logprobs'; logprobs=K gives the K best too"),
    ("a", {"topk": 5}, "unknown parameter 'topk'; did you mean top_k?"),
    ("a", {"cache_hint": {"nxt_within": 3}}, "cache_hint: unknown parameter 'nxt_within'; did you mean next_within?"),
    ("a", {"logprobs": "5"}, "logprobs must be"),
    ("a", {"logprobs": 21}, "logprobs must be less than or equal to 20; got 21"), ("a", {"n": 0}, "n must be"),
    ("a", {"temperature": 9}, "temperature must be"), ("a", {"stop_token_ids": [10**6]}, "token id 1000000")])
def test_what_cannot_be_done_is_refused_in_words(engine, prompt, params, words):
    with pytest.raises(RequestError, match=words.replace("?", r"\?")):
        engine.generate(prompt, **params)
    assert not engine._arrived and not len(engine._texts), "nothing is left of it"


def test_a_context_that_does_not_fit_is_refused_without_advice_that_cannot_be_followed(engine):
    for prompt, params in ((["a", [3] * 300], {}), ([3] * 256, {}), ("a", {"max_tokens": 300})):
        with pytest.raises(RequestError, match="maximum context length is 256 tokens") as caught:
            engine.generate(prompt, **params)
        assert caught.value.code == "context_length_exceeded" and "--" not in str(caught.value)


@pytest.mark.parametrize("params", [{"n": 2}, {"logprobs": 1}, {"prompt_logprobs": 0}])
def test_a_stream_refuses_what_it_cannot_give(engine, params):
    with pytest.raises(RequestError, match=f"{next(iter(params))} is .*use generate"):
        next(engine.stream("a", **params))
    with pytest.raises(RequestError, match="holds 2 prompts"):
        next(engine.stream(["a", "b"]))


def test_parameters_go_by_the_names_that_http_knows_and_by_pythons_types(engine):
    answer = engine.generate("hello", max_new_tokens=3, temperature=np.float64(0), stop=("zzz",), ignore_eos=True)
    assert len(answer.tokens) == 3
    forced = engine.generate("hello", max_tokens=2, temperature=0, logit_bias={70: 100})
    assert forced.tokens == [70, 70]


def test_streams_may_be_read_in_turns_and_left_early(engine):
    right = {prompt: engine.generate(prompt, **GREEDY).text for prompt in ("hello", "a")}
    first, second = (engine.stream(prompt, **GREEDY) for prompt in right)
    texts = {"hello": "", "a": ""}
    for one, other in zip(first, second, strict=False):
        texts["hello"] += one
        texts["a"] += other
    texts["hello"] += "".join(first)
    texts["a"] += "".join(second)
    assert texts["a"] == right["a"] and texts["hello"] in (right["hello"], right["hello"][:len(texts["hello"])])
    left = engine.stream("hello", max_tokens=50, ignore_eos=True)
    next(left)
    left.close()
    assert engine.generate("hello", **GREEDY).text == right["hello"]
    assert not engine._arrived and not len(engine._texts) and not engine.core.scheduler.running


def test_more_prompts_than_the_queue_takes_are_done_all_the_same(tiny):
    with Engine(tiny, **SETTINGS, max_running_requests=2, max_queued_requests=1) as engine:
        answers = engine.generate([[3, 4 + i] for i in range(9)], **GREEDY)
        assert [a.tokens for a in answers] == [engine.generate([3, 4 + i], **GREEDY).tokens for i in range(9)]
        kept = [engine.stream([3, 4 + i], **GREEDY) for i in range(3)]
        for stream in kept:
            next(stream)
        assert len(engine.generate("a", **GREEDY).tokens) == 6


def test_a_chat_is_as_long_as_the_context_leaves_and_takes_a_template_of_ones_own(tiny, engine, tmp_path):
    answer = engine.chat(MESSAGES, temperature=0, ignore_eos=True)
    assert answer.prompt_tokens + len(answer.tokens) == 256
    (tmp_path / "t.jinja").write_text("{{ messages[0].content }}!")
    with Engine(tiny, **SETTINGS, chat_template=tmp_path / "t.jinja") as other:
        assert other.chat(MESSAGES, max_tokens=1).prompt_tokens == len(other.text.encode("hello!"))


def test_a_closed_engine_says_so(tiny):
    engine = Engine(tiny, **SETTINGS)
    assert repr(engine) == "<Engine tiny on reference, f64, 256 tokens of context>"
    stream = engine.stream("hello", max_tokens=50, ignore_eos=True)
    next(stream)
    engine.close()
    engine.close()
    assert repr(engine) == "<Engine tiny on reference, closed>"
    for use in (lambda: engine.generate("a"), lambda: next(engine.stream("a")), lambda: engine.chat(MESSAGES),
                lambda: list(stream)):
        with pytest.raises(EngineStopped, match="this engine is closed: make a new one"):
            use()


@pytest.mark.parametrize("settings, words", [
    ({"max_model_length": 5}, r"unknown setting 'max_model_length'; did you mean max_model_len\?"),
    ({"max_model_len": "x"}, "max_model_len: 'x' is not a whole number"),
    ({"dtype": "fp8"}, "dtype: 'fp8' is not one of"),
    ({"max_running_requests": 0}, "max_running_requests: 0 is out of range")])
def test_settings_are_checked_as_on_the_command_line(settings, words):
    with pytest.raises(ConfigError, match=words):
        config_of(**settings)


def test_settings_in_pythons_types():
    config = config_of(model=os.path.curdir, dtype="bf16", kv_cache_memory=2**20, platform_option={"threads": 2})
    assert (config.model.dtype, config.cache.kv_cache_memory) == ("bfloat16", "1048576")
    assert config.platform.platform_option == ("threads=2",)


def test_overload_without_anything_to_wait_for_is_told(engine, monkeypatch):
    def full(*_):
        raise Overloaded("full")
    monkeypatch.setattr(engine.core, "submit", full)
    with pytest.raises(Overloaded):
        engine.generate("a")
