"""EAGLE-3 heads: their numbers are the paper's, and what is said never changes."""
from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from isthmus.core.errors import CheckpointError
from isthmus.core.speculation.heads import EagleHead
from safetensors.torch import load_file, save_file
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from .drafting import engine, same_outputs, without_drafts
from .test_draft_heads import changed, double, head_logits  # noqa: F401  (a fixture)
from .tiny import hf_model, tiny_model

COST = 20  # seconds
SMALL = 50  # tokens of the head's vocabulary


@pytest.fixture(scope="module")
def plain():
    return without_drafts()


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory) -> Path:
    """A random head for the model "llama3", in the words in which they are published."""
    folder, config = tmp_path_factory.mktemp("eagle3"), hf_model("llama3").config
    draw, width, size = torch.Generator().manual_seed(3), config.hidden_size, config.head_dim
    heads, kv, inner = config.num_attention_heads * size, config.num_key_value_heads * size, config.intermediate_size
    shapes = {"self_attn.q_proj": (heads, 2 * width), "self_attn.k_proj": (kv, 2 * width),
              "self_attn.v_proj": (kv, 2 * width), "self_attn.o_proj": (width, heads), "mlp.gate_proj": (inner, width),
              "mlp.up_proj": (inner, width), "mlp.down_proj": (width, inner)}
    tensors = {f"midlayer.{name}.weight": shape for name, shape in shapes.items()}
    tensors |= {"fc.weight": (width, 3 * width), "lm_head.weight": (SMALL, width)}
    tensors = {name: torch.randn(shape, generator=draw) * shape[1] ** -0.5 for name, shape in tensors.items()}
    tensors |= {f"{name}.weight": 1 + torch.randn(width, generator=draw) * 0.2 for name in (
        "midlayer.hidden_norm", "midlayer.input_layernorm", "midlayer.post_attention_layernorm", "norm")}
    ids = torch.randperm(131, generator=draw)[:SMALL]
    ids = torch.cat([ids[ids != 23][:SMALL - 1], torch.tensor([23])]).sort().values
    tensors |= {"d2t": ids - torch.arange(SMALL), "t2d": torch.isin(torch.arange(131), ids)}
    save_file(tensors, folder / "model.safetensors")
    words = json.loads((tiny_model("llama3") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(words | {"num_hidden_layers": 1, "draft_vocab_size": SMALL}))
    return folder


class Layer:
    """The head in torch, by the paper."""

    def __init__(self, config, tensors: dict[str, torch.Tensor]):
        self.config, self.own, self.rotary = config, tensors, LlamaRotaryEmbedding(config)

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.own[f"{name}.weight"]

    def __call__(self, embedded: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
        """[T, hidden] both -> [T, hidden]."""
        count, size = len(g), self.config.head_dim
        x = torch.cat([self.norm(embedded, "midlayer.input_layernorm"), self.norm(g, "midlayer.hidden_norm")], -1)
        q, k, v = ((x @ self.own[f"midlayer.self_attn.{part}_proj.weight"].T).view(1, count, -1, size).transpose(1, 2)
                   for part in "qkv")
        q, k = apply_rotary_pos_emb(q, k, *self.rotary(x[None], torch.arange(count)[None]))
        y = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        x = g + y.transpose(1, 2).reshape(count, -1) @ self.own["midlayer.self_attn.o_proj.weight"].T
        gate, up = (self.norm(x, "midlayer.post_attention_layernorm") @ self.own[f"midlayer.mlp.{part}_proj.weight"].T
                    for part in ("gate", "up"))
        return x + (torch.nn.functional.silu(gate) * up) @ self.own["midlayer.mlp.down_proj.weight"].T

    def logits(self, x: torch.Tensor) -> np.ndarray:
        return (self.norm(x, "norm") @ self.own["lm_head.weight"].T).numpy()


def test_logits_are_the_papers(eagle3, double):  # noqa: F811
    model = hf_model("llama3").double()
    tensors = {name: w.double() if w.is_floating_point() else w
               for name, w in load_file(eagle3 / "model.safetensors").items()}
    first, second, tokens = head_logits(EagleHead, tiny_model("llama3"), str(eagle3))
    layer, found = Layer(model.config, tensors), []
    with torch.no_grad():
        states = model.model(torch.tensor([tokens[:8]]), use_cache=False, output_hidden_states=True).hidden_states
        taps = (2, model.config.num_hidden_layers // 2, model.config.num_hidden_layers - 3)
        g = torch.cat([states[i][0] for i in taps], -1) @ tensors["fc.weight"].T
        before = torch.cat([g[:1], g])
        for count in (9, 10):
            x = layer(model.model.embed_tokens(torch.tensor(tokens[:count])), before)
            before = torch.cat([before, x[-1:]])
            found.append(layer.logits(x[-1]))
    model.float()
    for have, want in zip((first, second), found, strict=True):
        assert have.shape == want.shape and np.abs(have - want).max() < 1e-5 < np.abs(want).max()


@pytest.fixture
def example(monkeypatch):
    """The modules of examples/train_eagle."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "examples" / "train_eagle"))


def test_the_head_that_the_example_trains_is_the_papers(eagle3, double, example):  # noqa: F811
    from head import Head3
    model, width = hf_model("llama2").double(), 64
    words = json.loads((tiny_model("llama2") / "config.json").read_text()) | {
        "rope_theta": 10000.0, "draft_vocab_size": SMALL}
    torch.manual_seed(5)
    trained = Head3(words)
    layer = Layer(model.config, trained.state_dict())
    embedded, g = torch.randn(2, 7, width)
    with torch.no_grad():
        have, want = trained(embedded[None], g[None])[0], layer(embedded, g)
        logits = trained.logits(have).numpy()
    assert (have - want).abs().max() < 1e-5 and np.abs(logits - layer.logits(want)).max() < 1e-5
    model.float()


@pytest.mark.parametrize("kind", ["Training", "Training3"])
def test_the_example_learns_and_its_head_is_served(plain, example, tmp_path, kind):
    """A few steps on made-up texts: the loss falls, it goes on where it was, and the checkpoint is one."""
    import train
    rng, config = np.random.default_rng(0), json.loads((tiny_model("llama3") / "config.json").read_text())
    lengths = [12] * 32
    np.savez(tmp_path / "text-0.npz", tokens=rng.integers(3, 60, 384).astype(np.int32), lengths=lengths,
             answers=[4] * 32)
    states = torch.from_numpy(rng.normal(size=(384, 256))).bfloat16()
    np.save(tmp_path / "states-0.npy", states.view(torch.int16).numpy())
    matrix = load_file(tiny_model("llama3") / "model.safetensors")["model.embed_tokens.weight"].bfloat16()
    given = (tmp_path, config | {"num_hidden_layers": 1, "rope_theta": 10000.0}, matrix, matrix[0], matrix)
    training = getattr(train, kind)(*given, train.Texts(tmp_path))
    losses = [training.learn(np.arange(8), 0.0) for _ in range(12)]
    assert losses[-1] < losses[0]
    training.save()
    again = getattr(train, kind)(*given, train.Texts(tmp_path))
    again.load()
    assert again.step == 12 and torch.equal(again.head.fc.weight, training.head.fc.weight)
    same_outputs(plain, "eagle", f"model={tmp_path / 'head'}", "tokens=2")


@pytest.mark.parametrize("platform, page, more", [("reference", 4, ()), ("cpu", 16, ()),
                                                  ("reference", 16, ("branches=2",))])
def test_a_random_head_changes_nothing(plain, eagle3, platform, page, more):
    assert same_outputs(plain, "eagle", f"model={eagle3}", "tokens=2", *more, platform=platform, page=page,
                        chunked_prefill_size=16) < 0.5


def test_other_layers_are_read_where_the_configuration_names_them(plain, eagle3, tmp_path):
    folder = changed(tmp_path / "head", eagle3, eagle_config={"eagle_aux_hidden_state_layer_ids": [0, 2, 1]})
    core = engine("eagle", f"model={folder}")
    assert any("drafts come from the EAGLE head" in line for line in core.info.report)
    core.close()


def test_a_head_with_the_whole_vocabulary(plain, eagle3, tmp_path):
    def whole(kept):
        matrix = torch.randn(131, 64, generator=torch.Generator().manual_seed(1)) * 0.1
        return {name: w for name, w in kept.items() if name not in ("d2t", "t2d")} | {"lm_head.weight": matrix}
    folder = changed(tmp_path / "head", eagle3, whole)
    same_outputs(plain, "eagle", f"model={folder}", "tokens=2")


@pytest.mark.parametrize("words, tensors, error", [
    ({"num_hidden_layers": 2}, {}, "an EAGLE-3 head has one layer"),
    ({"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}, {}, r"layers \[0, 1, 7\], and llama3 has the layers 0 to 2"),
    ({}, {"norm.weight": None}, "it lacks model.norm.weight"),
    ({}, {"midlayer.x": torch.ones(1)}, "it has unknown model.layers.0.x"),
    ({}, {"fc.weight": torch.ones(64, 64)}, r"fc.weight is f32 \[64, 64\]; it must be .* \[hidden, 3 \* hidden\]"),
    ({}, {"lm_head.weight": torch.ones(49, 64)}, r"weight has shape \[49, 64\], the configuration says \[50, 64\]"),
    ({}, {"d2t": torch.full((SMALL,), 100)}, "d2t says tokens twice or outside the vocabulary of 131"),
    ({}, {"d2t": torch.ones(SMALL)}, r"d2t is f32 \[50\]; whole numbers")])
def test_a_head_that_does_not_fit_is_refused(eagle3, tmp_path, words, tensors, error):
    def edited(kept):
        return {name: w for name, w in (kept | tensors).items() if w is not None}
    folder = changed(tmp_path / "head", eagle3, edited, **words)
    with pytest.raises(CheckpointError, match=error):
        engine("eagle", f"model={folder}")
