//! Servers that can't be heard, and what is said of them.

use std::net::{Ipv4Addr, TcpListener};
use std::thread;

use super::server::free_port;
use super::*;
use crate::xds::fixtures::pki::Authority;
use crate::xds::tls;

/// Why a gateway can't hear a server.
async fn error(server: PolicyServer) -> String {
    let (gateway, _) = Gateway::start(server);
    let status = gateway.is(|status| status.error.as_deref().is_some_and(|it| it != "not connected yet")).await;
    assert!(!status.connected);
    gateway.stop().await;
    let error = status.error.unwrap();
    // One line for people, without what only programmers can read.
    assert!(!error.contains(['\n', '{']) && error.len() < 300, "{error}");
    error
}

/// The same of a server that says this to everybody, and then closes the connection.
async fn error_from(says: &'static [u8]) -> String {
    let (folder, listener) = (tempfile::tempdir().unwrap(), TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            use std::io::{Read, Write};
            let mut stream = stream.unwrap();
            let _ = stream.write_all(says);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    error(plain(port, folder.path())).await
}

#[tokio::test]
async fn nothing_listens() {
    let folder = tempfile::tempdir().unwrap();
    let said = error(plain(free_port(), folder.path())).await;
    assert!(said.contains("Connection refused"), "{said}");
}

#[tokio::test]
async fn another_protocol_answers() {
    for says in [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".as_slice(),
        b"SSH-2.0-OpenSSH_9.2p1\r\n",
    ] {
        let said = error_from(says).await;
        assert!(said.ends_with("what answers there doesn't speak HTTP/2"), "{said}");
    }
}

#[tokio::test]
async fn the_connection_is_closed() {
    let said = error_from(b"").await;
    assert!(said.contains("closed"), "{said}");
}

/// Takes as long as a gateway waits: 5 s.
#[tokio::test]
async fn nothing_is_said() {
    let (folder, listener) = (tempfile::tempdir().unwrap(), TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let said = error(plain(listener.local_addr().unwrap().port(), folder.path())).await;
    assert_eq!(said, "connected, but no answer within 5 s");
}

#[tokio::test]
async fn the_server_has_another_service() {
    let (folder, server) = (tempfile::tempdir().unwrap(), Server::start_empty());
    let said = error(plain(server.port, folder.path())).await;
    assert_eq!(said, "the server knows no delta discovery service: is it a policy server?");
}

#[tokio::test]
async fn one_side_speaks_tls_and_the_other_does_not() {
    let (folder, ca, plain_server) = (tempfile::tempdir().unwrap(), Authority::new("ca"), Server::start());
    let own = ca.issue(&["127.0.0.1"]);
    let secure = PolicyServer { ca: Some(ca.ca()), ..plain(plain_server.port, folder.path()) };
    let secure = PolicyServer { url: secure.url.replace("http:", "https:"), ..secure };
    let said = error(secure).await;
    assert!(said.contains("received corrupt message"), "{said}");
    let tls_server = Server::start_tls(tls::server(None, &own.cert, &own.key).unwrap());
    let said = error(plain(tls_server.port, folder.path())).await;
    let expected = ["what answers there speaks TLS: the url must begin with https://", "closed", "reset"];
    assert!(expected.iter().any(|words| said.contains(words)), "{said}");
}

#[tokio::test]
async fn certificates_are_not_what_they_should_be() {
    let (folder, ca, other) = (tempfile::tempdir().unwrap(), Authority::new("ca"), Authority::new("other"));
    let own = ca.issue(&["127.0.0.1"]);
    let server = Server::start_tls(tls::server(Some(&ca.ca()), &own.cert, &own.key).unwrap());
    let with = |host: &str, trusts: &Authority, shows: Option<&Authority>| {
        let shows = shows.map(|it| it.issue(&["g1"]));
        let (cert, key) = shows.map(|it| (it.cert, it.key)).unzip();
        let url = format!("https://{host}:{}", server.port);
        PolicyServer { url, ca: Some(trusts.ca()), cert, key, cache: folder.path().join("policy.cache") }
    };
    let cases = [
        (with("127.0.0.1", &other, None), "invalid peer certificate: UnknownIssuer"),
        (with("localhost", &ca, None), "not valid for name \"localhost\""),
        (with("127.0.0.1", &ca, None), "received fatal alert: CertificateRequired"),
        (with("127.0.0.1", &ca, Some(&other)), "received fatal alert: UnknownCA"),
        (
            PolicyServer { ca: Some("/nowhere/ca.pem".into()), ..with("127.0.0.1", &ca, None) },
            "/nowhere/ca.pem: can't be read: No such file",
        ),
    ];
    for (config, expected) in cases {
        let said = error(config).await;
        assert!(said.contains(expected), "{said} / {expected}");
    }
}

/// A certificate that is renewed while the server can't be reached lets the gateway in.
#[tokio::test]
async fn certificates_are_read_again() {
    let (folder, ca, other) = (tempfile::tempdir().unwrap(), Authority::new("ca"), Authority::new("other"));
    let own = ca.issue(&["127.0.0.1"]);
    let mut server = Server::start_tls(tls::server(Some(&ca.ca()), &own.cert, &own.key).unwrap());
    let shown = other.issue(&["g1"]);
    let url = format!("https://127.0.0.1:{}", server.port);
    let (cert, key) = (Some(shown.cert.clone()), Some(shown.key.clone()));
    let config = PolicyServer { url, ca: Some(ca.ca()), cert, key, cache: folder.path().join("policy.cache") };
    let (gateway, _) = Gateway::start(config);
    gateway.is(|status| status.error.as_deref().is_some_and(|error| error.contains("UnknownCA"))).await;
    let renewed = ca.issue(&["g1"]);
    std::fs::copy(&renewed.key, &shown.key).unwrap();
    std::fs::copy(&renewed.cert, &shown.cert).unwrap();
    server.talk().await.subscriptions().await;
    gateway.is(|status| status.connected).await;
}
