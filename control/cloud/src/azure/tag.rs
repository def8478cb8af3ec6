//! Tags of public addresses.
//!
//! Names of tags can't have a slash, and are the same in whatever case; values have 256 characters at most
//! (<https://learn.microsoft.com/azure/azure-resource-manager/management/tag-resources#limitations>). So `vipgate.io/cluster` is
//! written `vipgate.io_cluster`. A value that would be too long is refused, never cut off: two owners never have the same tags.

use serde_json::{Map, Value};

use crate::error::{CloudError, ErrorKind};
use crate::provider::{Claim, Tags};

/// The cluster that has claimed an address.
pub(super) const CLUSTER: &str = "vipgate.io_cluster";
/// The object that it is claimed for.
pub(super) const VIP: &str = "vipgate.io_vip";
/// At addresses that vipgate has allocated: the token of the allocation.
pub(super) const ALLOCATED: &str = "vipgate.io_allocated";

/// Longest value of a tag, characters.
const MAX_VALUE: usize = 256;

/// A tag of a resource.
pub(super) fn get<'a>(resource: &'a Value, name: &str) -> Option<&'a str> {
    let tags = resource.get("tags")?.as_object()?;
    tags.iter().find(|(key, _)| key.eq_ignore_ascii_case(name))?.1.as_str()
}

/// Whether a resource has these tags, all of them.
pub(super) fn has_all(resource: &Value, tags: &Tags) -> bool {
    tags.iter().all(|(name, value)| get(resource, name) == Some(value))
}

/// The claim on an address.
pub(super) fn claim(resource: &Value) -> Option<Claim> {
    let cluster = get(resource, CLUSTER)?.to_owned();
    Some(Claim { cluster, owner: get(resource, VIP).unwrap_or_default().to_owned() })
}

/// Sets the claim on an address, or removes it.
pub(super) fn set_claim(resource: &mut Value, claim: Option<&Claim>) {
    set(resource, CLUSTER, claim.map(|claim| claim.cluster.as_str()));
    set(resource, VIP, claim.map(|claim| claim.owner.as_str()));
}

/// Sets a tag, or removes it.
pub(super) fn set(resource: &mut Value, name: &str, value: Option<&str>) {
    let Some(resource) = resource.as_object_mut() else { return };
    let tags = resource.entry("tags").or_insert_with(|| Value::Object(Map::new()));
    if tags.is_null() {
        *tags = Value::Object(Map::new());
    }
    let Some(tags) = tags.as_object_mut() else { return };
    tags.retain(|key, _| !key.eq_ignore_ascii_case(name));
    if let Some(value) = value {
        tags.insert(name.to_owned(), value.into());
    }
}

/// Checks that these can be values of tags.
pub(super) fn check_values<'a>(
    operation: &'static str,
    values: impl IntoIterator<Item = &'a str>,
) -> Result<(), CloudError> {
    let long = values.into_iter().find(|value| value.chars().count() > MAX_VALUE);
    long.map_or(Ok(()), |value| {
        let text = format!("{value:?} is too long for a tag, which has {MAX_VALUE} characters at most");
        Err(CloudError::new(ErrorKind::Invalid, operation, "Tag", &text))
    })
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn names_of_tags_are_the_same_in_whatever_case_and_values_are_not() {
        let mut resource = json!({ "tags": { "Pool": "Edge", "VIPGATE.io_cluster": "a" } });
        assert!(has_all(&resource, &[("pool".to_owned(), "Edge".to_owned())].into()));
        assert!(!has_all(&resource, &[("pool".to_owned(), "edge".to_owned())].into()));
        assert_eq!(claim(&resource), Some(Claim { cluster: "a".into(), owner: String::new() }));
        let new = Claim { cluster: "b".to_owned(), owner: "shop/web".to_owned() };
        set_claim(&mut resource, Some(&new));
        let expected = json!({ "Pool": "Edge", "vipgate.io_cluster": "b", "vipgate.io_vip": "shop/web" });
        assert_eq!(resource["tags"], expected);
        set_claim(&mut resource, None);
        assert_eq!(resource["tags"], json!({ "Pool": "Edge" }));
    }

    #[test]
    fn a_value_that_is_too_long_is_refused() {
        assert!(check_values("x", ["a", &"ü".repeat(256)]).is_ok());
        assert!(check_values("x", ["a", &"a".repeat(257)]).is_err());
    }
}
