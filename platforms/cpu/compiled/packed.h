// Matrices whose outputs lie sixteen side by side, so that a product needs no sums across lanes.
//
// A matrix is blocks [N / 16], each a run over k in groups of GROUP values. A group has parts of WIDTH values that lie
// together; `value` gives the j-th of a part in float32, with what `head` reads once for a group. Every path expands to
// the very same numbers.
#pragma once
#include "vec.h"

namespace isthmus {

struct Bf16 {  // [k / 2][16 outputs][2]
    static constexpr int GROUP = 2, WIDTH = 2, BYTES = 64;
    struct Head {};
    static inline Head head(const uint8_t*) { return {}; }
    static ISTHMUS_INLINE f32x16 value(const uint8_t* p, int, const Head&, int j) {
        const u32x16 pair = load<u32x16>(p);
        return bits(j ? pair & 0xFFFF0000u : pair << 16);
    }
};
struct F32 {  // [k][16]
    static constexpr int GROUP = 1, WIDTH = 1, BYTES = 64;
    struct Head {};
    static inline Head head(const uint8_t*) { return {}; }
    static ISTHMUS_INLINE f32x16 value(const uint8_t* p, int, const Head&, int) { return load<f32x16>(p); }
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
    static ISTHMUS_INLINE f32x16 value(const uint8_t* p, int part, const Head& h, int j) {
        return from_i8(p + LANES * (WIDTH * part + j)) * h.scale + h.minimum;
    }
};
struct Int4 {  // groups of 32: codes [4][16 outputs] words of eight digits, scale half [16], minimum half [16]
    static constexpr int GROUP = 32, WIDTH = 8, BYTES = 256 + 64;
    typedef Scaled Head;
    static inline Head head(const uint8_t* p) {
        return {from_f16((const uint16_t*)(p + 256)), from_f16((const uint16_t*)(p + 288))};
    }
    static ISTHMUS_INLINE f32x16 value(const uint8_t* p, int part, const Head& h, int j) {
        return digit(load<u32x16>(p + 64 * part) >> (uint32_t)(4 * j)) * h.scale + h.minimum;
    }
};

// One output's K weights.
template <class W>
static inline void row_of(const uint8_t* w, long block, long K, long n, float* y) {
    w += n / LANES * block;
    for (long k = 0; k < K; k += W::GROUP, w += W::BYTES) {
        const typename W::Head head = W::head(w);
        for (int i = 0; i < W::GROUP; i++) {
            float v[LANES];
            store(v, W::value(w, i / W::WIDTH, head, i % W::WIDTH));
            y[k + i] = v[n % LANES];
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
            for (int part = 0; part < W::GROUP / W::WIDTH; part++)
#pragma GCC unroll 8
                for (int i = 0; i < W::WIDTH; i++, to += LANES) store(to, W::value(at, part, head, i));
        }
    }
}

}  // namespace isthmus
