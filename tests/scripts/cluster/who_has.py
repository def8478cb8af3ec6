"""Asks on a segment who has an address, again and again, and remembers who answers to which question.

Usage: who_has.py INTERFACE ADDRESS RECORD. Each request has a sender address of its own, which answers name, so it is known which
request an answer is for. SIGTERM writes RECORD, as JSON:
  {"asked": N, "answers": [[request, MAC, milliseconds since the first request]..]}  # in the order in which they came
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
PAUSE = 0.001
# Addresses of nobody's: 240.0.0.0/4 is reserved.
FIRST_SENDER = 0xF0000001

sock = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(ETH_P_ARP))
sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 8 << 20)
sock.bind((interface, ETH_P_ARP))
own = sock.getsockname()[4]
target = socket.inet_aton(address)
answers, ended = [], []
signal.signal(signal.SIGTERM, lambda *_: ended.append(True))


def request(number):
    ethernet = b"\xff" * 6 + own + struct.pack("!H", ETH_P_ARP)
    arp = struct.pack("!HHBBH", 1, 0x0800, 6, 4, REQUEST)
    return ethernet + arp + own + struct.pack("!I", FIRST_SENDER + number) + bytes(6) + target


def take():
    frame = sock.recv(2048)
    if len(frame) < 42 or struct.unpack("!H", frame[20:22])[0] != REPLY or frame[28:32] != target:
        return
    number = struct.unpack("!I", frame[38:42])[0] - FIRST_SENDER
    if 0 <= number < asked:
        answers.append([number, frame[22:28].hex(":"), round((time.monotonic() - begun) * 1000)])


begun, asked = time.monotonic(), 0
due = begun
print("asks", flush=True)
while not ended:
    now = time.monotonic()
    if now >= due:
        sock.send(request(asked))
        asked += 1
        due = max(due + PAUSE, now)
    if select.select([sock], [], [], max(0.0, due - time.monotonic()))[0]:
        take()
while select.select([sock], [], [], 0.05)[0]:
    take()
with open(record, "w") as file:
    json.dump({"asked": asked, "answers": answers}, file)
