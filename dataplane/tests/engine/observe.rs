//! Observation: packet capture, drop statistics and session log.

use std::net::SocketAddr;
use std::sync::Arc;

use crossbeam::channel::bounded;
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::flow::verdict::Verdict;
use vipgate_dataplane::observe::capture::{CaptureFilter, CapturedPacket, OutcomeFilter};
use vipgate_dataplane::observe::drops::{DropRecord, MAX_RECORDS};
use vipgate_dataplane::observe::session_log::SessionEventQueue;
use vipgate_dataplane::worker::command::{Command, DropChunk};
use vipgate_testkit::*;

const POD: &str = "10.244.1.5:4000";
const REMOTE: &str = "198.51.100.10:53";

fn drop_records(gateway: &mut Gateway) -> Box<DropChunk> {
    let (reply, response) = bounded(1);
    let chunk =
        Box::new(DropChunk { now: Tick(0), last: Default::default(), records: Vec::with_capacity(MAX_RECORDS) });
    gateway.commands[0].send(Command::Drops { chunk, reply }).unwrap();
    gateway.turn();
    response.try_recv().unwrap()
}

fn capture_packet(
    gateway: &mut Gateway,
    interface: vipgate_dataplane::flow::ids::InterfaceId,
    packet: &[u8],
) -> Vec<CapturedPacket> {
    assert!(gateway.workers[0].io().inject(interface, packet));
    gateway.run();
    gateway.captured()
}

#[test]
fn a_capture_has_the_packet_before_and_after_processing() {
    let mut gateway = Gateway::new(&Setup::default());
    gateway.capture(&CaptureFilter::default(), 2048, 1000);
    let mut long = Vec::new();
    let remote = at(REMOTE);
    etherparse::PacketBuilder::ethernet2(POD_MAC, INSIDE_MAC)
        .ipv4([10, 244, 1, 5], [198, 51, 100, 10], 64)
        .udp(4000, remote.port())
        .write(&mut long, &(0..1400_u16).map(|n| n as u8).collect::<Vec<_>>())
        .unwrap();
    let seen = capture_packet(&mut gateway, INSIDE, &long);
    assert_eq!(seen.len(), 1);
    let [CapturedPacket { before, after, verdict, direction, is_first: true, before_length, after_length, .. }] =
        &seen[..]
    else {
        panic!("{seen:?}")
    };
    assert_eq!((before, usize::from(*before_length), usize::from(*after_length)), (&long, long.len(), long.len()));
    check_only_translated(before, after);
    check_packet(after);
    assert_eq!((*verdict, *direction), (Verdict::Forward(OUTSIDE), Some(Direction::Egress)));
    gateway.capture(&CaptureFilter::default(), 60, 1000);
    let seen = capture_packet(&mut gateway, INSIDE, &long);
    assert_eq!((&seen[0].before[..], seen[0].after.len()), (&long[..60], 60), "truncated to the capture length");
    assert_eq!(usize::from(seen[0].before_length), long.len());
    gateway.assert_delta("egress 2, created 1");
}

#[test]
fn a_capture_filter_matches_before_and_after_translation() {
    let mut gateway = Gateway::new(&Setup::default());
    let out = gateway.pod_sends(&packet(Protocol::Udp, at(POD), at(REMOTE)));
    let reply = reply_to(&out, Protocol::Udp);
    let net = |text: &str| CaptureFilter { nets: vec![text.parse().unwrap()], ..CaptureFilter::default() };
    let port = |port| CaptureFilter { port: Some(port), ..CaptureFilter::default() };
    let outcome = |outcome| CaptureFilter { outcome, ..CaptureFilter::default() };
    let vip_port = ends(&out).0.port();
    let cases = [
        (net("10.244.1.5/32"), true),
        (net("192.0.2.10/32"), true),
        (net("198.51.100.0/24"), true),
        (net("10.244.1.6/32"), false),
        (
            CaptureFilter {
                nets: vec!["10.244.1.5/32".parse().unwrap(), "192.0.2.0/24".parse().unwrap()],
                ..CaptureFilter::default()
            },
            true,
        ),
        (
            CaptureFilter {
                nets: vec!["10.244.1.5/32".parse().unwrap(), "192.0.3.0/24".parse().unwrap()],
                ..CaptureFilter::default()
            },
            false,
        ),
        (port(4000), true),
        (port(vip_port), true),
        (port(4001), false),
        (CaptureFilter { protocol: Some(17), ..CaptureFilter::default() }, true),
        (CaptureFilter { protocol: Some(6), ..CaptureFilter::default() }, false),
        (CaptureFilter { interface: Some(OUTSIDE), ..CaptureFilter::default() }, true),
        (CaptureFilter { interface: Some(INSIDE), ..CaptureFilter::default() }, false),
        (outcome(OutcomeFilter::Passed), true),
        (outcome(OutcomeFilter::Dropped), false),
        (outcome(OutcomeFilter::Forwarded(Direction::Reply)), true),
        (outcome(OutcomeFilter::Forwarded(Direction::Egress)), false),
    ];
    for (filter, matches) in cases {
        gateway.capture(&filter, 256, 1000);
        let seen = capture_packet(&mut gateway, OUTSIDE, &reply);
        assert_eq!(seen.len(), usize::from(matches), "{filter:?}");
    }
    let stray = packet(Protocol::Udp, at(REMOTE), at("192.0.2.10:9"));
    for (wanted, matches) in [
        (OutcomeFilter::Dropped, true),
        (OutcomeFilter::DroppedWith(DropReason::NoService), true),
        (OutcomeFilter::DroppedWith(DropReason::Quota), false),
        (OutcomeFilter::Passed, false),
    ] {
        gateway.capture(&outcome(wanted), 256, 1000);
        let seen = capture_packet(&mut gateway, OUTSIDE, &stray);
        assert_eq!(seen.len(), usize::from(matches), "{wanted:?}");
        assert!(seen.iter().all(|it| it.verdict == Verdict::Drop(DropReason::NoService) && it.after.is_empty()));
    }
    gateway.assert_delta("egress 1, reply 17, drop no_service 4, created 1");
}

#[test]
fn a_capture_filter_matches_one_address_family_only() {
    let mut gateway = Gateway::new(&Setup::default());
    for (pod, remote) in POD_AND_REMOTE {
        for (net, other) in [("10.244.1.5/32", "10.244.1.6/32"), ("fd00:244:1::5/128", "fd00:244:1::6/128")] {
            for (net, matches) in [(net, net.contains(':') == pod.contains('[')), (other, false)] {
                let filter = CaptureFilter { nets: vec![net.parse().unwrap()], ..CaptureFilter::default() };
                gateway.capture(&filter, 256, 1000);
                let seen = capture_packet(&mut gateway, INSIDE, &packet(Protocol::Tcp, at(pod), at(remote)));
                assert_eq!(seen.len(), usize::from(matches), "{net} of {pod}");
                assert!(seen.iter().all(|it| it.before.len() == usize::from(it.before_length)));
            }
        }
    }
    gateway.assert_delta("egress 8, created 2");
}

#[test]
fn packets_beyond_the_capture_limits_are_counted() {
    let mut gateway = Gateway::new(&Setup::default());
    gateway.capture(&CaptureFilter::default(), 256, 3);
    let ring = gateway.capture_rings[0].clone();
    for n in 0..10 {
        gateway.receive(0, INSIDE, &packet(Protocol::Udp, (at(POD).ip(), 4000 + n).into(), at(REMOTE)));
    }
    assert_eq!(ring.missed(), 7, "rate limit: three a second");
    gateway.capture(&CaptureFilter::default(), 256, 1000);
    let ring = gateway.capture_rings[0].clone();
    for n in 0..20 {
        assert!(
            gateway.workers[0].io().inject(INSIDE, &packet(Protocol::Udp, (at(POD).ip(), 4000 + n).into(), at(REMOTE)))
        );
    }
    gateway.run();
    assert_eq!((gateway.captured().len(), ring.missed()), (16, 4), "the ring has 16 slots");
    gateway.advance(2_000);
    gateway.commands[0].send(Command::Capture(None)).unwrap();
    gateway.turn();
    assert!(
        capture_packet(&mut gateway, INSIDE, &packet(Protocol::Udp, at(POD), at(REMOTE))).is_empty(),
        "the capture is off"
    );
    assert_eq!(Arc::strong_count(&ring), 2, "the worker has released it; the test has two references");
    gateway.assert_delta("egress 31, created 20");
}

#[test]
fn drops_are_recorded_by_reason_and_address_with_the_last_packet() {
    let mut gateway = Gateway::new(&Setup { reject: true, ..Setup::default() });
    let strays: Vec<_> = (1..=3_u16).map(|n| packet(Protocol::Udp, at(REMOTE), (ip("192.0.2.10"), n).into())).collect();
    for stray in &strays {
        gateway.receive(0, OUTSIDE, stray);
    }
    gateway.receive(0, INSIDE, &tcp(at(POD), at(REMOTE), "A", 1, 1));
    gateway.receive(0, INSIDE, &[0; 20]);
    let chunk = drop_records(&mut gateway);
    let of = |reason: DropReason| {
        chunk.records.iter().filter(|it| it.reason == reason).copied().collect::<Vec<DropRecord>>()
    };
    let [vip] = of(DropReason::NoService)[..] else { panic!("{:?}", chunk.records) };
    assert_eq!((vip.address, vip.packets, vip.max_error), (ip("192.0.2.10"), 3, 0), "with and without an ICMP reply");
    let last = vip.last.packet.unwrap();
    assert_eq!((last.destination, last.ports, vip.last.interface), (ip("192.0.2.10"), Some([53, 3]), OUTSIDE));
    let [pod] = of(DropReason::NoSession)[..] else { panic!("{:?}", chunk.records) };
    assert_eq!((pod.address, pod.packets), (ip("10.244.1.5"), 1));
    assert_eq!(chunk.last[DropReason::NoSession as usize], Some(pod.last));
    assert_eq!(chunk.last[DropReason::NotOurs as usize].unwrap().packet, None, "not an IP packet");
    assert_eq!(chunk.now, gateway.now);
    let counted: u64 = gateway.drops().values().sum();
    assert_eq!(counted, 5);
    gateway.assert_delta("drop no_service 3, drop no_session 1, drop not_ours 1, replies sent 3");
}

#[test]
fn the_session_log_starts_and_stops_on_command() {
    for (pod, remote) in POD_AND_REMOTE {
        let from = |port| SocketAddr::from((at(pod).ip(), port));
        let mut gateway = Gateway::new(&Setup::default());
        gateway.pod_sends(&packet(Protocol::Udp, from(1), at(remote)));
        let queue = Arc::new(SessionEventQueue::new(3));
        gateway.commands[0].send(Command::LogSessions(Some(queue.clone()))).unwrap();
        gateway.turn();
        let opened_at = gateway.now;
        let out = gateway.pod_sends(&packet(Protocol::Udp, at(pod), at(remote)));
        let opened = queue.pop().unwrap();
        assert!(
            opened.opened && opened.at == opened_at && opened.protocol == 17 && opened.direction == Direction::Egress
        );
        assert_eq!((opened.before, opened.after), ([at(pod), at(remote)], [ends(&out).0, at(remote)]));
        assert_eq!(queue.pop(), None, "packets of an existing session are not logged");
        gateway.advance(20_000);
        let ended: Vec<_> = std::iter::from_fn(|| queue.pop()).collect();
        assert_eq!(ended.len(), 2, "including the session from before the log");
        assert!(ended.iter().all(|it| !it.opened));
        assert!(ended.iter().any(|it| it.before == opened.before && it.after == opened.after));
        for port in 5000..5005 {
            gateway.pod_sends(&packet(Protocol::Udp, from(port), at(remote)));
        }
        assert_eq!(queue.lost(), 2);
        gateway.commands[0].send(Command::LogSessions(None)).unwrap();
        gateway.turn();
        assert_eq!(Arc::strong_count(&queue), 1);
        gateway.assert_delta("egress 7, ended idle 2, created 7");
    }
}
