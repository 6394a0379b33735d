#!/bin/sh
# No mutable file-scope data but what mutable_allowed lists with a reason. Constant
# tables that hold addresses (.data.rel.ro) are not mutable. Argument: the object folder.
set -eu
objects=$1
allowed=$(dirname "$0")/mutable_allowed
bad=0
for object in $(find "$objects/config" "$objects/proto" "$objects/kernels" "$objects/daemon" "$objects/gateway" -name '*.o' \
    -not -path '*/examples/*'); do
    [ -f "$(echo "${object#"$objects"/}" | sed 's/\.o$/.c/')" ] || continue
    for name in $(objdump -t "$object" | awk 'NF > 4 && $(NF-2) ~ /^\.t?(data|bss)/ && $(NF-2) !~ /^\.data\.rel\.ro/ && $NF !~ /^\./ {print $NF}' |
        sed 's/\.[0-9]*$//' | grep -v '^__' || true); do
        awk -v n="$name" '$1 == n && NF > 1 {found = 1} END {exit !found}' "$allowed" && continue
        echo "$(basename "$object" .o).c: mutable data '$name' (put it on a struct, or list it with a reason in mutable_allowed)" >&2
        bad=1
    done
done
exit $bad
