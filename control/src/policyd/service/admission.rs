//! Admission of clients by the first request of their streams: gateways, and agents of nodes. Each has a registry of its
//! own, so a node may have the name of a gateway.

use std::sync::Arc;

use envoy_types::pb::envoy::config::core::v3::Node;
use envoy_types::pb::envoy::config::core::v3::node::UserAgentVersionType;
use envoy_types::pb::envoy::service::discovery::v3::DeltaDiscoveryRequest;
use envoy_types::pb::google::protobuf::value::Kind as ValueKind;
use tonic::Status;

use super::DiscoveryService;
use crate::policyd::identity::ClientIdentity;
use crate::policyd::registry::{NameInUse, Process, Registry};
use crate::policyd::stream::Audience;
use crate::xds::resource::{INCARNATION, NODE_ROLE, ROLE};

/// Maximum length of a client's name, bytes.
const MAX_NAME_BYTES: usize = 253;
/// Maximum length of the version of its program, bytes.
const MAX_VERSION_BYTES: usize = 64;
/// Maximum streams of one client: the server may not have detected yet that earlier ones are broken.
const MAX_STREAMS: u32 = 16;

/// What a client is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Role {
    Gateway,
    /// The agent of a node.
    Node,
}

/// An admitted client.
#[derive(Clone, Debug)]
pub(super) struct Admitted {
    pub(super) role: Role,
    pub(super) name: String,
}

impl Role {
    /// As a word in reasons.
    fn noun(self) -> &'static str {
        match self {
            Self::Gateway => "gateway",
            Self::Node => "node",
        }
    }
}

impl Admitted {
    /// What it may get.
    pub(super) fn audience(&self) -> Audience {
        match self.role {
            Role::Gateway => Audience::Gateways,
            Role::Node => Audience::Node(self.name.as_str().into()),
        }
    }
}

impl DiscoveryService {
    /// Authorizes and registers a client by the first request of its stream.
    pub(super) fn admit(&self, request: &DeltaDiscoveryRequest, identity: &ClientIdentity) -> Result<Admitted, Status> {
        let node = request.node.as_ref();
        let name = node.map(|node| node.id.clone()).unwrap_or_default();
        let role = node.map_or(Role::Gateway, role);
        let noun = role.noun();
        if name.is_empty() || name.len() > MAX_NAME_BYTES || name.contains(|c: char| c.is_control() || c == ' ') {
            let reason =
                format!("node.id of the first request must be the {noun}'s name: 1 to 253 bytes without blanks");
            return Err(Status::invalid_argument(reason));
        }
        let client = Admitted { role, name };
        if role == Role::Gateway && identity.has_token() && self.published.borrow().is_none() {
            return Err(Status::unavailable("there is no policy yet, whose gateways alone may have tokens"));
        }
        let authorized = match role {
            Role::Gateway => {
                identity.authorize_gateway(&client.name).and_then(|()| self.refuse_outsider(&client.name, identity))
            }
            Role::Node => identity.authorize_node(&client.name),
        };
        if let Err(status) = authorized {
            self.stats.certificate_mismatches.increment();
            self.log_rejection(&client, identity, &status);
            return Err(status);
        }
        let process = match node.and_then(incarnation) {
            Some(incarnation) => Process::Incarnation(incarnation),
            None => identity.address.map_or(Process::Unknown, |address| Process::Host(address.ip())),
        };
        let name = &client.name;
        match self.registry_of(role).connect(name, process, identity.address) {
            Ok(..=MAX_STREAMS) => {}
            Ok(_) => {
                self.disconnect(&client);
                let reason = format!("{noun} {name} has {MAX_STREAMS} streams already: is its name used twice?");
                return Err(Status::resource_exhausted(reason));
            }
            Err(NameInUse { address }) => {
                let at = address.map(|address| format!(" at {address}")).unwrap_or_default();
                let status = Status::already_exists(format!(
                    "the name {name} is in use by another live process{at}: stop one of them, or give each a unique \
                     name"
                ));
                self.stats.name_conflicts.increment();
                self.log_rejection(&client, identity, &status);
                return Err(status);
            }
        }
        self.registry_of(role).set_version(name, node.and_then(version));
        let address = identity.address.map(tracing::field::display);
        match role {
            Role::Gateway => {
                tracing::info!(event = "gateway_connected", gateway = name, address, "gateway connected");
            }
            Role::Node => tracing::info!(event = "node_connected", node = name, address, "node agent connected"),
        }
        Ok(client)
    }

    /// Refuses the certificate of a node that is no gateway, by its name: it is for the node's part of the policy. And the
    /// token of a pod that is no gateway: a node can get such a pod by labels, which its kubelet may change.
    fn refuse_outsider(&self, name: &str, identity: &ClientIdentity) -> Result<(), Status> {
        let published = self.published.borrow();
        let Some(placement) = published.as_ref().map(|it| &it.placement) else { return Ok(()) };
        if placement.peer(name).is_some() {
            return Ok(());
        }
        if identity.has_certificate() && placement.agent(name).is_some() {
            return Err(Status::permission_denied(format!("{name} is a node, and no gateway of the policy")));
        }
        if identity.has_token() {
            let reason = format!("{name} is no gateway of the policy: make a VipGateway with the name of its node");
            return Err(Status::permission_denied(reason));
        }
        Ok(())
    }

    /// Removes a stream of a client that has ended.
    pub(super) fn disconnect(&self, client: &Admitted) {
        let name = &client.name;
        let is_known = self.published.borrow().as_ref().is_some_and(|it| match client.role {
            Role::Gateway => it.placement.peer(name).is_some(),
            Role::Node => it.placement.agent(name).is_some(),
        });
        self.registry_of(client.role).disconnect(name, is_known);
    }

    /// The registry of all clients with this role.
    pub(super) fn registry_of(&self, role: Role) -> &Arc<Registry> {
        match role {
            Role::Gateway => &self.registry,
            Role::Node => &self.nodes,
        }
    }

    /// Logs a rejected stream.
    pub(super) fn log_rejection(&self, client: &Admitted, identity: &ClientIdentity, status: &Status) {
        match client.role {
            Role::Gateway => self.rejections.log_gateway(identity, &client.name, status),
            Role::Node => self.rejections.log_node(identity, &client.name, status),
        }
    }
}

/// The text of a field in a client's metadata.
fn metadata<'a>(node: &'a Node, name: &str) -> Option<&'a str> {
    match node.metadata.as_ref()?.fields.get(name)?.kind.as_ref()? {
        ValueKind::StringValue(text) => Some(text),
        _ => None,
    }
}

/// The role in a client's metadata.
fn role(node: &Node) -> Role {
    if metadata(node, ROLE) == Some(NODE_ROLE) { Role::Node } else { Role::Gateway }
}

/// The incarnation in a client's metadata.
fn incarnation(node: &Node) -> Option<u64> {
    u64::from_str_radix(metadata(node, INCARNATION)?, 16).ok()
}

/// The version of the program, in printable characters.
fn version(node: &Node) -> Option<String> {
    match node.user_agent_version_type.as_ref()? {
        UserAgentVersionType::UserAgentVersion(text) => {
            let text: String = text.chars().filter(char::is_ascii_graphic).take(MAX_VERSION_BYTES).collect();
            Some(text).filter(|text| !text.is_empty())
        }
        UserAgentVersionType::UserAgentBuildVersion(_) => None,
    }
}
