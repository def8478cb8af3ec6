//! Where packets were lost during a transfer: counters of all interfaces, and of the kernel's backlog queues.

use std::collections::BTreeMap;
use std::fs;

use serde_json::Value;
use vipgate_lab::Host;

use crate::wire::testbed::Testbed;

/// Counters by place.
pub(super) type Counters = BTreeMap<String, u64>;

/// Lost packets since the interfaces were created, by namespace, interface and direction; `backlog`: those that found a
/// CPU's queue of received packets full (`net.core.netdev_max_backlog`), of the whole machine.
pub(super) fn lost(testbed: &Testbed) -> Counters {
    let mut lost = Counters::new();
    let hosts = [("source", &testbed.source), ("gateway", &testbed.gateway), ("sink", &testbed.sink)];
    for (name, host) in hosts {
        lost.extend(of_interfaces(name, host));
    }
    let softnet = fs::read_to_string("/proc/net/softnet_stat").unwrap_or_default();
    lost.insert("backlog".to_owned(), backlog_drops(&softnet));
    lost
}

/// What has been added since; without the counters that are the same.
pub(super) fn increase(before: &Counters, after: Counters) -> Counters {
    let added = |(name, count): (String, u64)| {
        let added = count.saturating_sub(before.get(&name).copied().unwrap_or_default());
        (added > 0).then_some((name, added))
    };
    after.into_iter().filter_map(added).collect()
}

fn of_interfaces(name: &str, host: &Host) -> Counters {
    let output = host.output(&["ip", "-s", "-j", "link", "show"]).unwrap_or_default();
    let links: Value = serde_json::from_str(&output).unwrap_or_default();
    let mut drops = Counters::new();
    for link in links.as_array().into_iter().flatten() {
        for direction in ["rx", "tx"] {
            let count = link["stats64"][direction]["dropped"].as_u64().unwrap_or_default();
            let interface = link["ifname"].as_str().unwrap_or_default();
            drops.insert(format!("{name} {interface} {direction}"), count);
        }
    }
    drops
}

/// The second column of `/proc/net/softnet_stat`, hexadecimal, over all CPUs.
fn backlog_drops(softnet: &str) -> u64 {
    let second = |line: &str| u64::from_str_radix(line.split_whitespace().nth(1)?, 16).ok();
    softnet.lines().filter_map(second).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_show_what_was_added() {
        let counters = |pairs: &[(&str, u64)]| pairs.iter().map(|(name, it)| ((*name).to_owned(), *it)).collect();
        let before: Counters = counters(&[("tx_full", 1), ("ttl", 4)]);
        let added = increase(&before, counters(&[("tx_full", 3), ("ttl", 4), ("other", 1)]));
        assert_eq!(added, counters(&[("tx_full", 2), ("other", 1)]));
    }

    #[test]
    fn the_backlog_is_the_sum_of_all_cpus() {
        assert_eq!(backlog_drops("0000a1b2 0000000a 00000001\n0000a1b2 00000010 00000001\n"), 26);
        assert_eq!(backlog_drops(""), 0);
    }
}
