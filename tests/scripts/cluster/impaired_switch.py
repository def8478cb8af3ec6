"""Switch with impaired links: loses, delays, duplicates and reorders frames, where the kernel has no netem.

Usage: impaired_switch.py LOSS DUPLICATE DELAY JITTER SEED INTERFACE.. LOSS and DUPLICATE are percentages, DELAY and
JITTER milliseconds: a frame is delayed by DELAY plus a random part of JITTER, which reorders frames. SIGUSR1 ends the
impairment. SIGTERM prints the counters, as JSON.
"""
import heapq
import json
import random
import selectors
import signal
import socket
import sys
import time

loss, duplicate, delay, jitter = (float(word) for word in sys.argv[1:5])
rng = random.Random(int(sys.argv[5]))
selector = selectors.DefaultSelector()
ports, learned, delayed, ended = [], {}, [], []
counts = dict.fromkeys(["frames", "lost", "duplicated"], 0)
ALL_PROTOCOLS, OUTGOING = 3, 4
for name in sys.argv[6:]:
    port = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ALL_PROTOCOLS))
    port.bind((name, ALL_PROTOCOLS))
    # Promiscuous mode: frames are addressed to other hosts.
    index = socket.if_nametoindex(name).to_bytes(4, sys.byteorder)
    port.setsockopt(263, 1, index + bytes([1, 0, 0, 0]) + bytes(8))
    port.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
    port.setblocking(False)
    selector.register(port, selectors.EVENT_READ)
    ports.append(port)


def stop_impairment(*_):
    global loss, duplicate, delay, jitter
    loss = duplicate = delay = jitter = 0.0


def send(frame, source):
    target = learned.get(frame[:6])
    for port in [target] if target else ports:
        if port is not source:
            try:
                port.send(frame)
            except OSError:
                counts["lost"] += 1


signal.signal(signal.SIGUSR1, stop_impairment)
signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
print("listening", flush=True)
number = 0
while not ended:
    now = time.monotonic()
    while delayed and delayed[0][0] <= now:
        _, _, frame, source = heapq.heappop(delayed)
        send(frame, source)
    for key, _ in selector.select(max(0.0, delayed[0][0] - now) if delayed else 0.2):
        for _ in range(64):
            try:
                frame, origin = key.fileobj.recvfrom(65536)
            except OSError:
                break
            if origin[2] == OUTGOING:
                continue
            counts["frames"] += 1
            learned[frame[6:12]] = key.fileobj
            if rng.uniform(0, 100) < loss:
                counts["lost"] += 1
                continue
            copies = 1 + (rng.uniform(0, 100) < duplicate)
            counts["duplicated"] += copies - 1
            for _ in range(copies):
                number += 1
                at = time.monotonic() + (delay + rng.uniform(0, jitter)) / 1000
                heapq.heappush(delayed, (at, number, frame, key.fileobj))
print(json.dumps(counts), flush=True)
