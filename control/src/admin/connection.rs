//! Serves an admin socket: connections, their requests, and the end of both when the process stops.

use std::io;
use std::net::Ipv4Addr;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use futures::stream::{self, BoxStream};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader};
use tokio::net::unix::OwnedWriteHalf;
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::mpsc;
use vipgate_common::{Task, Tasks};

use super::protocol::{Answer, Greeting, RequestError, encode, read_line};
use crate::listener::{self, ConnectionLimiter, DescriptorReserve, Slot};

/// Timeout of requests in progress when the process stops.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_millis(500);
/// Limit of a request in bytes.
const MAX_REQUEST_BYTES: usize = 64 << 10;

/// The replies to a request, each an encoded line.
pub(crate) type Replies = BoxStream<'static, Result<Vec<u8>, RequestError>>;

/// What answers the requests at an admin socket.
pub(crate) trait AdminService: Send + Sync + 'static {
    type Request: DeserializeOwned + Send;

    fn greeting(&self) -> Greeting;

    fn answer(&self, request: Self::Request) -> impl Future<Output = Result<Replies, RequestError>> + Send;
}

/// An answer of one reply.
pub(crate) fn one(reply: &impl Serialize) -> Result<Replies, RequestError> {
    let line = encode_reply(reply)?;
    Ok(stream::iter([Ok(line)]).boxed())
}

/// An answer of replies that are sent one by one, by a task that ends with the answer at the latest.
pub(crate) fn several<T: Serialize + Send + 'static, F: Future<Output = ()> + Send + 'static>(
    send: impl FnOnce(mpsc::Sender<Result<T, RequestError>>) -> F,
) -> Replies {
    let (sender, replies) = mpsc::channel(2);
    let task = Task::spawn(send(sender));
    let next = |(mut replies, task): (mpsc::Receiver<Result<T, RequestError>>, Task)| async move {
        let reply = replies.recv().await?;
        Some((reply.and_then(|reply| encode_reply(&reply)), (replies, task)))
    };
    stream::unfold((replies, task), next).boxed()
}

fn encode_reply(reply: &impl Serialize) -> Result<Vec<u8>, RequestError> {
    encode(&Answer::Reply(reply))
        .map_err(|error| RequestError::unavailable(format!("cannot encode the reply: {error}")))
}

/// Runs a service on a socket until the stop signal of `tasks`. Reserved file descriptors keep commands working when the
/// process has none left.
pub(crate) async fn serve(
    service: impl AdminService,
    listener: UnixListener,
    limiter: Arc<ConnectionLimiter>,
    tasks: Tasks,
) {
    let service = Arc::new(service);
    let mut reserve = DescriptorReserve::new();
    let connections = tasks.child();
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = connections.stopped() => break,
        };
        match accepted {
            Ok((stream, _)) => {
                // All clients are on this host.
                let Ok(slot) = limiter.admit(Ipv4Addr::LOCALHOST.into()) else { continue };
                slot.mark_in_use();
                let serving = serve_connection(service.clone(), stream, slot, connections.clone());
                connections.spawn("admin connection", serving);
                reserve.refill();
            }
            Err(_) if reserve.release_one() => {}
            Err(error) => listener::accept_failed(&limiter, &error).await,
        }
    }
    connections.stop(SHUTDOWN_TIMEOUT).await;
}

/// Serves the requests of one connection, one after the other.
async fn serve_connection(
    service: Arc<impl AdminService>,
    stream: UnixStream,
    _slot: Slot,
    tasks: Tasks,
) -> io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut reader = BufReader::new(reader);
    writer.write_all(&encode(&service.greeting())?).await?;
    let mut request = Vec::new();
    loop {
        request.clear();
        let is_read = tokio::select! {
            is_read = read_line(&mut reader, MAX_REQUEST_BYTES, &mut request) => is_read?,
            () = tasks.stopped() => return Ok(()),
        };
        if !is_read {
            return Ok(());
        }
        tokio::select! {
            biased;
            answered = answer(&*service, &request, &mut writer) => answered?,
            // Its client has disconnected, or doesn't wait for the answer: what it asked for is given up.
            _ = reader.fill_buf() => return Ok(()),
        }
    }
}

async fn answer<S: AdminService>(service: &S, request: &[u8], writer: &mut OwnedWriteHalf) -> io::Result<()> {
    let replies = match serde_json::from_slice(request) {
        Ok(request) => service.answer(request).await,
        Err(error) => Err(RequestError::invalid(format!("invalid request: {error}"))),
    };
    let end: Answer<()> = match replies {
        Err(error) => Answer::Error(error),
        Ok(mut replies) => loop {
            match replies.next().await {
                Some(Ok(reply)) => writer.write_all(&reply).await?,
                Some(Err(error)) => break Answer::Error(error),
                None => break Answer::End,
            }
        },
    };
    writer.write_all(&encode(&end)?).await
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::sync::atomic::Ordering::Relaxed;

    use serde::Deserialize;
    use tempfile::TempDir;

    use super::*;
    use crate::admin::client::{Client, ClientError, REPLY_TIMEOUT};
    use crate::admin::protocol::GATEWAY;
    use crate::listener::Limits;

    #[derive(Debug, Serialize, Deserialize)]
    enum Request {
        /// That many numbers, one by one.
        Count(u32),
        Fail,
        /// Never replies.
        Hang,
        /// Neither does the task that would send several replies.
        HangLater,
    }

    /// Answers requests, and counts those that it is about.
    #[derive(Clone, Debug, Default)]
    struct Service(Arc<AtomicUsize>);

    struct Pending(Arc<AtomicUsize>);

    impl Drop for Pending {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Relaxed);
        }
    }

    impl AdminService for Service {
        type Request = Request;

        fn greeting(&self) -> Greeting {
            Greeting::of(GATEWAY, "gw-a")
        }

        async fn answer(&self, request: Request) -> Result<Replies, RequestError> {
            self.0.fetch_add(1, Relaxed);
            let pending = Pending(self.0.clone());
            match request {
                Request::Count(count) => Ok(several(move |sender| async move {
                    for number in 0..count {
                        if sender.send(Ok(number)).await.is_err() {
                            return;
                        }
                    }
                })),
                Request::Fail => Err(RequestError::refused("not in this state")),
                Request::Hang => std::future::pending().await,
                Request::HangLater => Ok(several(move |sender: mpsc::Sender<Result<u32, _>>| async move {
                    let _held = (pending, sender);
                    std::future::pending::<()>().await;
                })),
            }
        }
    }

    struct Server {
        service: Service,
        folder: TempDir,
        tasks: Tasks,
    }

    impl Server {
        fn start() -> Self {
            let (folder, service) = (TempDir::new().unwrap(), Service::default());
            let listener = UnixListener::bind(folder.path().join("socket")).unwrap();
            let tasks = Tasks::default();
            let limiter = ConnectionLimiter::new("test", Limits { connections: 2, per_address: 2 });
            tasks.spawn("server", serve(service.clone(), listener, limiter, tasks.clone()));
            Self { service, folder, tasks }
        }

        async fn connect(&self) -> Result<Client, ClientError> {
            Client::connect(&self.folder.path().join("socket")).await
        }

        /// Waits until this number of requests is being answered.
        async fn pending(&self, count: usize) {
            while self.service.0.load(Relaxed) != count {
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        }
    }

    #[tokio::test]
    async fn requests_of_a_connection_are_answered_one_after_the_other() {
        let server = Server::start();
        let mut client = server.connect().await.unwrap();
        for count in [0, 3] {
            client.send(&Request::Count(count)).await.unwrap();
            for number in 0..count {
                assert_eq!(client.next::<u32>().await.unwrap(), Some(number));
            }
            assert_eq!(client.next::<u32>().await.unwrap(), None);
        }
        let error = client.ask::<u32>(&Request::Fail).await.unwrap_err().to_string();
        assert!(error.ends_with("socket: not in this state"), "{error}");
        assert_eq!(client.ask::<u32>(&Request::Count(1)).await.unwrap(), 0);
        let error = client.ask::<u32>(&"no such request").await.unwrap_err();
        assert!(matches!(error, ClientError::InvalidRequest(_)), "{error}");
    }

    #[tokio::test]
    async fn a_request_of_a_client_that_disconnects_is_given_up() {
        let server = Server::start();
        for request in [Request::Hang, Request::HangLater] {
            let mut client = server.connect().await.unwrap();
            client.send(&request).await.unwrap();
            server.pending(1).await;
            drop(client);
            server.pending(0).await;
        }
    }

    #[tokio::test]
    async fn connections_beyond_the_limit_are_closed_and_others_stay() {
        let server = Server::start();
        let mut clients = [server.connect().await.unwrap(), server.connect().await.unwrap()];
        let error = server.connect().await.unwrap_err();
        assert!(matches!(error, ClientError::Connection { .. }), "{error}");
        for client in &mut clients {
            assert_eq!(client.ask::<u32>(&Request::Count(1)).await.unwrap(), 0);
        }
        let [client, _other] = clients;
        drop(client);
        let connected = async { while server.connect().await.is_err() {} };
        tokio::time::timeout(REPLY_TIMEOUT, connected).await.unwrap();
    }

    #[tokio::test]
    async fn a_client_that_does_not_read_delays_neither_others_nor_the_end() {
        let server = Server::start();
        let mut slow = server.connect().await.unwrap();
        slow.send(&Request::Count(u32::MAX)).await.unwrap();
        let mut client = server.connect().await.unwrap();
        assert_eq!(client.ask::<u32>(&Request::Count(1)).await.unwrap(), 0);
        assert!(server.tasks.stop(2 * SHUTDOWN_TIMEOUT).await);
        let error = client.ask::<u32>(&Request::Count(1)).await.unwrap_err();
        assert!(matches!(error, ClientError::Connection { .. }), "{error}");
    }

    #[tokio::test]
    async fn a_request_that_is_too_long_ends_its_connection() {
        let server = Server::start();
        let mut client = server.connect().await.unwrap();
        // The write may fail, too: the server reads no further.
        let _ = client.send(&"x".repeat(MAX_REQUEST_BYTES)).await;
        let error = client.next::<u32>().await.unwrap_err();
        assert!(matches!(error, ClientError::Connection { .. }), "{error}");
    }
}
