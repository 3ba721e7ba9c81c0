/* What the compiled functions of models have in common: vectors, products, e^x, norms.
 *
 * Vectors are those of GCC and Clang, of any width that the processor has. A matrix lies in panels of COLUMNS columns,
 * [panels, depth, COLUMNS], the last one padded.
 */

#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#ifdef __AVX512F__
#define WIDTH 16
#else
#define WIDTH 8
#endif
#define COLUMNS (2 * WIDTH) /* of a panel: they are computed together */
#define ROWS 6              /* computed together: 12 sums, which with two of the weights fit into 16 registers */
#define BLOCK 96            /* tokens that pass through a layer together */
#define INLINE static inline __attribute__((always_inline))

typedef float vec __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef float vec8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef uint32_t bits __attribute__((vector_size(4 * WIDTH), aligned(4), may_alias));
typedef int32_t int8v __attribute__((vector_size(32), aligned(4), may_alias));

int64_t panel_columns(void) { return COLUMNS; }

static inline int64_t padded(int64_t outputs) { return (outputs + COLUMNS - 1) / COLUMNS * COLUMNS; }

/* Row k of a panel. half: it is bfloat16, in pairs of a column of the left half and the same one of the right. */
INLINE void weights_of(const int half, const char *w, int64_t k, vec *left, vec *right) {
    w += k * COLUMNS * (half ? 2 : 4);
    __builtin_prefetch(w + 24 * COLUMNS * 4);
    if (half) {
        const bits both = *(const bits *)w;
        *left = (vec)(both << 16);
        *right = (vec)(both & 0xffff0000u);
    } else {
        *left = *(const vec *)w;
        *right = *(const vec *)(w + WIDTH * 4);
    }
}

/* y [n, outputs] (+)= x [n, depth] times a panel, for `n` and `half` known when this is compiled. x_row, x_depth: floats
 * from a row of x to the next, and from one of its columns to the next. */
INLINE void tile(const int n, const int half, const float *restrict x, int64_t x_row, int64_t x_depth,
                 const void *restrict w, int64_t depth, const float *bias, float *restrict y, int64_t y_stride,
                 int64_t outputs, int add) {
    vec a[ROWS][2];
    for (int r = 0; r < n; r++)
        for (int j = 0; j < 2; j++) a[r][j] = bias ? *(const vec *)(bias + j * WIDTH) : (vec){0};
    for (int64_t k = 0; k < depth; k++) {
        vec left, right;
        weights_of(half, w, k, &left, &right);
#pragma GCC unroll 6
        for (int r = 0; r < n; r++) {
            a[r][0] += x[r * x_row + k * x_depth] * left;
            a[r][1] += x[r * x_row + k * x_depth] * right;
        }
    }
    if (outputs >= COLUMNS) {
        for (int r = 0; r < n; r++)
            for (int j = 0; j < 2; j++) {
                vec *to = (vec *)(y + r * y_stride + j * WIDTH);
                if (add) a[r][j] += *to;
                *to = a[r][j];
            }
        return;
    }
    for (int r = 0; r < n; r++)
        for (int64_t j = 0; j < outputs; j++) {
            float *to = y + r * y_stride + j, sum = ((const float *)a[r])[j];
            *to = add ? *to + sum : sum;
        }
}

#define TILES(half, n, x, x_row, x_depth, w, depth, bias, y, y_stride, outputs, add)                                   \
    do {                                                                                                               \
        int64_t r = 0;                                                                                                 \
        for (; r + ROWS <= (n); r += ROWS)                                                                             \
            tile(ROWS, half, (x) + r * (x_row), x_row, x_depth, w, depth, bias, (y) + r * (y_stride), y_stride,        \
                 outputs, add);                                                                                        \
        const float *last = (x) + r * (x_row);                                                                         \
        float *to = (y) + r * (y_stride);                                                                              \
        switch ((n) - r) {                                                                                             \
        case 1: tile(1, half, last, x_row, x_depth, w, depth, bias, to, y_stride, outputs, add); break;                \
        case 2: tile(2, half, last, x_row, x_depth, w, depth, bias, to, y_stride, outputs, add); break;                \
        case 3: tile(3, half, last, x_row, x_depth, w, depth, bias, to, y_stride, outputs, add); break;                \
        case 4: tile(4, half, last, x_row, x_depth, w, depth, bias, to, y_stride, outputs, add); break;                \
        case 5: tile(5, half, last, x_row, x_depth, w, depth, bias, to, y_stride, outputs, add); break;                \
        }                                                                                                              \
    } while (0)

/* y [n, outputs] (+)= x [n, depth] times the matrix of the panels w, plus bias, which is padded to whole panels. */
static inline void product(int64_t n, const float *x, int64_t x_stride, const float *w, int64_t depth,
                           const float *bias, float *y, int64_t y_stride, int64_t outputs, int add) {
    for (int64_t c = 0; c < outputs; c += COLUMNS, w += depth * COLUMNS) {
        const float *b = bias ? bias + c : NULL;
        TILES(0, n, x, x_stride, 1, w, depth, b, y + c, y_stride, outputs - c, add);
    }
}

INLINE vec8 choose(int8v which, vec8 a, vec8 b) { return (vec8)((which & (int8v)a) | (~which & (int8v)b)); }

/* e^x to 2 units in the last place (the polynomial of Cephes), for x up to 88; below -87 it is 0. */
INLINE vec8 exponential(vec8 x) {
    const vec8 low = (vec8){0} - 87.0f, high = (vec8){0} + 88.0f;
    const int8v nothing = x < low;
    x = choose(nothing, low, x);
    x = choose(x > high, high, x);
    const vec8 n = (x * 1.44269504f + 12582912.0f) - 12582912.0f; /* rounded */
    const vec8 r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    vec8 p = r * 1.9875691500e-4f + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = (p * (r * r) + r + 1.0f) * (vec8)((__builtin_convertvector(n, int8v) + 127) << 23);
    return choose(nothing, (vec8){0}, p);
}

INLINE float dot(const float *a, const float *b, int64_t n) {
    vec8 products = {0};
    float sum = 0;
    int64_t d = 0;
    for (; d + 8 <= n; d += 8) products += *(const vec8 *)(a + d) * *(const vec8 *)(b + d);
    for (int j = 0; j < 8; j++) sum += products[j];
    for (; d < n; d++) sum += a[d] * b[d];
    return sum;
}

/* to [size] = x [size] divided by its root mean square; return what it was multiplied by. */
INLINE float normalize(const float *x, int64_t size, float eps, float *to) {
    const float scale = 1 / sqrtf(dot(x, x, size) / size + eps);
    for (int64_t d = 0; d < size; d++) to[d] = x[d] * scale;
    return scale;
}

/* Turn `keys` scores into e^(score - largest), zeros up to `room`, a multiple of eight; return their sum. */
INLINE float exponentials(float *score, int64_t keys, int64_t room, float *largest) {
    for (int64_t t = keys; t < room; t++) score[t] = -INFINITY;
    vec8 high = *(vec8 *)score, total = {0};
    for (int64_t t = 8; t < room; t += 8) high = choose(*(vec8 *)(score + t) > high, *(vec8 *)(score + t), high);
    float most = high[0], sum = 0;
    for (int j = 1; j < 8; j++) most = high[j] > most ? high[j] : most;
    for (int64_t t = 0; t < room; t += 8) {
        const vec8 e = exponential(*(vec8 *)(score + t) - most);
        *(vec8 *)(score + t) = e;
        total += e;
    }
    for (int j = 0; j < 8; j++) sum += total[j];
    *largest = most;
    return sum;
}
