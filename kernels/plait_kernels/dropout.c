/* Dropout by Philox4x32-7 (Salmon et al. 2011) for CPUs: the same bits as dropout.py, vectorised.
 *
 * Counter words 0 to 2 of each row come from `counters` (three int64 a row), word 3 is feature / 8. A call's
 * four words are stored one after the other, so that on a little-endian machine their 16-bit halves lie in
 * the order of the features. Compiled on first use; see compiled.py.
 */
#include <stdint.h>
#include <string.h>

enum { LANES = 32, BLOCK = 8 * LANES };

typedef struct {
    uint32_t k0, k1, c0, c1, c2;
} philox_row;

/* 32-bit words held in 64-bit lanes: the product of two is whole, and its halves are a shift away. */
typedef uint64_t lanes __attribute__((vector_size(8 * LANES)));

static inline void philox_block(philox_row row, uint32_t first, uint16_t halves[BLOCK]) {
    lanes a = {0}, b = {0}, c = {0}, d = {0};
    a += row.c0;
    b += row.c1;
    c += row.c2;
    for (int lane = 0; lane < LANES; lane++) d[lane] = first + (uint32_t)lane;
    uint32_t k0 = row.k0, k1 = row.k1;
    for (int round = 0; round < 7; round++) {
        lanes p = a * 0xD2511F53u, q = c * 0xCD9E8D57u;
        a = (q >> 32) ^ b ^ (uint64_t)k0;
        b = q & 0xFFFFFFFFu;
        c = (p >> 32) ^ d ^ (uint64_t)k1;
        d = p & 0xFFFFFFFFu;
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    a |= b << 32;
    c |= d << 32;
    uint64_t pairs[LANES][2];
    for (int lane = 0; lane < LANES; lane++) {
        pairs[lane][0] = a[lane];
        pairs[lane][1] = c[lane];
    }
    memcpy(halves, pairs, sizeof pairs);
}

static inline philox_row row_of(const int64_t *counters, int64_t row, uint32_t seed, uint32_t module) {
    const int64_t *words = counters + 3 * row;
    return (philox_row){seed, module, (uint32_t)words[0], (uint32_t)words[1], (uint32_t)words[2]};
}

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

/* keep[row, f]: 1 where the feature is kept; `first` is that of all of the layer at which these begin. */
void keep(uint8_t *out, const int64_t *counters, int64_t rows, int64_t features, int64_t first, uint32_t seed,
          uint32_t module, uint32_t threshold, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (int64_t row = 0; row < rows; row++) {
        philox_row state = row_of(counters, row, seed, module);
        uint16_t halves[BLOCK];
        for (int64_t start = 0; start < features; start += BLOCK) {
            philox_block(state, (uint32_t)((first + start) / 8), halves);
            int64_t count = features - start < BLOCK ? features - start : BLOCK;
            for (int64_t f = 0; f < count; f++) out[row * features + start + f] = halves[f] >= threshold;
        }
    }
}

/* dropped[site, row, f] = D[site, row, f] * x[row, f]; and where `total` is given, total[row, f] += sum over
 * sites of D[site, row, f] * part[site, row, f],
 * where D is 0 or scale, for `part` 0 or part_scale. `dropped` and `part` are contiguous; x and total have a row stride.
 */
#define DEFINE_DROPOUT(NAME, TYPE)                                                                             \
    static inline void drop_##NAME##_block(TYPE *restrict out, const TYPE *restrict x,                         \
                                           const uint16_t *restrict halves, int64_t count, uint32_t threshold, \
                                           float scale) {                                                      \
        for (int64_t f = 0; f < count; f++)                                                                    \
            out[f] = halves[f] >= threshold ? store_##NAME(load_##NAME(x[f]) * scale) : (TYPE)0;               \
    }                                                                                                          \
    static inline void add_##NAME##_block(float *restrict sum, const TYPE *restrict part,                      \
                                          const uint16_t *restrict halves, int64_t count, uint32_t threshold,  \
                                          float scale) {                                                       \
        for (int64_t f = 0; f < count; f++) sum[f] += halves[f] >= threshold ? load_##NAME(part[f]) * scale : 0.0f; \
    }                                                                                                          \
    void drop_##NAME(TYPE *dropped, const TYPE *x, int64_t x_stride, TYPE *total, int64_t total_stride,        \
                     const TYPE *part, const int64_t *counters, int64_t rows, int64_t features, int64_t first, \
                     int64_t sites, const uint32_t *modules, uint32_t seed, uint32_t threshold, float scale,   \
                     float part_scale, int threads) {                                                          \
        _Pragma("omp parallel for num_threads(threads) schedule(static)")                                      \
        for (int64_t row = 0; row < rows; row++) {                                                             \
            uint16_t halves[BLOCK];                                                                            \
            float sum[BLOCK];                                                                                  \
            for (int64_t start = 0; start < features; start += BLOCK) {                                        \
                int64_t count = features - start < BLOCK ? features - start : BLOCK;                           \
                if (total)                                                                                     \
                    for (int64_t f = 0; f < count; f++)                                                        \
                        sum[f] = load_##NAME(total[row * total_stride + start + f]);                           \
                for (int64_t site = 0; site < sites; site++) {                                                 \
                    int64_t offset = (site * rows + row) * features + start;                                   \
                    philox_block(row_of(counters, row, seed, modules[site]), (uint32_t)((first + start) / 8),  \
                                 halves);                                                                      \
                    drop_##NAME##_block(dropped + offset, x + row * x_stride + start, halves, count,           \
                                        threshold, scale);                                                     \
                    if (total) add_##NAME##_block(sum, part + offset, halves, count, threshold, part_scale);   \
                }                                                                                              \
                if (total)                                                                                     \
                    for (int64_t f = 0; f < count; f++)                                                        \
                        total[row * total_stride + start + f] = store_##NAME(sum[f]);                          \
            }                                                                                                  \
        }                                                                                                      \
    }

DEFINE_DROPOUT(f32, float)
DEFINE_DROPOUT(bf16, uint16_t)
