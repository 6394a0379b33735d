#!/bin/sh
# Does LeakSanitizer work here? It stops a process's threads by ptrace, which some containers refuse; it then fails or hangs
# at each exit. Argument: the compiler. Prints the ASAN_OPTIONS that the tests need: nothing if a leak is found as it should.
cc=${1:-gcc}
folder=$(mktemp -d) || exit 0
trap 'rm -rf "$folder"' EXIT
cat >"$folder/leak.c" <<'EOF'
#include <pthread.h>
#include <stdlib.h>
#include <unistd.h>
static void *waits(void *nothing)
{
    pause();
    return nothing;
}
int main(void)
{
    pthread_t thread;
    void *volatile block = malloc(10);
    block = NULL;
    return pthread_create(&thread, NULL, waits, (void *)block);
}
EOF
# Without a compiler there is nothing to say yet.
$cc -fsanitize=address -pthread -o "$folder/leak" "$folder/leak.c" >/dev/null 2>&1 || exit 0
if ! ASAN_OPTIONS= timeout -k 1 60 "$folder/leak" 2>&1 | grep -q '10 byte(s) leaked'; then
    echo "leaks: LeakSanitizer does not work here (is ptrace refused?): leaks are not looked for" >&2
    echo detect_leaks=0
fi
