/* Every robust turn of the reference conversations, answered through the engine with exactly the
 * reference's tokens: turn by turn as a user would ask, so that prefixes are shared, and then all
 * at once from an engine that has seen none of them. */
#include <jansson.h>
#include <stdio.h>
#include <string.h>

#include "alloc.h"
#include "engine_rig.h"

enum {
    MAX_TURNS = 256,
    MAX_TOKENS = 4096,
    MAX_ANSWER = 400,
    ROBUST_TURNS = 83 /* of each file */
};

struct turn {
    uint32_t chat, number;
    uint32_t *prompt, *answer;
    uint32_t n_prompt, n_answer;
};

struct tally {
    unsigned passed, failed;
};

static uint32_t *read_ids(const json_t *list, uint32_t *ret_n)
{
    const size_t n = json_array_size(list);
    uint32_t *ids = n == 0 || n > MAX_TOKENS ? NULL : alloc_zero(ALLOC_MISC, n, sizeof(*ids));
    for (size_t i = 0; ids != NULL && i < n; i++)
        ids[i] = (uint32_t)json_integer_value(json_array_get(list, i));
    *ret_n = (uint32_t)n;
    return ids;
}

static uint32_t read_turns(const char *path, struct turn *turns, uint32_t *ret_eos)
{
    json_error_t why;
    size_t c, t;
    json_t *root = json_load_file(path, 0, &why), *chat, *turn;
    uint32_t n = 0;
    if (root == NULL) {
        printf("%s: %s\n", path, why.text);
        return 0;
    }
    json_array_foreach(json_object_get(root, "chats"), c, chat)
    {
        json_array_foreach(json_object_get(chat, "turns"), t, turn)
        {
            struct turn *to = &turns[n];
            if (n == MAX_TURNS || !json_is_true(json_object_get(turn, "robust")))
                continue;
            *to = (struct turn){.chat = (uint32_t)c, .number = (uint32_t)t};
            to->prompt = read_ids(json_object_get(turn, "prompt_tokens"), &to->n_prompt);
            to->answer = read_ids(json_object_get(turn, "answer_tokens"), &to->n_answer);
            if (to->prompt == NULL || to->answer == NULL)
                return 0;
            if (strcmp(json_string_value(json_object_get(turn, "finish")), "stop") == 0)
                *ret_eos = to->answer[to->n_answer - 1];
            n++;
        }
    }
    json_decref(root);
    return n;
}

static void check(const struct turn *t, const struct engine_rig_answer *a, const char *how,
                  struct tally *tally)
{
    uint32_t same = 0;
    while (same < a->n_tokens && same < t->n_answer && a->tokens[same].id == t->answer[same])
        same++;
    if (a->ended && !a->failed && a->n_tokens == t->n_answer && same == t->n_answer) {
        tally->passed++;
        return;
    }
    tally->failed++;
    printf("  FAILED %s: chat %u turn %u: %u of %u tokens, equal up to %u %s\n", how, t->chat,
           t->number, a->n_tokens, t->n_answer, same, a->error.text);
}

static void submit(struct engine_rig *rig, const struct turn *t, uint32_t eos)
{
    struct proto_run run = engine_rig_run(t->prompt, t->n_prompt);
    run.max_new = t->answer[t->n_answer - 1] == eos ? MAX_ANSWER : t->n_answer;
    run.n_end = 1;
    run.end[0] = eos;
    engine_rig_submit(rig, &run);
}

/* The turns in groups of so many at a time, from an engine that has seen none of them. */
static uint64_t answer_all(struct engine_rig *rig, const struct turn *turns, uint32_t n,
                           uint32_t at_once, uint32_t eos, const char *how, struct tally *tally)
{
    uint64_t cached = 0;
    for (uint32_t first = 0; first < n; first += at_once) {
        const uint32_t group = n - first < at_once ? n - first : at_once;
        for (uint32_t i = 0; i < group; i++)
            submit(rig, &turns[first + i], eos);
        engine_rig_finish(rig);
        for (uint32_t i = 0; i < group; i++) {
            check(&turns[first + i], &rig->answers[i], how, tally);
            cached += rig->answers[i].done.usage.cached;
        }
        engine_rig_forget(rig);
    }
    return cached;
}

static void chat_file(struct engine_rig *rig, const char *model, const char *chats,
                      struct tally *tally)
{
    static const struct {
        const char *how;
        uint32_t at_once;
    } ways[] = {{"one by one", 1}, {"all at once", ENGINE_RIG_MAX}};
    struct turn *turns = alloc_zero(ALLOC_MISC, MAX_TURNS, sizeof(*turns));
    const struct engine_config config = engine_rig_config(model);
    uint32_t eos = 0;
    const uint32_t n = turns == NULL ? 0 : read_turns(chats, turns, &eos);
    if (n != ROBUST_TURNS) {
        printf("FAILED %s: %u robust turns, %d expected\n", chats, n, ROBUST_TURNS);
        tally->failed++;
    }
    for (size_t w = 0; w < sizeof(ways) / sizeof(ways[0]) && n > 0; w++) {
        const unsigned failed = tally->failed;
        engine_rig_start(rig, &config);
        if (engine_rig_wait_loaded(rig) == PROTO_SERVING) {
            const uint64_t cached =
                answer_all(rig, turns, n, ways[w].at_once, eos, ways[w].how, tally);
            printf("%s: %u robust turns %s, %llu prompt tokens from shared pages: %u wrong\n",
                   strrchr(chats, '/') + 1, n, ways[w].how, (unsigned long long)cached,
                   tally->failed - failed);
        } else {
            printf("FAILED %s does not load\n", model);
            tally->failed++;
        }
        engine_rig_stop(rig);
    }
    for (uint32_t i = 0; i < n; i++) {
        alloc_free(turns[i].prompt);
        alloc_free(turns[i].answer);
    }
    alloc_free(turns);
}

int main(void)
{
    struct tally tally = {0, 0};
    struct engine_rig *rig = alloc_zero(ALLOC_MISC, 1, sizeof(*rig));
    if (rig == NULL)
        return 1;
    chat_file(rig, ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf",
              ISLET_TEST_DIR "/models/robust_chat-q8_0.json", &tally);
    chat_file(rig, ISLET_TEST_DIR "/models/tinymoe-q4_k_m.gguf",
              ISLET_TEST_DIR "/models/robust_chat-q4_k_m.json", &tally);
    alloc_free(rig);
    printf("%u passed, %u failed\n", tally.passed, tally.failed);
    return tally.failed == 0 ? 0 : 1;
}
