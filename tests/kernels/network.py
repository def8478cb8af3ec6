"""Hosts around a guest's gateway, as network namespaces, and what connects them:

    pod 10.1.0.11, .12 -- eth0 [guest] eth1 -- router -- server 198.51.100.10, and .20, whose path has an MTU of 1400

The guest's interfaces are the kernel's `tun` devices with two queues, in the namespaces of the pod and of the router.
"""

import contextlib
import ctypes
import fcntl
import os
import struct
from pathlib import Path

from isolation import run

POD = ("10.1.0.11", "fd00:1::11")
VIP = ("203.0.113.10", "2001:db8:113::10")
SERVER = ("198.51.100.10", "2001:db8:51::10")
NARROW = ("198.51.100.20", "2001:db8:51::20")
NARROW_MTU = 1400
# Of the guest's interfaces, inside and outside.
INSIDE = ("10.1.0.1/24", "fd00:1::1/64")
OUTSIDE = ("203.0.113.1/24", "2001:db8:113::1/64")
ROUTER = ("203.0.113.254", "2001:db8:113::fe")
FAMILIES = ("IPv4", "IPv6")
QUEUES = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _enter(descriptor):
    if _libc.setns(descriptor, os.CLONE_NEWNET if hasattr(os, "CLONE_NEWNET") else 0x40000000):
        raise OSError(ctypes.get_errno(), "setns")


class Host:
    """A network namespace."""

    def __init__(self, name, forwards=False):
        self.name = name
        run("ip", "netns", "add", name)
        self._handle = os.open(f"/run/netns/{name}", os.O_RDONLY)
        self.ip("link", "set", "lo", "up")
        for setting in ("net.ipv4.ip_forward", "net.ipv6.conf.all.forwarding") if forwards else ():
            self.run("sysctl", "-qw", f"{setting}=1")

    @contextlib.contextmanager
    def inside(self):
        """Moves this thread into the namespace: sockets and devices that it makes belong there."""
        before = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
        try:
            _enter(self._handle)
            yield
        finally:
            _enter(before)
            os.close(before)

    def ip(self, *arguments):
        return run("ip", "-n", self.name, *arguments)

    def run(self, *command):
        return run("ip", "netns", "exec", self.name, *command)

    def addresses(self, device, *addresses, deprecated=()):
        """Adds addresses to a device; deprecated ones are no source addresses by default."""
        for address in (*addresses, *deprecated):
            options = ["nodad"] if ":" in address else []
            options += ["preferred_lft", "0"] if address in deprecated else []
            self.ip("address", "add", address, "dev", device, *options)
        self.ip("link", "set", device, "up")

    def routes(self, destinations, gateways):
        for destination, gateway in zip(destinations, gateways, strict=True):
            self.ip("-6" if ":" in gateway else "-4", "route", "add", destination, "via", gateway)

    def guest_device(self, name):
        """Adds a device with two queues whose other side is a guest's interface; a file descriptor for each queue, for QEMU."""
        IFF_TAP, IFF_MULTI_QUEUE, IFF_NO_PI, IFF_VNET_HDR = 2, 0x100, 0x1000, 0x4000
        TUNSETIFF = 0x400454CA
        request = struct.pack("16sH22x", name.encode(), IFF_TAP | IFF_MULTI_QUEUE | IFF_NO_PI | IFF_VNET_HDR)
        descriptors = []
        with self.inside():
            for _ in range(QUEUES):
                descriptor = os.open("/dev/net/tun", os.O_RDWR)
                fcntl.ioctl(descriptor, TUNSETIFF, request)
                descriptors.append(descriptor)
        return descriptors

    def dropped(self, device):
        """Packets that a device has dropped, in either direction."""
        with self.inside():
            text = Path("/proc/thread-self/net/dev").read_text()
        return dropped(text, device)


def dropped(text, device):
    """Drops and errors of a device in the text of /proc/net/dev."""
    (line,) = [line for line in text.splitlines() if line.strip().startswith(f"{device}:")]
    fields = [int(field) for field in line.split(":")[1].split()]
    return sum(fields[at] for at in (2, 3, 4, 10, 11))


class Network:
    """The hosts of one guest."""

    def __init__(self, name):
        self.pod, self.router, self.server = Host(f"{name}-pod"), Host(f"{name}-router", forwards=True), Host(f"{name}-server")
        self.descriptors = (self.pod.guest_device("eth0"), self.router.guest_device("to-guest"))
        self.pod.addresses("eth0", "10.1.0.11/24", "fd00:1::11/64", deprecated=("10.1.0.12/24", "fd00:1::12/64"))
        self.pod.routes(("default", "default"), [address.split("/")[0] for address in INSIDE])
        self.router.addresses("to-guest", f"{ROUTER[0]}/24", f"{ROUTER[1]}/64")
        # For what the guest's kernel forwards without a gateway.
        self.router.routes(("10.1.0.0/24", "fd00:1::/64"), [address.split("/")[0] for address in OUTSIDE])
        self._server()

    def _server(self):
        run("ip", "link", "add", "to-server", "netns", self.router.name, "type", "veth", "peer", "name", "eth0", "netns", self.server.name)
        self.router.addresses("to-server", "198.51.100.254/24", "2001:db8:51::fe/64")
        self.server.addresses("eth0", f"{SERVER[0]}/24", f"{SERVER[1]}/64", deprecated=(f"{NARROW[0]}/24", f"{NARROW[1]}/64"))
        self.server.routes(("default", "default"), ("198.51.100.254", "2001:db8:51::fe"))
        for address in NARROW:
            self.router.ip("-6" if ":" in address else "-4", "route", "add", address, "dev", "to-server", "mtu", "lock", NARROW_MTU)

    def close(self):
        for descriptor in (descriptor for queues in self.descriptors for descriptor in queues):
            os.close(descriptor)
        for host in (self.pod, self.router, self.server):
            run("ip", "netns", "del", host.name)
