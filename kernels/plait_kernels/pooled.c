/* Rows of any adapters over one layer, whose vectors lie in a pool of pages: out[row] += scale * B (A x[row]).
 *
 * A vector is one rank's row of A or column of B, contiguous, at the offset that the adapter's table gives for
 * its site, its side and its rank. Sums are in float32 and rounded once. Compiled on first use; see compiled.py.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#ifdef __AVX512BW__ /* which gcc and clang define where the processor has it */
#include <immintrin.h>
#endif

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
/* Of four, each as sum_lanes has it. */
static inline void sum_four(float *sums, const lanes *all) {
#ifdef __AVX512BW__
    __m512 a = (__m512)all[0], b = (__m512)all[1], c = (__m512)all[2], d = (__m512)all[3];
    __m512 ab = _mm512_add_ps(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xEE));
    __m512 cd = _mm512_add_ps(_mm512_shuffle_f32x4(c, d, 0x44), _mm512_shuffle_f32x4(c, d, 0xEE));
    __m512 each = _mm512_add_ps(_mm512_shuffle_f32x4(ab, cd, 0x88), _mm512_shuffle_f32x4(ab, cd, 0xDD));
    each = _mm512_add_ps(each, _mm512_permute_ps(each, 0x4E));
    each = _mm512_add_ps(each, _mm512_permute_ps(each, 0xB1));
    for (int k = 0; k < 4; k++) sums[k] = each[4 * k];
#else
    for (int k = 0; k < 4; k++) sums[k] = sum_lanes(all[k]);
#endif
}
static inline float store_f32(float value) { return value; }
/* To the nearest, ties to even; NaN stays NaN. */
static inline uint16_t store_bf16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
    return value != value ? (uint16_t)0x7FC0 : (uint16_t)rounded;
}

/* Adds the products of STEP_… neighbouring features, by lane. */
enum { STEP_f32 = LANES, STEP_bf16 = 2 * LANES };
static inline lanes dot_f32(lanes sum, const float *a, const float *b) { return sum + load_f32(a) * load_f32(b); }
static inline lanes dot_bf16(lanes sum, const uint16_t *a, const uint16_t *b) {
#ifdef __AVX512BF16__
    __m512bh given, values;
    memcpy(&given, a, sizeof given);
    memcpy(&values, b, sizeof values);
    return (lanes)_mm512_dpbf16_ps((__m512)sum, given, values);
#else
    sum += load_bf16(a) * load_bf16(b);
    return sum + load_bf16(a + LANES) * load_bf16(b + LANES);
#endif
}

enum { MOST_ROWS = 8, FOUR = 4 };
/* An adapter's ranks from `first` on. Its table is (sites, 2, rank); a negative offset: the adapter is not there.
 * `fetch`: they come next, and no row before has read them. */
struct ranks {
    const int64_t *table;
    int64_t rank, first;
    int fetch;
};
/* 0, after two products of the 0 before: a fetch at an address that this is added to goes out no sooner, and loads of
 * what is needed now can go before it. That takes some 15 % of the time off rows whose adapters come from memory. */
static inline int64_t paced(int64_t nought) {
    for (int n = 0; n < 2; n++) {
        nought *= nought;
        __asm__("" : "+r"(nought)); /* so that the compiler does not know it */
    }
    return nought;
}
static inline int there(struct ranks of, int64_t site) { return of.table[2 * of.rank * site] >= 0; }

/* tiles (n, 4): first row of x and out, rows (at most MOST_ROWS), offset of their adapter's table, rank. sites (m, 3):
 * index in the tables, first column, columns. A row's sums have one order, however many rows its tile has. */
#define DEFINE_ROWS(NAME, TYPE)                                                                                 \
    /* The vectors of up to FOUR ranks; the missing ones are the first. `side`: twice the site, plus 1 for B. */\
    static inline void vectors_##NAME(const TYPE *found[], const TYPE *pool, struct ranks of, int64_t side) {   \
        const int64_t *at = of.table + of.rank * side + of.first;                                               \
        for (int k = 0; k < FOUR; k++) {                                                                        \
            const int64_t offset = at[of.first + k < of.rank ? k : 0];                                          \
            found[k] = pool + (offset < 0 ? 0 : offset);                                                        \
        }                                                                                                       \
    }                                                                                                           \
    /* f (rows, FOUR) = scale * A x. What comes next is fetched meanwhile: the vectors are too short for the    \
     * processor to foresee. */                                                                                 \
    static inline __attribute__((always_inline)) void down_##NAME(                                              \
        const int rows, float *f, const TYPE *x, int64_t x_stride, int64_t features, const TYPE *pool,          \
        struct ranks now, struct ranks next, int64_t site, float scale) {                                       \
        const TYPE *v[FOUR], *soon[FOUR];                                                                       \
        lanes sums[FOUR][FOUR] = {{{0}}};                                                                       \
        vectors_##NAME(v, pool, now, 2 * site);                                                                 \
        vectors_##NAME(soon, pool, next, 2 * site);                                                             \
        int64_t i = 0, pace = 0;                                                                                \
        for (; i + STEP_##NAME <= features; i += STEP_##NAME) {                                                 \
            if (next.fetch)                                                                                     \
                for (int k = 0; k < FOUR; k++) {                                                                \
                    pace = paced(pace);                                                                         \
                    __builtin_prefetch(soon[k] + i + pace, 0, 2);                                               \
                }                                                                                               \
            for (int r = 0; r < rows; r++)                                                                      \
                for (int k = 0; k < FOUR; k++)                                                                  \
                    sums[r][k] = dot_##NAME(sums[r][k], x + r * x_stride + i, v[k] + i);                        \
        }                                                                                                       \
        for (int r = 0; r < rows; r++) {                                                                        \
            float own[FOUR];                                                                                    \
            sum_four(own, sums[r]);                                                                             \
            for (int k = 0; k < FOUR; k++) {                                                                    \
                for (int64_t j = i; j < features; j++)                                                          \
                    own[k] += one_##NAME(x[r * x_stride + j]) * one_##NAME(v[k][j]);                            \
                f[FOUR * r + k] = k < now.rank - now.first ? scale * own[k] : 0.0f;                             \
            }                                                                                                   \
        }                                                                                                       \
    }                                                                                                           \
    /* out (rows, stride) += B f. */                                                                            \
    static inline __attribute__((always_inline)) void up_##NAME(                                                \
        const int rows, float *out, int64_t stride, int64_t width, const float *f, const TYPE *pool,            \
        struct ranks now, struct ranks next, int64_t site) {                                                    \
        const TYPE *w[FOUR], *soon[FOUR];                                                                       \
        vectors_##NAME(w, pool, now, 2 * site + 1);                                                             \
        vectors_##NAME(soon, pool, next, 2 * site + 1);                                                         \
        int64_t i = 0;                                                                                          \
        for (; i + LANES <= width; i += LANES) {                                                                \
            lanes values[FOUR];                                                                                 \
            for (int k = 0; k < FOUR; k++) {                                                                    \
                values[k] = load_##NAME(w[k] + i);                                                              \
                if (next.fetch && i % STEP_##NAME == 0) __builtin_prefetch(soon[k] + i, 0, 2);                  \
            }                                                                                                   \
            for (int r = 0; r < rows; r++) {                                                                    \
                lanes sum = load_f32(out + r * stride + i);                                                     \
                for (int k = 0; k < FOUR; k++) sum += f[FOUR * r + k] * values[k];                              \
                memcpy(out + r * stride + i, &sum, sizeof sum);                                                 \
            }                                                                                                   \
        }                                                                                                       \
        for (; i < width; i++)                                                                                  \
            for (int r = 0; r < rows; r++)                                                                      \
                for (int k = 0; k < FOUR; k++) out[r * stride + i] += f[FOUR * r + k] * one_##NAME(w[k][i]);    \
    }                                                                                                           \
    /* FOUR ranks at all sites of `rows` rows: first what is read of A, then of B, as they lie in a page. */    \
    static inline __attribute__((always_inline)) void block_##NAME(                                             \
        const int rows, float *sums, int64_t width, const TYPE *x, int64_t x_stride, int64_t features,          \
        const TYPE *pool, struct ranks now, struct ranks next, float scale, const int64_t *sites, int64_t m,    \
        float *f) {                                                                                             \
        for (int64_t s = 0; s < m; s++)                                                                         \
            if (there(now, sites[3 * s]))                                                                       \
                down_##NAME(rows, f + FOUR * FOUR * s, x, x_stride, features, pool, now, next, sites[3 * s],    \
                            scale);                                                                             \
        for (int64_t s = 0; s < m; s++)                                                                         \
            if (there(now, sites[3 * s]))                                                                       \
                up_##NAME(rows, sums + sites[3 * s + 1], width, sites[3 * s + 2], f + FOUR * FOUR * s, pool,    \
                          now, next, sites[3 * s]);                                                             \
    }                                                                                                           \
    static void tile_##NAME(TYPE *out, int64_t out_stride, const TYPE *x, int64_t x_stride, int64_t features,   \
                            const TYPE *pool, struct ranks now, struct ranks then, int read, int64_t rows,      \
                            float scale, const int64_t *sites, int64_t m, float *sums, int64_t width,           \
                            float *f) {                                                                         \
        for (const int64_t *s = sites; s < sites + 3 * m; s += 3)                                               \
            for (int64_t r = 0; r < rows; r++)                                                                  \
                for (int64_t i = s[1]; i < s[1] + s[2]; i++)                                                    \
                    sums[r * width + i] = one_##NAME(out[r * out_stride + i]);                                  \
        for (; now.first < now.rank; now.first += FOUR) {                                                       \
            struct ranks next = {now.table, now.rank, now.first + FOUR, !read};                                 \
            if (next.first >= next.rank) next = then;                                                           \
            int64_t r = 0;                                                                                      \
            for (; r + FOUR <= rows; r += FOUR, next.fetch = 0)                                                 \
                block_##NAME(FOUR, sums + r * width, width, x + r * x_stride, x_stride, features, pool, now,    \
                             next, scale, sites, m, f);                                                         \
            for (; r < rows; r++, next.fetch = 0)                                                               \
                block_##NAME(1, sums + r * width, width, x + r * x_stride, x_stride, features, pool, now, next, \
                             scale, sites, m, f);                                                               \
        }                                                                                                       \
        for (const int64_t *s = sites; s < sites + 3 * m; s += 3)                                               \
            for (int64_t r = 0; there(now, s[0]) && r < rows; r++)                                              \
                for (int64_t i = s[1]; i < s[1] + s[2]; i++)                                                    \
                    out[r * out_stride + i] = store_##NAME(sums[r * width + i]);                                \
    }                                                                                                           \
    int rows_##NAME(TYPE *out, int64_t out_stride, const TYPE *x, int64_t x_stride, int64_t features,           \
                     const TYPE *pool, const int64_t *tables, const int64_t *tiles, const float *scales,        \
                     int64_t n, const int64_t *sites, int64_t m, int threads) {                                 \
        int64_t width = 0;                                                                                      \
        for (const int64_t *s = sites; s < sites + 3 * m; s += 3)                                               \
            if (s[1] + s[2] > width) width = s[1] + s[2];                                                       \
        int failed = 0;                                                                                         \
        _Pragma("omp parallel num_threads(threads)") {                                                          \
            float *scratch = malloc((MOST_ROWS * width + FOUR * FOUR * m) * sizeof(float));                     \
            if (scratch == NULL) {                                                                              \
                _Pragma("omp atomic write") failed = 1;                                                         \
            }                                                                                                   \
            _Pragma("omp for schedule(static)")                                                                 \
            for (int64_t i = 0; i < n; i++) {                                                                   \
                const int64_t *own = tiles + 4 * i, *after = i + 1 < n ? own + 4 : own;                         \
                struct ranks now = {tables + own[2], own[3], 0, 0};                                             \
                struct ranks then = {tables + after[2], after[3], 0, after[2] != own[2]};                       \
                const int read = i > 0 && own[-2] == own[2]; /* by the tile before */                           \
                if (scratch != NULL)                                                                            \
                    tile_##NAME(out + own[0] * out_stride, out_stride, x + own[0] * x_stride, x_stride,         \
                                features, pool, now, then, read, own[1], scales[i], sites, m, scratch, width,   \
                                scratch + MOST_ROWS * width);                                                   \
            }                                                                                                   \
            free(scratch);                                                                                      \
        }                                                                                                       \
        return failed;                                                                                          \
    }

/* Write an adapter's vectors into the pool, rounded once if its type is the smaller. tensors (m, 4): twice the number
 * of the site in the table (sites, 2, rank), plus 1 for B; addresses of A (rank, in) or B (out, rank), to which shift
 * is added, and of the layer's pages; in or out. B's columns are copied in blocks of its rows, which then lie in the
 * cache.
 *
 * What is written in bfloat16 goes past the caches by whole lines: else each line of a page would be read before it is
 * overwritten. copied_ and turned_ do this for the first elements of a row of A, or of B's columns, and return how many
 * they are; the rest is left to place_. */
#ifdef __AVX512BW__
enum { SIDE = 16, LINE = 2 * SIDE };
/* SIDE elements, or some of them, as store_bf16 rounds, each in the upper half of a word. */
static inline __m512i upper(__m512 values) {
    __m512i bits = (__m512i)values, odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
    __mmask16 nan = _mm512_cmp_ps_mask(values, values, _CMP_UNORD_Q);
    return _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7FC00000));
}
static inline __m512i upper_f32(const float *at, __mmask16 some) { return upper(_mm512_maskz_loadu_ps(some, at)); }
static inline __m512i upper_bf16(const uint16_t *at, __mmask16 some) {
    __m256i read = _mm512_castsi512_si256(_mm512_maskz_loadu_epi16(some, at));
    return upper((__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(read), 16));
}
/* The upper halves of both, the first one's in the lower halves of the words. */
static inline __m512i paired(__m512i first, __m512i second) {
    return _mm512_mask_blend_epi16(0xAAAAAAAAu, _mm512_srli_epi32(first, 16), second);
}
static inline void put(uint16_t *at, __m512i line) {
    if ((uintptr_t)at % sizeof line == 0)
        _mm512_stream_si512((void *)at, line);
    else
        _mm512_storeu_si512(at, line);
}
/* Rows and columns of SIDE by SIDE words change places. */
static inline void turn(__m512i *rows) {
    __m512i half[SIDE];
    for (int i = 0; i < SIDE; i += 2) {
        half[i] = _mm512_unpacklo_epi32(rows[i], rows[i + 1]);
        half[i + 1] = _mm512_unpackhi_epi32(rows[i], rows[i + 1]);
    }
    for (int i = 0; i < SIDE; i += 4)
        for (int j = 0; j < 2; j++) {
            rows[i + 2 * j] = _mm512_unpacklo_epi64(half[i + j], half[i + j + 2]);
            rows[i + 2 * j + 1] = _mm512_unpackhi_epi64(half[i + j], half[i + j + 2]);
        }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 2; j++) {
            half[i + 8 * j] = _mm512_shuffle_i32x4(rows[i + 8 * j], rows[i + 8 * j + 4], 0x88);
            half[i + 8 * j + 4] = _mm512_shuffle_i32x4(rows[i + 8 * j], rows[i + 8 * j + 4], 0xDD);
        }
    for (int i = 0; i < 8; i++) {
        rows[i] = _mm512_shuffle_i32x4(half[i], half[i + 8], 0x88);
        rows[i + 8] = _mm512_shuffle_i32x4(half[i], half[i + 8], 0xDD);
    }
}
static inline void written(void) { _mm_sfence(); } /* before another thread is told */
#define DEFINE_LINES(FROM, GIVEN)                                                                               \
    static inline int64_t copied_##FROM##_bf16(uint16_t *to, const GIVEN *from, int64_t size) {                 \
        int64_t i = 0;                                                                                          \
        for (; i + LINE <= size; i += LINE) {                                                                   \
            const __m256i low = _mm512_cvtepi32_epi16(_mm512_srli_epi32(upper_##FROM(from + i, 0xFFFF), 16));   \
            const __m256i high = _mm512_cvtepi32_epi16(_mm512_srli_epi32(upper_##FROM(from + i + SIDE, 0xFFFF), 16));\
            put(to + i, _mm512_inserti64x4(_mm512_castsi256_si512(low), high, 1));                              \
        }                                                                                                       \
        return i;                                                                                               \
    }                                                                                                           \
    static inline int64_t turned_##FROM##_bf16(uint16_t *pool, const int64_t *at, const GIVEN *from, int64_t size,\
                                               int64_t rank) {                                                  \
        int64_t first = 0;                                                                                      \
        for (; first + LINE <= size; first += LINE)                                                             \
            for (int64_t k = 0; k < rank; k += SIDE) {                                                          \
                const int count = rank - k < SIDE ? (int)(rank - k) : SIDE;                                     \
                const __mmask16 some = (__mmask16)((1u << count) - 1);                                          \
                __m512i lines[SIDE];                                                                            \
                for (int i = 0; i < SIDE; i++) {                                                                \
                    const GIVEN *row = from + (first + 2 * i) * rank + k;                                       \
                    lines[i] = paired(upper_##FROM(row, some), upper_##FROM(row + rank, some));                 \
                }                                                                                               \
                turn(lines);                                                                                    \
                for (int i = 0; i < count; i++) put(pool + at[k + i] + first, lines[i]);                        \
            }                                                                                                   \
        return first;                                                                                           \
    }
DEFINE_LINES(f32, float)
DEFINE_LINES(bf16, uint16_t)
#else
#define copied_f32_bf16(to, from, size) 0
#define copied_bf16_bf16(to, from, size) 0
#define turned_f32_bf16(pool, at, from, size, rank) 0
#define turned_bf16_bf16(pool, at, from, size, rank) 0
static inline void written(void) {}
#endif
#define copied_f32_f32(to, from, size) 0
#define copied_bf16_f32(to, from, size) 0
#define turned_f32_f32(pool, at, from, size, rank) 0
#define turned_bf16_f32(pool, at, from, size, rank) 0

#define DEFINE_PLACE(FROM, GIVEN, TO, TYPE)                                                                     \
    void place_##FROM##_##TO(const int64_t *tensors, int64_t m, int64_t shift, const int64_t *table,            \
                             int64_t rank) {                                                                    \
        for (const int64_t *own = tensors; own < tensors + 4 * m; own += 4) {                                   \
            const int64_t *at = table + rank * own[0], size = own[3];                                           \
            const GIVEN *given = (const GIVEN *)(own[1] + shift);                                               \
            TYPE *pool = (TYPE *)own[2];                                                                        \
            if (own[0] % 2 == 0) {                                                                              \
                for (int64_t k = 0; k < rank; k++) {                                                            \
                    TYPE *restrict to = pool + at[k];                                                           \
                    const GIVEN *from = given + k * size;                                                       \
                    for (int64_t i = copied_##FROM##_##TO(to, from, size); i < size; i++)                       \
                        to[i] = store_##TO(one_##FROM(from[i]));                                                \
                }                                                                                               \
                continue;                                                                                       \
            }                                                                                                   \
            for (int64_t first = turned_##FROM##_##TO(pool, at, given, size, rank); first < size; first += LANES) {\
                int64_t count = size - first < LANES ? size - first : LANES;                                    \
                for (int64_t k = 0; k < rank; k++) {                                                            \
                    TYPE *restrict to = pool + at[k] + first;                                                   \
                    const GIVEN *from = given + first * rank + k;                                               \
                    for (int64_t i = 0; i < count; i++) to[i] = store_##TO(one_##FROM(from[i * rank]));         \
                }                                                                                               \
            }                                                                                                   \
        }                                                                                                       \
        written();                                                                                              \
    }

DEFINE_PLACE(f32, float, f32, float)
DEFINE_PLACE(f32, float, bf16, uint16_t)
DEFINE_PLACE(bf16, uint16_t, f32, float)
DEFINE_PLACE(bf16, uint16_t, bf16, uint16_t)
DEFINE_ROWS(f32, float)
DEFINE_ROWS(bf16, uint16_t)
