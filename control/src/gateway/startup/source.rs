//! Startup of the policy source: manifest files or a policy server, and the policy that is known at once.

use std::sync::Arc;

use arc_swap::ArcSwap;
use tokio::sync::mpsc;

use crate::command_error::CommandError;
use crate::config::{Config, PolicySource};
use crate::gateway::background::BackgroundRuntime;
use crate::gateway::policy_source::{MAX_PENDING_EVENTS, PolicySubscription};
use crate::gateway::session_store::{ADDRESSES, path_beside};
use crate::source::address_record::RecordStorage;
use crate::source::files::WatchedFiles;
use crate::source::ingest::SourceIngester;
use crate::source::store::{ManifestStore, RecordMode};
use crate::xds::client::{Client, ServerStatus};
use crate::xds::store::PolicyUpdate;

/// The policy source, and the policy that it has at startup.
pub(super) struct OpenedSource {
    pub(super) subscription: PolicySubscription,
    /// For display.
    pub(super) description: String,
    /// Status of the connection, with a policy server.
    pub(super) server: Option<Arc<ArcSwap<ServerStatus>>>,
    /// The policy of the files, or of the policy server's cache.
    pub(super) known: Option<PolicyUpdate>,
    /// The policy server's client; it doesn't run yet.
    pub(super) client: Option<Client>,
}

/// Opens the source. Files are read, a policy server isn't connected to yet.
///
/// # Errors
/// If the record of addresses of pools can't be read, or the policy of the files can't be put in force.
pub(super) async fn open(config: &Config, background: &BackgroundRuntime) -> Result<OpenedSource, CommandError> {
    Ok(match &config.policy {
        PolicySource::Files(paths) => {
            let names: Vec<String> = paths.iter().map(|path| path.display().to_string()).collect();
            let store = ManifestStore::new(config.allow_empty).with_tenancy(config.tenancy);
            let store = store.with_cluster(config.locality().cluster);
            let (mode, storage) = address_record(config)?;
            let ingester = SourceIngester::new(format!("files {}", names.join(", ")), store.with_record(mode));
            let (files, ingester) = (WatchedFiles::new(paths.clone()), ingester.with_storage(storage));
            let files = PolicySubscription::files(files, config.locality(), ingester);
            let (subscription, update) = background.run(files).await.map_err(CommandError::usage)?;
            let description = subscription.files.as_ref().map(|files| files.status.name.clone()).unwrap_or_default();
            OpenedSource { subscription, description, server: None, known: update, client: None }
        }
        PolicySource::Server(server) => {
            let (sender, receiver) = mpsc::channel(MAX_PENDING_EVENTS);
            let (client, update) = Client::open(config.locality(), server.clone(), sender);
            let description = format!("server {}", server.url);
            let status = Some(client.status());
            let subscription = PolicySubscription::server(receiver);
            OpenedSource { subscription, description, server: status, known: update, client: Some(client) }
        }
    })
}

/// Where the record of addresses of pools is while this gateway is alone: beside its sessions.
fn address_record(config: &Config) -> Result<(RecordMode, Option<RecordStorage>), CommandError> {
    let Some(path) = path_beside(config, ADDRESSES) else { return Ok((RecordMode::None, None)) };
    let storage = RecordStorage::file(path).map_err(|error| CommandError::input(error).context("sessions.state"))?;
    Ok((RecordMode::KeptBy(config.name.as_str().into()), Some(storage)))
}
