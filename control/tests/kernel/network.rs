//! Network watcher: interfaces, neighbors and local addresses, in the initial dump and as they change.

use std::net::IpAddr;

use vipgate::kernel::{InterfaceConfig, Network, NetworkError};
use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::policy::spec::{InterfaceSpec, NetworkSpec, Role, RouteTarget};

use crate::testbed::{IN, OUT, Testbed, assert_unchanged, ip, mac, neighbor, open, route, until, via, wanted};

fn interface(now: &NetworkSpec, id: InterfaceId) -> &InterfaceSpec {
    &now.interfaces[usize::from(id.0)]
}

#[test]
fn the_initial_dump_is_complete() {
    Testbed::new("dump").run(|testbed| async move {
        testbed.ip("route add default via 192.0.2.2");
        testbed.ip("neigh add 192.0.2.9 lladdr 02:00:00:00:00:09 dev gw-out nud permanent");
        testbed.ip("neigh add 2001:db8:a::9 lladdr 02:00:00:00:00:0a dev gw-in nud stale");
        testbed.ip("neigh add 172.16.0.9 lladdr 02:00:00:00:00:0b dev mgmt nud permanent");
        testbed.ip("neigh add 192.0.2.10 dev gw-out nud failed");
        testbed.ip("neigh add proxy 192.0.2.11 dev gw-out");
        testbed.ip("address add 203.0.113.1/32 dev lo");
        testbed.ip("link set gw-in mtu 1400");
        let network = open().await;
        let now = network.current();

        let [inside, outside] = &now.interfaces[..] else { panic!("{now:?}") };
        assert_eq!(
            (inside.id, &inside.name[..], inside.role, inside.mtu, inside.up),
            (IN, "gw-in", Role::Inside, 1400, true)
        );
        assert_eq!((outside.id, &outside.name[..], outside.role, outside.mtu), (OUT, "gw-out", Role::Outside, 1500));
        assert_eq!(inside.mac, mac(&testbed.gateway, "gw-in"));
        assert_eq!(outside.mac, mac(&testbed.gateway, "gw-out"));
        assert_eq!(inside.addresses[..2], [ip("10.0.0.1"), ip("2001:db8:a::1")]);
        assert_eq!(inside.addresses.len(), 3, "and a link-local address");
        let index: u32 =
            testbed.gateway.output(&["cat", "/sys/class/net/gw-out/ifindex"]).unwrap().trim().parse().unwrap();
        assert_eq!(outside.ifindex, index);

        assert_eq!(route(&now, "0.0.0.0/0"), Some(&via(&[(OUT, "192.0.2.2")])));
        assert_eq!(route(&now, "10.0.0.0/24"), Some(&via(&[(IN, "")])));
        assert_eq!(route(&now, "2001:db8:b::/64"), Some(&via(&[(OUT, "")])));
        assert_eq!(route(&now, "172.16.0.0/24"), Some(&RouteTarget::Unreachable));
        assert_eq!(route(&now, "192.0.2.1/32"), Some(&RouteTarget::Local));

        let matching: Vec<_> = now.neighbors.iter().filter(|n| n.mac[0] == 2 && n.mac[1..5] == [0; 4]).collect();
        assert_eq!(matching.len(), 2, "{matching:?}");
        assert_eq!(neighbor(&now, OUT, "192.0.2.9"), Some([2, 0, 0, 0, 0, 9]));
        assert_eq!(neighbor(&now, IN, "2001:db8:a::9"), Some([2, 0, 0, 0, 0, 10]));

        // Addresses of all interfaces, including lo and mgmt, with broadcast addresses but without loopback addresses.
        let expected =
            ["10.0.0.1", "10.0.0.255", "172.16.0.1", "172.16.0.255", "192.0.2.1", "192.0.2.255", "203.0.113.1"];
        let v4: Vec<IpAddr> = now.locals.iter().filter(|address| address.is_ipv4()).copied().collect();
        assert_eq!(v4, expected.map(ip));
        for local in ["2001:db8:a::1", "2001:db8:b::1", "2001:db8:c::1"] {
            assert!(now.locals.contains(&ip(local)), "{local} in {:?}", now.locals);
        }
        assert!(!now.locals.contains(&ip("::1")));
        assert!(now.locals.is_sorted());
    });
}

#[test]
fn unsuitable_interfaces_are_rejected_by_name() {
    Testbed::new("rejected").run(|testbed| async move {
        testbed.ip("tuntap add dev tun0 mode tun");
        let open = async |name: &str| {
            let wanted = InterfaceConfig { id: IN, name: name.into(), role: Role::Both };
            Network::open(vec![wanted]).await.unwrap_err()
        };
        assert_eq!(open("gw-inn").await.to_string(), "interface gw-inn: not found in this network namespace");
        assert!(matches!(open("lo").await, NetworkError::Loopback { name } if name == "lo"));
        assert!(matches!(open("tun0").await, NetworkError::NotEthernet { name, .. } if name == "tun0"));
    });
}

#[test]
fn neighbor_changes_are_followed() {
    Testbed::new("neighbors").run(|testbed| async move {
        let mut network = open().await;
        for (interface, device, address) in [(OUT, "gw-out", "192.0.2.9"), (IN, "gw-in", "2001:db8:a::9")] {
            let is = |mac: Option<u8>| {
                move |now: &_| neighbor(now, interface, address) == mac.map(|last| [2, 0, 0, 0, 0, last])
            };
            let set = |last: u8, state: &str| {
                testbed.ip(&format!("neigh replace {address} lladdr 02:00:00:00:00:0{last} dev {device} nud {state}"));
            };
            set(1, "reachable");
            until(&mut network, "neighbor added", is(Some(1))).await;
            for state in ["stale", "delay", "probe", "noarp", "permanent"] {
                set(1, state);
                assert!(is(Some(1))(&network.current()), "{state}");
            }
            assert_unchanged(&mut network).await;
            set(2, "permanent");
            until(&mut network, "MAC address changed", is(Some(2))).await;
            set(2, "failed");
            until(&mut network, "neighbor failed", is(None)).await;
            set(3, "stale");
            until(&mut network, "neighbor restored", is(Some(3))).await;
            testbed.ip(&format!("neigh del {address} dev {device}"));
            until(&mut network, "neighbor deleted", is(None)).await;
            // Ignored: neighbors on other interfaces, and multicast MAC addresses.
            testbed.ip("neigh replace 172.16.0.9 lladdr 02:00:00:00:00:01 dev mgmt nud permanent");
            testbed.ip("neigh replace 192.0.2.77 lladdr 01:00:5e:00:00:01 dev gw-out nud permanent");
            assert_unchanged(&mut network).await;
        }
    });
}

#[test]
fn routes_follow_the_link_state() {
    Testbed::new("updown").run(|testbed| async move {
        testbed.ip("route add 198.51.100.0/24 via 192.0.2.2");
        testbed.ip("route add 198.51.101.0/24 nexthop via 192.0.2.2 nexthop via 10.0.0.2");
        testbed.ip("route add 2001:db8:101::/48 nexthop via 2001:db8:b::2 nexthop via 2001:db8:a::2");
        let mut network = open().await;

        // Without carrier, the kernel keeps the routes.
        testbed.external.ip(&["link", "set", "eth0", "down"]).unwrap();
        let now = until(&mut network, "no carrier", |now| !interface(now, OUT).up).await;
        assert!(interface(&now, IN).up);
        assert_eq!(route(&now, "198.51.100.0/24"), Some(&via(&[(OUT, "192.0.2.2")])));
        testbed.external.ip(&["link", "set", "eth0", "up"]).unwrap();
        until(&mut network, "carrier", |now| interface(now, OUT).up).await;

        // When the link is set down, it removes them, those of IPv4 without notification, and marks next hops as dead.
        testbed.ip("link set gw-out down");
        until(&mut network, "down", |now| {
            !interface(now, OUT).up
                && route(now, "198.51.100.0/24").is_none()
                && route(now, "192.0.2.0/24").is_none()
                && route(now, "198.51.101.0/24") == Some(&via(&[(IN, "10.0.0.2")]))
                && route(now, "2001:db8:101::/48") == Some(&via(&[(IN, "2001:db8:a::2")]))
                && route(now, "192.0.2.255/32").is_none()
        })
        .await;
        testbed.ip("link set gw-out up");
        until(&mut network, "up", |now| {
            interface(now, OUT).up
                && route(now, "192.0.2.0/24") == Some(&via(&[(OUT, "")]))
                && route(now, "198.51.101.0/24") == Some(&via(&[(OUT, "192.0.2.2"), (IN, "10.0.0.2")]))
        })
        .await;
    });
}

#[test]
fn next_hops_without_carrier_are_dead_with_ignore_routes_with_linkdown() {
    Testbed::new("linkdown").run(|testbed| async move {
        Testbed::sysctl(&testbed.gateway, "net.ipv4.conf.gw-out.ignore_routes_with_linkdown", 1);
        testbed.ip("route add 198.51.100.0/24 via 192.0.2.2 metric 1");
        testbed.ip("route add 198.51.100.0/24 via 10.0.0.2 metric 2");
        let mut network = open().await;
        assert_eq!(route(&network.current(), "198.51.100.0/24"), Some(&via(&[(OUT, "192.0.2.2")])));
        testbed.external.ip(&["link", "set", "eth0", "down"]).unwrap();
        let second = via(&[(IN, "10.0.0.2")]);
        until(&mut network, "the second metric", |now| route(now, "198.51.100.0/24") == Some(&second)).await;
        testbed.external.ip(&["link", "set", "eth0", "up"]).unwrap();
        let first = via(&[(OUT, "192.0.2.2")]);
        until(&mut network, "the first metric", |now| route(now, "198.51.100.0/24") == Some(&first)).await;
    });
}

#[test]
fn link_and_address_changes_are_followed() {
    Testbed::new("change").run(|testbed| async move {
        let mut network = open().await;
        testbed.ip("link set gw-out mtu 9000");
        until(&mut network, "the MTU", |now| interface(now, OUT).mtu == 9000).await;
        testbed.ip("link set gw-in address 02:00:00:00:00:77");
        until(&mut network, "the MAC address", |now| interface(now, IN).mac == [2, 0, 0, 0, 0, 0x77]).await;
        for (prefix, added) in [("192.0.2.7/24", "192.0.2.7"), ("2001:db8:b::7/64", "2001:db8:b::7")] {
            let address = ip(added);
            let has = |now: &NetworkSpec| {
                let host = format!("{added}/{}", if address.is_ipv4() { 32 } else { 128 });
                let known = [
                    interface(now, OUT).addresses.contains(&address),
                    now.locals.contains(&address),
                    route(now, &host) == Some(&RouteTarget::Local),
                ];
                (known == [true; 3], known == [false; 3])
            };
            testbed.ip(&format!("address add {prefix} dev gw-out"));
            let now = until(&mut network, "address added", |now| has(now).0).await;
            assert_eq!(interface(&now, OUT).addresses[0], ip("192.0.2.1"), "the first address stays first");
            testbed.ip(&format!("address del {prefix} dev gw-out"));
            until(&mut network, "address deleted", |now| has(now).1).await;
        }
        testbed.ip("address add 172.16.5.5/32 dev mgmt");
        until(&mut network, "address of another interface", |now| now.locals.contains(&ip("172.16.5.5"))).await;
        // The kernel removes routes with this preferred source, in some versions without notification.
        testbed.ip("address add 192.0.2.8/24 dev gw-out");
        testbed.ip("route add 198.51.100.0/24 via 10.0.0.2 src 192.0.2.8");
        until(&mut network, "the route", |now| route(now, "198.51.100.0/24").is_some()).await;
        testbed.ip("address del 192.0.2.8/24 dev gw-out");
        until(&mut network, "no route", |now| route(now, "198.51.100.0/24").is_none()).await;
    });
}

#[test]
fn a_deleted_interface_stays_down_even_if_its_name_is_reused() {
    Testbed::new("gone").run(|testbed| async move {
        testbed.ip("neigh add 192.0.2.9 lladdr 02:00:00:00:00:09 dev gw-out nud permanent");
        let mut network = open().await;
        let before = interface(&network.current(), OUT).ifindex;
        testbed.ip("link del gw-out");
        let now =
            until(&mut network, "interface deleted", |now| !interface(now, OUT).up && now.neighbors.is_empty()).await;
        assert_eq!(now.interfaces.len(), 2);
        assert!(interface(&now, OUT).addresses.is_empty());
        assert_eq!(interface(&now, OUT).ifindex, before);
        until(&mut network, "its routes are gone", |now| route(now, "192.0.2.0/24").is_none()).await;

        testbed.ip("link add gw-out type veth peer name gw-out-peer");
        testbed.ip("link set gw-out up");
        testbed.ip("link set gw-out-peer up");
        testbed.ip("address add 192.0.2.1/24 dev gw-out");
        let unreachable = |now: &NetworkSpec| route(now, "192.0.2.0/24") == Some(&RouteTarget::Unreachable);
        let now = until(&mut network, "route over another device", unreachable).await;
        assert!(!interface(&now, OUT).up);
        assert_eq!(interface(&now, OUT).ifindex, before);

        // Other interfaces are still followed.
        testbed.ip("link set gw-in mtu 1300");
        until(&mut network, "the other interface", |now| interface(now, IN).mtu == 1300).await;
    });
}

#[test]
fn bridge_port_changes_are_ignored() {
    Testbed::new("bridge").run(|testbed| async move {
        let mut network = open().await;
        testbed.ip("link add br0 type bridge");
        testbed.ip("link set mgmt master br0");
        testbed.ip("link set br0 up");
        testbed.ip("link set gw-in master br0");
        testbed.ip("link set gw-in nomaster");
        testbed.ip("link del br0");
        testbed.ip("link set gw-in mtu 1300");
        let now = until(&mut network, "the MTU", |now| interface(now, IN).mtu == 1300).await;
        assert!(interface(&now, IN).up, "removal of the bridge port doesn't remove the interface");
    });
}

#[test]
fn interfaces_are_indexed_by_id() {
    Testbed::new("order").run(|_testbed| async move {
        let mut wanted = wanted();
        wanted.reverse();
        let network = Network::open(wanted).await.unwrap();
        for (i, interface) in network.current().interfaces.iter().enumerate() {
            assert_eq!(usize::from(interface.id.0), i);
        }
    });
}
