/* What lies between a decoder layer's matrix products, one pass over memory each, for CPUs.
 *
 * Arithmetic is float32; bfloat16 values are rounded once, on the way out, except where transformers rounds
 * in between and a comment says so. Rows are independent and their order of summation is fixed, so results do
 * not depend on the number of threads. Compiled on first use; elementwise.py has the same in plain torch.
 */
#include <math.h>
#include <stdint.h>
#include <string.h>

static inline float load_f32(float value) { return value; }
static inline float store_f32(float value) { return value; }

static inline float load_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* To the nearest, ties to even; NaN stays NaN. */
static inline uint16_t store_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return value != value ? (uint16_t)0x7FC0 : (uint16_t)rounded;
}

/* e^x to about 2e-7 relative: 2^n times a polynomial of degree 6 on [-ln2/2, ln2/2]; 0 below -87; NaN stays. */
static inline float fast_exp(float x) {
    float bounded = x < -87.0f ? -87.0f : x > 88.0f ? 88.0f : x;
    float n = (bounded * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounds to a whole number */
    float r = bounded - n * 0.693359375f + n * 2.12194440e-4f;
    float p = 1.9875691500e-4f;
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * r * r + r + 1.0f;
    int32_t bits = ((int32_t)n + 127) << 23;
    float power;
    memcpy(&power, &bits, sizeof power);
    return x < -87.0f ? 0.0f : x != x ? x : p * power;
}

static inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

enum { SILU = 0, GELU_TANH = 1 };

/* GELU's tanh form: x * sigmoid(2 * inner), inner = sqrt(2/pi) * (x + 0.044715 x^3). */
static inline float gelu_inner2(float x) { return 1.5957691216f * (x + 0.044715f * x * x * x); }

static inline float activate(float x, int kind) { return x * sigmoid(kind == SILU ? x : gelu_inner2(x)); }

static inline float activate_slope(float x, int kind) {
    float inner = kind == SILU ? x : gelu_inner2(x);
    float slope = kind == SILU ? 1.0f : 1.5957691216f * (1.0f + 0.134145f * x * x);
    float s = sigmoid(inner);
    return s + x * s * (1.0f - s) * slope;
}

#define DEFINE(NAME, TYPE)                                                                                     \
    /* out = x / rms(x) * (offset + w). Without an offset x / rms(x) is rounded first, as Llama's is. */       \
    void rms_##NAME(TYPE *out, float *scale, const TYPE *x, const TYPE *w, int64_t rows, int64_t n, float eps, \
                    float offset, int threads) {                                                               \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                      \
        for (int64_t row = 0; row < rows; row++) {                                                             \
            const TYPE *restrict a = x + row * n;                                                              \
            TYPE *restrict o = out + row * n;                                                                  \
            float sum = 0.0f;                                                                                  \
            _Pragma("omp simd reduction(+ : sum)")                                                             \
            for (int64_t i = 0; i < n; i++) sum += load_##NAME(a[i]) * load_##NAME(a[i]);                      \
            float s = 1.0f / sqrtf(sum / (float)n + eps);                                                      \
            scale[row] = s;                                                                                    \
            if (offset == 0.0f)                                                                                \
                for (int64_t i = 0; i < n; i++)                                                                \
                    o[i] = store_##NAME(load_##NAME(store_##NAME(load_##NAME(a[i]) * s)) * load_##NAME(w[i])); \
            else                                                                                               \
                for (int64_t i = 0; i < n; i++)                                                                \
                    o[i] = store_##NAME(load_##NAME(a[i]) * s * (offset + load_##NAME(w[i])));                 \
        }                                                                                                      \
    }                                                                                                          \
    /* dx = s (g - x s^2 mean(g x)), g = grad * (offset + w). */                                               \
    void rms_back_##NAME(TYPE *dx, const TYPE *grad, const float *scale, const TYPE *x, const TYPE *w,         \
                         int64_t rows, int64_t n, float offset, int threads) {                                 \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                      \
        for (int64_t row = 0; row < rows; row++) {                                                             \
            const TYPE *restrict a = x + row * n, *restrict g = grad + row * n;                                \
            TYPE *restrict o = dx + row * n;                                                                   \
            float sum = 0.0f, s = scale[row];                                                                  \
            _Pragma("omp simd reduction(+ : sum)")                                                             \
            for (int64_t i = 0; i < n; i++)                                                                    \
                sum += load_##NAME(g[i]) * (offset + load_##NAME(w[i])) * load_##NAME(a[i]);                   \
            float back = s * s * sum / (float)n;                                                               \
            for (int64_t i = 0; i < n; i++)                                                                    \
                o[i] = store_##NAME(s * (load_##NAME(g[i]) * (offset + load_##NAME(w[i])) -                    \
                                         load_##NAME(a[i]) * back));                                           \
        }                                                                                                      \
    }                                                                                                          \
    /* out = act(gate) * up, gate and up side by side in a row of 2n; act(gate) is rounded first. */           \
    static inline __attribute__((always_inline)) void gated_row_##NAME(                                        \
        TYPE *restrict o, const TYPE *restrict a, int64_t n, int kind) {                                       \
        for (int64_t i = 0; i < n; i++)                                                                        \
            o[i] = store_##NAME(load_##NAME(store_##NAME(activate(load_##NAME(a[i]), kind))) *                 \
                                load_##NAME(a[n + i]));                                                        \
    }                                                                                                          \
    void gated_##NAME(TYPE *out, const TYPE *x, int64_t rows, int64_t n, int kind, int threads) {              \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                      \
        for (int64_t row = 0; row < rows; row++) {                                                             \
            if (kind == SILU) gated_row_##NAME(out + row * n, x + 2 * row * n, n, SILU);                       \
            else gated_row_##NAME(out + row * n, x + 2 * row * n, n, GELU_TANH);                               \
        }                                                                                                      \
    }                                                                                                          \
    static inline __attribute__((always_inline)) void gated_back_row_##NAME(                                   \
        TYPE *restrict o, const TYPE *restrict g, const TYPE *restrict a, int64_t n, int kind) {               \
        for (int64_t i = 0; i < n; i++) {                                                                      \
            float gate = load_##NAME(a[i]), grad = load_##NAME(g[i]);                                          \
            o[i] = store_##NAME(grad * load_##NAME(a[n + i]) * activate_slope(gate, kind));                    \
            o[n + i] = store_##NAME(grad * activate(gate, kind));                                              \
        }                                                                                                      \
    }                                                                                                          \
    void gated_back_##NAME(TYPE *dx, const TYPE *grad, const TYPE *x, int64_t rows, int64_t n, int kind,       \
                           int threads) {                                                                      \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                      \
        for (int64_t row = 0; row < rows; row++) {                                                             \
            TYPE *o = dx + 2 * row * n;                                                                        \
            const TYPE *g = grad + row * n, *a = x + 2 * row * n;                                              \
            if (kind == SILU) gated_back_row_##NAME(o, g, a, n, SILU);                                         \
            else gated_back_row_##NAME(o, g, a, n, GELU_TANH);                                                 \
        }                                                                                                      \
    }                                                                                                          \
    /* Rotates the first 2 * half features of every row in place; row r is at position r mod length. */        \
    void rotate_##NAME(TYPE *x, const TYPE *cosine, const TYPE *sine, int64_t rows, int64_t length,            \
                       int64_t size, int64_t half, float sign, int threads) {                                  \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                      \
        for (int64_t row = 0; row < rows; row++) {                                                             \
            TYPE *restrict a = x + row * size, *restrict b = x + row * size + half;                            \
            const TYPE *c = cosine + (row % length) * 2 * half, *s = sine + (row % length) * 2 * half;         \
            for (int64_t i = 0; i < half; i++) {                                                               \
                float first = load_##NAME(a[i]), second = load_##NAME(b[i]);                                   \
                a[i] = store_##NAME(first * load_##NAME(c[i]) - second * sign * load_##NAME(s[i]));            \
                b[i] = store_##NAME(second * load_##NAME(c[half + i]) + first * sign * load_##NAME(s[half + i])); \
            }                                                                                                  \
        }                                                                                                      \
    }                                                                                                          \
    /* Scores to probabilities in place: row r of a matrix of `keys` columns is the query at position          \
     * r mod length and sees the keys up to its own, at most `window` of them. */                              \
    void softmax_##NAME(TYPE *x, int64_t rows, int64_t length, int64_t keys, int64_t window, float scale,      \
                        int threads) {                                                                         \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                      \
        for (int64_t row = 0; row < rows; row++) {                                                             \
            TYPE *restrict a = x + row * keys;                                                                 \
            int64_t stop = row % length + 1, start = stop > window ? stop - window : 0;                        \
            float e[KEYS], top = -INFINITY, sum = 0.0f;                                                        \
            for (int64_t i = start; i < stop; i++) e[i] = scale * load_##NAME(a[i]);                           \
            _Pragma("omp simd reduction(max : top)")                                                           \
            for (int64_t i = start; i < stop; i++) top = e[i] > top ? e[i] : top;                              \
            _Pragma("omp simd reduction(+ : sum)")                                                             \
            for (int64_t i = start; i < stop; i++) {                                                           \
                e[i] = fast_exp(e[i] - top);                                                                   \
                sum += e[i];                                                                                   \
            }                                                                                                  \
            float share = 1.0f / sum;                                                                          \
            for (int64_t i = 0; i < start; i++) a[i] = 0;                                                      \
            for (int64_t i = start; i < stop; i++) a[i] = store_##NAME(e[i] * share);                          \
            for (int64_t i = stop; i < keys; i++) a[i] = 0;                                                    \
        }                                                                                                      \
    }                                                                                                          \
    /* In place: dx = scale * p * (dp - sum(p dp)), 0 outside of what the query sees. */                       \
    void softmax_back_##NAME(TYPE *dp, const TYPE *p, int64_t rows, int64_t length, int64_t keys,              \
                             int64_t window, float scale, int threads) {                                       \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                      \
        for (int64_t row = 0; row < rows; row++) {                                                             \
            TYPE *restrict d = dp + row * keys;                                                                \
            const TYPE *restrict q = p + row * keys;                                                           \
            int64_t stop = row % length + 1, start = stop > window ? stop - window : 0;                        \
            float sum = 0.0f;                                                                                  \
            _Pragma("omp simd reduction(+ : sum)")                                                             \
            for (int64_t i = start; i < stop; i++) sum += load_##NAME(q[i]) * load_##NAME(d[i]);               \
            for (int64_t i = 0; i < start; i++) d[i] = 0;                                                      \
            for (int64_t i = start; i < stop; i++)                                                             \
                d[i] = store_##NAME(scale * load_##NAME(q[i]) * (load_##NAME(d[i]) - sum));                    \
            for (int64_t i = stop; i < keys; i++) d[i] = 0;                                                    \
        }                                                                                                      \
    }

enum { KEYS = 512 }; /* most columns of softmax_*: as attention.ROWS */

DEFINE(f32, float)
DEFINE(bf16, uint16_t)
