//! Backend selection, and what happens to sessions while backends are added, drained and removed.

use std::collections::{BTreeSet, HashMap};
use std::net::{IpAddr, SocketAddr};

use vipgate_dataplane::flow::address::Address;
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::policy::spec::*;
use vipgate_dataplane::session::query::{SessionFilter, SessionState};
use vipgate_dataplane::worker::command::{Command, SessionChunk};
use vipgate_testkit::services::*;
use vipgate_testkit::*;

const ONE: &str = "10.244.1.5";
const TWO: &str = "10.244.1.6";
const THREE: &str = "10.244.1.7";

fn three() -> [BackendSpec; 3] {
    [ONE, TWO, THREE].map(backend)
}

/// The backends of new sessions from these ports of one client.
fn selected(gateway: &mut Gateway, ports: std::ops::Range<u16>) -> Vec<IpAddr> {
    ports.map(|n| gateway.client_sends(&packet(Protocol::Udp, client(n), vip(53))).ip()).collect()
}

fn counts(selected: &[IpAddr]) -> HashMap<IpAddr, usize> {
    selected.iter().fold(HashMap::new(), |mut counts, backend| {
        *counts.entry(*backend).or_default() += 1;
        counts
    })
}

#[test]
fn every_gateway_selects_the_same_backends() {
    let mut one = Gateway::with_service(&Setup::default(), &service(&three()));
    let mut other = Gateway::with_service(&Setup { workers: 2, ..Setup::default() }, &service(&three()));
    let selection = selected(&mut one, 1000..2000);
    assert_eq!(selection, selected(&mut other, 1000..2000));
    assert!(counts(&selection).values().all(|count| (270..400).contains(count)), "{:?}", counts(&selection));
    one.assert_delta("inbound 1000, created 1000");
    other.assert_delta("inbound 1000, created 1000");
}

#[test]
fn new_sessions_are_distributed_by_weight() {
    let mut backends = three();
    for (backend, weight) in backends.iter_mut().zip([0, 1, 3]) {
        backend.weight = weight;
    }
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&backends));
    let counts = counts(&selected(&mut gateway, 1000..2000));
    assert_eq!(counts.get(&ip(ONE)), None);
    assert!((200..300).contains(&counts[&ip(TWO)]), "{counts:?}");
    gateway.assert_delta("inbound 1000, created 1000");
}

#[test]
fn sessions_keep_their_backend_while_others_are_added_or_drained() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&three()[..2]));
    let before = selected(&mut gateway, 1000..1100);
    for backends in
        [three().to_vec(), vec![terminating(ONE), backend(TWO)], vec![backend(ONE), terminating(TWO)], three().into()]
    {
        gateway.set_service(&service(&backends));
        assert_eq!(selected(&mut gateway, 1000..1100), before);
    }
    gateway.set_service(&service(&[terminating(ONE), backend(TWO)]));
    assert!(
        selected(&mut gateway, 2000..2100).iter().all(|it| *it == ip(TWO)),
        "new sessions go to the remaining backend"
    );
    gateway.assert_delta("inbound 600, created 200");
}

#[test]
fn removing_a_backend_moves_udp_flows_and_ends_tcp_connections() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&three()[..2]));
    let before = selected(&mut gateway, 1000..1100);
    let connections: Vec<SocketAddr> =
        (1000..1100).map(|n| gateway.client_sends(&packet(Protocol::Tcp, client(n), vip(80)))).collect();
    gateway.set_service(&service(&[backend(ONE)]));
    let after = selected(&mut gateway, 1000..1100);
    assert!(after.iter().all(|backend| *backend == ip(ONE)));
    assert!(before.iter().any(|backend| *backend == ip(TWO)));
    for (n, backend) in (1000..).zip(connections) {
        let sent = gateway.receive(0, OUTSIDE, &tcp(client(n), vip(80), "A", 1001, 8));
        assert_eq!(sent.len(), usize::from(backend.ip() == ip(ONE)));
    }
    let moved = before.iter().filter(|backend| **backend == ip(TWO)).count();
    assert!(gateway.drops()[&DropReason::NoSession] as usize > moved / 2);
    // A packet from the removed backend is not a Service reply any more.
    assert!(gateway.receive(0, INSIDE, &packet(Protocol::Udp, (ip(THREE), 5353).into(), client(1000))).is_empty());
    gateway.assert_delta("inbound 352, drop no_policy 1, drop no_session 48, ended policy 97, created 249");
}

#[test]
fn segments_of_a_reopened_connection_keep_their_order() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&both_pods()));
    let (client, vip) = (client(4000), vip(80));
    let segment = |flags: &str, sequence, ack| tcp(client, vip, flags, sequence, ack);
    let backend = gateway.client_sends(&segment("S", 1000, 0));
    gateway.backend_sends(0, &tcp(backend, client, "SA", 5000, 1001));
    gateway.client_sends(&segment("A", 1001, 5001));
    gateway.client_sends(&segment("A", 1001, 5001));
    gateway.backend_sends(0, &tcp(backend, client, "FA", 5001, 1001));
    // In one batch: the end of the old connection, the SYN of the new one, and a segment after it.
    for packet in [segment("FA", 1001, 5002), segment("S", 9000, 0), segment("A", 9001, 7001)] {
        assert!(gateway.workers[0].io().inject(OUTSIDE, &packet));
    }
    let sent = gateway.run();
    let order: Vec<u32> = sent.iter().map(|(_, bytes)| sequence(bytes)).collect();
    assert_eq!(order, [1001, 9000, 9001]);
    gateway.assert_delta("inbound 6, service_reply 2, ended closed 1, created 2");
}

#[test]
fn a_reopened_connection_leaves_a_draining_backend() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&[backend(ONE)]));
    let client_sends = |gateway: &mut Gateway, flags: &str, sequence, ack| {
        gateway.client_sends(&tcp(client(1), vip(80), flags, sequence, ack)).ip()
    };
    let backend_sends = |gateway: &mut Gateway, flags: &str, sequence, ack| {
        gateway.backend_sends(0, &tcp((ip(ONE), 8080).into(), client(1), flags, sequence, ack));
    };
    client_sends(&mut gateway, "S", 1000, 0);
    backend_sends(&mut gateway, "SA", 5000, 1001);
    client_sends(&mut gateway, "A", 1001, 5001);
    client_sends(&mut gateway, "FA", 1001, 5001);
    backend_sends(&mut gateway, "FA", 5001, 1002);
    client_sends(&mut gateway, "A", 1002, 5002);
    gateway.set_service(&service(&[terminating(ONE), backend(TWO)]));
    assert_eq!(client_sends(&mut gateway, "A", 1002, 5002), ip(ONE), "the old connection still closes at its backend");
    assert_eq!(client_sends(&mut gateway, "S", 9000, 0), ip(TWO));
    assert_eq!(gateway.sessions(), 1);
    gateway.assert_delta("inbound 6, service_reply 2, ended closed 1, created 2");
}

#[test]
fn client_affinity_keeps_the_backend_until_its_timeout() {
    for workers in [1, 2] {
        let sticky = |backends: &[BackendSpec]| ServiceSpec { affinity: Some(60), ..service(backends) };
        let setup = Setup { workers, ..Setup::default() };
        let mut gateway = Gateway::with_service(&setup, &sticky(&three()[..2]));
        let first = selected(&mut gateway, 1000..1070);
        assert_eq!(counts(&first).len(), 1, "one client, one backend");
        let (first, other) = if first[0] == ip(ONE) { (ONE, TWO) } else { (TWO, ONE) };
        // The Maglev table changes under the affinity.
        gateway.set_service(&sticky(&[backend(first), backend(other), BackendSpec { weight: 50, ..backend(THREE) }]));
        assert_eq!(counts(&selected(&mut gateway, 2000..2010)), [(ip(first), 10)].into());
        // Its backend drains: the client gets another one and stays there when the first one is ready again.
        gateway.set_service(&sticky(&[terminating(first), backend(other)]));
        assert_eq!(counts(&selected(&mut gateway, 3000..3010)), [(ip(other), 10)].into());
        gateway.set_service(&sticky(&[backend(first), backend(other)]));
        assert_eq!(counts(&selected(&mut gateway, 4000..4010)), [(ip(other), 10)].into());
        gateway.advance(70_000);
        assert_eq!(
            counts(&selected(&mut gateway, 5000..5010)),
            [(ip(first), 10)].into(),
            "the affinity timeout has passed"
        );
        gateway.assert_delta("inbound 110, ended idle 100, created 110");
    }
}

/// Two backends of one address, as two host-network pods of a node: the second one's ports are greater by one.
fn shared_address() -> [BackendSpec; 2] {
    let other = BackendSpec { ports: backend(ONE).ports.iter().map(|port| port + 1).collect(), ..backend(ONE) };
    [backend(ONE), other]
}

/// The backends of new datagrams from these ports of one client.
fn selected_ports(gateway: &mut Gateway, ports: std::ops::Range<u16>) -> Vec<u16> {
    ports.map(|n| gateway.client_sends(&packet(Protocol::Udp, client(n), vip(53))).port()).collect()
}

fn count_of(selected: &[u16], port: u16) -> usize {
    selected.iter().filter(|other| **other == port).count()
}

#[test]
fn backends_of_one_address_are_selected_and_reply_by_their_ports() {
    for workers in [1, 2] {
        let setup = Setup { workers, ..Setup::default() };
        let mut gateway = Gateway::with_service(&setup, &service(&shared_address()));
        let backends = selected_ports(&mut gateway, 1000..1100);
        assert!((35..65).contains(&count_of(&backends, 5353)) && (35..65).contains(&count_of(&backends, 5354)));
        for (n, port) in (1000..).zip(backends) {
            let reply = packet(Protocol::Udp, (ip(ONE), port).into(), client(n));
            assert_eq!(gateway.backend_sends(0, &reply), (vip(53), client(n)));
        }
        let connections: Vec<_> =
            (1000..1100).map(|n| gateway.client_sends(&packet(Protocol::Tcp, client(n), vip(80)))).collect();
        for (n, backend) in (1000..).zip(&connections) {
            assert_eq!(gateway.backend_sends(0, &tcp(*backend, client(n), "SA", 5000, 1001)), (vip(80), client(n)));
        }
        assert_eq!(connections.iter().map(SocketAddr::port).collect::<BTreeSet<_>>(), [8080, 8081].into());
        // Replies without a session, and a port that is no backend's.
        for port in [8080, 8081] {
            let reply = tcp((ip(ONE), port).into(), client(9000), "SA", 5000, 1001);
            assert_eq!(gateway.backend_sends(0, &reply), (vip(80), client(9000)));
        }
        let other = packet(Protocol::Udp, (ip(ONE), 5355).into(), client(9000));
        let sent = gateway.receive(0, INSIDE, &other);
        assert_ne!(ends(&sent[0].1).0, vip(53), "the pod's own datagram");
        gateway.assert_delta("egress 1, inbound 200, service_reply 202, created 201");
    }
}

#[test]
fn draining_or_removing_one_backend_of_an_address_leaves_the_other() {
    let [one, other] = shared_address();
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&[one.clone(), other.clone()]));
    let before = selected_ports(&mut gateway, 1000..1100);
    let usage = |gateway: &Gateway, port: u16| {
        let snapshot = gateway.builder.snapshot();
        let service = snapshot.policy.services().next().unwrap();
        let backend = service.v4.frontends[1].backends.iter().find(|it| it.port == port).unwrap();
        (backend.usage.sessions() as usize, backend.usage.opened() as usize)
    };
    for port in [5353, 5354] {
        assert_eq!(usage(&gateway, port), (count_of(&before, port), count_of(&before, port)));
    }
    let draining = BackendSpec { state: BackendState::Terminating, external: false, internal: false, ..one };
    gateway.set_service(&service(&[draining, other.clone()]));
    assert_eq!(selected_ports(&mut gateway, 1000..1100), before, "open sessions stay");
    assert_eq!(count_of(&selected_ports(&mut gateway, 2000..2010), 5354), 10, "new ones go to the other backend");
    assert_eq!(usage(&gateway, 5353).0, count_of(&before, 5353));
    gateway.set_service(&service(&[other]));
    assert_eq!(count_of(&selected_ports(&mut gateway, 1000..1100), 5354), 100, "datagrams move");
    assert_eq!(usage(&gateway, 5354), (110, 110));
    let moved = count_of(&before, 5353);
    gateway.assert_delta(&format!("inbound 310, ended policy {moved}, created {}", 110 + moved));
}

#[test]
fn client_affinity_keeps_the_backend_of_a_shared_address_at_all_service_ports() {
    let [one, other] = shared_address();
    let sticky = |backends: &[BackendSpec]| ServiceSpec { affinity: Some(60), ..service(backends) };
    let mut gateway = Gateway::with_service(&Setup::default(), &sticky(&[one.clone(), other.clone()]));
    let first = selected_ports(&mut gateway, 1000..1001)[0];
    assert_eq!(count_of(&selected_ports(&mut gateway, 1001..1010), first), 9);
    let connect = |gateway: &mut Gateway, n| {
        let connection = gateway.client_sends(&packet(Protocol::Tcp, client(n), vip(80)));
        assert_eq!(connection.port() - 8080, first - 5353, "the same backend at another Service port");
    };
    connect(&mut gateway, 3000);
    // Lower and higher ports of the same address come, with most of the table.
    let with_ports = |port: u16| BackendSpec { ports: vec![port; 3], weight: 50, ..one.clone() };
    gateway.set_service(&sticky(&[one.clone(), other, with_ports(1000), with_ports(10_000)]));
    assert_eq!(count_of(&selected_ports(&mut gateway, 2000..2010), first), 10);
    connect(&mut gateway, 3001);
    gateway.assert_delta("inbound 22, created 22");
}

#[test]
fn backends_count_open_and_opened_sessions() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&three()));
    let counts = counts(&selected(&mut gateway, 1000..1100));
    let used = |gateway: &Gateway| -> HashMap<IpAddr, (usize, u64)> {
        let snapshot = gateway.builder.snapshot();
        let service = snapshot.policy.services().next().unwrap();
        let targets = service.v4.frontends[1].backends.iter();
        targets.map(|it| (it.address.to_ip(), (it.usage.sessions() as usize, it.usage.opened()))).collect()
    };
    for (backend, count) in &counts {
        assert_eq!(used(&gateway)[backend], (*count, *count as u64));
    }
    // A policy change keeps the counts; ended sessions are subtracted.
    gateway.set_service(&service(&[backend(ONE), terminating(TWO)]));
    assert_eq!(used(&gateway)[&ip(TWO)].0, counts[&ip(TWO)]);
    gateway.advance(7_000);
    assert!(used(&gateway).values().all(|(open, opened)| *open == 0 && *opened > 0));
    gateway.assert_delta("inbound 100, ended idle 100, created 100");
}

#[test]
fn an_inbound_session_is_listed_with_its_backend() {
    let mut gateway = Gateway::with_service(&Setup::default(), &service(&[backend(ONE)]));
    let request = packet(Protocol::Udp, client(4000), vip(53));
    gateway.client_sends(&request);
    gateway.client_sends(&request);
    gateway.backend_sends(0, &packet(Protocol::Udp, (ip(ONE), 5353).into(), client(4000)));
    let (reply, responses) = crossbeam::channel::unbounded();
    let filter = SessionFilter { endpoint: Some(ip(ONE)), ..SessionFilter::default() };
    let mut chunk = SessionChunk { filter, cursor: Some(0), records: Vec::with_capacity(4) };
    while chunk.cursor.is_some() {
        gateway.commands[0].send(Command::Sessions { chunk, reply: reply.clone() }).unwrap();
        gateway.run();
        chunk = responses.try_recv().unwrap();
    }
    let [record] = chunk.records[..] else { panic!("one session") };
    assert_eq!((record.direction, record.remote, record.vip), (Direction::Inbound, client(4000), vip(53)));
    assert_eq!(record.endpoint, (ip(ONE), 5353).into());
    assert_eq!((record.packets_in, record.packets_out, record.state), (2, 1, SessionState::Established));
    gateway.assert_delta("inbound 2, service_reply 1, created 1");
}
