#!/usr/bin/env python3
"""Tests vipgate's CustomResourceDefinitions at the current apiextensions-apiserver: make e2e-kubernetes-current; needs root.

CEL rules are evaluated there, which Kubernetes 1.20, the server of the other tests, drops; and lists are streamed. Services, nodes and namespaces are
those of kube-apiserver 1.20.2, which authenticates for both, too. `vipgate check` must agree with the server about each object.
"""

import json
import os
import subprocess
import unittest

import cluster
from cluster import CRDS, Process, wait_for
from extensions import API, CLUSTER, NAMESPACED, CurrentCluster, is_established, manifest, plural, proxy_kubeconfig, start_proxy

PROXY_PORT = 6445
POLICIES = ("EgressPolicy", "ClusterEgressPolicy")
PODS = {"podSelector": {"matchLabels": {"app": "worker"}}}


def by_pods(**fields):
    return {"selectors": [PODS], "pools": [{"name": "public"}], **fields}


def by_service(kind, **fields):
    namespace = {"namespace": "tenant-a"} if kind == "ClusterEgressPolicy" else {}
    return {"serviceRef": {"name": "api", **namespace}, **fields}


def cases(kind):
    """Of each rule of a policy kind by its message: a spec that passes, and one that it refuses."""
    reference = "serviceRef.namespace is only for a ClusterEgressPolicy: an EgressPolicy refers to a Service in its own namespace"
    if kind == "ClusterEgressPolicy":
        reference = "serviceRef.namespace is required in a ClusterEgressPolicy, which has no namespace of its own"
    other = {"name": "api"} if kind == "ClusterEgressPolicy" else {"name": "api", "namespace": "tenant-a"}
    return {
        "exactly one of names and selector is required": (
            by_pods(gateways={"names": ["node-1"]}),
            by_pods(gateways={"names": ["node-1"], "selector": {"matchLabels": {"rack": "r1"}}}),
        ),
        "guaranteedPortsPerEndpoint is more than sessionsPerEndpoint": (
            by_pods(limits={"guaranteedPortsPerEndpoint": 100, "sessionsPerEndpoint": 100}),
            by_pods(limits={"guaranteedPortsPerEndpoint": 101, "sessionsPerEndpoint": 100}),
        ),
        reference: (by_service(kind), {"serviceRef": other}),
        "exactly one of serviceRef and selectors is required": (by_service(kind), by_service(kind, selectors=[PODS])),
        "addresses and pools can't be combined with serviceRef, which defines the VIPs": (
            by_service(kind),
            by_service(kind, addresses=["203.0.113.16"]),
        ),
        "selectors needs addresses or pools for the VIPs": (by_pods(), {"selectors": [PODS]}),
    }


CASES = {kind: cases(kind) for kind in POLICIES}

# Objects that the schemas or CEL decide about, with what both the server and `vipgate check` must say.
POOL = "AddressPool"
NODE = {"address": "192.0.2.11", "vni": 1, "mac": "02:00:00:00:00:01", "podCIDRs": ["10.244.1.0/24"]}
AGREED = [
    *[(kind, spec, is_valid) for kind in POLICIES for spec, is_valid in (
        (by_pods(), True),
        (by_service(kind), True),
        ({}, False),
        ({"selectors": [PODS], "addresses": ["203.0.113.16", "2001:db8::16"]}, True),
        ({"selectors": [PODS], "addresses": ["203.0.113.300"]}, False),
        ({"selectors": [PODS], "addresses": ["203.0.113.16", "203.0.113.16"]}, False),
        ({"selectors": [PODS], "addresses": "203.0.113.16"}, False),
        ({"selectors": [{}], "pools": [{"name": "public"}]}, False),
        ({"selectors": [PODS], "pools": [{"name": "public", "count": 0}]}, False),
        ({"selectors": [PODS], "pools": [{"name": "public"}, {"name": "public", "count": 2}]}, False),
        ({"selectors": [PODS], "pools": [{"count": 1}]}, False),
        (by_pods(gateways={}), False),
        (by_pods(gateways={"names": []}), False),
        (by_pods(gateways={"selector": {}}), True),
        (by_pods(distribution="RoundRobin", addressSelection="PerConnection", onExhaustion="Drop", zoneAffinity="Prefer"), True),
        (by_pods(distribution="roundrobin"), False),
        (by_pods(limits={"sessionsPerEndpoint": 0}), False),
        (by_pods(limits={"guaranteedPortsPerEndpoint": 8}), True),
        (by_pods(destinationCIDRs=["0.0.0.0/0", "::/0"], excludedCIDRs=["10.0.0.0/8"]), True),
        (by_pods(destinationCIDRs=[]), False),
        (by_pods(excludedCIDRs=["10.0.0.0/33"]), False),
        (by_pods(exclude=["10.0.0.0/8"]), False),
        ({"selectors": [{"podSelector": {"matchExpressions": [{"key": "app", "operator": "In", "values": ["a"]}]}}], "pools": [{"name": "public"}]}, True),
        ({"selectors": [{"podSelector": {"matchExpressions": [{"key": "app", "operator": "In"}]}}], "pools": [{"name": "public"}]}, False),
        ({"selectors": [{"podSelector": {"matchExpressions": [{"key": "app", "operator": "Exists", "values": ["a"]}]}}],
          "pools": [{"name": "public"}]}, False),
    )],
    (POOL, {"ranges": ["203.0.113.0/28", "203.0.113.32-203.0.113.40", "2001:db8:1::/120"]}, True),
    (POOL, {"ranges": ["203.0.113.0/28"], "announce": "BGP", "autoAssign": False, "namespaces": {"matchLabels": {"a": "b"}}}, True),
    (POOL, {"ranges": []}, False),
    (POOL, {}, False),
    (POOL, {"ranges": ["203.0.113.0/28"], "announce": "OSPF"}, False),
    (POOL, {"ranges": ["203.0.113.0"]}, False),
    (POOL, {"provider": {"tags": {"a": "b"}}}, True),
    ("VipGateway", {"node": "node-1", "zone": "z", "peerAddress": "192.0.2.11", "maxAddresses": 10, "podCIDRs": ["10.244.1.0/24"], "uncovered": "pass"}, True),
    ("VipGateway", {}, True),
    ("VipGateway", {"maxAddresses": 0}, False),
    ("VipGateway", {"peerAddress": "gateway.example"}, False),
    ("VipGateway", {"uncovered": "reject"}, False),
    ("OverlayNode", NODE, True),
    ("OverlayNode", {**NODE, "vni": 16777216}, False),
    ("OverlayNode", {**NODE, "mac": "02:00:00:00:00"}, False),
    ("OverlayNode", {**NODE, "podCIDRs": []}, False),
]
# What a schema for Kubernetes 1.25 can't say: the server accepts these, and the policy server refuses them.
LIMITS = [
    ("EgressPolicy", by_pods(destinationCIDRs=["10.0.0.1/8"])),
    ("EgressPolicy", {"selectors": [PODS], "addresses": ["2001:db8:::16"]}),
    (POOL, {"ranges": ["203.0.113.1/28"]}),
    (POOL, {"ranges": ["203.0.113.9-203.0.113.3"]}),
    (POOL, {"ranges": ["203.0.113.0/28", "203.0.113.8/29"]}),
]
# What the policies above refer to.
CONTEXT = [
    {"apiVersion": "vipgate.io/v1alpha1", "kind": POOL, "metadata": {"name": "public"}, "spec": {"ranges": ["203.0.113.16/28", "2001:db8::10/124"]}},
    {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "tenant-a", "labels": {"kubernetes.io/metadata.name": "tenant-a"}}},
    {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "worker-0", "namespace": "tenant-a", "labels": {"app": "worker"}},
     "spec": {"containers": [{"name": "worker", "image": "worker"}]}, "status": {"podIP": "10.244.1.7", "podIPs": [{"ip": "10.244.1.7"}]}},
    {"apiVersion": "v1", "kind": "Service", "metadata": {"name": "api", "namespace": "tenant-a", "annotations": {"vipgate.io/announce": "L2"}},
     "spec": {"type": "LoadBalancer", "ports": [{"port": 80, "protocol": "TCP"}]}, "status": {"loadBalancer": {"ingress": [{"ip": "203.0.113.30"}]}}},
    {"apiVersion": "discovery.k8s.io/v1", "kind": "EndpointSlice", "addressType": "IPv4",
     "metadata": {"name": "api-1", "namespace": "tenant-a", "labels": {"kubernetes.io/service-name": "api"}},
     "endpoints": [{"addresses": ["10.244.1.8"], "conditions": {"ready": True}}], "ports": [{"name": "", "port": 8080, "protocol": "TCP"}]},
]

api = None


def setUpModule():
    global api
    api = CurrentCluster()


def tearDownModule():
    api.stop()


def vipgate_check(document):
    """What `vipgate check` says of an object among those of CONTEXT: the exit code and its output."""
    folder = api.folder / "check"
    folder.mkdir(exist_ok=True)
    for number, it in enumerate([document, *CONTEXT]):
        (folder / f"{number}.yaml").write_text(json.dumps(it))
    done = subprocess.run([os.environ["VIPGATE_BINARY"], "check", folder], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout + done.stderr


def rules(schema, path=""):
    """All CEL rules of a schema, as (path, message)."""
    for rule in schema.get("x-kubernetes-validations", []):
        yield path, rule["message"]
    for name, property in schema.get("properties", {}).items():
        yield from rules(property, f"{path}.{name}".lstrip("."))
    for name in ("items", "additionalProperties"):
        if isinstance(schema.get(name), dict):
            yield from rules(schema[name], f"{path}[]")


class Definitions(unittest.TestCase):
    """The server takes the definitions, and serves what they say."""

    def test_the_server_takes_all_definitions(self):
        kinds = {it["spec"]["names"]["kind"] for it in api.definitions() if it["spec"]["group"] == "vipgate.io" and is_established(it)}
        self.assertEqual(kinds, {*NAMESPACED, *CLUSTER})

    def test_every_rule_has_cases(self):
        for definition in api.definitions():
            kind = definition["spec"]["names"]["kind"]
            if definition["spec"]["group"] != "vipgate.io":
                continue
            (version,) = definition["spec"]["versions"]
            messages = [message for _, message in rules(version["schema"]["openAPIV3Schema"])]
            self.assertEqual(sorted(messages), sorted(CASES.get(kind, {})), kind)
        # None was dropped on the way to the server.
        self.assertEqual(CRDS.read_text().count(" rule: "), sum(len(it) for it in CASES.values()))

    def test_each_rule_passes_one_object_and_refuses_another(self):
        for kind, of_kind in CASES.items():
            for message, (right, wrong) in of_kind.items():
                with self.subTest(kind=kind, rule=message):
                    status, answer = api.create(kind, right, dry_run=True)
                    self.assertEqual(status, 201, answer)
                    status, answer = api.create(kind, wrong, dry_run=True)
                    self.assertEqual(status, 422, answer)
                    causes = [it["message"] for it in answer["details"]["causes"]]
                    self.assertEqual([it for it in causes if message in it], causes[:1], f"not this rule alone: {causes}")
                    for spec, code in ((right, 0), (wrong, 2)):
                        self.assertEqual(vipgate_check(manifest(kind, spec))[0], code, vipgate_check(manifest(kind, spec))[1])

    def test_the_server_and_vipgate_check_agree(self):
        for kind, spec, is_valid in AGREED:
            with self.subTest(kind=kind, spec=spec):
                status, answer = api.create(kind, spec, dry_run=True)
                code, output = vipgate_check(manifest(kind, spec))
                self.assertEqual((status == 201, code == 0), (is_valid, is_valid), f"{answer}\n{output}")
                self.assertIn(status, (201, 400, 422))
                self.assertIn(code, (0, 2))

    def test_what_the_server_cannot_see_vipgate_check_refuses(self):
        for kind, spec in LIMITS:
            with self.subTest(kind=kind, spec=spec):
                status, answer = api.create(kind, spec, dry_run=True)
                code, output = vipgate_check(manifest(kind, spec))
                self.assertEqual((status, code), (201, 2), f"{answer}\n{output}")

    def test_status_is_a_subresource(self):
        spec = by_pods()
        status, created = api.create("EgressPolicy", spec, "status")
        self.assertEqual(status, 201, created)
        path = f"{API}/namespaces/tenant-a/egresspolicies/status"
        merge = "application/merge-patch+json"
        _, patched = api.request(f"{path}/status", "PATCH", {"status": {"endpoints": 1}, "spec": {"distribution": "RoundRobin"}}, merge)
        self.assertEqual((patched["status"], patched["spec"]["distribution"]), ({"endpoints": 1}, "Rendezvous"))
        self.assertEqual(patched["metadata"]["generation"], 1)
        _, patched = api.request(path, "PATCH", {"status": {"endpoints": 9}, "spec": {"distribution": "RoundRobin"}}, merge)
        self.assertEqual((patched["status"], patched["spec"]["distribution"]), ({"endpoints": 1}, "RoundRobin"))
        self.assertEqual(patched["metadata"]["generation"], 2)
        api.request(path, "DELETE")

    def test_columns_are_those_of_the_definitions(self):
        objects = {
            "EgressPolicy": by_service("EgressPolicy"), "ClusterEgressPolicy": by_pods(), "VipGateway": {"node": "node-1", "zone": "zone-1"},
            POOL: {"ranges": ["203.0.113.128/28"]}, "OverlayNode": NODE,
        }
        definitions = {it["spec"]["names"]["kind"]: it["spec"] for it in api.definitions()}
        for kind, spec in objects.items():
            with self.subTest(kind=kind):
                status, answer = api.create(kind, spec, "columns")
                self.assertEqual(status, 201, answer)
                columns = definitions[kind]["versions"][0]["additionalPrinterColumns"]
                names = ["Name"] + [it["name"] for it in columns]
                where = "/namespaces/tenant-a" if kind in NAMESPACED else ""
                _, table = api.request(f"{API}{where}/{plural(kind)}/columns", accept="application/json;as=Table;v=v1;g=meta.k8s.io")
                self.assertEqual([it["name"] for it in table["columnDefinitions"]], names)
                self.assertEqual(table["rows"][0]["cells"][0], "columns")
                text = api.kubectl("get", plural(kind), "columns", "-n", "tenant-a", "-o", "wide")
                shown = [name.upper() for name in names]
                self.assertEqual(text.split("\n")[0].split(), " ".join(shown).split())
                self.assertNotRegex(text, "<unknown>|<invalid>")
                api.request(f"{API}{where}/{plural(kind)}/columns", "DELETE")


class Lists(unittest.TestCase):
    """A policy server that reads the server, with lists in pages and streamed."""

    @classmethod
    def setUpClass(cls):
        cls.proxy = start_proxy(api, PROXY_PORT)
        for document in CONTEXT:
            cls.create(document)
        cls.create(manifest("EgressPolicy", by_pods(), "by-pods"))
        cls.create(manifest("EgressPolicy", by_service("EgressPolicy"), "by-service"))
        cls.create(manifest("VipGateway", {"node": "node-1", "peerAddress": "192.0.2.11"}, "node-1"))

    @staticmethod
    def create(document):
        group = document["apiVersion"]
        prefix = f"/apis/{group}" if "/" in group else f"/api/{group}"
        kinds = {**NAMESPACED, **CLUSTER, "EndpointSlice": "endpointslices", "Namespace": "namespaces", "Pod": "pods", "Service": "services"}
        namespace = document["metadata"].get("namespace")
        path = prefix + (f"/namespaces/{namespace}" if namespace else "") + f"/{kinds[document['kind']]}"
        status, answer = api.request(path, "POST", document)
        assert status == 201, answer
        if "status" in document:
            name = document["metadata"]["name"]
            body = {"status": document["status"]}
            status, answer = api.request(f"{path}/{name}/status", "PATCH", body, "application/merge-patch+json")
            assert status == 200, answer

    def start(self, lists):
        self.proxy.requests.clear()
        config = api.folder / f"{lists}.yaml"
        config.write_text(json.dumps({
            "listen": "127.0.0.1:18000", "metrics": {"listen": "127.0.0.1:9470"}, "log": {"format": "json"},
            "source": {"kubernetes": {"kubeconfig": str(proxy_kubeconfig(api, PROXY_PORT)), "lists": lists}},
        }))
        server = Process(api.folder, lists, [os.environ["VIPGATE_BINARY"], "policyd", "--config", config])
        self.addCleanup(server.stop)
        server.wait_until("ready", lambda: '"event":"ready"' in server.log())
        return server

    def status(self):
        return json.loads(cluster.run(os.environ["VIPGATE_BINARY"], "policy", "status", "--server", "http://127.0.0.1:18000", "-o", "json"))

    def test_streamed_lists_give_the_same_policy(self):
        versions = {}
        for lists in ("paged", "streamed"):
            server = self.start(lists)
            wait_for("pods", lambda: self.status()["policies"] and all(it["endpoints"] for it in self.status()["policies"]), log=lambda: json.dumps(self.status()))
            versions[lists] = self.status()["version"]
            custom = [(path.rsplit("/", 1)[-1], query) for path, query, is_custom in list(self.proxy.requests) if is_custom]
            for resource in (*NAMESPACED.values(), *CLUSTER.values(), "endpointslices"):
                of_kind = [query for name, query in custom if name == resource]
                streamed = [query.get("sendInitialEvents") == "true" for query in of_kind if "watch" in query]
                is_listed = any("watch" not in query for query in of_kind)
                self.assertEqual((streamed[0], is_listed), (True, False) if lists == "streamed" else (False, True), f"{lists}: {resource}: {of_kind}")
            # It goes on from the end of the stream.
            name = f"later-{lists}"
            self.create(manifest("EgressPolicy", by_pods(distribution="RoundRobin"), name))
            wait_for(name, lambda: name in json.dumps(self.status()), log=server.log)
            api.request(f"{API}/namespaces/tenant-a/egresspolicies/{name}", "DELETE")
            wait_for("the version from before", lambda: self.status()["version"] == versions[lists], log=server.log)
            self.assertEqual(server.stop(), 0)
        self.assertEqual(versions["paged"], versions["streamed"])


if __name__ == "__main__":
    cluster.main(["VIPGATE_KUBE_APISERVER", "VIPGATE_EXTENSIONS", "VIPGATE_KUBECTL", "VIPGATE_BINARY"])
