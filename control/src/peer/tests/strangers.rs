//! Who comes without being of the view, or doesn't behave.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpSocket, TcpStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::pki_types::ServerName;
use vipgate_dataplane::snapshot::members::GatewayId;

use super::room::{Gateway, until, view_with};
use crate::peer::frame::{self, LONGEST};
use crate::peer::identity::{Identity, NAME, Pins};
use crate::peer::proto::frame::Kind;
use crate::peer::proto::{Ack, Beat, Hearsay, Hello, Sessions, SyncBegin, SyncEnd};
use crate::peer::replicate::outbound_limit;
use crate::peer::{Broken, Member};

/// Connects as "a" to a gateway that is "b".
async fn connect(identity: &Identity, gateway: &Gateway) -> std::io::Result<TlsStream<TcpStream>> {
    let pins = Arc::new(Pins::default());
    pins.set(BTreeMap::from([(Arc::from("b"), gateway.member.fingerprint.unwrap())]));
    let config = identity.client(pins, &Arc::from("b")).unwrap();
    let stream = TcpStream::connect(gateway.member.address.unwrap()).await?;
    TlsConnector::from(Arc::new(config)).connect(ServerName::try_from(NAME).unwrap(), stream).await
}

fn hello(name: &str, incarnation: u64) -> Vec<u8> {
    frame::encode(Kind::Hello(Hello { min: 1, max: 1, name: name.to_owned(), incarnation }))
}

/// A gateway that lets this certificate in as "a".
fn room() -> (Gateway, Identity) {
    let (gateway, identity) = (Gateway::new("b"), Identity::generate().unwrap());
    gateway.peers.set_view(&view_with(&gateway, Some(identity.fingerprint())));
    (gateway, identity)
}

/// What is said of a stranger that sends this.
async fn said(after_hello: bool, bytes: &[u8]) -> Broken {
    let (gateway, identity) = room();
    let mut stream = connect(&identity, &gateway).await.unwrap();
    if after_hello {
        stream.write_all(&hello("a", 7)).await.unwrap();
        gateway.until("a", "linked", |peer| peer.linked).await;
    }
    stream.write_all(bytes).await.unwrap();
    stream.flush().await.unwrap();
    let status = gateway.until("a", "refused", |peer| peer.refused == 1).await;
    assert!(!status.linked);
    // The connection is closed.
    let closed = tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut Vec::new())).await;
    assert!(closed.is_ok());
    status.last_failure.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_that_the_view_does_not_name_is_refused() {
    let (gateway, _) = room();
    let other = Identity::generate().unwrap();
    // In TLS 1.3 the client hears of it when it reads.
    if let Ok(mut stream) = connect(&other, &gateway).await {
        assert!(stream.read_u8().await.is_err());
    }
    until("counted", || gateway.peers.status().borrow().strangers == 1).await;
    // Who doesn't speak TLS either.
    let mut plain = TcpStream::connect(gateway.member.address.unwrap()).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\n\r\n").await.unwrap();
    until("counted", || gateway.peers.status().borrow().strangers == 2).await;
}

/// Says nothing, from an address that no gateway has.
async fn silent_stranger(gateway: &Gateway) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.9:0".parse().unwrap()).unwrap();
    socket.connect(gateway.member.address.unwrap()).await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn silent_strangers_use_up_no_handshakes_however_many_they_are() {
    let (gateway, identity) = room();
    let mut strangers = Vec::new();
    for _ in 0..300 {
        strangers.push(silent_stranger(&gateway).await);
    }
    let mut peer = connect(&identity, &gateway).await.unwrap();
    peer.write_all(&hello("a", 7)).await.unwrap();
    gateway.until("a", "linked", |peer| peer.linked).await;
    for stranger in &mut strangers {
        let closed = tokio::time::timeout(Duration::from_secs(10), stranger.read(&mut [0])).await;
        assert!(matches!(closed, Ok(Ok(0) | Err(_))), "its connection is closed: {closed:?}");
    }
    until("counted", || gateway.peers.status().borrow().strangers == 300).await;
    assert!(gateway.status("a").linked);
}

/// Says nothing, from the address of a gateway.
async fn connect_from(address: &str, gateway: &Gateway) -> TcpStream {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(address.parse().unwrap()).unwrap();
    socket.connect(gateway.member.address.unwrap()).await.unwrap()
}

/// Somebody behind a gateway's address, or a gateway that was taken over, opens connections without end.
#[tokio::test(flavor = "multi_thread")]
async fn a_silent_host_at_a_gateways_address_takes_none_of_the_others_places() {
    let (gateway, identity) = (Gateway::new("b"), Identity::generate().unwrap());
    let mut view = (*view_with(&gateway, Some(identity.fingerprint()))).clone();
    let other = Some("127.0.0.2:9".parse().unwrap());
    view.members.push(Member { name: "c".into(), address: other, fingerprint: None, serving: true, incarnation: 7 });
    gateway.peers.set_view(&Arc::new(view));
    let mut silent = Vec::new();
    for _ in 0..200 {
        silent.push(connect_from("127.0.0.2:0", &gateway).await);
    }
    let begun = Instant::now();
    let mut peer = connect(&identity, &gateway).await.unwrap();
    peer.write_all(&hello("a", 7)).await.unwrap();
    gateway.until("a", "linked", |peer| peer.linked).await;
    println!("linked after {:?}", begun.elapsed());
    // Four of them are open at a time, and none for long.
    for stream in silent.iter_mut().rev() {
        let closed = tokio::time::timeout(Duration::from_secs(10), stream.read(&mut [0])).await;
        assert!(matches!(closed, Ok(Ok(0) | Err(_))), "its connection is closed: {closed:?}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handshake_that_comes_byte_by_byte_ends_at_the_deadline() {
    let (gateway, identity) = room();
    let mut slow = connect_from("127.0.0.1:0", &gateway).await;
    let begun = Instant::now();
    // A record of a handshake, of 512 bytes, as TLS begins.
    slow.write_all(&[22, 3, 1, 2, 0, 1, 0, 1, 252]).await.unwrap();
    let ended = async {
        while slow.write_all(&[3]).await.is_ok() {
            let closed = tokio::time::timeout(Duration::from_millis(50), slow.read(&mut [0])).await;
            if matches!(closed, Ok(Ok(0) | Err(_))) {
                break;
            }
        }
    };
    tokio::time::timeout(Duration::from_secs(10), ended).await.expect("it ends");
    println!("a handshake that goes on and on was ended after {:?}", begun.elapsed());
    assert!(begun.elapsed() >= Duration::from_millis(1500));
    let mut peer = connect(&identity, &gateway).await.unwrap();
    peer.write_all(&hello("a", 7)).await.unwrap();
    gateway.until("a", "linked", |peer| peer.linked).await;
}

/// As a gateway that was stopped finds it: all that another one has tried meanwhile, and behind that what it means now.
#[tokio::test(flavor = "multi_thread")]
async fn of_many_connections_of_a_gateway_the_newest_is_meant() {
    let (gateway, identity) = room();
    let mut tried = Vec::new();
    for _ in 0..20 {
        tried.push(TcpStream::connect(gateway.member.address.unwrap()).await.unwrap());
    }
    let mut peer = connect(&identity, &gateway).await.unwrap();
    peer.write_all(&hello("a", 7)).await.unwrap();
    gateway.until("a", "linked", |peer| peer.linked).await;
    assert_eq!(gateway.peers.status().borrow().peers["a"].refused, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_gateway_with_another_certificate_is_not_linked_to() {
    let (a, mut b) = (Gateway::new("a"), Gateway::new("b"));
    b.member.fingerprint = a.member.fingerprint;
    super::room::enter(1, &[&a, &b]);
    let status = a.until("b", "refused", |peer| peer.refused >= 2).await;
    assert_eq!(status.last_failure, Some(Broken::Unpinned));
}

#[tokio::test(flavor = "multi_thread")]
async fn nonsense_ends_the_link_and_is_counted() {
    let long = ((LONGEST + 1) as u32).to_be_bytes();
    assert_eq!(said(false, &long).await, Broken::TooLong(LONGEST + 1));
    assert_eq!(said(true, &long).await, Broken::TooLong(LONGEST + 1));
    assert!(matches!(said(false, &[0, 0, 0, 3, 0xff, 0xff, 0xff]).await, Broken::Garbage(_)));
    assert!(matches!(said(true, &[0, 0, 0, 3, 0xff, 0xff, 0xff]).await, Broken::Garbage(_)));
    // A first frame of a kind that nobody knows, and one that isn't first.
    assert!(matches!(said(false, &[0, 0, 0, 3, 0xaa, 0x06, 0]).await, Broken::Protocol(_)));
    let beat = frame::encode(Kind::Beat(Beat::default()));
    assert!(matches!(said(false, &beat).await, Broken::Protocol(_)));
    let ack = frame::encode(Kind::Ack(Ack { number: 99, refused: false }));
    assert!(matches!(said(true, &ack).await, Broken::Protocol(_)));
    let hearsay = frame::encode(Kind::Hearsay(Hearsay { view: vec![0xff; 9] }));
    assert!(matches!(said(true, &hearsay).await, Broken::Garbage(_)));
    let end = frame::encode(Kind::SyncEnd(SyncEnd { number: 1, round: 3 }));
    assert!(matches!(said(true, &end).await, Broken::Protocol(_)));
}

#[tokio::test(flavor = "multi_thread")]
async fn who_is_not_who_the_certificate_says_is_refused() {
    assert!(matches!(said(false, &hello("c", 7)).await, Broken::Name { .. }));
    assert_eq!(said(false, &hello("a", 8)).await, Broken::Incarnation);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_kind_of_frame_is_passed_over() {
    let (gateway, identity) = room();
    let mut stream = connect(&identity, &gateway).await.unwrap();
    stream.write_all(&hello("a", 7)).await.unwrap();
    stream.write_all(&[0, 0, 0, 3, 0xaa, 0x06, 0]).await.unwrap();
    stream.write_all(&frame::encode(Kind::Beat(Beat { sequence: 1, view: 1 }))).await.unwrap();
    gateway.until("a", "echoed", |peer| peer.promised.is_some()).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_name_of_a_link_is_not_taken_by_another_process() {
    let (gateway, identity) = room();
    let mut first = connect(&identity, &gateway).await.unwrap();
    first.write_all(&hello("a", 7)).await.unwrap();
    gateway.until("a", "linked", |peer| peer.linked).await;
    let mut second = connect(&identity, &gateway).await.unwrap();
    second.write_all(&hello("a", 8)).await.unwrap();
    let status = gateway.until("a", "refused", |peer| peer.refused == 1).await;
    assert!(status.linked && status.last_failure == Some(Broken::Incarnation));
    // The same process again: the older connection is half dead, and it knows.
    let mut third = connect(&identity, &gateway).await.unwrap();
    third.write_all(&hello("a", 7)).await.unwrap();
    first.read_to_end(&mut Vec::new()).await.unwrap();
    gateway.until("a", "linked", |peer| peer.linked).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn who_says_nothing_is_down_after_four_beats() {
    let (gateway, identity) = room();
    let mut stream = connect(&identity, &gateway).await.unwrap();
    stream.write_all(&hello("a", 7)).await.unwrap();
    gateway.until("a", "linked", |peer| peer.linked).await;
    let begin = Instant::now();
    let status = gateway.until("a", "down", |peer| !peer.linked).await;
    println!("a silent gateway was down after {:?}", begin.elapsed());
    assert_eq!(status.beats_missed, 3);
    until("said", || gateway.status("a").last_failure == Some(Broken::Silent(400))).await;
    assert!(begin.elapsed() >= Duration::from_millis(350));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_slow_reader_costs_bounded_memory() {
    let (gateway, identity) = room();
    let mut stream = connect(&identity, &gateway).await.unwrap();
    stream.write_all(&hello("a", 7)).await.unwrap();
    gateway.until("a", "linked", |peer| peer.linked).await;
    let tables = gateway.tables.clone();
    let opener = tokio::task::spawn_blocking(move || {
        for number in 0..200_000 {
            tables.open(1_000_000 + number, GatewayId(0));
            if number % 1000 == 0 {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    });
    // It lives, and acknowledges nothing.
    let (begin, mut most) = (Instant::now(), 0);
    while !opener.is_finished() || begin.elapsed() < Duration::from_millis(500) {
        stream.write_all(&frame::encode(Kind::Beat(Beat { sequence: 1, view: 1 }))).await.unwrap();
        stream.flush().await.unwrap();
        tokio::time::sleep(Duration::from_millis(20)).await;
        most = most.max(gateway.status("a").copies.queued);
    }
    println!("at most {most} bytes waited for a gateway that takes nothing");
    assert!(most > 0 && most <= outbound_limit(), "{most}");
    assert!(gateway.status("a").linked);
}

#[tokio::test(flavor = "multi_thread")]
async fn who_sends_without_waiting_for_acknowledgements_is_refused() {
    let (gateway, identity) = room();
    let mut stream = connect(&identity, &gateway).await.unwrap();
    stream.write_all(&hello("a", 7)).await.unwrap();
    let mut flood = frame::encode(Kind::SyncBegin(SyncBegin { number: 1, round: 1, view: 0 }));
    (2..2000).for_each(|number| flood.extend(frame::encode(Kind::Sessions(Sessions { number, sessions: Vec::new() }))));
    // It may be gone before it has all.
    let _ = stream.write_all(&flood).await;
    gateway.until("a", "refused", |peer| peer.refused == 1).await;
}
