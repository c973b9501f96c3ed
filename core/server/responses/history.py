"""What the store knows of a conversation, for its owner."""
from __future__ import annotations

import json
from typing import NamedTuple

from ...errors import RequestError
from ..stream import encode_json
from .items import Item
from .store import ResponseStore, Row

MAX_CHAIN = 1000  # responses of one conversation


class Kept(NamedTuple):
    """The store as one caller sees it. None where nothing is stored."""

    store: ResponseStore | None
    owner: str

    def get(self, id: str) -> Row | None:
        """The caller's row with this id."""
        return self.store and self.store.get(self.owner, id)


def missing(id: str, param: str | None = None, why: str = "") -> RequestError:
    """The error for a response that is not there."""
    return RequestError(f"the response {id[:128]!r} is not kept here{why}", status=400 if param else 404, param=param,
                        code="previous_response_not_found" if param else "response_not_found")


def history(kept: Kept, id: str, most: int) -> list[Item]:
    """All items of the conversation that ends with response `id`, oldest first. most: bytes that they may have. Raises
    the 400 for one that is not there or has not ended."""
    rows: list[Row] = []
    size, next_id = 0, id
    while next_id is not None:
        row = kept.get(next_id)
        if row is None:
            raise missing(next_id, "previous_response_id", "; send the whole conversation in input")
        if row.status in ("queued", "in_progress"):
            raise RequestError(f"the response {next_id} has not ended yet", param="previous_response_id",
                               code="invalid_value")
        size += len(row.response) + len(row.input)
        if size > most or len(rows) == MAX_CHAIN:
            raise RequestError(f"the conversation that ends with {id} has more than {MAX_CHAIN} responses or {most} "
                               "bytes; begin a new one", param="previous_response_id", code="context_length_exceeded")
        rows.append(row)
        next_id = row.previous
    return [item for row in reversed(rows) for item in (*json.loads(row.input), *outputs(row))]


def outputs(row: Row) -> list[Item]:
    """Items that a response gave. A call that was cut short cannot be shown to a model."""
    return [item for item in json.loads(row.response)["output"]
            if item["type"] != "function_call" or item["status"] == "completed"]


class References:
    """Finds items that a request names; each response is read once. most: bytes of all that is read and named."""

    def __init__(self, kept: Kept, most: int):
        self._kept, self._left, self._most = kept, most, most
        self._read: dict[str, dict[str, tuple[Item, int]]] = {}

    def find(self, id: str) -> Item | None:
        """The item with this id. Ids of items hold the id of their response."""
        owner = "resp_" + id.partition("_")[2][:32]
        if owner not in self._read:
            row = self._kept.get(owner)
            self._count(len(row.input) + len(row.response) if row else 1)
            items = [*json.loads(row.input), *json.loads(row.response)["output"]] if row else []
            self._read[owner] = {item["id"]: (item, len(encode_json(item))) for item in items}
        item, size = self._read[owner].get(id, (None, 0))
        self._count(size)
        return item

    def _count(self, size: int) -> None:
        self._left -= size
        if self._left < 0 or len(self._read) > MAX_CHAIN:
            raise RequestError(f"input names items of more than {MAX_CHAIN} responses or {self._most} bytes",
                               param="input", code="context_length_exceeded")
