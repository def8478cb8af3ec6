//! What may be asked over the admin socket: any request to a gateway whose workers are the real ones.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use prost::Message;
use tokio_stream::StreamExt;
use tonic::{Code, Status};
use vipgate_dataplane::snapshot::policy::Policy;
use vipgate_dataplane::snapshot::spec::NetworkSpec;

use crate::admin::Service;
use crate::admin::proto::admin_server::Admin;
use crate::admin::proto::{
    CaptureRequest, DrainRequest, ExplainRequest, FlushSessionsRequest, SessionsRequest, StatusRequest, TraceRequest,
};
use crate::gateway::state::{Dealt, DeviceFigures, Figure, GatewayState, PolicyStatus, RingDrops, Rooms, WorkerHandle};

/// A request.
#[derive(Clone, Debug)]
pub enum Request {
    /// How the gateway is.
    Status,
    /// List sessions.
    Sessions(SessionsRequest),
    /// End sessions.
    Flush(FlushSessionsRequest),
    /// What would become of a packet.
    Trace(TraceRequest),
    /// What policy makes of an address.
    Explain(ExplainRequest),
    /// Capture packets.
    Capture(CaptureRequest),
    /// Stop serving.
    Drain(DrainRequest),
}

impl Request {
    /// Whether it only asks.
    pub fn only_asks(&self) -> bool {
        !matches!(self, Self::Flush(_) | Self::Drain(_) | Self::Capture(_))
    }
}

/// A request: its kind, and its message.
pub fn request(data: &[u8]) -> Option<Request> {
    let (what, message) = data.split_first()?;
    Some(match what % 7 {
        0 => StatusRequest::decode(message).map(|_| Request::Status).ok()?,
        1 => Request::Sessions(SessionsRequest::decode(message).ok()?),
        2 => Request::Flush(FlushSessionsRequest::decode(message).ok()?),
        3 => Request::Trace(TraceRequest::decode(message).ok()?),
        4 => Request::Explain(ExplainRequest::decode(message).ok()?),
        5 => Request::Capture(CaptureRequest::decode(message).ok()?),
        _ => Request::Drain(DrainRequest::decode(message).ok()?),
    })
}

/// A device that knows nothing.
#[derive(Debug)]
struct NoFigures;

impl DeviceFigures for NoFigures {
    fn ring_drops(&self, _: usize) -> RingDrops {
        RingDrops::default()
    }

    fn figures(&self) -> Vec<Figure> {
        Vec::new()
    }

    fn captures(&self, _: &[u8], _: u32) -> Option<bool> {
        None
    }
}

/// A gateway without anything but workers.
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
        files: None,
        compiled: ArcSwap::new(policy),
        dealt: Dealt::default(),
        health_errors: ArcSwap::default(),
        conflicts: ArcSwap::default(),
        ports: (1024, 65_535),
        port_blocks: 1008,
        network: ArcSwap::from_pointee(network),
        group: ArcSwap::default(),
        tracking: ArcSwap::default(),
        stalls: Arc::default(),
        nat_log: None,
        orders: None,
        workers,
        sockets: Vec::new(),
        rooms: Rooms::default(),
        device: Arc::new(NoFigures),
    })
}

/// The answer to a request, for comparison.
///
/// # Errors
/// Why there is none: the request's own fault, never the gateway's.
pub async fn answer(state: Arc<GatewayState>, request: Request) -> Result<String, String> {
    let service = Service::new(state);
    let answered = match request {
        // It says how long the gateway runs.
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
    answered.map_err(|status| {
        let is_theirs = matches!(status.code(), Code::InvalidArgument | Code::NotFound | Code::FailedPrecondition);
        assert!(is_theirs, "{status:?}");
        assert!(!status.message().is_empty());
        status.message().to_owned()
    })
}

fn text<T: std::fmt::Debug>(response: tonic::Response<T>) -> String {
    format!("{:?}", response.into_inner())
}

async fn sessions(service: &Service, request: SessionsRequest) -> Result<String, Status> {
    let limit = request.limit;
    let mut slices = service.sessions(tonic::Request::new(request)).await?.into_inner();
    let mut all = Vec::new();
    while let Some(slice) = slices.next().await {
        all.extend(slice?.sessions);
    }
    assert!(limit == 0 || all.len() as u64 <= limit, "{} sessions, and at most {limit} were asked for", all.len());
    Ok(format!("{all:?}"))
}
