//! Links between gateways: authenticated connections, one for each two gateways of the view, over which they hear whether the other
//! is there, and get copies of its sessions.
//!
//! `handshakes` and `identity` say who may talk, `tunnel_key` makes the keys of tunnels, `frame` and `session` what is said, `link` is one connection, `mesh` all of them;
//! `replicate` is what goes over them. Who serves, who is home, and who takes over is decided elsewhere.

mod frame;
mod handshakes;
mod identity;
mod link;
mod mesh;
mod replicate;
mod session;
mod status;
#[cfg(test)]
mod tests;
mod troubles;
mod tunnel_key;
mod view;
mod work;

/// What fuzz targets see of links.
#[cfg(any(test, fuzzing))]
pub(crate) mod fuzzed {
    pub(crate) use super::frame::{encode as write_frame, read as read_frame};
    pub(crate) use super::replicate::inbound::{Inbound, Step};
    pub(crate) use super::replicate::rounds::Rounds;
    pub(crate) use super::session::{decode, encode};
}

/// The generated messages.
#[expect(missing_docs, clippy::pedantic, reason = "generated; the .proto file has the comments")]
pub mod proto {
    tonic::include_proto!("vipgate.peer.v1");
}

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinSet;
use vipgate_dataplane::time::Tick;

pub use self::frame::Broken;
pub use self::identity::{Fingerprint, Identity, IdentityError};
use self::mesh::Shared;
use self::replicate::pump::{Order, Pump};
use self::replicate::rounds::Rounds;
use self::status::Board;
pub use self::status::{CopiesStatus, Echoed, PeerStatus, PeersStatus};
pub use self::tunnel_key::{End, TagKeys, TunnelKey, TunnelSecret};
pub use self::view::{Member, View};
use self::work::Turns;
pub use self::work::{Bell, Workers};
use crate::members;

/// The versions of the protocol that this program speaks, from and to. A program speaks that of the one before it too.
pub const VERSIONS: (u32, u32) = (1, 1);
/// How often beats are sent, unless configured.
pub const HEARTBEAT: Duration = Duration::from_millis(100);
/// Events that wait for whoever listens.
const EVENTS: usize = 1024;
/// What links have to say to the pump.
const ORDERS: usize = 1024;

/// What links are made of.
#[derive(Debug)]
pub struct Plan {
    /// The name of this gateway.
    pub name: Arc<str>,
    /// Which process of this name it is: what the policy server was told.
    pub incarnation: u64,
    /// Its certificate.
    pub identity: Identity,
    /// Where others connect to.
    pub listen: SocketAddr,
    /// How often beats are sent; after four of them without a sign, a link is down.
    pub heartbeat: Duration,
    /// The versions to speak: [`VERSIONS`].
    pub versions: (u32, u32),
    /// Those who have the sessions.
    pub workers: Arc<dyn Workers>,
    /// What their outlets ring.
    pub bell: Arc<Bell>,
    /// The clock that workers go by.
    pub clock: fn() -> Tick,
}

/// What has happened between gateways.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Event {
    /// We have everything that a gateway told.
    Synced {
        /// Which.
        gateway: Arc<str>,
    },
    /// A gateway has let go of what a view takes from it, and we have everything of that.
    Released {
        /// Which.
        gateway: Arc<str>,
        /// The view's number.
        view: u64,
    },
    /// A gateway goes by a later view than we, as the policy server told it.
    Told {
        /// Which.
        gateway: Arc<str>,
        /// The view.
        view: Arc<members::View>,
    },
}

/// Why there can be no links.
#[derive(Debug, Error)]
pub enum PeerError {
    /// The port is in use, or the address isn't ours.
    #[error("peer.port: cannot listen on {address} for other gateways: {error}")]
    Listen {
        /// Where.
        address: SocketAddr,
        /// What the kernel says.
        error: io::Error,
    },
    /// The certificate is no good.
    #[error(transparent)]
    Identity(#[from] IdentityError),
}

/// All links, while it lives.
#[derive(Debug)]
pub struct Peers {
    shared: Arc<Shared>,
    orders: mpsc::UnboundedSender<Order>,
    address: SocketAddr,
    _tasks: JoinSet<()>,
}

impl Peers {
    /// Opens the port, and waits for a view. Needs a tokio runtime. Events must be taken: a link waits for it.
    ///
    /// # Errors
    /// When the port can't be opened, or the certificate used.
    pub fn start(plan: Plan) -> Result<(Self, mpsc::Receiver<Event>), PeerError> {
        let failed = |error| PeerError::Listen { address: plan.listen, error };
        let listener = mesh::bind(&plan).map_err(failed)?;
        let address = listener.local_addr().map_err(failed)?;
        let board = Board::new();
        let (orders, ordered) = mpsc::unbounded_channel();
        let (links, said) = mpsc::channel(ORDERS);
        let (events, receiver) = mpsc::channel(EVENTS);
        let pump = Pump::new(plan.workers.clone(), plan.bell.clone(), board.clone());
        let shared = Arc::new(Shared {
            view: watch::Sender::new(Arc::default()),
            board,
            rounds: Rounds::default(),
            turns: Turns::default(),
            events,
            links,
            pins: Arc::default(),
            handshakes: Arc::default(),
            registry: std::sync::Mutex::default(),
            plan,
        });
        let acceptor = mesh::acceptor(&shared)?;
        let mut tasks = JoinSet::new();
        tasks.spawn(pump.run(ordered, said));
        tasks.spawn(mesh::listen(shared.clone(), listener, acceptor));
        tasks.spawn(mesh::dial_all(shared.clone()));
        Ok((Self { shared, orders, address, _tasks: tasks }, receiver))
    }

    /// Where others connect to: with the port that the kernel chose, if the plan left it open.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Another view counts: links come and go with it. Views of the past are passed over.
    pub fn set_view(&self, view: &Arc<View>) {
        if view.number < self.shared.view.borrow().number {
            return;
        }
        let others =
            view.members.iter().map(|member| member.name.clone()).filter(|name| *name != self.shared.plan.name);
        // Before links come up.
        self.order(Order::Keep(others.collect(), view.number));
        self.shared.enter(view);
    }

    /// Tells a gateway all sessions whose copies belong there: where they belong has changed.
    pub fn resync(&self, gateway: &str) {
        self.order(Order::Resync(gateway.into()));
    }

    /// Asks a gateway for all sessions whose copies belong here: some may have got lost here.
    pub fn request(&self, gateway: &str) {
        self.order(Order::Request(gateway.into()));
    }

    /// Tells a gateway that we do no more what the view with this number takes from us, after all news that workers have told until
    /// now, and after telling all, if that is to be done. It is told again over the next link if it hasn't heard.
    pub fn release(&self, gateway: &str, view: u64) {
        self.order(Order::Release(gateway.into(), view));
    }

    /// How links stand.
    pub fn status(&self) -> watch::Receiver<Arc<PeersStatus>> {
        self.shared.board.watch()
    }

    fn order(&self, order: Order) {
        // It lives as long as this does.
        let _ = self.orders.send(order);
    }
}
