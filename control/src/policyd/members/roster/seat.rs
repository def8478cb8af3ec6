//! What was last heard of a gateway, and of a second process with its name.

use std::net::SocketAddr;
use std::time::{Duration, Instant};

use super::{Heard, Refusal};
use crate::members::{Beat, Fingerprint, Member, Wish};

/// A gateway that was heard.
#[derive(Clone, Debug)]
pub struct Seat {
    /// Its process.
    pub incarnation: u64,
    /// What it wants.
    pub wish: Wish,
    /// Number of the view that it acts by.
    pub seen_view: u64,
    /// When its last beat came.
    pub(super) last: Instant,
    /// Whether the stream of that beat has ended.
    pub(super) left: bool,
    fingerprint: Option<Fingerprint>,
    peer: Option<SocketAddr>,
    contender: Option<Contender>,
}

/// Another process with the same name.
#[derive(Clone, Copy, Debug)]
struct Contender {
    incarnation: u64,
    since: Instant,
}

impl Seat {
    pub(super) fn of(beat: &Beat, now: Instant) -> Self {
        Self {
            incarnation: beat.incarnation,
            wish: beat.wish,
            seen_view: beat.seen_view,
            last: now,
            left: false,
            fingerprint: beat.fingerprint,
            peer: beat.peer,
            contender: None,
        }
    }

    /// The same process again.
    pub(super) fn renew(&mut self, beat: &Beat, now: Instant) {
        *self = Self { contender: self.contender, ..Self::of(beat, now) };
    }

    pub(super) fn is_fresh(&self, now: Instant, ttl: Duration) -> bool {
        now.saturating_duration_since(self.last) <= ttl
    }

    /// Whether nobody has the name any more, if another process wants it.
    pub(super) fn is_gone(&self, now: Instant, ttl: Duration) -> bool {
        self.left || !self.is_fresh(now, ttl)
    }

    /// Another process says that it is this gateway. Most often the first one is dead, and its end wasn't seen: whoever lives
    /// beats twice in half a TTL.
    pub(super) fn contend(&mut self, beat: &Beat, now: Instant, ttl: Duration) -> Result<Heard, Refusal> {
        let contender = match self.contender {
            Some(contender) if contender.incarnation == beat.incarnation => contender,
            _ => Contender { incarnation: beat.incarnation, since: now },
        };
        self.contender = Some(contender);
        if self.last > contender.since {
            return Err(Refusal::UsedTwice { gateway: beat.gateway.clone(), incarnation: self.incarnation });
        }
        if now.saturating_duration_since(contender.since) < ttl / 2 {
            return Ok(Heard::Waits);
        }
        *self = Self::of(beat, now);
        Ok(Heard::Counts)
    }

    /// Whether it would serve if it were asked to.
    pub(super) fn is_ready(&self, member: &Member, number: u64, now: Instant, ttl: Duration) -> bool {
        self.wish == Wish::Ready
            && self.seen_view == number
            && self.incarnation == member.incarnation
            && !self.is_gone(now, ttl)
    }

    /// Writes down who it is.
    pub(super) fn describe(&self, member: &mut Member) {
        member.incarnation = self.incarnation;
        member.fingerprint = self.fingerprint;
        member.peer = self.peer;
    }
}
