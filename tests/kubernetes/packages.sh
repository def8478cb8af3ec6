# Sourced by the scripts beside it: a cache of binaries, and packages of Debian bookworm that are unpacked instead of installed.
#
#   open_cache NAME   sets $target, the cached file or directory of this version of the scripts, and $work, an empty directory that
#                     is removed at exit; exits with the path on stdout when the target exists
#   debian update     gets the lists of Debian bookworm, with sources; the machine's own lists are left alone
#   debian ARGS..     apt-get with these lists; it must not install anything
#   unpack NAME..     downloads packages and unpacks them into $work/root
#
# stdout has the path alone: everything else goes to stderr.
exec 3>&1 1>&2

script=$(basename "$0")
here=$(dirname "$(realpath "$0")")
started=$SECONDS

fail() { echo "$script: $*"; exit 1; }
step() { echo "$script: $((SECONDS - started)) s: $*"; }

open_cache() {
  local cache
  cache=${VIPGATE_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/vipgate}
  mkdir -p "$cache" || fail "cannot create $cache: set VIPGATE_CACHE to a directory"
  cache=$(realpath "$cache")
  target=$cache/$1-$(cat "$0" "$here/packages.sh" | sha256sum | cut -c1-12)
  # One at a time: another run may be building the same.
  exec 9>"$cache/$1.lock"
  flock -n 9 || { step "waiting for another run"; flock 9; }
  if [ -e "$target" ]; then echo "$target" >&3; exit; fi
  # Of killed runs.
  rm -rf "$cache/$1".work.*
  work=$(mktemp -d "$cache/$1.work.XXXXXX")
  trap 'rm -rf "$work"' EXIT
  trap 'exit 130' INT TERM HUP
  # apt checks signatures in a process of the user _apt.
  chmod 755 "$work"
}

# Moves a result into the cache and prints its path.
keep() {
  mv -T "$1" "$target"
  step "done: $target"
  echo "$target" >&3
}

need() {
  local program
  for program in "$@"; do command -v "$program" >/dev/null || fail "$program is missing: run make deps"; done
}

# Writes the machine's own entries for Debian bookworm, with their mirror and key, as sources of packages and source packages.
write_sources() {
  python3 - "$1" <<'PYTHON'
import pathlib, re, sys

etc, parts = pathlib.Path("/etc/apt"), pathlib.Path(sys.argv[1])
stanzas, lines = [], []
for file in sorted(etc.glob("sources.list.d/*.sources")):
    for stanza in re.split(r"\n\s*\n", file.read_text()):
        fields = dict(re.findall(r"^([\w-]+):[ \t]*(.*(?:\n[ \t]+.*)*)", stanza, re.M))
        if fields.get("Enabled", "yes").strip() == "no":
            continue
        if "bookworm" in fields.get("Suites", "").split() and "main" in fields.get("Components", "").split():
            fields.update(Types="deb deb-src", Suites="bookworm", Components="main")
            stanzas.append("".join(f"{name}: {value}\n" for name, value in fields.items()))
for file in [etc / "sources.list", *sorted(etc.glob("sources.list.d/*.list"))]:
    for line in file.read_text().splitlines() if file.exists() else []:
        match = re.match(r"\s*deb\s+((?:\[[^]]*\]\s+)?\S+)\s+bookworm\s+(.*)", line)
        if match and "main" in match[2].split("#")[0].split():
            lines.append(f"deb {match[1]} bookworm main\ndeb-src {match[1]} bookworm main\n")
# One is enough: a second one of the same mirror is a warning at each call.
if stanzas:
    (parts / "bookworm.sources").write_text(stanzas[0])
elif lines:
    (parts / "bookworm.list").write_text(lines[0])
else:
    sys.exit("no entry for Debian bookworm in /etc/apt/sources.list and /etc/apt/sources.list.d: this needs Debian 12")
PYTHON
}

debian() {
  if [ ! -d "$work/apt" ]; then
    mkdir -p "$work/apt"/{parts,lists/partial,cache/archives/partial}
    write_sources "$work/apt/parts" || fail "cannot get packages of Debian bookworm"
  fi
  # The work directory need not be readable for the user _apt.
  apt-get -qq -o Dir::Etc::sourceparts="$work/apt/parts" -o Dir::Etc::sourcelist=/dev/null -o Dir::State::lists="$work/apt/lists" \
    -o Dir::Cache="$work/apt/cache" -o APT::Sandbox::User=root -o Acquire::Retries=3 "$@"
}

unpack() {
  local package
  mkdir -p "$work/debs" "$work/root"
  (cd "$work/debs" && debian download "$@") || fail "cannot download $*"
  for package in "$work/debs"/*.deb; do dpkg -x "$package" "$work/root"; done
  rm -rf "$work/debs"
}
