"""Pool and radix tree under every order of operations that Hypothesis finds; negative controls in test_mutants.py."""
from __future__ import annotations

from hypothesis import settings

from .cache_machine import CacheMachine

TestCache = CacheMachine.TestCase
TestCache.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
