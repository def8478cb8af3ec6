"""The current apiextensions-apiserver (extensions.sh) behind kube-apiserver 1.20.2, for tests of vipgate's CustomResourceDefinitions.

It evaluates CEL and streams lists, as current versions of Kubernetes do. Services, nodes, namespaces, users and their rights are those of 1.20.
"""

import http.client
import json
import os
import threading
import time
import urllib.error
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from cluster import ADMIN, CRDS, ENDPOINT_SLICES, ETCD, Cluster, wait_for

PORT = 6444
POLICY_PORT = 6446
EXTENSIONS = f"https://127.0.0.1:{PORT}"
GROUPS = {"vipgate.io": "v1alpha1", "discovery.k8s.io": "v1"}
API = "/apis/vipgate.io/v1alpha1"
DEFINITIONS = "/apis/apiextensions.k8s.io/v1/customresourcedefinitions"
NAMESPACED = {"EgressPolicy": "egresspolicies"}
CLUSTER = {"ClusterEgressPolicy": "clusteregresspolicies", "VipGateway": "vipgateways", "AddressPool": "addresspools", "OverlayNode": "overlaynodes"}


def documents(text):
    """The documents of JSON texts, one after the other."""
    decoder, position = json.JSONDecoder(), 0
    while position < len(text.rstrip()):
        document, position = decoder.raw_decode(text, position)
        yield from document["items"] if document["kind"] == "List" else [document]
        position += len(text[position:]) - len(text[position:].lstrip())


def is_established(definition):
    conditions = {it["type"]: it["status"] for it in definition.get("status", {}).get("conditions", [])}
    return conditions.get("Established") == "True" and conditions.get("NonStructuralSchema") != "True"


class CurrentCluster(Cluster):
    """The API server 1.20.2 and, behind it as an aggregated API, the current server of custom resources.

    `policies` returns ValidatingAdmissionPolicies and their bindings for it, by the paths of their collections: 1.20 doesn't store any.
    """

    def __init__(self, policies=None):
        self.programs = Path(os.environ["VIPGATE_EXTENSIONS"])
        # Streamed lists need its progress notifications.
        super().__init__(etcd=self.programs / "etcd", flags=[
            "--requestheader-client-ca-file={folder}/front.crt", "--proxy-client-cert-file={folder}/proxy.crt",
            "--proxy-client-key-file={folder}/proxy.key", "--requestheader-username-headers=X-Remote-User",
            "--requestheader-group-headers=X-Remote-Group", "--requestheader-extra-headers-prefix=X-Remote-Extra-",
        ])
        off = "NamespaceLifecycle,MutatingAdmissionWebhook,ValidatingAdmissionWebhook,MutatingAdmissionPolicy"
        read_by = self.kubeconfig
        if policies:
            start_proxy(self, POLICY_PORT, policies(self))
            read_by = proxy_kubeconfig(self, POLICY_PORT)
        else:
            off += ",ValidatingAdmissionPolicy"
        server = self.start("apiextensions-apiserver", [
            self.programs / "apiextensions-apiserver", "--kubeconfig", read_by, "--authentication-kubeconfig", self.kubeconfig,
            "--authorization-kubeconfig", self.kubeconfig, f"--etcd-servers={ETCD}", "--etcd-prefix=/extensions", "--bind-address=127.0.0.1",
            f"--secure-port={PORT}", f"--tls-cert-file={self.folder}/extensions.crt", f"--tls-private-key-file={self.folder}/extensions.key",
            "--enable-priority-and-fairness=false", f"--disable-admission-plugins={off}",
        ])
        server.wait_until("ready", lambda: self.request("/readyz", base=EXTENSIONS)[0] == 200)
        self.define()
        self.aggregate()

    def _certificates(self):
        super()._certificates()
        self.sign("ca", "extensions", "extensions", "DNS:localhost,IP:127.0.0.1")
        self.certificate_authority("front", "front proxy")
        self.sign("front", "proxy", "front-proxy")

    def define(self):
        """Creates the definitions at the server that evaluates them."""
        for file in (CRDS, ENDPOINT_SLICES):
            # Read by kubectl, and nothing else: it can't discover what the other server has.
            text = self.kubectl("create", "--dry-run=client", "--validate=false", "-o", "json", "-f", file)
            for definition in documents(text):
                status, answer = self.request(f"{DEFINITIONS}?fieldValidation=Strict", "POST", definition, base=EXTENSIONS)
                if status != 201:
                    raise AssertionError(answer)
        wait_for("definitions", lambda: all(is_established(it) for it in self.definitions()))

    def definitions(self):
        return self.request(DEFINITIONS, base=EXTENSIONS)[1]["items"]

    def aggregate(self):
        """Has the API server forward requests for the other one's groups."""
        self.apply({"apiVersion": "v1", "kind": "Service", "metadata": {"name": "extensions", "namespace": "default"},
                    "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": PORT}]}})
        for group, version in GROUPS.items():
            self.apply({"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": f"{version}.{group}"},
                        "spec": {"group": group, "version": version, "groupPriorityMinimum": 1000, "versionPriority": 15, "insecureSkipTLSVerify": True,
                                 "service": {"name": "extensions", "namespace": "default", "port": PORT}}})
        self.kubectl("wait", "--for=condition=Available", "--timeout=30s", "apiservice", *(f"{version}.{group}" for group, version in GROUPS.items()))
        served = [f"{API}/{name}" for name in (*NAMESPACED.values(), *CLUSTER.values())]
        wait_for("kinds", lambda: all(self.request(path)[0] == 200 for path in served))

    def create(self, kind, spec, name="test", dry_run=False):
        """Creates an object of vipgate's; the status and the answer."""
        body = manifest(kind, spec, name)
        namespace = "/namespaces/tenant-a" if kind in NAMESPACED else ""
        query = "?fieldValidation=Strict" + ("&dryRun=All" if dry_run else "")
        return self.request(f"{API}{namespace}/{plural(kind)}{query}", "POST", body)


def plural(kind):
    return {**NAMESPACED, **CLUSTER}[kind]


def manifest(kind, spec, name="test"):
    metadata = {"name": name, "namespace": "tenant-a"} if kind in NAMESPACED else {"name": name}
    return {"apiVersion": "vipgate.io/v1alpha1", "kind": kind, "metadata": metadata, "spec": spec}


class Proxy(BaseHTTPRequestHandler):
    """The API server, with what 1.20 lacks: streamed lists of its kinds, which are lists as events, then a watch; and objects of kinds that it doesn't
    have. Only for reading.
    """

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def do_GET(self):
        url = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(url.query))
        is_custom = any(url.path.startswith(f"/apis/{group}/") for group in (*GROUPS, "apiextensions.k8s.io"))
        self.server.requests.append((url.path, query, is_custom))
        # The API server's own definitions are others.
        self.base = EXTENSIONS if "/apiextensions.k8s.io/" in url.path else self.server.cluster.base
        try:
            if url.path in self.server.objects:
                self.send_objects(self.server.objects[url.path], query)
            elif query.get("sendInitialEvents") == "true" and not is_custom:
                self.send_streamed(url.path, query)
            else:
                self.forward(url.path, query)
        except (OSError, http.client.IncompleteRead):
            # One of both ends has closed.
            self.close_connection = True

    def send_objects(self, objects, query):
        kind = objects[0]
        found = {"apiVersion": kind["apiVersion"], "kind": f"{kind['kind']}List", "metadata": {"resourceVersion": "1"}, "items": objects}
        self.start(200)
        if "watch" not in query:
            self.chunk(json.dumps(found).encode())
            return self.end()
        if query.get("sendInitialEvents") == "true":
            self.send_events(found)
        # They never change.
        time.sleep(300)
        self.end()

    def send_streamed(self, path, query):
        listed = {key: value for key, value in query.items() if key in ("fieldSelector", "labelSelector")}
        try:
            with self.open(path, listed) as response:
                found = json.load(response)
        except urllib.error.HTTPError as error:
            return self.answer(error)
        self.start(200)
        self.send_events(found)
        watch = {key: value for key, value in query.items() if key not in ("sendInitialEvents", "resourceVersionMatch")}
        with self.open(path, {**watch, "resourceVersion": found["metadata"]["resourceVersion"]}) as response:
            self.copy(response)

    def send_events(self, found):
        kind = {"apiVersion": found["apiVersion"], "kind": found["kind"].removesuffix("List")}
        end = {"resourceVersion": found["metadata"]["resourceVersion"], "annotations": {"k8s.io/initial-events-end": "true"}}
        events = [{"type": "ADDED", "object": {**kind, **item}} for item in found["items"]]
        for event in [*events, {"type": "BOOKMARK", "object": {**kind, "metadata": end}}]:
            self.chunk(json.dumps(event).encode() + b"\n")

    def forward(self, path, query):
        try:
            response = self.open(path, query)
        except urllib.error.HTTPError as error:
            return self.answer(error)
        with response:
            self.start(response.status, response.headers.get("Content-Type"))
            self.copy(response)

    def open(self, path, query):
        # Others are offered protobuf, too, which nobody reads here.
        headers = {"Authorization": f"Bearer {ADMIN}", "Accept": "application/json"}
        return self.server.cluster.open(f"{self.base}{path}?{urllib.parse.urlencode(query)}", headers)

    def copy(self, response):
        while data := response.read1(65536):
            self.chunk(data)
        self.end()

    def answer(self, error):
        self.start(error.code, error.headers.get("Content-Type"))
        self.chunk(error.read())
        self.end()

    def start(self, status, content="application/json"):
        self.send_response(status)
        self.send_header("Content-Type", content or "application/json")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()

    def chunk(self, data):
        # An empty chunk is the end.
        if data:
            self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
            self.wfile.flush()

    def end(self):
        self.wfile.write(b"0\r\n\r\n")
        self.wfile.flush()


def start_proxy(cluster, port, objects=()):
    """Starts a proxy on a port of the loopback. `objects` are lists of objects by the path of their collection."""
    server = ThreadingHTTPServer(("127.0.0.1", port), Proxy)
    server.daemon_threads = True
    server.cluster, server.objects, server.requests = cluster, dict(objects), []
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def proxy_kubeconfig(cluster, port):
    """A kubeconfig for a proxy."""
    path = cluster.folder / f"proxy-{port}.kubeconfig"
    path.write_text(json.dumps({
        "apiVersion": "v1", "kind": "Config", "current-context": "test", "users": [{"name": "user", "user": {"token": ADMIN}}],
        "clusters": [{"name": "test", "cluster": {"server": f"http://127.0.0.1:{port}"}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
    }))
    return path
