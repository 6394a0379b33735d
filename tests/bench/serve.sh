#!/bin/sh
# make bench-serve: time to first token, P95 inter-token time and tokens/s of a running server at 1, 4 and 16 clients.
# MODEL=file serves another model. Environment: B = build folder.
set -eu
B=${B:-build}
model=${MODEL:-tests/models/tinymoe-q8_0.gguf}
dir=$(mktemp -d)
trap 'kill "$up" 2>/dev/null || true; wait "$up" 2>/dev/null || true; rm -rf "$dir"' EXIT INT TERM
export XDG_RUNTIME_DIR="$dir" XDG_STATE_HOME="$dir"
"$B/bin/islet" up --model "$model" --set "server.listen=none" --set "server.socket=$dir/http.sock" >"$dir/log" 2>&1 &
up=$!
n=0
until curl -sf --unix-socket "$dir/http.sock" http://localhost/readyz >/dev/null 2>&1; do
    n=$((n + 1))
    if [ "$n" -gt 600 ] || ! kill -0 "$up" 2>/dev/null; then
        echo "bench-serve: the server did not become ready:" >&2
        tail -20 "$dir/log" >&2
        exit 1
    fi
    sleep 0.2
done
mkdir -p "$B/bench"
"$B/bin/islet" bench --server "unix:$dir/http.sock" --clients 1,4,16 "$@"
