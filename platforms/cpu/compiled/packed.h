// Matrices whose outputs lie sixteen side by side, so that a product needs no sums across lanes.
//
// A matrix is blocks [N / 16], each a run over k in groups. `value` gives the j-th of a group in float32, `pair` two codes.
#pragma once
#include "vec.h"

namespace isthmus {

struct Bf16 {  // [k / 2][16 outputs][2]
    static constexpr int GROUP = 2, BYTES = 64;
    static ISTHMUS_INLINE f32x16 value(const uint8_t* p, int j) {
        const u32x16 pair = load<u32x16>(p);
        return bits(j ? pair & 0xFFFF0000u : pair << 16);
    }
};
struct F32 {  // [k][16]
    static constexpr int GROUP = 1, BYTES = 64;
    static ISTHMUS_INLINE f32x16 value(const uint8_t* p, int) { return load<f32x16>(p); }
};

// Codes are multiplied in whole numbers: two inputs of an output lie in one word, as two numbers of 16 bits.
struct Int8 {  // groups of 32: codes [16][16 outputs][2], scale half [16], minimum half [16]
    static constexpr int CODES = 512, BYTES = CODES + 64;
    static ISTHMUS_INLINE i32x16 pair(const uint8_t* p, int j) { return widen_i8(p + 2 * LANES * j); }
};
struct Int4 {  // groups of 32: codes [4][16 outputs][2] of four digits, scale half [16], minimum half [16]
    static constexpr int CODES = 256, BYTES = CODES + 64;
    static ISTHMUS_INLINE i32x16 pair(const uint8_t* p, int j) {
        return (i32x16)((load<u32x16>(p + 4 * LANES * (j / 4)) >> (uint32_t)(4 * (j % 4))) & 0x000F000Fu);
    }
};
constexpr long GROUP = 32;         // inputs that share a scale
constexpr long PAIRS = GROUP / 2;

// One output's K weights.
template <class W>
static inline void row_of(const uint8_t* w, long block, long K, long n, float* y) {
    w += n / LANES * block;
    for (long k = 0; k < K; k += W::GROUP, w += W::BYTES)
        for (int j = 0; j < W::GROUP; j++) y[k + j] = W::value(w, j)[n % LANES];
}
template <class W>
static inline void row_of_codes(const uint8_t* w, long block, long K, long n, float* y) {
    w += n / LANES * block, n %= LANES;
    for (long k = 0; k < K; k += GROUP, w += W::BYTES) {
        const float scale = from_f16((const uint16_t*)(w + W::CODES))[n];
        const float minimum = from_f16((const uint16_t*)(w + W::CODES + 2 * LANES))[n];
        for (int j = 0; j < PAIRS; j++) {
            const int32_t two = W::pair(w, j)[n];
            y[k + 2 * j] = (float)(int16_t)two * scale + minimum;
            y[k + 2 * j + 1] = (float)(two >> 16) * scale + minimum;
        }
    }
}

// NB neighbouring blocks from k on: [NB][length][LANES].
template <class W>
static void expand(const uint8_t* w, long block, int NB, long k, long length, float* to) {
    for (int n = 0; n < NB; n++) {
        const uint8_t* at = w + n * block + k / W::GROUP * W::BYTES;
        for (long j = 0; j < length; j += W::GROUP, at += W::BYTES)
#pragma GCC unroll 8
            for (int i = 0; i < W::GROUP; i++, to += LANES) store(to, W::value(at, i));
    }
}

}  // namespace isthmus
