//! What may be seen outside: from the policy as it is written, not as the engine has compiled it; and what a frame
//! shows, by a parser of its own.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use vipgate_testkit::PolicySet;

/// What a frame shows to its receiver.
#[derive(Debug)]
pub(super) struct Shown {
    pub(super) source: IpAddr,
    pub(super) receiver: IpAddr,
    /// Addresses in the IP headers that it quotes.
    pub(super) quoted: Vec<IpAddr>,
    /// It is an ICMP error, or neighbor discovery.
    pub(super) is_error: bool,
    pub(super) is_neighbor_discovery: bool,
}

/// What a frame with an IP packet shows; `None` for ARP.
///
/// # Panics
/// When it is neither, or has no whole IP header.
pub(super) fn shown(frame: &[u8]) -> Option<Shown> {
    let kind = u16::from_be_bytes([frame[12], frame[13]]);
    if kind == 0x0806 {
        return None;
    }
    let version = frame[14] >> 4;
    assert!(matches!((kind, version), (0x0800, 4) | (0x86dd, 6)), "sent: {frame:02x?}");
    let (source, receiver) = ends(&frame[14..]).unwrap_or_else(|| panic!("sent without a header: {frame:02x?}"));
    let message = icmp(&frame[14..]);
    let first = message.and_then(|message| message.first().copied());
    let mut quoted = Vec::new();
    if let Some(message) = message {
        add_quoted(message, version == 6, &mut quoted);
    }
    Some(Shown {
        source,
        receiver,
        quoted,
        is_error: first.is_some_and(|kind| is_error(kind, version == 6)),
        is_neighbor_discovery: version == 6 && first.is_some_and(|kind| (133..=137).contains(&kind)),
    })
}

/// The addresses at their places in an IP header; `None` if it is truncated.
fn ends(packet: &[u8]) -> Option<(IpAddr, IpAddr)> {
    match packet.first()? >> 4 {
        4 => {
            let at = |from: usize| packet.get(from..)?.first_chunk::<4>().map(|it| IpAddr::V4(Ipv4Addr::from(*it)));
            Some((at(12)?, at(16)?))
        }
        6 => {
            let at = |from: usize| packet.get(from..)?.first_chunk::<16>().map(|it| IpAddr::V6(Ipv6Addr::from(*it)));
            Some((at(8)?, at(24)?))
        }
        _ => None,
    }
}

/// The ICMP message in a packet, in a first fragment, too; of its own family. None behind an authentication header: no
/// router may change that, and none but the receiver looks there.
fn icmp(packet: &[u8]) -> Option<&[u8]> {
    if packet.first()? >> 4 == 4 {
        let is_later = u16::from_be_bytes([*packet.get(6)?, *packet.get(7)?]) & 0x1fff != 0;
        let message = packet.get(usize::from(packet[0] & 0xf) * 4..)?;
        return (*packet.get(9)? == 1 && !is_later).then_some(message);
    }
    // Extension headers that a router's packets may have (RFC 8200 section 4).
    let (mut next, mut rest) = (*packet.get(6)?, packet.get(40..)?);
    loop {
        let length = match next {
            58 => return Some(rest),
            44 if u16::from_be_bytes([*rest.get(2)?, *rest.get(3)?]) >> 3 == 0 => 8,
            0 | 43 | 60 => (usize::from(*rest.get(1)?) + 1) * 8,
            _ => return None,
        };
        (next, rest) = (rest[0], rest.get(length..)?);
    }
}

/// Types of errors (RFC 792; RFC 4443 section 2.1, RFC 4861 section 4.5).
fn is_error(kind: u8, v6: bool) -> bool {
    if v6 { kind < 128 || kind == 137 } else { matches!(kind, 3 | 4 | 5 | 11 | 12) }
}

/// Adds the addresses that an ICMP error quotes, and those that a quoted error quotes.
fn add_quoted(message: &[u8], v6: bool, to: &mut Vec<IpAddr>) {
    let Some(quote) = message.get(8..).filter(|_| is_error(message[0], v6)) else { return };
    let Some((source, destination)) = ends(quote) else { return };
    to.extend([source, destination]);
    if let Some(message) = icmp(quote) {
        add_quoted(message, source.is_ipv6(), to);
    }
}

/// The policy in force.
pub(super) struct Rule<'a>(pub(super) &'a PolicySet);

impl Rule<'_> {
    /// Whether a receiver must not see this address: that of a pod whose packets to it a policy translates, or, where
    /// uncovered pods are dropped, of any other pod unless the receiver is in the cluster.
    pub(super) fn hides(&self, address: IpAddr, receiver: IpAddr) -> bool {
        if address == receiver {
            return false;
        }
        let set = self.0;
        if let Some(endpoint) = set.endpoints.iter().find(|endpoint| endpoint.address == address) {
            return self.translates(&endpoint.policy, receiver);
        }
        let is_pod = set.cluster.pods.iter().any(|net| net.contains(&address));
        is_pod && set.cluster.drop_uncovered && self.cluster_prefix(receiver).is_none()
    }

    /// Whether it is a covered pod's address.
    pub(super) fn covers(&self, address: IpAddr) -> bool {
        self.0.endpoints.iter().any(|endpoint| endpoint.address == address)
    }

    pub(super) fn is_vip(&self, address: IpAddr) -> bool {
        self.0.vips.iter().any(|vip| vip.address == address)
    }

    /// Length of the longest cluster prefix that an address is in.
    pub(super) fn cluster_prefix(&self, address: IpAddr) -> Option<u8> {
        let all = self.0.cluster.pods.iter().chain(&self.0.cluster.others);
        all.filter(|net| net.contains(&address)).map(ipnet::IpNet::prefix_len).max()
    }

    /// Whether a policy translates this destination. The longest of its prefixes decides, an exclusion before a
    /// destination of the same length; a longer cluster prefix keeps it internal.
    fn translates(&self, policy: &str, destination: IpAddr) -> bool {
        let Some(policy) = self.0.policies.iter().find(|it| *it.name == *policy) else { return false };
        let longest = |nets: &[ipnet::IpNet]| {
            nets.iter().filter(|net| net.contains(&destination)).map(ipnet::IpNet::prefix_len).max()
        };
        let Some(length) = longest(&policy.destinations) else { return false };
        longest(&policy.excluded).is_none_or(|excluded| excluded < length)
            && self.cluster_prefix(destination).is_none_or(|own| own <= length)
    }
}
