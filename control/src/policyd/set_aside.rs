//! What a gateway refuses: the resources that its NACKs name are set aside for this gateway alone, so that everything
//! else goes on there. Each returns when its content changes, when the gateway's process does, and from time to time,
//! since what made the gateway refuse it, such as an address of its own, may be gone. Pure: time is an argument.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use vipgate_policy::compiler::SetAside;

use crate::xds::publication::Publication;
use crate::xds::publication::selection::{Form, Selection, add};
use crate::xds::resource::slices::parse_name;
use crate::xds::resource::{Key, Kind};

/// Maximum number of resources that are set aside for one gateway; what it refuses beyond that stops its policy.
pub const MAX_SET_ASIDE: usize = 64;
/// How long a resource is set aside the first time and at most; each time twice as long.
const INTERVAL: (Duration, Duration) = (Duration::from_mins(5), Duration::from_mins(80));
/// Least time between two resources that return: a gateway that refuses all of them gets along meanwhile.
const RETURN_INTERVAL: Duration = Duration::from_secs(1);
/// Maximum length of a reason, bytes.
const MAX_REASON_BYTES: usize = 256;
/// How many colons of a NACK are tried as the end of a resource's name: an IPv6 address has some.
const MAX_COLONS: usize = 16;

/// A resource that a NACK names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The resource.
    pub key: Key,
    /// Number of the publication that was rejected.
    pub number: u64,
    /// Whether it had been set aside in that publication already.
    pub is_closed: bool,
}

/// A resource that is set aside.
#[derive(Clone, Debug)]
pub struct Refusal {
    /// Why, in the gateway's words.
    pub reason: Arc<str>,
    /// Since when.
    pub since: Instant,
    /// The version that was refused.
    version: u64,
    form: Form,
    /// When it returns; `None`: it has returned, and the gateway hasn't accepted it yet.
    until: Option<Instant>,
    interval: Duration,
}

/// What one gateway refuses.
#[derive(Clone, Debug, Default)]
pub struct Refusals {
    by_key: BTreeMap<Key, Refusal>,
    /// When the last resource returned.
    returned_at: Option<Instant>,
}

impl Refusals {
    /// Sets a resource aside that is in the current publication; whether that changes anything.
    pub fn refuse(&mut self, refused: &Refused, reason: &str, current: &Publication, now: Instant) -> bool {
        let Refused { key, number, is_closed } = refused;
        // What has changed since is judged by the gateway when it gets it.
        let Some(version) = version_of(current, key).filter(|_| last_change(current, key) <= *number) else {
            return false;
        };
        let count = self.active().count();
        let known = self.by_key.get_mut(key).filter(|known| known.version == version);
        if let Some(known) = known {
            let is_new_form = *is_closed && known.form == Form::Closed && key.kind == Kind::Endpoint;
            if is_new_form {
                known.form = Form::Dropped;
            } else if known.until.is_some() || count >= MAX_SET_ASIDE {
                return false;
            } else {
                known.interval = (2 * known.interval).min(INTERVAL.1);
                known.until = Some(now + known.interval);
            }
            known.reason = why(reason, key);
            return true;
        }
        if *is_closed || count >= MAX_SET_ASIDE {
            return false;
        }
        let refusal = Refusal {
            reason: why(reason, key),
            since: now,
            version,
            form: Form::Closed,
            until: Some(now + INTERVAL.0),
            interval: INTERVAL.0,
        };
        self.by_key.insert(key.clone(), refusal);
        true
    }

    /// The resources that are set aside, with the reasons.
    pub fn active(&self) -> impl Iterator<Item = (&Key, &Refusal)> {
        self.by_key.iter().filter(|(_, refusal)| refusal.until.is_some())
    }

    /// Whether there is nothing to remember.
    pub fn is_empty(&self) -> bool {
        self.by_key.is_empty()
    }

    /// What to leave out of a publication.
    pub fn selection(&self) -> Selection {
        self.active().map(|(key, refusal)| (key.clone(), refusal.form)).collect()
    }

    /// Forgets what isn't in a publication any more, or has other content there; returns the resources.
    pub fn retain_current(&mut self, current: &Publication) -> Vec<Key> {
        let is_outdated = |key: &Key, refusal: &Refusal| version_of(current, key) != Some(refusal.version);
        let outdated = self.by_key.extract_if(.., |key, refusal| is_outdated(key, refusal));
        outdated.filter(|(_, refusal)| refusal.until.is_some()).map(|(key, _)| key).collect()
    }

    /// When the next resource returns.
    pub fn next_return(&self) -> Option<Instant> {
        let due = self.by_key.values().filter_map(|refusal| refusal.until).min()?;
        Some(self.returned_at.map_or(due, |at| due.max(at + RETURN_INTERVAL)))
    }

    /// Lets the next resource return if it is time.
    pub fn return_due(&mut self, now: Instant) -> Option<Key> {
        self.next_return().filter(|at| *at <= now)?;
        let (key, refusal) =
            self.by_key.iter_mut().filter(|(_, it)| it.until.is_some()).min_by_key(|(_, it)| it.until)?;
        refusal.until = None;
        self.returned_at = Some(now);
        Some(key.clone())
    }

    /// The gateway has accepted what has returned.
    pub fn accept_returned(&mut self) {
        self.by_key.retain(|_, refusal| refusal.until.is_some());
    }
}

/// The resource of a publication that a NACK names and that can be set aside: `resource Kind name: reason`, after any
/// other words. Gateways of other versions may word it differently: what names no resource sets nothing aside.
pub fn named_resource(publication: &Publication, nack: &str) -> Option<Key> {
    let (_, text) = nack.split_once("resource ")?;
    let ends = text.match_indices(": ").map(|(at, _)| at).take(MAX_COLONS);
    let mut keys = ends.flat_map(|end| Key::displayed_as(&text[..end])).filter_map(|key| settable(publication, key));
    keys.next()
}

/// The key of what is set aside for a resource, if that is in the publication.
fn settable(publication: &Publication, key: Key) -> Option<Key> {
    let key = match key.kind {
        Kind::BackendSlice => Key { kind: Kind::Service, name: parse_name(&key.name)?.0.into() },
        // Gateways name what refers to an unknown shard map by its address.
        Kind::Endpoint if publication.get(&key).is_none() => Key { kind: Kind::Vip, ..key },
        _ => key,
    };
    publication.get(&key)?;
    add(&mut SetAside::default(), &key).then_some(key)
}

/// Resources whose content decides whether one is refused: its own, the backend slices of a Service, and of an endpoint
/// the VIP with its address.
fn versions<'a>(publication: &'a Publication, key: &'a Key) -> impl Iterator<Item = (u64, u64)> + 'a {
    let slices = publication.slices_of(key);
    let vip = (key.kind == Kind::Endpoint).then(|| Key { kind: Kind::Vip, ..key.clone() });
    let vip = vip.and_then(|vip| publication.get(&vip));
    publication.get(key).into_iter().chain(slices).chain(vip).map(|it| (it.content.version, it.changed_in))
}

fn version_of(publication: &Publication, key: &Key) -> Option<u64> {
    publication.get(key)?;
    Some(versions(publication, key).fold(0, |sum, (version, _)| sum.wrapping_add(version)))
}

fn last_change(publication: &Publication, key: &Key) -> u64 {
    versions(publication, key).map(|(_, changed_in)| changed_in).max().unwrap_or_default()
}

/// What a NACK says of a resource, of limited length.
fn why(nack: &str, key: &Key) -> Arc<str> {
    let reason = nack.split_once(&format!("{key}: ")).map_or(nack, |(_, reason)| reason);
    reason[..reason.floor_char_boundary(MAX_REASON_BYTES)].into()
}

#[cfg(test)]
mod tests;
