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
static inline float sum_lanes(lanes all) {
    float half[LANES / 2];
    for (int i = 0; i < LANES / 2; i++) half[i] = all[i] + all[i + LANES / 2];
    for (int i = 0; i < LANES / 4; i++) half[i] += half[i + LANES / 4];
    return (half[0] + half[2]) + (half[1] + half[3]);
}
static inline float store_f32(float value) { return value; }
/* To the nearest, ties to even; NaN stays NaN. */
static inline uint16_t store_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return value != value ? (uint16_t)0x7FC0 : (uint16_t)rounded;
}

/* tiles (n, 4): first row of x and out, rows (at most MOST_ROWS), offset of their adapter's table, rank. A table is
 * (sites, 2, rank). sites (m, 3): index in the tables, first column, columns. A negative offset: the adapter is
 * not there. A row's sums have one order, however many rows its tile has. */
enum { MOST_ROWS = 8, FOUR = 4 };
#define DEFINE_ROWS(NAME, TYPE)                                                                                 \
    /* out += scale * B[:, k] (A[k, :] x) for up to four of the k that are left, and `rows` rows; the missing   \
     * k read the first. The next four are fetched meanwhile: the vectors are too short for the processor to    \
     * foresee. */                                                                                              \
    static inline __attribute__((always_inline)) void block_##NAME(                                             \
        const int rows, float *out, int64_t width, const float *x, int64_t features, const TYPE *pool,          \
        const int64_t *a, const int64_t *b, int64_t left, float scale) {                                        \
        const TYPE *v[FOUR], *w[FOUR], *next_v[FOUR], *next_w[FOUR];                                            \
        float f[FOUR][FOUR] = {{0}};                                                                            \
        lanes sums[FOUR][FOUR] = {{{0}}};                                                                       \
        const int ranks = left < FOUR ? left : FOUR;                                                            \
        for (int k = 0; k < FOUR; k++) {                                                                        \
            const int64_t own = k < ranks ? k : 0, next = k + FOUR < left ? k + FOUR : own;                     \
            v[k] = pool + a[own], w[k] = pool + b[own], next_v[k] = pool + a[next], next_w[k] = pool + b[next]; \
        }                                                                                                       \
        int64_t i = 0;                                                                                          \
        for (; i + LANES <= features; i += LANES) {                                                             \
            lanes values[FOUR];                                                                                 \
            for (int k = 0; k < FOUR; k++) {                                                                    \
                values[k] = load_##NAME(v[k] + i);                                                              \
                __builtin_prefetch(next_v[k] + i, 0, 2);                                                        \
            }                                                                                                   \
            for (int r = 0; r < rows; r++) {                                                                    \
                lanes given = load_f32(x + r * features + i);                                                   \
                for (int k = 0; k < FOUR; k++) sums[r][k] += given * values[k];                                 \
            }                                                                                                   \
        }                                                                                                       \
        for (int r = 0; r < rows; r++)                                                                          \
            for (int k = 0; k < ranks; k++) {                                                                   \
                float sum = sum_lanes(sums[r][k]);                                                              \
                for (int64_t j = i; j < features; j++) sum += x[r * features + j] * one_##NAME(v[k][j]);        \
                f[r][k] = scale * sum;                                                                          \
            }                                                                                                   \
        for (i = 0; i + LANES <= width; i += LANES) {                                                           \
            lanes values[FOUR];                                                                                 \
            for (int k = 0; k < FOUR; k++) {                                                                    \
                values[k] = load_##NAME(w[k] + i);                                                              \
                __builtin_prefetch(next_w[k] + i, 0, 2);                                                        \
            }                                                                                                   \
            for (int r = 0; r < rows; r++) {                                                                    \
                lanes sum = load_f32(out + r * width + i);                                                      \
                for (int k = 0; k < FOUR; k++) sum += f[r][k] * values[k];                                      \
                memcpy(out + r * width + i, &sum, sizeof sum);                                                  \
            }                                                                                                   \
        }                                                                                                       \
        for (; i < width; i++)                                                                                  \
            for (int r = 0; r < rows; r++)                                                                      \
                for (int k = 0; k < FOUR; k++) out[r * width + i] += f[r][k] * one_##NAME(w[k][i]);             \
    }                                                                                                           \
    static void tile_##NAME(TYPE *out, int64_t out_stride, const TYPE *x, int64_t x_stride, int64_t features,   \
                            const TYPE *pool, const int64_t *table, int64_t rows, int64_t rank, float scale,    \
                            const int64_t *sites, int64_t m, float *given, float *sums) {                       \
        for (int64_t r = 0; r < rows; r++)                                                                      \
            for (int64_t i = 0; i < features; i++) given[r * features + i] = one_##NAME(x[r * x_stride + i]);   \
        for (int64_t site = 0; site < m; site++) {                                                              \
            const int64_t *a = table + 2 * rank * sites[3 * site], *b = a + rank, width = sites[3 * site + 2];  \
            TYPE *own = out + sites[3 * site + 1];                                                              \
            if (a[0] < 0) continue;                                                                             \
            for (int64_t r = 0; r < rows; r++)                                                                  \
                for (int64_t i = 0; i < width; i++) sums[r * width + i] = one_##NAME(own[r * out_stride + i]);  \
            for (int64_t k = 0; k < rank; k += FOUR) {                                                          \
                int64_t r = 0;                                                                                  \
                for (; r + FOUR <= rows; r += FOUR)                                                             \
                    block_##NAME(FOUR, sums + r * width, width, given + r * features, features, pool, a + k,    \
                                 b + k, rank - k, scale);                                                       \
                for (; r < rows; r++)                                                                           \
                    block_##NAME(1, sums + r * width, width, given + r * features, features, pool, a + k,       \
                                 b + k, rank - k, scale);                                                       \
            }                                                                                                   \
            for (int64_t r = 0; r < rows; r++)                                                                  \
                for (int64_t i = 0; i < width; i++)                                                             \
                    own[r * out_stride + i] = store_##NAME(sums[r * width + i]);                                \
        }                                                                                                       \
    }                                                                                                           \
    int rows_##NAME(TYPE *out, int64_t out_stride, const TYPE *x, int64_t x_stride, int64_t features,           \
                     const TYPE *pool, const int64_t *tables, const int64_t *tiles, const float *scales,        \
                     int64_t n, const int64_t *sites, int64_t m, int threads) {                                 \
        int64_t widest = features;                                                                              \
        for (int64_t site = 0; site < m; site++)                                                                \
            if (sites[3 * site + 2] > widest) widest = sites[3 * site + 2];                                     \
        int failed = 0;                                                                                         \
        _Pragma("omp parallel num_threads(threads)") {                                                          \
            float *scratch = malloc(2 * MOST_ROWS * widest * sizeof(float));                                    \
            if (scratch == NULL) {                                                                              \
                _Pragma("omp atomic write") failed = 1;                                                         \
            }                                                                                                   \
            _Pragma("omp for schedule(static)")                                                                 \
            for (int64_t i = 0; i < n; i++)                                                                     \
                if (scratch != NULL)                                                                            \
                    tile_##NAME(out + tiles[4 * i] * out_stride, out_stride, x + tiles[4 * i] * x_stride,       \
                                x_stride, features, pool, tables + tiles[4 * i + 2], tiles[4 * i + 1],          \
                                tiles[4 * i + 3], scales[i], sites, m, scratch, scratch + MOST_ROWS * widest);  \
            free(scratch);                                                                                      \
        }                                                                                                       \
        return failed;                                                                                          \
    }

/* Write an adapter's vectors into the pool, rounded once if its type is the smaller. tensors (m, 4): twice the number
 * of the site in the table (sites, 2, rank), plus 1 for B; addresses of A (rank, in) or B (out, rank), and of the
 * layer's pages; in or out. B's columns are copied in blocks of its rows, which then lie in the cache. */
#define DEFINE_PLACE(FROM, GIVEN, TO, TYPE)                                                                     \
    void place_##FROM##_##TO(const int64_t *tensors, int64_t m, const int64_t *table, int64_t rank) {           \
        for (const int64_t *own = tensors; own < tensors + 4 * m; own += 4) {                                   \
            const int64_t *at = table + rank * own[0], size = own[3];                                           \
            const GIVEN *given = (const GIVEN *)own[1];                                                         \
            TYPE *pool = (TYPE *)own[2];                                                                        \
            if (own[0] % 2 == 0) {                                                                              \
                for (int64_t k = 0; k < rank; k++) {                                                            \
                    TYPE *restrict to = pool + at[k];                                                           \
                    for (int64_t i = 0; i < size; i++) to[i] = store_##TO(one_##FROM(given[k * size + i]));     \
                }                                                                                               \
                continue;                                                                                       \
            }                                                                                                   \
            for (int64_t first = 0; first < size; first += LANES) {                                             \
                int64_t count = size - first < LANES ? size - first : LANES;                                    \
                for (int64_t k = 0; k < rank; k++) {                                                            \
                    TYPE *restrict to = pool + at[k] + first;                                                   \
                    const GIVEN *from = given + first * rank + k;                                               \
                    for (int64_t i = 0; i < count; i++) to[i] = store_##TO(one_##FROM(from[i * rank]));         \
                }                                                                                               \
            }                                                                                                   \
        }                                                                                                       \
    }

DEFINE_PLACE(f32, float, f32, float)
DEFINE_PLACE(f32, float, bf16, uint16_t)
DEFINE_PLACE(bf16, uint16_t, f32, float)
DEFINE_PLACE(bf16, uint16_t, bf16, uint16_t)
DEFINE_ROWS(f32, float)
DEFINE_ROWS(bf16, uint16_t)
