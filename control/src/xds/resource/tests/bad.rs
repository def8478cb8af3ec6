//! What means nothing: each with its field and the reason.

use prost::Message;

use super::super::super::proto;
use super::*;

fn policy() -> proto::EgressPolicy {
    proto::EgressPolicy {
        name: "p".to_owned(),
        destinations: vec!["0.0.0.0/0".to_owned(), "::/0".to_owned()],
        ..proto::EgressPolicy::default()
    }
}

fn vip() -> proto::Vip {
    proto::Vip {
        address: "203.0.113.1".to_owned(),
        reserved_ports: vec![80, 443],
        shares: vec![share("g1", 128), share("g2", 0)],
        ..proto::Vip::default()
    }
}

fn share(gateway: &str, bytes: usize) -> proto::Share {
    proto::Share {
        gateway: gateway.to_owned(),
        blocks: vec![1; bytes],
        backups: vec!["g3".to_owned(), "g4".to_owned()],
    }
}

fn endpoint() -> proto::Endpoint {
    proto::Endpoint {
        address: "10.0.0.1".to_owned(),
        policy: "p".to_owned(),
        vips: vec!["203.0.113.1".to_owned()],
        ..proto::Endpoint::default()
    }
}

fn gateway() -> proto::Gateway {
    proto::Gateway { name: "g1".to_owned(), ..proto::Gateway::default() }
}

fn node() -> proto::OverlayNode {
    proto::OverlayNode {
        name: "n1".to_owned(),
        address: "10.9.0.1".to_owned(),
        port: 8472,
        vni: 1,
        mac: vec![2, 0, 0, 0, 0, 1],
        prefixes: vec!["10.1.0.0/24".to_owned()],
    }
}

fn refusal(kind: Kind, name: &str, message: &impl Message) -> String {
    decode(kind, name, &message.encode_to_vec()).unwrap_err().to_string()
}

/// Why a policy named `p` is refused after a change.
fn of_policy(change: impl FnOnce(&mut proto::EgressPolicy)) -> String {
    let mut message = policy();
    change(&mut message);
    refusal(Kind::EgressPolicy, "p", &message)
}

fn of_vip(change: impl FnOnce(&mut proto::Vip)) -> String {
    let mut message = vip();
    change(&mut message);
    refusal(Kind::Vip, "203.0.113.1", &message)
}

/// Why a VIP with this address, and named by it, is refused.
fn of_vip_at(address: &str) -> String {
    refusal(Kind::Vip, address, &proto::Vip { address: address.to_owned(), ..vip() })
}

fn of_endpoint(change: impl FnOnce(&mut proto::Endpoint)) -> String {
    let mut message = endpoint();
    change(&mut message);
    refusal(Kind::Endpoint, "10.0.0.1", &message)
}

fn cluster() -> proto::Cluster {
    let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
    proto::Cluster {
        pod_cidrs: texts(&["10.244.0.0/16", "fd00:244::/48"]),
        service_cidrs: texts(&["10.96.0.0/12"]),
        node_cidrs: texts(&["10.244.1.0/24"]),
        uncovered: proto::Uncovered::Drop.into(),
    }
}

#[test]
fn a_cluster_is_refused_for() {
    let of = |change: fn(&mut proto::Cluster)| {
        let mut message = cluster();
        change(&mut message);
        refusal(Kind::Cluster, "cluster", &message)
    };
    let cases = [
        (of(|it| it.pod_cidrs[1] = "10.244.0.0".to_owned()), "pod_cidrs[1]: `10.244.0.0` is no prefix"),
        (
            of(|it| it.service_cidrs[0] = "10.96.0.1/12".to_owned()),
            "service_cidrs[0]: 10.96.0.1/12 has bits set beyond its prefix length",
        ),
        (
            of(|it| it.node_cidrs[0] = "0.0.0.0/0".to_owned()),
            "node_cidrs[0]: 0.0.0.0/0 holds every address: nothing would be outside",
        ),
        (of(|it| it.pod_cidrs[1] = "10.244.0.0/16".to_owned()), "pod_cidrs[1]: 10.244.0.0/16 is in the list already"),
        (of(|it| it.uncovered = 3), "uncovered: 3 is unknown to this version"),
    ];
    for (said, expected) in cases {
        assert_eq!(said, expected);
    }
    assert_eq!(refusal(Kind::Cluster, "other", &cluster()), "name: is `cluster`, but the resource's name is `other`");
}

fn of_gateway(change: impl FnOnce(&mut proto::Gateway)) -> String {
    let mut message = gateway();
    change(&mut message);
    refusal(Kind::Gateway, "g1", &message)
}

#[test]
fn without_the_fault_they_are_read() {
    let good: [(Kind, &str, Vec<u8>); Kind::ALL.len() - 1] = [
        (Kind::OverlayNode, "n1", node().encode_to_vec()),
        (Kind::Cluster, "cluster", cluster().encode_to_vec()),
        (Kind::EgressPolicy, "p", policy().encode_to_vec()),
        (Kind::Vip, "203.0.113.1", vip().encode_to_vec()),
        (Kind::Endpoint, "10.0.0.1", endpoint().encode_to_vec()),
        (Kind::Gateway, "g1", gateway().encode_to_vec()),
        (Kind::Settings, "settings", proto::Settings::default().encode_to_vec()),
    ];
    for (kind, name, body) in good {
        assert!(decode(kind, name, &body).is_ok(), "{kind:?}");
    }
}

#[test]
fn a_node_is_refused_for() {
    let of = |change: fn(&mut proto::OverlayNode)| {
        let mut message = node();
        change(&mut message);
        refusal(Kind::OverlayNode, "n1", &message)
    };
    let cases = [
        (of(|it| it.name = "n2".to_owned()), "name: is `n2`, but the resource's name is `n1`"),
        (of(|it| it.address = "10.9.0".to_owned()), "address: `10.9.0` is no address"),
        (of(|it| it.address = "0.0.0.0".to_owned()), "address: 0.0.0.0 is the unspecified address"),
        (of(|it| it.port = 0), "port: 0 is no port"),
        (of(|it| it.port = 65_536), "port: 65536 is no port"),
        (of(|it| it.vni = 1 << 24), "vni: 16777216 is more than 24 bits"),
        (of(|it| it.mac.truncate(5)), "mac: is no link address of one interface"),
        (of(|it| it.mac[0] = 1), "mac: is no link address of one interface"),
        (
            of(|it| it.prefixes[0] = "10.1.0.1/24".to_owned()),
            "prefixes[0]: 10.1.0.1/24 has bits set beyond its prefix length",
        ),
        (of(|it| it.prefixes = vec!["::/0".to_owned(); 4097]), "prefixes: has 4097 entries, at most 4096 are read"),
    ];
    for (said, expected) in cases {
        assert_eq!(said, expected);
    }
}

#[test]
fn a_policy_is_refused_for() {
    let cases = [
        (of_policy(|it| it.name = "q".to_owned()), "name: is `q`, but the resource's name is `p`"),
        (
            of_policy(|it| it.destinations[1] = "10.0.0.1/8".to_owned()),
            "destinations[1]: 10.0.0.1/8 has bits set beyond its prefix length",
        ),
        (
            of_policy(|it| it.excluded = vec!["fd00::1/8".to_owned()]),
            "excluded[0]: fd00::1/8 has bits set beyond its prefix length",
        ),
        (of_policy(|it| it.destinations[0] = "10.0.0.0".to_owned()), "destinations[0]: `10.0.0.0` is no prefix"),
        (of_policy(|it| it.destinations[0] = "10.0.0.0/33".to_owned()), "destinations[0]: `10.0.0.0/33` is no prefix"),
        (of_policy(|it| it.excluded = vec![String::new()]), "excluded[0]: `` is no prefix"),
        (
            of_policy(|it| it.destinations = vec!["::/0".to_owned(); 4097]),
            "destinations: has 4097 entries, at most 4096 are read",
        ),
        (
            of_policy(|it| it.excluded = vec!["::/0".to_owned(); 4097]),
            "excluded: has 4097 entries, at most 4096 are read",
        ),
        (of_policy(|it| it.address_selection = 2), "address_selection: 2 is unknown to this version"),
        (of_policy(|it| it.on_exhaustion = -1), "on_exhaustion: -1 is unknown to this version"),
        (refusal(Kind::EgressPolicy, "", &proto::EgressPolicy::default()), "name: is empty"),
    ];
    for (said, expected) in cases {
        assert_eq!(said, expected);
    }
}

#[test]
fn a_vip_is_refused_for() {
    let cases = [
        (
            of_vip(|it| it.address = "203.0.113.2".to_owned()),
            "address: is `203.0.113.2`, but the resource's name is `203.0.113.1`",
        ),
        (of_vip_at("2001:DB8::1"), "address: `2001:DB8::1` is not in canonical form, which is `2001:db8::1`"),
        (of_vip_at("2001:db8:0::1"), "address: `2001:db8:0::1` is not in canonical form, which is `2001:db8::1`"),
        (of_vip_at("203.0.113.01"), "address: `203.0.113.01` is no address"),
        (of_vip_at("203.0.113.1/32"), "address: `203.0.113.1/32` is no address"),
        (of_vip_at(""), "address: `` is no address"),
        (of_vip_at("0.0.0.0"), "address: 0.0.0.0 is the unspecified address"),
        (of_vip_at("::"), "address: :: is the unspecified address"),
        (of_vip_at("0.0.0.1"), "address: 0.0.0.1 is no address that a host can have"),
        (of_vip_at("127.0.0.1"), "address: 127.0.0.1 is a loopback address"),
        (of_vip_at("::1"), "address: ::1 is a loopback address"),
        (of_vip_at("224.0.0.1"), "address: 224.0.0.1 is a multicast address"),
        (of_vip_at("ff02::1"), "address: ff02::1 is a multicast address"),
        (of_vip_at("fe80::1"), "address: fe80::1 is a link-local address"),
        (of_vip_at("255.255.255.255"), "address: 255.255.255.255 is no address that a host can have"),
        (of_vip_at("::ffff:203.0.113.1"), "address: ::ffff:203.0.113.1 is no address that a host can have"),
        (of_vip(|it| it.announce = 2), "announce: 2 is unknown to this version"),
        (of_vip(|it| it.reserved_ports[0] = 0), "reserved_ports[0]: 0 is no port"),
        (of_vip(|it| it.reserved_ports[1] = 70_000), "reserved_ports[1]: 70000 is no port"),
        (of_vip(|it| it.reserved_ports = vec![443, 80]), "reserved_ports[1]: 80 is not above the one before it"),
        (of_vip(|it| it.reserved_ports = vec![80, 80]), "reserved_ports[1]: 80 is not above the one before it"),
        (of_vip(|it| it.shares[0].blocks.truncate(127)), "shares[0].blocks: has 127 bytes, expected 128 or none"),
        (of_vip(|it| it.shares[1].blocks = vec![0; 129]), "shares[1].blocks: has 129 bytes, expected 128 or none"),
        (of_vip(|it| it.shares[1].gateway = "g1".to_owned()), "shares[1].gateway: `g1` is empty or there already"),
        (of_vip(|it| it.shares[0].gateway.clear()), "shares[0].gateway: `` is empty or there already"),
        (
            of_vip(|it| it.shares[0].backups[1].clear()),
            "shares[0].backups[1]: `` is empty, the share's own gateway, or there already",
        ),
        (
            of_vip(|it| it.shares[1].backups[0] = "g2".to_owned()),
            "shares[1].backups[0]: `g2` is empty, the share's own gateway, or there already",
        ),
        (
            of_vip(|it| it.shares[1].backups[1] = "g3".to_owned()),
            "shares[1].backups[1]: `g3` is empty, the share's own gateway, or there already",
        ),
        (
            of_vip(|it| it.shares[0].backups = (5..9).map(|n| format!("g{n}")).collect()),
            "shares[0].backups: has 4 entries, at most 3 are read",
        ),
        (of_vip(|it| it.shares = vec![share("g", 0); 4097]), "shares: has 4097 entries, at most 4096 are read"),
    ];
    for (said, expected) in cases {
        assert_eq!(said, expected);
    }
}

#[test]
fn an_endpoint_is_refused_for() {
    let cases = [
        (
            of_endpoint(|it| it.address = "10.0.0.2".to_owned()),
            "address: is `10.0.0.2`, but the resource's name is `10.0.0.1`",
        ),
        (
            of_endpoint(|it| it.vips[0] = "2001:db8::1".to_owned()),
            "vips[0]: 2001:db8::1 is of another address family than 10.0.0.1",
        ),
        (of_endpoint(|it| it.vips.push("203.0.113.1".to_owned())), "vips[1]: 203.0.113.1 is in the list already"),
        (of_endpoint(|it| it.vips[0] = "0.0.0.0".to_owned()), "vips[0]: 0.0.0.0 is the unspecified address"),
        (of_endpoint(|it| it.vips[0] = "web".to_owned()), "vips[0]: `web` is no address"),
        (
            of_endpoint(|it| it.vips = vec!["203.0.113.1".to_owned(); 4097]),
            "vips: has 4097 entries, at most 4096 are read",
        ),
    ];
    for (said, expected) in cases {
        assert_eq!(said, expected);
    }
}

#[test]
fn a_gateway_is_refused_for() {
    let cases = [
        (of_gateway(|it| it.name = "g2".to_owned()), "name: is `g2`, but the resource's name is `g1`"),
        (of_gateway(|it| it.peer_address = "127.0.0.1".to_owned()), "peer_address: 127.0.0.1 is a loopback address"),
        (of_gateway(|it| it.peer_address = "g1:50051".to_owned()), "peer_address: `g1:50051` is no address"),
        (refusal(Kind::Gateway, "", &proto::Gateway::default()), "name: is empty"),
    ];
    for (said, expected) in cases {
        assert_eq!(said, expected);
    }
}

#[test]
fn settings_have_one_name() {
    let said = refusal(Kind::Settings, "setting", &proto::Settings::default());
    assert_eq!(said, "name: is `settings`, but the resource's name is `setting`");
}

/// All of these are printed, or stand in labels of metrics.
#[test]
fn texts_are_printable_and_end() {
    let long = || "x".repeat((64 << 10) + 1);
    let fine = || "x".repeat(64 << 10);
    let message = proto::Vip { name: fine(), ..vip() };
    assert!(decode(Kind::Vip, "203.0.113.1", &message.encode_to_vec()).is_ok());
    let evil = ["a\nb".to_owned(), "a\u{1b}[2J".to_owned(), "\0".to_owned(), "\u{85}".to_owned(), long()];
    for text in evil {
        let mut said = vec![
            ("name", of_vip(|it| it.name.clone_from(&text))),
            ("shares[1].gateway", of_vip(|it| it.shares[1].gateway.clone_from(&text))),
            ("shares[0].backups[1]", of_vip(|it| it.shares[0].backups[1].clone_from(&text))),
            ("name", of_endpoint(|it| it.name.clone_from(&text))),
            ("policy", of_endpoint(|it| it.policy.clone_from(&text))),
            ("gateway", of_endpoint(|it| it.gateway.clone_from(&text))),
            ("node", of_gateway(|it| it.node.clone_from(&text))),
            ("zone", of_gateway(|it| it.zone.clone_from(&text))),
            (
                "version",
                refusal(Kind::Settings, SETTINGS, &proto::Settings { version: text.clone(), ..Default::default() }),
            ),
        ];
        if text.len() <= 1024 {
            said.push((
                "name",
                refusal(Kind::EgressPolicy, &text, &proto::EgressPolicy { name: text.clone(), ..policy() }),
            ));
            said.push(("name", refusal(Kind::Gateway, &text, &proto::Gateway { name: text.clone(), ..gateway() })));
        }
        for (field, said) in said {
            assert_eq!(said, format!("{field}: is longer than 65536 bytes, or not printable"));
        }
    }
}

#[test]
fn names_end() {
    for kind in Kind::ALL {
        let said = decode(kind, &"x".repeat(1025), b"").unwrap_err();
        assert_eq!(said.to_string(), "name: has 1025 bytes, at most 1024 are read");
    }
    let longest = "x".repeat(1024);
    let message = proto::EgressPolicy { name: longest.clone(), ..policy() };
    assert!(decode(Kind::EgressPolicy, &longest, &message.encode_to_vec()).is_ok());
}

#[test]
fn what_is_no_message_is_refused_with_the_message_it_should_be() {
    let bodies: [(&[u8], &str); 4] = [
        (b"\x0a\x02\xc3\x28", "UTF-8"),
        (b"\x0a\x05p", "buffer underflow"),
        (b"\x08\x01", "wire type"),
        (b"\xff", "varint"),
    ];
    for kind in Kind::ALL {
        for (body, cause) in bodies {
            let name = if kind == Kind::Settings { SETTINGS } else { "p" };
            let said = decode(kind, name, body).unwrap_err().to_string();
            assert!(said.starts_with(&format!("is no {}: ", kind.name())), "{said}");
            assert!(said.contains(cause), "{said}");
        }
    }
}

/// A refusal is logged, and sent back: whatever it is about, it is a line that people can read.
#[test]
fn a_refusal_is_short_and_printable() {
    let evil = "\n\u{1b}".repeat(1 << 16);
    let said = [
        of_policy(|it| it.name.clone_from(&evil)),
        of_policy(|it| it.destinations[0].clone_from(&evil)),
        of_vip(|it| it.address.clone_from(&evil)),
        of_endpoint(|it| it.vips[0].clone_from(&evil)),
        of_gateway(|it| it.peer_address.clone_from(&evil)),
        Key { kind: Kind::Vip, name: evil.as_str().into() }.to_string(),
    ];
    for said in said {
        assert!(said.len() < 4096, "{} bytes", said.len());
        assert!(!said.contains(char::is_control), "{said:?}");
    }
}
