#!/bin/sh
# Prints the path of Python $1, such as 3.12: the one on PATH, or the newest that pyenv has.
# Exits 1 and prints nothing if there is none.
set -u

# pyenv puts a script on PATH for every version, which fails for a version that is not chosen.
path_of() {
    "$1" -c 'import sys; print(sys.executable)' 2>/dev/null
}

path_of "python$1" && exit 0
command -v pyenv >/dev/null 2>&1 || exit 1
newest=$(pyenv versions --bare | grep -E "^$1\.[0-9]+$" | sort -V | tail -n 1)
[ -n "$newest" ] && path_of "$(pyenv prefix "$newest")/bin/python$1"
