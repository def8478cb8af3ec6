//! One stream with the authority, from the first beat to its end.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::mpsc;
use tokio::time::{Instant, sleep_until, timeout};
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status};
use vipgate_dataplane::link::lease;
use vipgate_dataplane::time::Tick;

use super::{Authority, End, MembersClient, PAUSE, Wanted};
use crate::members::view::{Beat, View};
use crate::xds::client::{connect_watched, explain};
use crate::xds::proto;
use crate::xds::proto::membership_client::MembershipClient;

/// Beats in a lease.
const BEATS: u32 = 4;
/// Beats that wait for the network; when there are more, it is broken.
const QUEUE: usize = 4;
/// Beats whose answers are waited for.
const MOST_UNANSWERED: usize = 64;
/// The shortest time between two log lines about others who want this gateway's name.
const CONTESTED_INTERVAL: Duration = Duration::from_secs(10);
/// The longest notice, bytes.
const LONGEST: usize = 1 << 20;
/// The shortest time in which a server must answer, and the longest.
const PATIENCE: (Duration, Duration) = (Duration::from_millis(300), Duration::from_secs(5));

/// Beats until the stream ends.
pub(super) async fn follow(client: &mut MembersClient) -> End {
    let patience = client.patience();
    let Ok(connected) = timeout(patience, connect_watched(&client.plan.server)).await else {
        return client.too_slow(patience);
    };
    let (channel, breakage) = match connected {
        Ok(connected) => connected,
        Err(why) => return End::Lost(why),
    };
    let (beats, outgoing) = mpsc::channel(QUEUE);
    let mut stream = Stream { client, beats, sequence: 0, unanswered: VecDeque::new() };
    // Before the stream stands: its first beat is what the server answers to.
    stream.beat();
    let mut service = MembershipClient::new(channel).max_decoding_message_size(LONGEST);
    let Ok(opened) = timeout(patience, service.join(ReceiverStream::new(outgoing))).await else {
        return stream.client.too_slow(patience);
    };
    let end = |status: &Status| match status.code() {
        Code::Unimplemented => End::NoService,
        Code::AlreadyExists => End::InUse(status.message().to_owned()),
        Code::InvalidArgument | Code::PermissionDenied => End::Refused(status.message().to_owned()),
        _ => End::Lost(breakage.explain(explain(status))),
    };
    let mut notices = match opened {
        Ok(response) => response.into_inner(),
        Err(status) => return end(&status),
    };
    let (mut beaten, mut heard) = (Instant::now(), Instant::now());
    loop {
        let (pace, patience) = (stream.client.status.borrow().ttl / BEATS, stream.client.patience());
        tokio::select! {
            // What the server has said counts, however late we come to read it.
            biased;
            notice = notices.message() => match notice {
                Ok(Some(notice)) => {
                    heard = Instant::now();
                    if let Err(why) = stream.hear(notice) {
                        return End::Lost(why);
                    }
                }
                Ok(None) => return End::Lost("the server has ended the stream".to_owned()),
                Err(status) => return end(&status),
            },
            changed = stream.client.wish.changed() => {
                if changed.is_err() {
                    return End::Abandoned;
                }
                beaten = Instant::now();
                stream.beat();
            }
            () = sleep_until(beaten + pace) => {
                beaten = Instant::now();
                stream.beat();
            }
            () = sleep_until(heard + patience) => {
                return End::Lost(format!("no answer within {} ms", patience.as_millis()));
            }
        }
    }
}

impl MembersClient {
    /// How long the server may take. One that was heard must answer while there is time to find another one at the same address
    /// before the lease ends; one that wasn't may be far away.
    fn patience(&self) -> Duration {
        if self.is_reached { (self.status.borrow().ttl / 2).clamp(PATIENCE.0, PATIENCE.1) } else { self.first_patience }
    }

    fn too_slow(&mut self, patience: Duration) -> End {
        self.first_patience = (self.first_patience * 2).min(PATIENCE.1);
        End::Lost(format!("no answer within {} ms", patience.as_millis()))
    }
}

/// How long a server that was never heard may take at first.
pub(super) const FIRST_PATIENCE: Duration = PATIENCE.0;

struct Stream<'a> {
    client: &'a mut MembersClient,
    beats: mpsc::Sender<proto::Beat>,
    sequence: u64,
    /// Beats, and when they were sent.
    unanswered: VecDeque<(u64, Tick)>,
}

impl Stream<'_> {
    fn beat(&mut self) {
        let Wanted { wish, seen_view, unable } = self.client.wish.borrow_and_update().clone();
        let plan = &self.client.plan;
        let known = self.client.status.borrow().view.clone();
        let beat = Beat {
            gateway: plan.name.clone(),
            incarnation: plan.secret.incarnation(),
            commitment: None,
            predecessor: None,
            wish,
            seen_view,
            fingerprint: Some(plan.fingerprint),
            peer: plan.peer,
            tunnel_key: Some(plan.tunnel_key),
            unable,
            view: (self.sequence == 0 && known.number > 0).then_some(known),
        };
        self.sequence += 1;
        // Before it is sent: whatever it waits for here is taken off the lease.
        let sent = plan.lease.now();
        let message = proto::Beat {
            secret: plan.secret.bytes().to_owned(),
            predecessor: plan.predecessor.as_ref().map(|it| it.bytes().to_owned()).unwrap_or_default(),
            ..beat.message(self.sequence)
        };
        if self.beats.try_send(message).is_ok() {
            if self.unanswered.len() == MOST_UNANSWERED {
                self.unanswered.pop_front();
            }
            self.unanswered.push_back((self.sequence, sent));
        }
    }

    fn hear(&mut self, notice: proto::Notice) -> Result<(), String> {
        let proto::Notice { sequence, lease_ms, view, rival } = notice;
        let client = &mut *self.client;
        let is_told = client.contested.is_some_and(|at| at.elapsed() < CONTESTED_INTERVAL);
        if !rival.is_empty() && !is_told {
            client.contested = Some(Instant::now());
            let gateway = &*client.plan.name;
            tracing::warn!(
                event = "name_contested",
                gateway,
                address = rival,
                "another process, at {rival}, wants to be gateway {gateway}; the policy server refuses it"
            );
        }
        let view = match view.map(View::try_from).transpose() {
            Ok(view) => view,
            Err(why) => return Err(format!("what the server says makes no sense: {why}")),
        };
        let known = client.status.borrow().view.number;
        if let Some(view) = view.as_ref().filter(|view| view.number < known) {
            return Err(format!("the server tells of view {}, but there was {known} already", view.number));
        }
        if client.status.borrow().authority != Authority::Present {
            let (server, view) = (&client.plan.server.url, view.as_ref().map_or(known, |view| view.number));
            tracing::info!(event = "authority_found", server, view, "the policy server says who serves");
        }
        client.is_reached = true;
        client.pause = PAUSE.0;
        client.complaint = None;
        let lease_ms = lease_ms.min(lease::LONGEST_MS);
        client.set(|status| {
            status.authority = Authority::Present;
            if let Some(view) = view.filter(|view| *view != *status.view) {
                status.view = Arc::new(view);
            }
            if lease_ms > 0 {
                (status.ttl, status.is_granted) = (Duration::from_millis(lease_ms.into()), true);
            }
        });
        // After the view: a lease is for what it says, and for who acts by it.
        let acts = self.client.wish.borrow().seen_view == self.client.status.borrow().view.number;
        while let Some((of, sent)) = self.unanswered.front().copied().filter(|(of, _)| *of <= sequence) {
            self.unanswered.pop_front();
            if of == sequence && lease_ms > 0 && acts {
                self.client.plan.lease.extend(sent.plus(lease_ms));
            }
        }
        Ok(())
    }
}
