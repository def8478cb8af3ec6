//! Observation: the pool's addresses and the gateways' ENIs.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use super::describe::{MAX_VALUES, filtered};
use super::query::filters;
use super::reply::{Address, DescribeAddresses, NetworkInterface};
use super::{Aws, DESCRIBE_ADDRESSES, ipv6, tags};
use crate::error::CloudError;
use crate::provider::{
    AddressId, Associate, Attachment, Capacity, GatewayNic, Nic, NicId, Observation, PublicAddress, Scope,
};

pub(super) async fn observe(aws: &Aws, scope: &Scope) -> Result<Observation, CloudError> {
    let interfaces = interfaces_of(aws, &scope.gateways).await?;
    let by_id: BTreeMap<&str, &NetworkInterface> =
        interfaces.iter().map(|it| (it.network_interface_id.as_str(), it)).collect();
    let of_gateways: Vec<(&GatewayNic, &NetworkInterface)> =
        scope.gateways.iter().filter_map(|gateway| Some((gateway, interface_of(gateway, &interfaces)?))).collect();
    let mut addresses: Vec<PublicAddress> = if scope.tags.is_empty() {
        Vec::new()
    } else {
        let by_tags = scope.tags.iter().map(|(key, value)| (format!("tag:{key}"), vec![value.as_str()]));
        let reply: DescribeAddresses = aws.query.call(DESCRIBE_ADDRESSES, &filters(by_tags)).await?;
        // A filter that the API understands in another way must not widen the pool.
        let of_pool = reply.addresses_set.items.iter().filter(|address| tags::has_all(address, &scope.tags));
        of_pool.map(|address| public_address(aws, address, &by_id, &of_gateways)).collect()
    };
    addresses.extend(ipv6::observe(aws, &scope.prefixes, &of_gateways).await?);
    addresses.sort_by_key(|address| address.address);
    let instances: BTreeSet<&str> = of_gateways.iter().filter_map(|(_, it)| instance_of(it)).collect();
    let limits = aws.types.lock().await.limits(aws, &instances).await?;
    let mut nics: Vec<Nic> =
        of_gateways.iter().map(|(gateway, it)| nic(aws, gateway, it, &limits, &addresses)).collect();
    nics.sort_by(|a, b| a.gateway.cmp(&b.gateway));
    Ok(Observation { addresses, nics })
}

/// The ENIs of the gateways' instances.
async fn interfaces_of(aws: &Aws, gateways: &[GatewayNic]) -> Result<Vec<NetworkInterface>, CloudError> {
    let instances: BTreeSet<&str> = gateways.iter().filter_map(|gateway| instance_id(&gateway.instance)).collect();
    let instances: Vec<&str> = instances.into_iter().collect();
    let mut interfaces = Vec::new();
    for some in instances.chunks(MAX_VALUES) {
        interfaces.extend(filtered(aws, "attachment.instance-id", some.to_vec()).await?);
    }
    Ok(interfaces)
}

/// The id in a provider id, `aws:///ZONE/INSTANCE`, or the id itself.
fn instance_id(provider_id: &str) -> Option<&str> {
    provider_id.rsplit('/').next().filter(|id| id.starts_with("i-"))
}

fn instance_of(interface: &NetworkInterface) -> Option<&str> {
    interface.attachment.as_ref()?.instance_id.as_deref()
}

/// The ENI of a gateway: by its id, or by its index at the instance.
fn interface_of<'a>(gateway: &GatewayNic, all: &'a [NetworkInterface]) -> Option<&'a NetworkInterface> {
    let instance = instance_id(&gateway.instance)?;
    let mut of_instance = all.iter().filter(|interface| instance_of(interface) == Some(instance));
    let index = |interface: &NetworkInterface| interface.attachment.as_ref()?.device_index;
    match gateway.nic.as_deref() {
        Some(id) if id.starts_with("eni-") => of_instance.find(|interface| interface.network_interface_id == id),
        Some(number) => {
            let number = number.parse().ok()?;
            of_instance.find(|interface| index(interface) == Some(number))
        }
        None => of_instance.find(|interface| index(interface) == Some(0)),
    }
}

fn public_address(
    aws: &Aws,
    address: &Address,
    interfaces: &BTreeMap<&str, &NetworkInterface>,
    of_gateways: &[(&GatewayNic, &NetworkInterface)],
) -> PublicAddress {
    let mut private = tags::private(address);
    // What was bound but isn't assigned has to be prepared again. Of other instances' ENIs nothing is known.
    private.retain(|nic, address| interfaces.get(&*nic.0).is_none_or(|it| it.private(*address).is_some()));
    if aws.config.associate == Associate::Instance {
        private = primaries(address, of_gateways);
    }
    let attachment = address.association_id.as_ref().map(|id| Attachment {
        nic: address.network_interface_id.clone().map(NicId),
        private: address.private_ip_address,
        id: Some(id.clone()),
    });
    PublicAddress {
        id: AddressId(address.allocation_id.clone()),
        address: address.public_ip,
        zone: address.network_border_group.clone().filter(|group| *group != aws.config.region),
        has_tags: true,
        claim: tags::claim(address),
        token: address.tag(tags::ALLOCATED).map(str::to_owned),
        attachment,
        private,
        version: String::new(),
    }
}

/// The primary private addresses of all gateways, for an address that is claimed.
fn primaries(address: &Address, of_gateways: &[(&GatewayNic, &NetworkInterface)]) -> BTreeMap<NicId, IpAddr> {
    let primary = |(_, interface): &(&GatewayNic, &NetworkInterface)| {
        Some((NicId(interface.network_interface_id.clone()), interface.primary()?))
    };
    let is_claimed = tags::claim(address).is_some();
    of_gateways.iter().filter(|_| is_claimed).filter_map(primary).collect()
}

fn nic(
    aws: &Aws,
    gateway: &GatewayNic,
    interface: &NetworkInterface,
    limits: &BTreeMap<String, Capacity>,
    addresses: &[PublicAddress],
) -> Nic {
    let id = NicId(interface.network_interface_id.clone());
    let mut missing = Vec::new();
    if interface.source_dest_check == Some(true) {
        missing.push("the source/destination check is on: packets of pods are dropped".to_owned());
    }
    let limit = instance_of(interface).and_then(|instance| limits.get(instance)).copied().unwrap_or_default();
    Nic {
        gateway: gateway.gateway.clone(),
        zone: interface.availability_zone.as_deref().map(|zone| border_group(zone, &aws.config.region)),
        capacity: capacity(aws, interface, limit, addresses),
        associate: aws.config.associate,
        is_busy: false,
        is_ready: missing.is_empty() || aws.unmodifiable.contains(&id),
        missing,
        version: String::new(),
        id,
    }
}

/// What is left beside addresses of others and delegated prefixes, each of which takes the room of an address.
fn capacity(aws: &Aws, interface: &NetworkInterface, limit: Capacity, addresses: &[PublicAddress]) -> Capacity {
    let id = NicId(interface.network_interface_id.clone());
    let is_other = |private: &IpAddr| addresses.iter().all(|it| it.private.get(&id) != Some(private));
    let private = interface.private_ip_addresses_set.items.iter().map(|it| it.private_ip_address);
    let v4 = private.filter(is_other).count() + interface.ipv4_prefix_set.items.len();
    let private = interface.ipv6_addresses_set.items.iter().map(|it| it.ipv6_address);
    let v6 = private.filter(is_other).count() + interface.ipv6_prefix_set.items.len();
    Capacity {
        v4: match aws.config.associate {
            Associate::Nic => limit.v4.saturating_sub(v4),
            // The primary private address, whatever else it has.
            Associate::Instance => 1,
        },
        v6: limit.v6.saturating_sub(v6),
    }
}

/// The network border group of a zone: the region for its own zones (`eu-west-1a`), else the group of a local zone
/// (`us-west-2-lax-1` of `us-west-2-lax-1a`).
fn border_group(zone: &str, region: &str) -> String {
    let group = zone.strip_suffix(|last: char| last.is_ascii_lowercase()).unwrap_or(zone);
    if group == region { region.to_owned() } else { group.to_owned() }
}
