#!/usr/bin/env bash
# Makes every image that compose.yaml needs without a container registry or a package index in the build: the base image
# from Debian's packages, the stand-ins for Redis and Prometheus, and Octavo itself from a wheelhouse.
# Usage, as root: deploy/standins.sh [FOLDER]    where the base image's files are put together; a temporary one by default
# Needs docker, debootstrap, and deploy/wheels.sh run before. DEBIAN_MIRROR names another mirror.
set -euo pipefail
cd "$(dirname "$0")/.."
mirror=${DEBIAN_MIRROR:-http://deb.debian.org/debian}
folder=${1:-$(mktemp -d)}
# The final images have all of it, the compiler too: the price of asking nobody while they are built.
packages=python3,python3-venv,g++,redis-server,prometheus

ls deploy/wheels/*.whl >/dev/null || { echo "no wheels: run deploy/wheels.sh first" >&2; exit 1; }
if ! docker image inspect debian:bookworm-slim >/dev/null 2>&1; then
    debootstrap --variant=minbase --include="$packages" bookworm "$folder/rootfs" "$mirror"
    rm -rf "$folder"/rootfs/var/cache/apt/archives/*.deb "$folder"/rootfs/var/lib/apt/lists/*
    tar -C "$folder/rootfs" -c . | docker import --change 'CMD ["bash"]' - debian:bookworm-slim
fi
for name in redis prometheus; do
    docker build --network none -t "octavo-$name:standin" - <"deploy/standins/$name.Dockerfile"
done
docker build --network none -f deploy/Dockerfile -t octavo:local .
echo "made; now: export REDIS_IMAGE=octavo-redis:standin PROMETHEUS_IMAGE=octavo-prometheus:standin"
