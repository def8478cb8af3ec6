"""Somebody who is no gateway and calls a gateway's peer port.

Usage: strange_peer.py ADDRESS PORT HOW [CERT KEY]. HOW: `garbage` sends bytes that mean nothing, `silent` nothing, `tls` shakes
hands without a certificate or, where one is given, with that one, and then says a frame's worth of zeros. Prints how it ended:
`refused WHY` when the gateway closed, `accepted` when it is still open after ten seconds.
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
