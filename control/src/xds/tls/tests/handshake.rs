//! Handshakes: accepted and rejected certificates, with the errors on both sides.

use std::fs;

use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;

/// Outcome of a handshake and an exchange on each side: the data received from the peer, or the error.
#[derive(Debug)]
struct Outcome {
    server: Result<String, String>,
    client: Result<String, String>,
}

async fn connect(server: ServerConfig, client: ClientConfig, name: &str) -> Outcome {
    let (client_io, server_io) = duplex(1 << 16);
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let server = async move {
        let mut stream = TlsAcceptor::from(Arc::new(server)).accept(server_io).await?;
        let mut received = [0; 4];
        stream.read_exact(&mut received).await?;
        stream.write_all(b"pong").await?;
        stream.shutdown().await?;
        Ok(String::from_utf8_lossy(&received).into_owned())
    };
    let client = async move {
        let mut stream = TlsConnector::from(Arc::new(client)).connect(name, client_io).await?;
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(b"h2".as_slice()));
        stream.write_all(b"ping").await?;
        let mut received = [0; 4];
        stream.read_exact(&mut received).await?;
        Ok(String::from_utf8_lossy(&received).into_owned())
    };
    let (server, client): (io::Result<_>, io::Result<_>) = tokio::join!(server, client);
    Outcome { server: server.map_err(|error| error.to_string()), client: client.map_err(|error| error.to_string()) }
}

impl Outcome {
    fn is_ok(&self) -> bool {
        self.server.as_deref() == Ok("ping") && self.client.as_deref() == Ok("pong")
    }

    /// Expects these errors on both sides.
    fn expect_errors(&self, server: &str, client: &str) {
        for (result, expected) in [(&self.server, server), (&self.client, client)] {
            let error = result.as_ref().unwrap_err();
            assert!(error.contains(expected), "{error} / {expected}");
        }
    }
}

/// A server with the certificate `own` that requires clients to have one signed by `ca`, if any.
fn server_with(own: &Identity, ca: Option<&Authority>) -> ServerConfig {
    let ca = ca.map(Authority::ca);
    server_config(ca.as_deref(), ClientCertificates::Required, &own.cert, &own.key).unwrap()
}

/// A client that trusts `ca`, with the certificate `own`, if any.
fn client_with(ca: &Authority, own: Option<&Identity>) -> ClientConfig {
    client_config(Some(&ca.ca()), own.map(Identity::paths)).unwrap()
}

#[tokio::test]
async fn valid_certificates_are_accepted() {
    let ca = Authority::new("ca");
    let (own, gateway) = (ca.issue(&["policy.example", "192.0.2.1", "2001:db8::1"]), ca.issue(&["g1"]));
    for name in ["policy.example", "192.0.2.1", "2001:db8::1"] {
        assert!(connect(server_with(&own, None), client_with(&ca, None), name).await.is_ok());
        assert!(connect(server_with(&own, Some(&ca)), client_with(&ca, Some(&gateway)), name).await.is_ok());
    }
    // A server that requests no certificate accepts a client that has one.
    assert!(connect(server_with(&own, None), client_with(&ca, Some(&gateway)), "policy.example").await.is_ok());
}

#[tokio::test]
async fn a_server_certificate_of_another_ca_is_rejected() {
    let (ca, other) = (Authority::new("ca"), Authority::new("other"));
    let own = other.issue(&["policy.example"]);
    let outcome = connect(server_with(&own, None), client_with(&ca, None), "policy.example").await;
    outcome.expect_errors("received fatal alert: UnknownCA", "invalid peer certificate: UnknownIssuer");
}

#[tokio::test]
async fn a_server_certificate_with_another_name_is_rejected() {
    let ca = Authority::new("ca");
    let own = ca.issue(&["policy.example"]);
    for name in ["other.example", "192.0.2.1"] {
        let outcome = connect(server_with(&own, None), client_with(&ca, None), name).await;
        outcome.expect_errors("received fatal alert: BadCertificate", "certificate not valid for name");
    }
}

#[tokio::test]
async fn an_expired_server_certificate_is_rejected() {
    let ca = Authority::new("ca");
    let own = ca.issue_expired(&["policy.example"]);
    let outcome = connect(server_with(&own, None), client_with(&ca, None), "policy.example").await;
    outcome.expect_errors("received fatal alert: CertificateExpired", "certificate expired");
}

#[tokio::test]
async fn a_client_without_a_certificate_is_rejected() {
    let ca = Authority::new("ca");
    let own = ca.issue(&["policy.example"]);
    let outcome = connect(server_with(&own, Some(&ca)), client_with(&ca, None), "policy.example").await;
    outcome.expect_errors("peer sent no certificates", "received fatal alert: CertificateRequired");
}

#[tokio::test]
async fn a_client_certificate_of_another_ca_is_rejected() {
    let (ca, other) = (Authority::new("ca"), Authority::new("other"));
    let (own, gateway) = (ca.issue(&["policy.example"]), other.issue(&["g1"]));
    let outcome = connect(server_with(&own, Some(&ca)), client_with(&ca, Some(&gateway)), "policy.example").await;
    outcome.expect_errors("invalid peer certificate: UnknownIssuer", "received fatal alert: UnknownCA");
}

#[tokio::test]
async fn an_expired_client_certificate_is_rejected() {
    let ca = Authority::new("ca");
    let (own, gateway) = (ca.issue(&["policy.example"]), ca.issue_expired(&["g1"]));
    let outcome = connect(server_with(&own, Some(&ca)), client_with(&ca, Some(&gateway)), "policy.example").await;
    outcome.expect_errors("certificate expired", "received fatal alert: CertificateExpired");
}

#[tokio::test]
async fn a_client_without_a_common_alpn_protocol_is_rejected() {
    let ca = Authority::new("ca");
    let own = ca.issue(&["policy.example"]);
    let mut client = client_with(&ca, None);
    client.alpn_protocols = vec![b"http/1.1".to_vec()];
    let outcome = connect(server_with(&own, None), client, "policy.example").await;
    outcome.expect_errors("peer doesn't support any known protocol", "received fatal alert: NoApplicationProtocol");
}

#[tokio::test]
async fn a_renewed_file_is_used_for_the_next_connection() {
    let ca = Authority::new("ca");
    let own = ca.issue_expired(&["policy.example"]);
    let old = server_with(&own, None);
    let renewed = ca.issue(&["policy.example"]);
    assert_eq!(own.cert, renewed.cert);
    connect(old, client_with(&ca, None), "policy.example")
        .await
        .expect_errors("CertificateExpired", "certificate expired");
    assert!(connect(server_with(&own, None), client_with(&ca, None), "policy.example").await.is_ok());
}

#[tokio::test]
async fn a_ca_file_may_hold_several_cas() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let both = [old.ca(), new.ca()].map(|ca| fs::read_to_string(ca).unwrap()).concat();
    let both = new.file("both.pem", &both);
    for authority in [&old, &new] {
        let config = client_config(Some(&both), None).unwrap();
        assert!(
            connect(server_with(&authority.issue(&["policy.example"]), None), config, "policy.example").await.is_ok()
        );
    }
}
