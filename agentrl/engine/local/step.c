/* One step of decoding a small float32 model: what `block.hidden` computes, in one call without an operation in between.
 *
 * Tokens are computed in blocks of BLOCK, each through all layers, so that what a layer leaves for the next one stays in
 * the processor's cache. A token attends to what its slot holds up to its own position: tokens of one slot stand in
 * order.
 */

#include "vectors.h"

#define TOGETHER 16 /* tokens that may read the keys of one slot together, */
#define QUERIES 16  /* and queries that do */
#define TILE_KEYS 32
#define PIECE 512 /* tokens whose probabilities are summed before one of them is looked for */
#define AHEAD 16 /* keys and values that are fetched before they are needed */
#define LINE 16  /* floats of a line of the processor's cache */

#ifdef __clang__
#define SHUFFLE(a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, ...) __builtin_shuffle(a, b, (int8v){__VA_ARGS__})
#endif

typedef struct {
    int64_t layers, hidden, heads, kv_heads, size, inner, vocabulary;
    float eps;
    const float *embed;              /* [vocabulary, hidden] */
    const float *head;               /* as all matrices: panels of COLUMNS outputs, [panels, inputs, COLUMNS] */
    const float **qkv, **out, **gate, **up, **down;
    const float **qk_gain;           /* each [heads + kv_heads, size]; or NULL */
    const float **qkv_bias, **out_bias, **gate_bias, **up_bias, **down_bias; /* each padded to whole panels, or NULL */
} Model;

typedef struct {
    int64_t count;
    const int64_t *ids, *slots;
    const int64_t *positions;        /* in its slot, which is also how many keys it attends to beside its own */
    const int64_t *groups;           /* slots of the same one hold the same first `shared` keys; -1: none */
    const int64_t *shared;
    const int64_t *rows;             /* of the logits; -1: none */
    const float *cosines, *sines;    /* [positions, size / 2] */
    float *const *keys, *const *values; /* by layer, [slots, kv_heads, stride, size] */
    int64_t stride;
    float *logits;                   /* [rows, vocabulary] */
} Tokens;

/* The sums of eight vectors. */
INLINE vec8 sums(const vec8 *a) {
    vec8 b[4], c[2];
    for (int i = 0; i < 4; i++)
        b[i] = SHUFFLE(a[2 * i], a[2 * i + 1], 0, 8, 2, 10, 4, 12, 6, 14) +
               SHUFFLE(a[2 * i], a[2 * i + 1], 1, 9, 3, 11, 5, 13, 7, 15);
    for (int i = 0; i < 2; i++)
        c[i] = SHUFFLE(b[2 * i], b[2 * i + 1], 0, 1, 8, 9, 4, 5, 12, 13) +
               SHUFFLE(b[2 * i], b[2 * i + 1], 2, 3, 10, 11, 6, 7, 14, 15);
    return SHUFFLE(c[0], c[1], 0, 1, 2, 3, 8, 9, 10, 11) + SHUFFLE(c[0], c[1], 4, 5, 6, 7, 12, 13, 14, 15);
}

/* The scores of `count` queries with `keys` keys of a slot, which are read once. `score` has room for whole fours. */
static void scores(int64_t count, const float *const *query, const float *k, int64_t keys, int64_t size,
                   float *const *score) {
    for (int64_t t = 0; t < keys; t += 4) {
        const float *own[4];
        for (int j = 0; j < 4; j++) own[j] = k + (t + j < keys ? t + j : keys - 1) * size;
        for (int64_t d = 0; d < 4 * size; d += LINE) __builtin_prefetch(k + (t + AHEAD) * size + d);
        for (int64_t i = 0; i < count; i += 2) {
            const int64_t next = i + 1 < count ? i + 1 : i; /* an odd last one is computed twice */
            vec8 a[8] = {{0}};
            for (int64_t d = 0; d < size; d += 8) {
                const vec8 x = *(const vec8 *)(query[i] + d), y = *(const vec8 *)(query[next] + d);
#pragma GCC unroll 4
                for (int j = 0; j < 4; j++) {
                    const vec8 z = *(const vec8 *)(own[j] + d);
                    a[j] += x * z;
                    a[4 + j] += y * z;
                }
            }
            const vec8 s = sums(a);
            memcpy(score[i] + t, &s, 16);
            memcpy(score[next] + t, (const float *)&s + 4, 16);
        }
    }
}

/* Add to each of `count` averages, [size], those of a slot's values with the weights of that query. */
static void averages(int64_t count, float *const *weight, const float *v, int64_t keys, int64_t size, float *const *to) {
    for (int64_t start = 0; start < keys; start += TILE_KEYS) {
        const int64_t end = start + TILE_KEYS < keys ? start + TILE_KEYS : keys;
        for (int64_t i = 0; i < count; i += 2) {
            const int64_t next = i + 1 < count ? i + 1 : i;
            const float *p = weight[i], *q = weight[next];
            int64_t d = 0;
            for (; d + 32 <= size; d += 32) {
                vec8 a[4], b[4];
                for (int j = 0; j < 4; j++) {
                    a[j] = *(vec8 *)(to[i] + d + 8 * j);
                    b[j] = *(vec8 *)(to[next] + d + 8 * j);
                }
                for (int64_t t = start; t < end; t++) {
                    const float x = p[t], y = q[t];
                    if (i == 0)
                        for (int j = 0; j < 32; j += LINE) __builtin_prefetch(v + (t + AHEAD) * size + d + j);
#pragma GCC unroll 4
                    for (int j = 0; j < 4; j++) {
                        const vec8 z = *(const vec8 *)(v + t * size + d + 8 * j);
                        a[j] += x * z;
                        b[j] += y * z;
                    }
                }
                for (int j = 0; j < 4; j++) {
                    *(vec8 *)(to[i] + d + 8 * j) = a[j];
                    *(vec8 *)(to[next] + d + 8 * j) = b[j];
                }
            }
            for (; d < size; d += 8) {
                vec8 a = *(vec8 *)(to[i] + d), b = *(vec8 *)(to[next] + d);
                for (int64_t t = start; t < end; t++) {
                    const vec8 z = *(const vec8 *)(v + t * size + d);
                    a += p[t] * z;
                    b += q[t] * z;
                }
                *(vec8 *)(to[i] + d) = a;
                *(vec8 *)(to[next] + d) = b;
            }
        }
    }
}

/* Tokens of a block that attend to the same first keys; those of one slot are next to each other. */
typedef struct {
    int64_t count, shared;
    int64_t tokens[TOGETHER]; /* in the block */
} Batch;

/* Which tokens of a block attend together: those of one slot, in order, and those whose slots begin alike. */
static int64_t batches_of(const Tokens *t, int64_t start, int64_t n, Batch *batches) {
    int64_t count = 0;
    char taken[BLOCK] = {0};
    for (int64_t i = 0; i < n; i++) {
        if (taken[i]) continue;
        const int64_t group = t->groups[start + i], slot = t->slots[start + i];
        Batch *b = batches + count++;
        *b = (Batch){.count = 1, .shared = t->positions[start + i] + 1, .tokens = {i}};
        for (int64_t j = i + 1; j < n && b->count < TOGETHER; j++) {
            const int same_slot = t->slots[start + j] == slot;
            if (!same_slot && group < 0) break;
            if (taken[j] || (!same_slot && t->groups[start + j] != group)) continue;
            if (!same_slot) b->shared = t->shared[start + j];
            b->tokens[b->count++] = j;
            taken[j] = 1;
        }
    }
    return count;
}

/* The attention of a batch, from the queries in y to o. score: QUERIES rows. */
static void attend(const Model *m, const Tokens *t, int64_t layer, int64_t start, const Batch *b, const float *y,
                   int64_t y_stride, float *o, int64_t o_stride, float *score, int64_t score_stride) {
    const int64_t size = m->size, each = m->heads / m->kv_heads, slot = t->slots[start + b->tokens[0]];
    const int64_t slot_stride = m->kv_heads * t->stride * size;
    for (int64_t head = 0; head < m->kv_heads; head++) {
        const float *k = t->keys[layer] + head * t->stride * size, *v = t->values[layer] + head * t->stride * size;
        for (int64_t first = 0; first < b->count * each; first += QUERIES) {
            const int64_t count = b->count * each - first < QUERIES ? b->count * each - first : QUERIES;
            const float *query[QUERIES], *own_k[QUERIES], *own_v[QUERIES];
            float *to[QUERIES], *row[QUERIES], *beyond[QUERIES], scale[QUERIES], largest;
            int64_t keys[QUERIES], most = 0;
            for (int64_t i = 0; i < count; i++) {
                const int64_t token = b->tokens[(first + i) / each], h = head * each + (first + i) % each;
                const int64_t place = t->slots[start + token] * slot_stride + b->shared * size;
                query[i] = y + token * y_stride + h * size;
                to[i] = o + token * o_stride + h * size;
                row[i] = score + i * score_stride;
                beyond[i] = row[i] + b->shared;
                own_k[i] = k + place;
                own_v[i] = v + place;
                keys[i] = t->positions[start + token] + 1;
                most = keys[i] > most ? keys[i] : most;
            }
            scores(count, query, k + slot * slot_stride, b->shared, size, row);
            for (int64_t i = 0, next; i < count; i = next) {
                for (next = i + 1; next < count && own_k[next] == own_k[i];) next++;
                if (keys[next - 1] > b->shared)
                    scores(next - i, query + i, own_k[i], keys[next - 1] - b->shared, size, beyond + i);
            }
            for (int64_t i = 0; i < count; i++) {
                scale[i] = 1 / exponentials(row[i], keys[i], (most + 7) / 8 * 8, &largest);
                memset(to[i], 0, size * sizeof(float));
            }
            averages(count, row, v + slot * slot_stride, b->shared, size, to);
            for (int64_t i = 0, next; i < count; i = next) {
                for (next = i + 1; next < count && own_v[next] == own_v[i];) next++;
                if (keys[next - 1] > b->shared)
                    averages(next - i, beyond + i, own_v[i], keys[next - 1] - b->shared, size, to + i);
            }
            for (int64_t i = 0; i < count; i++)
                for (int64_t d = 0; d < size; d++) to[i][d] *= scale[i];
        }
    }
}

/* Normalize and rotate the queries and the keys of a token, y [heads + 2 kv_heads, size], and store its keys and values. */
static void place(const Model *m, const Tokens *t, int64_t layer, int64_t token, float *restrict y) {
    const int64_t size = m->size, half = size / 2, both = m->heads + m->kv_heads;
    const float *restrict c = t->cosines + t->positions[token] * half, *restrict s = t->sines + t->positions[token] * half;
    for (int64_t h = 0; h < both; h++) {
        float *restrict x = y + h * size;
        if (m->qk_gain) {
            const float *restrict gain = m->qk_gain[layer] + h * size;
            normalize(x, size, m->eps, x);
            for (int64_t d = 0; d < size; d++) x[d] *= gain[d];
        }
        for (int64_t d = 0; d < half; d++) {
            const float a = x[d], b = x[d + half];
            x[d] = a * c[d] - b * s[d];
            x[d + half] = b * c[d] + a * s[d];
        }
    }
    for (int64_t h = 0; h < m->kv_heads; h++) {
        const int64_t to = ((t->slots[token] * m->kv_heads + h) * t->stride + t->positions[token]) * size;
        memcpy(t->keys[layer] + to, y + (m->heads + h) * size, size * sizeof(float));
        memcpy(t->values[layer] + to, y + (both + h) * size, size * sizeof(float));
    }
}

/* Compute the step; return 0, or 1 where there is no memory for it. */
int step(const Model *m, const Tokens *t) {
    const int64_t hidden = m->hidden, size = m->size, wide = padded((m->heads + 2 * m->kv_heads) * size);
    const int64_t attended = m->heads * size, inner = padded(m->inner);
    int64_t longest = 0;
    for (int64_t i = 0; i < t->count; i++) longest = t->positions[i] > longest ? t->positions[i] : longest;
    const int64_t score_stride = longest + 16;
    const int64_t floats = BLOCK * (2 * hidden + wide + attended + 2 * inner) + QUERIES * score_stride;
    float *memory = malloc(floats * sizeof(float));
    if (!memory) return 1;
    float *x = memory, *unit = x + BLOCK * hidden, *y = unit + BLOCK * hidden, *o = y + BLOCK * wide;
    float *gate = o + BLOCK * attended, *up = gate + BLOCK * inner, *score = up + BLOCK * inner;

    for (int64_t start = 0; start < t->count; start += BLOCK) {
        const int64_t n = t->count - start < BLOCK ? t->count - start : BLOCK;
        Batch together[BLOCK];
        const int64_t batches = batches_of(t, start, n, together);
        for (int64_t i = 0; i < n; i++)
            memcpy(x + i * hidden, m->embed + t->ids[start + i] * hidden, hidden * sizeof(float));
        for (int64_t layer = 0; layer < m->layers; layer++) {
            for (int64_t i = 0; i < n; i++) normalize(x + i * hidden, hidden, m->eps, unit + i * hidden);
            product(n, unit, hidden, m->qkv[layer], hidden, m->qkv_bias[layer], y, wide, wide, 0);
            for (int64_t i = 0; i < n; i++) place(m, t, layer, start + i, y + i * wide);
            for (int64_t i = 0; i < batches; i++)
                attend(m, t, layer, start, together + i, y, wide, o, attended, score, score_stride);
            product(n, o, attended, m->out[layer], attended, m->out_bias[layer], x, hidden, hidden, 1);
            for (int64_t i = 0; i < n; i++) normalize(x + i * hidden, hidden, m->eps, unit + i * hidden);
            product(n, unit, hidden, m->gate[layer], hidden, m->gate_bias[layer], gate, inner, inner, 0);
            product(n, unit, hidden, m->up[layer], hidden, m->up_bias[layer], up, inner, inner, 0);
            for (int64_t i = 0; i < n * inner; i += 8) {
                vec8 *g = (vec8 *)(gate + i);
                *g = *g / (exponential(-*g) + 1.0f) * *(const vec8 *)(up + i);
            }
            product(n, gate, inner, m->down[layer], m->inner, m->down_bias[layer], x, hidden, hidden, 1);
        }
        for (int64_t i = 0, next; i < n; i = next) {
            next = i + 1;
            if (t->rows[start + i] < 0) continue;
            while (next < n && t->rows[start + next] == t->rows[start + next - 1] + 1) next++;
            for (int64_t j = i; j < next; j++) normalize(x + j * hidden, hidden, m->eps, unit + (j - i) * hidden);
            product(next - i, unit, hidden, m->head, hidden, NULL, t->logits + t->rows[start + i] * m->vocabulary,
                    m->vocabulary, m->vocabulary, 0);
        }
    }
    free(memory);
    return 0;
}

/* The largest of a row, and its first index. */
static float largest_of(const float *row, int64_t n, int64_t *where) {
    vec8 high = (vec8){0} - INFINITY;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) high = choose(*(const vec8 *)(row + i) > high, *(const vec8 *)(row + i), high);
    float most = high[0];
    for (int j = 1; j < 8; j++) most = high[j] > most ? high[j] : most;
    for (; i < n; i++) most = row[i] > most ? row[i] : most;
    for (*where = 0; *where < n - 1 && row[*where] != most;) ++*where;
    return most;
}

/* The number in [0, 1) of a key and a position: as `uniforms` in sampler.py. */
static float uniform_of(uint64_t key, uint64_t position) {
    uint64_t x = key + position * 0x9E3779B97F4A7C15u;
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBu;
    return (float)((x ^ (x >> 31)) >> 41) * 0x1p-23f;
}

/* Sample a token of each row: the first whose cumulative probability exceeds the number of the row's key and position.
 *
 * logits: [rows, vocabulary]. temperature: [rows]; 0: the likeliest token, with its probability at temperature 1.
 * logprobs: their natural logarithms before any truncation. Returns 1 without memory. */
int sample(int64_t rows, int64_t vocabulary, const float *logits, const float *temperature, const uint64_t *key,
           const int64_t *position, int64_t *tokens, float *logprobs) {
    const int64_t pieces = (vocabulary + PIECE - 1) / PIECE;
    float *e = malloc(pieces * PIECE * sizeof(float));
    double *sum = malloc(pieces * sizeof(double));
    for (int64_t r = 0; r < rows && e && sum; r++) {
        const float *x = logits + r * vocabulary, by = temperature[r] > 0 ? 1 / temperature[r] : 1;
        int64_t likeliest, token = 0;
        const float most = largest_of(x, vocabulary, &likeliest);
        double total = 0, before = 0;
        for (int64_t p = 0; p < pieces; p++) {
            const int64_t first = p * PIECE, n = vocabulary - first < PIECE ? vocabulary - first : PIECE;
            vec8 piece = {0};
            int64_t i = 0;
            for (; i + 8 <= n; i += 8) {
                const vec8 one = exponential((*(const vec8 *)(x + first + i) - most) * by);
                *(vec8 *)(e + first + i) = one;
                piece += one;
            }
            if (i < n) {
                vec8 rest = (vec8){0} - INFINITY;
                for (int64_t j = i; j < n; j++) rest[j - i] = (x[first + j] - most) * by;
                rest = exponential(rest);
                *(vec8 *)(e + first + i) = rest;
                piece += rest;
            }
            sum[p] = 0;
            for (int j = 0; j < 8; j++) sum[p] += piece[j];
            total += sum[p];
        }
        const double wanted = uniform_of(key[r], position[r]) * total;
        if (temperature[r] > 0) {
            int64_t p = 0, last = vocabulary - 1;
            while (p < pieces - 1 && before + sum[p] <= wanted) before += sum[p++];
            const int64_t end = (p + 1) * PIECE < vocabulary ? (p + 1) * PIECE : vocabulary;
            for (token = p * PIECE; token < end && (before += e[token]) <= wanted; token++)
                if (e[token] > 0) last = token;
            if (token == end) token = last; /* the sum of single ones was rounded otherwise than that of the piece */
        } else {
            token = likeliest;
        }
        tokens[r] = token;
        logprobs[r] = (float)((x[token] - most) * by - log(total));
    }
    free(e);
    free(sum);
    return !e || !sum;
}
