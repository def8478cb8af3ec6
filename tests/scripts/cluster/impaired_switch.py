"""A switch whose cables lose, delay, repeat and reorder frames, where the kernel has no netem.

Usage: impaired_switch.py LOSS REPEAT DELAY JITTER SEED INTERFACE.. The first two in percent, the next two in milliseconds: a frame takes
DELAY, and up to JITTER more, by which frames overtake each other. SIGUSR1 lets all frames pass at once from then on. SIGTERM
prints what became of them, as JSON.
"""
import heapq
import json
import random
import selectors
import signal
import socket
import sys
import time

loss, repeat, delay, jitter = (float(word) for word in sys.argv[1:5])
chance = random.Random(int(sys.argv[5]))
selector = selectors.DefaultSelector()
ports, learned, late, ended = [], {}, [], []
counts = dict.fromkeys(["frames", "lost", "repeated"], 0)
ALL_PROTOCOLS, OUTGOING = 3, 4
for name in sys.argv[6:]:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    port.bind((name, ALL_PROTOCOLS))
    # Frames are for others.
    index = socket.if_nametoindex(name).to_bytes(4, sys.byteorder)
    port.setsockopt(263, 1, index + bytes([1, 0, 0, 0]) + bytes(8))
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    port.setblocking(False)
    selector.register(port, selectors.EVENT_READ)
    ports.append(port)


def perfect(*_):
    global loss, repeat, delay, jitter
    loss = repeat = delay = jitter = 0.0


def send(frame, source):
    target = learned.get(frame[:6])
    for port in [target] if target else ports:
        if port is not source:
            try:
                port.send(frame)
            except OSError:
                counts["lost"] += 1


signal.signal(signal.SIGUSR1, perfect)
signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
print("listening", flush=True)
number = 0
while not ended:
    now = time.monotonic()
    while late and late[0][0] <= now:
        _, _, frame, source = heapq.heappop(late)
        send(frame, source)
    for key, _ in selector.select(max(0.0, late[0][0] - now) if late else 0.2):
        for _ in range(64):
            try:
                frame, origin = key.fileobj.recvfrom(65536)
            except OSError:
                break
            if origin[2] == OUTGOING:
                continue
            counts["frames"] += 1
            learned[frame[6:12]] = key.fileobj
            if chance.uniform(0, 100) < loss:
                counts["lost"] += 1
                continue
            copies = 1 + (chance.uniform(0, 100) < repeat)
            counts["repeated"] += copies - 1
            for _ in range(copies):
                number += 1
                at = time.monotonic() + (delay + chance.uniform(0, jitter)) / 1000
                heapq.heappush(late, (at, number, frame, key.fileobj))
print(json.dumps(counts), flush=True)
