//! Fake of AWS: the EC2 query API as far as it concerns Elastic IP addresses and ENIs, STS, and the metadata server (IMDSv2).
//!
//! What it refuses, and with which code, is from "Error codes for the Amazon EC2 API" and the descriptions of the actions.

mod actions;
mod credentials;
mod describe;
mod state;
mod xml;

use std::collections::BTreeMap;
use std::net::IpAddr;

use ipnet::IpNet;

pub use self::credentials::{ACCESS_KEY, AGENT_TOKEN};
use self::state::{Association, Eip, State};
pub use self::xml::error_reply;
use crate::request::{RecordedRequest, Reply};
use crate::server::FakeCloud;

/// A region with one VPC.
#[derive(Default)]
pub struct FakeAws {
    state: State,
    /// State before the last change, and how many reads still see it.
    stale: Option<(State, usize)>,
    /// Reads that see the state before a change.
    lag: usize,
    /// Addresses as reads see them, and how many reads still do.
    frozen: Option<(BTreeMap<String, Eip>, usize)>,
    credentials: credentials::Issued,
}

/// Parameters of a request.
type Parameters = BTreeMap<String, String>;

/// A refusal: HTTP status and code; its message.
struct Refusal {
    status: u16,
    code: &'static str,
    message: String,
}

fn refuse(code: &'static str, message: impl Into<String>) -> Refusal {
    Refusal { status: 400, code, message: message.into() }
}

impl FakeAws {
    /// A region without anything.
    pub fn new() -> Self {
        Self { state: State::new(), ..Self::default() }
    }

    /// Adds an instance with one ENI in the subnet of its zone; returns their ids.
    pub fn add_instance(&mut self, instance_type: &str, zone: &str) -> (String, String) {
        self.state.add_instance(instance_type, zone)
    }

    /// Sets the prefix of the subnet of a zone, before there is an instance in it.
    pub fn set_subnet(&mut self, zone: &str, net: IpNet) {
        self.state.subnets.insert(state::subnet_id(zone), net);
    }

    /// Sets the primary private address of an ENI.
    pub fn set_primary(&mut self, eni: &str, address: IpAddr) {
        if let Some(eni) = self.state.enis.get_mut(eni) {
            eni.private[0] = address;
        }
    }

    /// Removes an instance with its ENI.
    pub fn terminate(&mut self, instance: &str) {
        self.state.terminate(instance);
    }

    /// Adds an Elastic IP address with tags; returns its allocation id.
    pub fn add_address(&mut self, public: IpAddr, tags: &[(&str, &str)]) -> String {
        let tags = tags.iter().map(|(key, value)| ((*key).to_owned(), (*value).to_owned())).collect();
        self.state.add_address(public, tags)
    }

    /// Where packets to each public address go now: the ENI and the private address.
    pub fn routes(&self) -> BTreeMap<IpAddr, (String, IpAddr)> {
        let eips = self.state.eips.values();
        let route =
            |eip: &Eip| Some((eip.public, (eip.association.as_ref()?.eni.clone(), eip.association.as_ref()?.private)));
        let mut routes: BTreeMap<IpAddr, (String, IpAddr)> = eips.filter_map(route).collect();
        for (id, eni) in &self.state.enis {
            routes.extend(eni.ipv6.iter().map(|address| (*address, (id.clone(), *address))));
        }
        routes
    }

    /// Tags of an address.
    pub fn tags(&self, allocation: &str) -> BTreeMap<String, String> {
        self.state.eips.get(allocation).map(|eip| eip.tags.clone()).unwrap_or_default()
    }

    /// The owner in the claim on an address.
    pub fn owner_of(&self, public: IpAddr) -> Option<String> {
        let eip = self.state.eips.values().find(|eip| eip.public == public)?;
        eip.tags.get("vipgate.io/vip").cloned()
    }

    /// Sets a tag of an address by somebody else's hand.
    pub fn set_tag(&mut self, allocation: &str, key: &str, value: &str) {
        if let Some(eip) = self.state.eips.get_mut(allocation) {
            eip.tags.insert(key.to_owned(), value.to_owned());
        }
    }

    /// Removes a tag of an address by somebody else's hand.
    pub fn remove_tag(&mut self, allocation: &str, key: &str) {
        if let Some(eip) = self.state.eips.get_mut(allocation) {
            eip.tags.remove(key);
        }
    }

    /// The public addresses by allocation id.
    pub fn addresses(&self) -> BTreeMap<String, IpAddr> {
        self.state.eips.iter().map(|(id, eip)| (id.clone(), eip.public)).collect()
    }

    /// Ids of the ENIs.
    pub fn interfaces(&self) -> impl Iterator<Item = &str> {
        self.state.enis.keys().map(String::as_str)
    }

    /// Private addresses of an ENI, the primary one first.
    pub fn private_addresses(&self, eni: &str) -> Vec<IpAddr> {
        self.state.enis.get(eni).map(|eni| eni.private.clone()).unwrap_or_default()
    }

    /// Gives a private address to an ENI by somebody else's hand, as a CNI does for a pod.
    pub fn assign_by_hand(&mut self, eni: &str, address: IpAddr) {
        if let Some(eni) = self.state.enis.get_mut(eni) {
            eni.private.push(address);
        }
    }

    /// Delegates a prefix to an ENI by somebody else's hand, as a CNI does.
    pub fn delegate(&mut self, eni: &str, prefix: IpNet) {
        if let Some(eni) = self.state.enis.get_mut(eni) {
            eni.prefixes.push(prefix);
        }
    }

    /// Associates an address by somebody else's hand.
    pub fn associate_by_hand(&mut self, allocation: &str, eni: &str, private: IpAddr) {
        let id = self.state.next_id("eipassoc");
        if let Some(eip) = self.state.eips.get_mut(allocation) {
            eip.association = Some(Association { id, eni: eni.to_owned(), private });
        }
    }

    /// Ends the association of an address by somebody else's hand.
    pub fn disassociate_by_hand(&mut self, allocation: &str) {
        if let Some(eip) = self.state.eips.get_mut(allocation) {
            eip.association = None;
        }
    }

    /// The zone of an ENI.
    pub fn zone_of(&self, eni: &str) -> Option<String> {
        self.state.enis.get(eni).map(|eni| eni.zone.clone())
    }

    /// Number of ENIs with a private address for a public one, by its tags.
    pub fn prepared(&self, public: IpAddr) -> usize {
        let eip = self.state.eips.values().find(|eip| eip.public == public);
        eip.map_or(0, |eip| eip.tags.keys().filter(|key| key.starts_with("vipgate.io/private/")).count())
    }

    /// Whether the source/destination check of an ENI is on.
    pub fn has_check(&self, eni: &str) -> bool {
        self.state.enis.get(eni).is_some_and(|eni| eni.source_dest_check)
    }

    /// Lets this many reads after each change see the state before it.
    pub fn set_lag(&mut self, reads: usize) {
        self.lag = reads;
    }

    /// Lets this many reads of addresses see them as they are now, whatever changes; of ENIs they see what there is.
    pub fn freeze_addresses(&mut self, reads: usize) {
        self.frozen = Some((self.state.eips.clone(), reads));
    }

    /// Maximum number of addresses of the account.
    pub fn set_address_limit(&mut self, limit: usize) {
        self.state.address_limit = limit;
    }

    /// Refuses the keys that were issued until now.
    pub fn expire_keys(&mut self) {
        self.credentials.expire();
    }

    /// The prefix of the subnet of a zone.
    pub fn subnet(&self, zone: &str) -> Option<IpNet> {
        self.state.subnets.get(&state::subnet_id(zone)).copied()
    }

    fn query(&mut self, request: &RecordedRequest) -> Reply {
        let parameters: Parameters = request.form().into_iter().collect();
        let action = parameters.get("Action").cloned().unwrap_or_default();
        if action == "AssumeRoleWithWebIdentity" {
            return self.credentials.assume_role(&parameters);
        }
        let outcome = match self.credentials.check(request) {
            Ok(()) => self.act(&action, &parameters),
            Err(refusal) => Err(refusal),
        };
        match outcome {
            Ok(body) => xml::reply(&action, &body),
            Err(refusal) => xml::error(refusal.status, refusal.code, &refusal.message),
        }
    }

    fn act(&mut self, action: &str, parameters: &Parameters) -> Result<String, Refusal> {
        if let Some(read) = describe::action(action) {
            describe::check(action, parameters)?;
            if action == "DescribeAddresses"
                && let Some((eips, left)) = self.frozen.take_if(|(_, left)| *left > 0)
            {
                let mut state = self.state.clone();
                state.eips.clone_from(&eips);
                self.frozen = Some((eips, left - 1));
                return read(&state, parameters);
            }
            let stale = self.stale.take();
            let Some((state, left)) = stale.filter(|(_, left)| *left > 0) else { return read(&self.state, parameters) };
            let body = read(&state, parameters);
            self.stale = Some((state, left - 1));
            return body;
        }
        let stale = self.stale.take().filter(|(_, left)| *left > 0);
        let before = stale.map_or_else(|| self.state.clone(), |(state, _)| state);
        let body = actions::act(&mut self.state, action, parameters)?;
        self.stale = (self.lag > 0).then_some((before, self.lag));
        Ok(body)
    }
}

impl FakeCloud for FakeAws {
    fn handle(&mut self, request: &RecordedRequest) -> Reply {
        match (request.method.as_str(), request.path.as_str()) {
            ("POST", "/") => self.query(request),
            (_, path) if path.starts_with("/latest/") => self.credentials.metadata(request),
            ("GET", "/v1/credentials") => self.credentials.of_container(request),
            _ => Reply::text(404, "text/plain", "not found".to_owned()),
        }
    }
}
