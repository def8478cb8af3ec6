//! Fair shares of the session table: whoever floods it, pod or client or another gateway, fills its own share. Those that have less than
//! theirs open what they want, and keep it.

mod random;

use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use crossbeam::channel::bounded;
use vipgate_dataplane::command::{Command, SessionFilter};
use vipgate_dataplane::counters::{DropReason, EndReason};
use vipgate_dataplane::session::entry::Slot;
use vipgate_dataplane::session::image::Image;
use vipgate_dataplane::session::{SessionFamily, Sessions};
use vipgate_dataplane::snapshot::members::GatewayId;
use vipgate_dataplane::snapshot::spec::{EndpointSpec, ServiceSpec, VipSpec};

use crate::support::services::*;
use crate::support::*;

const FAR: [&str; 2] = ["198.51.100.10:53", "[2001:db8:51::10]:53"];
/// Another tenant's VIP, and its pod.
const OTHER_VIP: &str = "192.0.2.11";
const OTHER_POD: &str = "10.244.1.21";

/// Tables of 1024 sessions, of which 960 are shared.
fn setup(workers: u8) -> Setup {
    Setup { workers, capacity: 1024, reserve: Some(64), frames: 1024, ..Setup::default() }
}

fn far(pod: &str) -> SocketAddr {
    at(FAR[usize::from(pod.contains(':'))])
}

/// A pod's session from a port; `None` if it is refused. Its packet as it left.
fn open(gateway: &mut Gateway, worker: usize, pod: &str, port: u16) -> Option<Vec<u8>> {
    let sent = gateway.arrives(worker, INSIDE, &packet(Protocol::Udp, (ip(pod), port).into(), far(pod)));
    sent.into_iter().next().map(|(_, bytes)| bytes)
}

/// Sessions of a pod from ports from 2000 on, answered; those that it gets.
fn answered(gateway: &mut Gateway, pod: &str, count: u16) -> Vec<Vec<u8>> {
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

/// Whether an answer to a pod's packet still reaches it.
fn is_alive(gateway: &mut Gateway, worker: usize, seen: &[u8]) -> bool {
    gateway.arrives(worker, OUTSIDE, &answer_to(seen, Protocol::Udp)).len() == 1
}

fn alive(gateway: &mut Gateway, sessions: &[Vec<u8>]) -> usize {
    let workers = gateway.workers.len();
    sessions.iter().enumerate().filter(|(n, seen)| is_alive(gateway, n % workers, seen)).count()
}

/// A connection of a client at a VIP that both sides confirm; `None` if it is refused. Its backend.
fn connect(gateway: &mut Gateway, worker: usize, client: SocketAddr, vip: SocketAddr) -> Option<SocketAddr> {
    let sent = gateway.arrives(worker, OUTSIDE, &tcp(client, vip, "S", 1000, 0));
    let backend = ends(&sent.first()?.1).1;
    assert_eq!(gateway.arrives(worker, INSIDE, &tcp(backend, client, "SA", 5000, 1001)).len(), 1);
    assert_eq!(gateway.arrives(worker, OUTSIDE, &tcp(client, vip, "A", 1001, 5001)).len(), 1);
    Some(backend)
}

/// Whether a backend still reaches its client by way of the VIP.
fn serves(gateway: &mut Gateway, worker: usize, client: SocketAddr, vip: SocketAddr, backend: SocketAddr) -> bool {
    let sent = gateway.arrives(worker, INSIDE, &tcp(backend, client, "PA", 5001, 1001));
    sent.len() == 1 && sent[0].0 == OUTSIDE && ends(&sent[0].1) == (vip, client)
}

/// Another tenant's Service at a VIP.
fn other_service(vip: &str) -> ServiceSpec {
    ServiceSpec { name: format!("Service other/{vip}").into(), vips: vec![ip(vip)], ..service(&[backend(OTHER_POD)]) }
}

/// A client of its own address.
fn stranger(n: u16, v6: bool) -> SocketAddr {
    if v6 {
        return at(&format!("[2001:db8:51:{n:x}::1]:4000"));
    }
    (IpAddr::V4(Ipv4Addr::from_bits(0x0b00_0000 + u32::from(n))), 4000).into()
}

fn ended(gateway: &Gateway, reason: EndReason) -> u64 {
    gateway.workers.iter().map(|it| it.counters().sessions_ended[reason as usize].get()).sum()
}

fn refused(gateway: &Gateway) -> u64 {
    gateway.drops().get(&DropReason::SessionTableFull).copied().unwrap_or(0)
}

/// Every worker has its reserve whole, and counts for each VIP what is in its table.
fn check_counts(gateway: &Gateway) {
    for worker in &gateway.workers {
        random::recount(&worker.tables().sessions);
    }
}

#[test]
fn a_pod_without_limits_fills_what_nobody_else_wants_and_gives_way() {
    for (workers, hog, neighbour) in
        [(1, "10.244.1.5", "10.244.1.6"), (2, "10.244.1.5", "10.244.1.6"), (1, "fd00:244:1::5", "fd00:244:1::6")]
    {
        let mut gateway = Gateway::new(&setup(workers));
        gateway.counts_vary();
        let before = answered(&mut gateway, OTHER_POD, 20);
        let room = 960 * u16::from(workers);
        let taken = answered(&mut gateway, hog, room + 300);
        assert_eq!((before.len(), taken.len()), (20, usize::from(room) - 20), "all but the reserve");
        assert_eq!((refused(&gateway), ended(&gateway, EndReason::OverShare)), (320, 0));
        // Another tenant, and another pod of the same.
        let newcomers: Vec<_> = (0..50).filter_map(|n| open(&mut gateway, 0, OTHER_POD, 7000 + n)).collect();
        assert_eq!(newcomers.len(), 50, "{:?}", gateway.drops());
        let neighbours: Vec<_> = (0..50).filter_map(|n| open(&mut gateway, 0, neighbour, 7000 + n)).collect();
        assert_eq!(neighbours.len(), 50, "{:?}", gateway.drops());
        let lives = |gateway: &mut Gateway, all: &[Vec<u8>]| all.iter().filter(|it| is_alive(gateway, 0, it)).count();
        assert_eq!(lives(&mut gateway, &newcomers) + lives(&mut gateway, &neighbours), 100);
        assert_eq!(alive(&mut gateway, &before), 20);
        assert_eq!(ended(&gateway, EndReason::OverShare), 100);
        assert_eq!(alive(&mut gateway, &taken), usize::from(room) - 20 - 100, "no more than others needed");
        assert_eq!(gateway.sessions(), room.into());
        check_counts(&gateway);
    }
}

#[test]
fn sessions_that_nobody_answered_go_before_those_that_somebody_did() {
    let mut gateway = Gateway::new(&setup(1));
    let established = answered(&mut gateway, "10.244.1.5", 480);
    for n in 0..480 {
        assert!(open(&mut gateway, 0, "10.244.1.5", 10_000 + n).is_some());
    }
    for n in 0..50 {
        assert!(open(&mut gateway, 0, OTHER_POD, 7000 + n).is_some());
    }
    // Eight are looked at for each that goes: one in 256 times all of them are established.
    assert!(alive(&mut gateway, &established) >= 478);
    let over = ended(&gateway, EndReason::OverShare);
    assert_eq!(ended(&gateway, EndReason::Evicted) + over, 50);
    gateway.counts_vary();
}

#[test]
fn clients_of_one_vip_take_nothing_from_another_one() {
    for (workers, v6) in [(1, false), (2, false), (1, true)] {
        let mut gateway = Gateway::new(&setup(workers));
        gateway.counts_vary();
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
        let sessions = answered(&mut gateway, pod, 20);
        // A botnet: each of its clients is real.
        let flood = 960 * u16::from(workers) + 300;
        let bots = (0..flood).filter(|&n| {
            connect(&mut gateway, usize::from(n) % usize::from(workers), stranger(n, false), (ip(OTHER_VIP), 80).into())
                .is_some()
        });
        assert_eq!(bots.count(), usize::from(960 * u16::from(workers)) - 50);
        assert_eq!(refused(&gateway), 350);
        for n in 30..80 {
            let worker = usize::from(n) % usize::from(workers);
            assert!(connect(&mut gateway, worker, client(n), own).is_some(), "client {n}: {:?}", gateway.drops());
        }
        let more: Vec<_> = (0..50).filter_map(|n| open(&mut gateway, 0, pod, 7000 + n)).collect();
        assert_eq!(more.len(), 50, "{:?}", gateway.drops());
        assert!(more.iter().all(|seen| is_alive(&mut gateway, 0, seen)));
        assert_eq!(alive(&mut gateway, &sessions), 20);
        for (n, backend) in connected.into_iter().enumerate() {
            assert!(serves(&mut gateway, 0, client(n as u16), own, backend));
        }
        assert_eq!((refused(&gateway), ended(&gateway, EndReason::OverShare)), (350, 100));
        check_counts(&gateway);
    }
}

/// Blind packets at many VIPs: each of them has little, so nobody is above its share but who has connections that stand.
#[test]
fn blind_packets_at_many_vips_end_nobodys_established_sessions() {
    for own in [false, true] {
        let mut gateway = Gateway::new(&setup(1));
        gateway.counts_vary();
        let flooded: Vec<String> = (12..20).map(|n| format!("192.0.2.{n}")).collect();
        let mut policy = with_services(
            &flooded.iter().map(|vip| other_service(vip)).chain([service(&both_pods())]).collect::<Vec<_>>(),
        );
        let vip = policy.vips[0].clone();
        policy.vips.extend(flooded.iter().map(|address| VipSpec { address: ip(address), ..vip.clone() }));
        gateway.set_policy(&policy);
        let established = answered(&mut gateway, "10.244.1.5", 600);
        for n in 0..4000 {
            // Or at its own: clients are a member of their VIP, as each pod is.
            let target = if own { VIPS[0] } else { &flooded[usize::from(n % 8)] };
            gateway.arrives(0, OUTSIDE, &tcp(stranger(n, false), (ip(target), 80).into(), "S", 1000, 0));
            if n % 100 == 0 {
                assert!(open(&mut gateway, 0, "10.244.1.6", 7000 + n / 100).is_some(), "{n}: {:?}", gateway.drops());
                let client = at(&format!("198.51.100.10:{}", 1000 + n));
                assert!(connect(&mut gateway, 0, client, (ip(VIPS[0]), 80).into()).is_some(), "{:?}", gateway.drops());
            }
        }
        assert_eq!((alive(&mut gateway, &established), ended(&gateway, EndReason::OverShare)), (600, 0));
        assert!(ended(&gateway, EndReason::Evicted) > 3600);
        check_counts(&gateway);
    }
}

/// The open sessions of a worker, as it would tell them to another gateway.
fn images<A: SessionFamily>(sessions: &Sessions, gateway: &Gateway) -> Vec<Image> {
    let table = A::table(sessions);
    let slots = (0..table.slots()).map(Slot).filter(|slot| table.deadline(*slot) != 0);
    slots.map(|slot| A::image(sessions.image(slot, gateway.now))).collect()
}

/// Has the gateway take standby sessions of another one.
fn take(gateway: &mut Gateway, images: &[Image]) {
    for images in images.chunks(256) {
        let (reply, _answer) = bounded(1);
        let command = Command::Take { images: images.to_vec(), round: 1, from: GatewayId(1), reply };
        gateway.commands[0].send(command).unwrap();
        gateway.run();
    }
}

#[test]
fn standby_sessions_end_nobodys_and_give_way_to_live_ones() {
    let mut peer = Gateway::new(&Setup { capacity: 2048, reserve: Some(0), ..Setup::default() });
    peer.counts_vary();
    assert_eq!(answered(&mut peer, "10.244.1.5", 1500).len(), 1500);
    let standby = images::<u32>(&peer.workers[0].tables().sessions, &peer);
    let mut gateway = Gateway::new(&setup(1));
    gateway.counts_vary();
    let live = answered(&mut gateway, OTHER_POD, 300);
    take(&mut gateway, &standby);
    let copies = |gateway: &Gateway| gateway.workers[0].tables().sessions.copies();
    assert_eq!((gateway.sessions(), copies(&gateway)), (300, 660), "all but the reserve");
    let more: Vec<_> = (0..50).filter_map(|n| open(&mut gateway, 0, OTHER_POD, 7000 + n)).collect();
    assert_eq!((more.len(), copies(&gateway)), (50, 610), "{:?}", gateway.drops());
    assert_eq!((alive(&mut gateway, &live), alive(&mut gateway, &more)), (300, 50));
    assert_eq!(gateway.workers[0].counters().copies_refused.get(), 840 + 50);
    check_counts(&gateway);
    // The other way about: its own sessions fill the table, and standby sessions find no place but half of the reserve.
    let larger = Setup { capacity: 1088, reserve: Some(128), ..setup(1) };
    let mut gateway = Gateway::new(&larger);
    gateway.counts_vary();
    let live = answered(&mut gateway, OTHER_POD, 1100);
    take(&mut gateway, &standby);
    assert_eq!((live.len(), copies(&gateway), alive(&mut gateway, &live)), (960, 64, 960));
    let newcomers = (0..64).filter(|n| open(&mut gateway, 0, "10.244.1.6", 3000 + n).is_some()).count();
    assert_eq!(newcomers, 64, "the other half is for them: {:?}", gateway.drops());
    // What nobody answered, of whoever has most, makes room for them.
    let mut gateway = Gateway::new(&larger);
    gateway.counts_vary();
    let flood = (0..960).filter(|n| open(&mut gateway, 0, OTHER_POD, 2000 + n).is_some()).count();
    gateway.pass(1_000);
    for _ in 0..20 {
        take(&mut gateway, &standby[..400]);
    }
    assert_eq!((flood, copies(&gateway)), (960, 400), "{:?}", gateway.drops());
    check_counts(&gateway);
    // Those that are there make room for a pod that has its share already.
    let mut gateway = Gateway::new(&setup(1));
    gateway.counts_vary();
    take(&mut gateway, &standby);
    gateway.pass(1_000);
    let tries = (0..300).filter(|n| open(&mut gateway, 0, "10.244.1.6", 3000 + n).is_some()).count();
    assert!(tries >= 290, "{tries}: {:?}", gateway.drops());
    check_counts(&gateway);
}

/// VIPs that want little leave the rest to those that want more: a flood's standby sessions fill the table, and neither a VIP that has more than
/// an equal part of it, nor a pod in that VIP, has had its share by that.
#[test]
fn what_small_ones_leave_is_everybodys_before_it_is_a_floods() {
    let (own, flooded) = ("192.0.2.10", "192.0.2.12");
    let mut peer = Gateway::new(&Setup { capacity: 2048, reserve: Some(0), ..Setup::default() });
    peer.counts_vary();
    let mut set = policy();
    let vip = set.vips[0].clone();
    let small: Vec<String> = (30..39).map(|n| format!("192.0.2.{n}")).collect();
    let more = small.iter().map(String::as_str).chain([flooded]);
    set.vips.extend(more.clone().map(|address| VipSpec { address: ip(address), ..vip.clone() }));
    set.services = more.chain([own]).map(other_service).collect();
    let connect_all = |gateway: &mut Gateway, vip: &str, clients: std::ops::Range<u16>| {
        let target = (ip(vip), 80).into();
        clients.filter(|n| connect(gateway, 0, stranger(*n, false), target).is_some()).count()
    };
    peer.set_policy(&set);
    assert_eq!(connect_all(&mut peer, flooded, 0..1500), 1500);
    let standby = images::<u32>(&peer.workers[0].tables().sessions, &peer);
    let mut gateway = Gateway::new(&setup(1));
    gateway.counts_vary();
    gateway.set_policy(&set);
    for (vip, n) in small.iter().zip(0..) {
        assert_eq!(connect_all(&mut gateway, vip, 2000 + n..2001 + n), 1);
    }
    let before = answered(&mut gateway, "10.244.1.5", 90);
    assert_eq!(connect_all(&mut gateway, own, 2100..2110), 10);
    take(&mut gateway, &standby);
    let copies = |gateway: &Gateway| gateway.workers[0].tables().sessions.copies();
    assert_eq!((gateway.sessions(), copies(&gateway)), (109, 851), "all but the reserve");
    // An equal part would be 87 sessions of eleven VIPs each, and 43 of two members.
    let opened = (0..100).filter(|n| open(&mut gateway, 0, "10.244.1.5", 7000 + n).is_some()).count();
    assert_eq!((opened, connect_all(&mut gateway, own, 2110..2210)), (100, 100), "{:?}", gateway.drops());
    assert_eq!((alive(&mut gateway, &before), ended(&gateway, EndReason::OverShare)), (90, 0));
    assert_eq!((gateway.sessions(), copies(&gateway)), (309, 651), "the flood makes up for it");
    // Within a VIP it is the same: pods that want little leave the rest to both of those that want more.
    let crowd: Vec<String> = (30..60).map(|n| format!("10.244.1.{n}")).collect();
    let mut gateway = Gateway::new(&setup(1));
    gateway.counts_vary();
    let mut set = policy();
    let endpoint = set.endpoints.iter().find(|endpoint| endpoint.address == ip("10.244.1.5")).unwrap().clone();
    set.endpoints.extend(crowd.iter().map(|pod| EndpointSpec { address: ip(pod), ..endpoint.clone() }));
    gateway.set_policy(&set);
    for pod in &crowd {
        assert!(open(&mut gateway, 0, pod, 5000).is_some());
    }
    let before = answered(&mut gateway, "10.244.1.6", 100);
    let hog = answered(&mut gateway, "10.244.1.5", 1000);
    assert_eq!((before.len(), hog.len()), (100, 830), "all but the reserve");
    let opened = (0..300).filter(|n| open(&mut gateway, 0, "10.244.1.6", 7000 + n).is_some()).count();
    assert_eq!((opened, alive(&mut gateway, &before)), (300, 100), "{:?}", gateway.drops());
    assert!(open(&mut gateway, 0, "10.244.1.5", 60_000).is_none());
    check_counts(&gateway);
}

/// Sessions that were flushed have their places while their ports are in quarantine; so do standby sessions that come then, until the next batch.
#[test]
fn a_batch_finds_room_behind_standby_sessions_that_came_into_a_table_of_quarantined_ones() {
    let mut peer = Gateway::new(&Setup { capacity: 2048, reserve: Some(0), ..Setup::default() });
    peer.counts_vary();
    assert_eq!(answered(&mut peer, OTHER_POD, 700).len(), 700);
    let standby = images::<u32>(&peer.workers[0].tables().sessions, &peer);
    let mut gateway = Gateway::new(&Setup { capacity: 2048, reserve: Some(512), ..setup(1) });
    gateway.counts_vary();
    assert_eq!(answered(&mut gateway, "10.244.1.5", 1500).len(), 1500);
    let flushed = gateway.flush(0, SessionFilter::default());
    assert_eq!((flushed, gateway.sessions()), (1500, 0));
    take(&mut gateway, &standby);
    assert_eq!(gateway.workers[0].tables().sessions.copies(), 700);
    for n in 0..64 {
        let first = packet(Protocol::Udp, (ip("10.244.1.6"), 7000 + n).into(), at(FAR[0]));
        assert!(gateway.workers[0].io().inject(INSIDE, &first));
    }
    assert_eq!((gateway.run().len(), gateway.sessions()), (64, 64), "{:?}", gateway.drops());
    check_counts(&gateway);
}

#[test]
fn shares_outlive_a_restart_and_changes_of_policy() {
    for workers in [1, 2] {
        let path = std::env::temp_dir().join(format!("vipgate-fair-shares-{}-{workers}", std::process::id()));
        let setup = Setup { state: Some(path.clone()), ..setup(workers) };
        let mut gateway = Gateway::new(&setup);
        gateway.counts_vary();
        let before = answered(&mut gateway, OTHER_POD, 20);
        let room = 960 * u16::from(workers);
        let taken = answered(&mut gateway, "10.244.1.5", room);
        assert_eq!(taken.len(), usize::from(room) - 20);
        let now = gateway.now;
        drop(gateway);
        let mut gateway = Gateway::starting_at(&setup, network(), &policy(), now.plus(500));
        gateway.counts_vary();
        check_counts(&gateway);
        let mut newcomers = 0..;
        let mut fifty = |gateway: &mut Gateway| {
            let ports = newcomers.by_ref().take(50);
            ports.filter(|n| open(gateway, 0, OTHER_POD, 7000 + n).is_some()).count()
        };
        assert_eq!((fifty(&mut gateway), alive(&mut gateway, &before)), (50, 20));
        // Nobody has sent for the hog's sessions since its VIP went: they are in the table still, and count for it.
        let mut without = policy();
        without.vips.retain(|vip| vip.address != ip(VIPS[0]));
        without.endpoints.retain(|endpoint| !endpoint.vips.contains(&ip(VIPS[0])));
        gateway.set_policy(&without);
        gateway.run();
        assert_eq!((fifty(&mut gateway), alive(&mut gateway, &before)), (50, 20));
        check_counts(&gateway);
        gateway.set_policy(&policy());
        gateway.run();
        assert_eq!((fifty(&mut gateway), alive(&mut gateway, &before)), (50, 20));
        check_counts(&gateway);
        assert!(ended(&gateway, EndReason::OverShare) >= 150);
        drop(gateway);
        for worker in 0..workers {
            std::fs::remove_file(path.with_extension(worker.to_string())).unwrap();
        }
    }
}

#[test]
fn whoever_has_its_share_is_refused_and_closing_connections_make_room() {
    let mut gateway = Gateway::new(&setup(1));
    gateway.counts_vary();
    let taken = answered(&mut gateway, "10.244.1.5", 900);
    let far = at(FAR[0]);
    for port in 1000..1060 {
        let pod = at(&format!("10.244.1.5:{port}"));
        let seen = gateway.pod_sends(&tcp(pod, far, "S", 1000, 0));
        let (vip, _) = ends(&seen);
        gateway.far_sends(&tcp(far, vip, "SA", 5000, 1001));
        gateway.pod_sends(&tcp(pod, far, "FA", 1001, 5001));
        gateway.far_sends(&tcp(far, vip, "FA", 5001, 1002));
        gateway.pod_sends(&tcp(pod, far, "A", 1002, 5002));
    }
    assert_eq!(gateway.sessions(), 960);
    assert!(open(&mut gateway, 0, "10.244.1.5", 60_000).is_none(), "no other has less");
    gateway.pass(1_000);
    // The first of each few asks in vain; for the next ones, connections that are over have made room.
    let got = (0..100).filter(|n| open(&mut gateway, 0, "10.244.1.5", 61_000 + n).is_some()).count();
    assert!((45..=60).contains(&got), "{got}");
    assert_eq!((alive(&mut gateway, &taken), ended(&gateway, EndReason::OverShare)), (900, 0));
    check_counts(&gateway);
}
