//! The kernel's view of the network, followed by netlink: interfaces, routes, neighbours. The gateway routes as the node
//! does, so it keeps no routes of its own.
//!
//! Events only say that something changed; what is true then is asked for whole, except for neighbours, which change
//! often and are followed one by one. Bursts become one update.

mod read;
mod resolver;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::net::IpAddr;
use std::time::Duration;

use futures::channel::mpsc::UnboundedReceiver;
use futures::{StreamExt, TryStreamExt};
use rtnetlink::packet_core::{NetlinkMessage, NetlinkPayload};
use rtnetlink::packet_route::RouteNetlinkMessage;
use rtnetlink::packet_route::address::{AddressAttribute, AddressMessage};
use rtnetlink::packet_route::link::LinkMessage;
use rtnetlink::packet_route::neighbour::NeighbourMessage;
use rtnetlink::packet_route::route::RouteMessage;
use rtnetlink::sys::SocketAddr;
use rtnetlink::{Handle, MulticastGroup, new_multicast_connection};
use thiserror::Error;
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::spec::{InterfaceSpec, NeighbourSpec, NetworkSpec, Role, RouteTarget};

pub use resolver::Resolver;

/// Events that come within this time become one update.
const SETTLE: Duration = Duration::from_millis(5);
/// Updates are at least this far apart, however much happens.
const APART: Duration = Duration::from_millis(20);
/// Without any event the kernel is asked all the same, in case one was missed.
const ASK_ANYWAY: Duration = Duration::from_secs(30);

/// The kernel can't be followed.
#[derive(Debug, Error)]
pub enum NetworkError {
    /// No netlink socket.
    #[error("cannot open a netlink socket: {0}")]
    Socket(#[source] io::Error),
    /// The kernel didn't answer.
    #[error("cannot ask the kernel for its {what}: {source}")]
    Dump {
        /// What was asked for.
        what: &'static str,
        /// What it says.
        source: rtnetlink::Error,
    },
    /// There is no interface of this name.
    #[error("interface {name}: there is none of this name in this network namespace")]
    Missing {
        /// The name.
        name: String,
    },
    /// The interface can't carry Ethernet frames.
    #[error("interface {name}: it has no Ethernet address (loopback and tunnels can't be used)")]
    NoEthernet {
        /// Its name.
        name: String,
    },
    /// The connection to the kernel ended.
    #[error("the netlink connection ended")]
    Closed,
}

/// An interface as configured.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// Its number.
    pub id: InterfaceId,
    /// Its name.
    pub name: String,
    /// Which side of the gateway it is.
    pub role: Role,
}

type Messages = UnboundedReceiver<(NetlinkMessage<RouteNetlinkMessage>, SocketAddr)>;

/// The kernel's network, followed.
pub struct Network {
    handle: Handle,
    messages: Messages,
    connection: tokio::task::JoinHandle<()>,
    wanted: Vec<Wanted>,
    neighbours: BTreeMap<(InterfaceId, IpAddr), [u8; 6]>,
    current: NetworkSpec,
}

impl std::fmt::Debug for Network {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Network").field("wanted", &self.wanted).finish_non_exhaustive()
    }
}

impl Drop for Network {
    fn drop(&mut self) {
        self.connection.abort();
    }
}

impl Network {
    /// Begins to follow the network of this namespace.
    ///
    /// # Errors
    /// When an interface is missing or unsuitable, or the kernel doesn't answer.
    pub async fn open(wanted: Vec<Wanted>) -> Result<Self, NetworkError> {
        // Subscribed first, asked then: what changes in between is not missed.
        let groups = [
            MulticastGroup::Link,
            MulticastGroup::Ipv4Ifaddr,
            MulticastGroup::Ipv6Ifaddr,
            MulticastGroup::Ipv4Route,
            MulticastGroup::Ipv6Route,
            MulticastGroup::Neigh,
        ];
        let (connection, handle, messages) = new_multicast_connection(&groups).map_err(NetworkError::Socket)?;
        let connection = tokio::spawn(connection);
        let (neighbours, current) = (BTreeMap::new(), NetworkSpec::default());
        let mut network = Self { handle, messages, connection, wanted, neighbours, current };
        network.current = network.ask().await?;
        for wanted in &network.wanted {
            let found = &network.current.interfaces[usize::from(wanted.id.0)];
            if found.ifindex == 0 {
                return Err(NetworkError::Missing { name: wanted.name.clone() });
            }
            if found.mac == [0; 6] {
                return Err(NetworkError::NoEthernet { name: wanted.name.clone() });
            }
        }
        Ok(network)
    }

    /// What was last heard.
    pub fn current(&self) -> &NetworkSpec {
        &self.current
    }

    /// Something that asks the kernel for link addresses.
    pub fn resolver(&self) -> Resolver {
        Resolver::new(self.handle.clone())
    }

    /// Waits until something changes, and returns what is true then. Not to be dropped half-way: a change could be lost.
    ///
    /// # Errors
    /// When the kernel doesn't answer any more.
    pub async fn changed(&mut self) -> Result<NetworkSpec, NetworkError> {
        loop {
            let mut seen = Seen::default();
            match tokio::time::timeout(ASK_ANYWAY, self.messages.next()).await {
                Ok(Some((message, _))) => self.note(message, &mut seen),
                Ok(None) => return Err(NetworkError::Closed),
                Err(_) => seen.all = true,
            }
            let settled = tokio::time::Instant::now() + SETTLE;
            while let Ok(next) = tokio::time::timeout_at(settled, self.messages.next()).await {
                let Some((message, _)) = next else { return Err(NetworkError::Closed) };
                self.note(message, &mut seen);
            }
            let now = if seen.all {
                self.ask().await?
            } else if seen.neighbours {
                NetworkSpec { neighbours: self.neighbour_specs(), ..self.current.clone() }
            } else {
                continue;
            };
            if now != self.current {
                self.warn_about(&now);
                self.current = now.clone();
                tokio::time::sleep(APART).await;
                return Ok(now);
            }
        }
    }

    fn note(&mut self, message: NetlinkMessage<RouteNetlinkMessage>, seen: &mut Seen) {
        match message.payload {
            NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewNeighbour(neighbour)) => {
                seen.neighbours = true;
                self.note_neighbour(&neighbour, false);
            }
            NetlinkPayload::InnerMessage(RouteNetlinkMessage::DelNeighbour(neighbour)) => {
                seen.neighbours = true;
                self.note_neighbour(&neighbour, true);
            }
            // Routes, addresses, links; or the kernel says that events were lost.
            _ => seen.all = true,
        }
    }

    fn note_neighbour(&mut self, message: &NeighbourMessage, gone: bool) {
        let interface = self.current.interfaces.iter().find(|interface| interface.ifindex == message.header.ifindex);
        let Some(interface) = interface.map(|interface| interface.id) else { return };
        let Some((address, mac)) = read::neighbour(message) else { return };
        match mac.filter(|_| !gone) {
            Some(mac) => drop(self.neighbours.insert((interface, address), mac)),
            None => drop(self.neighbours.remove(&(interface, address))),
        }
    }

    fn neighbour_specs(&self) -> Vec<NeighbourSpec> {
        let spec = |(&(interface, address), &mac): (&(InterfaceId, IpAddr), &[u8; 6])| NeighbourSpec {
            interface,
            address,
            mac,
        };
        self.neighbours.iter().map(spec).collect()
    }

    /// Asks for everything.
    async fn ask(&mut self) -> Result<NetworkSpec, NetworkError> {
        let dump = |what| move |source| NetworkError::Dump { what, source };
        let links: Vec<LinkMessage> =
            self.handle.link().get().execute().try_collect().await.map_err(dump("interfaces"))?;
        let addresses: Vec<AddressMessage> =
            self.handle.address().get().execute().try_collect().await.map_err(dump("addresses"))?;
        let mut routes: Vec<RouteMessage> = Vec::new();
        for family in [read::any_ipv4_route(), read::any_ipv6_route()] {
            routes.extend(
                self.handle.route().get(family).execute().try_collect::<Vec<_>>().await.map_err(dump("routes"))?,
            );
        }
        let neighbours: Vec<NeighbourMessage> =
            self.handle.neighbours().get().execute().try_collect().await.map_err(dump("neighbours"))?;

        let interfaces: Vec<InterfaceSpec> =
            self.wanted.iter().map(|wanted| read::interface(wanted, &links, &addresses)).collect();
        let routes = read::routes(&routes, &interfaces);
        self.current.interfaces.clone_from(&interfaces);
        self.neighbours.clear();
        for neighbour in &neighbours {
            self.note_neighbour(neighbour, false);
        }
        let local = |address: &AddressMessage| {
            address.attributes.iter().find_map(|attribute| match attribute {
                AddressAttribute::Local(address) | AddressAttribute::Address(address) => Some(*address),
                _ => None,
            })
        };
        let own = addresses.iter().filter_map(local);
        let answered = routes.iter().filter(|route| route.target == RouteTarget::Local);
        let single = answered.filter(|route| route.prefix.prefix_len() == route.prefix.max_prefix_len());
        let locals: BTreeSet<IpAddr> = own.chain(single.map(|route| route.prefix.addr())).collect();
        Ok(NetworkSpec { interfaces, routes, neighbours: self.neighbour_specs(), locals: locals.into_iter().collect() })
    }

    fn warn_about(&self, now: &NetworkSpec) {
        for (before, after) in self.current.interfaces.iter().zip(&now.interfaces) {
            if before.up != after.up {
                tracing::info!(interface = after.name, up = after.up, "link state changed");
            }
            if before.ifindex != after.ifindex && after.ifindex != 0 {
                tracing::error!(
                    interface = after.name,
                    "the interface was deleted and made anew; restart the gateway to open its queues again"
                );
            }
        }
    }
}

/// What a burst of events was about.
#[derive(Default)]
struct Seen {
    /// Links, addresses or routes.
    all: bool,
    /// Neighbours.
    neighbours: bool,
}
