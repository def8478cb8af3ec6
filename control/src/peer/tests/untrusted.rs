//! Unauthenticated peers and protocol violations.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use vipgate_dataplane::flow::ids::GatewayId;

use crate::peer::frame::{self, MAX_FRAME_BYTES};
use crate::peer::identity::{CERTIFICATE_NAME, Identity, Pins};
use crate::peer::proto::frame::Kind;
use crate::peer::proto::{Ack, Heartbeat, Hello, RelayedView, Sessions, SyncBegin, SyncEnd};
use crate::peer::replication::max_queued_bytes;
use crate::peer::tests::testbed::{Gateway, view_with_peer, wait_until};
use crate::peer::{LinkError, PeerMember};

/// Connects as "a" to the gateway "b".
async fn connect(identity: &Identity, gateway: &Gateway) -> std::io::Result<TlsStream<TcpStream>> {
    let pins = Arc::new(Pins::default());
    pins.set(BTreeMap::from([(Arc::from("b"), gateway.member.fingerprint.unwrap())]));
    let config = identity.client_config(pins, &Arc::from("b")).unwrap();
    let stream = TcpStream::connect(gateway.member.address.unwrap()).await?;
    TlsConnector::from(Arc::new(config)).connect(ServerName::try_from(CERTIFICATE_NAME).unwrap(), stream).await
}

fn hello(name: &str, incarnation: u64) -> Vec<u8> {
    successors_hello(name, incarnation, &[])
}

fn successors_hello(name: &str, incarnation: u64, predecessors: &[u64]) -> Vec<u8> {
    let (name, predecessors) = (name.to_owned(), predecessors.to_vec());
    frame::encode(Kind::Hello(Hello { min: 1, max: 1, name, incarnation, predecessors }))
}

/// A gateway "b" whose view pins this certificate for "a".
fn gateway_with_peer() -> (Gateway, Identity) {
    let (gateway, identity) = (Gateway::new("b"), Identity::generate().unwrap());
    gateway.peers.set_view(&view_with_peer(&gateway, Some(identity.fingerprint())));
    (gateway, identity)
}

/// The link error after a peer has sent these bytes.
async fn error_after(after_hello: bool, bytes: &[u8]) -> LinkError {
    let (gateway, identity) = gateway_with_peer();
    let mut stream = connect(&identity, &gateway).await.unwrap();
    if after_hello {
        stream.write_all(&hello("a", 7)).await.unwrap();
        gateway.wait_until("a", "linked", |peer| peer.linked).await;
    }
    stream.write_all(bytes).await.unwrap();
    stream.flush().await.unwrap();
    let status = gateway.wait_until("a", "rejected", |peer| peer.rejections == 1).await;
    assert!(!status.linked);
    // The connection is closed.
    let closed = tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut Vec::new())).await;
    assert!(closed.is_ok());
    status.last_failure.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_is_not_in_the_view_is_rejected() {
    let (gateway, _) = gateway_with_peer();
    let other = Identity::generate().unwrap();
    // With TLS 1.3 the client gets the alert when it reads.
    if let Ok(mut stream) = connect(&other, &gateway).await {
        assert!(stream.read_u8().await.is_err());
    }
    wait_until("counted", || gateway.peers.status().borrow().unauthenticated == 1).await;
    // A client that doesn't speak TLS.
    let mut plain = TcpStream::connect(gateway.member.address.unwrap()).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    wait_until("counted", || gateway.peers.status().borrow().unauthenticated == 2).await;
}

/// A silent connection from an address that no gateway has.
async fn connect_from_unknown_address(gateway: &Gateway) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.9:0".parse().unwrap()).unwrap();
    socket.connect(gateway.member.address.unwrap()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_unknown_addresses_use_no_handshake_slots() {
    let (gateway, identity) = gateway_with_peer();
    let mut unknown = Vec::new();
    for _ in 0..300 {
        unknown.push(connect_from_unknown_address(&gateway).await);
    }
    let mut peer = connect(&identity, &gateway).await.unwrap();
    peer.write_all(&hello("a", 7)).await.unwrap();
    gateway.wait_until("a", "linked", |peer| peer.linked).await;
    for stream in &mut unknown {
        let closed = tokio::time::timeout(Duration::from_secs(10), stream.read(&mut [0])).await;
        assert!(matches!(closed, Ok(Ok(0) | Err(_))), "its connection is closed: {closed:?}");
    }
    wait_until("counted", || gateway.peers.status().borrow().unauthenticated == 300).await;
    assert!(gateway.status("a").linked);
}

/// A silent connection from the address of a gateway.
async fn connect_from(address: &str, gateway: &Gateway) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(address.parse().unwrap()).unwrap();
    socket.connect(gateway.member.address.unwrap()).await.unwrap()
}

/// A host that shares a gateway's address, or a compromised gateway, keeps opening connections.
#[tokio::test(flavor = "multi_thread")]
async fn silent_connections_from_a_peer_address_use_no_slots_of_other_peers() {
    let (gateway, identity) = (Gateway::new("b"), Identity::generate().unwrap());
    let mut view = (*view_with_peer(&gateway, Some(identity.fingerprint()))).clone();
    let other = Some("127.0.0.2:9".parse().unwrap());
    view.members.push(PeerMember { name: "c".into(), address: other, fingerprint: None, active: true, incarnation: 7 });
    gateway.peers.set_view(&Arc::new(view));
    let mut silent = Vec::new();
    for _ in 0..200 {
        silent.push(connect_from("127.0.0.2:0", &gateway).await);
    }
    let start = Instant::now();
    let mut peer = connect(&identity, &gateway).await.unwrap();
    peer.write_all(&hello("a", 7)).await.unwrap();
    gateway.wait_until("a", "linked", |peer| peer.linked).await;
    println!("linked after {:?}", start.elapsed());
    // At most four of them are open at a time, and each only for a short time.
    for stream in silent.iter_mut().rev() {
        let closed = tokio::time::timeout(Duration::from_secs(10), stream.read(&mut [0])).await;
        assert!(matches!(closed, Ok(Ok(0) | Err(_))), "its connection is closed: {closed:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_handshake_ends_at_the_deadline() {
    let (gateway, identity) = gateway_with_peer();
    let mut slow = connect_from("127.0.0.1:0", &gateway).await;
    let start = Instant::now();
    // The header of a TLS handshake record of 512 bytes.
    slow.write_all(&[22, 3, 1, 2, 0, 1, 0, 1, 252]).await.unwrap();
    let ended = async {
        while slow.write_all(&[3]).await.is_ok() {
            let closed = tokio::time::timeout(Duration::from_millis(50), slow.read(&mut [0])).await;
            if matches!(closed, Ok(Ok(0) | Err(_))) {
                break;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(10), ended).await.expect("the handshake ends");
    println!("an endless handshake was ended after {:?}", start.elapsed());
    assert!(start.elapsed() >= Duration::from_millis(1500));
    let mut peer = connect(&identity, &gateway).await.unwrap();
    peer.write_all(&hello("a", 7)).await.unwrap();
    gateway.wait_until("a", "linked", |peer| peer.linked).await;
}

/// As after a pause of the process: the accept queue contains all connection attempts of a peer, the current one last.
#[tokio::test(flavor = "multi_thread")]
async fn of_many_connections_of_a_peer_the_newest_is_used() {
    let (gateway, identity) = gateway_with_peer();
    let mut attempts = Vec::new();
    for _ in 0..20 {
        attempts.push(TcpStream::connect(gateway.member.address.unwrap()).await.unwrap());
    }
    let mut peer = connect(&identity, &gateway).await.unwrap();
    peer.write_all(&hello("a", 7)).await.unwrap();
    gateway.wait_until("a", "linked", |peer| peer.linked).await;
    assert_eq!(gateway.peers.status().borrow().peers["a"].rejections, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn no_link_to_a_gateway_with_another_certificate() {
    let (a, mut b) = (Gateway::new("a"), Gateway::new("b"));
    b.member.fingerprint = a.member.fingerprint;
    crate::peer::tests::testbed::set_view(1, &[&a, &b]);
    let status = a.wait_until("b", "rejected", |peer| peer.rejections >= 2).await;
    assert_eq!(status.last_failure, Some(LinkError::UntrustedCertificate));
}

#[tokio::test(flavor = "multi_thread")]
async fn invalid_frames_end_the_link_and_are_counted() {
    let too_long = ((MAX_FRAME_BYTES + 1) as u32).to_be_bytes();
    assert_eq!(error_after(false, &too_long).await, LinkError::FrameTooLong(MAX_FRAME_BYTES + 1));
    assert_eq!(error_after(true, &too_long).await, LinkError::FrameTooLong(MAX_FRAME_BYTES + 1));
    assert!(matches!(error_after(false, &[0, 0, 0, 3, 0xff, 0xff, 0xff]).await, LinkError::InvalidFrame(_)));
    assert!(matches!(error_after(true, &[0, 0, 0, 3, 0xff, 0xff, 0xff]).await, LinkError::InvalidFrame(_)));
    // A first frame of an unknown kind, and a known one that isn't a Hello.
    assert!(matches!(error_after(false, &[0, 0, 0, 3, 0xaa, 0x06, 0]).await, LinkError::ProtocolViolation(_)));
    let heartbeat = frame::encode(Kind::Heartbeat(Heartbeat::default()));
    assert!(matches!(error_after(false, &heartbeat).await, LinkError::ProtocolViolation(_)));
    let ack = frame::encode(Kind::Ack(Ack { number: 99, refused: false }));
    assert!(matches!(error_after(true, &ack).await, LinkError::ProtocolViolation(_)));
    let relayed_view = frame::encode(Kind::RelayedView(RelayedView { view: vec![0xff; 9] }));
    assert!(matches!(error_after(true, &relayed_view).await, LinkError::InvalidFrame(_)));
    let end = frame::encode(Kind::SyncEnd(SyncEnd { number: 1, round: 3, policy: String::new() }));
    assert!(matches!(error_after(true, &end).await, LinkError::ProtocolViolation(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn name_and_incarnation_must_match_the_certificate() {
    assert!(matches!(error_after(false, &hello("c", 7)).await, LinkError::NameMismatch { .. }));
    assert_eq!(error_after(false, &hello("a", 8)).await, LinkError::IncarnationMismatch);
    let other = successors_hello("a", 8, &[5, 6]);
    assert_eq!(error_after(false, &other).await, LinkError::IncarnationMismatch, "it doesn't succeed the process 7");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frame_of_an_unknown_kind_is_ignored() {
    let (gateway, identity) = gateway_with_peer();
    let mut stream = connect(&identity, &gateway).await.unwrap();
    stream.write_all(&hello("a", 7)).await.unwrap();
    stream.write_all(&[0, 0, 0, 3, 0xaa, 0x06, 0]).await.unwrap();
    stream.write_all(&frame::encode(Kind::Heartbeat(Heartbeat { sequence: 1, view: 1 }))).await.unwrap();
    gateway.wait_until("a", "echoed", |peer| peer.echo_sent_at.is_some()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn another_process_with_the_same_name_does_not_replace_the_link() {
    let (gateway, identity) = gateway_with_peer();
    let mut first = connect(&identity, &gateway).await.unwrap();
    first.write_all(&hello("a", 7)).await.unwrap();
    gateway.wait_until("a", "linked", |peer| peer.linked).await;
    let mut second = connect(&identity, &gateway).await.unwrap();
    second.write_all(&hello("a", 8)).await.unwrap();
    let status = gateway.wait_until("a", "rejected", |peer| peer.rejections == 1).await;
    assert!(status.linked && status.last_failure == Some(LinkError::IncarnationMismatch));
    // The same process again, for example since its older connection is half-open.
    let mut third = connect(&identity, &gateway).await.unwrap();
    third.write_all(&hello("a", 7)).await.unwrap();
    first.read_to_end(&mut Vec::new()).await.unwrap();
    gateway.wait_until("a", "linked", |peer| peer.linked).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_silent_peer_is_down_after_four_heartbeats() {
    let (gateway, identity) = gateway_with_peer();
    let mut stream = connect(&identity, &gateway).await.unwrap();
    stream.write_all(&hello("a", 7)).await.unwrap();
    gateway.wait_until("a", "linked", |peer| peer.linked).await;
    let start = Instant::now();
    let status = gateway.wait_until("a", "down", |peer| !peer.linked).await;
    println!("a silent peer was down after {:?}", start.elapsed());
    assert_eq!(status.heartbeats_missed, 3);
    wait_until("reported", || gateway.status("a").last_failure == Some(LinkError::HeartbeatTimeout(400))).await;
    assert!(start.elapsed() >= Duration::from_millis(350));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_costs_bounded_memory() {
    let (gateway, identity) = gateway_with_peer();
    let mut stream = connect(&identity, &gateway).await.unwrap();
    stream.write_all(&hello("a", 7)).await.unwrap();
    gateway.wait_until("a", "linked", |peer| peer.linked).await;
    let tables = gateway.workers.clone();
    let opener = tokio::task::spawn_blocking(move || {
        for number in 0..200_000 {
            tables.open(1_000_000 + number, GatewayId(0));
            if number % 1000 == 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });
    // It sends heartbeats but acknowledges nothing.
    let (start, mut peak) = (Instant::now(), 0);
    while !opener.is_finished() || start.elapsed() < Duration::from_millis(500) {
        stream.write_all(&frame::encode(Kind::Heartbeat(Heartbeat { sequence: 1, view: 1 }))).await.unwrap();
        stream.flush().await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        peak = peak.max(gateway.status("a").replication.queued_bytes);
    }
    println!("at most {peak} bytes were queued for a peer that reads nothing");
    assert!(peak > 0 && peak <= max_queued_bytes(), "{peak}");
    assert!(gateway.status("a").linked);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_sender_that_exceeds_the_window_is_rejected() {
    let (gateway, identity) = gateway_with_peer();
    let mut stream = connect(&identity, &gateway).await.unwrap();
    stream.write_all(&hello("a", 7)).await.unwrap();
    let mut flood = frame::encode(Kind::SyncBegin(SyncBegin { number: 1, round: 1, view: 0, applied: Some(0) }));
    (2..2000).for_each(|number| flood.extend(frame::encode(Kind::Sessions(Sessions { number, sessions: Vec::new() }))));
    // The connection may be closed before everything is written.
    let _ = stream.write_all(&flood).await;
    gateway.wait_until("a", "rejected", |peer| peer.rejections == 1).await;
}
