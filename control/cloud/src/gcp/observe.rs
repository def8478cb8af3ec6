//! Observation: the pool's addresses and the gateways' NICs.

use std::collections::BTreeMap;
use std::net::IpAddr;

use futures::future::try_join_all;

use super::client::Client;
use super::label;
use super::name::{ANY_NIC, InstanceName, interface_of, nic_id};
use super::resource::{AccessConfig, Address, Instance};
use crate::error::CloudError;
use crate::provider::{AddressId, Associate, Attachment, Capacity, GatewayNic, Nic, Observation, PublicAddress, Scope};

/// A gateway that exists, or that can't have addresses of this pool.
struct Gateway {
    name: String,
    instance: InstanceName,
    /// Name of its NIC.
    interface: String,
    /// `None`: it is in another project or region.
    read: Option<Instance>,
}

/// Reads addresses and NICs. IPv6 addresses and internal ones are left out: access configs can't have them.
pub(super) async fn observe(client: &Client, scope: &Scope) -> Result<Observation, CloudError> {
    // All at once.
    let gateways = try_join_all(scope.gateways.iter().map(|gateway| read_gateway(client, gateway)));
    let (mut addresses, gateways) = tokio::try_join!(client.addresses(&scope.tags), gateways)?;
    let gateways: Vec<Gateway> = gateways.into_iter().flatten().collect();
    // A filter that the API understands in another way must not widen the pool.
    addresses.retain(|read| scope.tags.iter().all(|(key, value)| read.labels.get(key) == Some(value)));
    let mut observed: Vec<PublicAddress> =
        addresses.iter().filter_map(|read| public_address(read, read.external_ipv4()?, &gateways)).collect();
    observed.sort_by_key(|it| it.address);
    let mut nics: Vec<Nic> = gateways.iter().filter_map(|gateway| nic(gateway, &observed)).collect();
    nics.sort_by(|a, b| a.gateway.cmp(&b.gateway));
    for address in &mut observed {
        // Without a claim it is nobody's, except where its access config is vipgate's: there somebody removed the claim, or it ended
        // while another server attached the address.
        let is_at = |nic: &&Nic| {
            address.attachment.as_ref().is_some_and(|it| it.nic.as_ref() == Some(&nic.id) && it.private.is_some())
        };
        let bound = nics.iter().filter(|it| it.capacity.v4 > 0 && (address.claim.is_some() || is_at(it)));
        address.private = bound.filter_map(|it| primary(it, &gateways)).collect();
    }
    Ok(Observation { addresses: observed, nics })
}

/// Reads a gateway's instance; `None`: it has none in this cloud.
async fn read_gateway(client: &Client, gateway: &GatewayNic) -> Result<Option<Gateway>, CloudError> {
    // A provider id of another cloud: not a gateway of this pool.
    let Some(instance) = InstanceName::of_provider_id(&gateway.instance) else { return Ok(None) };
    let (name, interface) = (gateway.gateway.clone(), interface_of(gateway));
    if !client.is_reachable(&instance) {
        return Ok(Some(Gateway { name, instance, interface, read: None }));
    }
    let read = client.instance(&instance.zone, &instance.name).await?;
    Ok(read.map(|read| Gateway { name, instance, interface, read: Some(read) }))
}

fn public_address(read: &Address, address: IpAddr, gateways: &[Gateway]) -> Option<PublicAddress> {
    if !super::name::is_plain(&read.name) {
        return None;
    }
    Some(PublicAddress {
        id: AddressId(read.name.clone()),
        address,
        zone: None,
        has_tags: true,
        claim: label::claim_of(&read.labels),
        token: label::token_of(&read.labels),
        attachment: attachment(read, address, gateways),
        private: BTreeMap::new(),
        version: read.label_fingerprint.clone(),
    })
}

/// Where an address is attached. The gateways' NICs count more than `users`, which can be older or newer than they are.
fn attachment(read: &Address, address: IpAddr, gateways: &[Gateway]) -> Option<Attachment> {
    for gateway in gateways {
        let Some(instance) = &gateway.read else { continue };
        if let Some((interface, config)) = instance.attachment_of(address) {
            return Some(Attachment {
                nic: Some(nic_id(&gateway.instance, &interface.name)),
                // Without it, it isn't where vipgate attaches it.
                private: interface.network_ip.parse().ok().filter(|_| config.is_own()),
                id: Some(config.name.clone()),
            });
        }
    }
    if !read.is_used() {
        return None;
    }
    let instance = read.users.iter().find_map(|user| InstanceName::of_user(user));
    Some(Attachment { nic: instance.map(|instance| nic_id(&instance, ANY_NIC)), private: None, id: None })
}

/// A gateway's NIC; `None`: the instance doesn't have it.
fn nic(gateway: &Gateway, addresses: &[PublicAddress]) -> Option<Nic> {
    let mut nic = Nic {
        id: nic_id(&gateway.instance, &gateway.interface),
        gateway: gateway.name.clone(),
        zone: Some(gateway.instance.zone.clone()),
        capacity: Capacity::default(),
        associate: Associate::Instance,
        is_busy: false,
        // What it lacks no change of the NIC gives it.
        is_ready: true,
        missing: Vec::new(),
        version: String::new(),
    };
    let Some(instance) = &gateway.read else {
        nic.missing.push("to be in the project and the region of the pool".to_owned());
        return Some(nic);
    };
    let interface = instance.interface(&gateway.interface)?;
    let is_in_pool = |address: Option<IpAddr>| addresses.iter().any(|it| Some(it.address) == address);
    let is_ours = |config: &AccessConfig| config.is_own() && is_in_pool(config.address());
    nic.capacity = Capacity::ipv4(interface.access_configs.iter().all(is_ours).into());
    if !instance.can_ip_forward {
        // It can be changed only by stopping the instance, with instances.update.
        nic.missing.push("canIpForward".to_owned());
    }
    Some(nic)
}

fn primary(nic: &Nic, gateways: &[Gateway]) -> Option<(crate::provider::NicId, IpAddr)> {
    let gateway = gateways.iter().find(|it| it.name == nic.gateway)?;
    let interface = gateway.read.as_ref()?.interface(&gateway.interface)?;
    Some((nic.id.clone(), interface.network_ip.parse().ok()?))
}
