"""TCP echo server: replies to each byte with the port that it sees of the client."""
import selectors
import socket
import sys

selector = selectors.DefaultSelector()
listener = socket.create_server(("::", int(sys.argv[1])), family=socket.AF_INET6, dualstack_ipv6=True, backlog=4096)
selector.register(listener, selectors.EVENT_READ)
print("listening", flush=True)
while True:
    for key, _ in selector.select():
        if key.fileobj is listener:
            connection, _ = listener.accept()
            selector.register(connection, selectors.EVENT_READ)
            continue
        try:
            data = key.fileobj.recv(64)
            if data:
                key.fileobj.send(key.fileobj.getpeername()[1].to_bytes(2, "big") * len(data))
                continue
        except OSError:
            pass
        selector.unregister(key.fileobj)
        key.fileobj.close()
