"""Pods of workloads in the API, as far as a policy server and a gateway need them: what kubelet and a container runtime would do.

Volumes, environment, service account token, user, capabilities and arguments are those of the objects in the API.
"""

import base64
import os
import re
import shutil
import tempfile
import urllib.request
from pathlib import Path

from cluster import PORT, Process, run

ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"


class Pod:
    """A pod of a workload in the API, as kubelet and a container runtime would run it, in an overlay over this machine's files.

    `hosts` are names that a cluster's DNS would have, all of them on the loopback. The image is this machine's root and VIPGATE_BINARY.
    """

    def __init__(self, cluster, workload, namespace, node, address, hosts=()):
        self.cluster, self.namespace = cluster, namespace
        self.node, self.address, self.hosts = node, address, hosts
        self.name = workload["metadata"]["name"]
        # A CronJob's pod is that of its Job.
        self.spec = workload["spec"].get("jobTemplate", workload)["spec"]["template"]["spec"]
        self.folder = Path(tempfile.mkdtemp(prefix=f"{self.name}-", dir=cluster.folder))
        self.volumes = {volume["name"]: self._volume(volume) for volume in self.spec.get("volumes", [])}
        if self.spec.get("automountServiceAccountToken"):
            self.volumes["account"] = self._account()
        self.processes = {}

    def _volume(self, volume):
        if not {"configMap", "secret", "emptyDir", "hostPath", "projected"} & volume.keys():
            raise AssertionError(f"a volume of another kind: {volume}")
        # What a node always has; other directories are this pod's own.
        host = volume.get("hostPath", {})
        if host.get("type") in ("CharDevice", "Directory"):
            return Path(host["path"])
        path = self.folder / "volumes" / volume["name"]
        path.mkdir(parents=True)
        self._fill(volume, path)
        for source in volume.get("projected", {}).get("sources", []):
            self._token(source["serviceAccountToken"], path)
        return path

    def _token(self, source, path):
        """A token that is bound to this pod, which is in the API from then on, as the DaemonSet's controller makes it."""
        account = self.spec["serviceAccountName"]
        name = f"{self.name}-{self.node}"
        container = {"name": "main", "image": "none"}
        self.cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name, "namespace": self.namespace},
                            "spec": {"nodeName": self.node, "serviceAccountName": account, "containers": [container]}})
        uid = self.cluster.get("pod", name, self.namespace)["metadata"]["uid"]
        token = self.cluster.kubectl("create", "token", account, "-n", self.namespace, "--audience", source["audience"], "--duration",
                                     f"{source['expirationSeconds']}s", "--bound-object-kind", "Pod", "--bound-object-name", name, "--bound-object-uid", uid)
        (path / source["path"]).write_text(token.strip())

    def _fill(self, volume, path):
        """Writes the files of a ConfigMap or Secret, as kubelet does: all at once, by a link that is replaced."""
        group = self.spec.get("securityContext", {}).get("fsGroup")
        for kind, name, decode in (("configMap", "name", str.encode), ("secret", "secretName", base64.b64decode)):
            if not (source := volume.get(kind)):
                continue
            data = self.cluster.get(kind.lower(), source[name], self.namespace)["data"]
            if items := source.get("items"):
                data = {item["path"]: data[item["key"]] for item in items}
            directory = Path(tempfile.mkdtemp(prefix="..", dir=path))
            directory.chmod(0o755)
            for key, value in data.items():
                file = directory / key
                file.write_bytes(decode(value))
                file.chmod(source.get("defaultMode", 0o644))
                if group:
                    os.chown(file, 0, group)
                if not (path / key).is_symlink():
                    (path / key).symlink_to(f"..data/{key}")
            (path / "..new").symlink_to(directory.name)
            (path / "..new").rename(path / "..data")

    def update_volumes(self):
        """What kubelet does within a minute or two of a change."""
        for volume in self.spec["volumes"]:
            self._fill(volume, self.volumes[volume["name"]])

    def _account(self):
        path = self.folder / "volumes/account"
        path.mkdir(parents=True)
        account = self.spec["serviceAccountName"]
        (path / "token").write_text(self.cluster.kubectl("create", "token", account, "-n", self.namespace).strip())
        (path / "namespace").write_text(self.namespace)
        shutil.copy(self.cluster.folder / "ca.crt", path / "ca.crt")
        return path

    def _command(self, container, command):
        """The command in the container's mount namespace, with its user and capabilities."""
        root = self.folder / "roots" / container["name"]
        upper, work, merged = root / "upper", root / "work", root / "root"
        for directory in (upper / "usr/bin", upper / "etc", work, merged):
            directory.mkdir(parents=True, exist_ok=True)
        # One file for all pods: a debug build is large, and the overlays are in memory.
        binary = self.cluster.folder / "vipgate"
        if not binary.exists():
            run("strip", "-o", binary, os.environ["VIPGATE_BINARY"])
        if not (program := upper / "usr/bin/vipgate").exists():
            program.hardlink_to(binary)
        lines = "".join(f"127.0.0.1 {name}\n" for name in ("localhost", *self.hosts))
        (upper / "etc/hosts").write_text(lines)
        mounts = [(self.volumes[it["name"]], it["mountPath"], it.get("readOnly", False)) for it in container.get("volumeMounts", [])]
        if "account" in self.volumes:
            mounts.append((self.volumes["account"], ACCOUNT, True))
        script = ["set -e", f"mount -t overlay overlay -o lowerdir=/,upperdir={upper},workdir={work} {merged}"]
        script += [f"mount --rbind /{name} {merged}/{name}" for name in ("proc", "sys", "dev")]
        script += [f"mount -t tmpfs none {merged}/{name}" for name in ("run", "dev/shm")]
        for source, target, is_read_only in mounts:
            target = str(merged) + os.path.realpath(target) if target.startswith("/var/run") else f"{merged}{target}"
            if source.is_char_device():
                # There with /dev.
                continue
            script += [f"mkdir -p {target}", f"mount --bind {source} {target}"]
            script += [f"mount -o remount,bind,ro {target}"] if is_read_only else []
        if self._context(container).get("readOnlyRootFilesystem"):
            script.append(f"mount -o remount,bind,ro {merged}")
        # The same process throughout, so that its namespaces are found by its id.
        script.append(f'exec chroot {merged} "$@"')
        return ["unshare", "--mount", "sh", "-c", "\n".join(script), "sh", *self._privileges(container), *command]

    def _context(self, container):
        return {**self.spec.get("securityContext", {}), **container["securityContext"]}

    def _privileges(self, container):
        """The prefix of a command for a container's user and capabilities."""
        context = self._context(container)
        added = [f"+{name.lower()}" for name in context["capabilities"].get("add", [])]
        prefix = ["setpriv", "--bounding-set", ",".join(["-all", *added])]
        if context.get("allowPrivilegeEscalation") is False:
            prefix.append("--no-new-privs")
        if context.get("runAsUser"):
            ids = {"--reuid": "runAsUser", "--regid": "runAsGroup", "--groups": "fsGroup"}
            prefix += [word for option, name in ids.items() for word in (option, str(context[name]))]
        return prefix

    def _environment(self, container):
        values = {"spec.nodeName": self.node, "status.hostIP": self.address}
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "KUBERNETES_SERVICE_HOST": "127.0.0.1", "KUBERNETES_SERVICE_PORT": str(PORT)}
        for variable in container.get("env", []):
            source = variable["valueFrom"]
            if reference := source.get("configMapKeyRef"):
                value = self.cluster.get("configmap", reference["name"], self.namespace)["data"][reference["key"]]
            else:
                value = values[source["fieldRef"]["fieldPath"]]
            environment[variable["name"]] = value
        return environment

    def _process(self, name):
        """The command and the environment of a container's process."""
        container = self.container(name)
        environment = self._environment(container)
        words = container.get("command", ["vipgate"]) + container.get("args", [])
        # $(NAME) is a variable's value, if there is one.
        words = [re.sub(r"\$\((\w+)\)", lambda it: environment.get(it[1], it[0]), word) for word in words]
        return self._command(container, words), environment

    def run(self, name):
        """Runs an init container, or one of a Job, to its end; its stdout."""
        command, environment = self._process(name)
        return run(*command, env=environment)

    def start(self, name):
        """Starts a container."""
        command, environment = self._process(name)
        self.processes[name] = Process(self.folder, name, command, env=environment)
        return self.processes[name]

    def execute(self, name, *command):
        """Runs a command in a container that runs, as `kubectl exec` does; its stdout."""
        container = self.container(name)
        target = ["nsenter", "--target", self.processes[name].process.pid, "--mount", "--root", "--wd"]
        return run(*target, *self._privileges(container), *command, env=self._environment(container))

    def container(self, name):
        (found,) = [it for it in [*self.spec["containers"], *self.spec.get("initContainers", [])] if it["name"] == name]
        return found

    def is_ready(self, name):
        """What kubelet's readiness probe of a container finds."""
        container = self.container(name)
        if execute := container["readinessProbe"].get("exec"):
            try:
                self.execute(name, *execute["command"])
            except AssertionError:
                return False
            return True
        probe = container["readinessProbe"]["httpGet"]
        port = {it["name"]: it["containerPort"] for it in container.get("ports", [])}.get(probe["port"], probe["port"])
        try:
            with urllib.request.urlopen(f"http://{probe.get('host', '127.0.0.1')}:{port}{probe['path']}", timeout=2) as response:
                return response.status == 200
        except OSError:
            return False

    def stop(self):
        """SIGTERM to each container; their exit codes."""
        codes = [process.stop() for process in self.processes.values()]
        self.processes = {}
        return codes
