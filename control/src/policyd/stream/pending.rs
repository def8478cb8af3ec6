//! Responses that haven't been sent yet. A response is a list of keys until it can be sent, so nothing is encoded for a
//! client that doesn't read.

use std::ops::Range;
use std::sync::Arc;

use prost::bytes::Bytes;

use crate::xds::publication::{EncodedResponse, MAX_RESPONSE_BYTES, Publication};
use crate::xds::resource::{Key, Kind};

/// Memory of a name beside its bytes, in a subscription or in a response; and of a key that the publication shares.
pub(super) const NAME_OVERHEAD: usize = 72;
pub(super) const SHARED_KEY_BYTES: usize = 24;
/// Memory of an unacknowledged response without its keys.
const RESPONSE_BYTES: usize = 128;

/// A response that hasn't been sent.
#[derive(Debug)]
pub(super) struct PendingResponse {
    pub(super) body: Body,
    /// The resources in it; `None` for the reply to an unknown type, which needs no acknowledgment.
    pub(super) contents: Option<Contents>,
    /// Its memory until it is acknowledged.
    pub(super) bytes: usize,
}

/// Body of a response.
#[derive(Debug)]
pub(super) enum Body {
    /// Encoded already.
    Encoded(Bytes),
    /// A range of these keys, all of one kind.
    Keys { kind: Kind, keys: Arc<KeyList>, range: Range<usize> },
}

/// Resources in a response, or in the batch it belongs to. No reference to a publication: a client that doesn't
/// acknowledge must not keep an old one alive.
#[derive(Clone, Debug)]
pub(super) enum Contents {
    /// All resources of a kind.
    All(Kind),
    /// The resources with these keys.
    Keys(Arc<KeyList>),
}

/// Keys of the resources in a batch of responses.
#[derive(Debug)]
pub(super) struct KeyList {
    pub(super) list: Vec<Key>,
    /// Their memory until the last response of the batch is acknowledged.
    pub(super) bytes: usize,
}

/// Responses that share a list of keys.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) responses: Vec<PendingResponse>,
    /// Their memory until all are acknowledged.
    pub(super) bytes: usize,
}

impl Body {
    /// Estimated length, bytes.
    pub(super) fn size(&self) -> usize {
        match self {
            Self::Encoded(bytes) => bytes.len(),
            Self::Keys { .. } => MAX_RESPONSE_BYTES,
        }
    }

    /// Encodes its resources as they are in this publication.
    pub(super) fn encode(self, publication: &Publication) -> Bytes {
        match self {
            Self::Encoded(bytes) => bytes,
            Self::Keys { kind, keys, range } => publication.encode(kind, &keys.list[range]),
        }
    }
}

impl Contents {
    /// Memory that is released when a response with these contents is acknowledged.
    pub(super) fn released_bytes(&self) -> usize {
        match self {
            Self::Keys(keys) if Arc::strong_count(keys) == 1 => keys.bytes,
            Self::Keys(_) | Self::All(_) => 0,
        }
    }
}

impl Batch {
    /// Responses with the resources of these keys in a publication, in order; each response has keys of one kind.
    pub(super) fn of_keys(publication: &Publication, keys: KeyList) -> Self {
        let keys = Arc::new(keys);
        let body = |(kind, range)| Body::Keys { kind, keys: keys.clone(), range };
        Self::new(&Contents::Keys(keys.clone()), publication.responses_of(&keys.list).into_iter().map(body))
    }

    /// Responses that were encoded once for all gateways.
    pub(super) fn encoded<'a>(responses: impl Iterator<Item = &'a EncodedResponse>, contents: &Contents) -> Self {
        Self::new(contents, responses.map(|response| Body::Encoded(response.bytes.clone())))
    }

    /// A response that needs no acknowledgment.
    pub(super) fn without_ack(encoded: Bytes) -> Self {
        let bytes = RESPONSE_BYTES + encoded.len();
        Self { responses: vec![PendingResponse { body: Body::Encoded(encoded), contents: None, bytes }], bytes }
    }

    fn new(contents: &Contents, bodies: impl Iterator<Item = Body>) -> Self {
        let pending = |body| PendingResponse { body, contents: Some(contents.clone()), bytes: RESPONSE_BYTES };
        let responses: Vec<PendingResponse> = bodies.map(pending).collect();
        let keys_bytes = match contents {
            Contents::Keys(keys) if !responses.is_empty() => keys.bytes,
            Contents::Keys(_) | Contents::All(_) => 0,
        };
        let bytes = responses.len() * RESPONSE_BYTES + keys_bytes;
        Self { responses, bytes }
    }
}
