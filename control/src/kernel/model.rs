//! Model of the kernel's network state, updated by netlink events. The engine's [`NetworkSpec`] is built from it on
//! demand.

use vipgate_dataplane::policy::spec::NetworkSpec;
use vipgate_netlink::{Address, Change, Link, Neighbor, NetworkEvent, NextHopObject, Route};

use super::error::NetworkError;
use super::links::{Effect, Links};
use super::network::InterfaceConfig;
use super::routes::Routes;
use crate::kernel::neighbors::Neighbors;
use crate::kernel::nexthop_objects::NextHopObjects;

/// The network state.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) links: Links,
    nexthops: NextHopObjects,
    routes: Routes,
    neighbors: Neighbors,
}

/// The result of one full dump.
#[derive(Debug)]
pub(super) struct Dump {
    pub(super) links: Vec<Link>,
    pub(super) addresses: Vec<Address>,
    pub(super) neighbors: Vec<Neighbor>,
    pub(super) routes: RouteDump,
}

/// The result of dumping the routes, and the nexthop objects that they refer to.
#[derive(Debug)]
pub(super) struct RouteDump {
    pub(super) next_hops: Vec<NextHopObject>,
    pub(super) routes: Vec<Route>,
}

impl Model {
    /// Builds the model from a first dump, which must contain the configured interfaces.
    pub(super) fn new(wanted: &[InterfaceConfig], dump: Dump) -> Result<Self, NetworkError> {
        let mut model = Self {
            links: Links::new(wanted, &dump.links)?,
            nexthops: NextHopObjects::default(),
            routes: Routes::default(),
            neighbors: Neighbors::default(),
        };
        model.replace(dump);
        Ok(model)
    }

    /// Replaces everything by a full dump.
    pub(super) fn replace(&mut self, dump: Dump) {
        self.links.replace(&dump.links);
        self.links.replace_addresses(dump.addresses);
        self.neighbors = Neighbors::default();
        for neighbor in &dump.neighbors {
            if let Some(interface) = self.links.interface_id(neighbor.ifindex) {
                self.neighbors.apply(interface, Change::New, neighbor);
            }
        }
        self.replace_routes(dump.routes);
    }

    /// Replaces routes and nexthop objects by dumped ones; returns whether they differ.
    pub(super) fn replace_routes(&mut self, dump: RouteDump) -> bool {
        let mut routes = Routes::default();
        let mut nexthops = NextHopObjects::default();
        dump.routes.into_iter().for_each(|route| routes.load(route));
        for next_hop in dump.next_hops {
            nexthops.apply(Change::New, next_hop);
        }
        let changed = routes != self.routes || nexthops != self.nexthops;
        self.routes = routes;
        self.nexthops = nexthops;
        changed
    }

    /// Applies one event.
    pub(super) fn apply(&mut self, event: NetworkEvent) -> Effect {
        match event {
            NetworkEvent::Link(change, link) => {
                let own = self.links.interface_id(link.ifindex);
                let mut effect = self.links.apply(change, &link);
                if let Some(interface) = own.filter(|_| change == Change::Removed) {
                    effect.changed |= self.neighbors.remove_interface(interface);
                }
                effect
            }
            NetworkEvent::Address(change, address) => self.links.apply_address(change, address),
            NetworkEvent::Route(change, route) => self.routes.apply(change, route),
            NetworkEvent::NextHop(change, nexthop) => {
                let changed = self.nexthops.apply(change, nexthop);
                // The kernel removes the IPv4 routes of a removed object without a notification.
                Effect { changed, routes_stale: change == Change::Removed }
            }
            NetworkEvent::Neighbor(change, neighbor) => {
                let interface = self.links.interface_id(neighbor.ifindex);
                let changed = interface.is_some_and(|interface| self.neighbors.apply(interface, change, &neighbor));
                Effect { changed, routes_stale: false }
            }
        }
    }

    /// Builds the engine's description.
    pub(super) fn spec(&self) -> NetworkSpec {
        NetworkSpec {
            interfaces: self.links.spec(),
            routes: self.routes.spec(&self.links, &self.nexthops),
            neighbors: self.neighbors.spec(),
            locals: self.routes.local_addresses(),
        }
    }
}
