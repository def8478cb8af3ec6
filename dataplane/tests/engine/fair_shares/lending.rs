//! All packets of pods and clients arrive on one queue: the tables of all workers fill up, and shares are of all of
//! them together.

use std::net::SocketAddr;

use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::session::end_reason::EndReason;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

use super::{
    OTHER_POD, OTHER_VIP, backend_reaches_client, check_counts, connect, distinct_client, ended, open, other_service,
    rejected, remote, setup,
};

/// Tables with the default reserve: of 1024 sessions of each worker, 992 are shared.
fn default_reserve(workers: u8) -> Setup {
    Setup { reserve: None, ..setup(workers) }
}

const SHARED: u16 = 992;

/// Opens sessions of a pod on queue 0; returns their ports, with the first packets as sent.
fn open_all(gateway: &mut Gateway, pod: &str, ports: std::ops::Range<u16>) -> Vec<(u16, Vec<u8>)> {
    ports.filter_map(|port| Some((port, open(gateway, 0, pod, port)?))).collect()
}

/// Whether a reply to a pod's packet, on any queue, reaches the pod.
fn is_alive(gateway: &mut Gateway, pod: &str, (port, seen): &(u16, Vec<u8>)) -> bool {
    let worker = usize::from(*port) % gateway.workers.len();
    let received = gateway.receive(worker, OUTSIDE, &reply_to(seen, Protocol::Udp));
    received.len() == 1 && ends(&received[0].1).1 == (ip(pod), *port).into()
}

fn count_alive(gateway: &mut Gateway, pod: &str, sessions: &[(u16, Vec<u8>)]) -> usize {
    sessions.iter().map(|session| is_alive(gateway, pod, session)).filter(|alive| *alive).count()
}

/// How many of these sessions continue with a packet of the pod on queue 0, and a reply.
fn count_continuing(gateway: &mut Gateway, pod: &str, sessions: &[(u16, Vec<u8>)]) -> usize {
    let mut count = 0;
    for session in sessions {
        let (port, seen) = session;
        let sent = open(gateway, 0, pod, *port);
        let is_same = sent.is_some_and(|sent| ends(&sent) == ends(seen));
        count += usize::from(is_same && is_alive(gateway, pod, session));
    }
    count
}

/// So many, or up to 1 % less: the flow directory may have lost entries.
fn nearly(count: usize) -> std::ops::RangeInclusive<usize> {
    count - count / 100..=count
}

#[test]
fn pods_on_one_queue_fill_the_tables_of_all_workers() {
    for (workers, pod, reserve, shared) in [
        (2, "10.244.1.5", None, SHARED),
        (3, "10.244.1.5", None, SHARED),
        (2, "fd00:244:1::5", None, SHARED),
        (3, "fd00:244:1::5", Some(0), 1024),
    ] {
        let mut gateway = Gateway::new(&Setup { reserve, ..default_reserve(workers) });
        gateway.skip_counter_check();
        let mut sessions = open_all(&mut gateway, pod, 2000..2000 + shared);
        assert_eq!((sessions.len(), gateway.handoffs()), (shared.into(), 0), "no hand-off while there are slots");
        let of_all = shared * u16::from(workers);
        sessions.extend(open_all(&mut gateway, pod, 2000 + shared..2000 + of_all + 50));
        assert_eq!(sessions.len(), usize::from(of_all), "{:?}", gateway.drops());
        assert!(sessions.len() * 100 >= 95 * 1024 * usize::from(workers));
        assert_eq!((rejected(&gateway), ended(&gateway, EndReason::OverShare)), (50, 0));
        for worker in &gateway.workers {
            assert_eq!(worker.tables().sessions.open_count(), u32::from(shared));
        }
        let continuing = count_continuing(&mut gateway, pod, &sessions);
        assert!(nearly(sessions.len()).contains(&continuing), "{continuing}: {:?}", gateway.drops());
        assert_eq!(gateway.sessions(), u64::from(of_all), "none of them was opened twice");
        check_counts(&gateway);
    }
}

#[test]
fn clients_on_one_queue_fill_the_tables_of_all_workers() {
    for (workers, v6) in [(2, false), (3, false), (2, true)] {
        let mut gateway = Gateway::new(&default_reserve(workers));
        gateway.skip_counter_check();
        gateway.set_policy(&with_services(&[service(&both_pods())]));
        let vip: SocketAddr = (ip(VIPS[usize::from(v6)]), 80).into();
        let of_all = SHARED * u16::from(workers);
        let clients: Vec<_> = (0..of_all + 50)
            .filter_map(|n| Some((distinct_client(n, v6), connect(&mut gateway, 0, distinct_client(n, v6), vip)?)))
            .collect();
        assert_eq!((clients.len(), rejected(&gateway)), (of_all.into(), 50), "{:?}", gateway.drops());
        let continuing = clients.iter().enumerate().filter(|(n, (client, backend))| {
            let sent = gateway.receive(0, OUTSIDE, &tcp(*client, vip, "PA", 1001, 5001));
            sent.len() == 1
                && ends(&sent[0].1) == (*client, *backend)
                && backend_reaches_client(&mut gateway, n % usize::from(workers), *client, vip, *backend)
        });
        let continuing = continuing.count();
        assert!(nearly(clients.len()).contains(&continuing), "{continuing}: {:?}", gateway.drops());
        assert_eq!((gateway.sessions(), ended(&gateway, EndReason::OverShare)), (of_all.into(), 0));
        check_counts(&gateway);
    }
}

#[test]
fn fair_shares_are_of_all_workers_together() {
    for (workers, greedy, other) in [
        (2, "10.244.1.5", OTHER_POD),
        (3, "10.244.1.5", OTHER_POD),
        (2, "10.244.1.5", "10.244.1.6"),
        (2, "fd00:244:1::5", "fd00:244:1::6"),
    ] {
        let mut gateway = Gateway::new(&default_reserve(workers));
        gateway.skip_counter_check();
        let of_all = SHARED * u16::from(workers);
        let flood = open_all(&mut gateway, greedy, 2000..2000 + of_all);
        assert_eq!(flood.len(), usize::from(of_all));
        let half = usize::from(of_all / 2);
        let sessions = open_all(&mut gateway, other, 10_000..10_200 + of_all / 2);
        assert!(nearly(half).contains(&sessions.len()), "{} of {half}: {:?}", sessions.len(), gateway.drops());
        assert_eq!(count_alive(&mut gateway, other, &sessions), sessions.len());
        let alive = count_alive(&mut gateway, greedy, &flood);
        assert_eq!(alive, flood.len() - sessions.len(), "only as many ended as the other pod needed");
        assert_eq!(gateway.sessions(), of_all.into());
        check_counts(&gateway);
    }
}

/// A flood has filled the free slots of all workers, so it has fewer sessions at the first one than another pod: that
/// one keeps them.
#[test]
fn a_flood_over_all_workers_gives_way_before_holders_at_one() {
    let mut gateway = Gateway::new(&default_reserve(2));
    gateway.skip_counter_check();
    let before = open_all(&mut gateway, OTHER_POD, 2000..2600);
    let flood = open_all(&mut gateway, "10.244.1.5", 2000..4500);
    // At the first worker it has less than its share. It takes one slot there before that worker publishes its shares.
    assert_eq!((before.len(), flood.len()), (600, 2 * usize::from(SHARED) - 599));
    let new_sessions = open_all(&mut gateway, "10.244.1.6", 2000..2200);
    assert_eq!(new_sessions.len(), 200, "{:?}", gateway.drops());
    assert_eq!(count_alive(&mut gateway, "10.244.1.6", &new_sessions), 200);
    assert_eq!(count_alive(&mut gateway, OTHER_POD, &before), 599);
    check_counts(&gateway);
}

/// Rejected packets of a flood keep no other worker busy.
#[test]
fn few_packets_of_a_flood_are_handed_off_when_all_tables_are_full() {
    // Frames stay at the worker that they are handed off to.
    let mut gateway = Gateway::new(&Setup { frames: 4096, ..default_reserve(2) });
    gateway.skip_counter_check();
    assert_eq!(open_all(&mut gateway, "10.244.1.5", 2000..2000 + 2 * SHARED).len(), 2 * usize::from(SHARED));
    let before = gateway.handoffs();
    for port in 10_000..10_060 {
        let first = packet(Protocol::Udp, (ip("10.244.1.5"), port).into(), remote("10.244.1.5"));
        assert!(gateway.workers[0].io().inject(INSIDE, &first));
    }
    assert!(gateway.run().is_empty());
    assert_eq!((gateway.handoffs() - before, rejected(&gateway)), (8, 60));
}

#[test]
fn lent_slots_survive_a_restart() {
    let path = std::env::temp_dir().join(format!("vipgate-lending-{}", std::process::id()));
    let setup = Setup { state: Some(path.clone()), ..default_reserve(2) };
    let policy = with_services(&[service(&both_pods())]);
    let vip: SocketAddr = (ip(VIPS[0]), 80).into();
    let mut gateway = Gateway::with(&setup, network(), &policy);
    gateway.skip_counter_check();
    let sessions = open_all(&mut gateway, OTHER_POD, 2000..3100);
    let connected: Vec<_> =
        (0..20).map(|n| connect(&mut gateway, 0, distinct_client(n, false), vip).unwrap()).collect();
    assert_eq!((sessions.len(), gateway.sessions()), (1100, 1120));
    let now = gateway.now;
    drop(gateway);
    let mut gateway = Gateway::starting_at(&setup, network(), &policy, now.plus(500));
    gateway.skip_counter_check();
    assert_eq!(gateway.workers[0].tables().sessions.open_count(), u32::from(SHARED));
    let continuing = count_continuing(&mut gateway, OTHER_POD, &sessions);
    assert!(nearly(1100).contains(&continuing), "{continuing}: {:?}", gateway.drops());
    for (n, backend) in (0..).zip(connected) {
        let client = distinct_client(n, false);
        let sent = gateway.receive(0, OUTSIDE, &tcp(client, vip, "PA", 1001, 5001));
        assert_eq!((sent.len(), ends(&sent[0].1)), (1, (client, backend)), "{:?}", gateway.drops());
        assert!(backend_reaches_client(&mut gateway, 0, client, vip, backend));
    }
    assert_eq!(gateway.sessions(), 1120);
    // All free slots are the second worker's, and the first one uses them before its reserve.
    let free = 2 * SHARED - 1120;
    let more = open_all(&mut gateway, "10.244.1.5", 2000..2000 + free);
    assert_eq!((more.len(), gateway.sessions()), (free.into(), u64::from(2 * SHARED)));
    assert_eq!(gateway.workers[0].tables().sessions.open_count(), u32::from(SHARED));
    check_counts(&gateway);
    drop(gateway);
    for worker in ["0", "1"] {
        std::fs::remove_file(path.with_extension(worker)).unwrap();
    }
}

/// Two sessions of a client that differ in their VIP only have one reply tuple: the worker that has the first one
/// translates the port of the second, and so lends no slot for it.
#[test]
fn a_session_whose_reply_tuple_is_in_use_is_not_lent() {
    let mut gateway = Gateway::new(&default_reserve(2));
    gateway.skip_counter_check();
    gateway.set_policy(&with_services(&[VIPS[0], OTHER_VIP].map(other_service)));
    let client = distinct_client(1, false);
    let [first, second]: [SocketAddr; 2] = [OTHER_VIP, VIPS[0]].map(|vip| (ip(vip), 80).into());
    let backend = connect(&mut gateway, 0, client, first).unwrap();
    assert_eq!(open_all(&mut gateway, "10.244.1.5", 2000..2000 + SHARED - 1).len(), usize::from(SHARED) - 1);
    let sent = gateway.receive(0, OUTSIDE, &tcp(client, second, "S", 1000, 0));
    let translated = ends(&sent[0].1);
    assert_eq!((translated.0.ip(), translated.1, gateway.handoffs()), (client.ip(), backend, 0));
    assert_ne!(translated.0.port(), client.port());
    let reply = gateway.receive(0, INSIDE, &tcp(backend, translated.0, "SA", 5000, 1001));
    assert_eq!(ends(&reply[0].1), (second, client));
    assert!(backend_reaches_client(&mut gateway, 0, client, first, backend));
    assert_eq!(gateway.forwarded(Direction::ServiceReply), 3);
    assert_eq!(gateway.drops().get(&DropReason::SessionTableFull), None);
}
