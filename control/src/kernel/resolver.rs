//! Makes the kernel look for next hops, and keep those known that the gateway uses.
//!
//! The kernel doesn't see the gateway's packets, so by itself it neither asks for a next hop nor notices that one has
//! another link address now. Where the kernel can (Linux 5.16), entries are marked as managed and it cares for them;
//! elsewhere they are used from time to time, so that stale ones are asked again.

mod book;
mod keeper;
mod order;

use std::net::IpAddr;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tracing::warn;
use vipgate_dataplane::io::InterfaceId;

use super::error::NetworkError;
use super::network::Network;
use keeper::Keeper;

/// Orders that may wait; what comes on top is refused and has to be asked for again.
const ORDERS: usize = 1024;

/// A next hop: an address behind an interface.
type Hop = (InterfaceId, IpAddr);

/// What is wanted of the kernel.
#[derive(Debug)]
enum Order {
    Resolve(Hop),
    Keep(Vec<Hop>),
}

/// How often the kernel is asked, and for how much.
#[derive(Clone, Copy, Debug)]
pub struct ResolverLimits {
    /// Time between two questions for one next hop: the kernel repeats them by itself, but whoever deletes an entry ends that.
    pub pause: Duration,
    /// Questions a second, all next hops together.
    pub per_second: u32,
    /// Next hops that are looked after at once: a new one takes the place of the one that nobody has asked for or named
    /// as in use for longest. The kernel's own bound is net.ipv4.neigh.default.gc_thresh3.
    pub hops: usize,
    /// Time between two looks after a next hop: whether the kernel still has it, and whether it still answers.
    pub look_again: Duration,
}

impl Default for ResolverLimits {
    fn default() -> Self {
        Self { pause: Duration::from_millis(100), per_second: 256, hops: 4096, look_again: Duration::from_secs(30) }
    }
}

/// The way to the task that asks the kernel. Dropped, it lets all next hops go, if the runtime still runs for it;
/// [`Resolver::close`] waits for that.
#[derive(Debug)]
pub struct Resolver {
    orders: mpsc::Sender<Order>,
    task: JoinHandle<()>,
}

impl Resolver {
    /// Starts the task in the current runtime, for the interfaces of `network` and in this thread's namespace.
    /// Takes over what a gateway that was killed has left marked.
    ///
    /// # Errors
    /// The process may not change neighbours, or netlink can't be used.
    pub async fn open(network: &Network, limits: ResolverLimits) -> Result<Self, NetworkError> {
        let keeper = Keeper::open(network, limits).await?;
        let (orders, waiting) = mpsc::channel(ORDERS);
        Ok(Self { orders, task: tokio::spawn(keeper.run(waiting)) })
    }

    /// Asks for a next hop that packets wait for. Returns at once; the answer is a change of the network or a
    /// [`NeighbourFailed`](super::NeighbourFailed). Questions that come too soon are left out silently.
    ///
    /// Returns whether the question was taken; `false`: too many are waiting.
    pub fn resolve(&self, interface: InterfaceId, address: IpAddr) -> bool {
        self.orders.try_send(Order::Resolve((interface, address))).is_ok()
    }

    /// Names next hops that are in use, to be repeated every [`ResolverLimits::look_again`]: they are asked for before
    /// packets wait for them, and still when they don't answer. Routers that routes lead to need no naming.
    ///
    /// Returns whether the order was taken; `false`: too many are waiting.
    pub fn keep(&self, hops: Vec<(InterfaceId, IpAddr)>) -> bool {
        self.orders.try_send(Order::Keep(hops)).is_ok()
    }

    /// Lets all next hops go and leaves the kernel's neighbours to themselves again.
    pub async fn close(self) {
        drop(self.orders);
        if let Err(error) = self.task.await {
            warn!(%error, "the kernel may keep next hops that nobody uses: the resolver ended early");
        }
    }
}
