#!/bin/sh
# Fetches llama.cpp, prebuilt for CPUs by node-llama-cpp (the versions of package-lock.json), and builds peer_llama, the
# program that measures it. Headers come from the sources that the same npm package brings along (a git bundle). Prints
# the folder of the shared libraries. Environment: B, the build folder.
set -eu
cd "$(dirname "$0")/../../.."
B=${B:-build}
peer=tests/bench/peer
libs=$PWD/$peer/node_modules/@node-llama-cpp/linux-x64/bins/linux-x64
out=$B/bin/peer_llama
include=$B/bench/peer/include

if [ ! -e "$libs/llama-addon.node" ]; then
    echo "bench-outofcore: installing the peer of $peer/package-lock.json (npm ci, 45 MB)" >&2
    (cd $peer && npm ci --omit=optional --ignore-scripts --no-audit --no-fund --loglevel=error) >&2
fi
if [ ! -e "$include/llama.h" ]; then
    bare=$(mktemp -d)
    trap 'rm -rf "$bare"' EXIT
    git init -q --bare "$bare"
    git -C "$bare" fetch -q "$PWD/$peer/node_modules/node-llama-cpp/llama/gitRelease.bundle" HEAD
    mkdir -p "$include"
    git -C "$bare" archive FETCH_HEAD include ggml/include | tar -x -C "$bare"
    cp "$bare"/include/*.h "$bare"/ggml/include/*.h "$include"
fi
set -- $peer/peer_llama.c tests/support/read_counters.c $B/lib/libislet.a
for source in "$@"; do
    [ "$out" -nt "$source" ] || stale=1
done
if [ -n "${stale:-}" ]; then
    mkdir -p "$B/bin"
    ${CC:-gcc} -std=c17 -D_GNU_SOURCE -O2 -g -Wall -Wextra -Werror -Iconfig/base -Itests/support -isystem "$include" \
        -o "$out" "$@" "$libs"/libllama.v*.so "$libs"/libggml.v*.so "$libs"/libggml-base.so -Wl,-rpath,"$libs" -pthread -lsystemd -lm
fi
echo "$libs"
