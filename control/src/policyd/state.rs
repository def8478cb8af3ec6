//! What the running server knows of itself.

use std::sync::Arc;

use tokio::sync::{mpsc, oneshot, watch};

use super::budget::Budget;
use super::figures::Figures;
use super::members::Members;
use super::publication::Publication;
use super::registry::Registry;
use crate::listener::Room;
use crate::source::intake::SourceStatus;
use crate::source::store::Accepted;

/// An order to take the source at its word where it is empty: the answer says what goes out of force, or why nothing does.
pub type AcceptEmpty = oneshot::Sender<Result<Accepted, String>>;

/// The server as its answers and metrics see it.
#[derive(Debug)]
pub struct State {
    /// Where manifests come from, how that stands, and what they come to.
    pub source: Arc<SourceStatus>,
    /// Takes the source at its word where it is empty.
    pub accept_empty: mpsc::Sender<AcceptEmpty>,
    /// What gateways are told.
    pub published: watch::Receiver<Option<Arc<Publication>>>,
    /// The gateways.
    pub registry: Arc<Registry>,
    /// Who serves.
    pub members: Members,
    /// What is counted.
    pub figures: Arc<Figures>,
    /// The connections of its listeners.
    pub rooms: [Arc<Room>; 2],
    /// What clients make it hold.
    pub budget: Arc<Budget>,
    /// Who may give orders: names in certificates.
    pub admins: Vec<String>,
}
