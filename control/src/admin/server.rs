//! gRPC service of the admin API.

use std::collections::HashMap;
use std::net::IpAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use ipnet::IpNet;
use tokio_stream::Stream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Request, Response, Status};
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::observe::counters::Counter;
use vipgate_dataplane::policy::compiled::{Policy, Vip};
use vipgate_dataplane::policy::endpoints::Endpoint;
use vipgate_dataplane::policy::spec::{Announce, ClusterSpec, Role};
use vipgate_dataplane::session::query::SessionFilter;

use super::capture::Captures;
use super::filter::FilterError;
use super::proto::admin_server::Admin;
use super::{PROTOCOL, drops, explain, ports, proto, services, trace, tracking};
use crate::admin::membership;
use crate::admin::workers::Workers;
use crate::natlog::NatLogStatus;
use crate::source::ingest::SourceStatus;
use crate::state::conflicts::format_mac;
use crate::state::{DeviceStats, GatewayState};
use crate::xds::client::ServerStatus;

/// Limit of faulty objects in the status; the counters include all.
const MAX_FAULTY: usize = 100;

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
        let state = &self.state;
        let (policy, compiled) = (state.policy.load(), state.compiled.load());
        let workers: Vec<_> = (0..)
            .zip(state.workers())
            .map(|(number, worker)| {
                let counters = &worker.counters;
                let packets = Direction::ALL
                    .map(|direction| (direction.name().to_owned(), counters.packets[direction as usize].get()));
                let bytes = Direction::ALL
                    .map(|direction| (direction.name().to_owned(), counters.bytes[direction as usize].get()));
                proto::WorkerStatus {
                    worker: number,
                    core: u32::try_from(worker.core).unwrap_or(u32::MAX),
                    sessions: counters.sessions.get(),
                    received: counters.received.get(),
                    packets: packets.into(),
                    drops: state.drops(number as usize).iter().sum(),
                    handoffs: counters.handoffs.get(),
                    answered: counters.replies_sent.get(),
                    waiting: counters.neighbor_waiting.get(),
                    sessions_created: counters.sessions_created.get(),
                    sessions_ended: counters.sessions_ended.iter().map(Counter::get).sum(),
                    bytes: bytes.into(),
                }
            })
            .collect();
        let (network, tracking) = (state.network.load(), state.tracking.load());
        let interfaces = network.interfaces.iter().map(|interface| proto::InterfaceStatus {
            down: tracking::down(&tracking, &interface.name),
            xdp: tracking::xdp(&tracking, &interface.name),
            xdp_detached: tracking::detached(&tracking, &interface.name),
            name: interface.name.clone(),
            role: role(interface.role).to_owned(),
            mac: interface.mac.map(|byte| format!("{byte:02x}")).join(":"),
            mtu: interface.mtu.into(),
            carried: interface.usable_mtu().into(),
            up: interface.up,
            addresses: interface.addresses.iter().map(IpAddr::to_string).collect(),
        });
        let sockets = state.sockets().iter().map(|socket| proto::SocketStatus {
            interface: socket.interface.clone(),
            queue: socket.queue,
            worker: u32::try_from(socket.worker).unwrap_or(u32::MAX),
            mode: socket.mode.to_owned(),
            zero_copy: socket.zero_copy,
        });
        let stats =
            state.device().map(DeviceStats::metrics).unwrap_or_default().into_iter().map(|stat| proto::Figure {
                name: stat.name.to_owned(),
                labels: stat.labels.into_iter().map(|(name, value)| (name.to_owned(), value)).collect(),
                value: stat.value,
            });
        Ok(Response::new(proto::StatusReply {
            protocol: PROTOCOL,
            name: state.name.clone(),
            node: state.node.clone(),
            zone: state.zone.clone().unwrap_or_default(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            uptime_seconds: state.started.elapsed().as_secs(),
            ready: state.ready.load(Ordering::Relaxed),
            sessions: workers.iter().map(|worker| worker.sessions).sum(),
            session_capacity: state.session_capacity,
            standby_sessions: state.sum(|counters| counters.standby_sessions.get()),
            session_reserve: state.sum(|counters| counters.session_reserve.get()),
            session_fair_share: state.sum(|counters| counters.session_fair_share.get()),
            policy: Some(proto::PolicyStatus {
                version: compiled.version().to_owned(),
                source: policy.source.clone(),
                generation: policy.generation,
                age_seconds: SystemTime::now().duration_since(policy.applied_at).unwrap_or_default().as_secs(),
                updates_applied: policy.updates_applied,
                updates_rejected: policy.updates_rejected,
                last_error: policy.last_error.clone().unwrap_or_default(),
                vips: compiled.live_vips().count() as u64,
                endpoints: compiled.endpoint_count() as u64,
                services: compiled.services().count() as u64,
                server: state.server.as_ref().map(|server| server_status(&server.load())),
                manifests: state.files.as_ref().map(|files| manifests(&files.status)),
                cluster: Some(cluster(compiled.cluster())),
            }),
            workers,
            interfaces: interfaces.collect(),
            sockets: sockets.collect(),
            figures: stats.collect(),
            group: (!policy.peers.is_empty()).then(|| membership::membership(state)),
            nat_log: state.nat_log.as_ref().map(|log| nat_log(log)),
            faults: tracking.faults.iter().map(ToString::to_string).collect(),
            held_down_ms: tracking::held_down_ms(&tracking),
            next_hops: tracking::next_hops(&tracking),
        }))
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
            proto::Vip { table_sessions: used.table_sessions(it.ports.id), ..vip(it, users, &policy, &self.state) }
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
        if !dry_run {
            membership::drain(&self.state, draining)?;
        }
        Ok(Response::new(proto::DrainReply { moves }))
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

/// A VIP and the number of endpoints that use it.
pub(super) fn vip(vip: &Vip, endpoints: u64, policy: &Policy, state: &GatewayState) -> proto::Vip {
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
        table_sessions: 0,
    }
}

/// An endpoint.
pub(super) fn endpoint(address: IpAddr, endpoint: &Endpoint, policy: &Policy, state: &GatewayState) -> proto::Endpoint {
    proto::Endpoint {
        sessions: endpoint.usage.sessions().into(),
        refused: endpoint.usage.rejected(),
        address: address.to_string(),
        name: endpoint.name.to_string(),
        policy: policy.egress_of(endpoint).spec.name.to_string(),
        vips: policy.vips_of(endpoint).map(|vip| vip.address.to_string()).collect(),
        home: endpoint.home.map(|home| policy.members().name(home).to_string()).unwrap_or_default(),
        owner: membership::owner_name(policy, policy.owner_of(endpoint), state),
    }
}

fn cluster(cluster: &ClusterSpec) -> proto::ClusterRanges {
    let texts = |nets: &[IpNet]| nets.iter().map(ToString::to_string).collect();
    proto::ClusterRanges {
        pods: texts(&cluster.pods),
        others: texts(&cluster.others),
        drop_uncovered: cluster.drop_uncovered,
    }
}

fn filter(filter: Option<proto::SessionFilter>) -> Result<SessionFilter, Status> {
    (&filter.unwrap_or_default()).try_into().map_err(|error: FilterError| Status::invalid_argument(error.to_string()))
}

fn server_status(server: &ServerStatus) -> proto::ServerStatus {
    let seconds = |at: SystemTime| SystemTime::now().duration_since(at).unwrap_or_default().as_secs();
    proto::ServerStatus {
        connected: server.connected,
        since_seconds: seconds(server.since),
        error: server.error.clone().unwrap_or_default(),
        has_policy: server.confirmed_at.is_some(),
        policy_age_seconds: server.confirmed_at.map_or(0, seconds),
        cache_error: server.cache_error.clone().unwrap_or_default(),
    }
}

fn manifests(status: &SourceStatus) -> proto::ManifestSource {
    let (health, compiled) = (status.health.load(), status.compiled.load());
    let [(_, accepted), (_, last_good), (_, rejected)] = compiled.states();
    let faulty = compiled.faulty.iter().take(MAX_FAULTY).map(|(id, faulty)| proto::FaultyObject {
        name: id.to_string(),
        last_good: faulty.has_last_good,
        reasons: faulty.reasons.clone(),
    });
    proto::ManifestSource {
        healthy: health.is_healthy(),
        reasons: health.reasons.clone(),
        since_seconds: health.age_seconds(),
        waiting: health.waiting,
        accepted,
        last_good,
        rejected,
        faulty: faulty.collect(),
    }
}

fn nat_log(log: &NatLogStatus) -> proto::NatLog {
    proto::NatLog {
        collector: log.collector.clone(),
        sessions: log.sessions,
        sent: log.stats.sent(),
        lost: log.stats.lost(),
        error: log.stats.error().map(|error| error.to_string()).unwrap_or_default(),
    }
}

fn role(role: Role) -> &'static str {
    match role {
        Role::Inside => "inside",
        Role::Outside => "outside",
        Role::Both => "both",
    }
}
