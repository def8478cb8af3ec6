//! The objects of an API server as its watches send them, without the server: for tests.

use std::sync::Arc;

use vipgate_policy::manifest::Kind;

use super::collection::{Collection, CollectionEvent};
use super::manifest::manifest;
use super::mirror::Mirror;
use crate::source::SourceUpdate;

/// A cluster whose collections are watched, pods among them.
#[derive(Debug)]
pub(in crate::source) struct Cluster {
    mirror: Mirror,
    is_listed: bool,
}

impl Default for Cluster {
    fn default() -> Self {
        let mut mirror = Mirror::default();
        for kind in Kind::ALL {
            mirror.add(Collection { kind, namespace: None });
        }
        Self { mirror, is_listed: false }
    }
}

impl Cluster {
    /// The update for objects that were written, as JSON, or deleted: by `Kind/namespace/name`. The API server refuses what
    /// isn't JSON.
    pub(in crate::source) fn deliver(&mut self, objects: Vec<(Arc<str>, Option<String>)>) -> Vec<SourceUpdate> {
        if !self.is_listed {
            self.is_listed = true;
            for kind in Kind::ALL {
                self.mirror.apply(&Collection { kind, namespace: None }, CollectionEvent::Listed(Vec::new(), None));
            }
        }
        for (path, object) in objects {
            let Some(kind) = path.split('/').next().and_then(Kind::named) else { continue };
            let collection = Collection { kind, namespace: None };
            let event = match object.map(|text| serde_json::from_str(&text)) {
                None => CollectionEvent::Deleted(path),
                Some(Ok(object)) => CollectionEvent::Applied(manifest(kind, object)),
                Some(Err(_)) => continue,
            };
            self.mirror.apply(&collection, event);
        }
        self.mirror.take_update().into_iter().collect()
    }
}
