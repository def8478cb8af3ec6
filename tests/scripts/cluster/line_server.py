"""Line server: echoes lines and datagrams, and records which client sent what from where.

Usage: line_server.py PORT RECORD. Every payload of a client begins with its identity, eight digits, so that
misdelivered replies and clients that share an address and port are detected. TCP and UDP on PORT; on PORT + 1, a
request `N` returns N bytes. SIGTERM writes RECORD, as JSON:
  {"tcp": [[peer, port, local, identity, opened, closed, lines, faults]..],  # times since the epoch; 0: not closed
   "udp": [[peer, port, local, identity, first, last, datagrams]..]}
"""
import json
import resource
import selectors
import signal
import socket
import struct
import sys
import time

port, record = int(sys.argv[1]), sys.argv[2]
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
THIN_LINEAR_TIMEOUTS, PKTINFO_4, PKTINFO_6 = 16, 8, 50
BLOCK = bytes(range(251)) * 261
selector = selectors.DefaultSelector()
connections, datagrams, ended = [], {}, []


def unmapped(address):
    return address.removeprefix("::ffff:")


class Lines:
    """A connection whose lines are echoed."""

    def __init__(self, stream, peer):
        stream.setblocking(False)
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream.setsockopt(socket.IPPROTO_TCP, THIN_LINEAR_TIMEOUTS, 1)
        self.stream, self.rest, self.unsent, self.next = stream, b"", b"", 0
        local = unmapped(stream.getsockname()[0])
        self.row = [unmapped(peer[0]), peer[1], local, "", time.time(), 0, 0, 0]
        connections.append(self.row)

    def ready(self, mask):
        if mask & selectors.EVENT_READ:
            try:
                data = self.stream.recv(65536)
            except BlockingIOError:
                return
            except OSError:
                data = b""
            if not data:
                self.row[5] = time.time()
                selector.unregister(self.stream)
                self.stream.close()
                return
            self.receive(data)
            self.unsent += data
        while self.unsent:
            try:
                self.unsent = self.unsent[self.stream.send(self.unsent) :]
            except BlockingIOError:
                break
            except OSError:
                self.unsent = b""
        selector.modify(self.stream, selectors.EVENT_READ | (selectors.EVENT_WRITE if self.unsent else 0), self)

    def receive(self, data):
        *lines, self.rest = (self.rest + data).split(b"\n")
        row = self.row
        for line in lines:
            identity, number = line[:8].decode("ascii", "replace"), line[9:15]
            if not row[3]:
                row[3], self.next = identity, int(number)
            if identity != row[3] or not number.isdigit() or int(number) != self.next:
                row[7] += 1
            self.next += 1
            row[6] += 1


class Blocks:
    """A connection that sends the requested number of bytes."""

    def __init__(self, stream, _peer):
        stream.setblocking(False)
        self.stream, self.sent, self.size = stream, 0, None

    def ready(self, mask):
        try:
            if mask & selectors.EVENT_READ:
                data = self.stream.recv(64)
                if not data:
                    raise ConnectionError
                self.size = int(data)
                selector.modify(self.stream, selectors.EVENT_WRITE, self)
            while self.size is not None and self.sent < self.size:
                at = self.sent % len(BLOCK)
                self.sent += self.stream.send(BLOCK[at : at + self.size - self.sent])
        except BlockingIOError:
            return
        except OSError:
            self.size, self.sent = 0, 0
        if self.sent == self.size:
            selector.unregister(self.stream)
            self.stream.close()


class Listener:
    """Accepts connections."""

    def __init__(self, at, kind):
        self.kind = kind
        self.stream = socket.create_server(("::", at), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
        self.stream.setblocking(False)

    def ready(self, _mask):
        for _ in range(64):
            try:
                stream, peer = self.stream.accept()
            except BlockingIOError:
                return
            selector.register(stream, selectors.EVENT_READ, self.kind(stream, peer))


class Datagrams:
    """A UDP socket that replies to each datagram from the address that it was sent to."""

    def __init__(self, family):
        self.stream = socket.socket(family, socket.SOCK_DGRAM)
        if family == socket.AF_INET6:
            self.stream.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            self.stream.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_RECVPKTINFO, 1)
        else:
            self.stream.setsockopt(socket.IPPROTO_IP, PKTINFO_4, 1)
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
        self.stream.setblocking(False)
        self.family = family
        self.stream.bind(("", port))

    def ready(self, _mask):
        for _ in range(64):
            try:
                data, (info, *_), _, peer = self.stream.recvmsg(65536, 128)
            except (BlockingIOError, ConnectionError):
                return
            info = info[2]
            if self.family == socket.AF_INET6:
                local, kind = info[:16], (socket.IPPROTO_IPV6, PKTINFO_6)
                info = local + bytes(4)
            else:
                local, kind = info[8:12], (socket.IPPROTO_IP, PKTINFO_4)
                info = struct.pack("=i4s4s", 0, local, bytes(4))
            identity, now = data[:8].decode("ascii", "replace"), time.time()
            row = datagrams.setdefault((peer[0], peer[1], local, identity), [now, now, 0])
            row[1] = now
            row[2] += 1
            try:
                self.stream.sendmsg([data], [(*kind, info)], 0, peer)
            except OSError:
                pass


listeners = Listener(port, Lines), Listener(port + 1, Blocks), Datagrams(socket.AF_INET), Datagrams(socket.AF_INET6)
for listener in listeners:
    selector.register(listener.stream, selectors.EVENT_READ, listener)
signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
print("listening", flush=True)
while not ended:
    for key, mask in selector.select(0.2):
        key.data.ready(mask)


def text(local):
    return socket.inet_ntop(socket.AF_INET if len(local) == 4 else socket.AF_INET6, local)


udp = [[peer, at, text(local), identity, *row] for (peer, at, local, identity), row in datagrams.items()]
with open(record, "w") as file:
    json.dump({"tcp": connections, "udp": udp}, file)
print("written", flush=True)
