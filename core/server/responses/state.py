"""What `/v1/responses` keeps between requests: the store, and what runs in the background."""
from __future__ import annotations

import json

from starlette.requests import Request

from ...config import ServerSettings, size_bytes
from ...files import named_path
from ..access import sent_keys
from ..stream import encode_json
from ..terms import tenant_of
from .background import Background
from .history import Kept
from .store import OFF, TEMPORARY, ResponseStore
from .wire import failure

STOPPED = failure("server_error", "the server was stopped before the response was complete")


class Responses:
    """Of one server. store: None where nothing is stored. Raises `ConfigError` for a file that cannot be used."""

    def __init__(self, settings: ServerSettings):
        self.locked = settings.api_key is not None
        self.background = Background(size_bytes(settings.max_body))
        self.store: ResponseStore | None = None
        if settings.response_store != OFF:
            path = None if settings.response_store == TEMPORARY else str(named_path(settings.response_store))
            self.store = ResponseStore(path, settings.response_store_rows, size_bytes(settings.response_store_size))
            self._end_unfinished(self.store)

    def _end_unfinished(self, store: ResponseStore) -> None:
        for owner, row in store.unfinished():
            response = json.loads(row.response) | {"status": "failed", "error": STOPPED}
            store.put(owner, row._replace(status="failed", response=encode_json(response)))

    def kept(self, request: Request) -> Kept:
        """The store for whoever asks. The names of its tenants outlive the server, as the store may."""
        keys = sent_keys(request.scope["headers"]) if self.locked else ()
        return Kept(self.store, tenant_of(keys[0], self.store.secret) if keys and self.store else "")

    async def close(self) -> None:
        """End what still runs, and write out what is to be kept."""
        await self.background.close()
        if self.store is not None:
            self.store.close()
