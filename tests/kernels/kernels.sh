#!/usr/bin/env bash
# Gets the kernels of the guests from Debian, and prints the directory with them: tests/kernels/kernels.sh
#
# One from each suite below, in the version that the mirror has now: SUITE/vmlinuz, SUITE/release, and SUITE/modules with the modules that a
# gateway needs, in the order in which they load. They stay in VIPGATE_CACHE (~/.cache/vipgate), 36 MB; remove them there to get newer
# ones. Nothing is installed.
set -euo pipefail
. "$(dirname "$0")/../kubernetes/packages.sh"
here=$here/../kubernetes

suites="bookworm bookworm-backports trixie-backports"
# Drivers of the guest's devices, and what the tc classifier needs.
modules="virtio_pci virtio_net virtio_console sch_ingress cls_bpf"

# apt-get or apt-cache with the lists of one suite: `of SUITE apt-get ARGS..`.
of() {
  local suite=$1 program=$2 apt=$work/apt-$1
  shift 2
  if [ ! -d "$apt" ]; then
    mkdir -p "$apt"/{parts,lists/partial,cache/archives/partial}
    write_sources "$apt/parts" || fail "cannot get packages of Debian"
    sed -i "s/^Types: .*/Types: deb/; s/^Suites: .*/Suites: $suite/; /^deb-src /d; s/^\(deb .*\) bookworm main$/\1 $suite main/" "$apt/parts"/*
  fi
  "$program" -qq -o Dir::Etc::sourceparts="$apt/parts" -o Dir::Etc::sourcelist=/dev/null -o Dir::State::lists="$apt/lists" \
    -o Dir::Cache="$apt/cache" -o Dir::State::status=/dev/null -o APT::Sandbox::User=root -o Acquire::Retries=3 "$@"
}

# The packages of a suite's current kernel: one, or an image and its modules.
packages_of() {
  of "$1" apt-cache depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances linux-image-amd64 \
    | grep -E '^linux-(image|binary|modules)-[0-9]' | sort -u
}

# Copies modules and those that they depend on, uncompressed, with numbers that sort them: pick FROM TO NAME..
pick() {
  /usr/bin/python3 - "$@" <<'PYTHON'
import lzma, pathlib, re, sys

root, target, *names = sys.argv[1:]
files = {re.sub(r"\.ko(\.xz)?$", "", path.name): path for path in pathlib.Path(root).rglob("*.ko*")}
copied = []


def copy(name):
    # What isn't there is built in.
    if name in copied or name not in files:
        return
    code = files[name].read_bytes()
    if files[name].suffix == ".xz":
        code = lzma.decompress(code)
    for other in filter(None, re.search(rb"\0depends=([^\0]*)\0", code)[1].decode().split(",")):
        copy(other)
    pathlib.Path(target, f"{len(copied):02}-{name}.ko").write_bytes(code)
    copied.append(name)


for name in names:
    copy(name)
PYTHON
}

need apt-get apt-cache dpkg flock sha256sum
[ "$(dpkg --print-architecture)" = amd64 ] || fail "the guests are amd64"
open_cache kernels

mkdir "$work/kernels"
for suite in $suites; do
  of "$suite" apt-get update || fail "cannot get the list of Debian $suite"
  packages=$(packages_of "$suite") || fail "Debian $suite has no kernel"
  step "downloading" $packages
  mkdir "$work/debs" "$work/root" "$work/kernels/$suite" "$work/kernels/$suite/modules"
  (cd "$work/debs" && of "$suite" apt-get download $packages) || fail "cannot download" $packages
  for package in "$work/debs"/*.deb; do dpkg -x "$package" "$work/root"; done
  image=$(find "$work/root" -name 'vmlinuz*' | head -1)
  [ -n "$image" ] || fail "no kernel in" $packages
  cp "$image" "$work/kernels/$suite/vmlinuz"
  release=$(find "$work/root" -path '*/modules/[0-9]*' -prune -printf '%f\n' | head -1)
  echo "$release" >"$work/kernels/$suite/release"
  pick "$work/root" "$work/kernels/$suite/modules" $modules
  rm -rf "$work/debs" "$work/root"
done
keep "$work/kernels"
