//! Making a kernel look for next hops: it asks, the answer comes as a change of the network, silence as a failure, and
//! in the end the kernel's neighbours are its own again.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod kernel_support;

use std::sync::Arc;
use std::time::Duration;

use kernel_support::{IN, OUT, Site, eventually, ip, mac, neighbour, open, until};
use rustix::thread::{CapabilitySet, CapabilitySets, set_capabilities};
use tokio::time::{sleep, timeout};
use vipgate::kernel::{NeighbourFailed, Network, NetworkError, Resolver, ResolverLimits};
use vipgate_dataplane::io::InterfaceId;

/// A neighbour that answers, for each family, and where it is.
const PEERS: [(InterfaceId, &str, &str); 2] = [(OUT, "gw-out", "192.0.2.2"), (IN, "gw-in", "2001:db8:a::2")];

/// Makes the kernel as quick as a test wants it.
fn hurry(site: &Site) {
    for family in ["ipv4", "ipv6"] {
        for device in ["gw-in", "gw-out"] {
            for (name, value) in
                [("retrans_time_ms", 100), ("base_reachable_time_ms", 1000), ("delay_first_probe_time", 1)]
            {
                Site::sysctl(&site.gateway, &format!("net.{family}.neigh.{device}.{name}"), value);
            }
        }
    }
}

async fn resolver(network: &Network) -> Resolver {
    Resolver::open(network, ResolverLimits::default()).await.unwrap()
}

/// The kernel's line on a neighbour.
fn entry(site: &Arc<Site>, device: &str, address: &str) -> String {
    site.show(&format!("-d neigh show {address} dev {device} nud all"))
}

/// How many entries the kernel keeps by itself.
fn managed(site: &Arc<Site>) -> usize {
    site.show("-d neigh").lines().filter(|line| line.contains("managed")).count()
}

#[test]
fn an_answer_comes_and_the_entry_is_kept_until_the_end() {
    Site::new("answer").run(|site| async move {
        let mut network = open().await;
        let resolver = resolver(&network).await;
        for (interface, device, address) in PEERS {
            assert_eq!(neighbour(&network.current(), interface, address), None);
            assert!(resolver.resolve(interface, ip(address)));
            let host = if interface == OUT { &site.world } else { &site.pods };
            let answer = mac(host, "eth0");
            until(&mut network, "the answer", |now| neighbour(now, interface, address) == Some(answer)).await;
            let line = entry(&site, device, address);
            assert!(line.contains("managed") && line.contains("proto 118"), "{line}");
        }
        assert_eq!(managed(&site), 2);
        resolver.close().await;
        assert_eq!(managed(&site), 0, "{}", site.show("-d neigh"));
        for (_, device, address) in PEERS {
            assert!(entry(&site, device, address).contains("lladdr"), "it is an ordinary entry now");
        }
    });
}

#[test]
fn silence_is_a_failure_and_leaves_nothing_behind() {
    Site::new("silence").run(|site| async move {
        hurry(&site);
        let network = open().await;
        let mut failures = network.failures();
        let resolver = resolver(&network).await;
        for (interface, device, address) in [(OUT, "gw-out", "192.0.2.99"), (IN, "gw-in", "2001:db8:a::99")] {
            assert!(resolver.resolve(interface, ip(address)));
            let failed = timeout(Duration::from_secs(10), failures.recv()).await.unwrap().unwrap();
            assert_eq!(failed, NeighbourFailed { interface, address: ip(address) });
            eventually("the entry is gone", || entry(&site, device, address).is_empty()).await;
        }
        resolver.close().await;
    });
}

#[test]
fn entries_that_others_decide_on_are_not_touched() {
    Site::new("others").run(|site| async move {
        site.ip("neigh add 192.0.2.8 lladdr 02:00:00:00:00:08 dev gw-out nud permanent");
        site.ip("neigh add 192.0.2.9 lladdr 02:00:00:00:00:09 dev gw-out nud noarp");
        site.ip("neigh add 192.0.2.10 lladdr 02:00:00:00:00:0a dev gw-out nud reachable extern_learn");
        site.ip("neigh replace 192.0.2.2 dev gw-out managed");
        let addresses = ["192.0.2.8", "192.0.2.9", "192.0.2.10", "192.0.2.2"];
        let words = ["PERMANENT", "NOARP", "extern_learn", "managed"];
        let network = open().await;
        let resolver = resolver(&network).await;
        resolver.keep(addresses.map(|address| (OUT, ip(address))).to_vec());
        for address in addresses {
            resolver.resolve(OUT, ip(address));
        }
        // What is asked for last is answered last.
        resolver.resolve(IN, ip("10.0.0.2"));
        eventually("the orders are done", || entry(&site, "gw-in", "10.0.0.2").contains("lladdr")).await;
        for (address, word) in addresses.into_iter().zip(words) {
            let line = entry(&site, "gw-out", address);
            assert!(line.contains(word) && !line.contains("proto"), "{line}");
        }
        resolver.close().await;
        for (address, word) in addresses.into_iter().zip(words) {
            let line = entry(&site, "gw-out", address);
            assert!(line.contains(word), "{line}");
        }
    });
}

#[test]
fn a_neighbour_that_moves_silently_is_found_again() {
    Site::new("moves").run(|site| async move {
        hurry(&site);
        let mut network = open().await;
        let resolver = resolver(&network).await;
        for (interface, _, address) in PEERS {
            resolver.resolve(interface, ip(address));
            until(&mut network, "the neighbour", |now| neighbour(now, interface, address).is_some()).await;
        }
        for (host, last) in [(&site.world, 0x51), (&site.pods, 0x52)] {
            // Nothing is announced: the address changes while the link stays up, and IPv4 never announces by default.
            host.ip(&["link", "set", "eth0", "address", &format!("02:00:00:00:00:{last:02x}")]).unwrap();
        }
        // Nobody asks again here: a kept entry is the kernel's, or it fails, and then the next packet asks.
        for ((interface, _, address), last) in PEERS.into_iter().zip([0x51, 0x52]) {
            let moved = |now: &_| neighbour(now, interface, address) != Some([2, 0, 0, 0, 0, last]);
            while moved(&network.current()) {
                if neighbour(&network.current(), interface, address).is_none() {
                    resolver.resolve(interface, ip(address));
                }
                timeout(Duration::from_secs(20), network.changed()).await.expect("a change").unwrap();
            }
        }
        resolver.close().await;
    });
}

#[test]
fn routers_are_looked_after_before_anybody_asks_and_after_they_failed() {
    Site::new("routers").run(|site| async move {
        hurry(&site);
        site.ip("route add default via 192.0.2.2");
        site.ip("-6 route add default via 2001:db8:a::2");
        site.ip("route add 198.51.100.0/24 via 192.0.2.98");
        let mut network = open().await;
        let mut failures = network.failures();
        let resolver = resolver(&network).await;
        for (interface, device, address) in PEERS {
            until(&mut network, "the router", |now| neighbour(now, interface, address).is_some()).await;
            assert!(entry(&site, device, address).contains("managed"));
        }
        // One that is not there is asked for again and again, and found when it comes.
        for _ in 0..2 {
            let failed = timeout(Duration::from_secs(10), failures.recv()).await.unwrap().unwrap();
            assert_eq!(failed, NeighbourFailed { interface: OUT, address: ip("192.0.2.98") });
        }
        site.world.addresses("eth0", &["192.0.2.98/32"]).unwrap();
        until(&mut network, "it has come", |now| neighbour(now, OUT, "192.0.2.98").is_some()).await;
        resolver.close().await;
        assert_eq!(managed(&site), 0);
    });
}

#[test]
fn questions_are_bounded_and_the_oldest_make_room() {
    Site::new("bounded").run(|site| async move {
        let addresses: Vec<String> = (10..30).map(|last| format!("192.0.2.{last}/32")).collect();
        let addresses: Vec<&str> = addresses.iter().map(String::as_str).collect();
        site.world.addresses("eth0", &addresses).unwrap();
        let mut network = open().await;
        let limits = ResolverLimits { per_second: 5, hops: 8, ..ResolverLimits::default() };
        let resolver = Resolver::open(&network, limits).await.unwrap();
        let ask = |last: u8| resolver.resolve(OUT, [192, 0, 2, last].into());
        for last in 10..20 {
            ask(last);
        }
        until(&mut network, "the first five", |now| now.neighbours.iter().filter(|n| n.interface == OUT).count() == 5)
            .await;
        sleep(Duration::from_millis(1100)).await;
        for last in 20..30 {
            ask(last);
        }
        until(&mut network, "five more", |now| now.neighbours.iter().filter(|n| n.interface == OUT).count() == 10)
            .await;
        assert_eq!(managed(&site), 8, "{}", site.show("-d neigh"));
        resolver.close().await;
        assert_eq!(managed(&site), 0);
    });
}

#[test]
fn entries_that_the_kernel_dropped_are_made_again() {
    Site::new("flap").run(|site| async move {
        let mut network = open().await;
        let limits = ResolverLimits { look_again: Duration::from_secs(1), ..ResolverLimits::default() };
        let resolver = Resolver::open(&network, limits).await.unwrap();
        resolver.resolve(OUT, ip("192.0.2.2"));
        until(&mut network, "the neighbour", |now| neighbour(now, OUT, "192.0.2.2").is_some()).await;
        site.ip("link set gw-out down");
        until(&mut network, "dropped", |now| neighbour(now, OUT, "192.0.2.2").is_none()).await;
        site.ip("link set gw-out up");
        until(&mut network, "made again", |now| neighbour(now, OUT, "192.0.2.2").is_some()).await;
        assert_eq!(managed(&site), 1);
        resolver.close().await;
        assert_eq!(managed(&site), 0);
    });
}

#[test]
fn what_a_killed_gateway_has_left_is_taken_over() {
    Site::new("killed").run(|site| async move {
        {
            // A runtime that ends without a word.
            let here = site.clone();
            let killed = site.gateway.run(move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
                runtime.block_on(async {
                    let network = open().await;
                    let resolver = resolver(&network).await;
                    resolver.resolve(OUT, ip("192.0.2.2"));
                    eventually("the entry", || entry(&here, "gw-out", "192.0.2.2").contains("lladdr")).await;
                    std::mem::forget(resolver);
                });
                Ok(())
            });
            killed.join().unwrap().unwrap();
        }
        assert_eq!(managed(&site), 1);
        let network = open().await;
        resolver(&network).await.close().await;
        assert_eq!(managed(&site), 0);
    });
}

#[test]
fn without_the_right_to_change_neighbours_it_says_so() {
    Site::new("rights").run(|_site| async move {
        // Of this thread alone, which ends with the test.
        let none = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none }).unwrap();
        let network = open().await;
        let error = Resolver::open(&network, ResolverLimits::default()).await.unwrap_err();
        assert!(matches!(error, NetworkError::NotPermitted { .. }), "{error}");
        assert!(error.to_string().contains("CAP_NET_ADMIN"), "{error}");
    });
}
