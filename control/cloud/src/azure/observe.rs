//! Observation: the pool's addresses and the gateways' NICs.

use std::collections::{BTreeMap, BTreeSet};

use futures::future::try_join_all;
use serde_json::Value;

use super::claim::{attached_to, ip_of};
use super::client::Client;
use super::interface::{Interface, IpConfiguration, etag, is_busy};
use super::prepare::MAX_CONFIGURATIONS;
use super::resource_id::{ResourceId, Type, configuration_name};
use super::tag;
use crate::error::CloudError;
use crate::provider::{
    AddressId, Associate, Attachment, Capacity, GatewayNic, Nic, NicId, Observation, PublicAddress, Scope,
};

/// Interfaces that were read.
type Interfaces = BTreeMap<ResourceId, Interface>;

/// A gateway that exists, or that can't have addresses.
struct Gateway {
    name: String,
    zone: Option<String>,
    /// Its NIC. `None`: a virtual machine whose NICs can't be changed.
    nic: Option<(ResourceId, Interface)>,
    instance: String,
}

/// Reads addresses and NICs. Without tags there are no addresses: a pool is never all that there is.
pub(super) async fn observe(client: &Client, scope: &Scope) -> Result<Observation, CloudError> {
    let addresses = async { if scope.tags.is_empty() { Ok(Vec::new()) } else { client.addresses().await } };
    // All at once.
    let gateways = try_join_all(scope.gateways.iter().map(|gateway| read_gateway(client, gateway)));
    let (addresses, gateways) = tokio::try_join!(addresses, gateways)?;
    let gateways: Vec<Gateway> = gateways.into_iter().flatten().collect();
    if let Some(location) = gateways.iter().find_map(location_of) {
        client.location.get_or_init(|| location);
    }
    let of_pool = addresses.iter().filter(|read| tag::has_all(read, &scope.tags));
    let of_pool: Vec<(ResourceId, &Value)> = of_pool.filter_map(|read| Some((id_of(read)?, read))).collect();
    let mut interfaces: Interfaces = gateways.iter().filter_map(|gateway| gateway.nic.clone()).collect();
    let of_gateways: BTreeSet<ResourceId> = interfaces.keys().cloned().collect();
    for id in former(client, &of_pool, &interfaces) {
        if let Some(read) = client.interface(&id).await? {
            interfaces.insert(id, read);
        }
    }
    let mut observed: Vec<PublicAddress> =
        of_pool.iter().filter_map(|(id, read)| public_address(client, id, read, &interfaces)).collect();
    observed.sort_by_key(|it| it.address);
    let mut nics: Vec<Nic> = gateways.iter().map(|gateway| nic(client, gateway, &observed)).collect();
    nics.sort_by(|a, b| a.gateway.cmp(&b.gateway));
    if client.associate == Associate::Instance {
        bind_primaries(&mut observed, &nics, &interfaces, &of_gateways);
    }
    Ok(Observation { addresses: observed, nics })
}

/// Region of a gateway's NIC.
fn location_of(gateway: &Gateway) -> Option<String> {
    let (_, interface) = gateway.nic.as_ref()?;
    interface.0["location"].as_str().map(str::to_owned)
}

fn id_of(read: &Value) -> Option<ResourceId> {
    ResourceId::parse(read["id"].as_str()?, Type::PublicAddress)
}

/// NICs that aren't a gateway's any more, but that an address is attached to as vipgate does it.
fn former(client: &Client, addresses: &[(ResourceId, &Value)], known: &Interfaces) -> BTreeSet<ResourceId> {
    if client.associate == Associate::Instance {
        return BTreeSet::new();
    }
    let of = |(id, read): &(ResourceId, &Value)| {
        let (nic, name) = ResourceId::parse_configuration(attached_to(read)?)?;
        (name.eq_ignore_ascii_case(&configuration_name(id)) && !known.contains_key(&nic)).then_some(nic)
    };
    addresses.iter().filter_map(of).collect()
}

/// Reads a gateway's machine and NIC.
async fn read_gateway(client: &Client, gateway: &GatewayNic) -> Result<Option<Gateway>, CloudError> {
    // A provider id of another cloud: not a gateway of this pool.
    let Some(instance) = gateway.instance.strip_prefix("azure://") else { return Ok(None) };
    let (name, instance) = (gateway.gateway.clone(), instance.to_owned());
    let Some(id) = ResourceId::parse(&instance, Type::Machine) else {
        return Ok(Some(Gateway { name, zone: None, nic: None, instance }));
    };
    let Some(machine) = client.machine(&id).await? else { return Ok(None) };
    let Some(id) = nic_of(&machine, gateway.nic.as_deref()) else { return Ok(None) };
    let interface = client.interface(&id).await?;
    let zone = machine["zones"][0].as_str().map(str::to_owned);
    Ok(interface.map(|interface| Gateway { name, zone, nic: Some((id, interface)), instance }))
}

/// A machine's NIC: by id, name or index; the primary one if nothing is said.
fn nic_of(machine: &Value, wanted: Option<&str>) -> Option<ResourceId> {
    let nics = machine["properties"]["networkProfile"]["networkInterfaces"].as_array()?;
    let id_of = |nic: &Value| ResourceId::parse(nic["id"].as_str()?, Type::Interface);
    let is_primary = |nic: &&Value| nic["properties"]["primary"] == serde_json::json!(true);
    let Some(wanted) = wanted else {
        // One that is alone needs no mark.
        return nics.iter().find(is_primary).or_else(|| nics.first()).and_then(id_of);
    };
    if let Ok(index) = wanted.parse::<usize>() {
        return nics.get(index).and_then(id_of);
    }
    nics.iter().filter_map(id_of).find(|id| id.is(wanted) || id.name.eq_ignore_ascii_case(wanted))
}

/// The zone that an address can be attached in: of one that has several or none, any.
fn zone_of(address: &Value) -> Option<String> {
    match &address["zones"].as_array()?[..] {
        [zone] => zone.as_str().map(str::to_owned),
        _ => None,
    }
}

/// `None`: it has no address, which only dynamic ones can lack.
fn public_address(client: &Client, id: &ResourceId, read: &Value, interfaces: &Interfaces) -> Option<PublicAddress> {
    let name = configuration_name(id);
    let bound = interfaces.iter().filter_map(|(nic, interface)| {
        let own = interface.named(&name).filter(|it| client.associate == Associate::Nic && !it.is_primary())?;
        let is_free = own.public_id().is_none_or(|found| id.is(found));
        Some((NicId::from(nic), own.private().filter(|_| is_free)?))
    });
    Some(PublicAddress {
        id: AddressId::from(id),
        address: ip_of(read)?,
        zone: zone_of(read),
        has_tags: true,
        claim: tag::claim(read),
        token: tag::get(read, tag::ALLOCATED).map(str::to_owned),
        attachment: attachment(id, read, interfaces),
        private: bound.collect(),
        version: etag(read).to_owned(),
    })
}

/// Where an address is attached. The NICs count more than what the address says: that can be older.
fn attachment(id: &ResourceId, read: &Value, interfaces: &Interfaces) -> Option<Attachment> {
    for (nic, interface) in interfaces {
        if let Some(found) = interface.with_public(id) {
            return Some(Attachment { nic: Some(NicId::from(nic)), private: found.private(), id: None });
        }
    }
    let user = attached_to(read)?;
    let Some((nic, name)) = ResourceId::parse_configuration(user) else {
        return Some(Attachment { nic: None, private: None, id: Some(user.to_owned()) });
    };
    let private = interfaces.get(&nic).and_then(|it| it.named(name)?.private());
    Some(Attachment { nic: Some(NicId::from(&nic)), private, id: None })
}

fn nic(client: &Client, gateway: &Gateway, addresses: &[PublicAddress]) -> Nic {
    let Some((id, interface)) = &gateway.nic else {
        return Nic {
            id: NicId(gateway.instance.clone()),
            gateway: gateway.name.clone(),
            zone: None,
            capacity: Capacity::default(),
            associate: client.associate,
            is_busy: false,
            is_ready: true,
            missing: vec!["a NIC of its own: machines of a uniform scale set have none".to_owned()],
            version: String::new(),
        };
    };
    let nic = NicId::from(id);
    let (mut capacity, mut missing) = (Capacity::default(), Vec::new());
    match client.associate {
        Associate::Nic => {
            let ours = |is_ipv6: bool| {
                let bound = addresses.iter().filter(|it| it.private.contains_key(&nic));
                bound.filter(|it| it.address.is_ipv6() == is_ipv6).count()
            };
            let others = interface.configurations().count().saturating_sub(ours(false));
            capacity.v4 = MAX_CONFIGURATIONS.saturating_sub(others);
            // One private IPv6 address at most.
            let others = interface.configurations().filter(IpConfiguration::is_ipv6).count().saturating_sub(ours(true));
            capacity.v6 = 1_usize.saturating_sub(others);
        }
        Associate::Instance => {
            let found = interface.primary().and_then(|it| it.public_id());
            let is_ours =
                |found: &str| addresses.iter().any(|it| it.claim.is_some() && it.id.0.eq_ignore_ascii_case(found));
            if found.is_none_or(is_ours) {
                // The primary one is always of IPv4.
                capacity.v4 = 1;
            } else {
                missing.push("a primary IP configuration without somebody else's public address".to_owned());
            }
        }
    }
    Nic {
        id: nic,
        gateway: gateway.name.clone(),
        zone: gateway.zone.clone(),
        capacity,
        associate: client.associate,
        is_busy: is_busy(&interface.0),
        is_ready: interface.is_forwarding(),
        missing,
        version: etag(&interface.0).to_owned(),
    }
}

/// Binds the primary private address of each NIC to each claimed address. What nobody has claimed is there by somebody else's hand.
fn bind_primaries(
    addresses: &mut [PublicAddress],
    nics: &[Nic],
    interfaces: &Interfaces,
    of_gateways: &BTreeSet<ResourceId>,
) {
    let has_room = |id: &NicId| nics.iter().any(|nic| nic.id == *id && nic.capacity.v4 > 0);
    let primary = |(id, interface): (&ResourceId, &Interface)| Some((NicId::from(id), interface.primary()?.private()?));
    let of_gateways = interfaces.iter().filter(|(id, _)| of_gateways.contains(*id));
    let primaries: BTreeMap<_, _> = of_gateways.filter_map(primary).filter(|(id, _)| has_room(id)).collect();
    for address in addresses.iter_mut().filter(|address| address.claim.is_some() && address.address.is_ipv4()) {
        address.private = primaries.clone();
    }
}
