/* Chat templates: the files in tests/model/templates (NAME.jinja; NAME.CASE.json is the input,
 * NAME.CASE.txt what Jinja itself made of it), the shipped model's own template, facts, refusals
 * and limits. */
#include <dirent.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "gw_template.h"

#define DIR_TEMPLATES ISLET_TEST_DIR "/model/templates/"

static const char chatml[] =
    "{%- for message in messages -%}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n' -}}{%- endfor -%}{%- if add_generation_prompt -%}{{- "
    "'<|im_start|>assistant\\n' -}}{%- endif -%}";

static char *file_text(const char *name, size_t *ret_size)
{
    char path[512];
    (void)snprintf(path, sizeof path, "%s%s", DIR_TEMPLATES, name);
    FILE *f = fopen(path, "rb");
    assert_non_null(f);
    char *text = malloc(1 << 16);
    assert_non_null(text);
    *ret_size = fread(text, 1, (1 << 16) - 1, f);
    text[*ret_size] = '\0';
    (void)fclose(f);
    return text;
}

static struct gw_template *compiled(const char *text)
{
    struct gw_template *t = NULL;
    struct err e = {0};
    enum err_code code = gw_template_compile(
        text, strlen(text), &(struct gw_template_model){.bos = "<s>", .eos = "</s>"}, &t, &e);
    if (code != ERR_OK)
        fail_msg("%s", e.text);
    return t;
}

static struct gw_template *compiled_file(const char *name)
{
    size_t n;
    char file[300];
    (void)snprintf(file, sizeof file, "%.200s.jinja", name);
    char *text = file_text(file, &n);
    struct gw_template *t = compiled(text);
    free(text);
    return t;
}

static enum err_code render(const struct gw_template *t, const char *messages, bool prompt,
                            char **ret, struct err *e)
{
    json_error_t where;
    json_t *m = json_loads(messages, 0, &where);
    size_t n;
    assert_non_null(m);
    enum err_code code = gw_template_render(
        t,
        &(struct gw_template_input){
            .messages = m, .add_generation_prompt = prompt, .continue_final_message = !prompt},
        ret, &n, e);
    json_decref(m);
    return code;
}

static void assert_renders(const struct gw_template *t, const char *messages, bool prompt,
                           const char *want)
{
    char *text;
    struct err e = {0};
    if (render(t, messages, prompt, &text, &e) != ERR_OK)
        fail_msg("%s", e.text);
    assert_string_equal(text, want);
    alloc_free(text);
}

static void assert_refuses(const char *source, enum err_code code, const char *part)
{
    struct gw_template *t;
    struct err e = {0};
    assert_int_equal(
        gw_template_compile(source, strlen(source), &(struct gw_template_model){0}, &t, &e), code);
    if (!strstr(e.text, part))
        fail_msg("\"%s\" does not say \"%s\"", e.text, part);
}

static void check_golden(const char *json_name)
{
    char name[256], txt[300];
    size_t n, n_want, n_got;
    char *got, *input = file_text(json_name, &n);
    struct err e = {0};
    json_t *all = json_loads(input, 0, NULL);
    assert_non_null(all);
    memset(name, 0, sizeof name);
    memcpy(name, json_name, strcspn(json_name, "."));
    memset(txt, 0, sizeof txt);
    memcpy(txt, json_name, strlen(json_name) - 5);
    memcpy(txt + strlen(json_name) - 5, ".txt", 4);
    char *want = file_text(txt, &n_want);
    struct gw_template *t = compiled_file(name);
    enum err_code code =
        gw_template_render(t,
                           &(struct gw_template_input){.messages = json_object_get(all, "messages"),
                                                       .kwargs = json_object_get(all, "kwargs"),
                                                       .add_generation_prompt = true},
                           &got, &n_got, &e);
    if (code != ERR_OK)
        fail_msg("%s: %s", json_name, e.text);
    if (n_got != n_want || memcmp(got, want, n_got) != 0)
        fail_msg("%s:\n[%s]\ninstead of\n[%s]", json_name, got, want);
    alloc_free(got);
    gw_template_free(t);
    json_decref(all);
    free(want);
    free(input);
}

static void test_gw_template_golden_conversations_are_as_jinja_writes_them(void **state)
{
    (void)state;
    DIR *d = opendir(DIR_TEMPLATES);
    size_t n = 0;
    assert_non_null(d);
    for (struct dirent *file; (file = readdir(d)) != NULL;) {
        size_t length = strlen(file->d_name);
        if (length < 5 || strcmp(file->d_name + length - 5, ".json") != 0)
            continue;
        check_golden(file->d_name);
        n++;
    }
    (void)closedir(d);
    assert_true(n >= 20);
}

static void test_gw_template_plain_chatml_has_its_facts(void **state)
{
    (void)state;
    struct gw_template *t = compiled(chatml);
    const struct gw_template_facts *f = gw_template_get_facts(t);
    assert_true(f->system_anywhere);
    assert_false(f->developer_role || f->tool_calls || f->thinking_switch);
    assert_null(f->think_open);
    gw_template_free(t);
}

static void test_gw_template_families_have_their_facts(void **state)
{
    (void)state;
    struct gw_template *t = compiled_file("thinking");
    const struct gw_template_facts *f = gw_template_get_facts(t);
    assert_true(f->thinking_switch && f->tool_calls && f->system_anywhere);
    assert_string_equal(f->think_open, "<think>");
    assert_string_equal(f->think_close, "</think>");
    assert_true(gw_template_prompt_opens(t, "a<think>\n", 9));
    assert_false(gw_template_prompt_opens(t, "a<think>\nb", 10));
    assert_false(gw_template_prompt_opens(t, "", 0));
    gw_template_free(t);
    t = compiled_file("strict");
    f = gw_template_get_facts(t);
    assert_false(f->system_anywhere || f->tool_calls);
    gw_template_free(t);
}

static void test_gw_template_developer_is_given_as_system(void **state)
{
    (void)state;
    struct gw_template *t = compiled(chatml);
    assert_renders(
        t, "[{\"role\":\"developer\",\"content\":\"d\"},{\"role\":\"user\",\"content\":\"u\"}]",
        true,
        "<|im_start|>system\nd<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
        "<|im_start|>assistant\n");
    gw_template_free(t);
}

static void test_gw_template_scattered_system_is_joined_in_front(void **state)
{
    (void)state;
    struct gw_template *t = compiled_file("strict");
    assert_renders(
        t,
        "[{\"role\":\"user\",\"content\":\"u\"},{\"role\":\"system\",\"content\":\"a\"},"
        "{\"role\":\"assistant\",\"content\":null},{\"role\":\"developer\",\"content\":\"b\"},"
        "{\"role\":\"user\",\"content\":\"v\"}]",
        true,
        "<|im_start|>system\na\n\nb<|im_end|>\n<|im_start|>user\nu<|im_end|>\n"
        "<|im_start|>assistant\n<|im_end|>\n<|im_start|>user\nv<|im_end|>\n"
        "<|im_start|>assistant\n");
    gw_template_free(t);
}

static void test_gw_template_final_message_is_continued(void **state)
{
    (void)state;
    struct gw_template *t = compiled(chatml);
    assert_renders(
        t, "[{\"role\":\"user\",\"content\":\"u\"},{\"role\":\"assistant\",\"content\":\"im \"}]",
        false, "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\nim ");
    assert_renders(t, "[{\"role\":\"user\",\"content\":\"u\"},{\"role\":\"assistant\"}]", false,
                   "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n");
    gw_template_free(t);
    t = compiled_file("strict"); /* trims */
    assert_renders(
        t, "[{\"role\":\"user\",\"content\":\"u\"},{\"role\":\"assistant\",\"content\":\"<|im \"}]",
        false, "<|im_start|>user\nu<|im_end|>\n<|im_start|>assistant\n<|im");
    gw_template_free(t);
}

static void test_gw_template_refusal_carries_the_templates_text(void **state)
{
    (void)state;
    char *text;
    struct err e = {0};
    struct gw_template *t = compiled_file("strict");
    assert_int_equal(
        render(t, "[{\"role\":\"user\",\"content\":\"u\"},{\"role\":\"user\",\"content\":\"v\"}]",
               true, &text, &e),
        ERR_UNSUPPORTED);
    assert_non_null(strstr(e.text, "Roles must alternate"));
    e = (struct err){0};
    assert_int_equal(
        render(t, "[{\"role\":\"user\",\"content\":\"u\"},{\"role\":\"tool\",\"content\":\"v\"}]",
               true, &text, &e),
        ERR_UNSUPPORTED);
    assert_non_null(strstr(e.text, "messages[1]"));
    gw_template_free(t);
}

static void test_gw_template_what_is_not_built_in_is_named(void **state)
{
    (void)state;
    assert_refuses("a\n{% include 'x' %}", ERR_UNSUPPORTED, "line 2");
    assert_refuses("{% include 'x' %}", ERR_UNSUPPORTED, "'include'");
    assert_refuses("{{ messages | wordcount }}", ERR_UNSUPPORTED, "'wordcount'");
    assert_refuses("{{ 1 is filter }}", ERR_UNSUPPORTED, "'filter'");
    assert_refuses("{{ lipsum() }}", ERR_UNSUPPORTED, "'lipsum'");
    assert_refuses("{% for x in messages %}", ERR_FORMAT, "lacks");
    assert_refuses("{{ 'a }}", ERR_FORMAT, "quote");
    assert_refuses("\xff", ERR_FORMAT, "UTF-8");
    assert_refuses("", ERR_UNSUPPORTED, "user's message");
}

static void test_gw_template_hostile_ones_end(void **state)
{
    (void)state;
    const char *const endless[] = {
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x='ab') %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(999) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
        "{{ 'a' * 999999999999 }}",
    };
    for (size_t i = 0; i < sizeof endless / sizeof *endless; i++) {
        struct gw_template *t;
        struct err e = {0};
        enum err_code code = gw_template_compile(endless[i], strlen(endless[i]),
                                                 &(struct gw_template_model){0}, &t, &e);
        assert_int_equal(code, ERR_UNSUPPORTED);
        assert_int_equal(e.code, ERR_LIMIT);
    }
    char deep[4001];
    memset(deep, '(', sizeof deep - 1);
    deep[0] = deep[1] = '{';
    deep[4000] = '\0';
    assert_refuses(deep, ERR_LIMIT, "deep");
}

static void test_gw_template_no_memory_is_an_error_and_leaks_nothing(void **state)
{
    (void)state;
    uint64_t before = alloc_live_blocks();
    bool done = false;
    for (uint64_t k = 1; !done; k++) {
        struct gw_template *t = NULL;
        struct err e = {0};
        char *text = NULL;
        alloc_fail_at(k, 0);
        enum err_code code =
            gw_template_compile(chatml, strlen(chatml), &(struct gw_template_model){0}, &t, &e);
        if (code == ERR_OK)
            code = render(t, "[{\"role\":\"user\",\"content\":\"u\"}]", true, &text, &e);
        alloc_fail_at(0, 0);
        done = code == ERR_OK && k > 200;
        alloc_free(text);
        gw_template_free(t);
        assert_int_equal(alloc_live_blocks(), before);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_template_golden_conversations_are_as_jinja_writes_them),
        cmocka_unit_test(test_gw_template_plain_chatml_has_its_facts),
        cmocka_unit_test(test_gw_template_families_have_their_facts),
        cmocka_unit_test(test_gw_template_developer_is_given_as_system),
        cmocka_unit_test(test_gw_template_scattered_system_is_joined_in_front),
        cmocka_unit_test(test_gw_template_final_message_is_continued),
        cmocka_unit_test(test_gw_template_refusal_carries_the_templates_text),
        cmocka_unit_test(test_gw_template_what_is_not_built_in_is_named),
        cmocka_unit_test(test_gw_template_hostile_ones_end),
        cmocka_unit_test(test_gw_template_no_memory_is_an_error_and_leaks_nothing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
