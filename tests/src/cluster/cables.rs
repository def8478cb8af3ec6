//! Cables of a cluster that are cut, healed, and bad.
//!
//! A cut cable keeps its carrier: the ports at the switch let go of each other, as a switch in between would that fails. Loss, delay and
//! reordering come from a switch in user space, since not every kernel has netem.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use serde_json::Value;
use vipgate::lab::Process;

use super::Cluster;
use crate::traffic::script;
use crate::wait_for;

/// What happens to frames between gateways.
#[derive(Clone, Copy, Debug)]
pub struct Impairment {
    /// Lost, percent.
    pub loss: f64,
    /// Sent twice, percent.
    pub repeat: f64,
    /// How long each takes, milliseconds.
    pub delay: f64,
    /// How much longer some of them take.
    pub jitter: f64,
}

/// A bad switch between gateways, in place of the good one.
#[derive(Debug)]
pub struct Impaired {
    process: Process,
    log: PathBuf,
}

impl Impaired {
    /// From now on all frames pass, and at once.
    pub fn be_perfect(&self) {
        self.process.signal("USR1").unwrap();
    }

    /// Ends it; frames that it has seen, and lost.
    pub fn end(mut self) -> [u64; 2] {
        self.process.signal("TERM").unwrap();
        self.process.wait(Duration::from_secs(5)).expect("it ends");
        let said = fs::read_to_string(&self.log).unwrap();
        let counts: Value = serde_json::from_str(said.lines().last().unwrap()).unwrap();
        ["frames", "lost"].map(|name| counts[name].as_u64().unwrap())
    }
}

impl Cluster {
    fn port(number: usize) -> String {
        format!("gw{}", number + 1)
    }

    /// Cuts a gateway off from all other gateways.
    pub fn cut_peers(&self, number: usize) {
        self.peers.ip(&["link", "set", &Self::port(number), "nomaster"]).unwrap();
    }

    /// Undoes that.
    pub fn heal_peers(&self, number: usize) {
        self.peers.ip(&["link", "set", &Self::port(number), "master", "peers"]).unwrap();
    }

    /// Cuts a gateway off from the policy server.
    pub fn cut_management(&self, number: usize) {
        self.management.ip(&["link", "set", &Self::port(number), "nomaster"]).unwrap();
    }

    /// Undoes that.
    pub fn heal_management(&self, number: usize) {
        self.management.ip(&["link", "set", &Self::port(number), "master", "mgmt"]).unwrap();
    }

    /// Two gateways don't hear each other any more, while all others do. Before the first such cut there must be none.
    pub fn cut_between(&self, one: usize, other: usize) {
        let (one, other) = (Self::port(one), Self::port(other));
        let rules = format!(
            "add table bridge cut; add chain bridge cut forward {{ type filter hook forward priority 0; }}; \
             add rule bridge cut forward iifname {one} oifname {other} drop; \
             add rule bridge cut forward iifname {other} oifname {one} drop"
        );
        self.peers.output(&["nft", &rules]).unwrap();
    }

    /// All gateways hear each other again.
    pub fn heal_between(&self) {
        self.peers.output(&["nft", "delete table bridge cut"]).unwrap();
    }

    /// Puts a bad switch between the gateways in place of the good one; what it does to frames follows from `seed`.
    pub fn impair_peers(&self, impairment: Impairment, seed: u64) -> Impaired {
        let Impairment { loss, repeat, delay, jitter } = impairment;
        let numbers = [loss, repeat, delay, jitter].map(|number| number.to_string());
        let (seed, script) = (seed.to_string(), script("cluster/impaired_switch.py"));
        let ports: Vec<String> = self.all().into_iter().map(Self::port).chain(["stranger".to_owned()]).collect();
        for port in &ports {
            // The switch's own host keeps out of it.
            self.peers.sysctl(&format!("net.ipv6.conf.{port}.disable_ipv6"), 1).unwrap();
            self.peers.ip(&["link", "set", port, "nomaster"]).unwrap();
        }
        let mut command = vec!["python3", script.as_str()];
        command.extend(numbers.iter().map(String::as_str));
        command.push(&seed);
        command.extend(ports.iter().map(String::as_str));
        let log = self.path().join("impaired.log");
        let process = self.peers.spawn(&command, &log).unwrap();
        let works = || fs::read_to_string(&log).is_ok_and(|log| log.contains("listening"));
        assert!(wait_for(Duration::from_secs(5), works), "{}", fs::read_to_string(&log).unwrap());
        Impaired { process, log }
    }

    /// Puts the good switch back.
    pub fn repair_peers(&self, impaired: Impaired) -> [u64; 2] {
        let counts = impaired.end();
        for number in self.all() {
            self.heal_peers(number);
        }
        self.peers.ip(&["link", "set", "stranger", "master", "peers"]).unwrap();
        counts
    }
}
