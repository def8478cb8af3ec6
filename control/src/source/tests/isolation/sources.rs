//! How entries reach a store: as they are, or through the product's sources.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use etcd_client::TxnOp;
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};
use tokio::sync::mpsc::{Receiver, channel};
use tokio::time::timeout;

use super::entries::Content;
use super::world::Shape;
use crate::config::Etcd;
use crate::source::etcd::tests::server::{EtcdServer, TEST_TIMEOUT};
use crate::source::etcd::watch_prefix;
use crate::source::files::FileReader;
use crate::source::kubernetes::fixtures::Cluster;
use crate::source::{SourceEvent, SourceUpdate};

/// What delivers changed entries.
#[expect(clippy::large_enum_variant, reason = "there is one for each world")]
pub(super) enum Source {
    /// Nothing stands between.
    Direct {
        is_first: bool,
    },
    Files(Files),
    Etcd(Box<EtcdPrefix>),
    /// The objects of an API server, with the fields that the product keeps.
    Kubernetes(Box<Cluster>),
}

impl Source {
    /// The source in which a world is tried mostly.
    pub(super) fn quick(shape: Shape) -> Self {
        match shape {
            Shape::Files | Shape::Etcd => Self::Direct { is_first: true },
            Shape::Kubernetes => Self::Kubernetes(Box::default()),
        }
    }

    /// The product's source.
    pub(super) fn real(shape: Shape) -> Self {
        match shape {
            Shape::Files => Self::Files(Files::new()),
            Shape::Etcd => Self::Etcd(Box::new(EtcdPrefix::new())),
            Shape::Kubernetes => Self::Kubernetes(Box::default()),
        }
    }

    /// What the names of its entries begin with.
    pub(super) fn prefix(&self) -> String {
        match self {
            Self::Direct { .. } | Self::Kubernetes(_) => String::new(),
            Self::Files(Files { root, .. }) => format!("{}/", root.path().display()),
            Self::Etcd(_) => EtcdPrefix::PREFIX.to_owned(),
        }
    }

    /// It starts again, and delivers everything.
    pub(super) fn restart(&mut self) {
        match self {
            Self::Direct { is_first } => *is_first = true,
            Self::Files(files) => files.reader = FileReader::new(vec![files.root.path().to_owned()]),
            Self::Etcd(prefix) => prefix.watch(),
            Self::Kubernetes(cluster) => **cluster = Cluster::default(),
        }
    }

    /// The updates for changed entries; the first one is full.
    pub(super) fn deliver(&mut self, entries: Vec<(Arc<str>, Content)>) -> Vec<SourceUpdate> {
        match self {
            Self::Direct { is_first } => vec![update(entries, std::mem::take(is_first))],
            Self::Files(files) => vec![files.deliver(entries)],
            Self::Etcd(prefix) => prefix.deliver(entries),
            Self::Kubernetes(cluster) => cluster.deliver(entries),
        }
    }
}

fn update(entries: Vec<(Arc<str>, Content)>, full: bool) -> SourceUpdate {
    let mut update = SourceUpdate { full, ..SourceUpdate::default() };
    for (name, content) in entries {
        match content {
            Some(text) => update.changed.push((name, Ok(text.into()))),
            None => update.removed.push(name),
        }
    }
    update
}

/// A directory of manifests.
pub(super) struct Files {
    root: TempDir,
    reader: FileReader,
}

impl Files {
    fn new() -> Self {
        let root = tempfile::tempdir().unwrap();
        let reader = FileReader::new(vec![root.path().to_owned()]);
        Self { root, reader }
    }

    fn deliver(&mut self, entries: Vec<(Arc<str>, Content)>) -> SourceUpdate {
        for (name, content) in entries {
            let path = Path::new(&*name);
            match content {
                Some(text) => fs::write(path, text).unwrap(),
                None => drop(fs::remove_file(path)),
            }
        }
        self.reader.read()
    }
}

/// Keys of an etcd server.
pub(super) struct EtcdPrefix {
    server: EtcdServer,
    runtime: Runtime,
    events: Receiver<SourceEvent>,
    writes: u32,
}

impl EtcdPrefix {
    const PREFIX: &str = "/vipgate/";
    /// Operations of a transaction.
    const CHUNK: usize = 64;

    fn new() -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().unwrap();
        let server = runtime.block_on(EtcdServer::running());
        let mut prefix = Self { server, runtime, events: channel(1).1, writes: 0 };
        prefix.watch();
        prefix
    }

    fn watch(&mut self) {
        let (sender, events) = channel(4);
        let config = Etcd { endpoints: vec![self.server.endpoint()], prefix: Self::PREFIX.into() };
        self.runtime.spawn(watch_prefix(config, sender));
        self.events = events;
    }

    /// Writes the entries, and a key after them that shows that all of them have been seen.
    fn deliver(&mut self, entries: Vec<(Arc<str>, Content)>) -> Vec<SourceUpdate> {
        let Self { server, runtime, events, writes } = self;
        let operation = |(name, content): (Arc<str>, Content)| match content {
            Some(text) => TxnOp::put(&*name, text, None),
            None => TxnOp::delete(&*name, None),
        };
        let operations: Vec<TxnOp> = entries.into_iter().map(operation).collect();
        *writes += 1;
        let marker =
            format!("kind: Namespace\napiVersion: v1\nmetadata: {{name: marker, labels: {{write: \"{writes}\"}}}}\n");
        let key = format!("{}Namespace/marker", Self::PREFIX);
        runtime.block_on(async {
            for chunk in operations.chunks(Self::CHUNK) {
                server.transaction(chunk).await;
            }
            server.put(&key, marker.clone()).await;
            let mut updates = Vec::new();
            loop {
                let event = timeout(TEST_TIMEOUT, events.recv()).await.expect("an event in time").expect("it runs");
                let SourceEvent::Update(update) = event else { continue };
                let is_last =
                    update.changed.iter().any(|(name, text)| **name == *key && *text == Ok(marker.as_str().into()));
                updates.push(update);
                if is_last {
                    return updates;
                }
            }
        })
    }
}
