"""A Kubernetes API server for the tests beside this file: etcd and kube-apiserver 1.20.2 on the loopback of a network namespace, with kubectl
and helm as its clients.

No controllers run: nothing schedules pods, makes EndpointSlices or writes the status of Services.
"""

import json
import os
import shutil
import ssl
import tempfile
import unittest
import urllib.error
import urllib.request
from pathlib import Path

from isolation import Process, isolate, run, wait_for

ROOT = Path(__file__).resolve().parents[2]
CRDS = ROOT / "conf/crds.yaml"
ENDPOINT_SLICES = ROOT / "tests/lab/src/api_server/endpointslices.yaml"
PORT = 6443
ETCD = "http://127.0.0.1:12379"
ADMIN = "admin"


def main(variables):
    """Runs the tests of the calling script in namespaces of their own."""
    isolate(variables)
    unittest.main(module="__main__", verbosity=2, failfast=False)


class Cluster:
    """etcd and the API server, with nothing in it. `flags` are for kube-apiserver, with `{folder}` for the directory of certificates."""

    def __init__(self, etcd="etcd", flags=()):
        self.folder = Path(tempfile.mkdtemp(prefix="vipgate-cluster-"))
        self.home = self.folder / "home"
        self.home.mkdir()
        self.base = f"https://127.0.0.1:{PORT}"
        self._certificates()
        (self.folder / "tokens.csv").write_text(f"{ADMIN},{ADMIN},1,system:masters\n")
        self.kubeconfig = self.write_kubeconfig(ADMIN)
        peer = "http://127.0.0.1:12380"
        self.processes = []
        self.start("etcd", [
            etcd, "--data-dir", self.folder / "etcd", "--unsafe-no-fsync", "--log-level", "warn",
            "--listen-client-urls", ETCD, "--advertise-client-urls", ETCD,
            "--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}",
        ])
        server = self.start("kube-apiserver", [
            os.environ["VIPGATE_KUBE_APISERVER"], f"--etcd-servers={ETCD}", "--advertise-address=127.0.0.1", "--bind-address=127.0.0.1",
            f"--secure-port={PORT}", f"--cert-dir={self.folder}/made", f"--tls-cert-file={self.folder}/server.crt",
            f"--tls-private-key-file={self.folder}/server.key", f"--token-auth-file={self.folder}/tokens.csv",
            "--authorization-mode=RBAC", "--allow-privileged=true", "--service-cluster-ip-range=10.96.0.0/16,fd96::/112",
            "--feature-gates=IPv6DualStack=true,EfficientWatchResumption=true,MixedProtocolLBService=true",
            "--service-account-issuer=https://kubernetes.default.svc", f"--service-account-signing-key-file={self.folder}/accounts.key",
            f"--service-account-key-file={self.folder}/accounts.key", "--disable-admission-plugins=ServiceAccount",
            "--endpoint-reconciler-type=none", "--runtime-config=discovery.k8s.io/v1beta1=false", *(flag.format(folder=self.folder) for flag in flags),
        ])
        server.wait_until("ready", lambda: self.request("/readyz")[0] == 200)
        # The account of each namespace, which a controller makes.
        wait_for("namespaces", lambda: self.request("/api/v1/namespaces/kube-system")[0] == 200)

    def start(self, name, command):
        process = Process(self.folder, name, command, env={**os.environ, "HOME": str(self.home)})
        self.processes.append(process)
        return process

    def stop(self):
        for process in reversed(self.processes):
            process.process.kill()
            process.process.wait()
        shutil.rmtree(self.folder)

    def _certificates(self):
        self.certificate_authority("ca", "kubernetes")
        self.sign("ca", "server", "kubernetes", "DNS:localhost,DNS:kubernetes.default.svc,IP:127.0.0.1")
        run("openssl", "genrsa", "-out", self.folder / "accounts.key", "2048")

    def certificate_authority(self, name, common_name):
        key, crt = self.folder / f"{name}.key", self.folder / f"{name}.crt"
        run("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-days", "2", "-subj", f"/CN={common_name}",
            "-keyout", key, "-out", crt)

    def sign(self, ca, name, common_name, names=None):
        base = self.folder / name
        run("openssl", "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes", "-subj", f"/CN={common_name}", "-keyout", f"{base}.key",
            "-out", f"{base}.csr")
        usage = "extendedKeyUsage=serverAuth,clientAuth\n"
        Path(f"{base}.ext").write_text(usage + (f"subjectAltName={names}\n" if names else ""))
        ca = self.folder / ca
        run("openssl", "x509", "-req", "-in", f"{base}.csr", "-CA", f"{ca}.crt", "-CAkey", f"{ca}.key", "-CAcreateserial", "-days", "2",
            "-extfile", f"{base}.ext", "-out", f"{base}.crt")

    def write_kubeconfig(self, token):
        path = self.folder / "kubeconfig"
        path.write_text(json.dumps({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": {
                "server": f"https://127.0.0.1:{PORT}", "certificate-authority": str(self.folder / "ca.crt")}}],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
        }))
        return path

    @property
    def environment(self):
        # Helm and kubectl keep what they have discovered below HOME.
        return {"HOME": str(self.home), "KUBECONFIG": str(self.kubeconfig), "PATH": os.environ["PATH"]}

    def kubectl(self, *arguments, stdin=None):
        return run(os.environ["VIPGATE_KUBECTL"], *arguments, stdin=stdin, env=self.environment)

    def helm(self, *arguments):
        return run(os.environ["VIPGATE_HELM"], *arguments, env=self.environment)

    def apply(self, text, validate="strict"):
        return self.kubectl("apply", f"--validate={validate}", "-f", "-", stdin=text if isinstance(text, str) else json.dumps(text))

    def get(self, resource, name=None, namespace=None):
        """An object, or the list of all."""
        where = ["-n", namespace] if namespace else ["--all-namespaces"] if name is None else []
        return json.loads(self.kubectl("get", resource, *([name] if name else []), *where, "-o", "json"))

    def open(self, url, headers, data=None, method="GET"):
        """Sends a request to a server with a certificate of the cluster's CA; a response to read."""
        context = ssl.create_default_context(cafile=self.folder / "ca.crt")
        request = urllib.request.Request(url, data, headers, method=method)
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
        return opener.open(request, timeout=300)

    def request(self, path, method="GET", body=None, kind="application/json", token=ADMIN, accept="application/json", base=None):
        """Sends a request; the status and the body, parsed."""
        headers = {"Authorization": f"Bearer {token}", "Content-Type": kind, "Accept": accept}
        data = json.dumps(body).encode() if body is not None else None
        try:
            with self.open(f"{base or self.base}{path}", headers, data, method) as response:
                return response.status, _parsed(response.read())
        except urllib.error.HTTPError as error:
            return error.code, _parsed(error.read())
        except OSError as error:
            return 0, str(error)

    def objects(self):
        """All objects of all kinds, as (kind, namespace, name)."""
        kinds = self.kubectl("api-resources", "--verbs=list", "-o", "name").split()
        # Shown in two groups, or not objects.
        kinds = [kind for kind in kinds if kind not in ("events", "events.events.k8s.io", "componentstatuses", "ingresses.extensions")]
        columns = "custom-columns=K:.kind,S:.metadata.namespace,N:.metadata.name"
        lines = self.kubectl("get", ",".join(kinds), "--all-namespaces", "--no-headers", "-o", columns).splitlines()
        return {tuple(line.split()) for line in lines}

    def apply_definitions(self):
        """vipgate's definitions, whose CEL rules 1.20 drops, and the stand-in for EndpointSlices of discovery.k8s.io/v1."""
        self.kubectl("apply", "--validate=ignore", "-f", CRDS)
        self.kubectl("apply", "-f", ENDPOINT_SLICES)
        self.kubectl("wait", "--for=condition=Established", "--timeout=20s", "crd", "--all")


def _parsed(body):
    try:
        return json.loads(body)
    except ValueError:
        return body.decode(errors="replace")
