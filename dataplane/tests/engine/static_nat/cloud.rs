//! A cloud's 1:1 NAT, as a model: it replaces VIPs by private addresses on the way to the gateway, and back on the way from it, in
//! quotes of ICMP errors too. Slow, and unlike the gateway's: it updates checksums word by word.

use std::net::IpAddr;

/// VIPs and their private addresses at the gateway.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cloud(pub(crate) Vec<(IpAddr, IpAddr)>);

/// A checksum that covers a word: its offset, whether it is of UDP, and that of the ICMP error around it.
#[derive(Clone, Copy)]
struct Sum {
    at: usize,
    is_udp: bool,
    outer: Option<usize>,
}

fn word(bytes: &[u8], at: usize) -> u16 {
    u16::from_be_bytes([bytes[at], bytes[at + 1]])
}

fn set_word(bytes: &mut [u8], at: usize, new: u16, sums: &[Sum]) {
    let old = word(bytes, at);
    bytes[at..at + 2].copy_from_slice(&new.to_be_bytes());
    for sum in sums.iter().filter(|sum| sum.at + 2 <= bytes.len()).copied().collect::<Vec<_>>() {
        let before = word(bytes, sum.at);
        if sum.is_udp && before == 0 {
            continue;
        }
        // RFC 1624, equation 3.
        let mut total = u32::from(!before) + u32::from(!old) + u32::from(new);
        while total > 0xffff {
            total = (total >> 16) + (total & 0xffff);
        }
        let after = !(total as u16);
        let after = if sum.is_udp && after == 0 { u16::MAX } else { after };
        let outer: Vec<Sum> = sum.outer.map(|at| Sum { at, is_udp: false, outer: None }).into_iter().collect();
        set_word(bytes, sum.at, after, &outer);
    }
}

/// Where a packet has its parts.
struct Layout {
    addresses: [usize; 2],
    length: usize,
    header_sum: Option<usize>,
    transport_sum: Option<(usize, bool)>,
    /// Start of the packet that it quotes, if it is an ICMP error.
    quote: Option<usize>,
    icmp_sum: usize,
}

fn layout(bytes: &[u8], at: usize) -> Layout {
    let is_v4 = bytes[at] >> 4 == 4;
    let (mut protocol, mut l4) =
        if is_v4 { (bytes[at + 9], at + usize::from(bytes[at] & 15) * 4) } else { (bytes[at + 6], at + 40) };
    let mut is_later = is_v4 && word(bytes, at + 6) & 0x1fff != 0;
    // The gateway leaves quoted transport headers behind a fragment header as they are.
    if !is_v4 && protocol == 44 && at == 14 {
        is_later = word(bytes, l4 + 2) & 0xfff8 != 0;
        (protocol, l4) = (bytes[l4], l4 + 8);
    }
    let transport_sum = match protocol {
        _ if is_later => None,
        6 => Some((l4 + 16, false)),
        17 => Some((l4 + 6, true)),
        58 => Some((l4 + 2, false)),
        _ => None,
    };
    let kind = bytes.get(l4).copied().unwrap_or_default();
    let is_error = !is_later && matches!((protocol, kind), (1, 3 | 4 | 5 | 11 | 12) | (58, 0..128));
    Layout {
        addresses: if is_v4 { [at + 12, at + 16] } else { [at + 8, at + 24] },
        length: if is_v4 { 4 } else { 16 },
        header_sum: is_v4.then_some(at + 10),
        transport_sum,
        quote: is_error.then_some(l4 + 8),
        icmp_sum: l4 + 2,
    }
}

/// Replaces the source (0) or destination (1) of the packet at an offset; returns whether it did.
fn replace(bytes: &mut [u8], at: usize, which: usize, pairs: &[(IpAddr, IpAddr)], error: Option<usize>) -> bool {
    let layout = layout(bytes, at);
    let from = layout.addresses[which];
    let octets = |address: IpAddr| match address {
        IpAddr::V4(v4) => v4.octets().to_vec(),
        IpAddr::V6(v6) => v6.octets().to_vec(),
    };
    let found = pairs.iter().find(|(old, _)| octets(*old) == bytes[from..from + layout.length]);
    let Some((_, new)) = found else { return false };
    let header = layout.header_sum.map(|at| Sum { at, is_udp: false, outer: error });
    let transport = layout.transport_sum.map(|(at, is_udp)| Sum { at, is_udp, outer: error });
    let outer = error.map(|at| Sum { at, is_udp: false, outer: None });
    let sums: Vec<Sum> = [header, transport, outer].into_iter().flatten().collect();
    for (n, new) in octets(*new).chunks(2).enumerate() {
        set_word(bytes, from + 2 * n, u16::from_be_bytes([new[0], new[1]]), &sums);
    }
    true
}

impl Cloud {
    /// The frame as the gateway receives it.
    pub(crate) fn to_gateway(&self, frame: &[u8]) -> Vec<u8> {
        let mut bytes = frame.to_vec();
        if self.0.is_empty() {
            return bytes;
        }
        let quote = layout(&bytes, 14).quote;
        if replace(&mut bytes, 14, 1, &self.0, None)
            && let Some(at) = quote
        {
            let icmp_sum = layout(&bytes, 14).icmp_sum;
            replace(&mut bytes, at, 0, &self.0, Some(icmp_sum));
        }
        bytes
    }

    /// The frame that the gateway sent, as the internet receives it. No VIP may be its source before.
    pub(crate) fn to_internet(&self, frame: &[u8]) -> Vec<u8> {
        let mut bytes = frame.to_vec();
        if self.0.is_empty() {
            return bytes;
        }
        assert!(!replace(&mut bytes.clone(), 14, 0, &self.0, None), "a VIP is on the wire: {frame:02x?}");
        let back: Vec<_> = self.0.iter().map(|(vip, private)| (*private, *vip)).collect();
        let quote = layout(&bytes, 14).quote;
        replace(&mut bytes, 14, 0, &back, None);
        if let Some(at) = quote {
            let icmp_sum = layout(&bytes, 14).icmp_sum;
            assert!(!replace(&mut bytes.clone(), at, 1, &self.0, None), "a VIP is quoted: {frame:02x?}");
            replace(&mut bytes, at, 1, &back, Some(icmp_sum));
        }
        bytes
    }
}
