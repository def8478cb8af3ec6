//! What gateways are told: all resources of one moment, and what differs from the moment before. Made once, encoded once,
//! shared by all streams.

use std::net::IpAddr;
use std::sync::{Arc, OnceLock};

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryResponse, Resource};
use envoy_types::pb::google::protobuf::Any;
use prost::Message;
use prost::bytes::Bytes;
use vipgate_dataplane::snapshot::spec::EndpointSpec;

use crate::policy::Deal;
use crate::xds::resource::{CLUSTER, Content, Key, Kind, SETTINGS, encode, settings};

/// Resources of one response, bytes: each stream keeps room for its longest one, and gives way to others after each.
const CHUNK: usize = 1 << 16;

/// All resources of one moment.
#[derive(Debug, Default)]
pub struct Publication {
    /// Counts publications of this process; 0 is that of nothing.
    pub number: u64,
    /// What people call it.
    pub version: String,
    /// What it was made of.
    pub deal: Arc<Deal>,
    /// What differs from the publication before.
    pub difference: Vec<Key>,
    /// By kind, in the order of the deal.
    resources: [Vec<Published>; Kind::ALL.len()],
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
    /// The publication after this one. `None` when nothing differs. What is the same is taken over as it was encoded.
    pub fn next(&self, deal: Arc<Deal>) -> Option<Self> {
        let (number, old) = (self.number + 1, &self.deal);
        let mut difference = Vec::new();
        let mut carry = Carry { number, difference: &mut difference };
        let [policies, vips, endpoints, services, gateways, nodes, cluster, _] = &self.resources;
        let mut resources = [
            carry.over(&old.policies, policies, &deal.policies, |it| &it.name, encode::egress_policy),
            carry.over(&old.vips, vips, &deal.vips, |it| &it.address, encode::vip),
            carry.over(&old.endpoints, endpoints, &deal.endpoints, |it| &it.address, encode::endpoint),
            carry.over(&old.services, services, &deal.services, |it| &it.name, encode::service),
            carry.over(&old.peers, gateways, &deal.peers, |it| &it.name, encode::gateway),
            carry.over(&old.nodes, nodes, &deal.nodes, |it| &it.name, encode::overlay_node),
            carry.over(old.cluster.as_slice(), cluster, deal.cluster.as_slice(), |_| &(), encode::cluster),
            Vec::new(),
        ];
        if difference.is_empty() && self.number > 0 {
            return None;
        }
        let sum = resources.iter().flatten().fold(0_u64, |sum, it| sum.wrapping_add(it.content.version));
        let (key, content, version) = settings(deal.counts(), sum);
        difference.push(key.clone());
        resources[Kind::Settings as usize].push(Published { key, content, since: number });
        let (whole, news) = Default::default();
        Some(Self { number, version, deal, difference, resources, whole, news })
    }

    /// The resource with this key.
    pub fn get(&self, key: &Key) -> Option<&Published> {
        let (deal, name) = (&self.deal, &*key.name);
        let address = || name.parse::<IpAddr>().ok();
        let at = match key.kind {
            Kind::EgressPolicy => deal.policies.binary_search_by(|it| (*it.name).cmp(name)).ok(),
            Kind::Vip => address().and_then(|own| deal.vips.binary_search_by_key(&own, |it| it.address).ok()),
            Kind::Endpoint => address().and_then(|own| deal.endpoints.binary_search_by_key(&own, |it| it.address).ok()),
            Kind::Service => deal.services.binary_search_by(|it| (*it.name).cmp(name)).ok(),
            Kind::Gateway => deal.peers.binary_search_by(|it| (*it.name).cmp(name)).ok(),
            Kind::OverlayNode => deal.nodes.binary_search_by(|it| (*it.name).cmp(name)).ok(),
            Kind::Cluster => (name == CLUSTER).then_some(0),
            Kind::Settings => (name == SETTINGS).then_some(0),
        };
        // A name that isn't in canonical form names nothing.
        self.of(key.kind).get(at?).filter(|it| *it.key.name == *name)
    }

    /// The resources of a kind.
    pub fn of(&self, kind: Kind) -> &[Published] {
        &self.resources[kind as usize]
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
            // What endpoints name goes when they name it no more.
            let (at_once, later) = if kind == Kind::Endpoint { (gone, Vec::new()) } else { (Vec::new(), gone) };
            if !there.is_empty() || !at_once.is_empty() {
                out.extend(chunks(&self.version, kind, there.into_iter(), at_once));
            }
            if !later.is_empty() {
                gone_later.extend(chunks(&self.version, kind, [].into_iter(), later));
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
        for kind in Kind::ALL {
            let same =
                |it: &&Published| earlier.get(&it.key).is_none_or(|was| was.content.version != it.content.version);
            keys.extend(self.of(kind).iter().filter(same).map(|it| it.key.clone()));
            let gone = |was: &&Published| self.get(&was.key).is_none();
            keys.extend(earlier.of(kind).iter().filter(gone).map(|was| was.key.clone()));
        }
        keys
    }

    /// The endpoint with this address.
    pub fn endpoint(&self, address: IpAddr) -> Option<&EndpointSpec> {
        let at = self.deal.endpoints.binary_search_by_key(&address, |endpoint| endpoint.address).ok()?;
        self.deal.endpoints.get(at)
    }
}

/// Carries resources over from one publication to the next.
struct Carry<'a> {
    number: u64,
    difference: &'a mut Vec<Key>,
}

impl Carry<'_> {
    /// The resources of a kind: `was` are those of the items `old`, both sorted by key like `new`.
    fn over<T: PartialEq, K: Ord>(
        &mut self,
        old: &[T],
        was: &[Published],
        new: &[T],
        key: impl Fn(&T) -> &K,
        encode: impl Fn(&T) -> (Key, Content),
    ) -> Vec<Published> {
        let mut before = old.iter().zip(was).peekable();
        let mut resources = Vec::with_capacity(new.len());
        for item in new {
            while let Some((_, gone)) = before.next_if(|(old, _)| key(old) < key(item)) {
                self.difference.push(gone.key.clone());
            }
            match before.next_if(|(old, _)| key(old) == key(item)) {
                Some((old, same)) if old == item => resources.push(same.clone()),
                _ => {
                    let (key, content) = encode(item);
                    self.difference.push(key.clone());
                    resources.push(Published { key, content, since: self.number });
                }
            }
        }
        self.difference.extend(before.map(|(_, gone)| gone.key.clone()));
        resources
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
