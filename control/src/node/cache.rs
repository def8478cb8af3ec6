//! Cache of the last policy, cluster and view: the agent starts from it while the policy server is unreachable. One
//! message in one file, written whole beside it and renamed into place.
//!
//! ```text
//!   "vipgate node cache 1\n"   u64 fingerprint of the message (little endian)   message
//! ```

use std::path::{Path, PathBuf};
use std::{fs, io};

use prost::Message;
use vipgate_node::agent::View;
use vipgate_node::policy::{Cluster, NodePolicy};
use vipgate_policy::fingerprint::Fingerprint;

use super::decode;
use crate::replaced_file::replace;
use crate::xds::proto;

const MAGIC: &[u8] = b"vipgate node cache 1\n";

/// What the cache has, as the server sent it.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Cached {
    #[prost(message, optional, tag = "1")]
    pub(super) policy: Option<proto::NodePolicy>,
    #[prost(message, optional, tag = "2")]
    pub(super) cluster: Option<proto::Cluster>,
    #[prost(message, optional, tag = "3")]
    pub(super) view: Option<proto::View>,
}

/// What the cache has, decoded.
#[derive(Debug, Default)]
pub(super) struct Decoded {
    pub(super) policy: Option<NodePolicy>,
    pub(super) cluster: Cluster,
    pub(super) view: View,
}

/// The cache file.
#[derive(Debug)]
pub(super) struct Cache {
    path: PathBuf,
    contents: Cached,
}

impl Cache {
    /// Reads the file. One that is damaged, or of another node, is ignored and logged: without policy, the agent holds all
    /// packets of pods.
    pub(super) fn open(path: &Path, node: &str) -> (Self, Decoded) {
        let (contents, decoded) = match read(path).and_then(|cached| {
            let decoded = cached.decode(node).map_err(io::Error::other)?;
            Ok((cached, decoded))
        }) {
            Ok(contents) => contents,
            Err(error) if error.kind() == io::ErrorKind::NotFound => Default::default(),
            Err(error) => {
                let (file, error) = (path.display().to_string(), error.to_string());
                tracing::error!(event = "policy_cache_damaged", file, error, "the policy cache is ignored");
                Default::default()
            }
        };
        (Self { path: path.to_owned(), contents }, decoded)
    }

    /// Changes the contents and writes the file.
    pub(super) fn update(&mut self, change: impl FnOnce(&mut Cached)) {
        let before = self.contents.clone();
        change(&mut self.contents);
        if self.contents == before {
            return;
        }
        if let Err(error) = self.write() {
            let (file, error) = (self.path.display().to_string(), error.to_string());
            tracing::error!(
                event = "policy_cache_failed",
                file,
                error,
                "the policy cache can't be written: after a restart without the policy server, pods would be held back"
            );
        }
    }

    fn write(&self) -> io::Result<()> {
        let message = self.contents.encode_to_vec();
        // With the node's secret MAC address.
        replace(&self.path, 0o600, &[MAGIC, &Fingerprint::of(&message).to_le_bytes(), &message])
    }
}

impl Cached {
    fn decode(&self, node: &str) -> Result<Decoded, String> {
        let policy = self.policy.as_ref().map(|policy| decode::node_policy(node, policy)).transpose();
        let cluster = self.cluster.as_ref().map(decode::cluster).transpose();
        let view = self.view.clone().map(decode::view).transpose();
        Ok(Decoded {
            policy: policy.map_err(|error| error.to_string())?,
            cluster: cluster.map_err(|error| error.to_string())?.unwrap_or_default(),
            view: view.map_err(|error| error.to_string())?.unwrap_or_default(),
        })
    }
}

fn read(path: &Path) -> io::Result<Cached> {
    let bytes = fs::read(path)?;
    let damaged = |reason: &str| io::Error::other(reason.to_owned());
    let rest = bytes.strip_prefix(MAGIC).ok_or_else(|| damaged("has no node cache header of this version"))?;
    let (fingerprint, message) = rest.split_first_chunk().ok_or_else(|| damaged("is truncated"))?;
    if Fingerprint::of(message) != u64::from_le_bytes(*fingerprint) {
        return Err(damaged("is corrupt: wrong fingerprint"));
    }
    Message::decode(message).map_err(io::Error::other)
}
