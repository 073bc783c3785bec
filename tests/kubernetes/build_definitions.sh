#!/bin/bash
# Build apiextensions-apiserver into FOLDER: the part of a newer API server that keeps definitions of resources, and judges
# objects by them, with their rules (CEL). Debian's unstable distribution has it, and all libraries it is made of; the rest
# of an API server as new as this is in no package. Nothing is installed.
#
#   build_definitions.sh FOLDER
set -euo pipefail
target=$(realpath -m "$1")
work=$target.work

rm -rf "$work"
mkdir -p "$work"/{packages,bin}
source "$(dirname "$0")/apt.sh" "$work" sid deb
cd "$work"
apt-get "${apt[@]}" -qq update
go=$(apt-cache "${apt[@]}" show golang-go | grep -oPm1 '^Depends:.*\Kgolang-1\.\d+(?=-go)')
libraries=$(apt-cache "${apt[@]}" depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
    --no-enhances golang-k8s-apiextensions-apiserver-dev | grep -E '^(golang-.*-dev|gogoprotobuf)$' | sort -u)
(cd packages && apt-get "${apt[@]}" -qq download "$go-go" "$go-src" $libraries)
for package in packages/*.deb; do dpkg-deb -x "$package" root; done

export GOROOT=$work/root/usr/lib/go-${go#golang-} GOPATH=$work/root/usr/share/gocode GOCACHE=$work/gocache HOME=$work
export GO111MODULE=off GOFLAGS= CGO_ENABLED=0 GOTOOLCHAIN=local PATH=$GOROOT/bin:$PATH
go build -p 2 -ldflags "-s -w" -o bin/apiextensions-apiserver k8s.io/apiextensions-apiserver
dpkg-deb -f packages/golang-k8s-apiextensions-apiserver-dev_*.deb Version > bin/version
mv bin "$target"
chmod -R u+w "$work" && rm -rf "$work"
