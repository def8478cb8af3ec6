"""ARP probe: requests one address continuously, and records the replies with the request that each is for.

Usage: who_has.py INTERFACE ADDRESS RECORD. Each request has its own sender address, which the reply repeats as its
target. SIGTERM writes RECORD, as JSON:
  {"requests": N, "replies": [[request, MAC, milliseconds since the first request]..]}  # in the order of arrival
"""
import json
import select
import signal
import socket
import struct
import sys
import time

interface, address, record = sys.argv[1:4]
ETH_P_ARP, REQUEST, REPLY = 0x0806, 1, 2
INTERVAL = 0.001
# Unused sender addresses: 240.0.0.0/4 is reserved.
FIRST_SENDER = 0xF0000001

sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ARP))
sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
sock.bind((interface, ETH_P_ARP))
own = sock.getsockname()[4]
target = socket.inet_aton(address)
replies, ended = [], []
signal.signal(signal.SIGTERM, lambda *_: ended.append(True))


def request(number):
    ethernet = b"\xff" * 6 + own + struct.pack("!H", ETH_P_ARP)
    arp = struct.pack("!HHBBH", 1, 0x0800, 6, 4, REQUEST)
    return ethernet + arp + own + struct.pack("!I", FIRST_SENDER + number) + bytes(6) + target


def receive():
    frame = sock.recv(2048)
    if len(frame) < 42 or struct.unpack("!H", frame[20:22])[0] != REPLY or frame[28:32] != target:
        return
    number = struct.unpack("!I", frame[38:42])[0] - FIRST_SENDER
    if 0 <= number < requests:
        replies.append([number, frame[22:28].hex(":"), round((time.monotonic() - started) * 1000)])


started, requests = time.monotonic(), 0
due = started
print("sending", flush=True)
while not ended:
    now = time.monotonic()
    if now >= due:
        sock.send(request(requests))
        requests += 1
        due = max(due + INTERVAL, now)
    if select.select([sock], [], [], max(0.0, due - time.monotonic()))[0]:
        receive()
while select.select([sock], [], [], 0.05)[0]:
    receive()
with open(record, "w") as file:
    json.dump({"requests": requests, "replies": replies}, file)
