//! One gateway's stream: what it wants, what it was told, what it has acknowledged. No I/O: requests and publications go in,
//! responses come out, each made when there is room for it: a client that doesn't read them makes the server hold keys, and no text.
//! Subscriptions are those of Envoy's incremental xDS, with and without wildcard ("How the client specifies what resources to return" in
//! its description of the protocol).

mod pending;

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use prost::Message;
use tonic::Status;

use self::pending::{Batch, Keys, NAME, Pending, SHARED, Told};
use super::codec::Response;
use super::publication::{Chunk, Publication, Published};
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
/// What a resource costs of a publication that isn't the current one any more: its entry, its item of the deal, its part of encoded
/// responses. The rest it shares with later ones.
const RESOURCE: usize = 400;
/// The longest reason of a refusal that is kept, bytes.
const LONGEST_REASON: usize = 1024;
/// The longest name of a type that we don't have; how many names of its resources are answered, and their bytes.
const LONGEST_TYPE: usize = 512;
const MOST_UNKNOWN: usize = 16;
const LONGEST_UNKNOWN: usize = 256;

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
    /// What it costs, beside the names that it tells of.
    bytes: usize,
}

/// The responses that bring a client from one publication to another.
#[derive(Debug)]
pub struct Update {
    publication: Arc<Publication>,
    batch: Batch,
}

impl Update {
    /// Bytes that it makes the server hold until it is acknowledged.
    pub fn bytes(&self) -> usize {
        self.batch.bytes
    }
}

/// What an answer has told us.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Heard {
    /// Nothing: no answer, or one to something that we never said.
    Nothing,
    /// A response is in force.
    Accepted,
    /// A response was refused, and why: no more of it than people need.
    Refused(String),
}

/// A gateway's stream.
#[derive(Debug, Default)]
pub struct Stream {
    subscriptions: BTreeMap<Kind, Subscription>,
    /// What was told last.
    at: Option<Arc<Publication>>,
    /// Responses of it that are to be made.
    pending: VecDeque<Pending>,
    in_flight: VecDeque<InFlight>,
    /// What both of these cost.
    in_flight_bytes: usize,
    /// What the client was told, but may not hold.
    owed: BTreeSet<Key>,
    owed_bytes: usize,
    /// Kinds of which that is everything.
    owed_kinds: BTreeSet<Kind>,
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

    /// Bytes of the publication that the client is told, when that isn't the current one any more: its part, among all that hold it.
    pub fn lag(&self, current: u64) -> usize {
        let Some(at) = self.at.as_ref().filter(|at| at.number != current) else { return 0 };
        let resources: usize = Kind::ALL.iter().map(|kind| at.of(*kind).len()).sum();
        resources * RESOURCE / Arc::strong_count(at)
    }

    /// Whether the client should answer before it is told more.
    pub fn is_busy(&self) -> bool {
        let mut numbers: Vec<u64> = self.in_flight.iter().map(|it| it.number).collect();
        numbers.dedup();
        numbers.len() >= MOST_UNDER_WAY
    }

    /// Takes in a request; `current` is what to tell a client that was told nothing yet. What it asks for is pending then.
    ///
    /// # Errors
    /// When the client doesn't keep to the protocol: the stream ends.
    pub fn request(&mut self, request: DeltaDiscoveryRequest, current: &Arc<Publication>) -> Result<Heard, Status> {
        let heard = self.hear(&request);
        check(self.held())?;
        let Some(kind) = Kind::of_url(&request.type_url) else {
            self.tell_unknown(&request)?;
            return check(self.held()).map(|()| heard);
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
        check(self.held())?;
        let at = self.at.get_or_insert_with(|| current.clone()).clone();
        let mut known = request.initial_resource_versions;
        if all_is_new {
            self.tell_all(kind, &at, &known);
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
            self.tell_named(kind, &at, more, &known);
        }
        check(self.held()).map(|()| heard)
    }

    /// What to tell of a new publication; none: the client is told it already, or nothing yet.
    ///
    /// # Errors
    /// When the client has left too much unanswered: the stream ends.
    pub fn update(&self, new: &Arc<Publication>) -> Result<Option<Update>, Status> {
        let Some(at) = self.at.as_ref().filter(|at| at.number != new.number) else { return Ok(None) };
        if self.in_flight.len() > MOST_IN_FLIGHT {
            return Err(Status::resource_exhausted(format!("{MOST_IN_FLIGHT} responses without an answer")));
        }
        let is_owed = !self.owed.is_empty() || !self.owed_kinds.is_empty();
        let wants_all = self.subscriptions.values().all(|subscription| subscription.all);
        let batch = if wants_all && !is_owed && at.number + 1 == new.number {
            let keys = Keys { list: new.difference.clone(), bytes: new.difference.len() * SHARED };
            let is_wanted = |chunk: &&Chunk| self.subscriptions.contains_key(&chunk.kind);
            Batch::encoded(new.news().iter().filter(is_wanted), &Told::Keys(Arc::new(keys)))
        } else {
            let list = self.differing(at, new);
            let bytes = list.len() * SHARED + self.owed_bytes;
            Batch::of_keys(new, Keys { list, bytes })
        };
        check(self.held() + batch.bytes)?;
        Ok(Some(Update { publication: new.clone(), batch }))
    }

    /// Begins to tell of a publication.
    pub fn publish(&mut self, update: Update) {
        self.at = Some(update.publication);
        self.owed.clear();
        self.owed_kinds.clear();
        self.owed_bytes = 0;
        self.push(update.batch);
    }

    /// About how long the next response is, bytes; none: there is none.
    pub fn next_size(&self) -> Option<usize> {
        self.pending.front().map(|pending| pending.body.size())
    }

    /// The next response.
    pub fn next_response(&mut self) -> Option<Response> {
        let Pending { body, told, bytes } = self.pending.pop_front()?;
        let at = self.at.clone().unwrap_or_default();
        self.nonces += 1;
        let nonce = self.nonces.to_string();
        match told {
            Some(told) => {
                self.in_flight.push_back(InFlight { nonce: nonce.clone(), number: at.number, told, bytes });
            }
            None => self.in_flight_bytes -= bytes,
        }
        Some(Response { bytes: body.encode(&at), nonce, charge: None })
    }

    /// What the client is to be told that has one publication, and gets another: what comes before what goes, and the settings last. What
    /// goes, goes in the opposite order: what names something before what it names. Only what endpoints name goes when they name it no
    /// more.
    fn differing(&self, at: &Publication, new: &Publication) -> Vec<Key> {
        let mut keys = new.differing_from(at);
        keys.extend(self.owed.iter().cloned());
        for kind in &self.owed_kinds {
            keys.extend(new.of(*kind).iter().map(|it| it.key.clone()));
        }
        keys.retain(|key| self.subscriptions.get(&key.kind).is_some_and(|subscription| subscription.wants(key)));
        keys.sort_unstable();
        keys.dedup();
        let comes = |key: &Key| key.kind == Kind::Endpoint || new.get(key).is_some();
        let (there, mut gone): (Vec<Key>, Vec<Key>) = keys.into_iter().partition(comes);
        let (mut keys, settings): (Vec<Key>, Vec<Key>) = there.into_iter().partition(|key| key.kind != Kind::Settings);
        gone.sort_by_key(|key| Reverse(key.kind));
        keys.extend(gone);
        keys.extend(settings);
        keys
    }

    fn push(&mut self, batch: Batch) {
        self.in_flight_bytes += batch.bytes;
        self.pending.extend(batch.responses);
    }

    /// The client may not hold this, whatever it was told.
    fn owe(&mut self, told: &Told) {
        match told {
            Told::All(kind) => {
                self.owed_kinds.insert(*kind);
            }
            Told::Keys(keys) => {
                for key in &keys.list {
                    let is_shared = self.at.as_ref().is_some_and(|at| at.get(key).is_some());
                    // A tree takes more than a list.
                    let bytes = if is_shared { 2 * SHARED } else { key.name.len() + NAME };
                    if self.owed.insert(key.clone()) {
                        self.owed_bytes += bytes;
                    }
                }
            }
        }
    }

    /// The answer in a request, if there is one.
    fn hear(&mut self, request: &DeltaDiscoveryRequest) -> Heard {
        let known = |it: &InFlight| it.nonce == request.response_nonce;
        let Some(place) = self.in_flight.iter().position(known) else { return Heard::Nothing };
        let Some(InFlight { number, told, bytes, .. }) = self.in_flight.remove(place) else { return Heard::Nothing };
        self.in_flight_bytes -= bytes + told.freed();
        let Some(error) = &request.error_detail else {
            // In force as a whole is what nothing is missing of.
            let is_owed = !self.owed.is_empty() || !self.owed_kinds.is_empty();
            let is_told = self.pending.is_empty() || self.at.as_ref().is_some_and(|at| at.number > number);
            if !is_owed && is_told && self.in_flight.iter().all(|it| it.number > number) {
                self.in_force = self.in_force.max(number);
            }
            return Heard::Accepted;
        };
        self.owe(&told);
        Heard::Refused(shortened(&error.message))
    }

    fn tell_all(&mut self, kind: Kind, at: &Publication, known: &HashMap<String, String>) {
        let all = at.of(kind);
        let differs =
            |it: &&Published| known.get(&*it.key.name).is_none_or(|version| !is_version(version, &it.content));
        let there: Vec<&Published> = all.iter().filter(differs).collect();
        let exists = |name: &str| at.get(&Key { kind, name: name.into() }).is_some();
        let gone: Vec<String> = known.keys().filter(|name| !exists(name)).cloned().collect();
        if there.len() == all.len() && gone.is_empty() {
            // That is encoded once for all.
            self.push(Batch::encoded(at.whole(kind).iter(), &Told::All(kind)));
            return;
        }
        // The settings are told in any case: they say that all is told.
        let there = if kind == Kind::Settings { all.iter().collect() } else { there };
        self.tell(kind, at, &there, &gone);
    }

    fn tell_named(&mut self, kind: Kind, at: &Publication, names: BTreeSet<String>, known: &HashMap<String, String>) {
        let (mut there, mut gone) = (Vec::new(), Vec::new());
        for name in names {
            match at.get(&Key { kind, name: name.as_str().into() }) {
                Some(it) if known.get(&name).is_some_and(|version| is_version(version, &it.content)) => {}
                Some(it) => there.push(it),
                // Asked for by name, what isn't there is told to be gone.
                None => gone.push(name),
            }
        }
        self.tell(kind, at, &there, &gone);
    }

    fn tell(&mut self, kind: Kind, at: &Publication, there: &[&Published], gone: &[String]) {
        let of = |name: &String| Key { kind, name: name.as_str().into() };
        let list = there.iter().map(|it| it.key.clone()).chain(gone.iter().map(of)).collect();
        let bytes = there.len() * SHARED + gone.iter().map(|name| name.len() + NAME).sum::<usize>();
        self.push(Batch::of_keys(at, Keys { list, bytes }));
    }

    /// Of types that we don't have, there is nothing. Names are the client's: a few are said to be gone, so that nobody waits for them.
    fn tell_unknown(&mut self, request: &DeltaDiscoveryRequest) -> Result<(), Status> {
        if !request.response_nonce.is_empty() {
            return Ok(());
        }
        if request.type_url.len() > LONGEST_TYPE {
            return Err(Status::invalid_argument(format!("a type_url of more than {LONGEST_TYPE} bytes")));
        }
        let names = request.resource_names_subscribe.iter().filter(|name| name.len() <= LONGEST_UNKNOWN);
        let nothing = DeltaDiscoveryResponse {
            type_url: request.type_url.clone(),
            removed_resources: names.take(MOST_UNKNOWN).cloned().collect(),
            ..DeltaDiscoveryResponse::default()
        };
        self.push(Batch::unanswered(nothing.encode_to_vec().into()));
        Ok(())
    }
}

fn check(held: usize) -> Result<(), Status> {
    if held <= MOST_HELD {
        return Ok(());
    }
    Err(Status::resource_exhausted(format!(
        "the names and unanswered responses of this stream take more than {} MiB",
        MOST_HELD >> 20
    )))
}

/// The beginning of a text, with an ellipsis if that isn't all of it.
fn shortened(text: &str) -> String {
    let mut end = text.len().min(LONGEST_REASON);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let ellipsis = if end < text.len() { "…" } else { "" };
    format!("{}{ellipsis}", &text[..end])
}

fn is_version(text: &str, content: &Content) -> bool {
    u64::from_str_radix(text, 16) == Ok(content.version)
}

#[cfg(test)]
mod tests;
