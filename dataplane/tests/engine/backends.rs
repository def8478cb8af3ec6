//! Which backend a client gets, and what becomes of that while backends come, drain and go.

use std::collections::HashMap;
use std::net::{IpAddr, SocketAddr};

use crate::support::services::*;
use crate::support::*;
use vipgate_dataplane::address::Address;
use vipgate_dataplane::command::{Command, SessionChunk, SessionFilter, SessionState};
use vipgate_dataplane::counters::{Direction, DropReason};
use vipgate_dataplane::snapshot::spec::*;

const ONE: &str = "10.244.1.5";
const TWO: &str = "10.244.1.6";
const THREE: &str = "10.244.1.7";

fn three() -> [BackendSpec; 3] {
    [ONE, TWO, THREE].map(backend)
}

/// The backend of each of many new sessions, from ports of one client.
fn chosen(gateway: &mut Gateway, ports: std::ops::Range<u16>) -> Vec<IpAddr> {
    ports.map(|n| gateway.client_sends(&packet(Protocol::Udp, client(n), vip(53))).ip()).collect()
}

fn counts(chosen: &[IpAddr]) -> HashMap<IpAddr, usize> {
    chosen.iter().fold(HashMap::new(), |mut counts, backend| {
        *counts.entry(*backend).or_default() += 1;
        counts
    })
}

#[test]
fn every_gateway_makes_the_same_choice() {
    let mut one = Gateway::with_service(&Setup::default(), &service(&three()));
    let mut other = Gateway::with_service(&Setup { workers: 2, ..Setup::default() }, &service(&three()));
    let choice = chosen(&mut one, 1000..2000);
    assert_eq!(choice, chosen(&mut other, 1000..2000));
    assert!(counts(&choice).values().all(|count| (270..400).contains(count)), "{:?}", counts(&choice));
    one.assert_delta("inbound 1000, created 1000");
    other.assert_delta("inbound 1000, created 1000");
}

#[test]
fn weights_are_parts_of_new_sessions() {
    let mut backends = three();
    for (backend, weight) in backends.iter_mut().zip([0, 1, 3]) {
        backend.weight = weight;
    }
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&backends));
    let counts = counts(&chosen(&mut gateway, 1000..2000));
    assert_eq!(counts.get(&ip(ONE)), None);
    assert!((200..300).contains(&counts[&ip(TWO)]), "{counts:?}");
    gateway.assert_delta("inbound 1000, created 1000");
}

#[test]
fn sessions_stay_while_backends_come_drain_and_come_back() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&three()[..2]));
    let before = chosen(&mut gateway, 1000..1100);
    for backends in
        [three().to_vec(), vec![terminating(ONE), backend(TWO)], vec![backend(ONE), terminating(TWO)], three().into()]
    {
        gateway.serve(&service(&backends));
        assert_eq!(chosen(&mut gateway, 1000..1100), before);
    }
    gateway.serve(&service(&[terminating(ONE), backend(TWO)]));
    assert!(chosen(&mut gateway, 2000..2100).iter().all(|it| *it == ip(TWO)), "new ones go to whoever stays");
    gateway.assert_delta("inbound 600, created 200");
}

#[test]
fn datagrams_to_a_backend_that_is_gone_move_on_at_once_and_connections_end() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&three()[..2]));
    let before = chosen(&mut gateway, 1000..1100);
    let connections: Vec<SocketAddr> =
        (1000..1100).map(|n| gateway.client_sends(&packet(Protocol::Tcp, client(n), vip(80)))).collect();
    gateway.serve(&service(&[backend(ONE)]));
    let after = chosen(&mut gateway, 1000..1100);
    assert!(after.iter().all(|backend| *backend == ip(ONE)));
    assert!(before.iter().any(|backend| *backend == ip(TWO)));
    for (n, backend) in (1000..).zip(connections) {
        let sent = gateway.arrives(0, OUTSIDE, &tcp(client(n), vip(80), "A", 1001, 8));
        assert_eq!(sent.len(), usize::from(backend.ip() == ip(ONE)));
    }
    let lost = before.iter().filter(|backend| **backend == ip(TWO)).count();
    assert!(gateway.drops()[&DropReason::NoSession] as usize > lost / 2);
    // What the one that is gone still says is nobody's answer any more.
    assert!(gateway.arrives(0, INSIDE, &packet(Protocol::Udp, (ip(THREE), 5353).into(), client(1000))).is_empty());
    gateway.assert_delta("inbound 352, drop no_policy 1, drop no_session 48, ended policy 97, created 249");
}

#[test]
fn what_follows_a_client_that_begins_anew_does_not_overtake_it() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&both_pods()));
    let (client, vip) = (client(4000), vip(80));
    let say = |flags: &str, sequence, ack| tcp(client, vip, flags, sequence, ack);
    let backend = gateway.client_sends(&say("S", 1000, 0));
    gateway.backend_sends(0, &tcp(backend, client, "SA", 5000, 1001));
    gateway.client_sends(&say("A", 1001, 5001));
    gateway.client_sends(&say("A", 1001, 5001));
    gateway.backend_sends(0, &tcp(backend, client, "FA", 5001, 1001));
    // In one batch: the old connection's end, the new one, and what follows of it.
    for packet in [say("FA", 1001, 5002), say("S", 9000, 0), say("A", 9001, 7001)] {
        assert!(gateway.workers[0].io().inject(OUTSIDE, &packet));
    }
    let sent = gateway.run();
    let order: Vec<u32> = sent.iter().map(|(_, bytes)| sequence(bytes)).collect();
    assert_eq!(order, [1001, 9000, 9001]);
    gateway.assert_delta("inbound 6, service_reply 2, ended closed 1, created 2");
}

#[test]
fn a_connection_that_begins_anew_leaves_a_backend_that_drains() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&[backend(ONE)]));
    let say = |gateway: &mut Gateway, flags: &str, sequence, ack| {
        gateway.client_sends(&tcp(client(1), vip(80), flags, sequence, ack)).ip()
    };
    let answer = |gateway: &mut Gateway, flags: &str, sequence, ack| {
        gateway.backend_sends(0, &tcp((ip(ONE), 8080).into(), client(1), flags, sequence, ack));
    };
    say(&mut gateway, "S", 1000, 0);
    answer(&mut gateway, "SA", 5000, 1001);
    say(&mut gateway, "A", 1001, 5001);
    say(&mut gateway, "FA", 1001, 5001);
    answer(&mut gateway, "FA", 5001, 1002);
    say(&mut gateway, "A", 1002, 5002);
    gateway.serve(&service(&[terminating(ONE), backend(TWO)]));
    assert_eq!(say(&mut gateway, "A", 1002, 5002), ip(ONE), "the old one still closes");
    assert_eq!(say(&mut gateway, "S", 9000, 0), ip(TWO));
    assert_eq!(gateway.sessions(), 1);
    gateway.assert_delta("inbound 6, service_reply 2, ended closed 1, created 2");
}

#[test]
fn a_client_stays_with_its_backend_for_as_long_as_it_comes_back() {
    for workers in [1, 2] {
        let sticky = |backends: &[BackendSpec]| ServiceSpec { affinity: Some(60), ..service(backends) };
        let setup = Setup { workers, ..Setup::default() };
        let mut gateway = Gateway::with_service(&setup, &sticky(&three()[..2]));
        let home = chosen(&mut gateway, 1000..1070);
        assert_eq!(counts(&home).len(), 1, "one client, one backend");
        let (home, other) = if home[0] == ip(ONE) { (ONE, TWO) } else { (TWO, ONE) };
        // The table has changed under it.
        gateway.serve(&sticky(&[backend(home), backend(other), BackendSpec { weight: 50, ..backend(THREE) }]));
        assert_eq!(counts(&chosen(&mut gateway, 2000..2010)), [(ip(home), 10)].into());
        // Its backend drains: another one, and it stays there when the first comes back.
        gateway.serve(&sticky(&[terminating(home), backend(other)]));
        assert_eq!(counts(&chosen(&mut gateway, 3000..3010)), [(ip(other), 10)].into());
        gateway.serve(&sticky(&[backend(home), backend(other)]));
        assert_eq!(counts(&chosen(&mut gateway, 4000..4010)), [(ip(other), 10)].into());
        gateway.pass(70_000);
        assert_eq!(counts(&chosen(&mut gateway, 5000..5010)), [(ip(home), 10)].into(), "its time was over");
        gateway.assert_delta("inbound 110, ended idle 100, created 110");
    }
}

#[test]
fn sessions_are_counted_where_they_are() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&three()));
    let counts = counts(&chosen(&mut gateway, 1000..1100));
    let used = |gateway: &Gateway| -> HashMap<IpAddr, (usize, u64)> {
        let snapshot = gateway.builder.snapshot();
        let service = snapshot.policy.services().next().unwrap();
        let targets = service.v4.frontends[1].targets.iter();
        targets.map(|it| (it.address.to_ip(), (it.usage.sessions() as usize, it.usage.opened()))).collect()
    };
    for (backend, count) in &counts {
        assert_eq!(used(&gateway)[backend], (*count, *count as u64));
    }
    // A change keeps what was counted; what ends is counted off.
    gateway.serve(&service(&[backend(ONE), terminating(TWO)]));
    assert_eq!(used(&gateway)[&ip(TWO)].0, counts[&ip(TWO)]);
    gateway.pass(7_000);
    assert!(used(&gateway).values().all(|(open, opened)| *open == 0 && *opened > 0));
    gateway.assert_delta("inbound 100, ended idle 100, created 100");
}

#[test]
fn a_session_is_listed_as_its_backend_sees_it() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&[backend(ONE)]));
    let question = packet(Protocol::Udp, client(4000), vip(53));
    gateway.client_sends(&question);
    gateway.client_sends(&question);
    gateway.backend_sends(0, &packet(Protocol::Udp, (ip(ONE), 5353).into(), client(4000)));
    let (reply, answers) = crossbeam::channel::unbounded();
    let filter = SessionFilter { endpoint: Some(ip(ONE)), ..SessionFilter::default() };
    let mut chunk = SessionChunk { filter, cursor: Some(0), records: Vec::with_capacity(4) };
    while chunk.cursor.is_some() {
        gateway.commands[0].send(Command::Sessions { chunk, reply: reply.clone() }).unwrap();
        gateway.run();
        chunk = answers.try_recv().unwrap();
    }
    let [record] = chunk.records[..] else { panic!("one session") };
    assert_eq!((record.direction, record.remote, record.vip), (Direction::Inbound, client(4000), vip(53)));
    assert_eq!(record.endpoint, (ip(ONE), 5353).into());
    assert_eq!((record.packets_in, record.packets_out, record.state), (2, 1, SessionState::Established));
    gateway.assert_delta("inbound 2, service_reply 1, created 1");
}
