"""The heads that come with Isthmus: small, packaged, found by a model's weights, and right often on the real pair."""
from __future__ import annotations

import fnmatch
import json
import tomllib
from pathlib import Path

import numpy as np
import pytest
from isthmus.core import env
from isthmus.core.errors import CheckpointError
from isthmus.core.messages import SamplingParams, Submit, pack_ids
from isthmus.core.speculation import shipped
from isthmus.core.text.tokenizer import load_tokenizer
from isthmus.core.weights.checkpoint import open_checkpoint
from isthmus.core.weights.wheels import KNOWN
from safetensors.torch import load_file, save_file

from .drafting import drafted, engine
from .tiny import tiny_model

COST = 25  # seconds
MOST = 20_000_000  # bytes of a head
QUESTIONS = ("Why is the sky blue?", "What is music?", "How do bees find flowers?")


def test_heads_are_small_and_packaged():
    patterns = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())[
        "tool"]["setuptools"]["package-data"]["isthmus.core.speculation"]
    assert any(shipped.FOLDER.iterdir())
    for folder in shipped.FOLDER.iterdir():
        files = {path.name: path for path in folder.iterdir()}
        assert files.keys() == {"README.md", "config.json", "model.safetensors"}
        assert sum(path.stat().st_size for path in files.values()) < MOST
        assert json.loads(files["config.json"].read_text())[shipped.TRAINED_FOR].keys() == {"model", "norm"}
        for path in files.values():
            name = path.relative_to(shipped.FOLDER.parent).as_posix()
            assert any(fnmatch.fnmatch(name, pattern) for pattern in patterns)


def test_a_head_is_found_by_the_models_norm(tmp_path, monkeypatch):
    """Whatever the dtype of its weights; a model that was trained on is another."""
    folder = tmp_path / "model"
    folder.mkdir()
    tensors = load_file(tiny_model("llama3") / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16().float()
    (folder / "config.json").write_bytes((tiny_model("llama3") / "config.json").read_bytes())

    def mark(**changed) -> str:
        save_file(tensors | changed, folder / "model.safetensors")
        with open_checkpoint(folder) as checkpoint:
            return shipped.fingerprint(checkpoint)
    norm = tensors["model.norm.weight"]
    own = mark()
    assert len(own) == 64
    assert mark(**{"model.norm.weight": norm.bfloat16()}) == own != mark(**{"model.norm.weight": norm * 2})
    mark()
    monkeypatch.setattr(shipped, "FOLDER", tmp_path / "heads")
    for name, norm in (("other", "0" * 64), ("this", own)):
        (tmp_path / "heads" / name).mkdir(parents=True)
        (tmp_path / "heads" / name / "config.json").write_text(
            json.dumps({shipped.TRAINED_FOR: {"model": name, "norm": norm}}))
    with open_checkpoint(folder) as checkpoint:
        assert shipped.shipped_head(checkpoint, "model").name == "this"
    with open_checkpoint(tiny_model("llama2")) as checkpoint, pytest.raises(
            CheckpointError, match="has a head for other, this and none for llama2: name one, model=HEAD, or train"):
        shipped.shipped_head(checkpoint, "llama2")


def test_a_model_without_a_head_is_told():
    with pytest.raises(CheckpointError, match="and none for llama3: name one, model=HEAD"):
        engine("eagle")


def test_the_real_pair():
    """The default model and the head that is found for it."""
    path = KNOWN["smollm2-135m-instruct"].path(env.cache_dir() / "models")
    if not path.is_file():
        pytest.skip(f"{path} is not here: isthmus generate downloads it")
    with open_checkpoint(path) as checkpoint:
        tokenizer, head = load_tokenizer(checkpoint), shipped.shipped_head(checkpoint, "the default model")
    core = engine("eagle", "tokens=2", "adaptive=0", model=path, platform="cpu", memory="64MiB")
    assert any(f"the EAGLE head {head.name}" in line for line in core.info.report)
    for i, question in enumerate(QUESTIONS):
        ids = tokenizer.encode(f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n", add_special=True)
        core.submit(Submit(f"r{i}", pack_ids(np.array(ids)),
                           SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)))
    while core.has_work:
        core.step()
    assert drafted(core) > 0.2
    core.close()
