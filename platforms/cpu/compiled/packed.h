// Matrices whose outputs lie sixteen side by side, so that a product needs no sums across lanes.
//
// A matrix is blocks [N / 16], each a run over k in groups of GROUP values. A group is expanded to float32 in parts of
// WIDTH values, with what `head` reads once. Every path expands to the very same numbers.
#pragma once
#include "vec.h"

namespace isthmus {

struct Bf16 {  // [k / 2][16 outputs][2]
    static constexpr int GROUP = 2, WIDTH = 2, BYTES = 64;
    struct Head {};
    static inline Head head(const uint8_t*) { return {}; }
    static inline void expand(const uint8_t* p, int, Head, f32x16* w) {
        u32x16 v = load<u32x16>(p);
        w[0] = bits(v << 16);
        w[1] = bits(v & 0xFFFF0000u);
    }
};
struct F32 {  // [k][16]
    static constexpr int GROUP = 1, WIDTH = 1, BYTES = 64;
    struct Head {};
    static inline Head head(const uint8_t*) { return {}; }
    static inline void expand(const uint8_t* p, int, Head, f32x16* w) { w[0] = load<f32x16>(p); }
};
struct Scaled {
    f32x16 scale, minimum;
};
struct Int8 {  // groups of 32: codes [32][16], scale half [16], minimum half [16]
    static constexpr int GROUP = 32, WIDTH = 4, BYTES = 512 + 64;
    typedef Scaled Head;
    static inline Head head(const uint8_t* p) {
        return {from_f16((const uint16_t*)(p + 512)), from_f16((const uint16_t*)(p + 544))};
    }
    static inline void expand(const uint8_t* p, int part, Head h, f32x16* w) {
        for (int k = 0; k < WIDTH; k++) w[k] = from_i8(p + 16 * (WIDTH * part + k)) * h.scale + h.minimum;
    }
};
struct Int4 {  // groups of 32: codes [4][16 outputs] words of eight digits, scale half [16], minimum half [16]
    static constexpr int GROUP = 32, WIDTH = 8, BYTES = 256 + 64;
    typedef Scaled Head;
    static inline Head head(const uint8_t* p) {
        return {from_f16((const uint16_t*)(p + 256)), from_f16((const uint16_t*)(p + 288))};
    }
    static inline void expand(const uint8_t* p, int part, Head h, f32x16* w) {
        u32x16 c = load<u32x16>(p + 64 * part);
        for (int j = 0; j < 8; j++) w[j] = digit(c >> (4 * j)) * h.scale + h.minimum;
    }
};

// One output's K weights.
template <class W>
static inline void row_of(const uint8_t* w, long block, long K, long n, float* y) {
    w += n / LANES * block;
    f32x16 v[W::WIDTH];
    for (long k = 0; k < K; k += W::GROUP, w += W::BYTES) {
        const typename W::Head head = W::head(w);
        for (int part = 0; part < W::GROUP / W::WIDTH; part++) {
            W::expand(w, part, head, v);
            for (int j = 0; j < W::WIDTH; j++) y[k + part * W::WIDTH + j] = v[j][n % LANES];
        }
    }
}

// NB neighbouring blocks from k on: [NB][length][LANES].
template <class W>
static void expand(const uint8_t* w, long block, int NB, long k, long length, float* to) {
    for (int n = 0; n < NB; n++) {
        const uint8_t* at = w + n * block + k / W::GROUP * W::BYTES;
        for (long j = 0; j < length; j += W::GROUP, at += W::BYTES) {
            const typename W::Head head = W::head(at);
            for (int part = 0; part < W::GROUP / W::WIDTH; part++) {
                f32x16 v[W::WIDTH];
                W::expand(at, part, head, v);
                for (int i = 0; i < W::WIDTH; i++, to += LANES) store(to, v[i]);
            }
        }
    }
}

}  // namespace isthmus
