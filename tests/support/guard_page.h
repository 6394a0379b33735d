/* Memory that ends at an inaccessible page: a read one byte too far crashes the test there and
 * then. */
#ifndef ISLET_GUARD_PAGE_H
#define ISLET_GUARD_PAGE_H

#include <stddef.h>
#include <stdint.h>

/* Gives a copy of the n bytes (n may be 0) whose end is the start of an inaccessible page; free
 * with guard_page_free. Ends the test on failure. */
uint8_t *guard_page_copy(const void *data, size_t n);
void guard_page_free(uint8_t *copy, size_t n); /* n as given to guard_page_copy; NULL is fine */

#endif
