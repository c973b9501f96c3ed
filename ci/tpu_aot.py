"""Compile the TPU platform's steps for chips that are not there and print their memory as a table in Markdown.

    python ci/tpu_aot.py [v5e:2x2 v6e:2x2 ...]

Needs `pip install 'jax[tpu]' flatbuffers` beside isthmus; no device, no weights: the model is of SmolLM2-135M's size,
with heads that four ranks can share, and has the shapes of a checkpoint only.
"""
from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
# libtpu would ask the metadata server of a TPU's machine for these.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

import numpy as np
from isthmus.core.models.loader import LoadedModel, load_model
from isthmus.core.platform import Bucket, RawTensor, StateSpec
from isthmus.core.quant.formats import nbytes
from isthmus.platforms.tpu.aot import Memory, compile_step, topology_mesh
from isthmus.platforms.tpu.platform import BUCKETS, PAGE_SIZES, Platform

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 768, "num_hidden_layers": 30,
          "num_attention_heads": 12, "num_key_value_heads": 4, "intermediate_size": 2048, "vocab_size": 49152,
          "tie_word_embeddings": True, "max_position_embeddings": 8192, "rms_norm_eps": 1e-5, "rope_theta": 1e5}
TOPOLOGIES = ("v5e:2x2", "v6e:2x2")
PAGES = 2048


class Shapes:
    """A checkpoint of zeros: what `load_model` asks of one, with every matrix of a layer in one format."""

    def __init__(self, config: dict[str, Any], format: str):
        self.config, self.format = config, format
        self.path, self.generation, self.norms_include_one = Path("shapes"), {}, False
        hidden, wide = config["hidden_size"], config["intermediate_size"]
        keys = config["num_key_value_heads"] * hidden // config["num_attention_heads"]
        matrices = {"self_attn.q_proj": (hidden, hidden), "self_attn.k_proj": (keys, hidden),
                    "self_attn.v_proj": (keys, hidden), "self_attn.o_proj": (hidden, hidden),
                    "mlp.gate_proj": (wide, hidden), "mlp.up_proj": (wide, hidden), "mlp.down_proj": (hidden, wide)}
        self.tensors = {"model.embed_tokens.weight": ("bf16", (config["vocab_size"], hidden)),
                        "model.norm.weight": ("f32", (hidden,))}
        for layer in range(config["num_hidden_layers"]):
            prefix = f"model.layers.{layer}."
            self.tensors |= {f"{prefix}{name}.weight": (format, shape) for name, shape in matrices.items()}
            self.tensors |= {f"{prefix}{name}.weight": ("f32", (hidden,))
                             for name in ("input_layernorm", "post_attention_layernorm")}
        self.names = frozenset(self.tensors)
        self.nbytes = sum(nbytes(*entry) for entry in self.tensors.values())

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        return self.tensors[name]

    def tensor(self, name: str) -> RawTensor:
        format, shape = self.tensors[name]
        return RawTensor(format, shape, np.zeros(nbytes(format, shape), np.uint8))


def load_shapes(format: str, world: int, config: dict[str, Any] | None = None) -> LoadedModel:
    """The model on host devices, in the form that a TPU keeps it."""
    platform = Platform({"backend": "cpu", "kernels": "mosaic", "compile_cache": "off"})
    manifest = platform.probe(0, world)
    return load_model(Shapes(config or CONFIG, format), platform, manifest, "bf16", world=world)


def steps() -> Iterator[tuple[str, Bucket]]:
    """A decode and a prefill step of the buckets that the platform has on a TPU."""
    sizes = BUCKETS["tpu"]
    for name, tokens in (("decode", sizes.tokens[0]), ("prefill", sizes.tokens[-1])):
        yield name, Bucket(tokens, sizes.rows[0], sizes.pages[0], sizes.rows[0])


def compile_model(model: LoadedModel, bucket: Bucket, topology: str, world: int) -> Memory:
    page_size = PAGE_SIZES["tpu"][0]
    spec = StateSpec(model.state_layers, "bf16", page_size, bucket.rows + 1)
    return compile_step(model.forward, model.weights, spec, PAGES, bucket, topology_mesh(topology, world))


def main(topologies: tuple[str, ...]) -> None:
    columns = ("chip", "ranks", "weights", "step", "arguments", "temporary", "code", "kernels", "compiled in")
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for format in ("bf16", "q4_1"):
        for world in (1, 4):
            model = load_shapes(format, world)
            for topology in topologies:
                for name, bucket in steps():
                    m = compile_model(model, bucket, topology, world)
                    sizes = " | ".join(f"{size / 2**20:.1f} MiB" for size in (m.arguments, m.temporary, m.code))
                    print(f"| {topology} | {world} | {format} | {name}, {bucket.tokens} tokens | {sizes} | "
                          f"{m.kernels} | {m.seconds:.0f} s |", flush=True)


if __name__ == "__main__":
    main(tuple(sys.argv[1:]) or TOPOLOGIES)
