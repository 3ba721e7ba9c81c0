/* Products of few rows with the large matrices of a model, on several threads. A matrix lies in panels, in float32 or in
 * bfloat16; each panel is computed by one thread, in an order that depends on neither their number nor that of rows.
 *
 * The threads wait from one product to the next: a step has a hundred, each of which takes little longer than starting a
 * thread does.
 */

#include "vectors.h"

#include <pthread.h>
#include <stdatomic.h>

#define DEPTH 1024   /* of a panel that is computed at once, so that it stays in the cache for the next rows */
#define PIECES 4     /* that each thread takes of a product, so that a slower one takes fewer */
#define MOST 16      /* panels of a piece */
#define TURNS 2000   /* of looking for the next product, or for the end of this one, before a thread sleeps */

#ifdef __x86_64__
#define PAUSE() __builtin_ia32_pause()
#else
#define PAUSE() __asm__ volatile("" ::: "memory")
#endif

typedef struct {
    int64_t rows, depth, outputs;
    int half;              /* whether w is bfloat16 */
    const float *x;        /* [rows, depth] */
    const char *w;         /* [panels, depth, COLUMNS] */
    const float *bias;     /* padded to whole panels, or NULL */
    float *y;              /* [rows, outputs] */
    int add;               /* whether y is added to */
    int64_t piece;         /* panels that a thread takes at once */
    _Atomic int64_t next;  /* panel that nobody has taken */
} Product;

static struct {
    pthread_mutex_t used, lock;
    pthread_cond_t go, done;
    Product *product;
    int64_t made, helpers;       /* threads that there are, and those that are to take part in the product, */
    _Atomic int64_t round, busy; /* which is the round's; how many of them have not ended it */
} pool = {PTHREAD_MUTEX_INITIALIZER, PTHREAD_MUTEX_INITIALIZER, PTHREAD_COND_INITIALIZER, PTHREAD_COND_INITIALIZER};

static void rows_of_panel(int half, int64_t n, const float *x, int64_t stride, const char *w, int64_t depth,
                          const float *bias, float *y, int64_t y_stride, int64_t outputs, int add) {
    if (half)
        TILES(1, n, x, stride, 1, w, depth, bias, y, y_stride, outputs, add);
    else
        TILES(0, n, x, stride, 1, w, depth, bias, y, y_stride, outputs, add);
}

/* Compute panels of a product until none is left. */
static void take_part(Product *p) {
    const int64_t panels = padded(p->outputs) / COLUMNS, bytes = p->half ? 2 : 4;
    for (int64_t first; (first = atomic_fetch_add(&p->next, p->piece)) < panels;) {
        const int64_t end = first + p->piece < panels ? first + p->piece : panels;
        for (int64_t row = 0; row < p->rows; row += BLOCK) {
            const int64_t rows = p->rows - row < BLOCK ? p->rows - row : BLOCK;
            for (int64_t panel = first; panel < end; panel++) {
                const int64_t column = panel * COLUMNS;
                for (int64_t k = 0; k < p->depth; k += DEPTH)
                    rows_of_panel(p->half, rows, p->x + row * p->depth + k, p->depth,
                                  p->w + (panel * p->depth + k) * COLUMNS * bytes,
                                  p->depth - k < DEPTH ? p->depth - k : DEPTH, k || !p->bias ? NULL : p->bias + column,
                                  p->y + row * p->outputs + column, p->outputs, p->outputs - column, k || p->add);
            }
        }
    }
}

static void *wait_for_products(void *index) {
    int64_t seen = 0;
    for (;;) {
        for (int i = 0; i < TURNS && atomic_load(&pool.round) == seen; i++) PAUSE();
        pthread_mutex_lock(&pool.lock);
        while (atomic_load(&pool.round) == seen) pthread_cond_wait(&pool.go, &pool.lock);
        seen = atomic_load(&pool.round);
        Product *p = (int64_t)index < pool.helpers ? pool.product : NULL;
        pthread_mutex_unlock(&pool.lock);
        if (!p) continue;
        take_part(p);
        pthread_mutex_lock(&pool.lock);
        if (atomic_fetch_sub(&pool.busy, 1) == 1) pthread_cond_signal(&pool.done);
        pthread_mutex_unlock(&pool.lock);
    }
    return NULL;
}

/* A forked process has none of the threads, and may have been forked while one of them held a lock. */
static void forget_threads(void) {
    pthread_mutex_init(&pool.used, NULL);
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.go, NULL);
    pthread_cond_init(&pool.done, NULL);
    pool.made = pool.helpers = 0;
    pool.round = pool.busy = 0;
}

__attribute__((constructor)) static void when_loaded(void) { pthread_atfork(NULL, NULL, forget_threads); }

/* Hand a product to up to `helpers` threads. */
static void begin(Product *p, int64_t helpers) {
    pthread_mutex_lock(&pool.lock);
    for (pthread_t thread; pool.made < helpers; pool.made++)
        if (pthread_create(&thread, NULL, wait_for_products, (void *)pool.made) || pthread_detach(thread)) break;
    pool.helpers = helpers < pool.made ? helpers : pool.made;
    pool.product = p;
    atomic_store(&pool.busy, pool.helpers);
    atomic_fetch_add(&pool.round, 1);
    pthread_cond_broadcast(&pool.go);
    pthread_mutex_unlock(&pool.lock);
}

static void wait_for_helpers(void) {
    for (int i = 0; i < TURNS && atomic_load(&pool.busy); i++) PAUSE();
    pthread_mutex_lock(&pool.lock);
    while (atomic_load(&pool.busy)) pthread_cond_wait(&pool.done, &pool.lock);
    pthread_mutex_unlock(&pool.lock);
}

/* y [rows, outputs] (+)= x [rows, depth] times the matrix of the panels w, plus bias, on up to `threads` threads; on
 * this one alone while another one uses those that wait. half: the panels are bfloat16. bias: padded to whole panels. */
void panel_product(int64_t threads, int64_t rows, int64_t depth, int64_t outputs, int half, const float *x,
                   const void *w, const float *bias, float *y, int add) {
    Product p = {rows, depth, outputs, half, x, w, bias, y, add};
    const int64_t piece = padded(outputs) / COLUMNS / (PIECES * threads);
    p.piece = piece < 1 ? 1 : piece > MOST ? MOST : piece;
    const int shared = threads > 1 && !pthread_mutex_trylock(&pool.used);
    if (shared) begin(&p, threads - 1);
    take_part(&p);
    if (!shared) return;
    wait_for_helpers();
    pthread_mutex_unlock(&pool.used);
}
