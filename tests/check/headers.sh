#!/bin/sh
# Each header compiles alone, by both compilers. Arguments: flags.
set -eu
bad=0
for header in $(find config proto kernels daemon gateway tests/support -name '*.h'); do
    for cc in gcc clang-14; do
        command -v $cc >/dev/null 2>&1 || continue
        $cc -x c -std=c17 -D_GNU_SOURCE -Wall -Wextra -Werror -Wno-unused-function "$@" -fsyntax-only "$header" 2>/tmp/islet-header.$$ || {
            echo "$header does not compile alone by $cc:" >&2
            head -4 /tmp/islet-header.$$ >&2
            bad=1
        }
    done
done
rm -f /tmp/islet-header.$$
exit $bad
