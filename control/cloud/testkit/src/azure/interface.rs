//! Changes of network interfaces.
//! <https://learn.microsoft.com/rest/api/virtualnetwork/network-interfaces/create-or-update>

use std::collections::BTreeSet;
use std::net::IpAddr;

use serde_json::{Value, json};

use super::error::Error;
use super::router::name_of;
use super::{FakeAzure, LOCATION, schema};
use crate::request::{RecordedRequest, Reply};

/// Fields that the API sets.
const READ_ONLY: &[&str] = &[
    "provisioningState",
    "resourceGuid",
    "macAddress",
    "primary",
    "virtualMachine",
    "vnetEncryptionSupported",
    "hostedWorkloads",
    "tapConfigurations",
];

impl FakeAzure {
    pub(super) fn put_interface(&mut self, request: &RecordedRequest) -> Result<Reply, Error> {
        let body = request.json();
        schema::interface(&body)?;
        schema::tags(&body)?;
        self.check_conditions(request)?;
        let former = self.state.get(&request.path).cloned();
        let former = former.ok_or_else(|| Error::bad("NotInFake", "The fake doesn't create interfaces."))?;
        if body["location"] != LOCATION {
            return Err(Error::bad("LocationRequired", "The location property is required for this definition."));
        }
        self.check_idle(request)?;
        let configurations = self.configurations_of(&body, &former)?;
        let (value, changed) = self.stored_interface(&body, &former, &configurations);
        let id = former["id"].as_str().unwrap_or_default().to_owned();
        let reply = value.clone();
        let headers = self.accept(request, &id, |state| {
            state.put(&id, value);
            // What is attached or detached is another version of the address, too.
            for address in changed {
                let version = state.next_version();
                state.get_mut(&address)["etag"] = json!(version);
            }
        });
        let mut reply = reply;
        reply["properties"]["provisioningState"] = json!("Updating");
        let reply = Reply::json(200, &reply);
        Ok(Reply { headers: [reply.headers.clone(), headers].concat(), ..reply })
    }

    /// The interface that a body makes, and the public addresses that come or go. What the body leaves out is gone, except what the
    /// API sets.
    fn stored_interface(&mut self, body: &Value, former: &Value, configurations: &[Value]) -> (Value, Vec<String>) {
        let version = self.state.next_version();
        let mut value = body.clone();
        for name in READ_ONLY {
            if let Some(properties) = value["properties"].as_object_mut() {
                properties.remove(*name);
                let kept = former["properties"].get(*name);
                properties.extend(kept.map(|kept| ((*name).to_owned(), kept.clone())));
            }
        }
        for name in ["id", "name", "type"] {
            value[name] = former[name].clone();
        }
        value["etag"] = json!(version);
        // Reset when left out.
        for name in ["enableIPForwarding", "enableAcceleratedNetworking"] {
            if value["properties"][name].is_null() {
                value["properties"][name] = json!(false);
            }
        }
        let public = |all: &[Value]| -> BTreeSet<String> {
            let id = |it: &Value| it["properties"]["publicIPAddress"]["id"].as_str().map(str::to_ascii_lowercase);
            all.iter().filter_map(id).collect()
        };
        let before = former["properties"]["ipConfigurations"].as_array().map_or(BTreeSet::new(), |all| public(all));
        let changed = before.symmetric_difference(&public(configurations)).cloned().collect();
        value["properties"]["ipConfigurations"] = json!(configurations);
        (value, changed)
    }

    /// The IP configurations that a body makes of those that there were.
    fn configurations_of(&self, body: &Value, former: &Value) -> Result<Vec<Value>, Error> {
        let none = Vec::new();
        let all = body["properties"]["ipConfigurations"].as_array().unwrap_or(&none);
        let before = former["properties"]["ipConfigurations"].as_array().unwrap_or(&none);
        check_set(all, self.max_configurations)?;
        let id = former["id"].as_str().unwrap_or_default();
        let others: BTreeSet<IpAddr> = {
            let own: BTreeSet<IpAddr> = before.iter().filter_map(private).collect();
            self.state.private().difference(&own).chain(&self.taken).copied().collect()
        };
        let mut used: BTreeSet<IpAddr> = all.iter().filter_map(private).collect();
        let mut made = Vec::new();
        for configuration in all {
            let name = configuration["name"].as_str().unwrap_or_default();
            let own = format!("{id}/ipConfigurations/{name}");
            let kept = before.iter().find(|it| it["name"].as_str().is_some_and(|it| it.eq_ignore_ascii_case(name)));
            let private = self.private_of(configuration, kept, &own, &others, &mut used)?;
            self.check_public(configuration, &own)?;
            let mut configuration = configuration.clone();
            configuration["id"] = json!(own);
            configuration["type"] = json!("Microsoft.Network/networkInterfaces/ipConfigurations");
            configuration["properties"]["privateIPAddress"] = json!(private);
            configuration["properties"]["provisioningState"] = json!("Succeeded");
            made.push(configuration);
        }
        Ok(made)
    }

    /// The private address of an IP configuration.
    fn private_of(
        &self,
        configuration: &Value,
        kept: Option<&Value>,
        id: &str,
        others: &BTreeSet<IpAddr>,
        used: &mut BTreeSet<IpAddr>,
    ) -> Result<IpAddr, Error> {
        let properties = &configuration["properties"];
        let subnet = properties["subnet"]["id"].as_str().unwrap_or_default();
        let prefixes = self.state.prefixes(subnet);
        if prefixes.is_empty() {
            let text = format!("Resource {subnet} referenced by resource {id} was not found.");
            return Err(Error::bad("InvalidResourceReference", &text));
        }
        let is_ipv6 = properties["privateIPAddressVersion"] == "IPv6";
        let wanted = private(configuration);
        if properties["privateIPAllocationMethod"] != "Static" {
            // A dynamic one stays as long as its IP configuration.
            if let Some(kept) = kept.and_then(private) {
                return Ok(kept);
            }
            let taken = others.union(used).copied().collect();
            let free = self.state.free_private(subnet, is_ipv6, &taken);
            let free = free.ok_or_else(|| Error::bad("SubnetIsFull", "Subnet does not have enough capacity."))?;
            used.insert(free);
            return Ok(free);
        }
        let wanted = wanted.ok_or_else(|| {
            Error::bad(
                "PrivateIPAddressMissing",
                "Private IP address is required when privateIPAllocationMethod is Static.",
            )
        })?;
        let Some(prefix) = prefixes.iter().find(|prefix| prefix.contains(&wanted)) else {
            let text = format!("Private static IP address {wanted} does not belong to the range of subnet prefix.");
            return Err(Error::bad("PrivateIPAddressNotInSubnet", &text));
        };
        let is_reserved =
            prefix.broadcast() == wanted || prefix.network() == wanted || prefix.hosts().take(3).any(|it| it == wanted);
        if is_reserved {
            let text = format!("Private static IP address {wanted} falls within reserved IP range of subnet prefix.");
            return Err(Error::bad("PrivateIPAddressInReservedRange", &text));
        }
        if others.contains(&wanted) {
            let text = format!(
                "IP configuration {id} is using the private IP address {wanted} which is already allocated to resource X."
            );
            return Err(Error::bad("PrivateIPAddressIsAllocated", &text));
        }
        Ok(wanted)
    }

    /// Checks the public address of an IP configuration.
    fn check_public(&self, configuration: &Value, id: &str) -> Result<(), Error> {
        let Some(public) = configuration["properties"]["publicIPAddress"]["id"].as_str() else { return Ok(()) };
        let Some(address) = self.state.get(public) else {
            let text = format!("Resource {public} referenced by resource {id} was not found.");
            return Err(Error::bad("InvalidResourceReference", &text));
        };
        if let Some(user) = self.state.user_of(public).filter(|user| !user.eq_ignore_ascii_case(id)) {
            let text = format!(
                "Resource {id} is referencing public IP address {public} that is already allocated to resource {user}."
            );
            return Err(Error::bad("PublicIPAddressInUse", &text));
        }
        // Not a code of Azure's: none is documented.
        let of = |value: &Value| if *value == "IPv6" { 6 } else { 4 };
        let versions =
            (&address["properties"]["publicIPAddressVersion"], &configuration["properties"]["privateIPAddressVersion"]);
        if of(versions.0) != of(versions.1) {
            return Err(Error::bad("IpVersionMismatch", "Public and private IP addresses are of different versions."));
        }
        Ok(())
    }
}

fn private(configuration: &Value) -> Option<IpAddr> {
    configuration["properties"]["privateIPAddress"].as_str()?.parse().ok()
}

/// Checks IP configurations of an interface against each other.
fn check_set(all: &[Value], max: usize) -> Result<(), Error> {
    let primaries = all.iter().filter(|it| it["properties"]["primary"] == json!(true)).count();
    if primaries != 1 {
        let text = "One IP configuration must be marked as primary.";
        return Err(Error::bad("PrimaryIpConfigurationCountInvalid", text));
    }
    let mut names = BTreeSet::new();
    let mut public = BTreeSet::new();
    let mut private_addresses = BTreeSet::new();
    for configuration in all {
        let name = configuration["name"].as_str().unwrap_or_default();
        if !schema::is_name(name) {
            return Err(Error::bad("InvalidResourceName", &format!("Resource name {name} is invalid.")));
        }
        if !names.insert(name.to_ascii_lowercase()) {
            return Err(Error::bad(
                "DuplicateResourceName",
                &format!("Resource has two child resources with the name {name}."),
            ));
        }
        let address = configuration["properties"]["publicIPAddress"]["id"].as_str();
        if address.is_some_and(|it| !public.insert(it.to_ascii_lowercase())) {
            let text = "Public IP address is referenced by multiple ipconfigs.";
            return Err(Error::bad("PublicIPReferencedByMultipleIPConfigs", text));
        }
        if private(configuration).is_some_and(|it| !private_addresses.insert(it)) {
            let text = format!("The private IP address of {} is used twice.", name_of(name));
            return Err(Error::bad("PrivateIPAddressIsAllocated", &text));
        }
    }
    // Neither is a code of Azure's: none is documented.
    if all.len() > max {
        return Err(Error::bad("IpConfigurationCountLimitReached", "The interface has too many IP configurations."));
    }
    if all.iter().filter(|it| it["properties"]["privateIPAddressVersion"] == "IPv6").count() > 1 {
        return Err(Error::bad("SecondIpv6Configuration", "An interface has one IPv6 configuration at most."));
    }
    Ok(())
}
