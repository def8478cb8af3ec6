//! A provider that is watched: what it is asked to do is counted, and checked against the view of the server that asks.

use std::net::IpAddr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use ipnet::IpNet;
use vipgate_cloud::plan::GatewayState;
use vipgate_cloud::reconciler::Inputs;
use vipgate_cloud::{Allocation, Binding, Claim, CloudError, Nic, NicId, Observation, Provider, PublicAddress, Scope};

use crate::reconcile::cloud::OURS;
use crate::reconcile::log::Log;
use crate::reconcile::reached::Reached;

/// The last two inputs of a server: an action may be of the former.
pub(crate) type Views = Arc<Mutex<[Inputs; 2]>>;

pub(crate) struct Checked<P> {
    pub(crate) provider: P,
    pub(crate) views: Views,
    /// The NICs of gateways that were ever observed.
    pub(crate) nics: Arc<Mutex<Vec<(NicId, String)>>>,
    pub(crate) log: Log,
    pub(crate) name: String,
    pub(crate) reached: Reached,
    pub(crate) activity: Arc<AtomicU64>,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<P: Provider> Checked<P> {
    fn began(&self, text: &str) {
        self.activity.fetch_add(1, Ordering::Relaxed);
        self.log.note(&format!("{}: {text}", self.name));
    }

    fn ended<T>(&self, kind: &str, result: Result<T, CloudError>) -> Result<T, CloudError> {
        self.activity.fetch_add(1, Ordering::Relaxed);
        match &result {
            Ok(_) => self.reached.count(kind),
            Err(error) => {
                self.reached.count(format!("{kind} failed"));
                self.reached.count(format!("error {}", error.kind.as_str()));
                self.log.note(&format!("{}: {kind} failed: {error}", self.name));
            }
        }
        result
    }

    fn violation(&self, text: &str) {
        self.log.violation(&format!("{}: {text}", self.name));
    }

    /// Checks that addresses have the claim of this cluster, or none.
    fn check_claims<'a>(&self, kind: &str, addresses: impl Iterator<Item = &'a PublicAddress>) {
        for address in addresses {
            if address.has_tags && address.claim.as_ref().is_none_or(|claim| claim.cluster != OURS) {
                self.violation(&format!("{kind} of {}, which has the claim {:?}", address.address, address.claim));
            }
        }
    }

    fn check_dead(&self, from: &NicId, bindings: &[Binding]) {
        let nics = lock(&self.nics);
        let gateway = nics.iter().find(|(id, _)| id == from).map(|(_, gateway)| gateway.clone());
        let is_dead = |inputs: &Inputs| {
            let state = inputs.desired.as_ref().and_then(|it| it.gateways.get(gateway.as_ref()?));
            state == Some(&GatewayState::Dead)
        };
        if !lock(&self.views).iter().any(is_dead) {
            let moved: Vec<IpAddr> = bindings.iter().map(|binding| binding.address.address).collect();
            self.violation(&format!("{moved:?} are moved from {from} of {gateway:?}, which isn't dead"));
        }
    }
}

fn list<'a>(addresses: impl Iterator<Item = &'a PublicAddress>) -> String {
    addresses.map(|it| it.address.to_string()).collect::<Vec<_>>().join(", ")
}

fn of(bindings: &[Binding]) -> impl Iterator<Item = &PublicAddress> {
    bindings.iter().map(|it| &it.address)
}

impl<P: Provider> Provider for Checked<P> {
    async fn observe(&self, scope: &Scope) -> Result<Observation, CloudError> {
        self.began("observe");
        let result = self.provider.observe(scope).await;
        if let Ok(observed) = &result {
            let mut nics = lock(&self.nics);
            for nic in &observed.nics {
                if nics.iter().all(|(id, _)| *id != nic.id) {
                    nics.push((nic.id.clone(), nic.gateway.clone()));
                }
            }
        }
        self.ended("observe", result)
    }

    async fn claim(&self, address: &PublicAddress, claim: &Claim) -> Result<(), CloudError> {
        self.began(&format!("claim {} for {}", address.address, claim.owner));
        self.ended("claim", self.provider.claim(address, claim).await)
    }

    async fn unclaim(&self, address: &PublicAddress) -> Result<(), CloudError> {
        self.began(&format!("unclaim {}", address.address));
        self.check_claims("unclaim", std::iter::once(address));
        self.ended("unclaim", self.provider.unclaim(address).await)
    }

    async fn prepare(&self, nic: &Nic, addresses: &[PublicAddress], candidates: &[IpNet]) -> Result<(), CloudError> {
        self.began(&format!("prepare {} at {}", list(addresses.iter()), nic.gateway));
        self.check_claims("prepare", addresses.iter());
        self.ended("prepare", self.provider.prepare(nic, addresses, candidates).await)
    }

    async fn unprepare(&self, nic: &Nic, bindings: &[Binding]) -> Result<(), CloudError> {
        self.began(&format!("unprepare {} at {}", list(of(bindings)), nic.gateway));
        self.ended("unprepare", self.provider.unprepare(nic, bindings).await)
    }

    async fn attach(&self, nic: &Nic, bindings: &[Binding]) -> Result<(), CloudError> {
        self.began(&format!("attach {} to {}", list(of(bindings)), nic.gateway));
        self.check_claims("attach", of(bindings));
        self.ended("attach", self.provider.attach(nic, bindings).await)
    }

    async fn move_from_dead(&self, from: &NicId, nic: &Nic, bindings: &[Binding]) -> Result<(), CloudError> {
        self.began(&format!("move {} from {from} to {}", list(of(bindings)), nic.gateway));
        self.check_claims("move", of(bindings));
        self.check_dead(from, bindings);
        self.ended("move", self.provider.move_from_dead(from, nic, bindings).await)
    }

    async fn detach(&self, from: &NicId, addresses: &[PublicAddress]) -> Result<(), CloudError> {
        self.began(&format!("detach {} from {from}", list(addresses.iter())));
        self.check_claims("detach", addresses.iter());
        self.ended("detach", self.provider.detach(from, addresses).await)
    }

    async fn allocate(&self, allocation: &Allocation) -> Result<PublicAddress, CloudError> {
        self.began(&format!("allocate {}", allocation.token));
        self.ended("allocate", self.provider.allocate(allocation).await)
    }

    async fn release(&self, address: &PublicAddress) -> Result<(), CloudError> {
        self.began(&format!("release {}", address.address));
        self.ended("release", self.provider.release(address).await)
    }
}
