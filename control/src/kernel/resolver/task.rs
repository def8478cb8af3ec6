//! The resolver task: executes commands, sends requests to the kernel, refreshes and releases next hops.

use std::collections::BTreeSet;
use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::{debug, info, warn};
use vipgate_common::MinInterval;
use vipgate_dataplane::policy::spec::{NetworkSpec, RouteTarget};
use vipgate_netlink::protocols::NETLINK_ROUTE;
use vipgate_netlink::{Client, PROTOCOL};

use super::super::error::NetworkError;
use super::super::network::Network;
use super::super::watcher::NeighborFailed;
use super::{Command, NextHop, ResolverLimits};
use crate::kernel::resolver::request;
use crate::kernel::resolver::request::{ReleaseAction, ResolveAction};
use crate::kernel::resolver::table::{Admission, NextHopTable, Released};

/// Interval of checking for due next hops; one check sends at most `ResolverLimits::per_second` requests.
const TICK_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum time between two logged errors.
const LOG_INTERVAL: Duration = Duration::from_mins(1);

/// State of the resolver task.
pub(super) struct ResolverTask {
    limits: ResolverLimits,
    client: Client,
    table: NextHopTable,
    /// When the gateways of all routes were last marked as in use.
    gateways_marked: Option<Instant>,
    network: watch::Receiver<Arc<NetworkSpec>>,
    failures: broadcast::Receiver<NeighborFailed>,
    /// Whether the kernel supports managed entries; `None`: not known yet.
    can_manage: Option<bool>,
    log: MinInterval,
}

impl ResolverTask {
    /// Checks the permission to change neighbors, and restores the entries marked as vipgate's.
    pub(super) async fn open(network: &Network, limits: ResolverLimits) -> Result<Self, NetworkError> {
        let error = |source| NetworkError::new("changing the kernel's neighbors", source);
        let mut client = Client::open(NETLINK_ROUTE).map_err(error)?;
        let mut table = NextHopTable::new(limits);
        let receiver = network.subscribe();
        let interfaces = receiver.borrow().interfaces.clone();
        if let Some(first) = interfaces.first() {
            // This neighbor doesn't exist, but the kernel checks the permission first.
            let probe = request::delete(first.ifindex, Ipv4Addr::UNSPECIFIED.into());
            match client.set(probe, 0).await {
                Err(source) if source.kind() == io::ErrorKind::PermissionDenied => return Err(error(source)),
                Ok(()) | Err(_) => {}
            }
        }
        let neighbors = client.neighbors().await.map_err(error)?;
        for entry in neighbors.iter().filter(|entry| entry.is_managed() && entry.protocol == PROTOCOL) {
            if let Some(interface) = interfaces.iter().find(|interface| interface.ifindex == entry.ifindex) {
                table.restore((interface.id, entry.address), Instant::now());
            }
        }
        let failures = network.failed_neighbors();
        Ok(Self {
            limits,
            client,
            table,
            gateways_marked: None,
            network: receiver,
            failures,
            can_manage: None,
            log: MinInterval::default(),
        })
    }

    /// Runs until all handles are dropped, then releases all next hops.
    pub(super) async fn run(mut self, mut commands: mpsc::Receiver<Command>) {
        let mut tick = interval(TICK_INTERVAL);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut has_failures = true;
        loop {
            tokio::select! {
                command = commands.recv() => match command {
                    Some(Command::Resolve(hop)) => self.resolve(hop).await,
                    Some(Command::MarkInUse(hops)) => self.mark_in_use(&hops).await,
                    None => break,
                },
                failed = self.failures.recv(), if has_failures => match failed {
                    Ok(NeighborFailed { interface, address }) => self.handle_failure((interface, address)).await,
                    // Missed failures are released later, when they are no longer in use.
                    Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => has_failures = false,
                },
                _ = tick.tick() => self.refresh().await,
            }
        }
        for hop in self.table.next_hops() {
            self.remove(hop).await;
        }
    }

    async fn resolve(&mut self, hop: NextHop) {
        if let Admission::Request(evicted) = self.table.request(hop, Instant::now()) {
            if let Some(evicted) = evicted {
                self.release(evicted).await;
            }
            self.request(hop).await;
        }
    }

    async fn mark_in_use(&mut self, hops: &[NextHop]) {
        for evicted in self.table.mark_in_use(hops, Instant::now()) {
            self.release(evicted).await;
        }
    }

    /// A next hop doesn't respond.
    async fn handle_failure(&mut self, hop: NextHop) {
        if !self.table.contains(hop) {
            return;
        }
        if self.table.should_release(hop, Instant::now()) {
            self.remove(hop).await;
        } else {
            // The kernel would retry too, but only after seconds; and the neighbor may just have a new MAC address.
            self.resolve(hop).await;
        }
    }

    /// Marks the gateways of routes as in use, and requests the next hops that are due.
    async fn refresh(&mut self) {
        if self.gateways_marked.is_none_or(|at| at.elapsed() >= self.limits.refresh_interval) {
            self.gateways_marked = Some(Instant::now());
            let gateways = gateways(&self.network.borrow());
            self.mark_in_use(&gateways).await;
        }
        for hop in self.table.due(Instant::now()) {
            self.request(hop).await;
        }
    }

    async fn remove(&mut self, hop: NextHop) {
        if let Some(removed) = self.table.remove(hop) {
            self.release(removed).await;
        }
    }

    /// Asks the kernel to resolve a next hop, and records whether the kernel manages it.
    async fn request(&mut self, hop: NextHop) {
        let Some(ifindex) = self.ifindex(hop) else { return };
        match self.try_request(ifindex, hop).await {
            Ok(managed) => self.table.set_managed(hop, managed),
            Err(error) => self.log_error(hop, &error),
        }
    }

    async fn try_request(&mut self, ifindex: u32, hop: NextHop) -> io::Result<bool> {
        let entry = self.client.neighbor(ifindex, hop.1).await?;
        let manage = match ResolveAction::new(entry.as_ref(), self.can_manage.unwrap_or(true)) {
            ResolveAction::Skip => return Ok(false),
            ResolveAction::Probe => false,
            ResolveAction::Manage => true,
        };
        let (probe, flags) = request::probe(ifindex, hop.1, manage);
        self.client.set(probe, flags).await?;
        if manage && self.can_manage.is_none() {
            // A kernel without support ignores the flag.
            self.can_manage = self.client.neighbor(ifindex, hop.1).await?.map(|entry| entry.is_managed());
            if self.can_manage == Some(false) {
                info!("no managed neighbors (Linux before 5.16); probing periodically");
            }
        }
        Ok(manage && self.can_manage != Some(false))
    }

    async fn release(&mut self, released: Released) {
        if !released.managed {
            return;
        }
        let Some(ifindex) = self.ifindex_even_down(released.hop) else { return };
        if let Err(error) = self.try_release(ifindex, released.hop).await {
            self.log_error(released.hop, &error);
        }
    }

    async fn try_release(&mut self, ifindex: u32, hop: NextHop) -> io::Result<()> {
        let entry = self.client.neighbor(ifindex, hop.1).await?;
        let request = match ReleaseAction::new(entry.as_ref()) {
            ReleaseAction::Skip => return Ok(()),
            ReleaseAction::Unmanage => request::unmanage(ifindex, hop.1),
            ReleaseAction::Delete => request::delete(ifindex, hop.1),
        };
        self.client.set(request, 0).await
    }

    /// The index of the interface; `None` while it is down.
    fn ifindex(&self, hop: NextHop) -> Option<u32> {
        let network = self.network.borrow();
        network.interfaces.iter().find(|interface| interface.id == hop.0 && interface.up).map(|found| found.ifindex)
    }

    fn ifindex_even_down(&self, hop: NextHop) -> Option<u32> {
        let network = self.network.borrow();
        network.interfaces.iter().find(|interface| interface.id == hop.0).map(|found| found.ifindex)
    }

    fn log_error(&mut self, (interface, address): NextHop, error: &io::Error) {
        match error.raw_os_error() {
            // Removed meanwhile: not an error.
            Some(libc::ENOENT | libc::ENODEV | libc::ENETDOWN) => {
                debug!(interface = interface.0, %address, %error, "the neighbor or its interface was removed");
            }
            _ if self.log.due(LOG_INTERVAL, Instant::now().into_std()).is_none() => {}
            Some(libc::ENOBUFS) => warn!(
                interface = interface.0, %address,
                "the kernel's neighbor table is full; raise net.ipv4.neigh.default.gc_thresh3 (or the same of net.ipv6)"
            ),
            _ => warn!(interface = interface.0, %address, %error, "can't make the kernel resolve a next hop"),
        }
    }
}

/// The gateways of all routes.
fn gateways(network: &NetworkSpec) -> Vec<NextHop> {
    let hops = network.routes.iter().filter_map(|route| match &route.target {
        RouteTarget::Via(hops) => Some(hops),
        RouteTarget::Local | RouteTarget::Unreachable => None,
    });
    let gateways: BTreeSet<NextHop> =
        hops.flatten().filter_map(|hop| hop.gateway.map(|gateway| (hop.interface, gateway))).collect();
    gateways.into_iter().collect()
}
