//! Status service (`vipgate policy status`): the state of each policy and the gateways on which it is in force. A reply
//! is computed from all endpoints and gateways, so concurrent requests and the length of replies are limited.

mod set_aside;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;
use tonic::{Request, Response, Status};
use vipgate_common::spawn_blocking;
use vipgate_policy::diagnostic::Severity;

use super::identity::{ClientIdentity, RejectionLog};
use super::kubernetes::KubernetesState;
use super::policy_summary::{changed_in, policy_summaries};
use super::registry::Gateway;
use super::state::ServerState;
use crate::membership::Member;
use crate::xds::proto::policy_status_server::PolicyStatus;
use crate::xds::proto::{
    AcceptEmptyReply, AcceptEmptyRequest, CloudReply, CloudRequest, Diagnostic, EmptyText, EndpointState, GatewayState,
    MemberState, NodesState, PolicyState, SourceStatus, StatusReply, StatusRequest,
};
use crate::xds::publication::Publication;
use crate::xds::resource::Kind;

/// Maximum number of endpoints in one request.
const MAX_ENDPOINTS: usize = 1000;
/// Maximum number of concurrent requests; they run on threads that the compiler of policies needs as well.
const MAX_CONCURRENT: usize = 2;
/// How long a further request waits for a permit.
const PERMIT_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum size of a reply, bytes, mostly names of gateways; a longer one is an error.
const MAX_REPLY_BYTES: usize = 64 << 20;
/// Maximum size of the diagnostics in a reply, bytes; the rest is left out.
const MAX_DIAGNOSTICS_BYTES: usize = 16 << 20;
/// Maximum length of a gateway's NACK reason, characters: its content is up to the gateway.
const MAX_ERROR: usize = 1000;
/// Size of an address as text, bytes.
const ADDRESS_BYTES: usize = size_of::<String>() + 39;

/// Nodes that a reply names, at most.
const MAX_NAMED_NODES: usize = 100;

/// Permits for concurrent requests.
static PERMITS: Semaphore = Semaphore::const_new(MAX_CONCURRENT);

/// The status service.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) state: Arc<ServerState>,
    pub(super) rejections: Arc<RejectionLog>,
}

impl Service {
    /// What a name is in the policy, in the membership view, or of a client that has connected; `None`: neither a
    /// gateway nor a node.
    fn role_of(&self, name: &str) -> Option<&'static str> {
        let state = &self.state;
        let (in_policy, has_agent) = state
            .published
            .borrow()
            .as_ref()
            .map_or((false, false), |it| (it.placement.peer(name).is_some(), it.placement.agent(name).is_some()));
        let is_gateway =
            in_policy || state.membership.view.borrow().member(name).is_some() || state.registry.contains(name);
        let is_node = has_agent || state.nodes.contains(name);
        is_gateway.then_some("gateway").or_else(|| is_node.then_some("node"))
    }

    /// The client of a request, if it may make it; otherwise the request is counted and logged.
    fn authorized<T>(
        &self,
        command: &str,
        request: &Request<T>,
        authorize: impl FnOnce(&ClientIdentity) -> Result<(), Status>,
    ) -> Result<ClientIdentity, Status> {
        let client = ClientIdentity::from_request(request);
        match authorize(&client) {
            Ok(()) => Ok(client),
            Err(status) => {
                self.state.stats.commands_denied.increment();
                self.rejections.log_command(&client, command, &status);
                Err(status)
            }
        }
    }
}

#[tonic::async_trait]
impl PolicyStatus for Service {
    async fn status(&self, request: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        self.authorized("status", &request, ClientIdentity::authorize_query)?;
        let addresses = parse_addresses(&request.into_inner().endpoints)?;
        let state = self.state.clone();
        let reply = run_blocking(&PERMITS, move || StatusView::of(&state).reply(&addresses)).await.flatten();
        if reply.is_err() {
            self.state.budget.refused.increment();
        }
        reply.map(Response::new)
    }

    async fn cloud(&self, request: Request<CloudRequest>) -> Result<Response<CloudReply>, Status> {
        self.authorized("cloud", &request, ClientIdentity::authorize_query)?;
        let state = self.state.clone();
        let reply = run_blocking(&PERMITS, move || {
            let leads = state.kubernetes.as_ref().is_none_or(KubernetesState::leads);
            state.cloud.reply(leads)
        });
        reply.await.map(Response::new)
    }

    async fn accept_empty(&self, request: Request<AcceptEmptyRequest>) -> Result<Response<AcceptEmptyReply>, Status> {
        let authorize = |client: &ClientIdentity| client.authorize_command(&self.state.admins, |it| self.role_of(it));
        let client = self.authorized("accept-empty", &request, authorize)?;
        let address = client.address.map(|it| it.to_string()).unwrap_or_default();
        tracing::info!(event = "accept_empty", address, "an admin command accepts the empty policy source");
        let (command, reply) = oneshot::channel();
        let stopping = || Status::unavailable("the server is stopping");
        self.state.accept_empty.send(command).await.map_err(|_| stopping())?;
        let outcome = reply.await.map_err(|_| stopping())?;
        let accepted = outcome.map_err(|error| Status::failed_precondition(error.to_string()))?;
        let texts = accepted.entries.into_iter();
        let texts =
            texts.map(|(name, objects)| EmptyText { name: name.to_string(), objects: objects as u64 }).collect();
        Ok(Response::new(AcceptEmptyReply { texts }))
    }
}

/// The addresses in a request, without duplicates.
fn parse_addresses(texts: &[String]) -> Result<Vec<IpAddr>, Status> {
    let (mut seen, mut addresses) = (BTreeSet::new(), Vec::new());
    for text in texts {
        let address: IpAddr =
            text.parse().map_err(|_| Status::invalid_argument(format!("`{text:.50}` is no address")))?;
        if !seen.insert(address) {
            continue;
        }
        if addresses.len() == MAX_ENDPOINTS {
            return Err(Status::invalid_argument(format!(
                "more than {MAX_ENDPOINTS} endpoints: request fewer at a time"
            )));
        }
        addresses.push(address);
    }
    Ok(addresses)
}

/// Runs blocking work on a thread of its own once a permit is available. The permit is held until the work ends, not
/// the request: a client can't occupy more threads by cancelling requests.
async fn run_blocking<T: Send + 'static>(
    permits: &'static Semaphore,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    let Ok(Ok(permit)) = timeout(PERMIT_TIMEOUT, permits.acquire()).await else {
        return Err(Status::resource_exhausted("too many concurrent status requests: retry later"));
    };
    let task = spawn_blocking(move || {
        let outcome = work();
        drop(permit);
        outcome
    });
    Ok(task.await)
}

/// Size limit of a reply, or of a part of it.
#[derive(Debug)]
struct SizeLimit {
    remaining: usize,
    /// Whether it was exceeded; then nothing more is admitted.
    is_exceeded: bool,
}

impl SizeLimit {
    fn of(bytes: usize) -> Self {
        Self { remaining: bytes, is_exceeded: false }
    }

    /// Takes this many bytes if they are available.
    fn try_take(&mut self, bytes: usize) -> bool {
        let remaining = self.remaining.checked_sub(bytes);
        self.is_exceeded |= remaining.is_none();
        self.remaining = remaining.unwrap_or_default();
        !self.is_exceeded
    }

    /// Takes this many bytes for a part that can't be left out.
    fn take(&mut self, bytes: usize) -> Result<(), Status> {
        if self.try_take(bytes) {
            return Ok(());
        }
        Err(Status::resource_exhausted(format!(
            "the reply, with the names of gateways for each policy and endpoint, would exceed {} MiB: request fewer \
             endpoints",
            MAX_REPLY_BYTES >> 20
        )))
    }

    /// As many of these texts as fit.
    fn truncate(&mut self, texts: &[String]) -> Vec<String> {
        texts.iter().take_while(|text| self.try_take(size_of::<String>() + text.len())).cloned().collect()
    }
}

/// Consistent view of the server's state, from which a reply is built.
struct StatusView<'a> {
    state: &'a ServerState,
    published: Arc<Publication>,
    gateways: BTreeMap<String, Gateway>,
    /// Size of the names of connected gateways, bytes: each policy and each endpoint lists all of them.
    names_bytes: usize,
}

impl<'a> StatusView<'a> {
    fn of(state: &'a ServerState) -> Self {
        let published = state.published.borrow().clone().unwrap_or_default();
        let gateways = state.registry.list();
        let connected = gateways.iter().filter(|(_, gateway)| gateway.streams > 0);
        let names_bytes = connected.map(|(name, _)| size_of::<String>() + name.len()).sum();
        Self { state, published, gateways, names_bytes }
    }

    fn reply(&self, addresses: &[IpAddr]) -> Result<StatusReply, Status> {
        let error = self.state.source.unreachable.load_full();
        let health = self.state.source.health.load();
        let (mut limit, mut diagnostics_limit) = (SizeLimit::of(MAX_REPLY_BYTES), SizeLimit::of(MAX_DIAGNOSTICS_BYTES));
        let policies = self.policies(&mut limit, &mut diagnostics_limit)?;
        let gateways = self.gateways(&mut limit)?;
        let endpoints = addresses.iter().map(|address| self.endpoint(*address, &mut limit));
        let endpoints = endpoints.collect::<Result<Vec<_>, Status>>()?;
        Ok(StatusReply {
            program: env!("CARGO_PKG_VERSION").to_owned(),
            version: self.published.version.clone(),
            source: Some(SourceStatus {
                source: self.state.source.name.clone(),
                connected: error.is_none(),
                error: error.map(|error| error.to_string()).unwrap_or_default(),
                healthy: health.is_healthy(),
                reasons: health.reasons.clone(),
                since_seconds: health.age_seconds(),
                waiting: health.waiting,
                slices_unverified: self.state.source.compiled.load().slices_unverified,
            }),
            policies,
            gateways,
            diagnostics: self.diagnostics(&mut diagnostics_limit),
            endpoints,
            vips: self.published.placement.vips.len() as u64,
            covered_endpoints: self.published.placement.endpoints.len() as u64,
            services: self.published.placement.services.len() as u64,
            members: self.members(),
            view: self.state.membership.view.borrow().number,
            nodes: self.nodes(),
            set_aside: self.set_aside(&mut diagnostics_limit),
        })
    }

    /// Diagnostics of manifests, up to the size limit.
    fn diagnostics(&self, limit: &mut SizeLimit) -> Vec<Diagnostic> {
        let compiled = self.state.source.compiled.load();
        let mut out = Vec::new();
        for it in &compiled.diagnostics {
            if !limit.try_take(size_of::<Diagnostic>() + it.file.len() + it.field.len() + it.reason.len()) {
                break;
            }
            out.push(Diagnostic {
                file: it.file.to_string(),
                line: it.line,
                field: it.field.clone(),
                severity: if it.severity == Severity::Error { "error" } else { "warning" }.to_owned(),
                reason: it.reason.clone(),
            });
        }
        if limit.is_exceeded {
            out.push(Diagnostic {
                file: self.state.source.name.clone(),
                severity: "error".to_owned(),
                reason: "further diagnostics are left out: the reply would be too long".to_owned(),
                ..Diagnostic::default()
            });
        }
        out
    }

    /// Connected gateways with this publication or a later one in force, and those without.
    fn in_force(&self, number: u64, limit: &mut SizeLimit) -> Result<(Vec<String>, Vec<String>), Status> {
        limit.take(self.names_bytes)?;
        let connected = self.gateways.iter().filter(|(_, gateway)| gateway.streams > 0);
        let (in_force, pending): (Vec<_>, Vec<_>) = connected.partition(|(_, gateway)| gateway.in_force >= number);
        let names = |list: Vec<(&String, &Gateway)>| list.into_iter().map(|(name, _)| name.clone()).collect();
        Ok((names(in_force), names(pending)))
    }

    fn policies(&self, limit: &mut SizeLimit, diagnostics: &mut SizeLimit) -> Result<Vec<PolicyState>, Status> {
        let compiled = self.state.source.compiled.load();
        let mut faulty: BTreeMap<String, _> =
            compiled.faulty.iter().map(|(id, faulty)| (id.to_string(), faulty)).collect();
        let mut out = Vec::new();
        let summaries = policy_summaries(&self.published);
        let mut set_aside = self.set_aside_by_object(&summaries, diagnostics);
        for (name, summary) in summaries {
            limit.take(size_of::<PolicyState>() + name.len() + summary.vips.len() * ADDRESS_BYTES)?;
            let (in_force, pending) = self.in_force(summary.since, limit)?;
            let fault = faulty.remove(name);
            let set_aside = set_aside.remove(name).unwrap_or_default();
            let is_set_aside = |gateway: &String| set_aside.iter().any(|it| it.gateway == *gateway);
            out.push(PolicyState {
                name: name.to_owned(),
                accepted: fault.is_none(),
                last_good: fault.is_some(),
                reasons: fault.map(|fault| diagnostics.truncate(&fault.reasons)).unwrap_or_default(),
                endpoints: summary.endpoints,
                vips: summary.vips.iter().map(IpAddr::to_string).collect(),
                in_force: in_force.into_iter().filter(|it| !is_set_aside(it)).collect(),
                pending: pending.into_iter().filter(|it| !is_set_aside(it)).collect(),
                set_aside,
            });
        }
        // Services that are no policies are of interest where a part is set aside.
        for (name, set_aside) in set_aside {
            out.push(PolicyState { name, accepted: true, set_aside, ..PolicyState::default() });
        }
        // Then all other invalid objects; policies in force come first, since users look for them.
        for (name, fault) in faulty {
            if !diagnostics.try_take(size_of::<PolicyState>() + name.len()) {
                break;
            }
            out.push(PolicyState {
                name,
                last_good: fault.has_last_good,
                reasons: diagnostics.truncate(&fault.reasons),
                ..PolicyState::default()
            });
        }
        Ok(out)
    }

    fn gateways(&self, limit: &mut SizeLimit) -> Result<Vec<GatewayState>, Status> {
        let placement = &self.published.placement;
        let is_known =
            |name: &str| placement.peers.is_empty() || placement.peers.iter().any(|peer| *peer.name == *name);
        let mut states: BTreeMap<String, GatewayState> = BTreeMap::new();
        let is_in_force = self.published.number > 0;
        for (name, gateway) in &self.gateways {
            let error: String = gateway.error.iter().flat_map(|error| error.chars()).take(MAX_ERROR).collect();
            limit.take(size_of::<GatewayState>() + name.len() + error.len() + ADDRESS_BYTES)?;
            states.insert(
                name.clone(),
                GatewayState {
                    name: name.clone(),
                    connected: gateway.streams > 0,
                    address: gateway.address.map(|address| address.to_string()).unwrap_or_default(),
                    since_seconds: gateway.since.elapsed().as_secs(),
                    in_step: gateway.streams > 0 && is_in_force && gateway.in_force == self.published.number,
                    error,
                    known: is_known(name),
                },
            );
        }
        // Gateways of the policy that have never connected.
        for peer in &placement.peers {
            limit.take(size_of::<GatewayState>() + peer.name.len())?;
            let never_connected =
                || GatewayState { name: peer.name.to_string(), known: true, ..GatewayState::default() };
            states.entry(peer.name.to_string()).or_insert_with(never_connected);
        }
        Ok(states.into_values().collect())
    }

    /// The agents of nodes; `None`: nodes run none.
    fn nodes(&self) -> Option<NodesState> {
        let (nodes, connected) = (self.published.placement.agents.len(), self.state.nodes.connected());
        (nodes + connected > 0).then(|| NodesState {
            nodes: nodes as u64,
            connected: connected as u64,
            rejected: self.state.nodes.rejecting().into_iter().take(MAX_NAMED_NODES).collect(),
        })
    }

    fn members(&self) -> Vec<MemberState> {
        let membership = self.state.membership.state.load();
        let state = |member: &Member| {
            let record = membership.record(&member.name).filter(|it| it.incarnation == member.incarnation);
            MemberState {
                name: member.name.to_string(),
                serving: member.serving,
                epoch: member.epoch,
                desired_state: record
                    .map_or("", |it| if it.is_unable() { "unable" } else { it.desired_state.name() })
                    .to_owned(),
                view: record.map_or(0, |it| it.seen_view),
                drain_blocked: membership.drain_block(&member.name).map(ToString::to_string).unwrap_or_default(),
            }
        };
        membership.view().members.iter().map(state).collect()
    }

    fn endpoint(&self, address: IpAddr, limit: &mut SizeLimit) -> Result<EndpointState, Status> {
        let Some(spec) = self.published.endpoint(address) else {
            return Ok(EndpointState { address: address.to_string(), ..EndpointState::default() });
        };
        limit.take(size_of::<EndpointState>() + spec.policy.len() + (1 + spec.vips.len()) * ADDRESS_BYTES)?;
        let vips: Vec<String> = spec.vips.iter().map(IpAddr::to_string).collect();
        let since = |kind, name: &str| changed_in(&self.published, kind, name);
        let own = [since(Kind::Endpoint, &address.to_string()), since(Kind::EgressPolicy, &spec.policy)];
        let since = vips.iter().map(|vip| since(Kind::Vip, vip));
        let (mut in_force, mut pending) = self.in_force(since.chain(own).max().unwrap_or(0), limit)?;
        self.without_set_aside(spec, &mut in_force, &mut pending);
        Ok(EndpointState {
            address: address.to_string(),
            policy: spec.policy.to_string(),
            vips,
            gateway: spec.gateway.as_deref().unwrap_or_default().to_owned(),
            in_force,
            pending,
        })
    }
}

#[cfg(test)]
mod tests;
