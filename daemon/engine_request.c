#include "engine_request.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "kernels.h"
#include "size.h"

/* Copies n bytes to *at and moves it on; the arrays' alignment falls from 8 to 1. */
static void *put(uint8_t **at, const void *from, size_t n)
{
    void *to = *at;
    if (n > 0)
        memcpy(to, from, n);
    *at += n;
    return to;
}

struct engine_request *engine_request_new(uint64_t handle, const struct proto_run *run,
                                          const char *client)
{
    const size_t tokens = (size_t)run->n_tokens * sizeof(*run->tokens);
    const size_t bias = (size_t)run->n_bias * sizeof(*run->bias);
    struct engine_job *j = alloc_get(ALLOC_REQUEST, sizeof(*j) + tokens + bias + run->session.size);
    if (j == NULL)
        return NULL;
    memset(j, 0, sizeof(*j));
    uint8_t *at = (uint8_t *)(j + 1);
    j->request.handle = handle;
    j->request.run = *run;
    j->request.run.tokens = put(&at, run->tokens, tokens);
    j->request.run.bias = put(&at, run->bias, bias);
    j->request.run.session.data = put(&at, run->session.data, run->session.size);
    j->request.run.trace = proto_text_of(""); /* the peer's matter */
    snprintf(j->request.client, sizeof(j->request.client), "%s", client);
    list_init(&j->open);
    list_init(&j->waiting);
    return &j->request;
}

void engine_request_free(struct engine_request *r)
{
    alloc_free(r);
}

static enum err_code check_settings(const struct proto_run *run, struct err *e)
{
    const struct {
        const char *name;
        float value, least, most;
    } settings[] = {{"temperature", run->temperature, -INFINITY, 1e30f},
                    {"top_p", run->top_p, 0.0f, 1.0f},
                    {"min_p", run->min_p, 0.0f, 1.0f},
                    {"presence", run->presence, -1e30f, 1e30f},
                    {"frequency", run->frequency, -1e30f, 1e30f},
                    {"repeat", run->repeat, 1e-30f, 1e30f}};
    for (size_t i = 0; i < sizeof(settings) / sizeof(settings[0]); i++)
        if (!(settings[i].value >= settings[i].least && settings[i].value <= settings[i].most))
            return err_set(e, ERR_ARGUMENT, "run_inference: %s is %g; it must be %g to %g",
                           settings[i].name, (double)settings[i].value, (double)settings[i].least,
                           (double)settings[i].most);
    for (uint16_t i = 0; i < run->n_bias; i++)
        if (isnan(run->bias[i].value) || run->bias[i].value == INFINITY)
            return err_set(e, ERR_ARGUMENT, "run_inference: the bias of token %u is %g",
                           run->bias[i].id, (double)run->bias[i].value);
    return ERR_OK;
}

enum err_code engine_request_check_run(const struct proto_run *run, struct err *e)
{
    if (run->n_prompt == 0)
        return err_set(e, ERR_ARGUMENT,
                       "run_inference: n_prompt is 0; a prompt has 1 token at least");
    if (run->n_prompt > run->n_tokens || run->n_tokens - run->n_prompt != run->first_index)
        return err_set(e, ERR_ARGUMENT,
                       "run_inference: %u tokens with n_prompt %u do not fit first_index %u",
                       run->n_tokens, run->n_prompt, run->first_index);
    if (run->n_end > PROTO_MAX_END || run->n_bias > PROTO_MAX_BIAS || run->n_top > PROTO_MAX_TOP)
        return err_set(e, ERR_ARGUMENT,
                       "run_inference: n_end %u, n_bias %u, n_top %u; the most are %d, %d, %d",
                       run->n_end, run->n_bias, run->n_top, PROTO_MAX_END, PROTO_MAX_BIAS,
                       PROTO_MAX_TOP);
    return check_settings(run, e);
}

enum err_code engine_request_check_model(const struct proto_run *run, uint32_t n_vocab,
                                         uint32_t n_ctx, struct err *e)
{
    if (run->n_prompt >= n_ctx || run->n_tokens > n_ctx)
        return err_set(e, ERR_ARGUMENT,
                       "run_inference: %u prompt tokens and %u of the answer; the context is %u, "
                       "and one place must be left for the answer",
                       run->n_prompt, run->first_index, n_ctx);
    for (uint32_t i = 0; i < run->n_tokens; i++)
        if (run->tokens[i] >= n_vocab)
            return err_set(e, ERR_ARGUMENT,
                           "run_inference: token %u is id %u; the vocabulary ends at %u", i,
                           run->tokens[i], n_vocab - 1);
    for (uint16_t i = 0; i < run->n_bias; i++)
        if (run->bias[i].id >= n_vocab)
            return err_set(e, ERR_ARGUMENT,
                           "run_inference: a bias is for id %u; the vocabulary ends at %u",
                           run->bias[i].id, n_vocab - 1);
    return ERR_OK;
}
