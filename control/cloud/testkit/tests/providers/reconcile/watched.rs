//! A fake cloud that is watched: before and after each request its state is compared, and what no request of ours may do is a
//! violation.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tokio::task::AbortHandle;
use tokio::time::Instant;
use vipgate_cloud_testkit::{FakeCloud, RecordedRequest, Reply};

use crate::reconcile::checked::lock;
use crate::reconcile::cloud::{Address, Cloud, GATEWAYS, OURS, Snapshot};
use crate::reconcile::log::Log;
use crate::reconcile::random::Random;
use crate::reconcile::server::Common;

/// Time after its last claim of ours, or after a gateway's death in some view, in which a request that was on its way may still be
/// carried out: neither AWS nor GCP nor Azure has a condition on the tags of an address for its attachment.
pub(crate) const MAX_IN_FLIGHT: Duration = Duration::from_secs(40);

/// The same while no request fails or is late, and no read is old: then what is done was read just before.
const SHORT_IN_FLIGHT: Duration = Duration::from_secs(2);

/// A fake cloud, and what has happened to it.
pub(crate) struct Watched<C> {
    pub(crate) cloud: C,
    pub(crate) last: Snapshot,
    log: Log,
    /// Changes that were asked for.
    pub(crate) changes: u64,
    /// Changes that reads are behind at most.
    pub(crate) max_lag: usize,
    /// When reads are as of now again.
    pub(crate) lag_until: Instant,
    /// Requests until a policy server dies.
    pub(crate) crash: Option<(usize, AbortHandle)>,
    /// Addresses that somebody else has attached, and since when.
    pub(crate) foreign: BTreeMap<IpAddr, Instant>,
    /// Private addresses that somebody else has given to NICs.
    pub(crate) foreign_private: BTreeSet<String>,
    /// Private addresses whose public address was deleted by hand: no tag says any more that they are vipgate's, which a request in
    /// flight still knows.
    pub(crate) orphaned: BTreeSet<String>,
    /// Gateways that are dead in some server's view, and when they were last.
    pub(crate) dead: BTreeMap<String, Instant>,
    /// Time that operations take.
    pub(crate) operation_time: Duration,
    /// When a request failed or was late the last time.
    failed: Arc<Mutex<Option<Instant>>>,
    /// Addresses that another cluster has got while nothing was on its way.
    pub(crate) lost: BTreeSet<IpAddr>,
    /// Since when the other cluster has claims.
    pub(crate) theirs: BTreeMap<IpAddr, Instant>,
    /// When an address was ours the last time.
    claimed: BTreeMap<IpAddr, Instant>,
    random: Random,
    activity: Arc<AtomicU64>,
}

impl<C: Cloud> Watched<C> {
    pub(crate) fn new(cloud: C, random: Random, common: &Common) -> Self {
        Self {
            last: cloud.snapshot(),
            cloud,
            log: common.log.clone(),
            changes: 0,
            max_lag: 0,
            lag_until: Instant::now(),
            crash: None,
            foreign: BTreeMap::new(),
            foreign_private: BTreeSet::new(),
            orphaned: BTreeSet::new(),
            dead: BTreeMap::new(),
            operation_time: Duration::ZERO,
            failed: common.failed.clone(),
            lost: BTreeSet::new(),
            theirs: BTreeMap::new(),
            claimed: BTreeMap::new(),
            random,
            activity: common.activity.clone(),
        }
    }

    /// Changes something by somebody else's hand.
    pub(crate) fn by_hand<T>(&mut self, work: impl FnOnce(&mut C) -> T) -> T {
        let done = work(&mut self.cloud);
        self.last = self.cloud.snapshot();
        // What went with its NIC can be anybody's next.
        let nics = &self.last.nics;
        let is_there = |it: &String| nics.values().any(|nic| nic.secondary.contains_key(it));
        self.foreign_private.retain(is_there);
        self.orphaned.retain(is_there);
        done
    }

    /// Time that a request may take from what was read for it until it is carried out.
    fn max_in_flight(&self) -> Duration {
        let is_late = lock(&self.failed).is_some_and(|at| at.elapsed() < MAX_IN_FLIGHT)
            || self.lag_until + MAX_IN_FLIGHT > Instant::now();
        if is_late { MAX_IN_FLIGHT } else { SHORT_IN_FLIGHT + 3 * self.operation_time }
    }

    /// Whether an address has been without a claim of ours for so long that no request that is on its way can know one.
    fn is_long_free(&self, address: IpAddr) -> bool {
        self.claimed.get(&address).is_none_or(|at| at.elapsed() > self.max_in_flight())
    }

    /// Whether no request fails or is late, and no operation takes long.
    pub(crate) fn is_calm(&self) -> bool {
        self.max_in_flight() == SHORT_IN_FLIGHT
    }

    /// Whether another cluster can claim an address, so that it can be distinguished from what is on its way.
    pub(crate) fn is_claimable(&self, address: IpAddr) -> bool {
        self.is_long_free(address) || self.max_in_flight() < MAX_IN_FLIGHT
    }

    /// Deletes an address by hand. No tag says any more that the private addresses that were bound to it are vipgate's, except where
    /// they have a name.
    pub(crate) fn delete_by_hand(&mut self, address: IpAddr) {
        let nics = self.last.nics.values().flat_map(|nic| &nic.secondary);
        let bound = nics.filter(|(_, bound)| bound.contains(&address)).map(|(private, _)| private.clone());
        let bound: Vec<String> = bound.collect();
        self.foreign.remove(&address);
        self.by_hand(|cloud| cloud.remove(address));
        let is_left = |private: &String| self.last.nics.values().any(|nic| nic.secondary.contains_key(private));
        self.orphaned.extend(bound.into_iter().filter(is_left));
    }

    fn violation(&self, text: &str) {
        self.log.violation(text);
    }

    fn compare(&mut self, before: &Snapshot, after: &Snapshot) {
        let now = Instant::now();
        for (ip, address) in before.addresses.iter().chain(&after.addresses) {
            if is_ours(address) {
                self.claimed.insert(*ip, now);
            }
        }
        let all: BTreeSet<IpAddr> = before.addresses.keys().chain(after.addresses.keys()).copied().collect();
        for ip in all {
            match (before.addresses.get(&ip), after.addresses.get(&ip)) {
                (Some(old), Some(new)) if old != new => self.check_change(ip, old, new, before),
                (Some(old), None) => self.check_release(ip, old),
                _ => {}
            }
        }
        self.check_places(after);
        for (id, nic) in &before.nics {
            let Some(now) = after.nics.get(id) else { continue };
            for private in nic.secondary.keys().filter(|it| !now.secondary.contains_key(*it)) {
                if self.foreign_private.contains(private) {
                    self.violation(&format!("{private} of {id}, which isn't vipgate's, was taken away"));
                }
            }
            if now.primary != nic.primary {
                self.violation(&format!("the primary address of {id} changed"));
            }
        }
    }

    fn check_change(&self, ip: IpAddr, old: &Address, new: &Address, before: &Snapshot) {
        let is_theirs = old.claim.as_ref().is_some_and(|claim| claim.cluster != OURS);
        let is_late = if self.lost.contains(&ip) {
            false
        } else if old.claim == new.claim {
            !self.is_long_free(ip)
        } else {
            !C::HAS_SWAP && self.theirs.get(&ip).is_some_and(|at| at.elapsed() < self.max_in_flight())
        };
        if is_theirs && !is_late || !old.in_pool && !new.in_pool && !old.is_allocated && !new.id.starts_with("vipgate-")
        {
            self.violation(&format!("{ip} isn't ours, and was changed: {old:?} to {new:?}"));
        }
        if old.others_tags != new.others_tags && !old.others_tags.is_empty() {
            self.violation(&format!("tags of {ip} that aren't vipgate's changed: {old:?} to {new:?}"));
        }
        let is_old = self.foreign.get(&ip).is_some_and(|at| at.elapsed() > MAX_IN_FLIGHT);
        if old.claim.is_none() && new.claim.is_some() && is_old && old.at.is_some() {
            self.violation(&format!("{ip} was claimed, and is attached by somebody else: {old:?}"));
        }
        if old.at == new.at {
            return;
        }
        if self.foreign.contains_key(&ip) && old.at.is_some() {
            self.violation(&format!("{ip} is attached by somebody else, and was moved: {old:?} to {new:?}"));
        }
        if self.is_long_free(ip) {
            self.violation(&format!("{ip} has no claim of ours, and was attached or detached: {old:?} to {new:?}"));
        }
        let gateway = before.gateway_of(old);
        let is_gateway = gateway.is_some_and(|it| GATEWAYS.contains(&it));
        if let (Some((from, _)), Some((to, _))) = (&old.at, &new.at)
            && (!is_gateway || gateway.and_then(|it| self.dead.get(it)).is_none_or(|at| at.elapsed() > MAX_IN_FLIGHT))
        {
            self.violation(&format!("{ip} was taken from {from} to {to}, and {gateway:?} isn't dead"));
        }
    }

    fn check_release(&self, ip: IpAddr, old: &Address) {
        // In Google Cloud it has its name before its labels.
        let is_allocated = old.is_allocated || old.id.starts_with("vipgate-");
        if !is_allocated || old.at.is_some() || old.claim.as_ref().is_some_and(|claim| claim.cluster != OURS) {
            self.violation(&format!("{ip} was released: {old:?}"));
        }
    }

    /// That no place has two addresses.
    fn check_places(&self, after: &Snapshot) {
        let mut places = BTreeMap::new();
        for (ip, address) in &after.addresses {
            let Some(place) = address.at.as_ref().filter(|(_, private)| !private.is_empty()) else { continue };
            if let Some(other) = places.insert(place, ip) {
                self.violation(&format!("{ip} and {other} are both attached to {place:?}"));
            }
        }
    }
}

pub(crate) fn is_ours(address: &Address) -> bool {
    address.claim.as_ref().is_some_and(|claim| claim.cluster == OURS)
}

impl<C: Cloud> FakeCloud for Watched<C> {
    fn handle(&mut self, request: &RecordedRequest) -> Reply {
        self.activity.fetch_add(1, Ordering::Relaxed);
        let lag = if Instant::now() >= self.lag_until { 0 } else { self.random.below(self.max_lag + 1) };
        self.cloud.set_lag(lag);
        if let Some((left, task)) = &mut self.crash {
            *left -= 1;
            if *left == 0 {
                task.abort();
                self.crash = None;
                self.log.note("the policy server dies");
            }
        }
        let reply = self.cloud.handle(request);
        let after = self.cloud.snapshot();
        let text = C::describe(request);
        let lag = if lag > 0 { format!(" (lag {lag})") } else { String::new() };
        let is_change = C::is_change(request);
        self.changes += u64::from(is_change);
        let body = if is_change && reply.status >= 300 {
            String::from_utf8_lossy(&reply.body).into_owned()
        } else {
            String::new()
        };
        self.log.note(&format!(
            "{} {text}{lag} -> {} {body}",
            if is_change { "CHANGE" } else { "      " },
            reply.status
        ));
        let before = std::mem::replace(&mut self.last, after.clone());
        self.compare(&before, &after);
        reply
    }
}
