//! Fuzzing of the admin API: any request to a gateway with real workers.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Instant, SystemTime};

use arc_swap::ArcSwap;
use futures::StreamExt as _;
use thiserror::Error;
use tokio::sync::mpsc;
use vipgate_dataplane::policy::compiled::Policy;
use vipgate_dataplane::policy::spec::NetworkSpec;

use crate::admin::protocol::{Answer, RequestError};
use crate::admin::workers::Session;
use crate::admin::{AdminService as _, Replies, Request, Service};
use crate::metric::Family;
use crate::state::{
    DeviceStats, EngineHandle, GatewayState, ListenerConnections, PolicyStatus, RingDrops, VipPlacement, WorkerHandle,
};
use crate::xds::tls::CertificateFiles;

/// Whether a request is read-only.
pub fn is_read_only(request: &Request) -> bool {
    !matches!(request, Request::FlushSessions(_) | Request::Drain { .. } | Request::Capture(_))
}

/// Decodes a request, of a kind that [`reply`] executes.
pub fn request(data: &[u8]) -> Option<Request> {
    let request: Request = serde_json::from_slice(data).ok()?;
    let again = serde_json::to_vec(&request).map(|json| serde_json::from_slice::<Request>(&json));
    assert!(matches!(&again, Ok(Ok(again)) if *again == request), "{request:?} is read as {again:?}");
    let is_executed = match &request {
        Request::Status
        | Request::Sessions { .. }
        | Request::FlushSessions(_)
        | Request::Trace(_)
        | Request::Explain(_)
        | Request::Capture(_)
        | Request::Drain { .. } => true,
        Request::Vips
        | Request::Endpoints
        | Request::Services
        | Request::Peers
        | Request::Placement
        | Request::AcceptEmpty
        | Request::Drops
        | Request::Ports => false,
    };
    is_executed.then_some(request)
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

/// Executes a request; returns the replies as text, for comparison.
///
/// # Errors
/// When the request is rejected; never because of an internal error.
pub async fn reply(state: Arc<GatewayState>, request: Request) -> Result<String, RejectedRequest> {
    let service = Service::new(state);
    let replies = match service.answer(request.clone()).await {
        Ok(replies) => text(replies, &request).await,
        Err(error) => Err(error),
    };
    replies.map_err(|error| {
        assert!(!matches!(error, RequestError::Unavailable(_)), "{error:?}");
        assert!(!error.to_string().is_empty());
        RejectedRequest(error.to_string())
    })
}

/// The replies, of a capture the first one.
async fn text(mut replies: Replies, request: &Request) -> Result<String, RequestError> {
    let mut all = String::new();
    let mut sessions = 0;
    while let Some(line) = replies.next().await {
        let line = line?;
        if let Request::Sessions { limit, .. } = request {
            let Ok(Answer::Reply(chunk)) = serde_json::from_slice::<Answer<Vec<Session>>>(&line) else {
                panic!("{}", String::from_utf8_lossy(&line))
            };
            sessions += chunk.len() as u64;
            assert!(*limit == 0 || sessions <= *limit, "{sessions} sessions for a limit of {limit}");
        }
        all.push_str(&String::from_utf8_lossy(&line));
        if matches!(request, Request::Capture(_)) {
            break;
        }
    }
    // The status has the uptime, so it isn't compared.
    Ok(if matches!(request, Request::Status) { String::new() } else { all })
}
