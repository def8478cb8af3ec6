//! What people see of packets: those that a tap wants, whole, as they came and went; drops by whom; sessions as they begin and end.

use std::net::SocketAddr;
use std::sync::Arc;

use crossbeam::channel::bounded;
use vipgate_dataplane::command::{Command, DropChunk};
use vipgate_dataplane::counters::{Direction, DropReason};
use vipgate_dataplane::time::Tick;
use vipgate_dataplane::verdict::Verdict;
use vipgate_dataplane::watch::drops::{DropRecord, MOST};
use vipgate_dataplane::watch::log::SessionQueue;
use vipgate_dataplane::watch::tap::{Captured, Outcome, TapFilter};

use crate::support::*;

const POD: &str = "10.244.1.5:4000";
const FAR: &str = "198.51.100.10:53";

impl Gateway {
    fn drop_records(&mut self) -> Box<DropChunk> {
        let (reply, answer) = bounded(1);
        let chunk = Box::new(DropChunk { now: Tick(0), last: Default::default(), records: Vec::with_capacity(MOST) });
        self.commands[0].send(Command::Drops { chunk, reply }).unwrap();
        self.turn();
        answer.try_recv().unwrap()
    }
}

fn worker_sees(gateway: &mut Gateway, interface: vipgate_dataplane::io::InterfaceId, packet: &[u8]) -> Vec<Captured> {
    assert!(gateway.workers[0].io().inject(interface, packet));
    gateway.run();
    gateway.captured()
}

#[test]
fn a_packet_is_captured_as_it_came_and_as_it_went() {
    let mut gateway = Gateway::new(&Setup::default());
    gateway.capture(&TapFilter::default(), 2048, 1000);
    let mut long = Vec::new();
    let far = at(FAR);
    etherparse::PacketBuilder::ethernet2(POD_MAC, INSIDE_MAC)
        .ipv4([10, 244, 1, 5], [198, 51, 100, 10], 64)
        .udp(4000, far.port())
        .write(&mut long, &(0..1400_u16).map(|n| n as u8).collect::<Vec<_>>())
        .unwrap();
    let seen = worker_sees(&mut gateway, INSIDE, &long);
    assert_eq!(seen.len(), 1);
    let [Captured { before, after, verdict, direction, is_first: true, before_length, after_length, .. }] = &seen[..]
    else {
        panic!("{seen:?}")
    };
    assert_eq!((before, usize::from(*before_length), usize::from(*after_length)), (&long, long.len(), long.len()));
    check_only_translated(before, after);
    check_packet(after);
    assert_eq!((*verdict, *direction), (Verdict::Forward(OUTSIDE), Some(Direction::Egress)));
    gateway.capture(&TapFilter::default(), 60, 1000);
    let seen = worker_sees(&mut gateway, INSIDE, &long);
    assert_eq!((&seen[0].before[..], seen[0].after.len()), (&long[..60], 60), "no more than is wanted");
    assert_eq!(usize::from(seen[0].before_length), long.len());
    gateway.assert_delta("egress 2, created 1");
}

#[test]
fn a_filter_matches_before_and_after_translation() {
    let mut gateway = Gateway::new(&Setup::default());
    let out = gateway.pod_sends(&packet(Protocol::Udp, at(POD), at(FAR)));
    let reply = answer_to(&out, Protocol::Udp);
    let net = |text: &str| TapFilter { nets: vec![text.parse().unwrap()], ..TapFilter::default() };
    let port = |port| TapFilter { port: Some(port), ..TapFilter::default() };
    let outcome = |outcome| TapFilter { outcome, ..TapFilter::default() };
    let vip_port = ends(&out).0.port();
    let cases = [
        (net("10.244.1.5/32"), true),
        (net("192.0.2.10/32"), true),
        (net("198.51.100.0/24"), true),
        (net("10.244.1.6/32"), false),
        (
            TapFilter {
                nets: vec!["10.244.1.5/32".parse().unwrap(), "192.0.2.0/24".parse().unwrap()],
                ..TapFilter::default()
            },
            true,
        ),
        (
            TapFilter {
                nets: vec!["10.244.1.5/32".parse().unwrap(), "192.0.3.0/24".parse().unwrap()],
                ..TapFilter::default()
            },
            false,
        ),
        (port(4000), true),
        (port(vip_port), true),
        (port(4001), false),
        (TapFilter { protocol: Some(17), ..TapFilter::default() }, true),
        (TapFilter { protocol: Some(6), ..TapFilter::default() }, false),
        (TapFilter { interface: Some(OUTSIDE), ..TapFilter::default() }, true),
        (TapFilter { interface: Some(INSIDE), ..TapFilter::default() }, false),
        (outcome(Outcome::Passed), true),
        (outcome(Outcome::Dropped), false),
        (outcome(Outcome::Sent(Direction::Reply)), true),
        (outcome(Outcome::Sent(Direction::Egress)), false),
    ];
    for (filter, matches) in cases {
        gateway.capture(&filter, 256, 1000);
        let seen = worker_sees(&mut gateway, OUTSIDE, &reply);
        assert_eq!(seen.len(), usize::from(matches), "{filter:?}");
    }
    let stray = packet(Protocol::Udp, at(FAR), at("192.0.2.10:9"));
    for (wanted, matches) in [
        (Outcome::Dropped, true),
        (Outcome::DroppedFor(DropReason::NoService), true),
        (Outcome::DroppedFor(DropReason::Quota), false),
        (Outcome::Passed, false),
    ] {
        gateway.capture(&outcome(wanted), 256, 1000);
        let seen = worker_sees(&mut gateway, OUTSIDE, &stray);
        assert_eq!(seen.len(), usize::from(matches), "{wanted:?}");
        assert!(seen.iter().all(|it| it.verdict == Verdict::Drop(DropReason::NoService) && it.after.is_empty()));
    }
    gateway.assert_delta("egress 1, reply 17, drop no_service 4, created 1");
}

#[test]
fn a_filter_for_one_family_matches_nothing_of_the_other() {
    let mut gateway = Gateway::new(&Setup::default());
    for (pod, far) in POD_AND_FAR {
        for (net, other) in [("10.244.1.5/32", "10.244.1.6/32"), ("fd00:244:1::5/128", "fd00:244:1::6/128")] {
            for (net, matches) in [(net, net.contains(':') == pod.contains('[')), (other, false)] {
                let filter = TapFilter { nets: vec![net.parse().unwrap()], ..TapFilter::default() };
                gateway.capture(&filter, 256, 1000);
                let seen = worker_sees(&mut gateway, INSIDE, &packet(Protocol::Tcp, at(pod), at(far)));
                assert_eq!(seen.len(), usize::from(matches), "{net} of {pod}");
                assert!(seen.iter().all(|it| it.before.len() == usize::from(it.before_length)));
            }
        }
    }
    gateway.assert_delta("egress 8, created 2");
}

#[test]
fn what_is_too_much_is_counted_and_left_out() {
    let mut gateway = Gateway::new(&Setup::default());
    gateway.capture(&TapFilter::default(), 256, 3);
    let ring = gateway.rings[0].clone();
    for n in 0..10 {
        gateway.arrives(0, INSIDE, &packet(Protocol::Udp, (at(POD).ip(), 4000 + n).into(), at(FAR)));
    }
    assert_eq!(ring.missed(), 7, "three a second");
    gateway.capture(&TapFilter::default(), 256, 1000);
    let ring = gateway.rings[0].clone();
    for n in 0..20 {
        assert!(
            gateway.workers[0].io().inject(INSIDE, &packet(Protocol::Udp, (at(POD).ip(), 4000 + n).into(), at(FAR)))
        );
    }
    gateway.run();
    assert_eq!((gateway.captured().len(), ring.missed()), (16, 4), "there are sixteen places");
    gateway.pass(2_000);
    gateway.commands[0].send(Command::Capture(None)).unwrap();
    gateway.turn();
    assert!(worker_sees(&mut gateway, INSIDE, &packet(Protocol::Udp, at(POD), at(FAR))).is_empty(), "it is off");
    assert_eq!(Arc::strong_count(&ring), 2, "the worker has let go of it; the test has two");
    gateway.assert_delta("egress 31, created 20");
}

#[test]
fn drops_are_known_by_reason_and_address_with_the_last_packet() {
    let mut gateway = Gateway::new(&Setup { reject: true, ..Setup::default() });
    let strays: Vec<_> = (1..=3_u16).map(|n| packet(Protocol::Udp, at(FAR), (ip("192.0.2.10"), n).into())).collect();
    for stray in &strays {
        gateway.arrives(0, OUTSIDE, stray);
    }
    gateway.arrives(0, INSIDE, &tcp(at(POD), at(FAR), "A", 1, 1));
    gateway.arrives(0, INSIDE, &[0; 20]);
    let chunk = gateway.drop_records();
    let of = |reason: DropReason| {
        chunk.records.iter().filter(|it| it.reason == reason).copied().collect::<Vec<DropRecord>>()
    };
    let [vip] = of(DropReason::NoService)[..] else { panic!("{:?}", chunk.records) };
    assert_eq!((vip.address, vip.packets, vip.doubt), (ip("192.0.2.10"), 3, 0), "answered or not");
    let last = vip.last.packet.unwrap();
    assert_eq!((last.destination, last.ports, vip.last.interface), (ip("192.0.2.10"), Some([53, 3]), OUTSIDE));
    let [pod] = of(DropReason::NoSession)[..] else { panic!("{:?}", chunk.records) };
    assert_eq!((pod.address, pod.packets), (ip("10.244.1.5"), 1));
    assert_eq!(chunk.last[DropReason::NoSession as usize], Some(pod.last));
    assert_eq!(chunk.last[DropReason::NotOurs as usize].unwrap().packet, None, "it is no IP packet");
    assert_eq!(chunk.now, gateway.now);
    let counted: u64 = gateway.drops().values().sum();
    assert_eq!(counted, 5);
    gateway.assert_delta("drop no_service 3, drop no_session 1, drop not_ours 1, answered 3");
}

#[test]
fn sessions_are_logged_from_when_somebody_asks_until_he_stops() {
    for (pod, far) in POD_AND_FAR {
        let from = |port| SocketAddr::from((at(pod).ip(), port));
        let mut gateway = Gateway::new(&Setup::default());
        gateway.pod_sends(&packet(Protocol::Udp, from(1), at(far)));
        let queue = Arc::new(SessionQueue::new(3));
        gateway.commands[0].send(Command::LogSessions(Some(queue.clone()))).unwrap();
        gateway.turn();
        let begun = gateway.now;
        let out = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(far)));
        let began = queue.take().unwrap();
        assert!(began.began && began.at == begun && began.protocol == 17 && began.direction == Direction::Egress);
        assert_eq!((began.before, began.after), ([at(pod), at(far)], [ends(&out).0, at(far)]));
        assert_eq!(queue.take(), None, "packets of a session that stands are nobody's business");
        gateway.pass(20_000);
        let ended: Vec<_> = std::iter::from_fn(|| queue.take()).collect();
        assert_eq!(ended.len(), 2, "also that which began before");
        assert!(ended.iter().all(|it| !it.began));
        assert!(ended.iter().any(|it| it.before == began.before && it.after == began.after));
        for port in 5000..5005 {
            gateway.pod_sends(&packet(Protocol::Udp, from(port), at(far)));
        }
        assert_eq!(queue.lost(), 2);
        gateway.commands[0].send(Command::LogSessions(None)).unwrap();
        gateway.turn();
        assert_eq!(Arc::strong_count(&queue), 1);
        gateway.assert_delta("egress 7, ended idle 2, created 7");
    }
}
