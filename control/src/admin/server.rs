//! gRPC service of the admin API.

use std::collections::HashMap;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;

use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use vipgate_dataplane::policy::compiled::{Policy, Vip};
use vipgate_dataplane::policy::endpoints::Endpoint;
use vipgate_dataplane::policy::spec::Announce;
use vipgate_dataplane::session::query::SessionFilter;

use super::capture::Captures;
use super::filter::FilterError;
use super::ports::BlockUsage;
use super::proto::admin_server::Admin;
use super::{drops, explain, membership, placement, ports, proto, services, status, trace};
use crate::admin::workers::Workers;
use crate::state::GatewayState;
use crate::state::conflicts::format_mac;

/// Answers requests from the gateway's shared state and its workers.
pub(crate) struct Service {
    state: Arc<GatewayState>,
    workers: Arc<Workers>,
    captures: Captures,
}

impl Service {
    pub(crate) fn new(state: Arc<GatewayState>) -> Self {
        Self { workers: Arc::new(Workers::new(state.clone())), state, captures: Captures::default() }
    }
}

type Reply<T> = Result<Response<T>, Status>;

#[tonic::async_trait]
impl Admin for Service {
    async fn status(&self, _: Request<proto::StatusRequest>) -> Reply<proto::StatusReply> {
        Ok(Response::new(status::status(&self.state)))
    }

    type SessionsStream = Pin<Box<dyn Stream<Item = Result<proto::SessionsReply, Status>> + Send>>;

    async fn sessions(&self, request: Request<proto::SessionsRequest>) -> Reply<Self::SessionsStream> {
        let request = request.into_inner();
        let filter = filter(request.filter)?;
        let limit = if request.limit == 0 { u64::MAX } else { request.limit };
        let (sender, receiver) = tokio::sync::mpsc::channel(2);
        let workers = self.workers.clone();
        // The task ends when the client disconnects: sending the next chunk fails then.
        tokio::spawn(async move { workers.list_sessions(filter, limit, sender).await });
        Ok(Response::new(Box::pin(ReceiverStream::new(receiver))))
    }

    async fn flush_sessions(&self, request: Request<proto::FlushSessionsRequest>) -> Reply<proto::FlushSessionsReply> {
        let filter = filter(request.into_inner().filter)?;
        let ended = self.workers.flush_sessions(&filter).await?;
        tracing::info!(event = "flush", ended, ?filter, "sessions flushed");
        Ok(Response::new(proto::FlushSessionsReply { ended }))
    }

    async fn vips(&self, _: Request<proto::VipsRequest>) -> Reply<proto::VipsReply> {
        let used = ports::block_usage(&self.state, &self.workers, None).await?;
        let policy = self.state.compiled.load();
        let mut users: HashMap<IpAddr, u64> = HashMap::new();
        for vip in policy.endpoints().flat_map(|(_, endpoint)| policy.vips_of(endpoint)) {
            *users.entry(vip.address).or_default() += 1;
        }
        let mut vips: Vec<_> = policy.live_vips().collect();
        vips.sort_by_key(|vip| vip.address);
        let vips = vips.into_iter().map(|it| {
            let users = users.get(&it.address).copied().unwrap_or_default();
            vip(it, users, &used, &policy, &self.state)
        });
        Ok(Response::new(proto::VipsReply {
            vips: vips.collect(),
            session_fair_share: self.state.sum(|counters| counters.session_fair_share.get()),
        }))
    }

    async fn endpoints(&self, _: Request<proto::EndpointsRequest>) -> Reply<proto::EndpointsReply> {
        let policy = self.state.compiled.load();
        let mut endpoints: Vec<_> = policy.endpoints().collect();
        endpoints.sort_by_key(|(address, _)| *address);
        let endpoints = endpoints.into_iter().map(|(address, it)| endpoint(address, it, &policy, &self.state));
        Ok(Response::new(proto::EndpointsReply { endpoints: endpoints.collect() }))
    }

    async fn services(&self, _: Request<proto::ServicesRequest>) -> Reply<proto::ServicesReply> {
        let services = services::all(&self.state.compiled.load(), &self.state.health_errors.load());
        Ok(Response::new(proto::ServicesReply { services }))
    }

    async fn peers(&self, _: Request<proto::PeersRequest>) -> Reply<proto::PeersReply> {
        let (peers, group) = (membership::peers(&self.state), membership::membership(&self.state));
        Ok(Response::new(proto::PeersReply { peers, group: Some(group) }))
    }

    async fn drain(&self, request: Request<proto::DrainRequest>) -> Reply<proto::DrainReply> {
        let proto::DrainRequest { draining, dry_run } = request.into_inner();
        let moves = if dry_run { membership::drain_moves(&self.state)? } else { Vec::new() };
        let drains_refused = self.state.group.load().refused_drains.count;
        if !dry_run {
            membership::drain(&self.state, draining)?;
        }
        Ok(Response::new(proto::DrainReply { moves, drains_refused }))
    }

    async fn placement(&self, _: Request<proto::PlacementRequest>) -> Reply<proto::PlacementReply> {
        Ok(Response::new(placement::in_force(&self.state)?))
    }

    async fn accept_empty(&self, _: Request<proto::AcceptEmptyRequest>) -> Reply<proto::AcceptEmptyReply> {
        let from_server = "this gateway's policy comes from a policy server: use --server URL";
        let files = self.state.files.as_ref().ok_or_else(|| Status::failed_precondition(from_server))?;
        let accepted = files.accept_empty().await.map_err(|error| Status::failed_precondition(error.to_string()))?;
        let text =
            |(name, objects): (Arc<str>, usize)| proto::EmptyText { name: name.to_string(), objects: objects as u64 };
        Ok(Response::new(proto::AcceptEmptyReply { texts: accepted.entries.into_iter().map(text).collect() }))
    }

    async fn drops(&self, _: Request<proto::DropsRequest>) -> Reply<proto::DropsReply> {
        Ok(Response::new(drops::all(&self.state, &self.workers).await?))
    }

    async fn ports(&self, _: Request<proto::PortsRequest>) -> Reply<proto::PortsReply> {
        Ok(Response::new(ports::all(&self.state, &self.workers).await?))
    }

    async fn trace(&self, request: Request<proto::TraceRequest>) -> Reply<proto::TraceReply> {
        Ok(Response::new(trace::trace(request.get_ref(), &self.state, &self.workers).await?))
    }

    async fn explain(&self, request: Request<proto::ExplainRequest>) -> Reply<proto::ExplainReply> {
        Ok(Response::new(explain::explain(&request.get_ref().address, &self.state, &self.workers).await?))
    }

    type CaptureStream = Pin<Box<dyn Stream<Item = Result<proto::CaptureReply, Status>> + Send>>;

    async fn capture(&self, request: Request<proto::CaptureRequest>) -> Reply<Self::CaptureStream> {
        let packets = self.captures.start(request.get_ref(), &self.state)?;
        Ok(Response::new(Box::pin(ReceiverStream::new(packets))))
    }
}

/// A VIP, with the number of endpoints that use it, and what it uses at the workers.
pub(super) fn vip(vip: &Vip, endpoints: u64, used: &BlockUsage, policy: &Policy, state: &GatewayState) -> proto::Vip {
    let conflicts = state.conflicts.load();
    proto::Vip {
        address: vip.address.to_string(),
        name: vip.name.to_string(),
        announce: match vip.announce {
            Announce::L2 => "L2".to_owned(),
            Announce::Bgp => "BGP".to_owned(),
        },
        reserved_ports: vip.ports.reserved.iter().map(|&port| port.into()).collect(),
        endpoints,
        conflict: conflicts.get(&vip.address).map(|claim| proto::Conflict {
            mac: format_mac(claim.mac),
            age_seconds: claim.last_seen.elapsed().as_secs(),
        }),
        shares: membership::shards(policy, vip, state),
        sessions: vip.ports.pool.sessions(),
        table_sessions: used.table_sessions(vip.ports.id),
        private: vip.private_at(policy.members().this_name()).map(|it| it.to_string()).unwrap_or_default(),
    }
}

pub(super) fn endpoint(address: IpAddr, endpoint: &Endpoint, policy: &Policy, state: &GatewayState) -> proto::Endpoint {
    proto::Endpoint {
        sessions: endpoint.usage.sessions().into(),
        refused: endpoint.usage.rejected(),
        address: address.to_string(),
        name: endpoint.name.to_string(),
        policy: policy.egress_of(endpoint).spec.name.to_string(),
        vips: policy.vips_of(endpoint).map(|vip| vip.address.to_string()).collect(),
        home: policy.home_of(endpoint).map(|home| policy.members().name(home).to_string()).unwrap_or_default(),
        owner: membership::owner_name(policy, policy.owner_of(endpoint), state),
    }
}

fn filter(filter: Option<proto::SessionFilter>) -> Result<SessionFilter, Status> {
    (&filter.unwrap_or_default()).try_into().map_err(|error: FilterError| Status::invalid_argument(error.to_string()))
}
