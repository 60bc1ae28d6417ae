#!/bin/sh
# Entry point of the image: checks the folders that must be writable, then becomes `reelwright "$@"`.
# A mounted folder often belongs to another user; without this check that shows as a failed job, hours later.
set -eu

check_writable() {
    folder=$1
    if mkdir -p "$folder" && probe=$(mktemp "$folder/.writable.XXXXXX"); then
        rm "$probe"
        return
    fi
    cat >&2 <<EOF
reelwright: $folder is not writable for uid $(id -u), gid $(id -g).
Give the mounted folder to that user (on the host: chown -R $(id -u):$(id -g) FOLDER), or start the container
as the folder's owner (--user UID:GID, in a compose file user: "UID:GID").
EOF
    exit 1
}

check_writable "$REELWRIGHT_DATA_DIR"
check_writable "$HF_HOME"
check_writable "$TRITON_CACHE_DIR"
check_writable "$TORCHINDUCTOR_CACHE_DIR"
case ${REELWRIGHT_STORAGE_URL:-} in
    *%*) ;; # an escaped name; the server knows how to read it
    file:///*) check_writable "${REELWRIGHT_STORAGE_URL#file://}" ;;
esac

exec reelwright "$@"
