use netlink_packet_core::NLM_F_REPLACE;

use super::super::{Change, NetworkEvent};
use super::*;
use crate::message::{Message, push_attribute};

fn event(kind: u16, flags: u16, body: &[u8]) -> Result<Option<NetworkEvent>, DecodeError> {
    NetworkEvent::decode(&Message { kind, flags, sequence: 0, body })
}

/// The body of the RTM_NEWROUTE message for
/// `ip -6 route add 2001:db8:9::/48 metric 10 nexthop via 2001:db8::9 dev A nexthop via 2001:db8::a dev B`, where A has
/// index 3 and B, index 4, is down.
fn multipath() -> Vec<u8> {
    let mut body = vec![10, 48, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0];
    body.extend(attribute(1, &[0x20, 0x01, 0x0d, 0xb8, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]));
    body.extend(attribute(15, &254u32.to_ne_bytes()));
    body.extend(attribute(6, &10u32.to_ne_bytes()));
    let mut hops = Vec::new();
    for (last, ifindex, flags) in [(9u8, 3u32, 0u8), (10, 4, 1)] {
        hops.extend([28, 0, flags, 0]);
        hops.extend(ifindex.to_ne_bytes());
        hops.extend(attribute(5, &[0x20, 0x01, 0x0d, 0xb8, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, last]));
    }
    body.extend(attribute(9, &hops));
    body
}

fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::new();
    push_attribute(&mut bytes, kind, value);
    bytes
}

#[test]
fn a_multipath_route_has_all_next_hops() {
    let Some(NetworkEvent::Route(Change::New, route)) = event(libc::RTM_NEWROUTE, 0, &multipath()).unwrap() else {
        panic!("no route");
    };
    let hop =
        |gateway: &str, ifindex, dead| NextHop { ifindex, gateway: gateway.parse().ok(), dead, encapsulated: false };
    assert_eq!(
        route,
        Route {
            table: 254,
            prefix: "2001:db8:9::/48".parse().unwrap(),
            metric: 10,
            kind: libc::RTN_UNICAST,
            protocol: 3,
            next_hops: vec![hop("2001:db8::9", 3, false), hop("2001:db8::a", 4, true)],
            nexthop_id: None,
        }
    );
}

#[test]
fn a_gateway_of_the_other_family_is_decoded() {
    let mut body = vec![2, 24, 0, 0, 254, 3, 0, 1, 0, 0, 0, 0];
    body.extend(attribute(1, &[192, 0, 2, 0]));
    body.extend(attribute(4, &7u32.to_ne_bytes()));
    let mut via = vec![10, 0];
    via.extend("fe80::1".parse::<Ipv6Addr>().unwrap().octets());
    body.extend(attribute(18, &via));
    let Some(NetworkEvent::Route(Change::Replaced, route)) = event(libc::RTM_NEWROUTE, NLM_F_REPLACE, &body).unwrap()
    else {
        panic!("no route");
    };
    assert_eq!(
        route.next_hops,
        [NextHop { ifindex: 7, gateway: "fe80::1".parse().ok(), dead: false, encapsulated: false }]
    );
}

#[test]
fn a_truncated_message_is_not_read_past_its_end() {
    let whole = multipath();
    for kind in [libc::RTM_NEWLINK, libc::RTM_NEWADDR, libc::RTM_NEWROUTE, libc::RTM_NEWNEIGH, RTM_NEWNEXTHOP] {
        for end in 0..whole.len() {
            // An error, nothing, or the attributes before the end; never a panic.
            let _ = event(kind, 0, &whole[..end]);
        }
    }
    assert!(event(libc::RTM_NEWROUTE, 0, &whole[..whole.len() - 1]).is_err());
    assert!(event(libc::RTM_NEWNEIGH, 0, &[0; 3]).is_err());
}

#[test]
fn source_specific_tos_and_cached_routes_are_ignored() {
    let plain = multipath();
    for (offset, value) in [(2usize, 64u8), (3, 0x10), (9, 2)] {
        // A source prefix, a type of service, RTM_F_CLONED.
        let mut body = plain.clone();
        body[offset] = value;
        assert_eq!(event(libc::RTM_NEWROUTE, 0, &body).unwrap(), None);
    }
}

#[test]
fn a_vxlan_device_has_a_port_only_if_its_tunnels_are_in_metadata() {
    let link = |kind: &[u8], metadata: u8| {
        let data = [attribute(1, &[0; 4]), attribute(15, &4789u16.to_be_bytes()), attribute(25, &[metadata])].concat();
        let info = [attribute(libc::IFLA_INFO_KIND, kind), attribute(libc::IFLA_INFO_DATA, &data)].concat();
        let body = [vec![0; LINK_HEADER], attribute(libc::IFLA_LINKINFO, &info)].concat();
        link(&body).unwrap().map(|link| (link.is_virtual, link.metadata_vxlan_port)).unwrap()
    };
    assert_eq!(link(b"vxlan\0", 1), (true, Some(4789)));
    assert_eq!(link(b"vxlan\0", 0), (true, None));
    assert_eq!(link(b"geneve\0", 1), (true, None));
}
