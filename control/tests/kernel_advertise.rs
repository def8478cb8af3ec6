//! Routes for a BGP daemon as the kernel has them: what is set stands, whatever others do to it, and nothing else.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

mod kernel_support;

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::time::Duration;

use kernel_support::{Site, eventually, ip, open, stays};
use vipgate::kernel::{Advertiser, Place, withdraw_all};

const PLACE: Place = Place { table: 179, metric: None };

async fn advertiser(place: Place) -> Advertiser {
    Advertiser::open(place, env!("CARGO_BIN_EXE_vipgate").into()).await.unwrap()
}

fn vips(addresses: &[&str]) -> BTreeSet<IpAddr> {
    addresses.iter().map(|address| ip(address)).collect()
}

async fn set(advertiser: &Advertiser, addresses: &[&str]) {
    advertiser.set(vips(addresses));
    let settled = tokio::time::timeout(Duration::from_secs(10), advertiser.settled()).await;
    assert!(settled.is_ok(), "{:?}", advertiser.standing());
}

/// The routes of ours in a table.
fn shown(site: &Site, table: u32) -> Vec<String> {
    let of = |family: &str| {
        // There may be no such table.
        let options = ["ip", family, "route", "show", "table", &table.to_string(), "proto", "118"];
        site.gateway.output(&options).unwrap_or_default()
    };
    let both = of("-4") + &of("-6");
    both.lines().map(|line| line.split_whitespace().take(2).collect::<Vec<_>>().join(" ")).collect()
}

#[test]
fn what_is_set_stands_and_is_withdrawn_in_the_end() {
    Site::new("advset").run(|site| async move {
        let mut network = open().await;
        let advertiser = advertiser(PLACE).await;
        set(&advertiser, &["198.51.100.1", "198.51.100.2", "2001:db8:100::1"]).await;
        let all = ["blackhole 198.51.100.1", "blackhole 198.51.100.2", "blackhole 2001:db8:100::1"];
        assert_eq!(shown(&site, 179), all);
        set(&advertiser, &["198.51.100.2", "2001:db8:100::2"]).await;
        assert_eq!(shown(&site, 179), ["blackhole 198.51.100.2", "blackhole 2001:db8:100::2"]);
        advertiser.close().await;
        assert_eq!(shown(&site, 179), Vec::<String>::new());
        // Nobody routes by them, in the main table neither.
        let advertiser = self::advertiser(Place { table: 254, metric: Some(7) }).await;
        set(&advertiser, &["198.51.100.1", "2001:db8:100::1"]).await;
        assert!(site.show("-6 route").contains("blackhole 2001:db8:100::1 dev lo proto 118 metric 7"));
        stays(&mut network).await;
    });
}

#[test]
fn routes_of_a_dead_process_are_removed_and_those_of_others_stay() {
    Site::new("advstale").run(|site| async move {
        for table in ["179", "77", "3000", "254"] {
            site.ip(&format!("route add blackhole 198.51.100.9/32 proto 118 metric 3 table {table}"));
            site.ip(&format!("-6 route add 2001:db8:100::9/128 dev gw-out proto 118 table {table}"));
        }
        site.ip("route add blackhole 198.51.100.1/32 table 179");
        site.ip("route add blackhole 198.51.100.0/24 proto 118 table 179");
        let advertiser = advertiser(PLACE).await;
        for table in [77, 3000, 254] {
            assert_eq!(shown(&site, table), Vec::<String>::new(), "{table}");
        }
        assert_eq!(shown(&site, 179), ["blackhole 198.51.100.0/24"]);
        // Another's route in the place of one of ours is left alone, and the rest is advertised.
        advertiser.set(vips(&["198.51.100.1", "198.51.100.2"]));
        eventually("the one that can be", || advertiser.standing() == vips(&["198.51.100.2"])).await;
        advertiser.close().await;
        let left = site.show("-4 route show table 179");
        assert_eq!(left.lines().count(), 2, "{left}");
        assert_eq!(withdraw_all().await.unwrap(), 0);
    });
}

#[test]
fn what_somebody_removes_comes_back() {
    Site::new("advflush").run(|site| async move {
        let advertiser = advertiser(Place { table: 7000, metric: Some(12) }).await;
        set(&advertiser, &["198.51.100.1", "2001:db8:100::1"]).await;
        let both = shown(&site, 7000);
        assert_eq!(both.len(), 2);
        site.ip("-4 route flush table 7000");
        site.ip("-6 route flush table 7000");
        assert_eq!(shown(&site, 7000).len(), 0);
        eventually("both again", || shown(&site, 7000) == both).await;
        // And what somebody adds in our name goes.
        site.ip("route add blackhole 198.51.100.7/32 proto 118 table 7000");
        eventually("only ours", || shown(&site, 7000) == both).await;
    });
}
