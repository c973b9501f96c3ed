"""Schemes: how quantized checkpoints of Hugging Face name their tensors, and which format each matrix has.

What a module is, its own tensors say: a scheme's names mark a quantized one, shapes tell bits and groups. Lists of
modules in configurations (`ignore`, `targets`, `modules_to_not_convert`) only repeat that, and are not read. Scales of
activations are `activations.py`'s, those of K and V `kv_scales.py`'s. Nothing is computed here.

Sources: AutoAWQ (`WQLinear_GEMM`); AutoGPTQ and GPTQModel (`QuantLinear`); compressed-tensors (its compressors);
DeepSeek-V3 (`weight_scale_inv`); NVIDIA ModelOpt and AMD Quark (their exports); the OCP Microscaling specification.
"""
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError
from ..models.fields import Fields
from .formats import BLOCK, FORMATS, SAFETENSORS_TYPES, nbytes

Described = tuple[str, tuple[int, ...]]
FLOATS = ("f16", "bf16", "f32")
IGNORED = (".input_scale", ".input_global_scale", ".input_zero_point", ".input_scale_ub", ".output_scale", ".k_scale",
           ".v_scale", ".q_scale", ".kv_scale")
_WORD = 32


class Part(NamedTuple):
    """A stored tensor, with the format and the shape that its bytes are meant to have."""

    name: str
    dtype: str
    shape: tuple[int, ...]


class Quantized(NamedTuple):
    """A matrix: the name of its codes, its format, its logical shape, and what lies beside the codes."""

    codes: str
    format: str
    shape: tuple[int, ...]
    beside: tuple[Part, ...]


class Scheme(NamedTuple):
    """One `quant_method`.

    reads: for people.  marks: ends of names, any of which makes a module a quantized one.
    check: refuses settings that nothing here reads.  read: (module, settings) -> its matrix.
    """

    reads: str
    marks: tuple[str, ...]
    check: Callable[[Fields], None]
    read: Callable[[Module, Fields], Quantized]


class Module:
    """The tensors of one module; each is checked where it is asked for."""

    def __init__(self, where: str, stem: str, tensors: Mapping[str, Described], values: Callable[[str], np.ndarray]):
        self.where, self.stem, self._tensors, self._values = where, stem, tensors, values

    def __contains__(self, end: str) -> bool:
        return f"{self.stem}.{end}" in self._tensors

    def part(self, end: str, *dtypes: str, axes: int | None = None) -> Part:
        """The module's tensor with this end, of one of `dtypes`, as it is stored."""
        if end not in self:
            raise CheckpointError(f"{self.where}: {self.stem} is quantized, but has no {end}: download the model again")
        part = Part(f"{self.stem}.{end}", *self._tensors[f"{self.stem}.{end}"])
        if part.dtype not in dtypes or axes not in (None, len(part.shape)):
            raise self.misfit(part, f"{' or '.join(dtypes)}" + f" with {axes} axes" * (axes is not None))
        return part

    def fitting(self, part: Part, *shapes: tuple[int, ...]) -> Part:
        """The tensor with the first of `shapes` that it has, without regard to axes of 1."""
        def long(shape: tuple[int, ...]) -> tuple[int, ...]:
            return tuple(n for n in shape if n != 1)
        found = next((shape for shape in shapes if long(shape) == long(part.shape)), None)
        if found is None:
            raise self.misfit(part, " or ".join(str(list(shape)) for shape in dict.fromkeys(shapes)))
        return part._replace(shape=found)

    def values(self, part: Part) -> np.ndarray:
        """What a small tensor of integers, or of f32, holds."""
        kinds = {"i64": "<i8", "i32": "<i4", "f32": "<f4"}
        return self._values(part.name).view(kinds.get(part.dtype, "u1")).reshape(-1)

    def misfit(self, part: Part, wanted: str) -> CheckpointError:
        return CheckpointError(f"{self.where}: {part.name} is {part.dtype} {list(part.shape)}, it must be {wanted}")

    def matrix(self, name: str, shape: tuple[int, int], codes: Part, *beside: Part) -> Quantized:
        """Codes that take as many bytes as the format says."""
        words = nbytes(codes.dtype, codes.shape)
        if name not in FORMATS or shape[1] % FORMATS[name].block or not min(shape) or nbytes(name, shape) != words:
            raise CheckpointError(f"{self.where}: {codes.name}, {codes.dtype} {list(codes.shape)}, is no matrix "
                                  f"{list(shape)} in {name}")
        return Quantized(codes.name, name, shape, beside)


def quantized(where: str, config: Any, tensors: Mapping[str, Described],
              values: Callable[[str], np.ndarray]) -> tuple[dict[str, Quantized], set[str]]:
    """The quantized matrices by their names, and the names of all tensors that are no weights of their own any more.

    config: the value of `quantization_config`.  tensors: stored format and shape by name.  values: name -> bytes.
    Raises `CheckpointError` for a method or setting that is not read, and for tensors that do not agree.
    """
    settings = Fields(config, f"{where}: quantization_config")
    method = settings.get("quant_method", "compressed-tensors" if "config_groups" in settings else "none")
    scheme = SCHEMES.get(method) if isinstance(method, str) else None
    if scheme is None:
        raise settings.error("quant_method", method, f"one of {', '.join(SCHEMES)}; or take the model as a GGUF file, "
                                                     "as an MLX checkpoint, or not quantized")
    scheme.check(settings)
    found, used = {}, {name for name in tensors if name.endswith(IGNORED)}
    for stem in _stems(scheme, tensors):
        found[f"{stem}.weight"] = scheme.read(Module(where, stem, tensors, values), settings)
        used |= {name for end in _ENDS if (name := f"{stem}.{end}") in tensors}
    return found, used


def _stems(scheme: Scheme, tensors: Mapping[str, Described]) -> Iterator[str]:
    """Names of the quantized modules; 8-bit numbers say so even without scales."""
    for name, (dtype, _) in tensors.items():
        stem, _, end = name.rpartition(".")
        first = next((f"{stem}.{mark}" for mark in scheme.marks if f"{stem}.{mark}" in tensors), name)
        if name == first and (end in scheme.marks or (end == "weight" and dtype in ("i8", "u8", "f8_e4m3"))):
            yield stem


# AWQ and GPTQ: words along the columns of a matrix that is stored [in, out].

def _check_awq(settings: Fields) -> None:
    settings.integer("bits" if "bits" in settings else "w_bit", 4, low=4, high=4)
    for key in ("version", "format", "checkpoint_format"):
        settings.choice(key, {"gemm": "", "GEMM": ""}, "gemm")
    if not settings.flag("zero_point", True):
        raise settings.error("zero_point", False, "true")


def _awq(module: Module, settings: Fields) -> Quantized:
    codes = module.part("qweight", "i32", axes=2)
    shape = codes.shape[1] * 8, codes.shape[0]
    groups = _groups(module, settings, shape[1])
    return module.matrix("awq4", shape, codes, module.fitting(module.part("scales", *FLOATS), (groups, shape[0])),
                         module.fitting(module.part("qzeros", "i32"), (groups, shape[0] // 8)))


def _groups(module: Module, settings: Fields, width: int, ragged: bool = False) -> int:
    """How many groups `width` inputs have, as the scales say; the configuration must say the same."""
    scales = module.part("scales", *FLOATS, axes=2)
    groups = scales.shape[0]
    key = "group_size" if "group_size" in settings else "q_group_size"
    size = settings.get(key, None)
    if size is not None and size != -1 and "dynamic" not in settings:  # which gives modules sizes of their own
        size = settings.integer(key)
        if groups != -(-width // size) or (width % size and not ragged):
            raise module.misfit(scales, f"for {width} inputs in groups of {size}, as {key} says")
    if not groups or (width % groups and not ragged) or (size == -1 and groups != 1):
        raise module.misfit(scales, f"for groups that {width} inputs can be shared among evenly")
    return groups


def _check_gptq(settings: Fields) -> None:
    settings.choice("checkpoint_format", dict.fromkeys(("gptq", "gptq_v2"), ""), "gptq")
    if (bits := settings.integer("bits", low=2, high=8)) not in (2, 3, 4, 8):
        raise settings.error("bits", bits, "2, 3, 4 or 8")
    if settings.flag("is_marlin_format", False):
        raise settings.error("is_marlin_format", True, "false")


def _gptq(module: Module, settings: Fields) -> Quantized:
    codes, bits = module.part("qweight", "i32", axes=2), settings.integer("bits")
    rows, height = codes.shape
    order = module.part("g_idx", "i32", axes=1) if "g_idx" in module else None
    width = order.shape[0] if order else rows * _WORD // bits
    stored = rows * _WORD // max(width, 1)
    if stored != bits and "dynamic" not in settings:  # which gives modules bits of their own
        raise module.misfit(codes, f"{width * bits // _WORD} words for each of {height} outputs: {width} inputs of "
                                   f"{bits} bits, as the configuration says, not of {stored}")
    bits = stored
    groups = _groups(module, settings, width, ragged=order is not None)
    if order is None and groups > 1 and settings.flag("desc_act", False):
        module.part("g_idx")  # raises: without it the groups would be runs of inputs
    beside = [module.fitting(module.part("scales", *FLOATS), (groups, height)),
              module.fitting(module.part("qzeros", "i32"), (groups, -(-height * bits // _WORD)))]
    name = f"gptq{bits}" + "_v2" * (settings.get("checkpoint_format", "gptq") == "gptq_v2")
    if order and not _in_order(module, order, groups):
        size = settings.get("group_size", None)
        if isinstance(size, int) and size > 0 and "dynamic" not in settings:
            _hold_size(module, order, size)
        name, beside = f"{name}_act", [*beside, order]
    return module.matrix(name, (height, width), codes, *beside)


def _hold_size(module: Module, order: Part, size: int) -> None:
    """Raises `CheckpointError` unless every group but the last has `size` inputs."""
    counts = np.bincount(module.values(order))
    if (counts[:-1] != size).any() or counts[-1] > size:
        raise module.misfit(order, f"in groups of {size} inputs, as group_size says, not of {counts.max()}")


def _in_order(module: Module, order: Part, groups: int) -> bool:
    """Are the groups runs of inputs? Raises `CheckpointError` for a group that does not exist."""
    values = module.values(order)
    if ((values < 0) | (values >= groups)).any():
        raise module.misfit(order, f"group numbers from 0 to {groups - 1}, not from {values.min()} to {values.max()}")
    return values.size % groups == 0 and np.array_equal(values, np.repeat(np.arange(groups), values.size // groups))


# The others: codes [out, in] with scales beside, which differ in names.

def _check_compressed(settings: Fields) -> None:
    known = dict.fromkeys(("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision",
                           "nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"), "")
    Fields(settings.get("sparsity_config", {}), f"{settings.where}: sparsity_config").choice(
        "format", {"dense": ""}, "dense")
    if settings.get("transform_config", {}):
        raise settings.error("transform_config", settings.get("transform_config"), "empty: rotations are not computed")
    for fields in (settings, *_config_groups(settings)):
        fields.choice("format", known, "mixed-precision")
        weights = Fields(fields.get("weights", {}), f"{fields.where}: weights")
        _check_block(weights, "block_structure")
        if weights.integer("group_size", -1, low=-1) == 0:
            raise weights.error("group_size", 0, "null, -1, or a whole number above 0")


def _config_groups(settings: Fields) -> list[Fields]:
    where = f"{settings.where}: config_groups"
    groups = Fields(settings.get("config_groups", {}), where).values
    return [Fields(group, f"{where}: {str(name)[:40]}") for name, group in groups.items()]


def _check_block(settings: Fields, key: str = "weight_block_size") -> None:
    block = settings.get(key, None)
    if block not in (None, [BLOCK, BLOCK], f"{BLOCK}x{BLOCK}"):
        raise settings.error(key, block, f"[{BLOCK}, {BLOCK}]")


def _check_fp8(settings: Fields) -> None:
    settings.choice("fmt", {"e4m3": "", "float8_e4m3fn": ""}, "e4m3")
    _check_block(settings)


def _check_modelopt(settings: Fields) -> None:
    settings.choice("quant_algo", dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "NVFP4", "MXFP8"), ""))


def _check_quark(settings: Fields) -> None:
    whole = Fields(settings.get("global_quant_config"), f"{settings.where}: global_quant_config")
    weight = Fields(whole.get("weight"), f"{whole.where}: weight")
    weight.choice("dtype", dict.fromkeys(("fp4", "fp8_e4m3", "int8"), ""))


def _compressed(module: Module, settings: Fields) -> Quantized:
    """As `_scaled`, in groups of one of the sizes that the configuration states: which has which is not read."""
    matrix = _scaled(module, settings)
    scales, groups = matrix.beside[0], matrix.beside[0].shape[-1]
    stated = [Fields(fields.get("weights", {}), f"{fields.where}: weights") for fields in _config_groups(settings)]
    sizes = {fields.integer("group_size", -1, low=-1) for fields in stated}
    width, size = matrix.shape[1], matrix.shape[1] // groups
    whole = groups == 1 and (-1 in sizes or max(sizes, default=0) >= width)
    blocks = matrix.format == "fp8_128"  # whose sizes are not groups'
    if stated and not blocks and not whole and size not in sizes:
        said = " or ".join(map(str, sorted(sizes - {-1}))) or "all of them"
        raise module.misfit(scales, f"for {width} inputs in groups of {said}, as group_size says, not of {size}")
    return matrix


def _scaled(module: Module, settings: Fields) -> Quantized:
    packed = "weight_packed" if "weight_packed" in module else "weight"
    codes = module.part(packed, "i32", "u8", "i8", "f8_e4m3", axes=2)
    if "weight_zero_point" in module and codes.dtype != "i32":
        zeros = module.part("weight_zero_point", *SAFETENSORS_TYPES.values())
        if module.values(zeros).any():
            raise module.misfit(zeros, "nothing but zeros, or packed beside packed weights")
    scales = module.part("weight_scale_inv" if "weight_scale_inv" in module else "weight_scale",
                         *FLOATS, "u8", "f8_e4m3", "f8_e8m0")
    if codes.dtype == "i32":
        return _packed(module, settings, codes, scales)
    return (_fp4 if codes.dtype == "u8" else _eight_bits)(module, codes, scales)


def _eight_bits(module: Module, codes: Part, scales: Part) -> Quantized:
    height, width = codes.shape
    if scales.dtype == "u8":  # exponents alone
        scales = scales._replace(dtype="f8_e8m0")
    if codes.dtype == "i8":
        return module.matrix("int8", codes.shape, codes, _shared(module, scales, codes.shape))
    found = _shared(module, scales, codes.shape, (-(-height // BLOCK), -(-width // BLOCK)))
    plain = found.shape == (1, 1) or found.shape[0] == height
    return module.matrix("fp8" if plain else "fp8_128", codes.shape, codes, found)


def _shared(module: Module, scales: Part, shape: tuple[int, ...], blocks: tuple[int, int] = (1, 1)) -> Part:
    """Scales for the whole, for each row, for groups of each row, or for blocks, with two axes."""
    rows, groups = (*scales.shape, 1, 1)[:2]
    fits = (rows, groups) in ((1, 1), blocks) or (rows == shape[0] and groups and shape[1] % groups == 0)
    if scales.dtype not in (*FLOATS, "f8_e8m0") or len(scales.shape) > 2 or not fits:
        raise module.misfit(scales, f"{', '.join(FLOATS)} and one scale, or [{shape[0]}, n] with n groups that "
                                    f"{shape[1]} inputs can be shared among evenly")
    return scales._replace(shape=(rows, groups))


def _packed(module: Module, settings: Fields, codes: Part, scales: Part) -> Quantized:
    stated = module.part("weight_shape", "i64", "i32")
    shape = tuple(module.values(stated).tolist())
    if len(shape) != 2 or shape[0] != codes.shape[0] or not 0 < shape[1] <= codes.shape[1] * _WORD:
        raise CheckpointError(f"{module.where}: {stated.name} says {list(shape)[:4]}, but {codes.name} is "
                              f"{list(codes.shape)}")
    bits = codes.shape[1] * _WORD // shape[1]
    name, beside = f"pack{bits}", [_shared(module, scales, shape)]
    rows, groups = beside[0].shape
    asymmetric = [group.get("weights", {}).get("symmetric") is False for group in _config_groups(settings)]
    if "weight_zero_point" in module or (asymmetric and all(asymmetric)):
        zeros = module.part("weight_zero_point", "i32")
        name, beside = f"{name}_asym", [*beside, module.fitting(zeros, (-(-rows * bits // _WORD), groups))]
    by_group = [group.get("weights", {}).get("actorder") in ("group", True) for group in _config_groups(settings)]
    if "weight_g_idx" in module or (groups > 1 and by_group and all(by_group)):
        order = module.fitting(module.part("weight_g_idx", "i32"), (shape[1],))
        if (module.values(order) != -1).any() and not _in_order(module, order, groups):
            name, beside = f"{name}_act", [*beside, order]
    return module.matrix(name, shape, codes, *beside)


def _fp4(module: Module, codes: Part, scales: Part) -> Quantized:
    shape = codes.shape[0], codes.shape[1] * 2
    end = next((end for end in ("weight_global_scale", "weight_scale_2") if end in module), None)
    if end is None:
        if scales.dtype not in ("u8", "f8_e8m0"):
            raise module.misfit(scales, "u8 or f8_e8m0; or there must be weight_global_scale or weight_scale_2")
        scales = scales._replace(dtype="f8_e8m0")
        return module.matrix("mxfp4", shape, codes, module.fitting(scales, (shape[0], -(-shape[1] // 32))))
    if scales.dtype != "f8_e4m3":
        raise module.misfit(scales, "f8_e4m3")
    whole = module.fitting(module.part(end, "f32"), ())
    if not 0 < module.values(whole)[0] < np.inf:
        raise module.misfit(whole, f"a number above 0, not {module.values(whole)[0]}")
    name = "nvfp4" if end == "weight_scale_2" else "nvfp4_div"
    return module.matrix(name, shape, codes, module.fitting(scales, (shape[0], -(-shape[1] // 16))), whole)


_WORDS = ("qweight", "qzeros", "scales")
_SCALES = ("weight_packed", "weight_scale", "weight_scale_inv")
_ENDS = (*_WORDS, "g_idx", *_SCALES, "weight", "weight_shape", "weight_zero_point", "weight_g_idx",
         "weight_global_scale", "weight_scale_2")

SCHEMES: dict[str, Scheme] = {
    "awq": Scheme("4 bits, version gemm", _WORDS, _check_awq, _awq),
    "gptq": Scheme("2, 3, 4 and 8 bits, checkpoint_format gptq and gptq_v2, act order with 4 and 8 bits", _WORDS,
                   _check_gptq, _gptq),
    "compressed-tensors": Scheme("pack-quantized (4 and 8 bits), int-quantized, float-quantized (by tensor, row, "
                                 "group, or blocks of 128 x 128), nvfp4-pack-quantized, mxfp4-pack-quantized, "
                                 "mxfp8-quantized", _SCALES, _check_compressed, _compressed),
    "fp8": Scheme("e4m3 by tensor, or by blocks of 128 x 128", _SCALES, _check_fp8, _scaled),
    "fbgemm_fp8": Scheme("e4m3 by row", _SCALES, _check_fp8, _scaled),
    "modelopt": Scheme("FP8, FP8_PER_CHANNEL_PER_TOKEN, MXFP8 and NVFP4", _SCALES, _check_modelopt, _scaled),
    "quark": Scheme("fp8_e4m3, int8 and fp4 (MXFP4)", _SCALES, _check_quark, _scaled),
}
