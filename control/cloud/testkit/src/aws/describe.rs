//! Actions that read.

use std::collections::BTreeMap;
use std::net::IpAddr;

use super::state::{Eip, Eni, REGION, State, TYPES};
use super::xml::{element, set};
use super::{Parameters, Refusal, refuse};

type Read = fn(&State, &Parameters) -> Result<String, Refusal>;

/// Items of a page.
const PAGE: usize = 5;

pub(super) fn action(name: &str) -> Option<Read> {
    Some(match name {
        "DescribeAddresses" => addresses,
        "DescribeNetworkInterfaces" => interfaces,
        "DescribeInstances" => instances,
        "DescribeInstanceTypes" => types,
        "DescribeSubnets" => subnets,
        _ => return None,
    })
}

/// Refuses parameters that the action doesn't have.
pub(super) fn check(action: &str, parameters: &Parameters) -> Result<(), Refusal> {
    let own: &[&str] = match action {
        "DescribeAddresses" => &["AllocationId", "PublicIp"],
        "DescribeNetworkInterfaces" => &["NetworkInterfaceId", "NextToken", "MaxResults"],
        "DescribeInstances" => &["InstanceId", "NextToken", "MaxResults"],
        "DescribeInstanceTypes" => &["InstanceType", "NextToken", "MaxResults"],
        _ => &["SubnetId", "NextToken", "MaxResults"],
    };
    let is_known = |name: &String| {
        let first = name.split('.').next().unwrap_or_default();
        ["Action", "Version", "Filter", "DryRun"].contains(&first) || own.contains(&first)
    };
    match parameters.keys().find(|name| !is_known(name)) {
        Some(name) => Err(refuse("UnknownParameter", format!("The parameter {name} is not recognized"))),
        None => Ok(()),
    }
}

/// Values of `NAME.1`, `NAME.2`, ..
pub(super) fn list(parameters: &Parameters, name: &str) -> Vec<String> {
    (1..).map_while(|i| parameters.get(&format!("{name}.{i}")).cloned()).collect()
}

fn filters(parameters: &Parameters) -> Vec<(String, Vec<String>)> {
    let filter = |i: u32| {
        let name = parameters.get(&format!("Filter.{i}.Name"))?.clone();
        Some((name, list(parameters, &format!("Filter.{i}.Value"))))
    };
    (1..).map_while(filter).collect()
}

/// Whether a value is as a filter has it: `*` is any text, `?` any character, and what follows a backslash is meant as it is.
fn is_like(value: &str, pattern: &str) -> bool {
    let mut pattern = pattern.chars();
    match (pattern.next(), value.chars().next()) {
        (None, first) => first.is_none(),
        (Some('*'), _) => value
            .char_indices()
            .map(|(at, _)| at)
            .chain([value.len()])
            .any(|at| is_like(&value[at..], pattern.as_str())),
        (Some(_), None) => false,
        (Some(wanted), Some(first)) => {
            let is_same = match wanted {
                '?' => true,
                '\\' => pattern.next() == Some(first),
                wanted => wanted == first,
            };
            is_same && is_like(&value[first.len_utf8()..], pattern.as_str())
        }
    }
}

/// Whether all filters match; an unknown one is an error.
fn matches(filters: &[(String, Vec<String>)], values: impl Fn(&str) -> Option<Vec<String>>) -> Result<bool, Refusal> {
    for (name, wanted) in filters {
        let unknown = || refuse("InvalidParameterValue", format!("The filter '{name}' is invalid"));
        let has = values(name).ok_or_else(unknown)?;
        if !wanted.iter().any(|pattern| has.iter().any(|value| is_like(value, pattern))) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// The items of a page, and the token of the next one.
fn page(parameters: &Parameters, all: Vec<String>) -> (Vec<String>, String) {
    let start: usize = parameters.get("NextToken").and_then(|token| token.parse().ok()).unwrap_or_default();
    let next = (start + PAGE < all.len()).then(|| element("nextToken", &(start + PAGE).to_string()));
    (all.into_iter().skip(start).take(PAGE).collect(), next.unwrap_or_default())
}

fn tag_set(tags: &BTreeMap<String, String>) -> String {
    set("tagSet", tags.iter().map(|(key, value)| format!("{}{}", element("key", key), element("value", value))))
}

fn addresses(state: &State, parameters: &Parameters) -> Result<String, Refusal> {
    let ids = list(parameters, "AllocationId");
    if let Some(id) = ids.iter().find(|id| !state.eips.contains_key(*id)) {
        return Err(refuse("InvalidAllocationID.NotFound", format!("The allocation ID '{id}' does not exist")));
    }
    let filters = filters(parameters);
    let mut items = Vec::new();
    for (id, eip) in state.eips.iter().filter(|(id, _)| ids.is_empty() || ids.contains(id)) {
        let values = |name: &str| match name {
            "allocation-id" => Some(vec![id.clone()]),
            "network-interface-id" => Some(eip.association.iter().map(|it| it.eni.clone()).collect()),
            "tag-key" => Some(eip.tags.keys().cloned().collect()),
            _ => Some(eip.tags.get(name.strip_prefix("tag:")?).cloned().into_iter().collect()),
        };
        if matches(&filters, values)? {
            items.push(address(state, id, eip));
        }
    }
    Ok(set("addressesSet", items))
}

fn address(state: &State, id: &str, eip: &Eip) -> String {
    let mut text = element("publicIp", &eip.public.to_string());
    text += &element("allocationId", id);
    text += &element("domain", "vpc");
    if let Some(association) = &eip.association {
        text += &element("associationId", &association.id);
        text += &element("networkInterfaceId", &association.eni);
        text += &element("privateIpAddress", &association.private.to_string());
        text += &element("instanceId", state.enis.get(&association.eni).map_or("", |eni| &eni.instance));
    }
    text += &tag_set(&eip.tags);
    text + &element("networkBorderGroup", &eip.group)
}

fn interfaces(state: &State, parameters: &Parameters) -> Result<String, Refusal> {
    let ids = list(parameters, "NetworkInterfaceId");
    if let Some(id) = ids.iter().find(|id| !state.enis.contains_key(*id)) {
        return Err(refuse(
            "InvalidNetworkInterfaceID.NotFound",
            format!("The networkInterface ID '{id}' does not exist"),
        ));
    }
    let filters = filters(parameters);
    let mut items = Vec::new();
    for (id, eni) in state.enis.iter().filter(|(id, _)| ids.is_empty() || ids.contains(id)) {
        let values = |name: &str| match name {
            "attachment.instance-id" => Some(vec![eni.instance.clone()]),
            "network-interface-id" => Some(vec![id.clone()]),
            "ipv6-addresses.ipv6-address" => Some(eni.ipv6.iter().map(IpAddr::to_string).collect()),
            _ => None,
        };
        if matches(&filters, values)? {
            items.push(interface(state, id, eni));
        }
    }
    let (items, next) = page(parameters, items);
    Ok(set("networkInterfaceSet", items) + &next)
}

fn interface(state: &State, id: &str, eni: &Eni) -> String {
    let private = eni.private.iter().enumerate().map(|(i, private)| {
        let association = state
            .eips
            .iter()
            .find(|(_, eip)| eip.association.as_ref().is_some_and(|it| it.eni == id && it.private == *private));
        let association = association.map_or_else(String::new, |(allocation, eip)| {
            let ids = element("publicIp", &eip.public.to_string()) + &element("allocationId", allocation);
            format!("<association>{ids}</association>")
        });
        let is_primary = if i == 0 { "true" } else { "false" };
        element("privateIpAddress", &private.to_string()) + &element("primary", is_primary) + &association
    });
    let attachment =
        element("instanceId", &eni.instance) + &element("deviceIndex", "0") + &element("status", "attached");
    [
        element("networkInterfaceId", id),
        element("subnetId", &eni.subnet),
        element("vpcId", "vpc-1"),
        element("availabilityZone", &eni.zone),
        element("status", "in-use"),
        element("privateIpAddress", &eni.private[0].to_string()),
        element("sourceDestCheck", if eni.source_dest_check { "true" } else { "false" }),
        format!("<attachment>{attachment}</attachment>"),
        set("privateIpAddressesSet", private),
        prefixes("ipv4Prefix", eni, false),
        prefixes("ipv6Prefix", eni, true),
        set("ipv6AddressesSet", eni.ipv6.iter().map(|address| element("ipv6Address", &address.to_string()))),
    ]
    .concat()
}

fn prefixes(name: &str, eni: &Eni, is_ipv6: bool) -> String {
    let of_family = eni.prefixes.iter().filter(|prefix| prefix.addr().is_ipv6() == is_ipv6);
    set(&format!("{name}Set"), of_family.map(|prefix| element(name, &prefix.to_string())))
}

fn instances(state: &State, parameters: &Parameters) -> Result<String, Refusal> {
    let filters = filters(parameters);
    let mut items = Vec::new();
    for (id, kind) in &state.instances {
        let values = |name: &str| (name == "instance-id").then(|| vec![id.clone()]);
        if matches(&filters, values)? {
            let instance = element("instanceId", id) + &element("instanceType", kind);
            items.push(element("reservationId", "r-1") + &set("instancesSet", [instance]));
        }
    }
    let (items, next) = page(parameters, items);
    Ok(set("reservationSet", items) + &next)
}

fn types(_: &State, parameters: &Parameters) -> Result<String, Refusal> {
    let mut items = Vec::new();
    for name in list(parameters, "InstanceType") {
        let known = TYPES.iter().find(|(known, _)| *known == name);
        let unknown =
            || refuse("InvalidInstanceType", format!("The following supplied instance types do not exist: [{name}]"));
        let (_, limit) = known.ok_or_else(unknown)?;
        let info = element("maximumNetworkInterfaces", "4")
            + &element("ipv4AddressesPerInterface", &limit.to_string())
            + &element("ipv6AddressesPerInterface", &limit.to_string());
        items.push(element("instanceType", &name) + &format!("<networkInfo>{info}</networkInfo>"));
    }
    Ok(set("instanceTypeSet", items))
}

fn subnets(state: &State, parameters: &Parameters) -> Result<String, Refusal> {
    let mut items = Vec::new();
    for id in list(parameters, "SubnetId") {
        let missing = || refuse("InvalidSubnetID.NotFound", format!("The subnet ID '{id}' does not exist"));
        let net = state.subnets.get(&id).ok_or_else(missing)?;
        items.push(element("subnetId", &id) + &element("cidrBlock", &net.to_string()) + &element("ownerId", REGION));
    }
    Ok(set("subnetSet", items))
}
