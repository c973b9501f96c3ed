// What is computed row by row: norms, activations, rotation, look-up.
#pragma once
#include "vec.h"

namespace isthmus {

static inline f32x16 some(const float* p, long n) {  // the first n lanes, zeros behind
    float a[LANES] = {};
    std::memcpy(a, p, n * sizeof(float));
    return load<f32x16>(a);
}

// y = x / sqrt(mean(x^2) + eps) * w over K values.
static inline void rms_norm(const float* x, const float* w, float eps, long K, float* y) {
    f32x16 total{};
    long k = 0;
    for (; k + LANES <= K; k += LANES) {
        f32x16 v = load<f32x16>(x + k);
        total += v * v;
    }
    if (k < K) {
        f32x16 v = some(x + k, K - k);
        total += v * v;
    }
    const float scale = 1.0f / std::sqrt(sum(total) / (float)K + eps);
    for (k = 0; k + LANES <= K; k += LANES) store(y + k, load<f32x16>(x + k) * scale * load<f32x16>(w + k));
    for (; k < K; k++) y[k] = x[k] * scale * w[k];
}

enum Act { SILU, GELU_TANH, GELU, SIGMOID };

static inline f32x16 activate(f32x16 g, int kind) {
    switch (kind) {
        case SILU: return g / (1.0f + vexp(-g));
        case SIGMOID: return 1.0f / (1.0f + vexp(-g));
        case GELU_TANH: return 0.5f * g * (1.0f + vtanh(0.7978845608f * (g + 0.044715f * g * g * g)));
        default: {
            float a[LANES];
            store(a, g);
            for (float& v : a) v = 0.5f * v * (1.0f + std::erf(v * 0.70710678f));
            return load<f32x16>(a);
        }
    }
}

// Rotates the first 2 * half values of a head: turns[0, half) are cosines, turns[half, 2 half) sines.
static inline void rotate(const float* x, const float* turns, long half, long width, float* y) {
    for (long i = 0; i < half; i++) {
        const float a = x[i], b = x[i + half], c = turns[i], s = turns[i + half];
        y[i] = a * c - b * s;
        y[i + half] = b * c + a * s;
    }
    for (long i = 2 * half; i < width; i++) y[i] = x[i];
}

}  // namespace isthmus
