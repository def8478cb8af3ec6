//! The steering program in the kernel, asked about single packets without a device: every row of the table at its head.

mod cluster;

use std::net::IpAddr;

use vipgate_dataplane::io::InterfaceId;

use super::*;

/// What the program decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Kernel,
    /// Captured; dropped here, where no socket listens.
    Socket,
}
use Verdict::{Kernel, Socket};

const LOOPBACK: u32 = 1;
const ARP_REQUEST: u16 = 0x0806;

fn loaded(tables: SteeringTables) -> Steering {
    let mut steering = Steering::load().expect("tests of the steering program run as root");
    steering.add_interface(LOOPBACK, InterfaceId(0), true).expect("an interface's number");
    steering.apply(tables).expect("tables");
    steering
}

fn verdict(steering: &mut Steering, frame: &[u8]) -> Verdict {
    let program = steering.program_mut().expect("a loaded program");
    let options = TestRunOptions { data_in: Some(frame), ..TestRunOptions::default() };
    // From linux/bpf.h: XDP_DROP and XDP_PASS.
    let verdict = match program.test_run(options).expect("a run").return_value {
        1 => Socket,
        2 => Kernel,
        other => panic!("the program answered {other}"),
    };
    let captures = steering.captures(frame, LOOPBACK).expect("a run");
    assert_eq!(captures, verdict == Socket, "whoever asks hears what packets hear");
    verdict
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// A frame with a UDP header's worth of payload.
fn packet(source: IpAddr, destination: IpAddr) -> Vec<u8> {
    let mut frame = vec![0; 12];
    match (source, destination) {
        (IpAddr::V4(source), IpAddr::V4(destination)) => {
            frame.extend([8, 0, 0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0]);
            frame.extend(source.octets());
            frame.extend(destination.octets());
        }
        (IpAddr::V6(source), IpAddr::V6(destination)) => {
            frame.extend([0x86, 0xdd, 0x60, 0, 0, 0, 0, 8, 17, 64]);
            frame.extend(source.octets());
            frame.extend(destination.octets());
        }
        _ => panic!("{source} and {destination} are of two families"),
    }
    frame.extend([0; 8]);
    frame
}

fn solicitation(source: IpAddr, destination: IpAddr, target: IpAddr) -> Vec<u8> {
    let IpAddr::V6(target) = target else { panic!("{target} is asked for by ARP") };
    let mut frame = packet(source, destination);
    frame[14 + 6] = 58;
    frame.truncate(14 + 40);
    frame.extend([135, 0, 0, 0, 0, 0, 0, 0]);
    frame.extend(target.octets());
    frame
}

fn arp_request(target: IpAddr) -> Vec<u8> {
    let IpAddr::V4(target) = target else { panic!("{target} is asked for by neighbour solicitation") };
    let mut frame = vec![0; 14 + 24];
    frame[12..14].copy_from_slice(&ARP_REQUEST.to_be_bytes());
    frame.extend(target.octets());
    frame
}

/// An address that is all of `kinds`; an endpoint's policy is number 7.
fn describe(tables: &mut SteeringTables, address: IpAddr, kinds: u32) {
    if kinds & VIP != 0 {
        tables.vips.insert(address);
    }
    if kinds & ENDPOINT != 0 {
        tables.endpoints.insert(address, 7);
    }
    if kinds & LOCAL != 0 {
        tables.locals.insert(address);
    }
}

/// The table at the head of the program, in the words of its rows.
fn expected(tables: &SteeringTables, source: IpAddr, destination: IpAddr) -> Verdict {
    let to_vip = tables.vips.contains(&destination);
    let from_endpoint = tables.endpoints.contains_key(&source) && !tables.locals.contains(&destination);
    let answer = !tables.endpoints.contains_key(&source)
        && !tables.locals.contains(&source)
        && tables.endpoints.get(&destination).is_some_and(|&policy| {
            let matching = tables.cidrs.iter().filter(|((of, net), _)| *of == policy && net.contains(&source));
            !matching.max_by_key(|((_, net), _)| net.prefix_len()).is_some_and(|(_, &translated)| translated)
        });
    if to_vip || from_endpoint || answer { Socket } else { Kernel }
}

#[test]
fn any_two_addresses_are_judged_by_all_that_they_are() {
    for (source, destination, wide, narrow) in [
        ("192.0.2.1", "198.51.100.9", "0.0.0.0/0", "192.0.2.1/32"),
        ("2001:db8:1::1", "2001:db8:2::9", "::/0", "2001:db8:1::1/128"),
    ] {
        let (source, destination) = (ip(source), ip(destination));
        let net = |text: &str| text.parse::<IpNet>().expect("a net");
        let exclusions: [&[((u32, IpNet), bool)]; 4] = [
            &[],
            &[((7, net(wide)), true)],
            &[((7, net(wide)), true), ((7, net(narrow)), false)],
            &[((8, net(wide)), true)],
        ];
        // One program for all: each case is also a change from the one before it.
        let mut steering = loaded(SteeringTables::default());
        for cidrs in exclusions {
            for kinds in 0..64 {
                let mut tables = SteeringTables { cidrs: cidrs.iter().copied().collect(), ..Default::default() };
                describe(&mut tables, source, kinds & 7);
                describe(&mut tables, destination, kinds >> 3);
                steering.apply(tables.clone()).expect("tables");
                let is = verdict(&mut steering, &packet(source, destination));
                assert_eq!(is, expected(&tables, source, destination), "{source} -> {destination} by {tables:?}");
            }
        }
    }
}

#[test]
fn what_comes_out_of_a_tunnel_is_captured_and_all_else_is_the_kernels() {
    for (peer, own) in [("10.2.0.2", "10.2.0.1"), ("fd00:2::2", "fd00:2::1")] {
        let (peer, own) = (ip(peer), ip(own));
        let tables = SteeringTables { locals: [own].into(), tunnels: [(own, 4790)].into(), ..Default::default() };
        let mut steering = loaded(tables);
        let ports = if own.is_ipv4() { 34 } else { 54 };
        let tunnel = |port: u16| {
            let mut frame = packet(peer, own);
            frame[ports + 2..ports + 4].copy_from_slice(&port.to_be_bytes());
            frame
        };
        assert_eq!((verdict(&mut steering, &tunnel(4790)), verdict(&mut steering, &tunnel(4789))), (Socket, Kernel));
        let mut tcp = tunnel(4790);
        tcp[if own.is_ipv4() { 23 } else { 20 }] = 6;
        assert_eq!(verdict(&mut steering, &tcp), Kernel, "what gateways tell each other is the kernel's");
        let mut from_here = packet(own, peer);
        from_here[ports..ports + 2].copy_from_slice(&4790_u16.to_be_bytes());
        assert_eq!(verdict(&mut steering, &from_here), Kernel);
    }
}

/// The backend in both families, listening on TCP port 8080 and UDP port 53.
fn backends() -> SteeringTables {
    let listeners = ["10.0.0.1", "fd00::1"].map(ip).into_iter().flat_map(|it| [(it, 8080, 6), (it, 53, 17)]);
    SteeringTables { listeners: listeners.collect(), ..Default::default() }
}

/// A packet from a port, by a protocol.
fn from_port(source: &str, destination: &str, protocol: u8, port: u16) -> Vec<u8> {
    let mut frame = packet(ip(source), ip(destination));
    let (protocol_at, payload) = if frame[12] == 8 { (23, 34) } else { (20, 54) };
    frame[protocol_at] = protocol;
    frame[payload..payload + 2].copy_from_slice(&port.to_be_bytes());
    frame
}

#[test]
fn of_a_backend_only_what_can_be_an_answer_is_ours() {
    let mut steering = loaded(backends());
    for (backend, client, payload, error, question) in
        [("10.0.0.1", "198.51.100.9", 34, 3, 8), ("fd00::1", "2001:db8::9", 54, 1, 128)]
    {
        for (protocol, port, expected) in [
            (6, 8080, Socket),
            (17, 53, Socket),
            (17, 8080, Kernel),
            (6, 53, Kernel),
            (132, 8080, Kernel),
            (6, 40_000, Kernel),
            (47, 8080, Kernel),
        ] {
            let is = verdict(&mut steering, &from_port(backend, client, protocol, port));
            assert_eq!(is, expected, "{backend}, protocol {protocol}, port {port}");
        }
        assert_eq!(verdict(&mut steering, &from_port(client, backend, 6, 8080)), Kernel, "the way there");
        let icmp = if payload == 34 { 1 } else { 58 };
        for (kind, expected) in [(error, Socket), (question, Kernel)] {
            let mut message = from_port(backend, client, icmp, 0);
            message[payload] = kind;
            assert_eq!(verdict(&mut steering, &message), expected, "ICMP type {kind}");
        }
    }
    // What only shows behind other headers, or in another fragment, may be an answer.
    let mut later = from_port("10.0.0.1", "198.51.100.9", 17, 9);
    later[21] = 50;
    let mut options = from_port("10.0.0.1", "198.51.100.9", 17, 9);
    options[14] = 0x46;
    for frame in [later, options, from_port("fd00::1", "2001:db8::9", 44, 9), from_port("fd00::1", "2001:db8::9", 0, 9)]
    {
        assert_eq!(verdict(&mut steering, &frame), Socket, "{frame:x?}");
    }
    // Not to the gateway itself, and not to the link.
    let locals = ["10.0.0.254", "fd00::fe"].map(ip).into();
    steering.apply(SteeringTables { locals, ..backends() }).expect("tables");
    for (backend, others) in [("10.0.0.1", ["10.0.0.254", "224.0.0.1"]), ("fd00::1", ["fd00::fe", "ff02::1"])] {
        for other in others {
            assert_eq!(verdict(&mut steering, &from_port(backend, other, 6, 8080)), Kernel, "{other}");
        }
    }
}

#[test]
fn a_backend_is_one_for_as_long_as_it_listens_anywhere() {
    let mut steering = loaded(SteeringTables::default());
    let http = from_port("10.0.0.1", "198.51.100.9", 6, 8080);
    let dns = from_port("10.0.0.1", "198.51.100.9", 17, 53);
    let only = |listener| SteeringTables { listeners: [listener].into(), ..Default::default() };
    let (tcp, udp) = ((ip("10.0.0.1"), 8080, 6), (ip("10.0.0.1"), 53, 17));
    let both = |steering: &mut Steering| [&http, &dns].map(|frame| verdict(steering, frame));
    steering.extend(only(tcp)).expect("more");
    assert_eq!(both(&mut steering), [Socket, Kernel]);
    steering.extend(only(udp)).expect("more");
    assert_eq!(both(&mut steering), [Socket, Socket]);
    steering.reduce(only(tcp)).expect("less");
    assert_eq!(both(&mut steering), [Kernel, Socket]);
    steering.reduce(only(udp)).expect("less");
    assert_eq!(both(&mut steering), [Kernel, Kernel]);
    let mut later = dns.clone();
    later[21] = 50;
    assert_eq!(verdict(&mut steering, &later), Kernel, "a backend no more");
    steering.apply(backends()).expect("tables");
    steering.apply(only(udp)).expect("tables");
    assert_eq!(both(&mut steering), [Kernel, Socket]);
}

#[test]
fn what_an_endpoint_says_to_its_link_only_is_the_kernels() {
    for (endpoint, on_link, beyond) in [
        ("10.0.0.1", &["224.0.0.1", "239.255.255.250", "255.255.255.255"][..], &["169.254.1.1", "240.0.0.1"][..]),
        ("fd00::1", &["ff02::1", "ff0e::1", "fe80::1", "febf::1"][..], &["fec0::1", "fd00::2"][..]),
    ] {
        let mut tables = SteeringTables::default();
        describe(&mut tables, ip(endpoint), ENDPOINT);
        let mut steering = loaded(tables);
        for destination in on_link {
            assert_eq!(verdict(&mut steering, &packet(ip(endpoint), ip(destination))), Kernel, "{destination}");
        }
        for destination in beyond {
            assert_eq!(verdict(&mut steering, &packet(ip(endpoint), ip(destination))), Socket, "{destination}");
        }
    }
}

#[test]
fn the_question_where_a_vip_is_is_ours_and_all_others_the_kernels() {
    let mut tables = SteeringTables::default();
    for vip in ["203.0.113.1", "2001:db8::1"] {
        describe(&mut tables, ip(vip), VIP);
    }
    for (other, kind) in [("10.0.0.1", ENDPOINT), ("10.0.0.2", LOCAL), ("fd00::1", ENDPOINT), ("fd00::2", LOCAL)] {
        describe(&mut tables, ip(other), kind);
    }
    let mut steering = loaded(tables);
    assert_eq!(verdict(&mut steering, &arp_request(ip("203.0.113.1"))), Socket);
    for target in ["10.0.0.1", "10.0.0.2", "10.0.0.3"] {
        assert_eq!(verdict(&mut steering, &arp_request(ip(target))), Kernel, "{target}");
    }
    let (asker, group) = (ip("fe80::5"), ip("ff02::1:ff00:1"));
    assert_eq!(verdict(&mut steering, &solicitation(asker, group, ip("2001:db8::1"))), Socket);
    for target in ["fd00::1", "fd00::2", "fd00::3"] {
        assert_eq!(verdict(&mut steering, &solicitation(asker, group, ip(target))), Kernel, "{target}");
    }
    // What an endpoint asks others on its link is not ours; where a VIP is, it may ask too.
    assert_eq!(verdict(&mut steering, &solicitation(ip("fd00::1"), group, ip("fd00::3"))), Kernel);
    assert_eq!(verdict(&mut steering, &solicitation(ip("fd00::1"), group, ip("2001:db8::1"))), Socket);
}

#[test]
fn a_claim_to_a_vip_is_ours_and_one_to_anything_else_the_kernels() {
    let mut tables = SteeringTables::default();
    for vip in ["203.0.113.1", "2001:db8::1"] {
        describe(&mut tables, ip(vip), VIP);
    }
    for (other, kind) in [("10.0.0.1", ENDPOINT), ("10.0.0.2", LOCAL), ("fd00::1", ENDPOINT), ("fd00::2", LOCAL)] {
        describe(&mut tables, ip(other), kind);
    }
    let mut steering = loaded(tables);
    // Whatever it asks: for itself (an announcement), for the gateway's own address, for another.
    let by = |sender: [u8; 4], target: &str| {
        let mut frame = arp_request(ip(target));
        frame[14 + 14..14 + 18].copy_from_slice(&sender);
        frame
    };
    for target in ["203.0.113.1", "10.0.0.2", "10.0.0.9"] {
        assert_eq!(verdict(&mut steering, &by([203, 0, 113, 1], target)), Socket, "{target}");
    }
    assert_eq!(verdict(&mut steering, &by([10, 0, 0, 1], "10.0.0.9")), Kernel);
    let advertisement = |target: &str| {
        let mut frame = solicitation(ip("fe80::5"), ip("ff02::1"), ip(target));
        frame[14 + 40] = 136;
        frame
    };
    assert_eq!(verdict(&mut steering, &advertisement("2001:db8::1")), Socket);
    for target in ["fd00::1", "fd00::2", "fd00::3"] {
        assert_eq!(verdict(&mut steering, &advertisement(target)), Kernel, "{target}");
    }
}

#[test]
fn what_is_cut_short_or_no_ip_is_the_kernels() {
    let mut tables = SteeringTables::default();
    for vip in ["203.0.113.1", "2001:db8::1"] {
        describe(&mut tables, ip(vip), VIP);
    }
    let mut steering = loaded(tables);
    for (frame, needed) in [
        (packet(ip("192.0.2.1"), ip("203.0.113.1")), 14 + 20),
        (packet(ip("2001:db8:1::1"), ip("2001:db8::1")), 14 + 40),
        (solicitation(ip("fe80::5"), ip("ff02::1:ff00:1"), ip("2001:db8::1")), 14 + 64),
        (arp_request(ip("203.0.113.1")), 14 + 28),
    ] {
        assert_eq!(verdict(&mut steering, &frame[..needed]), Socket, "{frame:x?}");
        // The kernel runs programs on nothing shorter than a link header.
        for length in 14..needed {
            assert_eq!(verdict(&mut steering, &frame[..length]), Kernel, "{length} bytes of {frame:x?}");
        }
        let mut other = frame;
        other[12..14].copy_from_slice(&[0x88, 0xcc]);
        assert_eq!(verdict(&mut steering, &other), Kernel, "{other:x?}");
    }
}

#[test]
fn what_a_failed_change_has_left_is_made_up_for() {
    let at = |n: u32| IpAddr::from((0xcb00_0000 + n).to_be_bytes());
    let vips = |numbers: std::ops::Range<u32>| SteeringTables { vips: numbers.map(at).collect(), ..Default::default() };
    let mut steering = loaded(vips(0..10));
    // One address more than the table has room for.
    let error = steering.apply(vips(5..819_206)).expect_err("no room");
    assert!(error.to_string().contains("table hosts"), "{error}");
    // What only the failed one wrote is gone, too.
    steering.apply(vips(8..12)).expect("room again");
    for (n, wanted) in [(0, Kernel), (7, Kernel), (8, Socket), (11, Socket), (12, Kernel), (200_000, Kernel)] {
        assert_eq!(verdict(&mut steering, &packet(ip("192.0.2.1"), at(n))), wanted, "{}", at(n));
    }
}

#[test]
fn outcomes_are_counted() {
    let mut tables = SteeringTables::default();
    describe(&mut tables, ip("203.0.113.1"), VIP);
    let mut steering = loaded(tables);
    for (destination, times) in [("203.0.113.1", 3), ("203.0.113.2", 5)] {
        for _ in 0..times {
            verdict(&mut steering, &packet(ip("192.0.2.1"), ip(destination)));
        }
    }
    let counted = steering.outcomes().expect("counters");
    // `verdict` has the program run twice: as packets do, and as whoever asks what they get.
    assert_eq!(counted, Outcomes { passed: 2 * 5, captured: 0, no_socket: 2 * 3, guarded: 0 });
}

#[test]
fn while_the_policy_is_unknown_only_the_gateways_own_traffic_passes() {
    for (own, stranger, other, group) in
        [("192.0.2.1", "198.51.100.9", "10.0.0.1", "224.0.0.5"), ("2001:db8::1", "2001:db8:2::9", "fd00::1", "ff02::5")]
    {
        let mut tables = SteeringTables::default();
        describe(&mut tables, ip(own), LOCAL);
        let mut steering = loaded(tables);
        for (closed, stranger_gets) in [(false, Kernel), (true, Socket), (false, Kernel)] {
            steering.close(closed).expect("the switch");
            assert_eq!(verdict(&mut steering, &packet(ip(stranger), ip(own))), Kernel);
            assert_eq!(verdict(&mut steering, &packet(ip(own), ip(stranger))), stranger_gets);
            assert_eq!(verdict(&mut steering, &packet(ip(stranger), ip(other))), stranger_gets);
            assert_eq!(verdict(&mut steering, &packet(ip(other), ip(group))), Kernel);
        }
    }
}

#[test]
fn more_and_less_come_to_what_is_wanted() {
    let (source, destination) = (ip("192.0.2.1"), ip("198.51.100.9"));
    let wide = ((7, "0.0.0.0/0".parse().expect("a net")), true);
    let tables = |kinds: u32| {
        let mut tables = SteeringTables { cidrs: [wide].into(), ..Default::default() };
        describe(&mut tables, source, kinds & 7);
        describe(&mut tables, destination, kinds >> 3);
        tables
    };
    let mut steering = loaded(tables(0));
    for (old, new) in (0..64).flat_map(|old| (0..64).map(move |new| (old, new))) {
        steering.apply(tables(old)).expect("tables");
        steering.extend(SteeringTables { cidrs: BTreeMap::new(), ..tables(new & !old) }).expect("more");
        // Between the two, what either captures is captured.
        let between = verdict(&mut steering, &packet(source, destination));
        assert_eq!(between, expected(&tables(old | new), source, destination));
        steering.reduce(SteeringTables { cidrs: BTreeMap::new(), ..tables(old & !new) }).expect("less");
        assert_eq!(verdict(&mut steering, &packet(source, destination)), expected(&tables(new), source, destination));
        assert!(!steering.is_unsure());
    }
    steering.apply(tables(ENDPOINT << 3)).expect("tables");
    assert_eq!(verdict(&mut steering, &packet(source, destination)), Kernel);
    steering.reduce(SteeringTables { cidrs: [wide].into(), ..Default::default() }).expect("less");
    assert_eq!(verdict(&mut steering, &packet(source, destination)), Socket);
}
