//! Link addresses are the kernel's business: vipgate asks it to find one, and to keep it fresh.
//!
//! The kernel doesn't see our packets, so to it a neighbour that we use looks unused. A managed entry (Linux 5.16) it
//! keeps resolved by itself; older kernels are asked again from time to time.

use std::collections::HashMap;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use rtnetlink::Handle;
use rtnetlink::packet_route::neighbour::{NeighbourAttribute, NeighbourExtFlags, NeighbourFlags, NeighbourState};

/// Neighbours that are kept fresh at once; behind that, the one that was asked for longest ago is let go.
const MOST: usize = 4096;
/// One neighbour isn't asked for more often.
const ASK_APART: Duration = Duration::from_millis(400);

/// Asks the kernel for link addresses.
#[derive(Debug)]
pub struct Resolver {
    handle: Handle,
    /// When each neighbour was last asked for; by interface index.
    asked: HashMap<(u32, IpAddr), Instant>,
    /// Whether the kernel keeps entries fresh by itself.
    managed: bool,
}

impl Resolver {
    pub(super) fn new(handle: Handle) -> Self {
        Self { handle, asked: HashMap::new(), managed: true }
    }

    /// Asks for the link address of a neighbour; the answer comes as a change of the network.
    pub async fn resolve(&mut self, ifindex: u32, address: IpAddr) {
        let now = Instant::now();
        if self.asked.get(&(ifindex, address)).is_some_and(|&then| now - then < ASK_APART) {
            return;
        }
        if self.asked.len() >= MOST && !self.asked.contains_key(&(ifindex, address)) {
            let oldest = self.asked.iter().min_by_key(|(_, then)| **then).map(|(&key, _)| key);
            if let Some((ifindex, address)) = oldest {
                self.asked.remove(&(ifindex, address));
                self.ask(ifindex, address, false).await;
            }
        }
        self.asked.insert((ifindex, address), now);
        if self.managed && !self.ask(ifindex, address, true).await {
            self.managed = false;
            tracing::debug!("this kernel doesn't manage neighbours (Linux 5.16 does); they are asked for instead");
        }
        if !self.managed {
            self.ask(ifindex, address, false).await;
        }
    }

    /// Lets the kernel forget the neighbours that it keeps fresh only for us.
    pub async fn close(mut self) {
        if self.managed {
            for ((ifindex, address), _) in std::mem::take(&mut self.asked) {
                self.ask(ifindex, address, false).await;
            }
        }
    }

    /// Says whether the kernel took the question.
    async fn ask(&self, ifindex: u32, address: IpAddr, managed: bool) -> bool {
        let mut request = self
            .handle
            .neighbours()
            .add(ifindex, address)
            .state(NeighbourState::None)
            .flags(NeighbourFlags::Use)
            .replace();
        if managed {
            request.message_mut().header.flags = NeighbourFlags::default();
            request.message_mut().attributes.push(NeighbourAttribute::ExtFlags(NeighbourExtFlags::Managed));
        }
        match request.execute().await {
            Ok(()) => true,
            Err(error) => {
                tracing::debug!(ifindex, %address, managed, %error, "the kernel wouldn't resolve a neighbour");
                false
            }
        }
    }
}
