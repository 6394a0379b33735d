# Refuses includes that the include paths alone do not stop: "../", system libraries that a folder may not use, and cycles
# between our headers. Input: all .c and .h files of the five folders. Prints one line a fault; exit 1 if any.
function folder_of(path) {
    if (path ~ /^config\/base\//) return "base"
    if (path ~ /^gateway\//) return "gateway"
    sub(/\/.*/, "", path)
    return path
}
BEGIN {
    forbidden["base"] = "uv.h jansson.h llhttp.h hiredis liburing.h pcre2.h histedit.h ini.h cuda"
    forbidden["config"] = "uv.h jansson.h llhttp.h hiredis liburing.h pcre2.h histedit.h cuda"
    forbidden["proto"] = "uv.h jansson.h llhttp.h hiredis liburing.h pcre2.h histedit.h ini.h cuda systemd"
    forbidden["kernels"] = "uv.h jansson.h llhttp.h hiredis liburing.h pcre2.h histedit.h ini.h systemd math.h sys/socket.h"
    forbidden["daemon"] = "jansson.h llhttp.h pcre2.h histedit.h ini.h cuda immintrin.h"
    forbidden["gateway"] = "liburing.h cuda immintrin.h ini.h"
}
FNR == 1 { folder = folder_of(FILENAME) }
/^[ \t]*#[ \t]*include/ {
    name = $0
    sub(/^[^"<]*["<]/, "", name)
    sub(/[">].*/, "", name)
    if (name ~ /\.\.\//) { printf "%s:%d: include by relative path: %s\n", FILENAME, FNR, name; bad = 1 }
    n = split(forbidden[folder], word, " ")
    for (i = 1; i <= n; i++)
        if (index(name, word[i]) == 1) {
            printf "%s:%d: %s may not be used in this folder\n", FILENAME, FNR, name
            bad = 1
        }
    if (FILENAME ~ /\.h$/ && $0 ~ /"/) {
        own = FILENAME
        sub(/.*\//, "", own)
        edges[own] = edges[own] " " name
        header[own] = 1
    }
}
function visit(h, path,    list, n, i) {
    if (index(path, " " h " ")) { printf "header cycle:%s%s\n", path, h; bad = 1; return }
    if (done[h]) return
    n = split(edges[h], list, " ")
    for (i = 1; i <= n; i++) if (list[i] in header) visit(list[i], path h " ")
    done[h] = 1
}
END {
    for (h in header) visit(h, " ")
    exit bad
}
