"""What is checked of a gateway in a guest. A check is a function of a `Bench`; its result has an error or None for each address family."""

import functools
import hashlib
import json
import re
import threading

import traffic
from guest import IP, SOCKET
from isolation import wait_for
from network import FAMILIES, INSIDE, NARROW, NARROW_MTU, POD, QUEUES, SERVER, VIP, dropped
from traffic import CONTENT, DIGEST, Client

DATAGRAMS = 1000
# The largest MTU of packets in one buffer, and one of packets in several.
PAGE_MTU, JUMBO_MTU = 3450, 9000
# In place of an error: the check is for other modes.
NOT_APPLICABLE = object()


class Bench:
    """A gateway in one mode in a guest, and the servers around it."""

    def __init__(self, guest, network, setting, log, *, has_zero_copy, has_multi_buffer):
        self.guest, self.network, self.setting, self.log = guest, network, setting, log
        self.has_zero_copy, self.has_multi_buffer = has_zero_copy, has_multi_buffer
        self._starts = 0
        self._http = [traffic.serve_http(network.server, address) for address in (*SERVER, *NARROW)]
        self._http += [traffic.serve_http(network.pod, address, 8080) for address in (*POD, "10.1.0.12", "fd00:1::12")]
        self.echo = [traffic.Echo(network.server, address) for address in SERVER]

    def close(self):
        self.guest.execute("kill -9 $(cat /run/gateway.pid); rm -rf /dev/shm/vipgate")
        self.guest.execute("vipgate detach --config /etc/vipgate/auto.yaml")
        set_mtu(self, 1500)
        self.log.write_text(self.guest.execute("cat /run/gateway-*.log; dmesg | tail -50")[1])
        self.guest.execute("rm -f /run/gateway-*.log")
        for server in self._http:
            server.shutdown()
            server.server_close()
        for echo in self.echo:
            echo.close()

    def start(self):
        self._starts += 1
        log = f"/run/gateway-{self._starts}.log"
        self.guest.run(f"vipgate gateway --config /etc/vipgate/{self.setting}.yaml >{log} 2>&1 & echo $! >/run/gateway.pid")

        def is_ready():
            assert self.guest.execute("kill -0 $(cat /run/gateway.pid)")[0] == 0, "the gateway has exited: " + self.guest.run(f"tail -c 3000 {log}")
            return self.guest.execute(f'grep -q \'"event":"ready"\' {log}')[0] == 0

        wait_for("the gateway is ready", is_ready, 30, lambda: self.guest.run(f"tail -c 3000 {log}"))

    def stop(self, signal):
        """Sends a signal; the exit code."""
        return self.guest.execute(f"kill -{signal} $(cat /run/gateway.pid); wait $(cat /run/gateway.pid)")[0]

    def query(self, command):
        return json.loads(self.guest.run(f"vipgate {command} --socket {SOCKET} -o json"))

    def figures(self, name):
        """Sums of a device statistic over all workers, by its label."""
        sums = {}
        for figure in self.query("status")["figures"]:
            if figure["name"] == name:
                (label,) = [value for key, value in figure["labels"].items() if key != "worker"]
                sums[label] = sums.get(label, 0) + int(figure["value"])
        return sums

    def drops(self):
        """The gateway's drops and ring losses, those that aren't 0."""
        counts = {**self.query("drops"), **self.figures("ring_losses")}
        return {reason: int(count) for reason, count in counts.items() if isinstance(count, int) and count}

    def counted_losses(self):
        """All losses that anything between the hosts has counted."""
        devices = self.guest.run("cat /proc/net/dev")
        guest = sum(dropped(devices, device) for device in ("eth0", "eth1"))
        pod, router = self.network.pod, self.network.router
        hosts = pod.dropped("eth0") + router.dropped("to-guest") + router.dropped("to-server")
        return guest + hosts + sum(self.drops().values())


def check_equal(what, found, expected):
    assert found == expected, f"{what}: {found}, expected {expected}"


def by_family(check):
    """A check that is called with the index of each family."""

    @functools.wraps(check)
    def both(bench):
        errors = []
        for at in range(len(FAMILIES)):
            try:
                check(bench, at)
                errors.append(None)
            except Exception as error:
                errors.append(error)
        return errors

    return both


def once(check):
    """A check of the gateway as a whole."""

    @functools.wraps(check)
    def both(bench):
        check(bench)
        return [None] * len(FAMILIES)

    return both


@once
def starts(bench):
    bench.start()


@once
def status(bench):
    """Workers, driver mode and zero copy are as expected, and nothing was lost before there was traffic."""
    report = bench.query("status")
    sockets = sorted((it["interface"], it["queue"], it["mode"], it["zero_copy"]) for it in report["sockets"])
    check_equal("sockets", sockets, [(device, queue, "native", bench.has_zero_copy) for device in ("eth0", "eth1") for queue in range(QUEUES)])
    check_equal("workers", len(report["workers"]), QUEUES)
    check_equal("losses", bench.drops(), {})


@by_family
def ping(bench, at):
    output = bench.network.pod.run("ping", "-c", "5", "-i", "0.2", "-W", "2", SERVER[at])
    assert "5 received" in output, output


def check_source(source, at):
    check_equal("source at the server", source[0], VIP[at])


@by_family
def download(bench, at):
    source, body = Client(bench.network.pod, SERVER[at]).exchange("GET", "/content")
    check_source(source, at)
    check_equal("digest", hashlib.sha256(body).hexdigest(), DIGEST)


@by_family
def upload(bench, at):
    source, body = Client(bench.network.pod, SERVER[at]).exchange("POST", body=CONTENT)
    check_source(source, at)
    check_equal("digest", body.decode(), DIGEST)


@by_family
def inbound(bench, at):
    source, body = Client(bench.network.server, VIP[at]).exchange("GET", "/content")
    check_equal("source at the pod", source[0], SERVER[at])
    check_equal("digest", hashlib.sha256(body).hexdigest(), DIGEST)


@by_family
def fragments(bench, at):
    """Datagrams and pings in three fragments, in both directions."""
    assert traffic.echoes(bench.network.pod, SERVER[at], CONTENT[:4000]), "no reply to a datagram of 4000 bytes"
    check_equal("sources at the server", bench.echo[at].sources, {VIP[at]})
    output = bench.network.pod.run("ping", "-c", "2", "-i", "0.2", "-W", "2", "-s", "4000", SERVER[at])
    assert "2 received" in output, output


@by_family
def path_mtu(bench, at):
    """The pod learns the path MTU from the router's ICMP errors, which are about packets of the VIP."""
    client = Client(bench.network.pod, NARROW[at])
    source, body = client.exchange("POST", body=CONTENT)
    check_source(source, at)
    check_equal("digest", body.decode(), DIGEST)
    check_equal("the pod's path MTU", client.path_mtu(), NARROW_MTU)


@by_family
def counted(bench, at):
    """No datagram is lost that no counter has."""
    before = bench.counted_losses()
    replies = traffic.burst(bench.network.pod, SERVER[at], DATAGRAMS)
    losses = bench.counted_losses() - before
    assert DATAGRAMS - replies <= losses, f"{DATAGRAMS - replies} of {DATAGRAMS} datagrams are missing, {losses} are counted"


def check_losses(bench):
    """Frames are conserved, and nothing was dropped."""

    def conserved():
        frames = bench.figures("frames")
        return frames["pool"] + frames["device"] + frames["held"] == frames["total"]

    wait_for("vipgate_frames has all frames", conserved, 5, lambda: str(bench.figures("frames")))
    check_equal("drops", bench.drops(), {})


@once
def counters(bench):
    """Nothing was lost, and each worker has received packets of its queues."""
    check_losses(bench)
    received = [int(worker["received"]) for worker in bench.query("status")["workers"]]
    assert all(received), f"packets by worker: {received}"


class Interrupted(threading.Thread):
    """A download that goes on only when it may, so that it is under way when the gateway is killed."""

    def __init__(self, bench, at):
        super().__init__(daemon=True)
        self.is_under_way, self.may_go_on, self.error = threading.Event(), threading.Event(), None
        self._client = Client(bench.network.pod, SERVER[at], receive_buffer=1 << 16)
        self.start()

    def run(self):
        def progress(length):
            if length > len(CONTENT) // 4:
                self.is_under_way.set()
                self.may_go_on.wait()

        try:
            self._client.request("GET", "/content")
            _, body = self._client.finish(progress)
            check_equal("digest of the download", hashlib.sha256(body).hexdigest(), DIGEST)
        except Exception as error:
            self.error = error

    def check(self):
        self.join(60)
        assert not self.is_alive(), "the download has stopped"
        if self.error:
            raise self.error


def restarts(bench):
    """Connections survive `kill -9` and a restart, and nothing passes in between."""
    clients = [Client(bench.network.pod, address) for address in SERVER]
    sources = [client.exchange("GET")[0] for client in clients]
    downloads = [Interrupted(bench, at) for at in range(len(FAMILIES))]
    for download in downloads:
        assert download.is_under_way.wait(20), "the download doesn't begin"
    check_equal("exit code", bench.stop("KILL"), 128 + 9)
    for download in downloads:
        download.may_go_on.set()
    passed = [traffic.echoes(bench.network.pod, address, b"closed?", attempts=1) for address in SERVER]
    bench.start()

    @by_family
    def survives(bench, at):
        assert not passed[at], "a datagram has passed without a gateway"
        downloads[at].check()
        check_equal("source and port of a connection", clients[at].exchange("GET")[0], sources[at])
        check_equal("sources at the server", bench.echo[at].sources, {VIP[at]})

    return survives(bench)


def stop(bench):
    """A stopped gateway is closed, and after `vipgate detach` the kernel forwards again."""
    check_losses(bench)
    check_equal("exit code", bench.stop("TERM"), 0)
    passed = [traffic.echoes(bench.network.pod, address, b"closed?", attempts=1) for address in SERVER]
    assert "vipgate_steer" in bench.guest.run(f"{IP} -d link show eth0"), "the program isn't there"
    bench.guest.run(f"vipgate detach --config /etc/vipgate/{bench.setting}.yaml")
    for device in ("eth0", "eth1"):
        shown = bench.guest.run(f"{IP} -d link show {device}")
        assert not re.search(r"xdp|vipgate", shown), f"a program is left: {shown}"

    @by_family
    def opens(bench, at):
        assert not passed[at], "a datagram has passed a stopped gateway"
        inside = INSIDE[at].split("/")[0]
        bench.network.pod.run("ping", "-c", "1", "-W", "2", inside)
        assert traffic.echoes(bench.network.pod, SERVER[at], b"open?"), "the kernel doesn't forward"
        check_equal("sources at the server", bench.echo[at].sources, {VIP[at], POD[at]})

    return opens(bench)


def refused(bench):
    """Where zero copy isn't granted, `zero_copy: always` makes startup fail with the reason."""
    if bench.has_zero_copy or bench.setting == "never":
        return [NOT_APPLICABLE] * len(FAMILIES)
    code, output = bench.guest.execute("timeout 20 vipgate gateway --config /etc/vipgate/always.yaml")
    check_equal("exit code", code, 1)
    assert "zero copy" in output, output
    return [None] * len(FAMILIES)


def set_mtu(bench, mtu):
    """Sets the MTU of all links."""
    for device in ("eth0", "eth1"):
        bench.guest.run(f"{IP} link set dev {device} mtu {mtu}")
    network = bench.network
    for host, device in ((network.pod, "eth0"), (network.router, "to-guest"), (network.router, "to-server"), (network.server, "eth0")):
        host.ip("link", "set", "dev", device, "mtu", str(mtu))


def long_packets(bench, mtu, has_zero_copy):
    """Packets of an MTU pass a gateway that is started for it, in native mode, with and without fragments."""
    set_mtu(bench, mtu)
    bench.start()
    report = bench.query("status")
    modes = {(it["mode"], it["zero_copy"]) for it in report["sockets"]}
    check_equal("modes", modes, {("native", has_zero_copy)})

    @by_family
    def pass_through(bench, at):
        headers = 48 if ":" in SERVER[at] else 28
        for length, fragment in ((mtu, "do"), (20000, "dont")):
            output = bench.network.pod.run("ping", "-c", "2", "-i", "0.2", "-W", "2", "-M", fragment, "-s", str(length - headers), SERVER[at])
            assert "2 received" in output, output
        source, body = Client(bench.network.pod, SERVER[at]).exchange("POST", body=CONTENT)
        check_source(source, at)
        check_equal("digest", body.decode(), DIGEST)

    try:
        errors = pass_through(bench)
        check_losses(bench)
    finally:
        code = bench.stop("TERM")
    check_equal("exit code", code, 0)
    return errors


def of_page(bench):
    return long_packets(bench, PAGE_MTU, bench.has_zero_copy)


def jumbo(bench):
    """Multi-buffer: not with zero copy, and before Linux 6.6 startup fails with the reason."""
    if bench.has_multi_buffer:
        return long_packets(bench, JUMBO_MTU, False)
    set_mtu(bench, JUMBO_MTU)
    code, output = bench.guest.execute(f"timeout 20 vipgate gateway --config /etc/vipgate/{bench.setting}.yaml")
    check_equal("exit code", code, 1)
    assert "Linux 6.6" in output, output
    return [None] * len(FAMILIES)


# In this order, with their names in the table.
ALL = [
    ("refused", refused),
    ("start", starts),
    ("status", status),
    ("ping", ping),
    ("download", download),
    ("upload", upload),
    ("inbound", inbound),
    ("fragments", fragments),
    ("path MTU", path_mtu),
    ("counted", counted),
    ("frames", counters),
    ("kill -9", restarts),
    ("stop", stop),
    (f"MTU {PAGE_MTU}", of_page),
    (f"MTU {JUMBO_MTU}", jumbo),
]
