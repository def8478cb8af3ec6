//! Sessions of all workers: asked for in slices, so that a worker never does more than one between two batches.

use std::net::IpAddr;
use std::time::Duration;

use crossbeam::channel::bounded;
use tokio::sync::mpsc::Sender;
use tonic::Status;
use vipgate_dataplane::command::{Command, FlushChunk, SessionChunk, SessionFilter, SessionRecord, SessionState};
use vipgate_dataplane::wire::protocol;

use super::proto;
use crate::gateway::state::{GatewayState, WorkerHandle};

/// Sessions in one slice.
const SLICE: usize = 512;
/// A worker that doesn't answer within this time has a problem.
const PATIENCE: Duration = Duration::from_secs(5);

const PROTOCOLS: [(&str, u8); 4] =
    [("tcp", protocol::TCP), ("udp", protocol::UDP), ("icmp", protocol::ICMP), ("icmpv6", protocol::ICMPV6)];

/// Reads a filter as people write it.
pub(super) fn filter(filter: &proto::SessionFilter) -> Result<SessionFilter, Status> {
    let address = |field: &str, text: &str| -> Result<Option<IpAddr>, Status> {
        if text.is_empty() {
            return Ok(None);
        }
        let parsed = text.parse();
        parsed.map(Some).map_err(|_| Status::invalid_argument(format!("{field}: \"{text}\" is no IP address")))
    };
    let number = match filter.protocol.as_str() {
        "" => None,
        name => {
            let known = PROTOCOLS.iter().find(|(known, _)| *known == name).map(|&(_, number)| number);
            let number = known.or_else(|| name.parse().ok());
            Some(number.ok_or_else(|| {
                Status::invalid_argument(format!("proto: \"{name}\" is none of tcp, udp, icmp, icmpv6 or a number"))
            })?)
        }
    };
    let state = match filter.state.as_str() {
        "" => None,
        name => Some(SessionState::ALL.into_iter().find(|state| state.name() == name).ok_or_else(|| {
            let all = SessionState::ALL.map(SessionState::name).join(", ");
            Status::invalid_argument(format!("state: \"{name}\" is none of {all}"))
        })?),
    };
    Ok(SessionFilter {
        endpoint: address("endpoint", &filter.endpoint)?,
        vip: address("vip", &filter.vip)?,
        remote: address("remote", &filter.remote)?,
        protocol: number,
        state,
    })
}

/// Sends matching sessions, slice by slice, until the limit, the end, or nobody listens any more.
pub(super) fn list(
    state: &GatewayState,
    filter: &SessionFilter,
    limit: u64,
    sender: &Sender<Result<proto::SessionsReply, Status>>,
) {
    let mut left = limit;
    for (number, worker) in (0..).zip(&state.workers) {
        let mut cursor = Some(0);
        while cursor.is_some() && left > 0 {
            let records = Vec::with_capacity(SLICE);
            let chunk = SessionChunk { filter: filter.clone(), cursor, records };
            let chunk = match ask(worker, number, |reply| Command::Sessions { chunk, reply }) {
                Ok(chunk) => chunk,
                Err(status) => return drop(sender.blocking_send(Err(status))),
            };
            cursor = chunk.cursor;
            let take = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.records.len());
            left -= take as u64;
            let sessions: Vec<_> = chunk.records[..take].iter().map(|record| session(number, record)).collect();
            if !sessions.is_empty() && sender.blocking_send(Ok(proto::SessionsReply { sessions })).is_err() {
                return;
            }
        }
    }
}

/// Ends matching sessions of all workers; says how many.
pub(super) fn flush(state: &GatewayState, filter: &SessionFilter) -> Result<u64, Status> {
    let mut ended = 0;
    for (number, worker) in (0..).zip(&state.workers) {
        let mut chunk = FlushChunk { filter: filter.clone(), cursor: Some(0), ended: 0 };
        while chunk.cursor.is_some() {
            chunk = ask(worker, number, |reply| Command::Flush { chunk, reply })?;
        }
        ended += chunk.ended;
    }
    Ok(ended)
}

/// Asks a worker and waits for its answer.
fn ask<T>(
    worker: &WorkerHandle,
    number: u32,
    command: impl FnOnce(crossbeam::channel::Sender<T>) -> Command,
) -> Result<T, Status> {
    let (reply, answer) = bounded(1);
    let unavailable = |what: &str| Status::unavailable(format!("worker {number} {what}"));
    worker.commands.send_timeout(command(reply), PATIENCE).map_err(|_| unavailable("takes no commands"))?;
    worker.doorbell.wake();
    answer.recv_timeout(PATIENCE).map_err(|_| unavailable("doesn't answer"))
}

fn session(worker: u32, record: &SessionRecord) -> proto::Session {
    let known = PROTOCOLS.iter().find(|(_, number)| *number == record.protocol);
    proto::Session {
        worker,
        protocol: known.map_or_else(|| record.protocol.to_string(), |(name, _)| (*name).to_owned()),
        endpoint: record.endpoint.to_string(),
        vip: record.vip.to_string(),
        remote: record.remote.to_string(),
        state: record.state.name().to_owned(),
        idle_ms: record.idle_ms,
        expires_ms: record.expires_ms,
        packets_out: record.packets_out,
        bytes_out: record.bytes_out,
        packets_in: record.packets_in,
        bytes_in: record.bytes_in,
    }
}
