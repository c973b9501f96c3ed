// Products y[M, N] = x[M, K] w[N, K]^T in float32.
//
// Every element is one chain of fused multiply-adds over k = 0, 1, .. K - 1, whatever M is and whoever computes it, so
// a row's result does not depend on the rows beside it.
#pragma once
#include <algorithm>
#include "packed.h"

namespace isthmus {

constexpr int ROWS = 6;  // rows whose sums are in registers at once
constexpr long CHUNK = 32 * NATIVE;           // values of k whose weights are expanded at once for many rows
constexpr int MANY = NATIVE == 16 ? 32 : 12;  // rows from which that pays for codes; bf16 is expanded at no cost

// Blocks that several rows are multiplied with at once: the sums, a row of weights and one value fit the registers.
constexpr int WIDE = NATIVE == 16 ? 4 : 1;
constexpr int WIDEST = NATIVE == 16 ? 4 : 2;  // and a single row, whose scales want registers too

// Rows of x times NB neighbouring blocks: y[m * ys + n] gets the sums, on top of what it holds when `more`.
template <class W, int M, int NB>
static inline void tile(const float* x, long xs, const uint8_t* w, long block, long K, float* y, long ys, bool more) {
    f32x16 acc[M][NB];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < NB; n++) acc[m][n] = more ? load<f32x16>(y + m * ys + LANES * n) : f32x16{};
    for (long k = 0; k < K; k += W::GROUP, w += W::BYTES) {
        typename W::Head heads[NB];
#pragma GCC unroll 8
        for (int n = 0; n < NB; n++) heads[n] = W::head(w + n * block);
        for (int part = 0; part < W::GROUP / W::WIDTH; part++) {
            const float* at = x + k + part * W::WIDTH;
#pragma GCC unroll 8
            for (int j = 0; j < W::WIDTH; j++) {
                f32x16 v[NB];
#pragma GCC unroll 8
                for (int n = 0; n < NB; n++) v[n] = W::value(w + n * block, part, heads[n], j);
#pragma GCC unroll 8
                for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                    for (int n = 0; n < NB; n++) acc[m][n] += v[n] * at[m * xs + j];
            }
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

// y[M][16 NB] = x[M][K] times NB neighbouring blocks.
template <class W, int NB>
static void products(const float* x, long xs, long M, const uint8_t* w, long block, long K, float* panel, float* y) {
    const long ys = LANES * NB;
    if (M < MANY || W::GROUP == 1) return tiles<W, NB>(x, xs, M, w, block, K, y, ys, false);
    for (long k = 0; k < K; k += CHUNK) {
        const long length = std::min(CHUNK, K - k);
        expand<W>(w, block, NB, k, length, panel);
        tiles<F32, NB>(x + k, xs, M, (const uint8_t*)panel, length * LANES * sizeof(float), length, y, ys, k > 0);
    }
}

}  // namespace isthmus
