//! `vipgate policy status`: how things stand with each policy, and on which gateways it is in force.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;

use tokio::sync::oneshot;
use tonic::{Request, Response, Status};

use super::identity::{Peer, Refusals};
use super::publication::Publication;
use super::registry::Gateway;
use super::state::State;
use crate::complaint::Severity;
use crate::members::Member;
use crate::xds::proto::policy_status_server::PolicyStatus;
use crate::xds::proto::{
    AcceptEmptyReply, AcceptEmptyRequest, Complaint, EmptyText, EndpointState, GatewayState, MemberState, PolicyState,
    SourceStatus, StatusReply, StatusRequest,
};
use crate::xds::resource::{Key, Kind};

/// Answers from what the server knows of itself.
#[derive(Debug)]
pub(super) struct Service {
    pub(super) state: Arc<State>,
    pub(super) refusals: Arc<Refusals>,
}

impl Service {
    /// Whether a name is a gateway's: of the policy, of the view, or of one that has connected.
    fn is_gateway(&self, name: &str) -> bool {
        let in_policy =
            self.state.published.borrow().as_ref().is_some_and(|it| it.deal.peers.iter().any(|it| *it.name == *name));
        in_policy || self.state.members.view.borrow().member(name).is_some() || self.state.registry.has(name)
    }
}

#[tonic::async_trait]
impl PolicyStatus for Service {
    async fn status(&self, request: Request<StatusRequest>) -> Result<Response<StatusReply>, Status> {
        let mut wanted = Vec::new();
        for text in request.into_inner().endpoints {
            let address = text.parse().map_err(|_| Status::invalid_argument(format!("`{text}` is no address")))?;
            wanted.push(address);
        }
        let state = self.state.clone();
        // It looks at every endpoint: nobody else should wait for that.
        let reply = tokio::task::spawn_blocking(move || View::of(&state).reply(&wanted)).await;
        reply.map(Response::new).map_err(|error| Status::internal(error.to_string()))
    }

    async fn accept_empty(&self, request: Request<AcceptEmptyRequest>) -> Result<Response<AcceptEmptyReply>, Status> {
        let peer = Peer::of(&request);
        if let Err(status) = peer.may_order(&self.state.admins, |name| self.is_gateway(name)) {
            self.state.figures.orders_refused.add();
            self.refusals.log_order(&peer, "accept-empty", &status);
            return Err(status);
        }
        let address = peer.address.map(|it| it.to_string()).unwrap_or_default();
        tracing::info!(event = "accept_empty", address, "told to take an empty source at its word");
        let (answer, answered) = oneshot::channel();
        let stopping = || Status::unavailable("the server is stopping");
        self.state.accept_empty.send(answer).await.map_err(|_| stopping())?;
        let outcome = answered.await.map_err(|_| stopping())?;
        let accepted = outcome.map_err(Status::failed_precondition)?;
        let texts = accepted.texts.into_iter();
        let texts =
            texts.map(|(name, objects)| EmptyText { name: name.to_string(), objects: objects as u64 }).collect();
        Ok(Response::new(AcceptEmptyReply { texts }))
    }
}

/// What is in force where, at one moment.
struct View<'a> {
    state: &'a State,
    published: Arc<Publication>,
    gateways: BTreeMap<String, Gateway>,
}

/// A policy's endpoints and VIPs, and the publication that changed any of it last.
#[derive(Default)]
struct Part {
    endpoints: u64,
    vips: BTreeSet<IpAddr>,
    since: u64,
}

impl<'a> View<'a> {
    fn of(state: &'a State) -> Self {
        let published = state.published.borrow().clone().unwrap_or_default();
        Self { state, published, gateways: state.registry.list() }
    }

    fn reply(&self, wanted: &[IpAddr]) -> StatusReply {
        let compiled = self.state.source.compiled.load();
        let error = self.state.source.lost.load_full();
        let health = self.state.source.health.load();
        let complaint = |it: &crate::complaint::Complaint| Complaint {
            file: it.file.to_string(),
            line: it.line,
            field: it.field.clone(),
            severity: if it.severity == Severity::Error { "error" } else { "warning" }.to_owned(),
            reason: it.reason.clone(),
        };
        StatusReply {
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
            }),
            policies: self.policies(),
            gateways: self.gateways(),
            complaints: compiled.complaints.iter().map(complaint).collect(),
            endpoints: wanted.iter().map(|address| self.endpoint(*address)).collect(),
            vips: self.published.deal.vips.len() as u64,
            covered_endpoints: self.published.deal.endpoints.len() as u64,
            services: self.published.deal.services.len() as u64,
            members: self.members(),
            view: self.state.members.view.borrow().number,
        }
    }

    /// When a resource came to be what it is; 0 for what isn't there.
    fn since(&self, kind: Kind, name: &str) -> u64 {
        self.published.get(&Key { kind, name: name.into() }).map_or(0, |it| it.since)
    }

    /// Gateways that have what was published with this number in force, and those that don't.
    fn in_force(&self, number: u64) -> (Vec<String>, Vec<String>) {
        let connected = self.gateways.iter().filter(|(_, gateway)| gateway.streams > 0);
        let (there, not): (Vec<_>, Vec<_>) = connected.partition(|(_, gateway)| gateway.in_force >= number);
        let names = |list: Vec<(&String, &Gateway)>| list.into_iter().map(|(name, _)| name.clone()).collect();
        (names(there), names(not))
    }

    fn policies(&self) -> Vec<PolicyState> {
        let compiled = self.state.source.compiled.load();
        let deal = &self.published.deal;
        let mut parts: BTreeMap<&str, Part> =
            deal.policies.iter().map(|policy| (&*policy.name, Part::default())).collect();
        for endpoint in self.published.of(Kind::Endpoint) {
            let dealt = endpoint.key.name.parse().ok().and_then(|address| self.published.endpoint(address));
            let Some(dealt) = dealt else { continue };
            let Some(part) = parts.get_mut(&*dealt.policy) else { continue };
            part.endpoints += 1;
            part.since = part.since.max(endpoint.since);
            part.vips.extend(&dealt.vips);
        }
        let mut faulty: BTreeMap<String, _> =
            compiled.faulty.iter().map(|(id, faulty)| (id.to_string(), faulty)).collect();
        let mut out = Vec::new();
        for (name, part) in parts {
            let vips = part.vips.iter().map(|vip| self.since(Kind::Vip, &vip.to_string()));
            let since = vips.chain([part.since, self.since(Kind::EgressPolicy, name)]).max().unwrap_or(0);
            let (in_force, pending) = self.in_force(since);
            let fault = faulty.remove(name);
            out.push(PolicyState {
                name: name.to_owned(),
                accepted: fault.is_none(),
                last_good: fault.is_some(),
                reasons: fault.map(|fault| fault.reasons.clone()).unwrap_or_default(),
                endpoints: part.endpoints,
                vips: part.vips.iter().map(IpAddr::to_string).collect(),
                in_force,
                pending,
            });
        }
        // Whatever else was left out, policies first: they are what people ask for.
        for (name, fault) in faulty {
            out.push(PolicyState {
                name,
                last_good: fault.has_last_good,
                reasons: fault.reasons.clone(),
                ..PolicyState::default()
            });
        }
        out
    }

    fn gateways(&self) -> Vec<GatewayState> {
        let deal = &self.published.deal;
        let is_known = |name: &str| deal.peers.is_empty() || deal.peers.iter().any(|peer| *peer.name == *name);
        let mut states: BTreeMap<String, GatewayState> = BTreeMap::new();
        let is_in_force = self.published.number > 0;
        for (name, gateway) in &self.gateways {
            states.insert(
                name.clone(),
                GatewayState {
                    name: name.clone(),
                    connected: gateway.streams > 0,
                    address: gateway.address.map(|address| address.to_string()).unwrap_or_default(),
                    since_seconds: gateway.since.elapsed().as_secs(),
                    in_step: gateway.streams > 0 && is_in_force && gateway.in_force == self.published.number,
                    error: gateway.error.clone().unwrap_or_default(),
                    known: is_known(name),
                },
            );
        }
        // Those that should be there, but never were.
        for peer in &deal.peers {
            let absent = || GatewayState { name: peer.name.to_string(), known: true, ..GatewayState::default() };
            states.entry(peer.name.to_string()).or_insert_with(absent);
        }
        states.into_values().collect()
    }

    fn members(&self) -> Vec<MemberState> {
        let roster = self.state.members.roster.load();
        let state = |member: &Member| {
            let seat = roster.seat(&member.name).filter(|seat| seat.incarnation == member.incarnation);
            MemberState {
                name: member.name.to_string(),
                serving: member.serving,
                epoch: member.epoch,
                wish: seat.map_or("", |seat| if seat.is_unable() { "unable" } else { seat.wish.name() }).to_owned(),
                view: seat.map_or(0, |seat| seat.seen_view),
            }
        };
        roster.view().members.iter().map(state).collect()
    }

    fn endpoint(&self, address: IpAddr) -> EndpointState {
        let Some(dealt) = self.published.endpoint(address) else {
            return EndpointState { address: address.to_string(), ..EndpointState::default() };
        };
        let vips: Vec<String> = dealt.vips.iter().map(IpAddr::to_string).collect();
        let since = vips.iter().map(|vip| self.since(Kind::Vip, vip));
        let own = [self.since(Kind::Endpoint, &address.to_string()), self.since(Kind::EgressPolicy, &dealt.policy)];
        let (in_force, pending) = self.in_force(since.chain(own).max().unwrap_or(0));
        EndpointState {
            address: address.to_string(),
            policy: dealt.policy.to_string(),
            vips,
            gateway: dealt.gateway.as_deref().unwrap_or_default().to_owned(),
            in_force,
            pending,
        }
    }
}
