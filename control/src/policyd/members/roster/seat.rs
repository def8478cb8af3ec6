//! What was last heard of a gateway, and of a second process with its name.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{Heard, Refusal};
use crate::members::{Beat, Commitment, Fingerprint, Member, TunnelKey, Wish};

/// A gateway that was heard.
#[derive(Clone, Debug)]
pub struct Seat {
    /// Its process.
    pub incarnation: u64,
    /// Of its secret, once it has shown that.
    pub(super) commitment: Option<Commitment>,
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
    tunnel_key: Option<TunnelKey>,
    unable: Option<Arc<str>>,
    /// Since when it says that it is able, or that it isn't.
    since: Instant,
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
            commitment: beat.commitment,
            wish: beat.wish,
            seen_view: beat.seen_view,
            last: now,
            left: false,
            fingerprint: beat.fingerprint,
            peer: beat.peer,
            tunnel_key: beat.tunnel_key,
            unable: beat.unable.clone(),
            since: now,
            contender: None,
        }
    }

    /// Whether a beat with this incarnation is of this process. An incarnation shows nothing, since everybody sees it; who has shown
    /// a secret once shows it each time.
    pub(super) fn is_of(&self, beat: &Beat) -> bool {
        self.commitment.is_none() || self.commitment == beat.commitment
    }

    /// The same process again, as another server has taken it in; a server of before there were secrets keeps none.
    pub(super) fn observe(&mut self, beat: &Beat, now: Instant) {
        let commitment = beat.commitment.or(self.commitment);
        self.renew(beat, now);
        self.commitment = commitment;
    }

    /// The same process again.
    pub(super) fn renew(&mut self, beat: &Beat, now: Instant) {
        let since = if self.is_unable() == beat.unable.is_some() { self.since } else { now };
        *self = Self { since, contender: self.contender, ..Self::of(beat, now) };
    }

    pub(super) fn is_fresh(&self, now: Instant, ttl: Duration) -> bool {
        now.saturating_duration_since(self.last) <= ttl
    }

    /// Another process says that it is this gateway. Most often the first one is dead, and its end wasn't seen. Who has what the first
    /// one kept on its host waits only until that would have beaten twice; anybody else until the name is free.
    pub(super) fn contend(&mut self, beat: &Beat, now: Instant, ttl: Duration) -> Result<Heard, Refusal> {
        let is_successor = self.commitment.is_some() && beat.predecessor.as_deref() == self.commitment.as_ref();
        if is_successor && self.left {
            *self = Self::of(beat, now);
            return Ok(Heard::Counts);
        }
        let contender = match self.contender {
            Some(contender) if contender.incarnation == beat.incarnation => contender,
            _ => Contender { incarnation: beat.incarnation, since: now },
        };
        self.contender = Some(contender);
        if self.last > contender.since {
            return Err(Refusal::UsedTwice { gateway: beat.gateway.clone(), incarnation: self.incarnation });
        }
        if !is_successor || now.saturating_duration_since(contender.since) < ttl / 2 {
            return Ok(Heard::Waits);
        }
        *self = Self::of(beat, now);
        Ok(Heard::Counts)
    }

    /// Whether it would serve if it were asked to.
    pub(super) fn is_ready(&self, member: &Member, number: u64, now: Instant, ttl: Duration) -> bool {
        self.wish == Wish::Ready && self.is_current(member, number, now, ttl)
    }

    /// Whether it would serve, if nobody else did who can do better: an able gateway that wants to drain is left in peace.
    pub(super) fn is_makeshift(&self, member: &Member, number: u64, now: Instant, ttl: Duration) -> bool {
        self.is_unable() && self.is_current(member, number, now, ttl)
    }

    /// Whether it says that it can't do what it serves for.
    pub fn is_unable(&self) -> bool {
        self.unable.is_some()
    }

    /// Whether it has been able, or unable, for so long that others whom the same befalls have said so, too: gateways behind one router
    /// find it dead one after the other, within an interval of probes and a beat.
    pub(super) fn is_steady(&self, now: Instant, ttl: Duration) -> bool {
        now.saturating_duration_since(self.since) >= ttl / 2
    }

    /// Whether it is an able one that has come just now, and will serve.
    pub(super) fn is_coming(&self, now: Instant, ttl: Duration) -> bool {
        let is_new = now.saturating_duration_since(self.since) < 2 * ttl;
        is_new && !self.left && self.is_fresh(now, ttl) && !self.is_unable() && self.wish != Wish::Draining
    }

    /// Whether it lives, and has seen the current view.
    fn is_current(&self, member: &Member, number: u64, now: Instant, ttl: Duration) -> bool {
        let lives = !self.left && self.is_fresh(now, ttl);
        self.seen_view == number && self.incarnation == member.incarnation && lives
    }

    /// Writes down who it is.
    pub(super) fn describe(&self, member: &mut Member) {
        member.incarnation = self.incarnation;
        member.commitment = self.commitment;
        member.fingerprint = self.fingerprint;
        member.peer = self.peer;
        member.tunnel_key = self.tunnel_key;
        member.unable.clone_from(&self.unable);
    }
}
