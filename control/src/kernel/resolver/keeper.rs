//! The resolver's task: takes orders, asks the kernel, looks again, lets go.

use std::collections::BTreeSet;
use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::neighbour::NeighbourMessage;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc, watch};
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::{debug, info, warn};
use vipgate_dataplane::snapshot::spec::{NetworkSpec, RouteTarget};

use super::super::error::NetworkError;
use super::super::message::{Event, Neighbour, OURS};
use super::super::network::Network;
use super::super::socket::Client;
use super::super::watcher::NeighbourFailed;
use super::book::{Admission, Book, LetGo};
use super::order::{self, Plan, Return};
use super::{Hop, Order, ResolverLimits};

/// Time between two looks at what is due. Questions of one look are bounded by `ResolverLimits::per_second`.
const TICK: Duration = Duration::from_secs(1);
/// Time between two complaints in the log.
const COMPLAIN_AGAIN: Duration = Duration::from_mins(1);

/// Looks after next hops.
pub(super) struct Keeper {
    limits: ResolverLimits,
    client: Client,
    book: Book,
    /// When the routers of all routes were last named as in use.
    kept_routers: Option<Instant>,
    network: watch::Receiver<Arc<NetworkSpec>>,
    failures: broadcast::Receiver<NeighbourFailed>,
    /// Whether the kernel keeps entries resolved when told; `None`: not tried yet.
    can_manage: Option<bool>,
    complained: Option<Instant>,
}

impl Keeper {
    /// Checks that the kernel takes orders, and takes over the entries that carry our mark.
    pub(super) async fn open(network: &Network, limits: ResolverLimits) -> Result<Self, NetworkError> {
        let error = |source| NetworkError::new("changing the kernel's neighbours", source);
        let mut client = Client::open().map_err(error)?;
        let mut book = Book::new(limits, Instant::now());
        let published = network.follow();
        let interfaces = published.borrow().interfaces.clone();
        if let Some(first) = interfaces.first() {
            // There is no such neighbour; but whether one could be removed is checked before that.
            let nobody = order::delete(first.ifindex, Ipv4Addr::UNSPECIFIED.into());
            match client.set(nobody, 0).await {
                Err(source) if source.kind() == io::ErrorKind::PermissionDenied => return Err(error(source)),
                Ok(()) | Err(_) => {}
            }
        }
        let mut left: Vec<Neighbour> = Vec::new();
        let everything = RouteNetlinkMessage::GetNeighbour(NeighbourMessage::default());
        let keep_ours = |event| match event {
            Event::Neighbour(_, entry) if entry.is_managed() && entry.protocol == OURS => left.push(entry),
            _ => {}
        };
        client.dump(everything, keep_ours).await.map_err(error)?;
        for entry in left {
            if let Some(interface) = interfaces.iter().find(|interface| interface.ifindex == entry.ifindex) {
                book.adopt((interface.id, entry.address), Instant::now());
            }
        }
        let failures = network.failures();
        Ok(Self {
            limits,
            client,
            book,
            kept_routers: None,
            network: published,
            failures,
            can_manage: None,
            complained: None,
        })
    }

    /// Works until all handles are gone, then lets everything go.
    pub(super) async fn run(mut self, mut orders: mpsc::Receiver<Order>) {
        let mut tick = interval(TICK);
        tick.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut hears_failures = true;
        loop {
            tokio::select! {
                order = orders.recv() => match order {
                    Some(Order::Resolve(hop)) => self.resolve(hop).await,
                    Some(Order::Keep(hops)) => self.keep(&hops).await,
                    None => break,
                },
                failed = self.failures.recv(), if hears_failures => match failed {
                    Ok(NeighbourFailed { interface, address }) => self.give_up((interface, address)).await,
                    // Those that were missed are let go when they have been unused for long enough.
                    Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => hears_failures = false,
                },
                _ = tick.tick() => self.look_again().await,
            }
        }
        for hop in self.book.all() {
            self.forget(hop).await;
        }
    }

    async fn resolve(&mut self, hop: Hop) {
        if let Admission::Ask(gone) = self.book.want(hop, Instant::now()) {
            if let Some(gone) = gone {
                self.let_go(gone).await;
            }
            self.ask(hop).await;
        }
    }

    async fn keep(&mut self, hops: &[Hop]) {
        for gone in self.book.keep(hops, Instant::now()) {
            self.let_go(gone).await;
        }
    }

    /// A next hop doesn't answer.
    async fn give_up(&mut self, hop: Hop) {
        if !self.book.knows(hop) {
            return;
        }
        if self.book.gives_up(hop, Instant::now()) {
            self.forget(hop).await;
        } else {
            // The kernel would try again too, but only after seconds; and the neighbour may just have moved.
            self.resolve(hop).await;
        }
    }

    async fn look_again(&mut self) {
        if self.kept_routers.is_none_or(|at| at.elapsed() >= self.limits.look_again) {
            self.kept_routers = Some(Instant::now());
            let routers = routers(&self.network.borrow());
            self.keep(&routers).await;
        }
        for hop in self.book.due(Instant::now()) {
            self.ask(hop).await;
        }
    }

    async fn forget(&mut self, hop: Hop) {
        if let Some(gone) = self.book.remove(hop) {
            self.let_go(gone).await;
        }
    }

    /// Asks the kernel for a next hop and notes whether it keeps it for us.
    async fn ask(&mut self, hop: Hop) {
        let Some(ifindex) = self.ifindex(hop) else { return };
        match self.try_ask(ifindex, hop).await {
            Ok(managed) => self.book.set_managed(hop, managed),
            Err(error) => self.complain(hop, &error),
        }
    }

    async fn try_ask(&mut self, ifindex: u32, hop: Hop) -> io::Result<bool> {
        let entry = self.get(ifindex, hop).await?;
        let manage = match Plan::new(entry.as_ref(), self.can_manage.unwrap_or(true)) {
            Plan::Leave => return Ok(false),
            Plan::Probe => false,
            Plan::Manage => true,
        };
        let (probe, flags) = order::probe(ifindex, hop.1, manage);
        self.client.set(probe, flags).await?;
        if manage && self.can_manage.is_none() {
            // A kernel that doesn't know the flag ignores it.
            self.can_manage = self.get(ifindex, hop).await?.map(|entry| entry.is_managed());
            if self.can_manage == Some(false) {
                info!("the kernel can't keep neighbours by itself (Linux before 5.16); asking from time to time");
            }
        }
        Ok(manage && self.can_manage != Some(false))
    }

    async fn let_go(&mut self, gone: LetGo) {
        if !gone.managed {
            return;
        }
        let Some(ifindex) = self.ifindex_even_down(gone.hop) else { return };
        if let Err(error) = self.try_let_go(ifindex, gone.hop).await {
            self.complain(gone.hop, &error);
        }
    }

    async fn try_let_go(&mut self, ifindex: u32, hop: Hop) -> io::Result<()> {
        let entry = self.get(ifindex, hop).await?;
        let order = match Return::new(entry.as_ref()) {
            Return::Keep => return Ok(()),
            Return::Unmanage => order::unmanage(ifindex, hop.1),
            Return::Delete => order::delete(ifindex, hop.1),
        };
        self.client.set(order, 0).await
    }

    async fn get(&mut self, ifindex: u32, hop: Hop) -> io::Result<Option<Neighbour>> {
        match self.client.get(order::get(ifindex, hop.1)).await? {
            Some(Event::Neighbour(_, entry)) => Ok(Some(entry)),
            _ => Ok(None),
        }
    }

    /// The kernel's index of the interface; `None` while it is down, when nobody could answer.
    fn ifindex(&self, hop: Hop) -> Option<u32> {
        let network = self.network.borrow();
        network.interfaces.iter().find(|interface| interface.id == hop.0 && interface.up).map(|found| found.ifindex)
    }

    fn ifindex_even_down(&self, hop: Hop) -> Option<u32> {
        let network = self.network.borrow();
        network.interfaces.iter().find(|interface| interface.id == hop.0).map(|found| found.ifindex)
    }

    fn complain(&mut self, (interface, address): Hop, error: &io::Error) {
        match error.raw_os_error() {
            // It went away in the meantime, and that is what counts.
            Some(libc::ENOENT | libc::ENODEV | libc::ENETDOWN) => {
                debug!(interface = interface.0, %address, %error, "the neighbour or its interface is gone");
                return;
            }
            _ if self.complained.is_some_and(|at| at.elapsed() < COMPLAIN_AGAIN) => return,
            Some(libc::ENOBUFS) => warn!(
                interface = interface.0, %address,
                "the kernel's neighbour table is full; raise net.ipv4.neigh.default.gc_thresh3 (or its net.ipv6 twin)"
            ),
            _ => warn!(interface = interface.0, %address, %error, "can't make the kernel look for a next hop"),
        }
        self.complained = Some(Instant::now());
    }
}

/// The routers that routes lead to.
fn routers(network: &NetworkSpec) -> Vec<Hop> {
    let hops = network.routes.iter().filter_map(|route| match &route.target {
        RouteTarget::Via(hops) => Some(hops),
        RouteTarget::Local | RouteTarget::Unreachable => None,
    });
    let routers: BTreeSet<Hop> =
        hops.flatten().filter_map(|hop| hop.gateway.map(|gateway| (hop.interface, gateway))).collect();
    routers.into_iter().collect()
}
