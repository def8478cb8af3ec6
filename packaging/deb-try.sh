#!/usr/bin/env bash
# Tests a Debian package: packaging/deb-try.sh PACKAGE.deb; needs root. Installs, checks, removes and purges it in an
# overlay over this machine's root file system, with a separate network namespace, so that the machine isn't changed.
set -euo pipefail

fail() { echo "deb-try.sh: $*" >&2; exit 1; }
ok() { echo "  ok  $*"; }

if [ "${1:-}" != --inside ]; then
  [ $# -eq 1 ] && [ -f "$1" ] || fail "usage: packaging/deb-try.sh PACKAGE.deb"
  [ "$(id -u)" = 0 ] || fail "needs root to mount an overlay and to install the package"
  work=$(mktemp -d)
  trap 'rmdir "$work"' EXIT
  status=0
  unshare --mount --pid --net --fork --kill-child bash "$0" --inside "$(realpath "$1")" "$work" || status=$?
  exit $status
fi

package=$2 work=$3
mount -t tmpfs none "$work"
mkdir "$work"/{upper,work,root}
root=$work/root
mount -t overlay overlay -o "lowerdir=/,upperdir=$work/upper,workdir=$work/work" "$root" \
  || fail "cannot mount an overlay over /"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
# Hides this machine's systemd and gateways.
mount -t tmpfs none "$root/dev/shm"
mount -t tmpfs none "$root/run"
mount -t tmpfs none "$root/tmp"
cp "$package" "$root/tmp/vipgate.deb"
inside() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive "$@"; }
has() { inside sh -c "command -v $1" >/dev/null; }
# Added (+) and removed (-) files, except for databases of dpkg, man and the group tools.
changes() {
  (cd "$work/upper" && find . -mindepth 1 \( -path ./var/lib/dpkg -o -path ./var/cache -o -path ./var/log \) -prune -o -printf '%y /%P\n') \
    | while read -r kind path; do
      # A character device is a whiteout: a removed file.
      if [ "$kind" = c ]; then echo "- $path"; elif [ ! -e "$path" ] && [ ! -L "$path" ]; then echo "+ $path"; fi
    done | grep -vE ' /etc/((passwd|shadow|group|gshadow|subuid|subgid)-|\.pwd\.lock)$' | sort
}

# The package may be installed on this machine.
inside dpkg -P vipgate >/dev/null 2>&1 || true
! inside getent group vipgate >/dev/null || inside groupdel vipgate
rm -rf "$root"/{etc,var/lib}/vipgate
changes >"$work/before" || true

inside dpkg -i /tmp/vipgate.deb >"$work/log" 2>&1 || fail "cannot install the package: $(tail -5 "$work/log")"
grep -q 'vipgate: create /etc/vipgate/gateway.yaml' "$work/log" || fail "the installation prints no instructions"
ok "installed"

inside dpkg -V vipgate >"$work/log" 2>&1 || fail "files differ from the package: $(cat "$work/log")"
[ ! -s "$work/log" ] || fail "files differ from the package: $(cat "$work/log")"
while read -r expected path; do
  actual=$(inside stat -c %a:%U:%G "$path" 2>/dev/null) || fail "$path is missing"
  [ "$actual" = "$expected" ] || fail "$path is $actual, expected $expected"
done <<END
755:root:root /usr/bin/vipgate
644:root:root /lib/systemd/system/vipgate.service
644:root:root /lib/systemd/system/vipgate-policyd.service
644:root:root /lib/systemd/system/vipgate-node.service
750:root:vipgate /etc/vipgate
644:root:root /usr/share/doc/vipgate/copyright
644:root:root /usr/share/doc/vipgate/changelog.gz
644:root:root /usr/share/doc/vipgate/README.md.gz
644:root:root /usr/share/doc/vipgate/examples/gateway.yaml
644:root:root /usr/share/doc/vipgate/examples/crds.yaml
644:root:root /usr/share/man/man1/vipgate.1.gz
644:root:root /usr/share/man/man1/vipgate-gateway.1.gz
644:root:root /usr/share/bash-completion/completions/vipgate
644:root:root /usr/share/zsh/vendor-completions/_vipgate
644:root:root /usr/share/fish/vendor_completions.d/vipgate.fish
END
[ -z "$(ls -A "$root/etc/vipgate")" ] || fail "/etc/vipgate is not empty"
ok "files and modes"

output=$(inside vipgate --version 2>&1) || fail "vipgate --version fails: $output"
version=$(inside dpkg-query -W -f '${Version}' vipgate)
[ "${output//-/\~}" = "vipgate $version" ] || fail "the binary has version '$output', the package $version"
ok "$output runs"

if has groff; then
  for page in "$root"/usr/share/man/man1/vipgate*.1.gz; do
    errors=$(zcat "$page" | inside groff -man -ww -Tutf8 -z 2>&1) || fail "$(basename "$page") doesn't render: $errors"
    [ -z "$errors" ] || fail "$(basename "$page") doesn't render: $errors"
  done
  ok "$(ls "$root"/usr/share/man/man1/vipgate*.1.gz | wc -l) man pages render"
else
  echo "  --  groff isn't installed: man pages are not tested"
fi

completion=/usr/share/bash-completion/completions/vipgate
inside bash -n $completion || fail "invalid bash completion"
inside bash -c "source $completion && complete -p vipgate" >/dev/null || fail "the bash completion defines none for vipgate"
! has zsh || inside zsh -n /usr/share/zsh/vendor-completions/_vipgate || fail "invalid zsh completion"
! has fish || inside fish -n /usr/share/fish/vendor_completions.d/vipgate.fish || fail "invalid fish completion"
ok "completions"

if has systemd-analyze; then
  for unit in vipgate vipgate-policyd; do
    status=0
    inside systemd-analyze verify --man="$(has man && echo yes || echo no)" /lib/systemd/system/$unit.service >"$work/log" 2>&1 || status=$?
    # It also verifies referenced units; their errors are ignored.
    errors=$(grep vipgate "$work/log" || true)
    [ $status = 0 ] && [ -z "$errors" ] || fail "$unit.service is invalid: ${errors:-$(cat "$work/log")}"
  done
  ok "systemd units"
else
  echo "  --  systemd-analyze isn't installed: units are not tested"
fi

# A killed gateway leaves its XDP program attached; removing the package must detach it.
ip link set lo up
ip link add try0 type veth peer name try1
ip link set try0 up
ip link set try1 up
mkdir "$root/etc/vipgate/policy"
cat >"$root/etc/vipgate/gateway.yaml" <<END
name: try
interfaces: [{name: try0, role: both}]
policy: {files: [/etc/vipgate/policy]}
sessions: {capacity: 4096}
END
inside vipgate gateway --config /etc/vipgate/gateway.yaml >"$work/log" 2>&1 &
gateway=$!
for _ in $(seq 100); do
  ! grep -q 'event="ready"' "$work/log" || break
  kill -0 $gateway 2>/dev/null || break
  sleep 0.1
done
grep -q 'event="ready"' "$work/log" || fail "the gateway doesn't start: $(tail -3 "$work/log")"
kill -9 $gateway
wait $gateway 2>/dev/null || true
ip -d link show try0 | grep -q prog/xdp || fail "the XDP program was detached when the gateway was killed"
inside dpkg -r vipgate >"$work/log" 2>&1 || fail "cannot remove the package: $(tail -5 "$work/log")"
! ip -d link show try0 | grep -q prog/xdp || fail "the XDP program is attached after removal: $(cat "$work/log")"
[ -e "$root/etc/vipgate/gateway.yaml" ] || fail "the removal deletes gateway.yaml"
ok "removed; no XDP program is attached"

# User configuration is preserved; without any, the purge must leave nothing.
rm -r "$root/etc/vipgate"
mkdir -p "$root/var/lib/vipgate"
inside dpkg -P vipgate >"$work/log" 2>&1 || fail "cannot purge the package: $(tail -5 "$work/log")"
changes >"$work/after" || true
leftovers=$(diff "$work/before" "$work/after" | grep '^[<>]' || true; find "$root"/{run,tmp,dev/shm} -name 'vipgate*' ! -name vipgate.deb)
[ -z "$leftovers" ] || fail "leftovers of the purged package: $leftovers"
! inside getent group vipgate >/dev/null || fail "the group vipgate exists after the purge"
ok "purged without leftovers"
