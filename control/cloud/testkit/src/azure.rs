//! Fake of Azure: public addresses, network interfaces, virtual machines, subnets and operations of Azure Resource Manager, and the
//! servers that issue tokens.
//!
//! Its rules are those of the documentation and of error messages that users of the API have reported; it rejects parameters and
//! fields that a request doesn't have.

mod address;
mod error;
mod hand;
mod interface;
mod operation;
mod router;
mod schema;
mod state;
mod token;

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use serde_json::{Value, json};

pub use self::error::error_reply;
use self::operation::Operation;
use self::state::State;
use crate::request::{RecordedRequest, Reply};
use crate::server::FakeCloud;
use crate::token::Tokens;

/// Subscription of the fake.
pub const SUBSCRIPTION: &str = "00000000-0000-4000-8000-000000000001";
/// Its only resource group.
pub const GROUP: &str = "edge";
/// Its region.
pub const LOCATION: &str = "westeurope";

/// The fake, of one resource group.
pub struct FakeAzure {
    /// Reads show the state before this many of the last changes.
    pub lag: usize,
    /// Time that operations take. What they change is seen at once, with the provisioning state `Updating`.
    pub operation_time: Duration,
    /// `Retry-After` of accepted changes, seconds.
    pub retry_after: Option<u64>,
    /// Errors of the next operations, status, code and message: accepted, but not carried out.
    pub operation_errors: VecDeque<(String, String, String)>,
    /// Addresses of a page at most.
    pub page_size: usize,
    /// Public addresses of the subscription at most.
    pub max_addresses: usize,
    /// IP configurations of an interface at most.
    pub max_configurations: usize,
    /// Private addresses that something else in the network has.
    pub taken: BTreeSet<IpAddr>,
    /// Base of URLs in responses; `None`: the host of the request.
    pub links: Option<String>,
    /// Whether deletions say `Location` alone.
    pub has_location_only: bool,
    /// Tokens that it has issued, and whom it issues them to.
    pub tokens: Tokens,
    state: State,
    past: Vec<State>,
    operations: Vec<Operation>,
}

impl Default for FakeAzure {
    fn default() -> Self {
        Self::new()
    }
}

impl FakeAzure {
    /// A resource group with the subnets `gateways-1`, `gateways-2` and `gateways-3`, 10.0.1.0/24 to 10.0.3.0/24 and
    /// fd00:0:0:1::/64 to fd00:0:0:3::/64.
    pub fn new() -> Self {
        Self {
            lag: 0,
            operation_time: Duration::ZERO,
            retry_after: None,
            operation_errors: VecDeque::new(),
            page_size: 100,
            max_addresses: 1000,
            max_configurations: 256,
            taken: BTreeSet::new(),
            links: None,
            has_location_only: false,
            tokens: Tokens::default(),
            state: State::new(),
            past: Vec::new(),
            operations: Vec::new(),
        }
    }

    /// Adds a virtual machine in a zone (1 to 3), with the interface `NAME-nic` in the subnet of that zone. Returns its provider id.
    pub fn add_instance(&mut self, name: &str, zone: u8) -> String {
        let nic = self.add_interface(&format!("{name}-nic"), zone);
        let id = state::id("Microsoft.Compute/virtualMachines", name);
        let machine = json!({
            "id": id,
            "name": name,
            "type": "Microsoft.Compute/virtualMachines",
            "location": LOCATION,
            "zones": [zone.to_string()],
            "properties": {
                "provisioningState": "Succeeded",
                "networkProfile": { "networkInterfaces": [{ "id": nic, "properties": { "primary": true } }] },
            },
        });
        self.change(|state| {
            state.put(&id, machine);
            state.get_mut(&nic)["properties"]["virtualMachine"] = json!({ "id": id });
        });
        format!("azure://{id}")
    }

    /// Adds a second interface to a virtual machine; returns its id.
    pub fn add_second_interface(&mut self, machine: &str, name: &str, zone: u8) -> String {
        let nic = self.add_interface(name, zone);
        let id = state::id("Microsoft.Compute/virtualMachines", machine);
        self.change(|state| {
            let nics = &mut state.get_mut(&id)["properties"]["networkProfile"]["networkInterfaces"];
            if let Some(nics) = nics.as_array_mut() {
                // The order in the machine isn't that of importance.
                nics.insert(0, json!({ "id": nic, "properties": { "primary": false } }));
            }
        });
        nic
    }

    fn add_interface(&mut self, name: &str, zone: u8) -> String {
        let id = state::id("Microsoft.Network/networkInterfaces", name);
        let subnet = state::subnet_id(zone);
        let private = self.state.free_private(&subnet, false, &self.taken).map(|it| it.to_string());
        let version = self.state.next_version();
        let interface = json!({
            "id": id,
            "name": name,
            "type": "Microsoft.Network/networkInterfaces",
            "etag": version,
            "location": LOCATION,
            "tags": { "team": "net" },
            "properties": {
                "provisioningState": "Succeeded",
                "resourceGuid": "00000000-0000-4000-8000-0000000000aa",
                "macAddress": "00-0D-3A-00-00-01",
                "primary": true,
                "enableAcceleratedNetworking": true,
                "enableIPForwarding": false,
                "disableTcpStateTracking": false,
                "nicType": "Standard",
                "auxiliaryMode": "None",
                "auxiliarySku": "None",
                "vnetEncryptionSupported": false,
                "hostedWorkloads": [],
                "tapConfigurations": [],
                "dnsSettings": { "dnsServers": ["10.0.0.53"], "appliedDnsServers": [] },
                "networkSecurityGroup": { "id": state::id("Microsoft.Network/networkSecurityGroups", "gateways") },
                "ipConfigurations": [{
                    "id": format!("{id}/ipConfigurations/primary"),
                    "name": "primary",
                    "type": "Microsoft.Network/networkInterfaces/ipConfigurations",
                    "etag": version,
                    "properties": {
                        "provisioningState": "Succeeded",
                        "primary": true,
                        "privateIPAddress": private,
                        "privateIPAllocationMethod": "Dynamic",
                        "privateIPAddressVersion": "IPv4",
                        "subnet": { "id": subnet },
                    },
                }],
            },
        });
        self.change(|state| state.put(&id, interface));
        id
    }

    /// Adds a static public address of the Standard SKU; returns its id.
    pub fn add_address(&mut self, name: &str, address: IpAddr, tags: &[(&str, &str)]) -> String {
        let tags: BTreeMap<&str, &str> = tags.iter().copied().collect();
        let id = state::id("Microsoft.Network/publicIPAddresses", name);
        let version = self.state.next_version();
        let value = json!({
            "id": id,
            "name": name,
            "type": "Microsoft.Network/publicIPAddresses",
            "etag": version,
            "location": LOCATION,
            "sku": { "name": "Standard", "tier": "Regional" },
            "tags": tags,
            "zones": ["1", "2", "3"],
            "properties": {
                "provisioningState": "Succeeded",
                "resourceGuid": "00000000-0000-4000-8000-0000000000bb",
                "ipAddress": address,
                "publicIPAddressVersion": if address.is_ipv6() { "IPv6" } else { "IPv4" },
                "publicIPAllocationMethod": "Static",
                "idleTimeoutInMinutes": 4,
                "ipTags": [],
                "ddosSettings": { "protectionMode": "VirtualNetworkInherited" },
            },
        });
        self.change(|state| state.put(&id, value));
        id
    }

    /// Where addresses are: name of the interface and private address, by public address.
    pub fn routes(&self) -> BTreeMap<IpAddr, (String, IpAddr)> {
        let mut routes = BTreeMap::new();
        for (nic, configuration) in self.state.configurations() {
            let properties = &configuration["properties"];
            let public = properties["publicIPAddress"]["id"].as_str().and_then(|id| self.state.ip_of(id));
            let private = properties["privateIPAddress"].as_str().and_then(|it| it.parse().ok());
            if let (Some(public), Some(private)) = (public, private) {
                let name = nic["name"].as_str().unwrap_or_default().to_owned();
                let former = routes.insert(public, (name, private));
                assert!(former.is_none(), "{public} is at two IP configurations");
            }
        }
        routes
    }

    /// A resource as it is: an interface or a public address by its name.
    pub fn resource(&self, name: &str) -> Value {
        let kinds = ["Microsoft.Network/networkInterfaces", "Microsoft.Network/publicIPAddresses"];
        kinds.iter().find_map(|kind| self.state.get(&state::id(kind, name)).cloned()).unwrap_or_default()
    }

    /// The public addresses as the API shows them.
    pub fn addresses(&self) -> Vec<Value> {
        self.state.addresses().map(|address| self.state.shown(address)).collect()
    }

    /// The network interfaces as they are.
    pub fn interfaces(&self) -> Vec<Value> {
        self.state.interfaces().cloned().collect()
    }

    /// Tags of an address, as `name=value`.
    pub fn tags(&self, name: &str) -> Vec<String> {
        let address = self.resource(name);
        let tags = address["tags"].as_object();
        tags.into_iter().flatten().map(|(name, value)| format!("{name}={}", value.as_str().unwrap_or("?"))).collect()
    }

    /// Private addresses of an interface by name of the IP configuration.
    pub fn private(&self, nic: &str) -> BTreeMap<String, String> {
        let nic = self.resource(nic);
        let all = nic["properties"]["ipConfigurations"].as_array().cloned().unwrap_or_default();
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        all.iter().map(|it| (text(&it["name"]), text(&it["properties"]["privateIPAddress"]))).collect()
    }

    fn change<T>(&mut self, work: impl FnOnce(&mut State) -> T) -> T {
        self.past.push(self.state.clone());
        work(&mut self.state)
    }

    /// The state that reads show.
    fn visible(&self) -> &State {
        let at = self.past.len().checked_sub(self.lag);
        if self.lag == 0 { &self.state } else { at.and_then(|at| self.past.get(at)).unwrap_or(&self.state) }
    }
}

impl FakeCloud for FakeAzure {
    fn handle(&mut self, request: &RecordedRequest) -> Reply {
        if let Some(reply) = token::handle(&mut self.tokens, request) {
            return reply;
        }
        let reply = token::check(&self.tokens, request).and_then(|()| self.route(request));
        reply.unwrap_or_else(|error| error.reply())
    }
}
