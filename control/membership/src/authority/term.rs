//! Terms: each server that begins to decide has a term of its own, and all views that it makes have numbers of it. So no
//! number is used twice, whatever the server before has still under way.
//!
//! What is stored is one record, which a server replaces by its own before it decides. If the record was lost, or is from a
//! backup, gateways know later views. Then this server takes a term above theirs, and decides nothing until all leases
//! have expired that it can't know of. What the later views were, it can't know either: a gateway that has applied the
//! last one and is ready becomes active again, with all the sessions as of that view.

use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{MemberRecord, MembershipState};
use crate::{DesiredState, Member, MembershipView};

/// Numbers of views in a term.
const VIEWS_PER_TERM: u64 = 1_000_000;

/// Limit of view numbers that are accepted from gateways, half of what a view may have: whatever a gateway claims,
/// there are always higher numbers left.
pub const MAX_REPORTED_NUMBER: u64 = 1 << 61;

/// What outlives a server, and is shared by all.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Record {
    /// The term of the server that decides.
    pub term: u64,
    /// The last view; number 0: none yet.
    pub view: Arc<MembershipView>,
}

impl Record {
    /// The record by which the next server begins to decide.
    #[must_use]
    pub fn next_term(&self) -> Self {
        Self { term: self.term.max(term_of(self.view.number)) + 1, view: self.view.clone() }
    }
}

/// The term of a view number.
fn term_of(number: u64) -> u64 {
    number / VIEWS_PER_TERM
}

/// The term of a server that decides, and what it knows of others.
#[derive(Clone, Debug, Default)]
pub(super) struct Term {
    /// 0: this server doesn't decide.
    number: u64,
    /// Whether this server knows that the record is the last one: it has followed it while another one decided, or has
    /// decided itself before.
    is_followed: bool,
    /// The highest view number that is in use elsewhere, if no lower than the view's.
    pub(super) used_number: u64,
    /// When a gateway has first reported a view that isn't in the record, during recovery.
    outdated_at: Option<Instant>,
}

impl Term {
    /// The number of the view after one with this number.
    pub(super) fn next_number(&self, last: u64) -> u64 {
        (last + 1).max(self.number * VIEWS_PER_TERM + 1)
    }

    /// When all leases have expired that the record doesn't tell of; `None`: it tells of all, as far as known.
    pub(super) fn leases_expire_at(&self, ttl: Duration) -> Option<Instant> {
        self.outdated_at.map(|at| at + ttl)
    }

    /// Whether leases may be granted under the record's view at once.
    pub(super) fn is_followed(&self) -> bool {
        self.is_followed
    }
}

impl MembershipState {
    /// Follows the record while another server decides, for others to read.
    pub fn follow(&mut self, record: &Record) {
        self.term.is_followed = true;
        if record.view.number > self.view.number {
            self.view = record.view.clone();
        }
    }

    /// Begins to decide, by a record that this server has written: nothing that the server before writes succeeds any more.
    /// Its leases may be valid for a TTL, and gateways have as long to send a heartbeat to this one.
    pub fn begin_term(&mut self, record: &Record) {
        self.leave_term();
        let known = self.view.number;
        self.term.number = record.term.max(term_of(known) + 1);
        if record.view.number >= known {
            self.view = record.view.clone();
        } else {
            // The record has lost data. A view that was published can't be withdrawn; the next one gets a higher number.
            self.term.used_number = known;
        }
    }

    /// Goes on deciding after a write whose outcome wasn't known, by a record that this server has written in place of
    /// one of this term; whether it was of this term. If not, another server has decided meanwhile.
    pub fn continue_term(&mut self, record: &Record, previous_term: u64) -> bool {
        if previous_term != self.stored_record().term {
            return false;
        }
        self.term.number = record.term;
        if record.view.number > self.view.number {
            self.view = record.view.clone();
        }
        true
    }

    /// Ceases to decide. What heartbeats have shown is of the past from here on.
    pub fn leave_term(&mut self) {
        let last = std::mem::replace(self, Self::new(self.ttl));
        self.policy = last.policy;
        self.shard_groups = last.shard_groups;
        self.max_unavailable = last.max_unavailable;
        self.view = last.view;
        self.term.is_followed = last.term.is_followed || last.term.number > 0;
    }

    /// The record of the current decisions.
    pub fn stored_record(&self) -> Record {
        Record { term: self.term.number.max(term_of(self.view.number)), view: self.view.clone() }
    }

    /// Whether gateways know a view that isn't in the record, so that nothing is decided before all leases have expired.
    pub fn is_outdated(&self) -> bool {
        self.term.outdated_at.is_some() && !self.recovered
    }

    /// The highest number that is in use elsewhere, until the view's is above it.
    pub fn used_number(&self) -> u64 {
        self.term.used_number
    }

    /// Learns the highest view number that a gateway knows.
    pub(super) fn learn_number(&mut self, now: Instant, number: u64) {
        if number <= self.view.number.max(self.term.used_number) || number >= MAX_REPORTED_NUMBER {
            return;
        }
        self.term.used_number = number;
        // Afterwards it is too late for a lease under it: all others have promised something else since.
        if !self.recovered {
            self.term.outdated_at.get_or_insert(now);
        }
    }

    /// Goes on above the numbers that are in use elsewhere, if there are any; whether there are. Epochs and counts rise
    /// with the number, so that nothing in another view looks newer.
    pub(super) fn skip_used_numbers(&mut self, now: Instant) -> bool {
        let used = std::mem::take(&mut self.term.used_number);
        if used == 0 || used < self.view.number {
            return false;
        }
        self.term.number = self.term.number.max(term_of(used) + 1);
        let number = self.term.next_number(used);
        let is_unknown = self.term.outdated_at.take().is_some();
        let mut members = self.view.members.clone();
        self.add_new(&mut members, number);
        for member in &mut members {
            member.epoch = number;
            if is_unknown {
                self.continue_unknown(member, used, now);
            }
        }
        self.view = Arc::new(MembershipView { number, serving_changes: number, members });
        true
    }

    /// A member after the last view, with this number, that this server doesn't know.
    fn continue_unknown(&self, member: &mut Member, last: u64, now: Instant) {
        let record = self.records.get(&member.name);
        // Its stream may have ended, since nothing is replied while leases expire.
        let is_ready = |it: &MemberRecord| {
            it.desired_state == DesiredState::Ready && it.seen_view == last && it.is_alive(now, self.ttl)
        };
        member.serving = record.is_some_and(is_ready);
        member.lease_expired = false;
        if let Some(record) = record {
            record.copy_to(member);
        }
    }
}
