//! Changes by somebody else's hand, in the portal or by Terraform.

use serde_json::{Value, json};

use super::{FakeAzure, state};

impl FakeAzure {
    /// Attaches an address to an IP configuration of an interface, by name.
    pub fn attach(&mut self, address: &str, nic: &str, configuration: &str) {
        let public = json!({ "id": state::id("Microsoft.Network/publicIPAddresses", address) });
        self.edit_configuration(nic, configuration, |it| it["properties"]["publicIPAddress"] = public);
        self.touch(address);
    }

    /// Detaches whatever is attached to an IP configuration of an interface.
    pub fn detach(&mut self, nic: &str, configuration: &str) {
        self.edit_configuration(nic, configuration, |it| {
            if let Some(properties) = it["properties"].as_object_mut() {
                properties.remove("publicIPAddress");
            }
        });
    }

    /// Lets a NAT gateway use an address.
    pub fn attach_to_nat_gateway(&mut self, address: &str, gateway: &str) {
        let id = state::id("Microsoft.Network/natGateways", gateway);
        self.edit(address, |it| it["properties"]["natGateway"] = json!({ "id": id }));
    }

    /// Lets a load balancer use an address.
    pub fn attach_to_load_balancer(&mut self, address: &str, balancer: &str) {
        let id = state::id("Microsoft.Network/loadBalancers", balancer);
        let frontend = format!("{id}/frontendIPConfigurations/front");
        self.edit(address, |it| it["properties"]["ipConfiguration"] = json!({ "id": frontend }));
    }

    /// Sets a tag of an address or an interface; `None` removes it.
    pub fn set_tag(&mut self, resource: &str, name: &str, value: Option<&str>) {
        self.edit(resource, |it| match (it["tags"].as_object_mut(), value) {
            (Some(tags), Some(value)) => {
                tags.insert(name.to_owned(), value.into());
            }
            (Some(tags), None) => {
                tags.remove(name);
            }
            (None, _) => {}
        });
    }

    /// Sets the zones of an address.
    pub fn set_zones(&mut self, address: &str, zones: &[&str]) {
        self.edit(address, |it| it["zones"] = json!(zones));
    }

    /// Adds a secondary IP configuration to an interface, in the subnet of its primary one.
    pub fn add_configuration(&mut self, nic: &str, name: &str) {
        let subnet = self.resource(nic)["properties"]["ipConfigurations"][0]["properties"]["subnet"].clone();
        let private = self.state.free_private(subnet["id"].as_str().unwrap_or_default(), false, &self.taken);
        let id = format!("{}/ipConfigurations/{name}", state::id("Microsoft.Network/networkInterfaces", nic));
        let properties = json!({
            "primary": false,
            "privateIPAddress": private,
            "privateIPAllocationMethod": "Dynamic",
            "privateIPAddressVersion": "IPv4",
            "subnet": subnet,
        });
        self.edit(nic, |it| {
            if let Some(all) = it["properties"]["ipConfigurations"].as_array_mut() {
                all.push(json!({ "id": id, "name": name, "properties": properties }));
            }
        });
    }

    /// Removes a virtual machine and its interface.
    pub fn remove_instance(&mut self, name: &str) {
        self.change(|state| {
            state.remove(&state::id("Microsoft.Compute/virtualMachines", name));
            state.remove(&state::id("Microsoft.Network/networkInterfaces", &format!("{name}-nic")));
        });
    }

    /// Changes the version of an address or an interface, as an unrelated change does.
    pub fn touch(&mut self, resource: &str) {
        self.edit(resource, |_| {});
    }

    /// Changes an address or an interface.
    fn edit(&mut self, name: &str, edit: impl FnOnce(&mut Value)) {
        let id = self.resource(name)["id"].as_str().unwrap_or_default().to_owned();
        assert!(!id.is_empty(), "there is no {name}");
        self.change(|state| {
            let version = state.next_version();
            let resource = state.get_mut(&id);
            edit(resource);
            resource["etag"] = json!(version);
        });
    }

    fn edit_configuration(&mut self, nic: &str, name: &str, edit: impl FnOnce(&mut Value)) {
        self.edit(nic, |it| {
            let all = it["properties"]["ipConfigurations"].as_array_mut();
            let found = all.into_iter().flatten().find(|it| it["name"] == name);
            edit(found.unwrap_or_else(|| panic!("there is no IP configuration {name}")));
        });
    }
}
