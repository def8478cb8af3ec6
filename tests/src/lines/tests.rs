//! Lines, and clients with their server over loopback.

use std::io;
use std::net::{Ipv6Addr, SocketAddr, TcpListener};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::sleep;

use super::server::{Server, count_line, new_record};
use super::{block_on, clients, decode, encode, take_lines};
use crate::cluster::{Client, ClientConfig, ServerRecord};

/// Clients of each protocol and family.
const COUNT: u32 = 50;

/// A server, and its port.
fn bind_server() -> (Server, u16) {
    let bind = |_| {
        let port = TcpListener::bind((Ipv6Addr::UNSPECIFIED, 0)).unwrap().local_addr().unwrap().port();
        Server::bind(port).ok().map(|server| (server, port))
    };
    // That of datagrams may be in use.
    (0..100).find_map(bind).expect("a port is free")
}

/// Runs a server, and clients of it one configuration after the other, with identities in the same order; the results
/// of each, and what the server has seen.
fn run(configs: Vec<ClientConfig<'static>>) -> (Vec<Vec<Client>>, Vec<ServerRecord>) {
    let outcome = block_on(async {
        let (server, port) = bind_server();
        let (stop, stopped) = oneshot::channel::<()>();
        let traffic = async {
            let mut results = Vec::new();
            for (number, config) in (0..).zip(configs) {
                let config = ClientConfig { server: (config.server.0, port), ..config };
                // With a number of lines, they end on their own.
                let time = Duration::from_millis(if config.lines > 0 { 10_000 } else { 800 });
                results.push(clients::run(10_000_000 + number * COUNT, config, sleep(time)).await?);
            }
            drop(stop);
            Ok::<_, io::Error>(results)
        };
        let stopped = async {
            let _ = stopped.await;
        };
        tokio::try_join!(traffic, server.run(stopped))
    });
    outcome.unwrap()
}

fn config(address: &'static str, udp: bool) -> ClientConfig<'static> {
    let intervals = vec![(20, 0.01, 0.02), (80, 0.05, 0.1)];
    ClientConfig { server: (address, 0), count: COUNT, udp, intervals, ..ClientConfig::default() }
}

#[test]
fn every_client_gets_its_own_lines_back() {
    let sets = [("127.0.0.1", false), ("127.0.0.1", true), ("::1", false), ("::1", true)];
    let (results, records) = run(sets.iter().map(|(address, udp)| config(address, *udp)).collect());
    for ((address, udp), clients) in sets.into_iter().zip(results) {
        assert_eq!(clients.len(), COUNT as usize);
        for client in clients {
            let [sent, answered] = client.lines;
            assert!(client.end == "alive" && client.misdelivered == 0 && answered > 1, "{address}: {client:?}");
            assert_eq!(sent - answered, client.lost.len() as u64, "{address}: {client:?}");
            assert!(udp || client.lost.is_empty(), "{address}: {client:?}");
            let seen: Vec<&ServerRecord> = records.iter().filter(|it| it.identity == client.identity).collect();
            let [record] = seen[..] else { panic!("{address}: {client:?} is {seen:?} at the server") };
            assert!(record.udp == udp && record.peer.0 == address && record.local == address, "{record:?}");
            assert!((answered..=sent).contains(&record.lines) && record.errors == 0, "{client:?}: {record:?}");
        }
    }
    assert_eq!(records.len(), 4 * COUNT as usize);
}

#[test]
fn clients_with_a_number_of_lines_end_and_may_keep_their_ports() {
    let fixed = |udp| ClientConfig {
        lines: 3,
        max_concurrent: 20,
        rate: 100_000,
        keep_port: udp,
        source_addresses: vec!["127.0.0.2".to_owned(), "127.0.0.3".to_owned()],
        intervals: vec![(100, 0.01, 0.01)],
        ..config("127.0.0.1", udp)
    };
    let (results, records) = run(vec![fixed(false), fixed(true)]);
    for client in results.iter().flatten() {
        assert!(client.end == "done" && client.lines == [3, 3] && client.misdelivered == 0, "{client:?}");
        let record = records.iter().find(|record| record.identity == client.identity).unwrap();
        assert!(record.lines == 3 && record.errors == 0 && record.peer.0 == client.source, "{client:?}: {record:?}");
    }
    let mut ports: Vec<(&str, u16)> =
        records.iter().filter(|record| record.udp).map(|record| (record.peer.0.as_str(), record.peer.1)).collect();
    ports.sort_unstable();
    ports.dedup();
    assert_eq!(ports.len(), COUNT as usize, "each has its own");
}

#[test]
fn clients_without_a_server_fail() {
    let port = TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
    for (udp, end) in [(false, "connect: Connection refused (os error 111)"), (true, "silent")] {
        let config = ClientConfig { server: ("127.0.0.1", port), lines: 1, timeout: 1, ..config("", udp) };
        let run = async { clients::run(10_000_000, config, sleep(Duration::from_secs(10))).await };
        let clients = block_on(run).unwrap();
        assert!(clients.iter().all(|client| client.end == end && client.lines[1] == 0), "{clients:?}");
    }
}

#[test]
fn a_line_is_decoded_as_it_was_encoded() {
    for (number, length) in [(0, 0), (7, 16), (999_999, 17), (1_000_000, 16), (42, 1_400)] {
        let line = encode(17, number, length);
        assert!(line.len() >= length && line.ends_with(b"\n"), "{line:?}");
        assert_eq!(decode(&line[..line.len() - 1]), Some((17, number)));
    }
    assert_eq!(encode(17, 42, 20), b"00000017 000042....\n");
    for other in ["", "00000017", "00000017 ", "00000017 x", "0000017 000042", "GET / HTTP/1.1"] {
        assert_eq!(decode(other.as_bytes()), None, "{other}");
    }
}

#[test]
fn lines_are_whole_however_they_arrive() {
    let (mut buffer, mut lines) = (Vec::new(), Vec::new());
    for part in ["a", "bc\nde", "\n", "\nf\ng"] {
        buffer.extend_from_slice(part.as_bytes());
        take_lines(&mut buffer, |line| lines.push(String::from_utf8(line.to_vec()).unwrap()));
    }
    assert_eq!((lines.join("|"), buffer), ("abc|de||f".to_owned(), b"g".to_vec()));
}

#[test]
fn lines_of_another_client_and_lost_ones_are_errors() {
    let from: [SocketAddr; 2] = ["[::ffff:192.0.2.10]:1025".parse().unwrap(), "[::1]:7700".parse().unwrap()];
    let errors = |lines: &[&str]| {
        let (mut record, mut expected) = (new_record(false, from[0], from[1].ip()), None);
        for line in lines {
            count_line(&mut record, &mut expected, line.as_bytes());
        }
        assert_eq!((record.lines, &*record.peer.0), (lines.len() as u64, "192.0.2.10"));
        (record.identity, record.errors)
    };
    let counted = |identity: &str, count| (identity.to_owned(), count);
    assert_eq!(errors(&["00000017 000000", "00000017 000001", "00000017 000002"]), counted("00000017", 0));
    assert_eq!(errors(&["00000017 000000", "00000018 000001", "00000017 000002"]), counted("00000017", 1));
    assert_eq!(errors(&["00000017 000000", "00000017 000002"]), counted("00000017", 1));
    assert_eq!(errors(&["GET / HTTP/1.1", ""]), counted("GET / HT", 2));
}
