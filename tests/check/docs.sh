#!/bin/sh
# Documentation that code must agree with. Argument: the folder of the programs.
#   - --help-config names every setting; README.md and CONTRIBUTING.md name only make targets that exist
#   - every setting stands on a page, every message and status value in PROTOCOL.md, every metric in islet-gateway(8)
#   - no path of a build machine, no unfinished place
set -eu
bin=$1
bad=0
fault() {
    echo "docs: $*" >&2
    bad=1
}
text=$(cat README.md CONTRIBUTING.md config/man/* proto/PROTOCOL.md 2>/dev/null)

"$bin/islet-gateway" --help-config >/tmp/islet-docs.$$
for key in $(sed -n 's/^SETTING(\([a-z_]*\), *\([a-z_0-9]*\),.*/\1.\2/p' config/settings.def); do
    grep -q "$key" /tmp/islet-docs.$$ || fault "--help-config does not name $key"
    case $text in *"$key"* | *"${key#*.}"*) ;; *) fault "no page names the setting $key" ;; esac
done
rm -f /tmp/islet-docs.$$
for message in $(sed -n 's/^PROTO_MESSAGE(\([A-Z_]*\), *\(0x[0-9A-Fa-f]*\),.*/\2/p' proto/proto_messages.def); do
    grep -qi "$message" proto/PROTOCOL.md || fault "PROTOCOL.md does not describe $message"
done
for name in $(sed -n 's/^PROTO_STATUS(\([a-z_0-9]*\),.*/\1/p' proto/proto_status.def); do
    grep -q "$name" proto/PROTOCOL.md || fault "PROTOCOL.md does not name the status value $name"
done
for name in $(sed -n 's/^GW_METRIC(\([a-z_0-9]*\),.*/\1/p' gateway/gw_metrics.def); do
    grep -q "islet_gateway_$name" config/man/islet-gateway.8 || fault "islet-gateway(8) does not name islet_gateway_$name"
done
# README promises only targets that exist.
for target in $(grep -ohE '(`|^ *\$? ?)make [a-z0-9-]+' README.md CONTRIBUTING.md | sed 's/.*make //' | sort -u); do
    grep -qE "^$target:" Makefile || fault "README or CONTRIBUTING names 'make $target', which is not there"
done
if git grep -nIF "$PWD/" -- . >&2 ||
    git grep -nIE 'TODO|FIXME|(^|[^X])XXX([^X]|$)' -- . ':!tests/check/docs.sh' >&2; then
    fault "see the lines above"
fi
exit $bad
