//! Routes of the kernel, as they come, change and go: what the engine is told is what the kernel would do.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod kernel_support;

use std::fmt::Write;
use std::net::Ipv4Addr;
use std::time::Instant;

use kernel_support::{IN, OUT, Site, open, route, stays, until, via};
use vipgate_dataplane::snapshot::spec::RouteTarget;

/// A prefix, two routers outside, one inside, for each family.
const FAMILIES: [(&str, &str, &str, &str); 2] = [
    ("198.51.100.0/24", "192.0.2.2", "192.0.2.3", "10.0.0.2"),
    ("2001:db8:100::/48", "2001:db8:b::2", "2001:db8:b::3", "2001:db8:a::2"),
];

#[test]
fn the_best_metric_counts_until_it_is_gone() {
    Site::new("metric").run(|site| async move {
        let mut network = open().await;
        for (prefix, first, second, inside) in FAMILIES {
            let leads_to =
                |hop: &'static str, interface| move |now: &_| route(now, prefix) == Some(&via(&[(interface, hop)]));
            site.ip(&format!("route add {prefix} via {second} metric 200"));
            until(&mut network, "a route is added", leads_to(second, OUT)).await;
            site.ip(&format!("route add {prefix} via {first} metric 100"));
            until(&mut network, "a better one is added", leads_to(first, OUT)).await;
            site.ip(&format!("route replace {prefix} via {inside} metric 100"));
            until(&mut network, "the better one is replaced", leads_to(inside, IN)).await;
            site.ip(&format!("route add {prefix} via {second} metric 300"));
            stays(&mut network).await;
            site.ip(&format!("route del {prefix} metric 100"));
            until(&mut network, "the better one is deleted", leads_to(second, OUT)).await;
            site.ip(&format!("route del {prefix} metric 200"));
            stays(&mut network).await;
            site.ip(&format!("route del {prefix} metric 300"));
            until(&mut network, "the last one is deleted", |now| route(now, prefix).is_none()).await;
        }
    });
}

#[test]
fn default_routes_are_routes() {
    Site::new("default").run(|site| async move {
        let mut network = open().await;
        site.ip("route add default via 192.0.2.2");
        site.ip("-6 route add default via 2001:db8:b::2");
        until(&mut network, "both defaults", |now| {
            route(now, "0.0.0.0/0") == Some(&via(&[(OUT, "192.0.2.2")]))
                && route(now, "::/0") == Some(&via(&[(OUT, "2001:db8:b::2")]))
        })
        .await;
    });
}

#[test]
fn multipath_routes_have_all_their_hops() {
    Site::new("multipath").run(|site| async move {
        let mut network = open().await;
        for (prefix, first, second, inside) in FAMILIES {
            site.ip(&format!("route add {prefix} nexthop via {first} nexthop via {inside}"));
            let both = via(&[(OUT, first), (IN, inside)]);
            until(&mut network, "two hops", |now| route(now, prefix) == Some(&both)).await;
            site.ip(&format!("route replace {prefix} nexthop via {first} nexthop via {second} nexthop via {inside}"));
            let all = via(&[(OUT, first), (OUT, second), (IN, inside)]);
            until(&mut network, "three hops", |now| route(now, prefix) == Some(&all)).await;
            site.ip(&format!("route del {prefix}"));
            until(&mut network, "no hop", |now| route(now, prefix).is_none()).await;
        }
    });
}

#[test]
fn ipv6_hops_are_added_and_deleted_one_by_one() {
    Site::new("onebyone").run(|site| async move {
        let mut network = open().await;
        let (prefix, first, second, _) = FAMILIES[1];
        site.ip(&format!("route add {prefix} via {first} metric 5"));
        site.ip(&format!("route append {prefix} via {second} metric 5"));
        let both = via(&[(OUT, first), (OUT, second)]);
        until(&mut network, "two hops", |now| route(now, prefix) == Some(&both)).await;
        site.ip(&format!("route del {prefix} via {first} metric 5"));
        until(&mut network, "one hop", |now| route(now, prefix) == Some(&via(&[(OUT, second)]))).await;
    });
}

#[test]
fn appended_ipv4_routes_stand_behind_and_prepended_ones_before() {
    Site::new("append").run(|site| async move {
        let mut network = open().await;
        let (prefix, first, second, inside) = FAMILIES[0];
        site.ip(&format!("route add {prefix} via {first}"));
        until(&mut network, "the first", |now| route(now, prefix) == Some(&via(&[(OUT, first)]))).await;
        site.ip(&format!("route append {prefix} via {second}"));
        stays(&mut network).await;
        site.ip(&format!("route prepend {prefix} via {inside}"));
        until(&mut network, "the one before", |now| route(now, prefix) == Some(&via(&[(IN, inside)]))).await;
        site.ip(&format!("route del {prefix} via {inside}"));
        until(&mut network, "the first again", |now| route(now, prefix) == Some(&via(&[(OUT, first)]))).await;
    });
}

#[test]
fn what_leads_nowhere_is_said_to_lead_nowhere() {
    Site::new("nowhere").run(|site| async move {
        let mut network = open().await;
        for kind in ["blackhole", "unreachable", "prohibit"] {
            for (prefix, first, ..) in FAMILIES {
                site.ip(&format!("route add {kind} {prefix}"));
                until(&mut network, kind, |now| route(now, prefix) == Some(&RouteTarget::Unreachable)).await;
                site.ip(&format!("route del {kind} {prefix}"));
                until(&mut network, "gone", |now| route(now, prefix).is_none()).await;
                site.ip(&format!("route add {kind} {prefix} metric 9000"));
                site.ip(&format!("route add {prefix} via {first} metric 10"));
                until(&mut network, "a real one wins", |now| route(now, prefix) == Some(&via(&[(OUT, first)]))).await;
                site.ip(&format!("route del {prefix} metric 10"));
                site.ip(&format!("route del {kind} {prefix} metric 9000"));
                until(&mut network, "gone again", |now| route(now, prefix).is_none()).await;
            }
        }
        // By a link that isn't polled; and one that is polled beside it.
        site.ip("route add 203.0.113.0/24 via 172.16.0.9");
        site.ip("route add 203.0.114.0/24 nexthop via 172.16.0.9 nexthop via 192.0.2.2");
        site.ip("-6 route add 2001:db8:113::/48 via 2001:db8:c::9");
        until(&mut network, "other links lead nowhere", |now| {
            route(now, "203.0.113.0/24") == Some(&RouteTarget::Unreachable)
                && route(now, "203.0.114.0/24") == Some(&via(&[(OUT, "192.0.2.2")]))
                && route(now, "2001:db8:113::/48") == Some(&RouteTarget::Unreachable)
        })
        .await;
    });
}

#[test]
fn an_ipv4_route_may_have_an_ipv6_router() {
    Site::new("via").run(|site| async move {
        let mut network = open().await;
        site.ip("route add 198.51.100.0/24 via inet6 2001:db8:b::2 dev gw-out");
        let expected = via(&[(OUT, "2001:db8:b::2")]);
        until(&mut network, "the router", |now| route(now, "198.51.100.0/24") == Some(&expected)).await;
    });
}

#[test]
fn next_hop_objects_count_whether_the_kernel_spells_them_out_or_not() {
    for compat in [1, 0] {
        Site::new("nexthop").run(move |site| async move {
            Site::sysctl(&site.gateway, "net.ipv4.nexthop_compat_mode", compat);
            site.ip("nexthop add id 1 via 192.0.2.2 dev gw-out");
            site.ip("nexthop add id 2 via 10.0.0.2 dev gw-in");
            site.ip("nexthop add id 3 group 1/2");
            site.ip("nexthop add id 4 via 2001:db8:b::2 dev gw-out");
            site.ip("nexthop add id 5 blackhole");
            site.ip("route add 198.51.100.0/24 nhid 3");
            site.ip("-6 route add 2001:db8:100::/48 nhid 4");
            let mut network = open().await;
            let now = network.current();
            assert_eq!(route(&now, "198.51.100.0/24"), Some(&via(&[(OUT, "192.0.2.2"), (IN, "10.0.0.2")])));
            assert_eq!(route(&now, "2001:db8:100::/48"), Some(&via(&[(OUT, "2001:db8:b::2")])));
            site.ip("route add 198.51.101.0/24 nhid 5");
            until(&mut network, "a blackhole", |now| route(now, "198.51.101.0/24") == Some(&RouteTarget::Unreachable))
                .await;
            site.ip("nexthop replace id 1 via 192.0.2.3 dev gw-out");
            let replaced = via(&[(OUT, "192.0.2.3"), (IN, "10.0.0.2")]);
            until(&mut network, "a replaced member", |now| route(now, "198.51.100.0/24") == Some(&replaced)).await;
            site.ip("nexthop del id 1");
            let rest = via(&[(IN, "10.0.0.2")]);
            until(&mut network, "a deleted member", |now| route(now, "198.51.100.0/24") == Some(&rest)).await;
            // The kernel drops its routes too, the IPv4 ones without telling.
            site.ip("nexthop del id 3");
            site.ip("nexthop del id 4");
            until(&mut network, "no object, no route", |now| {
                route(now, "198.51.100.0/24").is_none() && route(now, "2001:db8:100::/48").is_none()
            })
            .await;
        });
    }
}

/// 10.128.0.0/24 and so on, one command a line.
fn many(count: u32, command: &str, rest: &str) -> String {
    let base = u32::from(Ipv4Addr::new(10, 128, 0, 0));
    (0..count).fold(String::new(), |mut text, i| {
        writeln!(text, "route {command} {}/24 {rest}", Ipv4Addr::from(base + (i << 8))).unwrap();
        text
    })
}

fn count(now: &vipgate_dataplane::snapshot::spec::NetworkSpec) -> usize {
    let net: ipnet::IpNet = "10.128.0.0/9".parse().unwrap();
    now.routes.iter().filter(|route| net.contains(&route.prefix)).count()
}

#[test]
fn a_burst_of_routes_is_few_updates_and_none_is_missing() {
    Site::new("burst").run(|site| async move {
        let mut network = open().await;
        let worker = site.clone();
        let changes = std::thread::spawn(move || {
            worker.batch(&many(5000, "add", "via 192.0.2.2"));
            worker.batch(&many(5000, "replace", "via 192.0.2.3"));
            worker.batch(&many(2500, "del", ""));
        });
        let began = Instant::now();
        let mut updates = 0;
        let expected = via(&[(OUT, "192.0.2.3")]);
        let is_done = |now: &vipgate_dataplane::snapshot::spec::NetworkSpec| {
            count(now) == 2500
                && route(now, "10.128.0.0/24").is_none()
                && route(now, "10.147.135.0/24") == Some(&expected)
        };
        while !is_done(&network.current()) {
            assert!(began.elapsed().as_secs() < 30, "{} routes", count(&network.current()));
            let _ = tokio::time::timeout(std::time::Duration::from_secs(1), network.changed()).await;
            updates += 1;
        }
        let most = 2 + began.elapsed().as_millis() / 5;
        assert!(updates <= most, "{updates} updates in {:?}", began.elapsed());
        changes.join().unwrap();
        assert_eq!(count(&network.current()), 2500);
    });
}

#[test]
fn nothing_is_missing_after_the_kernel_had_no_room_for_its_messages() {
    Site::new("overrun").run(|site| async move {
        let mut network = open().await;
        // This thread reads nothing meanwhile.
        site.batch(&many(20_000, "add", "via 192.0.2.2"));
        site.batch(&many(10_000, "del", ""));
        let lost = site.gateway.output(&["cat", "/proc/net/netlink"]).unwrap();
        let lost: u64 =
            lost.lines().skip(1).filter_map(|line| line.split_whitespace().nth(8)?.parse::<u64>().ok()).sum();
        assert!(lost > 0, "the test must fill the socket");
        until(&mut network, "the 10 000 that are left", |now| count(now) == 10_000).await;
        // And it hears of what comes then.
        site.ip("route del 10.200.0.0/24");
        until(&mut network, "one less", |now| count(now) == 9_999).await;
    });
}
