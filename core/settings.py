"""Where each setting's value comes from: default < YAML file < environment < command line."""
from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import Field, dataclass, fields, replace
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_type_hints

from .config import Config, size_bytes
from .env import PREFIX, VARIABLES
from .errors import SHOWN, ConfigError, cut, encodable
from .errors import shown as shown_value
from .files import is_there, read_text
from .suggest import suggest

SECRET = ("api_key", "admin_api_key")
MAX_FILE = 1 << 16  # characters
NOTHING = "{} is set, but holds no {}; give one or leave the setting out"
FLAGS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


@dataclass(frozen=True)
class Setting:
    """One field of a group of `Config`, as a flag, a variable and a YAML key."""

    group: str
    field: Field[Any]
    type: type
    optional: bool

    @property
    def name(self) -> str:
        return self.field.name

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return PREFIX + self.name.upper()

    def meta(self, key: str) -> Any:
        """`help`, `unit`, `least`, `most`, `needs`, `aliases` or `endpoint` of the field; None when it has none."""
        return self.field.metadata.get(key)

    @property
    def choices(self) -> tuple[str, ...]:
        """The values there are; () when any will do. Those of a registry are looked up only now."""
        choices = self.field.metadata.get("choices", ())
        return choices() if callable(choices) else choices


@dataclass(frozen=True)
class Resolved:
    """A configuration, and for each setting by name who set it."""

    config: Config
    origin: dict[str, str]


def list_settings() -> dict[str, Setting]:
    """Every setting by name; names are unique over the groups."""
    found = {}
    for group in fields(Config):
        kind = type(getattr(Config(), group.name))
        hints = get_type_hints(kind)
        for field in fields(kind):
            hint = hints[field.name]
            options = get_args(hint) if isinstance(hint, UnionType) else (hint,)
            real = next(o for o in options if o is not type(None))
            found[field.name] = Setting(group.name, field, getattr(real, "__origin__", real), type(None) in options)
    return found


def check(setting: Setting, value: Any, label: str) -> Any:
    """The value in the setting's own type. `label` says where it was given; `ConfigError` names it and the way out."""
    if (needs := setting.meta("needs")) and isinstance(value, str) and not value.strip(", \t\r\n"):
        raise ConfigError(NOTHING.format(label, needs))
    if setting.optional and value in (None, ""):
        return None
    try:
        value = _convert(setting.type, value)
        value = (setting.meta("aliases") or {}).get(str(value).lower(), value)
        amount = size_bytes(value) if setting.meta("unit") == "bytes" else value
    except ValueError as error:
        raise ConfigError(f"{label}: {error}") from None
    choices, least, most = setting.choices, setting.meta("least"), setting.meta("most")
    if setting.meta("endpoint"):
        match = re.fullmatch(r"tcp://[^/\s]+:(\d{1,5})|ipc://\S+", value, re.ASCII)
        if not match or int(match[1] or 0) > 65535:
            raise ConfigError(f"{label}: {shown_value(value)} is not an address such as tcp://127.0.0.1:5557")
    for one in (value if isinstance(value, tuple) else (value,)) if choices else ():
        if one not in choices:
            raise ConfigError(f"{label}: {shown_value(one)} is not one of {', '.join(choices)}{suggest(one, choices)}")
    if (least is not None and amount < least) or (most is not None and amount > most):
        limits = f"at least {least}" if most is None else f"between {least} and {most}"
        raise ConfigError(f"{label}: {value} is out of range, it must be {limits}")
    return value


def _convert(kind: type, value: Any) -> Any:
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "a text",
             tuple: "a list of texts or a mapping"}
    plain = isinstance(value, str | int | float) and not isinstance(value, bool)
    found = None
    if kind is bool and isinstance(value, str | bool):
        found = FLAGS.get(str(value).lower())
    elif kind is str and (plain or isinstance(value, os.PathLike)):
        found = os.fspath(value) if isinstance(value, os.PathLike) else str(value)
    elif kind is int and plain:
        found = int(value) if re.fullmatch(r"[+-]?\d{1,18}", str(value)) else None
    elif kind is float and plain:
        found = float(value) if re.fullmatch(r"[+-]?\d{1,18}(\.\d*)?", str(value)) else None
    elif kind is tuple:
        items = re.split(r"\s*,\s*", value) if isinstance(value, str) else value
        if isinstance(value, Mapping) and all(isinstance(v, str | int | float) for v in value.values()):
            items = [f"{k}={str(v).lower() if isinstance(v, bool) else v}" for k, v in value.items()]
        if isinstance(items, list | tuple) and all(isinstance(item, str) for item in items):
            found = tuple(items)
    if found is None:
        raise ValueError(f"{shown_value(value)} is not {words[kind]}")
    if any(isinstance(text, str) and text != encodable(text) for text in (found if kind is tuple else [found])):
        raise ValueError(f"{shown_value(value)} is no UTF-8, so that no answer can name it: rename it, or make a link "
                         "to it")
    return found


def read_file(path: Path) -> dict[str, Any]:
    """Settings of a YAML file by name. Keys may be given flat or under their group, with - or _; none twice."""
    data = _load_yaml(path)
    known = list_settings()
    groups = {s.group for s in known.values()}
    found: dict[str, Any] = {}
    wrong = []
    for key, value in data.items():
        if key in groups and isinstance(value, dict):
            entries = {k: (v, key) for k, v in value.items()}
        else:
            entries = {key: (value, None)}
        for name, (entry, group) in entries.items():
            plain = str(name).replace("-", "_")
            if plain not in known or group not in (None, known[plain].group):
                allowed = [n for n, s in known.items() if group in (None, s.group)] + ([] if group else sorted(groups))
                place = f" in {group}" if group else ""
                wrong.append(f"{path}: there is no setting {shown_value(str(name))}{place}{suggest(plain, allowed)}")
            elif plain in found:
                wrong.append(f"{path}: {plain} is set twice; keep one of the two")
            found[plain] = entry
    _refuse(wrong)
    return found


def _refuse(wrong: list[str]) -> None:
    """Raise a `ConfigError` with all that is wrong, one a line."""
    if wrong:
        raise ConfigError("\n         ".join(wrong))


def _load_yaml(path: Path) -> dict[Any, Any]:
    import yaml

    class TextSafeLoader(yaml.SafeLoader):
        """Leaves values as they were written: YAML reads the key 0123 as 83, and 12:30:45 as 45045. The type of each
        setting decides. Refuses a mapping that has one key twice, where YAML takes the last, and merges no mappings,
        which can grow without end.
        """

        yaml_implicit_resolvers = {first: [entry for entry in entries if entry[0] == "tag:yaml.org,2002:null"]
                                   for first, entries in yaml.SafeLoader.yaml_implicit_resolvers.items()}

        def flatten_mapping(self, node: Any) -> None:
            seen = set()
            for key in (key for key, _ in node.value if isinstance(key, yaml.ScalarNode)):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(problem=f"{cut(key.value, SHOWN)} is set twice; keep one of the two",
                                               problem_mark=key.start_mark)
                seen.add(key.value)

    try:
        data = yaml.load(read_text(path, MAX_FILE), TextSafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        raise ConfigError(f"{path}, line {mark.line + 1}, column {mark.column + 1}: "
                          f"{error.problem or error.context}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"{path} is not YAML: {getattr(error, 'reason', None) or error}") from None
    except RecursionError:
        raise ConfigError(f"{path} is nested too deeply for settings") from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(data, dict | None):
        raise ConfigError(f"{path}: settings are expected as `name: value`, not a {type(data).__name__}")
    return data or {}


def read_environment(environment: Mapping[str, str]) -> dict[str, str]:
    """Settings among the variables, by name. An empty variable counts as unset.

    A value like tcp://10.0.0.1:80 is left out where no endpoint is meant: Kubernetes sets one for every service, so
    also for one named isthmus.
    """
    return {s.name: value for s in list_settings().values() if (value := environment.get(s.variable))
            and (s.meta("endpoint") or not value.startswith(("tcp://", "udp://")))}


def unknown_variables(environment: Mapping[str, str]) -> list[str]:
    """Warnings for variables that look like settings and are none."""
    known = [s.variable for s in list_settings().values()] + list(VARIABLES)
    return [f"{name} is not a setting{hint}" for name in sorted(environment)
            if name.startswith(PREFIX) and name not in known and (hint := suggest(name, known, 0.85))]


def resolve(flags: Mapping[str, Any], environment: Mapping[str, str] | None = None,
            file: Path | None = None) -> Resolved:
    """Put the sources together. `flags` has only what was given on the command line, by setting name."""
    environment = os.environ if environment is None else environment
    if file is None and environment.get("ISTHMUS_CONFIG"):
        file = Path(environment["ISTHMUS_CONFIG"])
        if not (is_there(file) and file.is_file()):
            raise ConfigError(f"ISTHMUS_CONFIG={file}: there is no such file")
    known = list_settings()
    config, origin = Config(), dict.fromkeys(known, "default")
    sources = ((f"file {file}", read_file(file) if file else {}, lambda s: f"{file}: {s.name}"),
               ("environment", read_environment(environment), lambda s: s.variable),
               ("command line", flags, lambda s: s.flag))
    wrong = []
    for source, values, label in sources:
        for name, value in values.items():
            setting = known[name]
            try:
                unset = value is None and setting.meta("needs")  # `api_key:` with nothing behind it
                value = check(setting, "" if unset else value, label(setting))
            except ConfigError as error:
                wrong.append(str(error))
                continue
            config = replace(config, **{setting.group: replace(getattr(config, setting.group), **{name: value})})
            origin[name] = f"{source} {setting.variable}" if source == "environment" else source
    # Who names a key that turns out empty wants a lock: the server must not start without one.
    wrong += [NOTHING.format(s.variable, s.meta("needs")) for s in map(known.get, SECRET)
              if environment.get(s.variable) == "" and value_of(config, s) is None]
    _refuse(wrong)
    return Resolved(config, origin)


def check_platform(resolved: Resolved) -> None:
    """Raise `ConfigError` when the platform that was asked for is not there, or has no such options. Imports no
    platform."""
    from .discovery import list_platforms
    from .platform_options import check_options, platforms_for
    name, origin = resolved.config.platform.platform, resolved.origin["platform"]
    if name != "auto" and name not in (found := sorted(list_platforms())):
        source = "" if origin == "command line" else f" ({origin})"
        for_it = f"; for that there is {' or '.join(able)}" if (able := platforms_for(name)) else ""
        hint = suggest(name, found, 0.8) or for_it or suggest(name, found)  # "CPU" is meant for cpu, "gpu" not for npu
        raise ConfigError(f"--platform {name}{source}: no such platform is installed{hint}; there are: "
                          f"{', '.join(found)} (`isthmus doctor` says which can run here)")
    check_options(name, resolved.config.platform.platform_option)


def value_of(config: Config, setting: Setting) -> Any:
    """A setting's value in a configuration."""
    return getattr(getattr(config, setting.group), setting.name)


def shown(config: Config, setting: Setting) -> str:
    """The value for people; secrets are hidden."""
    value = value_of(config, setting)
    if value is None or value == ():
        return "-"
    if setting.name in SECRET:
        return "(hidden)"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return ", ".join(value) if isinstance(value, tuple) else f"{value:g}" if isinstance(value, float) else str(value)
