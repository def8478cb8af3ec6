#!/usr/bin/env python3
"""Writes docs/topology.svg: pods, gateways with VIPs, ECMP router, remote hosts, policy server.

The drawing has its own background and follows the reader's color scheme, so it is readable in light and dark pages. It needs no
dependencies; run it after a change: python3 docs/topology.py
"""

from pathlib import Path
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 1080, 560

# class: (light, dark)
COLORS = {
    "page": ("#ffffff", "#0d1117"),
    "zone": ("#f4f6f9", "#161b22"),
    "box": ("#ffffff", "#21262d"),
    "gateway": ("#e6f0fd", "#10305a"),
    "line": ("#6b7683", "#8b949e"),
    "text": ("#1b2229", "#e6edf3"),
    "note": ("#57606a", "#9aa4af"),
    "egress": ("#1a6fd0", "#6cb0ff"),
    "inbound": ("#14803c", "#56d67e"),
    "control": ("#8a4bbf", "#c79bff"),
    "peer": ("#b35900", "#f0a04b"),
}
FILLS = ("page", "zone", "box", "gateway")
LINES = ("egress", "inbound", "control", "peer")


def style():
    """The style sheet: light colors, and dark ones where the reader prefers them."""

    def rules(scheme):
        color = {name: pair[scheme] for name, pair in COLORS.items()}
        out = [f".page{{fill:{color['page']}}}"]
        out += [f".{name}{{fill:{color[name]};stroke:{color['line']}}}" for name in FILLS[1:]]
        out += [f".{name}{{stroke:{color[name]};fill:none}}.{name}-text,.{name}-head{{fill:{color[name]}}}" for name in LINES]
        out += [f".link{{stroke:{color['line']};fill:none}}", f".title,.text{{fill:{color['text']}}}.note{{fill:{color['note']}}}"]
        return "".join(out)

    fonts = "text{font-family:system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif;font-size:13px}"
    mono = ".mono{font-family:ui-monospace,'DejaVu Sans Mono',monospace;font-size:12px}"
    sizes = f".title{{font-size:15px;font-weight:600}}.note{{font-size:12px}}{mono}"
    return f"{fonts}{sizes}{rules(0)}@media (prefers-color-scheme:dark){{{rules(1)}}}"


class Drawing:
    """Elements in the order in which they are drawn."""

    def __init__(self):
        self.parts = []

    def box(self, x, y, width, height, kind="box", dashed=False):
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        self.parts.append(f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{height}" rx="8"{dash}/>')

    def text(self, x, y, text, kind="text", anchor="start"):
        self.parts.append(f'<text class="{kind}" x="{x}" y="{y}" text-anchor="{anchor}">{escape(text)}</text>')

    def lines(self, x, y, rows, anchor="start", step=18):
        """Rows of (text, class), one below the other."""
        for number, (text, kind) in enumerate(rows):
            self.text(x, y + number * step, text, kind, anchor)

    def path(self, points, kind="link", width=1.5, dashed=False, ends=""):
        """A polyline; `ends` says where it has arrow heads: "start", "end", or both."""
        dash = ' stroke-dasharray="6 4"' if dashed else ""
        heads = "".join(f' marker-{end}="url(#{kind})"' for end in ("start", "end") if end in ends)
        route = " ".join(f"{'M' if number == 0 else 'L'}{x} {y}" for number, (x, y) in enumerate(points))
        self.parts.append(f'<path class="{kind}" d="{route}" stroke-width="{width}"{dash}{heads}/>')

    def svg(self):
        head = '<marker id="{0}" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto-start-reverse">' \
            '<path class="{0}-head" d="M0 0L10 5L0 10z"/></marker>'
        title = "Pods on nodes, two vipgate gateways with VIPs, an ECMP router, remote hosts, and a policy server"
        return "\n".join([
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}">',
            f"<title>{title}</title>",
            f"<style>{style()}</style>",
            f"<defs>{''.join(head.format(name) for name in LINES)}</defs>",
            f'<rect class="page" width="{WIDTH}" height="{HEIGHT}" rx="10"/>',
            *self.parts,
            "</svg>",
            "",
        ])


def cluster(draw):
    """Nodes and pods."""
    draw.box(20, 120, 250, 330, "zone")
    draw.text(36, 146, "Kubernetes cluster", "title")
    for top, node, pods in [
        (162, "node-1", [("pod tenant-a/api-0", "10.244.1.11"), ("pod tenant-b/web-0", "10.244.1.21")]),
        (306, "node-2", [("pod tenant-a/api-1", "10.244.2.12"), ("pod tenant-b/web-1", "10.244.2.22")]),
    ]:
        draw.box(36, top, 218, 128, "zone", dashed=True)
        draw.text(48, top + 20, node, "note")
        for number, (name, address) in enumerate(pods):
            y = top + 30 + number * 47
            draw.box(48, y, 194, 40)
            draw.text(58, y + 17, name)
            draw.text(58, y + 33, address, "note mono")


def gateways(draw):
    """The policy server and two gateways with their VIPs."""
    draw.box(385, 20, 270, 66)
    draw.lines(520, 44, [("Policy server (policyd)", "title"), ("Services, EndpointSlices, EgressPolicies", "note")], "middle", 22)
    for top, name in [(134, "gw-a"), (324, "gw-b")]:
        draw.box(400, top, 240, 112, "gateway")
        draw.lines(416, top + 26, [
            (f"Gateway {name}", "title"),
            ("AF_XDP, one worker per core", "note"),
            ("VIP 203.0.113.10  tenant-a/api", "text mono"),
            ("VIP 203.0.113.20  tenant-b/web", "text mono"),
        ], step=22)
    draw.path([(520, 250), (520, 320)], "peer", 2, ends="start end")
    draw.lines(530, 276, [("replication (TLS)", "peer-text"), ("forwarding to the", "peer-text"), ("owner (VXLAN)", "peer-text")], step=16)
    # Membership and policy.
    draw.path([(500, 88), (500, 131)], "control", 1.5, True, "start end")
    draw.text(510, 114, "gRPC: delta xDS, leases", "control-text")
    draw.path([(382, 62), (364, 62), (364, 380), (397, 380)], "control", 1.5, True, "start end")


def network(draw):
    """The ECMP router and remote hosts."""
    draw.box(706, 226, 108, 118)
    draw.lines(760, 256, [("Router", "title"), ("ECMP", "text"), ("routes to VIPs:", "note"), ("BGP, or L2", "note")], "middle", 22)
    for top, name, address, role, peer in [
        (134, "Remote server", "198.51.100.10", "sees the source", "203.0.113.10"),
        (338, "Remote client", "198.51.100.20", "connects to", "203.0.113.20:443"),
    ]:
        draw.box(872, top, 172, 100)
        draw.lines(886, top + 26, [(name, "title"), (address, "note mono"), (role, "note"), (peer, "text mono")], step=21)


def traffic(draw):
    """Links, and the two directions in which sessions are opened."""
    draw.path([(254, 205), (397, 170)], "egress", 2, ends="end")
    draw.path([(640, 170), (703, 262)], "egress", 2, ends="end")
    draw.path([(814, 262), (869, 196)], "egress", 2, ends="end")
    draw.path([(872, 388), (817, 316)], "inbound", 2, ends="end")
    draw.path([(706, 312), (643, 400)], "inbound", 2, ends="end")
    draw.path([(400, 400), (257, 388)], "inbound", 2, ends="end")
    draw.path([(254, 362), (400, 222)], "link")
    draw.path([(640, 220), (706, 276)], "link")
    draw.path([(640, 350), (706, 296)], "link")
    draw.path([(254, 250), (400, 350)], "link")


def legend(draw):
    """What the colors mean."""
    y = 486
    draw.path([(36, y), (76, y)], "egress", 2, ends="end")
    draw.text(86, y + 4, "egress: SNAT, pod address to VIP, replies reversed", "egress-text")
    draw.path([(36, y + 30), (76, y + 30)], "inbound", 2, ends="end")
    draw.text(86, y + 34, "inbound: DNAT load balancing, VIP:port to backend, client address kept", "inbound-text")
    draw.path([(590, y), (630, y)], "peer", 2, ends="start end")
    draw.text(640, y + 4, "between gateways: replication, forwarding", "peer-text")
    draw.path([(590, y + 30), (630, y + 30)], "control", 1.5, True, "start end")
    draw.text(640, y + 34, "policy and membership", "control-text")


def main():
    draw = Drawing()
    for part in (cluster, gateways, network, traffic, legend):
        part(draw)
    Path(__file__).with_suffix(".svg").write_text(draw.svg(), encoding="utf-8")


if __name__ == "__main__":
    main()
