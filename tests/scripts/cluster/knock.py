"""Sends numbered datagrams to closed ports of an address.

Usage: knock.py ADDRESS COUNT RATE FIRST. Source ports rotate over a few hundred, destination ports are random, and each
datagram carries the next identity from FIRST. Prints the number of sent datagrams.
"""
import random
import socket
import sys
import time

address, count, rate, first = sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4])
rng = random.Random(first)
family = socket.AF_INET6 if ":" in address else socket.AF_INET
sockets = [socket.socket(family, socket.SOCK_DGRAM) for _ in range(300)]
sent, started = 0, time.monotonic()
while sent < count:
    due = min(count, int((time.monotonic() - started) * rate) + 1)
    while sent < due:
        try:
            sockets[sent % 300].sendto(b"%08d %06d\n" % (first + sent, sent), (address, rng.randrange(1024, 65536)))
        except OSError:
            pass
        sent += 1
    time.sleep(0.002)
print("sent", sent, flush=True)
