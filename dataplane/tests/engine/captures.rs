//! A capture shows what it is asked for, and changes nothing: over random stories, of two gateways that live through the same one, the
//! one that captures everything and the one that captures what concerns a prefix see the same packets and send the same.

use std::cell::Cell;
use std::net::IpAddr;

use etherparse::{NetSlice, SlicedPacket};
use ipnet::IpNet;
use proptest::prelude::*;
use proptest::test_runner::{Config, FileFailurePersistence, TestRunner};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::verdict::Verdict;
use vipgate_dataplane::watch::tap::{Captured, TapFilter};

use crate::story::{Step, Story, steps};

/// Pods, VIPs, far sides, the gateway itself, and nobody; alone, with neighbours, and all.
const NETS: [&str; 14] = [
    "10.244.1.5/32",
    "10.244.1.6/32",
    "10.244.1.4/30",
    "10.244.1.0/24",
    "192.0.2.10/32",
    "192.0.2.11/32",
    "192.0.2.1/32",
    "198.51.100.10/32",
    "198.51.100.0/24",
    "0.0.0.0/0",
    "172.16.0.0/12",
    "fd00:244:1::5/128",
    "2001:db8::/64",
    "2001:db8:51::/48",
];

fn addresses(packet: &[u8]) -> Option<[IpAddr; 2]> {
    match SlicedPacket::from_ethernet(packet).ok()?.net? {
        NetSlice::Ipv4(v4) => Some([v4.header().source_addr().into(), v4.header().destination_addr().into()]),
        NetSlice::Ipv6(v6) => Some([v6.header().source_addr().into(), v6.header().destination_addr().into()]),
        NetSlice::Arp(_) => None,
    }
}

fn concerns(net: IpNet, it: &Captured) -> bool {
    // Behind the headers of a tunnel the packet stands as it is long.
    let inside = it.after.len().checked_sub(it.before.len()).map(|start| &it.after[start..]);
    let packets = [Some(&it.before[..]), Some(&it.after), inside.filter(|_| !matches!(it.verdict, Verdict::Answer(_)))];
    packets.into_iter().flatten().filter_map(addresses).flatten().any(|one| net.contains(&one))
}

/// What a packet of the story became, and what was seen of it.
fn live(story: &mut Story, packets: &[(usize, InterfaceId, Vec<u8>)]) -> (Vec<(InterfaceId, Vec<u8>)>, Vec<Captured>) {
    for (worker, interface, packet) in packets {
        assert!(story.gateway.workers[*worker].io().inject(*interface, packet));
    }
    let sent = story.gateway.run();
    story.sent.extend(sent.clone());
    (sent, story.gateway.captured())
}

#[derive(Default)]
struct Counts {
    concerned: Cell<u32>,
    left_out: Cell<u32>,
    answered: Cell<u32>,
}

fn compare(steps: &[Step], workers: u8, several: bool, net: IpNet, at_once: usize, counts: &Counts) {
    let filters = [TapFilter::default(), TapFilter { nets: vec![net], ..TapFilter::default() }];
    let mut stories = filters.map(|filter| {
        let mut story = Story::new(workers, several);
        story.gateway.capture(&filter, 2048, u32::MAX);
        story
    });
    for steps in steps.chunks(at_once) {
        let packets =
            stories.each_mut().map(|story| steps.iter().filter_map(|step| story.packet(step)).collect::<Vec<_>>());
        assert_eq!(packets[0], packets[1]);
        let [(sent, all), (sent_too, some)] = [0, 1].map(|which| live(&mut stories[which], &packets[which]));
        assert_eq!(sent, sent_too, "the way of a packet is not for whoever looks on");
        let (wanted, rest): (Vec<_>, Vec<_>) = all.iter().partition(|it| concerns(net, it));
        assert_eq!(format!("{wanted:02x?}"), format!("{some:02x?}"), "{net}");
        let answered = wanted.iter().filter(|it| matches!(it.verdict, Verdict::Answer(_))).count();
        for (count, more) in
            [(&counts.concerned, wanted.len()), (&counts.left_out, rest.len()), (&counts.answered, answered)]
        {
            count.set(count.get() + more as u32);
        }
    }
}

#[test]
fn a_capture_of_a_prefix_is_its_part_of_a_capture_of_everything() {
    let kept = FileFailurePersistence::Direct("tests/engine/captures.regressions");
    let config = Config { cases: 1000, failure_persistence: Some(Box::new(kept)), ..Config::default() };
    let counts = Counts::default();
    let net = prop::sample::select(NETS.to_vec());
    let outcome =
        TestRunner::new(config).run(&(steps(), net, 1..6_usize), |((steps, workers, several), net, at_once)| {
            compare(&steps, workers, several, net.parse().unwrap(), at_once, &counts);
            Ok(())
        });
    if let Err(error) = outcome {
        panic!("{error}");
    }
    let [concerned, left_out, answered] = [counts.concerned, counts.left_out, counts.answered].map(Cell::into_inner);
    assert!(concerned > 1000 && left_out > 1000 && answered > 100, "{concerned}, {left_out}, {answered}");
}
