"""What platforms claim, as data: the `manifest.toml` beside each platform, read without importing it.

A file says what the platform offers at its best, whether or not it can run here; a probe (`platform.Manifest`) says
what it offers on this device, and never more. `doctor`, `explain`, the tables of the docs and the CI matrix read files.
"""
from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import msgspec

from .discovery import Found, list_platforms, platform_root
from .platform import FEATURES, LATER, SERVED, Manifest, Ops
from .registry import RegistrationError

FILE = "manifest.toml"
# Of determinism, the strongest first.
TIERS = {"T0": "a position has the same bits in every batch", "T1": "the same batch gives the same bits",
         "T2": "logits are within tolerance of the reference's"}
OPS = tuple(name for name in vars(Ops) if not name.startswith("_"))


class Job(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One way to test the platform: a row of the CI matrix.

    device:  what it computes on there, for people.  runner: labels of the machine; hosted: an ordinary one of the CI
    service, so that the job always runs.  install: words after `pip install`, in a fresh environment.
    without: modules that must not be importable there.  environment: variables.  whole: all tests that can be run in
    that environment but those of stand-ins, not only those of the platform.  conformance: seconds that the suite takes
    on two cores; every: a change is held to each so many-th case of it, where a stand-in is slow.
    stand_in: the platform that the suite is run on instead, an emulation where the device is not.  shown: what a passed
    case shows with that, as the tables say it; "" = that it runs.
    """

    name: str
    device: str
    runner: tuple[str, ...]
    install: tuple[str, ...]
    hosted: bool = True
    without: tuple[str, ...] = ()
    environment: dict[str, str] = {}
    whole: bool = False
    conformance: int = 180
    every: int = 1
    stand_in: str = ""
    shown: str = ""


class Claim(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A manifest file. Fields of the same name as `platform.Manifest`'s mean the same; beyond those:

    title, devices: for people.  library: the module that it computes with, "" = none beyond core's.  requires: what
    pip installs it with, "" = nothing more.  expands: formats that it does not keep are expanded at load.
    ops:   op -> limits for people, "" = none.  lacks: op or feature -> why it has none; every op and feature is in one
    of `ops`, `features` and `lacks`, words of `LATER` excepted.
    options: name -> the values that it takes, "1..8" = numbers between, () = any that the platform itself understands;
    None = not said.
    ci:    how it is tested.
    """

    title: str
    devices: str
    interface: int
    compute_dtypes: tuple[str, ...]
    kv_dtypes: tuple[str, ...]
    page_sizes: tuple[int, ...]
    features: tuple[str, ...]
    determinism: str
    ops: dict[str, str]
    library: str = ""
    requires: str = ""
    formats: tuple[str, ...] = ()
    expands: bool = True
    max_top_logprobs: int = 20
    max_ranks: int = 1
    rank: int = 0
    lacks: dict[str, str] = {}
    options: dict[str, tuple[str, ...]] | None = None
    ci: tuple[Job, ...] = ()


def find_file(found: Found) -> Path:
    """Where a platform's manifest is, or would be: in its folder, or in the folder of an entry point's module."""
    if found.entry is None:
        return platform_root() / found.name / FILE
    top, *rest = found.entry.module.split(".")
    try:
        spec = find_spec(top)  # of the outermost package only: nothing is imported
    except (ImportError, ValueError) as error:
        raise RegistrationError(f"platform {found.name!r}: {error}") from error
    if spec is None or not spec.submodule_search_locations:
        raise RegistrationError(f"platform {found.name!r}: {found.entry.value} is not inside an installed package")
    folder = Path(next(iter(spec.submodule_search_locations)), *rest)
    return (folder if folder.is_dir() else folder.parent) / FILE


def read_claim(found: Found) -> Claim:
    """A platform's manifest file. Raises `RegistrationError` that names the file and everything wrong with it."""
    if found.problem:
        raise RegistrationError(found.problem)
    path = find_file(found)
    if not path.is_file():
        raise RegistrationError(f"platform {found.name!r} has no {FILE} beside its module ({path})")
    return read_file(path)


def read_file(path: Path) -> Claim:
    """A manifest file, as `read_claim`."""
    try:
        claim = msgspec.convert(tomllib.loads(path.read_text("utf-8")), Claim)
    except (OSError, ValueError, RecursionError) as error:  # msgspec's and tomllib's errors are ValueErrors
        raise RegistrationError(f"{path}: {error}") from error
    problems = _problems(claim)
    if problems:
        raise RegistrationError(f"{path}: " + "; ".join(problems))
    return claim


def read_claims() -> dict[str, Claim | RegistrationError]:
    """Every platform's manifest file, or what is wrong with it."""
    result: dict[str, Claim | RegistrationError] = {}
    for name, found in list_platforms().items():
        try:
            result[name] = read_claim(found)
        except RegistrationError as error:
            result[name] = error
    return result


def _problems(claim: Claim) -> list[str]:
    problems = [f"{word!r} is no feature; there are {', '.join(FEATURES)}" for word in claim.features
                if word not in FEATURES]
    problems += [f"{word!r} is no op; there are {', '.join(OPS)}" for word in claim.ops if word not in OPS]
    for words, offered in ((OPS, claim.ops), (FEATURES, claim.features)):
        for word in words:
            if (word in offered) == (word in claim.lacks) and not (word in LATER and word not in offered):
                problems.append(f"{word} is both offered and lacking" if word in offered
                                else f"lacks.{word} needs a reason")
    problems += [f"lacks.{word} is neither op nor feature" for word in claim.lacks if word not in (*OPS, *FEATURES)]
    if claim.determinism not in TIERS:
        problems.append(f"determinism {claim.determinism!r} is not one of {', '.join(TIERS)}")
    texts = {**claim.ops, **claim.lacks, "title": claim.title, "devices": claim.devices, "library": claim.library,
             "requires": claim.requires}
    problems += [f"{name} holds characters that cannot be printed on a line: {text!r:.60}"
                 for name, text in texts.items() if not text.isprintable()]
    problems += [f"{name} is empty" for name in ("compute_dtypes", "kv_dtypes", "page_sizes")
                 if not getattr(claim, name)]
    return problems


def excess(claim: Claim, manifest: Manifest) -> list[str]:
    """What a probed manifest offers beyond its file; [] when it keeps to it."""
    found = []
    for name in ("compute_dtypes", "kv_dtypes", "formats", "page_sizes", "features"):
        extra = set(getattr(manifest, name)) - set(getattr(claim, name))
        if extra:
            found.append(f"{name}: {', '.join(map(str, sorted(extra)))}")
    for name, most in (("max_top_logprobs", claim.max_top_logprobs), ("local_ranks", claim.max_ranks),
                       ("rank", claim.rank)):
        if getattr(manifest, name) > most:
            found.append(f"{name}: {getattr(manifest, name)}, its file says {most}")
    if manifest.determinism < claim.determinism:
        found.append(f"determinism: {manifest.determinism}, its file says {claim.determinism}")
    if manifest.interface != claim.interface:
        found.append(f"interface: {manifest.interface}, its file says {claim.interface}")
    return found


def capabilities(claim: Claim) -> frozenset[str]:
    """What tests may need of a platform, in words: "bf16", "kv bf16", "q4_0", "pages of 16", "2 ranks", features."""
    sizes = [f"pages of {n}" for n in claim.page_sizes] + [f"{n} ranks" for n in range(2, claim.max_ranks + 1)]
    return frozenset([*claim.compute_dtypes, *claim.formats, *claim.features, *(f"kv {d}" for d in claim.kv_dtypes),
                      *sizes])


def missing_features(platform: Any, manifest: Manifest) -> dict[str, str]:
    """Each feature that a probed platform lacks, and why in the platform's own words."""
    reasons = {word: platform.supports(word) for word in FEATURES if word not in manifest.features}
    return {word: reason or f"its manifest offers no {FEATURES[word]}" for word, reason in reasons.items()}


def lines(claim: Claim) -> list[tuple[str, str]]:
    """A manifest file in full for people: (what, value)."""
    served = ", ".join(map(str, SERVED))
    needs = claim.library and f"{claim.library}, by pip install '{claim.requires}'"
    out = [("title", claim.title), ("devices", claim.devices), ("library", needs or "none"),
           ("interface", f"{claim.interface} (this core serves {served})"),
           ("computes in", ", ".join(claim.compute_dtypes)), ("K and V in", ", ".join(claim.kv_dtypes)),
           ("formats kept", ", ".join(claim.formats) or "none"),
           ("other formats", "expanded at load" if claim.expands else "refused"),
           ("page sizes", ", ".join(map(str, claim.page_sizes))),
           ("determinism", f"{claim.determinism}: {TIERS[claim.determinism]}"),
           ("log-probabilities", f"of at most {claim.max_top_logprobs} tokens a position"),
           ("tensor parallelism", f"{claim.max_ranks} ranks" if claim.max_ranks > 1 else "none")]
    return out + _offers("op", OPS, claim.ops, claim.lacks) + _offers("feature", FEATURES, dict.fromkeys(
        claim.features, ""), claim.lacks)


def _offers(kind: str, words: Mapping[str, Any] | tuple[str, ...], offered: Mapping[str, str],
            lacks: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(f"{kind} {word}", f"yes{', ' if offered[word] else ''}{offered[word]}" if word in offered
             else f"no: {lacks.get(word, 'its file is older than the word')}") for word in words]
