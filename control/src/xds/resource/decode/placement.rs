//! Decodes placement: shard maps, listed shards, and references to slots.

use std::collections::HashSet;
use std::sync::Arc;

use vipgate_dataplane::policy::members::MAX_GATEWAYS;
use vipgate_dataplane::policy::spec::{
    BlockSet, PrivateAddressSpec, SLOTS, ShardMapRef, ShardMapSpec, ShardSpec, SlotRef,
};
use vipgate_policy::compiler::MAX_BACKUPS;

use super::{ResourceError, check_len, check_name, field_error, parse_address, parse_text};
use crate::xds::proto;

pub(super) fn shard_map(name: &str, message: &proto::ShardMap) -> Result<ShardMapSpec, ResourceError> {
    check_name(&message.name, name)?;
    check_len(&message.gateways, "gateways", MAX_GATEWAYS)?;
    let mut gateways: Vec<Arc<str>> = Vec::with_capacity(message.gateways.len());
    let mut known = HashSet::new();
    for (i, gateway) in message.gateways.iter().enumerate() {
        let field = format!("gateways[{i}]");
        if gateway.is_empty() || !known.insert(gateway) {
            return Err(field_error(field, format!("`{gateway}` is empty or a duplicate")));
        }
        gateways.push(parse_text(&field, gateway)?);
    }
    let orders = message.orders.iter().enumerate().map(|(i, order)| gateway_order(i, order, &gateways));
    let orders: Vec<_> = orders.collect::<Result<_, _>>()?;
    let slot = |(i, order): (usize, &u32)| {
        u16::try_from(*order).map_err(|_| field_error(format!("slots[{i}]"), "is not the index of an order"))
    };
    let slots = message.slots.iter().enumerate().map(slot).collect::<Result<_, _>>()?;
    Ok(ShardMapSpec { name: parse_text("name", name)?, orders, slots })
}

fn gateway_order(i: usize, order: &proto::GatewayOrder, all: &[Arc<str>]) -> Result<Vec<Arc<str>>, ResourceError> {
    let field = format!("orders[{i}].gateways");
    check_len(&order.gateways, &field, MAX_BACKUPS + 1)?;
    let mut names: Vec<Arc<str>> = Vec::with_capacity(order.gateways.len());
    for at in &order.gateways {
        let name = usize::try_from(*at).ok().and_then(|at| all.get(at));
        match name {
            Some(name) if !names.contains(name) => names.push(name.clone()),
            _ => return Err(field_error(field, format!("{at} is not the index of a gateway, or a duplicate"))),
        }
    }
    Ok(names)
}

/// The private addresses of a VIP at gateways.
pub(super) fn private_addresses(message: &proto::Vip) -> Result<Vec<PrivateAddressSpec>, ResourceError> {
    check_len(&message.private_addresses, "private_addresses", MAX_GATEWAYS)?;
    let vip = parse_address("address", &message.address)?;
    let mut addresses: Vec<PrivateAddressSpec> = Vec::with_capacity(message.private_addresses.len());
    for (i, private) in message.private_addresses.iter().enumerate() {
        let field = |name: &str| format!("private_addresses[{i}].{name}");
        let gateway = parse_text(&field("gateway"), &private.gateway)?;
        let address = parse_address(&field("address"), &private.address)?;
        if address.is_ipv4() != vip.is_ipv4() {
            return Err(field_error(field("address"), format!("{address} is not of the family of {vip}")));
        }
        addresses.push(PrivateAddressSpec { gateway, address });
    }
    Ok(addresses)
}

/// The shard map of a VIP.
pub(super) fn shard_map_ref(message: &proto::Vip) -> Result<Option<ShardMapRef>, ResourceError> {
    let rotation = u16::try_from(message.rotation).ok().filter(|rotation| usize::from(*rotation) < SLOTS);
    let rotation = rotation.ok_or_else(|| field_error("rotation", format!("{} exceeds 1023", message.rotation)))?;
    if message.shard_map.is_empty() {
        return Ok(None);
    }
    Ok(Some(ShardMapRef { map: parse_text("shard_map", &message.shard_map)?, rotation }))
}

/// The slot of an endpoint.
pub(super) fn slot(message: &proto::Endpoint) -> Result<Option<SlotRef>, ResourceError> {
    let Some(slot) = message.slot.checked_sub(1) else { return Ok(None) };
    let slot = u16::try_from(slot).ok().filter(|slot| usize::from(*slot) < SLOTS);
    let slot = slot.ok_or_else(|| field_error("slot", format!("{} exceeds 1024", message.slot)))?;
    let map = (!message.shard_map.is_empty()).then(|| parse_text("shard_map", &message.shard_map)).transpose()?;
    Ok(Some(SlotRef { map, slot }))
}

/// Listed shards of a VIP.
pub(super) fn shards(messages: &[proto::Share]) -> Result<Vec<ShardSpec>, ResourceError> {
    let mut shards: Vec<ShardSpec> = Vec::with_capacity(messages.len());
    for (i, shard) in messages.iter().enumerate() {
        let field = |name: &str| format!("shares[{i}].{name}");
        if shard.gateway.is_empty() || shards.iter().any(|other| *other.gateway == *shard.gateway) {
            return Err(field_error(field("gateway"), format!("`{}` is empty or a duplicate", shard.gateway)));
        }
        let blocks = match shard.blocks.len() {
            0 => None,
            length => Some(shard.blocks.as_slice().try_into().map_err(|_| {
                field_error(field("blocks"), format!("has {length} bytes, expected {} or none", BlockSet::BYTES))
            })?),
        };
        shards.push(ShardSpec {
            gateway: parse_text(&field("gateway"), &shard.gateway)?,
            blocks: blocks.map(|bytes| Arc::new(BlockSet::from_bytes(bytes))),
            backups: backups(shard, &field("backups"))?,
        });
    }
    Ok(shards)
}

fn backups(shard: &proto::Share, field: &str) -> Result<Vec<Arc<str>>, ResourceError> {
    check_len(&shard.backups, field, MAX_BACKUPS)?;
    let mut backups: Vec<Arc<str>> = Vec::with_capacity(shard.backups.len());
    for (i, name) in shard.backups.iter().enumerate() {
        let field = format!("{field}[{i}]");
        if name.is_empty() || *name == shard.gateway || backups.iter().any(|other| **other == **name) {
            return Err(field_error(field, format!("`{name}` is empty, the shard's own gateway, or a duplicate")));
        }
        backups.push(parse_text(&field, name)?);
    }
    Ok(backups)
}
