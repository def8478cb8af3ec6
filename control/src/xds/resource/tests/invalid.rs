//! Invalid resources, and the errors with field and reason.

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
        shares: vec![shard("g1", 128), shard("g2", 0)],
        ..proto::Vip::default()
    }
}

fn shard(gateway: &str, bytes: usize) -> proto::Share {
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
        verify_mac: false,
        sends_covered_only: false,
    }
}

/// The decoding error of a message.
fn error(kind: Kind, name: &str, message: &impl Message) -> String {
    decode(kind, name, &message.encode_to_vec()).unwrap_err().to_string()
}

/// The decoding error of policy `p` after a change.
fn policy_error(change: impl FnOnce(&mut proto::EgressPolicy)) -> String {
    let mut message = policy();
    change(&mut message);
    error(Kind::EgressPolicy, "p", &message)
}

fn vip_error(change: impl FnOnce(&mut proto::Vip)) -> String {
    let mut message = vip();
    change(&mut message);
    error(Kind::Vip, "203.0.113.1", &message)
}

/// The decoding error of a VIP with this address and name.
fn vip_error_at(address: &str) -> String {
    error(Kind::Vip, address, &proto::Vip { address: address.to_owned(), ..vip() })
}

fn endpoint_error(change: impl FnOnce(&mut proto::Endpoint)) -> String {
    let mut message = endpoint();
    change(&mut message);
    error(Kind::Endpoint, "10.0.0.1", &message)
}

fn cluster() -> proto::Cluster {
    let texts = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
    proto::Cluster {
        pod_cidrs: texts(&["10.244.0.0/16", "fd00:244::/48"]),
        service_cidrs: texts(&["10.96.0.0/12"]),
        node_cidrs: texts(&["10.244.1.0/24"]),
        uncovered: proto::Uncovered::Drop.into(),
        node_addresses: Vec::new(),
    }
}

#[test]
fn invalid_clusters_are_rejected_with_field_and_reason() {
    let error_with = |change: fn(&mut proto::Cluster)| {
        let mut message = cluster();
        change(&mut message);
        error(Kind::Cluster, "cluster", &message)
    };
    let cases = [
        (error_with(|it| it.pod_cidrs[1] = "10.244.0.0".to_owned()), "pod_cidrs[1]: `10.244.0.0` is not a prefix"),
        (
            error_with(|it| it.service_cidrs[0] = "10.96.0.1/12".to_owned()),
            "service_cidrs[0]: 10.96.0.1/12 has bits set beyond its prefix length",
        ),
        (
            error_with(|it| it.node_cidrs[0] = "0.0.0.0/0".to_owned()),
            "node_cidrs[0]: 0.0.0.0/0 covers every address: nothing would be outside",
        ),
        (error_with(|it| it.pod_cidrs[1] = "10.244.0.0/16".to_owned()), "pod_cidrs[1]: 10.244.0.0/16 is a duplicate"),
        (error_with(|it| it.uncovered = 3), "uncovered: 3 is unknown to this version"),
    ];
    for (message, expected) in cases {
        assert_eq!(message, expected);
    }
    assert_eq!(error(Kind::Cluster, "other", &cluster()), "name: is `cluster`, but the resource's name is `other`");
}

fn shard_map() -> proto::ShardMap {
    let order = |gateways: &[u32]| proto::GatewayOrder { gateways: gateways.to_vec() };
    proto::ShardMap {
        name: "m".to_owned(),
        gateways: vec!["g1".to_owned(), "g2".to_owned()],
        orders: vec![order(&[0, 1]), order(&[1])],
        slots: (0..1024).map(|slot| slot % 2).collect(),
    }
}

#[test]
fn invalid_shard_maps_are_rejected_with_field_and_reason() {
    let error_with = |change: fn(&mut proto::ShardMap)| {
        let mut message = shard_map();
        change(&mut message);
        error(Kind::ShardMap, "m", &message)
    };
    let cases = [
        (error_with(|it| it.gateways[1] = String::new()), "gateways[1]: `` is empty or a duplicate"),
        (error_with(|it| it.gateways[1] = "g1".to_owned()), "gateways[1]: `g1` is empty or a duplicate"),
        (
            error_with(|it| it.orders[0].gateways[1] = 2),
            "orders[0].gateways: 2 is not the index of a gateway, or a duplicate",
        ),
        (
            error_with(|it| it.orders[0].gateways[1] = 0),
            "orders[0].gateways: 0 is not the index of a gateway, or a duplicate",
        ),
        (error_with(|it| it.slots[5] = u32::MAX), "slots[5]: is not the index of an order"),
    ];
    for (message, expected) in cases {
        assert_eq!(message, expected);
    }
    assert_eq!(vip_error(|it| it.rotation = 1024), "rotation: 1024 exceeds 1023");
    assert_eq!(endpoint_error(|it| it.slot = 1025), "slot: 1025 exceeds 1024");
    assert!(decode(Kind::Endpoint, "10.0.0.1", &proto::Endpoint { slot: 1024, ..endpoint() }.encode_to_vec()).is_ok());
}

fn gateway_error(change: impl FnOnce(&mut proto::Gateway)) -> String {
    let mut message = gateway();
    change(&mut message);
    error(Kind::Gateway, "g1", &message)
}

#[test]
fn the_unchanged_resources_are_valid() {
    let valid: [(Kind, &str, Vec<u8>); Kind::COUNTED] = [
        (Kind::OverlayNode, "n1", node().encode_to_vec()),
        (Kind::Cluster, "cluster", cluster().encode_to_vec()),
        (Kind::EgressPolicy, "p", policy().encode_to_vec()),
        (Kind::Vip, "203.0.113.1", vip().encode_to_vec()),
        (Kind::ShardMap, "m", shard_map().encode_to_vec()),
        (Kind::Endpoint, "10.0.0.1", endpoint().encode_to_vec()),
        (Kind::Gateway, "g1", gateway().encode_to_vec()),
        (
            Kind::BackendSlice,
            "s#0",
            proto::BackendSlice { service: "s".to_owned(), ..Default::default() }.encode_to_vec(),
        ),
        (Kind::Settings, "settings", proto::Settings::default().encode_to_vec()),
    ];
    for (kind, name, body) in valid {
        assert!(decode(kind, name, &body).is_ok(), "{kind:?}");
    }
}

#[test]
fn invalid_overlay_nodes_are_rejected_with_field_and_reason() {
    let error_with = |change: fn(&mut proto::OverlayNode)| {
        let mut message = node();
        change(&mut message);
        error(Kind::OverlayNode, "n1", &message)
    };
    let cases = [
        (error_with(|it| it.name = "n2".to_owned()), "name: is `n2`, but the resource's name is `n1`"),
        (error_with(|it| it.address = "10.9.0".to_owned()), "address: `10.9.0` is not an address"),
        (error_with(|it| it.address = "0.0.0.0".to_owned()), "address: 0.0.0.0 is the unspecified address"),
        (error_with(|it| it.port = 0), "port: 0 is not a port"),
        (error_with(|it| it.port = 65_536), "port: 65536 is not a port"),
        (error_with(|it| it.mac.truncate(5)), "mac: is not a MAC address"),
        (
            error_with(|it| it.prefixes[0] = "10.1.0.1/24".to_owned()),
            "prefixes[0]: 10.1.0.1/24 has bits set beyond its prefix length",
        ),
        (
            error_with(|it| it.prefixes = vec!["::/0".to_owned(); 4097]),
            "prefixes: has 4097 entries, the maximum is 4096",
        ),
    ];
    for (message, expected) in cases {
        assert_eq!(message, expected);
    }
}

#[test]
fn invalid_policies_are_rejected_with_field_and_reason() {
    let cases = [
        (policy_error(|it| it.name = "q".to_owned()), "name: is `q`, but the resource's name is `p`"),
        (
            policy_error(|it| it.destinations[1] = "10.0.0.1/8".to_owned()),
            "destinations[1]: 10.0.0.1/8 has bits set beyond its prefix length",
        ),
        (
            policy_error(|it| it.excluded = vec!["fd00::1/8".to_owned()]),
            "excluded[0]: fd00::1/8 has bits set beyond its prefix length",
        ),
        (policy_error(|it| it.destinations[0] = "10.0.0.0".to_owned()), "destinations[0]: `10.0.0.0` is not a prefix"),
        (
            policy_error(|it| it.destinations[0] = "10.0.0.0/33".to_owned()),
            "destinations[0]: `10.0.0.0/33` is not a prefix",
        ),
        (policy_error(|it| it.excluded = vec![String::new()]), "excluded[0]: `` is not a prefix"),
        (
            policy_error(|it| it.destinations = vec!["::/0".to_owned(); 4097]),
            "destinations: has 4097 entries, the maximum is 4096",
        ),
        (
            policy_error(|it| it.excluded = vec!["::/0".to_owned(); 4097]),
            "excluded: has 4097 entries, the maximum is 4096",
        ),
        (policy_error(|it| it.address_selection = 2), "address_selection: 2 is unknown to this version"),
        (policy_error(|it| it.on_exhaustion = -1), "on_exhaustion: -1 is unknown to this version"),
        (error(Kind::EgressPolicy, "", &proto::EgressPolicy::default()), "name: is empty"),
    ];
    for (message, expected) in cases {
        assert_eq!(message, expected);
    }
}

#[test]
fn invalid_vips_are_rejected_with_field_and_reason() {
    let cases = [
        (
            vip_error(|it| it.address = "203.0.113.2".to_owned()),
            "address: is `203.0.113.2`, but the resource's name is `203.0.113.1`",
        ),
        (vip_error_at("2001:DB8::1"), "address: `2001:DB8::1` is not in canonical form, which is `2001:db8::1`"),
        (vip_error_at("2001:db8:0::1"), "address: `2001:db8:0::1` is not in canonical form, which is `2001:db8::1`"),
        (vip_error_at("203.0.113.01"), "address: `203.0.113.01` is not an address"),
        (vip_error_at("203.0.113.1/32"), "address: `203.0.113.1/32` is not an address"),
        (vip_error_at(""), "address: `` is not an address"),
        (vip_error_at("0.0.0.0"), "address: 0.0.0.0 is the unspecified address"),
        (vip_error_at("::"), "address: :: is the unspecified address"),
        (vip_error_at("0.0.0.1"), "address: 0.0.0.1 is not a valid host address"),
        (vip_error_at("127.0.0.1"), "address: 127.0.0.1 is a loopback address"),
        (vip_error_at("::1"), "address: ::1 is a loopback address"),
        (vip_error_at("224.0.0.1"), "address: 224.0.0.1 is a multicast address"),
        (vip_error_at("ff02::1"), "address: ff02::1 is a multicast address"),
        (vip_error_at("fe80::1"), "address: fe80::1 is a link-local address"),
        (vip_error_at("255.255.255.255"), "address: 255.255.255.255 is not a valid host address"),
        (vip_error_at("::ffff:203.0.113.1"), "address: ::ffff:203.0.113.1 is not a valid host address"),
        (vip_error(|it| it.announce = 2), "announce: 2 is unknown to this version"),
        (vip_error(|it| it.reserved_ports[0] = 0), "reserved_ports[0]: 0 is not a port"),
        (vip_error(|it| it.reserved_ports[1] = 70_000), "reserved_ports[1]: 70000 is not a port"),
        (vip_error(|it| it.reserved_ports = vec![443, 80]), "reserved_ports[1]: 80 is not in ascending order"),
        (vip_error(|it| it.reserved_ports = vec![80, 80]), "reserved_ports[1]: 80 is not in ascending order"),
        (vip_error(|it| it.shares[0].blocks.truncate(127)), "shares[0].blocks: has 127 bytes, expected 128 or none"),
        (vip_error(|it| it.shares[1].blocks = vec![0; 129]), "shares[1].blocks: has 129 bytes, expected 128 or none"),
        (vip_error(|it| it.shares[1].gateway = "g1".to_owned()), "shares[1].gateway: `g1` is empty or a duplicate"),
        (vip_error(|it| it.shares[0].gateway.clear()), "shares[0].gateway: `` is empty or a duplicate"),
        (
            vip_error(|it| it.shares[0].backups[1].clear()),
            "shares[0].backups[1]: `` is empty, the shard's own gateway, or a duplicate",
        ),
        (
            vip_error(|it| it.shares[1].backups[0] = "g2".to_owned()),
            "shares[1].backups[0]: `g2` is empty, the shard's own gateway, or a duplicate",
        ),
        (
            vip_error(|it| it.shares[1].backups[1] = "g3".to_owned()),
            "shares[1].backups[1]: `g3` is empty, the shard's own gateway, or a duplicate",
        ),
        (
            vip_error(|it| it.shares[0].backups = (5..9).map(|n| format!("g{n}")).collect()),
            "shares[0].backups: has 4 entries, the maximum is 3",
        ),
        (vip_error(|it| it.shares = vec![shard("g", 0); 4097]), "shares: has 4097 entries, the maximum is 4096"),
    ];
    for (message, expected) in cases {
        assert_eq!(message, expected);
    }
}

#[test]
fn invalid_endpoints_are_rejected_with_field_and_reason() {
    let cases = [
        (
            endpoint_error(|it| it.address = "10.0.0.2".to_owned()),
            "address: is `10.0.0.2`, but the resource's name is `10.0.0.1`",
        ),
        (
            endpoint_error(|it| it.vips[0] = "2001:db8::1".to_owned()),
            "vips[0]: 2001:db8::1 is of another address family than 10.0.0.1",
        ),
        (endpoint_error(|it| it.vips.push("203.0.113.1".to_owned())), "vips[1]: 203.0.113.1 is a duplicate"),
        (endpoint_error(|it| it.vips[0] = "0.0.0.0".to_owned()), "vips[0]: 0.0.0.0 is the unspecified address"),
        (endpoint_error(|it| it.vips[0] = "web".to_owned()), "vips[0]: `web` is not an address"),
        (
            endpoint_error(|it| it.vips = vec!["203.0.113.1".to_owned(); 257]),
            "vips: has 257 entries, the maximum is 256",
        ),
    ];
    for (message, expected) in cases {
        assert_eq!(message, expected);
    }
}

#[test]
fn invalid_gateways_are_rejected_with_field_and_reason() {
    let cases = [
        (gateway_error(|it| it.name = "g2".to_owned()), "name: is `g2`, but the resource's name is `g1`"),
        (gateway_error(|it| it.peer_address = "127.0.0.1".to_owned()), "peer_address: 127.0.0.1 is a loopback address"),
        (gateway_error(|it| it.peer_address = "g1:50051".to_owned()), "peer_address: `g1:50051` is not an address"),
        (error(Kind::Gateway, "", &proto::Gateway::default()), "name: is empty"),
    ];
    for (message, expected) in cases {
        assert_eq!(message, expected);
    }
}

#[test]
fn settings_with_another_name_are_rejected() {
    let message = error(Kind::Settings, "setting", &proto::Settings::default());
    assert_eq!(message, "name: is `settings`, but the resource's name is `setting`");
}

/// All of these are printed or used as metric labels.
#[test]
fn texts_are_printable_and_bounded() {
    let too_long = || "x".repeat((64 << 10) + 1);
    let max = || "x".repeat(64 << 10);
    let message = proto::Vip { name: max(), ..vip() };
    assert!(decode(Kind::Vip, "203.0.113.1", &message.encode_to_vec()).is_ok());
    let invalid = ["a\nb".to_owned(), "a\u{1b}[2J".to_owned(), "\0".to_owned(), "\u{85}".to_owned(), too_long()];
    for text in invalid {
        let mut errors = vec![
            ("name", vip_error(|it| it.name.clone_from(&text))),
            ("shares[1].gateway", vip_error(|it| it.shares[1].gateway.clone_from(&text))),
            ("shares[0].backups[1]", vip_error(|it| it.shares[0].backups[1].clone_from(&text))),
            ("name", endpoint_error(|it| it.name.clone_from(&text))),
            ("policy", endpoint_error(|it| it.policy.clone_from(&text))),
            ("gateway", endpoint_error(|it| it.gateway.clone_from(&text))),
            ("node", gateway_error(|it| it.node.clone_from(&text))),
            ("zone", gateway_error(|it| it.zone.clone_from(&text))),
            (
                "version",
                error(Kind::Settings, SETTINGS, &proto::Settings { version: text.clone(), ..Default::default() }),
            ),
        ];
        if text.len() <= 1024 {
            errors.push((
                "name",
                error(Kind::EgressPolicy, &text, &proto::EgressPolicy { name: text.clone(), ..policy() }),
            ));
            errors.push(("name", error(Kind::Gateway, &text, &proto::Gateway { name: text.clone(), ..gateway() })));
        }
        for (field, message) in errors {
            assert_eq!(message, format!("{field}: is longer than 65536 bytes, or not printable"));
        }
    }
}

#[test]
fn names_are_bounded() {
    for kind in Kind::ALL {
        let error = decode(kind, &"x".repeat(1025), b"").unwrap_err();
        assert_eq!(error.to_string(), "name: has 1025 bytes, the maximum is 1024");
    }
    let max = "x".repeat(1024);
    let message = proto::EgressPolicy { name: max.clone(), ..policy() };
    assert!(decode(Kind::EgressPolicy, &max, &message.encode_to_vec()).is_ok());
}

#[test]
fn an_undecodable_body_is_rejected_with_the_expected_message_type() {
    let bodies: [(&[u8], &str); 4] = [
        (b"\x0a\x02\xc3\x28", "UTF-8"),
        (b"\x0a\x05p", "buffer underflow"),
        (b"\x08\x01", "wire type"),
        (b"\xff", "varint"),
    ];
    for kind in Kind::OF_GATEWAYS {
        for (body, cause) in bodies {
            let name = if kind == Kind::Settings { SETTINGS } else { "p" };
            let message = decode(kind, name, body).unwrap_err().to_string();
            assert!(message.starts_with(&format!("is not a valid {}: ", kind.name())), "{message}");
            assert!(message.contains(cause), "{message}");
        }
    }
}

/// Errors are logged and sent in NACKs.
#[test]
fn an_error_is_short_and_printable() {
    let malicious = "\n\u{1b}".repeat(1 << 16);
    let messages = [
        policy_error(|it| it.name.clone_from(&malicious)),
        policy_error(|it| it.destinations[0].clone_from(&malicious)),
        vip_error(|it| it.address.clone_from(&malicious)),
        endpoint_error(|it| it.vips[0].clone_from(&malicious)),
        gateway_error(|it| it.peer_address.clone_from(&malicious)),
        Key { kind: Kind::Vip, name: malicious.as_str().into() }.to_string(),
    ];
    for message in messages {
        assert!(message.len() < 4096, "{} bytes", message.len());
        assert!(!message.contains(char::is_control), "{message:?}");
    }
}
