"""Downloads data from the line server at a limited rate and verifies it.

Usage: download.py ADDRESS PORT BYTES BYTES_PER_SECOND [SOURCE]. Prints, as JSON, the number of received bytes, whether
they are intact, and the longest time in seconds without data.
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
# A larger receive buffer would hide gaps.
stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 65536)
stream.sendall(str(size).encode())
print("open 1", flush=True)
started = last = time.monotonic()
digest, received, longest_gap, error = hashlib.sha256(), 0, 0.0, ""
try:
    while received < size:
        data = stream.recv(65536)
        if not data:
            error = "closed by the server"
            break
        now = time.monotonic()
        longest_gap, last = max(longest_gap, now - last), now
        digest.update(data)
        received += len(data)
        ahead = received / rate - (now - started)
        if ahead > 0:
            time.sleep(min(ahead, 0.05))
            last = time.monotonic()
except OSError as failure:
    error = str(failure)
intact = digest.digest() == expected.digest()
print(json.dumps({"bytes": received, "intact": intact, "longest_gap": longest_gap, "error": error}), flush=True)
