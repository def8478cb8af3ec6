//! The task behind [`Network`](super::Network): receives netlink events, debounces bursts, dumps again what the kernel
//! doesn't notify, and publishes the network state when it has changed. Neighbor events are published at once: they are
//! complete in themselves, and packets may be queued for the neighbor.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use tokio::sync::{broadcast, watch};
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{info, warn};
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::policy::spec::{NetworkSpec, RouteTarget};
use vipgate_netlink::protocols::NETLINK_ROUTE;
use vipgate_netlink::{Change, Client, NetworkEvent, Subscription};

use super::links::LinkStatus;
use super::model::{Dump, Model, RouteDump};

/// A burst ends after this time without an event.
const DEBOUNCE_INTERVAL: Duration = Duration::from_millis(5);
/// A burst is published after this time at the latest.
const MAX_BURST: Duration = Duration::from_millis(20);
/// Delay of a second route dump after a change with incomplete notifications: the kernel reports a link as down before
/// it has removed the link's routes.
const ROUTE_REREAD_DELAY: Duration = Duration::from_millis(250);
/// Interval of retries after a netlink error.
const RETRY_INTERVAL: Duration = Duration::from_secs(1);

/// A neighbor that the kernel failed to resolve.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NeighborFailed {
    pub interface: InterfaceId,
    pub address: IpAddr,
}

/// The link states of the gateway's interfaces, and the number of link messages, which also count changes that aren't
/// decoded here, such as attached XDP programs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkReport {
    /// The interfaces, by id.
    pub links: Vec<LinkStatus>,
    /// Link messages received.
    pub messages: u64,
}

/// The receivers of what a watcher publishes.
pub(super) struct Published {
    pub(super) network: watch::Receiver<Arc<NetworkSpec>>,
    pub(super) links: watch::Receiver<LinkReport>,
}

/// Maintains the model and publishes it.
pub(super) struct Watcher {
    subscription: Subscription,
    model: Model,
    network: watch::Sender<Arc<NetworkSpec>>,
    /// Published without debouncing: a gateway with a failed link must notify its peers.
    links: watch::Sender<LinkReport>,
    failures: broadcast::Sender<NeighborFailed>,
    pending: Pending,
    /// Local prefixes already logged.
    warned: BTreeSet<IpNet>,
}

/// Work to do before waiting for the next event.
#[derive(Debug, Default)]
struct Pending {
    /// The model has changed since it was published.
    changed: bool,
    /// The routes must be dumped again.
    reread_routes: bool,
    /// All tables must be dumped again.
    resync: bool,
    /// When to dump the routes once more.
    reread_at: Option<Instant>,
    /// Rate limit of publishing: building the description may take at most a tenth of the time.
    not_before: Option<Instant>,
}

impl Watcher {
    /// Creates a watcher with an initial `model`, and the receivers of what it publishes.
    pub(super) fn new(
        subscription: Subscription,
        model: Model,
        failures: broadcast::Sender<NeighborFailed>,
    ) -> (Self, Published) {
        let (network, published) = watch::channel(Arc::new(model.spec()));
        let (links, links_published) = watch::channel(LinkReport { links: model.links.status(), messages: 0 });
        let pending = Pending::default();
        let mut watcher = Self { subscription, model, network, links, failures, pending, warned: BTreeSet::new() };
        watcher.log_local_prefixes();
        (watcher, Published { network: published, links: links_published })
    }

    /// Runs until it is aborted.
    pub(super) async fn run(mut self) {
        loop {
            if let Err(error) = self.wait().await {
                warn!(%error, "lost the subscription to netlink events; subscribing again");
                sleep(RETRY_INTERVAL).await;
                match Subscription::network() {
                    Ok(subscription) => self.subscription = subscription,
                    Err(error) => warn!(%error, "can't subscribe to netlink events"),
                }
                self.pending.resync = true;
            }
            if let Err(error) = self.reread().await {
                warn!(%error, "can't dump the kernel's network state; the last state stays in force");
                self.pending.resync = true;
                self.pending.reread_at = Some(Instant::now());
                sleep(RETRY_INTERVAL).await;
            }
            self.publish();
        }
    }

    /// Waits for a neighbor event, for the end of a burst of other events, or for the time of the next route dump.
    async fn wait(&mut self) -> io::Result<()> {
        let not_before = self.pending.not_before.unwrap_or_else(Instant::now);
        let mut began = None;
        loop {
            let deadline = match began {
                Some(began) => Some((Instant::now() + DEBOUNCE_INTERVAL).min(began + MAX_BURST).max(not_before)),
                None if self.pending.changed => Some(not_before),
                None => self.pending.reread_at,
            };
            let events = match deadline {
                None => self.subscription.next_events().await?,
                Some(deadline) => {
                    let Ok(events) = timeout_at(deadline, self.subscription.next_events()).await else {
                        if began.is_none() && !self.pending.changed {
                            self.pending.reread_at = None;
                            self.pending.reread_routes = true;
                        }
                        return Ok(());
                    };
                    events?
                }
            };
            if self.apply(events) {
                began.get_or_insert_with(Instant::now);
            }
            // With a busy socket the timeout above never fires.
            let latest = began.map(|began| began + MAX_BURST).or(self.pending.changed.then_some(not_before));
            if latest.is_some_and(|latest| Instant::now() >= latest.max(not_before)) {
                return Ok(());
            }
        }
    }

    /// Applies events, `None` if some were lost; returns whether they are part of a burst.
    fn apply(&mut self, events: Option<Vec<NetworkEvent>>) -> bool {
        let Some(events) = events else {
            self.pending.resync = true;
            return true;
        };
        let is_burst = events.iter().any(|event| !matches!(event, NetworkEvent::Neighbor(..)));
        let has_links = events.iter().any(|event| matches!(event, NetworkEvent::Link(..)));
        for event in events {
            self.publish_failure(&event);
            let effect = self.model.apply(event);
            self.pending.changed |= effect.changed;
            if effect.routes_stale {
                self.pending.reread_routes = true;
                self.pending.reread_at = Some(Instant::now() + ROUTE_REREAD_DELAY);
            }
        }
        if has_links {
            self.publish_links();
        }
        is_burst
    }

    fn publish_links(&self) {
        let links = self.model.links.status();
        self.links.send_modify(|report| *report = LinkReport { links, messages: report.messages + 1 });
    }

    fn publish_failure(&self, event: &NetworkEvent) {
        if let NetworkEvent::Neighbor(Change::New | Change::Replaced, neighbor) = event
            && neighbor.has_failed()
            && let Some(interface) = self.model.links.interface_id(neighbor.ifindex)
        {
            // Fails only without receivers.
            let _ = self.failures.send(NeighborFailed { interface, address: neighbor.address });
        }
    }

    /// Dumps the tables that must be read again.
    async fn reread(&mut self) -> io::Result<()> {
        if self.pending.resync {
            let drained = self.subscription.drain();
            let dump = read_everything().await?;
            self.model.replace(dump);
            self.publish_links();
            info!("netlink events were lost; dumped all tables again");
            self.pending = Pending {
                changed: true,
                resync: !drained,
                reread_at: (!drained).then(|| Instant::now() + RETRY_INTERVAL),
                not_before: self.pending.not_before,
                ..Pending::default()
            };
        } else if self.pending.reread_routes {
            let routes = read_routes(&mut Client::open(NETLINK_ROUTE)?).await?;
            self.pending.changed |= self.model.replace_routes(routes);
            self.pending.reread_routes = false;
        }
        Ok(())
    }

    fn publish(&mut self) {
        if !std::mem::take(&mut self.pending.changed) {
            return;
        }
        let began = Instant::now();
        let spec = self.model.spec();
        let changed = self.network.send_if_modified(|current| {
            let changed = **current != spec;
            if changed {
                *current = Arc::new(spec);
            }
            changed
        });
        if changed {
            self.log_local_prefixes();
        }
        let now = Instant::now();
        self.pending.not_before = Some(now + (now - began) * 9);
    }

    /// Logs each local prefix once: the list of local addresses can't contain whole prefixes.
    fn log_local_prefixes(&mut self) {
        let network = self.network.borrow();
        for route in network.routes.iter().filter(|route| route.target == RouteTarget::Local) {
            let prefix = route.prefix;
            let is_network = prefix.prefix_len() != prefix.max_prefix_len() && !prefix.addr().is_loopback();
            if is_network && self.warned.insert(prefix) {
                warn!(%prefix, "a whole prefix is local to the kernel; only single addresses count as local");
            }
        }
    }
}

/// Dumps all tables, in an order in which referenced objects come first.
pub(super) async fn read_everything() -> io::Result<Dump> {
    let mut client = Client::open(NETLINK_ROUTE)?;
    Ok(Dump {
        links: client.links().await?,
        addresses: client.addresses().await?,
        neighbors: client.neighbors().await?,
        routes: read_routes(&mut client).await?,
    })
}

async fn read_routes(client: &mut Client) -> io::Result<RouteDump> {
    Ok(RouteDump { next_hops: client.next_hops().await?, routes: client.routes().await? })
}
