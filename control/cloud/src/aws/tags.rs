//! Tags of Elastic IP addresses.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::reply::Address;
use crate::provider::{Claim, NicId};

/// The cluster that has claimed it.
pub(super) const CLUSTER: &str = "vipgate.io/cluster";
/// The object that it is claimed for.
pub(super) const VIP: &str = "vipgate.io/vip";
/// The private addresses that are bound to it: `ENI=ADDRESS`, separated by spaces.
pub(super) const PRIVATE: &str = "vipgate.io/private";
/// Set at addresses that vipgate has allocated: the token of the allocation.
pub(super) const ALLOCATED: &str = "vipgate.io/allocated";

/// Longest value of a tag, characters.
const MAX_VALUE: usize = 256;

/// The claim on an address.
pub(super) fn claim(address: &Address) -> Option<Claim> {
    let cluster = address.tag(CLUSTER)?.to_owned();
    Some(Claim { cluster, owner: address.tag(VIP).unwrap_or_default().to_owned() })
}

/// The private addresses in the tag. What can't be read was written by somebody else, and is left out.
pub(super) fn private(address: &Address) -> BTreeMap<NicId, IpAddr> {
    let entry = |entry: &str| {
        let (nic, address) = entry.split_once('=')?;
        Some((NicId(nic.to_owned()), address.parse().ok()?))
    };
    address.tag(PRIVATE).unwrap_or_default().split_whitespace().filter_map(entry).collect()
}

/// The tag of these private addresses; `None`: too many for a tag.
pub(super) fn private_value(private: &BTreeMap<NicId, IpAddr>) -> Option<String> {
    let entries: Vec<String> = private.iter().map(|(nic, address)| format!("{nic}={address}")).collect();
    let value = entries.join(" ");
    (value.len() <= MAX_VALUE).then_some(value)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aws::reply::{Set, Tag};

    fn address(private: &str) -> Address {
        let tag = Tag { key: PRIVATE.to_owned(), value: private.to_owned() };
        Address {
            public_ip: [203, 0, 113, 1].into(),
            allocation_id: "eipalloc-1".to_owned(),
            association_id: None,
            network_interface_id: None,
            private_ip_address: None,
            network_border_group: None,
            tag_set: Set { items: vec![tag] },
        }
    }

    #[test]
    fn private_addresses_are_read_as_written() {
        let entry = |nic: &str, last| (NicId(nic.to_owned()), IpAddr::from([10, 0, 0, last]));
        let all: BTreeMap<NicId, IpAddr> = [entry("eni-0a", 1), entry("eni-0b", 2)].into();
        let value = private_value(&all).unwrap();
        assert_eq!(value, "eni-0a=10.0.0.1 eni-0b=10.0.0.2");
        assert_eq!(private(&address(&value)), all);
        assert_eq!(private(&address("x eni-1=y eni-0a=10.0.0.1 =")), [entry("eni-0a", 1)].into());
    }

    #[test]
    fn a_tag_has_room_for_a_home_and_three_backups_and_a_former_gateway() {
        let all =
            |count: u8| (0..count).map(|n| (NicId(format!("eni-{n:017x}")), IpAddr::from([172, 31, 255, 100 + n])));
        assert!(private_value(&all(6).collect()).is_some());
        assert_eq!(private_value(&all(8).collect()), None);
    }
}
