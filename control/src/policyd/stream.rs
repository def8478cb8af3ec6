//! Delta xDS state of one stream: subscriptions, responses in flight, acknowledgments. No I/O: requests and
//! publications go in, responses come out. A response is encoded when it can be sent, so for a client that doesn't read
//! the server holds keys only. Subscriptions follow Envoy's incremental xDS, with and without wildcard ("How the client
//! specifies what resources to return" in the protocol's description).

mod acknowledgment;
mod audience;
mod pending;
mod subscription;
mod view;

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use prost::Message;
use tonic::Status;

pub use self::acknowledgment::Acknowledgment;
use self::acknowledgment::InFlight;
pub use self::audience::Audience;
use self::pending::{Batch, Contents, KeyList, NAME_OVERHEAD, PendingResponse, SHARED_KEY_BYTES};
use self::subscription::Subscription;
pub use self::view::ViewStream;
use super::codec::Response;
use crate::xds::publication::{EncodedResponse, Publication, PublishedResource, encode_responses};
use crate::xds::resource::{Content, Key, Kind};

/// Maximum number of unacknowledged responses; a client that exceeds it gets no further update.
const MAX_IN_FLIGHT: usize = 4096;
/// Maximum number of unacknowledged publications; then later ones are coalesced, so that a slow client isn't sent
/// versions that are out of date.
const MAX_UNACKED_PUBLICATIONS: usize = 4;
/// The name that subscribes to all resources of a kind.
const WILDCARD: &str = "*";
/// Maximum memory of one stream, bytes: subscribed names, unacknowledged responses, and rejected keys.
const MAX_HELD_BYTES: usize = 32 << 20;
/// Memory per resource of a publication that isn't the current one: its entry, its item of the placement, its part of
/// encoded responses. The rest is shared with later publications.
const OLD_RESOURCE_BYTES: usize = 400;
/// Limits for unknown resource types: length of the type, names in a reply, and length of each.
const MAX_TYPE_BYTES: usize = 512;
const MAX_UNKNOWN_NAMES: usize = 16;
const MAX_UNKNOWN_NAME_BYTES: usize = 256;

/// The responses that take a client from one publication to another.
#[derive(Debug)]
pub struct Update {
    publication: Arc<Publication>,
    batch: Batch,
}

impl Update {
    /// Memory that it takes until it is acknowledged.
    pub fn bytes(&self) -> usize {
        self.batch.bytes
    }

    /// Whether nothing that the client is subscribed to differs.
    pub fn is_empty(&self) -> bool {
        self.batch.responses.is_empty()
    }
}

/// Delta xDS state of a client's stream.
#[derive(Debug, Default)]
pub struct DeltaStream {
    audience: Audience,
    subscriptions: BTreeMap<Kind, Subscription>,
    /// The publication that was sent last, or is being sent.
    publication: Option<Arc<Publication>>,
    /// Which one of the stream that is.
    sequence: u64,
    /// Its responses that haven't been encoded yet.
    pending: VecDeque<PendingResponse>,
    in_flight: VecDeque<InFlight>,
    /// Memory of both.
    in_flight_bytes: usize,
    /// Keys in rejected responses: the client may lack them, so the next update includes them.
    resend: BTreeSet<Key>,
    resend_bytes: usize,
    /// Kinds of which all resources were rejected.
    resend_kinds: BTreeSet<Kind>,
    nonces: u64,
    in_force: u64,
}

impl DeltaStream {
    /// The stream of a client.
    pub fn new(audience: Audience) -> Self {
        Self { audience, ..Self::default() }
    }

    /// The number of the last publication that the client has completely in force; 0: none.
    pub fn in_force(&self) -> u64 {
        self.in_force
    }

    /// Whether the client has accepted everything that it was sent.
    pub fn is_in_sync(&self) -> bool {
        self.pending.is_empty() && self.in_flight.is_empty() && !self.has_rejected()
    }

    /// The publication that was sent last.
    pub fn publication(&self) -> Option<&Arc<Publication>> {
        self.publication.as_ref()
    }

    /// Memory of the stream's state, bytes.
    pub fn held_bytes(&self) -> usize {
        let names: usize = self.subscriptions.values().map(|it| it.bytes).sum();
        names + self.in_flight_bytes + self.resend_bytes
    }

    /// The stream's part of the memory of its publication if that isn't the current one, divided by all that hold it; of a
    /// variant, what only that has.
    pub fn old_publication_bytes(&self, current: u64) -> usize {
        if let Some(own) = self.publication.as_ref().and_then(|it| it.own_resources()) {
            return own * OLD_RESOURCE_BYTES;
        }
        let Some(old) = self.publication.as_ref().filter(|it| it.number != current) else { return 0 };
        let resources: usize = Kind::ALL.iter().map(|kind| old.count(*kind)).sum();
        resources * OLD_RESOURCE_BYTES / Arc::strong_count(old)
    }

    /// Whether the client should acknowledge earlier publications before it is sent another one.
    pub fn is_busy(&self) -> bool {
        let mut sequences: Vec<u64> = self.in_flight.iter().map(|it| it.sequence).collect();
        sequences.dedup();
        sequences.len() >= MAX_UNACKED_PUBLICATIONS
    }

    /// Handles a request: its acknowledgment and its change of subscriptions, whose resources become pending. `current`
    /// is the publication for a client that has none yet.
    ///
    /// # Errors
    /// When the client violates the protocol or its limits: the stream ends.
    pub fn handle_request(
        &mut self,
        request: DeltaDiscoveryRequest,
        current: &Arc<Publication>,
    ) -> Result<Acknowledgment, Status> {
        let acknowledgment = self.acknowledge(&request);
        check_limit(self.held_bytes())?;
        let Some(kind) = Kind::from_type_url(&request.type_url) else {
            self.reply_unknown_type(&request)?;
            return check_limit(self.held_bytes()).map(|()| acknowledgment);
        };
        let subscribe = request.resource_names_subscribe;
        let unsubscribe = request.resource_names_unsubscribe;
        let (mut subscribe, mut unsubscribe) = (BTreeSet::from_iter(subscribe), BTreeSet::from_iter(unsubscribe));
        let (adds_wildcard, removes_wildcard) = (subscribe.remove(WILDCARD), unsubscribe.remove(WILDCARD));
        let is_first = !self.subscriptions.contains_key(&kind);
        let may_get_all = self.audience.may_get_all(kind);
        let subscription = self.subscriptions.entry(kind).or_default();
        // The first request of a type without names is a wildcard subscription; later names are added to it.
        let wants_all = adds_wildcard || is_first && subscribe.is_empty() && !removes_wildcard;
        let (denies_all, wants_all) = (wants_all && !may_get_all, wants_all && may_get_all);
        let is_new_wildcard = wants_all && !subscription.all;
        subscription.all = wants_all || subscription.all && !removes_wildcard;
        let denied: Vec<String> = subscribe.extract_if(.., |name| !self.audience.may_get(kind, name)).collect();
        subscription.change(&unsubscribe, &subscribe);
        let is_wildcard = subscription.all;
        check_limit(self.held_bytes())?;
        let publication = self.publication.get_or_insert_with(|| current.clone()).clone();
        let mut known = request.initial_resource_versions;
        if denies_all || !denied.is_empty() {
            self.push_none(kind, &publication, denied);
        }
        if is_new_wildcard {
            self.push_all(kind, &publication, &known);
            // The wildcard response has them already.
            subscribe.retain(|name| publication.get(&Key { kind, name: name.as_str().into() }).is_none());
        }
        if is_wildcard {
            // A client that unsubscribes from a name under a wildcard may drop the resource until it is sent again.
            unsubscribe.retain(|name| !subscribe.contains(name));
            for name in &unsubscribe {
                known.remove(name);
            }
            subscribe.append(&mut unsubscribe);
        }
        if !subscribe.is_empty() {
            self.push_named(kind, &publication, subscribe, &known);
        }
        check_limit(self.held_bytes()).map(|()| acknowledgment)
    }

    /// The update to a new publication; `None` if the client has it already, or has sent no request yet.
    ///
    /// # Errors
    /// When too many responses are unacknowledged: the stream ends.
    pub fn update(&self, new: &Arc<Publication>) -> Result<Option<Update>, Status> {
        let Some(old) = self.publication.as_ref().filter(|it| it.id() != new.id()) else { return Ok(None) };
        if self.in_flight.len() > MAX_IN_FLIGHT {
            return Err(Status::resource_exhausted(format!("more than {MAX_IN_FLIGHT} unacknowledged responses")));
        }
        let wants_all = matches!(self.audience, Audience::Gateways)
            && self.subscriptions.values().all(|subscription| subscription.all);
        let batch = if wants_all && !self.has_rejected() && new.follows(old) {
            let keys = KeyList { list: new.changed_keys.clone(), bytes: new.changed_keys.len() * SHARED_KEY_BYTES };
            let is_subscribed = |response: &&EncodedResponse| self.subscriptions.contains_key(&response.kind);
            Batch::encoded(new.delta().iter().filter(is_subscribed), &Contents::Keys(Arc::new(keys)))
        } else {
            let list = self.changed_keys(old, new);
            let bytes = list.len() * SHARED_KEY_BYTES + self.resend_bytes;
            Batch::of_keys(new, KeyList { list, bytes })
        };
        check_limit(self.held_bytes() + batch.bytes)?;
        Ok(Some(Update { publication: new.clone(), batch }))
    }

    /// Starts an update: its responses become pending.
    pub fn publish(&mut self, update: Update) {
        self.publication = Some(update.publication);
        self.sequence += 1;
        self.resend.clear();
        self.resend_kinds.clear();
        self.resend_bytes = 0;
        self.push(update.batch);
        if self.pending.is_empty() && self.in_flight.is_empty() {
            // Nothing that it is subscribed to differs.
            self.in_force = self.publication.as_ref().map_or(self.in_force, |it| it.number);
        }
    }

    /// Estimated length of the next response, bytes; `None` if there is none.
    pub fn next_size(&self) -> Option<usize> {
        self.pending.front().map(|pending| pending.body.size())
    }

    /// Encodes the next response.
    pub fn next_response(&mut self) -> Option<Response> {
        let PendingResponse { body, contents, bytes } = self.pending.pop_front()?;
        let publication = self.publication.clone().unwrap_or_default();
        self.nonces += 1;
        let nonce = self.nonces.to_string();
        match contents {
            Some(contents) => {
                let (number, sequence) = (publication.number, self.sequence);
                self.in_flight.push_back(InFlight { nonce: nonce.clone(), number, sequence, contents, bytes });
            }
            None => self.in_flight_bytes -= bytes,
        }
        Some(Response { bytes: body.encode(&publication), nonce, charge: None })
    }

    /// Keys to send for a change of publication, in order.
    fn changed_keys(&self, old: &Publication, new: &Publication) -> Vec<Key> {
        // Clients with nothing but names compare those: what has changed may be long.
        let scans = self.subscriptions.values().any(|subscription| subscription.all);
        let mut keys = if scans { new.changed_since(old) } else { Vec::new() };
        for (kind, subscription) in self.subscriptions.iter().filter(|(_, subscription)| !subscription.all) {
            let names = subscription.names.iter().map(|name| Key { kind: *kind, name: name.as_str().into() });
            keys.extend(names.filter(|key| new.version_of(key) != old.version_of(key)));
        }
        keys.extend(self.resend.iter().cloned());
        for kind in &self.resend_kinds {
            keys.extend(new.of_kind(*kind).map(|it| it.key.clone()));
        }
        keys.retain(|key| self.subscriptions.get(&key.kind).is_some_and(|subscription| subscription.includes(key)));
        new.sending_order(keys)
    }

    fn push(&mut self, batch: Batch) {
        self.in_flight_bytes += batch.bytes;
        self.pending.extend(batch.responses);
    }

    /// Sends all resources of a kind, except those whose version the client knows.
    fn push_all(&mut self, kind: Kind, publication: &Publication, known: &HashMap<String, String>) {
        let all = || publication.of_kind(kind).filter(|it| self.audience.may_get(kind, &it.key.name));
        let present: Vec<&PublishedResource> = all().filter(|it| is_unknown(it, known)).collect();
        let exists = |name: &str| publication.get(&Key { kind, name: name.into() }).is_some();
        let removed: Vec<String> = known.keys().filter(|name| !exists(name)).cloned().collect();
        if !publication.is_variant() && present.len() == publication.count(kind) && removed.is_empty() {
            // Encoded once for all streams.
            self.push(Batch::encoded(publication.full(kind).iter(), &Contents::All(kind)));
            return;
        }
        // The settings are always sent: they complete an update.
        let present = if kind == Kind::Settings { all().collect() } else { present };
        self.push_resources(kind, publication, &present, &removed);
    }

    /// Sends resources by name, except those whose version the client knows.
    fn push_named(
        &mut self,
        kind: Kind,
        publication: &Publication,
        names: BTreeSet<String>,
        known: &HashMap<String, String>,
    ) {
        let (mut present, mut removed) = (Vec::new(), Vec::new());
        for name in names {
            let may_get = self.audience.may_get(kind, &name);
            match publication.get(&Key { kind, name: name.as_str().into() }).filter(|_| may_get) {
                Some(it) if !is_unknown(it, known) => {}
                Some(it) => present.push(it),
                // A name that doesn't exist is sent as removed.
                None => removed.push(name),
            }
        }
        self.push_resources(kind, publication, &present, &removed);
    }

    /// Replies that there is no resource of a kind, or none with these names, for the client.
    fn push_none(&mut self, kind: Kind, publication: &Publication, names: Vec<String>) {
        let responses = encode_responses(&publication.version, kind, [].into_iter(), names);
        let bytes = responses.iter().map(|response| response.bytes.len()).sum();
        let none = Contents::Keys(Arc::new(KeyList { list: Vec::new(), bytes }));
        self.push(Batch::encoded(responses.iter(), &none));
    }

    fn push_resources(
        &mut self,
        kind: Kind,
        publication: &Publication,
        present: &[&PublishedResource],
        removed: &[String],
    ) {
        let key = |name: &String| Key { kind, name: name.as_str().into() };
        let list = present.iter().map(|it| it.key.clone()).chain(removed.iter().map(key)).collect();
        let bytes =
            present.len() * SHARED_KEY_BYTES + removed.iter().map(|name| name.len() + NAME_OVERHEAD).sum::<usize>();
        self.push(Batch::of_keys(publication, KeyList { list, bytes }));
    }

    /// Replies to a request for an unknown type, which has no resources. A bounded number of the requested names is
    /// sent as removed, so that clients don't wait for them.
    fn reply_unknown_type(&mut self, request: &DeltaDiscoveryRequest) -> Result<(), Status> {
        if !request.response_nonce.is_empty() {
            return Ok(());
        }
        if request.type_url.len() > MAX_TYPE_BYTES {
            return Err(Status::invalid_argument(format!("a type_url of more than {MAX_TYPE_BYTES} bytes")));
        }
        let names = request.resource_names_subscribe.iter().filter(|name| name.len() <= MAX_UNKNOWN_NAME_BYTES);
        let response = DeltaDiscoveryResponse {
            type_url: request.type_url.clone(),
            removed_resources: names.take(MAX_UNKNOWN_NAMES).cloned().collect(),
            ..DeltaDiscoveryResponse::default()
        };
        self.push(Batch::without_ack(response.encode_to_vec().into()));
        Ok(())
    }
}

fn check_limit(held: usize) -> Result<(), Status> {
    if held <= MAX_HELD_BYTES {
        return Ok(());
    }
    Err(Status::resource_exhausted(format!(
        "the names and unacknowledged responses of this stream exceed {} MiB",
        MAX_HELD_BYTES >> 20
    )))
}

/// Whether a client that has these versions doesn't have this one of a resource.
fn is_unknown(it: &PublishedResource, known: &HashMap<String, String>) -> bool {
    known.get(&*it.key.name).is_none_or(|version| !is_version(version, &it.content))
}

fn is_version(text: &str, content: &Content) -> bool {
    u64::from_str_radix(text, 16) == Ok(content.version)
}

#[cfg(test)]
mod tests;
