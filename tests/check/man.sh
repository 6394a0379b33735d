#!/bin/sh
# islet.conf(5) from settings.def. Without an argument: prints the page; with --check: compares it with config/man/.
set -eu
cd "$(dirname "$0")/../.."

page() {
    cat <<'EOF'
.TH ISLET.CONF 5 "" "Islet" "Islet"
.SH NAME
islet.conf \- settings of isletd and islet\-gateway
.SH SYNOPSIS
.nf
$XDG_CONFIG_HOME/islet/islet.conf, ~/.config/islet/islet.conf
/etc/islet/islet.conf
.fi
.SH DESCRIPTION
The first of these files that exists is read by both daemons, unless
.B \-\-config
names another.
.BI \-\-set " section.key=value"
overrides single keys.
The file has sections in brackets and lines of the form
.IR "key = value" .
Unknown keys and bad values are errors that name file, line and what would be right.
Sizes have a unit (12 GiB, 1.5 MiB), and so do times (50 ms, 2 min); a bare number is refused where a unit could be meant.
.PP
Keys marked (reload) are applied by SIGHUP; others need a restart.
Only
.B model.path
must be set.
EOF
    awk '
        /^SETTING\(/ {
            line = substr($0, 9)
            comma = index(line, ","); section = substr(line, 1, comma - 1); line = substr(line, comma + 2)
            comma = index(line, ","); key = substr(line, 1, comma - 1); line = substr(line, comma + 2)
            # kind, default, reloadable, help: from the end, because kinds hold commas
            match(line, /, [01], "/)
            reload = substr(line, RSTART + 2, 1)
            help = substr(line, RSTART + RLENGTH); sub(/"\)$/, "", help)
            head = substr(line, 1, RSTART - 1)
            match(head, /"[^"]*"$/)
            value = substr(head, RSTART + 1, RLENGTH - 2)
            gsub(/-/, "\\-", value); gsub(/-/, "\\-", help)
            if (section != last) printf ".SH [%s]\n", section
            last = section
            printf ".TP\n.BR %s%s\n%s%s.\n", key, value != "" ? " \" = " value "\"" : "", help, reload == "1" ? " (reload)" : ""
        }' config/settings.def
    cat <<'EOF'
.SH SEE ALSO
.BR islet (1),
.BR isletd (8),
.BR islet\-gateway (8)
EOF
}

if [ "${1:-}" = --check ]; then
    page | diff -u config/man/islet.conf.5 - || {
        echo "man.sh: config/man/islet.conf.5 is not what settings.def says: tests/check/man.sh >config/man/islet.conf.5" >&2
        exit 1
    }
else
    page
fi
