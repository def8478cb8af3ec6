//! Interface and next-hop tracking, as VRRP has it: whether this gateway can do what it serves for. What is wrong is a list of faults;
//! whether it serves while there are any, the group decides (`policyd/members/roster`).

mod fault;
mod hold_down;
mod next_hops;
mod xdp;

use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::Instant;

use tokio::sync::watch;
use tokio::time::sleep_until;
use vipgate_dataplane::snapshot::policy::Policy;
use vipgate_dataplane::snapshot::spec::NetworkSpec;
use vipgate_xdp::attach::{Mode, OnExit};
use vipgate_xdp::nic::Nic;
use vipgate_xdp::steering::Steering;

pub use self::fault::{Fault, Routes};
use self::hold_down::HoldDown;
use self::next_hops::{NextHopTracker, Seen};
use self::xdp::XdpWatch;
pub use self::xdp::{Capture, TrackedCapture};
use crate::config::Health;
use crate::kernel::{LinkReport, LinkState, LinkStatus, Network, NextHopState, NextHopStatus, ProbePlan, Prober};

/// How this gateway's interfaces and next hops stand.
#[derive(Clone, Debug, Default)]
pub struct TrackingStatus {
    /// The interfaces, by number.
    pub links: Vec<LinkStatus>,
    /// What is captured on each of them.
    pub captures: Vec<TrackedCapture>,
    /// The next hops that are probed.
    pub next_hops: Vec<NextHopStatus>,
    /// Why this gateway can't do what it serves for.
    pub faults: Vec<Fault>,
    /// Until when it doesn't count as able again, since faults have gone only just now.
    pub held_down: Option<Instant>,
    /// Why it shouldn't serve: what is wrong, or was until just now.
    pub unable: Option<Arc<str>>,
}

impl TrackingStatus {
    /// An interface that is there again as another device: sockets and rings are bound to the one that is gone, and only another
    /// start binds them anew.
    pub fn recreated(&self) -> Option<&LinkStatus> {
        self.links.iter().find(|link| link.successor.is_some_and(|(_, is_up)| is_up))
    }

    /// What is wrong now.
    pub fn fault(&self) -> Option<String> {
        let faults: Vec<_> = self.faults.iter().map(Fault::to_string).collect();
        (!faults.is_empty()).then(|| faults.join("; "))
    }
}

/// Follows interfaces and next hops.
pub(super) struct Tracking {
    links: watch::Receiver<LinkReport>,
    known: Vec<LinkStatus>,
    xdp: XdpWatch,
    /// None: next hops aren't probed.
    prober: Option<(Prober, watch::Receiver<Vec<NextHopStatus>>)>,
    next_hops: Vec<NextHopStatus>,
    tracker: NextHopTracker,
    health: Health,
    hold_down: HoldDown,
    faults: Vec<Fault>,
    unable: Option<Arc<str>>,
}

/// What is tracked.
pub(super) struct Plan<'a> {
    pub(super) network: &'a Network,
    pub(super) nics: Vec<Nic>,
    pub(super) modes: Vec<Mode>,
    pub(super) on_exit: OnExit,
    pub(super) steering: Arc<Mutex<Steering>>,
    pub(super) health: Health,
}

impl Tracking {
    pub(super) fn new(plan: Plan<'_>) -> Self {
        let Plan { network, nics, modes, on_exit, steering, health } = plan;
        let links = network.links();
        let prober = health.probe.then(|| {
            let prober = Prober::start(network, probe_plan(&health, &links.borrow().links));
            let hops = prober.hops();
            (prober, hops)
        });
        Self {
            links,
            known: Vec::new(),
            prober,
            next_hops: Vec::new(),
            tracker: NextHopTracker::new(health.clone()),
            xdp: XdpWatch::new(nics, modes, on_exit, steering),
            hold_down: HoldDown::new(health.hold_down, health.hold_down_max),
            health,
            faults: Vec::new(),
            unable: None,
        }
    }

    /// Waits until something may have changed. May be dropped and called again.
    pub(super) async fn changed(&mut self) {
        let due = self.hold_down.until().into_iter().chain(self.tracker.due()).chain([self.xdp.due()]).min();
        let time = async {
            match due {
                Some(due) => sleep_until(due.into()).await,
                None => std::future::pending().await,
            }
        };
        let links = async {
            if self.links.changed().await.is_err() {
                std::future::pending::<()>().await;
            }
        };
        let hops = async {
            if let Some((_, hops)) = &mut self.prober
                && hops.changed().await.is_ok()
            {
                return;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = links => {}
            () = hops => {}
            () = time => {}
        }
    }

    /// Looks at everything, and puts back what can be put back. The network and the policy are those in force.
    pub(super) fn settle(&mut self, network: &NetworkSpec, policy: &Policy, now: Instant) -> TrackingStatus {
        let links = self.links.borrow_and_update().links.clone();
        self.log_links(&links);
        self.xdp.follow_successors(&links);
        self.xdp.check(&links, now);
        let captures = self.xdp.status();
        let next_hops = self.prober.as_mut().map(|(_, hops)| hops.borrow_and_update().clone()).unwrap_or_default();
        self.log_next_hops(&next_hops, &links);
        let mut faults = fault::of_interfaces(&self.health, &links, &captures);
        let needs = |is_v4| needs(policy, is_v4);
        faults.extend(self.tracker.judge(&Seen { links: &links, next_hops: &next_hops, network, needs: &needs }, now));
        self.log_faults(&faults);
        let is_able = self.hold_down.set(faults.is_empty(), now);
        self.faults.clone_from(&faults);
        let held_down = self.hold_down.until();
        let mut status = TrackingStatus { links, captures, next_hops, faults, held_down, unable: None };
        // While it is held down the reason stays as it was: each new one is a new view for all gateways.
        match status.fault() {
            Some(fault) => self.unable = Some(fault.into()),
            None if is_able => self.unable = None,
            None => {}
        }
        status.unable.clone_from(&self.unable);
        status
    }

    fn log_next_hops(&mut self, hops: &[NextHopStatus], links: &[LinkStatus]) {
        for hop in hops {
            let is_it = |known: &&NextHopStatus| (known.interface, known.address) == (hop.interface, hop.address);
            let before = self.next_hops.iter().find(is_it).map_or(NextHopState::Unknown, |known| known.state);
            let interface = links.iter().find(|link| link.id == hop.interface).map_or("?", |link| link.name.as_str());
            let address = hop.address;
            match (before, hop.state) {
                (before, after) if before == after => {}
                (_, NextHopState::Down) => tracing::error!(
                    event = "next_hop_down",
                    interface,
                    %address,
                    "next hop {address} on {interface} has left {} probes unanswered",
                    self.health.failures
                ),
                (_, NextHopState::Up) => {
                    tracing::info!(event = "next_hop_up", interface, %address, "next hop {address} on {interface} answers");
                }
                (_, NextHopState::Unknown) => {}
            }
        }
        self.next_hops = hops.to_vec();
    }

    fn log_links(&mut self, links: &[LinkStatus]) {
        for link in links {
            let before = self.known.iter().find(|known| known.id == link.id).map_or(LinkState::Up, |known| known.state);
            let interface = &link.name;
            match (before, link.state) {
                (before, after) if before == after => {}
                (_, LinkState::Up) => tracing::info!(event = "link_up", interface, "interface {interface} is up again"),
                (_, state) => {
                    tracing::error!(event = "link_down", interface, "interface {interface} {}", state.phrase());
                }
            }
        }
        self.known = links.to_vec();
    }

    fn log_faults(&self, faults: &[Fault]) {
        if faults.is_empty() && !self.faults.is_empty() {
            tracing::info!(event = "able", "all interfaces and next hops that count are there again");
        }
        for fault in faults.iter().filter(|fault| !self.faults.contains(fault)) {
            tracing::error!(event = "unable", reason = %fault, "this gateway can't do what it serves for: {fault}");
        }
    }
}

fn probe_plan(health: &Health, links: &[LinkStatus]) -> ProbePlan {
    let targets = health.targets.iter().filter_map(|target| {
        let link = links.iter().find(|link| link.name == target.interface)?;
        Some((link.id, target.address))
    });
    ProbePlan { interval: health.interval, failures: health.failures, targets: targets.collect() }
}

/// Whether policy needs routes of a family: it has VIPs of that family, or nodes whose tunnels are of it. Pods alone don't count, since
/// without a VIP of their family their packets are dropped, whatever routes there are.
fn needs(policy: &Policy, is_v4: bool) -> bool {
    let is_it = |address: IpAddr| address.is_ipv4() == is_v4;
    policy.live_vips().any(|vip| is_it(vip.address))
        || policy.nodes().list().iter().any(|node| is_it(node.address.ip()))
}

#[cfg(test)]
mod tests {
    use vipgate_dataplane::snapshot::build::Builder;
    use vipgate_dataplane::snapshot::spec::{Announce, NodeSpec, PolicySet, VipSpec};

    use super::*;

    #[test]
    fn a_family_is_needed_by_its_vips_and_by_tunnels_of_nodes() {
        let seen = |vips: &[&str], nodes: &[&str]| {
            let vip = |address: &&str| VipSpec {
                address: address.parse().unwrap(),
                name: "Service tenant/web".into(),
                announce: Announce::L2,
                reserved_ports: Vec::new(),
                shares: Vec::new(),
            };
            let node = |address: &&str| NodeSpec {
                name: (*address).into(),
                address: address.parse().unwrap(),
                vni: 1,
                mac: [2, 0, 0, 0, 0, 1],
                prefixes: Vec::new(),
            };
            let (vips, nodes) = (vips.iter().map(vip).collect(), nodes.iter().map(node).collect());
            let set = PolicySet { vips, nodes, ..PolicySet::default() };
            let policy = Builder::new(NetworkSpec::default()).with_policy(&set).unwrap().policy;
            [needs(&policy, true), needs(&policy, false)]
        };
        assert_eq!(seen(&[], &[]), [false, false]);
        assert_eq!(seen(&["192.0.2.10"], &[]), [true, false]);
        assert_eq!(seen(&["2001:db8:2::10"], &[]), [false, true]);
        assert_eq!(seen(&["192.0.2.10"], &["[2001:db8:4::1]:4789"]), [true, true]);
        assert_eq!(seen(&["2001:db8:2::10"], &["198.51.100.1:4789"]), [true, true]);
    }
}
