//! All of the kernel's network that vipgate has a use for, kept by deltas; the description for the engine is made
//! from it on demand.

use vipgate_dataplane::snapshot::spec::NetworkSpec;

use super::error::NetworkError;
use super::links::{Effect, Links};
use super::message::{Address, Change, Event, Link};
use super::neighbours::Neighbours;
use super::network::Wanted;
use super::nexthops::NextHops;
use super::routes::Routes;

/// The kernel's network.
#[derive(Debug)]
pub(super) struct Model {
    pub(super) links: Links,
    objects: NextHops,
    routes: Routes,
    neighbours: Neighbours,
}

/// What one full reading of the kernel gave.
#[derive(Debug, Default)]
pub(super) struct Dump {
    /// Devices.
    pub(super) links: Vec<Link>,
    /// Addresses of devices.
    pub(super) addresses: Vec<Address>,
    /// Everything else that was read, in the kernel's order.
    pub(super) rest: Vec<Event>,
}

impl Dump {
    /// Sorts an event of a dump in.
    pub(super) fn push(&mut self, event: Event) {
        match event {
            Event::Link(_, link) => self.links.push(link),
            Event::Address(_, address) => self.addresses.push(address),
            Event::Route(..) | Event::NextHop(..) | Event::Neighbour(..) => self.rest.push(event),
        }
    }
}

impl Model {
    /// The network of a first dump; the wanted interfaces must be in it.
    pub(super) fn new(wanted: &[Wanted], dump: Dump) -> Result<Self, NetworkError> {
        let mut model = Self {
            links: Links::new(wanted, &dump.links)?,
            objects: NextHops::default(),
            routes: Routes::default(),
            neighbours: Neighbours::default(),
        };
        model.replace(dump);
        Ok(model)
    }

    /// Takes a full dump in place of everything that was known.
    pub(super) fn replace(&mut self, dump: Dump) {
        self.links.replace(&dump.links);
        self.links.replace_addresses(dump.addresses);
        self.neighbours = Neighbours::default();
        for event in &dump.rest {
            if let Event::Neighbour(change, neighbour) = event
                && let Some(interface) = self.links.own(neighbour.ifindex)
            {
                self.neighbours.apply(interface, *change, neighbour);
            }
        }
        self.replace_routes(dump.rest);
    }

    /// Takes dumped routes and next-hop objects in place of those that were known; returns whether they differ.
    pub(super) fn replace_routes(&mut self, dump: Vec<Event>) -> bool {
        let mut routes = Routes::default();
        let mut objects = NextHops::default();
        for event in dump {
            match event {
                Event::Route(_, route) => routes.load(route),
                Event::NextHop(change, object) => drop(objects.apply(change, object)),
                Event::Link(..) | Event::Address(..) | Event::Neighbour(..) => {}
            }
        }
        let changed = routes != self.routes || objects != self.objects;
        self.routes = routes;
        self.objects = objects;
        changed
    }

    /// Takes one change.
    pub(super) fn apply(&mut self, event: Event) -> Effect {
        match event {
            Event::Link(change, link) => {
                let own = self.links.own(link.ifindex);
                let mut effect = self.links.apply(change, &link);
                if let Some(interface) = own.filter(|_| change == Change::Gone) {
                    effect.changed |= self.neighbours.forget(interface);
                }
                effect
            }
            Event::Address(change, address) => self.links.apply_address(change, address),
            Event::Route(change, route) => self.routes.apply(change, route),
            Event::NextHop(change, object) => {
                let changed = self.objects.apply(change, object);
                // The kernel drops the IPv4 routes of a removed object without telling.
                Effect { changed, routes_stale: change == Change::Gone }
            }
            Event::Neighbour(change, neighbour) => {
                let interface = self.links.own(neighbour.ifindex);
                let changed = interface.is_some_and(|interface| self.neighbours.apply(interface, change, &neighbour));
                Effect { changed, routes_stale: false }
            }
        }
    }

    /// The network as the engine wants it.
    pub(super) fn spec(&self) -> NetworkSpec {
        NetworkSpec {
            interfaces: self.links.spec(),
            routes: self.routes.spec(&self.links, &self.objects),
            neighbours: self.neighbours.spec(),
            locals: self.routes.locals(),
        }
    }
}
