// Products y[M, N] = x[M, K] w[N, K]^T in float32.
//
// Every element is one chain of fused multiply-adds over k = 0, 1, .. K - 1, whatever M is and whoever computes it, so
// a row's result does not depend on the rows beside it.
#pragma once
#include <algorithm>
#include "packed.h"

namespace isthmus {

constexpr int ROWS = 6;      // rows whose sums are in registers at once
constexpr long CHUNK = 512;  // values of k whose weights are expanded at once for many rows
constexpr int MANY = 32;     // rows from which that pays for codes; bf16 is expanded at no cost in registers

// Rows of x times NB neighbouring blocks. y gets the sums on top of what it holds when `more`.
template <class W, int M, int NB>
static inline void tile(const float* x, long xs, const uint8_t* w, long block, long K, float (*y)[LANES * NB],
                        bool more) {
    f32x16 acc[M][NB];
    for (int m = 0; m < M; m++)
        for (int n = 0; n < NB; n++) acc[m][n] = more ? load<f32x16>(y[m] + LANES * n) : f32x16{};
    for (long k = 0; k < K; k += W::GROUP, w += W::BYTES) {
        typename W::Head heads[NB];
#pragma GCC unroll 8
        for (int n = 0; n < NB; n++) heads[n] = W::head(w + n * block);
        for (int part = 0; part < W::GROUP / W::WIDTH; part++) {
            f32x16 v[NB][W::WIDTH];
#pragma GCC unroll 8
            for (int n = 0; n < NB; n++) W::expand(w + n * block, part, heads[n], v[n]);
            const float* at = x + k + part * W::WIDTH;
#pragma GCC unroll 8
            for (int j = 0; j < W::WIDTH; j++)
#pragma GCC unroll 8
                for (int m = 0; m < M; m++)
#pragma GCC unroll 8
                    for (int n = 0; n < NB; n++) acc[m][n] += v[n][j] * at[m * xs + j];
        }
    }
    for (int m = 0; m < M; m++)
        for (int n = 0; n < NB; n++) store(y[m] + LANES * n, acc[m][n]);
}

template <class W, int NB>
static void tiles(const float* x, long xs, long M, const uint8_t* w, long block, long K, float (*y)[LANES * NB],
                  bool more) {
    for (; M >= ROWS; M -= ROWS, x += ROWS * xs, y += ROWS) tile<W, ROWS, NB>(x, xs, w, block, K, y, more);
    switch (M) {
        case 1: return tile<W, 1, NB>(x, xs, w, block, K, y, more);
        case 2: return tile<W, 2, NB>(x, xs, w, block, K, y, more);
        case 3: return tile<W, 3, NB>(x, xs, w, block, K, y, more);
        case 4: return tile<W, 4, NB>(x, xs, w, block, K, y, more);
        case 5: return tile<W, 5, NB>(x, xs, w, block, K, y, more);
    }
}

// y[M][16 NB] = x[M][K] times NB neighbouring blocks.
template <class W, int NB>
static void products(const float* x, long xs, long M, const uint8_t* w, long block, long K, float* panel, float* y) {
    auto rows = (float (*)[LANES * NB]) y;
    if (M < MANY || W::GROUP <= 2) return tiles<W, NB>(x, xs, M, w, block, K, rows, false);
    for (long k = 0; k < K; k += CHUNK) {
        const long length = std::min(CHUNK, K - k);
        expand<W>(w, block, NB, k, length, panel);
        tiles<F32, NB>(x + k, xs, M, (const uint8_t*)panel, length * LANES * sizeof(float), length, rows, k > 0);
    }
}

}  // namespace isthmus
