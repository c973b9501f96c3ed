// Products y[M, N] = x[M, K] w[N, K]^T.
//
// Every element is one chain of fused multiply-adds over k = 0, 1, .. K - 1, whatever M is and whoever computes it, so
// a row's result does not depend on the rows beside it. Where weights are codes, x is coded too, in 16 bits with a scale
// for each group: the sums within a group are exact, and the chain is one over groups.
#pragma once
#include <algorithm>
#include <vector>
#include "packed.h"

namespace isthmus {

constexpr int ROWS = 6;  // rows whose sums are in registers at once
constexpr long CHUNK = 32 * NATIVE;           // values of k whose weights are expanded at once for many rows
constexpr int MANY = NATIVE == 16 ? 32 : 12;  // rows from which that pays

// Blocks that several rows are multiplied with at once: the sums, a row of weights and one value fit the registers.
constexpr int WIDE = NATIVE == 16 ? 4 : 1;
constexpr int WIDEST = NATIVE == 16 ? 4 : 2;  // and a single row

// Rows of x times NB neighbouring blocks: y[m * ys + n] gets the sums, on top of what it holds when `more`.
template <class W, int M, int NB>
static inline void tile(const float* x, long xs, const uint8_t* w, long block, long K, float* y, long ys, bool more) {
    f32x16 acc[M][NB];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < NB; n++) acc[m][n] = more ? load<f32x16>(y + m * ys + LANES * n) : f32x16{};
    for (long k = 0; k < K; k += W::GROUP, w += W::BYTES) {
#pragma GCC unroll 8
        for (int j = 0; j < W::GROUP; j++) {
            f32x16 v[NB];
#pragma GCC unroll 8
            for (int n = 0; n < NB; n++) v[n] = W::value(w + n * block, j);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                for (int n = 0; n < NB; n++) acc[m][n] += v[n] * x[m * xs + k + j];
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < NB; n++) store(y + m * ys + LANES * n, acc[m][n]);
}

template <class W, int NB>
static void tiles(const float* x, long xs, long M, const uint8_t* w, long block, long K, float* y, long ys, bool more) {
    constexpr int LESS = std::min(NB, NB > WIDEST ? WIDEST : WIDE);
    if (NB > (M > 1 ? WIDE : WIDEST)) {
        for (int n = 0; n < NB; n += LESS) tiles<W, LESS>(x, xs, M, w + n * block, block, K, y + n * LANES, ys, more);
        return;
    }
    for (; M >= ROWS; M -= ROWS, x += ROWS * xs, y += ROWS * ys) tile<W, ROWS, NB>(x, xs, w, block, K, y, ys, more);
    switch (M) {
        case 1: return tile<W, 1, NB>(x, xs, w, block, K, y, ys, more);
        case 2: return tile<W, 2, NB>(x, xs, w, block, K, y, ys, more);
        case 3: return tile<W, 3, NB>(x, xs, w, block, K, y, ys, more);
        case 4: return tile<W, 4, NB>(x, xs, w, block, K, y, ys, more);
        case 5: return tile<W, 5, NB>(x, xs, w, block, K, y, ys, more);
    }
}

// y[M][16 NB] = x[M][K] times NB neighbouring blocks, on top of what it holds when `more`.
template <class W, int NB>
static void products(const float* x, long xs, long M, const uint8_t* w, long block, long K, float* panel, float* y,
                     bool more = false) {
    const long ys = LANES * NB;
    if (M < MANY || W::GROUP == 1) return tiles<W, NB>(x, xs, M, w, block, K, y, ys, more);
    for (long k = 0; k < K; k += CHUNK) {
        const long length = std::min(CHUNK, K - k);
        expand<W>(w, block, NB, k, length, panel);
        tiles<F32, NB>(x + k, xs, M, (const uint8_t*)panel, length * LANES * sizeof(float), length, y, ys, more || k > 0);
    }
}

// ---- codes

constexpr long AHEAD = 4096;     // bytes of weights that are asked for before they are needed: products hide no latency
constexpr float LEAST = 1e-34f;  // what is smaller is coded as 0: its inverse would not be finite

// Rows in 16 bits, in tiles of ROWS that lie [K / 2][rows]; scales and sums of groups [K / GROUP][rows].
struct Coded {
    std::vector<int32_t> pairs;
    std::vector<float> scales, sums;

    void resize(long M, long K) {
        if ((long)pairs.size() < M * K / 2) pairs.resize(M * K / 2);
        if ((long)scales.size() < M * K / GROUP) scales.resize(M * K / GROUP), sums.resize(M * K / GROUP);
    }
    // Codes row m of M. A scale that is no number makes the sums none, where x has any.
    void encode(const float* x, long m, long M, long K) {
        const long tile = m / ROWS * ROWS, rows = std::min<long>(ROWS, M - tile), m0 = m - tile;
        int32_t* to = pairs.data() + tile * K / 2 + m0;
        float *scale = scales.data() + tile * K / GROUP + m0, *sum_ = sums.data() + tile * K / GROUP + m0;
        for (long k = 0; k < K; k += GROUP, scale += rows, sum_ += rows) {
            const f32x16 a = load<f32x16>(x + k), b = load<f32x16>(x + k + LANES);
            const float top = largest(vmax(vmax(a, -a), vmax(b, -b)));
            const float inverse = top > LEAST ? 32767.0f / top : 0.0f;
            const i32x16 low = whole(a * inverse), high = whole(b * inverse);
            *scale = top / 32767.0f + sum(a * 0.0f + b * 0.0f);
            int32_t codes[GROUP], total = 0;
            store(codes, low), store(codes + LANES, high);
            for (long j = 0; j < GROUP; j += 2, to += rows) {
                *to = (codes[j] & 0xFFFF) | (int32_t)((uint32_t)codes[j + 1] << 16);
                total += codes[j] + codes[j + 1];
            }
            *sum_ = *scale * (float)total;
        }
    }
};

template <class W, int M>
static inline void coded_tile(const int32_t* x, const float* scales, const float* sums, const uint8_t* w, long K,
                              float* y, long ys) {
    f32x16 acc[M]{};
    for (long k = 0; k < K; k += GROUP, w += W::BYTES, scales += M, sums += M) {
        for (int i = 0; i < W::BYTES; i += 64) __builtin_prefetch(w + AHEAD + i);
        i32x16 total[M]{};
        for (int part = 0; part < PAIRS; part += 4, x += 4 * M)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++) {
                const i32x16 v = W::pair(w, part + j);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++) {
                    total[m] = add_pairs(total[m], v, i32x16{} + x[j * M + m]);
                    pin(total[m]);
                }
            }
        const f32x16 scale = from_f16((const uint16_t*)(w + W::CODES));
        const f32x16 minimum = from_f16((const uint16_t*)(w + W::CODES + 2 * LANES));
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) {
            acc[m] += convert<float>(total[m]) * (scale * scales[m]);
            acc[m] += minimum * sums[m];
        }
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) store(y + m * ys, acc[m]);
}

// y[M][.] = x times one block.
template <class W>
static void coded_products(const Coded& x, long M, const uint8_t* w, long K, float* y, long ys) {
    const int32_t* pairs = x.pairs.data();
    const float *scales = x.scales.data(), *sums = x.sums.data();
    for (; M >= ROWS; M -= ROWS, y += ROWS * ys) {
        coded_tile<W, ROWS>(pairs, scales, sums, w, K, y, ys);
        pairs += ROWS * K / 2, scales += ROWS * K / GROUP, sums += ROWS * K / GROUP;
    }
    switch (M) {
        case 1: return coded_tile<W, 1>(pairs, scales, sums, w, K, y, ys);
        case 2: return coded_tile<W, 2>(pairs, scales, sums, w, K, y, ys);
        case 3: return coded_tile<W, 3>(pairs, scales, sums, w, K, y, ys);
        case 4: return coded_tile<W, 4>(pairs, scales, sums, w, K, y, ys);
        case 5: return coded_tile<W, 5>(pairs, scales, sums, w, K, y, ys);
    }
}

}  // namespace isthmus
