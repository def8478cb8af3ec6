//! Drops by whom: of each reason the last packet, and of each reason and address a count and the last packet.
//!
//! Addresses are anybody's to invent, so the table has a fixed size. In each row of eight, whoever was dropped least makes room for who
//! comes new, who inherits its count as a doubt ("Space-Saving", Metwally et al. 2005): those that are dropped a lot are always found,
//! and a count is never too small, and never more too high than it says.

use std::net::{IpAddr, Ipv4Addr};

use super::glimpse::Glimpse;
use crate::counters::DropReason;
use crate::io::InterfaceId;
use crate::snapshot::spec::Role;
use crate::time::Tick;

/// Rows, and places in each.
const ROWS: usize = 64;
const PLACES: usize = 8;
/// Reasons and addresses that are counted at most.
pub const MOST: usize = ROWS * PLACES;

/// Whose affair a drop is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Whose {
    /// A pod's, which sends.
    Sender,
    /// A VIP's or a pod's, who would have received it.
    Receiver,
}

impl Whose {
    /// Of a packet that came in on that side, untranslated.
    pub fn of(role: Role) -> Self {
        if role.is_inside() { Self::Sender } else { Self::Receiver }
    }
}

/// A dropped packet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Example {
    /// When it was dropped.
    pub at: Tick,
    /// Where it came in.
    pub interface: InterfaceId,
    /// Its ends, if they could be read.
    pub packet: Option<Glimpse>,
}

/// What was dropped of one address for one reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DropRecord {
    /// Why.
    pub reason: DropReason,
    /// On the inside whoever sent the packets, on the outside whom they were for.
    pub address: IpAddr,
    /// How many packets, at most.
    pub packets: u64,
    /// How many of these may have been somebody else's.
    pub doubt: u64,
    /// The last one.
    pub last: Example,
}

const NOBODY: DropRecord = DropRecord {
    reason: DropReason::NoService,
    address: IpAddr::V4(Ipv4Addr::UNSPECIFIED),
    packets: 0,
    doubt: 0,
    last: Example { at: Tick(0), interface: InterfaceId(0), packet: None },
};

/// The drops of one worker.
#[derive(Debug)]
pub struct DropTable {
    // Elsewhere: what packets need stays close together.
    last: Box<[Option<Example>; DropReason::ALL.len()]>,
    rows: Box<[[DropRecord; PLACES]]>,
}

impl Default for DropTable {
    fn default() -> Self {
        Self { last: Box::new([None; DropReason::ALL.len()]), rows: vec![[NOBODY; PLACES]; ROWS].into() }
    }
}

impl DropTable {
    /// Notes a dropped packet.
    #[cold]
    pub fn note(&mut self, reason: DropReason, frame: &[u8], interface: InterfaceId, whose: Whose, now: Tick) {
        self.note_packet(reason, Glimpse::of(frame), interface, whose, now);
    }

    /// The same of one that isn't there any more.
    pub fn note_packet(
        &mut self,
        reason: DropReason,
        packet: Option<Glimpse>,
        interface: InterfaceId,
        whose: Whose,
        now: Tick,
    ) {
        let last = Example { at: now, interface, packet };
        self.last[reason as usize] = Some(last);
        let Some(packet) = last.packet else { return };
        let address = match whose {
            Whose::Sender => packet.source,
            Whose::Receiver => packet.destination,
        };
        let row = &mut self.rows[row(reason, address)];
        let known =
            row.iter().position(|place| place.packets > 0 && place.reason == reason && place.address == address);
        let least = || (0..PLACES).min_by_key(|&at| row[at].packets);
        let Some(at) = known.or_else(least) else { return };
        let place = &mut row[at];
        if known.is_none() {
            *place = DropRecord { reason, address, packets: place.packets, doubt: place.packets, last };
        }
        place.packets += 1;
        place.last = last;
    }

    /// The last packet of each reason, by the reasons' numbers.
    pub fn last(&self) -> &[Option<Example>; DropReason::ALL.len()] {
        &self.last
    }

    /// What was dropped of whom, in no order.
    pub fn records(&self) -> impl Iterator<Item = &DropRecord> {
        self.rows.iter().flatten().filter(|place| place.packets > 0)
    }
}

/// The row of a reason and an address. Fixed is good enough: who finds many that share a row hides one of them from people.
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

    fn packet(source: u32) -> Glimpse {
        let destination = Ipv4Addr::new(198, 51, 100, 10).into();
        Glimpse { source: Ipv4Addr::from_bits(source).into(), destination, protocol: 17, ports: Some([9, 9]) }
    }

    #[test]
    fn what_is_no_packet_leaves_its_time_only() {
        let mut table = DropTable::default();
        table.note(DropReason::Malformed, &[1, 2, 3], InterfaceId(1), Whose::Sender, Tick(7));
        let last = table.last()[DropReason::Malformed as usize].unwrap();
        assert_eq!((last.at, last.interface, last.packet), (Tick(7), InterfaceId(1), None));
        assert_eq!(table.records().count(), 0);
    }

    proptest! {
        #[test]
        fn whoever_is_dropped_a_lot_is_found_and_counts_are_only_ever_too_high(
            senders in prop::collection::vec(prop_oneof![2 => 0_u32..5, 3 => any::<u32>()], 1..3000)
        ) {
            let mut table = DropTable::default();
            let mut counts: HashMap<IpAddr, u64> = HashMap::new();
            for &sender in &senders {
                let packet = Some(packet(sender));
                table.note_packet(DropReason::NoPolicy, packet, InterfaceId(0), Whose::Sender, Tick(1));
                *counts.entry(Ipv4Addr::from_bits(sender).into()).or_default() += 1;
            }
            prop_assert!(table.records().count() <= MOST);
            for record in table.records() {
                let truth = counts.get(&record.address).copied().unwrap_or(0);
                prop_assert!(record.packets >= truth && record.packets - record.doubt <= truth);
            }
            prop_assert_eq!(table.records().map(|record| record.packets).sum::<u64>(), senders.len() as u64);
            for (address, &count) in &counts {
                let share = senders.len() as u64 / PLACES as u64;
                prop_assert!(count <= share || table.records().any(|record| record.address == *address));
            }
        }
    }
}
