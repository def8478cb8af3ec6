//! Changes of Elastic IP addresses: claims, associations, allocation.

use super::query::{filters, list, one, tags as tag_parameters};
use super::reply::{Address, DescribeAddresses, NetworkInterface};
use super::{
    ALLOCATE, ASSOCIATE, Aws, CREATE_TAGS, DELETE_TAGS, DESCRIBE_ADDRESSES, DISASSOCIATE, RELEASE, describe, ipv6,
    tags, unprepare,
};
use crate::error::{CloudError, ErrorKind};
use crate::provider::{Allocation, Associate, Binding, Claim, Nic, NicId, PublicAddress};

pub(super) async fn claim(aws: &Aws, address: &PublicAddress, claim: &Claim) -> Result<(), CloudError> {
    if !address.has_tags {
        return Ok(());
    }
    let before = current(aws, address).await?;
    check_claimable(&before, claim, address)?;
    if tags::claim(&before).as_ref() != Some(claim) {
        let mut parameters = list("ResourceId", [address.id.0.as_str()]);
        let values = [(tags::CLUSTER, Some(claim.cluster.as_str())), (tags::VIP, Some(claim.owner.as_str()))];
        parameters.extend(tag_parameters("Tag", values));
        // Once: by another attempt, another cluster may have claimed it, and no condition of the request says that it is still free.
        aws.query.send(CREATE_TAGS.once(), &parameters).await?;
        // Another cluster may have written in between: then its tags replaced these, or these replaced its.
        check_claimable(&current(aws, address).await?, claim, address)?;
    }
    Ok(())
}

/// An address as it is now.
async fn current(aws: &Aws, address: &PublicAddress) -> Result<Address, CloudError> {
    let mut all = describe::addresses(aws, std::slice::from_ref(address)).await?;
    all.remove(&address.id).ok_or_else(|| missing(address))
}

fn missing(address: &PublicAddress) -> CloudError {
    let text = format!("{} doesn't exist any more", address.address);
    CloudError::new(ErrorKind::NotFound, DESCRIBE_ADDRESSES.name, "InvalidAllocationID.NotFound", &text)
}

fn in_use(address: &PublicAddress, by: &str) -> CloudError {
    let text = format!("{} is in use by {by}", address.address);
    CloudError::new(ErrorKind::InUse, ASSOCIATE.name, "InUse", &text)
}

/// Fails if another cluster has claimed the address, or if it is associated without a claim and without a private address of ours.
fn check_claimable(current: &Address, claim: &Claim, address: &PublicAddress) -> Result<(), CloudError> {
    match tags::claim(current) {
        Some(other) if other.cluster != claim.cluster => {
            Err(in_use(address, &format!("the cluster {}", other.cluster)))
        }
        Some(_) => Ok(()),
        None if current.association_id.is_none() || is_bound(current) => Ok(()),
        None => Err(in_use(address, "somebody else")),
    }
}

/// Whether it is associated where a private address is bound to it.
fn is_bound(current: &Address) -> bool {
    let nic = current.network_interface_id.clone().map(NicId);
    let bound = nic.and_then(|nic| tags::private(current).get(&nic).copied());
    bound.is_some() && bound == current.private_ip_address
}

/// Removes the claim, and the private addresses with it. Those that can't be unassigned keep their tags: so they are known to be
/// vipgate's when their ENI is a gateway's again, or the address is claimed again.
pub(super) async fn unclaim(aws: &Aws, address: &PublicAddress) -> Result<(), CloudError> {
    if !address.has_tags {
        return Ok(());
    }
    let current = match current(aws, address).await {
        Err(error) if error.kind == ErrorKind::NotFound => return Ok(()),
        current => current?,
    };
    if is_ours(aws, &current) {
        let left = unprepare::unbind(aws, &current).await?;
        let private = tags::private(&current).into_keys().filter(|nic| !left.contains(nic));
        let keys = [tags::CLUSTER, tags::VIP].map(str::to_owned).into_iter();
        let keys: Vec<String> = keys.chain(private.map(|nic| tags::private_key(&nic))).collect();
        // With their values: a claim that was written meanwhile stays.
        let values = keys.iter().filter_map(|key| Some((key.as_str(), Some(current.tag(key)?))));
        let mut parameters = list("ResourceId", [address.id.0.as_str()]);
        parameters.extend(tag_parameters("Tag", values));
        aws.query.send(DELETE_TAGS, &parameters).await?;
    }
    Ok(())
}

fn is_ours(aws: &Aws, current: &Address) -> bool {
    tags::claim(current).is_some_and(|claim| claim.cluster == aws.config.cluster)
}

/// Associates addresses with private ones of an ENI: free ones, and with `from` those that are associated there, too. Each is
/// looked at again before, so nothing is taken from anybody who was faster.
pub(super) async fn attach(aws: &Aws, nic: &Nic, from: Option<&NicId>, bindings: &[Binding]) -> Result<(), CloudError> {
    let (v6, v4): (Vec<Binding>, Vec<Binding>) =
        bindings.iter().cloned().partition(|binding| !binding.address.has_tags);
    ipv6::attach(aws, nic, from, &v6).await?;
    if v4.is_empty() {
        return Ok(());
    }
    let addresses: Vec<PublicAddress> = v4.iter().map(|binding| binding.address.clone()).collect();
    let (current, interface) = tokio::join!(describe::addresses(aws, &addresses), describe::interface(aws, &nic.id));
    let (current, interface) = (current?, interface?);
    let mut outcome = Ok(());
    for binding in &v4 {
        let one = match current.get(&binding.address.id) {
            Some(current) => associate(aws, &interface, from, binding, current).await,
            None => Err(missing(&binding.address)),
        };
        // One that can't be attached doesn't keep the others from it.
        outcome = outcome.and(one);
    }
    outcome
}

async fn associate(
    aws: &Aws,
    interface: &NetworkInterface,
    from: Option<&NicId>,
    binding: &Binding,
    current: &Address,
) -> Result<(), CloudError> {
    let address = &binding.address;
    if !is_ours(aws, current) {
        return Err(in_use(address, "somebody else: the claim is gone"));
    }
    let at = current.network_interface_id.as_deref();
    if at == Some(&*interface.network_interface_id) && current.private_ip_address == Some(binding.private) {
        return Ok(());
    }
    let is_associated = current.association_id.is_some();
    let is_at_from = from.is_some_and(|from| at == Some(&*from.0)) && (is_bound(current) || is_instance(aws));
    if is_associated && !is_at_from {
        return Err(in_use(address, at.unwrap_or("something that isn't an ENI")));
    }
    check_binding(aws, interface, binding, current)?;
    let Some(private) = interface.private(binding.private) else {
        let text = format!("{} isn't assigned to {}", binding.private, interface.network_interface_id);
        return Err(CloudError::new(ErrorKind::NotFound, ASSOCIATE.name, "NoPrivateAddress", &text));
    };
    let other = private.association.as_ref().and_then(|it| it.allocation_id.as_deref());
    if private.association.is_some() && other != Some(&*address.id.0) {
        let text = format!("{} has another public address already", binding.private);
        return Err(CloudError::new(ErrorKind::InUse, ASSOCIATE.name, "InUse", &text));
    }
    // Taking an address from its association is asked for once: by another attempt, somebody may have it.
    let operation = if is_associated { ASSOCIATE.once() } else { ASSOCIATE };
    let parameters = [
        one("AllocationId", address.id.0.as_str()),
        one("NetworkInterfaceId", interface.network_interface_id.as_str()),
        one("PrivateIpAddress", binding.private.to_string()),
        one("AllowReassociation", if is_associated { "true" } else { "false" }),
    ];
    match aws.query.send(operation, &parameters).await {
        Err(error) if error.kind == ErrorKind::InUse => {
            // Perhaps by a request of ours whose reply was lost.
            let now = describe::addresses(aws, std::slice::from_ref(address)).await?;
            let is_here = now.get(&address.id).is_some_and(|now| {
                now.network_interface_id.as_deref() == Some(&*interface.network_interface_id)
                    && now.private_ip_address == Some(binding.private)
            });
            if is_here { Ok(()) } else { Err(error) }
        }
        outcome => outcome.map(drop),
    }
}

/// Fails if the private address isn't bound to the address any more: it may be another one's by now.
fn check_binding(
    aws: &Aws,
    interface: &NetworkInterface,
    binding: &Binding,
    current: &Address,
) -> Result<(), CloudError> {
    let nic = NicId(interface.network_interface_id.clone());
    let bound = if is_instance(aws) { interface.primary() } else { tags::private(current).get(&nic).copied() };
    if bound == Some(binding.private) {
        return Ok(());
    }
    let text = format!("{} of {nic} isn't bound to {} any more", binding.private, binding.address.address);
    Err(CloudError::new(ErrorKind::Conflict, ASSOCIATE.name, "BindingChanged", &text))
}

fn is_instance(aws: &Aws) -> bool {
    aws.config.associate == Associate::Instance
}

/// Ends associations with an ENI, at the private addresses that are bound there: one that somebody made elsewhere at it stays. An
/// association has an id of its own: one that is made meanwhile isn't ended.
pub(super) async fn detach(aws: &Aws, from: &NicId, addresses: &[PublicAddress]) -> Result<(), CloudError> {
    let (v6, v4): (Vec<PublicAddress>, Vec<PublicAddress>) =
        addresses.iter().cloned().partition(|address| !address.has_tags);
    ipv6::detach(aws, from, &v6).await?;
    if v4.is_empty() {
        return Ok(());
    }
    let current = describe::addresses(aws, &v4).await?;
    let mut outcome = Ok(());
    for current in current.values().filter(|it| it.network_interface_id.as_deref() == Some(&*from.0)) {
        let is_made_here = is_ours(aws, current) && (is_bound(current) || is_instance(aws));
        let Some(association) = current.association_id.as_deref().filter(|_| is_made_here) else { continue };
        let one = match aws.query.send(DISASSOCIATE, &[one("AssociationId", association)]).await {
            Err(error) if error.kind == ErrorKind::NotFound => Ok(()),
            outcome => outcome.map(drop),
        };
        outcome = outcome.and(one);
    }
    outcome
}

pub(super) async fn allocate(aws: &Aws, allocation: &Allocation) -> Result<(), CloudError> {
    let by_token = filters([(format!("tag:{}", tags::ALLOCATED), vec![allocation.token.as_str()])]);
    let reply: DescribeAddresses = aws.query.call(DESCRIBE_ADDRESSES, &by_token).await?;
    let has_token = |address: &Address| address.tag(tags::ALLOCATED) == Some(&*allocation.token);
    if reply.addresses_set.items.iter().any(has_token) {
        return Ok(());
    }
    let own = [
        (tags::ALLOCATED, allocation.token.as_str()),
        (tags::CLUSTER, allocation.claim.cluster.as_str()),
        (tags::VIP, allocation.claim.owner.as_str()),
    ];
    let of_pool = allocation.tags.iter().map(|(key, value)| (key.as_str(), value.as_str()));
    let all = own.into_iter().chain(of_pool).map(|(key, value)| (key, Some(value)));
    let mut parameters = vec![one("Domain", "vpc"), one("TagSpecification.1.ResourceType", "elastic-ip")];
    parameters.extend(tag_parameters("TagSpecification.1.Tag", all));
    parameters.extend(allocation.zone.as_ref().map(|zone| one("NetworkBorderGroup", zone.as_str())));
    aws.query.send(ALLOCATE, &parameters).await.map(drop)
}

pub(super) async fn release(aws: &Aws, address: &PublicAddress) -> Result<(), CloudError> {
    let current = match current(aws, address).await {
        Err(error) if error.kind == ErrorKind::NotFound => return Ok(()),
        current => current?,
    };
    let is_unused = current.association_id.is_none() && tags::claim(&current).is_none();
    if !is_unused || current.tag(tags::ALLOCATED).is_none() {
        return Err(in_use(address, "somebody else"));
    }
    // Its tags go with it, and they alone say whose its private addresses are.
    if !unprepare::unbind(aws, &current).await?.is_empty() {
        return Err(in_use(address, "an ENI that still has its private address"));
    }
    match aws.query.send(RELEASE, &[one("AllocationId", address.id.0.as_str())]).await {
        Err(error) if error.kind == ErrorKind::NotFound => Ok(()),
        outcome => outcome.map(drop),
    }
}
