"""Rules for what the Helm chart renders, beyond schemas: references, rights, who can read which key, who reaches the policy server.

Each function takes the objects of one rendering, and yields what is wrong.
"""

# Rights that policyd may have.
READING = {"get", "list", "watch"}
KINDS = ("egresspolicies", "clusteregresspolicies", "vipgateways", "addresspools", "overlaynodes")
WRITING = {
    "services/status": {"patch"},
    "tokenreviews": {"create"},
    "events": {"create", "patch"},
    "leases": {"get", "create", "update"},
    "configmaps": {"get", "create", "update"},
    **{f"{kind}/status": {"patch"} for kind in KINDS},
}
# Arguments of `vipgate certificates` with the names of Secrets.
SECRET_FLAGS = ("--server", "--clients", "--tunnels")


def problems(documents, mode):
    """Of all rules; those for keys apply to a whole release, whose `tls.mode` is known."""
    yield from references(documents)
    yield from rights(documents)
    yield from bindings(documents)
    yield from network(documents)
    if mode:
        yield from keys(documents, mode)


def pod_templates(documents):
    """Each workload with its pod's spec."""
    for workload in documents:
        if workload["kind"] in ("DaemonSet", "Deployment", "Job"):
            yield workload, workload["spec"]["template"]["spec"]
        elif workload["kind"] == "CronJob":
            yield workload, workload["spec"]["jobTemplate"]["spec"]["template"]["spec"]


def made_secrets(documents):
    """Names of the Secrets that Jobs make, with the Job's kind."""
    for workload, spec in pod_templates(documents):
        for container in spec["containers"]:
            for flag, _, value in (it.partition("=") for it in container.get("args", [])):
                if flag in SECRET_FLAGS:
                    yield workload["kind"], value


def mounted_secrets(spec):
    """Each Secret that a pod can read, with the keys; none are all."""
    for volume in spec.get("volumes", []):
        sources = [volume["secret"]] if "secret" in volume else []
        sources += [it["secret"] for it in volume.get("projected", {}).get("sources", []) if "secret" in it]
        yield from ((it.get("secretName", it.get("name")), {item["key"] for item in it.get("items", [])}) for it in sources)
        if volume.keys() & {"csi", "flexVolume"}:
            yield (f"volume {volume['name']}", set())
    for container in spec["containers"] + spec.get("initContainers", []):
        variables = [it["valueFrom"]["secretKeyRef"] for it in container.get("env", []) if "secretKeyRef" in it.get("valueFrom", {})]
        yield from ((it["name"], {it["key"]}) for it in variables)
        yield from ((it["secretRef"]["name"], set()) for it in container.get("envFrom", []) if "secretRef" in it)


def policyd_configs(documents):
    """Configurations of the policy server."""
    import yaml

    return [yaml.safe_load(it["data"]["policyd.yaml"]) for it in documents if it["kind"] == "ConfigMap" and "policyd.yaml" in it["data"]]


def keys(documents, mode):
    """A node, and so who has taken it over, can read the Secrets of its pods: gateways and agents have no key, but the CA bundle, and a token for the
    policy server, which accepts those of their service accounts."""
    accepted = set()
    for config in policyd_configs(documents):
        tokens = [config.get("gateway_tokens"), config.get("node_agents", {}).get("tokens")]
        accepted |= {it["service_account"] for it in tokens if it}
    shown, readers = set(), {}
    for workload, spec in pod_templates(documents):
        name = f"{workload['kind']} {workload['metadata']['name']}"
        secrets = list(mounted_secrets(spec))
        for secret, items in secrets:
            if items != {"ca.crt"} and readers.setdefault(secret, name) != name:
                yield f"{name} and {readers[secret]} can read Secret {secret}"
        if workload["kind"] != "DaemonSet":
            continue
        if [items for _, items in secrets] != ([{"ca.crt"}] if mode != "none" else []):
            yield f"{name}: its pods on all nodes can read {secrets}"
        sources = [source for volume in spec["volumes"] for source in volume.get("projected", {}).get("sources", [])]
        tokens = [source["serviceAccountToken"] for source in sources if "serviceAccountToken" in source]
        if [it["audience"] for it in tokens] != (["vipgate"] if mode != "none" else []):
            yield f"{name}: tokens {tokens}"
        if tokens:
            shown.add(spec["serviceAccountName"])
    if any(it["kind"] == "Deployment" for it in documents) and shown != accepted:
        yield f"pods of {sorted(shown)} show tokens, the policy server accepts those of {sorted(accepted)}"


def network(documents):
    """Metrics of the policy server are for those that a NetworkPolicy names; without one, and by default, nobody connects to them."""
    for policyd in documents:
        if policyd["kind"] != "Deployment":
            continue
        (config,) = policyd_configs(documents)
        address = config["metrics"]["listen"].rpartition(":")[0]
        (container,) = policyd["spec"]["template"]["spec"]["containers"]
        ports = {it["containerPort"] for it in container["ports"]}
        is_open = not address.startswith("127.")
        if (9470 in ports) != is_open or any(("exec" in container[f"{probe}Probe"]) == is_open for probe in ("readiness", "liveness")):
            yield f"Deployment: metrics at {address}, which ports {ports} or the probes don't match"
        for policy in (it for it in documents if it["kind"] == "NetworkPolicy"):
            labels = policyd["spec"]["template"]["metadata"]["labels"].items()
            if not policy["spec"]["podSelector"]["matchLabels"].items() <= labels or policy["spec"]["policyTypes"] != ["Ingress"]:
                yield f"NetworkPolicy {policy['metadata']['name']} isn't that of the policy server's ingress"
            for rule in policy["spec"]["ingress"]:
                if [it["port"] for it in rule["ports"]] != [18000] and not rule.get("from"):
                    yield f"NetworkPolicy: everybody reaches {rule['ports']}"


def references(documents):
    """What objects of the chart refer to, and isn't there."""
    there = {(it["kind"], it["metadata"]["name"]) for it in documents}
    made = set(made_secrets(documents))
    there |= {("Secret", name) for _, name in made}
    has_secrets = any(kind == "Secret" for kind, _ in there)
    for workload, spec in pod_templates(documents):
        wanted = [("ServiceAccount", spec["serviceAccountName"])]
        volumes = spec.get("volumes", [])
        wanted += [("ConfigMap", it["configMap"]["name"]) for it in volumes if "configMap" in it]
        wanted += [("Secret", it["secret"]["secretName"]) for it in volumes if "secret" in it and has_secrets]
        containers = spec["containers"] + spec.get("initContainers", [])
        sources = [it.get("valueFrom", {}).get("configMapKeyRef") for container in containers for it in container.get("env", [])]
        wanted += [("ConfigMap", it["name"]) for it in sources if it]
        yield from (f"{workload['kind']}: no {kind} {name}" for kind, name in wanted if (kind, name) not in there)
        names = {it["name"] for it in volumes}
        for container in containers:
            mounts = {it["name"] for it in container.get("volumeMounts", [])}
            yield from (f"{workload['kind']}: no volume {name}" for name in sorted(mounts - names))
    if {name for kind, name in made if kind == "Job"} != {name for kind, name in made if kind == "CronJob"}:
        yield "Job and CronJob make other Secrets"


def rights(documents):
    made = {name for _, name in made_secrets(documents)}
    for role in documents:
        for rule in role.get("rules", []) if role["kind"] in ("Role", "ClusterRole") else []:
            if role["metadata"]["labels"]["app.kubernetes.io/component"] == "certificates":
                if not may_make_certificates(rule, role, made):
                    yield f"{role['kind']}: more than making certificates needs: {rule}"
                continue
            if "secrets" in rule["resources"]:
                yield f"{role['kind']} {role['metadata']['name']}: Secrets"
            allowed = [WRITING.get(resource, READING) for resource in rule["resources"]]
            if not all(set(rule["verbs"]) <= verbs for verbs in allowed) or "*" in rule["resources"] + rule["apiGroups"]:
                yield f"{role['kind']}: more than the policy server may do: {rule}"


def bindings(documents):
    """The rights of a component are its own account's alone, and none are a gateway's or an agent's."""
    accounts = {it["metadata"]["name"]: it["metadata"]["labels"]["app.kubernetes.io/component"] for it in documents if it["kind"] == "ServiceAccount"}
    for binding in documents:
        if binding["kind"] in ("RoleBinding", "ClusterRoleBinding"):
            component = binding["metadata"]["labels"]["app.kubernetes.io/component"]
            for subject in binding["subjects"]:
                if subject["kind"] != "ServiceAccount" or accounts.get(subject["name"], component) != component or component not in ("policyd", "certificates"):
                    yield f"{binding['kind']} {binding['metadata']['name']}: rights of {component} for {subject}"


def may_make_certificates(rule, role, made):
    """Whether a rule allows no more than to create Secrets, to read and update those that are made, and to read their owner."""
    names, verbs = set(rule.get("resourceNames", [])), set(rule["verbs"])
    match role["kind"], rule["apiGroups"], rule["resources"]:
        case "Role", [""], ["secrets"]:
            return verbs == {"create"} or (names and names <= made and verbs <= {"get", "update"})
        case "Role", [""], ["serviceaccounts"]:
            return names == {role["metadata"]["name"]} and verbs == {"get"}
    return False
