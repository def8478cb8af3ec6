//! Which candidates of private addresses are in a subnet.

use ipnet::IpNet;
use serde_json::Value;

use super::client::Client;
use crate::candidates::{Range, within};
use crate::error::{CloudError, ErrorKind};

/// The candidates that a NIC in this subnet can have.
pub(super) async fn usable(client: &Client, id: &str, candidates: &[IpNet]) -> Result<Vec<Range>, CloudError> {
    let subnet = client.subnet(id).await?;
    let subnet = subnet.ok_or_else(|| CloudError::new(ErrorKind::NotFound, "Subnets_Get", "NotFound", id))?;
    Ok(prefixes(&subnet).iter().flat_map(|prefix| within(prefix, candidates)).collect())
}

/// The prefixes of a subnet: one, or one per IP version.
fn prefixes(subnet: &Value) -> Vec<IpNet> {
    let properties = &subnet["properties"];
    let several = properties["addressPrefixes"].as_array().into_iter().flatten();
    several.chain([&properties["addressPrefix"]]).filter_map(|it| it.as_str()?.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use serde_json::json;

    use super::*;
    use crate::candidates::shuffled;

    fn all(subnet: &Value, candidates: &[&str]) -> BTreeSet<String> {
        let candidates: Vec<IpNet> = candidates.iter().map(|it| it.parse().expect("a prefix")).collect();
        let ranges = prefixes(subnet).into_iter().flat_map(|prefix| within(&prefix, &candidates));
        ranges.flat_map(|range| shuffled(range, "seed")).map(|it| it.to_string()).collect()
    }

    #[test]
    fn candidates_are_in_the_subnet_and_not_azures() {
        let subnet = json!({ "properties": { "addressPrefix": "10.0.1.0/29" } });
        let expected = BTreeSet::from(["10.0.1.4".to_owned(), "10.0.1.5".into(), "10.0.1.6".into()]);
        assert_eq!(all(&subnet, &["10.0.0.0/16", "fd00::/64"]), expected);
        assert_eq!(all(&subnet, &["10.0.1.5/32", "10.0.2.0/24"]), BTreeSet::from(["10.0.1.5".to_owned()]));
        assert!(all(&subnet, &["10.0.1.0/30", "10.0.1.7/32"]).is_empty());
    }

    #[test]
    fn both_versions_have_candidates() {
        let subnet = json!({ "properties": { "addressPrefixes": ["10.0.1.0/24", "fd00::/64"] } });
        let found = all(&subnet, &["10.0.1.64/30", "fd00::40/126"]);
        assert_eq!(found.len(), 8);
        assert!(found.contains("fd00::43") && found.contains("10.0.1.67"));
    }
}
