//! BGP advertisement: the kernel's routing table contains exactly the advertised routes, whatever other processes do.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use vipgate::kernel::{Advertiser, RouteTable, withdraw_all};

use crate::testbed::{Testbed, assert_unchanged, eventually, ip, open};

const PLACE: RouteTable = RouteTable { table: 179, metric: None };

async fn advertiser(place: RouteTable) -> Advertiser {
    Advertiser::open(place, env!("CARGO_BIN_EXE_vipgate").into()).await.unwrap()
}

fn vips(addresses: &[&str]) -> BTreeSet<IpAddr> {
    addresses.iter().map(|address| ip(address)).collect()
}

async fn set(advertiser: &Advertiser, addresses: &[&str]) {
    advertiser.set(vips(addresses));
    let applied = tokio::time::timeout(Duration::from_secs(10), advertiser.wait_installed()).await;
    assert!(applied.is_ok(), "{:?}", advertiser.installed());
}

/// Our routes in a table.
fn routes_in_table(testbed: &Testbed, table: u32) -> Vec<String> {
    let of = |family: &str| {
        // The table may not exist.
        let options = ["ip", family, "route", "show", "table", &table.to_string(), "proto", "118"];
        testbed.gateway.output(&options).unwrap_or_default()
    };
    let both = of("-4") + &of("-6");
    both.lines().map(|line| line.split_whitespace().take(2).collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn routes_are_added_replaced_and_withdrawn_on_close() {
    Testbed::new("advset").run(|testbed| async move {
        let mut network = open().await;
        let advertiser = advertiser(PLACE).await;
        set(&advertiser, &["198.51.100.1", "198.51.100.2", "2001:db8:100::1"]).await;
        let all = ["blackhole 198.51.100.1", "blackhole 198.51.100.2", "blackhole 2001:db8:100::1"];
        assert_eq!(routes_in_table(&testbed, 179), all);
        set(&advertiser, &["198.51.100.2", "2001:db8:100::2"]).await;
        assert_eq!(routes_in_table(&testbed, 179), ["blackhole 198.51.100.2", "blackhole 2001:db8:100::2"]);
        advertiser.close().await;
        assert_eq!(routes_in_table(&testbed, 179), Vec::<String>::new());
        // The network watcher ignores them, even in the main table.
        let advertiser = self::advertiser(RouteTable { table: 254, metric: Some(7) }).await;
        set(&advertiser, &["198.51.100.1", "2001:db8:100::1"]).await;
        assert!(testbed.show("-6 route").contains("blackhole 2001:db8:100::1 dev lo proto 118 metric 7"));
        assert_unchanged(&mut network).await;
    });
}

#[test]
fn stale_routes_of_a_dead_process_are_removed_and_foreign_routes_stay() {
    Testbed::new("advstale").run(|testbed| async move {
        for table in ["179", "77", "3000", "254"] {
            testbed.ip(&format!("route add blackhole 198.51.100.9/32 proto 118 metric 3 table {table}"));
            testbed.ip(&format!("-6 route add 2001:db8:100::9/128 dev gw-out proto 118 table {table}"));
        }
        testbed.ip("route add blackhole 198.51.100.1/32 table 179");
        testbed.ip("route add blackhole 198.51.100.0/24 proto 118 table 179");
        let advertiser = advertiser(PLACE).await;
        for table in [77, 3000, 254] {
            assert_eq!(routes_in_table(&testbed, table), Vec::<String>::new(), "{table}");
        }
        assert_eq!(routes_in_table(&testbed, 179), ["blackhole 198.51.100.0/24"]);
        // A foreign route with the prefix of one of ours is not replaced; the others are advertised.
        advertiser.set(vips(&["198.51.100.1", "198.51.100.2"]));
        eventually("the route without a conflict", || advertiser.installed() == vips(&["198.51.100.2"])).await;
        advertiser.close().await;
        let left = testbed.show("-4 route show table 179");
        assert_eq!(left.lines().count(), 2, "{left}");
        assert_eq!(withdraw_all().await.unwrap(), 0);
    });
}

#[test]
fn externally_removed_routes_are_restored() {
    Testbed::new("advflush").run(|testbed| async move {
        let advertiser = advertiser(RouteTable { table: 7000, metric: Some(12) }).await;
        set(&advertiser, &["198.51.100.1", "2001:db8:100::1"]).await;
        let both = routes_in_table(&testbed, 7000);
        assert_eq!(both.len(), 2);
        testbed.ip("-4 route flush table 7000");
        testbed.ip("-6 route flush table 7000");
        assert_eq!(routes_in_table(&testbed, 7000).len(), 0);
        eventually("both routes restored", || routes_in_table(&testbed, 7000) == both).await;
        // Routes that others add with our protocol number are removed.
        testbed.ip("route add blackhole 198.51.100.7/32 proto 118 table 7000");
        eventually("only our routes", || routes_in_table(&testbed, 7000) == both).await;
    });
}
