//! Resources of the API: the fields that are used (<https://cloud.google.com/compute/docs/reference/rest/v1>).

use std::collections::BTreeMap;
use std::net::IpAddr;

use serde::Deserialize;

/// A regional address.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
#[expect(clippy::struct_field_names, reason = "the API's names")]
pub(super) struct Address {
    pub(super) name: String,
    pub(super) address: String,
    /// `EXTERNAL` or `INTERNAL`.
    pub(super) address_type: String,
    pub(super) description: String,
    /// `RESERVING`, `RESERVED` or `IN_USE`.
    pub(super) status: String,
    /// URLs of what uses it.
    pub(super) users: Vec<String>,
    pub(super) labels: BTreeMap<String, String>,
    pub(super) label_fingerprint: String,
    pub(super) network_tier: String,
}

impl Address {
    /// The address, if it is an external one that access configs can have.
    pub(super) fn external_ipv4(&self) -> Option<IpAddr> {
        let address: IpAddr = self.address.parse().ok()?;
        (self.address_type != "INTERNAL" && address.is_ipv4()).then_some(address)
    }

    /// Whether something uses it. `users` and `status` can be of different times.
    pub(super) fn is_used(&self) -> bool {
        !self.users.is_empty() || self.status == "IN_USE"
    }
}

/// A page of addresses.
#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct AddressList {
    pub(super) items: Vec<Address>,
    pub(super) next_page_token: String,
}

#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Instance {
    pub(super) can_ip_forward: bool,
    pub(super) network_interfaces: Vec<NetworkInterface>,
}

impl Instance {
    /// An interface by name.
    pub(super) fn interface(&self, name: &str) -> Option<&NetworkInterface> {
        self.network_interfaces.iter().find(|interface| interface.name == name)
    }

    /// Interface and access config that an address is attached at.
    pub(super) fn attachment_of(&self, address: IpAddr) -> Option<(&NetworkInterface, &AccessConfig)> {
        let config = |interface: &'_ NetworkInterface| {
            interface.access_configs.iter().position(|config| config.address() == Some(address))
        };
        self.network_interfaces.iter().find_map(|it| config(it).map(|at| (it, &it.access_configs[at])))
    }
}

/// A NIC.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct NetworkInterface {
    pub(super) name: String,
    /// Its primary address.
    #[serde(rename = "networkIP")]
    pub(super) network_ip: String,
    /// One at most.
    pub(super) access_configs: Vec<AccessConfig>,
}

/// A public address in front of a NIC's primary address.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct AccessConfig {
    pub(super) name: String,
    /// Empty: an ephemeral one of a stopped instance.
    #[serde(rename = "natIP")]
    pub(super) nat_ip: String,
}

impl AccessConfig {
    /// Name of an access config of vipgate's: it has the address, so that a deletion by name never removes another one.
    pub(super) fn name_of(ip: IpAddr) -> String {
        format!("vipgate-{}", ip.to_string().replace('.', "-"))
    }

    /// Whether vipgate made it: it has the name that vipgate gives it.
    pub(super) fn is_own(&self) -> bool {
        self.address().is_some_and(|ip| self.name == Self::name_of(ip))
    }

    pub(super) fn address(&self) -> Option<IpAddr> {
        self.nat_ip.parse().ok()
    }
}

#[derive(Debug, Default, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub(super) struct Operation {
    pub(super) name: String,
    /// `PENDING`, `RUNNING` or `DONE`.
    pub(super) status: String,
    pub(super) error: Option<OperationErrors>,
    pub(super) http_error_status_code: Option<u16>,
    pub(super) http_error_message: String,
}

/// Errors of an operation that is done.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct OperationErrors {
    pub(super) errors: Vec<OperationError>,
}

/// One of them.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
pub(super) struct OperationError {
    pub(super) code: String,
    pub(super) message: String,
}
