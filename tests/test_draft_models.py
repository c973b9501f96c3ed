"""Drafters that compute with a model: what is said never changes, whatever drafts it, and good guesses are taken."""
from __future__ import annotations

import base64
from dataclasses import replace
from pathlib import Path

import pytest
from isthmus.conformance.tiny import tiny_model as tiny
from isthmus.core.cli.session import check_names
from isthmus.core.config import Config, ModelSettings, SpeculationSettings
from isthmus.core.engine import EngineCore
from isthmus.core.errors import CheckpointError, ConfigError
from isthmus.core.messages import pack_ids
from isthmus.core.models.loader import read_config
from isthmus.core.platform import Unsupported
from isthmus.core.recording.rerun import rerun
from isthmus.core.registry import RegistrationError
from isthmus.core.speculation.companion import Loading, companion
from isthmus.core.speculation.contract import Drafter, Drafters
from isthmus.core.speculation.draft_model import SmallerModel
from isthmus.core.speculation.on_device import ModelDrafter
from isthmus.core.weights.checkpoint import open_checkpoint

from .checkpoints import as_gguf, tiny_llama_metadata, tiny_weights, write_gguf
from .drafting import drafted, engine, outputs, same_outputs, without_drafts
from .lora_files import ALL, KIND, drawn, write_adapter
from .test_lora_engine import config, run, submit, text
from .tiny import tiny_model

COST = 15  # seconds


@pytest.fixture(scope="module")
def plain():
    return without_drafts()


# ---- another model

@pytest.mark.parametrize("platform, page", [("reference", 1), ("cpu", 16)])
def test_a_model_that_drafts_for_itself_is_always_right(plain, platform, page):
    name = f"model={tiny_model('llama3')}"
    assert same_outputs(plain, "draft", name, "tokens=3", platform=platform, page=page) > 0.95


def test_a_stranger_drafts_and_nothing_changes(plain):
    share = same_outputs(plain, "draft", f"model={tiny_model('qwen2')}", "tokens=2", chunked_prefill_size=16)
    assert share < 0.5


def test_drafts_survive_a_short_memory(plain):
    """Requests are sent back and come again; what the draft model knows of them comes with the same pages."""
    core = engine("draft", f"model={tiny_model('llama3')}", "adaptive=0", page=4, memory="264KiB")
    assert core.info.pages == 21  # for requests that end with 29
    assert outputs(core, most=24) == plain(most=24)
    assert core.command("stats")["preemptions"] > 0 and drafted(core) > 0.9
    core.close()


def loading(checkpoint, **more) -> Loading:
    given = dict(checkpoint=checkpoint, config=read_config(checkpoint)[1], platform=None, manifest=None, dtype="f32",
                 page_size=16, world=1, strict=False, resolve=Path, tell=lambda done, total: None)
    return Loading(**given | more)


def gguf(path: Path, **more) -> Path:
    metadata = {**tiny_llama_metadata(), **{name.replace("__", "."): value for name, value in more.items()}}
    return write_gguf(path, metadata, as_gguf(tiny_weights(3)))


def test_a_draft_model_has_the_targets_tokenizer(tmp_path):
    tokens = list(tiny_llama_metadata()["tokenizer.ggml.tokens"])
    target, same = gguf(tmp_path / "target.gguf"), gguf(tmp_path / "same.gguf")
    tokens[9], tokens[12] = tokens[12], tokens[9]
    other = gguf(tmp_path / "other.gguf", tokenizer__ggml__tokens=tokens)
    with open_checkpoint(target) as checkpoint:
        assert SmallerModel(loading(checkpoint), str(same)).nbytes > 0
        with pytest.raises(CheckpointError, match=r"other\.gguf: its tokens are not those of target: 2 differ, the "
                                                  r"first is 9, .* the same tokenizer"):
            SmallerModel(loading(checkpoint), str(other))
        bare = tiny_model("llama3")
        small = replace(read_config(checkpoint)[1], vocab_size=131)
        with pytest.raises(CheckpointError, match="it has no tokenizer, so that nobody can tell"):
            SmallerModel(loading(checkpoint, config=small), str(bare))
        with pytest.raises(CheckpointError, match="vocabulary has 131 tokens and that of target 900"):
            SmallerModel(loading(checkpoint, config=replace(small, vocab_size=900)), str(bare))


@pytest.mark.parametrize("items, error, words", [
    (("draft",), ConfigError, "the drafter draft needs model=..., a smaller model with the same vocabulary"),
    (("draft", "model=/nowhere/x"), CheckpointError,
     "^--speculative draft,model=/nowhere/x: '/nowhere/x': no such file or folder"),
    (("draft", "modle=x"), ConfigError, "did you mean model")])
def test_what_cannot_draft_is_said_before_weights_are_read(items, error, words):
    with pytest.raises(error, match=words):
        engine(*items)


def test_a_drafter_that_is_not_there_is_told_before_anything_is_loaded():
    for name, words in (("/nowhere/x", "no such file or folder"), ("no model", "no known model")):
        config = Config(ModelSettings(str(tiny_model("llama3"))), speculation=SpeculationSettings(
            ("draft", f"model={name}")))
        with pytest.raises(ConfigError, match=f"^--speculative draft,model={name}: '{name}'.*{words}"):
            check_names(config)


def test_ranks_are_refused_with_the_reason():
    with open_checkpoint(tiny_model("llama3")) as checkpoint, pytest.raises(Unsupported, match="ranks of tensor paral"):
        companion(("draft", "model=x"), loading(checkpoint, world=2))


def test_its_bytes_count():
    target = engine()
    both = engine("draft", f"model={tiny_model('qwen2')}")
    assert both.info.weight_bytes > 1.5 * target.info.weight_bytes
    assert both.info.pages < 0.7 * target.info.pages and "drafts come from qwen2" in " ".join(both.info.report)
    for core in (target, both):
        core.close()


# ---- the model's own first layers

@pytest.mark.parametrize("platform, layers", [("reference", 2), ("cpu", 0)])
def test_early_exit_changes_nothing(plain, platform, layers):
    assert same_outputs(plain, "exit", f"layers={layers}", "tokens=2", platform=platform, page=4) < 0.9


def test_early_exit_takes_no_memory_and_fewer_layers():
    target, early = engine(), engine("exit", "layers=2")
    assert early.info.weight_bytes == target.info.weight_bytes and early.info.pages == target.info.pages
    assert early.info.report[-1] == "drafts come from the first 2 of 3 layers"
    for core in (target, early):
        core.close()
    with pytest.raises(ConfigError, match="layers=3: the model has 3 layers, and fewer of them must draft"):
        engine("exit", "layers=3")


# ---- with everything else

def test_adapters_and_what_else_requests_ask_for(tmp_path):
    """Rows with adapters, penalties, biases and log-probabilities draft without them, and are decided with them; texts
    are embedded, and a request aborted."""
    base, pairs = tiny(KIND, 0), drawn(1, 8, ALL)
    adapters = {"sql": write_adapter(tmp_path / "sql", pairs)}
    found = []
    for speculative in ((), ("draft", f"model={base}", "adaptive=0"), ("exit", "layers=1", "adaptive=0")):
        core = EngineCore(replace(config(base, adapters), speculation=SpeculationSettings(speculative)))
        for id, name, more in (("a", "sql", {}), ("b", "", {"repetition_penalty": 1.3, "logprobs": 2}),
                               ("c", "sql", {"logit_bias": {7: 2.0}, "min_tokens": 4}), ("d", "", {}), ("e", "", {})):
            submit(core, id, text(ord(id), 20), name, 14, **more)
        got = run(core, lambda core=core: core.command("stats")["generated_tokens"] > 20)
        core.abort(["e"])
        for id, tokens in run(core).items():
            got[id] = got.get(id, []) + tokens
        ids = base64.b64encode(pack_ids(text(7, 30))).decode()
        vector = core.command("embed", ids=ids, lengths="30", pooling="last")["vectors"]
        core.scheduler.verify()
        if speculative:
            assert drafted(core) > 0
        assert len(got.pop("e", [])) < 14
        found.append((got, vector))
        core.close()
    assert found[0] == found[1] == found[2]


def test_a_recording_is_run_again_without_the_model(tmp_path):
    core = engine("exit", "layers=2", "adaptive=0", record=str(tmp_path / "drafts.rec"))
    outputs(core, most=10)
    stats = core.command("stats")
    core.close()
    again = rerun(tmp_path / "drafts.rec")
    assert not again.broken and stats["drafted_tokens"] > 0
    assert again.stats["drafted_tokens"] == stats["drafted_tokens"]


def test_a_drafter_that_computes_says_what_it_is_loaded_with():
    class Bare(ModelDrafter): ...

    with pytest.raises(RegistrationError, match=r"it is on_device, and beside\(loading, options\) is missing"):
        Drafters("drafter", Drafter, ("propose",)).register("bare", Bare)
