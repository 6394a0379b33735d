/* `islet bench`: tokens per second, time to the first text and gaps of a running server. */
#ifndef ISLET_CLI_BENCH_H
#define ISLET_CLI_BENCH_H

struct cli_options;

int cli_bench_main(const struct cli_options *o); /* exit status */

#endif
