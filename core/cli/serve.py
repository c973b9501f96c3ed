"""`isthmus serve`: the HTTP server from the first moment of loading to the end of the drain."""
from __future__ import annotations

import argparse
import asyncio
import contextlib
import errno
import gc
import ipaddress
import json
import logging
import signal
import socket
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..config import Config
from ..errors import ConfigError
from ..logs import announce
from ..settings import Resolved
from .banner import banner, base_url, count
from .main import INTERRUPTED
from .parser import add_model_argument
from .progress import ProgressLine
from .session import (
    check_names,
    end_children,
    fetch,
    in_process,
    in_thread,
    make_local_client,
    make_process_client,
    platform_warning,
)

if TYPE_CHECKING:
    from ..server.tls import Certificate

BACKLOG = 2048
FAILED = 1
HUNG = 71        # exit code after an engine that finished no step (sysexits.h: EX_OSERR)
DEAD_S = 5.0     # how long clients and probes are told that the engine is gone before the server ends
NEXT_PORTS = 50  # ports that are tried after one that is taken
PROBES = ("/health", "/ready")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_argument(parser)


def run(arguments: argparse.Namespace, resolved: Resolved) -> int:
    """Serve until a signal, then drain; 0 after an orderly end, 1 when the engine died for good, `HUNG` if it hung."""
    config = resolved.config
    if config.cache.cache_isolation == "key" and config.server.api_key is None:
        raise ConfigError("--cache-isolation key keeps the holders of different API keys apart, but no key is set: set "
                          "ISTHMUS_API_KEY to one for each, separated by commas")
    if config.scheduler.idle_unload and in_process(config):
        raise ConfigError("--idle-unload ends the engine's processes to free their memory, and with --in-process (as "
                          "on Windows) it has none of its own: leave one of them out")
    certificate = check_security(config)
    check_driver(config.platform.platform)
    check_names(config)
    listener = listen(config.server.host, config.server.port)
    if warning := open_to_others(config, listener.getsockname()[0]):
        announce(f"isthmus: {warning}", logging.WARNING)
    try:
        import uvloop
        runner = uvloop.run
    except ImportError:  # there is none for Windows
        runner = asyncio.run
    from .running import registered  # imports what --help can do without
    address = listener.getsockname()[:2]
    url = base_url(*address, secure=certificate is not None)
    with registered(config, url, address[1]) as tell:
        code = runner(_serve(config, listener, certificate, url, tell))
    if code == 0:
        announce("isthmus: stopped")
    return code


def check_security(config: Config) -> Certificate | None:
    """The certificate to serve with, if any. Raises `ConfigError` for rules of access that are wrong, before anything
    costly is done."""
    from ..server.access import access_of
    access_of(config.server)
    if config.server.tls_cert is None and config.server.tls_key is None:
        return None
    from ..server.tls import certificate_of
    return certificate_of(config.server.tls_cert, config.server.tls_key)


def check_driver(platform: str) -> None:
    """Raises `Unavailable` for want of a driver: whoever has no device needs no port."""
    from ..discovery import reason_against  # imports numpy, which --help can do without
    from ..platform import Unavailable
    if (reason := reason_against(platform)) is not None:
        raise Unavailable(f"platform {platform!r}: {reason}")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket, before anything costly is done. `ConfigError` names a free port when this one is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            free = _free_port(host, port, family)
            raise ConfigError(f"port {port} is in use on {host}; {free} is free: --port {free}") from None
        raise ConfigError(f"cannot listen on --host {host} --port {port}: {error.strerror or error}") from None


def open_to_others(config: Config, address: str) -> str:
    """A warning when other machines can use the server and no key is asked of them; "" otherwise."""
    if config.server.api_key is not None or ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return ""
    return (f"warning: no API key is set, and everybody who can reach this machine can use the server (--host "
            f"{config.server.host}): set ISTHMUS_API_KEY, or listen on 127.0.0.1 only")


def _free_port(host: str, port: int, family: int) -> int:
    """The next free port after `port`, or any where there is none nearby."""
    for candidate in (*range(port + 1, min(port + NEXT_PORTS, 65535) + 1), 0):
        with contextlib.suppress(OSError), socket.create_server((host, candidate), family=family) as free:
            return free.getsockname()[1]
    raise ConfigError(f"port {port} is in use on {host}, and no other is free")


class Loading:
    """How far the loading is: the name of its stage, and of so much in all so much is done."""

    def __init__(self, stage: str = "starting", done: int = 0, total: int = 0):
        self.stage, self.done, self.total = stage, done, total

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        self.stage, self.done, self.total = stage, done, total or 0

    def __str__(self) -> str:
        return f"the model is loading: {self.stage}" + (f" {100 * self.done // self.total}%" if self.total else "")


class Gate:
    """Answers 503 with the progress until the application is there, in the form that it would answer in; browsers get
    the chat page, which shows it."""

    def __init__(self, loading: Loading):
        self.loading = loading
        self.app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            status, headers, body = self._answer(scope)
            headers = {**headers, "content-length": str(len(body))}
            await send({"type": "http.response.start", "status": status,
                        "headers": [(name.encode(), value.encode()) for name, value in headers.items()]})
            await send({"type": "http.response.body", "body": b"" if scope["method"] == "HEAD" else body})

    def _answer(self, scope: Any) -> tuple[int, dict[str, str], bytes]:
        from ..server.chat_page import files, wants_page
        if wants_page(scope["method"], scope["path"], scope["headers"]):
            body, headers = files()[scope["path"]]
            return 200, headers, body
        loading = self.loading
        progress = {"stage": loading.stage, "done": loading.done, "total": loading.total}
        error = {"message": str(loading), "type": "overloaded_error", "param": None, "code": "loading"}
        told = {"status": "unavailable", "reason": str(loading)} if scope["path"] in PROBES else {"error": error}
        return (503, {"content-type": "application/json", "retry-after": "1"},
                json.dumps({**told, "progress": progress}).encode())


class Signals:
    """The first SIGTERM or SIGINT asks for an orderly end, a second one for an end at once.

    code: the exit code of a server that was stopped before it served.
    """

    def __init__(self) -> None:
        self.first, self.second = asyncio.Event(), asyncio.Event()
        self.code = 0
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            try:
                loop.add_signal_handler(number, self._on_signal, number)
            except NotImplementedError:  # Windows
                signal.signal(number, lambda number, _: loop.call_soon_threadsafe(self._on_signal, number))

    async def renew(self, certificate: Certificate) -> None:
        """Read the certificate again when its files change and, where there is that signal, on SIGHUP."""
        if hasattr(signal, "SIGHUP"):
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, certificate.reload)
        await certificate.watch()

    def _on_signal(self, number: int) -> None:
        if self.first.is_set():
            return self.second.set()
        self.code = INTERRUPTED if number == signal.SIGINT else 0
        self.first.set()


async def until(work: asyncio.Future[Any], event: asyncio.Event) -> bool:
    """Wait for `work`: True if it is done, False if the event came first and cancelled it. Raises what it raises."""
    stop = asyncio.ensure_future(event.wait())
    await asyncio.wait((work, stop), return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if work.done():
        work.result()
        return True
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)
    return False


def _http_server(gate: Gate, config: Config, certificate: Certificate | None) -> Any:
    import uvicorn

    from ..server.connection import Connection

    class Server(uvicorn.Server):
        """Signals are ours: they drain first."""

        @contextlib.contextmanager
        def capture_signals(self) -> Any:
            yield

    secure = {} if certificate is None else {"ssl_context_factory": lambda config, default: certificate.context}
    return Server(uvicorn.Config(
        gate, **secure, http=Connection, lifespan="off", log_config=None, access_log=False, server_header=False,
        log_level="error" if config.server.log_level == "error" else "warning", timeout_keep_alive=75,
        timeout_graceful_shutdown=2))


async def _serve(config: Config, listener: socket.socket, certificate: Certificate | None, url: str,
                 tell: Callable[[dict[str, Any]], None]) -> int:
    began = time.monotonic()
    signals = Signals()
    watching = asyncio.create_task(signals.renew(certificate)) if certificate is not None else None
    loading = Loading()
    gate = Gate(loading)
    http = _http_server(gate, config, certificate)
    serving = asyncio.create_task(http.serve(sockets=[listener]))
    client = None
    try:
        with ProgressLine(live=False if config.server.log_format == "json" else None) as line:
            def progress(name: str, done: int, total: int | None) -> None:
                loading(name, done, total)
                line(name, done, total)
            loop = asyncio.get_running_loop()
            fetching = in_thread(fetch, config, lambda *args: loop.call_soon_threadsafe(progress, *args))
            if not await until(fetching, signals.first):
                return signals.code
            local = fetching.result()
            opening = in_thread(_open_server, local)
            if in_process(local):
                if not await until(opening, signals.first):
                    return signals.code
                client = make_local_client(local, opening.result()[0])
            else:
                client = make_process_client(local)
            if not await until(asyncio.gather(client.start(progress), opening), signals.first):
                return signals.code
        text, create_app = opening.result()
        app = create_app(client, text, local)
        async with app.router.lifespan_context(app):
            gc.collect()
            gc.freeze()  # what was loaded stays: looking it through again would hold up every stream
            gate.app = app
            tell(client.info)
            if warning := platform_warning(client.info["platform"], client.info.get("platform_rank", 1)):
                announce(f"isthmus: {warning}", logging.WARNING)
            announce(banner(client.info, config, url, time.monotonic() - began, text))
            code = await until_end(client, config.server.drain_timeout, signals)
            await client.close()  # who still waits for the engine is answered now
            http.should_exit = True
            http.force_exit = signals.second.is_set()
            await serving
        return code
    finally:
        http.should_exit = http.force_exit = True
        if watching is not None:
            watching.cancel()
        if client is not None:
            await client.close()
        end_children()
        await asyncio.gather(serving, return_exceptions=True)


def _open_server(config: Config) -> tuple[Any, Callable[..., Any]]:
    """The text service, and what makes the application: imported here, while the engine loads."""
    from ..server.app import create_app
    from ..server.text_service import open_text
    return open_text(config), create_app


async def until_end(client: Any, drain_timeout: float, signals: Signals) -> int:
    """Wait for a signal and drain: exit code 0. If the engine dies for good instead, tell clients and probes for a
    while: `FAILED`, or `HUNG`."""
    died = asyncio.ensure_future(client.died.wait())
    if await until(died, signals.first):
        code = HUNG if client.hung else FAILED
        announce(f"isthmus: the engine is gone: {client.health()[1]}. The server ends with exit code {code} in "
                 f"{DEAD_S:g} s", logging.ERROR)
        await until(asyncio.ensure_future(asyncio.sleep(DEAD_S)), signals.first)
        return code
    await _drain(client, drain_timeout, signals)
    if client.died.is_set():
        announce(f"isthmus: the engine is gone: {client.health()[1]}", logging.ERROR)
        return FAILED
    return 0


async def _drain(client: Any, timeout: float, signals: Signals) -> None:
    if client.waiting:
        announce(f"isthmus: stopping; {count(client.waiting, 'running request')} may take {timeout:g} s to finish, "
                 "a second signal ends them now")
    draining = asyncio.create_task(client.drain(timeout))
    if not await until(draining, signals.second):
        await client.drain(0)
