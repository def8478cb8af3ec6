//! One gateway's stream: what it wants, what it was told, what it has acknowledged. No I/O: requests and publications go in,
//! responses come out. Subscriptions are those of Envoy's incremental xDS, with and without wildcard ("How the client specifies what
//! resources to return" in its description of the protocol).

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use prost::Message;
use tonic::Status;

use super::codec::Response;
use super::publication::{Chunk, Publication, Published, chunks};
use crate::xds::resource::{Content, Key, Kind};

/// Responses that a client may leave unanswered; a client that doesn't answer at all is told nothing more.
const MOST_IN_FLIGHT: usize = 4096;
/// Publications that are under way to a client: behind that, it is told the sum of what comes when it has answered, so that a
/// slow client isn't told what is long past.
const MOST_UNDER_WAY: usize = 4;
/// The name that stands for all resources of a kind.
const WILDCARD: &str = "*";
/// Names that a client may subscribe to one by one.
const MOST_NAMES: usize = 1 << 20;

/// What a client wants of one kind.
#[derive(Debug, Default)]
struct Subscription {
    /// Everything.
    all: bool,
    /// Or these, by name.
    names: BTreeSet<String>,
}

impl Subscription {
    fn wants(&self, key: &Key) -> bool {
        self.all || self.names.contains(&*key.name)
    }
}

/// A response that wasn't answered yet.
#[derive(Debug)]
struct InFlight {
    nonce: String,
    /// The publication that it is of.
    number: u64,
    told: Told,
}

/// What a response told, or a part of it.
#[derive(Clone, Debug)]
enum Told {
    /// All of a kind.
    All(Kind, Arc<Publication>),
    /// What became of these.
    Keys(Arc<[Key]>),
}

/// What an answer has told us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// Nothing: no answer, or one to something that we never said.
    Nothing,
    /// A response is in force.
    Accepted,
    /// A response was refused, and why.
    Refused(String),
}

/// A gateway's stream.
#[derive(Debug, Default)]
pub struct Stream {
    subscriptions: BTreeMap<Kind, Subscription>,
    /// What was told last.
    at: Option<Arc<Publication>>,
    in_flight: VecDeque<InFlight>,
    /// What the client was told, but may not hold.
    owed: BTreeSet<Key>,
    nonces: u64,
    in_force: u64,
}

impl Stream {
    /// The number of the publication that the client has in force as a whole; 0: none.
    pub fn in_force(&self) -> u64 {
        self.in_force
    }

    /// Whether the client should answer before it is told more.
    pub fn is_busy(&self) -> bool {
        let mut numbers: Vec<u64> = self.in_flight.iter().map(|it| it.number).collect();
        numbers.dedup();
        numbers.len() >= MOST_UNDER_WAY
    }

    /// Takes in a request; `current` is what to tell a client that was told nothing yet.
    ///
    /// # Errors
    /// When the client doesn't keep to the protocol: the stream ends.
    pub fn request(
        &mut self,
        request: DeltaDiscoveryRequest,
        current: &Arc<Publication>,
    ) -> Result<(Vec<Response>, Heard), Status> {
        let heard = self.hear(&request);
        let Some(kind) = Kind::of_url(&request.type_url) else {
            return Ok((self.unknown(&request), heard));
        };
        let DeltaDiscoveryRequest { resource_names_subscribe: more, resource_names_unsubscribe: less, .. } = request;
        let (mut more, mut less) = (BTreeSet::from_iter(more), BTreeSet::from_iter(less));
        let (subscribes_to_all, leaves_all) = (more.remove(WILDCARD), less.remove(WILDCARD));
        let is_first = !self.subscriptions.contains_key(&kind);
        let subscription = self.subscriptions.entry(kind).or_default();
        // Without names, the first request of a type wants all of it; names that come later are wanted beside all.
        let wants_all = subscribes_to_all || is_first && more.is_empty() && !leaves_all;
        let all_is_new = wants_all && !subscription.all;
        subscription.all = wants_all || subscription.all && !leaves_all;
        subscription.names.retain(|name| !less.contains(name));
        subscription.names.extend(more.iter().cloned());
        let is_wildcard = subscription.all;
        if subscription.names.len() > MOST_NAMES {
            return Err(Status::resource_exhausted(format!("more than {MOST_NAMES} names of {}", kind.name())));
        }
        let at = self.at.get_or_insert_with(|| current.clone()).clone();
        let mut known = request.initial_resource_versions;
        let mut responses = Vec::new();
        if all_is_new {
            responses = self.tell_all(kind, &at, &known);
            // These are told.
            more.retain(|name| at.get(&Key { kind, name: name.as_str().into() }).is_none());
        }
        if is_wildcard {
            // A client that leaves a name under a wildcard may forget the resource until it learns what it is now.
            less.retain(|name| !more.contains(name));
            for name in &less {
                known.remove(name);
            }
            more.append(&mut less);
        }
        if !more.is_empty() {
            responses.extend(self.tell_named(kind, &at, more, &known));
        }
        Ok((responses, heard))
    }

    /// What to tell of a new publication.
    ///
    /// # Errors
    /// When the client has left too much unanswered: the stream ends.
    pub fn publish(&mut self, new: &Arc<Publication>) -> Result<Vec<Response>, Status> {
        let Some(at) = self.at.clone().filter(|at| at.number != new.number) else { return Ok(Vec::new()) };
        if self.in_flight.len() > MOST_IN_FLIGHT {
            return Err(Status::resource_exhausted(format!("{MOST_IN_FLIGHT} responses without an answer")));
        }
        self.at = Some(new.clone());
        let plain = self.owed.is_empty() && self.subscriptions.values().all(|subscription| subscription.all);
        if plain && at.number + 1 == new.number {
            let keys: Arc<[Key]> = new.difference.clone().into();
            let news = new.news();
            let wanted = news.iter().filter(|chunk| self.subscriptions.contains_key(&chunk.kind)).cloned();
            return Ok(wanted
                .collect::<Vec<_>>()
                .into_iter()
                .map(|it| self.send(it, new, Told::Keys(keys.clone())))
                .collect());
        }
        let mut keys = new.differing_from(&at);
        keys.extend(std::mem::take(&mut self.owed));
        let subscriptions = &self.subscriptions;
        let wanted = |key: &Key| subscriptions.get(&key.kind).is_some_and(|subscription| subscription.wants(key));
        let news = new.differing(&keys, wanted);
        let keys: Arc<[Key]> = keys.into();
        Ok(news.into_iter().map(|chunk| self.send(chunk, new, Told::Keys(keys.clone()))).collect())
    }

    fn send(&mut self, chunk: Chunk, publication: &Arc<Publication>, told: Told) -> Response {
        self.nonces += 1;
        let nonce = self.nonces.to_string();
        self.in_flight.push_back(InFlight { nonce: nonce.clone(), number: publication.number, told });
        Response { bytes: chunk.bytes, nonce }
    }

    /// The answer in a request, if there is one.
    fn hear(&mut self, request: &DeltaDiscoveryRequest) -> Heard {
        let known = |it: &InFlight| it.nonce == request.response_nonce;
        let Some(place) = self.in_flight.iter().position(known) else { return Heard::Nothing };
        let Some(InFlight { number, told, .. }) = self.in_flight.remove(place) else { return Heard::Nothing };
        let Some(error) = &request.error_detail else {
            // In force as a whole is what nothing is missing of.
            if self.owed.is_empty() && self.in_flight.iter().all(|it| it.number > number) {
                self.in_force = self.in_force.max(number);
            }
            return Heard::Accepted;
        };
        match told {
            Told::All(kind, publication) => self.owed.extend(publication.of(kind).iter().map(|it| it.key.clone())),
            Told::Keys(keys) => self.owed.extend(keys.iter().cloned()),
        }
        Heard::Refused(error.message.clone())
    }

    fn tell_all(&mut self, kind: Kind, at: &Arc<Publication>, known: &HashMap<String, String>) -> Vec<Response> {
        if known.is_empty() {
            let whole = at.whole(kind);
            return whole.iter().map(|chunk| self.send(chunk.clone(), at, Told::All(kind, at.clone()))).collect();
        }
        let same = |it: &&Published| known.get(&*it.key.name).is_none_or(|version| !is_version(version, &it.content));
        let there: Vec<&Published> = at.of(kind).iter().filter(same).collect();
        let exists = |name: &str| at.get(&Key { kind, name: name.into() }).is_some();
        let gone: Vec<String> = known.keys().filter(|name| !exists(name)).cloned().collect();
        // The settings are told in any case: they say that all is told.
        let there = if kind == Kind::Settings { at.of(kind).iter().collect() } else { there };
        if there.is_empty() && gone.is_empty() {
            return Vec::new();
        }
        self.tell(kind, at, &there, gone)
    }

    fn tell_named(
        &mut self,
        kind: Kind,
        at: &Arc<Publication>,
        names: BTreeSet<String>,
        known: &HashMap<String, String>,
    ) -> Vec<Response> {
        let (mut there, mut gone) = (Vec::new(), Vec::new());
        for name in names {
            match at.get(&Key { kind, name: name.as_str().into() }) {
                Some(it) if known.get(&name).is_some_and(|version| is_version(version, &it.content)) => {}
                Some(it) => there.push(it),
                // Asked for by name, what isn't there is told to be gone.
                None => gone.push(name),
            }
        }
        if there.is_empty() && gone.is_empty() {
            return Vec::new();
        }
        self.tell(kind, at, &there, gone)
    }

    fn tell(&mut self, kind: Kind, at: &Arc<Publication>, there: &[&Published], gone: Vec<String>) -> Vec<Response> {
        let of = |name: &String| Key { kind, name: name.as_str().into() };
        let keys: Arc<[Key]> = there.iter().map(|it| it.key.clone()).chain(gone.iter().map(of)).collect();
        let chunks = chunks(&at.version, kind, there.iter().copied(), gone);
        chunks.into_iter().map(|chunk| self.send(chunk, at, Told::Keys(keys.clone()))).collect()
    }

    /// Of types that we don't have, there is nothing.
    fn unknown(&mut self, request: &DeltaDiscoveryRequest) -> Vec<Response> {
        if !request.response_nonce.is_empty() {
            return Vec::new();
        }
        self.nonces += 1;
        let nothing = DeltaDiscoveryResponse {
            type_url: request.type_url.clone(),
            removed_resources: request.resource_names_subscribe.clone(),
            ..DeltaDiscoveryResponse::default()
        };
        vec![Response { bytes: nothing.encode_to_vec().into(), nonce: self.nonces.to_string() }]
    }
}

fn is_version(text: &str, content: &Content) -> bool {
    u64::from_str_radix(text, 16) == Ok(content.version)
}

#[cfg(test)]
mod tests;
