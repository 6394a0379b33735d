#include "gw_text.h"

#include <string.h>

#include "gw_json_out.h"
#include "gw_template.h"
#include "gw_tokenizer.h"
#include "utf8.h"

enum {
    MAX_ENTRIES_BYTES = 1 << 30
};

enum err_code gw_text_init(struct gw_text *t, const struct gw_request_choice *c,
                           const struct gw_tokenizer *tokenizer,
                           const struct gw_template_facts *facts, struct err *e)
{
    const struct gw_request *q = c->request;
    struct gw_stop_config config = {.stops = q->ask.stops, .n_stops = q->ask.n_stops};
    bool splits = q->ask.kind == GW_CHAT_REQUEST_CHAT &&
                  q->ask.reasoning_format != GW_CHAT_REQUEST_FORMAT_NONE && facts &&
                  facts->think_open;
    if (splits) {
        config.think_open = facts->think_open;
        config.think_close = facts->think_close;
        config.open = q->opens_thoughts;
        config.open_bare = q->opens_bare;
    }
    *t = (struct gw_text){.choice = c, .tokenizer = tokenizer};
    t->collects = q->ask.logprobs || q->ask.return_tokens;
    t->echoed = !q->ask.echo;
    t->ends = t->starts = t->logprobs = t->ids = BUF_INIT(MAX_ENTRIES_BYTES);
    gw_openai_columns_init(&t->columns, MAX_ENTRIES_BYTES);
    return gw_stop_new(&config, &t->stop, e);
}

void gw_text_done(struct gw_text *t)
{
    gw_stop_free(t->stop);
    buf_done(&t->ends);
    buf_done(&t->starts);
    buf_done(&t->logprobs);
    buf_done(&t->ids);
    gw_openai_columns_done(&t->columns);
    *t = (struct gw_text){0};
}

void gw_text_clear_entries(struct gw_text *t)
{
    if (!t->has_entries)
        return;
    buf_clear(&t->logprobs);
    buf_clear(&t->ids);
    gw_openai_columns_clear(&t->columns);
    t->has_entries = false;
}

static uint64_t points_of(const char *text, size_t n)
{
    uint64_t points = 0;
    for (size_t i = 0; i < n; i++)
        points += ((uint8_t)text[i] & 0xC0) != 0x80;
    return points;
}

/* ---- entries ---- */

static void entry_add(struct gw_text *t, uint32_t id, const struct gw_request_lp *lp,
                      uint64_t offset)
{
    const struct gw_chat_request *ask = &t->choice->request->ask;
    t->has_entries = true;
    if (ask->return_tokens) {
        if (t->ids.size > 0)
            buf_byte(&t->ids, ',');
        gw_json_out_u64(&t->ids, id);
    }
    if (!ask->logprobs)
        return;
    if (ask->kind == GW_CHAT_REQUEST_COMPLETION) {
        gw_openai_columns_add(&t->columns, t->tokenizer, id, lp, offset);
        return;
    }
    if (t->logprobs.size > 0)
        buf_byte(&t->logprobs, ',');
    gw_openai_logprob(&t->logprobs, t->tokenizer, id, lp);
}

static uint64_t number_at(const struct buf *b, size_t i)
{
    uint64_t value;
    memcpy(&value, b->data + i * sizeof value, sizeof value);
    return value;
}

/* Entries of waiting tokens whose bytes end at or before `end`; with last, of those that begin
 * before it. */
static void entries_report(struct gw_text *t, uint64_t end, bool last)
{
    const struct gw_request_choice *c = t->choice;
    const struct gw_request *q = c->request;
    size_t n = t->ends.size / sizeof(uint64_t), i = 0;
    for (; i < n; i++) {
        uint64_t ends_at = number_at(&t->ends, i);
        uint64_t begins_at = i > 0 ? number_at(&t->ends, i - 1) : t->reported_bytes;
        uint32_t id = c->ids[t->reported + i];
        if (ends_at > end && !(last && begins_at < end))
            break;
        if (gw_request_is_end(q, id))
            continue;
        const struct gw_request_lp *lp =
            q->ask.logprobs ? gw_request_lp_at(q, c->lps, t->reported + (uint32_t)i) : NULL;
        entry_add(t, id, lp, number_at(&t->starts, i));
    }
    if (i == 0)
        return;
    t->reported_bytes = number_at(&t->ends, i - 1);
    t->reported += (uint32_t)i;
    buf_drop_front(&t->ends, i * sizeof(uint64_t));
    buf_drop_front(&t->starts, i * sizeof(uint64_t));
}

/* ---- steps ---- */

static enum err_code memory_check(const struct gw_text *t, struct err *e)
{
    if (buf_failed(&t->ends) || buf_failed(&t->starts) || buf_failed(&t->logprobs) ||
        buf_failed(&t->ids) || gw_openai_columns_failed(&t->columns))
        return err_set(e, ERR_NOMEM, "no memory for the answer");
    return ERR_OK;
}

bool gw_text_echo_is_due(struct gw_text *t)
{
    const struct gw_request_choice *c = t->choice;
    bool due = !t->echoed && (c->n_ids > 0 || c->state == GW_REQUEST_DONE);
    if (due)
        t->n_prompt_lps = c->n_prompt_lps;
    return due;
}

/* The prompt, with its own logprobs. */
enum err_code gw_text_echo(struct gw_text *t, gw_text_emit *emit, void *user, struct err *e)
{
    const struct gw_request_choice *c = t->choice;
    const struct gw_request *q = c->request;
    const struct gw_request_prompt *prompt = &q->prompts[c->prompt];
    struct buf text = BUF_INIT(MAX_ENTRIES_BYTES);
    struct utf8_gate gate = {0};
    for (uint32_t i = prompt->bos_added; i < prompt->n; i++) {
        const char *piece = "";
        size_t n = 0;
        if (!gw_tokenizer_piece(t->tokenizer, prompt->ids[i], true, &piece, &n))
            n = 0;
        if (t->collects)
            entry_add(t, prompt->ids[i],
                      q->ask.logprobs && i < t->n_prompt_lps ? gw_request_lp_at(q, c->prompt_lps, i)
                                                             : NULL,
                      t->points);
        t->points += points_of(piece, n);
        utf8_gate_push(&gate, piece, n, &text);
    }
    utf8_gate_finish(&gate, &text);
    enum err_code code =
        buf_failed(&text) ? err_set(e, ERR_NOMEM, "no memory for the answer") : memory_check(t, e);
    if (code == ERR_OK && text.size > 0)
        emit(user, GW_STOP_CONTENT, (const char *)text.data, text.size);
    buf_done(&text);
    t->echoed = true;
    return code;
}

static void segments_emit(struct gw_text *t, gw_text_emit *emit, void *user)
{
    const struct gw_stop_segment *segments;
    size_t n = gw_stop_segments(t->stop, &segments);
    t->matched = gw_stop_matched(t->stop, &t->match);
    for (size_t i = 0; i < n; i++) {
        if (t->collects)
            entries_report(t, segments[i].end, false);
        emit(user, segments[i].kind, segments[i].text, segments[i].size);
    }
}

static enum err_code token_step(struct gw_text *t, gw_text_emit *emit, void *user, struct err *e)
{
    const struct gw_request_choice *c = t->choice;
    uint32_t id = c->ids[t->pushed];
    const char *piece = "";
    size_t n = 0;
    bool thought = gw_stop_in_reasoning(t->stop);
    if (gw_request_is_end(c->request, id) ||
        !gw_tokenizer_piece(t->tokenizer, id, false, &piece, &n))
        n = 0;
    if (t->collects)
        buf_append(&t->starts, &t->points, sizeof t->points);
    t->bytes += n;
    t->points += points_of(piece, n);
    if (t->collects)
        buf_append(&t->ends, &t->bytes, sizeof t->bytes);
    t->pushed++;
    enum err_code code = memory_check(t, e); /* entries are read below */
    if (code == ERR_OK)
        code = gw_stop_push(t->stop, piece, n, e);
    if (code != ERR_OK)
        return code;
    segments_emit(t, emit, user);
    t->reasoning += thought || gw_stop_in_reasoning(t->stop);
    return ERR_OK;
}

static enum err_code end_step(struct gw_text *t, gw_text_emit *emit, void *user, struct err *e)
{
    enum err_code code = gw_stop_finish(t->stop, e);
    if (code != ERR_OK)
        return code;
    segments_emit(t, emit, user);
    if (t->collects)
        entries_report(t, t->matched ? gw_stop_kept(t->stop) : t->bytes, true);
    t->flushed = true;
    return ERR_OK;
}

enum err_code gw_text_step(struct gw_text *t, gw_text_emit *emit, void *user, bool *ret_more,
                           struct err *e)
{
    const struct gw_request_choice *c = t->choice;
    enum err_code code = ERR_OK;
    *ret_more = true;
    if (gw_text_echo_is_due(t))
        code = gw_text_echo(t, emit, user, e);
    else if (!t->matched && t->pushed < c->n_ids)
        code = token_step(t, emit, user, e);
    else if (!t->flushed && c->state == GW_REQUEST_DONE)
        code = end_step(t, emit, user, e);
    else
        *ret_more = false;
    return code == ERR_OK ? memory_check(t, e) : code;
}
