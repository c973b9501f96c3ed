// Paged attention over K and V in bf16, in tiles of queries that share a KV head.
//
// A tile walks its context in blocks of KEYS positions at multiples of KEYS. Each query's maximum, sum and output
// change only in blocks it sees something of, always in the same order, so a query's result does not depend on the
// tile, the chunk of the prompt or the batch that it comes in. Contexts are cut at multiples of SPLIT, and the parts are
// merged in order. Decode rows that have the same pages at the beginning of a part are one tile there.
#pragma once
#include <algorithm>
#include "product.h"

namespace isthmus {

constexpr int KEYS = 64;     // positions in a block
#if defined(__AMX_BF16__)
constexpr int QUERIES = 96;  // queries in a tile at most, heads that share K and V counted each
#else
constexpr int QUERIES = 48;
#endif
constexpr long SPLIT = 128;  // positions after which the sums begin anew, for any query
static const uint16_t NOTHING[256] = {};  // K or V where no position is

struct Sight {                            // what all queries of a layer have in common
    const uint16_t* kv;                   // [slots][2][kv_heads][d]
    const int32_t* pages;                 // one row of the page table
    long page_size, kv_heads, d, window;  // window 0 = none
    float scale, softcap;                 // softcap 0 = none
};

struct Scratch {
    float kt[256 * KEYS];  // keys, [d][KEYS]
    float v[KEYS * 256];   // values, [KEYS][d]
    float s[QUERIES][KEYS];
};

typedef uint32_t u32x4 __attribute__((vector_size(16)));
typedef uint32_t u32x8 __attribute__((vector_size(32)));

// Eight keys' values j to j + 7 as columns: to [8][KEYS]. Two bf16 of a key are moved as one word.
static inline void turn_keys(const uint16_t* const* keys, long j, float* to) {
    u32x8 r[4];
    for (int i = 0; i < 4; i++) {
        u32x4 low, high;
        std::memcpy(&low, keys[i] + j, 16), std::memcpy(&high, keys[i + 4] + j, 16);
        r[i] = __builtin_shufflevector(low, high, 0, 1, 2, 3, 4, 5, 6, 7);
    }
    u32x8 pairs[4];
    const u32x8 a = __builtin_shufflevector(r[0], r[1], 0, 8, 1, 9, 4, 12, 5, 13),
                b = __builtin_shufflevector(r[0], r[1], 2, 10, 3, 11, 6, 14, 7, 15),
                c = __builtin_shufflevector(r[2], r[3], 0, 8, 1, 9, 4, 12, 5, 13),
                d = __builtin_shufflevector(r[2], r[3], 2, 10, 3, 11, 6, 14, 7, 15);
    pairs[0] = __builtin_shufflevector(a, c, 0, 1, 8, 9, 4, 5, 12, 13);
    pairs[1] = __builtin_shufflevector(a, c, 2, 3, 10, 11, 6, 7, 14, 15);
    pairs[2] = __builtin_shufflevector(b, d, 0, 1, 8, 9, 4, 5, 12, 13);
    pairs[3] = __builtin_shufflevector(b, d, 2, 3, 10, 11, 6, 7, 14, 15);
    for (int i = 0; i < 4; i++) {
        const u32x8 even = pairs[i] << 16, odd = pairs[i] & 0xFFFF0000u;
        std::memcpy(to + 2 * i * KEYS, &even, 32), std::memcpy(to + (2 * i + 1) * KEYS, &odd, 32);
    }
}

// K and V of `keys` positions from `first` on are wanted soon: each head's lie apart, where no processor expects them.
static inline void expect_block(const Sight& a, long head, long first, long keys) {
    const long d = a.d, stride = 2 * a.kv_heads * d;
    long page = first / a.page_size, offset = first % a.page_size;
    for (long i = 0; i < keys; i++) {
        const uint16_t* k = a.kv + ((long)a.pages[page] * a.page_size + offset) * stride + head * d;
        for (long j = 0; j < d; j += 32) __builtin_prefetch(k + j), __builtin_prefetch(k + a.kv_heads * d + j);
        if (++offset == a.page_size) offset = 0, page++;
    }
}

// Where K and V of `keys` positions from `first` on lie, zeros behind them.
static inline void find_block(const Sight& a, long head, long first, long keys, const uint16_t** k,
                              const uint16_t** values) {
    const long d = a.d, stride = 2 * a.kv_heads * d;
    long page = first / a.page_size, offset = first % a.page_size;
    for (long i = 0; i < KEYS; i++) {
        k[i] = i < keys ? a.kv + ((long)a.pages[page] * a.page_size + offset) * stride + head * d : NOTHING;
        values[i] = i < keys ? k[i] + a.kv_heads * d : NOTHING;
        if (++offset == a.page_size) offset = 0, page++;
    }
}

// They as floats; V only where it is for many queries.
static inline void read_block(const uint16_t* const* k, const uint16_t* const* values, long d, bool many, Scratch& t) {
    for (long i = 0; i < KEYS; i += 8)
        for (long j = 0; j < d; j += 8) turn_keys(k + i, j, t.kt + j * KEYS + i);
    for (long i = 0; i < (many ? KEYS : 0); i++)
        for (long j = 0; j < d; j += LANES) store(t.v + i * d + j, from_bf16(values[i] + j));
}

// out [M][d] += weights [M][KEYS] times values: the same sums as of a panel of them.
template <int M>
static inline void weigh(const float* s, const uint16_t* const* values, long d, float* out) {
    for (long j = 0; j < d; j += LANES) {
        f32x16 acc[M];
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) acc[m] = load<f32x16>(out + m * d + j);
        for (long k = 0; k < KEYS; k++) {
            const f32x16 v = from_bf16(values[k] + j);
#pragma GCC unroll 8
            for (int m = 0; m < M; m++) acc[m] += v * s[m * KEYS + k];
        }
#pragma GCC unroll 8
        for (int m = 0; m < M; m++) store(out + m * d + j, acc[m]);
    }
}
static inline void weigh_few(int M, const float* s, const uint16_t* const* values, long d, float* out) {
    switch (M) {
        case 1: return weigh<1>(s, values, d, out);
        case 2: return weigh<2>(s, values, d, out);
        case 3: return weigh<3>(s, values, d, out);
        case 4: return weigh<4>(s, values, d, out);
        case 5: return weigh<5>(s, values, d, out);
        case 6: return weigh<6>(s, values, d, out);
    }
}

// rows of x [., xs] times a panel [K][stride] of 16 NB columns.
template <int M, int NB>
static inline void panel(const float* x, long xs, const float* w, long stride, long K, float* y, long ys, bool more) {
    f32x16 acc[M][NB];
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < NB; n++) acc[m][n] = more ? load<f32x16>(y + m * ys + LANES * n) : f32x16{};
    for (long k = 0; k < K; k++) {
        f32x16 v[NB];
#pragma GCC unroll 8
        for (int n = 0; n < NB; n++) v[n] = load<f32x16>(w + k * stride + LANES * n);
#pragma GCC unroll 8
        for (int m = 0; m < M; m++)
#pragma GCC unroll 8
            for (int n = 0; n < NB; n++) acc[m][n] += v[n] * x[m * xs + k];
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++)
#pragma GCC unroll 8
        for (int n = 0; n < NB; n++) store(y + m * ys + LANES * n, acc[m][n]);
}

template <int NB>
static inline void panels(int M, const float* x, long xs, const float* w, long stride, long K, float* y, long ys,
                          bool more) {
    for (; M >= 6; M -= 6, x += 6 * xs, y += 6 * ys) panel<6, NB>(x, xs, w, stride, K, y, ys, more);
    switch (M) {
        case 1: panel<1, NB>(x, xs, w, stride, K, y, ys, more); break;
        case 2: panel<2, NB>(x, xs, w, stride, K, y, ys, more); break;
        case 3: panel<3, NB>(x, xs, w, stride, K, y, ys, more); break;
        case 4: panel<4, NB>(x, xs, w, stride, K, y, ys, more); break;
        case 5: panel<5, NB>(x, xs, w, stride, K, y, ys, more); break;
    }
}

// Columns in runs of as many blocks as a tile of `product.h` has.
static inline void product(int M, const float* x, long xs, const float* w, long N, long K, float* y, long ys,
                           bool more) {
    long n = 0;
    for (; n + WIDE * LANES <= N; n += WIDE * LANES) panels<WIDE>(M, x, xs, w + n, N, K, y + n, ys, more);
    for (; n < N; n += LANES) panels<1>(M, x, xs, w + n, N, K, y + n, ys, more);
}

static inline void begin_sums(int M, long d, float* out, float* most, float* total) {
    for (int m = 0; m < M; m++) most[m] = -INFINITY, total[m] = 0;
    std::memset(out, 0, M * d * sizeof(float));
}

// Is one of `keys` vectors no number, or infinite, somewhere? An exponent of ones and a one more is a carry.
static inline bool unsound(const uint16_t* const* values, long keys, long d) {
    u16x16 carry{};
    for (long i = 0; i < keys; i++)
        for (long j = 0; j < d; j += LANES) carry = carry | ((load<u16x16>(values[i] + j) & 0x7F80) + 0x80);
    for (int i = 0; i < LANES; i++)
        if (carry[i] & 0x8000) return true;
    return false;
}

// Which positions a query at `at` sees: [low, high).
struct Seen {
    long low, high;
};
static inline Seen seen_by(const Sight& a, long at) { return {a.window ? at - a.window + 1 : 0, at + 1}; }

// As `weigh`, query by query, with zeros for values that it does not see: nothing times no number would be none.
static inline void weigh_seen(const Sight& a, int M, const float* s, const uint16_t* const* values, const long* at,
                              long first, float* out) {
    for (int m = 0; m < M; m++) {
        const Seen seen = seen_by(a, at[m]);
        const uint16_t* own[KEYS];
        for (long i = 0; i < KEYS; i++) own[i] = first + i >= seen.low && first + i < seen.high ? values[i] : NOTHING;
        weigh<1>(s + m * KEYS, own, a.d, out + m * a.d);
    }
}

// Scores s [KEYS] of positions from `first` on to weights under the largest score so far. What is no number stays none:
// a largest score leaves it out, and the sum of weights has it. A sum of 0 means that nothing was seen.
static inline void weights_of(const Sight& a, const Seen& seen, long first, float* s, float* out, float& most,
                              float& total) {
    const i32x16 low = i32x16{} + (int32_t)(seen.low - 1), high = i32x16{} + (int32_t)seen.high;
    const bool nothing = seen.low >= first + KEYS || seen.high <= first;
    f32x16 top = splat(-INFINITY);
    for (int i = 0; i < (nothing ? 0 : KEYS); i += LANES) {
        f32x16 v = load<f32x16>(s + i) * a.scale;
        if (a.softcap) v = vtanh(v / a.softcap) * a.softcap;
        const i32x16 place = count_from((int32_t)(first + i));
        v = select((place > low) & (place < high), v, splat(-INFINITY));
        store(s + i, v);
        top = vmax(v, top);
    }
    if (nothing) {
        std::memset(s, 0, KEYS * sizeof(float));
        return;
    }
    const float before = most, now = std::max(before, largest(top));
    f32x16 added{};
    for (int i = 0; i < KEYS; i += LANES) {
        const i32x16 place = count_from((int32_t)(first + i));
        const f32x16 p = select((place > low) & (place < high), vexp(load<f32x16>(s + i) - now), f32x16{});
        store(s + i, p);
        added += p;
    }
    if (now > before && before > -INFINITY) {
        const float shrink = vexp(splat(before - now))[0];
        total *= shrink;
        for (long j = 0; j < a.d; j += LANES) store(out + j, load<f32x16>(out + j) * shrink);
    }
    most = now;
    total += sum(added);
}

// Queries q[i] (M of them, row stride qs) at positions at[i] over positions [from, to): adds to out [M][d] sums, and
// their largest score and sum of weights.
static inline void attend_by_vectors(const Sight& a, long head, int M, const float* q, long qs, const long* at,
                                     long from, long to, float* out, float* most, float* total, Scratch& t) {
    const long d = a.d;
    const long oldest = *std::min_element(at, at + M), newest = *std::max_element(at, at + M);
    if (a.window) from = std::max(from, std::max(0L, oldest - a.window + 1) / KEYS * KEYS);
    to = std::min(to, newest + 1);
    if (from < to) expect_block(a, head, from, std::min<long>(KEYS, to - from));
    for (long first = from; first < to; first += KEYS) {
        const long next = first + KEYS, keys = std::min<long>(KEYS, to - first);
        if (next < to) expect_block(a, head, next, std::min<long>(KEYS, to - next));
        const uint16_t *k[KEYS], *values[KEYS];
        find_block(a, head, first, keys, k, values);
        read_block(k, values, d, M > ROWS, t);
        product(M, q, qs, t.kt, KEYS, d, t.s[0], KEYS, false);
        for (int m = 0; m < M; m++) weights_of(a, seen_by(a, at[m]), first, t.s[m], out + m * d, most[m], total[m]);
        const bool whole = oldest + 1 >= first + keys && (!a.window || newest - a.window < first);  // to all queries
        if (!whole && unsound(values, keys, d))
            weigh_seen(a, M, t.s[0], values, at, first, out);
        else if (M > ROWS)
            product(M, t.s[0], KEYS, t.v, d, KEYS, out, d, true);
        else
            weigh_few(M, t.s[0], values, d, out);
    }
}

// A part of which nothing was seen has a sum of 0. unit: of the largest scores, in logarithms.
static inline void merge(float* out, float& most, float& total, const float* part, float part_most, float part_total,
                         long d, float unit) {
    if (part_total == 0) return;
    if (total == 0) {
        std::memcpy(out, part, d * sizeof(float));
        most = part_most, total = part_total;
        return;
    }
    const float top = std::max(most, part_most), less = vexp(splat(-std::fabs(most - part_most) * unit))[0];
    const bool grown = most < part_most;  // one product each, so that there is one way to fuse it with the sum
    for (long j = 0; j < d; j += LANES) {
        const f32x16 a = load<f32x16>(out + j), b = load<f32x16>(part + j);
        store(out + j, grown ? a * less + b : b * less + a);
    }
    total = grown ? total * less + part_total : part_total * less + total;
    most = top;
}

static inline void finish(const float* out, float total, long d, float* y) {
    const float scale = total == 0 ? 0.0f : 1.0f / total;
    for (long j = 0; j < d; j += LANES) store(y + j, load<f32x16>(out + j) * scale);
}

}  // namespace isthmus
