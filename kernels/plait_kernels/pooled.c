/* Rows of any adapters over one layer, whose vectors lie in a pool of pages: out[row] += scale * B (A x[row]).
 *
 * A vector is one rank's row of A or column of B, contiguous, at the offset that the adapter's table gives for
 * its site, its side and its rank. Sums are in float32 and rounded once. Compiled on first use; see compiled.py.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { LANES = 16 };
typedef float lanes __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

static inline float one_f32(float value) { return value; }
static inline float one_bf16(uint16_t value) {
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}
static inline lanes load_f32(const float *at) {
    lanes result;
    memcpy(&result, at, sizeof result);
    return result;
}
static inline lanes load_bf16(const uint16_t *at) {
    halves read;
    memcpy(&read, at, sizeof read);
    words bits = __builtin_convertvector(read, words) << 16;
    lanes result;
    memcpy(&result, &bits, sizeof result);
    return result;
}
static inline float store_f32(float value) { return value; }
/* To the nearest, ties to even; NaN stays NaN. */
static inline uint16_t store_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return value != value ? (uint16_t)0x7FC0 : (uint16_t)rounded;
}

/* rows (n, 3): row of x and out, offset of its adapter's table, rank. A table is (sites, 2, rank).
 * sites (m, 3): index in the tables, first column, columns. A negative offset: the adapter is not there. */
#define DEFINE_ROWS(NAME, TYPE)                                                                                 \
    static inline float sum_##NAME(lanes sums, const float *x, const TYPE *a, int64_t from, int64_t count) {    \
        float sum = 0;                                                                                          \
        for (int lane = 0; lane < LANES; lane++) sum += sums[lane];                                             \
        for (int64_t i = from; i < count; i++) sum += x[i] * one_##NAME(a[i]);                                  \
        return sum;                                                                                             \
    }                                                                                                           \
    /* out += scale * B[:, k] (A[k, :] x) for up to four k; the missing ones read the first. */ \
    static void four_##NAME(float *out, const float *x, const TYPE *pool, const int64_t *a, const int64_t *b,   \
                            int64_t ranks, float scale, int64_t features, int64_t width) {                      \
        const TYPE *v[4], *w[4];                                                                                \
        float f[4] = {0};                                                                                       \
        for (int k = 0; k < 4; k++) v[k] = pool + a[k < ranks ? k : 0], w[k] = pool + b[k < ranks ? k : 0];      \
        lanes sums[4] = {{0}};                                                                                  \
        int64_t i = 0;                                                                                          \
        for (; i + LANES <= features; i += LANES) {                                                             \
            lanes value = load_f32(x + i);                                                                      \
            for (int k = 0; k < 4; k++) sums[k] += value * load_##NAME(v[k] + i);                               \
        }                                                                                                       \
        for (int k = 0; k < ranks; k++) f[k] = scale * sum_##NAME(sums[k], x, v[k], i, features);               \
        for (i = 0; i + LANES <= width; i += LANES) {                                                           \
            lanes sum = load_f32(out + i);                                                                      \
            for (int k = 0; k < 4; k++)                                                                         \
                if (k < ranks) sum += f[k] * load_##NAME(w[k] + i);                                             \
            memcpy(out + i, &sum, sizeof sum);                                                                  \
        }                                                                                                       \
        for (; i < width; i++)                                                                                  \
            for (int k = 0; k < ranks; k++) out[i] += f[k] * one_##NAME(w[k][i]);                               \
    }                                                                                                           \
    static void row_##NAME(TYPE *out, const TYPE *x, int64_t features, const TYPE *pool, const int64_t *table,  \
                           int64_t rank, float scale, const int64_t *sites, int64_t m, float *given,            \
                           float *sums) {                                                                       \
        for (int64_t i = 0; i < features; i++) given[i] = one_##NAME(x[i]);                                     \
        for (int64_t site = 0; site < m; site++) {                                                              \
            const int64_t *a = table + 2 * rank * sites[3 * site], *b = a + rank, width = sites[3 * site + 2];  \
            TYPE *own = out + sites[3 * site + 1];                                                              \
            if (a[0] < 0) continue;                                                                             \
            for (int64_t i = 0; i < width; i++) sums[i] = one_##NAME(own[i]);                                   \
            for (int64_t k = 0; k < rank; k += 4)                                                               \
                four_##NAME(sums, given, pool, a + k, b + k, rank - k < 4 ? rank - k : 4, scale, features, width); \
            for (int64_t i = 0; i < width; i++) own[i] = store_##NAME(sums[i]);                                 \
        }                                                                                                       \
    }                                                                                                           \
    int rows_##NAME(TYPE *out, int64_t out_stride, const TYPE *x, int64_t x_stride, int64_t features,           \
                     const TYPE *pool, const int64_t *tables, const int64_t *rows, const float *scales,         \
                     int64_t n, const int64_t *sites, int64_t m, int threads) {                                 \
        int64_t widest = features;                                                                              \
        for (int64_t site = 0; site < m; site++)                                                                \
            if (sites[3 * site + 2] > widest) widest = sites[3 * site + 2];                                     \
        int failed = 0;                                                                                         \
        _Pragma("omp parallel num_threads(threads)") {                                                          \
            float *scratch = malloc(2 * widest * sizeof(float));                                                \
            if (scratch == NULL) {                                                                              \
                _Pragma("omp atomic write") failed = 1;                                                         \
            }                                                                                                   \
            _Pragma("omp for schedule(static)")                                                                 \
            for (int64_t i = 0; i < n; i++)                                                                     \
                if (scratch != NULL)                                                                            \
                    row_##NAME(out + rows[3 * i] * out_stride, x + rows[3 * i] * x_stride, features, pool,      \
                               tables + rows[3 * i + 1], rows[3 * i + 2], scales[i], sites, m, scratch,         \
                               scratch + widest);                                                               \
            free(scratch);                                                                                      \
        }                                                                                                       \
        return failed;                                                                                          \
    }

/* Write an adapter's vectors into the pool. sites (m, 6): addresses of the layer's pages, of A (rank, in) and of B
 * (out, rank), in, out, and the site's index in the table (sites, 2, rank). B's columns are copied in blocks of its
 * rows, which then lie in the cache. */
#define DEFINE_PLACE(NAME, TYPE)                                                                                \
    void place_##NAME(const int64_t *sites, int64_t m, const int64_t *table, int64_t rank) {                    \
        for (const int64_t *site = sites; site < sites + 6 * m; site += 6) {                                    \
            TYPE *pool = (TYPE *)site[0];                                                                       \
            const TYPE *a = (const TYPE *)site[1], *b = (const TYPE *)site[2];                                  \
            const int64_t in = site[3], out = site[4], *at = table + 2 * rank * site[5];                        \
            for (int64_t k = 0; k < rank; k++) memcpy(pool + at[k], a + k * in, in * sizeof(TYPE));             \
            for (int64_t first = 0; first < out; first += LANES) {                                              \
                int64_t count = out - first < LANES ? out - first : LANES;                                      \
                for (int64_t k = 0; k < rank; k++) {                                                            \
                    TYPE *to = pool + at[rank + k] + first;                                                     \
                    const TYPE *from = b + first * rank + k;                                                    \
                    for (int64_t i = 0; i < count; i++) to[i] = from[i * rank];                                 \
                }                                                                                               \
            }                                                                                                   \
        }                                                                                                       \
    }

DEFINE_PLACE(f32, float)
DEFINE_PLACE(bf16, uint16_t)
DEFINE_ROWS(f32, float)
DEFINE_ROWS(bf16, uint16_t)
