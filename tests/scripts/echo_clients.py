"""Held TCP connections with continuous requests, until SIGTERM.

Prints `open N` when all are established, and one line at the end: connections that still get replies, connections whose
port changed at the server, and the longest time in milliseconds without a reply on any of them.
"""
import selectors
import signal
import socket
import sys
import time

address, port, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
selector = selectors.DefaultSelector()
seen, changed, broken, answered = {}, set(), set(), {}
connections = []
for _ in range(count):
    connection = socket.create_connection((address, port), timeout=20)
    connection.setblocking(False)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    selector.register(connection, selectors.EVENT_READ)
    connections.append(connection)
print("open", count, flush=True)


def send_requests():
    for connection in connections:
        try:
            connection.send(b"?")
        except BlockingIOError:
            pass
        except OSError:
            broken.add(connection)


def receive(until):
    global last, longest
    while time.monotonic() < until:
        for key, _ in selector.select(max(0, until - time.monotonic())):
            connection = key.fileobj
            try:
                data = connection.recv(4096)
            except BlockingIOError:
                continue
            except OSError:
                data = b""
            if not data:
                broken.add(connection)
                selector.unregister(connection)
                continue
            now = time.monotonic()
            longest, last = max(longest, now - last), now
            answered[connection] = now
            for at in range(0, len(data) - 1, 2):
                if seen.setdefault(connection, data[at : at + 2]) != data[at : at + 2]:
                    changed.add(connection)


longest, last = 0.0, time.monotonic()
ended = []
signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
while not ended:
    send_requests()
    receive(time.monotonic() + 0.05)
# The kernel retransmits lost requests with exponential backoff.
end = time.monotonic()
while time.monotonic() < end + 15 and any(answered.get(c, 0) < end for c in connections if c not in broken):
    send_requests()
    receive(time.monotonic() + 0.1)
alive = sum(1 for c in connections if c not in broken and answered.get(c, 0) >= end)
print("alive", alive, "changed", len(changed), "longest_ms", int(longest * 1000), flush=True)
