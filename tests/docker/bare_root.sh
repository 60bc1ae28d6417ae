#!/bin/sh
# The nearest thing to a container that needs no engine. Run by root as
#   unshare --mount sh bare_root.sh ROOT CACHE DATA FILES READ_ONLY_FOLDER... -- COMMAND...
# ROOT becomes a read-only root file system of system folders and the READ_ONLY_FOLDERs, each at its own path;
# CACHE lies at /cache, DATA at /data, FILES at /files, and /tmp is an empty tmpfs without execution, as Compose mounts it.
# COMMAND then runs as uid 1000 with the environment that this script got.
set -eu

show() {
    if [ -L "$1" ]; then
        cp -P "$1" "$root$1"
    elif [ -d "$1" ]; then
        mkdir -p "$root$1"
        mount --rbind "$1" "$root$1"
        mount -o remount,bind,ro "$root$1"
    fi
}

root=$1 cache=$2 data=$3 files=$4
shift 4
mount -t tmpfs -o mode=755 none "$root"
mkdir "$root/proc" "$root/dev" "$root/cache" "$root/data" "$root/files" "$root/tmp"
mount --rbind /proc "$root/proc"
mount --rbind /dev "$root/dev"
mount --bind "$cache" "$root/cache"
mount --bind "$data" "$root/data"
mount --bind "$files" "$root/files"
mount -t tmpfs -o mode=1777,size=1g,noexec,nosuid,nodev none "$root/tmp"
for folder in /bin /sbin /lib /lib64 /usr /etc /sys; do show "$folder"; done
while [ "$1" != -- ]; do
    show "$1"
    shift
done
shift
mount -o remount,ro "$root"

exec chroot --userspec=1000:1000 --groups=1000 "$root" "$@"
