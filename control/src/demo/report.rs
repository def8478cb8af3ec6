//! The demo's report: one line per check, with its result.

use std::io::IsTerminal;
use std::time::Instant;

use super::topology::Pod;
use crate::command_error::CommandError;
use crate::output::progress;

/// Topology of the first scenario.
const SINGLE_DIAGRAM: &str = r"
   pod-a1  10.1.0.11 ---+
   pod-a2  10.1.0.12 ---+--- gw-in [ gateway ] gw-out ---- router ---- server  198.51.100.10
   pod-b1  10.1.0.21 ---+           |                                          2001:db8:51::10
           fd00:1::/64              tenant A: SNAT to 203.0.113.10  2001:db8:113::10
                                    tenant B: SNAT to 203.0.113.20  2001:db8:113::20
                                    203.0.113.10 ports 80 and 53: DNAT to tenant A's pods
                                    no host has these VIPs; the gateway answers ARP and NDP for them
";

/// Topology of the second scenario.
const FAILOVER_DIAGRAM: &str = r"
                             +--- [ gw-1 ] ---+
   pod-c1  10.1.0.31 ---+    |       ||       |
                        +-- router   ||   router ---- server  198.51.100.10
   pod-c2  10.1.0.32 ---+    |       ||       |               2001:db8:51::10
           fd00:1::/64       +--- [ gw-2 ] ---+

           VIPs 192.0.2.10 and 2001:db8:2::10: each gateway owns a shard of their ports
           || is the link between the gateways: session replication, and packets for the other one's sessions
           a policy server, not shown, manages membership
           the routers hash connections over both gateways (ECMP), and detect a dead one after 300 ms, as with BFD
";

/// Topology of the third scenario.
const NODE_DIAGRAM: &str = r"
                                  +--- [ gw-1 ] ---+
   pod-d1  10.244.1.5 ---+        |       ||       |
   pod-d2  10.244.1.6 ---+-- node-1       ||   router ---- server  198.51.100.10
   pod-e1  10.244.1.7 ---+    | | |       ||       |               2001:db8:51::10
           fd00:244:1::/64    | | +--- [ gw-2 ] ---+
                              | +------------------+
                              agent
           VIPs 192.0.2.20 and 2001:db8:2:1::20 of tenant D; tenant E has no policy
           no route leads to a gateway: the agent steers pods' packets into a tunnel, and follows who is alive
           the node's own way to the server is open, and it masquerades what takes that
";

/// Source addresses of a pod that the server saw, in one address family.
#[derive(Clone, Debug, Default)]
pub(super) struct ObservedSources {
    pub(super) http: String,
    pub(super) udp: String,
    pub(super) ping: bool,
}

/// The source addresses of HTTP and UDP as text.
pub(super) fn both(http: &str, udp: &str) -> String {
    if http == udp { format!("HTTP and UDP from {http}") } else { format!("HTTP from {http}, UDP from {udp}") }
}

/// How long after a moment something was seen.
pub(super) fn after(start: Instant, what: &str) -> String {
    format!("{:.1} s after {what}", start.elapsed().as_secs_f64())
}

/// Prints checks as they complete, and counts failures.
#[derive(Debug)]
pub(super) struct Report {
    lines: u32,
    failed: u32,
    color: bool,
}

impl Report {
    pub(super) fn new() -> Self {
        Self { lines: 0, failed: 0, color: std::io::stdout().is_terminal() }
    }

    pub(super) fn title() {
        progress!(
            "Scenario 1: one gateway: SNAT of pods to their Service's VIP, load balancing at it\n{SINGLE_DIAGRAM}"
        );
    }

    pub(super) fn cluster_title() {
        progress!("One gateway, with the policy of a cluster's API\n{SINGLE_DIAGRAM}");
    }

    pub(super) fn failover_title() {
        progress!("\nScenario 2: two gateways, one of which is killed during a download\n{FAILOVER_DIAGRAM}");
    }

    pub(super) fn node_title() {
        progress!(
            "\nScenario 3: a node whose agent steers its pods to two gateways, one of which is killed\n{NODE_DIAGRAM}"
        );
    }

    pub(super) fn section(title: &str) {
        progress!("\n{title}");
    }

    /// Prints a command and its output.
    pub(super) fn output(command: &str, text: &str) {
        progress!("\n      $ {command}");
        for line in text.trim_end().lines() {
            progress!("      {line}");
        }
    }

    /// Prints a check: description, result, and observed values.
    pub(super) fn check(&mut self, what: &str, holds: bool, seen: &str) {
        self.lines += 1;
        self.failed += u32::from(!holds);
        let mark = match (holds, self.color) {
            (true, true) => "\x1b[32mok\x1b[0m    ",
            (true, false) => "ok    ",
            (false, true) => "\x1b[31mFAILED\x1b[0m",
            (false, false) => "FAILED",
        };
        progress!("{}", format!("  {mark}  {what:<44} {seen}").trim_end());
    }

    /// Checks what the server saw of a pod at two addresses, one of each family.
    pub(super) fn check_sources(
        &mut self,
        pod: &Pod,
        servers: [&str; 2],
        seen: &[ObservedSources; 2],
        expected: &[&str; 2],
    ) {
        for ((server, seen), expected) in servers.iter().zip(seen).zip(expected) {
            let holds = seen.http == *expected && seen.udp == *expected && seen.ping;
            let what = format!("tenant {} {} -> {server}", pod.tenant, pod.host.name());
            let ping = if seen.ping { "ping works" } else { "ping FAILS" };
            self.check(&what, holds, &format!("{}, {ping}", both(&seen.http, &seen.udp)));
        }
    }

    /// Prints the result; an error if a check has failed.
    pub(super) fn finish(&self) -> Result<(), CommandError> {
        if self.failed == 0 {
            progress!("\nAll {} checks passed.", self.lines);
            return Ok(());
        }
        Err(CommandError::runtime(format!("{} of {} checks failed", self.failed, self.lines)))
    }
}
