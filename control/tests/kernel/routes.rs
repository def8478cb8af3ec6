//! Network watcher: routes as they are added, changed and deleted. The engine must forward like the kernel would.

use std::fmt::Write;
use std::net::Ipv4Addr;
use std::time::Instant;

use vipgate_dataplane::policy::spec::RouteTarget;

use crate::testbed::{IN, OUT, Testbed, assert_unchanged, open, route, until, via};

/// For each family: a prefix, two outside routers, one inside router.
const FAMILIES: [(&str, &str, &str, &str); 2] = [
    ("198.51.100.0/24", "192.0.2.2", "192.0.2.3", "10.0.0.2"),
    ("2001:db8:100::/48", "2001:db8:b::2", "2001:db8:b::3", "2001:db8:a::2"),
];

#[test]
fn the_route_with_the_lowest_metric_wins() {
    Testbed::new("metric").run(|testbed| async move {
        let mut network = open().await;
        for (prefix, first, second, inside) in FAMILIES {
            let leads_to =
                |hop: &'static str, interface| move |now: &_| route(now, prefix) == Some(&via(&[(interface, hop)]));
            testbed.ip(&format!("route add {prefix} via {second} metric 200"));
            until(&mut network, "route added", leads_to(second, OUT)).await;
            testbed.ip(&format!("route add {prefix} via {first} metric 100"));
            until(&mut network, "better route added", leads_to(first, OUT)).await;
            testbed.ip(&format!("route replace {prefix} via {inside} metric 100"));
            until(&mut network, "better route replaced", leads_to(inside, IN)).await;
            testbed.ip(&format!("route add {prefix} via {second} metric 300"));
            assert_unchanged(&mut network).await;
            testbed.ip(&format!("route del {prefix} metric 100"));
            until(&mut network, "better route deleted", leads_to(second, OUT)).await;
            testbed.ip(&format!("route del {prefix} metric 200"));
            assert_unchanged(&mut network).await;
            testbed.ip(&format!("route del {prefix} metric 300"));
            until(&mut network, "last route deleted", |now| route(now, prefix).is_none()).await;
        }
    });
}

#[test]
fn default_routes_are_included() {
    Testbed::new("default").run(|testbed| async move {
        let mut network = open().await;
        testbed.ip("route add default via 192.0.2.2");
        testbed.ip("-6 route add default via 2001:db8:b::2");
        until(&mut network, "both default routes", |now| {
            route(now, "0.0.0.0/0") == Some(&via(&[(OUT, "192.0.2.2")]))
                && route(now, "::/0") == Some(&via(&[(OUT, "2001:db8:b::2")]))
        })
        .await;
    });
}

#[test]
fn multipath_routes_have_all_next_hops() {
    Testbed::new("multipath").run(|testbed| async move {
        let mut network = open().await;
        for (prefix, first, second, inside) in FAMILIES {
            testbed.ip(&format!("route add {prefix} nexthop via {first} nexthop via {inside}"));
            let both = via(&[(OUT, first), (IN, inside)]);
            until(&mut network, "two next hops", |now| route(now, prefix) == Some(&both)).await;
            testbed
                .ip(&format!("route replace {prefix} nexthop via {first} nexthop via {second} nexthop via {inside}"));
            let all = via(&[(OUT, first), (OUT, second), (IN, inside)]);
            until(&mut network, "three next hops", |now| route(now, prefix) == Some(&all)).await;
            testbed.ip(&format!("route del {prefix}"));
            until(&mut network, "no next hop", |now| route(now, prefix).is_none()).await;
        }
    });
}

#[test]
fn ipv6_next_hops_are_added_and_deleted_one_by_one() {
    Testbed::new("onebyone").run(|testbed| async move {
        let mut network = open().await;
        let (prefix, first, second, _) = FAMILIES[1];
        testbed.ip(&format!("route add {prefix} via {first} metric 5"));
        testbed.ip(&format!("route append {prefix} via {second} metric 5"));
        let both = via(&[(OUT, first), (OUT, second)]);
        until(&mut network, "two next hops", |now| route(now, prefix) == Some(&both)).await;
        testbed.ip(&format!("route del {prefix} via {first} metric 5"));
        until(&mut network, "one next hop", |now| route(now, prefix) == Some(&via(&[(OUT, second)]))).await;
    });
}

#[test]
fn appended_ipv4_routes_rank_last_and_prepended_ones_first() {
    Testbed::new("append").run(|testbed| async move {
        let mut network = open().await;
        let (prefix, first, second, inside) = FAMILIES[0];
        testbed.ip(&format!("route add {prefix} via {first}"));
        until(&mut network, "first route", |now| route(now, prefix) == Some(&via(&[(OUT, first)]))).await;
        testbed.ip(&format!("route append {prefix} via {second}"));
        assert_unchanged(&mut network).await;
        testbed.ip(&format!("route prepend {prefix} via {inside}"));
        until(&mut network, "prepended route", |now| route(now, prefix) == Some(&via(&[(IN, inside)]))).await;
        testbed.ip(&format!("route del {prefix} via {inside}"));
        until(&mut network, "first route again", |now| route(now, prefix) == Some(&via(&[(OUT, first)]))).await;
    });
}

#[test]
fn blackhole_routes_and_routes_over_foreign_interfaces_are_unreachable() {
    Testbed::new("nowhere").run(|testbed| async move {
        let mut network = open().await;
        for kind in ["blackhole", "unreachable", "prohibit"] {
            for (prefix, first, ..) in FAMILIES {
                testbed.ip(&format!("route add {kind} {prefix}"));
                until(&mut network, kind, |now| route(now, prefix) == Some(&RouteTarget::Unreachable)).await;
                testbed.ip(&format!("route del {kind} {prefix}"));
                until(&mut network, "route deleted", |now| route(now, prefix).is_none()).await;
                testbed.ip(&format!("route add {kind} {prefix} metric 9000"));
                testbed.ip(&format!("route add {prefix} via {first} metric 10"));
                until(&mut network, "unicast route wins", |now| route(now, prefix) == Some(&via(&[(OUT, first)])))
                    .await;
                testbed.ip(&format!("route del {prefix} metric 10"));
                testbed.ip(&format!("route del {kind} {prefix} metric 9000"));
                until(&mut network, "both routes deleted", |now| route(now, prefix).is_none()).await;
            }
        }
        // Over an interface that the gateway doesn't use, alone and with a next hop over one that it uses.
        testbed.ip("route add 203.0.113.0/24 via 172.16.0.9");
        testbed.ip("route add 203.0.114.0/24 nexthop via 172.16.0.9 nexthop via 192.0.2.2");
        testbed.ip("-6 route add 2001:db8:113::/48 via 2001:db8:c::9");
        until(&mut network, "foreign interfaces are unreachable", |now| {
            route(now, "203.0.113.0/24") == Some(&RouteTarget::Unreachable)
                && route(now, "203.0.114.0/24") == Some(&via(&[(OUT, "192.0.2.2")]))
                && route(now, "2001:db8:113::/48") == Some(&RouteTarget::Unreachable)
        })
        .await;
    });
}

#[test]
fn an_ipv4_route_may_have_an_ipv6_next_hop() {
    Testbed::new("via").run(|testbed| async move {
        let mut network = open().await;
        testbed.ip("route add 198.51.100.0/24 via inet6 2001:db8:b::2 dev gw-out");
        let expected = via(&[(OUT, "2001:db8:b::2")]);
        until(&mut network, "IPv6 next hop", |now| route(now, "198.51.100.0/24") == Some(&expected)).await;
    });
}

#[test]
fn next_hop_objects_are_resolved_with_and_without_compat_mode() {
    for compat in [1, 0] {
        Testbed::new("nexthop").run(move |testbed| async move {
            Testbed::sysctl(&testbed.gateway, "net.ipv4.nexthop_compat_mode", compat);
            testbed.ip("nexthop add id 1 via 192.0.2.2 dev gw-out");
            testbed.ip("nexthop add id 2 via 10.0.0.2 dev gw-in");
            testbed.ip("nexthop add id 3 group 1/2");
            testbed.ip("nexthop add id 4 via 2001:db8:b::2 dev gw-out");
            testbed.ip("nexthop add id 5 blackhole");
            testbed.ip("route add 198.51.100.0/24 nhid 3");
            testbed.ip("-6 route add 2001:db8:100::/48 nhid 4");
            let mut network = open().await;
            let now = network.current();
            assert_eq!(route(&now, "198.51.100.0/24"), Some(&via(&[(OUT, "192.0.2.2"), (IN, "10.0.0.2")])));
            assert_eq!(route(&now, "2001:db8:100::/48"), Some(&via(&[(OUT, "2001:db8:b::2")])));
            testbed.ip("route add 198.51.101.0/24 nhid 5");
            until(&mut network, "blackhole next hop", |now| {
                route(now, "198.51.101.0/24") == Some(&RouteTarget::Unreachable)
            })
            .await;
            testbed.ip("nexthop replace id 1 via 192.0.2.3 dev gw-out");
            let replaced = via(&[(OUT, "192.0.2.3"), (IN, "10.0.0.2")]);
            until(&mut network, "replaced group member", |now| route(now, "198.51.100.0/24") == Some(&replaced)).await;
            testbed.ip("nexthop del id 1");
            let rest = via(&[(IN, "10.0.0.2")]);
            until(&mut network, "deleted group member", |now| route(now, "198.51.100.0/24") == Some(&rest)).await;
            // The kernel deletes their routes, too, those of IPv4 without notification.
            testbed.ip("nexthop del id 3");
            testbed.ip("nexthop del id 4");
            until(&mut network, "routes of deleted objects removed", |now| {
                route(now, "198.51.100.0/24").is_none() && route(now, "2001:db8:100::/48").is_none()
            })
            .await;
        });
    }
}

/// Batch commands for consecutive /24 prefixes from 10.128.0.0.
fn batch_commands(count: u32, command: &str, rest: &str) -> String {
    let base = u32::from(Ipv4Addr::new(10, 128, 0, 0));
    (0..count).fold(String::new(), |mut text, i| {
        writeln!(text, "route {command} {}/24 {rest}", Ipv4Addr::from(base + (i << 8))).unwrap();
        text
    })
}

fn count_routes(now: &vipgate_dataplane::policy::spec::NetworkSpec) -> usize {
    let net: ipnet::IpNet = "10.128.0.0/9".parse().unwrap();
    now.routes.iter().filter(|route| net.contains(&route.prefix)).count()
}

#[test]
fn a_burst_of_route_changes_is_coalesced_without_loss() {
    Testbed::new("burst").run(|testbed| async move {
        let mut network = open().await;
        let writer = testbed.clone();
        let changes = std::thread::spawn(move || {
            writer.batch(&batch_commands(5000, "add", "via 192.0.2.2"));
            writer.batch(&batch_commands(5000, "replace", "via 192.0.2.3"));
            writer.batch(&batch_commands(2500, "del", ""));
        });
        let start = Instant::now();
        let mut updates = 0;
        let expected = via(&[(OUT, "192.0.2.3")]);
        let is_done = |now: &vipgate_dataplane::policy::spec::NetworkSpec| {
            count_routes(now) == 2500
                && route(now, "10.128.0.0/24").is_none()
                && route(now, "10.147.135.0/24") == Some(&expected)
        };
        while !is_done(&network.current()) {
            assert!(start.elapsed().as_secs() < 30, "{} routes", count_routes(&network.current()));
            let _ = tokio::time::timeout(std::time::Duration::from_secs(1), network.changed()).await;
            updates += 1;
        }
        let limit = 2 + start.elapsed().as_millis() / 5;
        assert!(updates <= limit, "{updates} updates in {:?}", start.elapsed());
        changes.join().unwrap();
        assert_eq!(count_routes(&network.current()), 2500);
    });
}

#[test]
fn a_netlink_overrun_is_recovered_without_loss() {
    Testbed::new("overrun").run(|testbed| async move {
        let mut network = open().await;
        // The watcher runs on this thread, so it reads nothing meanwhile.
        testbed.batch(&batch_commands(20_000, "add", "via 192.0.2.2"));
        testbed.batch(&batch_commands(10_000, "del", ""));
        let lost = testbed.gateway.output(&["cat", "/proc/net/netlink"]).unwrap();
        let lost: u64 =
            lost.lines().skip(1).filter_map(|line| line.split_whitespace().nth(8)?.parse::<u64>().ok()).sum();
        assert!(lost > 0, "the test must overrun the socket buffer");
        until(&mut network, "10 000 remaining routes", |now| count_routes(now) == 10_000).await;
        // Later changes are still received.
        testbed.ip("route del 10.200.0.0/24");
        until(&mut network, "one route deleted", |now| count_routes(now) == 9_999).await;
    });
}
