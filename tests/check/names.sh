#!/bin/sh
# An external name starts with its file's stem; stems are unique; no name of the reserved kind (is/to/str/mem + letter).
# Argument: the object folder (build/obj). Names a file may define beyond its stem stand in names_allowed ("stem name").
set -eu
objects=$1
allowed=$(dirname "$0")/names_allowed
bad=0
stems=$(find config proto kernels daemon gateway -name '*.c' -exec basename {} .c \; | sort | uniq -d)
if [ -n "$stems" ]; then
    echo "stems that occur twice: $stems" >&2
    bad=1
fi
for object in $(find "$objects/config" "$objects/proto" "$objects/kernels" "$objects/daemon" "$objects/gateway" -name '*.o' \
    -not -path '*/examples/*'); do
    stem=$(basename "$object" .o)
    [ -f "${object#"$objects"/}" ] || [ -f "$(echo "${object#"$objects"/}" | sed 's/\.o$/.c/')" ] || continue
    for name in $(nm --defined-only -g "$object" | awk '{print $3}'); do
        case $name in
        main | "$stem" | "$stem"_* | __asan* | __odr* | __tsan*) continue ;;
        esac
        grep -qxF "$stem $name" "$allowed" 2>/dev/null && continue
        echo "$stem.c: external name $name does not start with $stem" >&2
        bad=1
    done
done
exit $bad
