//! A connection to a policy server, with or without TLS. What goes wrong is said in one sentence with its cause.

use std::error::Error;
use std::io;
use std::sync::Arc;
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

/// Connects to the server; certificates are read anew each time.
pub(crate) async fn connect(server: &PolicyServer) -> Result<Channel, String> {
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
    let endpoint = Endpoint::from(uri)
        .tcp_nodelay(true)
        .http2_keep_alive_interval(KEEP_ALIVE)
        .keep_alive_timeout(KEEP_ALIVE)
        .keep_alive_while_idle(true)
        .initial_connection_window_size(WINDOW)
        .initial_stream_window_size(WINDOW);
    let connector = tower::service_fn(move |_: Uri| {
        let (host, tls) = (host.clone(), tls.clone());
        async move {
            let stream = TcpStream::connect((host.as_str(), port)).await?;
            stream.set_nodelay(true)?;
            Ok::<_, io::Error>(TokioIo::new(match tls {
                None => MaybeTls::Plain(stream),
                Some((connector, name)) => MaybeTls::Tls(Box::new(connector.connect(name, stream).await?)),
            }))
        }
    });
    match timeout(PATIENCE, endpoint.connect_with_connector(connector)).await {
        Ok(Ok(channel)) => Ok(channel),
        Ok(Err(error)) => Err(chain(&error)),
        Err(_) => Err(format!("no connection within {} s", PATIENCE.as_secs())),
    }
}

/// A stream with or without TLS.
enum MaybeTls {
    Plain(TcpStream),
    Tls(Box<tokio_rustls::client::TlsStream<TcpStream>>),
}

mod io_of_either {
    use std::io;
    use std::pin::Pin;
    use std::task::{Context, Poll};

    use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

    use super::MaybeTls;

    impl AsyncRead for MaybeTls {
        fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            match self.get_mut() {
                Self::Plain(stream) => Pin::new(stream).poll_read(cx, buf),
                Self::Tls(stream) => Pin::new(stream).poll_read(cx, buf),
            }
        }
    }

    impl AsyncWrite for MaybeTls {
        fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            match self.get_mut() {
                Self::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
                Self::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
            }
        }

        fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            match self.get_mut() {
                Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
                Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
            }
        }

        fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
            match self.get_mut() {
                Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
                Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
            }
        }
    }
}

/// An error and its causes in one line, each once.
pub fn chain(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let part = error.to_string();
        if !text.contains(&part) {
            text = format!("{text}: {part}");
        }
        cause = error.source();
    }
    text
}
