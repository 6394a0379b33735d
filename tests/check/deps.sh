#!/bin/sh
# Installs the Debian packages that are missing, saying so first. Arguments: sets of packages, from the lists below.
#   build   compile the three programs        demo = build
#   check   build, and what the tests need    fuzz = check, and libFuzzer's runtime
set -eu

build="gcc make pkg-config libc6-dev libuv1-dev liburing-dev libjansson-dev libinih-dev libsystemd-dev libpcre2-dev
       libxxhash-dev libedit-dev node-llhttp"
check="$build libcmocka-dev clang-14 clang-format-14 libasan8 libubsan1 libtsan2 nodejs npm curl
       binutils gawk procps python3 python3-requests python3-httpx python3-h11"
fuzz="$check libclang-rt-14-dev llvm-14"

case "${1:-build}" in
build | demo) wanted=$build ;;
check) wanted=$check ;;
fuzz) wanted=$fuzz ;;
*)
    echo "deps.sh: unknown set '$1' (build, demo, check or fuzz)" >&2
    exit 2
    ;;
esac

if ! command -v dpkg-query >/dev/null 2>&1; then
    echo "deps: this is not Debian; install by hand: $(echo $wanted)" >&2
    exit 0
fi

have() {
    case $1 in
    # A node or npm from elsewhere is as good.
    nodejs) command -v node >/dev/null 2>&1 && return 0 ;;
    npm) command -v npm >/dev/null 2>&1 && return 0 ;;
    esac
    [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

missing=
for package in $wanted; do
    have "$package" || missing="$missing $package"
done
[ -n "$missing" ] || exit 0

echo "deps: these Debian packages are missing and will be installed by apt-get:$missing"
if [ "$(id -u)" = 0 ]; then
    root=
elif command -v sudo >/dev/null 2>&1; then
    root=sudo
else
    echo "deps: neither root nor sudo; run as root: apt-get install$missing" >&2
    exit 1
fi
$root apt-get update -qq
$root env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends $missing >/dev/null
for package in $missing; do
    have "$package" || {
        echo "deps: $package could not be installed" >&2
        exit 1
    }
done
echo "deps: installed"
