#!/usr/bin/env python3
"""Tests the chart's ValidatingAdmissionPolicies at the current apiextensions-apiserver: make e2e-kubernetes-current; needs root.

The server admits custom resources by them. Services aren't custom resources, so those here are of another group, and the policy's rule is changed to
it; its conditions, variables and validations are those of the chart.
"""

import unittest

import cluster
from cluster import ROOT, wait_for
from extensions import EXTENSIONS, CurrentCluster, documents

CHART = ROOT / "charts/vipgate"
COLLECTION = "/apis/admissionregistration.k8s.io/v1/validatingadmissionpolic"
GROUP = "test.vipgate.example"
SERVICES = f"/apis/{GROUP}/v1/namespaces/default/services"
DEFINITION = {
    "apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": {"name": f"services.{GROUP}"},
    "spec": {"group": GROUP, "scope": "Namespaced", "names": {"kind": "Service", "plural": "services"}, "versions": [{
        "name": "v1", "served": True, "storage": True, "subresources": {"status": {}},
        "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
    }]},
}

# Annotations of a Service, without `vipgate.io/`, and what the server says.
REFUSED = [
    ({"egres": "true"}, "unknown annotation vipgate.io/egres: a Service can have vipgate.io/addresses, "),
    ({"weight": "1"}, "unknown annotation vipgate.io/weight"),
    ({"egress": "yes"}, 'vipgate.io/egress must be "true" or "false"'),
    ({"egress": ""}, 'vipgate.io/egress must be "true" or "false"'),
    ({"announce": "l2"}, "vipgate.io/announce must be L2 or BGP"),
    ({"maglev-table-size": "big"}, "vipgate.io/maglev-table-size must be"),
    ({"maglev-table-size": "5"}, "vipgate.io/maglev-table-size must be"),
    ({"maglev-table-size": "131072"}, "vipgate.io/maglev-table-size must be"),
    ({"pool": "Public"}, "vipgate.io/pool must be the name of an AddressPool"),
    ({"pool": "a" * 254}, "vipgate.io/pool must be the name of an AddressPool"),
    ({"addresses": "203.0.113.300"}, "vipgate.io/addresses: not an IP address: `203.0.113.300`"),
    ({"addresses": "203.0.113.9,"}, "vipgate.io/addresses: not an IP address: ``"),
    ({"addresses": "203.0.113.9; 2001:db8::9"}, "vipgate.io/addresses: not an IP address: `203.0.113.9; 2001:db8::9`"),
    ({"addresses": "203.0.113.9, 203.0.113.10"}, "vipgate.io/addresses: at most one address of each family"),
]
ADMITTED = [
    {"egress": "true", "announce": "BGP", "maglev-table-size": "2039", "sharing-key": "any text, even 1"},
    {"egress": "false", "announce": "L2", "pool": "public.pools-1"},
    {"pool": " public "},
    {"pool": ""},
    {"addresses": "203.0.113.9"},
    {"addresses": " 203.0.113.9 , 2001:db8::9 "},
    {"addresses": ""},
]
PODS = [{"podSelector": {}}]
OWN_REFUSED = [
    ("EgressPolicy", {"selectors": PODS, "addresses": ["2001:db8:::16"]}, "not an address or a prefix: `2001:db8:::16`"),
    ("EgressPolicy", {"selectors": PODS, "pools": [{"name": "Public"}]}, "no AddressPool can have this name: `Public`"),
    ("EgressPolicy", {"selectors": PODS, "pools": [{"name": "public"}], "destinationCIDRs": ["10.0.0.1/8"]}, "a prefix with host bits: `10.0.0.1/8`"),
    ("ClusterEgressPolicy", {"selectors": PODS, "pools": [{"name": "public"}], "excludedCIDRs": ["2001:db8::1/32"]}, "a prefix with host bits: `2001:db8::1/32`"),
    ("AddressPool", {"ranges": ["203.0.113.1/28"]}, "a prefix with host bits: `203.0.113.1/28`"),
    ("AddressPool", {"ranges": ["2001:db8:::1-2001:db8::9"]}, "not an address or a prefix: `2001:db8:::1`"),
    ("VipGateway", {"peerAddress": "2001:db8:::1"}, "not an address or a prefix: `2001:db8:::1`"),
    ("VipGateway", {"podCIDRs": ["10.244.1.1/24"]}, "a prefix with host bits: `10.244.1.1/24`"),
    ("OverlayNode", {"address": "2001:db8:::1", "vni": 1, "mac": "02:00:00:00:00:01", "podCIDRs": ["10.244.1.0/24"]}, "not an address or a prefix"),
]
OWN_ADMITTED = [
    ("EgressPolicy", {"selectors": PODS, "addresses": ["203.0.113.16", "2001:db8::16"], "destinationCIDRs": ["0.0.0.0/0", "::/0"]}),
    ("EgressPolicy", {"selectors": PODS, "pools": [{"name": "public"}], "excludedCIDRs": ["10.0.0.0/8"]}),
    ("EgressPolicy", {"serviceRef": {"name": "api"}}),
    ("ClusterEgressPolicy", {"selectors": PODS, "pools": [{"name": "public.pools-1", "count": 2}]}),
    ("AddressPool", {"ranges": ["203.0.113.0/28", "203.0.113.32-203.0.113.40", "2001:db8::1 - 2001:db8::9", "2001:db8:1::/120"]}),
    ("AddressPool", {"provider": {"tags": {"a": "b"}}}),
    ("VipGateway", {"peerAddress": "2001:db8::1", "podCIDRs": ["10.244.1.0/24"]}),
    ("VipGateway", {}),
    ("OverlayNode", {"address": "192.0.2.11", "vni": 1, "mac": "02:00:00:00:00:01", "podCIDRs": ["10.244.1.0/24", "2001:db8:2::/64"]}),
]

api = None


def setUpModule():
    global api
    api = CurrentCluster(policies)
    api.kubectl("create", "namespace", "tenant-a")
    status, answer = api.request("/apis/apiextensions.k8s.io/v1/customresourcedefinitions", "POST", DEFINITION, base=EXTENSIONS)
    assert status == 201, answer
    wait_for("Services", lambda: api.request(SERVICES, base=EXTENSIONS)[0] == 200)
    # The server reads policies in the background.
    probe = service({"vipgate.io/no-such": "x"})
    wait_for("policies in force", lambda: api.request(f"{SERVICES}?dryRun=All", "POST", probe, base=EXTENSIONS)[0] == 422)
    wait_for("policies in force", lambda: api.create("AddressPool", {"ranges": ["203.0.113.1/28"]}, dry_run=True)[0] == 422)


def tearDownModule():
    api.stop()


def policies(core):
    """The chart's policies and bindings, by their collections' paths, with the group of the stand-in for Services."""
    file = core.folder / "policies.yaml"
    file.write_text(core.helm("template", "vipgate", CHART, "--namespace", "vipgate", "--set", "admissionPolicies.enabled=true",
                              "--show-only", "templates/admission-policies.yaml"))
    # Only kubectl reads YAML here; it leaves the objects alone.
    found = list(documents(core.kubectl("label", "--local", "-o", "json", "-f", file, "a=b")))
    (rule,) = next(it for it in found if it["metadata"]["name"] == "vipgate-services")["spec"]["matchConstraints"]["resourceRules"]
    assert (rule["apiGroups"], rule["resources"]) == ([""], ["services"]), rule
    rule["apiGroups"] = [GROUP]
    for number, it in enumerate(found):
        if constraints := it["spec"].get("matchConstraints"):
            # Defaults of the API server that stores them.
            it["spec"]["matchConstraints"] = {"matchPolicy": "Equivalent", "namespaceSelector": {}, "objectSelector": {}, **constraints}
        it["metadata"].update(uid=f"uid-{number}", resourceVersion="1", generation=1)
    kinds = {"ies": "ValidatingAdmissionPolicy", "ybindings": "ValidatingAdmissionPolicyBinding"}
    return {f"{COLLECTION}{end}": [it for it in found if it["kind"] == kind] for end, kind in kinds.items()}


def service(annotations, name="test", **spec):
    metadata = {"name": name, "annotations": annotations} if annotations is not None else {"name": name}
    return {"apiVersion": f"{GROUP}/v1", "kind": "Service", "metadata": metadata, "spec": {"type": "LoadBalancer", **spec}}


def ours(annotations):
    return {f"vipgate.io/{name}": value for name, value in annotations.items()}


def send(method, path, body, kind="application/json"):
    return api.request(f"{SERVICES}{path}", method, body, kind, base=EXTENSIONS)


class Services(unittest.TestCase):
    """Annotations of Services."""

    def test_typing_errors_are_refused_with_a_reason(self):
        for annotations, message in REFUSED:
            with self.subTest(annotations=annotations):
                status, answer = send("POST", "?dryRun=All", service(ours(annotations)))
                self.assertEqual(status, 422, answer)
                self.assertIn(message, answer["message"])

    def test_valid_annotations_are_admitted(self):
        for annotations in ADMITTED:
            with self.subTest(annotations=annotations):
                status, answer = send("POST", "?dryRun=All", service(ours(annotations)))
                self.assertEqual(status, 201, answer)

    def test_the_known_annotations_are_those_of_the_policy_server(self):
        source = (ROOT / "control/policy/src/manifest/annotation.rs").read_text()
        names = source.split("SERVICE_ANNOTATIONS: [&str; ")[1].split("= [")[1].split("]")[0].split(", ")
        values = {name: source.split(f"const {name}: &str = \"")[1].split('"')[0] for name in names}
        _, answer = send("POST", "?dryRun=All", service({"vipgate.io/no-such": "x"}))
        known = answer["message"].split("a Service can have ")[1].split(", ")
        self.assertEqual(sorted(known), sorted(values.values()))

    def test_services_of_others_are_never_refused(self):
        bad = ours({"egres": "true"})
        others = [
            service(None), service({}), service({"metallb.io/address-pool": "Public", "example.vipgate.io/x": "y", "vipgate.io": "z"}),
            service(bad, loadBalancerClass="example.org/other"),
        ]
        for number, body in enumerate(others):
            with self.subTest(number=number):
                status, answer = send("POST", "?dryRun=All", body)
                self.assertEqual(status, 201, answer)
        status, _ = send("POST", "?dryRun=All", service(bad, loadBalancerClass="vipgate.io/vipgate"))
        self.assertEqual(status, 422)

    def test_what_was_wrong_before_can_be_changed_and_deleted(self):
        # As it was before the policy: without the class, it would be refused.
        bad = {**ours({"egres": "true"}), "example.org/a": "b"}
        body = service(bad, "old", loadBalancerClass="example.org/other")
        body["metadata"]["finalizers"] = ["example.org/cleanup"]
        self.assertEqual(send("POST", "", body)[0], 201)
        merge = "application/merge-patch+json"
        status, answer = send("PATCH", "/old", {"spec": {"loadBalancerClass": None}}, merge)
        self.assertEqual(status, 200, answer)
        for change in ({"metadata": {"annotations": {"example.org/a": "c"}}}, {"spec": {"type": "ClusterIP"}},
                       {"metadata": {"annotations": {"vipgate.io/egres": None}}}, {"metadata": {"annotations": {"vipgate.io/egress": "true"}}}):
            status, answer = send("PATCH", "/old", change, merge)
            self.assertEqual(status, 200, answer)
        status, answer = send("PATCH", "/old", {"metadata": {"annotations": {"vipgate.io/egress": "maybe"}}}, merge)
        self.assertEqual(status, 422, answer)
        # The status isn't examined, and a deletion is finished.
        self.assertEqual(send("PATCH", "/old/status", {"status": {"loadBalancer": {}}}, merge)[0], 200)
        self.assertEqual(send("DELETE", "/old", None)[0], 200)
        status, answer = send("PATCH", "/old", {"metadata": {"annotations": ours({"egress": "maybe"}), "finalizers": None}}, merge)
        self.assertEqual(status, 200, answer)
        self.assertEqual(send("GET", "/old", None)[0], 404)


class OwnKinds(unittest.TestCase):
    """Addresses, prefixes and names in vipgate's kinds."""

    def test_what_the_definitions_cannot_see_is_refused(self):
        for kind, spec, message in OWN_REFUSED:
            with self.subTest(kind=kind, spec=spec):
                status, answer = api.create(kind, spec, dry_run=True)
                self.assertEqual(status, 422, answer)
                self.assertIn("ValidatingAdmissionPolicy 'vipgate-addresses'", answer["message"])
                self.assertIn(message, answer["message"])

    def test_valid_objects_are_admitted(self):
        for kind, spec in OWN_ADMITTED:
            with self.subTest(kind=kind, spec=spec):
                status, answer = api.create(kind, spec, dry_run=True)
                self.assertEqual(status, 201, answer)

    def test_the_manifests_of_the_demo_and_the_documents_are_admitted(self):
        text = "\n---\n".join(it.read_text() for it in sorted((ROOT / "conf").rglob("*.yaml")) if "vipgate.io/v1alpha1" in it.read_text())
        kinds = {"EgressPolicy", "ClusterEgressPolicy", "VipGateway", "AddressPool", "OverlayNode"}
        count = 0
        for part in text.split("\n---\n"):
            if not any(f"\nkind: {kind}\n" in f"\n{part}\n" for kind in kinds):
                continue
            file = api.folder / "part.yaml"
            file.write_text(part)
            for document in documents(api.kubectl("label", "--local", "-o", "json", "-f", file, "a=b")):
                status, answer = api.create(document["kind"], document["spec"], dry_run=True)
                self.assertEqual(status, 201, answer)
                count += 1
        self.assertGreater(count, 3)


if __name__ == "__main__":
    cluster.main(["VIPGATE_KUBE_APISERVER", "VIPGATE_EXTENSIONS", "VIPGATE_KUBECTL", "VIPGATE_HELM"])
