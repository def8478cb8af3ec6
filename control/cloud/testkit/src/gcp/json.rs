//! Resources as the API writes them.

use serde_json::{Value, json};

use super::state::{GcpAddress, GcpInstance, GcpInterface};
use super::{FakeGcp, Operation};

/// Some time.
const TIME: &str = "2026-01-01T00:00:00.000-00:00";

impl FakeGcp {
    fn url(&self, path: &str) -> String {
        format!("https://www.googleapis.com/compute/v1/projects/{}/{path}", self.project)
    }

    pub(super) fn address_json(&self, name: &str, address: &GcpAddress) -> Value {
        let instance = self.visible().instance_with(&address.address);
        let zone = |name: &str| self.visible().instances.get(name).map_or(String::new(), |it| it.zone.clone());
        let instance = instance.map(|name| self.url(&format!("zones/{}/instances/{name}", zone(name))));
        let users: Vec<String> = address.user.clone().into_iter().chain(instance).collect();
        let mut value = json!({
            "kind": "compute#address",
            "id": "1234567890123456789",
            "creationTimestamp": TIME,
            "name": name,
            "description": address.description,
            "address": address.address,
            "status": if address.is_reserving { "RESERVING" } else if users.is_empty() { "RESERVED" } else { "IN_USE" },
            "region": self.url(&format!("regions/{}", self.region)),
            "selfLink": self.url(&format!("regions/{}/addresses/{name}", self.region)),
            "networkTier": address.tier,
            "labelFingerprint": address.fingerprint(),
            "addressType": address.address_type,
        });
        // Empty fields are left out.
        if !users.is_empty() {
            value["users"] = json!(users);
        }
        if !address.labels.is_empty() {
            value["labels"] = json!(address.labels);
        }
        value
    }

    pub(super) fn addresses_json(&self, items: &[Value], next: Option<String>) -> Value {
        let mut value = json!({
            "kind": "compute#addressList",
            "id": format!("projects/{}/regions/{}/addresses", self.project, self.region),
            "selfLink": self.url(&format!("regions/{}/addresses", self.region)),
        });
        if !items.is_empty() {
            value["items"] = json!(items);
        }
        if let Some(next) = next {
            value["nextPageToken"] = json!(next);
        }
        value
    }

    pub(super) fn instance_json(&self, name: &str, instance: &GcpInstance) -> Value {
        let interfaces: Vec<Value> = instance.interfaces.iter().map(|(nic, it)| self.interface_json(nic, it)).collect();
        json!({
            "kind": "compute#instance",
            "id": "1234567890123456789",
            "name": name,
            "status": "RUNNING",
            "zone": self.url(&format!("zones/{}", instance.zone)),
            "selfLink": self.url(&format!("zones/{}/instances/{name}", instance.zone)),
            "canIpForward": instance.can_ip_forward,
            "networkInterfaces": interfaces,
        })
    }

    fn interface_json(&self, nic: &str, interface: &GcpInterface) -> Value {
        let mut value = json!({
            "kind": "compute#networkInterface",
            "name": nic,
            "network": self.url("global/networks/default"),
            "networkIP": interface.network_ip,
            "stackType": "IPV4_ONLY",
            "fingerprint": "MTIzNDU2Nzg=",
        });
        if let Some(config) = &interface.access_config {
            value["accessConfigs"] = json!([{
                "kind": "compute#accessConfig",
                "type": "ONE_TO_ONE_NAT",
                "name": config.name,
                "natIP": config.nat_ip,
                "networkTier": "PREMIUM",
            }]);
        }
        value
    }

    pub(super) fn operation_json(&self, operation: &Operation) -> Value {
        let place = match operation.change.zone() {
            Some(zone) => ("zone", format!("zones/{zone}")),
            None => ("region", format!("regions/{}", self.region)),
        };
        let mut value = json!({
            "kind": "compute#operation",
            "id": "1234567890123456789",
            "name": operation.name,
            "operationType": operation.change.kind(),
            "targetLink": self.url(&operation.change.target(&self.region)),
            "status": if operation.outcome.is_some() { "DONE" } else { "RUNNING" },
            "progress": if operation.outcome.is_some() { 100 } else { 0 },
            "user": "gateway@example.iam.gserviceaccount.com",
            "insertTime": TIME,
            "startTime": TIME,
            "selfLink": self.url(&format!("{}/operations/{}", place.1, operation.name)),
        });
        value[place.0] = json!(self.url(&place.1));
        if let Some(id) = &operation.request_id {
            value["clientOperationId"] = json!(id);
        }
        if let Some(Err((code, message))) = &operation.outcome {
            value["error"] = json!({ "errors": [{ "code": code, "message": message }] });
            value["httpErrorStatusCode"] = json!(400);
            value["httpErrorMessage"] = json!("BAD REQUEST");
        }
        value
    }
}
