// Attention by the matrix unit (AMX), where the build is for processors with one and heads are whole tiles wide.
//
// What is not in bf16 already is two halves: a query's values in bf16 and what they leave, and weights likewise. Rows of
// a tile are queries. The unit computes each by itself, the same however many there are, and each step below keeps to
// one order for any number: a query's result depends on the query alone. Scores are in units of log 2.
#pragma once
#include "attention.h"
#include "matrix.h"

namespace isthmus {

// Queries of a part of the context that have the same pages, over some of its positions.
struct Run {
    const int32_t* pages;
    int first, count;  // queries
    long from, to;     // positions
};

#if defined(__AMX_BF16__)
constexpr int HEIGHT = 16;                // queries in a tile
constexpr long CELL = HEIGHT * DEPTH;     // numbers of a tile in bf16
constexpr float LOG2E = 1.44269504f;

struct TileScratch {  // K and V one block or part at a time
    alignas(64) uint16_t q[(QUERIES + HEIGHT) * 256 * 2];               // [query][d / DEPTH][half][DEPTH]
    alignas(64) uint16_t k[KEYS / LANES * 256 / DEPTH * CELL];          // [KEYS / 16][d / DEPTH][pair][16 keys][2]
    alignas(64) uint16_t v[SPLIT / DEPTH * 256 / LANES * CELL];         // [SPLIT / DEPTH][d / 16][pair][16 values][2]
    alignas(64) float s[QUERIES + HEIGHT][SPLIT];  // scores, then weights [SPLIT / DEPTH][half][DEPTH] bf16
    alignas(64) float edge[HEIGHT * 256];  // sums of a tile of which not all rows are queries
};

// Queries q [M][qs] as tiles.
static inline void encode_queries(const Sight& a, int M, const float* q, long qs, TileScratch& t) {
    const float factor = a.softcap ? a.scale / a.softcap : a.scale * LOG2E;
    for (int m = 0; m < M; m++) {
        for (long j = 0; j < a.d; j += LANES) {
            uint16_t* to = t.q + 2 * m * a.d + j / DEPTH * 2 * DEPTH + j % DEPTH;
            const f32x16 v = load<f32x16>(q + m * qs + j) * factor;
            to_bf16(to, v);
            to_bf16(to + DEPTH, v - from_bf16(to));
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
static inline void lay_values(const uint16_t* const* values, long d, long depth, uint16_t* to) {
    alignas(64) uint16_t order[2][32];
    for (int i = 0; i < 32; i++) order[0][i] = i / 2 + i % 2 * 32, order[1][i] = order[0][i] + 16;
    const __m512i low = _mm512_load_si512(order[0]), high = _mm512_load_si512(order[1]);
    for (long i = 0; i < depth * DEPTH; i += DEPTH, to += d / LANES * CELL)
        for (long n = 0; n < LANES; n++)
            for (long j = 0; j < d; j += DEPTH) {
                const __m512i a = _mm512_loadu_si512(values[i + n] + j),
                              b = _mm512_loadu_si512(values[i + n + LANES] + j);
                uint16_t* at = to + j / LANES * CELL + n * DEPTH;
                _mm512_store_si512(at, _mm512_permutex2var_epi16(a, low, b));
                _mm512_store_si512(at + CELL, _mm512_permutex2var_epi16(a, high, b));
            }
}

#define ISTHMUS_MEMORY __asm__ volatile("" ::: "memory")  // the compiler does not know that tiles are read and written

// Rows in halves: [depth][half][DEPTH], `row` bytes from one to the next.
struct Rows {
    const uint16_t* at;
    long row;
    const uint16_t* below() const { return at + HEIGHT * row / (long)sizeof *at; }
};
// Blocks that they are multiplied with: the first, from one to the next, and from one part in depth to the next.
struct Blocks {
    const uint16_t* at;
    long next, part;
};

// Two tiles of rows times two blocks: to c and `below`, on top of what they hold when `more`.
static inline void multiply_two(const Rows& a, const Blocks& b, long depth, float* c, float* below, long stride,
                                bool more) {
    const uint16_t *x = a.at, *y = a.below(), *w = b.at;
    ISTHMUS_MEMORY;
    if (more) {
        _tile_loadd(0, c, stride); _tile_loadd(1, c + LANES, stride);
        _tile_loadd(2, below, stride); _tile_loadd(3, below + LANES, stride);
    } else {
        _tile_zero(0); _tile_zero(1); _tile_zero(2); _tile_zero(3);
    }
    for (long k = 0; k < depth; k++, x += 2 * DEPTH, y += 2 * DEPTH, w += b.part) {
        _tile_loadd(6, w, 64); _tile_loadd(4, x, a.row); _tile_dpbf16ps(0, 4, 6);
        _tile_loadd(7, w + b.next, 64); _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, y, a.row); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
        _tile_loadd(4, x + DEPTH, a.row); _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(1, 4, 7);
        _tile_loadd(5, y + DEPTH, a.row); _tile_dpbf16ps(2, 5, 6); _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, c, stride); _tile_stored(1, c + LANES, stride);
    _tile_stored(2, below, stride); _tile_stored(3, below + LANES, stride);
    ISTHMUS_MEMORY;
}

// One tile of rows times two blocks.
static inline void multiply_one(const Rows& a, const Blocks& b, long depth, float* c, long stride, bool more) {
    const uint16_t *x = a.at, *w = b.at;
    ISTHMUS_MEMORY;
    if (more) {
        _tile_loadd(0, c, stride); _tile_loadd(1, c + LANES, stride);
    } else {
        _tile_zero(0); _tile_zero(1);
    }
    for (long k = 0; k < depth; k++, x += 2 * DEPTH, w += b.part) {
        _tile_loadd(4, x, a.row); _tile_loadd(5, x + DEPTH, a.row);
        _tile_loadd(6, w, 64); _tile_dpbf16ps(0, 4, 6); _tile_dpbf16ps(0, 5, 6);
        _tile_loadd(7, w + b.next, 64); _tile_dpbf16ps(1, 4, 7); _tile_dpbf16ps(1, 5, 7);
    }
    _tile_stored(0, c, stride); _tile_stored(1, c + LANES, stride);
    ISTHMUS_MEMORY;
}
#undef ISTHMUS_MEMORY

// c [M][16 blocks] = rows times blocks; of the last tile all rows are written.
static inline void multiply(int M, Rows a, Blocks b, long depth, long blocks, float* c, long stride, bool more) {
    for (int m = 0; m < M; m += 2 * HEIGHT, a.at += 2 * HEIGHT * a.row / (long)sizeof *a.at, c += 2 * HEIGHT * stride)
        for (long n = 0; n < blocks; n += 2) {
            const Blocks two{b.at + n * b.next, b.next, b.part};
            float* to = c + n * LANES;
            if (m + HEIGHT < M)
                multiply_two(a, two, depth, to, to + HEIGHT * stride, stride * 4, more);
            else
                multiply_one(a, two, depth, to, stride * 4, more);
        }
}

// 2^x of x <= 0, within 3e-7 of it; of no number none.
static ISTHMUS_INLINE __m512 power_of_two(__m512 x) {
    const __m512 r = _mm512_reduce_ps(x, 1);  // what is above the whole number below
    __m512 p = _mm512_set1_ps(1.867130087e-03f);
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(9.017030275e-03f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.579991315e-02f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(2.401644501e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(6.931513118e-01f));
    p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(p, x);
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

// Sixteen weights and those of the sixteen positions behind, as pairs of bf16, and behind them what they leave.
static ISTHMUS_INLINE void store_halves(uint16_t* to, __m512 one, __m512 other) {
    const __m512i upper = _mm512_set1_epi32((int)0xFFFF0000);
    const auto pairs = [&](__m512i a, __m512i b) {  // b where `upper`, a's upper half below
        return _mm512_ternarylogic_epi32(upper, b, _mm512_srli_epi32(a, 16), 0xCA);
    };
    const auto rest = [&](__m512 v) {
        return _mm512_castps_si512(_mm512_sub_ps(v, _mm512_castsi512_ps(_mm512_and_si512(_mm512_castps_si512(v), upper))));
    };
    _mm512_store_si512(to, pairs(_mm512_castps_si512(one), _mm512_castps_si512(other)));
    _mm512_store_si512(to + DEPTH, pairs(rest(one), rest(other)));
}

// The positions of 64 from `first` on that are seen, as bits.
static inline uint64_t seen_bits(const Seen& seen, long first) {
    const long low = std::max(0L, seen.low - first), high = std::min<long>(KEYS, seen.high - first);
    return low >= high ? 0 : (~0ull >> (KEYS - (high - low))) << low;
}

// Scores s [rows][SPLIT] of `count` positions from `first` on to weights in halves, and the largest score and the sum of
// weights of each row. WHOLE: each query sees all positions. As of `weights_of`, what is no number stays none.
template <bool WHOLE>
static inline void weights_of_tile(const Sight& a, int rows, const long* at, long first, long count, float* s,
                                   float* most, float* total) {
    const auto larger = [](__m512 x, __m512 y) { return _mm512_max_ps(x, y); };
    const auto plus = [](__m512 x, __m512 y) { return _mm512_add_ps(x, y); };
    uint64_t bits[HEIGHT][SPLIT / KEYS];
    const auto mask = [&](int m, long i) { return (__mmask16)(WHOLE ? ~0u : bits[m][i / KEYS] >> i % KEYS); };
    __m512 each[HEIGHT];
    for (int m = 0; m < HEIGHT; m++) each[m] = _mm512_set1_ps(-INFINITY);
    for (int m = 0; m < rows; m++) {
        float* row = s + m * SPLIT;
        for (int i = 0; !WHOLE && i < SPLIT / KEYS; i++) bits[m][i] = seen_bits(seen_by(a, at[m]), first + i * KEYS);
        for (long i = 0; a.softcap && i < count; i += LANES)
            store(row + i, vtanh(load<f32x16>(row + i)) * (a.softcap * LOG2E));
        for (long i = 0; i < count; i += LANES)  // the second where one is no number
            each[m] = _mm512_mask_max_ps(each[m], mask(m, i), _mm512_load_ps(row + i), each[m]);
    }
    const __mmask16 used = (__mmask16)((1u << rows) - 1);
    const __m512 tops = fold(each, larger);
    alignas(64) float top[HEIGHT];
    _mm512_store_ps(top, tops);
    _mm512_mask_storeu_ps(most, used, tops);
    for (int m = 0; m < rows; m++) {
        float* row = s + m * SPLIT;
        const __m512 down = _mm512_set1_ps(top[m]);
        __m512 sum = _mm512_setzero_ps();
        for (long i = 0; i < count; i += DEPTH) {
            const auto weight = [&](long i) {
                return _mm512_maskz_mov_ps(mask(m, i), power_of_two(_mm512_sub_ps(_mm512_load_ps(row + i), down)));
            };
            const __m512 one = weight(i), other = weight(i + LANES);
            sum = _mm512_add_ps(sum, _mm512_add_ps(one, other));
            store_halves((uint16_t*)(row + i), one, other);
        }
        each[m] = sum;
    }
    _mm512_mask_storeu_ps(total, used, fold(each, plus));
}

// out [.][d] of a run's queries = or += their weights times its values; `unseen`: zeros for what a query does not see.
static inline void weigh_run(const Sight& a, const Run& r, const uint16_t* const* values, bool unseen, const long* at,
                             long start, float* out, bool more, TileScratch& t) {
    const long d = a.d, blocks = d / LANES, column = r.from - start, depth = (r.to - r.from + KEYS - 1) / KEYS * KEYS / DEPTH;
    const Blocks v{t.v, CELL, blocks * CELL};
    const auto weights = [&](int m) {
        return Rows{(const uint16_t*)(t.s[r.first + m] + column), SPLIT * (long)sizeof(float)};
    };
    float* const sums = out + r.first * d;
    const int whole = r.count < HEIGHT ? r.count : r.count / HEIGHT * HEIGHT;  // so many are whole tiles
    const auto by_edge = [&](int m, int some) {  // without writing other rows
        const int before = m % HEIGHT;
        if (more) std::copy_n(sums + m * d, some * d, t.edge + before * d);
        multiply(HEIGHT, weights(m - before), v, depth, blocks, t.edge, d, more);
        std::copy_n(t.edge + before * d, some * d, sums + m * d);
    };
    for (int m = 0; unseen && m < r.count; m++) {
        const Seen seen = seen_by(a, at[r.first + m]);
        const uint16_t* own[SPLIT];
        for (long i = 0; i < depth * DEPTH; i++)
            own[i] = r.from + i >= seen.low && r.from + i < seen.high ? values[i] : NOTHING;
        lay_values(own, d, depth, t.v);
        by_edge(m, 1);
    }
    if (unseen) return;
    lay_values(values, d, depth, t.v);
    multiply(whole, weights(0), v, depth, blocks, sums, d, more);
    if (whole < r.count) by_edge(whole, r.count - whole);
}

// A run's positions that its queries see, in whole blocks.
static inline Run narrowed(const Sight& a, Run r, const long* at) {
    const auto [oldest, newest] = std::minmax_element(at + r.first, at + r.first + r.count);
    if (a.window) r.from = std::max(r.from, std::max(0L, *oldest - a.window + 1) / KEYS * KEYS);
    r.to = std::min(r.to, *newest + 1);
    return r;
}

// As `attend`, of the queries that are encoded.
static inline void attend_by_tiles(Sight a, long head, int M, const long* at, long start, const Run* runs, int count,
                                   float* out, float* most, float* total, TileScratch& t) {
    const long d = a.d, depth = d / DEPTH, row = 2 * d * sizeof(uint16_t);
    const uint16_t *k[SPLIT], *values[SPLIT];
    long end = start;
    bool all = count == 1 && runs->to == start + SPLIT;  // does each query see the whole part?
    for (int i = 0; i < count; i++) {
        const Run r = narrowed(a, runs[i], at);
        if (r.from >= r.to) continue;
        const Tiles shape(std::min(r.count, HEIGHT));
        a.pages = r.pages;
        expect_block(a, head, r.from, std::min<long>(KEYS, r.to - r.from));
        for (long first = r.from; first < r.to; first += KEYS) {
            const long next = first + KEYS;
            if (next < r.to) expect_block(a, head, next, std::min<long>(KEYS, r.to - next));
            find_block(a, head, first, std::min<long>(KEYS, r.to - first), k, values);
            lay_keys(k, d, t.k);
            multiply(r.count, {t.q + 2 * r.first * d, row}, {t.k, depth * CELL, CELL}, depth, KEYS / LANES,
                     t.s[r.first] + (first - start), SPLIT, false);
        }
        end = std::max(end, r.to);
        for (int m = 0; m < M; m++) all = all && at[m] + 1 >= start + SPLIT && (!a.window || at[m] - a.window < start);
    }
    const long columns = (end - start + KEYS - 1) / KEYS * KEYS;
    for (int m = 0; m < M; m += HEIGHT)
        (all ? weights_of_tile<true> : weights_of_tile<false>)(a, std::min(HEIGHT, M - m), at + m, start, columns, t.s[m],
                                                               most + m, total + m);
    bool begun = false;
    for (int i = 0; i < count; i++) {
        const Run r = narrowed(a, runs[i], at);
        if (r.from >= r.to) continue;
        const Tiles shape(std::min(r.count, HEIGHT));
        a.pages = r.pages;
        for (long first = r.from; first < r.to; first += KEYS)
            find_block(a, head, first, std::min<long>(KEYS, r.to - first), k + (first - r.from), values + (first - r.from));
        weigh_run(a, r, values, !all && unsound(values, r.to - r.from, d), at, start, out, begun, t);
        begun = begun || i == 0;
    }
}
#endif

struct Desk {  // what a thread attends with
    Scratch vectors;
#if defined(__AMX_BF16__)
    TileScratch tiles;
#endif
    const float* q;
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

// The queries q [M][d] of what `attend` is asked next.
static inline void take_queries(const Sight& a, int M, const float* q, Desk& desk) {
    desk.q = q;
#if defined(__AMX_BF16__)
    if (by_tiles(a.d)) encode_queries(a, M, q, a.d, desk.tiles);
#endif
}

// M queries at positions at[i] over a part of the context, which begins at `start`: each is in one of the runs, or in the
// first and in one more that is behind it. To out [M][d] their sums, and their largest scores and sums of weights.
static inline void attend(Sight a, long head, int M, const long* at, long start, const Run* runs, int count, float* out,
                          float* most, float* total, Desk& desk) {
#if defined(__AMX_BF16__)
    if (by_tiles(a.d)) return attend_by_tiles(a, head, M, at, start, runs, count, out, most, total, desk.tiles);
#endif
    begin_sums(M, a.d, out, most, total);
    for (const Run* r = runs; r < runs + count; r++) {
        a.pages = r->pages;
        const long q = r->first * a.d;
        attend_by_vectors(a, head, r->count, desk.q + q, a.d, at + r->first, r->from, r->to, out + q, most + r->first,
                          total + r->first, desk.vectors);
    }
}

}  // namespace isthmus
