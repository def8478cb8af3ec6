//! Drop statistics: the last packet of each drop reason, and for each reason and address a count and the last packet.
//!
//! Addresses can be forged, so the table has a fixed size. In each row of eight, a new entry replaces the one with the
//! lowest count and inherits that count as its error bound ("Space-Saving", Metwally et al. 2005): frequent addresses
//! are always found, and a count is never too low, and too high by at most its error.

use std::net::{IpAddr, Ipv4Addr};

use crate::flow::drop_reason::DropReason;
use crate::flow::ids::InterfaceId;
use crate::flow::time::Tick;
use crate::observe::packet_summary::PacketSummary;
use crate::policy::spec::Role;

/// Rows, and entries per row.
const ROWS: usize = 64;
const ENTRIES_PER_ROW: usize = 8;
/// Entries at most, one per reason and address.
pub const MAX_RECORDS: usize = ROWS * ENTRIES_PER_ROW;

/// The address that a drop is attributed to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Attribution {
    /// The source: an endpoint that sends.
    Source,
    /// The destination: a VIP or an endpoint.
    Destination,
}

impl Attribution {
    /// For an untranslated packet that came in on an interface of this role.
    pub fn of(role: Role) -> Self {
        if role.is_inside() { Self::Source } else { Self::Destination }
    }
}

/// A dropped packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropExample {
    /// Time of the drop.
    pub at: Tick,
    /// The ingress interface.
    pub interface: InterfaceId,
    /// Its addresses and ports, if they could be parsed.
    pub packet: Option<PacketSummary>,
}

/// Drops of one address for one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropRecord {
    pub reason: DropReason,
    /// The source address of packets from the inside, the destination address of packets from the outside.
    pub address: IpAddr,
    /// Packets dropped; an upper bound.
    pub packets: u64,
    /// The error of that count: packets that may belong to other addresses.
    pub max_error: u64,
    /// The last dropped packet.
    pub last: DropExample,
}

const EMPTY: DropRecord = DropRecord {
    reason: DropReason::NoService,
    address: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    packets: 0,
    max_error: 0,
    last: DropExample { at: Tick(0), interface: InterfaceId(0), packet: None },
};

/// Drop statistics of one worker.
#[derive(Debug)]
pub struct DropStats {
    // Boxed, so that the data of the packet path stays close together.
    last: Box<[Option<DropExample>; DropReason::ALL.len()]>,
    rows: Box<[[DropRecord; ENTRIES_PER_ROW]]>,
}

impl Default for DropStats {
    fn default() -> Self {
        Self { last: Box::new([None; DropReason::ALL.len()]), rows: vec![[EMPTY; ENTRIES_PER_ROW]; ROWS].into() }
    }
}

impl DropStats {
    /// Counts a dropped packet.
    #[cold]
    pub fn count(
        &mut self,
        reason: DropReason,
        frame: &[u8],
        interface: InterfaceId,
        attribution: Attribution,
        now: Tick,
    ) {
        self.count_packet(reason, PacketSummary::of(frame), interface, attribution, now);
    }

    /// Counts a dropped packet that is already parsed.
    pub fn count_packet(
        &mut self,
        reason: DropReason,
        packet: Option<PacketSummary>,
        interface: InterfaceId,
        attribution: Attribution,
        now: Tick,
    ) {
        let last = DropExample { at: now, interface, packet };
        self.last[reason as usize] = Some(last);
        // Frames for others, flooded by a switch: nobody here has sent or missed them.
        let Some(packet) = last.packet.filter(|_| reason != DropReason::NotOurs) else { return };
        let address = match attribution {
            Attribution::Source => packet.source,
            Attribution::Destination => packet.destination,
        };
        let row = &mut self.rows[row(reason, address)];
        let known =
            row.iter().position(|entry| entry.packets > 0 && entry.reason == reason && entry.address == address);
        let least_frequent = || (0..ENTRIES_PER_ROW).min_by_key(|&at| row[at].packets);
        let Some(at) = known.or_else(least_frequent) else { return };
        let entry = &mut row[at];
        if known.is_none() {
            *entry = DropRecord { reason, address, packets: entry.packets, max_error: entry.packets, last };
        }
        entry.packets += 1;
        entry.last = last;
    }

    /// The last dropped packet of each reason, indexed by reason.
    pub fn last(&self) -> &[Option<DropExample>; DropReason::ALL.len()] {
        &self.last
    }

    /// All entries, unordered.
    pub fn records(&self) -> impl Iterator<Item = &DropRecord> {
        self.rows.iter().flatten().filter(|entry| entry.packets > 0)
    }
}

/// The row of a reason and an address. The hash is not keyed: an attacker who finds collisions only hides one address
/// from the statistics.
fn row(reason: DropReason, address: IpAddr) -> usize {
    let bits = match address {
        IpAddr::V4(v4) => u64::from(v4.to_bits()),
        IpAddr::V6(v6) => {
            let [high, low] = [(v6.to_bits() >> 64) as u64, v6.to_bits() as u64];
            high.rotate_left(32) ^ low
        }
    };
    let mixed = (bits ^ (reason as u64) << 56).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 58) as usize % ROWS
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    fn packet(source: u32) -> PacketSummary {
        let destination = Ipv4Addr::new(198, 51, 100, 10).into();
        PacketSummary { source: Ipv4Addr::from_bits(source).into(), destination, protocol: 17, ports: Some([9, 9]) }
    }

    #[test]
    fn an_unparsable_packet_leaves_only_its_time_and_interface() {
        let mut table = DropStats::default();
        table.count(DropReason::Malformed, &[1, 2, 3], InterfaceId(1), Attribution::Source, Tick(7));
        let last = table.last()[DropReason::Malformed as usize].unwrap();
        assert_eq!((last.at, last.interface, last.packet), (Tick(7), InterfaceId(1), None));
        assert_eq!(table.records().count(), 0);
    }

    #[test]
    fn frames_for_others_are_attributed_to_no_address() {
        let mut table = DropStats::default();
        for reason in [DropReason::NotOurs, DropReason::NoPolicy] {
            table.count_packet(reason, Some(packet(9)), InterfaceId(0), Attribution::Source, Tick(7));
            assert!(table.last()[reason as usize].is_some(), "the last packet is kept");
        }
        let attributed: Vec<DropReason> = table.records().map(|record| record.reason).collect();
        assert_eq!(attributed, [DropReason::NoPolicy]);
    }

    proptest! {
        #[test]
        fn frequent_addresses_are_found_and_counts_are_upper_bounds(
            senders in prop::collection::vec(prop_oneof![2 => 0_u32..5, 3 => any::<u32>()], 1..3000)
        ) {
            let mut table = DropStats::default();
            let mut counts: HashMap<IpAddr, u64> = HashMap::new();
            for &sender in &senders {
                let packet = Some(packet(sender));
                table.count_packet(DropReason::NoPolicy, packet, InterfaceId(0), Attribution::Source, Tick(1));
                *counts.entry(Ipv4Addr::from_bits(sender).into()).or_default() += 1;
            }
            prop_assert!(table.records().count() <= MAX_RECORDS);
            for record in table.records() {
                let actual = counts.get(&record.address).copied().unwrap_or(0);
                prop_assert!(record.packets >= actual && record.packets - record.max_error <= actual);
            }
            prop_assert_eq!(table.records().map(|record| record.packets).sum::<u64>(), senders.len() as u64);
            for (address, &count) in &counts {
                let frequent = senders.len() as u64 / ENTRIES_PER_ROW as u64;
                prop_assert!(count <= frequent || table.records().any(|record| record.address == *address));
            }
        }
    }
}
