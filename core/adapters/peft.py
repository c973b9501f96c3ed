"""Low-rank adapters in PEFT's form: a folder with adapter_config.json and adapter_model.safetensors.

An adapter adds scale * B A to the weight of a projection (Hu et al. 2021, LoRA), where scale is lora_alpha / r, or
lora_alpha / sqrt(r) with `use_rslora` (Kalajdzievski 2023). The configuration's words are those of PEFT's `LoraConfig`.
Nothing of a file is believed before it is checked, and what would change the result in any other way is refused.
"""
from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError, printable
from ..models.fields import Fields
from ..quant.formats import SAFETENSORS_TYPES, nbytes
from ..specs import RawTensor
from ..weights.files import read_json
from ..weights.safetensors import Entry, SafeTensors, open_safetensors

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
FLOATS = {"f64": "<f8", "f32": "<f4", "f16": "<f2", "bf16": "<u2"}
ALL_LINEAR = "all-linear"
PREFIX = "base_model.model."
_TENSOR = re.compile(r"(?P<module>.+)\.lora_(?P<side>[AB])(?:\.[A-Za-z0-9_-]{1,64})?\.weight")
_PATTERN = re.compile(r"\^?[\w.]{1,256}\$?")
MAX_PATTERNS = 4096
# Settings that compute something else -> what they are called in a message. Any value but these two refuses.
OFF = (None, False, "none", [], {}, "")
REFUSED = {
    "use_dora": "DoRA, which scales whole columns", "bias": "trained biases", "lora_bias": "biases of B",
    "modules_to_save": "whole modules beside the low-rank ones", "fan_in_fan_out": "weights of transposed layers",
    "layer_replication": "repeated layers", "use_qalora": "QALoRA", "alora_invocation_tokens": "activated LoRA",
    "trainable_token_indices": "trained tokens", "target_parameters": "parameters without a module, as of experts",
    "use_bdlora": "block-diagonal LoRA", "arrow_config": "Arrow routing", "megatron_config": "Megatron's layers",
    "velora_config": "VeLoRA", "kappa_tuning_config": "kappa tuning"}
# Starts that take from the base weights what A and B are to give back.
CHANGES_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")


class Shape(NamedTuple):
    """Of a projection that an adapter may change."""

    outputs: int
    inputs: int


class Pair(NamedTuple):
    """A [r, in] and B [out, r] of one module, as stored, and the factor on their product."""

    a: RawTensor
    b: RawTensor
    scale: float

    @property
    def rank(self) -> int:
        return self.a.shape[0]

    def factors(self) -> tuple[np.ndarray, np.ndarray]:
        """A, and B times the factor, float32. A row of A beyond 1 is divided by a power of two, and the column of B
        multiplied with it: so what other adapters' tokens make of A, before it is masked, is as small as their input.
        """
        a, b = floats(self.a), floats(self.b).astype(np.float64) * self.scale
        exponents = np.maximum(np.frexp(np.abs(a).max(axis=1, initial=0.0))[1], 0)
        with np.errstate(over="ignore", invalid="ignore"):
            return np.ldexp(a, -exponents[:, None]), np.ldexp(b, exponents).astype(np.float32)


@dataclass(frozen=True)
class Adapter:
    """One adapter, its bytes copied from the file. rank: the largest of its modules; base: what it was made for, as its
    makers called it."""

    path: Path
    rank: int
    modules: Mapping[str, Pair]
    base: str = ""

    @cached_property
    def digest(self) -> str:
        """Of all that counts: a file may change after it was read."""
        found = hashlib.blake2b(digest_size=16)
        for name, pair in sorted(self.modules.items()):
            found.update(f"{name} {pair.scale!r} {pair.a.dtype} {pair.b.dtype} {pair.a.shape} ".encode())
            found.update(pair.a.data)
            found.update(pair.b.data)
        return found.hexdigest()


def floats(raw: RawTensor) -> np.ndarray:
    """A dense tensor's values, float32, a fresh array."""
    values = np.frombuffer(raw.data, FLOATS[raw.dtype]).reshape(raw.shape)
    if raw.dtype == "bf16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore"):
        return values.astype(np.float32)


def read_adapter(path: Path, shapes: Mapping[str, Shape], max_rank: int, largest: float = math.inf) -> Adapter:
    """The adapter in a folder. Raises `CheckpointError` that names the file, the value and the way out.

    shapes: by module, such as "model.layers.0.self_attn.q_proj", what may be adapted. largest: value of a weight that
    the dtype of the computation holds.
    """
    path = Path(path)
    _check_folder(path)
    config = _Config(Fields(read_json(path / CONFIG), str(path / CONFIG)))
    file = open_safetensors(path / WEIGHTS)
    try:
        modules = _pairs(file, config, shapes, max_rank)
        for name, pair in modules.items():
            _check_values(f"{path / WEIGHTS}: {name}", pair, largest)
    finally:
        file.map.close()
    if not modules:
        raise CheckpointError(f"{path / WEIGHTS} holds no tensor, so the adapter would change nothing")
    return Adapter(path, max(pair.rank for pair in modules.values()), modules, config.base)


def _check_folder(path: Path) -> None:
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder: an adapter is one with {CONFIG} and {WEIGHTS}")
    if not (path / CONFIG).is_file():
        what = ": it is a model, and is served by itself" if (path / "config.json").is_file() else ""
        raise CheckpointError(f"{path} has no {CONFIG}, so it is no adapter in PEFT's form{what}")
    if not (path / WEIGHTS).is_file():
        if (path / PICKLED).exists():
            raise CheckpointError(f"{path} has its weights only as {PICKLED}: pickle can run code and is never loaded; "
                                  "save it again with PEFT's save_pretrained, which writes safetensors")
        raise CheckpointError(f"{path} lacks {WEIGHTS}")


class _Config:
    """What adapter_config.json says, checked."""

    def __init__(self, fields: Fields) -> None:
        self._fields = fields
        kind = fields.get("peft_type", "LORA")
        if kind != "LORA":
            raise fields.error("peft_type", kind, "LORA")
        for key, what in REFUSED.items():
            value = fields.values.get(key)
            if not any(value is off or type(value) is type(off) and value == off for off in OFF):
                raise CheckpointError(f"{fields.where}: {key} = {str(value)[:80]!r} asks for {what}, which is not "
                                      "supported: only plain low-rank pairs are")
        start = fields.get("init_lora_weights", True)
        if isinstance(start, str) and start.lower().startswith(CHANGES_BASE):
            raise CheckpointError(f"{fields.where}: init_lora_weights = {start[:40]!r} changes the base model's "
                                  "weights too: convert the adapter to plain LoRA (PEFT's "
                                  "path_initial_model_for_weight_conversion)")
        self.rank, self.alpha = fields.integer("r", 8, high=2**16), _alpha(fields, "lora_alpha", 8)
        self.root = fields.flag("use_rslora", False)
        self.ranks = {key: Fields({key: value}, f"{fields.where}: rank_pattern").integer(key, high=2**16)
                      for key, value in self._patterns("rank_pattern")}
        self.alphas = {key: _alpha(Fields({key: value}, f"{fields.where}: alpha_pattern"), key, None)
                       for key, value in self._patterns("alpha_pattern")}
        self.targets = self._targets()
        base = fields.get("base_model_name_or_path", "")
        self.base = printable(base) if isinstance(base, str) else ""

    def _patterns(self, key: str) -> Sequence[tuple[str, Any]]:
        found = Fields(self._fields.get(key, {}), f"{self._fields.where}: {key}").values
        for name in found:
            if len(found) > MAX_PATTERNS or not _PATTERN.fullmatch(name):
                raise CheckpointError(f"{self._fields.where}: {key} names {name[:80]!r}; only plain module names are "
                                      f"read, no regular expressions, and at most {MAX_PATTERNS} of them")
        return list(found.items())

    def _targets(self) -> frozenset[str] | None:
        """The last parts of module names; None = whatever has tensors. A regular expression is never evaluated: the
        tensors say what it found when they were saved."""
        targets = self._fields.get("target_modules", None)
        if isinstance(targets, (list, tuple)) and all(isinstance(target, str) for target in targets):
            return frozenset(targets)
        if targets is None or isinstance(targets, str):
            return None
        raise self._fields.error("target_modules", targets, f"a list of module names, or {ALL_LINEAR!r}")

    def aims_at(self, module: str) -> bool:
        """As PEFT: a target is a module's whole name or its last parts."""
        return self.targets is None or any(module == t or module.endswith("." + t) for t in self.targets)

    def rank_of(self, module: str) -> int:
        return _matching(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        rank = self.rank_of(module)
        return _matching(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.root else rank)


def _alpha(fields: Fields, key: str, default: Any) -> float:
    value = fields.get(key, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not abs(value) <= 1e6:
        raise fields.error(key, value, "a number of at most 1e6")
    return float(value)


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    """The value of the first name that is the module's, or its last parts; with ^ in front only the whole name is."""
    for name, value in patterns.items():
        plain = name.removeprefix("^").removesuffix("$")
        if module == plain or not name.startswith("^") and module.endswith("." + plain):
            return value
    return default


def _pairs(file: SafeTensors, config: _Config, shapes: Mapping[str, Shape], max_rank: int) -> dict[str, Pair]:
    found: dict[str, dict[str, Entry]] = {}
    theirs: dict[str, str] = {}
    for name, entry in file.tensors.items():
        own, side = _place(file.path, name)
        module = canonical(own)
        if module not in shapes:
            raise CheckpointError(f"{file.path}: {name[:200]!r} changes {_reason(module)}")
        if not config.aims_at(own):
            raise CheckpointError(f"{file.path} has {name[:200]!r}, but target_modules of its {CONFIG} names no such "
                                  "module")
        if side in found.setdefault(module, {}):
            raise CheckpointError(f"{file.path}: {module} has two tensors {side}")
        found[module][side], theirs[module] = entry, own
    pairs = {}
    for module, sides in found.items():
        where = f"{file.path}: {module}"
        rank = _check_shapes(where, sides, shapes[module], max_rank)
        if rank != (said := config.rank_of(theirs[module])):
            raise CheckpointError(f"{where} has rank {rank}, its {CONFIG} says {said}")
        pairs[module] = Pair(*(_raw(where, file, sides[side]) for side in "AB"), config.scale_of(theirs[module]))
    return pairs


def _place(path: Path, name: str) -> tuple[str, str]:
    """Module, as the adapter's makers call it, and side of a tensor."""
    found = _TENSOR.fullmatch(name)
    if found is None:
        words = {"lora_embedding_": "an adapter of the embedding", "magnitude": "DoRA's magnitudes",
                 "modules_to_save": "a whole module", "bias": "a trained bias"}
        what = next((word for part, word in words.items() if part in name), "no part of a plain low-rank adapter")
        raise CheckpointError(f"{path}: {name[:200]!r} is {what}, which is not supported")
    return found["module"].removeprefix(PREFIX), found["side"]


def _reason(module: str) -> str:
    if module == "lm_head" or module.endswith("embed_tokens"):
        return "the head or the embedding, which no adapter can change here: train it without them"
    if ".experts" in module:
        return "experts of a sparse layer, which no adapter can change here: train it without them"
    return f"{module[:120]!r}, which the model does not have: is the adapter for another model?"


# Where models of text and images keep the language model, and Mixtral its router: as the loader reads checkpoints.
_RENAMED = {"language_model.model.": "model.", "model.language_model.": "model."}
_INNER = {".block_sparse_moe.": ".mlp.", ".shared_experts.": ".shared_expert."}


def canonical(module: str) -> str:
    """A module's name as the layouts of the models have it."""
    prefix = next((prefix for prefix in _RENAMED if module.startswith(prefix)), "")
    module = _RENAMED.get(prefix, "") + module[len(prefix):]
    for theirs, ours in _INNER.items():
        module = module.replace(theirs, ours)
    return module


def _check_shapes(where: str, sides: Mapping[str, Entry], shape: Shape, max_rank: int) -> int:
    """The rank of a module's two tensors."""
    if len(sides) < 2:
        raise CheckpointError(f"{where} has a tensor {min(sides)} and none beside it: the file is damaged")
    a, b = sides["A"], sides["B"]
    rank = a.shape[0] if a.shape else 0
    if rank < 1 or a.shape != (rank, shape.inputs) or b.shape != (shape.outputs, rank):
        raise CheckpointError(f"{where} has A {list(a.shape)} and B {list(b.shape)}; the model's weight is "
                              f"[{shape.outputs}, {shape.inputs}], so they must be [r, {shape.inputs}] and "
                              f"[{shape.outputs}, r]: is the adapter for another model?")
    if rank > max_rank:
        raise CheckpointError(f"{where} has rank {rank}, the limit is {max_rank} (--max-lora-rank)")
    return rank


def _raw(where: str, file: SafeTensors, entry: Entry) -> RawTensor:
    """A copy: the file may change or go afterwards."""
    dtype = SAFETENSORS_TYPES[entry.dtype]
    if dtype not in FLOATS:
        raise CheckpointError(f"{where} is stored as {entry.dtype}; it must be F32, F16, BF16 or F64")
    begin = file.base + entry.begin
    return RawTensor(dtype, entry.shape, np.frombuffer(file.map[begin:begin + nbytes(dtype, entry.shape)], np.uint8))


def _check_values(where: str, pair: Pair, largest: float) -> None:
    a, b = pair.factors()
    if not (np.isfinite(a).all() and np.isfinite(b).all()):
        raise CheckpointError(f"{where} has values that are no finite numbers in float32")
    if np.abs(b).max(initial=0.0) > largest:
        raise CheckpointError(f"{where}: B times its scale goes up to {np.abs(b).max():.3g}, beyond {largest:g}, the "
                              "most that the compute dtype holds: choose another --dtype")
