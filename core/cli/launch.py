"""`isthmus launch`: a coding tool against a server of ours, with the environment that the tool wants.

Sources: the tools' documentation of November 2026 (Claude Code "env vars" and "LLM gateway", Codex "config reference",
OpenCode "providers", aider "OpenAI compatible APIs").
"""
from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..errors import ConfigError, RequestError
from ..logs import announce
from ..settings import Resolved
from ..suggest import suggest
from .backends import RemoteBackend, own_key
from .banner import base_url
from .running import list_running

NO_KEY = "none"       # a server without keys takes any; the tools want one
FEW_TOKENS = 16_384   # of context: the first prompt of such a tool, with its tools' descriptions, may be longer
ANSWER_S = 10.0
OUTPUT_SHARE = 4      # of the context that an answer may take at most, as these tools reckon


@dataclass(frozen=True)
class Target:
    """The server. context: tokens, 0 = unknown."""

    url: str
    model: str
    key: str
    context: int


@dataclass(frozen=True)
class Plan:
    """How to start a tool. environment: None = the variable must not be set."""

    environment: dict[str, str | None]
    arguments: list[str]


def _claude(target: Target) -> Plan:
    names = ("ANTHROPIC_MODEL", "ANTHROPIC_DEFAULT_OPUS_MODEL", "ANTHROPIC_DEFAULT_SONNET_MODEL",
             "ANTHROPIC_DEFAULT_HAIKU_MODEL", "CLAUDE_CODE_SUBAGENT_MODEL")
    # A header with a number that changes with every request would keep prompts from sharing a prefix.
    return Plan({"ANTHROPIC_BASE_URL": target.url, "ANTHROPIC_AUTH_TOKEN": target.key, "ANTHROPIC_API_KEY": None,
                 **dict.fromkeys(names, target.model), "CLAUDE_CODE_ATTRIBUTION_HEADER": "0",
                 "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1"}, [])


def _codex(target: Target) -> Plan:
    provider = {"name": "Isthmus", "base_url": f"{target.url}/v1", "env_key": "OPENAI_API_KEY", "wire_api": "responses"}
    # It would offer a search that OpenAI's servers make; this one refuses tools that it would have to run.
    settings = {"model_provider": "isthmus", "web_search": "disabled",
                **{f"model_providers.isthmus.{name}": value for name, value in provider.items()}}
    words = [f"{name}={json.dumps(value)}" for name, value in settings.items()]  # TOML writes such texts as JSON does
    if target.context:
        words.append(f"model_context_window={target.context}")
    return Plan({"OPENAI_API_KEY": target.key}, [*(w for word in words for w in ("-c", word)), "-m", target.model])


def _opencode(target: Target) -> Plan:
    limit = {"limit": {"context": target.context, "output": max(1, target.context // OUTPUT_SHARE)}}
    models = {target.model: {"name": target.model, **(limit if target.context else {})}}
    if _major_version("opencode") == 1:
        provider: dict[str, Any] = {"provider": {"isthmus": {
            "npm": "@ai-sdk/openai-compatible", "name": "Isthmus",
            "options": {"baseURL": f"{target.url}/v1", "apiKey": "{env:OPENAI_API_KEY}"}, "models": models}}}
    else:
        provider = {"providers": {"isthmus": {
            "name": "Isthmus", "env": ["OPENAI_API_KEY"], "package": "@opencode/ai/providers/openai-compatible",
            "settings": {"baseURL": f"{target.url}/v1"}, "models": models}}}
    config = {"$schema": "https://opencode.ai/config.json", **provider, "model": f"isthmus/{target.model}"}
    return Plan({"OPENCODE_CONFIG_CONTENT": json.dumps(config), "OPENAI_API_KEY": target.key}, [])


def _aider(target: Target) -> Plan:
    return Plan({"OPENAI_API_BASE": f"{target.url}/v1", "OPENAI_API_KEY": target.key},
                ["--model", f"openai/{target.model}"])


def _major_version(program: str) -> int:
    """Of an installed program; 0 where it is not, or does not tell."""
    if (path := shutil.which(program)) is None:
        return 0
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=ANSWER_S).stdout
    except (OSError, subprocess.SubprocessError):
        return 0
    found = re.search(r"(\d{1,4})\.\d", said)
    return int(found[1]) if found else 0


@dataclass(frozen=True)
class Tool:
    """A coding tool. needs: the path of the API that it speaks."""

    about: str
    needs: str
    plan: Callable[[Target], Plan]


TOOLS = {"claude": Tool("Claude Code", "/v1/messages", _claude),
         "codex": Tool("OpenAI's Codex", "/v1/responses", _codex),
         "opencode": Tool("OpenCode", "/v1/chat/completions", _opencode),
         "aider": Tool("aider", "/v1/chat/completions", _aider)}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("tool", nargs="?", metavar="TOOL", help=f"{', '.join(TOOLS)}; what follows after -- is for it")
    parser.add_argument("--print", dest="show", action="store_true", help="print what to type instead of running it")
    parser.add_argument("--url", metavar="URL", help="the server; the one that runs here unless given")
    parser.add_argument("--model", metavar="NAME", help="one of the models that the server has; its first unless given")


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    if arguments.tool not in TOOLS:
        hint = suggest(arguments.tool, TOOLS) if arguments.tool else ""
        known = ", ".join(f"{name} ({tool.about})" for name, tool in TOOLS.items())
        which = f"there is no tool {arguments.tool}{hint}" if arguments.tool else "say which tool"
        raise ConfigError(f"{which}; known are {known}")
    tool = TOOLS[arguments.tool]
    program = shutil.which(arguments.tool)
    if program is None and not arguments.show:
        raise ConfigError(f"{tool.about} is not installed: there is no program {arguments.tool}; --print shows what to "
                          "type where it is")
    target = find_target(arguments.url or running_url(resolved), own_key(resolved), arguments.model, tool.needs)
    plan = tool.plan(target)
    if 0 < target.context < FEW_TOKENS:
        announce(f"isthmus: {target.model} has a context of {target.context} tokens here, which such tools fill with "
                 "their first prompt: a model made for more helps, or where --max-model-len keeps it below what it was "
                 "made for, a larger one")
    if arguments.show:
        print(shown_plan(arguments.tool, plan, arguments.rest, target.key, "ISTHMUS_API_KEY" in os.environ))
        return 0
    return start(program, [arguments.tool, *plan.arguments, *arguments.rest], plan.environment)


def running_url(resolved: Resolved) -> str:
    """The server that the settings name, or the only one that runs here. Raises `ConfigError` when several do."""
    settings = resolved.config.server
    asked = resolved.origin["port"] != "default" or resolved.origin["host"] != "default"
    found = [server for server in list_running() if not asked or server.port == settings.port]
    if len(found) > 1:
        listed = ", ".join(f"--port {server.port} ({server.model})" for server in found)
        raise ConfigError(f"{len(found)} servers run here, say which: {listed}")
    return found[0].url if found else base_url(settings.host, settings.port, settings.tls_cert is not None)


def find_target(url: str, key: str | None, model: str | None, needs: str) -> Target:
    """Ask the server what it serves. Raises `RequestError` when it does not answer, `ConfigError` when it has no such
    model or API."""
    server = RemoteBackend(url, model, key, ANSWER_S)
    try:
        cards = {card["id"]: card for card in server.get_json("GET", server.path + "/models")["data"]}
        endpoints = server.get_json("GET", server.root_path + "/")["endpoints"]
    except RequestError:
        raise
    except (ValueError, LookupError, TypeError):  # something else answers there
        raise ConfigError(f"{server.address} is no Isthmus server: start one with `isthmus serve`, or check "
                          "--url") from None
    name = model or next(iter(cards))
    if name not in cards:
        raise ConfigError(f"--model {name}: {server.address} has {', '.join(list(cards)[:8])}{suggest(name, cards)}")
    if needs not in endpoints:
        raise ConfigError(f"{server.address} has no {needs}, which this tool speaks")
    context = cards[name].get("max_model_len")
    return Target(server.root, name, key or NO_KEY, context if isinstance(context, int) else 0)


def shown_plan(name: str, plan: Plan, rest: list[str], key: str, from_variable: bool) -> str:
    """Lines for a POSIX shell; a key is not written out."""
    lines = []
    for variable, value in plan.environment.items():
        if value is None:
            lines.append(f"unset {variable}")
        elif value == key != NO_KEY:
            lines.append(f"export {variable}=" + ('"$ISTHMUS_API_KEY"' if from_variable else "'<your key>'"))
        else:
            lines.append(f"export {variable}={shlex.quote(value)}")
    return "\n".join([*lines, shlex.join([name, *plan.arguments, *rest])])


def start(program: str, words: list[str], changes: dict[str, str | None]) -> int:
    """Become the tool, or where no program can become another, run it: its exit code."""
    environment = {k: v for k, v in (os.environ | changes).items() if v is not None}
    sys.stdout.flush()
    sys.stderr.flush()
    if sys.platform == "win32":
        return subprocess.run([program, *words[1:]], env=environment).returncode
    os.execve(program, words, environment)
