//! `vipgate policy status`: how things stand with each policy, and on which gateways it is in force. A question is answered from all
//! endpoints and gateways, so only few are at the same time, and no answer is longer than it may be.

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;
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

/// Endpoints of one question, at most.
const MAX_ENDPOINTS: usize = 1000;
/// Questions that are answered at the same time, on threads that the compiler of policies needs as well.
const MAX_RUNNING: usize = 2;
/// How long another one waits for its turn.
const TURN_TIMEOUT: Duration = Duration::from_secs(2);
/// Bytes of one answer: of what is refused beyond, names of gateways for the most part, and of what is cut, the reasons of complaints.
const MAX_REPLY: usize = 64 << 20;
const MAX_COMPLAINTS: usize = 16 << 20;
/// Characters of what a gateway said when it refused something: it says what it likes.
const MAX_ERROR: usize = 1000;
/// Bytes of an address as text.
const ADDRESS: usize = size_of::<String>() + 39;

/// The turns of questions.
static RUNNING: Semaphore = Semaphore::const_new(MAX_RUNNING);

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
        let wanted = addresses(&request.into_inner().endpoints)?;
        let state = self.state.clone();
        let reply = apart(&RUNNING, move || View::of(&state).reply(&wanted)).await.flatten();
        if reply.is_err() {
            self.state.budget.refused.add();
        }
        reply.map(Response::new)
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

/// The addresses in a question, each once.
fn addresses(texts: &[String]) -> Result<Vec<IpAddr>, Status> {
    let (mut seen, mut wanted) = (BTreeSet::new(), Vec::new());
    for text in texts {
        let address: IpAddr =
            text.parse().map_err(|_| Status::invalid_argument(format!("`{text:.50}` is no address")))?;
        if !seen.insert(address) {
            continue;
        }
        if wanted.len() == MAX_ENDPOINTS {
            return Err(Status::invalid_argument(format!(
                "more than {MAX_ENDPOINTS} endpoints: ask for fewer at a time"
            )));
        }
        wanted.push(address);
    }
    Ok(wanted)
}

/// Does long work on a thread of its own when there is a turn for it. The turn ends with the work, not with the request: no client takes
/// more threads by going away.
async fn apart<T: Send + 'static>(
    turns: &'static Semaphore,
    work: impl FnOnce() -> T + Send + 'static,
) -> Result<T, Status> {
    let Ok(Ok(turn)) = timeout(TURN_TIMEOUT, turns.acquire()).await else {
        return Err(Status::resource_exhausted("too many ask for the status at the same time: ask again later"));
    };
    let done = tokio::task::spawn_blocking(move || {
        let outcome = work();
        drop(turn);
        outcome
    });
    done.await.map_err(|error| Status::internal(error.to_string()))
}

/// Bytes that an answer may still take.
#[derive(Debug)]
struct Space {
    left: usize,
    /// Whether something didn't fit; then nothing does any more.
    is_over: bool,
}

impl Space {
    fn of(bytes: usize) -> Self {
        Self { left: bytes, is_over: false }
    }

    /// Takes so many, if there are as many.
    fn fits(&mut self, bytes: usize) -> bool {
        let left = self.left.checked_sub(bytes);
        self.is_over |= left.is_none();
        self.left = left.unwrap_or_default();
        !self.is_over
    }

    /// The same for what can't be left out.
    fn take(&mut self, bytes: usize) -> Result<(), Status> {
        if self.fits(bytes) {
            return Ok(());
        }
        Err(Status::resource_exhausted(format!(
            "the answer, with the names of gateways for each policy and endpoint, would take more than {} MiB: ask for fewer endpoints",
            MAX_REPLY >> 20
        )))
    }

    /// As many of these texts as fit.
    fn cut(&mut self, texts: &[String]) -> Vec<String> {
        texts.iter().take_while(|text| self.fits(size_of::<String>() + text.len())).cloned().collect()
    }
}

/// What is in force where, at one moment.
struct View<'a> {
    state: &'a State,
    published: Arc<Publication>,
    gateways: BTreeMap<String, Gateway>,
    /// Bytes of the names of those that are connected: each policy and each endpoint lists all of them.
    names: usize,
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
        let gateways = state.registry.list();
        let connected = gateways.iter().filter(|(_, gateway)| gateway.streams > 0);
        let names = connected.map(|(name, _)| size_of::<String>() + name.len()).sum();
        Self { state, published, gateways, names }
    }

    fn reply(&self, wanted: &[IpAddr]) -> Result<StatusReply, Status> {
        let error = self.state.source.lost.load_full();
        let health = self.state.source.health.load();
        let (mut space, mut complaints) = (Space::of(MAX_REPLY), Space::of(MAX_COMPLAINTS));
        let policies = self.policies(&mut space, &mut complaints)?;
        let gateways = self.gateways(&mut space)?;
        let endpoints = wanted.iter().map(|address| self.endpoint(*address, &mut space));
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
            }),
            policies,
            gateways,
            complaints: self.complaints(&mut complaints),
            endpoints,
            vips: self.published.deal.vips.len() as u64,
            covered_endpoints: self.published.deal.endpoints.len() as u64,
            services: self.published.deal.services.len() as u64,
            members: self.members(),
            view: self.state.members.view.borrow().number,
        })
    }

    /// What is wrong with manifests, as far as there is space for it.
    fn complaints(&self, space: &mut Space) -> Vec<Complaint> {
        let compiled = self.state.source.compiled.load();
        let mut out = Vec::new();
        for it in &compiled.complaints {
            if !space.fits(size_of::<Complaint>() + it.file.len() + it.field.len() + it.reason.len()) {
                break;
            }
            out.push(Complaint {
                file: it.file.to_string(),
                line: it.line,
                field: it.field.clone(),
                severity: if it.severity == Severity::Error { "error" } else { "warning" }.to_owned(),
                reason: it.reason.clone(),
            });
        }
        if space.is_over {
            out.push(Complaint {
                file: self.state.source.name.clone(),
                severity: "error".to_owned(),
                reason: "more is wrong than an answer has space for".to_owned(),
                ..Complaint::default()
            });
        }
        out
    }

    /// When a resource came to be what it is; 0 for what isn't there.
    fn since(&self, kind: Kind, name: &str) -> u64 {
        self.published.get(&Key { kind, name: name.into() }).map_or(0, |it| it.since)
    }

    /// Gateways that have what was published with this number in force, and those that don't.
    fn in_force(&self, number: u64, space: &mut Space) -> Result<(Vec<String>, Vec<String>), Status> {
        space.take(self.names)?;
        let connected = self.gateways.iter().filter(|(_, gateway)| gateway.streams > 0);
        let (there, not): (Vec<_>, Vec<_>) = connected.partition(|(_, gateway)| gateway.in_force >= number);
        let names = |list: Vec<(&String, &Gateway)>| list.into_iter().map(|(name, _)| name.clone()).collect();
        Ok((names(there), names(not)))
    }

    fn policies(&self, space: &mut Space, complaints: &mut Space) -> Result<Vec<PolicyState>, Status> {
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
            space.take(size_of::<PolicyState>() + name.len() + part.vips.len() * ADDRESS)?;
            let (in_force, pending) = self.in_force(since, space)?;
            let fault = faulty.remove(name);
            out.push(PolicyState {
                name: name.to_owned(),
                accepted: fault.is_none(),
                last_good: fault.is_some(),
                reasons: fault.map(|fault| complaints.cut(&fault.reasons)).unwrap_or_default(),
                endpoints: part.endpoints,
                vips: part.vips.iter().map(IpAddr::to_string).collect(),
                in_force,
                pending,
            });
        }
        // Whatever else was left out, policies first: they are what people ask for.
        for (name, fault) in faulty {
            if !complaints.fits(size_of::<PolicyState>() + name.len()) {
                break;
            }
            out.push(PolicyState {
                name,
                last_good: fault.has_last_good,
                reasons: complaints.cut(&fault.reasons),
                ..PolicyState::default()
            });
        }
        Ok(out)
    }

    fn gateways(&self, space: &mut Space) -> Result<Vec<GatewayState>, Status> {
        let deal = &self.published.deal;
        let is_known = |name: &str| deal.peers.is_empty() || deal.peers.iter().any(|peer| *peer.name == *name);
        let mut states: BTreeMap<String, GatewayState> = BTreeMap::new();
        let is_in_force = self.published.number > 0;
        for (name, gateway) in &self.gateways {
            let error: String = gateway.error.iter().flat_map(|error| error.chars()).take(MAX_ERROR).collect();
            space.take(size_of::<GatewayState>() + name.len() + error.len() + ADDRESS)?;
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
        // Those that should be there, but never were.
        for peer in &deal.peers {
            space.take(size_of::<GatewayState>() + peer.name.len())?;
            let absent = || GatewayState { name: peer.name.to_string(), known: true, ..GatewayState::default() };
            states.entry(peer.name.to_string()).or_insert_with(absent);
        }
        Ok(states.into_values().collect())
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

    fn endpoint(&self, address: IpAddr, space: &mut Space) -> Result<EndpointState, Status> {
        let Some(dealt) = self.published.endpoint(address) else {
            return Ok(EndpointState { address: address.to_string(), ..EndpointState::default() });
        };
        space.take(size_of::<EndpointState>() + dealt.policy.len() + (1 + dealt.vips.len()) * ADDRESS)?;
        let vips: Vec<String> = dealt.vips.iter().map(IpAddr::to_string).collect();
        let since = vips.iter().map(|vip| self.since(Kind::Vip, vip));
        let own = [self.since(Kind::Endpoint, &address.to_string()), self.since(Kind::EgressPolicy, &dealt.policy)];
        let (in_force, pending) = self.in_force(since.chain(own).max().unwrap_or(0), space)?;
        Ok(EndpointState {
            address: address.to_string(),
            policy: dealt.policy.to_string(),
            vips,
            gateway: dealt.gateway.as_deref().unwrap_or_default().to_owned(),
            in_force,
            pending,
        })
    }
}

#[cfg(test)]
mod tests;
