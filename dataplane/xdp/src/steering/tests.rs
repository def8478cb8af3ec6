//! Tests of the steering program in the kernel, with single packets (BPF_PROG_TEST_RUN): every row of the table in
//! `steer.bpf.c`.

mod cluster;
pub(super) mod faults;
mod icmp_errors;
mod priority_tags;
mod sizes;
mod updates;

use std::net::IpAddr;

use ipnet::IpNet;
use vipgate_dataplane::flow::ids::InterfaceId;

use super::entries::{ENDPOINT, LOCAL, PRIVATE, VIP};
use super::*;

/// The program's verdict.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Kernel,
    /// Captured; dropped here, without sockets.
    Socket,
}
use Verdict::{Kernel, Socket};

const LOOPBACK: u32 = 1;
const ARP_REQUEST: u16 = 0x0806;

fn loaded(tables: &SteeringTables) -> Steering {
    let mut steering = Steering::load(FrameLayout::Standard).expect("tests of the steering program run as root");
    steering.add_interface(LOOPBACK, InterfaceId(0), true).expect("an interface ID");
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
        other => panic!("the program returned {other}"),
    };
    let captures = steering.captures(frame, LOOPBACK).expect("a run");
    assert_eq!(captures, verdict == Socket, "`captures` returns the verdict for packets");
    verdict
}

fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

/// A frame with eight bytes of payload, the size of a UDP header.
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
        _ => panic!("{source} and {destination} have different address families"),
    }
    frame.extend([0; 8]);
    frame
}

fn solicitation(source: IpAddr, destination: IpAddr, target: IpAddr) -> Vec<u8> {
    let IpAddr::V6(target) = target else { panic!("{target} is resolved by ARP") };
    let mut frame = packet(source, destination);
    frame[14 + 6] = 58;
    frame.truncate(14 + 40);
    frame.extend([135, 0, 0, 0, 0, 0, 0, 0]);
    frame.extend(target.octets());
    frame
}

fn arp_request(target: IpAddr) -> Vec<u8> {
    let IpAddr::V4(target) = target else { panic!("{target} is resolved by neighbor discovery") };
    let mut frame = vec![0; 14 + 24];
    frame[12..14].copy_from_slice(&ARP_REQUEST.to_be_bytes());
    frame.extend(target.octets());
    frame
}

/// Adds an address with these roles; the policy ID of an endpoint is 7.
fn add_address(tables: &mut SteeringTables, address: IpAddr, roles: u32) {
    if roles & VIP != 0 {
        tables.vips.insert(address);
    }
    if roles & ENDPOINT != 0 {
        tables.endpoints.insert(address, 7);
    }
    if roles & LOCAL != 0 {
        tables.local_addresses.insert(address);
    }
    if roles & PRIVATE != 0 {
        tables.private_addresses.insert(address);
    }
}

fn only_added(added: SteeringTables) -> SteeringChange {
    SteeringChange { added, removed: SteeringTables::default() }
}

fn only_removed(removed: SteeringTables) -> SteeringChange {
    SteeringChange { added: SteeringTables::default(), removed }
}

/// Model of the verdict: the table in `steer.bpf.c`.
fn expected(tables: &SteeringTables, source: IpAddr, destination: IpAddr) -> Verdict {
    let to_vip = tables.vips.contains(&destination);
    let from_endpoint = tables.endpoints.contains_key(&source) && !tables.local_addresses.contains(&destination);
    let untranslated_reply = !tables.endpoints.contains_key(&source)
        && !tables.local_addresses.contains(&source)
        && tables.endpoints.get(&destination).is_some_and(|&policy| {
            let matching = tables.policy_cidrs.iter().filter(|((id, net), _)| *id == policy && net.contains(&source));
            !matching.max_by_key(|((_, net), _)| net.prefix_len()).is_some_and(|(_, &translated)| translated)
        });
    if to_vip || from_endpoint || untranslated_reply { Socket } else { Kernel }
}

#[test]
fn the_verdict_equals_the_model_for_all_roles_of_both_addresses() {
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
        // One program for all cases, so that each case also tests an update.
        let mut steering = loaded(&SteeringTables::default());
        for cidrs in exclusions {
            for roles in 0..64 {
                let mut tables = SteeringTables { policy_cidrs: cidrs.iter().copied().collect(), ..Default::default() };
                add_address(&mut tables, source, roles & 7);
                add_address(&mut tables, destination, roles >> 3);
                steering.apply(&tables).expect("tables");
                let actual = verdict(&mut steering, &packet(source, destination));
                assert_eq!(actual, expected(&tables, source, destination), "{source} -> {destination} by {tables:?}");
            }
        }
    }
}

#[test]
fn of_a_private_address_that_the_kernel_has_what_resolves_and_keeps_it_is_the_kernels() {
    for (remote, private, [server, client]) in
        [("198.51.100.9", "10.0.1.5", [67, 68]), ("2001:db8:2::9", "fd00:1::5", [547, 546])]
    {
        let (remote, private) = (ip(remote), ip(private));
        for (roles, resolves) in
            [(PRIVATE, Socket), (PRIVATE | LOCAL, Kernel), (VIP, Socket), (PRIVATE | VIP, Socket), (LOCAL, Kernel)]
        {
            let mut tables = SteeringTables::default();
            add_address(&mut tables, private, roles);
            let mut steering = loaded(&tables);
            let data = if roles == LOCAL { Kernel } else { Socket };
            assert_eq!(verdict(&mut steering, &packet(remote, private)), data, "{private}, roles {roles}");
            let resolution = match private {
                IpAddr::V4(_) => arp_request(private),
                IpAddr::V6(_) => solicitation(remote, remote, private),
            };
            assert_eq!(verdict(&mut steering, &resolution), resolves, "{private}, roles {roles}");
            let ports = if private.is_ipv4() { 34 } else { 54 };
            let mut dhcp = packet(remote, private);
            dhcp[ports..ports + 2].copy_from_slice(&u16::to_be_bytes(server));
            dhcp[ports + 2..ports + 4].copy_from_slice(&u16::to_be_bytes(client));
            assert_eq!(verdict(&mut steering, &dhcp), resolves, "{private}, roles {roles}");
            if private.is_ipv6() {
                let mut advertisement = solicitation(remote, private, remote);
                advertisement[14 + 40] = 136;
                assert_eq!(verdict(&mut steering, &advertisement), resolves, "{private}, roles {roles}");
            }
        }
    }
}

#[test]
fn an_arp_reply_to_a_private_address_of_the_kernel_is_the_kernels() {
    let (router, private) = (ip("10.0.1.1"), ip("10.0.1.5"));
    let mut reply = arp_request(private);
    let IpAddr::V4(sender) = router else { panic!("{router} is resolved by neighbor discovery") };
    reply[14 + 14..14 + 18].copy_from_slice(&sender.octets());
    for (roles, expected) in [(PRIVATE, Socket), (PRIVATE | LOCAL, Kernel)] {
        let mut tables = SteeringTables::default();
        add_address(&mut tables, private, roles);
        assert_eq!(verdict(&mut loaded(&tables), &reply), expected);
    }
}

#[test]
fn only_tunnel_packets_to_the_tunnel_endpoint_are_captured() {
    for (peer, local) in [("10.2.0.2", "10.2.0.1"), ("fd00:2::2", "fd00:2::1")] {
        let (peer, local) = (ip(peer), ip(local));
        let tables =
            SteeringTables { local_addresses: [local].into(), tunnels: [(local, 4790)].into(), ..Default::default() };
        let mut steering = loaded(&tables);
        let ports = if local.is_ipv4() { 34 } else { 54 };
        let tunnel = |port: u16| {
            let mut frame = packet(peer, local);
            frame[ports + 2..ports + 4].copy_from_slice(&port.to_be_bytes());
            frame
        };
        assert_eq!((verdict(&mut steering, &tunnel(4790)), verdict(&mut steering, &tunnel(4789))), (Socket, Kernel));
        let mut tcp = tunnel(4790);
        tcp[if local.is_ipv4() { 23 } else { 20 }] = 6;
        assert_eq!(verdict(&mut steering, &tcp), Kernel, "the replication link is the kernel's");
        // A VIP's private address can't take the peers' one: the gateway would lose them.
        let private_addresses = [local].into();
        let tunnels = [(local, 4790)].into();
        let locals = [local].into();
        let tables = SteeringTables { private_addresses, tunnels, local_addresses: locals, ..Default::default() };
        steering.apply(&tables).expect("tables");
        assert_eq!((verdict(&mut steering, &tunnel(4790)), verdict(&mut steering, &tcp)), (Socket, Kernel));
        let mut outgoing = packet(local, peer);
        outgoing[ports..ports + 2].copy_from_slice(&4790_u16.to_be_bytes());
        assert_eq!(verdict(&mut steering, &outgoing), Kernel);
    }
}

/// A backend in both families, listening on TCP port 8080 and UDP port 53.
fn backends() -> SteeringTables {
    let listeners = ["10.0.0.1", "fd00::1"].map(ip).into_iter().flat_map(|it| [(it, 8080, 6), (it, 53, 17)]);
    SteeringTables { listeners: listeners.collect(), ..Default::default() }
}

/// A packet with this protocol and source port.
fn from_port(source: &str, destination: &str, protocol: u8, port: u16) -> Vec<u8> {
    let mut frame = packet(ip(source), ip(destination));
    let (protocol_at, payload) = if frame[12] == 8 { (23, 34) } else { (20, 54) };
    frame[protocol_at] = protocol;
    frame[payload..payload + 2].copy_from_slice(&port.to_be_bytes());
    frame
}

#[test]
fn packets_of_a_backend_are_captured_only_if_they_may_be_replies() {
    let mut steering = loaded(&backends());
    for (backend, client, payload, error, echo_request) in
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
            let actual = verdict(&mut steering, &from_port(backend, client, protocol, port));
            assert_eq!(actual, expected, "{backend}, protocol {protocol}, port {port}");
        }
        assert_eq!(verdict(&mut steering, &from_port(client, backend, 6, 8080)), Kernel, "original direction");
        let icmp = if payload == 34 { 1 } else { 58 };
        for (kind, expected) in [(error, Socket), (echo_request, Kernel)] {
            let mut message = from_port(backend, client, icmp, 0);
            message[payload] = kind;
            assert_eq!(verdict(&mut steering, &message), expected, "ICMP type {kind}");
        }
    }
    // Later fragments, and packets with IP options or extension headers, may be replies.
    let mut later = from_port("10.0.0.1", "198.51.100.9", 17, 9);
    later[21] = 50;
    let mut options = from_port("10.0.0.1", "198.51.100.9", 17, 9);
    options[14] = 0x46;
    for frame in [later, options, from_port("fd00::1", "2001:db8::9", 44, 9), from_port("fd00::1", "2001:db8::9", 0, 9)]
    {
        assert_eq!(verdict(&mut steering, &frame), Socket, "{frame:x?}");
    }
    // Not to local addresses, and not with link-local scope.
    let locals = ["10.0.0.254", "fd00::fe"].map(ip).into();
    steering.apply(&SteeringTables { local_addresses: locals, ..backends() }).expect("tables");
    for (backend, others) in [("10.0.0.1", ["10.0.0.254", "224.0.0.1"]), ("fd00::1", ["fd00::fe", "ff02::1"])] {
        for other in others {
            assert_eq!(verdict(&mut steering, &from_port(backend, other, 6, 8080)), Kernel, "{other}");
        }
    }
}

#[test]
fn packets_of_an_endpoint_with_link_local_scope_pass_to_the_kernel() {
    for (endpoint, on_link, forwarded) in [
        ("10.0.0.1", &["224.0.0.1", "239.255.255.250", "255.255.255.255"][..], &["169.254.1.1", "240.0.0.1"][..]),
        ("fd00::1", &["ff02::1", "ff0e::1", "fe80::1", "febf::1"][..], &["fec0::1", "fd00::2"][..]),
    ] {
        let mut tables = SteeringTables::default();
        add_address(&mut tables, ip(endpoint), ENDPOINT);
        let mut steering = loaded(&tables);
        for destination in on_link {
            assert_eq!(verdict(&mut steering, &packet(ip(endpoint), ip(destination))), Kernel, "{destination}");
        }
        for destination in forwarded {
            assert_eq!(verdict(&mut steering, &packet(ip(endpoint), ip(destination))), Socket, "{destination}");
        }
    }
}

#[test]
fn arp_requests_and_neighbor_solicitations_are_captured_only_for_vips() {
    let mut tables = SteeringTables::default();
    for vip in ["203.0.113.1", "2001:db8::1"] {
        add_address(&mut tables, ip(vip), VIP);
    }
    for (other, role) in [("10.0.0.1", ENDPOINT), ("10.0.0.2", LOCAL), ("fd00::1", ENDPOINT), ("fd00::2", LOCAL)] {
        add_address(&mut tables, ip(other), role);
    }
    let mut steering = loaded(&tables);
    assert_eq!(verdict(&mut steering, &arp_request(ip("203.0.113.1"))), Socket);
    for target in ["10.0.0.1", "10.0.0.2", "10.0.0.3"] {
        assert_eq!(verdict(&mut steering, &arp_request(ip(target))), Kernel, "{target}");
    }
    let (sender, group) = (ip("fe80::5"), ip("ff02::1:ff00:1"));
    assert_eq!(verdict(&mut steering, &solicitation(sender, group, ip("2001:db8::1"))), Socket);
    for target in ["fd00::1", "fd00::2", "fd00::3"] {
        assert_eq!(verdict(&mut steering, &solicitation(sender, group, ip(target))), Kernel, "{target}");
    }
    // The same for an endpoint as sender.
    assert_eq!(verdict(&mut steering, &solicitation(ip("fd00::1"), group, ip("fd00::3"))), Kernel);
    assert_eq!(verdict(&mut steering, &solicitation(ip("fd00::1"), group, ip("2001:db8::1"))), Socket);
}

#[test]
fn arp_and_neighbor_advertisements_are_captured_only_from_vips() {
    let mut tables = SteeringTables::default();
    for vip in ["203.0.113.1", "2001:db8::1"] {
        add_address(&mut tables, ip(vip), VIP);
    }
    for (other, role) in [("10.0.0.1", ENDPOINT), ("10.0.0.2", LOCAL), ("fd00::1", ENDPOINT), ("fd00::2", LOCAL)] {
        add_address(&mut tables, ip(other), role);
    }
    let mut steering = loaded(&tables);
    // For any target: itself (gratuitous ARP), a local address, another address.
    let arp_from = |sender: [u8; 4], target: &str| {
        let mut frame = arp_request(ip(target));
        frame[14 + 14..14 + 18].copy_from_slice(&sender);
        frame
    };
    for target in ["203.0.113.1", "10.0.0.2", "10.0.0.9"] {
        assert_eq!(verdict(&mut steering, &arp_from([203, 0, 113, 1], target)), Socket, "{target}");
    }
    assert_eq!(verdict(&mut steering, &arp_from([10, 0, 0, 1], "10.0.0.9")), Kernel);
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
fn truncated_and_non_ip_frames_pass_to_the_kernel() {
    let mut tables = SteeringTables::default();
    for vip in ["203.0.113.1", "2001:db8::1"] {
        add_address(&mut tables, ip(vip), VIP);
    }
    let mut steering = loaded(&tables);
    for (frame, min_length) in [
        (packet(ip("192.0.2.1"), ip("203.0.113.1")), 14 + 20),
        (packet(ip("2001:db8:1::1"), ip("2001:db8::1")), 14 + 40),
        (solicitation(ip("fe80::5"), ip("ff02::1:ff00:1"), ip("2001:db8::1")), 14 + 64),
        (arp_request(ip("203.0.113.1")), 14 + 28),
    ] {
        assert_eq!(verdict(&mut steering, &frame[..min_length]), Socket, "{frame:x?}");
        // A test run requires at least an Ethernet header.
        for length in 14..min_length {
            assert_eq!(verdict(&mut steering, &frame[..length]), Kernel, "{length} bytes of {frame:x?}");
        }
        let mut other = frame;
        other[12..14].copy_from_slice(&[0x88, 0xcc]);
        assert_eq!(verdict(&mut steering, &other), Kernel, "{other:x?}");
    }
}

#[test]
fn outcomes_are_counted() {
    let mut tables = SteeringTables::default();
    add_address(&mut tables, ip("203.0.113.1"), VIP);
    let mut steering = loaded(&tables);
    for (destination, times) in [("203.0.113.1", 3), ("203.0.113.2", 5)] {
        for _ in 0..times {
            verdict(&mut steering, &packet(ip("192.0.2.1"), ip(destination)));
        }
    }
    let counted = steering.outcomes().expect("counters");
    // `verdict` runs the program twice: directly, and by `captures`.
    assert_eq!(counted, Outcomes { passed: 2 * 5, captured: 0, no_socket: 2 * 3, guarded: 0, held: 0 });
}

#[test]
fn a_closed_program_passes_only_local_traffic() {
    for (local, remote, other, group) in
        [("192.0.2.1", "198.51.100.9", "10.0.0.1", "224.0.0.5"), ("2001:db8::1", "2001:db8:2::9", "fd00::1", "ff02::5")]
    {
        let mut tables = SteeringTables::default();
        add_address(&mut tables, ip(local), LOCAL);
        let mut steering = loaded(&tables);
        for (closed, expected) in [(false, Kernel), (true, Socket), (false, Kernel)] {
            steering.set_closed(closed).expect("the flags");
            assert_eq!(verdict(&mut steering, &packet(ip(remote), ip(local))), Kernel);
            assert_eq!(verdict(&mut steering, &packet(ip(local), ip(remote))), expected);
            assert_eq!(verdict(&mut steering, &packet(ip(remote), ip(other))), expected);
            assert_eq!(verdict(&mut steering, &packet(ip(other), ip(group))), Kernel);
        }
    }
}
