//! Names of what vipgate makes at providers.

use ring::digest::{Context, SHA256};

use crate::provider::Allocation;

/// Bytes of the digest in the name of an allocated address.
const DIGEST: usize = 16;

/// Name of an allocated address: the same for the same token, another one in each cluster.
pub(crate) fn of_allocation(allocation: &Allocation) -> String {
    address_name(&allocation.claim.cluster, &allocation.token)
}

/// Token of an allocation: the same for the same `slot` of an owner in a pool, and no other.
pub(crate) fn token(cluster: &str, pool: &str, owner: &str, is_ipv6: bool, slot: usize) -> String {
    let mut digest = Context::new(&SHA256);
    let family = if is_ipv6 { "IPv6" } else { "IPv4" };
    for part in [cluster, pool, owner, family, &slot.to_string()] {
        digest.update(&(part.len() as u64).to_be_bytes());
        digest.update(part.as_bytes());
    }
    hex(digest.finish().as_ref(), DIGEST)
}

fn address_name(cluster: &str, token: &str) -> String {
    let mut digest = Context::new(&SHA256);
    digest.update(&(cluster.len() as u64).to_be_bytes());
    digest.update(cluster.as_bytes());
    digest.update(token.as_bytes());
    format!("vipgate-{}", hex(digest.finish().as_ref(), DIGEST))
}

/// The first bytes of a digest, in hexadecimal.
pub(crate) fn hex(digest: &[u8], count: usize) -> String {
    digest.iter().take(count).fold(String::new(), |text, byte| format!("{text}{byte:02x}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_differ_by_cluster_and_token() {
        let names = [address_name("a", "b"), address_name("ab", ""), address_name("", "ab"), address_name("a", "c")];
        let different: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(different.len(), names.len());
        assert_eq!(names[0], address_name("a", "b"));
    }
}
