"""Platforms are found by folder and by entry point, checked whole, and cost each other nothing."""
from __future__ import annotations

import sys
from pathlib import Path

import pytest
from isthmus.core import discovery, manifests
from isthmus.core.discovery import (
    check_platform,
    choose_platform,
    list_platforms,
    load_platform,
    platform_root,
    probe_all,
    told,
)
from isthmus.core.platform import INTERFACE_VERSION, Manifest, Unavailable
from isthmus.core.registry import RegistrationError
from isthmus.platforms.null.platform import Platform as Null

VENDOR = """
from dataclasses import replace
from isthmus.platforms.null.platform import Platform as Null

class Platform(Null):
    def probe(self, rank=0, world=1):
        return replace(super().probe(rank, world), name="acme", device="Acme 9000", rank=99)
"""


@pytest.fixture
def install(tmp_path, monkeypatch):
    """install(name, source): a package of its own that offers platform `name`. Of the folders, only null is listed."""
    (tmp_path / "root" / "null").mkdir(parents=True)
    (tmp_path / "root" / "null" / "platform.py").touch()
    monkeypatch.setattr(discovery, "platform_root", lambda: tmp_path / "root")

    def make(name: str, source: str) -> None:
        module = f"isthmus_{name}_{tmp_path.name.replace('-', '_')}"
        folder: Path = tmp_path / name
        info = folder / f"isthmus_{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: isthmus-{name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[isthmus.platforms]\n{name} = {module}:Platform\n")
        (folder / f"{module}.py").write_text(source)
        monkeypatch.syspath_prepend(str(folder))
    return make


def test_folders_are_listed_without_an_import():
    loaded = set(sys.modules)
    names = set(list_platforms())
    assert {"null", "reference", "cpu"} <= names
    assert not [m for m in set(sys.modules) - loaded if m.startswith("isthmus.platforms.")]
    assert (platform_root() / "null" / "platform.py").exists()


def test_a_vendor_platform_is_found_loaded_and_preferred(install):
    install("acme", VENDOR)
    assert list_platforms()["acme"].source == "package isthmus-acme"
    assert load_platform("acme", {"vocab": "7"}).probe().device == "Acme 9000"
    name, reason = choose_platform()
    assert name == "acme" and reason == "the fastest found"


@pytest.mark.parametrize(("source", "reason"), [
    ("import no_such_library", "No module named 'no_such_library'"),
    ("raise OSError('libacme.so: cannot open shared object file')", "OSError: libacme.so: cannot open"),
    ("x = 1", "isthmus_broken_.*py has no attribute 'Platform'"),
    ("def Platform(options): pass", "`Platform` must be a class"),
    ("class Platform: pass", "is incomplete"),
    ("class Platform:\n    raise RuntimeError('driver crashed')", "RuntimeError: driver crashed"),
])
def test_a_broken_platform_costs_no_other_anything(install, source, reason):
    install("acme", VENDOR)
    install("broken", source)
    with pytest.raises((Unavailable, RegistrationError), match=reason) as caught:
        load_platform("broken")
    assert "broken" in str(caught.value)
    probed = probe_all()
    assert isinstance(probed["null"], Manifest) and isinstance(probed["acme"], Manifest)
    assert isinstance(probed["broken"], Exception)
    assert choose_platform()[0] == "acme" and "; broken cannot run here" in choose_platform()[1]
    assert load_platform("null").probe().name == "null"


def test_a_platform_that_cannot_run_here_gives_its_reason(install):
    install("acme", VENDOR.replace("return", "from isthmus.core.platform import Unavailable\n"
                                             "        raise Unavailable('no Acme driver')\n        return"))
    name, reason = choose_platform()
    assert name == "null" and reason == "nothing faster can run here (acme: no Acme driver)"


def test_who_lacks_an_option_is_not_said_to_be_unable_to_run(install):
    install("acme", VENDOR)
    install("broken", "import no_such_library")
    install("plain", VENDOR + '''
    def __init__(self, options):
        if options:
            raise ValueError("no options")
        super().__init__(options)
''')
    name, reason = choose_platform({"vocab": "7"})  # null and acme take it
    assert name == "acme"
    assert reason == ("the fastest found; plain cannot take vocab=7; broken cannot run here (isthmus doctor says why)")


@pytest.mark.parametrize(("source", "message"), [
    ("x = 1\nraise_ = undefined_name", r"py:2: NameError: name 'undefined_name' is not defined"),
    ("x = 1\nimport PACKAGE.opz", r"No module named 'PACKAGE.opz'"),
    ("x = 1\ndef f(:", r"py:2: SyntaxError: "),
    ("len(3)", r"py:1: TypeError: object of type 'int' has no len\(\)"),
    (VENDOR + "    def __init__(self, options):\n        self.speed = options.speeed\n",
     r"py:9: AttributeError: 'dict' object has no attribute 'speeed'"),
])
def test_a_mistake_in_the_platforms_own_code_is_told_with_file_and_line(install, tmp_path, source, message):
    """It is no reason to be let off as "unavailable"."""
    package = f"isthmus_broken_{tmp_path.name.replace('-', '_')}"
    install("broken", source.replace("PACKAGE", package))
    with pytest.raises(RegistrationError, match="platform 'broken': .*" + message.replace("PACKAGE", package)):
        load_platform("broken")


def test_a_mistake_inside_a_library_is_the_librarys(install, tmp_path):
    install("acme", VENDOR)
    folder = tmp_path / "acme"
    (folder / "old_library.py").write_text("import sys\nsys.no_such_thing\n")
    source = next(folder.glob("isthmus_acme_*.py"))
    source.write_text("import old_library\n" + VENDOR)
    with pytest.raises(Unavailable, match="acme/old_library.py:2: AttributeError"):
        load_platform("acme")


def test_a_mistake_in_probe_is_told_with_file_and_line(install):
    install("broken", VENDOR + "\n    def probe(self, rank=0, world=1):\n        return self.devicee\n")
    assert "py:10: AttributeError: 'Platform' object has no attribute 'devicee'" in told(probe_all()["broken"])


@pytest.mark.parametrize("line, told", [
    ("raise SystemExit(0)", "SystemExit: 0"), ("raise GeneratorExit", "GeneratorExit"),
    ("raise BaseException('odd')", "BaseException: odd"), ("raise Mute", "Mute"),
])
@pytest.mark.parametrize("place", ["module", "__init__", "probe", "close"])
def test_what_would_end_the_process_costs_the_platform_only(install, place, line, told):
    mute = "class Mute(Exception):\n    def __str__(self):\n        raise RuntimeError('no words')\n"
    body = f"    def {place}(self, rank=0, world=1):\n        {line}\n" if place != "module" else line + "\n"
    install("broken", mute + VENDOR + body)
    install("acme", VENDOR)
    probed = probe_all()
    assert isinstance(probed["acme"], Manifest) and told in discovery.told(probed["broken"])
    assert choose_platform()[0] == "acme"


@pytest.mark.parametrize("answer, told", [
    ("None", "probe returned a NoneType, a Manifest is needed"), ("{}", "probe returned a dict"),
    ("replace(self.at_best(), rank='high')", "Expected `int`, got `str` - at `$.rank`"),
    ("replace(self.at_best(), compute_dtypes=('f32', 3))", "got `int` - at `$.compute_dtypes[1]`"),
    ("replace(self.at_best(), compute_dtypes='f32')", "Expected `array`, got `str`"),
    ("replace(self.at_best(), kv_dtypes=())", "nothing in kv_dtypes"),
    ("replace(self.at_best(), memory_free=object())", "object"), ("replace(self.at_best(), memory_free=1.5)", "`int`"),
    ("replace(self.at_best(), details={'a': 1})", "$.details"), ("replace(self.at_best(), buckets=7)", "$.buckets"),
    ("replace(self.at_best(), buckets=Buckets(('a',), (1,), (1,)))", "$.buckets.tokens[0]"),
])
def test_a_manifest_of_wrong_types_is_told_and_passed_over(install, answer, told):
    install("acme", VENDOR)
    install("broken", VENDOR + f"    at_best = Null.probe\n    def probe(self, rank=0, world=1):\n"
                               f"        return {answer}\n" + "from isthmus.core.platform import Buckets\n")
    probed = probe_all()
    assert isinstance(probed["acme"], Manifest) and told in str(probed["broken"])
    assert "platform 'broken'" in str(probed["broken"]) and choose_platform()[0] == "acme"


def test_what_a_platform_says_of_itself_cannot_steer_a_terminal(install):
    install("acme", VENDOR.replace('"Acme 9000"', '"Acme\\x1b[2J\\n 9000 \\udc80", details={"a\\r": "b\\x07"}'))
    manifest = probe_all()["acme"]
    assert manifest.device == "Acme?[2J 9000 ?" and manifest.details == {"a?": "b?"}


@pytest.mark.parametrize("name, value, told", [
    ("auto", "null_of_others:Platform", "the name is reserved or not a word"),
    ("a b", "null_of_others:Platform", "the name is reserved or not a word"),
    ("odd", "!!!", "the entry point '!!!' is not of the form module:Class"),
    ("odd", "null_of_others", "the entry point 'null_of_others' is not of the form module:Class"),
])
def test_an_entry_point_that_is_none_is_told_and_passed_over(install, tmp_path, name, value, told):
    install("acme", VENDOR)
    install("x", VENDOR)
    file = tmp_path / "x" / "isthmus_x-1.0.dist-info" / "entry_points.txt"
    file.write_text(f"[isthmus.platforms]\n{name} = {value}\n")
    assert told in list_platforms()[name].problem
    with pytest.raises(RegistrationError, match="package isthmus-x: "):
        load_platform(name)
    assert told in str(probe_all()[name]) and choose_platform()[0] == "acme"
    with pytest.raises(RegistrationError, match="package isthmus-x: "):
        manifests.read_claim(list_platforms()[name])


def test_a_name_from_two_sources_is_refused_and_the_others_stay(install):
    install("null", VENDOR)
    install("acme", VENDOR)
    reason = ("platform 'null' is offered by folder and by package isthmus-null: uninstall package isthmus-null, or "
              "give its platform another name")
    assert list_platforms()["null"].problem == reason
    with pytest.raises(RegistrationError, match=reason):
        load_platform("null")
    probed = probe_all()
    assert str(probed["null"]) == reason and isinstance(probed["acme"], Manifest) and choose_platform()[0] == "acme"


def test_an_unknown_name_lists_those_there_are(install):
    install("acme", VENDOR)
    with pytest.raises(Unavailable, match="platform 'warp' is not installed; there are: acme, null"):
        load_platform("warp")


def test_nothing_can_run_here(install, monkeypatch):
    monkeypatch.setattr(discovery, "probe_all", lambda options: {"a": Unavailable("no driver"), "b": OSError("gone")})
    with pytest.raises(Unavailable, match="no platform can run here. a: no driver; b: gone"):
        choose_platform()


def test_an_incomplete_class_is_told_all_its_gaps_at_once():
    class Platform:
        interface_version = INTERFACE_VERSION + 1

        def probe(self):
            pass

        def supports(self, op):
            pass

        def alloc(self, pages, spec):
            pass

        def copy_pages(self, state, src, dst, stream):
            pass

    with pytest.raises(RegistrationError) as caught:
        check_platform("acme", Platform)
    message = str(caught.value)
    assert message.startswith("platform 'acme' is incomplete: ")
    for gap in ("probe() lacks the parameters rank, world", "supports() lacks the parameters case",
                "load(self, raws", "compile(self, forward",
                "alloc() takes its parameters in another order: self, pages, spec",
                "copy_pages() requires parameters that nobody passes: stream",
                f"interface_version is {INTERFACE_VERSION + 1}, this core serves {INTERFACE_VERSION}"):
        assert gap in message, gap


def test_a_complete_class_passes():
    check_platform("null", Null)
    with pytest.raises(RegistrationError, match="`Platform` must be a class, not 3"):
        check_platform("acme", 3)
