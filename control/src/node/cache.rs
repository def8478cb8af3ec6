//! Cache of the last policy, cluster and view, as the server has sent them: the agent starts from it while the policy
//! server is unreachable. It has the content of a gateway's cache, and its writer.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use arc_swap::ArcSwap;
use prost::{DecodeError, Message as _};
use tokio::sync::mpsc;
use vipgate_node::agent::View;
use vipgate_node::policy::{Cluster, NodePolicy};

use super::decode;
use crate::replaced_file::Format;
use crate::xds::cache::decode as decode_resources;
use crate::xds::client::{CacheWriter, Confirmation, ServerStatus};
use crate::xds::proto;
use crate::xds::resource::{Key, Kind};
use crate::xds::store::StoredResource;

/// It has the node's secret MAC address.
pub(super) const FORMAT: Format = Format { name: "node cache", version: 2, mode: 0o600 };

/// What the cache has.
pub(super) type Cached = BTreeMap<Key, StoredResource>;

/// The same, decoded.
#[derive(Debug, Default)]
pub(super) struct Decoded {
    pub(super) policy: Option<NodePolicy>,
    pub(super) cluster: Option<Cluster>,
    pub(super) view: Option<View>,
}

impl Decoded {
    /// Decodes a resource for the node with this name, in place of another one of the kind. Agents use no other kinds.
    pub(super) fn add(&mut self, node: &str, kind: Kind, body: &[u8]) -> Result<(), String> {
        let malformed = |error: DecodeError| error.to_string();
        match kind {
            Kind::NodePolicy => {
                let message = proto::NodePolicy::decode(body).map_err(malformed)?;
                self.policy = Some(decode::node_policy(node, &message).map_err(|error| error.to_string())?);
            }
            Kind::Cluster => {
                let message = proto::Cluster::decode(body).map_err(malformed)?;
                self.cluster = Some(decode::cluster(&message).map_err(|error| error.to_string())?);
            }
            Kind::View => {
                let message = proto::View::decode(body).map_err(malformed)?;
                self.view = Some(decode::view(message).map_err(|error| error.to_string())?);
            }
            _ => {}
        }
        Ok(())
    }
}

/// Reads the cache of a node. One that is damaged, or of another node, is ignored and logged: without policy, the agent
/// holds all packets of pods.
pub(super) fn read(path: &Path, node: &str) -> Option<(Cached, Decoded)> {
    match try_read(path, node) {
        Ok(contents) => Some(contents),
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        Err(error) => {
            let (file, error) = (path.display().to_string(), error.to_string());
            tracing::error!(event = "policy_cache_damaged", file, error, "the policy cache is ignored");
            None
        }
    }
}

fn try_read(path: &Path, node: &str) -> io::Result<(Cached, Decoded)> {
    let content = FORMAT.read(path)?.map_err(io::Error::other)?;
    let (cached, mut decoded) = (decode_resources(&content).map_err(io::Error::other)?, Decoded::default());
    for (key, resource) in &cached {
        decoded.add(node, key.kind, &resource.body).map_err(io::Error::other)?;
    }
    Ok((cached, decoded))
}

/// Writes what is confirmed until the sender is dropped. The file has `cached`.
pub(super) async fn write(
    path: PathBuf,
    cached: Option<Cached>,
    status: Arc<ArcSwap<ServerStatus>>,
    confirmations: mpsc::UnboundedReceiver<Confirmation>,
) {
    let mut writer = CacheWriter::new(path.clone(), status, confirmations);
    if let Some(cached) = cached {
        writer.set_written(cached);
    }
    // If that fails, the last one stays: without one, the agent would hold all packets of pods.
    let store = move |content: Option<Vec<u8>>, _: SystemTime| match content {
        Some(content) => FORMAT.write(&path, &content),
        None => Ok(()),
    };
    writer.run(Arc::new(store)).await;
}
