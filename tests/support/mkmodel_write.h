/* Writes a generated model's files with all threads. Each byte depends on its place alone, so that
 * pieces may be made in any order by anyone. The files appear under their names when they are
 * complete; until then they end in .part, and a failure removes them. */
#ifndef ISLET_MKMODEL_WRITE_H
#define ISLET_MKMODEL_WRITE_H

#include "mkmodel_plan.h"

struct mkmodel_router;

struct mkmodel_write_figures {
    uint64_t bytes;
    double seconds;
    bool direct; /* past the page cache, by O_DIRECT; false: the file system refuses it */
};

/* Fills to[n] with the bytes of part `part` from `offset` on; zeros behind its end. router: NULL if
 * routers are plain noise. Pure; any thread. */
void mkmodel_write_range(const struct mkmodel_plan *p, const struct mkmodel_router *router,
                         size_t part, uint64_t offset, void *to, size_t n);
/* progress: a line on stderr that is written over as the work goes on. SIGINT and SIGTERM end it
 * with ERR_CANCELLED. ERR_IO: a full disk is told before anything is written, where the file system
 * can reserve. */
enum err_code mkmodel_write_files(const struct mkmodel_plan *p, const struct mkmodel_router *router,
                                  bool progress, struct mkmodel_write_figures *ret, struct err *e)
    __attribute__((warn_unused_result));

#endif
