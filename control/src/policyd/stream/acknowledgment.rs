//! ACKs and NACKs of a stream's responses: what the client has in force, and what it has rejected and is sent again.

use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;

use super::pending::{Batch, Contents, KeyList, NAME_OVERHEAD, SHARED_KEY_BYTES};
use super::{DeltaStream, Update};
use crate::policyd::set_aside::{Refused, named_resource};
use crate::xds::resource::{Key, Kind};

/// Maximum length of a stored NACK reason, bytes.
const MAX_REASON_BYTES: usize = 1024;

/// An unacknowledged response.
#[derive(Debug)]
pub(super) struct InFlight {
    pub(super) nonce: String,
    /// Number of its publication, and which one of the stream that is.
    pub(super) number: u64,
    pub(super) sequence: u64,
    pub(super) contents: Contents,
    /// Its memory without the keys.
    pub(super) bytes: usize,
}

/// Acknowledgment in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Acknowledgment {
    /// No nonce, or an unknown one.
    None,
    /// ACK: the response is in force.
    Ack,
    Nack {
        /// Its reason, truncated.
        reason: String,
        /// The resource that it names, if that can be set aside.
        refused: Option<Refused>,
    },
}

impl DeltaStream {
    /// The rejected resources once more, with the Settings that complete an update; `None` if there are none, or the
    /// client still has to answer other responses.
    pub fn repetition(&self) -> Option<Update> {
        let publication = self.publication.as_ref().filter(|_| self.has_rejected())?;
        if !self.pending.is_empty() || !self.in_flight.is_empty() {
            return None;
        }
        let mut list = self.changed_keys(publication, publication);
        let settings = publication.of_kind(Kind::Settings).map(|it| it.key.clone()).filter(|key| !list.contains(key));
        let settings: Vec<Key> = settings.filter(|key| self.subscriptions.contains_key(&key.kind)).collect();
        list.extend(settings);
        let bytes = list.len() * SHARED_KEY_BYTES + self.resend_bytes;
        let batch = Batch::of_keys(publication, KeyList { list, bytes });
        Some(Update { publication: publication.clone(), batch })
    }

    /// Whether there are rejected resources to send again.
    pub(super) fn has_rejected(&self) -> bool {
        !self.resend.is_empty() || !self.resend_kinds.is_empty()
    }

    /// Whether the client has rejected a response and hasn't answered others yet.
    pub fn awaits_answers(&self) -> bool {
        self.has_rejected() && !(self.pending.is_empty() && self.in_flight.is_empty())
    }

    /// Schedules a rejected response's resources for the next update.
    fn schedule_resend(&mut self, contents: &Contents) {
        match contents {
            Contents::All(kind) => {
                self.resend_kinds.insert(*kind);
            }
            Contents::Keys(keys) => {
                for key in &keys.list {
                    let is_shared = self.publication.as_ref().is_some_and(|it| it.get(key).is_some());
                    // A tree takes more than a list.
                    let bytes = if is_shared { 2 * SHARED_KEY_BYTES } else { key.name.len() + NAME_OVERHEAD };
                    if self.resend.insert(key.clone()) {
                        self.resend_bytes += bytes;
                    }
                }
            }
        }
    }

    /// Handles the ACK or NACK in a request, if there is one.
    pub(super) fn acknowledge(&mut self, request: &DeltaDiscoveryRequest) -> Acknowledgment {
        let is_acknowledged = |it: &InFlight| it.nonce == request.response_nonce;
        let Some(index) = self.in_flight.iter().position(is_acknowledged) else { return Acknowledgment::None };
        let Some(response) = self.in_flight.remove(index) else { return Acknowledgment::None };
        let InFlight { number, sequence, contents, bytes, .. } = response;
        self.in_flight_bytes -= bytes + contents.released_bytes();
        let Some(error) = &request.error_detail else {
            // A publication is in force when all its responses were sent and acknowledged, and none was rejected.
            let is_sent = self.pending.is_empty() || self.sequence > sequence;
            if !self.has_rejected() && is_sent && self.in_flight.iter().all(|it| it.sequence > sequence) {
                // Later publications without a response for the client are in force with it.
                let is_all = self.pending.is_empty() && self.in_flight.is_empty();
                let last = self.publication.as_ref().filter(|_| is_all).map_or(number, |it| it.number);
                self.in_force = self.in_force.max(last);
            }
            return Acknowledgment::Ack;
        };
        self.schedule_resend(&contents);
        let reason = truncated(&error.message);
        Acknowledgment::Nack { refused: self.refused(&reason, number, sequence), reason }
    }

    /// The resource that a NACK names. One that is set aside already may have been sent closed, and is refused even so; an
    /// earlier response with it says nothing new.
    fn refused(&self, reason: &str, number: u64, sequence: u64) -> Option<Refused> {
        let publication = self.publication.as_ref()?;
        let key = named_resource(publication, reason)?;
        let is_closed = publication.has_set_aside(&key);
        (!is_closed || sequence == self.sequence).then_some(Refused { key, number, is_closed })
    }
}

/// A text cut to the maximum length of a reason, with an ellipsis if it was longer.
pub(super) fn truncated(text: &str) -> String {
    let mut end = text.len().min(MAX_REASON_BYTES);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    let ellipsis = if end < text.len() { "…" } else { "" };
    format!("{}{ellipsis}", &text[..end])
}
