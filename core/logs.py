"""Logging on standard error, the same in every process, and what else the program says there."""
from __future__ import annotations

import json
import logging
import sys
import threading
import time
from typing import Any, TextIO

from .config import ServerSettings
from .env import debug_level


class JsonFormatter(logging.Formatter):
    """One JSON object a line. A record's `fields` are fields of it, and its `what` the message without them."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {"time": time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created)) + f".{record.msecs:03.0f}Z",
                 "level": record.levelname.lower(), "logger": record.name,
                 "message": getattr(record, "what", None) or record.getMessage(),
                 **getattr(record, "fields", {})}
        if record.exc_info:
            entry["error"] = self.formatException(record.exc_info)
        if hasattr(record, "details"):
            entry["details"] = record.details
        return json.dumps(entry)  # escaped, since standard error may be in any encoding


def set_up_logging(settings: ServerSettings) -> None:
    """Print messages from `settings.log_level` on; with ISTHMUS_DEBUG above 0 at least those of level info."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter() if settings.log_format == "json" else
                         logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s", "%Y-%m-%d %H:%M:%S"))
    level = getattr(logging, settings.log_level.upper())
    logging.basicConfig(handlers=[handler], level=min(level, logging.INFO) if debug_level() else level, force=True)
    if settings.log_format == "json":  # what Python would print by itself
        sys.excepthook = _log_uncaught
        threading.excepthook = sys.unraisablehook = lambda found: _log_uncaught(*found[:3])
        logging.captureWarnings(True)


def announce(text: str, level: int = logging.INFO, stream: TextIO | None = None) -> None:
    """Say something to whoever watches the program, whatever the log level: as it is on `stream` (standard error), or
    with JSON logging as one record of that level, with the lines after the first as "details"."""
    json_handlers = [h for h in logging.getLogger().handlers if isinstance(h.formatter, JsonFormatter)]
    if json_handlers:
        message, *details = text.removeprefix("isthmus: ").splitlines()
        record = logging.LogRecord("isthmus", level, "", 0, message, None, None)
        if details:
            record.details = [line.strip() for line in details]
        json_handlers[0].handle(record)
    else:
        stream = stream or sys.stderr
        # On a terminal: in place of the ^C of Ctrl-C, or of a line of progress.
        print(f"\r\x1b[K{text}" if stream.isatty() else text, file=stream, flush=True)


def _log_uncaught(*error: Any) -> None:
    logging.getLogger("isthmus").critical("%s: %s", error[0].__name__, error[1], exc_info=error)
