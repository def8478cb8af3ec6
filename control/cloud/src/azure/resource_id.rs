//! Resource ids, and the names of resources in them.
//!
//! Azure compares ids without regard to case, and different services write the same id in different cases
//! (<https://learn.microsoft.com/azure/azure-resource-manager/management/resource-name-rules>). Ids of vipgate have names in lower
//! case, so that they can be compared.

use std::fmt;

use ring::digest::{SHA256, digest};

use crate::error::{CloudError, ErrorKind};
use crate::name::hex;
use crate::provider::{AddressId, NicId};

/// Longest name of a resource of Microsoft.Network, and of an IP configuration.
const MAX_NAME: usize = 80;
/// Prefix of names of vipgate's IP configurations.
const PREFIX: &str = "vipgate-";
/// Bytes of the digest in names that would be too long.
const DIGEST: usize = 12;

/// Types of resources.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Type {
    PublicAddress,
    Interface,
    Machine,
}

impl Type {
    fn path(self) -> &'static str {
        match self {
            Self::PublicAddress => "Microsoft.Network/publicIPAddresses",
            Self::Interface => "Microsoft.Network/networkInterfaces",
            Self::Machine => "Microsoft.Compute/virtualMachines",
        }
    }
}

/// Identity of a resource.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ResourceId {
    pub(super) subscription: String,
    pub(super) group: String,
    pub(super) resource: Type,
    pub(super) name: String,
}

impl ResourceId {
    pub(super) fn new(subscription: &str, group: &str, resource: Type, name: &str) -> Option<Self> {
        let parts = [subscription, group, name];
        let [subscription, group, name] = parts.map(str::to_ascii_lowercase);
        parts.into_iter().all(is_name).then_some(Self { subscription, group, resource, name })
    }

    /// `None`: it is of another type, or not an id.
    pub(super) fn parse(id: &str, resource: Type) -> Option<Self> {
        let (found, rest) = Self::split(id, resource)?;
        rest.is_empty().then_some(found)
    }

    /// An interface and the name of its IP configuration, of the id of an IP configuration. `None`: it isn't one of a NIC.
    pub(super) fn parse_configuration(id: &str) -> Option<(Self, &str)> {
        let (interface, rest) = Self::split(id, Type::Interface)?;
        match rest[..] {
            [kind, name] if kind.eq_ignore_ascii_case("ipConfigurations") => Some((interface, name)),
            _ => None,
        }
    }

    /// An id, and what follows it.
    fn split(id: &str, resource: Type) -> Option<(Self, Vec<&str>)> {
        let parts: Vec<&str> = id.strip_prefix('/')?.split('/').collect();
        let [subscriptions, subscription, groups, group, providers, namespace, kind, name, ref rest @ ..] = parts[..]
        else {
            return None;
        };
        let found = format!("{subscriptions}/{groups}/{providers}/{namespace}/{kind}");
        let expected = format!("subscriptions/resourceGroups/providers/{}", resource.path());
        let id = found.eq_ignore_ascii_case(&expected).then(|| Self::new(subscription, group, resource, name))??;
        Some((id, rest.to_vec()))
    }

    pub(super) fn of_address(operation: &'static str, id: &AddressId) -> Result<Self, CloudError> {
        Self::parse(&id.0, Type::PublicAddress).ok_or_else(|| malformed(operation, &id.0))
    }

    pub(super) fn of_nic(operation: &'static str, id: &NicId) -> Result<Self, CloudError> {
        Self::parse(&id.0, Type::Interface).ok_or_else(|| malformed(operation, &id.0))
    }

    /// Whether a text is this id, in whatever case.
    pub(super) fn is(&self, id: &str) -> bool {
        self.to_string().eq_ignore_ascii_case(id)
    }
}

impl fmt::Display for ResourceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { subscription, group, resource, name } = self;
        write!(f, "/subscriptions/{subscription}/resourceGroups/{group}/providers/{}/{name}", resource.path())
    }
}

impl From<&ResourceId> for AddressId {
    fn from(id: &ResourceId) -> Self {
        Self(id.to_string())
    }
}

impl From<&ResourceId> for NicId {
    fn from(id: &ResourceId) -> Self {
        Self(id.to_string())
    }
}

fn malformed(operation: &'static str, id: &str) -> CloudError {
    CloudError::new(ErrorKind::Invalid, operation, "ResourceId", &format!("{id:?} isn't such a resource id"))
}

/// Whether a text can be a segment of a path. Names with other letters than those of ASCII, which resource groups may have,
/// are not supported.
pub(super) fn is_name(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.()".contains(&byte);
    !text.is_empty() && text.len() <= 90 && !text.starts_with('.') && text.bytes().all(is_allowed)
}

/// Name of the IP configuration for a public address: the same at each NIC.
pub(super) fn configuration_name(address: &ResourceId) -> String {
    let plain = format!("{PREFIX}{}", address.name);
    if plain.len() <= MAX_NAME {
        return plain;
    }
    let digest = hex(digest(&SHA256, address.name.as_bytes()).as_ref(), DIGEST);
    format!("{}-{digest}", &plain[..MAX_NAME - 1 - 2 * DIGEST])
}

#[cfg(test)]
mod tests {
    use super::*;

    const NIC: &str = "/subscriptions/s-1/resourceGroups/gateways/providers/Microsoft.Network/networkInterfaces/gw-1";

    #[test]
    fn ids_are_equal_in_whatever_case() {
        let shouted = "/SUBSCRIPTIONS/S-1/resourcegroups/Gateways/providers/microsoft.network/NetworkInterfaces/GW-1";
        let id = ResourceId::parse(shouted, Type::Interface).expect("an id");
        assert_eq!(id.to_string(), NIC);
        assert!(id.is(shouted));
        let configuration = format!("{NIC}/ipConfigurations/vipgate-a");
        assert_eq!(ResourceId::parse_configuration(&configuration), Some((id, "vipgate-a")));
        let shouted = configuration.to_ascii_uppercase();
        assert_eq!(ResourceId::parse_configuration(&shouted).map(|(_, name)| name), Some("VIPGATE-A"));
    }

    #[test]
    fn an_id_has_nothing_that_leaves_its_path() {
        for wrong in [
            "",
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/networkInterfaces/",
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/networkInterfaces/..",
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/networkInterfaces/a?b",
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/networkInterfaces/a%2fb",
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/networkInterfaces/a/b",
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/publicIPAddresses/a",
            "subscriptions/s/resourceGroups/g/providers/Microsoft.Network/networkInterfaces/a",
        ] {
            assert_eq!(ResourceId::parse(wrong, Type::Interface), None, "{wrong}");
        }
        let of_frontend =
            "/subscriptions/s/resourceGroups/g/providers/Microsoft.Network/loadBalancers/l/frontendIPConfigurations/f";
        assert_eq!(ResourceId::parse_configuration(of_frontend), None);
    }

    #[test]
    fn names_of_configurations_are_short_enough_and_different() {
        let name =
            |name: &str| configuration_name(&ResourceId::new("s", "g", Type::PublicAddress, name).expect("a name"));
        assert_eq!(name("Vip-1"), "vipgate-vip-1");
        let (long, other) = (name(&format!("{}a", "x".repeat(79))), name(&format!("{}b", "x".repeat(79))));
        assert_eq!((long.len(), other.len()), (MAX_NAME, MAX_NAME));
        assert_ne!(long, other);
        assert_eq!(name(&"x".repeat(72)).len(), MAX_NAME);
    }
}
