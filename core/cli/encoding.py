"""Output where the encoding of standard output lacks a character: no reason to fail."""
from __future__ import annotations

import codecs
import sys


def accept_every_character(as_json: bool = False) -> None:
    """From now on such a character is printed as "?", or as an escape where `as_json` is printed."""
    codecs.register_error("jsonescape", _json_escape)
    for stream in (sys.stdout, sys.stderr):
        if getattr(stream, "errors", None) in ("strict", "replace") and hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="jsonescape" if as_json else "replace")


def _json_escape(error: UnicodeError) -> tuple[str, int]:
    r"""\uXXXX for each character, two for one beyond U+FFFF (RFC 8259, section 7)."""
    assert isinstance(error, UnicodeEncodeError)
    data = error.object[error.start:error.end].encode("utf-16-be", "surrogatepass").hex()
    return "".join(f"\\u{data[i:i + 4]}" for i in range(0, len(data), 4)), error.end
