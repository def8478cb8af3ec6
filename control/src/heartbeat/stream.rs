//! One stream of the membership client, from its first heartbeat to its end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::replication::lease;

use super::{HeartbeatClient, ReportedState, StreamEnd};
use crate::membership::status::Authority;
use crate::membership::view::{Heartbeat, MembershipView};
use crate::xds::client::{Target, authorized, describe_status, open_channel};
use crate::xds::membership_message::InvalidMessage;
use crate::xds::proto;
use crate::xds::proto::membership_client::MembershipClient;

const HEARTBEATS_PER_LEASE: u32 = 4;
/// Capacity of the queue of heartbeats; when it is full, the connection is broken.
const QUEUE: usize = 4;
/// Maximum number of unacknowledged heartbeats.
const MAX_UNACKED: usize = 64;
/// Minimum interval between log lines about rivals for this gateway's name.
const CONTESTED_LOG_INTERVAL: Duration = Duration::from_secs(10);
/// Maximum length of a notice, bytes.
const MAX_NOTICE_BYTES: usize = 1 << 20;
/// Minimum and maximum timeout of a response.
pub(super) const TIMEOUT_RANGE: (Duration, Duration) = (Duration::from_millis(300), Duration::from_secs(5));

/// Opens a stream and sends heartbeats until it ends.
pub(super) async fn run_stream(client: &mut HeartbeatClient, target: &Target) -> StreamEnd {
    let response_timeout = client.response_timeout();
    let Ok(connected) = timeout(response_timeout, open_channel(&client.config.server, target)).await else {
        return client.timed_out(response_timeout);
    };
    let (channel, breakage) = match connected {
        Ok(connected) => connected,
        Err(error) => return StreamEnd::Disconnected(error.to_string()),
    };
    let (heartbeats, outgoing) = mpsc::channel(QUEUE);
    let outgoing = match authorized(&client.config.server, ReceiverStream::new(outgoing)) {
        Ok(outgoing) => outgoing,
        Err(reason) => return StreamEnd::Disconnected(reason),
    };
    let mut stream = HeartbeatStream { client, target, heartbeats, sequence: 0, unacked: VecDeque::new() };
    // Before the stream is open: the server may answer only to the first heartbeat.
    stream.send_heartbeat();
    let mut service = MembershipClient::new(channel).max_decoding_message_size(MAX_NOTICE_BYTES);
    let Ok(opened) = timeout(response_timeout, service.join(outgoing)).await else {
        return stream.client.timed_out(response_timeout);
    };
    let end = |status: &Status| match status.code() {
        Code::Unimplemented => StreamEnd::NoService,
        Code::AlreadyExists => StreamEnd::NameInUse(status.message().to_owned()),
        Code::InvalidArgument | Code::PermissionDenied => StreamEnd::Rejected(status.message().to_owned()),
        _ => StreamEnd::Disconnected(breakage.explain(describe_status(status))),
    };
    match opened {
        Ok(response) => stream.run(response.into_inner(), end).await,
        Err(status) => end(&status),
    }
}

impl HeartbeatClient {
    /// Timeout of a response. A server that was reached before must respond while there is time to reconnect before the
    /// lease expires; another one may have a longer round-trip time.
    fn response_timeout(&self) -> Duration {
        if !self.was_reached {
            return self.connect_timeout.peek();
        }
        (self.status.borrow().ttl / 2).clamp(TIMEOUT_RANGE.0, TIMEOUT_RANGE.1)
    }

    fn timed_out(&mut self, after: Duration) -> StreamEnd {
        // Twice as long for the next one.
        self.connect_timeout.next_delay();
        StreamEnd::Disconnected(format!("no response within {} ms", after.as_millis()))
    }
}

/// A notice that no policy server sends.
#[derive(Debug, Error)]
enum NoticeError {
    #[error("the server has sent an invalid view: {0}")]
    InvalidView(#[from] InvalidMessage),
    #[error("the server has sent view {number}, older than view {known}")]
    OldView { number: u64, known: u64 },
}

struct HeartbeatStream<'a> {
    client: &'a mut HeartbeatClient,
    target: &'a Target,
    heartbeats: mpsc::Sender<proto::Heartbeat>,
    sequence: u64,
    /// Sequence numbers of unacknowledged heartbeats, and when they were sent.
    unacked: VecDeque<(u64, Tick)>,
}

impl HeartbeatStream<'_> {
    /// Sends heartbeats and handles notices until the stream ends.
    async fn run(
        &mut self,
        mut notices: Streaming<proto::MembershipUpdate>,
        end: impl Fn(&Status) -> StreamEnd,
    ) -> StreamEnd {
        let (mut sent, mut received) = (Instant::now(), Instant::now());
        loop {
            let (interval, response_timeout) =
                (self.client.status.borrow().ttl / HEARTBEATS_PER_LEASE, self.client.response_timeout());
            tokio::select! {
                // Notices first: one that has arrived counts, however late this task runs.
                biased;
                notice = notices.message() => match notice {
                    Ok(Some(notice)) => {
                        received = Instant::now();
                        if let Err(error) = self.handle_notice(notice) {
                            return StreamEnd::Disconnected(error.to_string());
                        }
                    }
                    Ok(None) => return StreamEnd::Disconnected("the server has ended the stream".to_owned()),
                    Err(status) => return end(&status),
                },
                changed = self.client.reported.changed() => {
                    if changed.is_err() {
                        return StreamEnd::ClientClosed;
                    }
                    sent = Instant::now();
                    self.send_heartbeat();
                }
                () = sleep_until(sent + interval) => {
                    sent = Instant::now();
                    self.send_heartbeat();
                }
                () = sleep_until(received + response_timeout) => {
                    return StreamEnd::Disconnected(format!("no response within {} ms", response_timeout.as_millis()));
                }
            }
        }
    }

    fn send_heartbeat(&mut self) {
        let reported = self.client.reported.borrow_and_update().clone();
        let ReportedState { desired_state, seen_view, unable, policy_version, sessions } = reported;
        let config = &self.client.config;
        let known_view = self.client.status.borrow().view.clone();
        let heartbeat = Heartbeat {
            gateway: config.name.clone(),
            incarnation: config.secret.incarnation(),
            commitment: config.secret.commitment(),
            predecessor: None,
            desired_state,
            seen_view,
            fingerprint: Some(config.fingerprint),
            peer: config.peer,
            tunnel_key: Some(config.tunnel_key),
            overlay: config.overlay,
            unable,
            policy_version,
            sessions,
            view: (self.sequence == 0 && known_view.number > 0).then_some(known_view),
        };
        self.sequence += 1;
        // Before it is queued: time in the queue shortens the lease.
        let sent = config.lease.now();
        let message = proto::Heartbeat {
            secret: config.secret.bytes().to_owned(),
            commitment: Vec::new(),
            predecessor: config.predecessor.as_ref().map(|it| it.bytes().to_owned()).unwrap_or_default(),
            ..proto::Heartbeat::of(&heartbeat, self.sequence)
        };
        if self.heartbeats.try_send(message).is_ok() {
            if self.unacked.len() == MAX_UNACKED {
                self.unacked.pop_front();
            }
            self.unacked.push_back((self.sequence, sent));
        }
    }

    fn handle_notice(&mut self, notice: proto::MembershipUpdate) -> Result<(), NoticeError> {
        let proto::MembershipUpdate { sequence, lease_ms, view, rival, drain_block } = notice;
        let client = &mut *self.client;
        if !rival.is_empty() && client.contested.due(CONTESTED_LOG_INTERVAL, Instant::now().into_std()).is_some() {
            let gateway = &*client.config.name;
            tracing::warn!(
                event = "name_contested",
                gateway,
                address = rival,
                "another process, at {rival}, tries to use the name of gateway {gateway}; the policy server rejects it"
            );
        }
        let view = view.map(MembershipView::try_from).transpose()?;
        let known = client.status.borrow().view.number;
        if let Some(view) = view.as_ref().filter(|view| view.number < known) {
            return Err(NoticeError::OldView { number: view.number, known });
        }
        if client.status.borrow().authority != Authority::Reachable {
            let (server, view) = (self.target, view.as_ref().map_or(known, |view| view.number));
            tracing::info!(event = "authority_found", %server, view, "connected to the membership service");
        }
        client.was_reached = true;
        client.attempts.reached(self.target);
        client.attempts.reset_delay();
        client.round_errors.clear();
        let lease_ms = lease_ms.min(lease::MAX_LEASE_MS);
        client.update_status(|status| {
            status.authority = Authority::Reachable;
            if let Some(view) = view.filter(|view| *view != *status.view) {
                status.view = Arc::new(view);
            }
            // Unsolicited updates are about the view alone.
            if sequence > 0 {
                status.drain_block = drain_block.and_then(proto::DrainBlock::into_value);
            }
            if lease_ms > 0 {
                (status.ttl, status.is_ttl_confirmed) = (Duration::from_millis(lease_ms.into()), true);
            }
        });
        // After the view: a lease is granted under it, and valid only once the gateway has applied it.
        let is_applied = self.client.reported.borrow().seen_view == self.client.status.borrow().view.number;
        while let Some((number, sent)) = self.unacked.front().copied().filter(|(number, _)| *number <= sequence) {
            self.unacked.pop_front();
            if number == sequence && lease_ms > 0 && is_applied {
                self.client.config.lease.extend(sent.plus(lease_ms));
            }
        }
        Ok(())
    }
}
