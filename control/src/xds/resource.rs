//! A policy as resources: encoded once, named, and versioned by content, so that every server that compiles the same
//! manifests says the same of each.

mod decode;
pub mod encode;
pub use self::decode::{Decoded, Fault, decode};
pub use self::encode::{encode_all, settings, version_of};

use std::fmt;
use std::sync::Arc;

use prost::bytes::Bytes;

/// The name of the one resource of kind [`Kind::Settings`].
pub const SETTINGS: &str = "settings";
/// In `node.metadata` of a stream's first request: the process, as 16 hexadecimal digits that differ for each start.
pub const INCARNATION: &str = "vipgate.io/incarnation";

/// The name of the one resource of kind [`Kind::Cluster`].
pub const CLUSTER: &str = "cluster";

/// The longest text of a server that is printed, characters.
const LONGEST_SHOWN: usize = 1024;

/// Kinds of resources, in the order in which they are sent: what is named before what names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Kind {
    /// `EgressPolicy`.
    EgressPolicy,
    /// `Vip`.
    Vip,
    /// `Endpoint`.
    Endpoint,
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
}

impl Kind {
    /// All of them.
    pub const ALL: [Self; 8] = [
        Self::EgressPolicy,
        Self::Vip,
        Self::Endpoint,
        Self::Service,
        Self::Gateway,
        Self::OverlayNode,
        Self::Cluster,
        Self::Settings,
    ];
    /// How many of them settings count.
    pub const COUNTED: usize = Self::ALL.len() - 1;

    /// Its number in caches and fingerprints: stays what it is, whatever else comes.
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
        }
    }

    /// As the protocol names it.
    pub const fn type_url(self) -> &'static str {
        match self {
            Self::EgressPolicy => "type.googleapis.com/vipgate.policy.v1.EgressPolicy",
            Self::Vip => "type.googleapis.com/vipgate.policy.v1.Vip",
            Self::Endpoint => "type.googleapis.com/vipgate.policy.v1.Endpoint",
            Self::Service => "type.googleapis.com/vipgate.policy.v1.Service",
            Self::Gateway => "type.googleapis.com/vipgate.policy.v1.Gateway",
            Self::OverlayNode => "type.googleapis.com/vipgate.policy.v1.OverlayNode",
            Self::Cluster => "type.googleapis.com/vipgate.policy.v1.Cluster",
            Self::Settings => "type.googleapis.com/vipgate.policy.v1.Settings",
        }
    }

    /// The kind that the protocol names so.
    pub fn of_url(type_url: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.type_url() == type_url)
    }

    /// The message's name.
    pub fn name(self) -> &'static str {
        self.type_url().rsplit('.').next().unwrap_or_default()
    }
}

/// What names a resource. Displays as `Kind name`.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key {
    /// Its kind.
    pub kind: Kind,
    /// Its name.
    pub name: Arc<str>,
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.kind.name(), shown(&self.name))
    }
}

/// What a server says, as it can be logged and sent back: a line that people can read, not without end.
pub(super) fn shown(text: &str) -> String {
    let printable = |letter: char| if letter.is_control() { char::REPLACEMENT_CHARACTER } else { letter };
    text.chars().map(printable).take(LONGEST_SHOWN).collect()
}

/// A resource without its key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Content {
    /// Names the body; the same body has the same version everywhere.
    pub version: u64,
    /// The encoded message.
    pub body: Bytes,
}

impl Content {
    /// The version as the protocol has it.
    pub fn version_text(version: u64) -> String {
        format!("{version:016x}")
    }
}

#[cfg(test)]
mod tests;
