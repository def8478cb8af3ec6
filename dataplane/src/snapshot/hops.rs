//! Building the network: routes and neighbours as netlink tells them to what the stages read.

use std::net::IpAddr;

use foldhash::HashMap;

use super::build::prefix;
use super::network::{Exit, Hop, HopId, NUMBERS, Network, Port, RouteEntry, Target};
use super::prefixes::Prefixes;
use super::spec::{NetworkSpec, RouteTarget};
use crate::io::InterfaceId;
use crate::wire::ethernet;

/// Next hops that have a number; behind that, sessions look theirs up for each packet.
pub(super) const MOST_HOPS: usize = HopId::HAIRPIN.0 as usize;

/// Builds it; `numbers` are those of next hops, which stay the same from one to the next.
pub(super) fn build_network(spec: &NetworkSpec, numbers: &mut HashMap<(InterfaceId, IpAddr), HopId>) -> Network {
    let mut number = |interface: InterfaceId, address: IpAddr| {
        let next = numbers.len();
        match numbers.get(&(interface, address)) {
            Some(&id) => Some(id),
            None if next < MOST_HOPS => Some(*numbers.entry((interface, address)).or_insert(HopId(next as u16))),
            None => None,
        }
    };
    let mut targets = Vec::new();
    let mut entries = Vec::with_capacity(spec.routes.len());
    for route in &spec.routes {
        let entry = match &route.target {
            RouteTarget::Local => RouteEntry::Local,
            RouteTarget::Unreachable => RouteEntry::Unreachable,
            RouteTarget::Via(hops) => {
                let first = targets.len();
                targets.extend(hops.iter().filter_map(|hop| match hop.gateway {
                    Some(gateway) => number(hop.interface, gateway).map(Target::Router),
                    None => Some(Target::OnLink(hop.interface)),
                }));
                match targets.len() - first {
                    0 => RouteEntry::Unreachable,
                    count => RouteEntry::Via { first: first as u32, count: count as u16 },
                }
            }
        };
        entries.push((&route.prefix, entry));
    }
    let macs: HashMap<_, _> = spec.neighbours.iter().map(|n| ((n.interface, n.address), n.mac)).collect();
    for neighbour in &spec.neighbours {
        number(neighbour.interface, neighbour.address);
    }
    let mut hops: Vec<Option<Hop>> = vec![None; numbers.len()];
    for (&(interface, address), id) in &*numbers {
        let mac = macs.get(&(interface, address)).copied();
        let link = mac.zip(spec.interfaces.get(usize::from(interface.0)));
        let link = link.map(|(mac, own)| ethernet::link(mac, own.mac));
        hops[usize::from(id.0)] = Some(Hop { interface, address, link });
    }
    let hops: Vec<Hop> = hops.into_iter().flatten().collect();
    let mut ports = Box::new([Port::default(); NUMBERS]);
    for (port, interface) in ports.iter_mut().zip(&spec.interfaces) {
        *port = Port::of(interface);
    }
    Network {
        exits: hops.iter().map(|hop| Exit::of(hop, &spec.interfaces)).collect(),
        interfaces: spec.interfaces.clone(),
        ports,
        hops,
        numbers: numbers.clone(),
        targets,
        v4: Prefixes::new(entries.iter().filter_map(|&(net, entry)| prefix(net, entry))),
        v6: Prefixes::new(entries.iter().filter_map(|&(net, entry)| prefix(net, entry))),
    }
}
