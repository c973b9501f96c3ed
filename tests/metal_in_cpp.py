"""Runs the Metal kernel's source on a host processor: each thread of a threadgroup is a thread, barriers are barriers.

This checks the kernel's arithmetic, indexing and synchronisation, not Metal's compiler.
"""
from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from isthmus.core.platform import AttentionSpec
from isthmus.platforms.mlx.attention_kernel import SOURCE, constants

SIMDGROUPS = 2
SHIM = """
#include <barrier>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <thread>
#include <vector>
#define device
#define threadgroup static
struct Place { unsigned x, y, z; };
static thread_local Place threadgroup_position_in_grid;
static thread_local unsigned thread_index_in_simdgroup, simdgroup_index_in_threadgroup;
static std::barrier<> all(SIMDGROUPS * 32);
static std::vector<std::unique_ptr<std::barrier<>>> groups;
static float lanes[SIMDGROUPS][32];
static float simd_sum(float x) {
    const unsigned group = simdgroup_index_in_threadgroup;
    lanes[group][thread_index_in_simdgroup] = x;
    groups[group]->arrive_and_wait();
    float total = 0;
    for (float value : lanes[group]) total += value;
    groups[group]->arrive_and_wait();
    return total;
}
namespace metal {
    using std::exp;
    float max(float a, float b) { return a > b ? a : b; }
    namespace precise { using std::tanh; }
    enum class mem_flags { mem_threadgroup };
}
static void threadgroup_barrier(metal::mem_flags) { all.arrive_and_wait(); }
"""
MAIN = """
template <class V> std::vector<V> read(const char* path) {
    std::vector<V> out;
    std::FILE* file = std::fopen(path, "rb");
    V value;
    while (std::fread(&value, sizeof value, 1, file) == 1) out.push_back(value);
    std::fclose(file);
    return out;
}
int main() {
    auto wide_q = read<float>("q"), wide_cache = read<float>("cache"), numbers = read<float>("numbers");
    auto pages = read<int>("pages"), positions = read<int>("positions"), slots = read<int>("slots");
    std::vector<T> q(wide_q.begin(), wide_q.end()), cache(wide_cache.begin(), wide_cache.end()), out(q.size());
    for (int i = 0; i < SIMDGROUPS; ++i) groups.push_back(std::make_unique<std::barrier<>>(32));
    std::vector<std::thread> threads;
    for (unsigned t = 0; t < SIMDGROUPS * 32; ++t) threads.emplace_back([&, t] {
        thread_index_in_simdgroup = t % 32;
        simdgroup_index_in_threadgroup = t / 32;
        for (unsigned row = 0; row < positions.size(); ++row) for (unsigned head = 0; head < HEADS; ++head) {
            threadgroup_position_in_grid = {head, row, 0};
            all.arrive_and_wait();
            attend(q.data(), cache.data(), pages.data(), positions.data(), slots.data(), numbers.data(), out.data());
        }
    });
    for (auto& thread : threads) thread.join();
    std::vector<float> wide(out.begin(), out.end());
    std::FILE* file = std::fopen("out", "wb");
    std::fwrite(wide.data(), sizeof(float), wide.size(), file);
    std::fclose(file);
}
"""


def run_decode_kernel(folder: Path, q: np.ndarray, cache: np.ndarray, pages: np.ndarray, positions: np.ndarray,
                      spec: AttentionSpec, page_size: int, kind: str) -> np.ndarray:
    """The decode kernel's result for elements of the C++ type `kind`; arguments as `decode_kernel` takes them."""
    if shutil.which("g++") is None:
        pytest.skip("needs g++")
    fixed = constants(q.shape[1], cache.shape[0] // 2, q.shape[2], page_size, pages.shape[1], spec)
    names = "".join(f"constexpr int {name} = {SIMDGROUPS if name == 'SIMDGROUPS' else value};\n"
                    for name, value in fixed)
    head = ("void attend(const T* q, const T* cache, const int* pages, const int* positions, const int* slots, "
            "const float* numbers, T* out) {")
    (folder / "kernel.cpp").write_text(f"using T = {kind};\n{names}{SHIM}\n{head}\n{SOURCE}\n}}\n{MAIN}")
    arrays = {"q": q, "cache": cache, "pages": pages, "positions": positions,
              "slots": np.array([cache.shape[1]], np.int32),
              "numbers": np.array([spec.scale, spec.softcap or 0], np.float32)}
    for name, array in arrays.items():
        array.tofile(folder / name)
    build = ["g++", "-std=c++20", "-O1", "-pthread", "-Wall", "-Werror", "-Wno-unused-function", "-Wno-psabi",
             "kernel.cpp", "-o", "kernel"]
    done = subprocess.run(build, cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    subprocess.run(["./kernel"], cwd=folder, check=True, timeout=600)
    return np.fromfile(folder / "out", np.float32).reshape(q.shape)
