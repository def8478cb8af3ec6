//! A connection to a policy server, with or without TLS. What goes wrong is said in one sentence with its cause.

use std::error::Error;
use std::io;
use std::sync::{Arc, OnceLock};
use std::task::Poll;
use std::time::Duration;

use hyper_util::rt::TokioIo;
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;
use tonic::transport::{Channel, Endpoint, Uri};

use crate::config::PolicyServer;
use crate::xds::tls;

/// The longest wait for a connection.
const PATIENCE: Duration = Duration::from_secs(5);
/// How often a silent connection is asked whether it lives, and how long it may take to say so.
const KEEP_ALIVE: Duration = Duration::from_secs(4);
/// What may be on its way: a whole policy shouldn't wait for acknowledgements of the window.
const WINDOW: u32 = 8 << 20;
/// The type of HTTP/2's frame of settings, in the fourth byte of its head (RFC 9113 section 6.5).
const SETTINGS_FRAME: u8 = 4;
/// How a TLS server answers somebody who doesn't speak it: an alert, version 3 (RFC 8446 section 5.1).
const TLS_ALERT: [u8; 2] = [21, 3];

/// Why a connection broke, in the words of the kernel or of TLS. HTTP/2 above it may say no more than that it did: whom
/// a server doesn't let in hears of it after the handshake (RFC 8446 section 4.4.2.4), in the middle of a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct Breakage(Arc<OnceLock<String>>);

impl Breakage {
    fn note<T>(&self, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if let Poll::Ready(Err(error)) = &outcome {
            // The first is the cause.
            let _ = self.0.set(in_words(&error.to_string()));
        }
        outcome
    }

    /// Looks at what the server says first: HTTP/2 begins with settings (RFC 9113 section 3.4).
    fn note_beginning(&self, said: &[u8]) {
        let what = if said.starts_with(&TLS_ALERT) {
            "what answers there speaks TLS: the url must begin with https://"
        } else if said.get(3).is_some_and(|kind| *kind != SETTINGS_FRAME) {
            "what answers there doesn't speak HTTP/2"
        } else {
            return;
        };
        let _ = self.0.set(what.to_owned());
    }

    /// What went wrong, with the cause where it isn't in it.
    pub(crate) fn explain(&self, what: String) -> String {
        match self.0.get() {
            Some(why) if !what.contains(why) => format!("{what}: {why}"),
            _ => what,
        }
    }
}

/// What TLS says when a server lets nobody in, with what to do.
fn in_words(error: &str) -> String {
    let hint = if error.contains("CertificateRequired") {
        ": the server lets in only those who present a certificate; name one that its `tls.ca` has signed (`policy.server.cert` and \
         `key`, or --cert and --key)"
    } else if error.contains("alert: UnknownCA") {
        ": the server's `tls.ca` hasn't signed the certificate that was presented"
    } else if error.contains("alert: CertificateExpired") {
        ": the certificate that was presented has expired"
    } else {
        ""
    };
    format!("{error}{hint}")
}

/// Connects to the server, so that it is known later why the connection broke. Certificates are read anew each time.
pub(crate) async fn connect_watched(server: &PolicyServer) -> Result<(Channel, Breakage), String> {
    let uri: Uri = server.url.parse().map_err(|error| format!("{}: {error}", server.url))?;
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']).to_owned();
    let secure = uri.scheme_str() == Some("https");
    let port = uri.port_u16().unwrap_or(if secure { 443 } else { 80 });
    let tls = if secure {
        let own = server.cert.as_deref().zip(server.key.as_deref());
        let config = tls::client(server.ca.as_deref(), own).map_err(|error| error.to_string())?;
        let name = ServerName::try_from(host.clone()).map_err(|_| format!("{host} is no name for a certificate"))?;
        Some((TlsConnector::from(Arc::new(config)), name))
    } else {
        None
    };
    // TLS is done here: of an address with https, tonic would want to do it again.
    let endpoint = Endpoint::from_static("http://policy.server")
        .origin(uri)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true)
        .initial_connection_window_size(WINDOW)
        .initial_stream_window_size(WINDOW);
    let breakage = Breakage::default();
    let noted = breakage.clone();
    let connector = tower::service_fn(move |_: Uri| {
        let (host, tls, breakage) = (host.clone(), tls.clone(), noted.clone());
        async move {
            let stream = TcpStream::connect((host.as_str(), port)).await?;
            stream.set_nodelay(true)?;
            let stream = match tls {
                None => MaybeTls::Plain(stream),
                Some((connector, name)) => MaybeTls::Tls(Box::new(connector.connect(name, stream).await?)),
            };
            Ok::<_, io::Error>(TokioIo::new(Watched { stream, breakage, begun: false }))
        }
    });
    match timeout(PATIENCE, endpoint.connect_with_connector(connector)).await {
        Ok(Ok(channel)) => Ok((channel, breakage)),
        Ok(Err(error)) => Err(breakage.explain(chain(&error))),
        Err(_) => Err(format!("no connection within {} s", PATIENCE.as_secs())),
    }
}

/// A stream with or without TLS.
enum MaybeTls {
    Plain(TcpStream),
    Tls(Box<tokio_rustls::client::TlsStream<TcpStream>>),
}

/// A stream of which is known why it broke.
struct Watched {
    stream: MaybeTls,
    breakage: Breakage,
    /// Whether the server has said anything.
    begun: bool,
}

mod io_of_either {
    use std::io::{self, ErrorKind};
    use std::pin::Pin;
    use std::task::{Context, Poll, ready};

    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

    use super::{MaybeTls, Watched};

    impl Watched {
        /// Notes why a write failed. What the other side said before it closed tells more than that it did: it is read
        /// first, and since it has closed, there will be something to read.
        fn written<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
            let closed = |error: &io::Error| matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset);
            if matches!(&outcome, Poll::Ready(Err(error)) if closed(error)) {
                // What is read is noted there.
                let _ = ready!(Pin::new(&mut *self).poll_read(cx, &mut ReadBuf::new(&mut [0; 64])));
            }
            self.breakage.note(outcome)
        }
    }

    impl AsyncRead for Watched {
        fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            let Self { stream, breakage, begun } = self.get_mut();
            let before = buf.filled().len();
            let outcome = match stream {
                MaybeTls::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
                MaybeTls::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
            };
            let said = &buf.filled()[before..];
            if !*begun && !said.is_empty() {
                *begun = true;
                breakage.note_beginning(said);
            }
            breakage.note(outcome)
        }
    }

    impl AsyncWrite for Watched {
        fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            let this = self.get_mut();
            let outcome = match &mut this.stream {
                MaybeTls::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
                MaybeTls::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
            };
            this.written(cx, outcome)
        }

        fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            let this = self.get_mut();
            let outcome = match &mut this.stream {
                MaybeTls::Plain(stream) => Pin::new(stream).poll_flush(cx),
                MaybeTls::Tls(stream) => Pin::new(stream).poll_flush(cx),
            };
            this.written(cx, outcome)
        }

        fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            match &mut self.get_mut().stream {
                MaybeTls::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
                MaybeTls::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
            }
        }
    }
}

/// An error and its causes in one line, each once.
pub fn chain(error: &dyn Error) -> String {
    with_causes(error.to_string(), error.source())
}

/// What went wrong and its causes in one line, each once.
pub(super) fn with_causes(mut text: String, mut cause: Option<&dyn Error>) -> String {
    while let Some(error) = cause {
        let part = error.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        cause = error.source();
    }
    text
}
