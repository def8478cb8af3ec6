//! Attachments: access configs of NICs.
//!
//! The API refuses an address that is in use, and a second access config of a NIC: these are what no race gets past. What is
//! read before gives the reason, and finds what is done already.

use std::net::IpAddr;

use ipnet::IpNet;

use super::claim::{in_use, not_found, owned};
use super::client::{ADD_ACCESS_CONFIG, Client, DELETE_ACCESS_CONFIG};
use super::name::{InstanceName, NicName};
use super::resource::{AccessConfig, Address, Instance, NetworkInterface};
use crate::error::{CloudError, ErrorKind};
use crate::provider::{Binding, Nic, NicId, PublicAddress};

const NAME: &str = ADD_ACCESS_CONFIG.name;

/// Checks that a NIC can have these addresses.
pub(super) async fn check_nic(
    client: &Client,
    nic: &Nic,
    addresses: &[PublicAddress],
    candidates: &[IpNet],
) -> Result<(), CloudError> {
    check_count(addresses.len())?;
    let Some(address) = addresses.first() else { return Ok(()) };
    let to = NicName::parse(NAME, &nic.id)?;
    let instance = target(client, &to).await?;
    let interface = instance.interface(&to.nic).ok_or_else(|| not_found(NAME, &nic.id.0))?;
    // One of ours that is there now may be detached before this one comes; capacity says whether it is one of ours.
    if nic.capacity.v4 == 0 {
        check_vacant(interface, address.address)?;
    }
    let private: Option<IpAddr> = interface.network_ip.parse().ok();
    let is_candidate = private.is_some_and(|it| candidates.iter().any(|prefix| prefix.contains(&it)));
    if !candidates.is_empty() && !is_candidate {
        let text = format!("a VIP's private address is the primary one of {}, {}", nic.id, interface.network_ip);
        return Err(CloudError::new(ErrorKind::Invalid, NAME, "Candidates", &text));
    }
    if !instance.can_ip_forward {
        let text = format!("{} doesn't forward: set canIpForward, which needs a stop of the instance", nic.id);
        return Err(CloudError::new(ErrorKind::Invalid, NAME, "CanIpForward", &text));
    }
    Ok(())
}

/// Attaches an address to a NIC; one that is still attached to `from` is detached there first.
pub(super) async fn attach(
    client: &Client,
    from: Option<&NicId>,
    nic: &Nic,
    bindings: &[Binding],
) -> Result<(), CloudError> {
    check_count(bindings.len())?;
    let Some(binding) = bindings.first() else { return Ok(()) };
    let to = NicName::parse(NAME, &nic.id)?;
    let from = from.map(|from| NicName::parse(NAME, from)).transpose()?;
    let source = async {
        match &from {
            Some(from) => client.instance(&from.zone, &from.instance).await,
            None => Ok(None),
        }
    };
    let name = &binding.address.id.0;
    let (address, target, source) = tokio::join!(client.address(name), target(client, &to), source);
    let (address, target, source) = (address?.ok_or_else(|| not_found(NAME, name))?, target?, source?);
    owned(NAME, &address, &binding.address)?;
    let ip = address.external_ipv4().ok_or_else(|| unsupported(&address))?;
    if let Some((_, config)) = target.attachment_of(ip).filter(|(interface, _)| interface.name == to.nic) {
        return if config.is_own() {
            Ok(())
        } else {
            Err(in_use(NAME, &address, "somebody else has attached it there"))
        };
    }
    let interface = target.interface(&to.nic).ok_or_else(|| not_found(NAME, &nic.id.0))?;
    check_vacant(interface, ip)?;
    if interface.network_ip.parse() != Ok(binding.private) {
        let text = format!("{} isn't the primary address of {}, {} is", binding.private, nic.id, interface.network_ip);
        return Err(CloudError::new(ErrorKind::Invalid, NAME, "Private", &text));
    }
    check_users(&address, &target, ip, &to, from.as_ref())?;
    if let (Some(from), Some(source)) = (&from, &source) {
        detach_at(client, from, source, &address, ip).await?;
    }
    match client.add_access_config(&to, &AccessConfig::name_of(ip), &address).await {
        Err(error) if is_refusal(&error) => explain(client, error, &address.name, &to, from.as_ref()).await,
        result => result,
    }
}

/// Detaches addresses from a NIC, those of them that are there.
pub(super) async fn detach(client: &Client, from: &NicId, addresses: &[PublicAddress]) -> Result<(), CloudError> {
    let from = NicName::parse(DELETE_ACCESS_CONFIG.name, from)?;
    for expected in addresses {
        let read = client.address(&expected.id.0);
        let (read, source) = tokio::join!(read, client.instance(&from.zone, &from.instance));
        // What doesn't exist is attached nowhere.
        let (Some(read), Some(source)) = (read?, source?) else { continue };
        let is_attached = source.attachment_of(expected.address).is_some_and(|(interface, _)| from.is(&interface.name));
        if !is_attached {
            continue;
        }
        owned(DELETE_ACCESS_CONFIG.name, &read, expected)?;
        detach_at(client, &from, &source, &read, expected.address).await?;
    }
    Ok(())
}

/// Removes the access config with this address, if it is at this NIC and vipgate's.
async fn detach_at(
    client: &Client,
    from: &NicName,
    source: &Instance,
    address: &Address,
    ip: IpAddr,
) -> Result<(), CloudError> {
    let Some((interface, config)) = source.attachment_of(ip) else { return Ok(()) };
    if !from.is(&interface.name) {
        return Err(in_use(DELETE_ACCESS_CONFIG.name, address, "it is at another NIC of the instance"));
    }
    if !config.is_own() {
        return Err(in_use(DELETE_ACCESS_CONFIG.name, address, "somebody else has attached it there"));
    }
    let at = NicName { nic: interface.name.clone(), ..from.clone() };
    let removed = client.delete_access_config(&at, &config.name).await;
    let Err(error) = removed else { return Ok(()) };
    if !matches!(error.kind, ErrorKind::NotFound | ErrorKind::Invalid) {
        return Err(error);
    }
    // Removed by somebody else meanwhile, or with its instance?
    let is_there = |instance: Instance| instance.attachment_of(ip).is_some();
    if client.instance(&from.zone, &from.instance).await?.is_some_and(is_there) {
        // The API doesn't have what it shows: the read is old.
        return Err(CloudError::new(ErrorKind::Conflict, error.operation, &error.code, &error.message));
    }
    Ok(())
}

async fn target(client: &Client, to: &NicName) -> Result<Instance, CloudError> {
    client.instance(&to.zone, &to.instance).await?.ok_or_else(|| not_found(NAME, &to.instance))
}

fn check_count(count: usize) -> Result<(), CloudError> {
    let text = "a NIC of Google Cloud has one VIP at most";
    if count > 1 { Err(CloudError::new(ErrorKind::Quota, NAME, "OneAccessConfig", text)) } else { Ok(()) }
}

/// That a NIC has no other access config: one of somebody else is never removed.
fn check_vacant(interface: &NetworkInterface, ip: IpAddr) -> Result<(), CloudError> {
    let Some(other) = interface.access_configs.iter().find(|config| config.address() != Some(ip)) else {
        return Ok(());
    };
    let text = format!("{} has the access config {:?} with {:?}", interface.name, other.name, other.nat_ip);
    Err(CloudError::new(ErrorKind::Quota, NAME, "OneAccessConfig", &text))
}

/// That nothing uses an address but the NIC that it comes from. `users` may be older than NICs: an instance that was read and
/// doesn't have the address is no user of it.
fn check_users(
    address: &Address,
    target: &Instance,
    ip: IpAddr,
    to: &NicName,
    from: Option<&NicName>,
) -> Result<(), CloudError> {
    if target.attachment_of(ip).is_some()
        && from.is_none_or(|from| (&from.zone, &from.instance) != (&to.zone, &to.instance))
    {
        return Err(in_use(NAME, address, "it is at another NIC of the instance"));
    }
    for user in &address.users {
        let instance = InstanceName::of_user(user);
        let is_read = instance.is_some_and(|it| to.is_of(&it) || from.is_some_and(|from| from.is_of(&it)));
        if !is_read {
            return Err(in_use(NAME, address, "it is attached elsewhere"));
        }
    }
    Ok(())
}

fn is_refusal(error: &CloudError) -> bool {
    matches!(error.kind, ErrorKind::Invalid | ErrorKind::InUse | ErrorKind::Conflict)
}

/// What a refused attachment means: the API says `invalid` for an address in use, too.
async fn explain(
    client: &Client,
    error: CloudError,
    name: &str,
    to: &NicName,
    from: Option<&NicName>,
) -> Result<(), CloudError> {
    let (address, target) = tokio::join!(client.address(name), target(client, to));
    let (address, target) = (address?.ok_or_else(|| not_found(NAME, name))?, target?);
    let ip = address.external_ipv4().ok_or_else(|| unsupported(&address))?;
    if target.attachment_of(ip).is_some_and(|(interface, config)| interface.name == to.nic && config.is_own()) {
        return Ok(());
    }
    if let Some(interface) = target.interface(&to.nic) {
        check_vacant(interface, ip)?;
    }
    let user = address.users.iter().find_map(|user| InstanceName::of_user(user));
    if user.is_some_and(|user| from.is_some_and(|from| from.is_of(&user))) {
        let text = format!("{name}: its detachment can't be seen everywhere yet");
        return Err(CloudError::new(ErrorKind::Busy, NAME, &error.code, &text));
    }
    Err(if address.is_used() {
        in_use(NAME, &address, "it was attached elsewhere meanwhile")
    } else {
        reclassify(error)
    })
}

/// A refusal that reads don't explain: they are older than what the API looked at, or it refuses for another reason. It has
/// no reasons of its own for some of them, so its message counts.
fn reclassify(mut error: CloudError) -> CloudError {
    let says = |text| error.message.contains(text);
    error.kind = if error.kind == ErrorKind::Conflict {
        // There is no fingerprint here that could be old: an organization policy forbids external addresses or this instance.
        ErrorKind::Denied
    } else if says("in-use") || says("in use") || says("already being used") {
        ErrorKind::InUse
    } else if says("At most one access config") {
        ErrorKind::Conflict
    } else {
        error.kind
    };
    error
}

fn unsupported(address: &Address) -> CloudError {
    let text = format!("{} {} isn't an external IPv4 address", address.name, address.address);
    CloudError::new(ErrorKind::Invalid, NAME, "AddressType", &text)
}
