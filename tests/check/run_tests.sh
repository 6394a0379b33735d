#!/bin/sh
# Runs test programs one after the other, each with a time limit, and adds up. Arguments: seconds, then programs (an
# argument list in one word: "program --option"). Exit 77 of a program counts as skipped. Last line: 'N passed, M failed'.
limit=$1
shift
passed=0
failed=0
skipped=0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
for program in "$@"; do
    start=$(date +%s)
    # shellcheck disable=SC2086
    timeout -k 10 "$limit" $program >"$log" 2>&1
    code=$?
    took=$(($(date +%s) - start))
    case $code in
    0)
        passed=$((passed + 1))
        printf '  ok    %s (%s s)\n' "$program" "$took"
        [ -z "${VERBOSE:-}" ] || cat "$log"
        ;;
    77)
        skipped=$((skipped + 1))
        printf '  skip  %s: %s\n' "$program" "$(tail -1 "$log")"
        ;;
    *)
        failed=$((failed + 1))
        printf '  FAIL  %s (exit %s, %s s)\n' "$program" "$code" "$took"
        grep -vE '^\[ +(OK|RUN) ' "$log" | tail -60
        ;;
    esac
done
echo "$passed passed, $failed failed, $skipped skipped"
[ "$failed" = 0 ]
