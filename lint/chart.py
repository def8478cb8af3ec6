#!/usr/bin/env python3
"""Checks the Helm chart in charts/vipgate, or writes its generated files.

    lint/chart.py copies [--write]           files of conf/ in the chart; needs Python alone
    lint/chart.py render HELM [--write]      manifests in conf/kubernetes, and the table of values in the README
    lint/chart.py check HELM [VIPGATE]       both, then lints and renders every file in charts/vipgate/ci, and validates each object by the
                                             schemas of Kubernetes and of conf/crds.yaml, and configuration files with `vipgate check`

HELM and VIPGATE are the programs' paths. All but `copies` need PyYAML, `check` also kubernetes-validate; `make chart` and `make chart-lint` provide them.
"""

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import chart_rules

ROOT = Path(__file__).resolve().parent.parent
CHART = ROOT / "charts/vipgate"
COPIES = {
    "conf/crds.yaml": "crds/crds.yaml",
    "conf/monitoring/alerts.yaml": "files/alerts.yaml",
    "conf/monitoring/dashboard.json": "files/dashboard.json",
}
INSTALL = ROOT / "conf/kubernetes/install.yaml"
GATEWAY = ROOT / "conf/kubernetes/gateway.yaml"
ADMISSION = ROOT / "conf/kubernetes/admission-policies.yaml"
# The oldest and the newest version that the chart is for.
KUBERNETES = ("1.25", "1.37")
# Kinds that its templates make for newer versions alone, and the first one.
SINCE = {"ValidatingAdmissionPolicy": "1.30", "ValidatingAdmissionPolicyBinding": "1.30"}
# Objects of other projects: without a schema here.
FOREIGN = {"cert-manager.io/v1", "monitoring.coreos.com/v1"}
# The chart's `tls.mode`.
TLS_MODES = {"job", "helm", "certManager", "secret", "none"}
# Values that the chart refuses, and what it says.
REFUSED = [
    (["policyd.enabled=false", "gateway.serverUrl=https://policy.example:18000"], "tls.mode job makes the certificate of a policy server"),
    (["monitoring.serviceMonitor.enabled=true"], "monitoring.serviceMonitor needs policyd.networkPolicy.metricsFrom"),
]

HEADER = """\
# vipgate in a cluster without Helm: CustomResourceDefinitions, policy server, gateways, agents of nodes, and the Job that makes the
# server's certificate. Made by `make chart` from charts/vipgate with its default values; change the chart instead. docs/kubernetes.md has the whole way.
#
# 1. Adapt in this file
#    - the image, wherever it is;
#    - in the ConfigMap vipgate-gateway, the interfaces: those toward pods (inside) and toward remote hosts (outside); `overlay.address`, where
#      the tunnels of nodes end, is the node's own address there, if it is on an inside interface;
#    - in the ConfigMap vipgate-node, `pod_cidrs`: the prefixes of all pods.
#
# 2. kubectl apply -f install.yaml
#
# 3. For each gateway: gateway.yaml beside it with the node's name and address, and the node's label. The policy server accepts no other gateways:
#
#      sed 's/node-1/NODE/g; s/192.0.2.11/ADDRESS/g' gateway.yaml | kubectl apply -f -
#      kubectl label node NODE vipgate.io/gateway=
#
# Another gateway: step 3. A gateway less: take the label away, and `kubectl delete` what step 3 has applied.
#
# To apply this file again with another image, delete the Job first, which can't be changed: its Secrets stay.
#
#      kubectl -n vipgate delete job --selector app.kubernetes.io/component=certificates
#
# After the DaemonSets are deleted, pods' packets are dropped until `vipgate detach` is run on the gateways' nodes, and `vipgate node detach` on all.
apiVersion: v1
kind: Namespace
metadata:
  name: vipgate
  labels:
    # Required for host network and capabilities.
    pod-security.kubernetes.io/enforce: privileged
"""


GATEWAY_HEADER = """\
# One gateway, beside install.yaml, whose head has the steps: replace node-1 and 192.0.2.11 by its node's name and address.
# Made by `make chart` from charts/vipgate; change the chart instead.
"""


ADMISSION_HEADER = """\
# ValidatingAdmissionPolicies for Kubernetes 1.30 or later, besides install.yaml: kubectl apply -f admission-policies.yaml
# Made by `make chart` from charts/vipgate; change the chart instead.
"""


def copies(write):
    """Files of conf/ that the chart contains: Helm reads none outside of it."""
    for source, copy in COPIES.items():
        content, target = (ROOT / source).read_bytes(), CHART / copy
        yield from generated(target, content, write, "make chart-crds")
    # What Helm renders needs Helm, but this part of it is plain.
    definitions, installed = (re.sub(r"[ \t]+$", "", path.read_text(), flags=re.M) for path in (ROOT / "conf/crds.yaml", INSTALL))
    if any(definition.strip() not in installed for definition in re.split(r"\n+---\n", definitions)):
        yield f"{INSTALL.relative_to(ROOT)} has other CustomResourceDefinitions than conf/crds.yaml: make chart"


def generated(path, content, write, command):
    if path.exists() and path.read_bytes() == content:
        return
    if write:
        path.write_bytes(content)
        print(f"wrote {path.relative_to(ROOT)}")
    else:
        yield f"{path.relative_to(ROOT)} is not current: {command}"


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True)
    return done.returncode, done.stdout, done.stderr


def template(helm, *arguments):
    code, stdout, stderr = run(helm, "template", "vipgate", str(CHART), "--namespace", "vipgate", "--include-crds", *arguments)
    if code:
        raise SystemExit(f"helm template {' '.join(arguments)}: {stderr}")
    return stdout


def install_yaml(helm):
    return f"{HEADER}{without_helm(template(helm))}\n"


def without_helm(rendered):
    # Helm doesn't manage these objects.
    rendered = re.sub(r"^ *(app.kubernetes.io/managed-by|helm.sh/chart): .*\n", "", rendered, flags=re.M)
    # Versions of Helm differ in white space.
    rendered = re.sub(r"[ \t]+$", "", rendered, flags=re.M)
    return re.sub(r"\n+---", "\n---", rendered).strip()


def admission_yaml(helm):
    rendered = template(helm, "--set", "admissionPolicies.enabled=true", "--show-only", "templates/admission-policies.yaml")
    return f"{ADMISSION_HEADER}{without_helm(rendered)}\n"


def gateway_yaml(helm):
    values = ["--set", "gateways[0].name=node-1,gateways[0].peerAddress=192.0.2.11"]
    return f"{GATEWAY_HEADER}{without_helm(template(helm, *values, '--show-only', 'templates/vipgateways.yaml'))}\n"


def values_table():
    """The table of values, from the comments `# -- ` of values.yaml."""
    import yaml

    text = (CHART / "values.yaml").read_text()
    values, path, comment, rows = yaml.safe_load(text), [], None, []
    for line in text.splitlines():
        if match := re.match(r" *# -- (.*)", line):
            comment = match[1]
        elif match := re.match(r" *# (.*)", line):
            comment = comment and f"{comment} {match[1]}"
        elif match := re.match(r"( *)([\w-]+):", line):
            path = [*path[: len(match[1]) // 2], match[2]]
            if comment:
                default = values
                for name in path:
                    default = default[name]
                rows.append((".".join(path), json.dumps(default), comment))
            comment = None
        else:
            comment = None
    documented = {key for key, _, _ in rows}
    missing = [key for key in leaves(values) if not any(key == it or key.startswith(f"{it}.") for it in documented)]
    if missing:
        raise SystemExit(f"values.yaml: no description: {', '.join(missing)}")
    lines = [f"| `{key}` | `{default}` | {comment} |" for key, default, comment in rows]
    return "\n".join(["| value | default | description |", "|---|---|---|", *lines])


def leaves(values, prefix=""):
    for key, value in values.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def readme():
    begin, end = "<!-- generated: values -->\n", "<!-- end of generated -->"
    before, rest = (CHART / "README.md").read_text().split(begin)
    return f"{before}{begin}\n{values_table()}\n\n{end}{rest.split(end)[1]}"


def render(helm, write):
    yield from generated(INSTALL, install_yaml(helm).encode(), write, "make chart")
    yield from generated(GATEWAY, gateway_yaml(helm).encode(), write, "make chart")
    yield from generated(ADMISSION, admission_yaml(helm).encode(), write, "make chart")
    yield from generated(CHART / "README.md", readme().encode(), write, "make chart")


def strict(schema):
    """A CRD's schema that rejects unknown fields, which an API server would drop."""
    if isinstance(schema, list):
        return [strict(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    schema = {key: strict(value) for key, value in schema.items()}
    is_object = isinstance(schema.get("properties"), dict) and schema.get("type") == "object"
    if is_object and schema["properties"].keys() != {"apiVersion", "kind", "metadata", "spec", "status"}:
        schema.setdefault("additionalProperties", False)
    return schema


def validator():
    """Returns a function that yields what is wrong with an object."""
    import jsonschema
    import kubernetes_validate
    import yaml

    own = {}
    for crd in yaml.safe_load_all((ROOT / "conf/crds.yaml").read_text()):
        for version in crd["spec"]["versions"]:
            name = (f"{crd['spec']['group']}/{version['name']}", crd["spec"]["names"]["kind"])
            own[name] = jsonschema.Draft7Validator(strict(version["schema"]["openAPIV3Schema"]))

    def validate(document):
        api, kind = document["apiVersion"], document["kind"]
        if (api, kind) in own:
            for error in own[api, kind].iter_errors(document):
                yield f"{'.'.join(map(str, error.path))}: {error.message}"
        elif api.startswith("vipgate.io/"):
            yield f"conf/crds.yaml has no {kind} of {api}"
        elif api not in FOREIGN and kind != "CustomResourceDefinition":
            for version in (SINCE.get(kind, KUBERNETES[0]), KUBERNETES[1]):
                try:
                    kubernetes_validate.validate(document, version, strict=True)
                except kubernetes_validate.ValidationError as error:
                    yield f"Kubernetes {version}: {'.'.join(map(str, error.path))}: {error.message}"

    return validate


def configuration(vipgate, key, text):
    """What `vipgate check` finds in a configuration file, except that certificates aren't here."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / key
        # As configure.sh does.
        file.write_text(text.replace("@NODE@", "node-1").replace("@ADDRESS@", "192.0.2.1").replace("@HOST@", "192.0.2.1"))
        code, stdout, stderr = run(vipgate, "check", str(file))
    lines = (stdout + stderr).replace(f"{folder}/", "").splitlines()
    found = [line for line in lines if line.endswith("]") and "[VG0701]" not in line]
    yield from found
    if code and not found and not any("[VG0701]" in line for line in lines):
        yield f"vipgate check: {stderr}"


def examine(name, text, validate, vipgate, mode=None):
    import yaml

    documents = [document for document in yaml.safe_load_all(text) if document]
    seen = set()
    for document in documents:
        metadata = document["metadata"]
        where = f"{name}: {document['kind']} {metadata['name']}"
        identity = (document["apiVersion"], document["kind"], metadata.get("namespace"), metadata["name"])
        if identity in seen:
            yield f"{where}: twice"
        seen.add(identity)
        yield from (f"{where}: {problem}" for problem in validate(document))
        for key, value in document.get("data", {}).items() if document["kind"] == "ConfigMap" else []:
            if key.endswith((".yaml", ".json")) and not isinstance(yaml.safe_load(value), dict):
                yield f"{where}: {key} is no object"
            if vipgate and key.endswith(".yaml"):
                yield from (f"{where}: {problem}" for problem in configuration(vipgate, key, value))
    yield from (f"{name}: {problem}" for problem in chart_rules.problems(documents, mode))


def schema_is_whole():
    """Each property of the schema is in values.yaml, with its default. Helm checks the other way round."""
    import yaml

    def missing(schema, values, path):
        for name, property in schema.get("properties", {}).items():
            if name not in values and path + name not in ("global",) and not path.startswith("tls.certManager.issuerRef."):
                yield f"values.yaml: {path}{name} of values.schema.json is missing"
            elif isinstance(values.get(name), dict):
                yield from missing(property, values[name], f"{path}{name}.")

    schema = json.loads((CHART / "values.schema.json").read_text())
    yield from missing(schema, yaml.safe_load((CHART / "values.yaml").read_text()), "")


def check(helm, vipgate):
    import yaml

    yield from copies(False)
    yield from render(helm, False)
    yield from schema_is_whole()
    validate = validator()
    yield from examine("install.yaml with gateway.yaml", f"{install_yaml(helm)}---\n{gateway_yaml(helm)}", validate, vipgate, "job")
    yield from examine("admission-policies.yaml", admission_yaml(helm), validate, vipgate)
    values, seen = yaml.safe_load((CHART / "values.yaml").read_text()), set()
    for path in [None, *sorted((CHART / "ci").glob("*.yaml"))]:
        name, arguments = (path.name, ["--values", str(path)]) if path else ("default values", [])
        code, stdout, stderr = run(helm, "lint", "--strict", str(CHART), "--namespace", "vipgate", *arguments)
        if code:
            yield f"{name}: helm lint: {stdout}{stderr}"
            continue
        own = yaml.safe_load(path.read_text()) if path else {}
        mode = own.get("tls", values["tls"]).get("mode", values["tls"]["mode"])
        if len(own.get("gateways", [])) > 1:
            seen.add(mode)
        yield from examine(name, template(helm, *arguments), validate, vipgate, mode)
    if seen != TLS_MODES:
        yield f"charts/vipgate/ci has two gateways with tls.mode {sorted(seen)} only"
    if "kind: NetworkPolicy" not in template(helm) or "listen: 127.0.0.1:9470" not in template(helm):
        yield "default values: no NetworkPolicy, or metrics of the policy server are open"
    for settings, message in REFUSED:
        code, _, stderr = run(helm, "template", "vipgate", str(CHART), *(word for it in settings for word in ("--set", it)))
        if not code or message not in stderr:
            yield f"{' '.join(settings)}: not refused with `{message}`: {stderr}"


def main():
    write = "--write" in sys.argv
    match [argument for argument in sys.argv[1:] if argument != "--write"]:
        case ["copies"]:
            problems = list(copies(write))
        case ["render", helm]:
            problems = list(render(helm, write))
        case ["check", helm, *vipgate] if not write and len(vipgate) < 2:
            problems = list(check(helm, *vipgate or [None]))
        case _:
            raise SystemExit(__doc__)
    print("\n".join(problems) or "charts/vipgate: no problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
