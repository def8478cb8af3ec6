//! Sessions as seen outside: no tuple is used by two clients at once, and no pod address leaks.

use std::collections::{BTreeMap, HashMap};
use std::net::IpAddr;

use super::packet::{Packet, TCP, client_identity};
use super::pcap::Frame;

/// Protocol, VIP and port, remote address and port.
type Tuple = (u8, IpAddr, u16, IpAddr, u16);

/// First and last time a client was seen with a tuple.
#[derive(Clone, Copy, Debug)]
struct Usage {
    identity: u32,
    first: u64,
    last: u64,
}

/// Usage of each tuple of these VIPs, by client.
fn tuple_usage(frames: &[Frame], vips: &[IpAddr]) -> HashMap<Tuple, Vec<Usage>> {
    let mut usage: HashMap<Tuple, Vec<Usage>> = HashMap::new();
    for frame in frames {
        let Some(packet) = Packet::in_frame(&frame.bytes) else { continue };
        let (Some([from, to]), Some(identity)) = (packet.ports, client_identity(packet.payload)) else { continue };
        let [source, target] = packet.addresses;
        let tuple = if vips.contains(&source) {
            (packet.protocol, source, from, target, to)
        } else if vips.contains(&target) {
            (packet.protocol, target, to, source, from)
        } else {
            continue;
        };
        let of_tuple = usage.entry(tuple).or_default();
        match of_tuple.iter_mut().find(|usage| usage.identity == identity) {
            Some(usage) => (usage.first, usage.last) = (usage.first.min(frame.time), usage.last.max(frame.time)),
            None => of_tuple.push(Usage { identity, first: frame.time, last: frame.time }),
        }
    }
    usage
}

/// Pairs of clients that used one tuple at the same time, over all gateways together, described. Must be empty.
pub fn concurrent_tuple_reuse(frames: &[Frame], vips: &[&str]) -> Vec<String> {
    let vips: Vec<IpAddr> = vips.iter().map(|vip| vip.parse().unwrap()).collect();
    let mut overlaps = Vec::new();
    for ((protocol, vip, port, remote, remote_port), mut of_tuple) in tuple_usage(frames, &vips) {
        of_tuple.sort_by_key(|usage| usage.first);
        for pair in of_tuple.windows(2) {
            if pair[1].first <= pair[0].last {
                let name = if protocol == TCP { "TCP" } else { "UDP" };
                let overlap = (pair[0].last - pair[1].first) / 1_000_000;
                overlaps.push(format!(
                    "{name} {vip} port {port} -> {remote} port {remote_port}: \
                     client {} overlaps with {} for {overlap} ms",
                    pair[1].identity, pair[0].identity
                ));
            }
        }
    }
    overlaps.sort();
    overlaps
}

/// Tuples that a server has seen with more than one client, at any time: (is UDP, peer, port, local address,
/// identity).
pub fn shared_tuples<'a>(seen: impl IntoIterator<Item = (bool, &'a str, u16, &'a str, &'a str)>) -> Vec<String> {
    let mut tuples: BTreeMap<(bool, &str, u16, &str), Vec<&str>> = BTreeMap::new();
    for (udp, peer, port, local, identity) in seen {
        let identities = tuples.entry((udp, peer, port, local)).or_default();
        if !identities.contains(&identity) {
            identities.push(identity);
        }
    }
    let shared = tuples.into_iter().filter(|(_, identities)| identities.len() > 1);
    shared.map(|(tuple, identities)| format!("{tuple:?} was used by {identities:?}")).collect()
}

/// Whether an address is a pod's.
fn is_pod_address(address: IpAddr) -> bool {
    match address {
        IpAddr::V4(address) => address.octets()[..2] == [10, 1],
        IpAddr::V6(address) => address.segments()[..3] == [0xfd00, 1, 0],
    }
}

/// Packets with a pod's address, also in the packets that ICMP errors quote, described. Must be empty outside.
pub fn leaked_pod_addresses(frames: &[Frame]) -> Vec<String> {
    let has_pod = |packet: &Packet<'_>| packet.addresses.into_iter().any(is_pod_address);
    let leaks = frames.iter().filter_map(|frame| {
        let packet = Packet::in_frame(&frame.bytes)?;
        let quotes: Vec<_> = packet.quotes().collect();
        let leaks = has_pod(&packet) || quotes.iter().any(has_pod);
        let Packet { addresses, protocol, ports, .. } = packet;
        leaks.then(|| {
            let quoted: Vec<_> = quotes.iter().map(|quote| quote.addresses).collect();
            format!("{addresses:?} protocol {protocol} ports {ports:?} quotes {quoted:?}")
        })
    });
    leaks.collect()
}
