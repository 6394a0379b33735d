#!/bin/sh
# Proves that a folder cannot include what it may not see: each line below must fail to compile, and the same include from
# a folder that may see it must compile. Arguments: CC, then "folder=flags" for each folder.
set -eu
CC=$1
shift
dir=$(mktemp -d)
trap 'rm -rf "$dir"' EXIT
passed=0
failed=0

flags_of() {
    folder=$1
    shift
    for pair in "$@"; do
        case $pair in
        "$folder="*) echo "${pair#*=}" ;;
        esac
    done
}

try() { # try yes|no folder header
    want=$1 folder=$2 header=$3
    shift 3
    printf '#include "%s"\nint main(void) { return 0; }\n' "$header" >"$dir/t.c"
    if $CC -std=c17 -D_GNU_SOURCE $(flags_of "$folder" "$@") -fsyntax-only "$dir/t.c" 2>"$dir/log"; then
        got=yes
    else
        got=no
    fi
    if [ "$got" = "$want" ]; then
        passed=$((passed + 1))
    else
        failed=$((failed + 1))
        echo "include check: $folder includes $header: compiles=$got, expected $want" >&2
        head -3 "$dir/log" >&2
    fi
}

try yes config settings.h "$@"
try no config_base settings.h "$@"
try no config proto_message.h "$@"
try no config kernels.h "$@"
try yes proto proto_message.h "$@"
try no proto settings.h "$@"
try no proto engine.h "$@"
try yes kernels k_format.h "$@"
try no kernels settings.h "$@"
try no kernels proto_message.h "$@"
try no kernels engine.h "$@"
try yes daemon kernels.h "$@"
try yes daemon settings.h "$@"
try no daemon k_format.h "$@"
try no daemon k_float.h "$@"
try no daemon gw_conn.h "$@"
try no daemon llhttp.h "$@"
try yes gateway proto_client.h "$@"
try yes gateway gguf.h "$@"
try no gateway kernels.h "$@"
try no gateway engine.h "$@"
try no gateway_cli gw_conn.h "$@"
try no gateway_cli engine.h "$@"
echo "include paths: $passed passed, $failed failed"
[ "$failed" = 0 ]
