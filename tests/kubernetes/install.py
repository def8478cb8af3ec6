#!/usr/bin/env python3
"""Tests charts/vipgate and conf/kubernetes at a real API server, Kubernetes 1.20.2: make chart-install; needs root.

Helm installs, upgrades, rolls back and uninstalls; the API server validates every object of every file in charts/vipgate/ci; and the policy server
and a gateway run as their pods would, with what was installed: arguments, ConfigMaps, Secrets, service account, capabilities.
"""

import base64
import os
import re
import shutil
import ssl
import subprocess
import unittest
from pathlib import Path

import cluster
from cluster import CRDS, ROOT, Cluster, run, wait_for
from pod import Pod

CHART = ROOT / "charts/vipgate"
NAMESPACE = "vipgate"
# Kinds of other projects, whose definitions aren't here: lint/chart.py doesn't know them either.
FOREIGN = {"Certificate", "Issuer", "PodMonitor", "PrometheusRule", "ServiceMonitor"}
# Kinds that 1.20 lacks: tests/kubernetes/admission.py has a server for them.
NEWER = {"ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding"}
# Versions that 1.20 lacks, and the one that it has of the same fields.
OLDER = {
    "apiVersion: policy/v1\n": "apiVersion: policy/v1beta1\n",
    "apiVersion: batch/v1\nkind: CronJob\n": "apiVersion: batch/v1beta1\nkind: CronJob\n",
}
NODES = [("node-1", "192.0.2.11"), ("node-2", "192.0.2.12")]
GATEWAYS = "gateways:\n" + "".join(f"  - {{name: {name}, peerAddress: {address}}}\n" for name, address in NODES)
THREE_GATEWAYS = f"{GATEWAYS}  - {{name: node-3, peerAddress: 192.0.2.13}}\n"
# Values with a certificate of Helm, not of the Job.
BY_HELM = "tls: {mode: helm}\n"
# Secrets: of the policy server, and of gateways and agents, with its CA bundle alone; and for the MAC addresses in nodes' tunnels.
SERVER, CLIENTS, TUNNELS = "vipgate-policyd-tls", "vipgate-clients-tls", "vipgate-node-tunnels"
SECRETS = (SERVER, CLIENTS, TUNNELS)
PAIR = ("ca.crt", "tls.crt", "tls.key")
POLICY = """
apiVersion: vipgate.io/v1alpha1
kind: AddressPool
metadata: {name: public}
spec: {ranges: [203.0.113.16/28]}
---
apiVersion: vipgate.io/v1alpha1
kind: EgressPolicy
metadata: {name: out, namespace: tenant-a}
spec:
  selectors: [{podSelector: {matchLabels: {app: worker}}}]
  pools: [{name: public, count: 1}]
---
apiVersion: v1
kind: Pod
metadata: {name: worker-0, namespace: tenant-a, labels: {app: worker}}
spec: {containers: [{name: worker, image: worker}]}
---
apiVersion: v1
kind: Service
metadata: {name: web, namespace: tenant-a, annotations: {vipgate.io/announce: L2}}
spec: {type: LoadBalancer, ports: [{port: 80}]}
"""
# `vipgate policy status` in the policy server's pod, as in docs/kubernetes.md.
STATUS = ("vipgate policy status --server https://localhost:18000 --ca /etc/vipgate-tls/ca.crt --cert /etc/vipgate-tls/tls.crt "
          "--key /etc/vipgate-tls/tls.key").split()

api = None


def setUpModule():
    global api
    api = Cluster()
    api.apply_definitions()
    for namespace in (NAMESPACE, "tenant-a", "tenant-b"):
        api.kubectl("create", "namespace", namespace)
    # A node's interfaces, in this network namespace, and its address for other gateways.
    for number, name in enumerate(("eth1", "eth2"), 1):
        run("ip", "link", "add", name, "type", "veth", "peer", "name", f"{name}-peer")
        for device in (name, f"{name}-peer"):
            run("ip", "link", "set", device, "up")
        run("ip", "address", "add", f"10.99.{number}.1/24", "dev", name)
    run("ip", "address", "add", "192.0.2.11/32", "dev", "lo")


def older(text):
    """Manifests in versions that 1.20 has."""
    for newer, version in OLDER.items():
        text = text.replace(newer, version)
    return text


def chart():
    """A copy of the chart that Helm also installs in 1.20, which the chart isn't for: only `kubeVersion` and versions of kinds differ."""
    copy = api.folder / "chart"
    if not copy.exists():
        shutil.copytree(CHART, copy)
        metadata = (copy / "Chart.yaml").read_text()
        metadata, count = re.subn(r"^kubeVersion: .*\n", "", metadata, flags=re.M)
        assert count == 1, "Chart.yaml has no kubeVersion"
        (copy / "Chart.yaml").write_text(metadata)
        for template in (copy / "templates").glob("*.yaml"):
            template.write_text(older(template.read_text()))
    return copy


def tearDownModule():
    api.stop()


def helm(action, *arguments, values=GATEWAYS, options=("--skip-crds",)):
    """Runs `helm install` or `helm upgrade` of the chart. The definitions are there."""
    file = api.folder / "values.yaml"
    file.write_text(values)
    return api.helm(action, "vipgate", chart(), "--namespace", NAMESPACE, "--values", file, *options, *arguments)


def uninstall():
    api.helm("uninstall", "vipgate", "--namespace", NAMESPACE)


def certificate(secret, key):
    data = api.get("secret", secret, NAMESPACE)["data"]
    return base64.b64decode(data[key]).decode()


def secrets():
    """All certificates and keys of the release."""
    there = {it["metadata"]["name"]: it["data"] for it in api.get("secret", namespace=NAMESPACE)["items"] if it["metadata"]["name"].startswith("vipgate-")}
    return {(name, key): value for name, data in there.items() for key, value in data.items()}


def delete_secrets():
    api.kubectl("delete", "secret", *SECRETS, "-n", NAMESPACE)


def versions():
    """The resource version of each Secret with certificates."""
    return {name: api.get("secret", name, NAMESPACE)["metadata"]["resourceVersion"] for name in SECRETS}


def job_pod(kind="job", changes=()):
    """A pod of the Job or the CronJob that makes certificates, with some arguments replaced."""
    (workload,) = api.get(kind, namespace=NAMESPACE)["items"]
    pod = Pod(api, workload, NAMESPACE, "node-9", "192.0.2.19")
    arguments = pod.container("certificates")["args"]
    for old, new in changes:
        arguments[arguments.index(old)] = new
    return pod


def run_job(kind="job", changes=()):
    """Runs it, as the controller and kubelet would; its output."""
    return job_pod(kind, changes).run("certificates")


def collect_garbage():
    """Deletes the Secrets whose owner is gone, as the API server's garbage collector does; their names."""
    there = {it["metadata"]["uid"] for it in api.get("serviceaccount", namespace=NAMESPACE)["items"]}
    collected = set()
    for secret in api.get("secret", namespace=NAMESPACE)["items"]:
        owners = {owner["uid"] for owner in secret["metadata"].get("ownerReferences", [])}
        if owners and not owners & there:
            api.kubectl("delete", "secret", secret["metadata"]["name"], "-n", NAMESPACE)
            collected.add(secret["metadata"]["name"])
    return collected


def is_signed(ca, signed, name):
    """Whether a CA's certificate verifies another one for a name."""
    for file, text in (("ca.pem", ca), ("signed.pem", signed)):
        (api.folder / file).write_text(text)
    verify = ["openssl", "verify", "-x509_strict", "-CAfile", api.folder / "ca.pem", "-verify_hostname", name]
    # The server is a client, too: for its own command line.
    purposes = [["-purpose", purpose, api.folder / "signed.pem"] for purpose in ("sslserver", "sslclient")]
    return all(subprocess.run([*verify, *purpose], capture_output=True, check=False).returncode == 0 for purpose in purposes)


class Validation(unittest.TestCase):
    """The API server validates what the chart renders."""

    def dry_run(self, rendered):
        """What of a rendering the server accepts, and what was left out."""
        documents = [it for it in re.split(r"^---\s*$", older(rendered), flags=re.M) if re.search(r"^kind: ", it, re.M)]
        kinds = [re.search(r"^kind: (\S+)", it, re.M)[1] for it in documents]
        skipped = {kind for kind in kinds if kind in FOREIGN | NEWER}
        # 1.20 drops CEL rules; tests/kubernetes/current.py has a server that evaluates them.
        checked = [it for it, kind in zip(documents, kinds) if kind not in FOREIGN | NEWER | {"CustomResourceDefinition"}]
        output = api.kubectl("apply", "--dry-run=server", "--validate=strict", "-f", "-", stdin="---\n".join(checked))
        self.assertEqual(output.count("(server dry run)"), len(checked), output)
        self.assertTrue(checked)
        return len(checked), skipped

    def test_the_server_accepts_every_file_of_values(self):
        files = sorted((CHART / "ci").glob("*.yaml"))
        self.assertGreaterEqual(len(files), 8)
        seen = set()
        for file in [None, *files]:
            arguments = ["--values", file] if file else []
            with self.subTest(values=file.name if file else "none"):
                api.helm("lint", "--strict", CHART, "--namespace", NAMESPACE, *arguments)
                rendered = api.helm("template", "vipgate", CHART, "--namespace", NAMESPACE, "--include-crds", *arguments)
                _, skipped = self.dry_run(rendered)
                seen |= skipped
        self.assertEqual(seen, FOREIGN | NEWER, "a kind that nothing renders any more")

    def test_the_server_accepts_the_manifests_without_helm(self):
        for name, least in (("install.yaml", 10), ("gateway.yaml", 1)):
            count, skipped = self.dry_run((ROOT / "conf/kubernetes" / name).read_text())
            self.assertEqual(skipped, set())
            self.assertGreaterEqual(count, least)

    def test_the_server_rejects_what_is_wrong(self):
        """The dry run is one that can fail: a field of the wrong type, and one that doesn't exist."""
        rendered = api.helm("template", "vipgate", CHART, "--namespace", NAMESPACE)
        for wrong in ("replicas: many", "replicaz: 1"):
            broken, count = re.subn(r"replicas: \d+", wrong, rendered)
            self.assertEqual(count, 1)
            with self.assertRaises(AssertionError):
                self.dry_run(broken)


class Releases(unittest.TestCase):
    """Helm at the API server."""

    def tearDown(self):
        if api.helm("list", "--namespace", NAMESPACE, "--short").strip():
            uninstall()

    def test_install_upgrade_rollback_uninstall(self):
        before = api.objects()
        helm("install")
        installed = api.objects() - before
        expected = {
            ("Deployment", NAMESPACE, "vipgate-policyd"), ("DaemonSet", NAMESPACE, "vipgate-gateway"), ("Service", NAMESPACE, "vipgate-policyd"),
            ("PodDisruptionBudget", NAMESPACE, "vipgate-policyd"),
            ("ConfigMap", NAMESPACE, "vipgate-policyd"), ("ConfigMap", NAMESPACE, "vipgate-gateway"),
            ("ServiceAccount", NAMESPACE, "vipgate-policyd"), ("ServiceAccount", NAMESPACE, "vipgate-gateway"),
            ("ServiceAccount", NAMESPACE, "vipgate-certificates"),
            ("Role", NAMESPACE, "vipgate-certificates"), ("RoleBinding", NAMESPACE, "vipgate-certificates"),
            ("CronJob", NAMESPACE, "vipgate-certificates"), ("Job", NAMESPACE, job_pod().name),
            ("NetworkPolicy", NAMESPACE, "vipgate-policyd"), ("Secret", NAMESPACE, "sh.helm.release.v1.vipgate.v1"),
            ("DaemonSet", NAMESPACE, "vipgate-node"), ("ConfigMap", NAMESPACE, "vipgate-node"), ("ServiceAccount", NAMESPACE, "vipgate-node"),
            ("ClusterRole", "<none>", "vipgate-policyd"), ("ClusterRoleBinding", "<none>", "vipgate-policyd"),
            ("Role", NAMESPACE, "vipgate-policyd-leader"), ("RoleBinding", NAMESPACE, "vipgate-policyd-leader"),
            *(("VipGateway", "<none>", name) for name, _ in NODES),
        }
        self.assertEqual(installed, expected)

        first = api.get("deployment", "vipgate-policyd", NAMESPACE)["spec"]["template"]
        changed = "policyd: {tenancy: open, podLabels: {team: net}}\nimage: {tag: newer}\ngateways: [{name: node-1, peerAddress: 192.0.2.11, zone: z}]\n"
        helm("upgrade", values=changed)
        second = api.get("deployment", "vipgate-policyd", NAMESPACE)["spec"]["template"]
        self.assertEqual(second["metadata"]["labels"]["team"], "net")
        self.assertEqual(second["spec"]["containers"][0]["image"], "vipgate:newer")
        self.assertNotEqual(second["metadata"]["annotations"]["checksum/config"], first["metadata"]["annotations"]["checksum/config"])
        self.assertIn("tenancy: open", api.get("configmap", "vipgate-policyd", NAMESPACE)["data"]["policyd.yaml"])
        self.assertEqual(api.get("vipgateway", "node-1")["spec"]["zone"], "z")
        self.assertNotIn(("VipGateway", "<none>", "node-2"), api.objects())

        api.helm("rollback", "vipgate", "1", "--namespace", NAMESPACE)
        self.assertEqual(api.get("deployment", "vipgate-policyd", NAMESPACE)["spec"]["template"], first)
        self.assertIn("tenancy: strict", api.get("configmap", "vipgate-policyd", NAMESPACE)["data"]["policyd.yaml"])
        self.assertNotIn("zone", api.get("vipgateway", "node-1")["spec"])
        releases = {("Secret", NAMESPACE, f"sh.helm.release.v1.vipgate.v{number}") for number in (2, 3)}
        self.assertEqual(api.objects() - before, expected | releases)

        uninstall()
        self.assertEqual(api.objects(), before)

    def test_helm_installs_the_definitions_and_leaves_them(self):
        api.kubectl("delete", "-f", CRDS, "--timeout=20s")
        before = api.objects()
        # In server-side apply, 1.20 rejects CEL rules; else it drops them.
        helm("install", options=("--server-side=false",))
        definitions = {it for it in api.objects() - before if it[0] == "CustomResourceDefinition"}
        names = {"egresspolicies", "clusteregresspolicies", "vipgateways", "addresspools", "overlaynodes"}
        self.assertEqual(definitions, {("CustomResourceDefinition", "<none>", f"{name}.vipgate.io") for name in names})
        uninstall()
        # The server has an APIService for each group of definitions.
        self.assertEqual(api.objects() - before, definitions | {("APIService", "<none>", "v1alpha1.vipgate.io")})

    def test_with_helm_upgrades_keep_the_certificate(self):
        helm("install", values=BY_HELM + GATEWAYS)
        first = secrets()
        bundle = certificate(CLIENTS, "ca.crt")
        self.assertTrue(is_signed(bundle, certificate(SERVER, "tls.crt"), "vipgate-policyd.vipgate.svc"))
        self.assertFalse(is_signed(bundle, certificate(SERVER, "tls.crt"), "node-1"))

        helm("upgrade", values=f"{BY_HELM}image: {{tag: newer}}\n{THREE_GATEWAYS}")
        self.assertEqual(secrets(), first, "an upgrade keeps certificate and key")
        api.helm("rollback", "vipgate", "1", "--namespace", NAMESPACE)
        self.assertEqual(secrets(), first)

        # Replaced on purpose.
        delete_secrets()
        helm("upgrade", values=BY_HELM + GATEWAYS)
        third = secrets()
        self.assertEqual(third.keys(), first.keys())
        self.assertFalse([key for key in first if third[key] == first[key]], "all are new")
        self.assertFalse(is_signed(bundle, certificate(SERVER, "tls.crt"), "localhost"))

    def test_with_helm_a_rollback_behind_replaced_certificates_brings_the_old_ones_back(self):
        """A limit, which docs/kubernetes.md names: they are part of each revision."""
        helm("install", values=BY_HELM + GATEWAYS)
        first = secrets()
        delete_secrets()
        helm("upgrade", values=BY_HELM + GATEWAYS)
        self.assertNotEqual(secrets(), first)
        api.helm("rollback", "vipgate", "1", "--namespace", NAMESPACE)
        self.assertEqual(secrets(), first)

    def test_with_helm_a_lost_bundle_is_put_back(self):
        helm("install", values=BY_HELM + GATEWAYS)
        first = secrets()
        api.kubectl("delete", "secret", CLIENTS, "-n", NAMESPACE)
        helm("upgrade", values=BY_HELM + GATEWAYS)
        self.assertEqual(secrets(), first)


class Certificates(unittest.TestCase):
    """The Job that makes the certificate, at the API server, with the rights that the chart grants."""

    def tearDown(self):
        if api.helm("list", "--namespace", NAMESPACE, "--short").strip():
            uninstall()
        api.kubectl("delete", "secret", "--ignore-not-found", *SECRETS, "-n", NAMESPACE)

    def assert_signed(self):
        """The certificate is valid for its names, and for no other one."""
        for name in ("vipgate-policyd.vipgate.svc", "vipgate-policyd.vipgate.svc.cluster.local", "localhost"):
            self.assertTrue(is_signed(certificate(CLIENTS, "ca.crt"), certificate(SERVER, "tls.crt"), name), name)
        self.assertFalse(is_signed(certificate(CLIENTS, "ca.crt"), certificate(SERVER, "tls.crt"), "node-1"))
        self.assertEqual(secrets().keys(), {*((SERVER, key) for key in PAIR), (CLIENTS, "ca.crt"), (TUNNELS, "secret")})

    def test_it_is_made_once_and_upgrades_and_rollbacks_keep_it(self):
        helm("install")
        output = run_job()
        self.assertRegex(output, r"(?m)^made certificate of the policy server until \d{4}-\d\d-\d\d: there was none$")
        self.assertNotIn("PRIVATE", output)
        self.assert_signed()
        first, written = secrets(), versions()

        # The other one has the same inputs.
        self.assertRegex(run_job("cronjob"), r"\Akept certificate of the policy server .*\nkept `secret` of Secret vipgate-node-tunnels\n\Z")
        self.assertEqual(versions(), written, "nothing is written when nothing changes")

        job = job_pod().name
        helm("upgrade", values=THREE_GATEWAYS + "policyd: {tenancy: open}\n")
        self.assertEqual(job_pod().name, job, "the same inputs are the same Job")
        helm("upgrade", values=GATEWAYS + "image: {tag: newer}\n")
        self.assertNotEqual(job_pod().name, job, "other inputs are another Job")
        run_job()
        api.helm("rollback", "vipgate", "1", "--namespace", NAMESPACE)
        self.assertEqual(job_pod().name, job)
        self.assertEqual(collect_garbage(), set())
        run_job()
        self.assertEqual(secrets(), first, "certificate and key are kept")

        # It is due.
        output = run_job("cronjob", [("--renew-before=30", "--renew-before=365")])
        self.assertEqual(len(re.findall("(?m)^made certificate .*: the one before ends on ", output)), 1, output)
        second = secrets()
        changed = {key for key in first if first[key] != second[key]}
        self.assertEqual(changed, {(SERVER, "ca.crt"), (SERVER, "tls.crt"), (CLIENTS, "ca.crt")}, "the key stays")
        self.assert_signed()

    def test_two_at_once_agree(self):
        for _ in range(3):
            helm("install")
            pods = [job_pod(), job_pod("cronjob"), job_pod()]
            for pod in pods:
                pod.start("certificates")
            for pod in pods:
                process = pod.processes["certificates"]
                self.assertEqual(process.process.wait(60), 0, process.log())
            self.assert_signed()
            written = versions()
            run_job()
            self.assertEqual(versions(), written)
            uninstall()
            self.assertEqual(collect_garbage(), set(SECRETS))

    def test_secrets_go_with_the_release_and_change_their_owner_with_the_next(self):
        before = api.objects()
        helm("install")
        run_job()
        first = secrets()
        uid = api.get("serviceaccount", "vipgate-certificates", NAMESPACE)["metadata"]["uid"]
        expected = [{"apiVersion": "v1", "kind": "ServiceAccount", "name": "vipgate-certificates", "uid": uid}]
        for secret in SECRETS:
            self.assertEqual(api.get("secret", secret, NAMESPACE)["metadata"]["ownerReferences"], expected)
        self.assertEqual(collect_garbage(), set())

        # Installed again before they are gone.
        uninstall()
        helm("install")
        self.assertIn("changed owner of Secret vipgate-policyd-tls\n", run_job())
        self.assertEqual(secrets(), first)
        self.assertEqual(collect_garbage(), set())

        uninstall()
        self.assertEqual(collect_garbage(), set(SECRETS))
        self.assertEqual(api.objects(), before)

    def test_secrets_of_helm_are_refused_until_it_has_deleted_them(self):
        """From mode helm to mode job: the Job's first pods may run before Helm has deleted its Secrets."""
        helm("install", values=BY_HELM + GATEWAYS)
        first = secrets()
        manifests = {name: api.get("secret", name, NAMESPACE) for name in SECRETS}
        helm("upgrade")
        for name in SECRETS:
            metadata = manifests[name]["metadata"]
            manifests[name]["metadata"] = {key: metadata[key] for key in ("name", "namespace", "labels", "annotations")}
            api.apply(manifests[name])
        with self.assertRaisesRegex(AssertionError, "exit code 1\nvipgate: Secret vipgate-policyd-tls is managed by Helm: delete it"):
            run_job()
        self.assertEqual(secrets(), first)
        delete_secrets()
        run_job()
        self.assert_signed()

    def test_a_broken_certificate_is_replaced_and_its_key_kept(self):
        helm("install")
        run_job()
        key = certificate(SERVER, "tls.key")
        api.kubectl("patch", "secret", SERVER, "-n", NAMESPACE, "-p", '{"data": {"tls.crt": "eA=="}}')
        self.assertRegex(run_job(), r"(?m)^made certificate of the policy server .*: the one before was unreadable$")
        self.assert_signed()
        self.assertEqual(certificate(SERVER, "tls.key"), key)

    def test_outside_of_a_pod(self):
        """As somebody without the chart runs it: with a kubeconfig, and without an owner."""
        command = [os.environ["VIPGATE_BINARY"], "certificates", "--kubeconfig", api.kubeconfig, "--namespace", "tenant-b"]
        command += ["--server", "server", "--server-name", "10.0.0.1,policyd.example", "--clients", "clients"]
        with self.assertRaisesRegex(AssertionError, "vipgate: ServiceAccount absent doesn't exist"):
            run(*command, "--owner", "absent")
        run(*command)
        self.addCleanup(api.kubectl, "delete", "secret", "server", "clients", "-n", "tenant-b")
        found = {name: api.get("secret", name, "tenant-b")["data"] for name in ("server", "clients")}
        self.assertEqual([data.keys() for data in found.values()], [set(PAIR), {"ca.crt"}])
        bundle, server = (base64.b64decode(data).decode() for data in (found["clients"]["ca.crt"], found["server"]["tls.crt"]))
        self.assertTrue(is_signed(bundle, server, "policyd.example"))
        self.assertRegex(run(*command), r"\Akept .*\n\Z")
        with self.assertRaisesRegex(AssertionError, "vipgate: --kubeconfig /absent: .*"):
            run(os.environ["VIPGATE_BINARY"], "certificates", "--kubeconfig", "/absent", "--server", "a", "--server-name", "b", "--clients", "c")

    def test_each_right_is_needed(self):
        helm("install")
        account = f"system:serviceaccount:{NAMESPACE}:vipgate-certificates"
        granted_rules = api.get("role", "vipgate-certificates", NAMESPACE)["rules"]
        rights = [(number, verb, name) for number, rule in enumerate(granted_rules) for verb in rule["verbs"] for name in rule.get("resourceNames", [None])]
        resources = {(granted_rules[number]["resources"][0], verb) for number, verb, _ in rights}
        expected = {("secrets", verb) for verb in ("get", "update", "create")} | {("serviceaccounts", "get")}
        self.assertEqual(resources, expected)

        def set_rules(rules):
            path = f"/apis/rbac.authorization.k8s.io/v1/namespaces/{NAMESPACE}/roles/vipgate-certificates"
            status, body = api.request(path, "PATCH", {"rules": rules}, "application/merge-patch+json")
            self.assertEqual(status, 200, body)

        def is_allowed(verb, rule, name):
            attributes = {"verb": verb, "resource": rule["resources"][0], "group": rule["apiGroups"][0], "name": name or "", "namespace": NAMESPACE}
            review = {"spec": {"user": account, "groups": ["system:serviceaccounts"], "resourceAttributes": attributes}}
            return api.request("/apis/authorization.k8s.io/v1/subjectaccessreviews", "POST", review)[1]["status"]["allowed"]

        for number, verb, name in rights:
            granted = granted_rules[number]
            resource = granted["resources"][0]
            with self.subTest(verb=verb, resource=resource, name=name):
                # What needs the right to update: the certificate is due, and this Secret has lost its owner.
                if verb == "update":
                    run_job()
                    api.kubectl("patch", "secret", name, "-n", NAMESPACE, "-p", '{"metadata": {"ownerReferences": null}}')
                rules = []
                for at, rule in enumerate(granted_rules):
                    for one in rule["verbs"]:
                        names = [it for it in rule.get("resourceNames", []) if (at, one, it) != (number, verb, name)]
                        if rule.get("resourceNames") and names:
                            rules.append({**rule, "verbs": [one], "resourceNames": names})
                        elif not rule.get("resourceNames") and (at, one, None) != (number, verb, name):
                            rules.append({**rule, "verbs": [one]})
                set_rules(rules)
                wait_for("the right is gone", lambda: not is_allowed(verb, granted, name))
                refused = rf'vipgate: cannot {verb} \w+ [\w-]+ in namespace {NAMESPACE}: .*cannot {verb} resource "{resource}"'
                with self.assertRaisesRegex(AssertionError, refused):
                    run_job("job", [("--renew-before=30", "--renew-before=365")])
                set_rules(granted_rules)
                wait_for("the right is back", lambda: is_allowed(verb, granted, name))
                api.kubectl("delete", "secret", "--ignore-not-found", *SECRETS, "-n", NAMESPACE)
        run_job()
        self.assert_signed()


class Rights(unittest.TestCase):
    """The rights that the chart grants to the policy server."""

    def test_they_are_those_that_the_tests_of_the_source_take_away(self):
        """Of tests/tests/kubernetes/access.rs: what it doesn't take away isn't known to be needed."""
        source = (ROOT / "tests/tests/kubernetes/access.rs").read_text()
        table = re.search(r"const RIGHTS: .*? = \[(.*?)\];", source, re.S)[1]
        rows = re.findall(r'\(\s*"([^"]*)",\s*"([^"]+)",\s*"([^"]+)",?\s*\)', table)
        tested = {(group, resource, verb) for group, resource, verbs in rows for verb in verbs.split(", ")}
        tested.add(("apiextensions.k8s.io", "customresourcedefinitions", "get"))
        self.assertGreater(len(tested), 20)
        helm("install")
        self.addCleanup(uninstall)
        roles = [api.get("clusterrole", "vipgate-policyd"), api.get("role", "vipgate-policyd-leader", NAMESPACE)]
        rules = [rule for role in roles for rule in role["rules"]]
        # Taken away by the test of agents, below.
        tested |= {("authentication.k8s.io", "tokenreviews", "create"), ("", "pods", "get")}
        granted = {(group, resource, verb) for it in rules for group in it["apiGroups"] for resource in it["resources"] for verb in it["verbs"]}
        self.assertEqual(granted, tested)


class Running(unittest.TestCase):
    """Policy server and gateway run with what was installed."""

    def tearDown(self):
        if api.helm("list", "--namespace", NAMESPACE, "--short").strip():
            uninstall()
        for kind in ("egresspolicies", "addresspools", "services", "pods"):
            api.kubectl("delete", kind, "--all", "-n", "tenant-a", "--force", "--grace-period=0")
        api.kubectl("delete", "pods", "--all", "-n", NAMESPACE, "--force", "--grace-period=0")
        api.kubectl("delete", "nodes", "--all")
        api.kubectl("delete", "lease", "--all", "-n", NAMESPACE)
        api.kubectl("delete", "configmap", "--ignore-not-found", "vipgate-policyd-membership", "-n", NAMESPACE)
        collect_garbage()

    def start_server(self):
        workload = api.get("deployment", "vipgate-policyd", NAMESPACE)
        self.assertEqual(workload["spec"]["template"]["spec"]["securityContext"]["runAsUser"], 65532)
        policyd = Pod(api, workload, NAMESPACE, "node-9", "192.0.2.19")
        self.addCleanup(policyd.stop)
        policyd.start("policyd").wait_until("ready", lambda: policyd.is_ready("policyd"))
        return policyd

    def start_gateway(self):
        """The gateway's pod on node-1, which the policy server knows by its token."""
        workload = api.get("daemonset", "vipgate-gateway", NAMESPACE)
        gateway = Pod(api, workload, NAMESPACE, "node-1", "192.0.2.11", [f"vipgate-policyd.{NAMESPACE}.svc"])
        self.addCleanup(gateway.stop)
        gateway.run("configure")
        self.assertRegex((gateway.volumes["configuration"] / "gateway.yaml").read_text(), r"(?m)^name: '?node-1'?$")
        gateway.start("gateway")
        return gateway

    def apply_policy(self, policyd):
        """A policy, its pod, and a Service that gets an address."""
        api.apply(POLICY)
        pod = '{"status": {"podIP": "10.244.1.7", "podIPs": [{"ip": "10.244.1.7"}]}}'
        api.kubectl("patch", "pod", "worker-0", "-n", "tenant-a", "--subresource=status", "--type=merge", "-p", pod)
        self.wait_status(policyd, r"^EgressPolicy tenant-a/out +accepted +1 +203\.0\.113\.(1[6-9]|2[0-9]|3[01])\b")
        log = policyd.processes["policyd"].log
        service = wait_for("address", lambda: api.get("service", "web", "tenant-a")["status"]["loadBalancer"].get("ingress"), log=log)
        self.assertEqual([it["ip"] for it in service], ["203.0.113.16"])
        self.assertNotIn("forbidden", log())

    def wait_status(self, policyd, pattern, seconds=30):
        """Waits until a line of `vipgate policy status` matches."""
        last = ""

        def matches():
            nonlocal last
            try:
                last = policyd.execute("policyd", *STATUS)
            except AssertionError as error:
                last = str(error)
            return re.search(pattern, last, re.M)

        wait_for(pattern, matches, seconds, log=lambda: last + policyd.processes["policyd"].log())

    def wait_in_sync(self, policyd, gateway):
        self.wait_status(policyd, r"^node-1 +in sync\b", seconds=60)
        status = gateway.execute("gateway", "vipgate", "status")
        self.assertIn("2 VIPs, 1 endpoint, 1 Service, from server https://vipgate-policyd.vipgate.svc:18000", status)

    def test_what_is_installed_serves_policy_and_the_certificate_can_be_replaced(self):
        before = api.objects()
        helm("install")
        run_job()
        pods = self.serve()
        self.renew_certificate(*pods)
        self.replace_certificate(*pods, lambda: run_job("cronjob"))
        self.end(*pods, before)

    def test_the_certificate_of_helm_can_be_replaced(self):
        before = api.objects()
        helm("install", values=BY_HELM + GATEWAYS)
        pods = self.serve()
        self.replace_certificate(*pods, lambda: helm("upgrade", values=BY_HELM + GATEWAYS))
        self.end(*pods, before)

    def serve(self):
        policyd = self.start_server()
        self.apply_policy(policyd)
        gateway = self.start_gateway()
        gateway.processes["gateway"].wait_until("ready", lambda: gateway.is_ready("gateway"))
        self.wait_in_sync(policyd, gateway)
        return policyd, gateway

    def end(self, policyd, gateway, before):
        self.assertEqual(gateway.stop(), [0])
        self.assertEqual(policyd.stop(), [0])
        api.kubectl("delete", "pods", "--all", "-n", NAMESPACE, "--force", "--grace-period=0")
        uninstall()
        collect_garbage()
        # What docs/kubernetes.md names.
        self.assertEqual(api.objects() - before, {
            ("AddressPool", "<none>", "public"), ("EgressPolicy", "tenant-a", "out"), ("EgressPolicy", "tenant-a", "later"),
            ("Service", "tenant-a", "web"), ("Pod", "tenant-a", "worker-0"), ("Lease", NAMESPACE, "vipgate-policyd"),
            ("ConfigMap", NAMESPACE, "vipgate-policyd-membership"),
        })

    def take_up(self, policyd):
        """Kubelet updates the server's files, which takes up what is new while it runs."""
        policyd.update_volumes()
        new = ssl.PEM_cert_to_DER_cert(certificate(SERVER, "tls.crt"))
        wait_for("the server's new certificate", lambda: ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("127.0.0.1", 18000))) == new,
                 log=policyd.processes["policyd"].log)

    def restart(self, policyd):
        """A connection from before would go on: the gateway's next one is to another process."""
        self.assertEqual(policyd.stop(), [0])
        policyd.start("policyd")

    def renew_certificate(self, policyd, gateway):
        """The gateway accepts it while it still has the bundle from before."""
        before = secrets()
        run_job("cronjob", [("--renew-before=30", "--renew-before=365")])
        changed = {key for key, value in secrets().items() if before[key] != value}
        self.assertEqual(changed, {(SERVER, "ca.crt"), (SERVER, "tls.crt"), (CLIENTS, "ca.crt")})
        self.take_up(policyd)
        self.restart(policyd)
        self.wait_status(policyd, r"^node-1 +in sync\b", seconds=60)
        gateway.update_volumes()

    def replace_certificate(self, policyd, gateway, replace):
        """Both take up a certificate with another key while they run, as docs/kubernetes.md says."""
        before = secrets()
        delete_secrets()
        replace()
        self.assertFalse(before.items() & secrets().items())
        self.take_up(policyd)
        gateway.update_volumes()
        # The command line has the new one, so the server does.
        self.wait_status(policyd, "^server ", seconds=60)
        self.restart(policyd)
        api.apply(POLICY.replace("203.0.113.16/28", "203.0.113.16/29").replace("name: out,", "name: later,"))
        self.wait_status(policyd, r"^EgressPolicy tenant-a/later +accepted", seconds=60)
        self.wait_status(policyd, r"^node-1 +in sync\b", seconds=60)

    def start_agent(self, node, name=None):
        """The agent's pod on a node, whose configuration may have the name of another one."""
        agent = Pod(api, api.get("daemonset", "vipgate-node", NAMESPACE), NAMESPACE, node, "192.0.2.12", [f"vipgate-policyd.{NAMESPACE}.svc"])
        self.addCleanup(agent.stop)
        agent.run("configure")
        config = agent.volumes["configuration"] / "node.yaml"
        config.write_text(config.read_text().replace(node, name or node))
        agent.start("node")
        return agent

    def test_the_agent_of_a_node_is_known_by_the_token_of_its_pod(self):
        run("ip", "address", "add", "192.0.2.12/32", "dev", "lo")
        self.addCleanup(run, "ip", "address", "del", "192.0.2.12/32", "dev", "lo")
        helm("install")
        run_job()
        api.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "node-2"}, "spec": {"podCIDRs": ["10.244.1.0/24"]}})
        addresses = '{"status": {"addresses": [{"type": "InternalIP", "address": "192.0.2.12"}]}}'
        api.kubectl("patch", "node", "node-2", "--subresource=status", "--type=merge", "-p", addresses)
        policyd = self.start_server()
        self.apply_policy(policyd)

        # Each right of the server's account is needed for it.
        path, account = "/apis/rbac.authorization.k8s.io/v1", f"system:serviceaccount:{NAMESPACE}:vipgate-policyd"
        for role, resource, where in (
            (f"{path}/clusterroles/vipgate-policyd", "tokenreviews", {"verb": "create", "group": "authentication.k8s.io"}),
            (f"{path}/namespaces/{NAMESPACE}/roles/vipgate-policyd-leader", "pods", {"verb": "get", "namespace": NAMESPACE}),
        ):
            def is_allowed():
                review = {"spec": {"user": account, "groups": ["system:serviceaccounts"], "resourceAttributes": {"resource": resource, **where}}}
                return api.request("/apis/authorization.k8s.io/v1/subjectaccessreviews", "POST", review)[1]["status"]["allowed"]

            rules = api.request(role)[1]["rules"]
            fewer = [rule for rule in rules if rule["resources"] != [resource]]
            self.assertEqual(len(fewer), len(rules) - 1)
            api.request(role, "PATCH", {"rules": fewer}, "application/merge-patch+json")
            wait_for("the right is gone", lambda: not is_allowed())
            agent = self.start_agent("node-2")
            refused = rf"the token can't be verified: .*cannot {where['verb']} resource"
            agent.processes["node"].wait_until("refused", lambda: re.search(refused, agent.processes["node"].log()))
            self.assertEqual(agent.stop(), [0])
            api.request(role, "PATCH", {"rules": rules}, "application/merge-patch+json")
            wait_for("the right is back", is_allowed)

        agent = self.start_agent("node-2")
        agent.processes["node"].wait_until("ready", lambda: agent.is_ready("node"))
        status = agent.execute("node", "vipgate", "node", "status")
        self.assertRegex(status, r"(?m)^node +node-2, ")
        self.assertRegex(status, r"(?m)^policy +connected, membership view")
        self.assertRegex(status, r"(?m)^kernel +as programmed")
        # Its MAC address is derived from the secret, not that of all nodes.
        mac = re.search(r"link/ether (\S+)", run("ip", "link", "show", "vipgate0"))[1]
        self.assertNotEqual(mac, "0a:76:6e:6f:64:65")
        self.assertEqual(int(mac[:2], 16) & 3, 2)
        self.assertEqual(agent.stop(), [0])

        # With the token of a pod on another node it gets nothing.
        other = self.start_agent("node-3", name="node-2")
        other.processes["node"].wait_until("refused", lambda: "the token is that of the agent of node node-3, not of node-2" in other.processes["node"].log())
        self.assertFalse(other.is_ready("node"))

    def test_a_gateway_outside_of_the_policy_is_refused(self):
        """A kubelet that labels its node gets a gateway's pod there, and with its token nothing until there is a VipGateway."""
        helm("install", values="gateways: [{name: node-2, peerAddress: 192.0.2.12}]\n")
        run_job()
        policyd = self.start_server()
        self.apply_policy(policyd)
        with self.assertRaisesRegex(AssertionError, "the client presents no certificate"):
            policyd.execute("policyd", *STATUS[:STATUS.index("--cert")])
        gateway = self.start_gateway()
        process = gateway.processes["gateway"]
        process.wait_until("refused", lambda: "node-1 is no gateway of the policy" in process.log())
        self.assertFalse(gateway.is_ready("gateway"))
        template = api.get("daemonset", "vipgate-gateway", NAMESPACE)["spec"]["template"]
        helm("upgrade")
        self.assertEqual(api.get("daemonset", "vipgate-gateway", NAMESPACE)["spec"]["template"], template, "a new gateway restarts no others")
        process.wait_until("ready", lambda: gateway.is_ready("gateway"))

    def test_rights_in_two_namespaces_suffice(self):
        helm("install", values="policyd: {source: {namespaces: [tenant-a, tenant-b]}}\n")
        run_job()
        self.apply_policy(self.start_server())
        self.assertEqual(api.request("/api/v1/namespaces/default/services", token=self.token())[0], 403)
        self.assertEqual(api.request("/api/v1/namespaces/tenant-b/services", token=self.token())[0], 200)

    @staticmethod
    def token():
        return api.kubectl("create", "token", "vipgate-policyd", "-n", NAMESPACE).strip()


class WithoutHelm(Running):
    """conf/kubernetes/install.yaml, with the steps in its head."""

    test_what_is_installed_serves_policy_and_the_certificate_can_be_replaced = None
    test_the_certificate_of_helm_can_be_replaced = None
    test_a_gateway_outside_of_the_policy_is_refused = None
    test_the_agent_of_a_node_is_known_by_the_token_of_its_pod = None
    test_rights_in_two_namespaces_suffice = None

    def test_the_steps_in_the_file_are_enough(self):
        manifests = api.folder / "install.yaml"
        manifests.write_text(older((ROOT / "conf/kubernetes/install.yaml").read_text()))
        # 1.20 doesn't know CEL rules.
        api.kubectl("apply", "--validate=ignore", "-f", manifests)
        gateway = (ROOT / "conf/kubernetes/gateway.yaml").read_text()
        for name, address in NODES:
            manifests.write_text(gateway.replace("node-1", name).replace("192.0.2.11", address))
            api.kubectl("apply", "-f", manifests)
        run_job()
        policyd = self.start_server()
        self.apply_policy(policyd)
        gateway = self.start_gateway()
        gateway.processes["gateway"].wait_until("ready", lambda: gateway.is_ready("gateway"))
        self.wait_in_sync(policyd, gateway)


if __name__ == "__main__":
    cluster.main(["VIPGATE_KUBE_APISERVER", "VIPGATE_KUBECTL", "VIPGATE_HELM", "VIPGATE_BINARY"])
