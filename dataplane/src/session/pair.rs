//! The two entries of a session in the tables of a former process, which may have died between its writes to them:
//! whether they agree, and the session's role.

use super::SessionFamily;
use super::entry::Flags;
use super::table::Table;
use crate::flow::address::Address;
use crate::flow::ids::Slot;
use crate::flow::tuple::HashKey;

/// Role of a session at this gateway, in order of importance.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Role {
    /// Open here.
    Active,
    /// Replicated from another gateway.
    Standby,
    /// Ended; its port isn't reusable yet.
    Quarantined,
}

impl Role {
    /// Role of a session, from both entries. If the process died between its writes to the two entries, the session
    /// counts as quarantined when one entry is, else as standby when one is.
    pub(super) fn of<A: Address>(table: &Table<A>, origin: Slot, twin: Slot) -> Self {
        let both = [table.entry(origin), table.entry(twin)];
        if both.iter().any(|entry| entry.flags().has(Flags::QUARANTINED)) {
            Self::Quarantined
        } else if both.iter().any(|entry| entry.is_standby()) {
            Self::Standby
        } else {
            Self::Active
        }
    }
}

/// Slot of the twin of an original-direction entry, if both exist and agree in everything.
pub(super) fn matching_twin<A: SessionFamily>(table: &Table<A>, key: HashKey, origin: Slot) -> Option<Slot> {
    let entry = table.is_occupied(origin).then(|| table.entry(origin))?;
    let twin_slot = entry.twin();
    let twin = (twin_slot != origin && table.is_occupied(twin_slot)).then(|| table.entry(twin_slot))?;
    let agree = entry.flags().has(Flags::ORIGIN)
        && !twin.flags().has(Flags::ORIGIN)
        && twin.twin() == origin
        && entry.key() == twin.translated().reversed()
        && entry.translated() == twin.key().reversed()
        && entry.has_valid_direction()
        && twin.has_valid_direction()
        && table.is_reachable(key.hash(&entry.key()), origin)
        && table.is_reachable(key.hash(&twin.key()), twin_slot);
    agree.then_some(twin_slot)
}
