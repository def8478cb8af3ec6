//! Link faults of a cluster: cuts, repairs and impairments.
//!
//! A cut keeps the carrier: the port leaves its bridge, as when a switch in between fails. Loss, delay and reordering
//! come from a switch in user space, since not every kernel has netem.

use std::time::Duration;

use serde_json::Value;
use vipgate_lab::Process;

use super::Cluster;
use crate::traffic::script_path;

/// Impairment of frames between gateways.
#[derive(Clone, Copy, Debug)]
pub struct Impairment {
    /// Loss in percent.
    pub loss: f64,
    /// Duplication in percent.
    pub duplicate: f64,
    /// Delay in milliseconds.
    pub delay: f64,
    /// Upper bound of the additional delay, milliseconds.
    pub jitter: f64,
}

/// The impaired switch that replaces the peer bridge.
#[derive(Debug)]
pub struct ImpairedSwitch(Process);

impl ImpairedSwitch {
    /// Forwards all frames without impairment from now on.
    pub fn stop_impairment(&self) {
        self.0.signal("USR1").unwrap();
    }

    /// Stops the switch; returns the numbers of frames seen and lost.
    pub fn end(mut self) -> [u64; 2] {
        self.0.stop("TERM", Duration::from_secs(5)).unwrap().expect("the switch exits");
        let output = self.0.log();
        let counts: Value = serde_json::from_str(output.lines().last().unwrap()).unwrap();
        ["frames", "lost"].map(|name| counts[name].as_u64().unwrap())
    }
}

impl Cluster {
    fn port(number: usize) -> String {
        format!("gw{}", number + 1)
    }

    /// Disconnects a gateway from all other gateways.
    pub fn cut_peers(&self, number: usize) {
        self.peers.ip(&["link", "set", &Self::port(number), "nomaster"]).unwrap();
    }

    /// Reconnects a gateway to the others.
    pub fn heal_peers(&self, number: usize) {
        self.peers.ip(&["link", "set", &Self::port(number), "master", "peers"]).unwrap();
    }

    /// Disconnects a gateway from the policy server.
    pub fn cut_management(&self, number: usize) {
        self.management.ip(&["link", "set", &Self::port(number), "nomaster"]).unwrap();
    }

    /// Reconnects a gateway to the policy server.
    pub fn heal_management(&self, number: usize) {
        self.management.ip(&["link", "set", &Self::port(number), "master", "mgmt"]).unwrap();
    }

    /// Drops all frames between two gateways, and no others. Only one such cut at a time.
    pub fn cut_between(&self, one: usize, other: usize) {
        let (one, other) = (Self::port(one), Self::port(other));
        let rules = format!(
            "add table bridge cut; add chain bridge cut forward {{ type filter hook forward priority 0; }}; \
             add rule bridge cut forward iifname {one} oifname {other} drop; \
             add rule bridge cut forward iifname {other} oifname {one} drop"
        );
        self.peers.output(&["nft", &rules]).unwrap();
    }

    /// Undoes [`Cluster::cut_between`].
    pub fn heal_between(&self) {
        self.peers.output(&["nft", "delete table bridge cut"]).unwrap();
    }

    /// Replaces the peer bridge by an impaired switch, reproducible by `seed`.
    pub fn impair_peers(&self, impairment: Impairment, seed: u64) -> ImpairedSwitch {
        let Impairment { loss, duplicate, delay, jitter } = impairment;
        let numbers = [loss, duplicate, delay, jitter].map(|number| number.to_string());
        let (seed, script) = (seed.to_string(), script_path("cluster/impaired_switch.py"));
        let ports: Vec<String> = self.indices().into_iter().map(Self::port).chain(["intruder".to_owned()]).collect();
        for port in &ports {
            // The switch's own host must not send on its ports.
            self.peers.sysctl(&format!("net.ipv6.conf.{port}.disable_ipv6"), 1).unwrap();
            self.peers.ip(&["link", "set", port, "nomaster"]).unwrap();
        }
        let mut command = vec!["python3", script.as_str()];
        command.extend(numbers.iter().map(String::as_str));
        command.push(&seed);
        command.extend(ports.iter().map(String::as_str));
        let mut process = self.peers.spawn(&command, &self.folder_path().join("impaired.log")).unwrap();
        process.wait_for_log("listening", Duration::from_secs(5)).unwrap_or_else(|error| panic!("{error}"));
        ImpairedSwitch(process)
    }

    /// Restores the peer bridge; returns the numbers of frames seen and lost.
    pub fn repair_peers(&self, impaired: ImpairedSwitch) -> [u64; 2] {
        let counts = impaired.end();
        for number in self.indices() {
            self.heal_peers(number);
        }
        self.peers.ip(&["link", "set", "intruder", "master", "peers"]).unwrap();
        counts
    }
}
