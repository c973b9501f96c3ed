// Products by the matrix unit (AMX), where the build is for processors with one: weights in bf16 as `packed.h` lays them.
//
// Values of x are rounded to bf16, sums are float32. The unit computes each row of a tile by itself, the same however many
// there are, and any number of rows goes through it: a row's result depends on the row alone.
#pragma once
#if defined(__AMX_BF16__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <algorithm>
#include <vector>
#include "packed.h"

namespace isthmus {

constexpr int TILE = 16;      // rows of x in a tile
constexpr long DEPTH = 32;    // inputs of a tile
constexpr long SOON = 2048;   // bytes of weights that are asked for before they are needed, where they pass by once
constexpr long NEAR = 768 << 10;  // bytes of x that stay in the cache while weights pass by

// May this process use the unit? Asks the system for it, which is needed once for all threads.
static inline bool has_matrix_unit() {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(c >> 11 & 1) || !(d >> 22 & 1) || !(d >> 24 & 1)) return false;
    return syscall(SYS_arch_prctl, 0x1023 /* ARCH_REQ_XCOMP_PERM */, 18 /* tile data */) == 0;
}

// Tiles 0 to 5 have `rows` rows, which are sums and what is multiplied, 6 and 7 sixteen, of weights, keys or values. For this
// thread; the system keeps them until they are released.
class Tiles {
  public:
    explicit Tiles(int rows) {
        alignas(64) uint8_t shape[64] = {1};
        for (int tile = 0; tile < 8; tile++) {
            const int height = tile < 6 ? rows : 16, width = 64;
            std::memcpy(shape + 16 + 2 * tile, &width, 2), shape[48 + tile] = (uint8_t)height;
        }
        __asm__ volatile("ldtilecfg %0" ::"m"(shape) : "memory");
    }
    ~Tiles() { __asm__ volatile("tilerelease" ::: "memory"); }
};

// Rows of x in tiles of `rows`, each [K / DEPTH][rows][DEPTH] bf16.
struct Rounded {
    std::vector<uint16_t> parts;
    uint16_t* at = nullptr;  // in `parts`, where a line of the cache begins: loads of rows that cross one take longer
    long rows = 0;

    void resize(long M, long K) {
        rows = std::min<long>(M, TILE);
        const size_t size = (M + TILE - 1) / TILE * rows * K;
        if (parts.size() < size + 32) parts.resize(size + 32);
        at = (uint16_t*)(((uintptr_t)parts.data() + 63) / 64 * 64);
    }
    const uint16_t* tile(long t, long K) const { return at + t * rows * K; }
    void encode(const float* x, long m, long K) {
        uint16_t* to = at + m / TILE * rows * K + m % TILE * DEPTH;
        for (long k = 0; k < K; k += DEPTH, to += rows * DEPTH)
            for (long j = 0; j < DEPTH; j += LANES) to_bf16(to + j, load<f32x16>(x + k + j));
    }
};

typedef float Sums[16][LANES];  // of a tile of x and sixteen outputs

static ISTHMUS_INLINE void expect(const uint8_t* tile) {
    for (int i = 0; i < 1024; i += 64) __builtin_prefetch(tile + SOON + i);
}

#define ISTHMUS_TILE_STORE(n) _tile_stored(n, c[n], sizeof c[n][0])

// One tile of x times four blocks of weights. Tiles 0 to 3 are sums, 4 and 5 x, 6 and 7 weights.
static inline void multiply_1_4(const uint16_t* a, const uint8_t* const* w, long K, long step, Sums* c) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    __asm__ volatile("" ::: "memory");  // the compiler does not know that tiles are read from memory
    for (long k = 0; k < K / DEPTH; k++, a += step) {
        _tile_loadd(4, a, 64);
        for (int n = 0; n < 4; n++) expect(w[n] + k * 1024);
        _tile_loadd(6, w[0] + k * 1024, 64); _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w[1] + k * 1024, 64); _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(6, w[2] + k * 1024, 64); _tile_dpbf16ps(2, 4, 6);
        _tile_loadd(7, w[3] + k * 1024, 64); _tile_dpbf16ps(3, 4, 7);
    }
    ISTHMUS_TILE_STORE(0); ISTHMUS_TILE_STORE(1); ISTHMUS_TILE_STORE(2); ISTHMUS_TILE_STORE(3);
    __asm__ volatile("" ::: "memory");
}

// Two tiles of x, a and b, times two blocks.
static inline void multiply_2_2(const uint16_t* a, const uint16_t* b, const uint8_t* const* w, long K, long step,
                                Sums* c, bool ahead) {
    _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    __asm__ volatile("" ::: "memory");
    for (long k = 0; k < K / DEPTH; k++, a += step, b += step) {
        for (int n = 0; ahead && n < 2; n++) expect(w[n] + k * 1024);
        _tile_loadd(4, a, 64); _tile_loadd(6, w[0] + k * 1024, 64); _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w[1] + k * 1024, 64); _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, b, 64); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
    ISTHMUS_TILE_STORE(0); ISTHMUS_TILE_STORE(1); ISTHMUS_TILE_STORE(2); ISTHMUS_TILE_STORE(3);
    __asm__ volatile("" ::: "memory");
}
#undef ISTHMUS_TILE_STORE

// Sums of tiles x blocks to y: [rows][width], of a run of `run` blocks, and the next run's behind it.
static inline void gather_sums(const Sums* c, int tiles, int blocks, int run, long rows, float* y) {
    const long width = run * LANES;
    for (int i = 0; i < tiles; i++)
        for (int n = 0; n < blocks; n++)
            for (long r = 0; r < std::min<long>(TILE, rows - i * TILE); r++)
                store(y + n / run * rows * width + (i * TILE + r) * width + n % run * LANES,
                      load<f32x16>(c[i * blocks + n][r]));
}

}  // namespace isthmus
#endif
