"""The one table from a checkpoint's model type to the functions that define the model."""
from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from ..errors import CheckpointError
from ..platform import Batch, Ops, Tensor
from . import gemma, glm, llama, qwen
from .blocks import Layout, head
from .config import Family, ModelConfig
from .fields import Fields


class Architecture(NamedTuple):
    """How to read the configuration, which weights there are, and all layers of a step: [T, hidden]."""

    family: Family
    layout: Callable[[ModelConfig], Layout]
    hidden: Callable[[ModelConfig, Ops, Mapping[str, Any], Batch], Tensor]

    def forward(self, config: ModelConfig, ops: Ops, weights: Mapping[str, Any], batch: Batch) -> Tensor:
        """One step over all tokens of the batch."""
        return head(ops, self.hidden(config, ops, weights, batch), weights, batch.logit_rows, config)


ARCHITECTURES = {
    "llama": Architecture(llama.LLAMA, llama.layout, llama.hidden),
    "mistral": Architecture(llama.MISTRAL, llama.layout, llama.hidden),
    "mixtral": Architecture(llama.MIXTRAL, llama.layout, llama.hidden),
    "qwen2": Architecture(qwen.QWEN2, llama.layout, llama.hidden),
    "qwen3": Architecture(qwen.QWEN3, llama.layout, llama.hidden),
    "qwen2_moe": Architecture(qwen.QWEN2_MOE, llama.layout, llama.hidden),
    "qwen3_moe": Architecture(qwen.QWEN3_MOE, llama.layout, llama.hidden),
    "glm4_moe": Architecture(glm.GLM4_MOE, llama.layout, llama.hidden),
    "dots1": Architecture(glm.DOTS1, llama.layout, llama.hidden),
    "gemma3_text": Architecture(gemma.GEMMA3, gemma.layout, gemma.hidden),
}


def find_architecture(config: Mapping[str, Any]) -> tuple[Architecture, Mapping[str, Any]]:
    """The architecture and the configuration of the language model in it (of a text and image model: `text_config`).

    Raises `CheckpointError` with the known model types for any other.
    """
    fields = Fields(config)
    if "text_config" in fields:
        text = Fields(fields.get("text_config"), "text_config").values
        config = {k: v for k, v in config.items() if k != "text_config"} | dict(text)
    model_type = Fields(config).get("model_type", None)
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise CheckpointError(f"config: model_type = {model_type!r} is not supported; "
                              f"there are: {', '.join(sorted(ARCHITECTURES))}")
    return ARCHITECTURES[model_type], config
