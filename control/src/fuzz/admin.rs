//! Fuzzing of the admin API: any request to a gateway with real workers.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use prost::Message;
use thiserror::Error;
use tokio::sync::mpsc;
use tokio_stream::StreamExt;
use tonic::{Code, Status};
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::spec::NetworkSpec;

use crate::admin::Service;
use crate::admin::proto::admin_server::Admin;
use crate::admin::proto::{
    CaptureRequest, DrainRequest, ExplainRequest, FlushSessionsRequest, SessionsRequest, StatusRequest, TraceRequest,
};
use crate::metric::Family;
use crate::state::{
    DeviceStats, EngineHandle, GatewayState, ListenerConnections, PolicyStatus, RingDrops, VipPlacement, WorkerHandle,
};
use crate::xds::tls::CertificateFiles;

/// A request of the admin API.
#[derive(Clone, Debug)]
pub enum Request {
    /// Status of the gateway.
    Status,
    /// List sessions.
    Sessions(SessionsRequest),
    /// End sessions.
    Flush(FlushSessionsRequest),
    /// Trace a packet.
    Trace(TraceRequest),
    /// Explain an address by the policy.
    Explain(ExplainRequest),
    /// Capture packets.
    Capture(CaptureRequest),
    /// Drain or undrain the gateway.
    Drain(DrainRequest),
}

impl Request {
    /// Whether the request is read-only.
    pub fn is_read_only(&self) -> bool {
        !matches!(self, Self::Flush(_) | Self::Drain(_) | Self::Capture(_))
    }
}

/// Decodes a request: a kind byte, then the message.
pub fn request(data: &[u8]) -> Option<Request> {
    let (kind, message) = data.split_first()?;
    Some(match kind % 7 {
        0 => StatusRequest::decode(message).map(|_| Request::Status).ok()?,
        1 => Request::Sessions(SessionsRequest::decode(message).ok()?),
        2 => Request::Flush(FlushSessionsRequest::decode(message).ok()?),
        3 => Request::Trace(TraceRequest::decode(message).ok()?),
        4 => Request::Explain(ExplainRequest::decode(message).ok()?),
        5 => Request::Capture(CaptureRequest::decode(message).ok()?),
        _ => Request::Drain(DrainRequest::decode(message).ok()?),
    })
}

/// A device without statistics.
#[derive(Debug)]
struct NoDeviceStats;

impl DeviceStats for NoDeviceStats {
    fn ring_drops(&self, _: usize) -> RingDrops {
        RingDrops::default()
    }

    fn metrics(&self) -> Vec<Family> {
        Vec::new()
    }

    fn captures(&self, _: &[u8], _: u32) -> Option<bool> {
        None
    }
}

/// The state of a gateway that has only workers.
pub fn state(workers: Vec<WorkerHandle>, policy: Arc<Policy>, network: NetworkSpec) -> Arc<GatewayState> {
    Arc::new(GatewayState {
        name: "gw-1".to_owned(),
        node: "gw-1".to_owned(),
        zone: None,
        started: Instant::now(),
        ready: AtomicBool::new(true),
        session_capacity: 64,
        policy: ArcSwap::from_pointee(PolicyStatus {
            generation: 1,
            applied_at: SystemTime::now(),
            source: String::new(),
            updates_applied: 1,
            updates_rejected: 0,
            last_error: None,
            peers: Arc::default(),
        }),
        server: None,
        certificates: CertificateFiles::default(),
        files: None,
        compiled: ArcSwap::new(policy),
        placement: VipPlacement::default(),
        health_errors: ArcSwap::default(),
        conflicts: ArcSwap::default(),
        ports: (1024, 65_535),
        port_blocks: 1008,
        network: ArcSwap::from_pointee(network),
        group: ArcSwap::default(),
        capture: ArcSwap::default(),
        tracking: ArcSwap::default(),
        stalls: Arc::default(),
        nat_log: None,
        connections: ListenerConnections::default(),
        engine: EngineHandle {
            workers,
            sockets: Vec::new(),
            device: Arc::new(NoDeviceStats),
            commands: mpsc::unbounded_channel().0,
        }
        .into(),
    })
}

/// A rejected request, with the message for the client.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("{0}")]
pub struct RejectedRequest(String);

/// Executes a request; returns the reply as text, for comparison.
///
/// # Errors
/// When the request is rejected; never because of an internal error.
pub async fn reply(state: Arc<GatewayState>, request: Request) -> Result<String, RejectedRequest> {
    let service = Service::new(state);
    let reply = match request {
        // Contains the uptime, so it isn't compared.
        Request::Status => service.status(tonic::Request::new(StatusRequest {})).await.map(|_| String::new()),
        Request::Sessions(request) => sessions(&service, request).await,
        Request::Flush(request) => service.flush_sessions(tonic::Request::new(request)).await.map(text),
        Request::Trace(request) => service.trace(tonic::Request::new(request)).await.map(text),
        Request::Explain(request) => service.explain(tonic::Request::new(request)).await.map(text),
        Request::Capture(request) => match service.capture(tonic::Request::new(request)).await {
            Ok(replies) => replies.into_inner().next().await.transpose().map(|reply| format!("{reply:?}")),
            Err(status) => Err(status),
        },
        Request::Drain(request) => service.drain(tonic::Request::new(request)).await.map(text),
    };
    reply.map_err(|status| {
        let is_client_error =
            matches!(status.code(), Code::InvalidArgument | Code::NotFound | Code::FailedPrecondition);
        assert!(is_client_error, "{status:?}");
        assert!(!status.message().is_empty());
        RejectedRequest(status.message().to_owned())
    })
}

fn text<T: std::fmt::Debug>(response: tonic::Response<T>) -> String {
    format!("{:?}", response.into_inner())
}

async fn sessions(service: &Service, request: SessionsRequest) -> Result<String, Status> {
    let limit = request.limit;
    let mut chunks = service.sessions(tonic::Request::new(request)).await?.into_inner();
    let mut all = Vec::new();
    while let Some(chunk) = chunks.next().await {
        all.extend(chunk?.sessions);
    }
    assert!(limit == 0 || all.len() as u64 <= limit, "{} sessions for a limit of {limit}", all.len());
    Ok(format!("{all:?}"))
}
