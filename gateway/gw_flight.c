#include "gw_flight.h"

#include <assert.h>

enum {
    STEP_US = 100 * 1000 /* records are as much apart, or they are one */
};

struct gw_flight *gw_flight_begin(struct gw_flights *fs, struct gw_request_choice *choice,
                                  const struct proto_run *run, uint64_t now_ns)
{
    assert(fs->n < GW_FLIGHT_MOST);
    struct gw_flight *f = &fs->list[fs->n++];
    *f = (struct gw_flight){
        .id = ++fs->last_id,
        .choice = choice,
        .n_prompt = run->n_prompt,
        .first_index = run->first_index,
        .max_new = run->max_new,
        .flags = run->flags,
        .sent_ns = now_ns,
    };
    return f;
}

struct gw_flight *gw_flight_find(struct gw_flights *fs, uint64_t id)
{
    for (unsigned i = 0; i < fs->n; i++)
        if (fs->list[i].id == id)
            return &fs->list[i];
    return NULL;
}

void gw_flight_end(struct gw_flights *fs, struct gw_flight *f)
{
    *f = fs->list[--fs->n];
}

/* NULL: it does not run, and *e says so. */
static struct gw_flight *find(struct gw_flights *fs, uint64_t id, const char *what, struct err *e)
{
    struct gw_flight *f = gw_flight_find(fs, id);
    if (!f)
        err_set(e, ERR_PROTOCOL, "%s for request %llu, which does not run", what,
                (unsigned long long)id);
    return f;
}

static enum err_code ids_check(const struct gw_flights *fs, const struct gw_flight *f,
                               const struct proto_tokens *m, bool want_lp, struct err *e)
{
    for (unsigned i = 0; i < m->n; i++) {
        const struct proto_token *t = &m->tokens[i];
        if (t->id >= fs->n_vocab)
            return err_set(e, ERR_PROTOCOL, "token %u for request %llu: the vocabulary has %u",
                           t->id, (unsigned long long)f->id, fs->n_vocab);
        if (want_lp && (t->flags & PROTO_TOKEN_LOGPROB) == 0)
            return err_set(e, ERR_PROTOCOL, "a token for request %llu without its logprob",
                           (unsigned long long)f->id);
        for (unsigned k = 0; k < t->n_top; k++)
            if (t->top[k].id >= fs->n_vocab)
                return err_set(e, ERR_PROTOCOL,
                               "best token %u for request %llu: the vocabulary "
                               "has %u",
                               t->top[k].id, (unsigned long long)f->id, fs->n_vocab);
    }
    return ERR_OK;
}

enum err_code gw_flight_tokens(struct gw_flights *fs, uint64_t id, const struct proto_tokens *m,
                               struct gw_flight **ret, struct err *e)
{
    struct gw_flight *f = find(fs, id, "tokens", e);
    if (!f)
        return ERR_PROTOCOL;
    bool prompt = (m->tokens[0].flags & PROTO_TOKEN_PROMPT) != 0;
    uint32_t asked_lp = prompt ? PROTO_RUN_PROMPT_LOGPROBS : PROTO_RUN_LOGPROBS;
    uint32_t due = prompt ? f->n_prompt_told : f->first_index + f->n_told;
    uint32_t most = prompt ? f->n_prompt : f->max_new;
    if (prompt && (f->flags & PROTO_RUN_PROMPT_LOGPROBS) == 0)
        return err_set(e, ERR_PROTOCOL,
                       "prompt tokens for request %llu, which did not ask for them",
                       (unsigned long long)id);
    if (m->first_index != due && !f->cancelled)
        return err_set(e, ERR_PROTOCOL, "%stoken %u for request %llu, where %u is due",
                       prompt ? "prompt " : "", m->first_index, (unsigned long long)id, due);
    if (m->n > most - due && !f->cancelled)
        return err_set(e, ERR_PROTOCOL, "%stokens %u to %u for request %llu, which has %u at most",
                       prompt ? "prompt " : "", due, due + m->n - 1, (unsigned long long)id, most);
    enum err_code code = ids_check(fs, f, m, (f->flags & asked_lp) != 0, e);
    if (code != ERR_OK)
        return code;
    if (prompt)
        f->n_prompt_told += m->n;
    else
        f->n_told += m->n;
    *ret = f;
    return ERR_OK;
}

enum err_code gw_flight_progress(struct gw_flights *fs, uint64_t id, const struct proto_progress *m,
                                 struct gw_flight **ret, struct err *e)
{
    struct gw_flight *f = find(fs, id, "progress", e);
    if (!f)
        return ERR_PROTOCOL;
    if (m->total < f->n_prompt)
        return err_set(e, ERR_PROTOCOL, "progress of %u tokens for request %llu, which sent %u",
                       m->total, (unsigned long long)id, f->n_prompt);
    *ret = f;
    return ERR_OK;
}

enum err_code gw_flight_done(struct gw_flights *fs, uint64_t id, const struct proto_done *m,
                             struct gw_flight **ret, struct err *e)
{
    struct gw_flight *f = find(fs, id, "done", e);
    if (!f)
        return ERR_PROTOCOL;
    *ret = f;
    if (f->cancelled || m->finish == PROTO_FINISH_CANCELLED)
        return ERR_OK;
    if (m->usage.generated != f->n_told)
        return err_set(e, ERR_PROTOCOL, "done after %u tokens for request %llu, of which %u came",
                       m->usage.generated, (unsigned long long)id, f->n_told);
    if (m->finish == PROTO_FINISH_LENGTH && f->first_index + f->n_told != f->max_new)
        return err_set(e, ERR_PROTOCOL, "done (length) for request %llu after %u of %u tokens",
                       (unsigned long long)id, f->first_index + f->n_told, f->max_new);
    if ((f->flags & PROTO_RUN_PROMPT_LOGPROBS) != 0 && f->n_prompt_told != f->n_prompt)
        return err_set(e, ERR_PROTOCOL, "done for request %llu after %u of %u prompt tokens",
                       (unsigned long long)id, f->n_prompt_told, f->n_prompt);
    return ERR_OK;
}

enum err_code gw_flight_error(struct gw_flights *fs, uint64_t id, struct gw_flight **ret,
                              struct err *e)
{
    struct gw_flight *f = find(fs, id, "an error", e);
    if (f)
        *ret = f;
    return f ? ERR_OK : ERR_PROTOCOL;
}

/* A run may lie where a record does not look, but not for long. The answer to a question that came
 * after the run was put together when the worker's loop had read the run; the engine takes up all
 * that came before each record that it makes. So the first such record may be older than the run,
 * the second may have been begun before it. Times of the worker's clock tell records apart, however
 * late they come. */
enum err_code gw_flight_status(struct gw_flights *fs, const struct proto_sequence *sequences,
                               unsigned n, uint64_t asked_ns, uint64_t taken_us, struct err *e)
{
    for (unsigned i = 0; i < fs->n; i++) {
        struct gw_flight *f = &fs->list[i];
        bool listed = false;
        for (unsigned k = 0; k < n && !listed; k++)
            listed = sequences[k].request_id == f->id;
        if (listed)
            f->missed = 0;
        if (listed || asked_ns <= f->sent_ns ||
            (f->missed > 0 && taken_us < f->missed_us + STEP_US))
            continue;
        f->missed_us = taken_us;
        if (++f->missed >= GW_FLIGHT_MISSES)
            return err_set(e, ERR_PROTOCOL, "the worker does not know request %llu any more",
                           (unsigned long long)f->id);
    }
    return ERR_OK;
}
