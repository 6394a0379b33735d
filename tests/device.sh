#!/bin/sh
# Everything about the GPU on a bare machine that has one, in one command: builds the kernels, their checker and their
# bench (gcc, make and nvcc; none of the daemon's libraries, no network), runs check-cuda and bench-cuda, and leaves a
# block for tests/bench/RESULTS.md in build/bench/cuda.md. `make bundle` makes the file to carry there.
#   tests/device.sh [check] [bench] [sanitize]     check and bench without arguments; sanitize: compute-sanitizer's
#                                                  memcheck and racecheck over a few cases of each kind
#   CASES=2000   cases of each kind of check       JOBS=n   compilers at once
set -eu
cd "$(dirname "$0")/.."
[ $# -gt 0 ] || set -- check bench
command -v nvcc >/dev/null 2>&1 || PATH=$PATH:/usr/local/cuda/bin
for tool in gcc make nvcc nvidia-smi; do
    command -v $tool >/dev/null 2>&1 || {
        echo "device.sh: no $tool here" >&2
        exit 1
    }
done
gpu=$(nvidia-smi --query-gpu=name,driver_version,memory.total --format=csv,noheader | head -1)
arch=$(nvidia-smi --query-gpu=compute_cap --format=csv,noheader | head -1 | tr -d .)
cuda=$(nvcc --version | sed -n 's/.*release \([0-9.]*\).*/\1/p')
echo "GPU: $gpu, sm_$arch; CUDA $cuda; $(nproc) processors"
B=build
mkdir -p $B/bench
start=$(date +%s)
make --no-print-directory -j"${JOBS:-$(nproc)}" CUDA_ARCHS="$arch" cuda $B/tests/bits $B/bin/bench_cuda >$B/bench/build.log 2>&1 || {
    tail -40 $B/bench/build.log
    exit 1
}
echo "built in $(($(date +%s) - start)) s"
failed=0
# Runs a command, shows and keeps what it says; a skip is a failure here, where a GPU is.
step() { # step name command...
    name=$1
    shift
    start=$(date +%s)
    echo "== $name: $*"
    if "$@" >$B/bench/$name.log 2>&1 && ! grep -q '^skip:' $B/bench/$name.log; then
        result=passed
    else
        result=FAILED
        failed=1
    fi
    cat $B/bench/$name.log
    echo "== $name: $result in $(($(date +%s) - start)) s"
}
cases=${CASES:+--cases $CASES}
md=$B/bench/cuda.md
{
    echo "## CUDA kernels (\`tests/device.sh $*\`)"
    echo
    echo "$(date -u +%Y-%m-%d), $gpu, CUDA $cuda, $(nproc) x $(sed -n 's/^model name[^:]*: //p' /proc/cpuinfo | head -1)."
} >$md
for goal in "$@"; do
    case $goal in
    check)
        # shellcheck disable=SC2086
        step check $B/tests/bits --backend cuda --quick $cases
        printf '\n`check-cuda`: %s, %s.\n' "$(tail -1 $B/bench/check.log)" "$(tail -2 $B/bench/check.log | head -1)" >>$md
        ;;
    bench)
        step bench $B/bin/bench_cuda --json $B/bench/cuda.json
        printf '\n`bench-cuda`: ' >>$md
        cat $B/bench/bench.log >>$md
        ;;
    sanitize)
        for tool in memcheck racecheck; do
            step $tool compute-sanitizer --tool $tool --error-exitcode 1 $B/tests/bits --backend cuda --cases 6
            printf '\ncompute-sanitizer %s, 6 cases of each kind: %s.\n' $tool "$(grep 'ERROR SUMMARY\|RACECHECK SUMMARY' $B/bench/$tool.log | tail -1)" >>$md
        done
        ;;
    *)
        echo "device.sh: unknown goal '$goal' (check, bench or sanitize)" >&2
        exit 2
        ;;
    esac
done
echo "for tests/bench/RESULTS.md: $md"
exit $failed
