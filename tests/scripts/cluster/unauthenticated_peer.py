"""An unauthenticated peer that connects to a gateway's peer port.

Usage: unauthenticated_peer.py ADDRESS PORT HOW [CERT KEY]. HOW: `garbage` sends random bytes, `silent` sends nothing, `tls`
completes a TLS handshake, with a client certificate if given, and sends 64 zero bytes. Prints `refused REASON` when the
gateway closes the connection, `accepted` when it is still open after ten seconds.
"""
import os
import socket
import ssl
import sys

address, port, how = sys.argv[1], int(sys.argv[2]), sys.argv[3]
try:
    stream = socket.create_connection((address, port), timeout=10)
    if how == "tls":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        if len(sys.argv) > 4:
            context.load_cert_chain(sys.argv[4], sys.argv[5])
        stream = context.wrap_socket(stream)
        stream.sendall(bytes(64))
    elif how == "garbage":
        stream.sendall(os.urandom(4096))
    while True:
        if not stream.recv(65536):
            print("refused closed")
            break
except (TimeoutError, socket.timeout):
    print("accepted")
except OSError as error:
    print("refused", error)
