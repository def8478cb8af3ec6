//! Invalid Services, and the errors with field and reason.

use prost::Message;

use super::super::super::proto;
use super::*;
use crate::xds::resource::slices::ServiceResource;

fn port(name: &str, protocol: u32, port: u32) -> proto::ServicePort {
    proto::ServicePort { name: name.to_owned(), protocol, port }
}

fn backend(address: &str) -> proto::Backend {
    proto::Backend {
        address: address.to_owned(),
        ports: vec![8080, 0],
        weight: 1,
        hint_nodes: vec!["n1".to_owned(), "n2".to_owned()],
        ..proto::Backend::default()
    }
}

fn service() -> proto::Service {
    proto::Service {
        name: "s".to_owned(),
        vips: vec!["203.0.113.1".to_owned(), "2001:db8::1".to_owned()],
        ports: vec![port("http", 6, 80), port("dns", 17, 80)],
        backends: vec![backend("10.0.0.1"), backend("fd00::1")],
        source_ranges: vec!["198.51.100.0/24".to_owned(), "2001:db8::/32".to_owned()],
        table_size: 2039,
        ..proto::Service::default()
    }
}

/// The decoding error of a Service after a change.
fn error_with(change: impl FnOnce(&mut proto::Service)) -> String {
    let mut message = service();
    change(&mut message);
    decode(Kind::Service, "s", &message.encode_to_vec()).unwrap_err().to_string()
}

#[test]
fn the_unchanged_service_is_valid() {
    let decoded = decode(Kind::Service, "s", &service().encode_to_vec());
    let Ok(Decoded::Service(decoded)) = decoded else { panic!("{decoded:?}") };
    let ServiceResource { service: decoded, slices: 0 } = decoded else { panic!("{decoded:?}") };
    assert_eq!((decoded.vips.len(), decoded.backends.len(), &*decoded.backends[0].ports), (2, 2, &[8080_u16, 0][..]));
    assert_eq!((decoded.affinity, decoded.health_port), (None, None));
    assert_eq!((decoded.external, decoded.internal), (Scope::Cluster, Scope::Cluster));
    let empty = proto::Service { name: "s".to_owned(), table_size: 7, ..proto::Service::default() };
    assert!(decode(Kind::Service, "s", &empty.encode_to_vec()).is_ok(), "a Service may be empty");
}

/// A change of a valid Service, and the error that it causes.
type Case = (fn(&mut proto::Service), &'static str);

const CASES: &[Case] = &[
    (|it| it.name = "t".to_owned(), "name: is `t`, but the resource's name is `s`"),
    (|it| it.vips[0] = "::ffff:1.2.3.4".to_owned(), "vips[0]: ::ffff:1.2.3.4 is not a valid host address"),
    (
        |it| it.vips[1] = "2001:DB8::1".to_owned(),
        "vips[1]: `2001:DB8::1` is not in canonical form, which is `2001:db8::1`",
    ),
    (|it| it.vips.reverse(), "vips[1]: is not in ascending order"),
    (|it| it.vips[1] = it.vips[0].clone(), "vips[1]: is not in ascending order"),
    (|it| it.vips = vec![String::new(); 65], "vips: has 65 entries, the maximum is 64"),
    (|it| it.ports[0].protocol = 1, "ports[0].protocol: 1 has no ports"),
    (|it| it.ports[0].protocol = 256 + 6, "ports[0].protocol: 262 has no ports"),
    (|it| it.ports[1].port = 0, "ports[1].port: 0 is not a port"),
    (|it| it.ports[1].port = 65_536, "ports[1].port: 65536 is not a port"),
    (|it| it.ports[0].name = "\n".to_owned(), "ports[0].name: is longer than 65536 bytes, or not printable"),
    (
        |it| (it.backend_slices, it.more_backends) = (1, std::mem::take(&mut it.backends)),
        "more_backends: isn't empty, but the Service has backend slices",
    ),
    (|it| it.backends[0].address = "127.0.0.1".to_owned(), "backends[0].address: 127.0.0.1 is a loopback address"),
    (|it| it.backends[0].ports[1] = 65_536, "backends[0].ports: 65536 is not a port"),
    (|it| it.backends[0].weight = 257, "backends[0].weight: is 257, the maximum is 256"),
    (|it| it.backends[0].weight = 65_537, "backends[0].weight: is 65537, the maximum is 256"),
    (|it| it.backends[0].state = 3, "backends[0].state: 3 is unknown to this version"),
    (|it| it.backends[0].node = "\u{7}".to_owned(), "backends[0].node: is longer than 65536 bytes, or not printable"),
    (|it| it.backends[0].zone = "x".repeat(65_537), "backends[0].zone: is longer than 65536 bytes, or not printable"),
    (|it| it.backends[0].hint_nodes.reverse(), "backends[0].hint_nodes[1]: is not in ascending order"),
    (|it| it.backends[0].hint_zones = vec!["z".to_owned(); 2], "backends[0].hint_zones[1]: is not in ascending order"),
    (
        |it| it.backends[0].hint_zones = vec![String::new(); 4097],
        "backends[0].hint_zones: has 4097 entries, the maximum is 4096",
    ),
    (
        |it| it.source_ranges[0] = "198.51.100.1/24".to_owned(),
        "source_ranges[0]: 198.51.100.1/24 has bits set beyond its prefix length",
    ),
    (|it| it.source_ranges.reverse(), "source_ranges[1]: is not in ascending order"),
    (|it| it.source_ranges = vec![String::new(); 65_536], "source_ranges: has 65536 entries, the maximum is 65535"),
    (|it| it.external_traffic_policy = 2, "external_traffic_policy: 2 is unknown to this version"),
    (|it| it.internal_traffic_policy = -1, "internal_traffic_policy: -1 is unknown to this version"),
    (|it| it.health_check_port = 65_536, "health_check_port: 65536 is not a port"),
];

#[test]
fn invalid_services_are_rejected_with_field_and_reason() {
    for (change, expected) in CASES {
        assert_eq!(error_with(change), *expected);
    }
}
