/* From a body to the text and the ids that the worker gets: what reaches the template, by a template
 * that writes all it is given. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "gguf_file.h"
#include "gw_model.h"
#include "gw_prompt.h"
#include "gw_template.h"
#include "gw_tokenizer.h"

static const char source[] =
    "{%- for m in messages -%}<{{ m.role }}{% if m.name %}:{{ m.name }}{% endif %}>{{ m.content }}"
    "{%- if m.reasoning_content %}~{{ m.reasoning_content }}{% endif %}"
    "{%- for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments | tojson }}]"
    "{%- endfor %}{% if m.tool_call_id %}({{ m.tool_call_id }}){% endif %}{% endfor -%}"
    "|{{ reasoning_effort }}|{{ enable_thinking }}|{{ x }}|{{ add_generation_prompt }}";

static struct gw_model model = {.id = "the-model"};

static int setup(void **state)
{
    struct gguf_file *file = NULL;
    struct err e = {0};
    struct gw_template_model facts = {0};
    (void)state;
    assert_int_equal(gguf_file_open(ISLET_TEST_DIR "/models/tinymoe-q8_0.gguf", &file, &e), ERR_OK);
    assert_int_equal(gw_tokenizer_new(file, &model.tokenizer, &e), ERR_OK);
    gguf_file_close(file);
    if (gw_template_compile(source, strlen(source), &facts, &model.template, &e) != ERR_OK)
        fail_msg("%s", e.text);
    assert_true(gw_template_get_facts(model.template)->thinking_switch);
    assert_true(gw_template_get_facts(model.template)->tool_calls);
    return 0;
}

static int teardown(void **state)
{
    (void)state;
    gw_template_free(model.template);
    gw_tokenizer_free(model.tokenizer);
    return 0;
}

static struct gw_prompt prompt_of(enum gw_chat_request_kind kind)
{
    return (struct gw_prompt){
        .model = &model,
        .aliases = alloc_text(ALLOC_REQUEST, "other, org/name:tag", 19),
        .kind = kind,
        .limits = {2048, 4096, 32},
    };
}

static bool read_body(struct gw_prompt *p, const char *body, struct gw_refusal *refusal)
{
    json_t *json = json_loads(body, 0, NULL);
    assert_non_null(json);
    bool ok = gw_prompt_read(p, json, refusal) && gw_prompt_encode(p, refusal);
    json_decref(json);
    return ok;
}

static void check_chat(const char *body, const char *want)
{
    struct gw_prompt p = prompt_of(GW_CHAT_REQUEST_CHAT);
    struct gw_refusal refusal = {0};
    if (!read_body(&p, body, &refusal))
        fail_msg("%s: %s", body, refusal.message);
    assert_string_equal(p.chat, want);
    assert_int_equal(p.n_prompts, 1);
    assert_true(p.prompts[0].n > 0);
    gw_prompt_done(&p);
}

static void check_refused(enum gw_chat_request_kind kind, const char *body, enum gw_error_code code,
                          const char *param, const char *part)
{
    struct gw_prompt p = prompt_of(kind);
    struct gw_refusal refusal = {0};
    assert_false(read_body(&p, body, &refusal));
    assert_string_equal(gw_error_name(refusal.code), gw_error_name(code));
    assert_string_equal(refusal.param, param);
    if (!strstr(refusal.message, part))
        fail_msg("\"%s\" does not say \"%s\"", refusal.message, part);
    gw_prompt_done(&p);
}

#define U "\"messages\":[{\"role\":\"user\",\"content\":\"a\"}]"

static void test_gw_prompt_effort_and_kwargs_reach_the_template(void **state)
{
    (void)state;
    check_chat("{" U "}", "<user>a||||True");
    check_chat("{" U ",\"reasoning_effort\":\"low\"}", "<user>a|low|||True");
    check_chat("{" U ",\"reasoning_effort\":\"none\"}", "<user>a||False||True");
    check_chat("{" U ",\"reasoning_effort\":null}", "<user>a||||True");
    check_chat("{" U ",\"reasoning_effort\":\"none\",\"chat_template_kwargs\":"
               "{\"enable_thinking\":true,\"x\":1.5}}",
               "<user>a||True|1.5|True");
    check_chat("{" U ",\"reasoning_effort\":\"max\",\"chat_template_kwargs\":"
               "{\"reasoning_effort\":\"own\",\"x\":null}}",
               "<user>a|own|||True");
    check_chat("{" U ",\"add_generation_prompt\":false}", "<user>a||||False");
}

static void test_gw_prompt_messages_reach_the_template(void **state)
{
    (void)state;
    check_chat("{\"messages\":[{\"role\":\"system\",\"content\":\"s\",\"name\":\"n\"},"
               "{\"role\":\"user\",\"content\":[{\"type\":\"text\",\"text\":\"b\"},"
               "{\"type\":\"input_text\",\"text\":\"c\"}],\"name\":null}]}",
               "<system:n>s<user>b\nc||||True");
    /* Arguments are an object for the template, and a text where they are none. */
    check_chat("{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},"
               "{\"role\":\"assistant\",\"content\":null,\"reasoning\":\"t\",\"tool_calls\":["
               "{\"id\":\"1\",\"type\":\"function\",\"function\":{\"name\":\"f\",\"arguments\":"
               "\"{\\\"k\\\": [1]}\"}},"
               "{\"id\":\"2\",\"type\":\"function\",\"function\":{\"name\":\"g\",\"arguments\":"
               "\"plain\"}}]},"
               "{\"role\":\"tool\",\"tool_call_id\":\"1\",\"content\":\"r\"}]}",
               "<user>a<assistant>~t[f {\"k\": [1]}][g \"plain\"]<tool>r(1)||||True");
}

static void test_gw_prompt_names_of_the_model(void **state)
{
    static const char *const names[] = {"", "default", "the-model", "other", "org/name:tag"};
    char body[160];
    (void)state;
    for (size_t i = 0; i < sizeof names / sizeof *names; i++) {
        snprintf(body, sizeof body, "{" U ",\"model\":\"%s\"}", names[i]);
        check_chat(body, "<user>a||||True");
    }
    check_refused(GW_CHAT_REQUEST_CHAT, "{" U ",\"model\":\"Other\"}", GW_ERROR_MODEL_NOT_FOUND,
                  "model", "served: the-model, other, org/name:tag");
    check_refused(GW_CHAT_REQUEST_COMPLETION, "{\"prompt\":\"a\",\"model\":\"x\"}",
                  GW_ERROR_MODEL_NOT_FOUND, "model", "served: the-model, other, org/name:tag");
}

static void test_gw_prompt_ids_go_as_they_are_and_texts_are_tokenised(void **state)
{
    struct gw_prompt p = prompt_of(GW_CHAT_REQUEST_COMPLETION);
    struct gw_refusal refusal = {0};
    (void)state;
    assert_true(read_body(&p, "{\"prompt\":[[5,6.0],[7]]}", &refusal));
    assert_int_equal(p.n_prompts, 2);
    assert_int_equal(p.prompts[0].n, 2);
    assert_int_equal(p.prompts[0].ids[1], 6);
    assert_false(p.prompts[0].bos_added);
    gw_prompt_done(&p);
    p = prompt_of(GW_CHAT_REQUEST_COMPLETION);
    assert_true(read_body(&p, "{\"prompt\":\"a<|im_end|>\"}", &refusal));
    assert_int_equal(p.prompts[0].n, 2); /* special tokens are parsed */
    assert_int_equal(p.prompts[0].ids[1], 4095);
    gw_prompt_done(&p);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_prompt_effort_and_kwargs_reach_the_template),
        cmocka_unit_test(test_gw_prompt_messages_reach_the_template),
        cmocka_unit_test(test_gw_prompt_names_of_the_model),
        cmocka_unit_test(test_gw_prompt_ids_go_as_they_are_and_texts_are_tokenised),
    };
    return cmocka_run_group_tests(tests, setup, teardown);
}
