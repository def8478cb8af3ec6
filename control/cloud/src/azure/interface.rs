//! A network interface as the API has it. The API replaces an interface as a whole, and resets what a request leaves out: so it stays
//! the JSON that was read, and only vipgate's IP configurations in it change.
//! <https://learn.microsoft.com/rest/api/virtualnetwork/network-interfaces/create-or-update>

use std::net::IpAddr;

use serde_json::{Value, json};

use super::resource_id::ResourceId;

/// A network interface.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Interface(pub(super) Value);

impl From<Value> for Interface {
    fn from(value: Value) -> Self {
        Self(value)
    }
}

impl From<Interface> for Value {
    fn from(Interface(value): Interface) -> Self {
        value
    }
}

/// Whether an operation on a resource is under way.
pub(super) fn is_busy(resource: &Value) -> bool {
    let state = resource["properties"]["provisioningState"].as_str().unwrap_or("Succeeded");
    !["Succeeded", "Failed", "Canceled"].iter().any(|finished| state.eq_ignore_ascii_case(finished))
}

/// Version of a resource.
pub(super) fn etag(resource: &Value) -> &str {
    resource["etag"].as_str().unwrap_or_default()
}

impl Interface {
    pub(super) fn configurations(&self) -> impl Iterator<Item = IpConfiguration<'_>> {
        let all = self.0["properties"]["ipConfigurations"].as_array();
        all.into_iter().flatten().enumerate().map(|(index, value)| IpConfiguration { index, value })
    }

    /// The IP configuration of this name.
    pub(super) fn named(&self, name: &str) -> Option<IpConfiguration<'_>> {
        self.configurations().find(|it| it.name().eq_ignore_ascii_case(name))
    }

    /// The primary IP configuration; one that is alone needs no mark.
    pub(super) fn primary(&self) -> Option<IpConfiguration<'_>> {
        self.configurations().find(IpConfiguration::is_primary).or_else(|| self.configurations().next())
    }

    /// The IP configuration that a public address is attached to.
    pub(super) fn with_public(&self, address: &ResourceId) -> Option<IpConfiguration<'_>> {
        self.configurations().find(|it| it.public_id().is_some_and(|id| address.is(id)))
    }

    /// Sets or removes the public address of an IP configuration.
    pub(super) fn set_public(&mut self, index: usize, id: Option<&str>) {
        let Some(properties) = self.0["properties"]["ipConfigurations"][index]["properties"].as_object_mut() else {
            return;
        };
        match id {
            Some(id) => properties.insert("publicIPAddress".to_owned(), json!({ "id": id })),
            None => properties.remove("publicIPAddress"),
        };
    }

    /// Adds a secondary IP configuration in a subnet, with this private address or one that Azure chooses. One that Azure has
    /// chosen is kept until the configuration is removed.
    pub(super) fn add(&mut self, name: &str, subnet: &str, is_ipv6: bool, private: Option<IpAddr>) {
        let mut properties = json!({
            "primary": false,
            "privateIPAddressVersion": if is_ipv6 { "IPv6" } else { "IPv4" },
            "privateIPAllocationMethod": if private.is_some() { "Static" } else { "Dynamic" },
            "subnet": { "id": subnet },
        });
        if let Some(private) = private {
            properties["privateIPAddress"] = json!(private);
        }
        if let Some(all) = self.0["properties"]["ipConfigurations"].as_array_mut() {
            all.push(json!({ "name": name, "properties": properties }));
        }
    }

    /// Removes an IP configuration.
    pub(super) fn remove(&mut self, index: usize) {
        if let Some(all) = self.0["properties"]["ipConfigurations"].as_array_mut() {
            all.remove(index);
        }
    }

    /// Whether it forwards packets that aren't from or to its own addresses.
    pub(super) fn is_forwarding(&self) -> bool {
        self.0["properties"]["enableIPForwarding"] == json!(true)
    }

    /// Turns forwarding on; whether it was off.
    pub(super) fn enable_forwarding(&mut self) -> bool {
        let was_on = self.is_forwarding();
        if let Some(properties) = self.0["properties"].as_object_mut() {
            properties.insert("enableIPForwarding".to_owned(), json!(true));
        }
        !was_on
    }
}

/// An IP configuration of an interface.
#[derive(Clone, Copy, Debug)]
pub(super) struct IpConfiguration<'a> {
    pub(super) index: usize,
    value: &'a Value,
}

impl<'a> IpConfiguration<'a> {
    pub(super) fn name(&self) -> &'a str {
        self.value["name"].as_str().unwrap_or_default()
    }

    pub(super) fn is_primary(&self) -> bool {
        self.value["properties"]["primary"] == json!(true)
    }

    /// Its private address. With a prefix length it is a block of addresses, which is never vipgate's.
    pub(super) fn private(&self) -> Option<IpAddr> {
        self.value["properties"]["privateIPAddress"].as_str()?.parse().ok()
    }

    pub(super) fn is_ipv6(&self) -> bool {
        self.value["properties"]["privateIPAddressVersion"].as_str().is_some_and(|it| it.eq_ignore_ascii_case("IPv6"))
    }

    /// Id of the public address that is attached to it.
    pub(super) fn public_id(&self) -> Option<&'a str> {
        self.value["properties"]["publicIPAddress"]["id"].as_str()
    }

    /// Id of its subnet.
    pub(super) fn subnet(&self) -> Option<&'a str> {
        self.value["properties"]["subnet"]["id"].as_str()
    }
}

#[cfg(test)]
mod tests {
    use super::super::resource_id::Type;
    use super::*;

    fn interface() -> Interface {
        Interface(json!({
            "etag": "W/\"1\"",
            "properties": {
                "provisioningState": "Succeeded",
                "nicType": "Standard",
                "ipConfigurations": [{
                    "name": "primary",
                    "properties": { "primary": true, "privateIPAddress": "10.0.0.4", "subnet": { "id": "/s" } },
                }],
            },
        }))
    }

    #[test]
    fn changes_leave_everything_else_as_it_is() {
        let before = interface();
        let mut changed = before.clone();
        changed.add("vipgate-a", "/s", false, None);
        changed.set_public(1, Some("/a"));
        assert_eq!(changed.named("VIPGATE-A").and_then(|it| it.public_id()), Some("/a"));
        changed.set_public(1, None);
        assert_eq!(changed.named("vipgate-a").and_then(|it| it.public_id()), None);
        changed.remove(1);
        assert_eq!(changed, before);
        assert!(changed.enable_forwarding());
        assert!(!changed.enable_forwarding());
        assert_eq!(changed.primary().and_then(|it| it.private()), "10.0.0.4".parse().ok());
    }

    #[test]
    fn a_public_address_is_found_in_whatever_case() {
        let mut nic = interface();
        let id = ResourceId::new("s", "g", Type::PublicAddress, "vip-1").expect("an id");
        assert!(nic.with_public(&id).is_none());
        nic.set_public(0, Some(&id.to_string().to_ascii_uppercase()));
        assert!(nic.with_public(&id).is_some_and(|it| it.is_primary() && !it.is_ipv6()));
    }

    #[test]
    fn a_resource_is_busy_until_its_state_is_one_of_three() {
        for (state, expected) in [("Updating", true), ("Deleting", true), ("Succeeded", false), ("Failed", false)] {
            assert_eq!(is_busy(&json!({ "properties": { "provisioningState": state } })), expected, "{state}");
        }
        assert!(!is_busy(&json!({})));
        assert_eq!(etag(&interface().0), "W/\"1\"");
    }
}
