#!/usr/bin/env bash
# Builds kube-apiserver and kube-proxy from Debian bookworm's source package and prints the path of kube-apiserver:
# tests/kubernetes/apiserver.sh
#
# No registry and no Debian release has binaries of them. The build takes six minutes and 3 GB of disk, once: the binaries stay in
# VIPGATE_CACHE (~/.cache/vipgate) as kube-apiserver-HASH and kube-proxy-HASH. Nothing is installed.
set -euo pipefail
. "$(dirname "$0")/packages.sh"

# The source that bookworm's package 1.20.5+really1.20.2 is made of.
version=1.20.2
sha256=b83c0780efb182d928dc63d46488a847f161f04e40a94b96bf5247dd671ecdfc

need apt-get dpkg python3 tar flock sha256sum
[ "$(dpkg --print-architecture)" = amd64 ] || [ "$(dpkg --print-architecture)" = arm64 ] || fail "only amd64 and arm64 are known to work"
open_cache kube-apiserver
free=$(df --output=avail -B1M "$work" | tail -1)
[ "$free" -gt 4000 ] || fail "$free MB free in $(dirname "$work"), 4000 MB are needed: set VIPGATE_CACHE to another directory"

step "downloading the source and the compiler, 120 MB"
debian update || fail "cannot get the lists of Debian bookworm"
unpack golang-1.19-go golang-1.19-src golang-github-modern-go-reflect2-dev
(cd "$work" && debian source --download-only kubernetes) || fail "cannot download the source of kubernetes"
sums=$(cd "$work" && sha256sum kubernetes_*.orig.tar.*)
grep -q "^$sha256 " <<<"$sums" || fail "another source than that of Kubernetes $version: $sums"

step "unpacking"
source=$work/source
mkdir "$source"
tar -xf "$work"/kubernetes_*.orig.tar.* -C "$source" --strip-components=1
# The vendored reflect2 1.0.1 crashes under Go 1.18 and later, at the first custom resource; Debian's is newer.
reflect2=vendor/github.com/modern-go/reflect2
rm "$source/$reflect2"/*.go "$source/$reflect2"/*.s
cp "$work/root/usr/share/gocode/src/github.com/modern-go/reflect2"/*.{go,s} "$source/$reflect2/"
rm -f "$source/$reflect2"/*_test.go

unset "${!GO@}"
export GOROOT=$work/root/usr/lib/go-1.19 GOPATH=$work/gopath GOCACHE=$work/gocache GOFLAGS= GOENV=off GO111MODULE=off CGO_ENABLED=0
export PATH=$GOROOT/bin:$PATH
mkdir -p "$GOPATH/src/k8s.io"
ln -s "$source" "$GOPATH/src/k8s.io/kubernetes"
cd "$GOPATH/src/k8s.io/kubernetes"

# The one generated file that the archive lacks. `make` would generate everything, with tools that aren't needed otherwise.
step "generating the OpenAPI definitions"
go build -o "$work/openapi-gen" ./vendor/k8s.io/kube-openapi/cmd/openapi-gen
packages=$(grep -rlE '\+k8s:openapi-gen=' --include=*.go -R vendor/k8s.io/ pkg/ \
  | grep -vE '/(kube-openapi|code-generator|sample-|gengo)/|_test\.go|generated|examples' \
  | xargs -n1 dirname | sort -u | sed 's|^|k8s.io/kubernetes/|' | paste -sd,)
"$work/openapi-gen" --logtostderr -i "$packages" -p k8s.io/kubernetes/pkg/generated/openapi -O zz_generated.openapi \
  -h vendor/k8s.io/code-generator/hack/boilerplate.go.txt -r "$work/violations" --output-base "$GOPATH/src"

step "compiling kube-apiserver $version, five minutes"
flags="-s -w"
for package in component-base/version client-go/pkg/version; do
  name=k8s.io/kubernetes/vendor/k8s.io/$package
  flags+=" -X $name.gitVersion=v$version -X $name.gitMajor=1 -X $name.gitMinor=20"
done
go build -ldflags "$flags" -o "$work/kube-apiserver" ./cmd/kube-apiserver
[ "$("$work/kube-apiserver" --version)" = "Kubernetes v$version" ] || fail "the binary doesn't start"

step "compiling kube-proxy $version, one minute"
go build -ldflags "$flags" -o "$work/kube-proxy" ./cmd/kube-proxy
[ "$("$work/kube-proxy" --version)" = "Kubernetes v$version" ] || fail "the binary doesn't start"
cd /
# Before kube-apiserver, whose presence shows that both are there.
mv -T "$work/kube-proxy" "${target/%kube-apiserver-*/kube-proxy-${target##*-}}"
keep "$work/kube-apiserver"
