"""The same weights in each class of precision: GGUF files in bf16, f16 and q8_0 out of a shipped one.

    ENVIRONMENT/bin/python benchmarks/peers/models.py MODEL.gguf FOLDER        # needs the package gguf

A model that is shipped in 4 bits carries the error of those in every class: all engines of a class read the same
values.
"""
from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
from gguf import GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, LlamaFileType
from gguf.quants import dequantize, quantize

CLASSES = {"bf16": (GGMLQuantizationType.BF16, LlamaFileType.MOSTLY_BF16),
           "f16": (GGMLQuantizationType.F16, LlamaFileType.MOSTLY_F16),
           "q8_0": (GGMLQuantizationType.Q8_0, LlamaFileType.MOSTLY_Q8_0)}


def write(reader: GGUFReader, name: str, to: Path) -> None:
    """A file with every matrix of `reader` in another type; vectors stay in float32."""
    kind, file_type = CLASSES[name]
    architecture = reader.get_field("general.architecture").contents()
    writer = GGUFWriter(to, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        inner = field.types[-1] if field.types[0] == GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), field.types[0], inner)
    writer.add_file_type(file_type)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        if values.ndim < 2:
            writer.add_tensor(tensor.name, values)
        else:
            writer.add_tensor(tensor.name, quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main() -> None:
    source, folder = Path(sys.argv[1]), Path(sys.argv[2])
    folder.mkdir(parents=True, exist_ok=True)
    for name in CLASSES:
        to = folder / f"{name}.gguf"
        if not to.exists():
            fresh = to.with_suffix(".part")
            write(GGUFReader(source), name, fresh)
            fresh.rename(to)
        print(to)


if __name__ == "__main__":
    main()
