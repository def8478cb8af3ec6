#!/usr/bin/env bash
# Builds the current apiextensions-apiserver from Debian sid, and prints the directory with it and with an etcd that it streams lists from:
#
#   tests/kubernetes/extensions.sh             exit code 3 when sid has moved on from the packages below
#   tests/kubernetes/extensions.sh --update    prints the packages with sid's versions of now, for the end of this file
#
# It serves custom resources as current versions of Kubernetes do: with CEL rules and streaming lists, which the whole API server of Debian
# (apiserver.sh) doesn't have. The build takes six minutes and 1 GB of disk, once: the result stays in VIPGATE_CACHE (~/.cache/vipgate). Nothing is
# installed.
set -euo pipefail
. "$(dirname "$0")/packages.sh"

# Packages of sid, and etcd of trixie: 3.4 of bookworm can't stream lists. Those that `go list -deps` names, of the 323 that Debian would install.
packages() {
  sed '1,/^exit # packages$/d' "$here/$script"
}

# As `debian`, with other suites and apt-get's name as the first argument.
newer() {
  if [ ! -d "$work/newer" ]; then
    mkdir -p "$work/newer"/{parts,lists/partial,cache/archives/partial}
    write_sources "$work/newer/parts" || fail "cannot get packages of Debian"
    sed -i 's/^Types: .*/Types: deb/; s/^Suites: .*/Suites: trixie sid/; /^deb-src /d; s/^\(deb .*\) bookworm main$/\1 trixie main\n\1 sid main/' "$work/newer/parts"/*
  fi
  local program=$1
  shift
  "$program" -qq -o Dir::Etc::sourceparts="$work/newer/parts" -o Dir::Etc::sourcelist=/dev/null -o Dir::State::lists="$work/newer/lists" \
    -o Dir::Cache="$work/newer/cache" -o APT::Sandbox::User=root -o Acquire::Retries=3 "$@"
}

# Hash, name and version of what Debian has of these packages, newest versions first.
available() {
  newer apt-cache show $(packages | cut -d' ' -f2) \
    | awk '/^Package: /{name=$2} /^Version: /{version=$2} /^SHA256: /{hash=$2} /^$/{print hash, name, version}'
}

need apt-get apt-cache dpkg python3 flock sha256sum
[ "$(dpkg --print-architecture)" = amd64 ] || fail "the packages are those of amd64"
if [ "${1-}" = --update ]; then
  exec 2>&1
  work=$(mktemp -d)
  trap 'rm -rf "$work"' EXIT
  newer apt-get update
  # etcd of trixie stays.
  available | awk '$2 == "etcd-server" && $3 !~ /^3\.5\.16/ {next} !seen[$2]++' | sort -k2 >&3
  exit
fi
open_cache extensions
free=$(df --output=avail -B1M "$work" | tail -1)
[ "$free" -gt 2000 ] || fail "$free MB free in $(dirname "$work"), 2000 MB are needed: set VIPGATE_CACHE to another directory"

step "downloading the source and the compiler, 130 MB"
newer apt-get update || fail "cannot get the lists of Debian trixie and sid"
gone=$(comm -23 <(packages | sort) <(available | sort -u) | cut -d' ' -f2,3)
if [ -n "$gone" ]; then
  echo "$script: Debian sid has moved on. It no longer has:"
  sed 's/^/  /' <<<"$gone"
  echo "Replace the packages at the end of tests/kubernetes/$script by the output of: tests/kubernetes/$script --update"
  exit 3
fi
mkdir "$work/debs" "$work/root"
(cd "$work/debs" && newer apt-get download $(packages | awk '{print $2 "=" $3}')) || fail "cannot download"
changed=$(comm -3 <(packages | cut -d' ' -f1 | sort) <(cd "$work/debs" && sha256sum -- *.deb | cut -d' ' -f1 | sort))
[ -z "$changed" ] || fail "other packages than those named here: $changed"
step "unpacking"
for package in "$work/debs"/*.deb; do dpkg -x "$package" "$work/root"; done
rm -rf "$work/debs"

unset "${!GO@}"
export GOROOT=$work/root/usr/lib/go-1.26 GOPATH=$work/gopath GOCACHE=$work/gocache GOFLAGS= GOENV=off GO111MODULE=off GOTOOLCHAIN=local CGO_ENABLED=0
export PATH=$GOROOT/bin:$PATH
mkdir -p "$GOPATH" "$work/result"
ln -s "$work/root/usr/share/gocode/src" "$GOPATH/src"
cd "$GOPATH/src/k8s.io/apiextensions-apiserver"

step "compiling apiextensions-apiserver, five minutes"
nice go build -ldflags "-s -w" -o "$work/result/apiextensions-apiserver" .
"$work/result/apiextensions-apiserver" --help >/dev/null || fail "the binary doesn't start"
cp "$work/root/usr/bin/etcd" "$work/result/etcd"
"$work/result/etcd" --version >/dev/null || fail "etcd doesn't start"
cd /
keep "$work/result"
exit # packages
0875921bb0d023f2af9b8e15cdfbe417a03e65731345fb832c40f9c2dd72967b etcd-server 3.5.16-4
497c936cb5050aaeb52021e757aafc8c959248a4c7015615f40390882b76683c golang-1.26-go 1.26.10-1
c535cfd05d879c7cb2b28577fc9011fe1639d36e957d5077bb5c862b07b87c02 golang-1.26-src 1.26.10-1
7c922b69ea189145b29b54d9565fe678dec32d5e7196e336e376c9f844ce3e26 golang-cel-cel-go-dev 0.32.0+ds-5
89aa37677aabe71e7cd11fb78087644a2e9ae981fe2a06861f49b79184d1069c golang-cel-expr-dev 0.24.0-1
0a5a2596ab3b40f437297905fadea5c2a2bf79499613a5aaafeb08dfbc2620d7 golang-etcd-server-dev 3.5.30-2
d28f823964d1c104c7d06729225c49fdb14e20dcc78f3c57288eb8be1d10e5c6 golang-github-antlr4-go-antlr-dev 4.13.1-2
7e8a16f73094842f2e52df959ea9f250257f6ecdfda1d9a8bed5c40227229c90 golang-github-beorn7-perks-dev 1.0.1-3
10884ea643290937d08dee2297f210b0ba45f9929c1e95224b1a482b07d814b2 golang-github-blang-semver-dev 4.0.0-2
d023692443bde5969fb539ba84cbd597845bc4b1f897bbf95986a5b8b9da5c8a golang-github-cenkalti-backoff-v5-dev 5.0.3-4
41d37cb1a3956a319a0f9b975b9518a8d1128e79fc0c38bb4e32b3354e14c325 golang-github-cespare-xxhash-v2-dev 2.3.0-4
3ff11175186f832fe00fb927e5f9f7fe0f564c99b049d9d7f92d9c13e6e4f5bb golang-github-coreos-go-semver-dev 0.3.1-1
2620e706ff7fb71190dbe6a65bdff5376af2cd718e858106c6a8094c209b0a11 golang-github-coreos-go-systemd-dev 22.6.0-1
d64d3392caf0d0c339d6dd2d7d4c1f42a43f04ff461b791b932f1e8feaa626e7 golang-github-davecgh-go-spew-dev 1.1.1-7
1370514a66d9d5e62a6982d81004581f3c109fe196623e4d1e88dac2e5234c95 golang-github-docker-spdystream-dev 0.5.0-1
d21ea63557d88ed7c39dc31181688c465b1d4f3df0396e03fd7ec98a4a929608 golang-github-emicklei-go-restful-dev 3.10.2-1
c0daed6feec5745046a8f382b871bad21639540922af55ea58b9e92a84ff39ab golang-github-evanphx-json-patch-dev 5.7.0-2
fc1780b3affc920c2a98590ad51f8afef7eb526b8d9dde039376146c4b369251 golang-github-felixge-httpsnoop-dev 1.0.3-3
7c1f58b36daffad6fea6b31e002c3e9869f0ec77c07214ec0cae513eeb154145 golang-github-fsnotify-fsnotify-dev 1.10.1-1
deb89810529a8c973a11dc034134e3d5f54894bb82a403277bd4203291c1f2ed golang-github-fxamacker-cbor-dev 2.9.6-2
a5a6f929de397e028d0dd87f25101b06a42429c825737c77f9e88401ec04e708 golang-github-go-logr-logr-dev 1.4.4-1
c674664d908664441de94488a1db269276d9dd6aea1d3f61a5862f2b7f1dab81 golang-github-go-logr-stdr-dev 1.2.2-4
0b42c17e64781a6457cdaf2e3c74c1ec02009fd14e0ecce215b9378d4f3b859f golang-github-go-openapi-jsonpointer-dev 1:0.23.1-1
d48877a6b70e6625f7beb0aa6938a5b78da338e3f2fdab4cb0c22eda4192fc3a golang-github-go-openapi-jsonreference-dev 1:0.21.5-1
6fe49045c8d1fe21b3cc303c773dd4e0b22584366b7a23f9ebe930eaed157862 golang-github-go-openapi-swag-dev 1:0.26.0-1
8a4647e0b1d90ec2a2e537ee1921df033a837971b51318bab15a896d6fc5a803 golang-github-gogo-protobuf-dev 1.3.2-3
3a26b57186c6a3f506bed1dad046caa49c7388343968c629e7fcee12ea2ce1ec golang-github-golang-protobuf-1-5-dev 1.5.4-2
10f33e69392172a4283ec554dc72540036b24d7d38f9ac1f477eed668bf8ba0f golang-github-google-gnostic-models-dev 0.7.1-1
dac5a782fcd3baee1e74e6129977d5e6accffa1dcb83ded6de13cb4167b6171d golang-github-google-uuid-dev 1.6.0-1
d2f701247bd45361f3bc0e62f5d50e197b1eb01ffa452494db6a2f961e3d9c92 golang-github-gorilla-websocket-dev 1.5.3-2
a46a76c0ed589193d898db9206e677a43c1c3dda6a635234e5fe14139a67d426 golang-github-grpc-ecosystem-go-grpc-middleware-dev 2.1.0-2
cf9af5d8aafffa7ee52bf0f5773e8b17ef64859a63fc0e9a281e7514626d4426 golang-github-grpc-ecosystem-grpc-gateway-dev 2.30.0-1
b498b80352c8e6484f7100b118f5684b766cf474d9c8db48fe9f1792a45c3fdf golang-github-json-iterator-go-dev 1.1.12-3
4823794bf67e10243150e0a84425e1554be006b71791d7126c0c71f149e48293 golang-github-kylelemons-godebug-dev 1.1.0-2
d49fedf2c7a250b2e7b720d37539995a78964b66a61327f466c67a94bab82999 golang-github-modern-go-concurrent-dev 1.0.3-1.1
af150a5172cf4c19bb321a53e67103e7fb18d07c1baa1e816a235155265d3948 golang-github-modern-go-reflect2-dev 1.0.2-2
17a0c8ce6c9cc9c45c9d395f20396f1f5019c660d84d6254952558c57f8b65dc golang-github-munnerz-goautoneg-dev 0.0~git20191010.a7dc8b6-2
c03456a54a652e7f7a77ac69920b3990dce07b6c0e21bb33d192f6285188ad3f golang-github-mxk-go-flowrate-dev 0.0~git20140419.0.cca7078-2
f60a3610ba2c47899eafa202a9b15235ccc59cc958cdd2c324970916e996684b golang-github-nytimes-gziphandler-dev 1.1.1-1
833b2ae263fa13ff80c90663f72581808e9b75e5bac1ad7bd0233a82816c2045 golang-github-pkg-errors-dev 0.9.1-3
49073cd1d65b027c0550603222db3a0fe4dad6544b7d4d470215075dc2547a9a golang-github-pmezard-go-difflib-dev 1.0.0-4
0272ec95c11f143dc86d291955ee3b97debbf55c105b331e05fc042c0a6ded19 golang-github-prometheus-client-golang-dev 1.23.2-5
0cf5e68370263995c53cf71f2a7ddff5ee66f43ee252c91ec113d2e229eb9b88 golang-github-prometheus-client-model-dev 0.6.2-2
19ae64ad8a325a33010518ba8d1f6697879c826572e999ae7aa987432596e355 golang-github-prometheus-common-dev 0.69.0-1
d4e42351f63a6f5c9fb68d2a35ecd4ae8b75c26cdeac1e4e318259c6feec7932 golang-github-prometheus-procfs-dev 0.21.1-1
5af394a4d73745bbe312e958ac3a16a4c147636e0c7357f3fa61a912df5a4587 golang-github-spf13-cobra-dev 1.10.2-1
11cd245d99b230006eb921aec4a0e3e2ff9d9986df4ffd3ca1e0b809967067c3 golang-github-spf13-pflag-dev 1.0.10-1
4083f6b824ce95ff58626c14598209c464f0194fbcf840170e645411a0c4f91d golang-github-x448-float16-dev 0.8.4-3
fedde6bcc3074ca6c5c3ccd93adb51a82a0a7f9cfb7a567ed3871112d4eaf991 golang-go.uber-multierr-dev 1.11.0-2
ffdf0bfcdbbcf412a2f04fc89d9aaf53e0b370c2d327443cf572255559124cd3 golang-go.uber-zap-dev 1.27.0-2
2f584fd262bfc5feee8f37429088b1bcf380181ee143ca4825de609cc3c12a10 golang-golang-x-crypto-dev 1:0.58.0-1
f701ee32763fc39756773343102780f422ec80ebdbb4a85bc64c8eb964fba880 golang-golang-x-exp-dev 0.0~git20261009.ca0d7ba-1
eea421f32541dea782ce00241b7d67d0a612e625d431d1881724dff2fc81e1ef golang-golang-x-net-dev 1:0.62.0-1
cbb21c16cf2a92c4efc14ae02e791aef4b4d029d15840f311f8749d78ea14902 golang-golang-x-oauth2-dev 0.37.0-1
2a1faa9c07c45da8b34689af29a80fe565e5d623799cf1ea326ecd77fa49306e golang-golang-x-oauth2-google-dev 0.37.0-1
e4334d4e9f607f5f2ea32fcaa4f8ed7ff01d5a1277a4bea8b43f41d4f43d98b4 golang-golang-x-sync-dev 0.24.0-1
4d759f69efca831b7c0680b3de298df1eebc1a7374747976c23df7e4ad7657b4 golang-golang-x-sys-dev 0.49.0+dfsg-1
df0e9c51d1e5b0d2b4dd1c75c786a29c299f1b9c40cd8070df3ed006e8b4fefb golang-golang-x-term-dev 0.47.0-1
b0114bcb485451026be0e49d5028ab9cfa5074ab2423c76bf924e52bfe648b74 golang-golang-x-text-dev 0.43.0-1
b31cbf28a4a4de6207cf8955f151c98fc78e3572e93cf05cbfe2fe7a5c837f7f golang-golang-x-time-dev 0.16.0-1
c4885c3a1031c1e4e72d6fa0667d4be48710b583f2236add98935b059a990b85 golang-google-genproto-dev 0.0~git20260414.afd174a-2
261d7c28e2bedcca28ce639b8e5777e7a981edce47bd44644a947b2cfd36ba9e golang-google-grpc-dev 1.81.1-1
7f552704f80a5ec3d0d6a71dac3a4425af54e5a7dcd80994b5e346fc11dee068 golang-google-protobuf-dev 1.36.10-2
54d17e79a2e01ac94edec1659148853e767b551c778004b77d116e483005c100 golang-gopkg-inf.v0-dev 0.9.1-2
7fcb5fa86ec6373753bc6f56df148858acc9d9549259616f195bdf750b30988e golang-gopkg-natefinch-lumberjack.v2-dev 2.1-2
348445a2b0d2789668e1e1eaf8a2230aac83cb231a1c513821c221042c621ae3 golang-gopkg-yaml.v2-dev 2.4.4-1
3b51f8a9d4aa4ad1ef0c907b3cbb7d2f612c3afeb96ed0d138ffb668aae1c230 golang-gopkg-yaml.v3-dev 3.0.5-1
0b5f0e6bb3c55edf6a564496c5997b729e0b03c6597891a32dac9b6d71b9e109 golang-k8s-api-dev 0.36.4-1
2b99dfbbdbea3372c625abfb6fcbdaf9ea79e36110bf06a66ac014c25f9babf8 golang-k8s-apiextensions-apiserver-dev 0.36.4-1
020045b2e32576be3350f382133cefaa6342f17ab8df24175667f6882b32925b golang-k8s-apimachinery-dev 0.36.4-3
2e61a34f4b07772ccdb4daef903097d9ce855f47af77b21791ea005c8f7b59a3 golang-k8s-apiserver-dev 0.36.4-2
959e75cd6a104d00a7b0262867f5064141a092dfd3ad55915033474c774e628a golang-k8s-client-go-dev 0.36.4-1
dcd4826eae22cb2a22bf914e53edf60cb81120b025ccba86fff8c2e9d664291c golang-k8s-component-base-dev 0.36.4-2
49847276d9f75a2ff5c8e24d368a79e79ece289b66c521d4a4fc7976f5eea979 golang-k8s-klog-dev 2.140.0-5
58be972a2aeb1bbd08913daa46a7bd5025e801707ab6253f3bcd3f7da1ad8795 golang-k8s-kms-dev 0.36.4-1
9490d7b5d6e32490d4b30b7bad208532fbd81174efbf01cf7db68d3259e9965d golang-k8s-kube-openapi-dev 0.0~git20260721.d427ff9-1
73d5c44fbc7abbafa13a5339c666de8e49515cc6e0f68a0037d6e24af6a52419 golang-k8s-sigs-apiserver-network-proxy-dev 0.36.0+ds1-2
3a944d8c2e8497311b54994c9de568353f5a2a5811bd9bd406b54be9e05d8bae golang-k8s-sigs-json-dev 0.0~git20260909.11ed52e-1
581ddefd073dd77fd71b14721efd8940c6475568edeaec22bcc13961553ed054 golang-k8s-sigs-randfill-dev 1.0.0-2
f361aa88be07bd6b04349e85d51d140114bfd628f9c993f657542d223adf21fc golang-k8s-sigs-structured-merge-diff-v6-dev 6.4.2-1
6feee0cb84f2703a402e88c1fc72cf7b0f58009ad3030fe1fcdfb74a6c1712e1 golang-k8s-sigs-yaml-dev 1.6.0-1
86786f8930725f27c2412461b12ac739848026d322aa4408de008ef2fdbb6f73 golang-k8s-streaming-dev 0.36.2-1
6f5965ef2384e264e10e8e6bf2ce69b6cbe21e111e9a33d57dcf8bd55ddfce3f golang-k8s-utils-dev 0.0~git20260707.cf1189d-1
96774124e3cb8cc72eb85cafc0332e2f881c5b3c1cb103f18454607dca5d6e52 golang-opentelemetry-contrib-dev 1.46.0-1
78e6fd0e22f71cd3f9aacdfeb34af5c4f83c9427d9da1d251d96e53bb7eea190 golang-opentelemetry-otel-dev 1.46.0-3
cf331de92fefa8f369109c38ceda7157d0fe1bfc56ed6b83dfe0d2c4e3f18fe1 golang-opentelemetry-proto-dev 1.10.0-1
