//! Changes: what the API allows, and what they do. Checked when they are requested and again when they are carried out.

use std::collections::BTreeMap;

use super::error::Error;
use super::state::{GcpAccessConfig, GcpAddress, GcpState};

#[derive(Clone, Debug)]
pub(super) enum Change {
    SetLabels { name: String, labels: BTreeMap<String, String>, fingerprint: String },
    Insert { name: String, description: String },
    Delete { name: String },
    AddAccessConfig { instance: String, zone: String, nic: String, config: GcpAccessConfig, tier: Option<String> },
    DeleteAccessConfig { instance: String, zone: String, nic: String, name: String },
}

impl Change {
    /// Kind of the operation.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::SetLabels { .. } => "setLabels",
            Self::Insert { .. } => "insert",
            Self::Delete { .. } => "delete",
            Self::AddAccessConfig { .. } => "addAccessConfig",
            Self::DeleteAccessConfig { .. } => "deleteAccessConfig",
        }
    }

    /// Path of the resource, below the project.
    pub(super) fn target(&self, region: &str) -> String {
        match self {
            Self::SetLabels { name, .. } | Self::Insert { name, .. } | Self::Delete { name } => {
                format!("regions/{region}/addresses/{name}")
            }
            Self::AddAccessConfig { instance, zone, .. } | Self::DeleteAccessConfig { instance, zone, .. } => {
                format!("zones/{zone}/instances/{instance}")
            }
        }
    }

    /// Zone of the operation; `None`: it is in the region.
    pub(super) fn zone(&self) -> Option<&str> {
        match self {
            Self::AddAccessConfig { zone, .. } | Self::DeleteAccessConfig { zone, .. } => Some(zone),
            Self::SetLabels { .. } | Self::Insert { .. } | Self::Delete { .. } => None,
        }
    }

    /// Whether it is allowed. `checks_use`: whether an address in use is found, too.
    pub(super) fn check(&self, state: &GcpState, checks_use: bool) -> Result<(), Error> {
        match self {
            Self::SetLabels { name, labels, fingerprint } => {
                let address = address(state, name)?;
                if address.fingerprint() != *fingerprint {
                    return Err(Error::new(
                        412,
                        "conditionNotMet",
                        "Labels fingerprint either invalid or resource labels have changed",
                    ));
                }
                check_labels(labels)
            }
            Self::Insert { name, .. } if state.addresses.contains_key(name) => {
                Err(Error::new(409, "alreadyExists", &format!("The resource 'addresses/{name}' already exists")))
            }
            Self::Insert { .. } if state.addresses.len() >= state.quota => {
                let text = format!("Quota 'STATIC_ADDRESSES' exceeded.  Limit: {}.0 in region", state.quota);
                Err(Error::new(403, "quotaExceeded", &text))
            }
            Self::Delete { name } if state.is_used(address(state, name)?) => {
                let text = format!("The address resource '{name}' is already being used by another resource");
                Err(Error::new(400, "resourceInUseByAnotherResource", &text))
            }
            Self::Insert { .. } | Self::Delete { .. } => Ok(()),
            Self::AddAccessConfig { instance, zone, nic, config, tier } => {
                let present = access_config(state, instance, zone, nic)?;
                if present.is_some() {
                    return Err(Error::new(400, "badRequest", "At most one access config currently supported."));
                }
                check_address(state, &config.nat_ip, tier.as_deref(), checks_use)
            }
            Self::DeleteAccessConfig { instance, zone, nic, name } => {
                let is_there =
                    access_config(state, instance, zone, nic)?.as_ref().is_some_and(|config| config.name == *name);
                let error = || Error::invalid("accessConfig", name, "The access config was not found.");
                if is_there { Ok(()) } else { Err(error()) }
            }
        }
    }

    /// Carries it out.
    pub(super) fn apply(self, state: &mut GcpState) {
        match self {
            Self::SetLabels { name, labels, .. } => {
                if let Some(address) = state.addresses.get_mut(&name) {
                    address.labels = labels;
                    address.label_version += 1;
                }
            }
            Self::Insert { name, description } => {
                state.allocated += 1;
                let address = GcpAddress {
                    address: format!("192.0.2.{}", state.allocated),
                    description,
                    ..GcpAddress::default()
                };
                state.addresses.insert(name, address);
            }
            Self::Delete { name } => {
                state.addresses.remove(&name);
            }
            Self::AddAccessConfig { instance, nic, config, .. } => {
                set_access_config(state, &instance, &nic, Some(config));
            }
            Self::DeleteAccessConfig { instance, nic, .. } => set_access_config(state, &instance, &nic, None),
        }
    }
}

fn address<'a>(state: &'a GcpState, name: &str) -> Result<&'a GcpAddress, Error> {
    state.addresses.get(name).ok_or_else(|| Error::not_found("addresses", name))
}

fn access_config<'a>(
    state: &'a GcpState,
    instance: &str,
    zone: &str,
    nic: &str,
) -> Result<&'a Option<GcpAccessConfig>, Error> {
    let found = state.instances.get(instance).filter(|it| it.zone == zone);
    let found = found.ok_or_else(|| Error::not_found("instances", instance))?;
    let interface = found.interfaces.get(nic);
    let error = || Error::invalid("networkInterface", nic, "The network interface was not found.");
    Ok(&interface.ok_or_else(error)?.access_config)
}

fn set_access_config(state: &mut GcpState, instance: &str, nic: &str, config: Option<GcpAccessConfig>) {
    let instance = state.instances.get_mut(instance);
    if let Some(interface) = instance.and_then(|it| it.interfaces.get_mut(nic)) {
        interface.access_config = config;
    }
}

/// Whether an access config can have an address.
fn check_address(state: &GcpState, nat_ip: &str, tier: Option<&str>, checks_use: bool) -> Result<(), Error> {
    let found = state.addresses.values().find(|it| it.address == nat_ip && it.address_type == "EXTERNAL");
    let absent = || {
        let text = format!("The specified external IP address '{nat_ip}' was not found in region.");
        Error::invalid("resource.natIP", nat_ip, &text)
    };
    let found = found.ok_or_else(absent)?;
    if found.is_reserving {
        return Err(Error::new(400, "resourceNotReady", "The resource is not ready"));
    }
    if checks_use && state.is_used(found) {
        let text = format!("External IP address: {nat_ip} is already in-use.");
        return Err(Error::invalid("resource.natIP", nat_ip, &text));
    }
    if tier.unwrap_or("PREMIUM") != found.tier {
        let text =
            format!("The network tier of external IP address is {}, that of the access config isn't", found.tier);
        return Err(Error::invalid("resource.networkTier", tier.unwrap_or_default(), &text));
    }
    Ok(())
}

fn check_labels(labels: &BTreeMap<String, String>) -> Result<(), Error> {
    let is_allowed = |letter: char| letter.is_ascii_lowercase() || letter.is_ascii_digit() || "-_".contains(letter);
    let is_part = |text: &str| text.len() <= 63 && text.chars().all(is_allowed);
    for (key, value) in labels {
        if !key.starts_with(|letter: char| letter.is_ascii_lowercase()) || !is_part(key) || !is_part(value) {
            return Err(Error::invalid("labels", &format!("{key}={value}"), "Labels must match [a-z0-9_-]{0,63}."));
        }
    }
    if labels.len() > 64 { Err(Error::invalid("labels", "", "Maximum number of labels is 64.")) } else { Ok(()) }
}
