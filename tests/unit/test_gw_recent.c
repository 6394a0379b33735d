#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "alloc.h"
#include "gw_recent.h"
#include "gw_request.h"

#define S 1000000000ull

/* A request without content. */
static struct gw_request *request(const char *id)
{
    struct gw_request *q = alloc_zero(ALLOC_REQUEST, 1, sizeof *q);
    assert_non_null(q);
    q->references = 1;
    snprintf(q->client_id, sizeof q->client_id, "%s", id);
    return q;
}

static struct gw_http_text text(const char *s)
{
    return (struct gw_http_text){s, strlen(s)};
}

static struct gw_request *put(struct gw_recent *r, const char *id, uint64_t key, uint64_t now)
{
    struct gw_request *q = request(id);
    gw_recent_put(r, q, key, now);
    gw_request_drop(q); /* the table keeps it */
    return q;
}

static void test_gw_recent_finds_by_id_and_key(void **state)
{
    (void)state;
    struct gw_recent r = {0};
    struct gw_request *a = put(&r, "a", 1, 0), *b = put(&r, "b", 1, 0), *other = put(&r, "a", 2, 0);
    assert_ptr_equal(gw_recent_find(&r, text("a"), 1, 0), a);
    assert_ptr_equal(gw_recent_find(&r, text("b"), 1, 0), b);
    assert_ptr_equal(gw_recent_find(&r, text("a"), 2, 0), other);
    assert_null(gw_recent_find(&r, text("b"), 2, 0));
    assert_null(gw_recent_find(&r, text(""), 1, 0));
    struct gw_request *later = put(&r, "a", 1, 1);
    assert_ptr_equal(gw_recent_find(&r, text("a"), 1, 1), later);
    assert_int_equal(r.n, 3);
    gw_recent_done(&r);
    assert_int_equal(alloc_live_blocks(), 0);
}

static void test_gw_recent_forgets_after_ten_minutes_and_256(void **state)
{
    (void)state;
    struct gw_recent r = {0};
    char id[16];
    put(&r, "old", 1, 0);
    assert_non_null(gw_recent_find(&r, text("old"), 1, 599 * S));
    assert_null(gw_recent_find(&r, text("old"), 1, 600 * S));
    for (int i = 0; i < 257; i++) {
        snprintf(id, sizeof id, "r%d", i);
        put(&r, id, 1, 700 * S);
    }
    assert_int_equal(r.n, GW_RECENT_MAX);
    assert_null(gw_recent_find(&r, text("r0"), 1, 700 * S));
    assert_non_null(gw_recent_find(&r, text("r1"), 1, 700 * S));
    assert_non_null(gw_recent_find(&r, text("r256"), 1, 700 * S));
    gw_recent_done(&r);
    assert_int_equal(alloc_live_blocks(), 0);
}

static void test_gw_recent_keys_differ(void **state)
{
    (void)state;
    assert_int_equal(gw_recent_key(text("")), 0);
    assert_true(gw_recent_key(text("a")) != gw_recent_key(text("b")));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_recent_finds_by_id_and_key),
        cmocka_unit_test(test_gw_recent_forgets_after_ten_minutes_and_256),
        cmocka_unit_test(test_gw_recent_keys_differ),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
