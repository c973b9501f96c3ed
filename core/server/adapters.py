"""Adapters by their names: which one a request chooses, their cards, and loading and unloading them at run time.

The calls are those of vLLM (`/v1/load_lora_adapter`) and SGLang (`/load_lora_adapter`); `core.server.access` lets only
who holds an admin key make them.
"""
from __future__ import annotations

import asyncio
import itertools
import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from ..errors import EngineDead, IsthmusError, RequestError, shown
from .protocol import Body, read
from .stream import json_response

if TYPE_CHECKING:
    from .context import Server

log = logging.getLogger(__name__)

POLL_S = 0.05       # between two questions whether files are read, or the last request has ended
READ_S = 600.0      # after which files that are still being read are not waited for: a network folder may hang
UNLOAD_S = 30.0     # after which who unloads an adapter is told how many requests still use it
ASK_S = 600.0       # for an answer of the engine, which comes between two steps; one may be compiled for long
FIRST = 1_000_001   # number of the first adapter that comes at run time: one number means one adapter, also after the
#                     engine was started anew


class LoadAdapter(Body):
    """`POST /v1/load_lora_adapter`. load_inplace: in place of one with this name."""

    lora_name: str = Field(min_length=1, max_length=256)
    lora_path: str = Field(min_length=1, max_length=4096)
    load_inplace: bool | None = None


class UnloadAdapter(Body):
    """`POST /v1/unload_lora_adapter`."""

    lora_name: str = Field(min_length=1, max_length=256)


class Catalogue:
    """What clients may name. The engine tells what there is when it starts, and is told of what comes and goes; so is a
    new one, after a crash or a rest."""

    def __init__(self, server: Server) -> None:
        self._server, self._numbers = server, itertools.count(FIRST)
        self._at_start: frozenset[str] = frozenset()  # what each new engine has
        self._changes: dict[str, dict[str, Any] | None] = {}  # at run time: as the engine told of it, None = unloaded
        server.client.on_start = self.restore

    @property
    def known(self) -> dict[str, dict[str, Any]]:
        """By name, as the engine tells of them; a new one gets those back that came at run time, and who names one
        waits for that."""
        changed = self._told() | self._changes
        return {name: known for name, known in changed.items() if known is not None}

    def _told(self) -> dict[str, dict[str, Any]]:
        """What the engine has, by name."""
        return {known["name"]: known for known in self._server.info.get("adapters", ())}

    def choose(self, model: str | None, lora: str | None) -> tuple[str, int]:
        """Name and number of the adapter that a request means by `model`, or by `lora_path`; ("", 0) = none. Raises the
        404 for one that there is not, 400 where the two disagree."""
        known = self.known
        if lora and lora not in known:
            raise RequestError(f"lora_path {shown(lora)} is no adapter of this server; it has "
                               f"{', '.join(known) or 'none'}", status=404, param="lora_path", code="model_not_found")
        if lora and model in known and model != lora:
            raise RequestError(f"lora_path is {lora!r} and model is the adapter {model!r}: leave one out",
                               param="lora_path", code="invalid_value")
        name = lora or (model if model in known else "")
        return (name, known[name]["number"]) if name else ("", 0)

    async def load(self, name: str, path: str, replace: bool) -> None:
        """Have the engine read it, beside its work, and take it. A model at rest is loaded for that."""
        await self._server.client.settle()
        await self._load(name, path, replace, None)
        told = self._told()
        kept = {other: change for other, change in self._changes.items() if change is None or other in told}
        self._changes = kept | {name: told[name]}  # without those that the engine could not place

    async def _load(self, name: str, path: str, replace: bool, number: int | None) -> None:
        words: dict[str, Any] = {"lora": name, "path": path, "replace": float(replace)}
        await self._ask("read_adapter", **words)
        words["number"] = float(next(self._numbers) if number is None else number)
        left = READ_S / POLL_S
        try:
            while (answer := await self._ask("add_adapter", **words)).get("reading"):
                if (left := left - 1) <= 0:
                    raise RequestError(f"adapter {name!r}: {shown(path)} is still being read after {READ_S:g} s, which "
                                       "is not waited for: is its folder within reach of the server?", status=504,
                                       param="lora_path", code="load_timeout")
                await asyncio.sleep(POLL_S)
        except BaseException:
            forget = asyncio.ensure_future(self._ask("add_adapter", **words, give_up=1.0))
            forget.add_done_callback(lambda done: done.cancelled() or done.exception())
            raise
        self._server.info["adapters"] = answer["adapters"]

    async def unload(self, name: str) -> int:
        """No new request may name it; waits until the last one has ended. -> requests that still use it. Raises the
        404 for a name that nothing has. A model at rest is not loaded for that."""
        client, found, left = self._server.client, False, UNLOAD_S / POLL_S
        if not client.idle:
            await client.settle()
        while True:
            answer = self._forget_at_rest(name) if client.idle else await self._remove(name)
            found, left = found or answer["found"], left - 1
            if not found:
                raise RequestError(f"there is no adapter {shown(name)}; this server has "
                                   f"{', '.join(self.known) or 'none'}", status=404, param="lora_name",
                                   code="model_not_found")
            if not answer["requests"] or left <= 0:
                return answer["requests"]
            await asyncio.sleep(POLL_S)

    def _forget_at_rest(self, name: str) -> dict[str, Any]:
        found = name in self.known
        self._forget(name)
        self._server.info["adapters"] = [known for known in self._told().values() if known["name"] != name]
        return {"found": found, "requests": 0}

    async def _remove(self, name: str) -> dict[str, Any]:
        answer = await self._ask("remove_adapter", lora=name)
        self._server.info["adapters"] = answer["adapters"]
        self._forget(name)
        return answer

    def _forget(self, name: str) -> None:
        self._changes.pop(name, None)
        if name in self._at_start:
            self._changes[name] = None

    async def restore(self) -> None:
        """An engine that was started anew knows what the settings name: it is told of all that came and went since."""
        self._at_start = frozenset(self._told())
        for name in sorted(self._changes, key=lambda name: self._changes[name] is not None):  # first there is room
            with suppress(EngineDead):  # the next one is told again
                await self._restore(name)

    async def _restore(self, name: str) -> None:
        wanted = self._changes[name]
        if wanted is not None and wanted["number"] != self._told().get(name, {}).get("number"):
            try:
                await self._load(name, wanted["path"], True, wanted["number"])
            except EngineDead:
                raise
            except IsthmusError as error:
                log.error("the adapter %s is gone, it cannot be loaded again: %s", name, error)
                self._forget(name)
                wanted = None
        if wanted is None and name in self._told():
            await self._remove(name)

    async def _ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        try:
            return await self._server.client.compute(command, ASK_S, **arguments)
        except (EngineDead, RequestError):
            raise
        except IsthmusError as error:
            raise RequestError(str(error), status=409, code="adapter_refused") from None


def cards(server: Server, base: dict[str, Any]) -> list[dict[str, Any]]:
    """Entries of `/v1/models`, made of that of the base model."""
    return [base | {"id": name, "created": int(known["loaded"]), "root": name, "parent": base["id"]}
            for name, known in server.adapters.known.items()]


async def load_adapter(server: Server, request: Request) -> Response:
    """Load an adapter from a folder of the server."""
    server.require_ready()
    asked = await server.read(request, lambda body: read(LoadAdapter, body))
    await server.adapters.load(asked.lora_name, asked.lora_path, bool(asked.load_inplace))
    return json_response(_told(server, f"adapter {asked.lora_name!r} is loaded"))


async def unload_adapter(server: Server, request: Request) -> Response:
    """Unload an adapter, once its last request has ended."""
    server.require_ready()
    asked = await server.read(request, lambda body: read(UnloadAdapter, body))
    left = await server.adapters.unload(asked.lora_name)
    told = f"adapter {asked.lora_name!r} takes no new requests, {left} still use it" if left else \
        f"adapter {asked.lora_name!r} is unloaded"
    return json_response(_told(server, told))


def _told(server: Server, message: str) -> dict[str, Any]:
    return {"success": True, "message": message,
            "loaded_adapters": {name: known["path"] for name, known in server.adapters.known.items()}}
