//! The demo's report: short, and each line says whether it holds.

use std::io::IsTerminal;

use super::group::{Group, VIPS};
use super::topology::{Pod, SERVER, Topology};
use crate::failure::Failure;

/// The first act's network.
const PICTURE: &str = r"
   pod-a1  10.1.0.11 ---+
   pod-a2  10.1.0.12 ---+--- gw-in [ gateway ] gw-out ---- router ---- server  198.51.100.10
   pod-b1  10.1.0.21 ---+           |                                          2001:db8:51::10
           fd00:1::/64              tenant A leaves as 203.0.113.10  2001:db8:113::10
                                    tenant B leaves as 203.0.113.20  2001:db8:113::20
                                    at 203.0.113.10 port 80 and 53, tenant A's pods serve
                                    no host has these addresses; the gateway answers for them
";

/// The second act's.
const GROUP_PICTURE: &str = r"
                             +--- [ gw-1 ] ---+
   pod-c1  10.1.0.31 ---+    |       ||       |
                        +-- router   ||   router ---- server  198.51.100.10
   pod-c2  10.1.0.32 ---+    |       ||       |               2001:db8:51::10
           fd00:1::/64       +--- [ gw-2 ] ---+

           both gateways serve 192.0.2.10  2001:db8:2::10, each a share; a policy server says which of them live
           ||  copies of sessions, and packets that came to the one that doesn't have their session
           each router chooses a gateway for each connection; what is dead it is told after 300 ms, as by BFD
";

/// What the server saw of a pod in one address family.
#[derive(Clone, Debug, Default)]
pub(super) struct Seen {
    pub(super) http: String,
    pub(super) udp: String,
    pub(super) ping: bool,
}

/// Prints as it goes, and counts what doesn't hold.
#[derive(Debug)]
pub(super) struct Report {
    lines: u32,
    failed: u32,
    colour: bool,
}

impl Report {
    pub(super) fn new() -> Self {
        Self { lines: 0, failed: 0, colour: std::io::stdout().is_terminal() }
    }

    pub(super) fn title() {
        println!("vipgate demo: pods leave as their Service's VIP, and are reached at it\n{PICTURE}");
    }

    pub(super) fn second_title() {
        println!("\nSecond act: two gateways, one of which is killed during a download\n{GROUP_PICTURE}");
    }

    pub(super) fn section(title: &str) {
        println!("\n{title}");
    }

    /// One line: what should hold, whether it does, and what was seen.
    pub(super) fn line(&mut self, what: &str, holds: bool, seen: &str) {
        self.lines += 1;
        self.failed += u32::from(!holds);
        let mark = match (holds, self.colour) {
            (true, true) => "\x1b[32mok\x1b[0m    ",
            (true, false) => "ok    ",
            (false, true) => "\x1b[31mFAILED\x1b[0m",
            (false, false) => "FAILED",
        };
        println!("  {mark}  {what:<44} {seen}");
    }

    /// What the server saw of a pod at two addresses, one of each family.
    pub(super) fn seen(&mut self, pod: &Pod, servers: [&str; 2], seen: &[Seen; 2], expected: &[&str; 2]) {
        for ((server, seen), expected) in servers.iter().zip(seen).zip(expected) {
            let holds = seen.http == *expected && seen.udp == *expected && seen.ping;
            let what = format!("tenant {} {} -> {server}", pod.tenant, pod.host.name());
            let ping = if seen.ping { "ping answered" } else { "no answer to ping" };
            let told = if seen.http == seen.udp {
                format!("HTTP and UDP from {}, {ping}", seen.http)
            } else {
                format!("HTTP from {}, UDP from {}, {ping}", seen.http, seen.udp)
            };
            self.line(&what, holds, &told);
        }
    }

    /// How to look around.
    pub(super) fn keep(topology: &Topology, group: &Group) {
        let socket = topology.socket().display().to_string();
        println!("\nBoth networks stay up. Look around, for example:");
        println!("  ip netns exec {} ping {}", topology.pods[0].host.netns(), SERVER[0]);
        println!("  ip netns exec {} curl http://203.0.113.10/", topology.server.netns());
        for command in ["services", "status", "sessions"] {
            println!("  vipgate {command} --socket {socket}");
        }
        println!("  ip netns exec {} curl http://{}/", group.pods[0].netns(), SERVER[0]);
        println!("  ip netns exec {} curl http://{}/", group.server.netns(), VIPS[0]);
        for (gateway, command) in group.gateways.iter().zip(["peers", "endpoints"]) {
            println!("  vipgate {command} --socket {}", gateway.socket.display());
        }
        println!("Enter or Ctrl-C removes everything.");
    }

    /// The last line; an error if something didn't hold.
    pub(super) fn end(&self) -> Result<(), Failure> {
        if self.failed == 0 {
            println!("\nAll {} lines hold.", self.lines);
            return Ok(());
        }
        Err(Failure::runtime(format_args!("{} of {} lines do not hold", self.failed, self.lines)))
    }
}
