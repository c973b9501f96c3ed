"""Manifest files: read without importing a platform, kept to by its probe, and what a request may ask for."""
from __future__ import annotations

import asyncio
import importlib
import json
import re
import sys
from dataclasses import replace
from importlib.metadata import EntryPoint
from importlib.util import find_spec

import msgspec
import pytest
from isthmus.core import discovery, manifests
from isthmus.core.api import Engine
from isthmus.core.cli import doctor
from isthmus.core.cli.main import main
from isthmus.core.config import Config, ModelSettings, PlatformSettings
from isthmus.core.discovery import Found
from isthmus.core.errors import RequestError
from isthmus.core.messages import ControlSpec, GrammarSpec, SamplingParams, Submit, pack_ids
from isthmus.core.platform import FEATURES, Manifest, Unavailable
from isthmus.core.platform_options import platforms_for
from isthmus.core.processes.in_process import InProcessClient
from isthmus.core.quant.formats import FORMATS
from isthmus.core.registry import RegistrationError
from isthmus.core.scheduler.admission import ASKS, Limits, check_request
from isthmus.core.server.app import create_app
from isthmus.core.specs import KV_FORMATS

from .checkpoints import tiny_llama_gguf
from .fake_client import ByteTokenizer, ChatMarks, drive

FOLDERS = sorted(p.parent.name for p in discovery.platform_root().glob("*/platform.py"))
GOOD = """
title = "t"
devices = "d"
interface = 1
compute_dtypes = ["f32"]
kv_dtypes = ["f32"]
page_sizes = [16]
features = ["logprobs", "moe"]
determinism = "T1"
[ops]
embed = ""
linear = "in f32"
rms_norm = ""
rope = ""
attention = ""
act_mul = ""
moe = ""
all_reduce = ""
sample = ""
[lacks]
sliding_window = "no window"
softcap = "no cap"
penalties = "no penalties here"
logit_bias = "no bias"
grammar_mask = "no masks"
overlap = "eager"
export_pages = "no way out"
"""


@pytest.fixture
def outside(tmp_path, monkeypatch):
    """outside(text): an entry-point platform of an installed package whose import fails, with this manifest file."""
    package = tmp_path / "some_vendor" / "chip"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "platform.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(tmp_path)

    def make(text: str | None, module: str = "some_vendor.chip.platform") -> Found:
        if text is not None:
            (package / manifests.FILE).write_text(text)
        return Found("chip", "package some-vendor", EntryPoint("chip", f"{module}:Platform", discovery.GROUP))
    return make


def test_a_file_nested_too_deep_is_told_as_any_other(outside):
    found = outside("x = " + "[" * 5000 + "]" * 5000)
    with pytest.raises(RegistrationError, match="chip/manifest.toml: .*recursion"):
        manifests.read_claim(found)


@pytest.mark.parametrize("old, new, what", [('title = "t"', 'title = "t\\u001b[2J"', "title"),
                                            ('"no cap"', '"no\\ncap"', "softcap")])
def test_texts_that_would_steer_a_terminal_are_refused(outside, old, new, what):
    with pytest.raises(RegistrationError, match=f"{what} holds characters that cannot be printed on a line: '"):
        manifests.read_claim(outside(GOOD.replace(old, new)))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return str(tiny_llama_gguf(tmp_path_factory.mktemp("tiny") / "tiny.gguf"))


# ---- the files

@pytest.mark.parametrize("name", FOLDERS)
def test_every_platform_of_the_tree_has_a_file_that_is_right(name):
    claim = manifests.read_claim(discovery.list_platforms()[name])
    assert set(claim.formats) <= set(FORMATS)
    assert set(claim.compute_dtypes) <= {"f64", "f32", "f16", "bf16"} and set(claim.kv_dtypes) <= set(KV_FORMATS)
    assert bool(claim.library) == bool(claim.requires)


@pytest.mark.parametrize("name", FOLDERS)
def test_options_of_the_file_are_those_of_the_code(name):
    """The platform refuses a name that no file has, and says which it has; and takes each value of the file's."""
    known = manifests.read_claim(discovery.list_platforms()[name]).options
    if (discovery.platform_root() / name / "driver.py").is_file():  # a device is needed to probe it
        if not find_spec("torch"):
            pytest.skip("torch is not installed")
        runtime = importlib.import_module(f"isthmus.platforms.{name}.runtime")
        words = {kind.options_known for kind in vars(runtime).values()
                 if isinstance(kind, type) and kind.__module__ == runtime.__name__ and hasattr(kind, "options_known")}
        assert words == {tuple(known)}
        return
    try:
        discovery.load_platform(name, {"qqq": "1"}).probe()
    except Unavailable as error:
        if "qqq" not in str(error):
            pytest.skip(f"unavailable: {error}")
        assert str(error).endswith(f"no option qqq; it has {', '.join(known) if known else 'none'}")
    else:
        pytest.fail("it takes any option")


@pytest.mark.parametrize("word, names", [("nvidia", ["cuda"]), ("AMD", ["rocm"]), ("intel", ["xpu"]), ("tpu", ["tpu"]),
                                         ("metal", ["mlx"]), ("jax", ["tpu"]),
                                         ("gpu", ["cuda", "mlx", "rocm", "xpu"]), ("(", []), ("", [])])
def test_a_platform_is_found_by_its_devices(word, names):
    assert [name for name in platforms_for(word) if name in FOLDERS] == names


def test_reading_imports_no_platform(outside):
    before = set(sys.modules)
    assert manifests.read_claim(outside(GOOD)).ops["linear"] == "in f32"
    for name in FOLDERS:
        manifests.read_claim(discovery.list_platforms()[name])
    new = {module for module in set(sys.modules) - before if "platforms" in module or "vendor" in module}
    assert not new


def test_the_module_of_an_entry_point_may_be_a_package(outside):
    assert manifests.find_file(outside(GOOD, "some_vendor.chip")).read_text() == GOOD


@pytest.mark.parametrize("change, message", [
    (("interface = 1", "interface = 'one'"), r"Expected `int`, got `str` - at `\$.interface`"),
    (("title", "titel"), "unknown field `titel`"),
    (('"logprobs", "moe"', '"logprobs", "moe", "fast"'), "'fast' is no feature; there are sliding_window"),
    (('overlap = "eager"', ""), "lacks.overlap needs a reason"),
    (('overlap = "eager"', 'overlap = "eager"\nlogprobs = "x"'), "logprobs is both offered and lacking"),
    (('overlap = "eager"', 'overlap = "eager"\nspeed = "x"'), "lacks.speed is neither op nor feature"),
    (('embed = ""', 'embed = ""\nsoftmax = ""'), "'softmax' is no op; there are embed"),
    (('rope = ""', ""), "lacks.rope needs a reason"),
    (('"T1"', '"T9"'), "determinism 'T9' is not one of T0, T1, T2"),
    (("page_sizes = [16]", "page_sizes = []"), "page_sizes is empty"),
    (("[ops]", "[ops"), "chip/manifest.toml"),
])
def test_a_wrong_file_is_refused_with_its_name_and_what_is_wrong(outside, change, message):
    assert change[0] in GOOD
    with pytest.raises(RegistrationError, match=message) as caught:
        manifests.read_claim(outside(GOOD.replace(*change)))
    assert manifests.FILE in str(caught.value)


def test_a_package_without_a_file_says_where_it_would_be(outside):
    with pytest.raises(RegistrationError, match=r"has no manifest.toml beside its module \(.*some_vendor/chip/man"):
        manifests.read_claim(outside(None))
    with pytest.raises(RegistrationError, match="not_there.platform:Platform is not inside an installed package"):
        manifests.read_claim(outside(None, "not_there.platform"))


# ---- what is probed

@pytest.fixture
def probed(platform_name):
    """A platform of the tree, probed, and its file."""
    try:
        platform = discovery.load_platform(platform_name)
        manifest = platform.probe()
    except Unavailable as error:
        pytest.skip(f"unavailable: {error}")
    yield platform, manifest, manifests.read_claim(discovery.list_platforms()[platform_name])
    getattr(platform, "close", lambda: None)()


@pytest.mark.needs()
def test_a_probe_claims_no_more_than_the_file(probed):
    _, manifest, claim = probed
    assert manifests.excess(claim, manifest) == []


@pytest.mark.needs()
def test_a_platform_that_can_run_gives_the_reasons_of_its_file(probed):
    platform, manifest, claim = probed
    given = manifests.missing_features(platform, manifest)
    assert {word: reason for word, reason in given.items() if word in claim.lacks} == {
        word: reason for word, reason in claim.lacks.items() if word in FEATURES}
    assert not [word for word in manifest.features if platform.supports(word)], "a feature is offered and declined"


def test_whatever_is_beyond_the_file_is_named(outside):
    claim = manifests.read_claim(outside(GOOD))
    manifest = Manifest("chip", "d", 1, ("f32",), ("f32",), (), (16,), None, 1, 1, frozenset({"moe"}), "T2", rank=-1)
    assert manifests.excess(claim, manifest) == []
    more = replace(manifest, compute_dtypes=("bf16", "f32"), kv_dtypes=("f16",), formats=("q4_0",), page_sizes=(16, 8),
                   features=frozenset({"softcap"}), determinism="T0", max_top_logprobs=21, local_ranks=2, rank=3,
                   interface=2)
    assert manifests.excess(claim, more) == [
        "compute_dtypes: bf16", "kv_dtypes: f16", "formats: q4_0", "page_sizes: 8", "features: softcap",
        "max_top_logprobs: 21, its file says 20", "local_ranks: 2, its file says 1", "rank: 3, its file says 0",
        "determinism: T0, its file says T1", "interface: 2, its file says 1"]


# ---- what the command line makes of it

def test_doctor_tells_what_a_platform_that_cannot_run_would_offer(monkeypatch, capsys):
    claim = manifests.read_claims()["cpu"]
    monkeypatch.setattr("isthmus.core.discovery.probe_all", lambda options=None: {"cpu": Unavailable("no torch here")})
    assert main(["doctor"]) == 1
    text = capsys.readouterr().out
    assert "- cpu  for host processors, bf16, f32; not here: no torch here" in text
    assert "isthmus explain --platform cpu" in text and len(text.splitlines()) <= 20
    found = doctor.examine(PlatformSettings())["platforms"]["cpu"]
    assert found["offers"] == msgspec.to_builtins(claim) and found["reason"] == "no torch here"


def test_doctor_calls_a_platforms_own_mistake_broken(monkeypatch, capsys):
    def forgetful(self, rank=0, world=1):
        return Manifest(name="reference", device="d")
    monkeypatch.setattr("isthmus.platforms.reference.platform.Platform.probe", forgetful)
    main(["doctor"])
    line, = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  - reference"))
    assert re.search(r"any host processor, f64, f32; broken: tests/test_manifests.py:\d+: TypeError: "
                     r"Manifest.__init__\(\) missing \d+ required positional arguments: 'interface'", line), line


def test_explain_prints_the_manifest_in_full_also_of_a_platform_that_cannot_run(monkeypatch, tiny, capsys):
    def absent(*_):
        raise Unavailable("no torch here")
    monkeypatch.setattr("isthmus.core.startup.load_platform", absent)
    assert main(["explain", tiny, "--platform", "cpu", "--json"]) == 2
    report = json.loads(capsys.readouterr().out)
    assert report["manifest"] == json.loads(msgspec.json.encode(manifests.read_claims()["cpu"]))
    assert report["decisions"] == [{"what": "problem", "value": "no torch here", "why": ""}]
    assert main(["explain", tiny, "--platform", "cpu"]) == 2
    rows = dict(line.strip().split("  ", 1) for line in capsys.readouterr().out.splitlines() if "  " in line.strip())
    for word in (*(f"op {op}" for op in manifests.OPS), *(f"feature {feature}" for feature in FEATURES)):
        assert rows[word].strip().startswith("yes"), word
    assert rows["library"].strip() == "torch, by pip install 'isthmus[cpu]'"
    assert rows["determinism"].strip() == "T2: logits are within tolerance of the reference's"
    assert rows["op linear"].strip() == "yes, kept formats in bf16 only"


def test_doctor_and_explain_tell_what_is_wrong_with_a_file(monkeypatch, tiny, capsys):
    bad = RegistrationError("/p/manifest.toml: Object contains unknown field `rnk`")
    monkeypatch.setattr("isthmus.core.manifests.read_claims", lambda: {"reference": bad})
    assert main(["explain", tiny, "--platform", "reference"]) == 0
    assert f"manifest\n  problem  {bad}\n" in capsys.readouterr().out
    assert main(["explain", tiny, "--platform", "reference", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["manifest"], report["manifest_problem"]) == (None, str(bad))
    assert main(["doctor"]) == 0
    assert f"; {bad}\n" in capsys.readouterr().out


def test_what_is_lacking_is_explained_with_the_reason(outside):
    shown = dict(manifests.lines(manifests.read_claim(outside(GOOD))))
    assert shown["feature penalties"] == "no: no penalties here" and shown["feature logprobs"] == "yes"
    assert shown["library"] == "none"
    assert shown["feature partial_rope"] == "no: its file is older than the word"


# ---- what a request may ask for

ASKING = {"logprobs": ("logprobs", 0), "prompt_logprobs": ("logprobs", 2), "repetition_penalty": ("penalties", 1.1),
          "presence_penalty": ("penalties", -0.5), "frequency_penalty": ("penalties", 0.5),
          "logit_bias": ("logit_bias", {7: 1.0}), "min_tokens": ("logit_bias", 2),
          "grammar": ("grammar_mask", GrammarSpec("json_object", "")),
          "controls": ("grammar_mask", ControlSpec(banned=pack_ids([3])))}


def test_every_sampling_parameter_was_thought_of():
    """A new field of `SamplingParams` must be listed: in `ASKS` when the platform has to be asked, else here."""
    every_platform = {"max_tokens", "temperature", "top_p", "top_k", "min_p", "seed"}
    only_core = {"stop", "stop_token_ids", "include_stop", "ignore_eos", "skip_special",
                 "thinking"}  # which comes with a grammar
    assert {*ASKS, *every_platform, *only_core} == {f.name for f in msgspec.structs.fields(SamplingParams)}
    assert {name: feature for name, (feature, _) in ASKING.items()} == ASKS


@pytest.mark.parametrize("name", ASKING)
def test_a_request_for_what_the_platform_lacks_is_refused_with_its_reason(name):
    feature, value = ASKING[name]
    sent = "bad_words" if name == "controls" else name  # the client's word
    submit = Submit("r", pack_ids([1]), SamplingParams(**{name: value}))
    limits = Limits(4, 4, 16, 16, 64, 100, platform="chip")
    assert check_request(submit, limits) == 16
    other = {word: "not this" for word in FEATURES if word != feature}
    assert check_request(submit, replace(limits, lacks=other)) == 16
    with pytest.raises(RequestError) as caught:
        check_request(submit, replace(limits, lacks={feature: "the silicon is too small"}))
    assert caught.value.message == f"{sent} is not available on chip: the silicon is too small"
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, sent, "unsupported_parameter")


def test_the_platforms_number_of_log_probabilities_is_the_limit():
    limits = Limits(4, 4, 16, 16, 64, 100, max_top_logprobs=2, platform="chip")
    with pytest.raises(RequestError, match="logprobs 3 is outside 0 to 2, the most that chip gives"):
        check_request(Submit("r", pack_ids([1]), SamplingParams(logprobs=3)), limits)


NULL = ("null", ("lacks=logprobs+penalties",))


def test_the_reason_reaches_programs(tiny):
    with Engine(tiny, platform="null", platform_option=NULL[1]) as engine:
        assert engine.generate("a", max_tokens=2, logit_bias={7: 1.0}).text is not None
        with pytest.raises(RequestError, match="logprobs is not available on null: the null platform was made without"):
            engine.generate("a", max_tokens=2, logprobs=1)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path, field, param", [
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 1}, "logprobs"),
    ("/v1/completions", {"logprobs": 1}, "logprobs"), ("/v1/completions", {"presence_penalty": 1}, "presence_penalty"),
    ("/v1/chat/completions", {"repetition_penalty": 1.5}, "repetition_penalty")])
def test_the_reason_reaches_http_clients_as_a_400(tiny, path, field, param, stream):
    from isthmus.core.server.text_service import TextService
    config = Config(model=ModelSettings(tiny), platform=PlatformSettings(*NULL))

    async def ask(body: dict) -> tuple[int, dict]:
        client = InProcessClient(config)
        await client.start()
        try:
            sent = await drive(create_app(client, TextService(ByteTokenizer(), ChatMarks()), config), path,
                               json.dumps(body).encode())
        finally:
            await client.close()
        return sent[0]["status"], json.loads(b"".join(m.get("body", b"") for m in sent[1:]))

    prompt = {"prompt": "a"} if "chat" not in path else {"messages": [{"role": "user", "content": "a"}]}
    status, answer = asyncio.run(ask({**prompt, "max_tokens": 2, "stream": stream, **field}))
    assert status == 400 and answer["error"]["param"] == param
    assert answer["error"]["message"] == (f"{param} is not available on null: the null platform was made without it")


def test_a_recommended_penalty_is_left_out_where_there_are_none(tiny, monkeypatch):
    from isthmus.core import startup
    monkeypatch.setattr(startup, "recommended_sampling",
                        lambda *_: {"temperature": 0.7, "repetition_penalty": 1.1})
    loaded = startup.load(Config(model=ModelSettings(tiny), platform=PlatformSettings(*NULL)))
    assert loaded.sampling == {"temperature": 0.7}
    assert "the model's recommended repetition penalty is left out: null has no penalties" in loaded.notes
    kept = startup.load(Config(model=ModelSettings(tiny), platform=PlatformSettings("null")))
    assert kept.sampling["repetition_penalty"] == 1.1 and not any("penalty" in note for note in kept.notes)


def test_the_null_platform_leaves_out_what_it_is_told_to():
    with pytest.raises(Unavailable, match="lacks='logprob': words of sliding_window"):
        discovery.load_platform("null", {"lacks": "logprob"})
    manifest = discovery.load_platform("null", {"lacks": "moe"}).probe()
    assert manifest.features == set(FEATURES) - {"moe", "export_pages"}


# ---- what tests declare

def test_words_of_a_claim_are_those_of_the_conformance_cases():
    words = manifests.capabilities(manifests.read_claim(Found("cpu", "folder")))
    assert {"bf16", "kv bf16", "q4_1", "pages of 16", "logprobs", "2 ranks"} <= words and "f64" not in words


@pytest.mark.needs("bf16", "kv bf16")
def test_a_test_is_tried_on_platforms_that_offer_what_it_needs(platform_name):
    assert {"bf16", "kv bf16"} <= manifests.capabilities(manifests.read_claim(Found(platform_name, "folder")))


@pytest.mark.needs("f64")
def test_and_on_no_other(platform_name):
    assert platform_name == "reference"
