//! Who gets in, who doesn't, and why.

use std::fs;

use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
use tokio_rustls::rustls::pki_types::ServerName;
use tokio_rustls::{TlsAcceptor, TlsConnector};

use super::*;

/// What came of it on each side: what each has heard from the other, or why it hasn't.
#[derive(Debug)]
struct Met {
    server: Result<String, String>,
    client: Result<String, String>,
}

async fn meet(server: ServerConfig, client: ClientConfig, name: &str) -> Met {
    let (near, far) = duplex(1 << 16);
    let name = ServerName::try_from(name.to_owned()).unwrap();
    let serve = async move {
        let mut stream = TlsAcceptor::from(Arc::new(server)).accept(far).await?;
        let mut heard = [0; 4];
        stream.read_exact(&mut heard).await?;
        stream.write_all(b"pong").await?;
        stream.shutdown().await?;
        Ok(String::from_utf8_lossy(&heard).into_owned())
    };
    let call = async move {
        let mut stream = TlsConnector::from(Arc::new(client)).connect(name, near).await?;
        assert_eq!(stream.get_ref().1.alpn_protocol(), Some(b"h2".as_slice()));
        stream.write_all(b"ping").await?;
        let mut heard = [0; 4];
        stream.read_exact(&mut heard).await?;
        Ok(String::from_utf8_lossy(&heard).into_owned())
    };
    let (server, client): (io::Result<_>, io::Result<_>) = tokio::join!(serve, call);
    Met { server: server.map_err(|error| error.to_string()), client: client.map_err(|error| error.to_string()) }
}

impl Met {
    fn is_good(&self) -> bool {
        self.server.as_deref() == Ok("ping") && self.client.as_deref() == Ok("pong")
    }

    /// Both sides say why not, with these words.
    fn fails_for(&self, server: &str, client: &str) {
        for (said, expected) in [(&self.server, server), (&self.client, client)] {
            let said = said.as_ref().unwrap_err();
            assert!(said.contains(expected), "{said} / {expected}");
        }
    }
}

/// A server that shows `own`, and lets in whom `ca` has signed.
fn shows(own: &Identity, ca: Option<&Authority>) -> ServerConfig {
    let ca = ca.map(Authority::ca);
    server(ca.as_deref(), &own.cert, &own.key).unwrap()
}

/// A client that trusts `ca`, and shows `own`.
fn trusts(ca: &Authority, own: Option<&Identity>) -> ClientConfig {
    client(Some(&ca.ca()), own.map(Identity::paths)).unwrap()
}

#[tokio::test]
async fn both_sides_know_each_other() {
    let ca = Authority::new("ca");
    let (own, gateway) = (ca.issue(&["policy.example", "192.0.2.1", "2001:db8::1"]), ca.issue(&["g1"]));
    for name in ["policy.example", "192.0.2.1", "2001:db8::1"] {
        assert!(meet(shows(&own, None), trusts(&ca, None), name).await.is_good());
        assert!(meet(shows(&own, Some(&ca)), trusts(&ca, Some(&gateway)), name).await.is_good());
    }
    // A server that asks nobody lets in those who would show one.
    assert!(meet(shows(&own, None), trusts(&ca, Some(&gateway)), "policy.example").await.is_good());
}

#[tokio::test]
async fn a_server_that_another_authority_has_signed_is_not_trusted() {
    let (ca, other) = (Authority::new("ca"), Authority::new("other"));
    let own = other.issue(&["policy.example"]);
    let met = meet(shows(&own, None), trusts(&ca, None), "policy.example").await;
    met.fails_for("received fatal alert: UnknownCA", "invalid peer certificate: UnknownIssuer");
}

#[tokio::test]
async fn a_server_of_another_name_is_not_trusted() {
    let ca = Authority::new("ca");
    let own = ca.issue(&["policy.example"]);
    for name in ["other.example", "192.0.2.1"] {
        let met = meet(shows(&own, None), trusts(&ca, None), name).await;
        met.fails_for("received fatal alert: BadCertificate", "certificate not valid for name");
    }
}

#[tokio::test]
async fn a_server_of_former_times_is_not_trusted() {
    let ca = Authority::new("ca");
    let own = ca.issue_expired(&["policy.example"]);
    let met = meet(shows(&own, None), trusts(&ca, None), "policy.example").await;
    met.fails_for("received fatal alert: CertificateExpired", "certificate expired");
}

#[tokio::test]
async fn a_client_that_shows_nothing_is_not_let_in() {
    let ca = Authority::new("ca");
    let own = ca.issue(&["policy.example"]);
    let met = meet(shows(&own, Some(&ca)), trusts(&ca, None), "policy.example").await;
    met.fails_for("peer sent no certificates", "received fatal alert: CertificateRequired");
}

#[tokio::test]
async fn a_client_that_another_authority_has_signed_is_not_let_in() {
    let (ca, other) = (Authority::new("ca"), Authority::new("other"));
    let (own, gateway) = (ca.issue(&["policy.example"]), other.issue(&["g1"]));
    let met = meet(shows(&own, Some(&ca)), trusts(&ca, Some(&gateway)), "policy.example").await;
    met.fails_for("invalid peer certificate: UnknownIssuer", "received fatal alert: UnknownCA");
}

#[tokio::test]
async fn a_client_of_former_times_is_not_let_in() {
    let ca = Authority::new("ca");
    let (own, gateway) = (ca.issue(&["policy.example"]), ca.issue_expired(&["g1"]));
    let met = meet(shows(&own, Some(&ca)), trusts(&ca, Some(&gateway)), "policy.example").await;
    met.fails_for("certificate expired", "received fatal alert: CertificateExpired");
}

#[tokio::test]
async fn who_speaks_another_protocol_is_not_let_in() {
    let ca = Authority::new("ca");
    let own = ca.issue(&["policy.example"]);
    let mut client = trusts(&ca, None);
    client.alpn_protocols = vec![b"http/1.1".to_vec()];
    let met = meet(shows(&own, None), client, "policy.example").await;
    met.fails_for("peer doesn't support any known protocol", "received fatal alert: NoApplicationProtocol");
}

#[tokio::test]
async fn a_renewed_file_counts_from_the_next_time_on() {
    let ca = Authority::new("ca");
    let own = ca.issue_expired(&["policy.example"]);
    let old = shows(&own, None);
    let renewed = ca.issue(&["policy.example"]);
    assert_eq!(own.cert, renewed.cert);
    meet(old, trusts(&ca, None), "policy.example").await.fails_for("CertificateExpired", "certificate expired");
    assert!(meet(shows(&own, None), trusts(&ca, None), "policy.example").await.is_good());
}

#[tokio::test]
async fn several_authorities_may_be_trusted() {
    let (old, new) = (Authority::new("old"), Authority::new("new"));
    let both = [old.ca(), new.ca()].map(|ca| fs::read_to_string(ca).unwrap()).concat();
    let both = new.file("both.pem", &both);
    for authority in [&old, &new] {
        let config = client(Some(&both), None).unwrap();
        assert!(meet(shows(&authority.issue(&["policy.example"]), None), config, "policy.example").await.is_good());
    }
}
