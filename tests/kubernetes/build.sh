#!/bin/bash
# Build kube-apiserver, kube-scheduler and kube-controller-manager into FOLDER, from the source package of Debian 12, which
# has the whole tree: about three minutes on two cores. Nothing else is downloaded, and nothing is installed.
#
#   build.sh FOLDER
set -euo pipefail
target=$(realpath -m "$1")
work=$target.work
programs="kube-apiserver kube-scheduler kube-controller-manager"
release=bookworm version=1.20.2

mkdir -p "$work/gopath/src/k8s.io"
source "$(dirname "$0")/apt.sh" "$work" "$release" "deb deb-src"
cd "$work"
apt-get "${apt[@]}" -qq update
apt-get "${apt[@]}" -qq source --download-only "kubernetes/$release"
apt-get "${apt[@]}" -qq download golang-github-modern-go-reflect2-dev golang-1.19-go golang-1.19-src
for package in *.deb; do dpkg-deb -x "$package" root; done
tar xzf kubernetes_1.20*.orig.tar.gz -C gopath/src/k8s.io
mv "gopath/src/k8s.io/kubernetes-$version" gopath/src/k8s.io/kubernetes
cd gopath/src/k8s.io/kubernetes

# The one that is in the tree crashes with a Go as new as this.
rm -rf vendor/github.com/modern-go/reflect2
cp -r "$work/root/usr/share/gocode/src/github.com/modern-go/reflect2" vendor/github.com/modern-go/

export GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$work/gopath GOCACHE=$work/gocache HOME=$work
export GO111MODULE=off GOFLAGS= CGO_ENABLED=0 PATH=$work/root/usr/lib/go-1.19/bin:$PATH

# The API server describes its types with generated code, which is not in the package.
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
folders=$(grep -rl --include='*.go' '+k8s:openapi-gen=true' pkg staging/src/k8s.io |
    grep -v -E '_test|zz_generated|code-generator/(_examples|cmd|test)|sample-' | xargs -n1 dirname | sort -u |
    sed 's#^staging/src/#k8s.io/kubernetes/vendor/#; s#^pkg/#k8s.io/kubernetes/pkg/#' | paste -sd,)
"$work/openapi-gen" -i "$folders" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
    -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations" --output-base "$work/gopath/src"

flags="-s -w"
for place in k8s.io/kubernetes/vendor/k8s.io/component-base/version k8s.io/component-base/version \
    k8s.io/kubernetes/vendor/k8s.io/client-go/pkg/version; do
    flags="$flags -X $place.gitVersion=v$version -X $place.gitMajor=1 -X $place.gitMinor=20 -X $place.gitTreeState=clean"
done
for program in $programs; do go build -p 2 -ldflags "$flags" -o "$work/bin/$program" "./cmd/$program"; done
mv "$work/bin" "$target"
chmod -R u+w "$work" && rm -rf "$work"
