/* Generated models whose routers choose with wanted statistics. The last 256 elements of the
 * residual are set aside: nothing but the embedding and one head of layer 0 writes them, and the
 * routers read nothing else:
 *
 *     0        1 in every token: popularity without topics
 *     1..60    1 in the tokens of topic 0, 1, ...: popularity within the topic
 *     64..159  a code of +-1, another one for each token: what is the token's own
 *     160..255 the mean of that code over the last tokens, by a head of layer 0 whose rotary
 *              frequencies are chosen so that it looks at about that many: what stays
 *
 * All of these values are exact in every format. A softmax's choice does not change when all
 * logits are scaled, so that growth of the residual with depth does not matter: every layer has
 * the statistics asked for. Logits are a normal deviate of deviation 1 plus the expert's bias; with
 * the bias at the normal quantile of the wanted probability the k best are those above 0. */
#ifndef ISLET_MKMODEL_ROUTER_H
#define ISLET_MKMODEL_ROUTER_H

#include "mkmodel_plan.h"

struct mkmodel_router;

struct mkmodel_router_figures {
    double base;        /* locality by popularity and topics alone */
    double highest;     /* the most that can be had */
    double locality;    /* what was made: the wanted share, or base where that is higher */
    double window;      /* effective number of tokens in the mean */
    uint64_t preferred; /* experts of a topic in a layer; 0 without topics */
};

/* ERR_ARGUMENT: a shape without room, or a locality above the highest. Gives *ret; free with
 * mkmodel_router_free. */
enum err_code mkmodel_router_new(const struct mkmodel_options *o, struct mkmodel_router **ret,
                                 struct err *e) __attribute__((warn_unused_result));
void mkmodel_router_free(struct mkmodel_router *r); /* NULL is fine */
struct mkmodel_router_figures mkmodel_router_figures(const struct mkmodel_router *r);
/* True when mkmodel_router_block has something to say about the tensor. */
bool mkmodel_router_shapes(const struct mkmodel_router *r, const struct mkmodel_tensor *t);
/* Writes the block of the tensor that begins at element `column` of `row` (rows of all experts
 * counted through); false: it is left to chance. Any thread. */
bool mkmodel_router_block(const struct mkmodel_router *r, const struct mkmodel_tensor *t,
                          uint64_t row, uint64_t column, void *to);

#endif
