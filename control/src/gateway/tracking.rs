//! Interface and next-hop tracking, as in VRRP: whether this gateway is able to forward. The result is a list of
//! faults; the policy server decides whether a gateway with faults stays active.

mod hold_down;
mod next_hops;
mod program;
mod xdp;

use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio::sync::watch;
use tokio::time::sleep_until;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::spec::NetworkSpec;
use vipgate_xdp::attach::{Mode, OnExit};
use vipgate_xdp::nic::Nic;
use vipgate_xdp::steering::Steering;

use self::hold_down::HoldDown;
use self::next_hops::{NextHopTracker, TrackingInput};
use self::xdp::XdpMonitor;
use crate::config::Health;
use crate::kernel::{LinkReport, LinkState, LinkStatus, Network, NextHopState, NextHopStatus, ProbeConfig, Prober};
use crate::state::fault::{self, Fault};
use crate::state::tracking::{Attachment, TrackingStatus};

/// Tracks interfaces, their programs and receive queues, and next hops.
pub(super) struct Tracking {
    links: watch::Receiver<LinkReport>,
    previous_links: Vec<LinkStatus>,
    xdp: XdpMonitor,
    /// `None`: next hops aren't probed.
    prober: Option<(Prober, watch::Receiver<Vec<NextHopStatus>>)>,
    next_hops: Vec<NextHopStatus>,
    tracker: NextHopTracker,
    health: Health,
    hold_down: HoldDown,
    /// The faults that prevent forwarding.
    faults: Vec<Fault>,
    unable: Option<Arc<str>>,
}

/// An interface to which the steering program is attached.
pub(super) struct AttachedInterface {
    pub(super) nic: Nic,
    pub(super) mode: Mode,
    /// The tc guard as the start has left it; `None`: it has none.
    pub(super) guard: Option<Attachment>,
}

/// Parameters of tracking.
pub(super) struct TrackingConfig<'a> {
    pub(super) network: &'a Network,
    pub(super) interfaces: Vec<AttachedInterface>,
    pub(super) on_exit: OnExit,
    /// Receive queues that each interface needs at a start.
    pub(super) min_queues: usize,
    pub(super) steering: Arc<Mutex<Steering>>,
    pub(super) health: Health,
}

impl Tracking {
    pub(super) fn new(plan: TrackingConfig<'_>) -> Self {
        let TrackingConfig { network, interfaces, on_exit, min_queues, steering, health } = plan;
        let links = network.links();
        let prober = health.probe.then(|| {
            let prober = Prober::start(network, probe_plan(&health, &links.borrow().links));
            let next_hops = prober.next_hops();
            (prober, next_hops)
        });
        Self {
            links,
            previous_links: Vec::new(),
            prober,
            next_hops: Vec::new(),
            tracker: NextHopTracker::new(health.clone()),
            xdp: XdpMonitor::new(interfaces, on_exit, min_queues, steering),
            hold_down: HoldDown::new(health.hold_down, health.hold_down_max),
            health,
            faults: Vec::new(),
            unable: None,
        }
    }

    /// Waits until the status may have changed. Cancel-safe.
    pub(super) async fn changed(&mut self) {
        let deadline =
            self.hold_down.until().into_iter().chain(self.tracker.next_deadline()).chain([self.xdp.next_check()]).min();
        let timer = async {
            match deadline {
                Some(deadline) => sleep_until(deadline.into()).await,
                None => std::future::pending().await,
            }
        };
        let links = async {
            if self.links.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let next_hops = async {
            if let Some((_, next_hops)) = &mut self.prober
                && next_hops.changed().await.is_ok()
            {
                return;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = links => {}
            () = next_hops => {}
            () = timer => {}
        }
    }

    /// Evaluates all inputs, and reattaches programs. `network` and `policy` are those in force.
    pub(super) fn update(&mut self, network: &NetworkSpec, policy: &Policy, now: Instant) -> TrackingStatus {
        let links = self.links.borrow_and_update().links.clone();
        self.log_links(&links);
        self.xdp.attach_successors(&links);
        self.xdp.check(&links, now);
        let attachments = self.xdp.status();
        let next_hops = self.prober.as_mut().map(|(_, hops)| hops.borrow_and_update().clone()).unwrap_or_default();
        self.log_next_hops(&next_hops, &links);
        let mut faults = fault::interface_faults(&self.health, &links, &attachments);
        let needs = |is_v4| needs_routes(policy, is_v4);
        faults.extend(
            self.tracker.evaluate(&TrackingInput { links: &links, next_hops: &next_hops, network, needs: &needs }, now),
        );
        let severe: Vec<Fault> = faults.iter().filter(|fault| fault.prevents_forwarding()).cloned().collect();
        self.log_faults(&severe);
        let is_able = self.hold_down.update(severe.is_empty(), now);
        // During hold-down the reason stays unchanged: each new one would cause a new view for all gateways.
        match fault::text(&severe) {
            Some(fault) => self.unable = Some(fault.into()),
            None if is_able => self.unable = None,
            None => {}
        }
        self.faults = severe;
        let (held_down, unable) = (self.hold_down.until(), self.unable.clone());
        TrackingStatus { interfaces: links, attachments, next_hops, faults, held_down, unable }
    }

    fn log_next_hops(&mut self, hops: &[NextHopStatus], links: &[LinkStatus]) {
        for hop in hops {
            let is_same = |it: &&NextHopStatus| (it.interface, it.address) == (hop.interface, hop.address);
            let before = self.next_hops.iter().find(is_same).map_or(NextHopState::Unknown, |previous| previous.state);
            let interface = links.iter().find(|link| link.id == hop.interface).map_or("?", |link| link.name.as_str());
            let address = hop.address;
            match (before, hop.state) {
                (before, after) if before == after => {}
                (_, NextHopState::Down) => tracing::error!(
                    event = "next_hop_down",
                    interface,
                    %address,
                    "next hop {address} on {interface} is down: {} probes without a reply",
                    self.health.failures
                ),
                (_, NextHopState::Up) => {
                    tracing::info!(
                        event = "next_hop_up",
                        interface,
                        %address,
                        "next hop {address} on {interface} is up"
                    );
                }
                (_, NextHopState::Unknown) => {}
            }
        }
        self.next_hops = hops.to_vec();
    }

    fn log_links(&mut self, links: &[LinkStatus]) {
        for link in links {
            let previous = self.previous_links.iter().find(|it| it.id == link.id);
            let before = previous.map_or(LinkState::Up, |previous| previous.state);
            let interface = &link.name;
            match (before, link.state) {
                (before, after) if before == after => {}
                (_, LinkState::Up) => tracing::info!(event = "link_up", interface, "interface {interface} is up again"),
                (_, state) => {
                    tracing::error!(event = "link_down", interface, "interface {interface} {}", state.description());
                }
            }
        }
        self.previous_links = links.to_vec();
    }

    fn log_faults(&self, faults: &[Fault]) {
        if faults.is_empty() && !self.faults.is_empty() {
            tracing::info!(event = "able", "all faults are resolved");
        }
        for fault in faults.iter().filter(|fault| !self.faults.contains(fault)) {
            tracing::error!(event = "unable", reason = %fault, "this gateway is unable to forward: {fault}");
        }
    }
}

fn probe_plan(health: &Health, links: &[LinkStatus]) -> ProbeConfig {
    let targets = health.targets.iter().filter_map(|target| {
        let link = links.iter().find(|link| link.name == target.interface)?;
        Some((link.id, target.address))
    });
    ProbeConfig { interval: health.interval, max_unanswered: health.failures, targets: targets.collect() }
}

/// Whether policy needs routes of an address family: for its VIPs or for tunnels to nodes. Endpoints alone don't:
/// without a VIP of their family their packets are dropped anyway.
fn needs_routes(policy: &Policy, is_v4: bool) -> bool {
    let matches = |address: IpAddr| address.is_ipv4() == is_v4;
    policy.live_vips().any(|vip| matches(vip.address))
        || policy.nodes().list().iter().any(|node| matches(node.address.ip()))
}

#[cfg(test)]
mod tests {
    use vipgate_dataplane::policy::build::Builder;
    use vipgate_dataplane::policy::change::PolicyChange;
    use vipgate_dataplane::policy::spec::{Announce, NodeSpec, VipSpec};

    use super::*;

    #[test]
    fn vips_and_node_tunnels_need_routes_of_their_family() {
        let needed = |vips: &[&str], nodes: &[&str]| {
            let vip = |address: &&str| VipSpec {
                address: address.parse().unwrap(),
                name: "Service tenant/web".into(),
                announce: Announce::L2,
                reserved_ports: Vec::new(),
                shards: Vec::new(),
                shard_map: None,
                private: vec![],
            };
            let node = |address: &&str| NodeSpec {
                name: (*address).into(),
                address: address.parse().unwrap(),
                vni: 1,
                mac: [2, 0, 0, 0, 0, 1],
                verify_mac: false,
                sends_covered_only: false,
                prefixes: Vec::new(),
            };
            let (vips, nodes) = (vips.iter().map(vip).collect(), nodes.iter().map(node).collect());
            let change = PolicyChange { vips, nodes, ..PolicyChange::default() };
            let policy = Builder::new(NetworkSpec::default()).with_change(&change).unwrap().policy;
            [needs_routes(&policy, true), needs_routes(&policy, false)]
        };
        assert_eq!(needed(&[], &[]), [false, false]);
        assert_eq!(needed(&["192.0.2.10"], &[]), [true, false]);
        assert_eq!(needed(&["2001:db8:2::10"], &[]), [false, true]);
        assert_eq!(needed(&["192.0.2.10"], &["[2001:db8:4::1]:4789"]), [true, true]);
        assert_eq!(needed(&["2001:db8:2::10"], &["198.51.100.1:4789"]), [true, true]);
    }
}
