#!/bin/sh
# Installs promtool, which checks the alert rules, with whatever package manager the machine has. Says
# what it could not do and still exits 0: the tests that need the tool say so themselves.
set -u

. "$(dirname "$0")/as-root.sh"

# Debian's package also holds the Prometheus server and starts it as a service; a policy that forbids
# starting services keeps it down. A machine with a policy of its own keeps that one.
POLICY=/usr/sbin/policy-rc.d

apt_install() {
    as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends prometheus
}

without_services() {
    if [ -e "$POLICY" ]; then
        "$@"
        return
    fi
    as_root sh -c "printf '#!/bin/sh\nexit 101\n' > $POLICY && chmod 755 $POLICY" || return 1
    "$@"
    result=$?
    as_root rm -f "$POLICY"
    return "$result"
}

install_promtool() {
    if command -v apt-get >/dev/null 2>&1; then
        without_services apt_install || { as_root apt-get update -q && without_services apt_install; }
    elif command -v dnf >/dev/null 2>&1; then
        as_root dnf install -y -q golang-github-prometheus
    elif command -v apk >/dev/null 2>&1; then
        as_root apk add --quiet prometheus
    elif command -v brew >/dev/null 2>&1; then
        brew install --quiet prometheus
    else
        return 1
    fi
}

if install_promtool >/dev/null 2>&1 && command -v promtool >/dev/null 2>&1; then
    echo "installed $(promtool --version 2>&1 | head -n 1)"
else
    echo "promtool is not installed and could not be (needs root and a package manager): the tests of the alert rules will skip" >&2
fi
