//! Tags of Elastic IP addresses.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::reply::{Address, Tag};
use crate::provider::{Claim, NicId, Tags};

/// The cluster that has claimed it.
pub(super) const CLUSTER: &str = "vipgate.io/cluster";
/// The object that it is claimed for.
pub(super) const VIP: &str = "vipgate.io/vip";
/// Before the id of an ENI: the private address there that is bound to it. A tag for each ENI, so that no write can lose what another
/// one has written for another ENI.
const PRIVATE: &str = "vipgate.io/private/";
/// Set at addresses that vipgate has allocated: the token of the allocation.
pub(super) const ALLOCATED: &str = "vipgate.io/allocated";

/// The claim on an address.
pub(super) fn claim(address: &Address) -> Option<Claim> {
    let cluster = address.tag(CLUSTER)?.to_owned();
    Some(Claim { cluster, owner: address.tag(VIP).unwrap_or_default().to_owned() })
}

/// Key of the tag with the private address at an ENI.
pub(super) fn private_key(nic: &NicId) -> String {
    format!("{PRIVATE}{nic}")
}

/// The private addresses in tags, by ENI. What can't be read was written by somebody else, and is left out.
pub(super) fn private(address: &Address) -> BTreeMap<NicId, IpAddr> {
    let entry = |tag: &Tag| Some((NicId(tag.key.strip_prefix(PRIVATE)?.to_owned()), tag.value.parse().ok()?));
    address.tag_set.items.iter().filter_map(entry).collect()
}

/// Whether an address has these tags, all of them.
pub(super) fn has_all(address: &Address, tags: &Tags) -> bool {
    tags.iter().all(|(key, value)| address.tag(key) == Some(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::aws::reply::Set;

    #[test]
    fn private_addresses_are_read_as_written() {
        let nic = NicId("eni-0a".to_owned());
        let tag = |key: &str, value: &str| Tag { key: key.to_owned(), value: value.to_owned() };
        let tags = vec![
            tag(&private_key(&nic), "10.0.0.1"),
            tag("vipgate.io/private/eni-0b", "by hand"),
            tag("vipgate.io/private", "10.0.0.2"),
            tag(CLUSTER, "prod"),
        ];
        let address = Address {
            public_ip: [203, 0, 113, 1].into(),
            allocation_id: "eipalloc-1".to_owned(),
            association_id: None,
            network_interface_id: None,
            private_ip_address: None,
            network_border_group: None,
            tag_set: Set { items: tags },
        };
        assert_eq!(private(&address), [(nic, [10, 0, 0, 1].into())].into());
        let wanted = |value: &str| [(CLUSTER.to_owned(), value.to_owned())].into();
        assert!(has_all(&address, &wanted("prod")) && !has_all(&address, &wanted("prod2")));
    }
}
