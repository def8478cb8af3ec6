//! Sessions as they look outside: no two at once with one tuple, and no pod's own address.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use super::packet::{Packet, TCP, identity};
use super::pcap::Frame;

/// Protocol, VIP and its port, the far side and its port.
type Tuple = (u8, IpAddr, u16, IpAddr, u16);

/// When somebody was first and last seen with a tuple.
#[derive(Clone, Copy, Debug)]
struct Stay {
    who: u32,
    first: u64,
    last: u64,
}

/// The stays of everybody with each tuple of these VIPs.
fn stays(frames: &[Frame], vips: &[IpAddr]) -> HashMap<Tuple, Vec<Stay>> {
    let mut stays: HashMap<Tuple, Vec<Stay>> = HashMap::new();
    for frame in frames {
        let Some(packet) = Packet::in_frame(&frame.bytes) else { continue };
        let (Some([from, to]), Some(who)) = (packet.ports, identity(packet.payload)) else { continue };
        let [source, target] = packet.addresses;
        let tuple = if vips.contains(&source) {
            (packet.protocol, source, from, target, to)
        } else if vips.contains(&target) {
            (packet.protocol, target, to, source, from)
        } else {
            continue;
        };
        let of_tuple = stays.entry(tuple).or_default();
        match of_tuple.iter_mut().find(|stay| stay.who == who) {
            Some(stay) => (stay.first, stay.last) = (stay.first.min(frame.time), stay.last.max(frame.time)),
            None => of_tuple.push(Stay { who, first: frame.time, last: frame.time }),
        }
    }
    stays
}

/// Pairs of clients who were seen with one tuple at the same time: each a sentence. There must be none, over all gateways
/// together.
pub fn two_at_once(frames: &[Frame], vips: &[&str]) -> Vec<String> {
    let vips: Vec<IpAddr> = vips.iter().map(|vip| vip.parse().unwrap()).collect();
    let mut found = Vec::new();
    for ((protocol, vip, port, far, far_port), mut of_tuple) in stays(frames, &vips) {
        of_tuple.sort_by_key(|stay| stay.first);
        for pair in of_tuple.windows(2) {
            if pair[1].first <= pair[0].last {
                let name = if protocol == TCP { "TCP" } else { "UDP" };
                let overlap = (pair[0].last - pair[1].first) / 1_000_000;
                found.push(format!(
                    "{name} {vip} port {port} -> {far} port {far_port}: client {} came while {} was there, for {overlap} ms",
                    pair[1].who, pair[0].who
                ));
            }
        }
    }
    found.sort();
    found
}

/// The same by what the far side has told: tuples that more than one client was seen with, at any time.
pub fn shared_tuples<'a>(seen: impl IntoIterator<Item = (bool, &'a str, u16, &'a str, &'a str)>) -> Vec<String> {
    let mut tuples: BTreeMap<(bool, &str, u16, &str), Vec<&str>> = BTreeMap::new();
    for (udp, peer, port, local, identity) in seen {
        let who = tuples.entry((udp, peer, port, local)).or_default();
        if !who.contains(&identity) {
            who.push(identity);
        }
    }
    let shared = tuples.into_iter().filter(|(_, who)| who.len() > 1);
    shared.map(|(tuple, who)| format!("{tuple:?} was seen of {who:?}")).collect()
}

/// Whether an address is a pod's.
fn is_pods(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.octets()[..2] == [10, 1],
        IpAddr::V6(address) => address.segments()[..3] == [0xfd00, 1, 0],
    }
}

/// Packets that show a pod's own address, also in what an ICMP error quotes: each a sentence. Outside there must be none.
pub fn pods_outside(frames: &[Frame]) -> Vec<String> {
    let shows = |packet: &Packet<'_>| packet.addresses.into_iter().any(is_pods);
    let told = frames.iter().filter_map(|frame| {
        let packet = Packet::in_frame(&frame.bytes)?;
        let quoted = packet.quoted();
        let seen = shows(&packet) || quoted.as_ref().is_some_and(shows);
        let Packet { addresses, protocol, ports, .. } = packet;
        seen.then(|| {
            format!("{addresses:?} protocol {protocol} ports {ports:?} quotes {:?}", quoted.map(|it| it.addresses))
        })
    });
    told.collect()
}
