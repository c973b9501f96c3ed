"""Tests declare what they need of a platform, never its name: `needs(...)` marks and the fixture `platform_name`."""
from __future__ import annotations

import signal
from collections import Counter
from contextlib import suppress

import pytest
from isthmus.core import manifests
from isthmus.core.discovery import list_platforms, platform_root

SLOWER = 3  # times the declared COST, and this many seconds more, until a test file is told about
_seconds: Counter[str] = Counter()


def pytest_addoption(parser):
    parser.addoption("--platform", help="try tests with the fixture `platform_name` on this platform only")
    parser.addoption("--draws", type=int, default=128, help="in each setting of tests/test_speculation_draws.py")


def pytest_configure():
    """A shell's background job ignores SIGINT, and so would all that tests start and interrupt. How long Hypothesis'
    examples take, and how long it takes to draw them, depends on the machine."""
    with suppress(ImportError):
        from hypothesis import HealthCheck, settings
        settings.register_profile("suite", deadline=None, suppress_health_check=[HealthCheck.too_slow])
        settings.load_profile("suite")
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def platforms_of_the_tree() -> list[str]:
    return sorted(name for name, found in list_platforms().items() if found.entry is None)


def pytest_generate_tests(metafunc):
    """`platform_name`: every platform of the tree whose manifest offers what the test needs."""
    if "platform_name" not in metafunc.fixturenames:
        return
    words = {word for mark in metafunc.definition.iter_markers("needs") for word in mark.args}
    claims = {name: manifests.read_claim(list_platforms()[name]) for name in platforms_of_the_tree()}
    known = frozenset().union(*map(manifests.capabilities, claims.values()))
    if words - known:
        raise pytest.UsageError(f"{metafunc.definition.nodeid} needs {', '.join(sorted(words - known))}, which no "
                                f"manifest under {platform_root()} offers")
    asked = metafunc.config.getoption("--platform")
    names = [name for name, claim in claims.items() if words <= manifests.capabilities(claim)]
    metafunc.parametrize("platform_name", [name for name in names if asked in (None, name)])


def pytest_runtest_logreport(report):
    _seconds[report.nodeid.partition("::")[0]] += report.duration


def pytest_terminal_summary(terminalreporter, config):
    """Name the files that take much longer than they declare."""
    from pathlib import Path

    import graph
    for name, seconds in _seconds.most_common():
        path = Path(name)
        if (graph.ROOT / path).is_file() and seconds > SLOWER * graph.cost(path) + SLOWER:
            terminalreporter.write_line(f"{name} took {seconds:.0f} s and declares {graph.cost(path):g}: set its COST")
