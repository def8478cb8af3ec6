//! Next-hop liveness probing by ARP requests and neighbor solicitations. The kernel's own probes, one per second, take
//! four seconds to detect a dead next hop. The replies are addressed to the kernel's addresses, so the steering program
//! passes them to the kernel.
//!
//! `liveness` is the state machine, `frame` the encoding; this module has the sockets and the clock.

mod frame;
mod liveness;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::time::{MissedTickBehavior, interval};
use tracing::debug;
use vipgate_common::Task;
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::policy::spec::{InterfaceSpec, NetworkSpec, RouteTarget};
use vipgate_xdp::packet::{PacketSocket, ReplyFilter};

use self::liveness::Liveness;
pub use self::liveness::{NextHopState, NextHopStatus};
use super::network::Network;

/// Maximum number of next hops probed per interface and family.
const MAX_HOPS: usize = 16;
/// Maximum number of frames read from a socket per round: more than all probes yield.
const MAX_REPLIES: usize = 4 * MAX_HOPS;

/// A next hop: an address behind an interface.
type NextHop = (InterfaceId, IpAddr);

/// Configuration of the prober.
#[derive(Clone, Debug)]
pub struct ProbeConfig {
    /// Time between two probes.
    pub interval: Duration,
    /// Consecutive unanswered probes after which a next hop is down.
    pub max_unanswered: u32,
    /// Addresses probed on an interface instead of the next hops of its routes.
    pub targets: Vec<(InterfaceId, IpAddr)>,
}

/// Handle of the probing task. Dropping it ends the task.
#[derive(Debug)]
pub struct Prober {
    next_hops: watch::Receiver<Vec<NextHopStatus>>,
    _task: Task,
}

impl Prober {
    /// Starts the task in the current runtime, for the interfaces of `network` and in this thread's namespace.
    pub fn start(network: &Network, plan: ProbeConfig) -> Self {
        let (published, hops) = watch::channel(Vec::new());
        let task = Probing {
            liveness: Liveness::new(plan.max_unanswered),
            plan,
            network: network.subscribe(),
            applied: Arc::default(),
            sockets: BTreeMap::new(),
            published,
        };
        Self { next_hops: hops, _task: Task::spawn(task.run()) }
    }

    /// Subscribes to the state of all next hops; marked as changed only when a state changes.
    pub fn next_hops(&self) -> watch::Receiver<Vec<NextHopStatus>> {
        self.next_hops.clone()
    }
}

struct Probing {
    plan: ProbeConfig,
    liveness: Liveness,
    network: watch::Receiver<Arc<NetworkSpec>>,
    /// The network state that the probed next hops are from.
    applied: Arc<NetworkSpec>,
    /// By interface index and whether IPv6.
    sockets: BTreeMap<(u32, bool), PacketSocket>,
    published: watch::Sender<Vec<NextHopStatus>>,
}

impl Probing {
    async fn run(mut self) {
        let mut tick = interval(self.plan.interval);
        // After a delayed round, next hops still get a full interval to respond.
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            self.round();
        }
    }

    /// Reads the replies to the last probes, updates the states and sends the next probes. Queued replies count as in
    /// time, however late this round is.
    fn round(&mut self) {
        let network = self.network.borrow_and_update().clone();
        if !Arc::ptr_eq(&network, &self.applied) {
            self.liveness.set_next_hops(&hops(&network, &self.plan.targets));
            let present: BTreeSet<u32> = network.interfaces.iter().map(|interface| interface.ifindex).collect();
            self.sockets.retain(|(ifindex, _), _| present.contains(ifindex));
            self.applied = network.clone();
        }
        let now = Instant::now();
        for interface in &network.interfaces {
            for is_v6 in [false, true] {
                self.read(interface, is_v6, now);
            }
        }
        for (hop, is_lost) in self.liveness.next_round() {
            let interface = network.interfaces.iter().find(|interface| interface.id == hop.0 && interface.up);
            let sent = interface.is_some_and(|interface| self.probe(&network, interface, hop.1, is_lost));
            if sent {
                self.liveness.probe_sent(hop);
            }
        }
        let status = self.liveness.status();
        self.published.send_if_modified(|current| {
            let states =
                |all: &[NextHopStatus]| all.iter().map(|it| (it.interface, it.address, it.state)).collect::<Vec<_>>();
            let has_changed = states(current) != states(&status);
            *current = status;
            has_changed
        });
    }

    fn read(&mut self, interface: &InterfaceSpec, is_v6: bool, now: Instant) {
        let Some(socket) = self.sockets.get(&(interface.ifindex, is_v6)) else { return };
        // Longer than an advertisement with all options: a truncated one isn't valid.
        let mut buffer = [0; 2048];
        for _ in 0..MAX_REPLIES {
            match socket.receive(&mut buffer) {
                Ok(Some(reply)) => {
                    if let Some(address) = frame::decode_reply(reply) {
                        self.liveness.reply_received((interface.id, address), now);
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    debug!(interface = %interface.name, %error, "can't read the replies of next hops");
                    return;
                }
            }
        }
    }

    /// Sends a probe: unicast if the MAC address is known and the last probe was answered, else broadcast or multicast.
    fn probe(&mut self, network: &NetworkSpec, interface: &InterfaceSpec, address: IpAddr, is_lost: bool) -> bool {
        let neighbor = network.neighbors.iter().find(|it| it.interface == interface.id && it.address == address);
        let mac = neighbor.filter(|_| !is_lost).map(|it| it.mac);
        let Some(frame) = frame::encode_probe(interface.mac, &interface.addresses, address, mac) else { return false };
        let result = self.socket(interface.ifindex, address.is_ipv6()).and_then(|socket| socket.send(&frame));
        if let Err(error) = &result {
            debug!(interface = %interface.name, %address, %error, "can't probe a next hop");
        }
        // A full transmit queue counts as an unanswered probe; other errors, such as missing permission, don't.
        result.is_ok() || result.is_err_and(|error| error.raw_os_error() == Some(libc::ENOBUFS))
    }

    fn socket(&mut self, ifindex: u32, is_v6: bool) -> std::io::Result<&PacketSocket> {
        let replies = if is_v6 { ReplyFilter::NeighborAdvertisement } else { ReplyFilter::Arp };
        match self.sockets.entry((ifindex, is_v6)) {
            std::collections::btree_map::Entry::Occupied(entry) => Ok(entry.into_mut()),
            std::collections::btree_map::Entry::Vacant(entry) => {
                Ok(entry.insert(PacketSocket::open(ifindex, replies)?))
            }
        }
    }
}

/// The next hops to probe: per interface the configured targets, or else the next hops of its routes, default routes
/// first.
fn hops(network: &NetworkSpec, targets: &[NextHop]) -> Vec<NextHop> {
    let mut routes: Vec<_> = network.routes.iter().collect();
    routes.sort_by_key(|route| route.prefix.prefix_len());
    let via = routes.into_iter().filter_map(|route| match &route.target {
        RouteTarget::Via(hops) => Some(hops),
        RouteTarget::Local | RouteTarget::Unreachable => None,
    });
    let has_targets = |interface| targets.iter().any(|target| target.0 == interface);
    let routers = via.flatten().filter_map(|hop| Some((hop.interface, hop.gateway?))).filter(|hop| !has_targets(hop.0));
    let mut found: Vec<NextHop> = Vec::new();
    for hop in targets.iter().copied().chain(routers) {
        let on_interface = found.iter().filter(|it| it.0 == hop.0 && it.1.is_ipv4() == hop.1.is_ipv4()).count();
        if on_interface < MAX_HOPS && !found.contains(&hop) {
            found.push(hop);
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use vipgate_dataplane::policy::spec::{HopSpec, RouteSpec};

    use super::*;

    fn route(prefix: &str, hops: &[(u8, &str)]) -> RouteSpec {
        let hop = |(interface, gateway): &(u8, &str)| HopSpec {
            interface: InterfaceId(*interface),
            gateway: gateway.parse().ok(),
        };
        RouteSpec { prefix: prefix.parse().unwrap(), target: RouteTarget::Via(hops.iter().map(hop).collect()) }
    }

    fn hop(interface: u8, address: &str) -> NextHop {
        (InterfaceId(interface), address.parse().unwrap())
    }

    #[test]
    fn default_routes_are_probed_first_and_each_next_hop_once() {
        let mut network = NetworkSpec {
            routes: vec![
                route("10.1.0.0/16", &[(0, "10.4.1.254"), (0, "")]),
                route("0.0.0.0/0", &[(1, "203.0.113.254"), (1, "203.0.113.253")]),
                route("::/0", &[(1, "fe80::1")]),
                route("10.2.0.0/16", &[(1, "203.0.113.254")]),
                RouteSpec { prefix: "10.9.0.0/16".parse().unwrap(), target: RouteTarget::Unreachable },
            ],
            ..NetworkSpec::default()
        };
        let expected = [hop(1, "203.0.113.254"), hop(1, "203.0.113.253"), hop(1, "fe80::1"), hop(0, "10.4.1.254")];
        let found = hops(&network, &[]);
        assert!(found.len() == expected.len() && expected.iter().all(|it| found.contains(it)), "{found:?}");
        assert_eq!(found.last(), Some(&hop(0, "10.4.1.254")));
        // Targets replace the next hops of their own interface only.
        let targets = [hop(1, "203.0.113.9")];
        assert_eq!(hops(&network, &targets), [hop(1, "203.0.113.9"), hop(0, "10.4.1.254")]);
        network.routes = (0..100).map(|n| route(&format!("10.{n}.0.0/16"), &[(0, &format!("10.0.0.{n}"))])).collect();
        assert_eq!(hops(&network, &[]).len(), MAX_HOPS);
    }
}
