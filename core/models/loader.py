"""From an open checkpoint to a model on a platform: everything is checked before the first weight is placed."""
from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from ..errors import CheckpointError
from ..platform import FEATURES, Batch, Manifest, Ops, Tensor, Unsupported, Weight
from ..quant.formats import FORMATS, nbytes
from ..specs import LayerState, RawTensor, WeightSpec
from .architectures import Architecture, find_architecture
from .blocks import Entry, Experts, Layout, Projections, Stack
from .config import ModelConfig, Sparse, eos_ids, parse_config
from .fields import Fields

Progress = Callable[[int, int], None]
DENSE = {"f64": "float64", "f32": "float32", "f16": "float16", "bf16": "bfloat16"}
# Where checkpoints of text and image models keep the language model, and what else they hold.
RENAMED = {"language_model.model.": "model.", "model.language_model.": "model.", "language_model.lm_head.": "lm_head."}
UNUSED = ("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_projector.")
RECOMPUTED = (".rotary_emb.inv_freq", "rope_freqs.weight")
# What sparse layers are called: by Mixtral's and DeepSeek's checkpoints, and by MLX's where experts are stacked.
SPARSE = {".block_sparse_moe.": ".mlp.", ".shared_experts.": ".shared_expert.", ".switch_mlp.": ".experts.",
          ".w1.": ".gate_proj.", ".w2.": ".down_proj.", ".w3.": ".up_proj."}


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to be compiled: `platform.compile(model.forward, model.weights, bucket)`.

    report: lines for people: how many weights are in which format, and which were expanded and why.
    nbytes: of the weights as they are held, without a platform's own padding and copies.
    dtype:  that it computes in.
    layout: of the weights as a checkpoint has them, whole.
    hidden: (ops, weights, batch) -> [T, hidden], `forward` without its head.
    rank:   the configuration as this rank has it.
    draft:  a drafter's own step (`core.speculation.companion`), None without one.
    """

    forward: Callable[[Ops, Any, Batch], Tensor]
    weights: Mapping[str, Any]
    config: ModelConfig
    state_layers: tuple[LayerState, ...]
    report: list[str]
    nbytes: int
    dtype: str
    layout: Layout = field(default_factory=dict)
    hidden: Callable[[Ops, Any, Batch], Tensor] | None = None
    rank: ModelConfig | None = None
    draft: Any = None


def load_model(checkpoint: Any, platform: Any, manifest: Manifest, dtype: str, strict: bool = False,
               progress: Progress | None = None, page_size: int | None = None, world: int = 1,
               expert_parallel: bool = False, first_state: int = 0) -> LoadedModel:
    """Load `checkpoint` (an open `core.weights` Checkpoint) onto a probed platform.

    dtype: compute dtype, one of `manifest.compute_dtypes`. strict: no quantized weight may be expanded; a format that
    the platform lacks is refused before anything is placed, a weight that it expands all the same (as it may the
    embedding) when the platform has said how it holds it.
    progress: called with (bytes done, bytes in all). page_size: of the cache, the platform's default unless given.
    world: ranks of tensor parallelism that the platform was probed with; forward and state are one rank's.
    expert_parallel: experts are whole, some on each rank. first_state: as in `ModelConfig`.
    Raises `CheckpointError` for a configuration, name or shape that does not fit, `Unsupported` with the platform's
    reason for a case that it cannot do.
    """
    if dtype not in manifest.compute_dtypes:
        raise Unsupported(f"{manifest.name} cannot compute in {dtype}; it can in {', '.join(manifest.compute_dtypes)}")
    architecture, config = read_config(checkpoint)
    if expert_parallel:
        reason = platform.supports("expert_parallel")
        if reason is not None:
            raise Unsupported(f"--expert-parallel: {manifest.name} cannot have some experts on each rank: {reason}")
        config = config.experts_apart(world)
    layout = architecture.layout(config)
    names = tensor_names(checkpoint.names)
    _check_names(list(entries(layout, names)), names, config, checkpoint)
    rank = replace(config.per_rank(world), first_state=first_state)
    weights, report, size = place_layout(checkpoint, names, layout, rank, Place(platform, manifest, dtype, strict,
                                                                                page_size, progress))
    weights.setdefault("head", weights["embed"])
    layers, told = _state_layers(rank, checkpoint, manifest)
    return LoadedModel(partial(architecture.forward, rank), weights, config, layers, report + told, size, dtype, layout,
                       partial(architecture.hidden, rank), rank)


class Place(NamedTuple):
    """Where weights go, and how: as the parameters of `load_model`."""

    platform: Any
    manifest: Manifest
    dtype: str
    strict: bool = False
    page_size: int | None = None
    progress: Progress | None = None


def place_layout(checkpoint: Any, names: Mapping[str, str], layout: Layout, rank: ModelConfig,
                 place: Place) -> tuple[dict[str, Any], list[str], int]:
    """A layout's weights on a platform, lines for people, and bytes. names: of the layout -> in the checkpoint; all are
    there. rank: the configuration as one rank has it. Raises as `load_model` does."""
    platform, manifest, dtype = place[:3]
    wanted = list(entries(layout, names))
    _check_tensors(wanted, names, checkpoint)
    _check_attention(rank, platform, manifest, dtype, place.page_size or manifest.page_sizes[0])
    reasons = _format_reasons(wanted, names, checkpoint, platform, manifest, dtype, rank.sparse)
    expanded = sorted({f"{f} ({reason})" for (_, f), reason in reasons.items() if reason is not None})
    if place.strict and expanded:
        raise Unsupported("--strict: these formats would be expanded: " + "; ".join(expanded))
    placer = _Placer(checkpoint, names, platform, dtype, reasons, place.progress,
                     rank.norms_add_one and not checkpoint.norms_include_one, place.strict)
    return placer.place(layout), placer.report(), placer.nbytes


def _state_layers(config: ModelConfig, checkpoint: Any, manifest: Manifest) -> tuple[tuple[LayerState, ...], list[str]]:
    """The layers' caches, with the checkpoint's scales of K and V where the platform uses them; and what to tell."""
    scales = {layer: pair for layer, pair in checkpoint.kv_scales.items() if layer < config.layers}
    if not scales:
        return config.state_layers, [checkpoint.kv_note] if checkpoint.kv_note else []
    told = f"scales of K and V in 8-bit floats (--kv-cache-dtype fp8) for {len(scales)} layers"
    if "kv_scales" not in manifest.features:
        return config.state_layers, [f"{told}: {manifest.name} does not use them"]
    layers = tuple(replace(state, k_scale=scales.get(layer, (1.0, 1.0))[0], v_scale=scales.get(layer, (1.0, 1.0))[1])
                   for layer, state in enumerate(config.state_layers))
    return layers, [told]


def read_config(checkpoint: Any) -> tuple[Architecture, ModelConfig]:
    """What an open checkpoint says the model is. Raises `CheckpointError` for what is not known or not in range."""
    architecture, settings = find_architecture(checkpoint.config)
    config = parse_config(settings, architecture.family, model_name(checkpoint.path))
    return architecture, replace(config, eos_ids=_eos_ids(checkpoint, config))


def model_name(path: Path) -> str:
    """What people call the checkpoint: the file's stem, the folder's name, or owner/name in a hub's cache."""
    for part in Path(path).parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return Path(path).stem if Path(path).suffix == ".gguf" else Path(path).name


def entries(layout: Layout, names: Collection[str]) -> Iterator[Entry]:
    """Every entry of a layout, in order, for a checkpoint with the tensors `names`."""
    for value in layout.values():
        if isinstance(value, Entry):
            yield value
        elif isinstance(value, Projections):
            yield from value.weights + value.biases
        elif isinstance(value, Experts):
            yield from value.entries(names)
        else:
            for layer in value:
                yield from entries(layer, names)


def _eos_ids(checkpoint: Any, config: ModelConfig) -> tuple[int, ...]:
    """Ids that end a text: from generation_config.json where it has some, else from the configuration."""
    generation = Fields(checkpoint.generation, "generation_config.json")
    listed = generation.get("eos_token_id", None)
    return config.eos_ids if listed is None else eos_ids(listed, config.vocab_size)


def tensor_names(names: frozenset[str]) -> dict[str, str]:
    """Canonical name -> name in the checkpoint, without the tensors that no language model needs."""
    canonical = {}
    for name in names:
        if name.startswith(UNUSED) or name.endswith(RECOMPUTED):
            continue
        prefix = next((p for p in RENAMED if name.startswith(p)), "")
        short = RENAMED.get(prefix, "") + name[len(prefix):]
        for theirs, ours in SPARSE.items():
            short = short.replace(theirs, ours)
        canonical[short] = name
    return canonical


def _check_names(entries: Sequence[Entry], names: Mapping[str, str], config: ModelConfig, checkpoint: Any) -> None:
    wanted = {entry.name for entry in entries}
    missing, extra = wanted - names.keys(), names.keys() - wanted
    if config.tied:
        extra -= {"lm_head.weight"}  # some files store the tied matrix twice
    drafts = tuple(f"model.layers.{config.layers + i}." for i in range(config.drafts))
    extra = {name for name in extra if not name.startswith(drafts)}
    extra = {name for name in extra if not _empty(name, names, checkpoint)}
    if missing or extra:
        raise CheckpointError(f"this checkpoint does not fit model_type {config.model_type!r}: it "
                              f"{name_gaps(missing, extra)}: download it again, or correct its config.json")


def name_gaps(missing: set[str], extra: set[str]) -> str:
    """What a checkpoint lacks and what it has too much, for a message; "" for nothing."""
    return " and ".join(f"{word} {_list(found)}" for word, found in (("lacks", missing), ("has unknown", extra))
                        if found)


def _empty(name: str, names: Mapping[str, str], checkpoint: Any) -> bool:
    """GPTQ files may give every quantized module a bias, which is nothing where the model has none."""
    weight = name.removesuffix("bias") + "weight"
    return name.endswith(".bias") and weight in names and not np.frombuffer(
        checkpoint.tensor(names[name]).data, np.uint8).any() and checkpoint.describe(names[weight])[0] not in DENSE


def _list(names: set[str], limit: int = 8) -> str:
    shown = ", ".join(sorted(names)[:limit])
    return shown + (f" and {len(names) - limit} more" if len(names) > limit else "")


def _check_tensors(entries: Sequence[Entry], names: Mapping[str, str], checkpoint: Any) -> None:
    for entry in entries:
        name, shape = checkpoint.describe(names[entry.name])
        vector = entry.role in ("norm", "bias")
        if name not in DENSE and (vector or FORMATS[name].kind == "int"):
            raise CheckpointError(f"{names[entry.name]} is stored as {name}; it must be {', '.join(DENSE)}"
                                  + ("" if vector else " or a quantized format"))
        if shape != entry.shape:
            raise CheckpointError(f"{names[entry.name]} has shape {list(shape)}, the configuration says "
                                  f"{list(entry.shape)}")


def _check_attention(config: ModelConfig, platform: Any, manifest: Manifest, dtype: str, page_size: int) -> None:
    for spec in dict.fromkeys(config.attention):
        reason = platform.supports("attention", head_dim=config.head_dim, heads=config.heads, kv_heads=config.kv_heads,
                                   page_size=page_size, window=spec.window, softcap=spec.softcap, dtype=dtype)
        if reason is not None:
            raise Unsupported(f"{manifest.name} cannot do this model's attention: {reason}")
    for rotated in sorted({2 * len(spec.inv_freq) for spec in config.rope} - {config.head_dim}):
        _check_features(["partial_rope"], "rotary embedding", platform, manifest, "rope", head_dim=config.head_dim,
                        rotated=rotated, dtype=dtype)


def _check_features(features: Sequence[str], what: str, platform: Any, manifest: Manifest, op: str,
                    **case: Any) -> None:
    """The platform must have the features and, asked for the case, do it."""
    missing = [feature for feature in features if feature not in manifest.features]
    if missing:
        reason = platform.supports(missing[0]) or f"it has no {FEATURES[missing[0]]}"
    else:
        reason = platform.supports(op, **case)
    if reason is not None:
        raise Unsupported(f"{manifest.name} cannot do this model's {what}: {reason}")


def _format_reasons(entries: Sequence[Entry], names: Mapping[str, str], checkpoint: Any, platform: Any,
                    manifest: Manifest, dtype: str, sparse: Sparse | None) -> dict[tuple[str, str], str | None]:
    """(op, quantized format) -> None if the platform keeps it, else why it must be expanded."""
    cases: dict[str, dict[str, Any]] = {"linear": {}}
    if sparse is not None:
        spec = sparse.spec
        cases["moe"] = dict(experts=spec.experts, top_k=spec.top_k)
        if sparse.grouped:
            cases["moe"] |= dict(groups=spec.groups, top_groups=spec.top_groups, bias=sparse.bias)
        _check_features(["moe", "expert_groups"][:1 + sparse.grouped], "sparse layers", platform, manifest, "moe",
                        **cases["moe"], format=dtype, dtype=dtype)
    reasons: dict[tuple[str, str], str | None] = {}
    for op, name in sorted({(_op(entry.role), checkpoint.describe(names[entry.name])[0]) for entry in entries}):
        if name not in DENSE:
            reasons[op, name] = f"no kernel on {manifest.name}"
            if name in manifest.formats:
                reasons[op, name] = platform.supports(op, **cases[op], format=name, dtype=dtype)
    return reasons


def _op(role: str) -> str:
    """What uses a matrix, as `Platform.supports` calls it."""
    return "moe" if role == "experts" else "linear"


class _Placer:
    """Places a layout's entries one by one, and counts them."""

    def __init__(self, checkpoint: Any, names: Mapping[str, str], platform: Any, dtype: str,
                 reasons: Mapping[tuple[str, str], str | None], progress: Progress | None, add_one: bool, strict: bool):
        self.checkpoint, self.names, self.platform, self.dtype = checkpoint, names, platform, dtype
        self.reasons, self.progress, self.add_one, self.strict = reasons, progress, add_one, strict
        self.static: Counter[bool] = Counter()               # calibrated scales of activations, used or not
        self.kept: Counter[tuple[str, str]] = Counter()      # by format and how it is held
        self.expanded: Counter[tuple[str, str]] = Counter()  # by format and reason
        self.done = self.nbytes = 0

    def place(self, layout: Layout) -> dict[str, Any]:
        """The weight tree: leaves where the layout has entries."""
        tree: dict[str, Any] = {}
        for key, value in layout.items():
            if isinstance(value, Entry):
                tree[key] = self._load([value])
            elif isinstance(value, Projections):
                tree[key] = self._place_projections(value)
            elif isinstance(value, Experts):
                tree[key] = self._load(value.entries(self.names), value.experts)
            else:
                tree[key] = [self.place(layer) for layer in value]
        return tree

    def report(self) -> list[str]:
        """Lines for people: the matrices by format, and those that were expanded by reason, the most first."""
        told = []
        for (name, how), count in self.kept.most_common():
            how = how and f" as {how}"
            if name in DENSE:
                how = "" if name == self.dtype else f" cast to {DENSE[self.dtype]}"
            told.append((count, f"{count} x {name}{how}"))
        for reason in dict.fromkeys(reason for _, reason in self.expanded):
            counts = {name: n for (name, why), n in self.expanded.most_common() if why == reason}
            formats = ", ".join(f"{n} x {name}" for name, n in counts.items())
            told.append((sum(counts.values()), f"{formats} expanded to {DENSE[self.dtype]} ({reason})"))
        lines = [line for _, line in sorted(told, key=lambda pair: -pair[0])]
        if self.static:
            used, total = self.static[True], self.static.total()
            lines.append(f"calibrated scales of activations: used for {used} of {total} weights" + (
                "; elsewhere each token has its own, or activations are not in 8 bits" if used < total else ""))
        return lines

    def _place_projections(self, stack: Projections) -> Stack:
        columns = (stack.weights, stack.biases) if stack.biases else (stack.weights,)
        runs = groupby(zip(*columns, strict=True), key=lambda parts: self._kept(parts[0]))
        return Stack(tuple(tuple(self._load(column) for column in zip(*run, strict=True)) for _, run in runs))

    def _kept(self, entry: Entry) -> str:
        """What the platform will hold it as: neighbours that agree can share a leaf."""
        name, _ = self.checkpoint.describe(self.names[entry.name])
        return self.dtype if name in DENSE or self.reasons["linear", name] else name

    def _load(self, stack: Sequence[Entry], experts: int = 0) -> Weight:
        names = tuple(entry.name for entry in stack)
        spec = WeightSpec(names, stack[0].role, stack[0].cut, experts, self.checkpoint.narrow, self._input_scale(names))
        raws = [self.checkpoint.tensor(self.names[name]) for name in spec.names]
        self.done += sum(memoryview(part.data).nbytes for raw in raws for part in (raw, *raw.extra))
        if spec.role == "norm" and self.add_one:
            raws = [_plus_one(raw) for raw in raws]
        try:
            leaf = self.platform.load(raws, spec, stack[0].dtype or self.dtype)
        except Unsupported as error:
            raise Unsupported(f"{', '.join(spec.names)}: {error}") from error
        self._count(raws, spec, leaf)
        if self.progress is not None:
            self.progress(self.done, self.checkpoint.nbytes)
        return leaf

    def _input_scale(self, names: Sequence[str]) -> float | None:
        """One that holds the input of each of these weights, where all of them were calibrated."""
        scales = [self.checkpoint.input_scales.get(self.names[name]) for name in names]
        return None if None in scales else max(scales)

    def _count(self, raws: Sequence[RawTensor], spec: WeightSpec, leaf: Weight) -> None:
        """Note how a leaf is held. The platform's word counts: it may expand what it has a kernel for elsewhere."""
        how = self.platform.describe(leaf) if hasattr(self.platform, "describe") else ""
        expanded = how.endswith((self.dtype, DENSE[self.dtype]))
        if spec.input_scale is not None:
            self.static["static" in how] += len(raws)
        for name, raw in zip(spec.names, raws, strict=True):
            dense, reason = raw.dtype in DENSE, self.reasons.get((_op(spec.role), raw.dtype))
            if expanded and not dense and not reason:
                reason = "the embedding" if spec.role == "embed" else "its shape"
                if self.strict:
                    raise Unsupported(f"--strict: {name} is stored as {raw.dtype} and would be expanded to "
                                      f"{DENSE[self.dtype]} ({reason})")
            held = RawTensor(self.dtype, raw.shape, None) if dense or reason else raw
            self.nbytes += sum(nbytes(part.dtype, part.shape) for part in (held, *held.extra))
            if spec.role in ("norm", "bias"):
                continue
            if reason:
                self.expanded[raw.dtype, reason] += 1
            else:
                self.kept[raw.dtype, "" if dense else how] += 1


def _plus_one(raw: RawTensor) -> RawTensor:
    """Gemma's Hugging Face checkpoints store w where the norm multiplies by 1 + w."""
    if raw.dtype == "bf16":
        values = (np.frombuffer(raw.data, "<u2").astype(np.uint32) << 16).view(np.float32)
    else:
        values = np.frombuffer(raw.data, {"f16": "<f2", "f32": "<f4", "f64": "<f8"}[raw.dtype]).astype(np.float32)
    return RawTensor("f32", raw.shape, (values + np.float32(1)).view(np.uint8))
