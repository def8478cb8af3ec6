//! Incoming TLS handshakes: accepted only from addresses of other gateways of the view, and a few at a time from each. Other connections
//! are closed before anything of TLS is read, so they cannot use up what gateways need.

use std::collections::{HashMap, VecDeque};
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::sync::oneshot;

use super::frame::Broken;
use super::view::View;

/// Concurrent handshakes per address. A further one supersedes the oldest: after a pause, a gateway finds all attempts of another one
/// in its accept queue, and only the newest connection is still open.
const PER_ADDRESS: usize = 4;

/// Handshakes in progress, by source address, the oldest first.
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
    /// Dropped when a newer handshake supersedes it.
    _current: oneshot::Sender<()>,
}

/// The slot of one handshake, until it is dropped.
#[derive(Debug)]
pub(super) struct Slot {
    handshakes: Arc<Handshakes>,
    address: IpAddr,
    id: u64,
    current: oneshot::Receiver<()>,
}

impl Handshakes {
    /// A slot for a connection from this address.
    ///
    /// # Errors
    /// When no other gateway of the view has the address.
    pub(super) fn admit(self: &Arc<Self>, address: IpAddr, view: &View, own: &str) -> Result<Slot, Broken> {
        let has_it = |gateway: &super::Member| gateway.address.is_some_and(|at| at.ip() == address);
        if !view.members.iter().any(|gateway| *gateway.name != *own && has_it(gateway)) {
            return Err(Broken::UnknownAddress);
        }
        let mut in_progress = self.in_progress();
        in_progress.last += 1;
        let id = in_progress.last;
        let of_address = in_progress.by_address.entry(address).or_default();
        let (sender, current) = oneshot::channel();
        of_address.push_back(Handshake { id, _current: sender });
        if of_address.len() > PER_ADDRESS {
            of_address.pop_front();
        }
        Ok(Slot { handshakes: self.clone(), address, id, current })
    }

    fn in_progress(&self) -> MutexGuard<'_, InProgress> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Slot {
    /// Waits until a newer handshake of its address supersedes this one.
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
    use super::super::Member;
    use super::*;

    fn member(name: &str, address: &str) -> Member {
        let address = Some(address.parse().unwrap());
        Member { name: name.into(), address, fingerprint: None, serving: false, incarnation: 1 }
    }

    #[test]
    fn each_gateway_of_the_view_has_slots_of_its_own_and_nobody_else_has_any() {
        let members =
            vec![member("a", "10.0.0.1:4790"), member("b", "10.0.0.2:4790"), member("c", "[2001:db8::3]:4790")];
        let view = View { members, ..View::default() };
        let handshakes = Arc::new(Handshakes::default());
        let admit = |address: &str| handshakes.admit(address.parse().unwrap(), &view, "a");
        for stranger in ["10.0.0.9", "2001:db8::9", "10.0.0.1"] {
            assert_eq!(admit(stranger).unwrap_err(), Broken::UnknownAddress, "{stranger}");
        }
        let is_superseded =
            |slot: &mut Slot| !matches!(slot.current.try_recv(), Err(oneshot::error::TryRecvError::Empty));
        let mut of_b: Vec<Slot> = (0..=PER_ADDRESS).map(|_| admit("10.0.0.2").unwrap()).collect();
        let mut of_c = admit("2001:db8::3").unwrap();
        let superseded: Vec<bool> = of_b.iter_mut().map(is_superseded).collect();
        assert_eq!(superseded, [true, false, false, false, false], "the newest are meant");
        of_b.remove(0);
        of_b.pop();
        of_b.push(admit("10.0.0.2").unwrap());
        assert!(!of_b.iter_mut().any(is_superseded), "a slot that was given back is free");
        assert!(!is_superseded(&mut of_c), "b uses no slot of c");
        drop((of_b, of_c));
        assert!(handshakes.in_progress().by_address.is_empty(), "nothing is kept of who isn't there");
    }
}
