"""What the grammar library says of a grammar, in the words of the client who wrote it."""
from __future__ import annotations

import re
from typing import Any

from ..errors import cut

TOO_COMPLEX = "it is too complex; simplify it, or make what it repeats, its patterns or its numbers' bounds shorter"
# What the library says, as a regular expression -> what the client is told.
WORDS = {
    r"oneOf constraints are not supported.*":
        "oneOf is supported only where its parts are plainly apart, by a type or by a property of one value; use anyOf",
    r"Resource '(.*?)' is not present in a registry.*": r"$ref '\1' leads to another document, which is never read",
    r"Value for 'multipleOf' has too many digits: .*": "multipleOf has more digits than can be enforced",
    r"NoExtensionBias": "no text satisfies it",
    r"invalid multiple of": "multipleOf must be a number above 0",
    r"Failed to generate regex for (?:float|integer) range.*":
        "minimum and maximum are too far apart to be enforced, or have too many digits",
    r"Expected f64 for": "a number is needed for",
    r"Expected positive integer for": "a whole number from 0 on, within 64 bits, is needed for",
    r"Unknown format: (.*)": r"the format \1 cannot be enforced; leave it out",
    r"lookarounds not supported yet; \w+ in regex": r"\\b and anchors in the middle are not supported:",
    r"Failed to convert the grammar from GBNF to Lark: ": "",
    r"\s+while processing json-schema:///(#\S*)": r" (in \1)",
    r"string index out of range": "it ends within an escape",
    r"maximum recursion depth exceeded": "its brackets are nested too deeply",
}
_LIMIT = re.compile(r"fuel exhausted|precomputation failed|[Tt]oo many (items|expressions|states)|max_grammar_size|"
                    r"[Gg]rammar too (big|large)")
# Of the Lark that a grammar in GBNF was converted to: places, lines of it, and what points into them.
_CONVERTED = re.compile(r"\A(?:at )?\d+\(\d+\): |\n *\d+ \|.*|\n *\^(?=\n|\Z)")


def reason(state: Any) -> str:
    """Why a matcher of the library's has failed, for people: nothing of its inside."""
    text = state.get_error().partition("<backtrace>")[0].partition("<state>")[0]
    return "the library failed on it" if text.startswith("panic") else in_words(text)


def in_words(text: str) -> str:
    """What the library says, said anew where it speaks of itself."""
    text = text.partition("<non-verbose/>")[0]
    if _LIMIT.search(text):
        return TOO_COMPLEX
    for theirs, ours in WORDS.items():
        text = re.sub(theirs, ours, text, flags=re.DOTALL)
    return cut(text.strip(), 500)


def of_gbnf(text: str) -> str:
    """What is said of a converted grammar, without places that its author has not seen."""
    return _CONVERTED.sub("", text).strip()
