"""Logging on standard error, the same in every process."""
from __future__ import annotations

import json
import logging
import sys
import time

from .config import ServerSettings
from .env import debug_level


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
                 "level": record.levelname.lower(), "logger": record.name, "message": record.getMessage()}
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)


def set_up_logging(settings: ServerSettings) -> None:
    """Print messages from `settings.log_level` on; with ISTHMUS_DEBUG above 0 at least those of level info."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else
                         logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%H:%M:%S"))
    level = getattr(logging, settings.log_level.upper())
    logging.basicConfig(handlers=[handler], level=min(level, logging.INFO) if debug_level() else level, force=True)
