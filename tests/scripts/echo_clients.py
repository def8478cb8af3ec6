"""Holds many TCP connections open and asks on each, again and again, until SIGTERM.

Prints `open N` when all stand. At the end, one line: connections that still answer, those that the server saw change their
port, and the longest time in milliseconds in which no answer came on any of them.
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


def ask():
    for connection in connections:
        try:
            connection.send(b"?")
        except BlockingIOError:
            pass
        except OSError:
            broken.add(connection)


def hear(until):
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
    ask()
    hear(time.monotonic() + 0.05)
# What was lost is sent again by the kernel, later and later: patience.
end = time.monotonic()
while time.monotonic() < end + 15 and any(answered.get(c, 0) < end for c in connections if c not in broken):
    ask()
    hear(time.monotonic() + 0.1)
alive = sum(1 for c in connections if c not in broken and answered.get(c, 0) >= end)
print("alive", alive, "changed", len(changed), "longest_ms", int(longest * 1000), flush=True)
