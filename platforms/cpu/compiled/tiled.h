// Attention by the matrix unit (AMX), where the build is for processors with one and heads are whole tiles wide.
//
// What is not in bf16 already is two halves: a query's values in bf16 and what they leave, and weights likewise. Rows of
// a tile are queries. The unit computes each by itself, the same however many there are, and each step below keeps to
// one order for any number: a query's result depends on the query alone. Scores are in units of log 2.
#pragma once
#include "attention.h"
#include "matrix.h"

namespace isthmus {

#if defined(__AMX_BF16__)
constexpr int HEIGHT = 16;                // queries in a tile
constexpr long CELL = HEIGHT * DEPTH;     // numbers of a tile in bf16
constexpr float LOG2E = 1.44269504f;

struct TileScratch {
    alignas(64) uint16_t q[QUERIES / HEIGHT * 256 / DEPTH * 2 * CELL];  // [tile][d / DEPTH][half][HEIGHT][DEPTH]
    alignas(64) uint16_t k[KEYS / LANES * 256 / DEPTH * CELL];          // [KEYS / 16][d / DEPTH][pair][16 keys][2]
    alignas(64) uint16_t v[KEYS / DEPTH * 256 / LANES * CELL];          // [KEYS / DEPTH][d / 16][pair][16 values][2]
    alignas(64) uint16_t p[QUERIES / HEIGHT * KEYS / DEPTH * 2 * CELL];  // [tile][KEYS / DEPTH][half][HEIGHT][DEPTH]
    alignas(64) float s[QUERIES][KEYS];
    alignas(64) float edge[HEIGHT * 256];  // sums of a tile of which not all rows are queries
};

// Queries q [M][qs] as tiles.
static inline void encode_queries(const Sight& a, int M, const float* q, long qs, TileScratch& t) {
    const float factor = a.softcap ? a.scale / a.softcap : a.scale * LOG2E;
    for (int m = 0; m < M; m++) {
        uint16_t* to = t.q + m / HEIGHT * (a.d / DEPTH) * 2 * CELL + m % HEIGHT * DEPTH;
        for (long j = 0; j < a.d; j += LANES, to += j % DEPTH ? LANES : 2 * CELL - LANES) {
            const f32x16 v = load<f32x16>(q + m * qs + j) * factor;
            to_bf16(to, v);
            to_bf16(to + CELL, v - from_bf16(to));
        }
    }
}

static inline void turn(__m512i* r) {  // 16 rows of 16 words to columns
    __m512i s[16];
    for (int i = 0; i < 16; i += 2) {
        s[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
        s[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            r[i + 2 * j] = _mm512_unpacklo_epi64(s[i + j], s[i + j + 2]);
            r[i + 2 * j + 1] = _mm512_unpackhi_epi64(s[i + j], s[i + j + 2]);
        }
    for (int i = 0; i < 4; i++) {
        s[i] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
        s[i + 4] = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xDD);
        s[i + 8] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
        s[i + 12] = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xDD);
    }
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_i32x4(s[i], s[i + 8], 0xDD);
        r[i + 4] = _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_i32x4(s[i + 4], s[i + 12], 0xDD);
    }
}

static inline void lay_keys(const uint16_t* const* keys, long d, uint16_t* to) {
    for (long i = 0; i < KEYS; i += LANES)
        for (long j = 0; j < d; j += DEPTH, to += CELL) {
            __m512i r[16];
#pragma GCC unroll 16
            for (int n = 0; n < 16; n++) r[n] = _mm512_loadu_si512(keys[i + n] + j);
            turn(r);
#pragma GCC unroll 16
            for (int n = 0; n < 16; n++) _mm512_store_si512(to + n * DEPTH, r[n]);
        }
}

// Pairs of positions are 16 apart, as `weights_of_tile` makes them.
static inline void lay_values(const uint16_t* const* values, long d, uint16_t* to) {
    alignas(64) uint16_t order[2][32];
    for (int i = 0; i < 32; i++) order[0][i] = i / 2 + i % 2 * 32, order[1][i] = order[0][i] + 16;
    const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
    for (long i = 0; i < KEYS; i += DEPTH, to += d / LANES * CELL)
        for (long n = 0; n < LANES; n++)
            for (long j = 0; j < d; j += DEPTH) {
                const __m512i a = _mm512_loadu_si512(values[i + n] + j),
                              b = _mm512_loadu_si512(values[i + n + LANES] + j);
                uint16_t* at = to + j / LANES * CELL + n * DEPTH;
                _mm512_store_si512(at, _mm512_permutex2var_epi16(a, low, b));
                _mm512_store_si512(at + CELL, _mm512_permutex2var_epi16(a, high, b));
            }
}

// Tiles 0 to 3 are sums, 4 and 5 queries or weights, 6 and 7 keys or values.
class Shape {
  public:
    explicit Shape(int rows) {
        alignas(64) uint8_t shape[64] = {1};
        for (int tile = 0; tile < 8; tile++) {
            const uint16_t width = 64;
            std::memcpy(shape + 16 + 2 * tile, &width, 2), shape[48 + tile] = (uint8_t)(tile < 6 ? rows : 16);
        }
        __asm__ volatile("ldtilecfg %0" ::"m"(shape) : "memory");
    }
    ~Shape() { __asm__ volatile("tilerelease" ::: "memory"); }
};

#define ISTHMUS_MEMORY __asm__ volatile("" ::: "memory")  // the compiler does not know that tiles are read and written

// Two tiles in halves a and a + other [depth][half], times two blocks b and b + next [depth][step apart]: to, or on top
// of, c [tile] at c, c + 16 and below.
static inline void multiply_two(const uint16_t* a, long other, const uint16_t* b, long next, long step, long depth,
                                float* c, float* below, long stride, bool more) {
    ISTHMUS_MEMORY;
    if (more) {
        _tile_loadd(0, c, stride); _tile_loadd(1, c + LANES, stride);
        _tile_loadd(2, below, stride); _tile_loadd(3, below + LANES, stride);
    } else {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    }
    for (long k = 0; k < depth; k++, a += 2 * CELL, b += step) {
        _tile_loadd(6, b, 64); _tile_loadd(4, a, 64); _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, b + next, 64); _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + other, 64); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
        _tile_loadd(4, a + CELL, 64); _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, a + other + CELL, 64); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, stride); _tile_stored(1, c + LANES, stride);
    _tile_stored(2, below, stride); _tile_stored(3, below + LANES, stride);
    ISTHMUS_MEMORY;
}

// One tile times two blocks.
static inline void multiply_one(const uint16_t* a, const uint16_t* b, long next, long step, long depth, float* c,
                                long stride, bool more) {
    ISTHMUS_MEMORY;
    if (more) {
        _tile_loadd(0, c, stride); _tile_loadd(1, c + LANES, stride);
    } else {
        _tile_zero(0); _tile_zero(1);
    }
    for (long k = 0; k < depth; k++, a += 2 * CELL, b += step) {
        _tile_loadd(4, a, 64); _tile_loadd(5, a + CELL, 64);
        _tile_loadd(6, b, 64); _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(0, 5, 6);
        _tile_loadd(7, b + next, 64); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(1, 5, 7);
    }
    _tile_stored(0, c, stride); _tile_stored(1, c + LANES, stride);
    ISTHMUS_MEMORY;
}
#undef ISTHMUS_MEMORY

// 2^x of x <= 0, within 2 units in the last place; at least 2^-126, and of no number none.
static ISTHMUS_INLINE __m512 power_of_two(__m512 x) {
    x = _mm512_max_ps(_mm512_set1_ps(-126.0f), x);  // the second where one is no number
    const __m512 magic = _mm512_set1_ps(12582912.0f), k = _mm512_sub_ps(_mm512_add_ps(x, magic), magic);
    const __m512 r = _mm512_sub_ps(x, k);
    __m512 p = _mm512_set1_ps(1.326472684e-3f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.671512665e-3f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.550733744e-2f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.402224208e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931469776e-1f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, k);
}

// Of each of 16 vectors the sum or the largest value, in order.
template <class F>
static ISTHMUS_INLINE __m512 fold(const __m512* v, F both) {
    __m512 a[8], b[4], c[2];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        a[i] = both(_mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0x44), _mm512_shuffle_f32x4(v[2 * i], v[2 * i + 1], 0xEE));
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        b[i] = both(_mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0x88), _mm512_shuffle_f32x4(a[2 * i], a[2 * i + 1], 0xDD));
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++)
        c[i] = both(_mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0x44), _mm512_shuffle_ps(b[2 * i], b[2 * i + 1], 0xEE));
    const __m512 d = both(_mm512_shuffle_ps(c[0], c[1], 0x88), _mm512_shuffle_ps(c[0], c[1], 0xDD));
    return _mm512_permutexvar_ps(_mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15), d);
}

// Sixteen weights and those of the sixteen positions behind, as pairs of bf16; what they leave goes behind the tile.
static ISTHMUS_INLINE void store_halves(uint16_t* to, __m512 one, __m512 other) {
    const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000);
    const auto pairs = [&](__m512i a, __m512i b) {  // b where `upper`, a's upper half below
        return _mm512_ternarylogic_epi32(upper, b, _mm512_srli_epi32(a, 16), 0xCA);
    };
    const auto rest = [&](__m512 v) {
        return _mm512_castps_si512(_mm512_sub_ps(v, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), upper))));
    };
    _mm512_store_si512(to, pairs(_mm512_castps_si512(one), _mm512_castps_si512(other)));
    _mm512_store_si512(to + CELL, pairs(rest(one), rest(other)));
}

// The positions of a block from `first` on that are seen, as bits.
static inline uint64_t seen_bits(const Seen& seen, long first) {
    const long low = std::max(0L, seen.low - first), high = std::min<long>(KEYS, seen.high - first);
    return low >= high ? 0 : (~0ull >> (KEYS - (high - low))) << low;
}

// As `weights_of`, of `rows` queries: scores s [rows][KEYS] to weights p in halves. WHOLE: each sees all positions.
template <bool WHOLE>
static inline void weights_of_tile(const Sight& a, int rows, const long* at, long first, float* s, uint16_t* p,
                                   float* out, float* most, float* total) {
    const auto larger = [](__m512 x, __m512 y) { return _mm512_max_ps(x, y); };
    const auto plus = [](__m512 x, __m512 y) { return _mm512_add_ps(x, y); };
    const __m512 least = _mm512_set1_ps(-INFINITY);
    uint64_t bits[HEIGHT];
    __m512 each[HEIGHT];
    for (int m = 0; m < HEIGHT; m++) each[m] = least;
    for (int m = 0; m < rows; m++) {
        bits[m] = WHOLE ? ~0ull : seen_bits(seen_by(a, at[m]), first);
        for (int i = 0; i < KEYS; i += LANES) {
            __m512 v = _mm512_load_ps(s + m * KEYS + i);
            if (a.softcap) {
                const f32x16 capped = vtanh(load<f32x16>(s + m * KEYS + i)) * (a.softcap * LOG2E);
                v = (__m512)capped.part[0];
                _mm512_store_ps(s + m * KEYS + i, v);
            }
            each[m] = WHOLE ? _mm512_max_ps(v, each[m])  // the second where one is no number
                            : _mm512_mask_max_ps(each[m], (__mmask16)(bits[m] >> i), v, each[m]);
        }
    }
    const __mmask16 used = (__mmask16)((1u << rows) - 1);
    const __m512 before = _mm512_maskz_loadu_ps(used, most), now = _mm512_max_ps(before, fold(each, larger));
    const __mmask16 grown = _mm512_mask_cmp_ps_mask(used, now, before, _CMP_GT_OQ) &
                            _mm512_cmp_ps_mask(before, least, _CMP_GT_OQ);
    alignas(64) float top[HEIGHT], shrink[HEIGHT];
    _mm512_store_ps(top, now);
    _mm512_mask_storeu_ps(most, used, now);
    __m512 sums = _mm512_maskz_loadu_ps(used, total);
    if (grown) {
        const __m512 less = _mm512_mask_mov_ps(_mm512_set1_ps(1.0f), grown, power_of_two(_mm512_sub_ps(before, now)));
        _mm512_store_ps(shrink, less);
        sums = _mm512_mul_ps(sums, less);
        for (int m = 0; m < rows; m++)
            for (long j = 0; j < (grown >> m & 1 ? a.d : 0); j += LANES)
                _mm512_storeu_ps(out + m * a.d + j, _mm512_mul_ps(_mm512_loadu_ps(out + m * a.d + j),
                                                                  _mm512_set1_ps(shrink[m])));
    }
    for (int m = 0; m < rows; m++) {
        __m512 v[4];
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) {
            v[i] = power_of_two(_mm512_sub_ps(_mm512_load_ps(s + m * KEYS + LANES * i), _mm512_set1_ps(top[m])));
            if (!WHOLE) v[i] = _mm512_maskz_mov_ps((__mmask16)(bits[m] >> LANES * i), v[i]);
        }
        each[m] = _mm512_add_ps(_mm512_add_ps(v[0], v[1]), _mm512_add_ps(v[2], v[3]));
        store_halves(p + m * DEPTH, v[0], v[1]);
        store_halves(p + 2 * CELL + m * DEPTH, v[2], v[3]);
    }
    _mm512_mask_storeu_ps(total, used, _mm512_add_ps(sums, fold(each, plus)));
}

// out += the weights p of a tile's `rows` queries times the values.
static inline void weigh_tile(const uint16_t* p, long d, float* out, const TileScratch& t) {
    for (long j = 0; j < d; j += 2 * LANES)
        multiply_one(p, t.v + j / LANES * CELL, CELL, d / LANES * CELL, KEYS / DEPTH, out + j, d * 4, true);
}

// As `weigh_seen`, of a tile.
static inline void weigh_seen_tile(const Sight& a, int rows, const uint16_t* const* values, const long* at, long first,
                                   const uint16_t* p, float* out, TileScratch& t) {
    for (int m = 0; m < rows; m++) {
        const uint64_t bits = seen_bits(seen_by(a, at[m]), first);
        const uint16_t* own[KEYS];
        for (int i = 0; i < KEYS; i++) own[i] = bits >> i & 1 ? values[i] : NOTHING;
        lay_values(own, a.d, t.v);
        std::copy_n(out + m * a.d, a.d, t.edge + m * a.d);
        weigh_tile(p, a.d, t.edge, t);
        std::copy_n(t.edge + m * a.d, a.d, out + m * a.d);
    }
}

// Scores of M queries for the keys.
static inline void score_tiles(int M, long d, TileScratch& t) {
    const long depth = d / DEPTH, cells = depth * CELL;
    for (int m = 0; m < M; m += 2 * HEIGHT)
        for (int i = 0; i < KEYS; i += 2 * LANES) {
            const uint16_t *q = t.q + m / HEIGHT * 2 * cells, *k = t.k + i / LANES * cells;
            if (m + HEIGHT < M)
                multiply_two(q, 2 * cells, k, cells, CELL, depth, t.s[m] + i, t.s[m + HEIGHT] + i, KEYS * 4, false);
            else
                multiply_one(q, k, cells, CELL, depth, t.s[m] + i, KEYS * 4, false);
        }
}

// out [M][d] += weights times the values. rows: the height of tiles.
static inline void weigh_tiles(int M, int rows, long d, float* out, TileScratch& t) {
    const int last = (M - 1) / HEIGHT * HEIGHT;  // the last tile's first query
    float* const end = M - last < rows ? t.edge : out + last * d;
    if (end == t.edge) std::copy_n(out + last * d, (M - last) * d, end);
    for (int m = 0; m < M; m += 2 * HEIGHT) {
        const uint16_t* p = t.p + m / HEIGHT * 4 * CELL;
        float* const below = m + HEIGHT < last ? out + (m + HEIGHT) * d : end;
        if (m == last) {
            weigh_tile(p, d, end, t);
            break;
        }
        for (long j = 0; j < d; j += 2 * LANES)
            multiply_two(p, 4 * CELL, t.v + j / LANES * CELL, CELL, d / LANES * CELL, KEYS / DEPTH, out + m * d + j,
                         below + j, d * 4, true);
    }
    if (end == t.edge) std::copy_n(end, (M - last) * d, out + last * d);
}

// As `attend`, of the queries that are encoded.
static inline void attend_by_tiles(const Sight& a, long head, int M, const long* at, long from, long to, float* out,
                                   float* most, float* total, TileScratch& t) {
    const long d = a.d;
    const long oldest = *std::min_element(at, at + M), newest = *std::max_element(at, at + M);
    if (a.window) from = std::max(from, std::max(0L, oldest - a.window + 1) / KEYS * KEYS);
    to = std::min(to, newest + 1);
    if (from >= to) return;
    const int rows = std::min(M, HEIGHT);
    const Shape shape(rows);
    expect_block(a, head, from, std::min<long>(KEYS, to - from));
    for (long first = from; first < to; first += KEYS) {
        const long next = first + KEYS, keys = std::min<long>(KEYS, to - first);
        if (next < to) expect_block(a, head, next, std::min<long>(KEYS, to - next));
        const uint16_t *k[KEYS], *values[KEYS];
        find_block(a, head, first, keys, k, values);
        const bool whole = oldest + 1 >= next && (!a.window || newest - a.window < first);
        const bool odd = !whole && unsound(values, keys, d);
        lay_keys(k, d, t.k);
        score_tiles(M, d, t);
        if (!odd) lay_values(values, d, t.v);
        for (int m = 0; m < M; m += HEIGHT) {
            const int some = std::min(HEIGHT, M - m);
            uint16_t* p = t.p + m / HEIGHT * 4 * CELL;
            if (whole)
                weights_of_tile<true>(a, some, at + m, first, t.s[m], p, out + m * d, most + m, total + m);
            else
                weights_of_tile<false>(a, some, at + m, first, t.s[m], p, out + m * d, most + m, total + m);
            if (odd) weigh_seen_tile(a, some, values, at + m, first, p, out + m * d, t);
        }
        if (!odd) weigh_tiles(M, rows, d, out, t);
    }
}
#endif

struct Desk {  // what a thread attends with
    Scratch vectors;
#if defined(__AMX_BF16__)
    TileScratch tiles;
#endif
    const float* q;
    long stride;
};

// By the matrix unit? That is said by the shape alone.
static inline bool by_tiles(long d) {
#if defined(__AMX_BF16__)
    return d % DEPTH == 0;
#else
    return false;
#endif
}
// What one unit of a largest score is in logarithms.
static inline float unit_of_scores(long d) { return by_tiles(d) ? 0.693147181f : 1.0f; }

// Queries q [M][qs] of what `attend` is asked next.
static inline void take_queries(const Sight& a, int M, const float* q, long qs, Desk& desk) {
    desk.q = q, desk.stride = qs;
#if defined(__AMX_BF16__)
    if (by_tiles(a.d)) encode_queries(a, M, q, qs, desk.tiles);
#endif
}

// The queries at positions at[i] over positions [from, to): adds to out [M][d] sums, and their largest score and sum of
// weights.
static inline void attend(const Sight& a, long head, int M, const long* at, long from, long to, float* out, float* most,
                          float* total, Desk& desk) {
#if defined(__AMX_BF16__)
    if (by_tiles(a.d)) return attend_by_tiles(a, head, M, at, from, to, out, most, total, desk.tiles);
#endif
    attend_by_vectors(a, head, M, desk.q, desk.stride, at, from, to, out, most, total, desk.vectors);
}

}  // namespace isthmus
