// Vectors of sixteen lanes, kept in as many registers as the instruction set needs for them, so that one source serves
// every processor. The compiler's own vectors of sixteen would do only where registers are that wide: it keeps wider
// ones in memory.
#pragma once
#include <cstdint>
#include <cstring>
#include <cmath>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace isthmus {

#define ISTHMUS_INLINE inline __attribute__((always_inline))

constexpr int LANES = 16;
#if defined(__AVX512F__)
constexpr int NATIVE = 16;  // lanes of a register
#elif defined(__AVX2__)
constexpr int NATIVE = 8;
#else
constexpr int NATIVE = 4;
#endif
constexpr int PARTS = LANES / NATIVE;

template <class T>
struct Native {
    typedef T V __attribute__((vector_size(NATIVE * sizeof(T))));
};

template <class T>
struct Sixteen {
    typedef typename Native<T>::V V;
    V part[PARTS];

    template <class U>
    explicit ISTHMUS_INLINE operator Sixteen<U>() const {  // the same bits
        static_assert(sizeof(T) == sizeof(U), "lanes of one size");
        Sixteen<U> to;
#pragma GCC unroll 4
        for (int i = 0; i < PARTS; i++) to.part[i] = (typename Native<U>::V)part[i];
        return to;
    }
    ISTHMUS_INLINE T operator[](int i) const { return part[i / NATIVE][i % NATIVE]; }
};
typedef Sixteen<float> f32x16;
typedef Sixteen<int32_t> i32x16;
typedef Sixteen<uint32_t> u32x16;
typedef Sixteen<uint16_t> u16x16;

// Lane by lane, with another vector or with one value.
#define ISTHMUS_BINARY(op)                                                                 \
    template <class T>                                                                     \
    static ISTHMUS_INLINE Sixteen<T> operator op(Sixteen<T> a, const Sixteen<T>& b) {      \
        _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++) a.part[i] = a.part[i] op b.part[i]; \
        return a;                                                                          \
    }                                                                                      \
    template <class T>                                                                     \
    static ISTHMUS_INLINE Sixteen<T> operator op(Sixteen<T> a, typename Same<T>::As b) {   \
        _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++) a.part[i] = a.part[i] op b;         \
        return a;                                                                          \
    }                                                                                      \
    template <class T>                                                                     \
    static ISTHMUS_INLINE Sixteen<T> operator op(typename Same<T>::As a, Sixteen<T> b) {   \
        _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++) b.part[i] = a op b.part[i];         \
        return b;                                                                          \
    }
template <class T>
struct Same {  // a type that is not deduced
    typedef T As;
};
ISTHMUS_BINARY(+)
ISTHMUS_BINARY(-)
ISTHMUS_BINARY(*)
ISTHMUS_BINARY(/)
ISTHMUS_BINARY(&)
ISTHMUS_BINARY(|)
ISTHMUS_BINARY(<<)
ISTHMUS_BINARY(>>)
#undef ISTHMUS_BINARY

// All bits of a lane are set where it holds.
#define ISTHMUS_COMPARE(op)                                                                       \
    template <class T>                                                                            \
    static ISTHMUS_INLINE i32x16 operator op(const Sixteen<T>& a, const Sixteen<T>& b) {          \
        i32x16 to;                                                                                \
        _Pragma("GCC unroll 4") for (int i = 0; i < PARTS; i++) to.part[i] = a.part[i] op b.part[i]; \
        return to;                                                                                \
    }
ISTHMUS_COMPARE(<)
ISTHMUS_COMPARE(>)
ISTHMUS_COMPARE(==)
ISTHMUS_COMPARE(!=)
#undef ISTHMUS_COMPARE

template <class T>
static ISTHMUS_INLINE Sixteen<T> operator-(Sixteen<T> a) {
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) a.part[i] = -a.part[i];
    return a;
}
template <class T>
static ISTHMUS_INLINE Sixteen<T> operator~(Sixteen<T> a) {
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) a.part[i] = ~a.part[i];
    return a;
}
template <class T, class U>
static ISTHMUS_INLINE void operator+=(Sixteen<T>& a, const U& b) {
    a = a + b;
}
template <class U, class T>
static ISTHMUS_INLINE Sixteen<U> convert(const Sixteen<T>& v) {
    Sixteen<U> to;
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) to.part[i] = __builtin_convertvector(v.part[i], typename Native<U>::V);
    return to;
}

// The value is needed here: without this the compiler moves sums behind many products, which it then keeps in memory.
template <class T>
static ISTHMUS_INLINE void pin(Sixteen<T>& v) {
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++)
#if defined(__x86_64__)
        __asm__("" : "+v"(v.part[i]));
#elif defined(__aarch64__)
        __asm__("" : "+w"(v.part[i]));
#endif
}

template <class V>
static ISTHMUS_INLINE V load(const void* p) {
    V v;
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) std::memcpy(&v.part[i], (const char*)p + i * sizeof v.part[i], sizeof v.part[i]);
    return v;
}
template <class T>
static ISTHMUS_INLINE void store(T* p, const Sixteen<T>& v) {
#pragma GCC unroll 4
    for (int i = 0; i < PARTS; i++) std::memcpy(p + i * NATIVE, &v.part[i], sizeof v.part[i]);
}
static ISTHMUS_INLINE f32x16 splat(float x) { return f32x16{} + x; }
static ISTHMUS_INLINE f32x16 bits(u32x16 v) { return (f32x16)v; }
static ISTHMUS_INLINE f32x16 from_bf16(const uint16_t* p) {
    return bits(convert<uint32_t>(load<u16x16>(p)) << 16);
}
static ISTHMUS_INLINE i32x16 count_from(int32_t first) {  // first, first + 1, ..
    static const int32_t up[LANES] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    return load<i32x16>(up) + first;
}

static ISTHMUS_INLINE void to_bf16(uint16_t* p, f32x16 v) {
    u32x16 u = (u32x16)v;
    const u32x16 nan = (u32x16)(v != v);
    u = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
    store(p, convert<uint16_t>((nan & 0x7FC0) | (~nan & u)));
}

// Sixteen half floats.
static ISTHMUS_INLINE f32x16 from_f16(const uint16_t* p) {
#if defined(__AVX512F__)
    return {{(f32x16::V)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p))}};
#elif defined(__AVX2__)
    return {{(f32x16::V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
             (f32x16::V)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)))}};
#else
    float to[LANES];
    for (int i = 0; i < LANES; i++) {
        _Float16 h;
        std::memcpy(&h, p + i, sizeof h);
        to[i] = (float)h;
    }
    return load<f32x16>(to);
#endif
}

// Thirty-two signed bytes as numbers of 16 bits, two to a lane.
static ISTHMUS_INLINE i32x16 widen_i8(const uint8_t* p) {
#if defined(__AVX512BW__)
    return {{(i32x16::V)_mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i*)p))}};
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return {{(i32x16::V)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)p)),
             (i32x16::V)_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i*)(p + 16)))}};
#else
    const i32x16 two = (i32x16)convert<uint32_t>(load<u16x16>(p));
    return (((two << 24) >> 24) & 0xFFFF) | (((two << 16) >> 24) << 16);
#endif
}
// In each lane a_low * b_low + a_high * b_high of numbers of 16 bits.
static ISTHMUS_INLINE i32x16 multiply_pairs(const i32x16& a, const i32x16& b) {
#if defined(__AVX512BW__)
    return {{(i32x16::V)_mm512_madd_epi16((__m512i)a.part[0], (__m512i)b.part[0])}};
#elif defined(__AVX2__) && !defined(__AVX512F__)
    return {{(i32x16::V)_mm256_madd_epi16((__m256i)a.part[0], (__m256i)b.part[0]),
             (i32x16::V)_mm256_madd_epi16((__m256i)a.part[1], (__m256i)b.part[1])}};
#else
    return ((a << 16) >> 16) * ((b << 16) >> 16) + (a >> 16) * (b >> 16);
#endif
}

// The same on top of `sums`.
static ISTHMUS_INLINE i32x16 add_pairs(const i32x16& sums, const i32x16& a, const i32x16& b) {
#if defined(__AVX512VNNI__)
    return {{(i32x16::V)_mm512_dpwssd_epi32((__m512i)sums.part[0], (__m512i)a.part[0], (__m512i)b.part[0])}};
#else
    return sums + multiply_pairs(a, b);
#endif
}

static ISTHMUS_INLINE f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) {
    return (f32x16)(((i32x16)yes & mask) | ((i32x16)no & ~mask));
}
// The second where one of them is no number: a limit comes first, so that what is no number stays none.
static ISTHMUS_INLINE f32x16 vmax(f32x16 a, f32x16 b) { return select(a > b, a, b); }
static ISTHMUS_INLINE f32x16 vmin(f32x16 a, f32x16 b) { return select(a < b, a, b); }

// Sums and maxima over lanes, in one order on every instruction set.
typedef float f32x4 __attribute__((vector_size(16)));
static ISTHMUS_INLINE float sum(const f32x16& v) {
    f32x4 q[4];
    std::memcpy(q, &v, sizeof q);
    f32x4 t = (q[0] + q[2]) + (q[1] + q[3]);
    t += __builtin_shufflevector(t, t, 2, 3, 2, 3);
    return t[0] + t[1];
}
static ISTHMUS_INLINE float largest(const f32x16& v) {
    f32x4 q[4];
    std::memcpy(q, &v, sizeof q);
    const auto most = [](f32x4 a, f32x4 b) { return a > b ? a : b; };
    f32x4 t = most(most(q[0], q[2]), most(q[1], q[3]));
    t = most(t, __builtin_shufflevector(t, t, 2, 3, 2, 3));
    return t[0] > t[1] ? t[0] : t[1];
}

// The nearest whole numbers of values within +-2^22.
static ISTHMUS_INLINE i32x16 whole(const f32x16& v) { return (i32x16)(v + 12582912.0f) - 0x4B400000; }

// exp by 2^n * p(r): Cody and Waite's reduction and a polynomial of degree 6; within 2 units in the last place. Of no
// number it is none.
static ISTHMUS_INLINE f32x16 vexp(f32x16 x) {
    x = vmin(splat(88.37626f), vmax(splat(-87.336544f), x));
    const f32x16 t = x * 1.44269504f + splat(12582912.0f);
    const i32x16 n = (i32x16)t - 0x4B400000;
    const f32x16 k = t - splat(12582912.0f);
    const f32x16 r = x - k * 0.693359375f + k * 2.12194440e-4f;
    f32x16 p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    return p * (f32x16)((n + 127) << 23);
}
static inline f32x16 vtanh(f32x16 x) {
    const f32x16 e = vexp(vmin(splat(30.0f), vmax(splat(-30.0f), 2.0f * x)));
    return (e - 1.0f) / (e + 1.0f);
}

}  // namespace isthmus
