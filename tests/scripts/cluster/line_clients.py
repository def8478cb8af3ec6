"""Many clients that say numbered lines and want each of them back.

Usage: line_clients.py PLAN RESULT. PLAN is JSON:
  protocol   "tcp" or "udp"
  to, port   whom they ask
  sources    their addresses, in turn; empty: the kernel's choice
  count      how many
  first      the first one's identity; the others count on
  rate       how many begin in a second
  at_once    how many may be there at once
  lines      how many lines each says before it ends; 0: until SIGTERM
  paces      [[part, shortest, longest]..]: of so many in a hundred, the seconds between lines lie between these
  patience   seconds that an answer may take after the last line
  bytes      the length of a line
  stay       whether those who have said all their lines keep their port until the end
Prints `open N` when all of them have begun and, where they stay, N been answered once and the others not for `patience`. RESULT is JSON:
  [[identity, source, port, opened, pace, lines, answered, longest, longest_at, end, wrong]..]
`longest` is the longest wait for an answer, over the connect and all lines of TCP; for UDP, where lines are lost, the longest time without any
answer. `end`: "alive", "done", "silent" or what the kernel said. `wrong`: answers that were meant for somebody else.
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

plan = json.load(open(sys.argv[1]))
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
ADDRESS_NO_PORT, THIN_LINEAR_TIMEOUTS = 24, 16
tcp = plan["protocol"] == "tcp"
target = (plan["to"], plan["port"])
family = socket.AF_INET6 if ":" in plan["to"] else socket.AF_INET
selector = selectors.EpollSelector()
chance = random.Random(plan["first"])
due, alive, ended = [], set(), []


class Client:
    def __init__(self, number):
        self.identity = b"%08d" % (plan["first"] + number)
        sources = plan["sources"]
        self.source = sources[number % len(sources)] if sources else ""
        self.opened, self.port, self.end, self.wrong = time.time(), 0, "", 0
        self.sent = self.answered = 0
        self.longest = self.longest_at = 0.0
        self.waiting, self.rest, self.connected, self.last = collections.deque(), b"", not tcp, time.monotonic()
        draw, self.pace = chance.uniform(0, 100), (1.0, 1.0)
        for part, shortest, longest in plan["paces"]:
            self.pace = (shortest, longest)
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
            self.stand()

    def stand(self):
        self.port = self.stream.getsockname()[1]
        self.last = time.monotonic()
        self.say()

    def say(self):
        if self.end or ended or (plan["lines"] and self.sent >= plan["lines"]):
            return
        line = self.identity + b" %06d" % self.sent
        line = line.ljust(plan["bytes"] - 1, b".") + b"\n"
        now = time.monotonic()
        try:
            self.stream.send(line)
            if tcp:
                self.waiting.append(now)
            self.sent += 1
        except BlockingIOError:
            pass
        except OSError as error:
            if tcp:
                self.finish(str(error))
                return
        heapq.heappush(due, (now + chance.uniform(*self.pace), id(self), self))

    def wait(self, seconds):
        if seconds > self.longest:
            self.longest, self.longest_at = seconds, time.time()

    def ready(self, mask):
        if not self.connected:
            error = self.stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error:
                self.finish(f"connect: errno {error}")
                return
            self.connected = True
            self.wait(time.monotonic() - self.last)
            selector.modify(self.stream, selectors.EVENT_READ, self)
            self.stand()
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
            self.finish("closed by the far side")
            return
        self.hear(data)

    def hear(self, data):
        *lines, self.rest = (self.rest + data).split(b"\n")
        now = time.monotonic()
        for line in lines:
            if line[:8] != self.identity or (tcp and int(line[9:15]) != self.answered):
                self.wrong += 1
            elif tcp:
                self.wait(now - self.waiting.popleft())
            else:
                self.wait(now - self.last)
            self.last = now
            self.answered += 1
        if plan["lines"] and self.answered >= plan["lines"]:
            self.finish("done")

    def leave(self):
        if self in alive:
            alive.discard(self)
            selector.unregister(self.stream)

    def finish(self, why):
        if self.end:
            return
        self.end = why
        now = time.monotonic()
        if tcp and self.waiting:
            self.wait(now - self.waiting[0])
        self.leave()
        if not plan["stay"]:
            self.stream.close()

    def row(self):
        pace = sum(self.pace) / 2
        answers = [self.sent, self.answered, self.longest, self.longest_at, self.end, self.wrong]
        return [self.identity.decode(), self.source, self.port, self.opened, pace, *answers]


def turn(until):
    while True:
        now = time.monotonic()
        while due and due[0][0] <= now:
            heapq.heappop(due)[2].say()
        next_due = due[0][0] if due else until
        for key, mask in selector.select(max(0.0005, min(until, next_due) - now)):
            key.data.ready(mask)
        if time.monotonic() >= until:
            return


signal.signal(signal.SIGTERM, lambda *_: ended.append(True))
clients, begun, told = [], time.monotonic(), False
while not ended:
    now = time.monotonic()
    wanted = min(plan["count"], int((now - begun) * plan["rate"]) + 1)
    while len(clients) < wanted and len(alive) < plan["at_once"]:
        clients.append(Client(len(clients)))
    if len(clients) == plan["count"] and not told:
        limit = time.time() - plan["patience"]
        settled = all(client.answered or client.end or client.opened < limit for client in clients)
        # Short ones come to their end, and that is told below.
        if plan["lines"] or settled:
            print("open", sum(1 for client in clients if client.answered and not client.end), flush=True)
            told = True
    if plan["lines"] and len(clients) == plan["count"]:
        if not alive or (tcp is False and time.monotonic() - max(c.last for c in clients) > plan["patience"]):
            break
    turn(time.monotonic() + 0.02)
    if plan["lines"]:
        # Whoever waits too long has failed; the others go on.
        limit = time.monotonic() - plan["patience"]
        for client in [client for client in alive if client.last < limit]:
            client.finish("silent")
if not plan["lines"]:
    patience = time.monotonic() + plan["patience"]
    stopped = time.monotonic()
    for client in [] if tcp else alive:
        client.wait(stopped - client.last)
    while time.monotonic() < patience and (
        any(client.waiting for client in alive) if tcp else time.monotonic() < stopped + 0.5
    ):
        turn(time.monotonic() + 0.05)
for client in list(alive):
    client.finish("alive" if not (tcp and client.waiting) else "silent")
with open(sys.argv[2], "w") as file:
    json.dump([client.row() for client in clients], file)
print("written", len(clients), flush=True)
