"""Structured output: grammars are compiled by a registered backend, and say which tokens may come next."""

# Backends of this tree -> the module that registers each, imported when it is asked for.
PACKAGES = {"llguidance": ".guidance", "xgrammar": ".xgrammar_backend"}
