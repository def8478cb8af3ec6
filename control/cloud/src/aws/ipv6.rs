//! IPv6 addresses: listed in the pool, assigned to an ENI as they are. They have no tags: one that is assigned to an ENI of a gateway
//! is ours, one elsewhere in the VPC is somebody else's.

use std::collections::BTreeSet;
use std::net::IpAddr;

use ipnet::IpNet;

use super::query::{list, one};
use super::reply::NetworkInterface;
use super::{ASSIGN_IPV6, Aws, UNASSIGN_IPV6, describe};
use crate::error::{CloudError, ErrorKind};
use crate::provider::{AddressId, Attachment, Binding, GatewayNic, Nic, NicId, PublicAddress};

/// The addresses of these prefixes, and where they are assigned.
pub(super) async fn observe(
    aws: &Aws,
    prefixes: &[IpNet],
    of_gateways: &[(&GatewayNic, &NetworkInterface)],
) -> Result<Vec<PublicAddress>, CloudError> {
    let addresses: Vec<IpAddr> = prefixes.iter().flat_map(IpNet::hosts).filter(IpAddr::is_ipv6).collect();
    let texts: Vec<String> = addresses.iter().map(IpAddr::to_string).collect();
    let mut interfaces = Vec::new();
    for some in texts.chunks(describe::MAX_VALUES) {
        let values = some.iter().map(String::as_str).collect();
        interfaces.extend(describe::filtered(aws, "ipv6-addresses.ipv6-address", values).await?);
    }
    let gateways: BTreeSet<NicId> = of_gateways.iter().map(|(_, it)| NicId(it.network_interface_id.clone())).collect();
    Ok(addresses.into_iter().map(|address| public_address(address, &interfaces, &gateways)).collect())
}

fn public_address(address: IpAddr, interfaces: &[NetworkInterface], gateways: &BTreeSet<NicId>) -> PublicAddress {
    let at = interfaces.iter().find(|interface| interface.has_ipv6(address));
    let nic = at.map(|interface| NicId(interface.network_interface_id.clone()));
    PublicAddress {
        id: AddressId(address.to_string()),
        address,
        zone: None,
        has_tags: false,
        claim: None,
        token: None,
        attachment: nic.map(|nic| Attachment { nic: Some(nic), private: Some(address), id: None }),
        // It is its own private address wherever it is assigned.
        private: gateways.iter().map(|nic| (nic.clone(), address)).collect(),
        version: String::new(),
    }
}

pub(super) async fn attach(aws: &Aws, nic: &Nic, from: Option<&NicId>, bindings: &[Binding]) -> Result<(), CloudError> {
    for binding in bindings {
        let text = binding.private.to_string();
        let at = describe::filtered(aws, "ipv6-addresses.ipv6-address", vec![text.as_str()]).await?;
        match at.first().map(|interface| interface.network_interface_id.as_str()) {
            Some(id) if *id == *nic.id.0 => continue,
            Some(id) if from.is_some_and(|from| *from.0 == *id) => unassign(aws, id, vec![text.clone()]).await?,
            Some(id) => {
                let message = format!("{text} is assigned to {id}");
                return Err(CloudError::new(ErrorKind::InUse, ASSIGN_IPV6.name, "InUse", &message));
            }
            None => {}
        }
        let mut parameters = vec![one("NetworkInterfaceId", nic.id.0.as_str())];
        parameters.extend(list("Ipv6Addresses", [text]));
        aws.query.send(ASSIGN_IPV6, &parameters).await?;
    }
    Ok(())
}

pub(super) async fn detach(aws: &Aws, from: &NicId, addresses: &[PublicAddress]) -> Result<(), CloudError> {
    if addresses.is_empty() {
        return Ok(());
    }
    let interface = match describe::interface(aws, from).await {
        Err(error) if error.kind == ErrorKind::NotFound => return Ok(()),
        interface => interface?,
    };
    let assigned = addresses.iter().map(|address| address.address).filter(|address| interface.has_ipv6(*address));
    let assigned: Vec<String> = assigned.map(|address| address.to_string()).collect();
    if assigned.is_empty() { Ok(()) } else { unassign(aws, &from.0, assigned).await }
}

async fn unassign(aws: &Aws, nic: &str, addresses: Vec<String>) -> Result<(), CloudError> {
    let mut parameters = vec![one("NetworkInterfaceId", nic)];
    parameters.extend(list("Ipv6Addresses", addresses));
    aws.query.send(UNASSIGN_IPV6, &parameters).await.map(drop)
}
