//! What the running server knows of itself.

use std::sync::Arc;

use arc_swap::{ArcSwap, ArcSwapOption};
use tokio::sync::watch;

use super::figures::Figures;
use super::members::Members;
use super::publication::Publication;
use super::registry::Registry;
use super::store::Outcome;

/// The server as its answers and metrics see it.
#[derive(Debug)]
pub struct State {
    /// Where manifests come from, for people.
    pub source: String,
    /// Why the source can't be asked; none while it can.
    pub source_error: ArcSwapOption<String>,
    /// What the manifests come to.
    pub compiled: ArcSwap<Outcome>,
    /// What gateways are told.
    pub published: watch::Receiver<Option<Arc<Publication>>>,
    /// The gateways.
    pub registry: Arc<Registry>,
    /// Who serves.
    pub members: Members,
    /// What is counted.
    pub figures: Arc<Figures>,
}
