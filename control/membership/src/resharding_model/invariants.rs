//! What holds at each step, and what holds in the end, when everything has converged.

use super::coverage::Class;
use super::env::Invariant;
use super::policies::{NAMES, SHARDS};
use super::process::Process;
use super::steps::Step;
use super::world::{Session, World};
use crate::DesiredState;
use crate::status::Authority;

/// How long a world may take to converge: recovery of the server, policies on their way, releases awaited for too
/// long, retries.
const CONVERGENCE_TIMEOUT: u64 = 20_000;
/// Interval of checks until then.
const CHECK_INTERVAL: u64 = 100;

impl World {
    fn live(&self) -> impl Iterator<Item = &Process> {
        self.processes.iter().flatten()
    }

    /// Checks what holds at each step.
    pub(super) fn check(&mut self) {
        for shard in 0..SHARDS {
            self.check_owners(shard);
        }
        if std::mem::take(&mut self.env.has_removed_sessions) {
            self.check_holders();
        }
    }

    /// Invariant: no two gateways may open sessions in the same shard, so none gives out a port of the other one.
    /// Unless a peer's release was awaited for too long.
    fn check_owners(&mut self, shard: usize) {
        let now = self.env.now;
        let suspended_until = &self.env.suspended_until;
        let is_owner = |it: &&Process| suspended_until[it.index] <= now && it.may_open(shard, now);
        let mut owners = self.processes.iter().flatten().filter(is_owner);
        let (Some(one), Some(other)) = (owners.next(), owners.next()) else {
            let has_timed_out = self.live().any(|process| process.timed_out_releases[shard]);
            self.tainted[shard] |= has_timed_out;
            return self.excuse_tainted(shard);
        };
        let has_timed_out = [one, other].iter().any(|it| it.timed_out_releases[shard]);
        let is_exempt = [one, other].iter().any(|it| self.server.exempt[it.index] == Some(it.incarnation));
        let is_alone = one.is_alone() || other.is_alone();
        let is_unknown = one.has_lease_unknown_to(other) || other.has_lease_unknown_to(one);
        let (one, other) = (one.index, other.index);
        if has_timed_out || is_exempt || is_alone || is_unknown {
            self.env.count(Class::TwoOwners);
            self.tainted[shard] = true;
            return self.excuse_tainted(shard);
        }
        self.env.violate(Invariant::OneOwner, || {
            format!("{} and {} may open sessions in shard {shard}", NAMES[one], NAMES[other])
        });
    }

    fn excuse_tainted(&mut self, shard: usize) {
        if self.tainted[shard] {
            self.sessions.iter_mut().filter(|it| it.shard == shard).for_each(|it| it.may_be_lost = true);
        }
    }

    /// Invariant: no session is lost while a gateway that has it lives.
    fn check_holders(&mut self) {
        let is_lost = |session: &&Session| {
            let is_held = || self.live().any(|it| it.table.has(session.id) || it.has_queued(session.id));
            !session.is_closed && !session.may_be_lost && !is_held() && !self.env.carries(session.id)
        };
        if let Some(lost) = self.sessions.iter().find(is_lost).copied() {
            self.env.violate(Invariant::SessionsKept, || format!("no gateway has {lost:?} any more"));
        }
    }

    /// Heals everything and waits until the world has converged.
    pub(super) fn converge(&mut self, restarts: bool) {
        let gateways = self.processes.len();
        self.env.choices.become_quick();
        for at in 0..gateways {
            self.env.server_paths[at] = true;
            (0..gateways).for_each(|other| self.heal(at, other));
            if restarts {
                self.step(Step::Restart(at, true));
            }
        }
        let until = self.env.now + CONVERGENCE_TIMEOUT;
        loop {
            self.advance(CHECK_INTERVAL);
            if self.env.violation.is_some() {
                return;
            }
            let Err(reason) = self.check_converged() else { break };
            if self.env.now >= until {
                return self.env.violate(Invariant::Convergence, || format!("not converged: {reason}"));
            }
        }
        self.env.count(Class::Converged);
        let survived = self.sessions.iter().filter(|it| it.has_survived && !it.may_be_lost && !it.is_closed).count();
        self.env.counts.add(Class::SurvivedCrash, survived as u64);
    }

    /// Invariant: in the end each live gateway of the policy has the view and takes part in it, each shard with an
    /// active gateway has one owner that may open sessions, and that one has all sessions of the shard.
    fn check_converged(&mut self) -> Result<(), String> {
        if self.env.is_busy() {
            return Err("messages are in flight".into());
        }
        let policy = &self.server.policy;
        if !self.live().any(|process| policy.placement.has(process.index)) {
            return Ok(());
        }
        self.check_view()?;
        for process in self.live() {
            check_process(process, self).map_err(|reason| format!("{}: {reason}", process.name))?;
        }
        for shard in 0..SHARDS {
            self.check_shard(shard)?;
        }
        Ok(())
    }

    fn check_view(&self) -> Result<(), String> {
        let view = self.server.state.view();
        let names: Vec<&str> = view.members.iter().map(|member| &*member.name).collect();
        let in_policy: Vec<&str> = self.server.policy.names.iter().map(|name| &**name).collect();
        if !self.env.is_server_up || names != in_policy {
            return Err(format!("the view has {names:?}, the policy {in_policy:?}"));
        }
        for member in &view.members {
            let live = self.live().find(|process| process.name == member.name);
            if member.serving && live.is_none_or(|it| it.incarnation != member.incarnation) {
                return Err(format!("{} is active and dead", member.name));
            }
            let is_able =
                live.is_some_and(|it| !it.member.state().is_draining() && it.member.state().unable().is_none());
            if is_able && !member.serving {
                return Err(format!("{} isn't active", member.name));
            }
        }
        if view.active_members().next().is_none() && !self.live().any(|it| it.member.state().is_draining()) {
            return Err("no gateway is active".into());
        }
        Ok(())
    }

    fn check_shard(&mut self, shard: usize) -> Result<(), String> {
        let view = self.server.state.view();
        let mut order = self.server.policy.placement.orders[shard].iter();
        // A gateway alone needs no view.
        let is_alone = self.server.policy.names.len() == 1;
        let is_active = |at: &usize| view.member(NAMES[*at]).is_some_and(|member| member.serving);
        let candidate = order.find(|at| if is_alone { self.processes[*at].is_some() } else { is_active(at) });
        let now = self.env.now;
        for process in self.live() {
            let (may_open, is_owner) = (process.may_open(shard, now), candidate == Some(process.index));
            if may_open != is_owner {
                return Err(format!("{} may open sessions in shard {shard}: {may_open}", process.name));
            }
        }
        let Some(owner) = candidate else {
            self.env.count(Class::NoCandidate);
            return Ok(());
        };
        let Some(owner) = &self.processes[owner] else { return Err("the owner is dead".into()) };
        self.check_ended(owner, shard)?;
        let mut stranded = 0;
        for session in self.sessions.iter().filter(|it| it.shard == shard && !it.is_closed && !it.may_be_lost) {
            if owner.table.find(session.id).is_some_and(|entry| entry.port == session.port)
                && owner.table.has(session.id)
            {
                continue;
            }
            let holders: Vec<usize> =
                self.live().filter(|it| it.table.has(session.id)).map(|process| process.index).collect();
            let is_stranded = holders.iter().all(|at| view.member(NAMES[*at]).is_none())
                && holders.iter().any(|at| self.server.forced_out[*at]);
            if !is_stranded {
                return Err(format!("{} lacks {session:?}, which {holders:?} have", owner.name));
            }
            stranded += 1;
        }
        self.env.counts.add(Class::Stranded, stranded);
        Ok(())
    }
}

impl World {
    /// Invariant: in the end no gateway holds the port of a session that has ended, and that the owner doesn't have.
    fn check_ended(&self, owner: &Process, shard: usize) -> Result<(), String> {
        let view = self.server.state.view();
        let has_ended = |it: &&Session| it.shard == shard && it.is_closed && !it.may_be_lost;
        for session in self.sessions.iter().filter(has_ended).filter(|it| !owner.table.has(it.id)) {
            let mut members = self.live().filter(|it| view.member(&it.name).is_some());
            if let Some(holder) = members.find(|it| it.table.has(session.id)) {
                return Err(format!("{} still has {session:?}, which {} has not", holder.name, owner.name));
            }
        }
        Ok(())
    }
}

fn check_process(process: &Process, world: &World) -> Result<(), String> {
    let view = world.server.state.view();
    if process.policy.number != world.server.policy.number {
        return Err("it has another policy".into());
    }
    if view.member(&process.name).is_none() {
        return Ok(());
    }
    if process.status.view != *view || process.member.applied() != view.number || process.is_adopting {
        return Err(format!("it has view {}, used {}", process.status.view.number, process.member.applied()));
    }
    if process.status.authority != Authority::Reachable || process.reported.desired_state == DesiredState::Joining {
        return Err(format!("{:?}, {:?}", process.status.authority, process.reported.desired_state));
    }
    for other in world.live().filter(|it| it.index != process.index && view.member(&it.name).is_some()) {
        let peer = process.peers[other.index].as_ref().ok_or("no peer")?;
        if peer.link.is_none() || !peer.replication.in_sync_from || !peer.replication.in_sync_to || peer.has_frames() {
            return Err(format!("it isn't in sync with {}", other.name));
        }
    }
    Ok(())
}
