//! Actions that change something.

use std::net::IpAddr;

use super::describe::list;
use super::state::{Association, Eip, Eni, State, TYPES};
use super::xml::element;
use super::{Parameters, Refusal, refuse};

/// Carries out an action.
type Run = fn(&mut State, &Parameters) -> Result<String, Refusal>;

const OK: &str = "<return>true</return>";

pub(super) fn act(state: &mut State, action: &str, parameters: &Parameters) -> Result<String, Refusal> {
    let (run, known): (Run, &[&str]) = match action {
        "CreateTags" => (create_tags, &["ResourceId", "Tag"]),
        "DeleteTags" => (delete_tags, &["ResourceId", "Tag"]),
        "AssociateAddress" => {
            (associate, &["AllocationId", "NetworkInterfaceId", "PrivateIpAddress", "AllowReassociation", "InstanceId"])
        }
        "DisassociateAddress" => (disassociate, &["AssociationId"]),
        "AssignPrivateIpAddresses" => {
            (assign, &["NetworkInterfaceId", "PrivateIpAddress", "AllowReassignment", "SecondaryPrivateIpAddressCount"])
        }
        "UnassignPrivateIpAddresses" => (unassign, &["NetworkInterfaceId", "PrivateIpAddress"]),
        "AssignIpv6Addresses" => (assign_ipv6, &["NetworkInterfaceId", "Ipv6Addresses", "Ipv6AddressCount"]),
        "UnassignIpv6Addresses" => (unassign_ipv6, &["NetworkInterfaceId", "Ipv6Addresses"]),
        "ModifyNetworkInterfaceAttribute" => (modify, &["NetworkInterfaceId", "SourceDestCheck"]),
        "AllocateAddress" => (allocate, &["Domain", "NetworkBorderGroup", "TagSpecification"]),
        "ReleaseAddress" => (release, &["AllocationId", "NetworkBorderGroup"]),
        _ => return Err(refuse("InvalidAction", format!("The action {action} is not valid for this web service"))),
    };
    let is_known = |name: &String| {
        let first = name.split('.').next().unwrap_or_default();
        ["Action", "Version", "DryRun"].contains(&first) || known.contains(&first)
    };
    match parameters.keys().find(|name| !is_known(name)) {
        Some(name) => Err(refuse("UnknownParameter", format!("The parameter {name} is not recognized"))),
        None => run(state, parameters),
    }
}

fn required<'a>(parameters: &'a Parameters, name: &str) -> Result<&'a str, Refusal> {
    let missing = || refuse("MissingParameter", format!("The request must contain the parameter {name}"));
    parameters.get(name).map(String::as_str).ok_or_else(missing)
}

fn eip<'a>(state: &'a mut State, id: &str) -> Result<&'a mut Eip, Refusal> {
    let missing = || refuse("InvalidAllocationID.NotFound", format!("The allocation ID '{id}' does not exist"));
    state.eips.get_mut(id).ok_or_else(missing)
}

fn eni<'a>(state: &'a mut State, parameters: &Parameters) -> Result<(String, &'a mut Eni), Refusal> {
    let id = required(parameters, "NetworkInterfaceId")?;
    let missing =
        || refuse("InvalidNetworkInterfaceID.NotFound", format!("The networkInterface ID '{id}' does not exist"));
    Ok((id.to_owned(), state.enis.get_mut(id).ok_or_else(missing)?))
}

fn address(text: &str) -> Result<IpAddr, Refusal> {
    text.parse().map_err(|_| refuse("InvalidParameterValue", format!("Invalid value '{text}' for an address")))
}

fn tags(parameters: &Parameters, prefix: &str) -> Vec<(String, Option<String>)> {
    let tag = |i: u32| {
        let key = parameters.get(&format!("{prefix}.{i}.Key"))?.clone();
        Some((key, parameters.get(&format!("{prefix}.{i}.Value")).cloned()))
    };
    (1..).map_while(tag).collect()
}

fn create_tags(state: &mut State, parameters: &Parameters) -> Result<String, Refusal> {
    for id in list(parameters, "ResourceId") {
        let eip = eip(state, &id)?;
        for (key, value) in tags(parameters, "Tag") {
            let value = value.unwrap_or_default();
            if value.chars().count() > 256 || key.starts_with("aws:") {
                return Err(refuse("InvalidParameterValue", "Tag value exceeds the maximum length of 256 characters"));
            }
            eip.tags.insert(key, value);
        }
    }
    Ok(OK.to_owned())
}

fn delete_tags(state: &mut State, parameters: &Parameters) -> Result<String, Refusal> {
    for id in list(parameters, "ResourceId") {
        let eip = eip(state, &id)?;
        for (key, value) in tags(parameters, "Tag") {
            if value.is_none() || eip.tags.get(&key) == value.as_ref() {
                eip.tags.remove(&key);
            }
        }
    }
    Ok(OK.to_owned())
}

fn associate(state: &mut State, parameters: &Parameters) -> Result<String, Refusal> {
    let allocation = required(parameters, "AllocationId")?.to_owned();
    let (id, interface) = eni(state, parameters)?;
    let private = match parameters.get("PrivateIpAddress") {
        Some(text) => address(text)?,
        None => interface.private[0],
    };
    if !interface.private.contains(&private) {
        return Err(refuse(
            "InvalidParameterValue",
            format!("The address {private} is not assigned to interface {id}"),
        ));
    }
    let is_forced = parameters.get("AllowReassociation").is_some_and(|text| text == "true");
    let current = eip(state, &allocation)?.association.clone();
    if let Some(current) = &current {
        if (&current.eni, current.private) == (&id, private) {
            return Ok(element("associationId", &current.id) + OK);
        }
        if !is_forced {
            let text = format!("resource {allocation} is already associated with associate-id {}", current.id);
            return Err(refuse("Resource.AlreadyAssociated", text));
        }
    }
    let is_here = |eip: &Eip| eip.association.as_ref().is_some_and(|it| it.eni == id && it.private == private);
    if let Some(other) = state.eips.values_mut().find(|eip| is_here(eip)) {
        if !is_forced {
            return Err(refuse("Resource.AlreadyAssociated", format!("resource {id} is already associated")));
        }
        other.association = None;
    }
    let association = state.next_id("eipassoc");
    eip(state, &allocation)?.association = Some(Association { id: association.clone(), eni: id, private });
    Ok(element("associationId", &association) + OK)
}

fn disassociate(state: &mut State, parameters: &Parameters) -> Result<String, Refusal> {
    let id = required(parameters, "AssociationId")?;
    let has_id = |eip: &&mut Eip| eip.association.as_ref().is_some_and(|association| association.id == id);
    let missing = || refuse("InvalidAssociationID.NotFound", format!("The association ID '{id}' does not exist"));
    state.eips.values_mut().find(has_id).ok_or_else(missing)?.association = None;
    Ok(OK.to_owned())
}

fn assign(state: &mut State, parameters: &Parameters) -> Result<String, Refusal> {
    let before = state.clone();
    let (id, interface) = eni(state, parameters)?;
    let limit = limit(&before, interface);
    let is_forced = parameters.get("AllowReassignment").is_some_and(|text| text == "true");
    for text in list(parameters, "PrivateIpAddress") {
        let private = address(&text)?;
        if !before.subnets[&interface.subnet].contains(&private) {
            let text = format!("Address {private} does not fall within the subnet's address range");
            return Err(refuse("InvalidParameterValue", text));
        }
        let is_elsewhere = before.enis.iter().any(|(other, it)| *other != id && it.has(private));
        if is_elsewhere && !is_forced {
            let text = format!("[{private}] is already assigned to another interface");
            return Err(refuse("InvalidParameterValue", text));
        }
        if !interface.private.contains(&private) {
            if interface.has(private) {
                let text = format!("{private} is in a prefix that is assigned to interface {id}");
                return Err(refuse("InvalidParameterValue", text));
            }
            if interface.used(false) >= limit {
                let text = format!("Number of private addresses will exceed limit for interface {id}");
                return Err(refuse("PrivateIpAddressLimitExceeded", text));
            }
            interface.private.push(private);
        }
    }
    Ok(OK.to_owned())
}

/// Private addresses per family that an interface can have.
fn limit(state: &State, interface: &Eni) -> usize {
    let kind = &state.instances[&interface.instance];
    TYPES.iter().find(|(name, _)| name == kind).map_or(1, |(_, limit)| *limit)
}

fn unassign(state: &mut State, parameters: &Parameters) -> Result<String, Refusal> {
    let (id, interface) = eni(state, parameters)?;
    let mut gone = Vec::new();
    for text in list(parameters, "PrivateIpAddress") {
        let private = address(&text)?;
        if !interface.private.iter().skip(1).any(|it| *it == private) {
            let text = format!("Some of the specified addresses are not assigned to interface {id}");
            return Err(refuse("InvalidParameterValue", text));
        }
        gone.push(private);
    }
    interface.private.retain(|private| !gone.contains(private));
    for eip in state.eips.values_mut() {
        if eip.association.as_ref().is_some_and(|it| it.eni == id && gone.contains(&it.private)) {
            eip.association = None;
        }
    }
    Ok(OK.to_owned())
}

fn assign_ipv6(state: &mut State, parameters: &Parameters) -> Result<String, Refusal> {
    let before = state.clone();
    let (id, interface) = eni(state, parameters)?;
    for text in list(parameters, "Ipv6Addresses") {
        let new = address(&text)?;
        if before.enis.iter().any(|(other, it)| *other != id && it.has(new)) {
            return Err(refuse("InvalidParameterValue", format!("{new} is already assigned to another interface")));
        }
        if !interface.ipv6.contains(&new) {
            if interface.used(true) >= limit(&before, interface) {
                let text = format!("Number of IPv6 addresses will exceed limit for interface {id}");
                return Err(refuse("PrivateIpAddressLimitExceeded", text));
            }
            interface.ipv6.push(new);
        }
    }
    Ok(element("networkInterfaceId", &id))
}

fn unassign_ipv6(state: &mut State, parameters: &Parameters) -> Result<String, Refusal> {
    let (id, interface) = eni(state, parameters)?;
    for text in list(parameters, "Ipv6Addresses") {
        let old = address(&text)?;
        if !interface.ipv6.contains(&old) {
            return Err(refuse("InvalidParameterValue", format!("{old} is not assigned to interface {id}")));
        }
        interface.ipv6.retain(|it| *it != old);
    }
    Ok(element("networkInterfaceId", &id))
}

fn modify(state: &mut State, parameters: &Parameters) -> Result<String, Refusal> {
    let value = required(parameters, "SourceDestCheck.Value")? == "true";
    eni(state, parameters)?.1.source_dest_check = value;
    Ok(OK.to_owned())
}

fn allocate(state: &mut State, parameters: &Parameters) -> Result<String, Refusal> {
    if state.eips.len() >= state.address_limit {
        return Err(refuse("AddressLimitExceeded", "The maximum number of addresses has been reached."));
    }
    // No address is given out twice.
    let last = u8::try_from(100 + state.allocated);
    let last = last.map_err(|_| refuse("InsufficientAddressCapacity", "There are not enough free addresses."))?;
    state.allocated += 1;
    let public = [192, 0, 2, last].into();
    let tags = tags(parameters, "TagSpecification.1.Tag");
    let tags = tags.into_iter().map(|(key, value)| (key, value.unwrap_or_default())).collect();
    let id = state.add_address(public, tags);
    Ok(element("publicIp", &public.to_string()) + &element("allocationId", &id) + &element("domain", "vpc"))
}

fn release(state: &mut State, parameters: &Parameters) -> Result<String, Refusal> {
    let id = required(parameters, "AllocationId")?;
    if eip(state, id)?.association.is_some() {
        return Err(refuse("InvalidIPAddress.InUse", format!("Address {id} is in use.")));
    }
    state.eips.remove(id);
    Ok(OK.to_owned())
}
