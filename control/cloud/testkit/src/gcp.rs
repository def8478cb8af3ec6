//! Fake of Google Cloud: addresses, instances and operations of the Compute Engine API v1, and the servers that issue tokens.
//!
//! Its rules are those of the documentation and of error messages that users of the API have reported; it rejects parameters
//! and fields that a request doesn't have.

mod change;
mod error;
mod json;
mod router;
mod state;
#[cfg(test)]
mod tests;
mod token;

use std::collections::{BTreeMap, VecDeque};
use std::net::IpAddr;
use std::time::Duration;

use tokio::time::Instant;

use self::change::Change;
pub use self::error::error_reply;
pub use self::state::{GcpAccessConfig, GcpAddress, GcpInstance, GcpInterface, GcpState};
use crate::request::{RecordedRequest, Reply};
use crate::server::FakeCloud;
use crate::token::Tokens;

struct Operation {
    name: String,
    request_id: Option<String>,
    change: Change,
    due: Instant,
    /// `None`: not done; code and message of the error.
    outcome: Option<Result<(), (String, String)>>,
}

/// The fake, of one region of a project.
pub struct FakeGcp {
    pub project: String,
    pub region: String,
    /// Addresses and instances as they are.
    pub state: GcpState,
    /// Reads show the state before this many of the last changes.
    pub lag: usize,
    /// Time that operations take.
    pub operation_time: Duration,
    /// Errors of the next operations, code and message: accepted, but not carried out.
    pub operation_errors: VecDeque<(String, String)>,
    /// Whether an address in use is an error of the operation, not of the request.
    pub finds_use_late: bool,
    /// Addresses of a page at most.
    pub page_size: usize,
    /// Tokens that it has issued, and whom it issues them to.
    pub tokens: Tokens,
    past: Vec<GcpState>,
    operations: Vec<Operation>,
}

impl FakeGcp {
    /// A region without anything.
    pub fn new(project: &str, region: &str) -> Self {
        Self {
            project: project.to_owned(),
            region: region.to_owned(),
            state: GcpState::default(),
            lag: 0,
            operation_time: Duration::ZERO,
            operation_errors: VecDeque::new(),
            finds_use_late: false,
            page_size: 500,
            tokens: Tokens::default(),
            past: Vec::new(),
            operations: Vec::new(),
        }
    }

    /// Adds an instance with `nic0`, which has no access config and may forward.
    pub fn add_instance(&mut self, zone: &str, name: &str, private: &str) {
        let interface = GcpInterface { network_ip: private.to_owned(), access_config: None };
        let interfaces = BTreeMap::from([("nic0".to_owned(), interface)]);
        let instance = GcpInstance { zone: zone.to_owned(), can_ip_forward: true, interfaces };
        self.change(|state| state.instances.insert(name.to_owned(), instance));
    }

    /// Adds a static external address.
    pub fn add_address(&mut self, name: &str, address: &str, labels: &[(&str, &str)]) {
        let labels = labels.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        let address = GcpAddress { address: address.to_owned(), labels, ..GcpAddress::default() };
        self.change(|state| state.addresses.insert(name.to_owned(), address));
    }

    /// Changes something by somebody else's hand.
    pub fn change<T>(&mut self, work: impl FnOnce(&mut GcpState) -> T) -> T {
        self.past.push(self.state.clone());
        work(&mut self.state)
    }

    /// Attaches an address by somebody else's hand.
    pub fn attach(&mut self, address: &str, instance: &str) {
        let config = GcpAccessConfig { name: "External NAT".to_owned(), nat_ip: address.to_owned() };
        self.change(|state| {
            let instance = state.instances.get_mut(instance);
            let interface = instance.and_then(|it| it.interfaces.get_mut("nic0"));
            interface.map(|interface| interface.access_config = Some(config))
        });
    }

    /// Where addresses are: `zone/instance/nic` and private address, by public address.
    pub fn routes(&self) -> BTreeMap<IpAddr, (String, IpAddr)> {
        let mut routes = BTreeMap::new();
        for (name, instance) in &self.state.instances {
            for (nic, interface) in &instance.interfaces {
                let public = interface.access_config.as_ref().and_then(|config| config.nat_ip.parse().ok());
                if let (Some(public), Ok(private)) = (public, interface.network_ip.parse()) {
                    let former = routes.insert(public, (format!("{}/{name}/{nic}", instance.zone), private));
                    assert!(former.is_none(), "{public} is at two NICs");
                }
            }
        }
        routes
    }

    /// Labels of an address, as `key=value`.
    pub fn labels(&self, name: &str) -> Vec<String> {
        let labels = self.state.addresses.get(name).map(|address| &address.labels);
        labels.into_iter().flatten().map(|(key, value)| format!("{key}={value}")).collect()
    }

    /// The state that reads show.
    fn visible(&self) -> &GcpState {
        let at = self.past.len().checked_sub(self.lag);
        if self.lag == 0 { &self.state } else { at.and_then(|at| self.past.get(at)).unwrap_or(&self.state) }
    }

    /// Carries out the operations whose time has come.
    fn run_operations(&mut self) {
        let now = Instant::now();
        for at in 0..self.operations.len() {
            let operation = &self.operations[at];
            if operation.outcome.is_some() || operation.due > now {
                continue;
            }
            let failed = self.operation_errors.pop_front();
            let change = operation.change.clone();
            let outcome = match failed {
                Some(error) => Err(error),
                None => change.check(&self.state, true).map_err(|error| (error.operation_code(), error.message)),
            };
            if outcome.is_ok() {
                self.change(|state| change.apply(state));
            }
            self.operations[at].outcome = Some(outcome);
        }
    }
}

impl FakeCloud for FakeGcp {
    fn handle(&mut self, request: &RecordedRequest) -> Reply {
        self.run_operations();
        if let Some(reply) = token::handle(&mut self.tokens, request) {
            return reply;
        }
        let reply = token::check(&self.tokens, request).and_then(|()| self.route(request));
        reply.unwrap_or_else(|error| error.reply())
    }
}
