#!/bin/sh
# Installs clang and its OpenMP runtime with whatever package manager the machine has. Says what it
# could not do and still exits 0: the tests that need clang say so themselves.
set -u

. "$(dirname "$0")/as-root.sh"

install_clang() {
    if command -v apt-get >/dev/null 2>&1; then
        as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends clang libomp-dev ||
            { as_root apt-get update -q &&
              as_root env DEBIAN_FRONTEND=noninteractive apt-get install -y -q --no-install-recommends clang libomp-dev; }
    elif command -v dnf >/dev/null 2>&1; then
        as_root dnf install -y -q clang libomp-devel
    elif command -v apk >/dev/null 2>&1; then
        as_root apk add --quiet clang openmp-dev
    else
        return 1
    fi
}

if install_clang >/dev/null 2>&1 && command -v clang >/dev/null 2>&1; then
    echo "installed $(clang --version | head -n 1)"
else
    echo "clang is not installed and could not be (needs root and a package manager): tests that compare compilers will skip" >&2
fi
