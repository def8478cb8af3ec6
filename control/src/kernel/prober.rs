//! Asks next hops whether they are there: by ARP requests and neighbour solicitations of our own, since the kernel's, which it sends once a
//! second, take four seconds to find a next hop dead. The answers are for the kernel's own addresses, so the steering program lets them pass.
//!
//! `liveness` decides, `frame` knows the bytes; here are the sockets and the clock.

mod frame;
mod liveness;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::{MissedTickBehavior, interval};
use tracing::debug;
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::spec::{InterfaceSpec, NetworkSpec, RouteTarget};
use vipgate_xdp::packet::{PacketSocket, Replies};

use self::liveness::Liveness;
pub use self::liveness::{NextHopState, NextHopStatus};
use super::network::Network;

/// Next hops that are probed on one interface: where there are more, one of these speaks for them.
const MAX_HOPS: usize = 16;
/// Frames that are read from a socket in one round: more than come for all probes.
const MAX_REPLIES: usize = 4 * MAX_HOPS;

/// A next hop: an address behind an interface.
type Hop = (InterfaceId, IpAddr);

/// How next hops are probed.
#[derive(Clone, Debug)]
pub struct ProbePlan {
    /// Time between two probes.
    pub interval: Duration,
    /// So many in a row without an answer are a dead next hop.
    pub failures: u32,
    /// What is probed on an interface in place of the next hops of its routes.
    pub targets: Vec<(InterfaceId, IpAddr)>,
}

/// The task that probes; it ends when this is dropped.
#[derive(Debug)]
pub struct Prober {
    hops: watch::Receiver<Vec<NextHopStatus>>,
    task: JoinHandle<()>,
}

impl Prober {
    /// Starts the task in the current runtime, for the interfaces of `network` and in this thread's namespace.
    pub fn start(network: &Network, plan: ProbePlan) -> Self {
        let (published, hops) = watch::channel(Vec::new());
        let task = Task {
            liveness: Liveness::new(plan.failures),
            plan,
            network: network.follow(),
            known: Arc::default(),
            sockets: BTreeMap::new(),
            published,
        };
        Self { hops, task: tokio::spawn(task.run()) }
    }

    /// How next hops stand; it counts as changed only when the state of one of them has.
    pub fn hops(&self) -> watch::Receiver<Vec<NextHopStatus>> {
        self.hops.clone()
    }
}

impl Drop for Prober {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Task {
    plan: ProbePlan,
    liveness: Liveness,
    network: watch::Receiver<Arc<NetworkSpec>>,
    /// The network that next hops were last taken from.
    known: Arc<NetworkSpec>,
    /// By the kernel's index of the interface, and the family.
    sockets: BTreeMap<(u32, bool), PacketSocket>,
    published: watch::Sender<Vec<NextHopStatus>>,
}

impl Task {
    async fn run(mut self) {
        let mut tick = interval(self.plan.interval);
        // After a pause of ours, next hops get their time again.
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tick.tick().await;
            self.round();
        }
    }

    /// Reads the answers to the last probes, judges, and sends the next ones: answers that lie there were in time, however late we come.
    fn round(&mut self) {
        let network = self.network.borrow_and_update().clone();
        if !Arc::ptr_eq(&network, &self.known) {
            self.liveness.set_hops(&hops(&network, &self.plan.targets));
            let there: BTreeSet<u32> = network.interfaces.iter().map(|interface| interface.ifindex).collect();
            self.sockets.retain(|(ifindex, _), _| there.contains(ifindex));
            self.known = network.clone();
        }
        let now = Instant::now();
        for interface in &network.interfaces {
            for is_v6 in [false, true] {
                self.read(interface, is_v6, now);
            }
        }
        for (hop, is_lost) in self.liveness.round() {
            let interface = network.interfaces.iter().find(|interface| interface.id == hop.0 && interface.up);
            let sent = interface.is_some_and(|interface| self.probe(&network, interface, hop.1, is_lost));
            if sent {
                self.liveness.probed(hop);
            }
        }
        let status = self.liveness.status();
        self.published.send_if_modified(|known| {
            let states =
                |all: &[NextHopStatus]| all.iter().map(|it| (it.interface, it.address, it.state)).collect::<Vec<_>>();
            let is_new = states(known) != states(&status);
            *known = status;
            is_new
        });
    }

    fn read(&mut self, interface: &InterfaceSpec, is_v6: bool, now: Instant) {
        let Some(socket) = self.sockets.get(&(interface.ifindex, is_v6)) else { return };
        let mut room = [0; 128];
        for _ in 0..MAX_REPLIES {
            match socket.receive(&mut room) {
                Ok(Some(reply)) => {
                    if let Some(address) = frame::answered(reply) {
                        self.liveness.answered((interface.id, address), now);
                    }
                }
                Ok(None) => return,
                Err(error) => {
                    debug!(interface = %interface.name, %error, "can't read the answers of next hops");
                    return;
                }
            }
        }
    }

    /// Sends a probe: to the next hop alone, as long as it is known where that is and it answers; else to all.
    fn probe(&mut self, network: &NetworkSpec, interface: &InterfaceSpec, address: IpAddr, is_lost: bool) -> bool {
        let known = network.neighbours.iter().find(|it| it.interface == interface.id && it.address == address);
        let mac = known.filter(|_| !is_lost).map(|it| it.mac);
        let Some(frame) = frame::request(interface.mac, &interface.addresses, address, mac) else { return false };
        let outcome = self.socket(interface.ifindex, address.is_ipv6()).and_then(|socket| socket.send(&frame));
        if let Err(error) = &outcome {
            debug!(interface = %interface.name, %address, %error, "can't probe a next hop");
        }
        // A queue that is full for three probes in a row is as good as a dead next hop; a missing right is not.
        outcome.is_ok() || outcome.is_err_and(|error| error.raw_os_error() == Some(libc::ENOBUFS))
    }

    fn socket(&mut self, ifindex: u32, is_v6: bool) -> std::io::Result<&PacketSocket> {
        let replies = if is_v6 { Replies::NeighborAdvertisement } else { Replies::Arp };
        match self.sockets.entry((ifindex, is_v6)) {
            std::collections::btree_map::Entry::Occupied(known) => Ok(known.into_mut()),
            std::collections::btree_map::Entry::Vacant(place) => {
                Ok(place.insert(PacketSocket::open(ifindex, replies)?))
            }
        }
    }
}

/// What is probed: on each interface the targets of the configuration, or else the next hops of routes, default routes' first.
fn hops(network: &NetworkSpec, targets: &[Hop]) -> Vec<Hop> {
    let mut routes: Vec<_> = network.routes.iter().collect();
    routes.sort_by_key(|route| route.prefix.prefix_len());
    let via = routes.into_iter().filter_map(|route| match &route.target {
        RouteTarget::Via(hops) => Some(hops),
        RouteTarget::Local | RouteTarget::Unreachable => None,
    });
    let has_targets = |interface| targets.iter().any(|target| target.0 == interface);
    let routers = via.flatten().filter_map(|hop| Some((hop.interface, hop.gateway?))).filter(|hop| !has_targets(hop.0));
    let mut found: Vec<Hop> = Vec::new();
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
    use vipgate_dataplane::snapshot::spec::{HopSpec, RouteSpec};

    use super::*;

    fn route(prefix: &str, hops: &[(u8, &str)]) -> RouteSpec {
        let hop = |(interface, gateway): &(u8, &str)| HopSpec {
            interface: InterfaceId(*interface),
            gateway: gateway.parse().ok(),
        };
        RouteSpec { prefix: prefix.parse().unwrap(), target: RouteTarget::Via(hops.iter().map(hop).collect()) }
    }

    fn hop(interface: u8, address: &str) -> Hop {
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
        // Targets take the place of an interface's routes, and of no other's.
        let targets = [hop(1, "203.0.113.9")];
        assert_eq!(hops(&network, &targets), [hop(1, "203.0.113.9"), hop(0, "10.4.1.254")]);
        network.routes = (0..100).map(|n| route(&format!("10.{n}.0.0/16"), &[(0, &format!("10.0.0.{n}"))])).collect();
        assert_eq!(hops(&network, &[]).len(), MAX_HOPS);
    }
}
