//! xDS resources. The version of one of a policy is a hash of its content, so servers that compile the same manifests send
//! the same versions; that of the membership view is its number.

mod decode;
pub mod encode;
pub mod slices;

use std::fmt;
use std::sync::Arc;

use prost::bytes::Bytes;

pub(crate) use self::decode::field_error;
pub use self::decode::{Decoded, ResourceError, decode};
pub use self::encode::{counts, encode_all, settings, version_of};

/// The name of the one resource of kind [`Kind::Settings`].
pub const SETTINGS: &str = "settings";
/// Key in `node.metadata` of a stream's first request. Its value, 16 hexadecimal digits, identifies the process and is
/// new at each start.
pub const INCARNATION: &str = "vipgate.io/incarnation";
/// Key in `node.metadata` of a stream's first request: what the client is. A client without it is a gateway.
pub const ROLE: &str = "vipgate.io/role";
/// Value of [`ROLE`] for node agents.
pub const NODE_ROLE: &str = "node";
/// The name of the one resource of kind [`Kind::Cluster`].
pub const CLUSTER: &str = "cluster";
/// The name of the one resource of kind [`Kind::View`].
pub const VIEW: &str = "view";

/// Maximum length of a server's text in messages, characters.
const MAX_PRINTED: usize = 1024;

/// Kinds of resources, in sending order: a resource is sent before those that refer to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `EgressPolicy`.
    EgressPolicy,
    /// `ShardMap`.
    ShardMap,
    /// `Vip`.
    Vip,
    /// `Endpoint`.
    Endpoint,
    /// `BackendSlice`.
    BackendSlice,
    /// `Service`.
    Service,
    /// `Gateway`.
    Gateway,
    /// `OverlayNode`.
    OverlayNode,
    /// `Cluster`.
    Cluster,
    /// `Settings`.
    Settings,
    /// `NodePolicy`: for node agents, by name. No part of the policy of gateways.
    NodePolicy,
    /// `View`: the membership view, for node agents. No part of any policy.
    View,
}

impl Kind {
    /// All kinds, those of gateways first.
    pub const ALL: [Self; 12] = [
        Self::EgressPolicy,
        Self::ShardMap,
        Self::Vip,
        Self::Endpoint,
        Self::BackendSlice,
        Self::Service,
        Self::Gateway,
        Self::OverlayNode,
        Self::Cluster,
        Self::Settings,
        Self::NodePolicy,
        Self::View,
    ];
    /// Number of kinds that Settings count: those of gateways, but Settings.
    pub const COUNTED: usize = Self::Settings as usize;
    /// The kinds that the policy of gateways has, Settings included.
    pub const OF_GATEWAYS: [Self; Self::COUNTED + 1] = match Self::ALL.first_chunk() {
        Some(kinds) => *kinds,
        None => unreachable!(),
    };

    /// Its number in caches and fingerprints. Never changes.
    pub const fn number(self) -> u8 {
        match self {
            Self::EgressPolicy => 0,
            Self::Vip => 1,
            Self::Endpoint => 2,
            Self::Gateway => 3,
            Self::Settings => 4,
            Self::Service => 5,
            Self::OverlayNode => 6,
            Self::Cluster => 7,
            Self::ShardMap => 8,
            Self::BackendSlice => 9,
            Self::NodePolicy => 10,
            Self::View => 11,
        }
    }

    /// Its type URL in the protocol.
    pub const fn type_url(self) -> &'static str {
        match self {
            Self::EgressPolicy => "type.googleapis.com/vipgate.policy.v1.EgressPolicy",
            Self::ShardMap => "type.googleapis.com/vipgate.policy.v1.ShardMap",
            Self::Vip => "type.googleapis.com/vipgate.policy.v1.Vip",
            Self::Endpoint => "type.googleapis.com/vipgate.policy.v1.Endpoint",
            Self::BackendSlice => "type.googleapis.com/vipgate.policy.v1.BackendSlice",
            Self::Service => "type.googleapis.com/vipgate.policy.v1.Service",
            Self::Gateway => "type.googleapis.com/vipgate.policy.v1.Gateway",
            Self::OverlayNode => "type.googleapis.com/vipgate.policy.v1.OverlayNode",
            Self::Cluster => "type.googleapis.com/vipgate.policy.v1.Cluster",
            Self::Settings => "type.googleapis.com/vipgate.policy.v1.Settings",
            Self::NodePolicy => "type.googleapis.com/vipgate.policy.v1.NodePolicy",
            Self::View => "type.googleapis.com/vipgate.policy.v1.View",
        }
    }

    /// The kind with this type URL.
    pub fn from_type_url(type_url: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.type_url() == type_url)
    }

    /// The name of its message.
    pub fn name(self) -> &'static str {
        self.type_url().rsplit('.').next().unwrap_or_default()
    }
}

/// Identifies a resource. Displays as `Kind name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    pub kind: Kind,
    pub name: Arc<str>,
}

impl Key {
    /// The keys that are displayed as this text.
    pub fn displayed_as(text: &str) -> impl Iterator<Item = Self> {
        let after = |kind: Kind| text.strip_prefix(kind.name())?.strip_prefix(' ');
        let kind = Kind::ALL.into_iter().find_map(|kind| Some((kind, after(kind)?)));
        kind.into_iter().flat_map(move |(kind, rest)| [text, rest].map(|name| Self { kind, name: name.into() }))
    }
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (kind, name) = (self.kind.name(), printable(&self.name));
        // Policies and Services have names like `EgressPolicy tenant/web`.
        if name.strip_prefix(kind).is_some_and(|rest| rest.starts_with(' ')) {
            return f.write_str(&name);
        }
        write!(f, "{kind} {name}")
    }
}

/// A server's text for logs and NACKs: truncated, without control characters.
pub(crate) fn printable(text: &str) -> String {
    let sanitize = |c: char| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c };
    text.chars().map(sanitize).take(MAX_PRINTED).collect()
}

/// An encoded resource without its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// Hash of kind and body: the same on every server.
    pub version: u64,
    /// The encoded message.
    pub body: Bytes,
}

impl Content {
    /// The version as text, as sent in the protocol.
    pub fn version_text(version: u64) -> String {
        format!("{version:016x}")
    }
}

#[cfg(test)]
mod tests;
