"""Downloads so many bytes from line_server.py, at a given pace, and checks each of them.

Usage: download.py ADDRESS PORT BYTES BYTES_PER_SECOND [SOURCE]. Prints, as JSON, how many came, whether they are what they should
be, and the longest time in seconds in which none came.
"""
import hashlib
import json
import socket
import sys
import time

address, port, size, rate = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
source = (sys.argv[5], 0) if len(sys.argv) > 5 else None
BLOCK = bytes(range(251)) * 261
expected = hashlib.sha256()
for at in range(0, size, len(BLOCK)):
    expected.update(BLOCK[: size - at])
stream = socket.create_connection((address, port), timeout=30, source_address=source)
# A large buffer here would hide a gap there.
stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
stream.sendall(str(size).encode())
print("open 1", flush=True)
begun = last = time.monotonic()
digest, got, longest, error = hashlib.sha256(), 0, 0.0, ""
try:
    while got < size:
        data = stream.recv(65536)
        if not data:
            error = "the far side has closed"
            break
        now = time.monotonic()
        longest, last = max(longest, now - last), now
        digest.update(data)
        got += len(data)
        ahead = got / rate - (now - begun)
        if ahead > 0:
            time.sleep(min(ahead, 0.05))
            last = time.monotonic()
except OSError as problem:
    error = str(problem)
whole = digest.digest() == expected.digest()
print(json.dumps({"bytes": got, "whole": whole, "longest": longest, "error": error}), flush=True)
