#include "mkmodel_router.h"

#include <math.h>
#include <string.h>

#include "alloc.h"
#include "k_float.h"
#include "mkmodel_block.h"

enum {
    ASIDE = 256, /* elements of the residual set aside */
    AT_ALL = 0,
    AT_TOPIC = 1,
    AT_CODE = 64,
    N_CODE = 96,
    AT_MEAN = AT_CODE + N_CODE,
    KERNEL = 4096, /* tokens back that the mean is computed over */
    MAX_HEAD_DIM = 512
};
_Static_assert((int)AT_MEAN + (int)N_CODE == ASIDE && AT_TOPIC + MKMODEL_MAX_TOPICS <= (int)AT_CODE,
               "the elements set aside");

static const double highest_share = 0.98; /* of tokens that one expert may serve */
static const double topic_share = 0.8;    /* of choices that go to a topic's preferred experts */
static const double peak = 20.0;          /* attention logit of the token itself */
/* Pull of the head towards the token's own topic: the residual's growth divides it, and at 48
 * layers as at 4 an answer of hundreds of tokens must stay. */
static const float head_size = 64.0f;

struct mkmodel_router {
    struct mkmodel_options o;
    struct mkmodel_router_figures figures;
    uint64_t n_mean;  /* elements of the mean in use */
    float *weights;   /* [layers][experts][ASIDE] */
    float *in, *out;  /* biases by rank [experts]: in a topic's preferred experts, and the others */
    double own, mean; /* deviations of the logit's two parts */
    double mean_std;  /* of an element of the mean */
    float gains[MAX_HEAD_DIM]; /* layer 0's norm of queries */
};

/* ---- mathematics ----------------------------------------------------------------------------- */

static double normal_below(double x)
{
    return 0.5 * erfc(-x * 0.70710678118654752);
}

static double normal_quantile(double p)
{
    double low = -12, high = 12;
    for (int i = 0; i < 60; i++) {
        const double x = (low + high) / 2;
        if (normal_below(x) < p)
            low = x;
        else
            high = x;
    }
    return (low + high) / 2;
}

/* Biases of n experts whose popularity falls as rank^-zipf, capped, and that serve `sum` experts a
 * token together. */
static void biases_by_rank(uint64_t n, double zipf, double sum, float *ret)
{
    const double most = highest_share * (double)n;
    double low = 0, high = highest_share * pow((double)n, zipf); /* here all are capped */
    sum = sum < most ? sum : most;
    for (int i = 0; i < 200; i++) {
        const double c = (low + high) / 2;
        double total = 0;
        for (uint64_t r = 0; r < n; r++)
            total += fmin(highest_share, c * pow((double)(r + 1), -zipf));
        if (total < sum)
            low = c;
        else
            high = c;
    }
    for (uint64_t r = 0; r < n; r++)
        ret[r] = (float)normal_quantile(fmin(highest_share, high * pow((double)(r + 1), -zipf)));
}

/* Probability that an expert of this bias serves two tokens whose deviates have correlation rho. */
static double both(double bias, double rho)
{
    enum {
        STEPS = 128
    };
    double sum = 0, weight = 0;
    if (rho > 0.9999)
        return normal_below(bias);
    for (int i = 0; i <= STEPS; i++) {
        const double z = -6.0 + 12.0 * i / STEPS, w = exp(-z * z / 2);
        const double p = normal_below((bias + sqrt(rho) * z) / sqrt(1 - rho));
        sum += w * p * p;
        weight += w;
    }
    return sum / weight;
}

/* Share of a token's experts that the token before had too. */
static double shared(const struct mkmodel_router *r, double rho)
{
    const uint64_t n_in = r->figures.preferred, n = r->o.experts;
    double same = 0, all = 0;
    for (uint64_t i = 0; i < n; i++) {
        const double bias = (double)(i < n_in ? r->in[i] : r->out[i - n_in]);
        same += both(bias, rho);
        all += normal_below(bias);
    }
    return same / all;
}

/* ---- the mean over the last tokens ----------------------------------------------------------- */

/* Attention's weights over `back` = 0, 1, ... for queries and keys of equal elements, of which the
 * norm lets `n` frequencies from `first` on pass. */
static void kernel_of(uint64_t half, uint64_t first, uint64_t n, double *ret)
{
    double sum = 0;
    for (int back = 0; back < KERNEL; back++) {
        double cosines = 0;
        for (uint64_t i = first; i < first + n; i++)
            cosines += cos(back * pow((double)MKMODEL_ROPE_BASE, -(double)i / (double)half));
        ret[back] = exp(peak * (cosines / (double)n - 1));
        sum += ret[back];
    }
    for (int back = 0; back < KERNEL; back++)
        ret[back] /= sum;
}

/* Sets gains, mean_std and figures.window; *ret_stays: the correlation of two tokens' means. */
static enum err_code choose_window(struct mkmodel_router *r, double *ret_stays, struct err *e)
{
    const uint64_t half = r->o.head_dim / 2;
    uint64_t n = (uint64_t)(0.34 * (double)half + 0.5); /* two decades of frequencies */
    double *kernel = alloc_zero(ALLOC_MISC, KERNEL, sizeof(*kernel));
    if (kernel == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the routers' mean");
    n = n > 0 ? n : 1;
    for (uint64_t first = 0; first + n <= half; first++) {
        double squares = 0, next = 0;
        kernel_of(half, first, n, kernel);
        for (int i = 0; i < KERNEL; i++) {
            squares += kernel[i] * kernel[i];
            next += i > 0 ? kernel[i] * kernel[i - 1] : 0;
        }
        *ret_stays = next / squares;
        r->mean_std = sqrt(squares);
        r->figures.window = 1 / squares;
        if (*ret_stays < 0.9 && first + n < half)
            continue;
        /* The logit of equal elements 1 is 2 * gain * n / sqrt(head_dim). */
        for (uint64_t i = first; i < first + n; i++)
            r->gains[i] = r->gains[i + half] =
                (float)(peak * sqrt((double)r->o.head_dim) / (2 * (double)n));
        break;
    }
    alloc_free(kernel);
    return ERR_OK;
}

/* Divides the logit's deviation among the token's own part and the mean. */
static enum err_code choose_parts(struct mkmodel_router *r, double stays, struct err *e)
{
    double low = 0, high = stays;
    r->figures.base = shared(r, 0);
    r->figures.highest = shared(r, stays);
    if (r->o.locality > r->figures.highest)
        return err_set(e, ERR_ARGUMENT,
                       "locality %.3f: %.3f is the highest with this shape and popularity",
                       r->o.locality, r->figures.highest);
    for (int i = 0; i < 40; i++) {
        const double rho = (low + high) / 2;
        if (shared(r, rho) < r->o.locality)
            low = rho;
        else
            high = rho;
    }
    r->mean = sqrt(high / stays);
    r->own = sqrt(1 - r->mean * r->mean);
    r->figures.locality = shared(r, high);
    return ERR_OK;
}

/* ---- weights --------------------------------------------------------------------------------- */

static double uniform(struct mkmodel_block_noise *n)
{
    return (double)(mkmodel_block_next(n) >> 11) * 0x1p-53;
}

static void shuffle(struct mkmodel_block_noise *n, uint32_t *order, uint64_t count)
{
    for (uint64_t i = 0; i < count; i++)
        order[i] = (uint32_t)i;
    for (uint64_t i = count; i > 1; i--) {
        const uint64_t k = (uint64_t)(uniform(n) * (double)i);
        const uint32_t t = order[i - 1];
        order[i - 1] = order[k];
        order[k] = t;
    }
}

static float *weights_of(const struct mkmodel_router *r, uint64_t layer, uint64_t expert)
{
    return r->weights + (layer * r->o.experts + expert) * ASIDE;
}

/* Biases of one layer. popular: experts by rank. A topic prefers the first of a shuffled list, and
 * among these as among the others the layer's ranks hold. */
static void set_biases(struct mkmodel_router *r, struct mkmodel_block_noise *n, uint64_t layer,
                       uint32_t *popular, uint32_t *drawn)
{
    const uint64_t experts = r->o.experts, n_in = r->figures.preferred;
    shuffle(n, popular, experts);
    if (r->o.topics == 0)
        for (uint64_t i = 0; i < experts; i++)
            weights_of(r, layer, popular[i])[AT_ALL] = r->out[i];
    for (uint64_t t = 0; t < r->o.topics; t++) {
        uint64_t rank_in = 0, rank_out = 0;
        shuffle(n, drawn, experts);
        for (uint64_t i = 0; i < experts; i++) {
            /* drawn[x] is a random number of expert x: those below n_in are preferred. */
            const bool in = drawn[popular[i]] < n_in;
            weights_of(r, layer, popular[i])[AT_TOPIC + t] =
                in ? r->in[rank_in++] : r->out[rank_out++];
        }
    }
}

static void set_deviates(struct mkmodel_router *r, struct mkmodel_block_noise *n, uint64_t layer)
{
    /* The mean's elements arrive as the code divided by the embedding's root mean square, then
     * averaged. */
    const double plain = (double)(r->o.hidden - ASIDE), marks = N_CODE + 1 + (r->o.topics > 0);
    const double rms = sqrt((plain + marks) / (double)r->o.hidden);
    const double own = r->own * sqrt(3.0 / N_CODE);
    const double mean = r->mean * sqrt(3.0 / (double)r->n_mean) * rms / r->mean_std;
    for (uint64_t x = 0; x < r->o.experts; x++) {
        float *w = weights_of(r, layer, x);
        for (uint64_t i = 0; i < N_CODE; i++)
            w[AT_CODE + i] = (float)(own * (2 * uniform(n) - 1));
        for (uint64_t i = 0; i < r->n_mean; i++)
            w[AT_MEAN + i] = (float)(mean * r->o.emb_std * (2 * uniform(n) - 1));
    }
}

static enum err_code set_weights(struct mkmodel_router *r, struct err *e)
{
    const uint64_t experts = r->o.experts;
    uint32_t *orders = alloc_zero(ALLOC_MISC, experts * 2, sizeof(*orders));
    r->weights = alloc_zero(ALLOC_MISC, r->o.layers * experts * ASIDE, sizeof(*r->weights));
    if (orders == NULL || r->weights == NULL) {
        alloc_free(orders);
        return err_set(e, ERR_NOMEM, "no memory for the routers of %llu layers",
                       (unsigned long long)r->o.layers);
    }
    for (uint64_t layer = 0; layer < r->o.layers; layer++) {
        struct mkmodel_block_noise n = {(r->o.seed + 1) * UINT64_C(0xd1342543de82ef95) ^ layer
                                                                                             << 20};
        n.state = mkmodel_block_next(&n);
        set_biases(r, &n, layer, orders, orders + experts);
        set_deviates(r, &n, layer);
    }
    alloc_free(orders);
    return ERR_OK;
}

/* ---- the object ------------------------------------------------------------------------------ */

static enum err_code check_options(const struct mkmodel_options *o, struct err *e)
{
    if (o->hidden < 2 * ASIDE)
        return err_set(e, ERR_ARGUMENT, "hidden %llu: routers with set statistics need %d",
                       (unsigned long long)o->hidden, 2 * ASIDE);
    if (o->topics > MKMODEL_MAX_TOPICS || (o->topics > 0 && o->experts < 4))
        return err_set(e, ERR_ARGUMENT, "topics %llu: at most %d, and 4 experts are needed",
                       (unsigned long long)o->topics, MKMODEL_MAX_TOPICS);
    return ERR_OK;
}

static enum err_code set_popularity(struct mkmodel_router *r, struct err *e)
{
    const uint64_t n = r->o.experts;
    const double k = (double)r->o.top_k;
    uint64_t n_in = 0;
    r->in = alloc_zero(ALLOC_MISC, n, sizeof(*r->in));
    r->out = alloc_zero(ALLOC_MISC, n, sizeof(*r->out));
    if (r->in == NULL || r->out == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the routers' biases");
    if (r->o.topics > 0) {
        n_in = n / 4 > r->o.top_k ? n / 4 : r->o.top_k;
        n_in = n_in < n ? n_in : n - 1;
        biases_by_rank(n_in, r->o.zipf, topic_share * k, r->in);
    }
    biases_by_rank(n - n_in, r->o.zipf, n_in > 0 ? (1 - topic_share) * k : k, r->out);
    r->figures.preferred = n_in;
    return ERR_OK;
}

enum err_code mkmodel_router_new(const struct mkmodel_options *o, struct mkmodel_router **ret,
                                 struct err *e)
{
    double stays = 0;
    enum err_code rc = check_options(o, e);
    if (rc != ERR_OK)
        return rc;
    struct mkmodel_router *r = alloc_zero(ALLOC_MISC, 1, sizeof(*r));
    if (r == NULL)
        return err_set(e, ERR_NOMEM, "no memory for the routers");
    r->o = *o;
    r->n_mean = o->head_dim < N_CODE ? o->head_dim : N_CODE;
    rc = set_popularity(r, e);
    if (rc == ERR_OK)
        rc = choose_window(r, &stays, e);
    if (rc == ERR_OK)
        rc = choose_parts(r, stays, e);
    if (rc == ERR_OK)
        rc = set_weights(r, e);
    if (rc == ERR_OK)
        *ret = r;
    else
        mkmodel_router_free(r);
    return rc;
}

void mkmodel_router_free(struct mkmodel_router *r)
{
    if (r == NULL)
        return;
    alloc_free(r->weights);
    alloc_free(r->in);
    alloc_free(r->out);
    alloc_free(r);
}

struct mkmodel_router_figures mkmodel_router_figures(const struct mkmodel_router *r)
{
    return r->figures;
}

/* ---- blocks ---------------------------------------------------------------------------------- */

/* Writes the block with the sign `sign` where it covers element `at`, zeros elsewhere. */
static void mark_one(const struct mkmodel_tensor *t, uint64_t column, uint64_t at, float size,
                     void *to)
{
    int8_t signs[MKMODEL_BLOCK_MAX] = {0};
    if (at >= column && at - column < k_format_block_elements(t->format))
        signs[at - column] = 1;
    mkmodel_block_marks(t->format, size, signs, to);
}

static void mark_none(const struct mkmodel_tensor *t, void *to)
{
    mark_one(t, 0, UINT64_MAX, 0.0f, to);
}

static uint64_t topic_of(const struct mkmodel_options *o, uint64_t token)
{
    return token * o->topics / o->vocab;
}

static bool embedding(const struct mkmodel_router *r, const struct mkmodel_tensor *t, uint64_t row,
                      uint64_t column, void *to)
{
    const uint64_t first = r->o.hidden - ASIDE;
    int8_t all[ASIDE] = {0};
    if (column < first)
        return false;
    struct mkmodel_block_noise n = {(r->o.seed + 2) * UINT64_C(0x9fb21c651e98df25) ^ row << 8};
    n.state = mkmodel_block_next(&n);
    const uint64_t bits[2] = {mkmodel_block_next(&n), mkmodel_block_next(&n)};
    all[AT_ALL] = 1;
    if (r->o.topics > 0)
        all[AT_TOPIC + topic_of(&r->o, row)] = 1;
    for (uint64_t i = 0; i < N_CODE; i++)
        all[AT_CODE + i] = bits[i / 64] >> (i % 64) & 1 ? 1 : -1;
    mkmodel_block_marks(t->format, t->std, all + (column - first), to);
    return true;
}

static bool head(const struct mkmodel_router *r, const struct mkmodel_tensor *t, uint64_t row,
                 uint64_t column, void *to)
{
    const uint64_t first = r->o.hidden - ASIDE;
    if (r->o.topics == 0 || column < first)
        return false;
    mark_one(t, column, first + AT_TOPIC + topic_of(&r->o, row), head_size, to);
    return true;
}

/* Layer 0, first head of keys and values and its first head of queries: constant queries and keys,
 * the code as value. */
static bool first_heads(const struct mkmodel_router *r, const struct mkmodel_tensor *t,
                        uint64_t row, uint64_t column, void *to)
{
    const uint64_t first = r->o.hidden - ASIDE;
    if (t->layer != 0 || row >= (t->role == MKMODEL_V ? r->n_mean : r->o.head_dim))
        return false;
    mark_one(t, column, first + (t->role == MKMODEL_V ? AT_CODE + row : AT_ALL), 1.0f, to);
    return true;
}

/* What writes the residual leaves the elements set aside alone, but for the mean in layer 0. */
static bool residual(const struct mkmodel_router *r, const struct mkmodel_tensor *t, uint64_t row,
                     uint64_t column, void *to)
{
    const uint64_t first = r->o.hidden - ASIDE, at = row % r->o.hidden;
    if (at < first)
        return false;
    if (t->role == MKMODEL_ATTN_OUTPUT && t->layer == 0 && at - first >= AT_MEAN &&
        at - first - AT_MEAN < r->n_mean)
        mark_one(t, column, at - first - AT_MEAN, 1.0f, to);
    else
        mark_none(t, to);
    return true;
}

static bool value(float x, void *to)
{
    const uint32_t bits = k_float_bits(x);
    memcpy(to, &bits, sizeof(bits));
    return true;
}

bool mkmodel_router_shapes(const struct mkmodel_router *r, const struct mkmodel_tensor *t)
{
    switch (t->role) {
    case MKMODEL_EMBD:
    case MKMODEL_ROUTER:
    case MKMODEL_ATTN_OUTPUT:
    case MKMODEL_DOWN:
        return true;
    case MKMODEL_OUTPUT:
        return r->o.topics > 0;
    case MKMODEL_Q:
    case MKMODEL_K:
    case MKMODEL_V:
    case MKMODEL_Q_NORM:
        return t->layer == 0;
    default:
        return false;
    }
}

bool mkmodel_router_block(const struct mkmodel_router *r, const struct mkmodel_tensor *t,
                          uint64_t row, uint64_t column, void *to)
{
    const uint64_t first = r->o.hidden - ASIDE;
    switch (t->role) {
    case MKMODEL_EMBD:
        return embedding(r, t, row, column, to);
    case MKMODEL_OUTPUT:
        return head(r, t, row, column, to);
    case MKMODEL_Q:
    case MKMODEL_K:
    case MKMODEL_V:
        return first_heads(r, t, row, column, to);
    case MKMODEL_Q_NORM:
        return t->layer == 0 && value(r->gains[column], to);
    case MKMODEL_ATTN_OUTPUT:
    case MKMODEL_DOWN:
        return residual(r, t, row, column, to);
    case MKMODEL_ROUTER:
        return value(column < first ? 0.0f : weights_of(r, t->layer, row)[column - first], to);
    default:
        return false;
    }
}
