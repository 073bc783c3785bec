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
mkdir -p "$work"/{lists/partial,cache/archives/partial,sources,packages,bin}
cd "$work"
cat > sources/source.sources <<END
Types: deb
URIs: $(awk '/^URIs:/ { print $2; exit }' /etc/apt/sources.list.d/debian.sources)
Suites: sid
Components: main
Signed-By: /usr/share/keyrings/debian-archive-keyring.gpg
END
options=(-o Dir::Etc::sourcelist=/dev/null -o "Dir::Etc::sourceparts=$work/sources" -o "Dir::State::lists=$work/lists"
    -o "Dir::Cache=$work/cache" -o APT::Sandbox::User=root)
apt-get "${options[@]}" -qq update
go=$(apt-cache "${options[@]}" show golang-go | grep -oPm1 '^Depends:.*\Kgolang-1\.\d+(?=-go)')
libraries=$(apt-cache "${options[@]}" depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces \
    --no-enhances golang-k8s-apiextensions-apiserver-dev | grep -E '^(golang-.*-dev|gogoprotobuf)$' | sort -u)
(cd packages && apt-get "${options[@]}" -qq download "$go-go" "$go-src" $libraries)
for package in packages/*.deb; do dpkg-deb -x "$package" root; done

export GOROOT=$work/root/usr/lib/go-${go#golang-} GOPATH=$work/root/usr/share/gocode GOCACHE=$work/gocache HOME=$work
export GO111MODULE=off GOFLAGS= CGO_ENABLED=0 GOTOOLCHAIN=local PATH=$GOROOT/bin:$PATH
go build -p 2 -ldflags "-s -w" -o bin/apiextensions-apiserver k8s.io/apiextensions-apiserver
dpkg-deb -f packages/golang-k8s-apiextensions-apiserver-dev_*.deb Version > bin/version
mv bin "$target"
chmod -R u+w "$work" && rm -rf "$work"
