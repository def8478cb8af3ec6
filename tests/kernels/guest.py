"""A guest in QEMU: a kernel of Debian, an initramfs with vipgate, and two virtio_net interfaces with two queues each.

QEMU emulates the processors (TCG): nested virtualization isn't needed. Commands run in the guest through a virtio_console port.
"""

import itertools
import os
import re
import shutil
import socket
import subprocess
from pathlib import Path

from isolation import Process, run
from network import INSIDE, OUTSIDE, QUEUES, ROUTER

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
SOCKET = "/run/gateway.sock"
# Without its path it would be busybox's, whatever PATH says.
IP = "/usr/bin/ip"


def network_script():
    """Shell commands that configure the guest's interfaces."""
    lines = []
    for device, addresses in (("eth0", INSIDE), ("eth1", OUTSIDE)):
        lines += [f"{IP} address add {address} dev {device} {'nodad' if ':' in address else ''}" for address in addresses]
    lines += [f"{IP} link set {device} up" for device in ("lo", "eth0", "eth1")]
    lines += [f"{IP} -{4 if '.' in address else 6} route add default via {address}" for address in ROUTER]
    lines += [f"echo 1 >/proc/sys/net/{setting}" for setting in ("ipv4/ip_forward", "ipv6/conf/all/forwarding")]
    return "\n".join([*lines, ""])


def configuration(zero_copy):
    """gateway.yaml with a mode of `xdp.zero_copy`."""
    return (
        "name: gw-test\n"
        "interfaces:\n  - {name: eth0, role: inside}\n  - {name: eth1, role: outside}\n"
        f"xdp: {{zero_copy: {zero_copy}}}\n"
        "policy: {files: [/etc/vipgate/policy]}\n"
        "workers: {cores: [0, 1]}\n"
        "sessions: {capacity: 65536, state: /dev/shm/vipgate}\n"
        f"admin: {{socket: {SOCKET}}}\n"
        "log: {format: json}\n"
    )


def add_program(root, program):
    """Copies a program and the libraries that it needs into the guest's root."""
    target = root / "usr/bin" / Path(program).name
    target.parent.mkdir(parents=True, exist_ok=True)
    run("strip", "-o", target, program)
    for library in re.findall(r"(/\S+) \(0x", run("ldd", program)):
        copy = root / library.lstrip("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, copy)


def initramfs(folder, kernel):
    """Packs the guest's root with a kernel's modules; the archive."""
    root = folder / "root"
    for directory in ("bin", "modules", "etc/vipgate/policy"):
        (root / directory).mkdir(parents=True)
    shutil.copy(shutil.which("busybox"), root / "bin/busybox")
    shutil.copy(HERE / "init", root / "init")
    shutil.copytree(kernel / "modules", root / "modules", dirs_exist_ok=True)
    for program in (os.environ["VIPGATE_BINARY"], shutil.which("ip")):
        add_program(root, program)
    (root / "etc/network.sh").write_text(network_script())
    shutil.copy(ROOT / "conf/demo/policy/tenant-a.yaml", root / "etc/vipgate/policy")
    for mode in ("auto", "always", "never"):
        (root / f"etc/vipgate/{mode}.yaml").write_text(configuration(mode))
    archive = folder / "initramfs"
    names = "".join(f"{path.relative_to(root)}\n" for path in sorted(root.rglob("*")))
    with archive.open("wb") as output:
        subprocess.run(["busybox", "cpio", "-o", "-H", "newc"], cwd=root, input=names.encode(), stdout=output, stderr=subprocess.PIPE, check=True)
    shutil.rmtree(root)
    return archive


class Guest:
    """A running guest. Its console and QEMU's output are in `logs`."""

    def __init__(self, kernel, network, folder, logs):
        self.console = logs / "console.log"
        self._numbers = itertools.count()
        control = folder / "control"
        command = ["qemu-system-x86_64", "-accel", "tcg,thread=multi", "-cpu", "max", "-smp", "2", "-m", "1024", "-nodefaults", "-no-reboot",
                   "-display", "none", "-kernel", kernel / "vmlinuz", "-initrd", initramfs(folder, kernel), "-append", "console=ttyS0 quiet panic=1",
                   "-serial", f"file:{self.console}", "-device", "virtio-serial-pci", "-device", "virtserialport,chardev=control",
                   "-chardev", f"socket,id=control,path={control},server=on,wait=off"]
        for number, queues in enumerate(network.descriptors):
            command += ["-netdev", f"tap,id=net{number},fds={':'.join(map(str, queues))},vhost=off"]
            # Zero copy needs one DMA device for both rings, which is what VIRTIO_F_ACCESS_PLATFORM (iommu_platform) says.
            command += ["-device", f"virtio-net-pci,netdev=net{number},mq=on,vectors={2 * QUEUES + 2},iommu_platform=on,disable-legacy=on,romfile="]
        self.process = Process(logs, "qemu", command, pass_fds=[descriptor for queues in network.descriptors for descriptor in queues])
        self._control = socket.socket(socket.AF_UNIX)
        try:
            self.process.wait_until("boots", lambda: "guest: ready" in self.text(), seconds=90)
            self._control.connect(str(control))
        except (AssertionError, OSError):
            self.stop()
            raise

    def text(self):
        return self.console.read_text(errors="replace") if self.console.exists() else ""

    def execute(self, command, seconds=30):
        """Runs a shell command; its exit code and its output, stderr included."""
        mark = f"--end {next(self._numbers)}"
        self._control.sendall(f"{{ {command}\n}} </dev/null 2>&1; echo \"{mark} $?\"\n".encode())
        self._control.settimeout(seconds)
        output = b""
        while not (end := re.search(rf"{mark} (\d+)\n".encode(), output)):
            try:
                received = self._control.recv(65536)
            except TimeoutError:
                raise AssertionError(f"not within {seconds} s in the guest: {command}\n{output.decode(errors='replace')}") from None
            if not received:
                raise AssertionError(f"the guest has ended\n{self.text()[-6000:]}")
            output += received
        return int(end[1]), output[:end.start()].decode(errors="replace")

    def run(self, command, seconds=30):
        """Runs a shell command that must succeed; its output."""
        code, output = self.execute(command, seconds)
        if code:
            raise AssertionError(f"in the guest: {command}: exit code {code}\n{output}")
        return output

    def stop(self):
        self._control.close()
        self.process.process.kill()
        self.process.process.wait()
