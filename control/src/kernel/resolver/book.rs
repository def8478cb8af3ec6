//! Which next hops are looked after, since when, and whether it is time to ask again. Pure: time is an argument.

use std::collections::HashMap;

use tokio::time::Instant;

use super::{Hop, ResolverLimits};

/// A next hop counts as in use for so many times `ResolverLimits::look_again` after it was named.
const KEPT_FOR: u32 = 3;

/// One next hop that is looked after.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// The last question to the kernel.
    asked: Option<Instant>,
    /// When somebody wanted it last.
    used: Instant,
    /// When it was last named as in use.
    kept: Option<Instant>,
    /// The kernel was told to keep it resolved, by us.
    managed: bool,
}

/// The next hops that are looked after.
#[derive(Debug)]
pub(super) struct Book {
    limits: ResolverLimits,
    hops: HashMap<Hop, Entry>,
    /// Questions that may be asked now, and since when that has been true.
    allowance: f64,
    allowance_at: Instant,
}

/// A next hop that isn't looked after any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LetGo {
    /// Which one.
    pub(super) hop: Hop,
    /// The kernel has to be told.
    pub(super) managed: bool,
}

/// What to do about a wanted next hop.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// Ask; the one that nobody has wanted for longest had to make room for it.
    Ask(Option<LetGo>),
    /// It was asked for just now, or too many were.
    Wait,
}

impl Book {
    /// Nothing is looked after yet.
    pub(super) fn new(limits: ResolverLimits, now: Instant) -> Self {
        Self { limits, hops: HashMap::new(), allowance: f64::from(limits.per_second), allowance_at: now }
    }

    /// Somebody wants a next hop that isn't known.
    pub(super) fn want(&mut self, hop: Hop, now: Instant) -> Admission {
        if let Some(entry) = self.hops.get_mut(&hop) {
            entry.used = now;
            if entry.asked.is_some_and(|asked| now < asked + self.limits.pause) {
                return Admission::Wait;
            }
        }
        if !self.spend(now) {
            return Admission::Wait;
        }
        let is_full = self.hops.len() >= self.limits.hops && !self.hops.contains_key(&hop);
        let let_go = if is_full { self.oldest().and_then(|oldest| self.remove(oldest)) } else { None };
        let entry = self.hops.entry(hop).or_insert(Entry { asked: None, used: now, kept: None, managed: false });
        entry.asked = Some(now);
        Admission::Ask(let_go)
    }

    /// Next hops are in use. Those that weren't looked after are due at once; returns those that made room for them.
    pub(super) fn keep(&mut self, hops: &[Hop], now: Instant) -> Vec<LetGo> {
        let mut let_go = Vec::new();
        for hop in hops {
            if !self.hops.contains_key(hop) && self.hops.len() >= self.limits.hops {
                // Those that were named in this same call stay: a list that is too long must not chase its own tail.
                match self.oldest().filter(|oldest| self.hops[oldest].used < now) {
                    Some(oldest) => let_go.extend(self.remove(oldest)),
                    None => continue,
                }
            }
            let entry = self.hops.entry(*hop).or_insert(Entry { asked: None, used: now, kept: None, managed: false });
            entry.used = now;
            entry.kept = Some(now);
        }
        let_go
    }

    /// A next hop that is the kernel's to keep since an earlier life of the gateway.
    pub(super) fn adopt(&mut self, hop: Hop, now: Instant) {
        self.hops.insert(hop, Entry { asked: Some(now), used: now, kept: None, managed: true });
    }

    /// Next hops that it is time to look after again, those that have waited longest first, no more than may be asked.
    pub(super) fn due(&mut self, now: Instant) -> Vec<Hop> {
        let is_due = |entry: &Entry| entry.asked.is_none_or(|asked| now >= asked + self.limits.look_again);
        let mut due: Vec<(Option<Instant>, Hop)> =
            self.hops.iter().filter(|(_, entry)| is_due(entry)).map(|(hop, entry)| (entry.asked, *hop)).collect();
        due.sort_unstable();
        due.truncate(self.limits.per_second as usize);
        for (_, hop) in &due {
            if let Some(entry) = self.hops.get_mut(hop) {
                entry.asked = Some(now);
            }
        }
        due.into_iter().map(|(_, hop)| hop).collect()
    }

    /// Whether a next hop that doesn't answer is to be let go: the kernel would ask for it for ever.
    pub(super) fn gives_up(&self, hop: Hop, now: Instant) -> bool {
        let in_use = |entry: &Entry| entry.kept.is_some_and(|kept| now < kept + self.limits.look_again * KEPT_FOR);
        self.hops.get(&hop).is_some_and(|entry| !in_use(entry))
    }

    /// Whether the next hop is looked after.
    pub(super) fn knows(&self, hop: Hop) -> bool {
        self.hops.contains_key(&hop)
    }

    /// Notes whether the kernel keeps the next hop for us.
    pub(super) fn set_managed(&mut self, hop: Hop, managed: bool) {
        if let Some(entry) = self.hops.get_mut(&hop) {
            entry.managed = managed;
        }
    }

    /// Forgets a next hop.
    pub(super) fn remove(&mut self, hop: Hop) -> Option<LetGo> {
        self.hops.remove(&hop).map(|entry| LetGo { hop, managed: entry.managed })
    }

    /// Every next hop.
    pub(super) fn all(&self) -> Vec<Hop> {
        self.hops.keys().copied().collect()
    }

    fn oldest(&self) -> Option<Hop> {
        self.hops.iter().min_by_key(|(_, entry)| entry.used).map(|(hop, _)| *hop)
    }

    /// Takes one question from the allowance, which refills by time and holds one second's worth.
    fn spend(&mut self, now: Instant) -> bool {
        let rate = f64::from(self.limits.per_second);
        self.allowance = (self.allowance + (now - self.allowance_at).as_secs_f64() * rate).min(rate);
        self.allowance_at = now;
        let may = self.allowance >= 1.0;
        if may {
            self.allowance -= 1.0;
        }
        may
    }
}

#[cfg(test)]
#[path = "book_tests.rs"]
mod tests;
