//! Connections of a listener: how many there may be, in all and of one address, and which one goes when there is no room for a new one:
//! the oldest of those that nobody uses. So whoever opens connections and stays silent keeps nobody else out.

mod guard;
mod reserve;
mod room;

pub use self::guard::{Activity, Guard, InUse, Pace};
pub use self::reserve::{Reserve, affordable, raise_descriptors};
pub use self::room::{Limits, Reason, Room, Slot, network};

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, TcpStream};

use crate::metrics::{Family, Kind, family};

/// How long to wait after the kernel refused to accept: out of descriptors, most likely, and that passes.
const PAUSE: Duration = Duration::from_millis(100);

/// The next connection that has a slot. Others are closed at once.
pub async fn accept(listener: &TcpListener, room: &Arc<Room>) -> (TcpStream, SocketAddr, Slot) {
    loop {
        match listener.accept().await {
            Ok((stream, from)) => {
                let admitted = room.admit(from.ip());
                // Whoever had to give way closes its connection now.
                tokio::task::yield_now().await;
                if let Ok(slot) = admitted {
                    return (stream, from, slot);
                }
            }
            Err(error) => failed(room, &error).await,
        }
    }
}

/// Notes that the kernel refuses to accept, and waits until that may have passed.
pub async fn failed(room: &Room, error: &io::Error) {
    room.failed(error);
    tokio::time::sleep(PAUSE).await;
}

/// HTTP/1 for axum: connections that have slots, and keep to a pace.
#[derive(Debug)]
pub struct Http {
    listener: TcpListener,
    room: Arc<Room>,
}

impl Http {
    /// On an open port.
    pub fn new(listener: TcpListener, room: Arc<Room>) -> Self {
        Self { listener, room }
    }
}

impl axum::serve::Listener for Http {
    type Io = Guard<TcpStream>;
    type Addr = SocketAddr;

    async fn accept(&mut self) -> (Self::Io, SocketAddr) {
        let (stream, from, slot) = accept(&self.listener, &self.room).await;
        (Guard::new(stream, slot, Pace::requests()).seen_from(from.ip()), from)
    }

    fn local_addr(&self) -> io::Result<SocketAddr> {
        self.listener.local_addr()
    }
}

/// The metrics of some listeners.
pub(crate) fn families(rooms: &[&Room]) -> Vec<Family> {
    let name = |room: &Room| ("listener", room.name().to_owned());
    let open = rooms.iter().map(|room| (vec![name(room)], room.len() as u64));
    let refused = rooms.iter().flat_map(|room| {
        Reason::ALL.map(|reason| (vec![name(room), ("reason", reason.name().to_owned())], room.refused(reason)))
    });
    vec![
        family("connections", "Connections that are open, by listener", Kind::Gauge, open.collect()),
        family(
            "connections_refused",
            "Connections that were closed or never taken: too many of one address or in all, given way to newer ones, too slow, or no \
             descriptors left",
            Kind::Counter,
            refused.collect(),
        ),
    ]
}
