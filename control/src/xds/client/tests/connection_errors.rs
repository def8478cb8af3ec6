//! Connection errors and their messages.

use std::net::{Ipv4Addr, TcpListener};
use std::thread;

use super::server::free_port;
use super::*;
use crate::xds::fixtures::pki::Authority;
use crate::xds::tls::{self, ClientCertificates};

/// The error of a client that can't connect to a server.
async fn error(server: PolicyServer) -> String {
    let (gateway, _) = Gateway::start(server);
    let status =
        gateway.wait_for_status(|status| status.error.as_deref().is_some_and(|it| it != "not connected yet")).await;
    assert!(!status.connected);
    gateway.stop().await;
    let error = status.error.unwrap();
    // One readable line, without debug output.
    assert!(!error.contains(['\n', '{']) && error.len() < 300, "{error}");
    error
}

/// The same for a server that sends these bytes and closes the connection.
async fn error_from(sent: &'static [u8]) -> String {
    let (dir, listener) = (tempfile::tempdir().unwrap(), TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let port = listener.local_addr().unwrap().port();
    thread::spawn(move || {
        for stream in listener.incoming() {
            use std::io::{Read, Write};
            let mut stream = stream.unwrap();
            let _ = stream.write_all(sent);
            let _ = stream.shutdown(std::net::Shutdown::Write);
            let _ = stream.read_to_end(&mut Vec::new());
        }
    });
    error(plain_server(port, dir.path())).await
}

#[tokio::test]
async fn a_closed_port_is_reported() {
    let dir = tempfile::tempdir().unwrap();
    let message = error(plain_server(free_port(), dir.path())).await;
    assert!(message.contains("Connection refused"), "{message}");
}

#[tokio::test]
async fn another_protocol_is_reported() {
    for sent in [
        b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".as_slice(),
        b"SSH-2.0-OpenSSH_9.2p1\r\n",
    ] {
        let message = error_from(sent).await;
        assert!(message.ends_with("the server doesn't speak HTTP/2"), "{message}");
    }
}

#[tokio::test]
async fn a_closed_connection_is_reported() {
    let message = error_from(b"").await;
    assert!(message.contains("closed"), "{message}");
}

/// Takes 5 s, the timeout.
#[tokio::test]
async fn a_silent_server_is_reported() {
    let (dir, listener) = (tempfile::tempdir().unwrap(), TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap());
    let message = error(plain_server(listener.local_addr().unwrap().port(), dir.path())).await;
    assert_eq!(message, "connected, but no response within 5 s");
}

#[tokio::test]
async fn a_server_without_the_discovery_service_is_reported() {
    let (dir, server) = (tempfile::tempdir().unwrap(), Server::start_empty());
    let message = error(plain_server(server.port, dir.path())).await;
    assert_eq!(message, "the server doesn't implement delta discovery: is it a policy server?");
}

#[tokio::test]
async fn tls_on_only_one_side_is_reported() {
    let (dir, ca, server) = (tempfile::tempdir().unwrap(), Authority::new("ca"), Server::start());
    let own = ca.issue(&["127.0.0.1"]);
    let secure = PolicyServer { ca: Some(ca.ca()), ..plain_server(server.port, dir.path()) };
    let secure = PolicyServer { url: secure.url.replace("http:", "https:"), ..secure };
    let message = error(secure).await;
    assert!(message.contains("received corrupt message"), "{message}");
    let tls_server =
        Server::start_tls(tls::server_config(None, ClientCertificates::Required, &own.cert, &own.key).unwrap());
    let message = error(plain_server(tls_server.port, dir.path())).await;
    let expected = ["the server expects TLS: the url must begin with https://", "closed", "reset"];
    assert!(expected.iter().any(|part| message.contains(part)), "{message}");
}

#[tokio::test]
async fn rejected_certificates_are_reported() {
    let (dir, ca, other) = (tempfile::tempdir().unwrap(), Authority::new("ca"), Authority::new("other"));
    let own = ca.issue(&["127.0.0.1"]);
    let server = Server::start_tls(
        tls::server_config(Some(&ca.ca()), ClientCertificates::Required, &own.cert, &own.key).unwrap(),
    );
    let with = |host: &str, trusted: &Authority, issuer: Option<&Authority>| {
        let identity = issuer.map(|it| it.issue(&["g1"]));
        let (cert, key) = identity.map(|it| (it.cert, it.key)).unzip();
        let url = format!("https://{host}:{}", server.port);
        let cache = dir.path().join("policy.cache");
        PolicyServer { ca: Some(trusted.ca()), cert, key, cache, ..policy_server(&[&url]) }
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
        let message = error(config).await;
        assert!(message.contains(expected), "{message} / {expected}");
    }
}

#[tokio::test]
async fn a_renewed_certificate_is_used_for_the_next_connection() {
    let (dir, ca, other) = (tempfile::tempdir().unwrap(), Authority::new("ca"), Authority::new("other"));
    let own = ca.issue(&["127.0.0.1"]);
    let mut server = Server::start_tls(
        tls::server_config(Some(&ca.ca()), ClientCertificates::Required, &own.cert, &own.key).unwrap(),
    );
    let identity = other.issue(&["g1"]);
    let url = format!("https://127.0.0.1:{}", server.port);
    let (cert, key) = (Some(identity.cert.clone()), Some(identity.key.clone()));
    let cache = dir.path().join("policy.cache");
    let config = PolicyServer { ca: Some(ca.ca()), cert, key, cache, ..policy_server(&[&url]) };
    let (gateway, _) = Gateway::start(config);
    gateway.wait_for_status(|status| status.error.as_deref().is_some_and(|error| error.contains("UnknownCA"))).await;
    let renewed = ca.issue(&["g1"]);
    std::fs::copy(&renewed.key, &identity.key).unwrap();
    std::fs::copy(&renewed.cert, &identity.cert).unwrap();
    server.accept_stream().await.subscriptions().await;
    gateway.wait_for_status(|status| status.connected).await;
}
