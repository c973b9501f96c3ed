"""`/v1/models` as Anthropic's clients read it; they share the path with OpenAI's."""
from __future__ import annotations

from datetime import UTC, datetime
from typing import Any


def model_info(card: dict[str, Any]) -> dict[str, Any]:
    """An entry in this form of OpenAI's."""
    created = datetime.fromtimestamp(card["created"], UTC).isoformat().replace("+00:00", "Z")
    return {"type": "model", "id": card["id"], "display_name": card["id"], "created_at": created}


def model_list(cards: list[dict[str, Any]]) -> dict[str, Any]:
    """All of them, which are one page."""
    data = [model_info(card) for card in cards]
    return {"data": data, "has_more": False, "first_id": data[0]["id"], "last_id": data[-1]["id"]}
