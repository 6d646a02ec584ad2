#!/bin/sh
# Installs redis-server with whatever package manager the machine has. Says what it could not do and
# still exits 0: the tests that need the server say so themselves.
set -u

. "$(dirname "$0")/as-root.sh"

install_redis() {
    if command -v apt-get >/dev/null 2>&1; then
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends redis-server ||
            { as_root apt-get update -q &&
              as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends redis-server; }
    elif command -v dnf >/dev/null 2>&1; then
        as_root dnf install -y -q redis
    elif command -v apk >/dev/null 2>&1; then
        as_root apk add --quiet redis
    elif command -v brew >/dev/null 2>&1; then
        brew install --quiet redis
    else
        return 1
    fi
}

if install_redis >/dev/null 2>&1 && command -v redis-server >/dev/null 2>&1; then
    echo "installed $(redis-server --version | cut -d' ' -f1-3)"
else
    echo "redis-server is not installed and could not be (needs root and a package manager): the Redis tests will skip" >&2
fi
