//! Registry of gateways that are or were connected, with the publication that each has in force. Another one has the
//! agents of nodes, by the nodes' names.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::set_aside::{Refusals, Refused};
use crate::xds::publication::Publication;
use crate::xds::publication::selection::Selection;
use crate::xds::resource::Key;

/// Maximum number of gateways; beyond it the one that has been disconnected for the longest is removed.
const MAX_GATEWAYS: usize = 8192;
/// Maximum number of disconnected gateways that the policy doesn't name: any client may claim such a name.
const MAX_UNKNOWN_GATEWAYS: usize = 256;
/// For how long a gateway that isn't connected keeps what it refuses.
const MEMORY_TIME: Duration = Duration::from_mins(10);

#[derive(Clone, Debug)]
pub struct Gateway {
    /// Open streams.
    pub streams: u32,
    /// The process that opened them.
    pub process: Process,
    /// Remote address of the last stream.
    pub address: Option<SocketAddr>,
    /// When it connected or disconnected.
    pub since: Instant,
    /// Number of the publication that it has in force.
    pub in_force: u64,
    /// Version of its program, as it has sent it.
    pub version: Option<String>,
    /// Reason of its last NACK.
    pub error: Option<String>,
    /// What it refuses, which is set aside for it.
    pub refusals: Refusals,
    /// When the next variant of the policy may be built for it.
    next_build: Instant,
    /// Whether the policy named it when it disconnected.
    is_known: bool,
}

/// Identity of a gateway's process, to tell it from another one with the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Process {
    /// A number that differs for each start.
    Incarnation(u64),
    /// It sends no incarnation: the address of its host.
    Host(IpAddr),
    /// Neither is known.
    #[default]
    Unknown,
}

/// A live process already uses the name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct NameInUse {
    /// Remote address of its last stream.
    pub address: Option<SocketAddr>,
}

/// All gateways, by name.
#[derive(Debug, Default)]
pub struct Registry(Mutex<BTreeMap<String, Gateway>>);

impl Registry {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Gateway>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of all entries.
    pub fn list(&self) -> BTreeMap<String, Gateway> {
        self.lock().clone()
    }

    /// Whether there is an entry for this name.
    pub fn contains(&self, name: &str) -> bool {
        self.lock().contains_key(name)
    }

    /// Number of connected gateways.
    pub fn connected(&self) -> usize {
        self.lock().values().filter(|gateway| gateway.streams > 0).count()
    }

    /// Whether a connected gateway hasn't acknowledged the publication with this number. One that has rejected its last
    /// update isn't waited for.
    pub fn lags_behind(&self, number: u64) -> bool {
        let is_behind = |it: &Gateway| it.streams > 0 && it.error.is_none() && it.in_force < number;
        self.lock().values().any(is_behind)
    }

    /// The names of connected gateways that have rejected their last update.
    pub fn rejecting(&self) -> Vec<String> {
        let all = self.lock();
        let rejecting = all.iter().filter(|(_, gateway)| gateway.streams > 0 && gateway.error.is_some());
        rejecting.map(|(name, _)| name.clone()).collect()
    }

    /// Registers a stream of a gateway's process; returns how many the gateway has now.
    ///
    /// # Errors
    /// When another process has an open stream with this name: nothing changes.
    pub fn connect(&self, name: &str, process: Process, address: Option<SocketAddr>) -> Result<u32, NameInUse> {
        let mut all = self.lock();
        if let Some(live) = all.get(name).filter(|it| it.streams > 0 && it.process != process) {
            return Err(NameInUse { address: live.address });
        }
        if all.len() >= MAX_GATEWAYS && !all.contains_key(name) {
            let disconnected = all.iter().filter(|(_, gateway)| gateway.streams == 0);
            let oldest = disconnected.min_by_key(|(_, gateway)| gateway.since).map(|(name, _)| name.clone());
            oldest.and_then(|name| all.remove(&name));
        }
        let gateway = all.entry(name.to_owned()).or_insert_with(|| Gateway {
            streams: 0,
            process,
            address,
            since: Instant::now(),
            in_force: 0,
            version: None,
            error: None,
            refusals: Refusals::default(),
            next_build: Instant::now(),
            is_known: false,
        });
        // What another process refuses may be something else.
        if gateway.process != process || gateway.streams == 0 && gateway.since.elapsed() > MEMORY_TIME {
            gateway.refusals = Refusals::default();
        }
        gateway.streams += 1;
        gateway.process = process;
        gateway.address = address;
        if gateway.streams == 1 {
            gateway.since = Instant::now();
            // It acknowledges again what it has in force.
            gateway.in_force = 0;
            gateway.error = None;
        }
        Ok(gateway.streams)
    }

    /// Records the version of a gateway's program.
    pub fn set_version(&self, name: &str, version: Option<String>) {
        if let Some(gateway) = self.lock().get_mut(name) {
            gateway.version = version;
        }
    }

    /// Removes a stream of a gateway that has ended. `is_known`: whether the policy names the gateway.
    pub fn disconnect(&self, name: &str, is_known: bool) {
        let mut all = self.lock();
        let Some(gateway) = all.get_mut(name) else { return };
        gateway.streams = gateway.streams.saturating_sub(1);
        if gateway.streams > 0 {
            return;
        }
        (gateway.since, gateway.is_known) = (Instant::now(), is_known);
        let unknown = || all.iter().filter(|(_, gateway)| gateway.streams == 0 && !gateway.is_known);
        if unknown().count() > MAX_UNKNOWN_GATEWAYS {
            let oldest = unknown().min_by_key(|(_, gateway)| gateway.since).map(|(name, _)| name.clone());
            oldest.and_then(|name| all.remove(&name));
        }
    }

    /// Records that a gateway has a publication in force; `is_in_sync`: and nothing else was sent or rejected since.
    pub fn acknowledge(&self, name: &str, number: u64, is_in_sync: bool) {
        if let Some(gateway) = self.lock().get_mut(name) {
            if number > gateway.in_force || is_in_sync {
                gateway.error = None;
            }
            if is_in_sync {
                gateway.refusals.accept_returned();
            }
            gateway.in_force = gateway.in_force.max(number);
        }
    }

    /// Records a NACK of a gateway.
    pub fn reject(&self, name: &str, reason: String) {
        if let Some(gateway) = self.lock().get_mut(name) {
            gateway.error = Some(reason);
        }
    }

    /// Sets a resource aside that a gateway has refused; whether that changes anything.
    pub fn refuse(&self, name: &str, refused: &Refused, reason: &str, current: &Publication) -> bool {
        let mut all = self.lock();
        all.get_mut(name).is_some_and(|it| it.refusals.refuse(refused, reason, current, Instant::now()))
    }

    /// What is set aside of a publication for a gateway, and what is no more, since its content has changed.
    pub fn set_aside(&self, name: &str, current: &Publication) -> (Selection, Vec<Key>) {
        let mut all = self.lock();
        let Some(gateway) = all.get_mut(name).filter(|it| !it.refusals.is_empty()) else { return Default::default() };
        let outdated = gateway.refusals.retain_current(current);
        (gateway.refusals.selection(), outdated)
    }

    /// When a resource that is set aside for a gateway returns.
    pub fn next_return(&self, name: &str) -> Option<Instant> {
        self.lock().get(name)?.refusals.next_return()
    }

    /// Lets a resource return to a gateway if it is time.
    pub fn return_due(&self, name: &str) -> Option<Key> {
        self.lock().get_mut(name)?.refusals.return_due(Instant::now())
    }

    /// When a variant of the policy may be built for a gateway.
    pub fn next_build(&self, name: &str) -> Option<Instant> {
        self.lock().get(name).map(|gateway| gateway.next_build)
    }

    /// Records that no variant may be built for a gateway for this long.
    pub fn pause_builds(&self, name: &str, pause: Duration) {
        if let Some(gateway) = self.lock().get_mut(name) {
            gateway.next_build = Instant::now() + pause;
        }
    }

    /// Number of resources that are set aside for connected gateways.
    pub fn set_aside_count(&self) -> usize {
        let all = self.lock();
        all.values().filter(|it| it.streams > 0).map(|it| it.refusals.active().count()).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn disconnected_gateways_that_the_policy_does_not_name_are_limited() {
        let registry = Registry::default();
        let connect_and_disconnect = |name: &str, is_known| {
            assert_eq!(registry.connect(name, Process::Unknown, None), Ok(1));
            registry.disconnect(name, is_known);
        };
        registry.connect("connected", Process::Unknown, None).unwrap();
        for n in 0..300 {
            connect_and_disconnect(&format!("known-{n}"), true);
        }
        for n in 0..1000 {
            connect_and_disconnect(&format!("unknown-{n}"), false);
        }
        let all = registry.list();
        assert_eq!(all.len(), 1 + 300 + MAX_UNKNOWN_GATEWAYS);
        // The connected one stays, and of unknown ones those that disconnected last.
        assert!(all.contains_key("connected") && all.contains_key("unknown-999") && !all.contains_key("unknown-743"));
    }
}
