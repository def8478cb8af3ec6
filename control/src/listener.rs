//! Connections of a listener: how many there may be, in all and of one address, and which one goes when there is no room for a new one:
//! the oldest of those that nobody uses. So whoever opens connections and stays silent keeps nobody else out.

mod guard;
mod reserve;
mod room;

pub use self::guard::{Activity, Guard, InUse, Pace};
pub use self::reserve::{Reserve, affordable, raise_descriptors};
pub use self::room::{Exchange, Limits, Reason, Room, Slot, network};

use std::io;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::Request;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tower::ServiceExt as _;

use crate::metrics::{Family, Kind, family};

/// How long to wait after the kernel refused to accept: out of descriptors, most likely, and that passes.
const PAUSE: Duration = Duration::from_millis(100);
/// The longest head of a request over HTTP/1, bytes.
const HEAD: usize = 16 << 10;

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

/// Answers over HTTP/1 until told to stop; what is being answered then is finished. Not over HTTP/2, where a connection has many requests
/// at the same time: a slot would stand for as many answers.
pub async fn serve(listener: TcpListener, room: Arc<Room>, router: Router, stop: watch::Receiver<bool>) {
    loop {
        let (stream, from, slot) = tokio::select! {
            accepted = accept(&listener, &room) => accepted,
            () = stopped(stop.clone()) => return,
        };
        let exchange = slot.exchange();
        let guard = Guard::new(stream, slot, Pace::requests(exchange.clone())).seen_from(from.ip());
        tokio::spawn(answer(guard, exchange, router.clone(), stop.clone()));
    }
}

/// Answers the requests of a connection.
async fn answer(guard: Guard<TcpStream>, exchange: Arc<Exchange>, router: Router, stop: watch::Receiver<bool>) {
    let service = service_fn(move |request: Request<Incoming>| {
        exchange.begin();
        router.clone().oneshot(request)
    });
    let connection = http1::Builder::new().max_buf_size(HEAD).serve_connection(TokioIo::new(guard), service);
    let mut connection = pin!(connection);
    tokio::select! {
        // If it fails, its client has gone, was too slow, or speaks something else: nobody has to know.
        _ = connection.as_mut() => {}
        () = stopped(stop) => {
            connection.as_mut().graceful_shutdown();
            let _ = connection.await;
        }
    }
}

/// Waits until told to stop, or until nobody is there to say so.
async fn stopped(mut stop: watch::Receiver<bool>) {
    drop(stop.wait_for(|stop| *stop).await);
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
