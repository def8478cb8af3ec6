//! One stream of the membership client, from its first heartbeat to its end.

use thiserror::Error;
use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, Streaming};

use super::{HeartbeatClient, update_status};
use crate::membership::heartbeat::{Accepted, Reply, StreamEnd, UnexpectedView};
use crate::membership::view::MembershipView;
use crate::xds::client::{Target, authorized, describe_status, open_channel};
use crate::xds::membership_message::InvalidMessage;
use crate::xds::proto;
use crate::xds::proto::membership_client::MembershipClient;

/// Capacity of the queue of heartbeats; when it is full, the connection is broken.
const QUEUE: usize = 4;
/// Maximum length of a notice, bytes.
const MAX_NOTICE_BYTES: usize = 1 << 20;

/// Opens a stream and sends heartbeats until it ends; `None`: the handle was dropped.
pub(super) async fn run_stream(client: &mut HeartbeatClient, target: &Target) -> Option<StreamEnd> {
    let response_timeout = client.decisions.response_timeout(&client.status.borrow());
    let Ok(connected) = timeout(response_timeout, open_channel(&client.config.server, target)).await else {
        return Some(client.decisions.not_opened(&client.status.borrow()));
    };
    let (channel, breakage) = match connected {
        Ok(connected) => connected,
        Err(error) => return Some(StreamEnd::Disconnected(error.to_string())),
    };
    let (heartbeats, outgoing) = mpsc::channel(QUEUE);
    let outgoing = match authorized(&client.config.server, ReceiverStream::new(outgoing)) {
        Ok(outgoing) => outgoing,
        Err(reason) => return Some(StreamEnd::Disconnected(reason)),
    };
    client.decisions.begin_stream(Instant::now().into_std());
    let mut stream = HeartbeatStream { client, target, heartbeats };
    // Before the stream is open: the server may answer only to the first heartbeat.
    stream.send_heartbeat();
    let mut service = MembershipClient::new(channel).max_decoding_message_size(MAX_NOTICE_BYTES);
    let Ok(opened) = timeout(response_timeout, service.join(outgoing)).await else {
        return Some(stream.client.decisions.not_opened(&stream.client.status.borrow()));
    };
    let end = |status: &Status| match status.code() {
        Code::Unimplemented => StreamEnd::NoService,
        Code::AlreadyExists => StreamEnd::NameInUse(status.message().to_owned()),
        Code::InvalidArgument | Code::PermissionDenied => StreamEnd::Rejected(status.message().to_owned()),
        _ => StreamEnd::Disconnected(breakage.explain(describe_status(status))),
    };
    match opened {
        Ok(response) => {
            stream.client.decisions.opened(Instant::now().into_std());
            stream.run(response.into_inner(), end).await
        }
        Err(status) => Some(end(&status)),
    }
}

/// A notice that no policy server sends.
#[derive(Debug, Error)]
enum NoticeError {
    #[error("the server has sent an invalid view: {0}")]
    InvalidView(#[from] InvalidMessage),
    #[error(transparent)]
    UnexpectedView(#[from] UnexpectedView),
}

struct HeartbeatStream<'a> {
    client: &'a mut HeartbeatClient,
    target: &'a Target,
    heartbeats: mpsc::Sender<proto::Heartbeat>,
}

impl HeartbeatStream<'_> {
    /// Sends heartbeats and handles notices until the stream ends.
    async fn run(
        &mut self,
        mut notices: Streaming<proto::MembershipUpdate>,
        end: impl Fn(&Status) -> StreamEnd,
    ) -> Option<StreamEnd> {
        loop {
            let (heartbeat_due, reply_due) = {
                let status = self.client.status.borrow();
                (self.client.decisions.heartbeat_due(&status), self.client.decisions.reply_due(&status))
            };
            tokio::select! {
                // Notices first: one that has arrived counts, however late this task runs.
                biased;
                notice = notices.message() => match notice {
                    Ok(Some(notice)) => {
                        if let Err(error) = self.handle_notice(notice) {
                            return Some(StreamEnd::Disconnected(error.to_string()));
                        }
                    }
                    Ok(None) => return Some(StreamEnd::Disconnected("the server has ended the stream".to_owned())),
                    Err(status) => return Some(end(&status)),
                },
                changed = self.client.reported.changed() => {
                    if changed.is_err() {
                        return None;
                    }
                    self.send_heartbeat();
                }
                () = sleep_until(heartbeat_due.into()) => self.send_heartbeat(),
                () = sleep_until(reply_due.into()) => {
                    return Some(self.client.decisions.no_reply(&self.client.status.borrow()));
                }
            }
        }
    }

    fn send_heartbeat(&mut self) {
        let HeartbeatClient { config, decisions, status, reported, .. } = &mut *self.client;
        let (reported, status) = (reported.borrow_and_update().clone(), status.borrow());
        let (now, tick) = (Instant::now().into_std(), config.lease.now());
        let (sequence, heartbeat) = decisions.next_heartbeat(now, tick, &reported, &status);
        let message = proto::Heartbeat {
            secret: config.secret.bytes().to_owned(),
            predecessor: config.predecessor.as_ref().map(|it| it.bytes().to_owned()).unwrap_or_default(),
            ..proto::Heartbeat::of(&heartbeat, sequence)
        };
        // If the queue is full, the connection is broken, and the reply is missed.
        let _ = self.heartbeats.try_send(message);
    }

    fn handle_notice(&mut self, notice: proto::MembershipUpdate) -> Result<(), NoticeError> {
        let proto::MembershipUpdate { sequence, lease_ms, view, rival, drain_block } = notice;
        self.client.log_rival(&rival);
        let view = view.map(MembershipView::try_from).transpose()?;
        let drain_block = drain_block.and_then(proto::DrainBlock::into_value);
        let reply = Reply { sequence, lease_ms, view, drain_block };
        let HeartbeatClient { config, decisions, reported, attempts, status, .. } = &mut *self.client;
        let reported = reported.borrow().clone();
        let now = Instant::now().into_std();
        let mut outcome = Ok(Accepted::default());
        update_status(status, |status| outcome = decisions.reply(now, reply, &reported, status));
        let accepted = outcome?;
        if accepted.is_found {
            let view = status.borrow().view.number;
            let server = self.target;
            tracing::info!(event = "authority_found", %server, view, "connected to the membership service");
        }
        attempts.reached(self.target);
        attempts.reset_delay();
        // After the view, under which the lease is granted.
        accepted.lease_until.into_iter().for_each(|until| config.lease.extend(until));
        Ok(())
    }
}
