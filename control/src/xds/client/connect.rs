//! Connection to a policy server, with or without TLS. Errors are one line with their root cause.

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

use super::target::{Target, host_and_port};
use crate::config::PolicyServer;
use crate::xds::tls;

/// Timeout of connect and TLS handshake.
pub(super) const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Interval of HTTP/2 PINGs, and the timeout of their replies.
const KEEP_ALIVE: Duration = Duration::from_secs(4);
/// HTTP/2 flow control window, bytes: large enough that a whole policy rarely waits for WINDOW_UPDATE.
const WINDOW: u32 = 8 << 20;
/// Type of an HTTP/2 SETTINGS frame, in the fourth byte of the frame header (RFC 9113 section 6.5).
const SETTINGS_FRAME: u8 = 4;
/// Reply of a TLS server to plaintext: content type alert, major version 3 (RFC 8446 section 5.1).
const TLS_ALERT: [u8; 2] = [21, 3];

/// The first I/O or TLS error of a connection. HTTP/2 above may only report that the connection broke: in TLS 1.3 a
/// client learns of a rejected certificate after its handshake (RFC 8446 section 4.4.2.4), in the middle of a request.
#[derive(Clone, Debug, Default)]
pub(crate) struct RootCause(Arc<OnceLock<String>>);

impl RootCause {
    fn record<T>(&self, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if let Poll::Ready(Err(error)) = &outcome {
            // Only the first error is kept: later ones are its consequences.
            let _ = self.0.set(with_hint(&error.to_string()));
        }
        outcome
    }

    /// Checks the first bytes from the server: an HTTP/2 server sends SETTINGS first (RFC 9113 section 3.4).
    fn check_preface(&self, received: &[u8]) {
        let error = if received.starts_with(&TLS_ALERT) {
            "the server expects TLS: the url must begin with https://"
        } else if received.get(3).is_some_and(|kind| *kind != SETTINGS_FRAME) {
            "the server doesn't speak HTTP/2"
        } else {
            return;
        };
        let _ = self.0.set(error.to_owned());
    }

    /// Appends the root cause to an error, unless it is part of it.
    pub(crate) fn explain(&self, error: String) -> String {
        match self.0.get() {
            Some(cause) if !error.contains(cause) => format!("{error}: {cause}"),
            _ => error,
        }
    }
}

/// Adds what to do to TLS alerts about the client's certificate.
fn with_hint(error: &str) -> String {
    let hint = if error.contains("CertificateRequired") {
        ": the server requires a client certificate; configure one that its `tls.ca` has signed (`policy.server.cert` \
         and `key`, or --cert and --key)"
    } else if error.contains("alert: UnknownCA") {
        ": the client certificate isn't signed by the server's `tls.ca`"
    } else if error.contains("alert: CertificateExpired") {
        ": the client certificate has expired"
    } else {
        ""
    };
    format!("{error}{hint}")
}

/// Opens a channel to a server of a configuration, and records the root cause if its connection breaks. Certificates are read each time.
pub(crate) async fn open_channel(server: &PolicyServer, target: &Target) -> io::Result<(Channel, RootCause)> {
    let invalid = |text: String| io::Error::new(io::ErrorKind::InvalidInput, text);
    let uri: Uri = target.url.parse().map_err(|error| invalid(format!("{}: {error}", target.url)))?;
    let (host, port) = host_and_port(&target.url).unwrap_or_default();
    let (secure, address) = (uri.scheme_str() == Some("https"), target.address);
    let tls = if secure {
        let identity = server.cert.as_deref().zip(server.key.as_deref());
        let config = tls::client_config(server.ca.as_deref(), identity).map_err(io::Error::other)?;
        let name = ServerName::try_from(host.clone())
            .map_err(|_| invalid(format!("{host} is not a valid TLS server name")))?;
        Some((TlsConnector::from(Arc::new(config)), name))
    } else {
        None
    };
    // The connector does TLS; with an https URI tonic would do it again.
    let endpoint = Endpoint::from_static("http://policy.server")
        .origin(uri)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true)
        .initial_connection_window_size(WINDOW)
        .initial_stream_window_size(WINDOW);
    let root_cause = RootCause::default();
    let recorded = root_cause.clone();
    let connector = tower::service_fn(move |_: Uri| {
        let (host, tls, root_cause) = (host.clone(), tls.clone(), recorded.clone());
        async move {
            let stream = match address {
                Some(address) => TcpStream::connect(address).await?,
                None => TcpStream::connect((host.as_str(), port)).await?,
            };
            stream.set_nodelay(true)?;
            let stream = match tls {
                None => MaybeTls::Plain(stream),
                Some((connector, name)) => MaybeTls::Tls(Box::new(connector.connect(name, stream).await?)),
            };
            Ok::<_, io::Error>(TokioIo::new(RecordingStream { stream, root_cause, preface_checked: false }))
        }
    });
    match timeout(CONNECT_TIMEOUT, endpoint.connect_with_connector(connector)).await {
        Ok(Ok(channel)) => Ok((channel, root_cause)),
        Ok(Err(error)) => Err(io::Error::other(root_cause.explain(error_chain(&error)))),
        Err(_) => {
            let text = format!("no connection within {} s", CONNECT_TIMEOUT.as_secs());
            Err(io::Error::new(io::ErrorKind::TimedOut, text))
        }
    }
}

/// A stream with or without TLS.
enum MaybeTls {
    Plain(TcpStream),
    Tls(Box<tokio_rustls::client::TlsStream<TcpStream>>),
}

/// A stream that records why it broke.
struct RecordingStream {
    stream: MaybeTls,
    root_cause: RootCause,
    /// Whether data has been received and its beginning checked.
    preface_checked: bool,
}

mod recording_stream {
    use std::io::{self, ErrorKind};
    use std::pin::Pin;
    use std::task::{Context, Poll, ready};

    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

    use super::{MaybeTls, RecordingStream};

    impl RecordingStream {
        /// Records a write error. If the server has closed the connection, its last data (a TLS alert) is read first:
        /// that tells more than the write error. The read doesn't block: at least EOF is pending.
        fn written<T>(&mut self, cx: &mut Context<'_>, outcome: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
            let closed = |error: &io::Error| matches!(error.kind(), ErrorKind::BrokenPipe | ErrorKind::ConnectionReset);
            if matches!(&outcome, Poll::Ready(Err(error)) if closed(error)) {
                // Its error is recorded by `poll_read`.
                let _ = ready!(Pin::new(&mut *self).poll_read(cx, &mut ReadBuf::new(&mut [0; 64])));
            }
            self.root_cause.record(outcome)
        }
    }

    impl AsyncRead for RecordingStream {
        fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            let Self { stream, root_cause, preface_checked } = self.get_mut();
            let before = buf.filled().len();
            let outcome = match stream {
                MaybeTls::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
                MaybeTls::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
            };
            let received = &buf.filled()[before..];
            if !*preface_checked && !received.is_empty() {
                *preface_checked = true;
                root_cause.check_preface(received);
            }
            root_cause.record(outcome)
        }
    }

    impl AsyncWrite for RecordingStream {
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

/// An error and its sources in one line, without repetitions.
fn error_chain(error: &dyn Error) -> String {
    with_causes(error.to_string(), error.source())
}

/// Appends the sources of an error to its message, without repetitions.
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
