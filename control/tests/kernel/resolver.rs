//! Resolver: next hops are resolved by the kernel as managed neighbor entries (`NTF_EXT_MANAGED`). Replies arrive as
//! changes of the network, timeouts as failures; entries are released on close.

use std::sync::Arc;
use std::time::Duration;

use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use tokio::time::{sleep, timeout};
use vipgate::kernel::{NeighborFailed, Network, NetworkError, Resolver, ResolverLimits};
use vipgate_dataplane::flow::ids::InterfaceId;

use crate::testbed::{IN, OUT, Testbed, eventually, ip, mac, neighbor, open, until};

/// A reachable neighbor of each family, with its interface.
const NEIGHBORS: [(InterfaceId, &str, &str); 2] = [(OUT, "gw-out", "192.0.2.2"), (IN, "gw-in", "2001:db8:a::2")];

/// Shortens the kernel's neighbor discovery timers.
fn shorten_timers(testbed: &Testbed) {
    for family in ["ipv4", "ipv6"] {
        for device in ["gw-in", "gw-out"] {
            for (name, value) in
                [("retrans_time_ms", 100), ("base_reachable_time_ms", 1000), ("delay_first_probe_time", 1)]
            {
                Testbed::sysctl(&testbed.gateway, &format!("net.{family}.neigh.{device}.{name}"), value);
            }
        }
    }
}

async fn resolver(network: &Network) -> Resolver {
    Resolver::open(network, ResolverLimits::default()).await.unwrap()
}

/// The kernel's neighbor entry.
fn entry(testbed: &Arc<Testbed>, device: &str, address: &str) -> String {
    testbed.show(&format!("-d neigh show {address} dev {device} nud all"))
}

/// Number of managed entries.
fn managed(testbed: &Arc<Testbed>) -> usize {
    testbed.show("-d neigh").lines().filter(|line| line.contains("managed")).count()
}

#[test]
fn a_resolved_neighbor_is_managed_until_close() {
    Testbed::new("resolved").run(|testbed| async move {
        let mut network = open().await;
        let resolver = resolver(&network).await;
        for (interface, device, address) in NEIGHBORS {
            assert_eq!(neighbor(&network.current(), interface, address), None);
            assert!(resolver.resolve(interface, ip(address)));
            let host = if interface == OUT { &testbed.external } else { &testbed.pods };
            let expected = mac(host, "eth0");
            until(&mut network, "resolved", |now| neighbor(now, interface, address) == Some(expected)).await;
            let line = entry(&testbed, device, address);
            assert!(line.contains("managed") && line.contains("proto 118"), "{line}");
        }
        assert_eq!(managed(&testbed), 2);
        resolver.close().await;
        assert_eq!(managed(&testbed), 0, "{}", testbed.show("-d neigh"));
        for (_, device, address) in NEIGHBORS {
            assert!(entry(&testbed, device, address).contains("lladdr"), "an ordinary entry now");
        }
    });
}

#[test]
fn an_unresolved_neighbor_fails_and_leaves_no_entry() {
    Testbed::new("silence").run(|testbed| async move {
        shorten_timers(&testbed);
        let network = open().await;
        let mut failures = network.failed_neighbors();
        let resolver = resolver(&network).await;
        for (interface, device, address) in [(OUT, "gw-out", "192.0.2.99"), (IN, "gw-in", "2001:db8:a::99")] {
            assert!(resolver.resolve(interface, ip(address)));
            let failed = timeout(Duration::from_secs(10), failures.recv()).await.unwrap().unwrap();
            assert_eq!(failed, NeighborFailed { interface, address: ip(address) });
            eventually("entry removed", || entry(&testbed, device, address).is_empty()).await;
        }
        resolver.close().await;
    });
}

#[test]
fn foreign_neighbor_entries_are_not_modified() {
    Testbed::new("others").run(|testbed| async move {
        testbed.ip("neigh add 192.0.2.8 lladdr 02:00:00:00:00:08 dev gw-out nud permanent");
        testbed.ip("neigh add 192.0.2.9 lladdr 02:00:00:00:00:09 dev gw-out nud noarp");
        testbed.ip("neigh add 192.0.2.10 lladdr 02:00:00:00:00:0a dev gw-out nud reachable extern_learn");
        testbed.ip("neigh replace 192.0.2.2 dev gw-out managed");
        let addresses = ["192.0.2.8", "192.0.2.9", "192.0.2.10", "192.0.2.2"];
        let states = ["PERMANENT", "NOARP", "extern_learn", "managed"];
        let network = open().await;
        let resolver = resolver(&network).await;
        resolver.mark_in_use(addresses.map(|address| (OUT, ip(address))).to_vec());
        for address in addresses {
            resolver.resolve(OUT, ip(address));
        }
        // Requests are processed in order: when the last one is resolved, all are done.
        resolver.resolve(IN, ip("10.0.0.2"));
        eventually("requests processed", || entry(&testbed, "gw-in", "10.0.0.2").contains("lladdr")).await;
        for (address, state) in addresses.into_iter().zip(states) {
            let line = entry(&testbed, "gw-out", address);
            assert!(line.contains(state) && !line.contains("proto"), "{line}");
        }
        resolver.close().await;
        for (address, state) in addresses.into_iter().zip(states) {
            let line = entry(&testbed, "gw-out", address);
            assert!(line.contains(state), "{line}");
        }
    });
}

#[test]
fn a_changed_mac_address_is_detected_without_announcement() {
    Testbed::new("moves").run(|testbed| async move {
        shorten_timers(&testbed);
        let mut network = open().await;
        let resolver = resolver(&network).await;
        for (interface, _, address) in NEIGHBORS {
            resolver.resolve(interface, ip(address));
            until(&mut network, "resolved", |now| neighbor(now, interface, address).is_some()).await;
        }
        for (host, last) in [(&testbed.external, 0x51), (&testbed.pods, 0x52)] {
            // Without announcement: the address changes while the link stays up, and IPv4 announces nothing by default.
            host.ip(&["link", "set", "eth0", "address", &format!("02:00:00:00:00:{last:02x}")]).unwrap();
        }
        // The kernel refreshes managed entries by itself. If one fails, the next packet would request it again.
        for ((interface, _, address), last) in NEIGHBORS.into_iter().zip([0x51, 0x52]) {
            let is_outdated = |now: &_| neighbor(now, interface, address) != Some([2, 0, 0, 0, 0, last]);
            while is_outdated(&network.current()) {
                if neighbor(&network.current(), interface, address).is_none() {
                    resolver.resolve(interface, ip(address));
                }
                timeout(Duration::from_secs(20), network.changed()).await.expect("a change").unwrap();
            }
        }
        resolver.close().await;
    });
}

#[test]
fn routers_are_resolved_in_advance_and_retried_after_failures() {
    Testbed::new("routers").run(|testbed| async move {
        shorten_timers(&testbed);
        testbed.ip("route add default via 192.0.2.2");
        testbed.ip("-6 route add default via 2001:db8:a::2");
        testbed.ip("route add 198.51.100.0/24 via 192.0.2.98");
        let mut network = open().await;
        let mut failures = network.failed_neighbors();
        let resolver = resolver(&network).await;
        for (interface, device, address) in NEIGHBORS {
            until(&mut network, "router resolved", |now| neighbor(now, interface, address).is_some()).await;
            assert!(entry(&testbed, device, address).contains("managed"));
        }
        // An unreachable router is retried until it is reachable.
        for _ in 0..2 {
            let failed = timeout(Duration::from_secs(10), failures.recv()).await.unwrap().unwrap();
            assert_eq!(failed, NeighborFailed { interface: OUT, address: ip("192.0.2.98") });
        }
        testbed.external.addresses("eth0", &["192.0.2.98/32"]).unwrap();
        until(&mut network, "router reachable", |now| neighbor(now, OUT, "192.0.2.98").is_some()).await;
        resolver.close().await;
        assert_eq!(managed(&testbed), 0);
    });
}

#[test]
fn resolutions_are_rate_limited_and_the_oldest_entries_are_evicted() {
    Testbed::new("bounded").run(|testbed| async move {
        let addresses: Vec<String> = (10..30).map(|last| format!("192.0.2.{last}/32")).collect();
        let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
        testbed.external.addresses("eth0", &addresses).unwrap();
        let mut network = open().await;
        let limits = ResolverLimits { per_second: 5, max_next_hops: 8, ..ResolverLimits::default() };
        let resolver = Resolver::open(&network, limits).await.unwrap();
        let resolve = |last: u8| resolver.resolve(OUT, [192, 0, 2, last].into());
        for last in 10..20 {
            resolve(last);
        }
        until(&mut network, "the first five", |now| now.neighbors.iter().filter(|n| n.interface == OUT).count() == 5)
            .await;
        sleep(Duration::from_millis(1100)).await;
        for last in 20..30 {
            resolve(last);
        }
        until(&mut network, "five more", |now| now.neighbors.iter().filter(|n| n.interface == OUT).count() == 10).await;
        assert_eq!(managed(&testbed), 8, "{}", testbed.show("-d neigh"));
        resolver.close().await;
        assert_eq!(managed(&testbed), 0);
    });
}

#[test]
fn entries_dropped_by_the_kernel_are_restored() {
    Testbed::new("flap").run(|testbed| async move {
        let mut network = open().await;
        let limits = ResolverLimits { refresh_interval: Duration::from_secs(1), ..ResolverLimits::default() };
        let resolver = Resolver::open(&network, limits).await.unwrap();
        resolver.resolve(OUT, ip("192.0.2.2"));
        until(&mut network, "resolved", |now| neighbor(now, OUT, "192.0.2.2").is_some()).await;
        testbed.ip("link set gw-out down");
        until(&mut network, "entry dropped", |now| neighbor(now, OUT, "192.0.2.2").is_none()).await;
        testbed.ip("link set gw-out up");
        until(&mut network, "entry restored", |now| neighbor(now, OUT, "192.0.2.2").is_some()).await;
        assert_eq!(managed(&testbed), 1);
        resolver.close().await;
        assert_eq!(managed(&testbed), 0);
    });
}

#[test]
fn managed_entries_of_a_killed_gateway_are_adopted() {
    Testbed::new("killed").run(|testbed| async move {
        {
            // The runtime ends without closing the resolver.
            let on_host = testbed.clone();
            let killed = testbed.gateway.run(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(async {
                    let network = open().await;
                    let resolver = resolver(&network).await;
                    resolver.resolve(OUT, ip("192.0.2.2"));
                    eventually("resolved", || entry(&on_host, "gw-out", "192.0.2.2").contains("lladdr")).await;
                    std::mem::forget(resolver);
                });
                Ok(())
            });
            killed.join().unwrap().unwrap();
        }
        assert_eq!(managed(&testbed), 1);
        let network = open().await;
        resolver(&network).await.close().await;
        assert_eq!(managed(&testbed), 0);
    });
}

#[test]
fn missing_cap_net_admin_is_reported() {
    Testbed::new("rights").run(|_testbed| async move {
        // Only this thread loses its capabilities; it ends with the test.
        let none = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none }).unwrap();
        let network = open().await;
        let error = Resolver::open(&network, ResolverLimits::default()).await.unwrap_err();
        assert!(matches!(error, NetworkError::NotPermitted { .. }), "{error}");
        assert!(error.to_string().contains("CAP_NET_ADMIN"), "{error}");
    });
}
