//! What a process leaves to the next one of its gateway. Mirrors `gateway/succession.rs`, whose lock is the order of
//! things here: a process starts once the one before has ended.

use std::sync::Arc;
use std::time::Duration;

use super::coverage::Class;
use super::env::Env;
use super::policies::{MAX_GATEWAYS, index_of};
use super::process::Process;
use crate::heartbeat::FormerMembership;
use crate::succession::{Claim, ClaimRefusal, KnownSuccessor, PeerProcess};
use crate::{Fingerprint, MembershipView};

/// How long it takes until a membership is written, milliseconds.
const WRITE_DELAY: u64 = 30;

/// The membership that a process leaves.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct LeftMembership {
    pub(super) view: Arc<MembershipView>,
    pub(super) ttl: Duration,
    successors: [Option<KnownSuccessor>; MAX_GATEWAYS],
}

/// The file.
#[derive(Clone, Debug, Default)]
pub(super) struct Left {
    /// The processes, the writer last.
    processes: Vec<u64>,
    /// The certificates whose keys it has, the writer's last.
    fingerprints: Vec<Fingerprint>,
    membership: Option<LeftMembership>,
}

/// What a process has inherited, and what it leaves.
#[derive(Clone, Debug)]
pub(super) struct Succession {
    pub(super) claim: Claim,
    /// Its certificate, and one of a predecessor.
    pub(super) own: Fingerprint,
    inherited: Option<Fingerprint>,
    /// The membership that its predecessor has left.
    former: Option<LeftMembership>,
    /// The successors in it.
    known: [Option<KnownSuccessor>; MAX_GATEWAYS],
    /// What it leaves, since when, and what it has left before.
    membership: Option<LeftMembership>,
    written_at: u64,
    before: Option<LeftMembership>,
}

impl Succession {
    /// Of a process that finds this file.
    pub(super) fn new(name: &str, incarnation: u64, left: Left) -> Self {
        let Left { processes, fingerprints, membership } = left;
        let named = membership.as_ref().and_then(|left| left.view.member(name)?.fingerprint);
        Self {
            claim: Claim::new(incarnation, processes),
            own: [incarnation as u8; 32],
            inherited: fingerprints.into_iter().find(|fingerprint| Some(*fingerprint) == named),
            known: membership.as_ref().map_or([None; MAX_GATEWAYS], |left| left.successors),
            former: membership.clone(),
            membership: membership.clone(),
            written_at: 0,
            before: membership,
        }
    }

    /// The membership that its predecessor has left, for the client.
    pub(super) fn former(&self) -> Option<FormerMembership> {
        self.former.as_ref().map(|left| FormerMembership { view: left.view.clone(), ttl: left.ttl })
    }

    /// The file that is left if the process ends now.
    pub(super) fn left(&self, name: &str, now: u64) -> Left {
        let is_written = now >= self.written_at + WRITE_DELAY;
        let membership = if is_written { self.membership.clone() } else { self.before.clone() };
        let named = membership.as_ref().and_then(|left| left.view.member(name)?.fingerprint);
        let inherited = self.inherited.filter(|fingerprint| Some(*fingerprint) == named);
        let mut processes = self.claim.predecessors.clone();
        processes.push(self.claim.incarnation);
        Left { processes, fingerprints: inherited.into_iter().chain([self.own]).collect(), membership }
    }
}

impl Process {
    /// Whether the process in the view that it knows isn't the one right before it.
    pub(super) fn is_second_successor(&self) -> bool {
        let named = self.succession.former.as_ref().and_then(|left| left.view.member(&self.name));
        let Claim { predecessors, .. } = &self.succession.claim;
        named.is_some_and(|it| predecessors.contains(&it.incarnation) && predecessors.last() != Some(&it.incarnation))
    }

    /// Leaves the membership to the next process.
    pub(super) fn leave_membership(&mut self, view: Arc<MembershipView>, ttl: Duration, env: &Env) {
        let successors = std::array::from_fn(|at| self.processes[at].as_ref().and_then(PeerProcess::successor));
        let membership = LeftMembership { view, ttl, successors };
        let Succession { membership: last, written_at, before, .. } = &mut self.succession;
        if last.as_ref() != Some(&membership) {
            if env.now >= *written_at + WRITE_DELAY {
                before.clone_from(last);
            }
            (*last, *written_at) = (Some(membership), env.now);
        }
    }

    /// The certificate that it presents: see `Identities::presented`.
    pub(super) fn presented(&self) -> Fingerprint {
        let named = self.peer_view.member(&self.name).and_then(|member| member.fingerprint);
        self.succession.inherited.filter(|it| Some(*it) == named).unwrap_or(self.succession.own)
    }

    /// Why it would not link with a process of another gateway; see `SharedState::admit`.
    pub(super) fn refusal(&self, other: &Self) -> Option<ClaimRefusal> {
        let linked = self.peers[other.index].as_ref().filter(|peer| peer.link.is_some()).and_then(|it| it.incarnation);
        let process = self.processes[other.index].as_ref()?;
        process.check(&other.succession.claim, linked).err()
    }

    /// Whether it would link with a process of another gateway.
    pub(super) fn expects(&self, other: &Self) -> bool {
        let has_certificate = |member: &crate::Member| member.fingerprint == Some(other.presented());
        self.peer_view.member(&other.name).is_some_and(has_certificate)
            && self.processes[other.index].is_some()
            && self.refusal(other).is_none()
    }

    /// Accepts a process of another gateway.
    pub(super) fn accept(&mut self, (at, incarnation): (usize, u64), env: &mut Env) {
        if self.processes[at].as_mut().is_some_and(|process| process.accept(incarnation)) {
            env.count(Class::Succeeded);
        }
    }

    /// See `SharedState::apply_view`.
    pub(super) fn set_named_processes(&mut self, view: &MembershipView) {
        let (known, started) = (self.succession.known, self.started);
        for at in (0..MAX_GATEWAYS).filter(|at| *at != self.index) {
            let named = view.members.iter().find(|member| index_of(&member.name) == at).map(|it| it.incarnation);
            self.processes[at] = named.map(|named| {
                let process = self.processes[at].take();
                let mut process = process.unwrap_or_else(|| PeerProcess::new(named, known[at], started));
                process.set_named(named);
                process
            });
        }
    }

    /// See `SharedState::promise`.
    pub(super) fn promise(&mut self, to: usize, env: &mut Env) -> bool {
        let view = self.member.state().view();
        let named = view.members.iter().find(|member| member.serving && index_of(&member.name) == to);
        let Some(named) = named.map(|member| member.incarnation) else { return false };
        let lease_ms = self.status.longest_lease().as_millis() as u32;
        let linked = self.peers[to].as_ref().and_then(|peer| peer.incarnation);
        let (Some(linked), Some(process)) = (linked, &mut self.processes[to]) else { return false };
        let is_made = process.promise(linked, named, env.tick(), lease_ms);
        if !is_made && process.current() == linked {
            env.count(Class::PromiseWithheld);
        }
        is_made
    }
}
