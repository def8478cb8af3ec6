//! The task behind [`Network`](super::Network): hears of changes, lets bursts pass, reads again what the kernel
//! doesn't tell, and publishes the network when it really looks different. Packets may wait for a neighbour, and the kernel tells
//! all about one in a single event: those are published at once.

use std::collections::BTreeSet;
use std::io;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use ipnet::IpNet;
use rtnetlink::packet_route::address::AddressMessage;
use rtnetlink::packet_route::link::LinkMessage;
use rtnetlink::packet_route::neighbour::NeighbourMessage;
use rtnetlink::packet_route::route::RouteMessage;
use rtnetlink::packet_route::{AddressFamily, RouteNetlinkMessage};
use tokio::sync::{broadcast, watch};
use tokio::time::{Instant, sleep, timeout_at};
use tracing::{debug, info, warn};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::spec::{NetworkSpec, RouteTarget};

use super::links::LinkStatus;
use super::message::{Change, Event};
use super::model::{Dump, Model};
use super::socket::{Client, Heard, Subscription};

/// A burst is over when nothing has come for this long.
const QUIET: Duration = Duration::from_millis(5);
/// A burst isn't waited for any longer than this.
const LONGEST_BURST: Duration = Duration::from_millis(20);
/// Routes are read a second time this long after a change that the kernel doesn't tell in full: it announces a link
/// that goes down before it has dropped the link's routes.
const RECHECK: Duration = Duration::from_millis(250);
/// Readings of one table while it changes under the reader.
const DUMP_TRIES: usize = 4;
/// Between two tries when the kernel can't be read.
const RETRY: Duration = Duration::from_secs(1);

/// A next hop that the kernel has asked for in vain.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct NeighbourFailed {
    /// The interface that it should be behind.
    pub interface: InterfaceId,
    /// Its address.
    pub address: IpAddr,
}

/// How the gateway's interfaces stand, and how often the kernel has said anything about them: also of what this program doesn't
/// read of it, such as XDP programs.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LinkReport {
    /// The interfaces, by number.
    pub links: Vec<LinkStatus>,
    /// Messages of the kernel about them.
    pub messages: u64,
}

/// Where a watcher publishes.
pub(super) struct Published {
    pub(super) network: watch::Receiver<Arc<NetworkSpec>>,
    pub(super) links: watch::Receiver<LinkReport>,
}

/// Keeps the model and publishes it.
pub(super) struct Watcher {
    subscription: Subscription,
    model: Model,
    network: watch::Sender<Arc<NetworkSpec>>,
    /// Published at once, since a gateway without a link has to let others know.
    links: watch::Sender<LinkReport>,
    failures: broadcast::Sender<NeighbourFailed>,
    pending: Pending,
    /// Local prefixes that were warned of.
    warned: BTreeSet<IpNet>,
}

/// What has to be done before the next waiting.
#[derive(Debug, Default)]
struct Pending {
    /// The model differs from what was published.
    changed: bool,
    /// The routes must be read again.
    routes: bool,
    /// Everything must be read again.
    everything: bool,
    /// When to read the routes once more.
    recheck: Option<Instant>,
    /// Nothing is published before: building the description takes at most a tenth of the time.
    not_before: Option<Instant>,
}

impl Watcher {
    /// A watcher that goes on from `model`, and where it publishes.
    pub(super) fn new(
        subscription: Subscription,
        model: Model,
        failures: broadcast::Sender<NeighbourFailed>,
    ) -> (Self, Published) {
        let (network, published) = watch::channel(Arc::new(model.spec()));
        let (links, links_published) = watch::channel(LinkReport { links: model.links.status(), messages: 0 });
        let pending = Pending::default();
        let mut watcher = Self { subscription, model, network, links, failures, pending, warned: BTreeSet::new() };
        watcher.warn_of_local_prefixes();
        (watcher, Published { network: published, links: links_published })
    }

    /// Runs until it is aborted.
    pub(super) async fn run(mut self) {
        loop {
            if let Err(error) = self.listen().await {
                warn!(%error, "can't hear of changes of the network; subscribing anew");
                sleep(RETRY).await;
                match Subscription::open() {
                    Ok(subscription) => self.subscription = subscription,
                    Err(error) => warn!(%error, "can't subscribe to changes of the network"),
                }
                self.pending.everything = true;
            }
            if let Err(error) = self.read_again().await {
                warn!(%error, "can't read the kernel's network; what was known stays in force");
                self.pending.everything = true;
                self.pending.recheck = Some(Instant::now());
                sleep(RETRY).await;
            }
            self.publish();
        }
    }

    /// Waits for a change of a neighbour, for the end of a burst of other changes, or for the time to look again.
    async fn listen(&mut self) -> io::Result<()> {
        let not_before = self.pending.not_before.unwrap_or_else(Instant::now);
        let mut began = None;
        loop {
            let until = match began {
                Some(began) => Some((Instant::now() + QUIET).min(began + LONGEST_BURST).max(not_before)),
                None if self.pending.changed => Some(not_before),
                None => self.pending.recheck,
            };
            let heard = match until {
                None => self.subscription.next().await?,
                Some(until) => {
                    let Ok(event) = timeout_at(until, self.subscription.next()).await else {
                        if began.is_none() && !self.pending.changed {
                            self.pending.recheck = None;
                            self.pending.routes = true;
                        }
                        return Ok(());
                    };
                    event?
                }
            };
            if self.take(heard) {
                began.get_or_insert_with(Instant::now);
            }
            // A full socket never lets the timeout win.
            let latest = began.map(|began| began + LONGEST_BURST).or(self.pending.changed.then_some(not_before));
            if latest.is_some_and(|latest| Instant::now() >= latest.max(not_before)) {
                return Ok(());
            }
        }
    }

    /// Takes in what was heard; says whether it is part of a burst.
    fn take(&mut self, heard: Heard) -> bool {
        let events = match heard {
            Heard::Events(events) => events,
            Heard::Lost => {
                self.pending.everything = true;
                return true;
            }
        };
        let is_burst = events.iter().any(|event| !matches!(event, Event::Neighbour(..)));
        let is_about_links = events.iter().any(|event| matches!(event, Event::Link(..)));
        for event in events {
            self.notice_failure(&event);
            let effect = self.model.apply(event);
            self.pending.changed |= effect.changed;
            if effect.routes_stale {
                self.pending.routes = true;
                self.pending.recheck = Some(Instant::now() + RECHECK);
            }
        }
        if is_about_links {
            self.report_links();
        }
        is_burst
    }

    fn report_links(&self) {
        let links = self.model.links.status();
        self.links.send_modify(|report| *report = LinkReport { links, messages: report.messages + 1 });
    }

    fn notice_failure(&self, event: &Event) {
        if let Event::Neighbour(Change::New | Change::Replaced, neighbour) = event
            && neighbour.has_failed()
            && let Some(interface) = self.model.links.own(neighbour.ifindex)
        {
            // Fails only when nobody listens.
            let _ = self.failures.send(NeighbourFailed { interface, address: neighbour.address });
        }
    }

    async fn read_again(&mut self) -> io::Result<()> {
        if self.pending.everything {
            let heard_all = self.subscription.drain();
            let dump = read_everything().await?;
            self.model.replace(dump);
            self.report_links();
            info!("changes of the network were lost; read all of it anew");
            self.pending = Pending {
                changed: true,
                everything: !heard_all,
                recheck: (!heard_all).then(|| Instant::now() + RETRY),
                not_before: self.pending.not_before,
                ..Pending::default()
            };
        } else if self.pending.routes {
            let mut client = Client::open()?;
            let routes = read_routes(&mut client).await?;
            self.pending.changed |= self.model.replace_routes(routes);
            self.pending.routes = false;
        }
        Ok(())
    }

    fn publish(&mut self) {
        if !std::mem::take(&mut self.pending.changed) {
            return;
        }
        let began = Instant::now();
        let spec = self.model.spec();
        let changed = self.network.send_if_modified(|known| {
            let changed = **known != spec;
            if changed {
                *known = Arc::new(spec);
            }
            changed
        });
        if changed {
            self.warn_of_local_prefixes();
        }
        let now = Instant::now();
        self.pending.not_before = Some(now + (now - began) * 9);
    }

    /// Logs, once each, what the list of local addresses can't say: whole prefixes that the kernel answers for.
    fn warn_of_local_prefixes(&mut self) {
        let network = self.network.borrow();
        for route in network.routes.iter().filter(|route| route.target == RouteTarget::Local) {
            let prefix = route.prefix;
            let whole = prefix.prefix_len() != prefix.max_prefix_len() && !prefix.addr().is_loopback();
            if whole && self.warned.insert(prefix) {
                warn!(%prefix, "the kernel answers for a whole prefix; only its single addresses count as local");
            }
        }
    }
}

/// Reads all tables, in an order in which what is named comes before what names it.
pub(super) async fn read_everything() -> io::Result<Dump> {
    let mut client = Client::open()?;
    let mut dump = Dump::default();
    let links = RouteNetlinkMessage::GetLink(LinkMessage::default());
    read(&mut client, &links, &mut dump).await?;
    let addresses = RouteNetlinkMessage::GetAddress(AddressMessage::default());
    read(&mut client, &addresses, &mut dump).await?;
    for family in [AddressFamily::Inet, AddressFamily::Inet6] {
        let mut neighbours = NeighbourMessage::default();
        neighbours.header.family = family;
        read(&mut client, &RouteNetlinkMessage::GetNeighbour(neighbours), &mut dump).await?;
    }
    dump.rest.extend(read_routes(&mut client).await?);
    Ok(dump)
}

/// Reads next-hop objects and routes.
async fn read_routes(client: &mut Client) -> io::Result<Vec<Event>> {
    let mut routes = Vec::new();
    for attempt in 1..=DUMP_TRIES {
        routes.clear();
        let mut stood_still = client.dump_next_hops(|event| routes.push(event)).await?;
        for family in [AddressFamily::Inet, AddressFamily::Inet6] {
            let mut question = RouteMessage::default();
            question.header.address_family = family;
            let question = RouteNetlinkMessage::GetRoute(question);
            stood_still &= client.dump(question, |event| routes.push(event)).await?;
        }
        if stood_still {
            break;
        }
        debug!(attempt, "routes changed while they were read");
    }
    Ok(routes)
}

/// Reads one table into `dump`.
async fn read(client: &mut Client, question: &RouteNetlinkMessage, dump: &mut Dump) -> io::Result<()> {
    let mut events = Vec::new();
    for attempt in 1..=DUMP_TRIES {
        events.clear();
        if client.dump(question.clone(), |event| events.push(event)).await? {
            break;
        }
        debug!(attempt, "a table changed while it was read");
    }
    for event in events {
        dump.push(event);
    }
    Ok(())
}
