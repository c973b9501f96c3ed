// Vectors of sixteen lanes in the compiler's own types, so that one source serves every instruction set.
#pragma once
#include <cstdint>
#include <cstring>
#include <cmath>
#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace isthmus {

constexpr int LANES = 16;
typedef float f32x16 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef uint32_t u32x16 __attribute__((vector_size(64)));
typedef uint16_t u16x16 __attribute__((vector_size(32)));
typedef int8_t i8x16 __attribute__((vector_size(16)));

template <class V>
static inline V load(const void* p) {
    V v;
    std::memcpy(&v, p, sizeof v);
    return v;
}
static inline void store(float* p, f32x16 v) { std::memcpy(p, &v, sizeof v); }
static inline f32x16 splat(float x) { return f32x16{} + x; }
static inline f32x16 bits(u32x16 v) { return (f32x16)v; }
static inline f32x16 from_bf16(const uint16_t* p) {
    return bits(__builtin_convertvector(load<u16x16>(p), u32x16) << 16);
}

static inline void to_bf16(uint16_t* p, f32x16 v) {
    u32x16 u = (u32x16)v;
    u32x16 nan = (u32x16)(v != v);
    u = (u + 0x7FFF + ((u >> 16) & 1)) >> 16;
    u = (nan & 0x7FC0) | (~nan & u);
    u16x16 h = __builtin_convertvector(u, u16x16);
    std::memcpy(p, &h, sizeof h);
}

// Sixteen half floats.
static inline f32x16 from_f16(const uint16_t* p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
#elif defined(__F16C__)
    __m256 lo = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
           hi = _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + 8)));
    f32x16 v;
    std::memcpy(&v, &lo, 32);
    std::memcpy((char*)&v + 32, &hi, 32);
    return v;
#else
    _Float16 h[16];
    std::memcpy(h, p, 32);
    f32x16 v;
    for (int i = 0; i < 16; i++) v[i] = (float)h[i];
    return v;
#endif
}

// Sixteen signed bytes, and the lowest four bits of each lane.
static inline f32x16 from_i8(const uint8_t* p) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    __m256 lo = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
    __m256 hi = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8))));
    f32x16 v;
    std::memcpy(&v, &lo, 32);
    std::memcpy((char*)&v + 32, &hi, 32);
    return v;
#else
    return __builtin_convertvector(load<i8x16>(p), f32x16);
#endif
}
static inline f32x16 digit(u32x16 c) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_permutexvar_ps((__m512i)c,
                                         _mm512_setr_ps(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
#else
    return __builtin_convertvector((i32x16)(c & 15), f32x16);
#endif
}

static inline f32x16 select(i32x16 mask, f32x16 yes, f32x16 no) {
    return (f32x16)(((i32x16)yes & mask) | ((i32x16)no & ~mask));
}
static inline f32x16 vmax(f32x16 a, f32x16 b) { return select(a > b, a, b); }
static inline f32x16 vmin(f32x16 a, f32x16 b) { return select(a < b, a, b); }

// Sums and maxima over lanes, in one order on every instruction set.
static inline float sum(f32x16 v) {
    float a[16];
    store(a, v);
    for (int s = 8; s; s /= 2)
        for (int i = 0; i < s; i++) a[i] += a[i + s];
    return a[0];
}
static inline float largest(f32x16 v) {
    float a[16];
    store(a, v);
    for (int s = 8; s; s /= 2)
        for (int i = 0; i < s; i++) a[i] = a[i] > a[i + s] ? a[i] : a[i + s];
    return a[0];
}

// exp by 2^n * p(r): Cody and Waite's reduction and a polynomial of degree 6; within 2 units in the last place.
static inline f32x16 vexp(f32x16 x) {
    x = vmin(vmax(x, splat(-87.336544f)), splat(88.37626f));
    f32x16 t = x * 1.44269504f + splat(12582912.0f);
    i32x16 n = (i32x16)t - 0x4B400000;
    f32x16 k = t - splat(12582912.0f);
    f32x16 r = x - k * 0.693359375f + k * 2.12194440e-4f;
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
    f32x16 e = vexp(vmin(vmax(2.0f * x, splat(-30.0f)), splat(30.0f)));
    return (e - 1.0f) / (e + 1.0f);
}

}  // namespace isthmus
