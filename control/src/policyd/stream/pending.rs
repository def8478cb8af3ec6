//! Responses that are to be sent. Until there is room for one it is a list of keys, so nothing is encoded for a client that doesn't read.

use std::ops::Range;
use std::sync::Arc;

use prost::bytes::Bytes;

use crate::policyd::publication::{Chunk, Publication, chunks};
use crate::xds::resource::{Key, Kind};

/// What a name costs beside its bytes, in a subscription and among what was refused; and what one costs that the publication has as well.
pub(super) const NAME: usize = 72;
pub(super) const SHARED: usize = 24;
/// What a response costs that hasn't been answered, beside the names that it tells of.
const RESPONSE: usize = 128;
/// Resources of one response, bytes.
const LENGTH: usize = 1 << 16;

/// A response that isn't sent yet.
#[derive(Debug)]
pub(super) struct Pending {
    pub(super) body: Body,
    /// What it tells; none: that there is nothing of a type that we don't have.
    pub(super) told: Option<Told>,
    /// What it costs until it is answered.
    pub(super) bytes: usize,
}

/// What a response is made of.
#[derive(Debug)]
pub(super) enum Body {
    /// It is encoded already.
    Encoded(Bytes),
    /// What became of some of these keys, which are of one kind.
    Keys { kind: Kind, keys: Arc<Keys>, range: Range<usize> },
}

/// What a response told, or a part of it. No publication: a client that doesn't answer holds none that is past.
#[derive(Clone, Debug)]
pub(super) enum Told {
    /// All of a kind.
    All(Kind),
    /// What became of these.
    Keys(Arc<Keys>),
}

/// Keys that some responses tell of together.
#[derive(Debug)]
pub(super) struct Keys {
    pub(super) list: Vec<Key>,
    /// What they cost until the last of these responses is answered.
    pub(super) bytes: usize,
}

/// Responses that tell something together.
#[derive(Debug)]
pub(super) struct Batch {
    pub(super) responses: Vec<Pending>,
    /// What they cost until all are answered.
    pub(super) bytes: usize,
}

impl Body {
    /// About how long it is, bytes.
    pub(super) fn size(&self) -> usize {
        match self {
            Self::Encoded(bytes) => bytes.len(),
            Self::Keys { .. } => LENGTH,
        }
    }

    /// What it tells as it stands in this publication.
    pub(super) fn encode(self, at: &Publication) -> Bytes {
        let (kind, keys, range) = match self {
            Self::Encoded(bytes) => return bytes,
            Self::Keys { kind, keys, range } => (kind, keys, range),
        };
        let (mut there, mut gone) = (Vec::new(), Vec::new());
        for key in &keys.list[range] {
            match at.get(key) {
                Some(it) => there.push(it),
                None => gone.push(key.name.to_string()),
            }
        }
        // One, by its size. Were it more, encoded messages add up when they are put together.
        let chunks = chunks(&at.version, kind, there.into_iter(), gone);
        chunks.iter().map(|chunk| &*chunk.bytes).collect::<Vec<&[u8]>>().concat().into()
    }
}

impl Told {
    /// What is free now that a response was answered which told this.
    pub(super) fn freed(&self) -> usize {
        match self {
            Self::Keys(keys) if Arc::strong_count(keys) == 1 => keys.bytes,
            Self::Keys(_) | Self::All(_) => 0,
        }
    }
}

impl Batch {
    /// What these keys name in a publication, in their order: each response has keys of one kind.
    pub(super) fn of_keys(at: &Publication, keys: Keys) -> Self {
        let keys = Arc::new(keys);
        let mut bodies = Vec::new();
        let (mut begin, mut size) = (0, 0);
        for (i, key) in keys.list.iter().enumerate() {
            let (end, name) = (i + 1, key.name.len());
            size += at.get(key).map_or(name + 8, |it| it.content.body.len() + 2 * name + 128);
            if size >= LENGTH || keys.list.get(end).is_none_or(|next| next.kind != key.kind) {
                bodies.push(Body::Keys { kind: key.kind, keys: keys.clone(), range: begin..end });
                (begin, size) = (end, 0);
            }
        }
        Self::telling(&Told::Keys(keys), bodies.into_iter())
    }

    /// What is encoded already, for all gateways.
    pub(super) fn encoded<'a>(chunks: impl Iterator<Item = &'a Chunk>, told: &Told) -> Self {
        Self::telling(told, chunks.map(|chunk| Body::Encoded(chunk.bytes.clone())))
    }

    /// A response that needs no answer.
    pub(super) fn unanswered(encoded: Bytes) -> Self {
        let bytes = RESPONSE + encoded.len();
        Self { responses: vec![Pending { body: Body::Encoded(encoded), told: None, bytes }], bytes }
    }

    fn telling(told: &Told, bodies: impl Iterator<Item = Body>) -> Self {
        let pending = |body| Pending { body, told: Some(told.clone()), bytes: RESPONSE };
        let responses: Vec<Pending> = bodies.map(pending).collect();
        let names = match told {
            Told::Keys(keys) if !responses.is_empty() => keys.bytes,
            Told::Keys(_) | Told::All(_) => 0,
        };
        let bytes = responses.len() * RESPONSE + names;
        Self { responses, bytes }
    }
}
