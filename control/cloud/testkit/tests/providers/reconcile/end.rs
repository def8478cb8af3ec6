//! The end of a world: nothing disturbs any more, so everything gets as desired as far as it can, and stays so.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;
use vipgate_cloud::plan::{AddressPlan, Problem};

use crate::reconcile::cloud::{Address, Cloud, OURS, Snapshot};
use crate::reconcile::watched::{MAX_IN_FLIGHT, is_ours};
use crate::reconcile::world::World;

/// Time until everything is as desired, at most.
const MAX_TIME: Duration = Duration::from_mins(6);
/// Time without a change.
const IDLE_INTERVAL: Duration = Duration::from_secs(45);
const ROUND: Duration = Duration::from_secs(5);

/// Whether another cluster's claim has replaced ours on an address that isn't attached to a NIC. What is bound to it there stays,
/// since the address isn't ours to change.
fn is_lost(ip: IpAddr, snapshot: &Snapshot, nic: &str) -> bool {
    snapshot.addresses.get(&ip).is_some_and(|address| {
        let is_attached = address.at.as_ref().is_some_and(|(at, _)| at == nic);
        address.claim.is_some() && !is_ours(address) && !is_attached
    })
}

impl<C: Cloud> World<C> {
    pub(crate) async fn end(&mut self) {
        self.calm().await;
        self.converge().await;
        // Nothing is on its way now: what anybody does without looking shows.
        self.lose();
        self.converge().await;
        for address in self.services.keys() {
            let is_attached = self.servers[0].states.borrow().plan.attached.contains(address);
            self.count(if is_attached { "attached at the end" } else { "a problem at the end" });
        }
    }

    async fn converge(&mut self) {
        self.publish();
        let mut left = MAX_TIME;
        while let Err(text) = self.is_as_desired() {
            assert!(!left.is_zero(), "not as desired after {MAX_TIME:?}: {text}");
            left -= ROUND;
            self.publish();
            self.pass(ROUND).await;
        }
        self.note("all is as desired");
        let before = self.changes();
        self.pass(IDLE_INTERVAL).await;
        let sent = self.changes() - before;
        assert_eq!(sent, 0, "{sent} changes when all was as desired");
        if let Err(text) = self.is_as_desired() {
            panic!("not as desired any more: {text}");
        }
    }

    fn is_ambiguous(&self) -> bool {
        self.fake.with(|watched| watched.cloud.is_ambiguous())
    }

    fn changes(&self) -> u64 {
        self.fake.with(|watched| watched.changes)
    }

    /// No faults; the first server leads.
    async fn calm(&mut self) {
        self.note("no disturbances any more");
        self.fake.clear_faults();
        self.fake.with(|watched| {
            watched.lag_until = Instant::now();
            watched.crash = None;
            watched.cloud.set_operations(Duration::from_millis(100), 0);
        });
        self.allocations.clear();
        while self.servers.iter().any(|it| it.task.is_finished()) {
            self.revive().await;
        }
        for (number, server) in self.servers.iter_mut().enumerate() {
            server.is_cut_off = false;
            server.lead(number == 0);
        }
        self.publish();
        // What is on its way arrives.
        self.pass(MAX_IN_FLIGHT).await;
    }

    fn is_as_desired(&self) -> Result<(), String> {
        let plan = self.servers[0].states.borrow().plan.clone();
        let (snapshot, foreign, private) = self.fake.with(|watched| {
            let private = &watched.foreign_private | &watched.orphaned;
            (watched.cloud.snapshot(), watched.foreign.keys().copied().collect(), private)
        });
        if !plan.actions.is_empty() {
            return Err(format!("there is something to do: {:#?}", plan.actions));
        }
        for address in self.services.keys() {
            self.check_vip(*address, &plan, &snapshot, &foreign).map_err(|text| format!("{address}: {text}"))?;
        }
        for (ip, address) in &snapshot.addresses {
            self.check_other(*ip, address, &snapshot, &foreign)?;
        }
        for (id, nic) in snapshot.nics.iter().filter(|(_, nic)| nic.gateway.is_some()) {
            for (address, bound) in nic.secondary.iter().filter(|(it, _)| !private.contains(*it)) {
                let may_stay = |ip: &IpAddr| self.services.contains_key(ip) || is_lost(*ip, &snapshot, id);
                if bound.len() != 1 || !bound.iter().all(may_stay) {
                    return Err(format!("{id} has {address} for {bound:?}"));
                }
            }
        }
        Ok(())
    }

    /// A VIP is at its gateway, or something keeps it from being there.
    fn check_vip(
        &self,
        ip: IpAddr,
        plan: &AddressPlan,
        snapshot: &Snapshot,
        foreign: &BTreeSet<IpAddr>,
    ) -> Result<(), String> {
        let desired = self.desired().vips.remove(&ip).unwrap_or_default();
        let address = snapshot.addresses.get(&ip).filter(|it| it.in_pool);
        let nic = desired.gateway.as_ref().and_then(|it| snapshot.nic_of(it));
        let is_foreign = foreign.contains(&ip) && address.is_some_and(|it| it.at.is_some());
        let expect =
            |is_so: bool, text: &str| if is_so { Ok(()) } else { Err(format!("{text}: {address:?} {desired:?}")) };
        let Some(problem) = plan.problems.get(&ip) else {
            expect(plan.attached.contains(&ip), "neither attached nor a problem")?;
            let at = address.and_then(|it| it.at.as_ref()).map(|(nic, _)| nic);
            expect(at.is_some() && at == nic.map(|(id, _)| id), "not at its gateway")?;
            let owner =
                address.and_then(|it| it.claim.as_ref()).map(|claim| (claim.cluster.as_str(), claim.owner.as_str()));
            return expect(owner == Some((OURS, &desired.owner)), "not claimed");
        };
        match problem {
            Problem::NoAddress => expect(address.is_none(), "there is an address"),
            Problem::OtherCluster(_) => {
                expect(address.is_some_and(|it| it.claim.is_some() && !is_ours(it)), "no other cluster has a claim")
            }
            Problem::Attached(_) | Problem::AttachedWithClaim(_) => {
                let may_be = self.is_ambiguous() && address.is_some_and(|it| it.claim.is_none());
                expect(is_foreign || may_be, "it is not attached by somebody else")
            }
            Problem::NoGateway => expect(desired.gateway.is_none(), "there is a gateway"),
            Problem::NoNic(_) => expect(nic.is_none(), "there is a NIC"),
            Problem::OtherZone(_) => {
                let zone = self.fake.with(|watched| watched.cloud.zone_of(ip));
                expect(zone.is_some() && zone.as_ref() != nic.map(|(_, nic)| &nic.zone), "it is in its zone")
            }
            Problem::NoCapacity(_) => {
                let Some((id, nic)) = nic else { return Err("no capacity without a NIC".to_owned()) };
                let capacity = self.fake.with(|watched| watched.cloud.capacity());
                let is_others = |it: &&Address| it.at.as_ref().is_some_and(|(at, _)| at == id);
                let here = snapshot.addresses.values().filter(is_others).count();
                let foreign = nic.secondary.iter().filter(|(_, bound)| bound.is_empty()).count();
                let bound = nic.secondary.values();
                let lost = bound.filter(|bound| bound.iter().any(|ip| is_lost(*ip, snapshot, id))).count();
                expect(here + foreign + lost >= capacity, "its NIC has room")
            }
        }
    }

    /// What isn't a VIP has nothing of ours.
    fn check_other(
        &self,
        ip: IpAddr,
        address: &Address,
        snapshot: &Snapshot,
        foreign: &BTreeSet<IpAddr>,
    ) -> Result<(), String> {
        let is_at_gateway = snapshot.gateway_of(address).is_some() && !foreign.contains(&ip);
        let is_desired = self.services.contains_key(&ip);
        if !is_desired && is_ours(address) {
            return Err(format!("{ip} is claimed, and no VIP: {address:?}"));
        }
        let may_be_foreign = self.is_ambiguous() && address.claim.is_none();
        if is_at_gateway && !may_be_foreign && !(is_desired && is_ours(address)) {
            return Err(format!("{ip} is attached, and no VIP: {address:?}"));
        }
        if address.is_allocated && !is_desired && address.claim.is_none() && address.at.is_none() {
            return Err(format!("{ip} was allocated, and isn't released: {address:?}"));
        }
        Ok(())
    }
}
