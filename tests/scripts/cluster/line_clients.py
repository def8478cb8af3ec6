"""Line clients: send numbered lines and expect each of them back.

Usage: line_clients.py CONFIG RESULT. CONFIG is JSON:
  protocol   "tcp" or "udp"
  to, port   the server
  sources    their addresses, round-robin; empty: chosen by the kernel
  count      number of clients
  first      identity of the first client; the others are numbered from it
  rate       clients started per second
  max_concurrent
             maximum number of concurrent clients
  lines      lines that each client sends before it ends; 0: until SIGTERM
  intervals  [[percent of clients, shortest, longest]..]: seconds between lines
  timeout    reply timeout in seconds
  bytes      length of a line
  keep_port  whether clients that have sent all their lines keep their port until the end
Prints `open N` when all clients have started and, without `lines`, N got a reply and the others timed out or failed.
RESULT is JSON:
  [[identity, source, port, opened, interval, lines, answered, longest, longest_at, end, wrong, lost]..]
`longest` is the longest wait for a reply, over the connect and all lines of TCP; for UDP, where lines may be lost, the
longest time without a reply. `end`: "alive", "done", "silent" or the kernel's error. `wrong`: replies to other
clients or out of order. `lost`: when UDP lines without a reply were sent.
"""
import collections
import heapq
import json
import random
import resource
import selectors
import signal
import socket
import sys
import time

config = json.load(open(sys.argv[1]))
limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))
ADDRESS_NO_PORT, THIN_LINEAR_TIMEOUTS = 24, 16
tcp = config["protocol"] == "tcp"
target = (config["to"], config["port"])
family = socket.AF_INET6 if ":" in config["to"] else socket.AF_INET
selector = selectors.EpollSelector()
rng = random.Random(config["first"])
due, alive, ended = [], set(), []


class Client:
    def __init__(self, number):
        self.identity = b"%08d" % (config["first"] + number)
        sources = config["sources"]
        self.source = sources[number % len(sources)] if sources else ""
        self.opened, self.port, self.end, self.wrong = time.time(), 0, "", 0
        self.sent = self.answered = 0
        self.longest = self.longest_at = 0.0
        self.lost = {}
        self.unanswered, self.rest, self.connected, self.last = collections.deque(), b"", not tcp, time.monotonic()
        draw, self.interval = rng.uniform(0, 100), (1.0, 1.0)
        for part, shortest, longest in config["intervals"]:
            self.interval = (shortest, longest)
            if draw < part:
                break
            draw -= part
        self.stream = socket.socket(family, socket.SOCK_STREAM if tcp else socket.SOCK_DGRAM)
        self.stream.setblocking(False)
        try:
            if self.source:
                if tcp:
                    self.stream.setsockopt(socket.IPPROTO_IP, ADDRESS_NO_PORT, 1)
                self.stream.bind((self.source, 0))
            if tcp:
                self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self.stream.setsockopt(socket.IPPROTO_TCP, THIN_LINEAR_TIMEOUTS, 1)
            self.stream.connect(target)
        except BlockingIOError:
            pass
        except OSError as error:
            self.finish(str(error))
            return
        alive.add(self)
        selector.register(self.stream, selectors.EVENT_WRITE if tcp else selectors.EVENT_READ, self)
        if not tcp:
            self.start()

    def start(self):
        self.port = self.stream.getsockname()[1]
        self.last = time.monotonic()
        self.send_line()

    def send_line(self):
        if self.end or ended or (config["lines"] and self.sent >= config["lines"]):
            return
        line = self.identity + b" %06d" % self.sent
        line = line.ljust(config["bytes"] - 1, b".") + b"\n"
        now = time.monotonic()
        try:
            self.stream.send(line)
            if tcp:
                self.unanswered.append(now)
            else:
                self.lost[self.sent] = time.time()
            self.sent += 1
        except BlockingIOError:
            pass
        except OSError as error:
            if tcp:
                self.finish(str(error))
                return
        heapq.heappush(due, (now + rng.uniform(*self.interval), id(self), self))

    def record_wait(self, seconds):
        if seconds > self.longest:
            self.longest, self.longest_at = seconds, time.time()

    def ready(self, mask):
        if not self.connected:
            error = self.stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self.finish(f"connect: errno {error}")
                return
            self.connected = True
            self.record_wait(time.monotonic() - self.last)
            selector.modify(self.stream, selectors.EVENT_READ, self)
            self.start()
            return
        try:
            data = self.stream.recv(65536)
        except BlockingIOError:
            return
        except OSError as error:
            if tcp:
                self.finish(str(error))
            return
        if tcp and not data:
            self.finish("closed by the server")
            return
        self.receive(data)

    def receive(self, data):
        *lines, self.rest = (self.rest + data).split(b"\n")
        now = time.monotonic()
        for line in lines:
            if line[:8] != self.identity or (tcp and int(line[9:15]) != self.answered):
                self.wrong += 1
            elif tcp:
                self.record_wait(now - self.unanswered.popleft())
            else:
                self.record_wait(now - self.last)
                self.lost.pop(int(line[9:15]), None)
            self.last = now
            self.answered += 1
        if config["lines"] and self.answered >= config["lines"]:
            self.finish("done")

    def remove(self):
        if self in alive:
            alive.discard(self)
            selector.unregister(self.stream)

    def finish(self, reason):
        if self.end:
            return
        self.end = reason
        now = time.monotonic()
        if tcp and self.unanswered:
            self.record_wait(now - self.unanswered[0])
        self.remove()
        if not config["keep_port"]:
            self.stream.close()

    def row(self):
        interval = sum(self.interval) / 2
        results = [self.sent, self.answered, self.longest, self.longest_at, self.end, self.wrong, list(self.lost.values())]
        return [self.identity.decode(), self.source, self.port, self.opened, interval, *results]


def run(until):
    while True:
        now = time.monotonic()
        while due and due[0][0] <= now:
            heapq.heappop(due)[2].send_line()
        next_due = due[0][0] if due else until
        for key, mask in selector.select(max(0.0005, min(until, next_due) - now)):
            key.data.ready(mask)
        if time.monotonic() >= until:
            return


signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
clients, started, reported = [], time.monotonic(), False
while not ended:
    now = time.monotonic()
    wanted = min(config["count"], int((now - started) * config["rate"]) + 1)
    while len(clients) < wanted and len(alive) < config["max_concurrent"]:
        clients.append(Client(len(clients)))
    if len(clients) == config["count"] and not reported:
        limit = time.time() - config["timeout"]
        all_answered = all(client.answered or client.end or client.opened < limit for client in clients)
        # Clients with a fixed number of lines may have ended already.
        if config["lines"] or all_answered:
            print("open", sum(1 for client in clients if client.answered and not client.end), flush=True)
            reported = True
    if config["lines"] and len(clients) == config["count"]:
        if not alive or (tcp is False and time.monotonic() - max(c.last for c in clients) > config["timeout"]):
            break
    run(time.monotonic() + 0.02)
    if config["lines"]:
        # Clients whose reply timed out have failed.
        limit = time.monotonic() - config["timeout"]
        for client in [client for client in alive if client.last < limit]:
            client.finish("silent")
if not config["lines"]:
    deadline = time.monotonic() + config["timeout"]
    stopped = time.monotonic()
    for client in [] if tcp else alive:
        client.record_wait(stopped - client.last)
    while time.monotonic() < deadline and (
        any(client.unanswered for client in alive) if tcp else time.monotonic() < stopped + 0.5
    ):
        run(time.monotonic() + 0.05)
for client in list(alive):
    client.finish("alive" if not (tcp and client.unanswered) else "silent")
with open(sys.argv[2], "w") as file:
    json.dump([client.row() for client in clients], file)
print("written", len(clients), flush=True)
