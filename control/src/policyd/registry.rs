//! The gateways that have been heard of, and what each has in force.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// Gateways that are remembered when they are gone; beyond it the one that is gone for the longest is forgotten.
const MOST: usize = 8192;
/// The same of those that the policy doesn't have: whoever reaches the port may take any such name.
const MOST_UNKNOWN: usize = 256;

/// A gateway.
#[derive(Clone, Debug)]
pub struct Gateway {
    /// Streams that it has open now.
    pub streams: u32,
    /// The process whose streams these are.
    pub process: Process,
    /// Where it connected from last.
    pub address: Option<SocketAddr>,
    /// Since when it is connected, or gone.
    pub since: Instant,
    /// Number of the publication that it has in force.
    pub in_force: u64,
    /// Why it refused what it was told last.
    pub error: Option<String>,
    /// Whether the policy had it when it went.
    is_known: bool,
}

/// What tells one process of a gateway from another one with the same name.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Process {
    /// Another number for each start.
    Incarnation(u64),
    /// It gives no number: then its host counts.
    At(IpAddr),
    /// Nothing is known of it.
    #[default]
    Unknown,
}

/// A living process has the name already.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct InUse {
    /// Where it connected from last.
    pub address: Option<SocketAddr>,
}

/// All of them, by name.
#[derive(Debug, Default)]
pub struct Registry(Mutex<BTreeMap<String, Gateway>>);

impl Registry {
    fn all(&self) -> MutexGuard<'_, BTreeMap<String, Gateway>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of all of them.
    pub fn list(&self) -> BTreeMap<String, Gateway> {
        self.all().clone()
    }

    /// Whether a gateway of this name has ever connected.
    pub fn has(&self, name: &str) -> bool {
        self.all().contains_key(name)
    }

    /// How many are connected.
    pub fn connected(&self) -> usize {
        self.all().values().filter(|gateway| gateway.streams > 0).count()
    }

    /// A process of a gateway has opened a stream; says how many it has now.
    ///
    /// # Errors
    /// When another process of this name has a stream: nothing changes.
    pub fn comes(&self, name: &str, process: Process, address: Option<SocketAddr>) -> Result<u32, InUse> {
        let mut all = self.all();
        if let Some(live) = all.get(name).filter(|it| it.streams > 0 && it.process != process) {
            return Err(InUse { address: live.address });
        }
        if all.len() >= MOST && !all.contains_key(name) {
            let gone = all.iter().filter(|(_, gateway)| gateway.streams == 0).min_by_key(|(_, gateway)| gateway.since);
            let gone = gone.map(|(name, _)| name.clone());
            gone.and_then(|name| all.remove(&name));
        }
        let gateway = all.entry(name.to_owned()).or_insert_with(|| Gateway {
            streams: 0,
            process,
            address,
            since: Instant::now(),
            in_force: 0,
            error: None,
            is_known: false,
        });
        gateway.streams += 1;
        gateway.process = process;
        gateway.address = address;
        if gateway.streams == 1 {
            gateway.since = Instant::now();
            // What it has in force it says again.
            gateway.in_force = 0;
            gateway.error = None;
        }
        Ok(gateway.streams)
    }

    /// A stream of a gateway has ended; whether the policy has that gateway.
    pub fn goes(&self, name: &str, is_known: bool) {
        let mut all = self.all();
        let Some(gateway) = all.get_mut(name) else { return };
        gateway.streams = gateway.streams.saturating_sub(1);
        if gateway.streams > 0 {
            return;
        }
        (gateway.since, gateway.is_known) = (Instant::now(), is_known);
        let unknown = || all.iter().filter(|(_, gateway)| gateway.streams == 0 && !gateway.is_known);
        if unknown().count() > MOST_UNKNOWN {
            let oldest = unknown().min_by_key(|(_, gateway)| gateway.since).map(|(name, _)| name.clone());
            oldest.and_then(|name| all.remove(&name));
        }
    }

    /// A gateway has a publication in force.
    pub fn accepted(&self, name: &str, number: u64) {
        if let Some(gateway) = self.all().get_mut(name)
            && number > gateway.in_force
        {
            gateway.in_force = number;
            gateway.error = None;
        }
    }

    /// A gateway has refused something.
    pub fn refused(&self, name: &str, reason: String) {
        if let Some(gateway) = self.all().get_mut(name) {
            gateway.error = Some(reason);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_gateways_that_the_policy_does_not_have_few_are_remembered() {
        let registry = Registry::default();
        let come_and_go = |name: &str, is_known| {
            assert_eq!(registry.comes(name, Process::Unknown, None), Ok(1));
            registry.goes(name, is_known);
        };
        registry.comes("stays", Process::Unknown, None).unwrap();
        for n in 0..300 {
            come_and_go(&format!("known-{n}"), true);
        }
        for n in 0..1000 {
            come_and_go(&format!("unknown-{n}"), false);
        }
        let all = registry.list();
        assert_eq!(all.len(), 1 + 300 + MOST_UNKNOWN);
        // Those that went last, and whoever hasn't gone.
        assert!(all.contains_key("stays") && all.contains_key("unknown-999") && !all.contains_key("unknown-743"));
    }
}
