/* Each code of an error frame becomes the HTTP error that says who is at fault. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "gw_error.h"

static void test_gw_error_of_a_file_that_cannot_be_read_is_the_models(void **state)
{
    (void)state;
    static const struct {
        enum err_code code;
        const char *name;
        unsigned status;
    } cases[] = {
        {ERR_BUSY, "overloaded", 503},
        {ERR_LIMIT, "overloaded", 503},
        {ERR_NOMEM, "overloaded", 503},
        {ERR_ARGUMENT, "invalid_value", 400},
        {ERR_FORMAT, "model_error", 500},
        {ERR_UNSUPPORTED, "model_error", 500},
        {ERR_IO, "model_error", 500},
        {ERR_DEVICE, "worker_unavailable", 503},
        {ERR_PROTOCOL, "worker_unavailable", 503},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        const enum gw_error_code code = gw_error_of_err(cases[i].code);
        assert_string_equal(gw_error_name(code), cases[i].name);
        assert_int_equal(gw_error_status(code), cases[i].status);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gw_error_of_a_file_that_cannot_be_read_is_the_models),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
