//! HTTP/1.1 server of a fake cloud.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Request, Response};
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::fault::{Fault, Faults};
use crate::request::{RecordedRequest, Reply};

/// State and rules of a cloud.
pub trait FakeCloud: Send + 'static {
    /// Carries out a request.
    fn handle(&mut self, request: &RecordedRequest) -> Reply;
}

/// What tests and connections share.
struct Shared<C> {
    cloud: C,
    faults: Faults,
    log: Vec<RecordedRequest>,
}

/// A server of a fake cloud. Ends when it is dropped.
pub struct FakeServer<C> {
    shared: Arc<Mutex<Shared<C>>>,
    address: SocketAddr,
    _stop: oneshot::Sender<Infallible>,
}

impl<C: FakeCloud> FakeServer<C> {
    /// Starts a server at a free port of the loopback address. Must be called within a Tokio runtime.
    ///
    /// # Errors
    /// When the port can't be bound.
    pub async fn start(cloud: C) -> std::io::Result<Self> {
        Self::start_at((std::net::Ipv4Addr::LOCALHOST, 0).into(), cloud).await
    }

    /// Starts a server at this address.
    ///
    /// # Errors
    /// When the address can't be bound.
    pub async fn start_at(address: SocketAddr, cloud: C) -> std::io::Result<Self> {
        let listener = TcpListener::bind(address).await?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Mutex::new(Shared { cloud, faults: Faults::default(), log: Vec::new() }));
        let (stop, mut stopped) = oneshot::channel::<Infallible>();
        let accepted = shared.clone();
        tokio::spawn(async move {
            loop {
                let stream = tokio::select! {
                    stream = listener.accept() => stream,
                    _ = &mut stopped => return,
                };
                if let Ok((stream, _)) = stream {
                    let shared = accepted.clone();
                    tokio::spawn(async move {
                        let service = service_fn(move |request| serve(shared.clone(), request));
                        // A broken connection is one of the faults.
                        let _ = http1::Builder::new().serve_connection(TokioIo::new(stream), service).await;
                    });
                }
            }
        });
        Ok(Self { shared, address, _stop: stop })
    }

    /// `http://ADDRESS`, without a slash.
    pub fn url(&self) -> String {
        format!("http://{}", self.address)
    }

    /// Looks at or changes the cloud's state.
    pub fn with<T>(&self, work: impl FnOnce(&mut C) -> T) -> T {
        work(&mut lock(&self.shared).cloud)
    }

    /// Plans a fault for the next `count` requests that it is for.
    pub fn plan_fault(&self, count: usize, fault: Fault, is_for: impl Fn(&RecordedRequest) -> bool + Send + 'static) {
        lock(&self.shared).faults.plan(count, fault, is_for);
    }

    /// Takes the requests since the last call.
    pub fn take_log(&self) -> Vec<RecordedRequest> {
        std::mem::take(&mut lock(&self.shared).log)
    }
}

fn lock<C>(shared: &Mutex<Shared<C>>) -> MutexGuard<'_, Shared<C>> {
    shared.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A broken connection.
#[derive(Debug)]
struct Broken;

impl std::fmt::Display for Broken {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("broken on purpose")
    }
}

impl std::error::Error for Broken {}

async fn serve<C: FakeCloud>(
    shared: Arc<Mutex<Shared<C>>>,
    request: Request<Incoming>,
) -> Result<Response<Full<Bytes>>, Broken> {
    let (parts, body) = request.into_parts();
    let body = body.collect().await.map_err(|_| Broken)?.to_bytes();
    let text = |value: &hyper::header::HeaderValue| String::from_utf8_lossy(value.as_bytes()).into_owned();
    let recorded = RecordedRequest {
        method: parts.method.to_string(),
        path: parts.uri.path().to_owned(),
        query: form_urlencoded::parse(parts.uri.query().unwrap_or_default().as_bytes()).into_owned().collect(),
        headers: parts.headers.iter().map(|(name, value)| (name.to_string(), text(value))).collect(),
        body: body.to_vec(),
    };
    let fault = {
        let mut shared = lock(&shared);
        shared.log.push(recorded.clone());
        shared.faults.take(&recorded)
    };
    let reply = match &fault {
        Some(Fault::Reply(reply)) => reply.clone(),
        Some(Fault::LostRequest) => return Err(Broken),
        Some(Fault::Delay(delay)) => {
            tokio::time::sleep(*delay).await;
            lock(&shared).cloud.handle(&recorded)
        }
        Some(Fault::Masked(reply)) => {
            lock(&shared).cloud.handle(&recorded);
            reply.clone()
        }
        Some(Fault::LostReply) | None => lock(&shared).cloud.handle(&recorded),
    };
    if fault == Some(Fault::LostReply) {
        return Err(Broken);
    }
    let mut response = Response::builder().status(reply.status);
    for (name, value) in &reply.headers {
        response = response.header(name, value);
    }
    response.body(Full::new(Bytes::from(reply.body))).map_err(|_| Broken)
}
