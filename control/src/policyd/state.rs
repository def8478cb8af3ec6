//! State of the running policy server, shared by its services and metrics.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};

use super::budget::Budget;
use super::cloud::CloudState;
use super::kubernetes::KubernetesState;
use super::listen::Certificates;
use super::registry::Registry;
use crate::listener::ConnectionLimiter;
use crate::policyd::membership::MembershipHandle;
use crate::policyd::stats::Stats;
use crate::source::ingest::SourceStatus;
use crate::source::store::{AcceptEmptyError, AcceptedEmpty};
use crate::xds::publication::Publication;

/// The accept-empty command, as the sender of its reply: what was removed because the source is empty, or an error.
pub type AcceptEmptyCommand = oneshot::Sender<Result<AcceptedEmpty, AcceptEmptyError>>;

/// State of the server.
#[derive(Debug)]
pub struct ServerState {
    /// The policy source, its health, and the compiled manifests.
    pub source: Arc<SourceStatus>,
    /// Queue of accept-empty commands.
    pub accept_empty: mpsc::Sender<AcceptEmptyCommand>,
    /// The current publication.
    pub published: watch::Receiver<Option<Arc<Publication>>>,
    /// Connected gateways.
    pub registry: Arc<Registry>,
    /// Nodes with connected agents.
    pub nodes: Arc<Registry>,
    /// Membership: active gateways and their leases.
    pub membership: MembershipHandle,
    /// What only servers with `source.kubernetes` have.
    pub kubernetes: Option<KubernetesState>,
    /// Public addresses of cloud providers.
    pub cloud: Arc<CloudState>,
    /// Its certificates, with TLS.
    pub certificates: Option<Arc<Certificates>>,
    /// Counters.
    pub stats: Arc<Stats>,
    /// Connections of the gRPC and the metrics listener.
    pub listeners: [Arc<ConnectionLimiter>; 2],
    /// Memory budget of clients.
    pub budget: Arc<Budget>,
    /// Names in certificates that are authorized to run admin commands.
    pub admins: Vec<String>,
}
