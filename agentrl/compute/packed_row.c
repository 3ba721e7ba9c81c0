/* Both passes of a small float32 model over a packed row: what `block.hidden` computes, and its gradients.
 *
 * Threads divide the tokens, and each takes its own through all layers, in blocks that stay in the processor's cache. They
 * wait for each other where a token attends to those of another. Gradients of matrices are summed by each thread for
 * itself, those of keys and values too, until the next wait; so that every sum has one order.
 */

#include <pthread.h>

#include "vectors.h"

#define QUERIES 48 /* of a head, which attend together */

typedef struct {
    int64_t layers, hidden, heads, kv_heads, size, inner;
    float eps, scale;                                   /* of the norms; of a query's product with a key */
    const float **qkv, **out, **gate_up, **down;        /* by layer, in panels */
    const float **qkv_t, **out_t, **gate_up_t, **down_t; /* transposed, in panels, for the backward pass */
    const float **qk_gain;                              /* each [heads + kv_heads, size]; or NULL */
    const float **qkv_bias;                             /* each padded to whole panels; or NULL */
} Model;

typedef struct {
    int64_t tokens, predictions, segments, longest, threads; /* longest: the most keys of a query */
    const int64_t *predict;                 /* the tokens whose states are wanted */
    const int64_t *start, *end;             /* the tokens of each segment, one segment behind the other */
    const int64_t *spans;                   /* [segments + 1]: where in the next two those of its prefix begin */
    const int64_t *span_start, *span_end;
    const int64_t *token_part, *predict_part; /* [threads + 1]: which of them each thread computes */
    const float *cosines, *sines;           /* [tokens, size / 2] */
} Row;

/* What is kept of a layer. Of the last one, x2, scale2 and gate_up are of predictions. */
typedef struct {
    float *x, *scale;        /* [tokens, hidden], and what the norm before the attention multiplied it by */
    float *y;                /* [tokens, wide]: projected queries, keys and values */
    float *qk, *qk_scale;    /* [tokens, heads + kv_heads, size]: queries and keys as they attend; of their norms */
    float *o, *log_sum;      /* [tokens, heads, size]; [tokens, heads] */
    float *x2, *scale2;      /* the same behind the attention */
    float *gate_up;          /* [tokens, gates] */
} Layer;

/* What a thread computes with. */
typedef struct {
    float *unit, *gate_up, *d_gate_up, *h, *d_h, *d_unit, *o, *d_y, *panel;
    float *k, *k_t, *v, *v_t, *query, *output, *d_output, *d_query, *score, *d_score, *d_k, *d_v;
    int64_t *held;
    int64_t count;
} Scratch;

typedef struct {
    pthread_mutex_t lock;
    pthread_cond_t all;
    int64_t threads, waiting, round;
    int broken;
} Barrier;

typedef struct {
    const Model *m;
    const Row *r;
    Barrier *barrier;
    float *memory;
    const float *in;   /* x [tokens, hidden]; in the backward pass d_states [predictions, hidden] */
    float *out;        /* states [predictions, hidden]; d_x [tokens, hidden] */
    float *gradients;  /* [threads, gradient_floats] */
    int64_t thread;
    int keep, backward;
} Work;

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t outputs_of(const Model *m) { return (m->heads + 2 * m->kv_heads) * m->size; }
static int64_t wide_of(const Model *m) { return padded(outputs_of(m)); }
static int64_t gates_of(const Model *m) { return padded(2 * m->inner); }
static int64_t room_of(const Row *r) { return padded(r->longest) + COLUMNS; }

/* Wait until all threads are here; return whether one of them never will be. */
static int wait_for_all(Barrier *b) {
    pthread_mutex_lock(&b->lock);
    const int64_t round = b->round;
    if (++b->waiting == b->threads) {
        b->waiting = 0;
        b->round++;
        pthread_cond_broadcast(&b->all);
    }
    while (round == b->round && !b->broken) pthread_cond_wait(&b->all, &b->lock);
    const int broken = b->broken;
    pthread_mutex_unlock(&b->lock);
    return broken;
}

static float *take(float **memory, int64_t floats) {
    float *found = *memory;
    *memory += (floats + 15) / 16 * 16;
    return found;
}

/* The place of layer `index` of those that are kept: all of them, or two in turn. Returns what lies behind. */
static float *layer_of(const Work *w, int64_t index, Layer *layer) {
    const Model *m = w->m;
    const int64_t n = w->r->tokens, both = m->heads + m->kv_heads;
    float *memory = w->memory;
    const int64_t end = w->keep ? index : index & 1;
    for (int64_t i = 0; i <= end; i++) {
        const int64_t rows = w->keep && i == m->layers - 1 ? w->r->predictions : n;
        layer->x = take(&memory, n * m->hidden);
        layer->scale = take(&memory, n);
        layer->y = take(&memory, n * wide_of(m));
        layer->qk = take(&memory, n * both * m->size);
        layer->qk_scale = take(&memory, n * both);
        layer->o = take(&memory, n * m->heads * m->size);
        layer->log_sum = take(&memory, n * m->heads);
        layer->x2 = take(&memory, (rows > w->r->predictions ? rows : w->r->predictions) * m->hidden);
        layer->scale2 = take(&memory, rows > w->r->predictions ? rows : w->r->predictions);
        layer->gate_up = w->keep ? take(&memory, rows * gates_of(m)) : NULL;
    }
    return memory;
}

/* What lies behind the last layer: its output at the predictions, and what the final norm multiplied it by. */
static float *final_of(const Work *w, float **x, float **scale) {
    Layer layer;
    float *memory = layer_of(w, w->keep ? w->m->layers - 1 : 1, &layer);
    *x = take(&memory, w->r->predictions * w->m->hidden);
    *scale = take(&memory, w->r->predictions);
    return memory;
}

static float *scratch_of(const Work *w, float *memory, Scratch *s) {
    const Model *m = w->m;
    const int64_t room = room_of(w->r), wide = padded(m->size), inner = padded(m->inner), attended = m->heads * m->size;
    const int64_t each = m->heads / m->kv_heads, queries = each > QUERIES ? each : QUERIES;
    s->unit = take(&memory, BLOCK * m->hidden);
    s->gate_up = take(&memory, BLOCK * gates_of(m));
    s->h = take(&memory, BLOCK * inner);
    s->o = take(&memory, BLOCK * attended);
    s->k_t = take(&memory, room * m->size);
    s->v = take(&memory, room * wide);
    s->query = take(&memory, queries * wide);
    s->output = take(&memory, queries * wide);
    s->score = take(&memory, queries * room);
    s->held = (int64_t *)take(&memory, 2 * room);
    if (!w->keep) return memory;
    s->d_gate_up = take(&memory, BLOCK * gates_of(m));
    s->d_h = take(&memory, BLOCK * inner);
    s->d_unit = take(&memory, BLOCK * m->hidden);
    s->d_y = take(&memory, BLOCK * wide_of(m));
    s->panel = take(&memory, BLOCK * COLUMNS);
    s->k = take(&memory, room * wide);
    s->v_t = take(&memory, room * m->size);
    s->d_output = take(&memory, queries * wide);
    s->d_query = take(&memory, queries * wide);
    s->d_score = take(&memory, queries * room);
    s->d_k = take(&memory, room * wide);
    s->d_v = take(&memory, room * wide);
    return memory;
}

/* Gradients while they are on their way: by token, at predictions, and of each thread's keys and values. */
typedef struct {
    float *x, *o, *query, *x2, *selected;
    float *k[2], *v[2]; /* [threads, tokens, kv_heads, size]; two in turn */
} Gradients;

static float *gradients_of(const Work *w, float *memory, Gradients *g) {
    const Model *m = w->m;
    const int64_t n = w->r->tokens, own = n * m->kv_heads * m->size * w->r->threads;
    g->x = w->out;
    g->o = take(&memory, n * m->heads * m->size);
    g->query = take(&memory, n * m->heads * m->size);
    g->x2 = take(&memory, w->r->predictions * m->hidden);
    g->selected = take(&memory, w->r->predictions * m->heads * m->size);
    for (int i = 0; i < 2; i++) {
        g->k[i] = take(&memory, own);
        g->v[i] = take(&memory, own);
    }
    return memory;
}

/* The gradients of one thread: of a layer's qkv, out, gate_up, down [inputs, outputs], qk_gain and qkv_bias, in order. */
typedef struct {
    float *qkv, *out, *gate_up, *down, *qk_gain, *qkv_bias;
} Sums;

static int64_t sums_of(const Model *m, int64_t layer, float *memory, Sums *s) {
    const int64_t outputs = outputs_of(m), attended = m->heads * m->size, gain = (m->heads + m->kv_heads) * m->size;
    const int64_t floats = m->hidden * (outputs + attended + 3 * m->inner) + gain + outputs;
    s->qkv = memory + layer * floats;
    s->out = s->qkv + m->hidden * outputs;
    s->gate_up = s->out + attended * m->hidden;
    s->down = s->gate_up + m->hidden * 2 * m->inner;
    s->qk_gain = s->down + m->inner * m->hidden;
    s->qkv_bias = s->qk_gain + gain;
    return floats;
}

int64_t gradient_floats(const Model *m) {
    Sums sums;
    return m->layers * sums_of(m, 0, NULL, &sums);
}

/* How many floats a pass needs. */
int64_t memory_floats(const Model *m, const Row *r, int keep) {
    static float first[1];
    const Work w = {.m = m, .r = r, .keep = keep, .memory = first};
    float *x, *scale, *memory = final_of(&w, &x, &scale);
    Gradients gradients;
    Scratch scratch;
    if (keep) memory = gradients_of(&w, memory, &gradients);
    for (int64_t i = 0; i < r->threads; i++) memory = scratch_of(&w, memory, &scratch);
    return memory - first;
}

static Scratch own_scratch(const Work *w, Gradients *gradients) {
    float *x, *scale, *memory = final_of(w, &x, &scale);
    Scratch scratch = {0};
    if (w->keep) memory = gradients_of(w, memory, gradients);
    for (int64_t i = 0; i <= w->thread; i++) memory = scratch_of(w, memory, &scratch);
    return scratch;
}

/* y [rows, outputs] += x^T dY, of x [n, rows] and dY [n, outputs], n at most BLOCK. */
static void outer(int64_t rows, const float *x, int64_t x_stride, const float *d_y, int64_t d_stride, int64_t n,
                  float *panel, float *y, int64_t y_stride, int64_t outputs) {
    for (int64_t c = 0; c < outputs; c += COLUMNS) {
        const int64_t own = least(COLUMNS, outputs - c);
        if (own < COLUMNS) memset(panel, 0, n * COLUMNS * sizeof(float));
        for (int64_t k = 0; k < n; k++) memcpy(panel + k * COLUMNS, d_y + k * d_stride + c, own * sizeof(float));
        TILES(0, rows, x, 1, x_stride, panel, n, NULL, y + c, y_stride, outputs - c, 1);
    }
}

/* d_x [n] += the gradient of x, of that of its unit, unit = x scale. */
INLINE void add_d_norm(const float *d_unit, const float *unit, float scale, int64_t n, float *d_x) {
    const float mean = dot(d_unit, unit, n) / n;
    for (int64_t d = 0; d < n; d++) d_x[d] += (d_unit[d] - unit[d] * mean) * scale;
}

/* Queries and keys of a token as they attend, of its projections. */
static void place(const Work *w, int64_t layer, const Layer *l, int64_t token, float *restrict unit) {
    const Model *m = w->m;
    const int64_t size = m->size, half = size / 2, both = m->heads + m->kv_heads;
    const float *c = w->r->cosines + token * half, *s = w->r->sines + token * half;
    for (int64_t h = 0; h < both; h++) {
        const float *x = l->y + token * wide_of(m) + h * size;
        float *restrict to = l->qk + (token * both + h) * size;
        if (m->qk_gain) {
            const float *gain = m->qk_gain[layer] + h * size;
            l->qk_scale[token * both + h] = normalize(x, size, m->eps, unit);
            for (int64_t d = 0; d < size; d++) unit[d] *= gain[d];
            x = unit;
        }
        for (int64_t d = 0; d < half; d++) {
            to[d] = x[d] * c[d] - x[d + half] * s[d];
            to[d + half] = x[d + half] * c[d] + x[d] * s[d];
        }
    }
}

/* d_y [heads + 2 kv_heads, size] of a token, of the gradients of its queries, keys and values; those of the gains. */
static void unplace(const Work *w, int64_t layer, const Layer *l, const Gradients *g, int64_t token, float *unit,
                    float *restrict d_y, float *restrict d_gain) {
    const Model *m = w->m;
    const int64_t size = m->size, half = size / 2, both = m->heads + m->kv_heads, n = w->r->tokens;
    const float *c = w->r->cosines + token * half, *s = w->r->sines + token * half;
    for (int64_t h = m->heads; h < both + m->kv_heads; h++) {
        float *const *of = h < both ? g->k : g->v;
        const int64_t own = (token * m->kv_heads + h - (h < both ? m->heads : both)) * size;
        float *restrict to = d_y + h * size;
        memset(to, 0, size * sizeof(float));
        for (int64_t t = 0; t < w->r->threads; t++) {
            const float *from = of[layer & 1] + t * n * m->kv_heads * size + own;
            for (int64_t d = 0; d < size; d++) to[d] += from[d];
        }
    }
    memcpy(d_y, g->query + token * m->heads * size, m->heads * size * sizeof(float));
    for (int64_t h = 0; h < both; h++) {
        float *restrict d_x = d_y + h * size;
        for (int64_t d = 0; d < half; d++) {
            const float a = d_x[d], b = d_x[d + half];
            d_x[d] = a * c[d] + b * s[d];
            d_x[d + half] = b * c[d] - a * s[d];
        }
        if (!m->qk_gain) continue;
        const float *x = l->y + token * wide_of(m) + h * size, scale = l->qk_scale[token * both + h];
        const float *gain = m->qk_gain[layer] + h * size;
        for (int64_t d = 0; d < size; d++) {
            unit[d] = x[d] * scale;
            d_gain[h * size + d] += d_x[d] * unit[d];
            d_x[d] *= gain[d];
        }
        const float mean = dot(d_x, unit, size) / size;
        for (int64_t d = 0; d < size; d++) d_x[d] = (d_x[d] - unit[d] * mean) * scale;
    }
}

/* Lay out the keys and values of a segment up to `end`, those of what it continues first; return the latter's number.
 * What the segment before has in common is there already. */
static int64_t lay_out(const Work *w, const Layer *l, Scratch *s, int64_t segment, int64_t end, int64_t head, int64_t *count) {
    const Model *m = w->m;
    const Row *r = w->r;
    const int64_t size = m->size, both = m->heads + m->kv_heads, room = room_of(r);
    int64_t t = 0, reach = 0;
    for (int64_t i = r->spans[segment]; i <= r->spans[segment + 1]; i++) {
        const int own = i == r->spans[segment + 1];
        if (own) reach = t;
        const int64_t from = own ? r->start[segment] : r->span_start[i], to = own ? end : r->span_end[i];
        for (int64_t token = from; token < to; token++, t++) {
            if (t < s->count && s->held[t] == token) continue;
            s->count = t + 1;
            s->held[t] = token;
            const float *k = l->qk + (token * both + m->heads + head) * size;
            const float *v = l->y + token * wide_of(m) + (both + head) * size;
            float *k_t = s->k_t + t / COLUMNS * COLUMNS * size + t % COLUMNS;
            for (int64_t d = 0; d < size; d++) k_t[d * COLUMNS] = k[d];
            for (int64_t d = 0; d < size; d += COLUMNS)
                memcpy(s->v + d * room + t * COLUMNS, v + d, least(COLUMNS, size - d) * sizeof(float));
            if (!w->backward) continue;
            float *v_t = s->v_t + t / COLUMNS * COLUMNS * size + t % COLUMNS;
            for (int64_t d = 0; d < size; d++) v_t[d * COLUMNS] = v[d];
            for (int64_t d = 0; d < size; d += COLUMNS)
                memcpy(s->k + d * room + t * COLUMNS, k + d, least(COLUMNS, size - d) * sizeof(float));
        }
    }
    *count = t;
    return reach;
}

/* y [rows, size] = x [rows, keys] times keys or values, which lie in panels [., room, COLUMNS]. */
static void averages(int64_t rows, const float *x, int64_t stride, const float *panels, int64_t keys, int64_t room,
                     float *y, int64_t y_stride, int64_t size) {
    for (int64_t c = 0; c < size; c += COLUMNS)
        TILES(0, rows, x, stride, 1, panels + c * room, keys, NULL, y + c, y_stride, size - c, 0);
}

/* Turn `keys` scores into their softmax, zeros up to `most`; return the logarithm of the sum of their exponentials. */
INLINE float softmax(float *score, int64_t keys, int64_t most) {
    const int64_t room = (keys + 7) / 8 * 8;
    float largest;
    const float sum = exponentials(score, keys, room, &largest), by = 1 / sum;
    for (int64_t t = 0; t < room; t += 8) *(vec8 *)(score + t) *= by;
    for (int64_t t = room; t < most; t++) score[t] = 0;
    return largest + logf(sum);
}

/* Attention of the own tokens: the outputs, or the gradients of queries, keys and values. */
static void attend(const Work *w, int64_t layer, const Layer *l, const Gradients *g, Scratch *s) {
    const Model *m = w->m;
    const Row *r = w->r;
    const int64_t size = m->size, wide = padded(size), both = m->heads + m->kv_heads, room = room_of(r);
    const int64_t each = m->heads / m->kv_heads, step = each < QUERIES ? QUERIES / each : 1;
    const int64_t a = r->token_part[w->thread], b = r->token_part[w->thread + 1];
    float *own_k = NULL, *own_v = NULL;
    if (w->backward) {
        const int64_t own = r->tokens * m->kv_heads * size;
        own_k = g->k[layer & 1] + w->thread * own;
        own_v = g->v[layer & 1] + w->thread * own;
        memset(own_k, 0, own * sizeof(float));
        memset(own_v, 0, own * sizeof(float));
    }
    for (int64_t head = 0; head < m->kv_heads; head++) {
        s->count = 0;
        for (int64_t segment = 0; segment < r->segments; segment++) {
            const int64_t low = r->start[segment] > a ? r->start[segment] : a, high = least(r->end[segment], b);
            if (low >= high) continue;
            int64_t count;
            const int64_t reach = lay_out(w, l, s, segment, high, head, &count);
            if (w->backward) {
                memset(s->d_k, 0, count * wide * sizeof(float));
                memset(s->d_v, 0, count * wide * sizeof(float));
            }
            for (int64_t first = low; first < high; first += step) {
                const int64_t tokens = least(step, high - first), rows = tokens * each;
                const int64_t keys = reach + first + tokens - r->start[segment];
                for (int64_t i = 0; i < rows; i++) {
                    const float *q = l->qk + ((first + i / each) * both + head * each + i % each) * size;
                    for (int64_t d = 0; d < size; d++) s->query[i * wide + d] = q[d] * m->scale;
                }
                product(rows, s->query, wide, s->k_t, size, NULL, s->score, room, padded(keys), 0);
                if (!w->backward) {
                    for (int64_t i = 0; i < rows; i++) {
                        const int64_t token = first + i / each;
                        l->log_sum[token * m->heads + head * each + i % each] =
                            softmax(s->score + i * room, reach + token - r->start[segment] + 1, keys);
                    }
                    averages(rows, s->score, room, s->v, keys, room, s->output, wide, size);
                    for (int64_t i = 0; i < rows; i++)
                        memcpy(l->o + ((first + i / each) * m->heads + head * each + i % each) * size, s->output + i * wide,
                               size * sizeof(float));
                    continue;
                }
                for (int64_t i = 0; i < rows; i++)
                    memcpy(s->d_output + i * wide, g->o + ((first + i / each) * m->heads + head * each + i % each) * size,
                           size * sizeof(float));
                product(rows, s->d_output, wide, s->v_t, size, NULL, s->d_score, room, padded(keys), 0);
                for (int64_t i = 0; i < rows; i++) {
                    const int64_t token = first + i / each, own = reach + token - r->start[segment] + 1;
                    const int64_t at = token * m->heads + head * each + i % each;
                    const float log_sum = l->log_sum[at], mean = dot(s->d_output + i * wide, l->o + at * size, size);
                    float *p = s->score + i * room, *d = s->d_score + i * room;
                    for (int64_t t = own; t < (own + 7) / 8 * 8; t++) p[t] = -INFINITY, d[t] = 0;
                    for (int64_t t = 0; t < own; t += 8) {
                        const vec8 e = exponential(*(vec8 *)(p + t) - log_sum);
                        *(vec8 *)(p + t) = e;
                        *(vec8 *)(d + t) = e * (*(vec8 *)(d + t) - mean);
                    }
                    for (int64_t t = (own + 7) / 8 * 8; t < keys; t++) p[t] = d[t] = 0;
                }
                averages(rows, s->d_score, room, s->k, keys, room, s->d_query, wide, size);
                for (int64_t i = 0; i < rows; i++) {
                    float *to = g->query + ((first + i / each) * m->heads + head * each + i % each) * size;
                    for (int64_t d = 0; d < size; d++) to[d] = s->d_query[i * wide + d] * m->scale;
                }
                for (int64_t c = 0; c < size; c += COLUMNS) {
                    for (int64_t i = 0; i < rows; i++)
                        memcpy(s->panel + i * COLUMNS, s->query + i * wide + c, COLUMNS * sizeof(float));
                    TILES(0, keys, s->d_score, 1, room, s->panel, rows, NULL, s->d_k + c, wide, COLUMNS, 1);
                    for (int64_t i = 0; i < rows; i++)
                        memcpy(s->panel + i * COLUMNS, s->d_output + i * wide + c, COLUMNS * sizeof(float));
                    TILES(0, keys, s->score, 1, room, s->panel, rows, NULL, s->d_v + c, wide, COLUMNS, 1);
                }
            }
            for (int64_t t = 0; w->backward && t < count; t++) {
                const int64_t at = (s->held[t] * m->kv_heads + head) * size;
                for (int64_t d = 0; d < size; d++) {
                    own_k[at + d] += s->d_k[t * wide + d];
                    own_v[at + d] += s->d_v[t * wide + d];
                }
            }
        }
    }
}

/* h [inner] = silu(gate) up. */
INLINE void gated(const float *gate_up, int64_t inner, float *h) {
    for (int64_t i = 0; i < inner; i += 8) {
        const vec8 gate = *(const vec8 *)(gate_up + i), up = *(const vec8 *)(gate_up + inner + i);
        *(vec8 *)(h + i) = gate / (exponential(-gate) + 1.0f) * up;
    }
}

/* h again, and d_gate_up, of d_h. */
INLINE void d_gated(const float *gate_up, const float *d_h, int64_t inner, float *h, float *d_gate_up) {
    for (int64_t i = 0; i < inner; i += 8) {
        const vec8 gate = *(const vec8 *)(gate_up + i), up = *(const vec8 *)(gate_up + inner + i);
        const vec8 slope = *(const vec8 *)(d_h + i), share = 1.0f / (exponential(-gate) + 1.0f), silu = gate * share;
        *(vec8 *)(h + i) = silu * up;
        *(vec8 *)(d_gate_up + inner + i) = slope * silu;
        *(vec8 *)(d_gate_up + i) = slope * up * (share + silu * (1.0f - share));
    }
}

static void forward(const Work *w) {
    const Model *m = w->m;
    const Row *r = w->r;
    const int64_t hidden = m->hidden, wide = wide_of(m), gates = gates_of(m), attended = m->heads * m->size;
    const int64_t a = r->token_part[w->thread], b = r->token_part[w->thread + 1];
    float *final, *final_scale;
    final_of(w, &final, &final_scale);
    Gradients none;
    Scratch s = own_scratch(w, &none);
    Layer l, next;
    layer_of(w, 0, &l);
    memcpy(l.x + a * hidden, w->in + a * hidden, (b - a) * hidden * sizeof(float));
    for (int64_t layer = 0; layer < m->layers; layer++, l = next) {
        const int last = layer == m->layers - 1;
        layer_of(w, last ? layer : layer + 1, &next);
        for (int64_t i = a; i < b; i += BLOCK) {
            const int64_t n = least(BLOCK, b - i);
            for (int64_t j = 0; j < n; j++)
                l.scale[i + j] = normalize(l.x + (i + j) * hidden, hidden, m->eps, s.unit + j * hidden);
            product(n, s.unit, hidden, m->qkv[layer], hidden, m->qkv_bias ? m->qkv_bias[layer] : NULL, l.y + i * wide, wide,
                    wide, 0);
            for (int64_t j = 0; j < n; j++) place(w, layer, &l, i + j, s.unit);
        }
        if (wait_for_all(w->barrier)) return;
        attend(w, layer, &l, NULL, &s);
        if (last && wait_for_all(w->barrier)) return;
        const int64_t end = last ? r->predict_part[w->thread + 1] : b;
        for (int64_t i = last ? r->predict_part[w->thread] : a; i < end; i += BLOCK) {
            const int64_t n = least(BLOCK, end - i);
            const float *o = l.o + i * attended;
            float *x2 = l.x2 + i * hidden, *to = (last ? final : next.x) + i * hidden;
            float *gate_up = w->keep ? l.gate_up + i * gates : s.gate_up;
            if (last) {
                for (int64_t j = 0; j < n; j++) {
                    memcpy(x2 + j * hidden, l.x + r->predict[i + j] * hidden, hidden * sizeof(float));
                    memcpy(s.o + j * attended, l.o + r->predict[i + j] * attended, attended * sizeof(float));
                }
                o = s.o;
            } else {
                memcpy(x2, l.x + i * hidden, n * hidden * sizeof(float));
            }
            product(n, o, attended, m->out[layer], attended, NULL, x2, hidden, hidden, 1);
            for (int64_t j = 0; j < n; j++)
                l.scale2[i + j] = normalize(x2 + j * hidden, hidden, m->eps, s.unit + j * hidden);
            product(n, s.unit, hidden, m->gate_up[layer], hidden, NULL, gate_up, gates, gates, 0);
            for (int64_t j = 0; j < n; j++) gated(gate_up + j * gates, m->inner, s.h + j * m->inner);
            memcpy(to, x2, n * hidden * sizeof(float));
            product(n, s.h, m->inner, m->down[layer], m->inner, NULL, to, hidden, hidden, 1);
            for (int64_t j = 0; last && j < n; j++)
                final_scale[i + j] = normalize(to + j * hidden, hidden, m->eps, w->out + (i + j) * hidden);
        }
    }
}

static void backward(const Work *w) {
    const Model *m = w->m;
    const Row *r = w->r;
    const int64_t hidden = m->hidden, wide = wide_of(m), gates = gates_of(m), attended = m->heads * m->size;
    const int64_t outputs = outputs_of(m), inner = m->inner;
    const int64_t a = r->token_part[w->thread], b = r->token_part[w->thread + 1];
    float *final, *final_scale, *own = w->gradients + w->thread * gradient_floats(m);
    final_of(w, &final, &final_scale);
    Gradients g;
    Scratch s = own_scratch(w, &g);
    for (int64_t layer = m->layers - 1; layer >= 0; layer--) {
        const int last = layer == m->layers - 1;
        Layer l;
        Sums sums;
        layer_of(w, layer, &l);
        sums_of(m, layer, own, &sums);
        const int64_t end = last ? r->predict_part[w->thread + 1] : b;
        for (int64_t i = last ? r->predict_part[w->thread] : a; i < end; i += BLOCK) {
            const int64_t n = least(BLOCK, end - i);
            const float *o = l.o + i * attended;
            float *d_x = (last ? g.x2 : g.x) + i * hidden, *d_o = (last ? g.selected : g.o) + i * attended;
            if (last) {
                memset(d_x, 0, n * hidden * sizeof(float));
                for (int64_t j = 0; j < n; j++) {
                    const float scale = final_scale[i + j];
                    for (int64_t d = 0; d < hidden; d++) s.unit[d] = final[(i + j) * hidden + d] * scale;
                    add_d_norm(w->in + (i + j) * hidden, s.unit, scale, hidden, d_x + j * hidden);
                    memcpy(s.o + j * attended, l.o + r->predict[i + j] * attended, attended * sizeof(float));
                }
                o = s.o;
            }
            product(n, d_x, hidden, m->down_t[layer], hidden, NULL, s.d_h, inner, inner, 0);
            for (int64_t j = 0; j < n; j++) {
                const float *x2 = l.x2 + (i + j) * hidden, scale = l.scale2[i + j];
                for (int64_t d = 0; d < hidden; d++) s.unit[j * hidden + d] = x2[d] * scale;
                d_gated(l.gate_up + (i + j) * gates, s.d_h + j * inner, inner, s.h + j * inner, s.d_gate_up + j * gates);
            }
            outer(inner, s.h, inner, d_x, hidden, n, s.panel, sums.down, hidden, hidden);
            outer(hidden, s.unit, hidden, s.d_gate_up, gates, n, s.panel, sums.gate_up, 2 * inner, 2 * inner);
            product(n, s.d_gate_up, gates, m->gate_up_t[layer], 2 * inner, NULL, s.d_unit, hidden, hidden, 0);
            for (int64_t j = 0; j < n; j++)
                add_d_norm(s.d_unit + j * hidden, s.unit + j * hidden, l.scale2[i + j], hidden, d_x + j * hidden);
            outer(attended, o, attended, d_x, hidden, n, s.panel, sums.out, hidden, hidden);
            product(n, d_x, hidden, m->out_t[layer], hidden, NULL, d_o, attended, attended, 0);
        }
        if (last) {
            if (wait_for_all(w->barrier)) return;
            memset(g.x + a * hidden, 0, (b - a) * hidden * sizeof(float));
            memset(g.o + a * attended, 0, (b - a) * attended * sizeof(float));
            for (int64_t i = 0; i < r->predictions; i++) {
                const int64_t token = r->predict[i];
                if (token < a || token >= b) continue;
                for (int64_t d = 0; d < hidden; d++) g.x[token * hidden + d] += g.x2[i * hidden + d];
                for (int64_t d = 0; d < attended; d++) g.o[token * attended + d] += g.selected[i * attended + d];
            }
        }
        attend(w, layer, &l, &g, &s);
        if (wait_for_all(w->barrier)) return;
        for (int64_t i = a; i < b; i += BLOCK) {
            const int64_t n = least(BLOCK, b - i);
            for (int64_t j = 0; j < n; j++) {
                const float *x = l.x + (i + j) * hidden, scale = l.scale[i + j];
                unplace(w, layer, &l, &g, i + j, s.d_unit, s.d_y + j * wide, sums.qk_gain);
                for (int64_t d = 0; d < hidden; d++) s.unit[j * hidden + d] = x[d] * scale;
                for (int64_t d = 0; m->qkv_bias && d < outputs; d++) sums.qkv_bias[d] += s.d_y[j * wide + d];
            }
            outer(hidden, s.unit, hidden, s.d_y, wide, n, s.panel, sums.qkv, outputs, outputs);
            product(n, s.d_y, wide, m->qkv_t[layer], outputs, NULL, s.d_unit, hidden, hidden, 0);
            for (int64_t j = 0; j < n; j++)
                add_d_norm(s.d_unit + j * hidden, s.unit + j * hidden, l.scale[i + j], hidden, g.x + (i + j) * hidden);
        }
    }
}

static void *run(void *work) {
    const Work *w = work;
    (w->backward ? backward : forward)(w);
    return NULL;
}

/* Both return 0, or 1 where no thread can be started. */
static int run_all(Work work) {
    const int64_t threads = work.r->threads;
    Barrier barrier = {.lock = PTHREAD_MUTEX_INITIALIZER, .all = PTHREAD_COND_INITIALIZER, .threads = threads};
    Work own[threads];
    pthread_t made[threads];
    int64_t count = 1;
    for (int64_t i = 0; i < threads; i++) {
        own[i] = work;
        own[i].barrier = &barrier;
        own[i].thread = i;
    }
    while (count < threads && !pthread_create(made + count, NULL, run, own + count)) count++;
    if (count < threads) {
        pthread_mutex_lock(&barrier.lock);
        barrier.broken = 1;
        pthread_cond_broadcast(&barrier.all);
        pthread_mutex_unlock(&barrier.lock);
    } else {
        run(own);
    }
    for (int64_t i = 1; i < count; i++) pthread_join(made[i], NULL);
    return barrier.broken;
}

int pass_forward(const Model *m, const Row *r, float *memory, int keep, const float *x, float *states) {
    return run_all((Work){.m = m, .r = r, .memory = memory, .keep = keep, .in = x, .out = states});
}

int pass_backward(const Model *m, const Row *r, float *memory, const float *d_states, float *d_x, float *gradients) {
    return run_all((Work){
        .m = m, .r = r, .memory = memory, .keep = 1, .backward = 1, .in = d_states, .out = d_x, .gradients = gradients});
}
