"""What all endpoints share: the engine's client, the text service, limits, metrics and the running requests."""
from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request

from ..config import Config, size_bytes
from ..errors import Overloaded, RequestError
from ..parsers.choose import Parsers
from ..processes.client import STOPPING
from .access import access_of
from .adapters import Catalogue
from .limits import Bodies
from .metrics import Metrics
from .middleware import OnEnd
from .protocol import TermFields
from .request_dump import open_dump
from .request_log import log_request
from .responses.state import Responses
from .stream import unless_hung_up
from .terms import Caller, Terms, caller_of, terms
from .text_service import TextService
from .threads import SMALL, Threads
from .traces import open_traces
from .validate import Bounds

T = TypeVar("T")


class Server:
    """State of one app.

    client: an `EngineClient`. running: the HTTP requests that generate, by tenant and id, with the names of their
    engine requests, which `serial` makes different. warned: ignored fields that the log has told of. isolates: tenants
    share no cached pages. secret: without it nobody can tell a key from its tenant's name. access: who may ask for
    what. parsers: what reads the model's replies. responses: what `/v1/responses` keeps. adapters: those of the model.
    """

    def __init__(self, client: Any, text: TextService, config: Config):
        self.client, self.text, self.config = client, text, config
        self.bodies = Bodies(size_bytes(config.server.max_body))
        self.created = int(time.time())
        self.running: dict[tuple[str, str], tuple[str, ...]] = {}
        self.serial = itertools.count()
        self.warned: set[str] = set()
        self.metrics = Metrics(config.server.metric_names)
        self.threads = Threads()
        self.secret = secrets.token_bytes(32)
        self.access = access_of(config.server)
        self.traces = open_traces(config.server.otlp_endpoint)
        self.dump = open_dump(config.server)
        self.responses = Responses(config.server)
        self.isolates = config.cache.cache_isolation == "key"
        self.adapters = Catalogue(self)
        self.parsers = Parsers(getattr(text.tool_template, "source", None), config.model.tool_parser,
                               config.model.reasoning_parser)

    @property
    def info(self) -> dict[str, Any]:
        """What the engine says about itself; empty while it loads."""
        return self.client.info or {}

    @property
    def model(self) -> str:
        """The name that clients use."""
        info = self.info
        return self.config.model.served_model_name or info.get("served_name") or info.get("model") or "default"

    @property
    def bounds(self) -> Bounds:
        places = self.info.get("max_running", 0) + self.config.scheduler.max_queued_requests
        return Bounds(self.info["vocab_size"], self.info["max_model_len"], self.config.server.max_n,
                      self.info.get("sampling_defaults", {}), places, self.text.spell,
                      self.config.scheduler.logits_processors)

    def caller(self, request: Request) -> Caller:
        """Who asks; raises 400 for a header that is wrong."""
        return caller_of(request.scope["headers"], self.config.server.api_key is not None, self.secret)

    def watchers(self) -> list[OnEnd]:
        """Who is told of each request that has ended."""
        tell = partial(log_request, contents=True) if self.config.server.log_contents else log_request
        return [tell, *([self.traces.ended] if self.traces is not None else [])]

    def close(self) -> None:
        """End what works beside the requests."""
        self.threads.close()
        for part in (self.traces, self.dump):
            if part is not None:
                part.close()

    async def read(self, request: Request, work: Callable[[bytes], T], always: bool = False, text: bool = False) -> T:
        """What `work` makes of the JSON body, in a thread if that may take long; `always`: for a small body too.

        text: it only converts text. Work whose client hangs up before it starts is never done.
        """
        if self.dump is not None:
            work = self.dump.kept(request, work)
        async with self.bodies.read_json(request) as body:
            if len(body) <= SMALL and not always:
                return work(body)
            return await unless_hung_up(request, self.threads.read(lambda: work(body), len(body), text))

    def why_not_ready(self) -> str:
        """The reason why no request can be taken now; "" = ready."""
        ok, reason = self.client.health()
        if not ok:
            return reason or "the engine is not ready"
        return STOPPING if self.client.draining else ""

    def require_ready(self) -> None:
        """Raise 503 with the reason when no request can be taken."""
        reason = self.why_not_ready()
        if self.client.draining and not self.client.died.is_set():
            raise Overloaded(STOPPING, status=503, retry_after=5, code="server_stopping")
        if self.client.gone:
            raise self.client.dead()
        if reason:
            raise Overloaded(reason, status=503, retry_after=5)

    def require_model(self, name: str | None, adapters: bool = True) -> None:
        """Raise 404 for a model that is not served here; no name means the one there is. adapters: they are meant too.
        """
        names = (self.model, self.info.get("model"), self.config.model.model, "default")
        if name and name not in names and not (adapters and name in self.adapters.known):
            served = ", ".join(map(repr, [self.model, *list(self.adapters.known)[:16]]))
            raise RequestError(f"model {name[:200]!r} does not exist; this server has {served}", status=404,
                               param="model", code="model_not_found")

    def terms(self, asked: TermFields, caller: Caller) -> Terms:
        """The terms of a request, with the adapter that it chooses."""
        name, number = self.adapters.choose(getattr(asked, "model", None), asked.lora_path)
        return replace(terms(asked, caller, self.isolates), adapter=number, model=name)
