//! Builds the network of a snapshot from the kernel's interfaces, routes and neighbors.

use std::net::IpAddr;

use foldhash::HashMap;

use super::network::{Adjacency, InterfaceEntry, MAX_INTERFACES, Neighbor, Network, NextHopId, RouteEntry, RoutePath};
use super::prefixes::Prefixes;
use super::spec::{NetworkSpec, RouteTarget};
use crate::flow::ids::InterfaceId;
use crate::policy::prefixes::prefix;
use crate::wire::ethernet;

/// Next hops with a number; for others, sessions look up the neighbor for each packet.
pub(super) const MAX_NEXT_HOPS: usize = NextHopId::HAIRPIN.0 as usize;

/// Builds the network; `ids` keeps the numbers of next hops across builds.
pub(super) fn build_network(spec: &NetworkSpec, ids: &mut HashMap<(InterfaceId, IpAddr), NextHopId>) -> Network {
    let mut id_of = |interface: InterfaceId, address: IpAddr| {
        let next = ids.len();
        match ids.get(&(interface, address)) {
            Some(&id) => Some(id),
            None if next < MAX_NEXT_HOPS => Some(*ids.entry((interface, address)).or_insert(NextHopId(next as u16))),
            None => None,
        }
    };
    let mut paths = Vec::new();
    let mut entries = Vec::with_capacity(spec.routes.len());
    for route in &spec.routes {
        let entry = match &route.target {
            RouteTarget::Local => RouteEntry::Local,
            RouteTarget::Unreachable => RouteEntry::Unreachable,
            RouteTarget::Via(hops) => {
                let first = paths.len();
                paths.extend(hops.iter().filter_map(|hop| match hop.gateway {
                    Some(gateway) => id_of(hop.interface, gateway).map(RoutePath::Router),
                    None => Some(RoutePath::OnLink(hop.interface)),
                }));
                match paths.len() - first {
                    0 => RouteEntry::Unreachable,
                    count => RouteEntry::Via { first: first as u32, count: count as u16 },
                }
            }
        };
        entries.push((&route.prefix, entry));
    }
    let mac_of: HashMap<_, _> = spec.neighbors.iter().map(|n| ((n.interface, n.address), n.mac)).collect();
    for neighbor in &spec.neighbors {
        id_of(neighbor.interface, neighbor.address);
    }
    let mut neighbors: Vec<Option<Neighbor>> = vec![None; ids.len()];
    for (&(interface, address), id) in &*ids {
        let mac = mac_of.get(&(interface, address)).copied();
        let macs = mac.zip(spec.interfaces.get(usize::from(interface.0)));
        let macs = macs.map(|(mac, own)| ethernet::mac_pair(mac, own.mac));
        neighbors[usize::from(id.0)] = Some(Neighbor { interface, address, macs });
    }
    let neighbors: Vec<Neighbor> = neighbors.into_iter().flatten().collect();
    let mut interface_entries = Box::new([InterfaceEntry::default(); MAX_INTERFACES]);
    for (entry, interface) in interface_entries.iter_mut().zip(&spec.interfaces) {
        *entry = InterfaceEntry::of(interface);
    }
    Network {
        adjacencies: neighbors.iter().map(|neighbor| Adjacency::of(neighbor, &spec.interfaces)).collect(),
        interfaces: spec.interfaces.clone(),
        interface_entries,
        has_partial_checksums: spec.interfaces.iter().any(|interface| interface.partial_checksums),
        neighbors,
        next_hop_ids: ids.clone(),
        paths,
        v4: Prefixes::new(entries.iter().filter_map(|&(net, entry)| prefix(net, entry))),
        v6: Prefixes::new(entries.iter().filter_map(|&(net, entry)| prefix(net, entry))),
    }
}
