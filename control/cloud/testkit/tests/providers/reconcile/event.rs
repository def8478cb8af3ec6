//! What happens in a world.

use std::time::Duration;

use tokio::time::Instant;
use vipgate_cloud::Claim;
use vipgate_cloud_testkit::{Fault, RecordedRequest};

use crate::reconcile::checked::lock;
use crate::reconcile::cloud::{Cloud, Refusal, THEIRS};
use crate::reconcile::server::Common;
use crate::reconcile::watched::is_ours;
use crate::reconcile::world::World;

impl<C: Cloud> World<C> {
    /// One event.
    pub(crate) fn event(&mut self) {
        match self.random.below(30) {
            0..=3 => self.add_service(),
            4..=5 => self.remove_service(),
            6..=8 => self.kill_gateway(),
            9..=12 => self.return_gateway(),
            13..=18 => self.fail_requests(),
            19 => self.lag(),
            20 => self.slow_operations(),
            21..=22 => self.crash(),
            23 => self.change_leader(),
            24 => self.split(),
            25 => self.allocate(),
            _ => self.disturb(),
        }
    }

    fn remove_service(&mut self) {
        let all: Vec<_> = self.services.keys().copied().collect();
        let Some(address) = self.random.of(&all) else { return };
        self.note(&format!("no service with {address} any more"));
        self.services.remove(&address);
        self.count("service removed");
    }

    fn kill_gateway(&mut self) {
        let gateway = self.gateway();
        if self.dead.insert(gateway.clone()) {
            self.count("gateway died");
        }
        let is_gone = self.random.chance(30);
        self.note(&format!("{gateway} dies{}", if is_gone { " with its instance" } else { "" }));
        if is_gone {
            self.count("instance terminated");
            self.fake.with(|watched| {
                let freed: Vec<_> = watched
                    .last
                    .addresses
                    .iter()
                    .filter(|(_, it)| watched.last.gateway_of(it) == Some(gateway.as_str()))
                    .map(|(ip, _)| *ip)
                    .collect();
                watched.foreign.retain(|ip, _| !freed.contains(ip));
                watched.by_hand(|cloud| cloud.terminate(&gateway));
            });
        }
    }

    fn return_gateway(&mut self) {
        let gateway = self.gateway();
        self.note(&format!("{gateway} is there"));
        self.fake.with(|watched| watched.by_hand(|cloud| cloud.launch(&gateway)));
        if self.dead.remove(&gateway) {
            self.count("gateway returned");
        }
    }

    fn fail_requests(&mut self) {
        let after = if self.random.chance(50) { Some(self.random.below(4) as u64) } else { None };
        let (class, fault) = match self.random.below(8) {
            0 if after.is_some() => ("throttled, Retry-After", Fault::Reply(C::refuse(Refusal::Throttled, after))),
            0 | 1 => ("throttled", Fault::Reply(C::refuse(Refusal::Throttled, None))),
            2 => ("unavailable", Fault::Reply(C::refuse(Refusal::Unavailable, after))),
            3 => ("internal error", Fault::Reply(C::refuse(Refusal::Internal, None))),
            4 => ("internal error, carried out", Fault::Masked(C::refuse(Refusal::Internal, None))),
            5 => ("lost request", Fault::LostRequest),
            6 => ("lost reply", Fault::LostReply),
            _ => ("slow request", Fault::Delay(Duration::from_millis(500 + self.random.below(6000) as u64))),
        };
        let (only_changes, count) = (self.random.chance(75), 1 + self.random.below(5));
        self.note(&format!("{count} requests{}: {class}", if only_changes { " that change something" } else { "" }));
        let Common { reached, activity, log, failed, .. } = self.common.clone();
        self.fake.plan_fault(count, fault, move |request: &RecordedRequest| {
            let is_for = C::is_change(request) || !only_changes;
            if is_for {
                activity.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
                log.note(&format!("FAULT  {class}: {}", C::describe(request)));
                reached.count(class);
                *lock(&failed) = Some(Instant::now());
            }
            is_for
        });
    }

    fn lag(&mut self) {
        let (lag, time) = (1 + self.random.below(4), Duration::from_millis(self.random.below(10_000) as u64));
        self.note(&format!("reads are {lag} changes behind for {time:?}"));
        self.fake.with(|watched| (watched.max_lag, watched.lag_until) = (lag, Instant::now() + time));
        self.count("lag");
    }

    fn slow_operations(&mut self) {
        let time = [0, 50, 800, 3000][self.random.below(4)];
        let failures = self.random.below(3);
        self.note(&format!("operations take {time} ms, the next {failures} fail"));
        self.fake.with(|watched| {
            watched.operation_time = watched.operation_time.max(Duration::from_millis(time));
            watched.cloud.set_operations(Duration::from_millis(time), failures);
        });
    }

    fn crash(&mut self) {
        let at = self.random.below(self.servers.len());
        let requests = 1 + self.random.below(25);
        let (server, task) = (self.servers[at].name.clone(), self.servers[at].task.abort_handle());
        self.note(&format!("{server} dies in {requests} requests"));
        self.fake.with(|watched| watched.crash = Some((requests, task)));
    }

    /// Starts servers for those that died.
    pub(crate) async fn revive(&mut self) {
        tokio::task::yield_now().await;
        for at in (0..self.servers.len()).rev() {
            if self.servers[at].task.is_finished() && self.random.chance(60) {
                let died = self.servers.remove(at);
                self.count("server died");
                let panic = self.common.log.violations();
                assert!(panic.is_empty(), "{panic:#?}");
                self.start_server();
                self.note(&format!("another server for {}", died.name));
                if self.servers.iter().all(|it| !it.leads()) {
                    let at = self.random.below(self.servers.len());
                    self.servers[at].lead(true);
                }
            }
        }
    }

    fn change_leader(&mut self) {
        let at = self.random.below(self.servers.len());
        self.note(&format!("{} leads", self.servers[at].name));
        self.count("leader changed");
        for (number, server) in self.servers.iter_mut().enumerate() {
            server.is_cut_off = false;
            server.lead(number == at);
        }
    }

    /// Both believe that they lead, and one may not see anything new.
    fn split(&mut self) {
        let cut = self.random.below(4);
        self.count("two leaders");
        for (number, server) in self.servers.iter_mut().enumerate() {
            server.lead(true);
            server.is_cut_off = number == cut;
        }
        self.note(&format!("two leaders; number {cut} is cut off"));
    }

    fn allocate(&mut self) {
        if self.random.chance(50) {
            let allocation = self.allocation();
            self.note(&format!("allocation {}", allocation.token));
            self.allocations = vec![allocation];
        } else {
            self.allocations.clear();
        }
    }

    /// Another cluster gets a VIP at the very moment when its gateway dies: the last observation says that it is ours.
    pub(crate) fn lose(&mut self) {
        let is_idle = self.servers.iter().all(|it| it.states.borrow().plan.actions.is_empty());
        if !is_idle || !self.fake.with(|watched| watched.is_calm()) {
            return;
        }
        let snapshot = self.snapshot();
        let desired = self.desired().vips;
        let at_home = snapshot.addresses.iter().filter(|(ip, it)| {
            let home = desired.get(ip).and_then(|it| it.gateway.as_deref());
            is_ours(it) && home.is_some() && snapshot.gateway_of(it) == home
        });
        let at_home: Vec<_> = at_home.filter_map(|(ip, it)| Some((*ip, snapshot.gateway_of(it)?.to_owned()))).collect();
        let Some((address, gateway)) = self.random.of(&at_home) else { return };
        self.note(&format!("another cluster gets {address}, and {gateway} dies"));
        let claim = Claim { cluster: THEIRS.to_owned(), owner: "x/y".to_owned() };
        self.fake.with(|watched| {
            watched.lost.insert(address);
            watched.by_hand(|cloud| {
                cloud.detach(address);
                cloud.set_claim(address, Some(&claim));
            });
        });
        self.dead.insert(gateway);
        self.count("lost to another cluster");
    }

    /// Somebody changes something by hand, if there is something to change.
    fn disturb(&mut self) {
        for _ in 0..8 {
            if self.change_by_hand() {
                return;
            }
        }
    }

    fn change_by_hand(&mut self) -> bool {
        let (address, gateway, kind) = (self.address(), self.gateway(), self.random.below(8));
        let is_there = self.snapshot().addresses.get(&address).cloned();
        let foreign = self.fake.with(|watched| watched.foreign.contains_key(&address));
        let class = self.fake.with(|watched| match (kind, is_there) {
            (0, Some(it)) if it.at.is_some() => {
                watched.foreign.remove(&address);
                watched.by_hand(|cloud| cloud.detach(address));
                Some("detached by hand")
            }
            (1, Some(it)) if it.at.is_none() => {
                watched.foreign.insert(address, Instant::now());
                watched.by_hand(|cloud| cloud.attach_elsewhere(address));
                Some("attached elsewhere by hand")
            }
            (2, Some(it)) if it.at.is_none() => {
                let is_done = watched.by_hand(|cloud| cloud.attach_at(address, &gateway));
                if is_done {
                    let at = watched.last.addresses[&address].at.clone();
                    watched.foreign_private.extend(at.map(|(_, private)| private));
                    watched.foreign.insert(address, Instant::now());
                }
                is_done.then_some("attached to a gateway by hand")
            }
            (3, Some(it)) if it.claim.is_some() => {
                watched.lost.remove(&address);
                watched.by_hand(|cloud| cloud.set_claim(address, None));
                Some(if it.claim.is_some_and(|it| it.cluster == THEIRS) {
                    "their claim ended"
                } else {
                    "claim removed by hand"
                })
            }
            (4 | 5, Some(it)) if it.at.is_none() && watched.is_claimable(address) => {
                let claim = Claim { cluster: THEIRS.to_owned(), owner: "x/y".to_owned() };
                watched.by_hand(|cloud| cloud.set_claim(address, Some(&claim)));
                watched.theirs.insert(address, Instant::now());
                Some(if is_ours(&it) { "claim replaced by another cluster's" } else { "claimed by another cluster" })
            }
            (6, Some(it)) if it.at.is_none() || foreign => {
                watched.delete_by_hand(address);
                Some("deleted by hand")
            }
            (6 | 7, None) => {
                watched.by_hand(|cloud| cloud.add(address));
                Some("added by hand")
            }
            (7, _) => {
                let private = watched.by_hand(|cloud| cloud.add_private(&gateway))?;
                watched.foreign_private.insert(private);
                Some("private address by hand")
            }
            _ => None,
        });
        if let Some(class) = class {
            self.note(&format!("{class}: {address}, {gateway}"));
            self.count(class);
        }
        class.is_some()
    }
}
