/* What lies between a decoder layer's matrix products, one pass over memory each, for CPUs.
 *
 * Arithmetic is float32; bfloat16 values are rounded once, on the way out, except where transformers rounds
 * in between and a comment says so. Rows are independent and their order of summation is fixed, so results do
 * not depend on the number of threads. Compiled on first use; elementwise.py has the same in plain torch.
 */
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
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

static inline void softmax_in_place(float *restrict e, int64_t count) {
    float top = -INFINITY, sum = 0.0f;
#pragma omp simd reduction(max : top)
    for (int64_t i = 0; i < count; i++) top = e[i] > top ? e[i] : top;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = 0; i < count; i++) {
        e[i] = fast_exp(e[i] - top);
        sum += e[i];
    }
    float share = 1.0f / sum;
    for (int64_t i = 0; i < count; i++) e[i] *= share;
}

/* Of attention over pages: tokens of a page, elements from page to page, key heads, query heads of each, elements of
 * a head, keys that a query sees; the factor of scores, and their cap (0: none). A page has each token's keys, then
 * its values. */
struct pages {
    int64_t tokens, stride, shared, group, size, window;
    float scale, cap;
};

enum { LANES = 16, FOUR = 4, AHEAD = 8 }; /* AHEAD: tokens */
typedef float lanes __attribute__((vector_size(4 * LANES), aligned(4)));

static inline float sum_lanes(lanes all) {
    typedef float eight __attribute__((vector_size(4 * 8), aligned(4)));
    typedef float four __attribute__((vector_size(4 * 4), aligned(4)));
    eight high, low;
    memcpy(&low, &all, sizeof low);
    memcpy(&high, (const char *)&all + sizeof low, sizeof high);
    low += high;
    four up, down;
    memcpy(&down, &low, sizeof down);
    memcpy(&up, (const char *)&low + sizeof down, sizeof up);
    down += up;
    return (down[0] + down[2]) + (down[1] + down[3]);
}

/* Scores of `heads` queries (heads, width) with four keys (FOUR, width), of which `keys` count; width: whole lanes. */
static inline __attribute__((always_inline)) void score(const int heads, float *scores, int64_t next, const float *q,
                                                        const float *given, int64_t width, int keys) {
    lanes sums[FOUR][FOUR] = {{{0}}};
    for (int64_t i = 0; i < width; i += LANES)
        for (int h = 0; h < heads; h++)
            for (int k = 0; k < FOUR; k++)
                sums[h][k] += *(const lanes *)(q + h * width + i) * *(const lanes *)(given + k * width + i);
    for (int h = 0; h < heads; h++)
        for (int k = 0; k < keys; k++) scores[h * next + k] = sum_lanes(sums[h][k]);
}

/* sums (heads, width) += shares (heads, keys) times four values (FOUR, width); those beyond `keys` are zeros. */
static inline void add_values(int64_t heads, float *sums, const float *shares, int64_t next, const float *given,
                              int64_t width, int keys) {
    for (int64_t h = 0; h < heads; h++) {
        float share[FOUR] = {0};
        for (int k = 0; k < keys; k++) share[k] = shares[h * next + k];
        for (int64_t i = 0; i < width; i += LANES) {
            lanes sum = *(lanes *)(sums + h * width + i);
            for (int k = 0; k < FOUR; k++) sum += share[k] * *(const lanes *)(given + k * width + i);
            *(lanes *)(sums + h * width + i) = sum;
        }
    }
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
    /* Rotates the first 2 * half features of each of `heads` heads of every row in place; rows begin `stride` \
     * apart, and row r is at position r mod length. */                                                        \
    void rotate_##NAME(TYPE *x, const TYPE *cosine, const TYPE *sine, int64_t rows, int64_t length,            \
                       int64_t heads, int64_t stride, int64_t size, int64_t half, float sign, int threads) {   \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                      \
        for (int64_t row = 0; row < rows; row++) {                                                             \
            const TYPE *c = cosine + (row % length) * 2 * half, *s = sine + (row % length) * 2 * half;         \
            for (int64_t head = 0; head < heads; head++) {                                                     \
                TYPE *restrict a = x + row * stride + head * size, *restrict b = a + half;                     \
                for (int64_t i = 0; i < half; i++) {                                                           \
                    float first = load_##NAME(a[i]), second = load_##NAME(b[i]);                               \
                    a[i] = store_##NAME(first * load_##NAME(c[i]) - second * sign * load_##NAME(s[i]));        \
                    b[i] = store_##NAME(second * load_##NAME(c[half + i]) +                                    \
                                        first * sign * load_##NAME(s[half + i]));                              \
                }                                                                                              \
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
            float e[KEYS];                                                                                     \
            for (int64_t i = start; i < stop; i++) e[i] = scale * load_##NAME(a[i]);                           \
            softmax_in_place(e + start, stop - start);                                                         \
            for (int64_t i = 0; i < start; i++) a[i] = 0;                                                      \
            for (int64_t i = start; i < stop; i++) a[i] = store_##NAME(e[i]);                                  \
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
    }                                                                                                          \
    /* Tokens' keys and values, which begin at `first` of their rows of x, into their pages. places (n, 2):    \
     * page, token in it. Of a head whose values are not finite keys become NaN and values 0, in x too. */     \
    void keep_##NAME(TYPE *x, int64_t x_stride, int64_t first, TYPE *pool, const int64_t *places, int64_t n,   \
                     const struct pages *at) {                                                                 \
        const int64_t size = at->size, values = at->shared * size;                                             \
        for (int64_t row = 0; row < n; row++) {                                                                \
            TYPE *own = x + row * x_stride + first;                                                            \
            for (TYPE *k = own, *v = own + values; k < own + values; k += size, v += size) {                   \
                float sum = 0.0f; /* or NaN */                                                                 \
                _Pragma("omp simd reduction(+ : sum)")                                                         \
                for (int64_t i = 0; i < size; i++) sum += 0.0f * load_##NAME(v[i]);                            \
                for (int64_t i = 0; sum != 0.0f && i < size; i++) k[i] = store_##NAME(NAN), v[i] = 0;          \
            }                                                                                                  \
            memcpy(pool + places[2 * row] * at->stride + places[2 * row + 1] * 2 * values, own,                \
                   2 * values * sizeof *own);                                                                  \
        }                                                                                                      \
    }                                                                                                          \
    /* Four vectors of `size` in floats, (FOUR, width), zeros behind them and in place of those beyond `count`. */\
    static inline void four_##NAME(float *restrict given, const TYPE *from, const int64_t *at, int64_t count,  \
                                   int64_t size, int64_t width) {                                              \
        if (count < FOUR || size < width) memset(given, 0, FOUR * width * sizeof(float));                      \
        for (int64_t k = 0; k < count; k++) {                                                                  \
            const TYPE *restrict own = from + at[k];                                                           \
            for (int64_t i = 0; i < size; i++) given[k * width + i] = load_##NAME(own[i]);                     \
        }                                                                                                      \
    }                                                                                                          \
    /* One row's query heads that share keys and values: those at `places`, `count` of them. `scores` is (group,\
     * count), `sums` (2 * group + FOUR, width). */                                                            \
    static void attend_heads_##NAME(TYPE *out, const TYPE *query, const TYPE *keys, const int64_t *places,     \
                                    int64_t count, const struct pages *at, int64_t width, float *scores,       \
                                    float *sums, int first) {                                                  \
        const int64_t size = at->size, group = at->group, values = at->shared * size;                          \
        float *q = sums + group * width, *given = sums + 2 * group * width;                                    \
        memset(sums, 0, 2 * group * width * sizeof(float));                                                    \
        for (int64_t h = 0; h < group; h++)                                                                    \
            for (int64_t i = 0; i < size; i++) q[h * width + i] = at->scale * load_##NAME(query[h * size + i]);\
        for (int64_t t = 0; t < count; t += FOUR) {                                                            \
            const int left = count - t < FOUR ? count - t : FOUR;                                              \
            if (first) /* fetch what all heads will read: tokens lie too scattered for the processor to foresee */\
                for (int64_t next = t + AHEAD; next < count && next < t + AHEAD + FOUR; next++)                \
                    for (int64_t i = 0; i < 2 * values; i += 64 / sizeof(TYPE))                                \
                        __builtin_prefetch(keys + places[next] + i, 0, 2);                                     \
            four_##NAME(given, keys, places + t, left, size, width);                                           \
            for (int64_t h = 0; h < group; h += FOUR) {                                                        \
                float *to = scores + h * count + t;                                                            \
                const float *own = q + h * width;                                                              \
                switch (group - h) {                                                                           \
                case 1: score(1, to, count, own, given, width, left); break;                                   \
                case 2: score(2, to, count, own, given, width, left); break;                                   \
                case 3: score(3, to, count, own, given, width, left); break;                                   \
                default: score(FOUR, to, count, own, given, width, left);                                      \
                }                                                                                              \
            }                                                                                                  \
        }                                                                                                      \
        if (at->cap > 0.0f)                                                                                    \
            for (int64_t i = 0; i < group * count; i++) scores[i] = at->cap * tanhf(scores[i] / at->cap);      \
        for (int64_t h = 0; h < group; h++) softmax_in_place(scores + h * count, count);                       \
        for (int64_t t = 0; t < count; t += FOUR) {                                                            \
            const int left = count - t < FOUR ? count - t : FOUR;                                              \
            four_##NAME(given, keys + values, places + t, left, size, width);                                  \
            add_values(group, sums, scores + t, count, given, width, left);                                    \
        }                                                                                                      \
        for (int64_t h = 0; h < group; h++)                                                                    \
            for (int64_t i = 0; i < size; i++) out[h * size + i] = store_##NAME(sums[h * width + i]);          \
    }                                                                                                          \
    /* Query rows over their earlier tokens' and their own keys and values, in pages. rows (n, 3): row of x    \
     * and out, its table among `tables`, its position. x (rows, x_stride) begins with the query heads. */     \
    int attend_##NAME(TYPE *out, int64_t out_stride, const TYPE *x, int64_t x_stride, const TYPE *pool,        \
                      const int64_t *tables, int64_t longest, const int64_t *rows, int64_t n,                  \
                      const struct pages *at, int threads) {                                                   \
        const int64_t size = at->size, group = at->group, width = (size + LANES - 1) / LANES * LANES;          \
        int64_t most = 0;                                                                                      \
        int failed = 0;                                                                                        \
        for (int64_t i = 0; i < n; i++) most = rows[3 * i + 2] + 1 > most ? rows[3 * i + 2] + 1 : most;        \
        _Pragma("omp parallel num_threads(threads)") {                                                         \
            int64_t *places = malloc(most * sizeof *places);                                                   \
            float *scores = malloc((group * most + (2 * group + FOUR) * width) * sizeof *scores);              \
            if (places == NULL || scores == NULL) {                                                            \
                _Pragma("omp atomic write") failed = 1;                                                        \
            }                                                                                                  \
            _Pragma("omp for schedule(static)")                                                                \
            for (int64_t i = 0; i < n; i++) {                                                                  \
                const int64_t *table = tables + rows[3 * i + 1] * longest, last = rows[3 * i + 2];             \
                const int64_t first = last >= at->window ? last - at->window + 1 : 0;                          \
                if (places == NULL || scores == NULL) continue;                                                \
                for (int64_t t = first; t <= last; t++)                                                        \
                    places[t - first] = table[t / at->tokens] * at->stride +                                   \
                                        t % at->tokens * 2 * at->shared * size;                                \
                for (int64_t head = 0; head < at->shared; head++)                                              \
                    attend_heads_##NAME(out + rows[3 * i] * out_stride + head * group * size,                  \
                                        x + rows[3 * i] * x_stride + head * group * size, pool + head * size,  \
                                        places, last - first + 1, at, width, scores, scores + group * most,    \
                                        head == 0);                                                            \
            }                                                                                                  \
            free(places);                                                                                      \
            free(scores);                                                                                      \
        }                                                                                                      \
        return failed;                                                                                         \
    }

enum { KEYS = 512 }; /* most columns of softmax_*: as attention.ROWS */

DEFINE(f32, float)
DEFINE(bf16, uint16_t)
