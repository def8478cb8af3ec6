//! Resources by id, as the API shows them.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;

use ipnet::IpNet;
use serde_json::{Value, json};

use super::{GROUP, SUBSCRIPTION};

const NULL: &Value = &Value::Null;

/// Id of a resource.
pub(super) fn id(kind: &str, name: &str) -> String {
    format!("/subscriptions/{SUBSCRIPTION}/resourceGroups/{GROUP}/providers/{kind}/{name}")
}

pub(super) fn subnet_id(zone: u8) -> String {
    format!("{}/subnets/gateways-{zone}", id("Microsoft.Network/virtualNetworks", "edge"))
}

/// The resources.
#[derive(Clone)]
pub(super) struct State {
    /// By id in lower case.
    resources: BTreeMap<String, Value>,
    version: u64,
    /// Last octet of the next public address.
    next_public: u8,
}

impl State {
    pub(super) fn new() -> Self {
        let mut state = Self { resources: BTreeMap::new(), version: 0, next_public: 100 };
        for zone in 1..=3 {
            let id = subnet_id(zone);
            let prefixes = [format!("10.0.{zone}.0/24"), format!("fd00:0:0:{zone}::/64")];
            let properties = json!({ "provisioningState": "Succeeded", "addressPrefixes": prefixes });
            let version = state.next_version();
            let name = format!("gateways-{zone}");
            state.put(&id, json!({ "id": id, "name": name, "etag": version, "properties": properties }));
        }
        state
    }

    pub(super) fn get(&self, id: &str) -> Option<&Value> {
        self.resources.get(&id.to_ascii_lowercase())
    }

    /// A resource to change; one that there isn't is made.
    pub(super) fn get_mut(&mut self, id: &str) -> &mut Value {
        self.resources.entry(id.to_ascii_lowercase()).or_default()
    }

    pub(super) fn put(&mut self, id: &str, value: Value) {
        self.resources.insert(id.to_ascii_lowercase(), value);
    }

    pub(super) fn remove(&mut self, id: &str) {
        self.resources.remove(&id.to_ascii_lowercase());
    }

    pub(super) fn next_version(&mut self) -> String {
        self.version += 1;
        format!("W/\"00000000-0000-4000-8000-{:012}\"", self.version)
    }

    pub(super) fn next_public(&mut self, is_ipv6: bool) -> IpAddr {
        self.next_public += 1;
        let last = self.next_public;
        if is_ipv6 { [0x2001, 0xdb8, 0, 0, 0, 0, 0, u16::from(last)].into() } else { [203, 0, 113, last].into() }
    }

    fn of_kind(&self, kind: &str) -> impl Iterator<Item = &Value> {
        self.resources.values().filter(move |value| value["type"] == kind)
    }

    /// Public addresses.
    pub(super) fn addresses(&self) -> impl Iterator<Item = &Value> {
        self.of_kind("Microsoft.Network/publicIPAddresses")
    }

    /// Network interfaces.
    pub(super) fn interfaces(&self) -> impl Iterator<Item = &Value> {
        self.of_kind("Microsoft.Network/networkInterfaces")
    }

    /// IP configurations with their interfaces.
    pub(super) fn configurations(&self) -> impl Iterator<Item = (&Value, &Value)> {
        self.interfaces().flat_map(|nic| {
            let all = nic["properties"]["ipConfigurations"].as_array();
            all.into_iter().flatten().map(move |configuration| (nic, configuration))
        })
    }

    /// The address of a public address by id.
    pub(super) fn ip_of(&self, id: &str) -> Option<IpAddr> {
        self.get(id)?["properties"]["ipAddress"].as_str()?.parse().ok()
    }

    /// Id of what a public address is attached to.
    pub(super) fn user_of(&self, address: &str) -> Option<String> {
        let is_here = |(_, configuration): &(&Value, &Value)| {
            let found = configuration["properties"]["publicIPAddress"]["id"].as_str();
            found.is_some_and(|found| found.eq_ignore_ascii_case(address))
        };
        let text = |value: &Value| value.as_str().map(str::to_owned);
        if let Some((_, configuration)) = self.configurations().find(is_here) {
            return text(&configuration["id"]);
        }
        let properties = self.get(address).map_or(NULL, |it| &it["properties"]);
        text(&properties["ipConfiguration"]["id"]).or_else(|| text(&properties["natGateway"]["id"]))
    }

    /// A public address as the API shows it.
    pub(super) fn shown(&self, address: &Value) -> Value {
        let mut shown = address.clone();
        let id = address["id"].as_str().unwrap_or_default();
        if shown["properties"]["natGateway"].is_null()
            && let Some(user) = self.user_of(id)
        {
            shown["properties"]["ipConfiguration"] = json!({ "id": user });
        }
        shown
    }

    /// Prefixes of a subnet.
    pub(super) fn prefixes(&self, subnet: &str) -> Vec<IpNet> {
        let prefixes = self.get(subnet).map_or(NULL, |it| &it["properties"]["addressPrefixes"]);
        prefixes.as_array().into_iter().flatten().filter_map(|it| it.as_str()?.parse().ok()).collect()
    }

    /// Private addresses that are in use.
    pub(super) fn private(&self) -> BTreeSet<IpAddr> {
        let of = |(_, it): (&Value, &Value)| it["properties"]["privateIPAddress"].as_str()?.parse().ok();
        self.configurations().filter_map(of).collect()
    }

    /// The next free private address of a subnet.
    pub(super) fn free_private(&self, subnet: &str, is_ipv6: bool, taken: &BTreeSet<IpAddr>) -> Option<IpAddr> {
        let used = self.private();
        let prefix = self.prefixes(subnet).into_iter().find(|it| it.network().is_ipv6() == is_ipv6)?;
        let last = prefix.broadcast();
        let is_free = |it: &IpAddr| *it != last && !used.contains(it) && !taken.contains(it);
        // The first four are Azure's. `hosts` leaves out the network's own address of IPv4.
        prefix.hosts().skip(if is_ipv6 { 4 } else { 3 }).find(is_free)
    }
}
