//! Requests to a gateway, and what answers them: its shared state and its workers.

use std::net::IpAddr;
use std::sync::Arc;

use serde::{Deserialize, Serialize};
use vipgate_dataplane::session::query::SessionFilter;

use super::capture::{CaptureRequest, Captures};
use super::connection::{AdminService, Replies, one, several};
use super::filter::SessionFilterJson;
use super::membership::{DrainReply, PeersReply};
use super::protocol::{GATEWAY, Greeting, RequestError};
use super::trace::TraceRequest;
use super::workers::Workers;
use super::{drops, endpoints, explain, membership, placement, ports, services, status, trace, vips};
use crate::state::GatewayState;

/// A request to a gateway.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Status of the gateway: policy, workers, interfaces, sockets.
    Status,
    /// Matching sessions, in chunks. A chunk may be empty: the gateway is still searching.
    Sessions {
        #[serde(with = "SessionFilterJson")]
        filter: SessionFilter,
        /// 0: all.
        limit: u64,
    },
    /// Ends matching sessions.
    FlushSessions(#[serde(with = "SessionFilterJson")] SessionFilter),
    /// VIPs of the policy in force.
    Vips,
    /// Endpoints of the policy in force.
    Endpoints,
    /// Services with VIPs as frontends, and their backends.
    Services,
    /// All gateways, and this one's membership.
    Peers,
    /// Drains or undrains the gateway; or only shows which shards would move.
    Drain { draining: bool, dry_run: bool },
    /// The placement in force: where gateways, VIPs and endpoints are assigned, whichever gateways are active.
    Placement,
    /// Accepts empty policy files: objects that stayed in force because the files may be empty by mistake are removed.
    AcceptEmpty,
    /// Drops by reason, and by address.
    Drops,
    /// Port usage of VIPs.
    Ports,
    /// Traces a packet through the live tables, step by step. Changes nothing.
    Trace(TraceRequest),
    /// The policy for an address, and the reasons for it.
    Explain(IpAddr),
    /// Captures packets until the client disconnects. One capture at a time.
    Capture(CaptureRequest),
}

/// Number of sessions that were ended.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FlushReply {
    pub ended: u64,
}

/// A policy file, or what a policy server has of a key, whose objects were removed.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EmptySource {
    pub name: String,
    pub objects: u64,
}

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

    /// Streams matching sessions; limit 0: all.
    fn sessions(&self, filter: SessionFilter, limit: u64) -> Replies {
        let limit = if limit == 0 { u64::MAX } else { limit };
        let workers = self.workers.clone();
        several(move |sender| async move { workers.list_sessions(filter, limit, sender).await })
    }

    async fn flush_sessions(&self, filter: &SessionFilter) -> Result<FlushReply, RequestError> {
        let ended = self.workers.flush_sessions(filter).await?;
        tracing::info!(event = "flush", ended, ?filter, "sessions flushed");
        Ok(FlushReply { ended })
    }

    fn drain(&self, draining: bool, dry_run: bool) -> Result<DrainReply, RequestError> {
        let moves = if dry_run { membership::drain_moves(&self.state)? } else { Vec::new() };
        let drains_refused = self.state.group.load().refused_drains.count;
        if !dry_run {
            membership::drain(&self.state, draining)?;
        }
        Ok(DrainReply { moves, drains_refused })
    }

    async fn accept_empty(&self) -> Result<Vec<EmptySource>, RequestError> {
        let from_server = "this gateway's policy comes from a policy server: use --server URL";
        let files = self.state.files.as_ref().ok_or_else(|| RequestError::refused(from_server))?;
        let accepted = files.accept_empty().await.map_err(|error| RequestError::refused(error.to_string()))?;
        let source =
            |(name, objects): (Arc<str>, usize)| EmptySource { name: name.to_string(), objects: objects as u64 };
        Ok(accepted.entries.into_iter().map(source).collect())
    }
}

impl AdminService for Service {
    type Request = Request;

    fn greeting(&self) -> Greeting {
        Greeting::of(GATEWAY, &self.state.name)
    }

    async fn answer(&self, request: Request) -> Result<Replies, RequestError> {
        let (state, workers) = (&self.state, &*self.workers);
        match request {
            Request::Status => one(&status::status(state)),
            Request::Sessions { filter, limit } => Ok(self.sessions(filter, limit)),
            Request::FlushSessions(filter) => one(&self.flush_sessions(&filter).await?),
            Request::Vips => one(&vips::all(state, workers).await?),
            Request::Endpoints => one(&endpoints::all(state)),
            Request::Services => one(&services::all(&state.compiled.load(), &state.health_errors.load())),
            Request::Peers => {
                one(&PeersReply { peers: membership::peers(state), group: membership::membership(state) })
            }
            Request::Drain { draining, dry_run } => one(&self.drain(draining, dry_run)?),
            Request::Placement => one(&placement::in_force(state)?),
            Request::AcceptEmpty => one(&self.accept_empty().await?),
            Request::Drops => one(&drops::all(state, workers).await?),
            Request::Ports => one(&ports::all(state, workers).await?),
            Request::Trace(request) => one(&trace::trace(&request, state, workers).await?),
            Request::Explain(address) => one(&explain::explain(address, state, workers).await?),
            Request::Capture(request) => self.captures.start(&request, state),
        }
    }
}
