#!/usr/bin/env bash
# Tries a Debian package: packaging/deb-try.sh PACKAGE.deb; needs root. It is installed, looked at, removed and purged for real, but
# in an overlay over this machine's files with a network of its own, so that the machine stays as it is.
set -euo pipefail

fail() { echo "deb-try.sh: $*" >&2; exit 1; }
ok() { echo "  ok  $*"; }

if [ "${1:-}" != --inside ]; then
  [ $# -eq 1 ] && [ -f "$1" ] || fail "usage: packaging/deb-try.sh PACKAGE.deb"
  [ "$(id -u)" = 0 ] || fail "needs root, to mount an overlay and to install in it"
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
  || fail "no overlay can be mounted over / here"
mount -t proc proc "$root/proc"
mount --rbind /sys "$root/sys"
mount --rbind /dev "$root/dev"
# Neither this machine's systemd nor its gateways are to be seen.
mount -t tmpfs none "$root/dev/shm"
mount -t tmpfs none "$root/run"
mount -t tmpfs none "$root/tmp"
cp "$package" "$root/tmp/vipgate.deb"
inside() { chroot "$root" /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin LC_ALL=C.UTF-8 DEBIAN_FRONTEND=noninteractive "$@"; }
has() { inside sh -c "command -v $1" >/dev/null; }
# What the overlay has more than this machine (+) or less (-), but for what dpkg, man and the tools for groups keep for themselves.
changes() {
  (cd "$work/upper" && find . -mindepth 1 \( -path ./var/lib/dpkg -o -path ./var/cache -o -path ./var/log \) -prune -o -printf '%y /%P\n') \
    | while read -r kind path; do
      # A character device stands for a file that is gone.
      if [ "$kind" = c ]; then echo "- $path"; elif [ ! -e "$path" ] && [ ! -L "$path" ]; then echo "+ $path"; fi
    done | grep -vE ' /etc/((passwd|shadow|group|gshadow|subuid|subgid)-|\.pwd\.lock)$' | sort
}

# This machine may have the package itself.
inside dpkg -P vipgate >/dev/null 2>&1 || true
! inside getent group vipgate >/dev/null || inside groupdel vipgate
rm -rf "$root"/{etc,var/lib}/vipgate
changes >"$work/before" || true

inside dpkg -i /tmp/vipgate.deb >"$work/log" 2>&1 || fail "it can't be installed: $(tail -5 "$work/log")"
grep -q 'vipgate: write /etc/vipgate/gateway.yaml' "$work/log" || fail "it doesn't say how to begin"
ok "it is installed"

inside dpkg -V vipgate >"$work/log" 2>&1 || fail "files are not what the package says: $(cat "$work/log")"
[ ! -s "$work/log" ] || fail "files are not what the package says: $(cat "$work/log")"
while read -r wanted path; do
  found=$(inside stat -c %a:%U:%G "$path" 2>/dev/null) || fail "$path is missing"
  [ "$found" = "$wanted" ] || fail "$path is $found, and should be $wanted"
done <<END
755:root:root /usr/bin/vipgate
644:root:root /lib/systemd/system/vipgate.service
644:root:root /lib/systemd/system/vipgate-policyd.service
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
[ -z "$(ls -A "$root/etc/vipgate")" ] || fail "/etc/vipgate isn't empty"
ok "files and modes"

said=$(inside vipgate --version 2>&1) || fail "vipgate --version fails: $said"
version=$(inside dpkg-query -W -f '${Version}' vipgate)
[ "${said//-/\~}" = "vipgate $version" ] || fail "the program says '$said', the package $version"
ok "$said runs"

if has groff; then
  for page in "$root"/usr/share/man/man1/vipgate*.1.gz; do
    wrong=$(zcat "$page" | inside groff -man -ww -Tutf8 -z 2>&1) || fail "$(basename "$page") doesn't render: $wrong"
    [ -z "$wrong" ] || fail "$(basename "$page") doesn't render: $wrong"
  done
  ok "$(ls "$root"/usr/share/man/man1/vipgate*.1.gz | wc -l) man pages render"
else
  echo "  --  there is no groff here: man pages are not tried"
fi

completion=/usr/share/bash-completion/completions/vipgate
inside bash -n $completion || fail "the completion isn't bash"
inside bash -c "source $completion && complete -p vipgate" >/dev/null || fail "bash has no completion for vipgate after sourcing it"
! has zsh || inside zsh -n /usr/share/zsh/vendor-completions/_vipgate || fail "the completion isn't zsh"
! has fish || inside fish -n /usr/share/fish/vendor_completions.d/vipgate.fish || fail "the completion isn't fish"
ok "completions"

if has systemd-analyze; then
  for unit in vipgate vipgate-policyd; do
    status=0
    inside systemd-analyze verify --man="$(has man && echo yes || echo no)" /lib/systemd/system/$unit.service >"$work/log" 2>&1 || status=$?
    # It also reads the units that this one names; what is wrong with those isn't ours.
    wrong=$(grep vipgate "$work/log" || true)
    [ $status = 0 ] && [ -z "$wrong" ] || fail "systemd wouldn't take $unit.service: ${wrong:-$(cat "$work/log")}"
  done
  ok "systemd takes the units"
else
  echo "  --  there is no systemd-analyze here: units are not tried"
fi

# A gateway that is killed leaves its interface closed; removing the package must open it.
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
ip -d link show try0 | grep -q prog/xdp || fail "a killed gateway leaves its interface open"
inside dpkg -r vipgate >"$work/log" 2>&1 || fail "it can't be removed: $(tail -5 "$work/log")"
! ip -d link show try0 | grep -q prog/xdp || fail "the removed package leaves the interface closed: $(cat "$work/log")"
[ -e "$root/etc/vipgate/gateway.yaml" ] || fail "removing it takes people's configuration away"
ok "removed, it leaves no interface closed"

# What people wrote is theirs; without it, nothing may be left.
rm -r "$root/etc/vipgate"
mkdir -p "$root/var/lib/vipgate"
inside dpkg -P vipgate >"$work/log" 2>&1 || fail "it can't be purged: $(tail -5 "$work/log")"
changes >"$work/after" || true
left=$(diff "$work/before" "$work/after" | grep '^[<>]' || true; find "$root"/{run,tmp,dev/shm} -name 'vipgate*' ! -name vipgate.deb)
[ -z "$left" ] || fail "purged, it leaves the files changed: $left"
! inside getent group vipgate >/dev/null || fail "purged, it leaves the group vipgate behind"
ok "purged, it leaves nothing behind"
