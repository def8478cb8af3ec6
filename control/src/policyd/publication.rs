//! What gateways are told: all resources of one moment, and what differs from the moment before. Made once, encoded once,
//! shared by all streams.

use std::sync::{Arc, OnceLock};

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryResponse, Resource};
use envoy_types::pb::google::protobuf::Any;
use prost::Message;
use prost::bytes::Bytes;

use crate::policy::{Deal, DealtEndpoint};
use crate::xds::resource::{Content, Key, Kind, SETTINGS, encode_all, settings};

/// Resources of one response, bytes: well below the 4 MiB that gRPC takes by default.
const CHUNK: usize = 1 << 20;

/// All resources of one moment.
#[derive(Debug, Default)]
pub struct Publication {
    /// Counts publications of this process; 0 is that of nothing.
    pub number: u64,
    /// What people call it.
    pub version: String,
    /// Sorted by key, the settings last.
    pub resources: Vec<Published>,
    /// What it was made of.
    pub deal: Arc<Deal>,
    /// What differs from the publication before.
    pub difference: Vec<Key>,
    whole: [OnceLock<Arc<[Chunk]>>; Kind::ALL.len()],
    news: OnceLock<Arc<[Chunk]>>,
}

/// A resource of a publication.
#[derive(Clone, Debug)]
pub struct Published {
    /// What names it.
    pub key: Key,
    /// What it is.
    pub content: Content,
    /// The number of the publication that it came with.
    pub since: u64,
}

/// A response without its nonce.
#[derive(Clone, Debug)]
pub struct Chunk {
    /// The kind of its resources.
    pub kind: Kind,
    /// Encoded.
    pub bytes: Bytes,
}

impl Publication {
    /// The publication after this one. `None` when nothing differs.
    pub fn next(&self, deal: Arc<Deal>) -> Option<Self> {
        let number = self.number + 1;
        let mut before = self.resources.iter().peekable();
        let mut resources = Vec::with_capacity(self.resources.len());
        let mut difference = Vec::new();
        let mut counts = [0; 4];
        let mut sum = 0_u64;
        for (key, content) in encode_all(&deal) {
            while let Some(gone) = before.next_if(|it| it.key < key && it.key.kind != Kind::Settings) {
                difference.push(gone.key.clone());
            }
            let same = before.next_if(|it| it.key == key);
            counts[key.kind as usize] += 1;
            sum = sum.wrapping_add(content.version);
            match same {
                Some(same) if same.content.version == content.version => resources.push(same.clone()),
                _ => {
                    difference.push(key.clone());
                    resources.push(Published { key, content, since: number });
                }
            }
        }
        difference.extend(before.filter(|it| it.key.kind != Kind::Settings).map(|gone| gone.key.clone()));
        if difference.is_empty() && self.number > 0 {
            return None;
        }
        let (key, content, version) = settings(counts, sum);
        difference.push(key.clone());
        resources.push(Published { key, content, since: number });
        let (whole, news) = Default::default();
        Some(Self { number, version, resources, deal, difference, whole, news })
    }

    /// The resource with this key.
    pub fn get(&self, key: &Key) -> Option<&Published> {
        let at = self.resources.binary_search_by(|it| it.key.cmp(key)).ok()?;
        self.resources.get(at)
    }

    /// The resources of a kind.
    pub fn of(&self, kind: Kind) -> &[Published] {
        let from = self.resources.partition_point(|it| it.key.kind < kind);
        let to = self.resources.partition_point(|it| it.key.kind <= kind);
        &self.resources[from..to]
    }

    /// Responses with all resources of a kind; one at least.
    pub fn whole(&self, kind: Kind) -> Arc<[Chunk]> {
        let make = || chunks(&self.version, kind, self.of(kind).iter(), Vec::new()).into();
        self.whole[kind as usize].get_or_init(make).clone()
    }

    /// Responses with what differs from the publication before.
    pub fn news(&self) -> Arc<[Chunk]> {
        self.news.get_or_init(|| self.differing(&self.difference, |_| true).into()).clone()
    }

    /// Responses with what these keys, in any order, name now; what is wanted of them. What comes is told before what goes, and
    /// the settings last.
    pub fn differing(&self, keys: &[Key], wanted: impl Fn(&Key) -> bool) -> Vec<Chunk> {
        let mut keys: Vec<&Key> = keys.iter().filter(|key| wanted(key)).collect();
        keys.sort_unstable();
        keys.dedup();
        let mut out = Vec::new();
        let mut gone_later = Vec::new();
        for kind in Kind::ALL {
            let of_kind = keys.iter().filter(|key| key.kind == kind);
            let (mut there, mut gone) = (Vec::new(), Vec::new());
            for key in of_kind {
                match self.get(key) {
                    Some(published) => there.push(published),
                    None => gone.push(key.name.to_string()),
                }
            }
            if kind == Kind::Settings {
                // In the opposite order: what names something goes before what it names.
                gone_later.reverse();
                out.append(&mut gone_later);
            }
            // An endpoint that becomes a VIP goes first, and so on: within one kind both are told at once.
            if !there.is_empty() || !gone.is_empty() && kind == Kind::Endpoint {
                out.extend(chunks(&self.version, kind, there.into_iter(), gone));
            } else if !gone.is_empty() {
                gone_later.extend(chunks(&self.version, kind, [].into_iter(), gone));
            }
        }
        out
    }

    /// Keys that differ between an earlier publication and this one.
    pub fn differing_from(&self, earlier: &Self) -> Vec<Key> {
        if earlier.number + 1 == self.number {
            return self.difference.clone();
        }
        let mut keys = Vec::new();
        let (mut old, mut new) = (earlier.resources.iter().peekable(), self.resources.iter().peekable());
        loop {
            match (old.peek(), new.peek()) {
                (None, None) => return keys,
                (Some(was), Some(is)) if was.key == is.key => {
                    if was.content.version != is.content.version {
                        keys.push(is.key.clone());
                    }
                    old.next();
                    new.next();
                }
                (Some(was), is) if is.is_none_or(|is| was.key < is.key) => {
                    keys.push(was.key.clone());
                    old.next();
                }
                (_, Some(is)) => {
                    keys.push(is.key.clone());
                    new.next();
                }
                (Some(_), None) => unreachable!("the arm above has taken it"),
            }
        }
    }

    /// The endpoint with this address.
    pub fn endpoint(&self, address: std::net::IpAddr) -> Option<&DealtEndpoint> {
        let at = self.deal.endpoints.binary_search_by_key(&address, |endpoint| endpoint.spec.address).ok()?;
        self.deal.endpoints.get(at)
    }

    /// The settings' key.
    pub fn settings_key() -> Key {
        Key { kind: Kind::Settings, name: SETTINGS.into() }
    }
}

/// Cuts resources into responses. With nothing at all there is one that says so.
pub fn chunks<'a>(
    version: &str,
    kind: Kind,
    resources: impl Iterator<Item = &'a Published>,
    gone: Vec<String>,
) -> Vec<Chunk> {
    let response = |resources, removed_resources| DeltaDiscoveryResponse {
        system_version_info: version.to_owned(),
        type_url: kind.type_url().to_owned(),
        resources,
        removed_resources,
        ..DeltaDiscoveryResponse::default()
    };
    let chunk = |response: DeltaDiscoveryResponse| Chunk { kind, bytes: response.encode_to_vec().into() };
    let mut out = Vec::new();
    let (mut collected, mut size) = (Vec::new(), 0);
    for Published { key, content, .. } in resources {
        collected.push(Resource {
            name: key.name.to_string(),
            version: Content::version_text(content.version),
            resource: Some(Any { type_url: kind.type_url().to_owned(), value: content.body.to_vec() }),
            ..Resource::default()
        });
        size += content.body.len() + 2 * key.name.len() + 128;
        if size >= CHUNK {
            out.push(chunk(response(std::mem::take(&mut collected), Vec::new())));
            size = 0;
        }
    }
    let mut gone = gone.into_iter().peekable();
    loop {
        let mut names = Vec::new();
        while size < CHUNK
            && let Some(name) = gone.next()
        {
            size += name.len() + 8;
            names.push(name);
        }
        if !collected.is_empty() || !names.is_empty() || out.is_empty() {
            out.push(chunk(response(std::mem::take(&mut collected), names)));
        }
        size = 0;
        if gone.peek().is_none() {
            return out;
        }
    }
}
