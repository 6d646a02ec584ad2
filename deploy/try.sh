#!/usr/bin/env bash
# Runs the steps of deploy/Dockerfile.cpu where no Docker engine runs: in a fresh Debian root if this is
# root and has debootstrap, else in an empty folder. Then it makes a small bundle, starts the image's own
# command as the image's own user and runs its HEALTHCHECK until that passes.
#   deploy/try.sh     TRY_PORT=8080   TRY_MOUNT="DIR ..." lends the root folders of this machine (wheels)
set -euo pipefail
cd "$(dirname "$0")/.."
dockerfile=deploy/Dockerfile.cpu
port=${TRY_PORT:-8080}
root=$(mktemp -d)
chmod 755 "$root"
user=root workdir=/ health='' entrypoint='' command='' server=''
variables=(PIP_DISABLE_PIP_VERSION_CHECK=1 PIP_ROOT_USER_ACTION=ignore) mounted=()

say() { printf '\n== %s\n' "$*"; }

cleanup() {
    [ -z "$server" ] || { kill "$server" && wait "$server"; } 2>/dev/null || true
    for folder in ${mounted[@]+"${mounted[@]}"}; do umount --recursive --lazy "$folder"; done
    rm -rf --one-file-system "$root"
}
trap cleanup EXIT

make_root() {
    if [ "$(id -u)" != 0 ] || ! command -v debootstrap >/dev/null; then
        mode=prefix
        mkdir -p "$root/bundle" "$root/data" "$root/tmp"
        say "not root or no debootstrap: an empty folder and a fresh virtual environment stand in"
        return
    fi
    mode=chroot
    say "debootstrap: Debian bookworm with Python 3.11"
    debootstrap --variant=minbase --include=python3,python3-venv,ca-certificates bookworm "$root" >/dev/null
    for file in /etc/resolv.conf /etc/pip.conf /etc/ssl/certs/ca-certificates.crt; do
        [ ! -e "$file" ] || cp -L "$file" "$root$file"
    done
    for folder in /proc /dev ${TRY_MOUNT:-}; do
        mkdir -p "$root$folder"
        mount --rbind "$folder" "$root$folder" && mount --make-rslave "$root$folder"
        mounted+=("$root$folder")
    done
}

here() { # the image's absolute paths, as they are called where there is no chroot
    if [ "$mode" = chroot ]; then cat; else sed -E "s#/(opt/recserve|src|data|bundle)\b#$root/\1#g"; fi
}

inside() { # a shell command as the image's current user, in its folder and with its variables
    local script="cd '$workdir' && $1" settings=()
    mapfile -t settings < <(printf '%s\n' "${variables[@]}" | here)
    if [ "$mode" = chroot ]; then
        exec chroot --userspec="$user" "$root" env HOME=/tmp "${settings[@]}" sh -c "$script"
    fi
    exec env HOME="$root/tmp" "${settings[@]}" sh -c "$(here <<<"$script")"
}

words() { python3 -c 'import json, shlex, sys; print(shlex.join(json.loads(sys.argv[1])))' "$1"; }

copy() { # COPY a b c /target : files into the folder, or the content of one folder
    local target=$root${*: -1}
    mkdir -p "$target"
    if [ -d "$1" ]; then cp -r "$1/." "$target"; else cp "${@:1:$#-1}" "$target"; fi
}

run() {
    if [ "$mode" = prefix ] && [[ $1 == useradd* || $1 == mkdir* ]]; then return; fi
    say "RUN $1"
    (inside "$1")
}

build() {
    local instruction rest name
    while read -r instruction rest; do
        case $instruction in
        '' | '#'* | FROM | EXPOSE) ;;
        ARG) name=${rest%%=*} && variables+=("$name=${!name:-}") ;;
        ENV) variables+=("$rest") ;;
        WORKDIR) workdir=$rest && mkdir -p "$root$rest" ;;
        USER) user=$rest ;;
        COPY) read -ra words <<<"$rest" && copy "${words[@]}" ;;
        RUN) run "$rest" ;;
        HEALTHCHECK) health=${rest#*CMD } ;;
        ENTRYPOINT) entrypoint=$(words "$rest") ;;
        CMD) command=$(words "$rest") ;;
        *) echo "deploy/try.sh does not know the instruction $instruction" >&2 && exit 1 ;;
        esac
    done < <(sed -e ':a' -e '/\\$/N; s/\\\n *//; ta' "$dockerfile")
}

for name in $(compgen -e); do # pip's own settings and the proxy's hold inside as outside
    case $name in PIP_* | *_proxy | *_PROXY) variables+=("$name=${!name}") ;; esac
done

make_root
build
variables+=("RECSERVE_API_KEYS=$(head -c 16 /dev/urandom | od -An -tx1 | tr -d ' \n')")
say "a bundle for it, made outside because the image has no training libraries: make demo ONCE=1"
XDG_CACHE_HOME="$root/tmp" make --no-print-directory demo ONCE=1
cp -r "$root"/tmp/recserve/demo/*/bundle/. "$root/bundle"
chmod -R a+rX "$root/bundle"

say "as $user: $entrypoint ${command//8080/$port}"
inside "exec $entrypoint ${command//8080/$port}" &
server=$!
for _ in $(seq 60); do
    if (inside "${health//8080/$port}") 2>/dev/null; then
        say "HEALTHCHECK passed; the steps of $dockerfile work"
        exit 0
    fi
    kill -0 "$server" 2>/dev/null || { echo "the server ended before it was healthy" >&2; exit 1; }
    sleep 1
done
echo "HEALTHCHECK did not pass within 60 s" >&2
exit 1
