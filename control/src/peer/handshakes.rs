//! Limits for incoming TLS handshakes: only from peer addresses in the view, and few at a time per address. Other
//! connections are closed before TLS data is read, so that they can't exhaust resources.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::frame::LinkError;
use super::view::PeerView;

/// Concurrent handshakes per address. A further one supersedes the oldest: after a pause of this process, its accept
/// queue contains all connection attempts of a peer, and only the newest connection is still open.
const MAX_PER_ADDRESS: usize = 4;

/// Handshakes in progress, by source address, oldest first.
#[derive(Debug, Default)]
pub(super) struct Handshakes(Mutex<InProgress>);

#[derive(Debug, Default)]
struct InProgress {
    last: u64,
    by_address: HashMap<IpAddr, VecDeque<Handshake>>,
}

#[derive(Debug)]
struct Handshake {
    id: u64,
    /// Dropped when a newer handshake supersedes this one.
    _current: oneshot::Sender<()>,
}

/// The slot of one handshake; released when dropped.
#[derive(Debug)]
pub(super) struct Slot {
    handshakes: Arc<Handshakes>,
    address: IpAddr,
    id: u64,
    current: oneshot::Receiver<()>,
}

impl Handshakes {
    /// Reserves a slot for a connection from this address.
    ///
    /// # Errors
    /// When no peer in the view has the address.
    pub(super) fn admit(self: &Arc<Self>, address: IpAddr, view: &PeerView, own: &str) -> Result<Slot, LinkError> {
        let has_address = |gateway: &super::PeerMember| gateway.address.is_some_and(|it| it.ip() == address);
        if !view.members.iter().any(|gateway| *gateway.name != *own && has_address(gateway)) {
            return Err(LinkError::UnknownAddress);
        }
        let mut in_progress = self.in_progress();
        in_progress.last += 1;
        let id = in_progress.last;
        let of_address = in_progress.by_address.entry(address).or_default();
        let (sender, current) = oneshot::channel();
        of_address.push_back(Handshake { id, _current: sender });
        if of_address.len() > MAX_PER_ADDRESS {
            of_address.pop_front();
        }
        Ok(Slot { handshakes: self.clone(), address, id, current })
    }

    fn in_progress(&self) -> MutexGuard<'_, InProgress> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    /// Waits until a newer handshake from the same address supersedes this one.
    pub(super) async fn superseded(&mut self) {
        let _ = (&mut self.current).await;
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        let mut in_progress = self.handshakes.in_progress();
        if let Some(of_address) = in_progress.by_address.get_mut(&self.address) {
            of_address.retain(|it| it.id != self.id);
            if of_address.is_empty() {
                in_progress.by_address.remove(&self.address);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::PeerMember;
    use super::*;

    fn member(name: &str, address: &str) -> PeerMember {
        let address = Some(address.parse().unwrap());
        PeerMember { name: name.into(), address, fingerprint: None, active: false, incarnation: 1 }
    }

    #[test]
    fn handshake_slots_are_per_peer_address_and_unknown_addresses_get_none() {
        let members =
            vec![member("a", "10.0.0.1:4790"), member("b", "10.0.0.2:4790"), member("c", "[2001:db8::3]:4790")];
        let view = PeerView { members, ..PeerView::default() };
        let handshakes = Arc::new(Handshakes::default());
        let admit = |address: &str| handshakes.admit(address.parse().unwrap(), &view, "a");
        for unknown in ["10.0.0.9", "2001:db8::9", "10.0.0.1"] {
            assert_eq!(admit(unknown).unwrap_err(), LinkError::UnknownAddress, "{unknown}");
        }
        let is_superseded =
            |slot: &mut Slot| !matches!(slot.current.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        let mut of_b: Vec<Slot> = (0..=MAX_PER_ADDRESS).map(|_| admit("10.0.0.2").unwrap()).collect();
        let mut of_c = admit("2001:db8::3").unwrap();
        let superseded: Vec<bool> = of_b.iter_mut().map(is_superseded).collect();
        assert_eq!(superseded, [true, false, false, false, false], "the newest ones stay");
        of_b.remove(0);
        of_b.pop();
        of_b.push(admit("10.0.0.2").unwrap());
        assert!(!of_b.iter_mut().any(is_superseded), "a released slot is free");
        assert!(!is_superseded(&mut of_c), "b uses no slot of c");
        drop((of_b, of_c));
        assert!(handshakes.in_progress().by_address.is_empty(), "no state remains for an address without handshakes");
    }
}
