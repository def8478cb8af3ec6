//! Names of instances and NICs: in provider ids, in users of addresses and in [`NicId`]s.

use crate::error::{CloudError, ErrorKind};
use crate::provider::{GatewayNic, NicId};

/// NIC of a [`NicId`] whose instance isn't among the gateways, so that its NICs aren't read: whichever has the address.
pub(super) const ANY_NIC: &str = "-";

/// Whether a text can be one segment of a path of the API. Projects of a domain have a colon and dots (`example.com:project`).
pub(super) fn is_plain(text: &str) -> bool {
    let is_allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"-.:_".contains(&byte);
    !text.is_empty() && text.len() <= 127 && !text.starts_with('.') && text.bytes().all(is_allowed)
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct InstanceName {
    pub(super) project: String,
    pub(super) zone: String,
    pub(super) name: String,
}

impl InstanceName {
    /// Of a provider id, `gce://project/zone/name`.
    pub(super) fn of_provider_id(id: &str) -> Option<Self> {
        let parts: Vec<&str> = id.strip_prefix("gce://")?.split('/').collect();
        let [project, zone, name] = parts[..] else { return None };
        Self::of_parts(project, zone, name)
    }

    /// Of a user of an address: a URL that ends with `projects/P/zones/Z/instances/NAME`. `None`: not an instance.
    pub(super) fn of_user(url: &str) -> Option<Self> {
        let parts: Vec<&str> = url.rsplit('/').take(6).collect();
        let [name, "instances", zone, "zones", project, "projects"] = parts[..] else { return None };
        Self::of_parts(project, zone, name)
    }

    fn of_parts(project: &str, zone: &str, name: &str) -> Option<Self> {
        let is_valid = [project, zone, name].into_iter().all(is_plain);
        is_valid.then(|| Self { project: project.to_owned(), zone: zone.to_owned(), name: name.to_owned() })
    }
}

/// A NIC: what a [`NicId`] says.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct NicName {
    pub(super) zone: String,
    pub(super) instance: String,
    /// `nic0`, or [`ANY_NIC`].
    pub(super) nic: String,
}

impl NicName {
    pub(super) fn parse(operation: &'static str, id: &NicId) -> Result<Self, CloudError> {
        let parts: Vec<&str> = id.0.split('/').collect();
        match parts[..] {
            [zone, instance, nic] if [zone, instance, nic].into_iter().all(is_plain) => {
                Ok(Self { zone: zone.to_owned(), instance: instance.to_owned(), nic: nic.to_owned() })
            }
            _ => {
                Err(CloudError::new(ErrorKind::Invalid, operation, "NicId", &format!("{id} is not zone/instance/nic")))
            }
        }
    }

    /// Whether an interface is meant.
    pub(super) fn is(&self, interface: &str) -> bool {
        self.nic == ANY_NIC || self.nic == interface
    }

    /// Whether it is a NIC of this instance.
    pub(super) fn is_of(&self, instance: &InstanceName) -> bool {
        self.zone == instance.zone && self.instance == instance.name
    }
}

/// Identity of a NIC.
pub(super) fn nic_id(instance: &InstanceName, nic: &str) -> NicId {
    NicId(format!("{}/{}/{nic}", instance.zone, instance.name))
}

/// Name of a gateway's NIC: `nic0` by default; an index is that of the name.
pub(super) fn interface_of(gateway: &GatewayNic) -> String {
    match gateway.nic.as_deref() {
        None => "nic0".to_owned(),
        Some(index) if index.bytes().all(|byte| byte.is_ascii_digit()) && !index.is_empty() => format!("nic{index}"),
        Some(name) => name.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn instances_have_three_parts_and_nothing_that_leaves_the_path() {
        let expected = InstanceName { project: "p1".into(), zone: "europe-west1-b".into(), name: "gw-1".into() };
        assert_eq!(InstanceName::of_provider_id("gce://p1/europe-west1-b/gw-1"), Some(expected.clone()));
        let user = "https://www.googleapis.com/compute/v1/projects/p1/zones/europe-west1-b/instances/gw-1";
        assert_eq!(InstanceName::of_user(user), Some(expected));
        for wrong in ["gce://p1/z", "gce://p1/z/a/b", "aws:///z/i-1", "gce://p1/z/..", "gce://p1/z/a?b", "gce:///z/a"] {
            assert_eq!(InstanceName::of_provider_id(wrong), None, "{wrong}");
        }
        assert_eq!(InstanceName::of_user("https://x/projects/p1/regions/r1/forwardingRules/web"), None);
    }
}
