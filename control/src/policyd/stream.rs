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
/// Bytes that one stream may make the server hold: names that the client has sent, responses that it hasn't answered, and what it has
/// refused.
const MOST_HELD: usize = 32 << 20;
/// What a name costs beside its bytes, in a subscription and among what was refused; and what one costs that the publication has as well.
const NAME: usize = 72;
const SHARED: usize = 24;
/// What a response costs that hasn't been answered, beside the names that it tells of.
const RESPONSE: usize = 128;

/// What a client wants of one kind.
#[derive(Debug, Default)]
struct Subscription {
    /// Everything.
    all: bool,
    /// Or these, by name.
    names: BTreeSet<String>,
    /// What these cost.
    bytes: usize,
}

impl Subscription {
    /// No more of `less`, and all of `more`.
    fn change(&mut self, less: &BTreeSet<String>, more: &BTreeSet<String>) {
        for name in less {
            if self.names.remove(name) {
                self.bytes -= name.len() + NAME;
            }
        }
        for name in more {
            if self.names.insert(name.clone()) {
                self.bytes += name.len() + NAME;
            }
        }
    }

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
    /// What it costs.
    bytes: usize,
}

/// What a response told, or a part of it.
#[derive(Clone, Debug)]
enum Told {
    /// All of a kind.
    All(Kind, Arc<Publication>),
    /// What became of these, which publications name.
    Keys(Arc<[Key]>),
    /// What became of these, which the client has named.
    Named(Arc<[Key]>),
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
    in_flight_bytes: usize,
    /// What the client was told, but may not hold.
    owed: BTreeSet<Key>,
    owed_bytes: usize,
    nonces: u64,
    in_force: u64,
}

impl Stream {
    /// The number of the publication that the client has in force as a whole; 0: none.
    pub fn in_force(&self) -> u64 {
        self.in_force
    }

    /// Bytes that the client makes the server hold.
    pub fn held(&self) -> usize {
        let names: usize = self.subscriptions.values().map(|it| it.bytes).sum();
        names + self.in_flight_bytes + self.owed_bytes
    }

    fn check(&self) -> Result<(), Status> {
        if self.held() <= MOST_HELD {
            return Ok(());
        }
        Err(Status::resource_exhausted(format!(
            "the names and unanswered responses of this stream take more than {} MiB",
            MOST_HELD >> 20
        )))
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
        self.check()?;
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
        subscription.change(&less, &more);
        let is_wildcard = subscription.all;
        self.check()?;
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
        self.check()?;
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
            let wanted = news.iter().filter(|chunk| self.subscriptions.contains_key(&chunk.kind)).cloned().collect();
            let responses = self.send_all(wanted, new, &Told::Keys(keys));
            return self.check().map(|()| responses);
        }
        let mut keys = new.differing_from(&at);
        keys.extend(std::mem::take(&mut self.owed));
        self.owed_bytes = 0;
        let subscriptions = &self.subscriptions;
        let wanted = |key: &Key| subscriptions.get(&key.kind).is_some_and(|subscription| subscription.wants(key));
        let news = new.differing(&keys, wanted);
        let responses = self.send_all(news, new, &Told::Keys(keys.into()));
        self.check().map(|()| responses)
    }

    /// Responses that tell this together.
    fn send_all(&mut self, chunks: Vec<Chunk>, publication: &Arc<Publication>, told: &Told) -> Vec<Response> {
        let names = match told {
            Told::All(..) => 0,
            Told::Keys(keys) => keys.len() * SHARED,
            Told::Named(keys) => keys.iter().map(|key| key.name.len() + NAME).sum(),
        };
        let bytes = RESPONSE + names / chunks.len().max(1);
        let mut responses = Vec::with_capacity(chunks.len());
        for chunk in chunks {
            self.nonces += 1;
            let nonce = self.nonces.to_string();
            let told = told.clone();
            self.in_flight.push_back(InFlight { nonce: nonce.clone(), number: publication.number, told, bytes });
            self.in_flight_bytes += bytes;
            responses.push(Response { bytes: chunk.bytes, nonce });
        }
        responses
    }

    /// The client may not hold these, whatever it was told.
    fn owe(&mut self, keys: impl IntoIterator<Item = Key>) {
        for key in keys {
            let bytes = key.name.len() + NAME;
            if self.owed.insert(key) {
                self.owed_bytes += bytes;
            }
        }
    }

    /// The answer in a request, if there is one.
    fn hear(&mut self, request: &DeltaDiscoveryRequest) -> Heard {
        let known = |it: &InFlight| it.nonce == request.response_nonce;
        let Some(place) = self.in_flight.iter().position(known) else { return Heard::Nothing };
        let Some(InFlight { number, told, bytes, .. }) = self.in_flight.remove(place) else { return Heard::Nothing };
        self.in_flight_bytes -= bytes;
        let Some(error) = &request.error_detail else {
            // In force as a whole is what nothing is missing of.
            if self.owed.is_empty() && self.in_flight.iter().all(|it| it.number > number) {
                self.in_force = self.in_force.max(number);
            }
            return Heard::Accepted;
        };
        match told {
            Told::All(kind, publication) => self.owe(publication.of(kind).iter().map(|it| it.key.clone())),
            Told::Keys(keys) | Told::Named(keys) => self.owe(keys.iter().cloned()),
        }
        Heard::Refused(error.message.clone())
    }

    fn tell_all(&mut self, kind: Kind, at: &Arc<Publication>, known: &HashMap<String, String>) -> Vec<Response> {
        if known.is_empty() {
            let whole = at.whole(kind);
            return self.send_all(whole.to_vec(), at, &Told::All(kind, at.clone()));
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
        self.send_all(chunks, at, &Told::Named(keys))
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
