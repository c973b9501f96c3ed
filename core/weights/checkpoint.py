"""A model's files as one object: its configuration, and each tensor as mapped bytes under its canonical name."""
from __future__ import annotations

import math
import mmap
from collections import Counter
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from ..errors import CheckpointError
from ..quant import activations, schemes
from ..quant.formats import FORMATS, SAFETENSORS_TYPES, nbytes
from ..quant.kv_scales import Scales, heads_of, kv_scales, unread_scheme
from ..specs import RawTensor
from . import gguf_config, mlx
from .files import read_json
from .gguf import GGUF, read_split, split_paths
from .safetensors import INDEX, open_model

PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
SIDECARS = ("mmproj", "mtp")  # GGUF files beside a model that are no model of their own
MAX_EXPERTS = 4096
MAX_SCALES = 1024  # of K or V in one layer: one for each head
QUANTIZATION = ("quantization_config", "compression_config")  # the second in early files of compressed-tensors
_FACTORS = "rope_freqs.weight"
# Format of scales -> type of its bits, those of the exponent, and their least that is no scale: not finite, or 2**119,
# whose product with the largest code, 448, is beyond f32.
_EXPONENTS = {"f64": ("<u8", 0x7ff0 << 48, 1142 << 52), "f32": ("<u4", 0x7f80 << 16, 246 << 23),
              "bf16": ("<u2", 0x7f80, 246 << 7), "f16": ("<u2", 0x7c00, 0x7c00), "f8_e4m3": ("u1", 0x7f, 0x7f),
              "f8_e8m0": ("u1", 0xff, 246)}
_FUSED = ".experts.gate_up_proj"  # [experts, 2 * width, in] as transformers 5 holds it; without ".weight"


class Place(NamedTuple):
    """Where a tensor lies. `heads` > 0: its rows are the interleaved pairs of that many heads. `beside`: the tensors
    that its format keeps apart from the codes."""

    map: mmap.mmap
    dtype: str
    shape: tuple[int, ...]
    offset: int
    heads: int = 0
    beside: tuple[Place, ...] = ()

    @property
    def nbytes(self) -> int:
        return nbytes(self.dtype, self.shape) + sum(part.nbytes for part in self.beside)


class Checkpoint:
    """An opened checkpoint; a context manager.

    config:     in the words of a Hugging Face config.json, whatever the files were.
    generation: generation_config.json, {} without one.
    metadata:   of a GGUF file, {} otherwise.
    norms_include_one: norm weights are stored as 1 + w.
    kv_scales:  layer -> scales of K and of V in 8-bit floats, where it was calibrated for them.
    kv_note:    what to tell of its `kv_cache_scheme`, "" for nothing.
    narrow:     it was made for activations in 8 bits.
    input_scales: weight -> the scale of what it is multiplied with, where those were calibrated to one for all tokens.
    """

    def __init__(self, path: Path, kind: Literal["gguf", "safetensors"], config: dict[str, Any],
                 places: dict[str, Place], metadata: dict[str, Any] | None = None,
                 generation: dict[str, Any] | None = None, norms_include_one: bool = False,
                 kv_scales: Scales | None = None, kv_note: str = "", narrow: bool = False,
                 input_scales: dict[str, float] | None = None):
        self.path, self.kind, self.config, self._places = path, kind, config, places
        self.metadata, self.generation = metadata or {}, generation or {}
        self.norms_include_one, self.narrow = norms_include_one, narrow
        self.kv_scales, self.kv_note, self.input_scales = kv_scales or {}, kv_note, input_scales or {}

    @property
    def names(self) -> frozenset[str]:
        return frozenset(self._places)

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors as stored."""
        return sum(place.nbytes for place in self._places.values())

    def formats(self) -> dict[str, int]:
        """How many tensors are stored in each format, the most frequent first."""
        return dict(Counter(p.dtype for p in self._places.values()).most_common())

    def census(self) -> Counter[str]:
        """How many weights are stored in each format."""
        found: Counter[str] = Counter()
        for place in self._places.values():
            found[place.dtype] += math.prod(place.shape)
        return found

    def tensor(self, name: str) -> RawTensor:
        """The tensor's bytes, a view of the file except where rows must be put in order. Raises `CheckpointError`, also
        for scales beside it that are no numbers."""
        raw = _raw(self._place(name))
        for part in raw.extra:
            kind, exponent, limit = _EXPONENTS.get(part.dtype, ("u1", 0, 1))
            if exponent and (part.data.view(kind) & exponent >= limit).any():
                raise CheckpointError(f"{self.path}: {name} has scales that are no finite numbers below 2**119: "
                                      "download it again")
        return raw

    def describe(self, name: str) -> tuple[str, tuple[int, ...]]:
        """Format and logical shape of a tensor, without touching its bytes. Raises `CheckpointError`."""
        place = self._place(name)
        return place.dtype, place.shape

    def _place(self, name: str) -> Place:
        place = self._places.get(name)
        if place is None:
            raise CheckpointError(f"{self.path} has no tensor {name!r}; it has {len(self._places)}" +
                                  (f", among them {min(self._places)!r}" if self._places else ""))
        return place

    def close(self) -> None:
        """Give the files back. Views handed out before stay valid and keep their file mapped until they are gone."""
        maps = {id(p.map): p.map for place in self._places.values() for p in (place, *place.beside)}
        self._places = {}
        for mapping in maps.values():
            try:
                mapping.close()
            except BufferError:  # a view is still in use: the mapping goes when the view goes
                pass

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        formats = ", ".join(f"{n} x {f}" for f, n in self.formats().items())
        return f"Checkpoint({str(self.path)!r}, {self.config.get('model_type')}, {formats})"


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a GGUF file (any part of a split one), or a folder with config.json and safetensors, or with one GGUF model.

    Raises `CheckpointError`, whose message names what is missing, damaged or unsafe, and the way out.
    """
    path = Path(path)
    if path.is_dir():
        return _open_folder(path)
    if not path.exists():
        raise CheckpointError(f"{path} does not exist")
    if path.suffix == ".safetensors":
        raise CheckpointError(f"{path} is one file of a model: give its folder, with config.json and the tokenizer")
    if path.suffix in PICKLES:
        raise CheckpointError(f"{path.name}: {_pickle_advice()}")
    return _open_gguf(path)


def _open_folder(folder: Path) -> Checkpoint:
    tensors = list(folder.glob("*.safetensors")) or (folder / INDEX).exists()
    models = sorted({split_paths(p)[0] for p in folder.glob("*.gguf") if not p.name.startswith(SIDECARS)})
    if models and not tensors:
        if len(models) > 1:
            raise CheckpointError(f"{folder} holds {len(models)} GGUF models, name one of them: "
                                  f"{', '.join(p.name for p in models[:8])}")
        return _open_gguf(models[0])
    if not tensors:
        if any(p.suffix in PICKLES for p in folder.iterdir()):
            raise CheckpointError(f"{folder} has its weights only as pickle files: {_pickle_advice()}")
        raise CheckpointError(f"{folder} holds no model: expected config.json with *.safetensors, or one .gguf file")
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder} has safetensors but no config.json: get it from where the model came from")
    config = read_json(folder / "config.json")
    extra = folder / "generation_config.json"
    places: dict[str, Place] = {}
    for name, file in open_model(folder):
        entry = file.tensors[name]
        place = Place(file.map, SAFETENSORS_TYPES[entry.dtype], entry.shape, file.base + entry.begin)
        places |= _apart(f"{folder}: tensor {name!r}", name, place)
    where, affine, said = _quantization(folder, config)
    scheme = said.get("kv_cache_scheme") if isinstance(said, dict) else None
    note, scales = unread_scheme(scheme), {}
    if not note:
        scales = kv_scales(str(folder), places, lambda name: _floats(f"{folder}: {name}", places[name]),
                           heads_of(config))
        note = "kv_cache_scheme, but no scales of K and V: taken as 1" if scheme is not None and not scales else ""
    places, narrow, inputs = _with_schemes(where, affine, said, places)
    return Checkpoint(folder, "safetensors", config, places, kv_scales=scales, kv_note=note, narrow=narrow,
                      input_scales=inputs, generation=read_json(extra) if extra.is_file() else None)


def _apart(where: str, name: str, place: Place) -> dict[str, Place]:
    """A tensor under its name; fused experts one by one and gate apart from up, as other checkpoints have them."""
    if name.endswith(".experts.down_proj"):
        return {f"{name}.weight": place}
    if not name.endswith(_FUSED):
        return {name: place}
    experts, rows, width = place.shape if len(place.shape) == 3 else (0, 0, 0)
    if not 1 <= experts <= MAX_EXPERTS or rows % 2:
        raise CheckpointError(f"{where} has shape {list(place.shape)}, not [1 to {MAX_EXPERTS} experts, 2 * n, m]")
    half = place._replace(shape=(rows // 2, width))
    return {f"{name.removesuffix(_FUSED)}.experts.{i // 2}.{('gate_proj', 'up_proj')[i % 2]}.weight":
            half._replace(offset=place.offset + i * half.nbytes) for i in range(2 * experts)}


def _quantization(folder: Path, config: dict[str, Any]) -> tuple[str, Any, Any]:
    """What the configuration says of quantization, which is taken out of it: the file, MLX's settings, and others'."""
    where, affine, said = str(folder / "config.json"), config.pop("quantization", None), None
    beside = folder / "hf_quant_config.json"
    for holder in (config, config.get("text_config")):
        for key in QUANTIZATION if isinstance(holder, dict) else ():
            said = holder.pop(key, None) if said is None else said
    if said is None and beside.is_file():
        where, said = str(beside), read_json(beside).get("quantization")
        said = {"quant_method": "modelopt", **said} if isinstance(said, dict) else said
    return where, affine, said


def _with_schemes(where: str, affine: Any, said: Any,
                  places: dict[str, Place]) -> tuple[dict[str, Place], bool, dict[str, float]]:
    """Each quantized tensor as one, with its logical shape; whether activations are meant to have 8 bits; and their
    scales where they were calibrated.

    affine, said: MLX's and others' settings in the file `where`, None = none.
    """
    stored, narrow, inputs = {name: (place.dtype, place.shape) for name, place in places.items()}, False, {}
    if affine is not None:  # MLX says it twice, the second time for other programs
        found, used = mlx.affine_tensors(where, affine, stored)
    elif said is not None:
        found, used = schemes.quantized(where, said, stored, lambda name: _read(places[name]))
        narrow = activations.declared(said)
        if activations.calibrated(said):
            inputs = activations.input_scales(
                where, {name: matrix.format for name, matrix in found.items()}, stored,
                lambda name: _floats(f"{where}: {name}", places[name]), lambda name: _read(places[name]))
    else:
        return places, narrow, inputs
    return {name: place for name, place in places.items() if name not in used} | {
        name: places[matrix.codes]._replace(
            dtype=matrix.format, shape=matrix.shape,
            beside=tuple(places[part.name]._replace(dtype=part.dtype, shape=part.shape) for part in matrix.beside))
        for name, matrix in found.items()}, narrow, inputs


def _pickle_advice() -> str:
    return "pickle can run code and is never loaded; convert to safetensors (save_pretrained of transformers does)"


def _open_gguf(path: Path) -> Checkpoint:
    parts = read_split(path)
    metadata = parts[0].metadata
    arch = gguf_config.arch_of(metadata)
    where: dict[str, GGUF] = {name: part for part in parts for name in part.tensors}
    shapes = {name: part.tensors[name].shape for name, part in where.items()}
    config = gguf_config.translate(metadata, shapes, _factors(where[_FACTORS]) if _FACTORS in where else None)
    places: dict[str, Place] = {}
    for name, part in where.items():
        if name == _FACTORS:
            continue
        info, canonical = part.tensors[name], gguf_config.canonical_name(name, arch.model_type)
        if canonical in places:
            raise CheckpointError(f"{part.path}: tensor {name!r} means {canonical!r}, which another tensor is already")
        shape = (1, *info.shape) if name.endswith("ffn_gate_inp_shexp.weight") and len(info.shape) == 1 else info.shape
        heads = 0
        if arch.permuted and gguf_config.heads_key(name):
            heads = config.get(gguf_config.heads_key(name), 0)
            _check_heads(f"{part.path}: tensor {name!r}", info.shape, info.dtype, heads)
        places[canonical] = Place(part.map, info.dtype, shape, info.offset, heads)
    return Checkpoint(path, "gguf", config, places, metadata, norms_include_one=arch.norms_include_one)


def _factors(part: GGUF) -> np.ndarray:
    """The divisors of the angular frequencies that Llama 3.x files store, float32 [head_dim / 2]."""
    info = part.tensors[_FACTORS]
    if info.dtype != "f32" or len(info.shape) != 1 or info.shape[0] > 4096:
        raise CheckpointError(f"{part.path}: {_FACTORS} is {info.dtype} of shape {info.shape}, not f32 [head_dim / 2]")
    factors = np.frombuffer(part.map, "<f4", info.shape[0], info.offset)
    if not (np.isfinite(factors) & (factors > 0)).all():
        raise CheckpointError(f"{part.path}: {_FACTORS} has values that are not finite numbers above 0")
    return factors


def _check_heads(where: str, shape: tuple[int, ...], dtype: str, heads: int) -> None:
    plain = FORMATS[dtype].block == 1
    if not heads or not shape or shape[0] == 0 or shape[0] % (2 * heads) or (len(shape) == 1 and not plain):
        raise CheckpointError(f"{where} is {dtype} of shape {shape}, which {heads} heads of an even size cannot share")


def _raw(place: Place) -> RawTensor:
    return RawTensor(place.dtype, place.shape, _read(place), tuple(map(_raw, place.beside)))


def _floats(where: str, place: Place) -> np.ndarray:
    """The values of a small tensor, in float32."""
    if place.dtype not in ("bf16", "f16", "f32") or not 0 < math.prod(place.shape) <= MAX_SCALES:
        raise CheckpointError(f"{where} is {place.dtype} {list(place.shape)}; it must be f16, bf16 or f32, and 1 to "
                              f"{MAX_SCALES} numbers")
    if place.dtype == "bf16":
        return (_read(place).view("<u2").astype(np.uint32) << 16).view(np.float32)
    return _read(place).view({"f16": "<f2", "f32": "<f4"}[place.dtype]).astype(np.float32)


def _read(place: Place) -> np.ndarray:
    """uint8 bytes in the order of the logical shape."""
    data = np.frombuffer(place.map, np.uint8, nbytes(place.dtype, place.shape), place.offset)
    if not place.heads:
        return data
    # Row 2i + j of a head in the file is row j * head_dim / 2 + i of the model; a row is whole blocks of bytes.
    row = data.size // place.shape[0]
    pairs = data.reshape(place.heads, -1, 2, row)
    return pairs.swapaxes(1, 2).reshape(-1)
