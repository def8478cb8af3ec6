//! Interfaces, neighbours and local addresses of the kernel, at the opening and as they change.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod kernel_support;

use std::net::IpAddr;

use kernel_support::{IN, OUT, Site, ip, mac, neighbour, open, route, stays, until, via, wanted};
use vipgate::kernel::{Network, NetworkError, Wanted};
use vipgate_dataplane::io::InterfaceId;
use vipgate_dataplane::snapshot::spec::{InterfaceSpec, NetworkSpec, Role, RouteTarget};

fn interface(now: &NetworkSpec, id: InterfaceId) -> &InterfaceSpec {
    &now.interfaces[usize::from(id.0)]
}

#[test]
fn what_is_there_at_the_opening_is_known() {
    Site::new("dump").run(|site| async move {
        site.ip("route add default via 192.0.2.2");
        site.ip("neigh add 192.0.2.9 lladdr 02:00:00:00:00:09 dev gw-out nud permanent");
        site.ip("neigh add 2001:db8:a::9 lladdr 02:00:00:00:00:0a dev gw-in nud stale");
        site.ip("neigh add 172.16.0.9 lladdr 02:00:00:00:00:0b dev mgmt nud permanent");
        site.ip("neigh add 192.0.2.10 dev gw-out nud failed");
        site.ip("neigh add proxy 192.0.2.11 dev gw-out");
        site.ip("address add 203.0.113.1/32 dev lo");
        site.ip("link set gw-in mtu 1400");
        let network = open().await;
        let now = network.current();

        let [inside, outside] = &now.interfaces[..] else { panic!("{now:?}") };
        assert_eq!(
            (inside.id, &inside.name[..], inside.role, inside.mtu, inside.up),
            (IN, "gw-in", Role::Inside, 1400, true)
        );
        assert_eq!((outside.id, &outside.name[..], outside.role, outside.mtu), (OUT, "gw-out", Role::Outside, 1500));
        assert_eq!(inside.mac, mac(&site.gateway, "gw-in"));
        assert_eq!(outside.mac, mac(&site.gateway, "gw-out"));
        assert_eq!(inside.addresses[..2], [ip("10.0.0.1"), ip("2001:db8:a::1")]);
        assert_eq!(inside.addresses.len(), 3, "and a link-local one");
        let index: u32 =
            site.gateway.output(&["cat", "/sys/class/net/gw-out/ifindex"]).unwrap().trim().parse().unwrap();
        assert_eq!(outside.ifindex, index);

        assert_eq!(route(&now, "0.0.0.0/0"), Some(&via(&[(OUT, "192.0.2.2")])));
        assert_eq!(route(&now, "10.0.0.0/24"), Some(&via(&[(IN, "")])));
        assert_eq!(route(&now, "2001:db8:b::/64"), Some(&via(&[(OUT, "")])));
        assert_eq!(route(&now, "172.16.0.0/24"), Some(&RouteTarget::Unreachable));
        assert_eq!(route(&now, "192.0.2.1/32"), Some(&RouteTarget::Local));

        let found: Vec<_> = now.neighbours.iter().filter(|n| n.mac[0] == 2 && n.mac[1..5] == [0; 4]).collect();
        assert_eq!(found.len(), 2, "{found:?}");
        assert_eq!(neighbour(&now, OUT, "192.0.2.9"), Some([2, 0, 0, 0, 0, 9]));
        assert_eq!(neighbour(&now, IN, "2001:db8:a::9"), Some([2, 0, 0, 0, 0, 10]));

        // Of all interfaces, also lo and mgmt, with broadcast addresses and without loopback ones.
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
fn what_cannot_be_an_interface_is_refused_by_name() {
    Site::new("refused").run(|site| async move {
        site.ip("tuntap add dev tun0 mode tun");
        let open = async |name: &str| {
            let wanted = Wanted { id: IN, name: name.into(), role: Role::Both };
            Network::open(vec![wanted]).await.unwrap_err()
        };
        assert_eq!(open("gw-inn").await.to_string(), "interface gw-inn: not found in this network namespace");
        assert!(matches!(open("lo").await, NetworkError::Loopback { name } if name == "lo"));
        assert!(matches!(open("tun0").await, NetworkError::NotEthernet { name, .. } if name == "tun0"));
    });
}

#[test]
fn neighbours_come_change_and_go() {
    Site::new("neighbours").run(|site| async move {
        let mut network = open().await;
        for (interface, device, address) in [(OUT, "gw-out", "192.0.2.9"), (IN, "gw-in", "2001:db8:a::9")] {
            let is = |mac: Option<u8>| {
                move |now: &_| neighbour(now, interface, address) == mac.map(|last| [2, 0, 0, 0, 0, last])
            };
            let set = |last: u8, state: &str| {
                site.ip(&format!("neigh replace {address} lladdr 02:00:00:00:00:0{last} dev {device} nud {state}"));
            };
            set(1, "reachable");
            until(&mut network, "a neighbour comes", is(Some(1))).await;
            for state in ["stale", "delay", "probe", "noarp", "permanent"] {
                set(1, state);
                assert!(is(Some(1))(&network.current()), "{state}");
            }
            stays(&mut network).await;
            set(2, "permanent");
            until(&mut network, "it has another link address", is(Some(2))).await;
            set(2, "failed");
            until(&mut network, "it fails", is(None)).await;
            set(3, "stale");
            until(&mut network, "it comes back", is(Some(3))).await;
            site.ip(&format!("neigh del {address} dev {device}"));
            until(&mut network, "it is deleted", is(None)).await;
            // Of no concern: another link, and what is no station.
            site.ip("neigh replace 172.16.0.9 lladdr 02:00:00:00:00:01 dev mgmt nud permanent");
            site.ip("neigh replace 192.0.2.77 lladdr 01:00:5e:00:00:01 dev gw-out nud permanent");
            stays(&mut network).await;
        }
    });
}

#[test]
fn links_go_down_and_come_back_with_their_routes() {
    Site::new("updown").run(|site| async move {
        site.ip("route add 198.51.100.0/24 via 192.0.2.2");
        site.ip("route add 198.51.101.0/24 nexthop via 192.0.2.2 nexthop via 10.0.0.2");
        site.ip("route add 2001:db8:101::/48 nexthop via 2001:db8:b::2 nexthop via 2001:db8:a::2");
        let mut network = open().await;

        // No carrier: the kernel keeps the routes.
        site.world.ip(&["link", "set", "eth0", "down"]).unwrap();
        let now = until(&mut network, "no carrier", |now| !interface(now, OUT).up).await;
        assert!(interface(&now, IN).up);
        assert_eq!(route(&now, "198.51.100.0/24"), Some(&via(&[(OUT, "192.0.2.2")])));
        site.world.ip(&["link", "set", "eth0", "up"]).unwrap();
        until(&mut network, "a carrier", |now| interface(now, OUT).up).await;

        // Down: it drops them, the IPv4 ones without telling, and marks hops dead.
        site.ip("link set gw-out down");
        until(&mut network, "down", |now| {
            !interface(now, OUT).up
                && route(now, "198.51.100.0/24").is_none()
                && route(now, "192.0.2.0/24").is_none()
                && route(now, "198.51.101.0/24") == Some(&via(&[(IN, "10.0.0.2")]))
                && route(now, "2001:db8:101::/48") == Some(&via(&[(IN, "2001:db8:a::2")]))
                && route(now, "192.0.2.255/32").is_none()
        })
        .await;
        site.ip("link set gw-out up");
        until(&mut network, "up", |now| {
            interface(now, OUT).up
                && route(now, "192.0.2.0/24") == Some(&via(&[(OUT, "")]))
                && route(now, "198.51.101.0/24") == Some(&via(&[(OUT, "192.0.2.2"), (IN, "10.0.0.2")]))
        })
        .await;
    });
}

#[test]
fn hops_without_carrier_are_dead_where_the_host_says_so() {
    Site::new("linkdown").run(|site| async move {
        Site::sysctl(&site.gateway, "net.ipv4.conf.gw-out.ignore_routes_with_linkdown", 1);
        site.ip("route add 198.51.100.0/24 via 192.0.2.2 metric 1");
        site.ip("route add 198.51.100.0/24 via 10.0.0.2 metric 2");
        let mut network = open().await;
        assert_eq!(route(&network.current(), "198.51.100.0/24"), Some(&via(&[(OUT, "192.0.2.2")])));
        site.world.ip(&["link", "set", "eth0", "down"]).unwrap();
        let second = via(&[(IN, "10.0.0.2")]);
        until(&mut network, "the second metric", |now| route(now, "198.51.100.0/24") == Some(&second)).await;
        site.world.ip(&["link", "set", "eth0", "up"]).unwrap();
        let first = via(&[(OUT, "192.0.2.2")]);
        until(&mut network, "the first metric", |now| route(now, "198.51.100.0/24") == Some(&first)).await;
    });
}

#[test]
fn links_and_addresses_change() {
    Site::new("change").run(|site| async move {
        let mut network = open().await;
        site.ip("link set gw-out mtu 9000");
        until(&mut network, "the MTU", |now| interface(now, OUT).mtu == 9000).await;
        site.ip("link set gw-in address 02:00:00:00:00:77");
        until(&mut network, "the link address", |now| interface(now, IN).mac == [2, 0, 0, 0, 0, 0x77]).await;
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
            site.ip(&format!("address add {prefix} dev gw-out"));
            let now = until(&mut network, "an address is added", |now| has(now).0).await;
            assert_eq!(interface(&now, OUT).addresses[0], ip("192.0.2.1"), "the first one stays first");
            site.ip(&format!("address del {prefix} dev gw-out"));
            until(&mut network, "it is deleted", |now| has(now).1).await;
        }
        site.ip("address add 172.16.5.5/32 dev mgmt");
        until(&mut network, "an address elsewhere", |now| now.locals.contains(&ip("172.16.5.5"))).await;
        // The kernel drops a route that prefers the address as its source, on some versions without telling.
        site.ip("address add 192.0.2.8/24 dev gw-out");
        site.ip("route add 198.51.100.0/24 via 10.0.0.2 src 192.0.2.8");
        until(&mut network, "the route", |now| route(now, "198.51.100.0/24").is_some()).await;
        site.ip("address del 192.0.2.8/24 dev gw-out");
        until(&mut network, "no route", |now| route(now, "198.51.100.0/24").is_none()).await;
    });
}

#[test]
fn an_interface_that_is_gone_stays_down_whatever_comes_in_its_name() {
    Site::new("gone").run(|site| async move {
        site.ip("neigh add 192.0.2.9 lladdr 02:00:00:00:00:09 dev gw-out nud permanent");
        let mut network = open().await;
        let before = interface(&network.current(), OUT).ifindex;
        site.ip("link del gw-out");
        let now = until(&mut network, "gone", |now| !interface(now, OUT).up && now.neighbours.is_empty()).await;
        assert_eq!(now.interfaces.len(), 2);
        assert!(interface(&now, OUT).addresses.is_empty());
        assert_eq!(interface(&now, OUT).ifindex, before);
        until(&mut network, "its routes are gone", |now| route(now, "192.0.2.0/24").is_none()).await;

        site.ip("link add gw-out type veth peer name gw-out-peer");
        site.ip("link set gw-out up");
        site.ip("link set gw-out-peer up");
        site.ip("address add 192.0.2.1/24 dev gw-out");
        let unreachable = |now: &NetworkSpec| route(now, "192.0.2.0/24") == Some(&RouteTarget::Unreachable);
        let now = until(&mut network, "a route over a strange device", unreachable).await;
        assert!(!interface(&now, OUT).up);
        assert_eq!(interface(&now, OUT).ifindex, before);

        // The rest goes on.
        site.ip("link set gw-in mtu 1300");
        until(&mut network, "the other one", |now| interface(now, IN).mtu == 1300).await;
    });
}

#[test]
fn bridges_and_their_ports_disturb_nothing() {
    Site::new("bridge").run(|site| async move {
        let mut network = open().await;
        site.ip("link add br0 type bridge");
        site.ip("link set mgmt master br0");
        site.ip("link set br0 up");
        site.ip("link set gw-in master br0");
        site.ip("link set gw-in nomaster");
        site.ip("link del br0");
        site.ip("link set gw-in mtu 1300");
        let now = until(&mut network, "the MTU", |now| interface(now, IN).mtu == 1300).await;
        assert!(interface(&now, IN).up, "the end of a port isn't the end of the device");
    });
}

#[test]
fn the_interfaces_are_where_their_numbers_say() {
    Site::new("order").run(|_site| async move {
        let mut wanted = wanted();
        wanted.reverse();
        let network = Network::open(wanted).await.unwrap();
        for (i, interface) in network.current().interfaces.iter().enumerate() {
            assert_eq!(usize::from(interface.id.0), i);
        }
    });
}
