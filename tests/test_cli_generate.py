"""`isthmus generate` with a model in its own process: small contexts, test devices, base models."""
from __future__ import annotations

import json
import os

import pytest
from isthmus.core.cli.session import platform_warning

from .checkpoints import as_gguf, tiny_llama_gguf, tiny_llama_metadata, tiny_weights, write_gguf
from .test_cli_chat import command_line

COST = 10  # seconds


@pytest.fixture(autouse=True)
def no_settings_from_outside(monkeypatch):
    for name in list(os.environ):
        if name.startswith("ISTHMUS_") and name != "ISTHMUS_CACHE":
            monkeypatch.delenv(name)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_llama_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


def generate(tiny, *words, **more):
    return command_line("generate", *words, "--model", tiny, "--platform", "null", "--json", **more)


def test_a_small_context_takes_the_default_and_refuses_a_wish(tiny):
    done = generate(tiny, "hi", "--max-model-len", "60", "--seed", "1", "--temperature", "0")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["usage"]["completion_tokens"] > 5
    done = generate(tiny, "hi " * 60, "--max-model-len", "60")
    assert done.returncode == 2 and "maximum context length is 60 tokens" in done.stderr
    assert "/clear" not in done.stderr
    done = generate(tiny, "hi", "--max-model-len", "60", "--max-tokens", "60")
    assert done.returncode == 2 and "60 in the completion" in done.stderr


def test_a_platform_that_is_no_model_is_warned_about(tiny):
    done = generate(tiny, "hi", "--max-tokens", "2")
    assert "isthmus: warning: null is a test device and no model: its answers are random words" in done.stderr
    assert platform_warning("reference", 0).startswith("warning: reference is the slow")
    assert platform_warning("x", 10) == ""


def test_a_base_model_is_continued_by_generate_and_refused_by_chat_before_it_is_loaded(tmp_path):
    base = str(write_gguf(tmp_path / "base.gguf", {k: v for k, v in tiny_llama_metadata().items()
                                                   if k != "tokenizer.chat_template"}, as_gguf(tiny_weights())))
    done = generate(base, "hi", "--max-tokens", "2")
    assert done.returncode == 0 and "no chat template: the text is continued as it is, as with --raw" in done.stderr
    assert "load weights" in done.stderr
    done = command_line("chat", base, "--platform", "null", input="hello\n")
    assert done.returncode == 2 and "base has no chat template" in done.stderr
    assert "load weights" not in done.stderr
