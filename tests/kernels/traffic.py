"""Servers and clients of the hosts around a gateway: HTTP with checksums, UDP echoes. Each notes which source addresses it sees."""

import hashlib
import http.client
import http.server
import random
import socket
import threading
import time

HTTP_PORT = 80
ECHO_PORT = 9
CONTENT = random.Random(7).randbytes(3 << 20)
DIGEST = hashlib.sha256(CONTENT).hexdigest()
TIMEOUT = 20


def family(address):
    return socket.AF_INET6 if ":" in address else socket.AF_INET


class Handler(http.server.BaseHTTPRequestHandler):
    """GET returns CONTENT, POST returns the digest of the body; both the client's address and port."""

    protocol_version = "HTTP/1.1"
    timeout = 60

    def do_GET(self):
        self._reply({"/content": CONTENT}.get(self.path, b""))

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self._reply(hashlib.sha256(body).hexdigest().encode())

    def _reply(self, body):
        self.send_response(200)
        self.send_header("X-Source", self.client_address[0])
        self.send_header("X-Port", str(self.client_address[1]))
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def serve_http(host, address, port=HTTP_PORT):
    """Starts an HTTP server in a host's namespace."""

    class Server(http.server.ThreadingHTTPServer):
        address_family = family(address)
        daemon_threads = True
        # Without a reverse lookup of its name.
        server_bind = http.server.socketserver.TCPServer.server_bind

    with host.inside():
        server = Server((address, port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


class Client(http.client.HTTPConnection):
    """An HTTP connection of a host; the reply to a request as (source and port that the server saw, body)."""

    def __init__(self, host, address, port=HTTP_PORT, receive_buffer=None):
        super().__init__(address, port, timeout=TIMEOUT)
        with host.inside():
            self.sock = socket.socket(family(address), socket.SOCK_STREAM)
        self.sock.settimeout(TIMEOUT)
        if receive_buffer:
            self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self.sock.connect((address, port))
        # A connection that was lost must not be replaced by another one.
        self.auto_open = 0

    def exchange(self, method, path="/", body=None):
        self.request(method, path, body)
        return self.finish()

    def finish(self, progress=None):
        """Reads the reply; calls `progress` with the number of bytes so far."""
        response = self.getresponse()
        body = bytearray()
        while part := response.read(1 << 16):
            body += part
            if progress:
                progress(len(body))
        return (response.headers["X-Source"], int(response.headers["X-Port"])), bytes(body)

    def path_mtu(self):
        level, option = (socket.IPPROTO_IPV6, 24) if self.sock.family == socket.AF_INET6 else (socket.IPPROTO_IP, 14)
        return self.sock.getsockopt(level, option)


class Echo:
    """A UDP server that returns each datagram, and notes the addresses that they come from."""

    def __init__(self, host, address, port=ECHO_PORT):
        self.sources, self.received = set(), 0
        self._socket = udp_socket(host, address)
        self._socket.bind((address, port))
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def _serve(self):
        while True:
            try:
                data, source = self._socket.recvfrom(65536)
            except OSError:
                return
            if source is None:
                return
            self.sources.add(source[0])
            self.received += 1
            self._socket.sendto(data, source)

    def close(self):
        # Ends the thread that waits in it.
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass
        self._thread.join()
        self._socket.close()


def udp_socket(host, address):
    with host.inside():
        made = socket.socket(family(address), socket.SOCK_DGRAM)
    SO_RCVBUFFORCE = 33
    made.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, 8 << 20)
    return made


def echoes(host, address, payload, attempts=3, port=ECHO_PORT):
    """Whether a server returns a datagram."""
    with udp_socket(host, address) as client:
        client.settimeout(2)
        client.connect((address, port))
        for _ in range(attempts):
            try:
                client.send(payload)
                return client.recv(65536) == payload
            except OSError:
                continue
    return False


def burst(host, address, count, port=ECHO_PORT):
    """Sends datagrams at a rate that a gateway on emulated processors can forward; how many different ones come back."""
    replies = set()
    with udp_socket(host, address) as client:
        client.settimeout(1.5)
        client.connect((address, port))

        def receive():
            try:
                while len(replies) < count:
                    replies.add(client.recv(2048))
            except TimeoutError:
                pass

        receiver = threading.Thread(target=receive)
        receiver.start()
        for number in range(count):
            client.send(f"{number:08}".encode() * 8)
            if number % 16 == 15:
                time.sleep(0.01)
        receiver.join()
    return len(replies)
