"""Finding platforms: folders of `isthmus.platforms` and entry points of the group `isthmus.platforms`.

Listing imports nothing; loading imports one platform only, so a broken library of one costs no other anything. A
library that is missing or broken makes a platform `Unavailable`; a mistake in its own code is a `RegistrationError`.
"""
from __future__ import annotations

import importlib
import traceback
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import msgspec

from .errors import printable, said
from .platform import SERVED, Manifest, Platform, Unavailable
from .registry import RegistrationError, is_name, signature_gaps

GROUP = "isthmus.platforms"
MISTAKES = (NameError, TypeError, AttributeError, SyntaxError, LookupError)
# Each required method and the interface version that brought it: platforms of an older version need not have it.
REQUIRED = dict.fromkeys(("probe", "supports", "load", "alloc", "compile", "copy_pages"), 1)


@dataclass(frozen=True)
class Found:
    """A platform that could be loaded: from a folder of this distribution, or from another package's entry point.

    problem: why nobody can have it, such as a name that two sources claim.
    """

    name: str
    source: str
    entry: EntryPoint | None = None
    problem: str = ""


def platform_root() -> Path:
    """The folder that holds the platforms of this distribution."""
    package = importlib.import_module(__package__.rpartition(".")[0] + ".platforms")
    return Path(next(iter(package.__path__)))


def list_platforms() -> dict[str, Found]:
    """Every platform by name; one that two sources claim is listed with the problem."""
    found = {p.parent.name: Found(p.parent.name, "folder") for p in sorted(platform_root().glob("*/platform.py"))}
    for entry in entry_points(group=GROUP):
        source = f"package {entry.dist.name}" if entry.dist else entry.value
        other = found.get(entry.name)
        if other is None:
            found[entry.name] = Found(entry.name, source, entry, _problem(entry, source))
            continue
        remedy = f"uninstall {source}" if other.entry is None else "uninstall one of them"
        found[entry.name] = replace(other, problem=f"platform {entry.name!r} is offered by {other.source} and by "
                                                   f"{source}: {remedy}, or give its platform another name")
    return found


def _problem(entry: EntryPoint, source: str) -> str:
    """What is wrong with an entry point itself, "" for nothing."""
    if not is_name(entry.name):
        return f"platform {entry.name!r} of {source}: the name is reserved or not a word"
    with suppress(AttributeError):  # what is no reference at all has neither
        if entry.module and entry.attr:
            return ""
    return f"platform {entry.name!r} of {source}: the entry point {entry.value!r} is not of the form module:Class"


@contextmanager
def blamed(name: str) -> Iterator[None]:
    """What only a mistake raises in the platform called so, and what would end the process, is a `RegistrationError`
    with file and line."""
    try:
        yield
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        if isinstance(error, Exception) and not isinstance(error, MISTAKES):
            raise
        raise RegistrationError(f"platform {name!r}: {told(error)}") from error


def check_platform(name: str, candidate: Any) -> None:
    """Check a platform class whole, by the interface version that it was written for. Raises `RegistrationError` with
    every gap, a version that is not served among them."""
    if not isinstance(candidate, type):
        raise RegistrationError(f"platform {name!r}: `Platform` must be a class, not {candidate!r}")
    version = getattr(candidate, "interface_version", None)
    served = isinstance(version, int) and version in SERVED
    required = tuple(method for method, since in REQUIRED.items() if not served or since <= version)
    gaps = signature_gaps(candidate, Platform, required)
    if not served:
        gaps.append(f"interface_version is {version!r}, this core serves {' and '.join(map(str, SERVED))}")
    if gaps:
        raise RegistrationError(f"platform {name!r} is incomplete: " + "; ".join(gaps))


def load_platform(name: str, options: Mapping[str, str] | None = None) -> Any:
    """Import one platform and make its object (not probed yet).

    Raises `Unavailable` when it does not exist or a library that it needs cannot be imported, `RegistrationError` when
    it is incomplete or its own code fails.
    """
    found = list_platforms()
    if name not in found:
        raise Unavailable(f"platform {name!r} is not installed; there are: {', '.join(sorted(found))} "
                          "(`isthmus doctor` says which can run here)")
    if found[name].problem:
        raise RegistrationError(found[name].problem)
    entry = found[name].entry
    package = f"{__package__.rpartition('.')[0]}.platforms.{name}"
    where, attribute = (entry.module, entry.attr) if entry else (f"{package}.platform", "Platform")
    try:
        module = importlib.import_module(where)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # a broken library may raise anything while it is imported
        own = _is_mistake(error, where.partition(".")[0] if entry else package)
        raise (RegistrationError if own else Unavailable)(f"platform {name!r}: {told(error)}") from error
    with blamed(name):
        candidate = module
        for part in attribute.split("."):
            candidate = getattr(candidate, part, None)
            if candidate is None:
                raise RegistrationError(f"platform {name!r}: {module.__file__} has no attribute {attribute!r}")
        check_platform(name, candidate)
        return candidate(dict(options or {}))


def reason_against(name: str) -> str | None:
    """Why the platform cannot run here, as far as that is known without a library of its own: the answer of the
    `driver.py` in its folder, where it has one. None = it is worth a try."""
    found = list_platforms().get(name)
    if found is None or found.entry is not None or not (platform_root() / name / "driver.py").is_file():
        return None
    driver = importlib.import_module(f"{__package__.rpartition('.')[0]}.platforms.{name}.driver")
    return driver.reason_against()


def probe(name: str, platform: Any, rank: int = 0, world: int = 1) -> Manifest:
    """A platform's manifest, with every field of its type, and texts of one line. Raises what the platform raises, and
    `RegistrationError` for its mistakes."""
    with blamed(name):
        answer = platform.probe(rank, world)
    if not isinstance(answer, Manifest):
        raise RegistrationError(f"platform {name!r}: probe returned a {type(answer).__name__}, a Manifest is needed")
    try:
        manifest = msgspec.convert(_one_line(msgspec.to_builtins(answer)), Manifest)
    except (TypeError, ValueError, RecursionError) as error:  # msgspec's are ValueErrors
        raise RegistrationError(f"platform {name!r}: its manifest is broken: {error}") from error
    if empty := [word for word in ("compute_dtypes", "kv_dtypes", "page_sizes") if not getattr(manifest, word)]:
        raise RegistrationError(f"platform {name!r}: its manifest is broken: nothing in {', '.join(empty)}")
    return manifest


def _one_line(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {_one_line(key): _one_line(each) for key, each in value.items()}
    if isinstance(value, list):
        return list(map(_one_line, value))
    return " ".join(printable(value).split()) if isinstance(value, str) else value


def _is_mistake(error: BaseException, package: str) -> bool:
    """Is it the platform's own: a module of its own that is not there, or what only a wrong line of its own raises?"""
    def own(module: str | None) -> bool:
        return f"{module}.".startswith(f"{package}.")
    if isinstance(error, ImportError):
        return own(error.name)
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return isinstance(error, SyntaxError) or isinstance(error, MISTAKES) and own(frames[-1].f_globals.get("__name__"))


def told(error: BaseException) -> str:
    """An exception in one line: what a platform says of itself as it is, anything else with file and line first."""
    if isinstance(error, ImportError | Unavailable | RegistrationError):
        return said(error) or type(error).__name__
    file, line, text = "", 0, said(error)
    if frames := traceback.extract_tb(error.__traceback__):
        file, line = frames[-1].filename, frames[-1].lineno
    if isinstance(error, SyntaxError) and error.filename:
        file, line, text = error.filename, error.lineno or 0, error.msg
    place = f"{'/'.join(Path(file).parts[-2:])}:{line}: " if file else ""
    return f"{place}{type(error).__name__}" + (f": {text}" if text else "")


def probe_all(options: Mapping[str, str] | None = None,
              names: Iterable[str] | None = None) -> dict[str, Manifest | Exception]:
    """Each platform's manifest (or those of `names`), or the exception that says why it cannot be had."""
    result: dict[str, Manifest | Exception] = {}
    for name in list_platforms() if names is None else names:
        try:
            platform = load_platform(name, options)
            with blamed(name):
                result[name] = probe(name, platform)
                getattr(platform, "close", lambda: None)()
        except Exception as error:  # any failure of one platform is a reason, never a crash of the listing
            result[name] = error
    return result


def choose_platform(options: Mapping[str, str] | None = None) -> tuple[str, str]:
    """The best platform here and why: by the manifest's rank among those that probe. Raises `Unavailable` if none."""
    probed = probe_all(options)
    good = {n: m for n, m in probed.items() if isinstance(m, Manifest)}
    if not good:
        reasons = "; ".join(f"{n}: {said(e)}" for n, e in probed.items())
        raise Unavailable(f"no platform can run here. {reasons}")
    best = max(good, key=lambda n: (good[n].rank, n))
    missing = [n for n in probed if n not in good]
    if good[best].rank <= 0:
        reasons = "; ".join(f"{n}: {said(probed[n])}" for n in missing)
        return best, "nothing faster can run here" + (f" ({reasons})" if reasons else "")
    others = ", ".join(n for n in good if n != best and good[n].rank > 0)
    able = [n for n, m in probe_all(None, missing).items() if isinstance(m, Manifest)] if options else []
    unable = [n for n in missing if n not in able]
    given = ", ".join(f"{key}={value}" for key, value in (options or {}).items())
    return best, ("the fastest found" + (f", before {others}" if others else "")
                  + (f"; {', '.join(able)} cannot take {given}" if able else "")
                  + (f"; {', '.join(unable)} cannot run here (isthmus doctor says why)" if unable else ""))
