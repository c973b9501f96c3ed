"""Heads on the model's hidden states: their numbers are the papers', and what is said never changes."""
from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from isthmus.core.discovery import load_platform
from isthmus.core.errors import CheckpointError
from isthmus.core.models.loader import load_model, read_config
from isthmus.core.plan import Batch, Sampling
from isthmus.core.platform import StateSpec
from isthmus.core.speculation.companion import Loading
from isthmus.core.speculation.heads import EagleHead, MtpLayer
from isthmus.core.weights.checkpoint import open_checkpoint
from safetensors.torch import load_file, save_file
from transformers.models.glm4_moe.modeling_glm4_moe import Glm4MoeDecoderLayer, Glm4MoeRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRotaryEmbedding

from .drafting import engine, same_outputs, without_drafts
from .tiny import hf_model, tiny_model

COST = 15  # seconds
PAGE = 4


@pytest.fixture(scope="module")
def plain():
    return without_drafts()


@pytest.fixture(scope="module")
def eagle(tmp_path_factory) -> Path:
    """A random EAGLE-1 head for the model "llama3", in the words in which they are published."""
    folder, config = tmp_path_factory.mktemp("eagle"), hf_model("llama3").config
    draw = torch.Generator().manual_seed(3)
    layer = LlamaDecoderLayer(config, 0).state_dict()
    tensors = {f"layers.0.{name}": torch.randn(w.shape, generator=draw) * (w.shape[-1] ** -0.5 if w.ndim > 1 else 0.2)
               + (w.ndim == 1) for name, w in layer.items() if "input_layernorm" not in name}
    tensors |= {"fc.weight": torch.randn(64, 128, generator=draw) * 0.1, "fc.bias": torch.randn(64, generator=draw),
                "embed_tokens.weight": torch.zeros(131, 64)}
    save_file(tensors, folder / "model.safetensors")
    words = json.loads((tiny_model("llama3") / "config.json").read_text()) | {"num_hidden_layers": 1, "bias": True}
    (folder / "config.json").write_text(json.dumps(words))
    return folder


@pytest.fixture(scope="module")
def mtp(tmp_path_factory) -> Path:
    """The model "glm4-moe" with a random MTP layer behind its last."""
    folder = tmp_path_factory.mktemp("mtp")
    shutil.copytree(tiny_model("glm4-moe"), folder, dirs_exist_ok=True)
    draw = torch.Generator().manual_seed(4)
    tensors = load_file(folder / "model.safetensors")
    last = "model.layers.2."
    own = {name: tensors[name] for name in tensors if name.startswith(last)}
    assert own.keys() >= {last + "mlp.gate.weight"}
    layer = {name.replace(last, "model.layers.3."): torch.randn(w.shape, generator=draw) * (
        w.shape[-1] ** -0.5 if w.ndim > 1 else 0.2) + (w.ndim == 1 and "norm" in name) for name, w in own.items()}
    extra = {f"model.layers.3.{name}.weight": 1 + torch.randn(64, generator=draw) * 0.2
             for name in ("enorm", "hnorm", "shared_head.norm")}
    extra |= {"model.layers.3.eh_proj.weight": torch.randn(64, 128, generator=draw) * 0.1,
              "model.layers.3.embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
              "model.layers.3.shared_head.head.weight": tensors["lm_head.weight"].clone()}
    save_file(tensors | layer | extra, folder / "model.safetensors", {"format": "pt"})
    return folder


# ---- numbers

class Logits:
    """Ops whose `sample` gives the logits."""

    def __init__(self, ops):
        self._ops = ops

    def __getattr__(self, name):
        return getattr(self._ops, name)

    def sample(self, logits, softcap=None):
        return logits


def batch(tokens: list[int], start: int, rows: list[int]) -> Batch:
    """One request's tokens from a place on, in pages that follow each other; the logits of some are wanted."""
    places = np.arange(start, start + len(tokens), dtype=np.int32)
    count = -(-(start + len(tokens)) // PAGE)

    def ints(*values):
        return np.array(values, np.int32)
    return Batch(ints(*tokens), places, places + PAGE, ints(*[0] * len(tokens)), ints(1), ints(0, len(tokens)),
                 ints(start + len(tokens)), np.arange(1, count + 1, dtype=np.int32)[None], ints(*rows),
                 ints(*[-2] * len(rows)), Sampling())


def head_logits(kind, folder: Path, *more: str) -> tuple[np.ndarray, np.ndarray, list[int]]:
    """Logits of a head's two steps behind a prompt that came in two chunks, and the tokens: the prompt's, and the two
    that the steps were fed, the second by its number in the head's vocabulary if it has one."""
    platform = load_platform("reference", {})
    manifest = platform.probe(0, 1)
    with open_checkpoint(folder) as checkpoint:
        loading = Loading(checkpoint, read_config(checkpoint)[1], platform, manifest, "f64", PAGE, 1, False, Path,
                          lambda done, total: None)
        companion = kind(loading, *more)
        model = companion.joined(load_model(checkpoint, platform, manifest, "f64", page_size=PAGE))
    state = platform.alloc(StateSpec(model.state_layers, "f64", PAGE, 3), 9)
    tokens, found = [5, 9, 100, 42, 8, 77, 3, 60, 11, 23], []
    for start, stop in ((0, 5), (5, 8)):
        out, state = platform.compile(model.forward, model.weights, None)(state, batch(tokens[start:stop], start, [0]))
        out.collect()

    def forward(ops, weights, b):
        return model.draft.forward(Logits(ops), weights, b)
    ids = model.draft.ids
    for place, token, weights in ((8, tokens[8], model.draft.weights), (
            9, tokens[9] if ids is None else int(np.flatnonzero(ids == tokens[9])[0]),
            model.draft.weights if ids is None else model.draft.after)):
        step = platform.compile(forward, weights, None)
        out, state = step(state, batch([token], place, [0]))
        found.append(out.collect()[0])
    return *found, tokens


def papers_logits(model, head, tokens: list[int]) -> list[np.ndarray]:
    """The same by the papers' formula: guesses of h behind (embedding of t(i + 1), h(i)), each fed to the
    next; place 0 has its own hidden state, as `core.models.draft_heads` says. head: of (embedded, hidden) [T, hidden]
    -> (guesses [T, hidden], logits [T, V])."""
    with torch.no_grad():
        h = model.model(torch.tensor([tokens[:8]]), use_cache=False).last_hidden_state[0]
        before, found = torch.cat([h[:1], h]), []
        for count in (9, 10):
            guesses, logits = head(model.model.embed_tokens(torch.tensor(tokens[:count])), before)
            before = torch.cat([before, guesses[-1:]])
            found.append(logits[-1].numpy())
    return found


def decoded(layer, rotary, x: torch.Tensor) -> torch.Tensor:
    """One decoder layer over a whole sequence [T, hidden]."""
    count = len(x)
    mask = torch.full((count, count), -torch.inf, dtype=x.dtype).triu(1)[None, None]
    out = layer(x[None], attention_mask=mask, position_embeddings=rotary(x[None], torch.arange(count)[None]))
    return (out[0] if isinstance(out, tuple) else out).reshape(count, -1)


@pytest.fixture
def double():
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_an_eagle_heads_logits_are_the_papers(eagle, double):
    model, tensors = hf_model("llama3").double(), load_file(eagle / "model.safetensors")
    tensors = {name: w.double() for name, w in tensors.items()}
    layer = LlamaDecoderLayer(model.config, 0)
    layer.input_layernorm = torch.nn.Identity()
    layer.load_state_dict({n.removeprefix("layers.0."): w for n, w in tensors.items() if n.startswith("layers.0.")})
    rotary = LlamaRotaryEmbedding(model.config)

    def head(embedded, hidden):
        x = torch.cat([embedded, hidden], -1) @ tensors["fc.weight"].T + tensors["fc.bias"]
        guesses = decoded(layer, rotary, x)
        return guesses, model.lm_head(guesses)
    first, second, tokens = head_logits(EagleHead, tiny_model("llama3"), str(eagle))
    want = papers_logits(model, head, tokens)
    model.float()
    assert np.abs(first - want[0]).max() < 1e-5 and np.abs(second - want[1]).max() < 1e-5
    assert np.abs(want[0]).max() > 1


def test_an_mtp_layers_logits_are_the_papers(mtp):
    model, tensors = hf_model("glm4-moe"), load_file(mtp / "model.safetensors")  # its experts know no float64
    own = {name.removeprefix("model.layers.3."): w for name, w in tensors.items() if name.startswith("model.layers.3.")}
    layer = Glm4MoeDecoderLayer(model.config, model.config.num_hidden_layers - 1).eval()
    layer.load_state_dict(expert_stacks(own, layer))
    rotary, eps = Glm4MoeRotaryEmbedding(model.config), model.config.rms_norm_eps

    def norm(x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * own[f"{name}.weight"]

    def head(embedded, hidden):
        x = torch.cat([norm(embedded, "enorm"), norm(hidden, "hnorm")], -1) @ own["eh_proj.weight"].T
        guesses = decoded(layer, rotary, x)
        return guesses, model.lm_head(norm(guesses, "shared_head.norm"))
    first, second, tokens = head_logits(MtpLayer, mtp)
    want = papers_logits(model, head, tokens)
    assert np.abs(first - want[0]).max() < 1e-3 and np.abs(second - want[1]).max() < 1e-3
    assert np.abs(want[0]).max() > 1


def expert_stacks(tensors: dict[str, torch.Tensor], layer: torch.nn.Module) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors of a layer as the installed `transformers` holds them: experts stacked, where it does."""
    wanted = layer.state_dict()
    found = {name: w for name, w in tensors.items() if name in wanted}
    if "mlp.experts.gate_up_proj" in wanted and "mlp.experts.gate_up_proj" not in found:
        count = wanted["mlp.experts.gate_up_proj"].shape[0]

        def of(expert: int, part: str) -> torch.Tensor:
            return tensors[f"mlp.experts.{expert}.{part}_proj.weight"]
        found["mlp.experts.gate_up_proj"] = torch.stack([torch.cat([of(i, "gate"), of(i, "up")]) for i in range(count)])
        found["mlp.experts.down_proj"] = torch.stack([of(i, "down") for i in range(count)])
    return found


@pytest.mark.parametrize("own", [True, False])
def test_the_head_that_the_example_trains_is_the_one_that_is_served(tmp_path, double, monkeypatch, own):
    """With its own vocabulary and matrix, and as others are published."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples" / "train_eagle"))
    from head import Head
    model = hf_model("llama2").double()
    words = json.loads((tiny_model("llama2") / "config.json").read_text()) | {"num_hidden_layers": 1,
                                                                               "rope_theta": 10000.0,
                                                                               "draft_vocab_size": 40}
    torch.manual_seed(5)
    trained, ids = Head(words), torch.arange(40) * 3 + 2
    tensors = trained.state_dict() | {"d2t": ids - torch.arange(40)}
    save_file({name: w for name, w in tensors.items() if own or name not in ("lm_head.weight", "d2t")},
              tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(words))

    def head(embedded, hidden):
        guesses = trained(embedded[None], hidden[None])[0]
        return guesses, (trained if own else model).lm_head(guesses)
    first, second, tokens = head_logits(EagleHead, tiny_model("llama2"), str(tmp_path))
    want = papers_logits(model, head, tokens)
    model.float()
    assert np.abs(first - want[0]).max() < 1e-5 and np.abs(second - want[1]).max() < 1e-5


# ---- outputs

@pytest.mark.parametrize("platform, page", [("reference", 4), ("cpu", 16)])
def test_a_random_eagle_head_changes_nothing(plain, eagle, platform, page):
    assert same_outputs(plain, "eagle", f"model={eagle}", "tokens=2", platform=platform, page=page,
                        chunked_prefill_size=16) < 0.5


def test_a_random_mtp_layer_changes_nothing(plain, mtp):
    assert same_outputs(plain, "mtp", "tokens=2", model=mtp, page=4) < 0.5


# ---- what does not fit

def changed(folder: Path, source: Path, tensors=lambda kept: kept, **words) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(json.loads((source / "config.json").read_text()) | words))
    save_file(tensors(load_file(source / "model.safetensors")), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("words, tensors, error", [
    ({"hidden_size": 128}, None, "hidden_size = 128, and llama3 has 64: this head was trained for another model"),
    ({"vocab_size": 99}, None, "vocab_size = 99, and llama3 has 131"),
    ({"model_type": "gemma3_text"}, None, "a head's layers are Llama's"),
    ({}, {"midlayer.x": torch.ones(1)}, "it lacks lm_head.weight, model.layers.0.hidden_norm.weight"),
    ({}, {"norm.weight": torch.ones(64)}, "no draft head of the kind asked for: it has unknown model.norm.weight"),
    ({}, {"fc.weight": None}, "it lacks model.fc.weight"),
    ({}, {"fc.weight": torch.ones(64, 64)}, r"has shape \[64, 32\], the configuration says \[64, 64\]")])
def test_a_head_that_does_not_fit_is_refused(eagle, tmp_path, words, tensors, error):
    def edited(kept):
        return {name: w for name, w in (kept | (tensors or {})).items() if w is not None}
    folder = changed(tmp_path / "head", eagle, edited, **words)
    with pytest.raises(CheckpointError, match=error):
        engine("eagle", f"model={folder}")


def test_a_model_without_an_mtp_layer_says_so():
    words = r"^--speculative mtp: llama3 has no MTP layer, which would be called model\.layers\.3\.\*"
    with pytest.raises(CheckpointError, match=words):
        engine("mtp")


def test_a_heads_bytes_count(eagle):
    target, both = engine(), engine("eagle", f"model={eagle}")
    assert both.info.weight_bytes > target.info.weight_bytes and both.info.pages < target.info.pages
    assert any(line.startswith("drafts come from the EAGLE head") for line in both.info.report)
    for core in (target, both):
        core.close()
