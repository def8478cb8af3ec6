//! Changes of public addresses.
//! <https://learn.microsoft.com/rest/api/virtualnetwork/public-ip-addresses/create-or-update>

use serde_json::{Value, json};

use super::error::Error;
use super::router::{address_id, name_of};
use super::{FakeAzure, LOCATION, schema};
use crate::request::{RecordedRequest, Reply};

/// Fields that the API sets.
const READ_ONLY: &[&str] = &["provisioningState", "resourceGuid", "ipConfiguration", "natGateway"];

impl FakeAzure {
    pub(super) fn put_address(&mut self, request: &RecordedRequest) -> Result<Reply, Error> {
        let body = request.json();
        schema::address(&body)?;
        schema::tags(&body)?;
        self.check_conditions(request)?;
        let id = address_id(&request.path);
        let former = self.state.get(&id).cloned();
        self.check_address(&body, former.as_ref(), &id)?;
        self.check_idle(request)?;
        let version = self.state.next_version();
        let value = self.stored_address(&body, former.as_ref(), &id, &version);
        let reply = value.clone();
        let headers = self.accept(request, &id, |state| state.put(&id, value));
        let status = if former.is_some() { 200 } else { 201 };
        let mut reply = self.state.shown(&reply);
        reply["properties"]["provisioningState"] = json!("Updating");
        Ok(Reply { headers: [Reply::json(status, &reply).headers, headers].concat(), ..Reply::json(status, &reply) })
    }

    fn check_address(&self, body: &Value, former: Option<&Value>, id: &str) -> Result<(), Error> {
        let properties = &body["properties"];
        if body["location"].as_str().is_none() {
            return Err(Error::bad("LocationRequired", "The location property is required for this definition."));
        }
        if body["location"] != LOCATION {
            return Err(Error::new(409, "InvalidResourceLocation", "The resource exists in another location."));
        }
        if !schema::is_name(name_of(id)) {
            return Err(Error::bad("InvalidResourceName", "Resource name is invalid."));
        }
        let method = properties["publicIPAllocationMethod"].as_str().unwrap_or("Dynamic");
        let is_standard = body["sku"]["name"] == "Standard";
        if is_standard && method != "Static" {
            let text = "Standard sku publicIp must have AllocationMethod set to Static.";
            return Err(Error::bad("StandardSkuPublicIPAddressesMustBeStatic", text));
        }
        if !is_standard {
            let text =
                "Cannot create more than 0 IPv4 Basic SKU public IP addresses for this subscription in this region.";
            return Err(Error::bad("IPv4BasicSkuPublicIpCountLimitReached", text));
        }
        match former {
            None if self.state.addresses().count() >= self.max_addresses => {
                let max = self.max_addresses;
                let text =
                    format!("Cannot create more than {max} public IP addresses for this subscription in this region.");
                Err(Error::bad("PublicIPCountLimitReached", &text))
            }
            Some(former) if former["zones"] != body["zones"] && !body["zones"].is_null() => {
                Err(Error::bad("ResourceAvailabilityZonesCannotBeModified", "Zones cannot be modified."))
            }
            Some(former)
                if former["properties"]["publicIPAddressVersion"] != properties["publicIPAddressVersion"]
                    && !properties["publicIPAddressVersion"].is_null() =>
            {
                Err(Error::bad("PublicIPAddressVersionCannotBeChanged", "The version cannot be changed."))
            }
            _ => Ok(()),
        }
    }

    /// The address that a body makes: what it leaves out is gone, except what the API sets.
    fn stored_address(&mut self, body: &Value, former: Option<&Value>, id: &str, version: &str) -> Value {
        let is_ipv6 = body["properties"]["publicIPAddressVersion"] == "IPv6";
        let mut value = body.clone();
        for name in READ_ONLY {
            if let Some(properties) = value["properties"].as_object_mut() {
                properties.remove(*name);
                let kept = former.and_then(|former| former["properties"].get(*name));
                properties.extend(kept.map(|kept| ((*name).to_owned(), kept.clone())));
            }
        }
        let address = former.map(|former| former["properties"]["ipAddress"].clone());
        value["properties"]["ipAddress"] = address.unwrap_or_else(|| json!(self.state.next_public(is_ipv6)));
        value["properties"]["provisioningState"] = json!("Succeeded");
        value["id"] = former.map_or_else(|| json!(id), |former| former["id"].clone());
        value["name"] = former.map_or_else(|| json!(name_of(id)), |former| former["name"].clone());
        value["type"] = json!("Microsoft.Network/publicIPAddresses");
        value["etag"] = json!(version);
        value
    }

    pub(super) fn delete_address(&mut self, request: &RecordedRequest) -> Result<Reply, Error> {
        if self.state.get(&request.path).is_none() {
            return Ok(Reply { status: 204, ..Reply::default() });
        }
        self.check_conditions(request)?;
        if let Some(user) = self.state.user_of(&request.path) {
            let text = format!(
                "Public IP address {} can not be deleted since it is still allocated to resource {user}.",
                request.path
            );
            return Err(Error::bad("PublicIPAddressCannotBeDeleted", &text));
        }
        self.check_idle(request)?;
        let headers = self.accept(request, &request.path, |state| state.remove(&request.path));
        Ok(Reply { status: 202, headers, ..Reply::default() })
    }
}
