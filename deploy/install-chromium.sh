#!/bin/sh
# Installs a Chromium with whatever package manager the machine has. Says what it could not do and
# still exits 0: the tests that need the browser say so themselves.
set -u

. "$(dirname "$0")/as-root.sh"

install_chromium() {
    if command -v apt-get >/dev/null 2>&1; then
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium ||
            { as_root apt-get update -q &&
              as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends chromium; }
    elif command -v dnf >/dev/null 2>&1; then
        as_root dnf install -y -q chromium
    elif command -v apk >/dev/null 2>&1; then
        as_root apk add --quiet chromium
    else
        return 1
    fi
}

if install_chromium >/dev/null 2>&1 && command -v chromium >/dev/null 2>&1; then
    echo "installed $(chromium --version)"
else
    echo "Chromium is not installed and could not be (needs root and a package manager): the browser tests will skip" >&2
fi
