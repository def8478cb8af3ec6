//! Max-min fair shares of the session table: a flood from a pod, a client or another gateway fills its own share only.
//! Holders below their share can open sessions and keep them.

mod lending;
mod random;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crossbeam::channel::bounded;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::{GatewayId, Slot};
use vipgate_dataplane::policy::spec::{EndpointSpec, ServiceSpec, VipSpec};
use vipgate_dataplane::session::end_reason::EndReason;
use vipgate_dataplane::session::query::SessionFilter;
use vipgate_dataplane::session::record::ReplicationRecord;
use vipgate_dataplane::session::{SessionFamily, Sessions};
use vipgate_dataplane::worker::command::Command;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

const REMOTE: [&str; 2] = ["198.51.100.10:53", "[2001:db8:51::10]:53"];
/// Another tenant's VIP and pod.
const OTHER_VIP: &str = "192.0.2.11";
const OTHER_POD: &str = "10.244.1.21";

/// Tables of 1024 sessions: 960 shared, 64 reserved.
fn setup(workers: u8) -> Setup {
    Setup { workers, capacity: 1024, reserve: Some(64), frames: 1024, ..Setup::default() }
}

fn remote(pod: &str) -> SocketAddr {
    at(REMOTE[usize::from(pod.contains(':'))])
}

/// Opens a session of a pod; returns the packet as sent, `None` if it is rejected.
fn open(gateway: &mut Gateway, worker: usize, pod: &str, port: u16) -> Option<Vec<u8>> {
    let sent = gateway.receive(worker, INSIDE, &packet(Protocol::Udp, (ip(pod), port).into(), remote(pod)));
    sent.into_iter().next().map(|(_, bytes)| bytes)
}

/// Opens sessions of a pod from port 2000 on, with replies; returns the packets of those opened.
fn open_confirmed(gateway: &mut Gateway, pod: &str, count: u16) -> Vec<Vec<u8>> {
    let workers = gateway.workers.len();
    let mut seen = Vec::new();
    for n in 0..count {
        let worker = usize::from(n) % workers;
        let Some(bytes) = open(gateway, worker, pod, 2000 + n) else { continue };
        assert!(is_alive(gateway, worker, &bytes));
        seen.push(bytes);
    }
    seen
}

/// Whether a reply to a pod's packet still reaches it.
fn is_alive(gateway: &mut Gateway, worker: usize, seen: &[u8]) -> bool {
    gateway.receive(worker, OUTSIDE, &reply_to(seen, Protocol::Udp)).len() == 1
}

fn count_alive(gateway: &mut Gateway, sessions: &[Vec<u8>]) -> usize {
    let workers = gateway.workers.len();
    sessions.iter().enumerate().filter(|(n, seen)| is_alive(gateway, n % workers, seen)).count()
}

/// Opens a client's connection to a VIP, confirmed by both sides; returns the backend, `None` if it is rejected.
fn connect(gateway: &mut Gateway, worker: usize, client: SocketAddr, vip: SocketAddr) -> Option<SocketAddr> {
    let sent = gateway.receive(worker, OUTSIDE, &tcp(client, vip, "S", 1000, 0));
    let backend = ends(&sent.first()?.1).1;
    assert_eq!(gateway.receive(worker, INSIDE, &tcp(backend, client, "SA", 5000, 1001)).len(), 1);
    assert_eq!(gateway.receive(worker, OUTSIDE, &tcp(client, vip, "A", 1001, 5001)).len(), 1);
    Some(backend)
}

/// Whether a backend's packet still reaches its client from the VIP.
fn backend_reaches_client(
    gateway: &mut Gateway,
    worker: usize,
    client: SocketAddr,
    vip: SocketAddr,
    backend: SocketAddr,
) -> bool {
    let sent = gateway.receive(worker, INSIDE, &tcp(backend, client, "PA", 5001, 1001));
    sent.len() == 1 && sent[0].0 == OUTSIDE && ends(&sent[0].1) == (vip, client)
}

/// Another tenant's Service at a VIP.
fn other_service(vip: &str) -> ServiceSpec {
    ServiceSpec { name: format!("Service other/{vip}").into(), vips: vec![ip(vip)], ..service(&[backend(OTHER_POD)]) }
}

/// A client with an address of its own.
fn distinct_client(n: u16, v6: bool) -> SocketAddr {
    if v6 {
        return at(&format!("[2001:db8:51:{n:x}::1]:4000"));
    }
    (IpAddr::V4(Ipv4Addr::from_bits(0x0b00_0000 + u32::from(n))), 4000).into()
}

fn ended(gateway: &Gateway, reason: EndReason) -> u64 {
    gateway.workers.iter().map(|it| it.counters().sessions_ended[reason as usize].get()).sum()
}

fn rejected(gateway: &Gateway) -> u64 {
    gateway.drops().get(&DropReason::SessionTableFull).copied().unwrap_or(0)
}

/// Every worker's reserve and its counts per VIP match its table.
fn check_counts(gateway: &Gateway) {
    for worker in &gateway.workers {
        random::recount(&worker.tables().sessions);
    }
}

#[test]
fn a_pod_without_limits_fills_unused_capacity_and_gives_way() {
    for (workers, greedy, other_pod) in
        [(1, "10.244.1.5", "10.244.1.6"), (2, "10.244.1.5", "10.244.1.6"), (1, "fd00:244:1::5", "fd00:244:1::6")]
    {
        let mut gateway = Gateway::new(&setup(workers));
        gateway.skip_counter_check();
        let before = open_confirmed(&mut gateway, OTHER_POD, 20);
        let capacity = 960 * u16::from(workers);
        let greedy_sessions = open_confirmed(&mut gateway, greedy, capacity + 300);
        assert_eq!(
            (before.len(), greedy_sessions.len()),
            (20, usize::from(capacity) - 20),
            "everything except the reserve"
        );
        assert_eq!((rejected(&gateway), ended(&gateway, EndReason::OverShare)), (320, 0));
        // Another tenant, and another pod of the same VIP.
        let new_sessions: Vec<_> = (0..50).filter_map(|n| open(&mut gateway, 0, OTHER_POD, 7000 + n)).collect();
        assert_eq!(new_sessions.len(), 50, "{:?}", gateway.drops());
        let neighbors: Vec<_> = (0..50).filter_map(|n| open(&mut gateway, 0, other_pod, 7000 + n)).collect();
        assert_eq!(neighbors.len(), 50, "{:?}", gateway.drops());
        let alive_at_worker_0 =
            |gateway: &mut Gateway, all: &[Vec<u8>]| all.iter().filter(|it| is_alive(gateway, 0, it)).count();
        assert_eq!(alive_at_worker_0(&mut gateway, &new_sessions) + alive_at_worker_0(&mut gateway, &neighbors), 100);
        assert_eq!(count_alive(&mut gateway, &before), 20);
        assert_eq!(ended(&gateway, EndReason::OverShare), 100);
        assert_eq!(
            count_alive(&mut gateway, &greedy_sessions),
            usize::from(capacity) - 20 - 100,
            "only as many ended as others needed"
        );
        assert_eq!(gateway.sessions(), capacity.into());
        check_counts(&gateway);
    }
}

#[test]
fn unconfirmed_sessions_are_evicted_before_established_ones() {
    let mut gateway = Gateway::new(&setup(1));
    let established = open_confirmed(&mut gateway, "10.244.1.5", 480);
    for n in 0..480 {
        assert!(open(&mut gateway, 0, "10.244.1.5", 10_000 + n).is_some());
    }
    for n in 0..50 {
        assert!(open(&mut gateway, 0, OTHER_POD, 7000 + n).is_some());
    }
    // Eviction samples eight sessions: once in 256 all of them are established.
    assert!(count_alive(&mut gateway, &established) >= 478);
    let over = ended(&gateway, EndReason::OverShare);
    assert_eq!(ended(&gateway, EndReason::Evicted) + over, 50);
    gateway.skip_counter_check();
}

#[test]
fn clients_of_one_vip_do_not_displace_sessions_of_another() {
    for (workers, v6) in [(1, false), (2, false), (1, true)] {
        let mut gateway = Gateway::new(&setup(workers));
        gateway.skip_counter_check();
        let other = ServiceSpec {
            name: "Service other/api".into(),
            vips: vec![ip(OTHER_VIP)],
            ..service(&[backend(OTHER_POD)])
        };
        gateway.set_policy(&with_services(&[service(&both_pods()), other]));
        let own: SocketAddr = (ip(VIPS[usize::from(v6)]), 80).into();
        let pod = if v6 { "fd00:244:1::6" } else { "10.244.1.6" };
        let client = |n: u16| -> SocketAddr { (at(CLIENTS[usize::from(v6)]).ip(), 1000 + n).into() };
        let connected: Vec<_> = (0..30).map(|n| connect(&mut gateway, 0, client(n), own).unwrap()).collect();
        let sessions = open_confirmed(&mut gateway, pod, 20);
        // A botnet: each of its clients completes the handshake.
        let flood = 960 * u16::from(workers) + 300;
        let bots = (0..flood).filter(|&n| {
            connect(
                &mut gateway,
                usize::from(n) % usize::from(workers),
                distinct_client(n, false),
                (ip(OTHER_VIP), 80).into(),
            )
            .is_some()
        });
        assert_eq!(bots.count(), usize::from(960 * u16::from(workers)) - 50);
        assert_eq!(rejected(&gateway), 350);
        for n in 30..80 {
            let worker = usize::from(n) % usize::from(workers);
            assert!(connect(&mut gateway, worker, client(n), own).is_some(), "client {n}: {:?}", gateway.drops());
        }
        let more: Vec<_> = (0..50).filter_map(|n| open(&mut gateway, 0, pod, 7000 + n)).collect();
        assert_eq!(more.len(), 50, "{:?}", gateway.drops());
        assert!(more.iter().all(|seen| is_alive(&mut gateway, 0, seen)));
        assert_eq!(count_alive(&mut gateway, &sessions), 20);
        for (n, backend) in connected.into_iter().enumerate() {
            assert!(backend_reaches_client(&mut gateway, 0, client(n as u16), own, backend));
        }
        assert_eq!((rejected(&gateway), ended(&gateway, EndReason::OverShare)), (350, 100));
        check_counts(&gateway);
    }
}

/// Unconfirmed packets to many VIPs: each VIP holds little, so only holders with established sessions are above their
/// share.
#[test]
fn spoofed_packets_to_many_vips_end_no_established_session() {
    for own in [false, true] {
        let mut gateway = Gateway::new(&setup(1));
        gateway.skip_counter_check();
        let flooded: Vec<String> = (12..20).map(|n| format!("192.0.2.{n}")).collect();
        let mut policy = with_services(
            &flooded.iter().map(|vip| other_service(vip)).chain([service(&both_pods())]).collect::<Vec<_>>(),
        );
        let vip = policy.vips[0].clone();
        policy.vips.extend(flooded.iter().map(|address| VipSpec { address: ip(address), ..vip.clone() }));
        gateway.set_policy(&policy);
        let established = open_confirmed(&mut gateway, "10.244.1.5", 600);
        for n in 0..4000 {
            // Or to its own VIP: the clients are one member of the VIP, as each pod is.
            let target = if own { VIPS[0] } else { &flooded[usize::from(n % 8)] };
            gateway.receive(0, OUTSIDE, &tcp(distinct_client(n, false), (ip(target), 80).into(), "S", 1000, 0));
            if n % 100 == 0 {
                assert!(open(&mut gateway, 0, "10.244.1.6", 7000 + n / 100).is_some(), "{n}: {:?}", gateway.drops());
                let client = at(&format!("198.51.100.10:{}", 1000 + n));
                assert!(connect(&mut gateway, 0, client, (ip(VIPS[0]), 80).into()).is_some(), "{:?}", gateway.drops());
            }
        }
        assert_eq!((count_alive(&mut gateway, &established), ended(&gateway, EndReason::OverShare)), (600, 0));
        assert!(ended(&gateway, EndReason::Evicted) > 3600);
        check_counts(&gateway);
    }
}

/// Replication records of the open sessions of a worker.
fn session_records<A: SessionFamily>(sessions: &Sessions, gateway: &Gateway) -> Vec<ReplicationRecord> {
    let table = A::table(sessions);
    let slots = (0..table.slots()).map(Slot).filter(|slot| table.deadline(*slot) != 0);
    slots.map(|slot| A::record(sessions.record(slot, gateway.now))).collect()
}

/// The gateway applies records of standby sessions.
fn apply_standby(gateway: &mut Gateway, records: &[ReplicationRecord]) {
    for records in records.chunks(256) {
        let (reply, _response) = bounded(1);
        let command = Command::ApplyRecords { records: records.to_vec(), round: 1, source: GatewayId(1), reply };
        gateway.commands[0].send(command).unwrap();
        gateway.run();
    }
}

#[test]
fn standby_sessions_displace_no_session_and_give_way_to_active_ones() {
    let mut peer = Gateway::new(&Setup { capacity: 2048, reserve: Some(0), ..Setup::default() });
    peer.skip_counter_check();
    assert_eq!(open_confirmed(&mut peer, "10.244.1.5", 1500).len(), 1500);
    let standby = session_records::<u32>(&peer.workers[0].tables().sessions, &peer);
    let mut gateway = Gateway::new(&setup(1));
    gateway.skip_counter_check();
    let live = open_confirmed(&mut gateway, OTHER_POD, 300);
    apply_standby(&mut gateway, &standby);
    let standby_count = |gateway: &Gateway| gateway.workers[0].tables().sessions.standby_count();
    assert_eq!((gateway.sessions(), standby_count(&gateway)), (300, 660), "everything except the reserve");
    let more: Vec<_> = (0..50).filter_map(|n| open(&mut gateway, 0, OTHER_POD, 7000 + n)).collect();
    assert_eq!((more.len(), standby_count(&gateway)), (50, 610), "{:?}", gateway.drops());
    assert_eq!((count_alive(&mut gateway, &live), count_alive(&mut gateway, &more)), (300, 50));
    assert_eq!(gateway.workers[0].counters().standby_rejected.get(), 840 + 50);
    check_counts(&gateway);
    // The reverse: active sessions fill the table, and standby sessions only get half of the reserve.
    let larger = Setup { capacity: 1088, reserve: Some(128), ..setup(1) };
    let mut gateway = Gateway::new(&larger);
    gateway.skip_counter_check();
    let live = open_confirmed(&mut gateway, OTHER_POD, 1100);
    apply_standby(&mut gateway, &standby);
    assert_eq!((live.len(), standby_count(&gateway), count_alive(&mut gateway, &live)), (960, 64, 960));
    let new_sessions = (0..64).filter(|n| open(&mut gateway, 0, "10.244.1.6", 3000 + n).is_some()).count();
    assert_eq!(new_sessions, 64, "the other half of the reserve is for active sessions: {:?}", gateway.drops());
    // Unconfirmed sessions of the largest holder give way to standby sessions.
    let mut gateway = Gateway::new(&larger);
    gateway.skip_counter_check();
    let flood = (0..960).filter(|n| open(&mut gateway, 0, OTHER_POD, 2000 + n).is_some()).count();
    gateway.advance(1_000);
    for _ in 0..20 {
        apply_standby(&mut gateway, &standby[..400]);
    }
    assert_eq!((flood, standby_count(&gateway)), (960, 400), "{:?}", gateway.drops());
    check_counts(&gateway);
    // Existing standby sessions give way even to a pod that is at its share.
    let mut gateway = Gateway::new(&setup(1));
    gateway.skip_counter_check();
    apply_standby(&mut gateway, &standby);
    gateway.advance(1_000);
    let opened = (0..300).filter(|n| open(&mut gateway, 0, "10.244.1.6", 3000 + n).is_some()).count();
    assert!(opened >= 290, "{opened}: {:?}", gateway.drops());
    check_counts(&gateway);
}

/// VIPs with few sessions leave the rest of their equal parts to others: when a flood's standby sessions fill the
/// table, neither a VIP above its equal part nor a pod in it has reached its fair share.
#[test]
fn unused_parts_go_to_holders_below_their_fair_share_before_a_flood() {
    let (own, flooded) = ("192.0.2.10", "192.0.2.12");
    let mut peer = Gateway::new(&Setup { capacity: 2048, reserve: Some(0), ..Setup::default() });
    peer.skip_counter_check();
    let mut set = policy();
    let vip = set.vips[0].clone();
    let small_vips: Vec<String> = (30..39).map(|n| format!("192.0.2.{n}")).collect();
    let more = small_vips.iter().map(String::as_str).chain([flooded]);
    set.vips.extend(more.clone().map(|address| VipSpec { address: ip(address), ..vip.clone() }));
    set.services = more.chain([own]).map(other_service).collect();
    let connect_all = |gateway: &mut Gateway, vip: &str, clients: std::ops::Range<u16>| {
        let target = (ip(vip), 80).into();
        clients.filter(|n| connect(gateway, 0, distinct_client(*n, false), target).is_some()).count()
    };
    peer.set_policy(&set);
    assert_eq!(connect_all(&mut peer, flooded, 0..1500), 1500);
    let standby = session_records::<u32>(&peer.workers[0].tables().sessions, &peer);
    let mut gateway = Gateway::new(&setup(1));
    gateway.skip_counter_check();
    gateway.set_policy(&set);
    for (vip, n) in small_vips.iter().zip(0..) {
        assert_eq!(connect_all(&mut gateway, vip, 2000 + n..2001 + n), 1);
    }
    let before = open_confirmed(&mut gateway, "10.244.1.5", 90);
    assert_eq!(connect_all(&mut gateway, own, 2100..2110), 10);
    apply_standby(&mut gateway, &standby);
    let standby_count = |gateway: &Gateway| gateway.workers[0].tables().sessions.standby_count();
    assert_eq!((gateway.sessions(), standby_count(&gateway)), (109, 851), "everything except the reserve");
    // Equal parts would be 87 sessions for each of eleven VIPs, and 43 for each of two members.
    let opened = (0..100).filter(|n| open(&mut gateway, 0, "10.244.1.5", 7000 + n).is_some()).count();
    assert_eq!((opened, connect_all(&mut gateway, own, 2110..2210)), (100, 100), "{:?}", gateway.drops());
    assert_eq!((count_alive(&mut gateway, &before), ended(&gateway, EndReason::OverShare)), (90, 0));
    assert_eq!((gateway.sessions(), standby_count(&gateway)), (309, 651), "the flood's standby sessions gave way");
    // The same within a VIP: pods with few sessions leave the rest to the two that want more.
    let small_pods: Vec<String> = (30..60).map(|n| format!("10.244.1.{n}")).collect();
    let mut gateway = Gateway::new(&setup(1));
    gateway.skip_counter_check();
    let mut set = policy();
    let endpoint = set.endpoints.iter().find(|endpoint| endpoint.address == ip("10.244.1.5")).unwrap().clone();
    set.endpoints.extend(small_pods.iter().map(|pod| EndpointSpec { address: ip(pod), ..endpoint.clone() }));
    gateway.set_policy(&set);
    for pod in &small_pods {
        assert!(open(&mut gateway, 0, pod, 5000).is_some());
    }
    let before = open_confirmed(&mut gateway, "10.244.1.6", 100);
    let greedy = open_confirmed(&mut gateway, "10.244.1.5", 1000);
    assert_eq!((before.len(), greedy.len()), (100, 830), "everything except the reserve");
    let opened = (0..300).filter(|n| open(&mut gateway, 0, "10.244.1.6", 7000 + n).is_some()).count();
    assert_eq!((opened, count_alive(&mut gateway, &before)), (300, 100), "{:?}", gateway.drops());
    assert!(open(&mut gateway, 0, "10.244.1.5", 60_000).is_none());
    check_counts(&gateway);
}

/// Flushed sessions keep their slots while their ports are in quarantine; standby sessions that arrive then stay until
/// the next batch needs capacity.
#[test]
fn a_batch_opens_sessions_in_a_table_full_of_quarantined_and_standby_ones() {
    let mut peer = Gateway::new(&Setup { capacity: 2048, reserve: Some(0), ..Setup::default() });
    peer.skip_counter_check();
    assert_eq!(open_confirmed(&mut peer, OTHER_POD, 700).len(), 700);
    let standby = session_records::<u32>(&peer.workers[0].tables().sessions, &peer);
    let mut gateway = Gateway::new(&Setup { capacity: 2048, reserve: Some(512), ..setup(1) });
    gateway.skip_counter_check();
    assert_eq!(open_confirmed(&mut gateway, "10.244.1.5", 1500).len(), 1500);
    let flushed = gateway.flush(0, SessionFilter::default());
    assert_eq!((flushed, gateway.sessions()), (1500, 0));
    apply_standby(&mut gateway, &standby);
    assert_eq!(gateway.workers[0].tables().sessions.standby_count(), 700);
    for n in 0..64 {
        let first = packet(Protocol::Udp, (ip("10.244.1.6"), 7000 + n).into(), at(REMOTE[0]));
        assert!(gateway.workers[0].io().inject(INSIDE, &first));
    }
    assert_eq!((gateway.run().len(), gateway.sessions()), (64, 64), "{:?}", gateway.drops());
    check_counts(&gateway);
}

#[test]
fn fair_shares_survive_restarts_and_policy_changes() {
    for workers in [1, 2] {
        let path = std::env::temp_dir().join(format!("vipgate-fair-shares-{}-{workers}", std::process::id()));
        let setup = Setup { state: Some(path.clone()), ..setup(workers) };
        let mut gateway = Gateway::new(&setup);
        gateway.skip_counter_check();
        let before = open_confirmed(&mut gateway, OTHER_POD, 20);
        let capacity = 960 * u16::from(workers);
        let greedy_sessions = open_confirmed(&mut gateway, "10.244.1.5", capacity);
        assert_eq!(greedy_sessions.len(), usize::from(capacity) - 20);
        let now = gateway.now;
        drop(gateway);
        let mut gateway = Gateway::starting_at(&setup, network(), &policy(), now.plus(500));
        gateway.skip_counter_check();
        check_counts(&gateway);
        let mut new_sessions = 0..;
        let mut fifty = |gateway: &mut Gateway| {
            let ports = new_sessions.by_ref().take(50);
            ports.filter(|n| open(gateway, 0, OTHER_POD, 7000 + n).is_some()).count()
        };
        assert_eq!((fifty(&mut gateway), count_alive(&mut gateway, &before)), (50, 20));
        // The greedy pod's sessions have had no packet since its VIP was removed: they are still in the table, and
        // count for it.
        let mut without = policy();
        without.vips.retain(|vip| vip.address != ip(VIPS[0]));
        without.endpoints.retain(|endpoint| !endpoint.vips.contains(&ip(VIPS[0])));
        gateway.set_policy(&without);
        gateway.run();
        assert_eq!((fifty(&mut gateway), count_alive(&mut gateway, &before)), (50, 20));
        check_counts(&gateway);
        gateway.set_policy(&policy());
        gateway.run();
        assert_eq!((fifty(&mut gateway), count_alive(&mut gateway, &before)), (50, 20));
        check_counts(&gateway);
        assert!(ended(&gateway, EndReason::OverShare) >= 150);
        drop(gateway);
        for worker in 0..workers {
            std::fs::remove_file(path.with_extension(worker.to_string())).unwrap();
        }
    }
}

#[test]
fn holders_at_their_share_are_rejected_until_closed_connections_are_evicted() {
    let mut gateway = Gateway::new(&setup(1));
    gateway.skip_counter_check();
    let greedy_sessions = open_confirmed(&mut gateway, "10.244.1.5", 900);
    let remote = at(REMOTE[0]);
    for port in 1000..1060 {
        let pod = at(&format!("10.244.1.5:{port}"));
        let seen = gateway.pod_sends(&tcp(pod, remote, "S", 1000, 0));
        let (vip, _) = ends(&seen);
        gateway.remote_sends(&tcp(remote, vip, "SA", 5000, 1001));
        gateway.pod_sends(&tcp(pod, remote, "FA", 1001, 5001));
        gateway.remote_sends(&tcp(remote, vip, "FA", 5001, 1002));
        gateway.pod_sends(&tcp(pod, remote, "A", 1002, 5002));
    }
    assert_eq!(gateway.sessions(), 960);
    assert!(open(&mut gateway, 0, "10.244.1.5", 60_000).is_none(), "no other holder has more");
    gateway.advance(1_000);
    // The first attempts are rejected; eviction then frees closed connections for the next ones.
    let got = (0..100).filter(|n| open(&mut gateway, 0, "10.244.1.5", 61_000 + n).is_some()).count();
    assert!((45..=60).contains(&got), "{got}");
    assert_eq!((count_alive(&mut gateway, &greedy_sessions), ended(&gateway, EndReason::OverShare)), (900, 0));
    check_counts(&gateway);
}
