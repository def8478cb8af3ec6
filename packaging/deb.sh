#!/usr/bin/env bash
# Makes a Debian package of a binary that is built already: packaging/deb.sh BINARY OUTPUT_DIR
# The same binary and the same commit give the same package, bit by bit.
set -euo pipefail
umask 022

fail() { echo "deb.sh: $*" >&2; exit 1; }

[ $# -eq 2 ] || fail "usage: packaging/deb.sh BINARY OUTPUT_DIR"
binary=$(realpath -m "$1") output=$2
source=$(realpath "$(dirname "$0")/..")
maintainer=${DEB_MAINTAINER:-vipgate maintainers <maintainers@vipgate.io>}

for tool in dpkg-deb strip; do command -v $tool >/dev/null || fail "$tool is missing: apt-get install dpkg binutils"; done
[ -f "$binary" ] || fail "there is no $1: build it first (make build)"
told=$("$binary" --version 2>&1) || fail "$1 doesn't run: $told"
version=$(sed -n 's/^vipgate \([0-9][0-9A-Za-z.+~-]*\)$/\1/p' <<<"$told")
[ -n "$version" ] || fail "$1 doesn't say its version, but: ${told%%$'\n'*}"
# What comes before a release sorts before it; a - would begin Debian's own revision.
version=${version//-/\~}
architecture=$(dpkg --print-architecture)

if [ -z "${SOURCE_DATE_EPOCH:-}" ]; then
  SOURCE_DATE_EPOCH=$(git -C "$source" log -1 --format=%ct 2>/dev/null || stat -c %Y "$source/CHANGELOG.md")
fi
# Several threads cut what they compress otherwise than one.
export SOURCE_DATE_EPOCH DPKG_DEB_THREADS_MAX=1

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
root=$work/root
doc=$root/usr/share/doc/vipgate
mkdir -p "$root"/{DEBIAN,usr/bin,lib/systemd/system,usr/share/man/man1} "$doc/examples"
# mktemp's folder is its owner's alone, a package's is not.
chmod 755 "$root"

install -m 755 "$binary" "$root/usr/bin/vipgate"
strip --strip-unneeded --remove-section=.comment --remove-section=.note "$root/usr/bin/vipgate"
install -m 644 "$source"/conf/vipgate{,-policyd}.service "$root/lib/systemd/system/"
# No gateway.yaml: nobody but its owner knows the interfaces of a machine. Keys lie here, too.
install -d -m 750 "$root/etc/vipgate"

cp -R "$source/conf/." "$doc/examples/"
rm "$doc"/examples/*.service
install -m 644 "$source/README.md" "$source/CHANGELOG.md" "$doc/"
cat >"$doc/changelog" <<END
vipgate ($version) unstable; urgency=medium

  * What is new is in CHANGELOG.md.gz beside this file.

 -- $maintainer  $(date -u -R -d "@$SOURCE_DATE_EPOCH")
END
cat >"$doc/copyright" <<END
Format: https://www.debian.org/doc/packaging-manuals/copyright-format/1.0/
Upstream-Name: vipgate

Files: *
Copyright: $(date -u +%Y -d "@$SOURCE_DATE_EPOCH") the vipgate authors
License: Apache-2.0
 On Debian systems, the text of the Apache License 2.0 is in
 /usr/share/common-licenses/Apache-2.0.
END

mkdir -p "$root/usr/share/lintian/overrides"
cat >"$root/usr/share/lintian/overrides/vipgate" <<'END'
# Keys lie there.
vipgate: non-standard-dir-perm *
# Made without debhelper; each call first asks whether systemd is there.
vipgate: maintainer-script-calls-systemctl *
END

# The binary describes its own commands.
completions() { "$binary" completions "$1" >"$2" && [ -s "$2" ] || fail "completions for $1 can't be made by $binary"; }
mkdir -p "$root"/usr/share/{bash-completion/completions,zsh/vendor-completions,fish/vendor_completions.d}
completions bash "$root/usr/share/bash-completion/completions/vipgate"
completions zsh "$root/usr/share/zsh/vendor-completions/_vipgate"
completions fish "$root/usr/share/fish/vendor_completions.d/vipgate.fish"
"$binary" man "$root/usr/share/man/man1" && [ -s "$root/usr/share/man/man1/vipgate.1" ] \
  || fail "man pages can't be made by $binary"
gzip -9n "$root"/usr/share/man/man1/*.1 "$doc"/{README.md,CHANGELOG.md,changelog}
find "$root/usr/share" -type f -exec chmod 644 {} + -o -type d -exec chmod 755 {} +

# The packages of the libraries that the binary names.
if command -v dpkg-shlibdeps >/dev/null; then
  mkdir "$work/debian"
  printf 'Source: vipgate\n\nPackage: vipgate\nArchitecture: any\n' >"$work/debian/control"
  depends=$(cd "$work" && dpkg-shlibdeps -O root/usr/bin/vipgate | sed -n 's/^shlibs:Depends=//p')
else
  libc=$(objdump -T "$binary" | grep -o 'GLIBC_[0-9.]*' | sort -uV | tail -1)
  depends="libc6 (>= ${libc#GLIBC_}), libelf1, libgcc-s1, zlib1g"
fi
[ -n "$depends" ] || fail "the libraries of $1 belong to no package"

cat >"$root/DEBIAN/control" <<END
Package: vipgate
Version: $version
Architecture: $architecture
Maintainer: $maintainer
Installed-Size: $(du -sk --apparent-size --exclude=DEBIAN "$root" | cut -f1)
Depends: $depends, passwd
Suggests: etcd-server, frr | bird2
Section: net
Priority: optional
Description: gateway that lets pods leave as their Service's VIP
 A tenant's workload is reachable at its Service's LoadBalancer address, the
 VIP. When it calls out, the far side sees that same VIP. vipgate is the
 gateway that does this: a userspace dataplane on AF_XDP whose sessions outlive
 its process, with policy from Kubernetes-style manifests or, over gRPC, from
 its policy server, which is in this package too.
END
install -m 755 "$source"/packaging/deb/{postinst,prerm,postrm} "$root/DEBIAN/"
(cd "$root" && find . -path ./DEBIAN -prune -o -type f -printf '%P\0' | sort -z | xargs -0 md5sum >DEBIAN/md5sums)

mkdir -p "$output"
dpkg-deb --root-owner-group -Zxz --build "$root" "$output/vipgate_${version}_${architecture}.deb"
