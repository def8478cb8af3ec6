//! A gateway's stream: assembly of updates, ACKs and NACKs.

use std::collections::{BTreeSet, HashMap};
use std::time::{Duration, SystemTime};

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use tokio::time::{Instant, sleep_until};

use super::{
    ClientEvent, ClientStopped, Confirmation, Effect, GatewayPolicy, OpenStream, Pending, Rejection, StreamEnd,
    Subscriber, apply,
};
use crate::xds::client::coalesce::{CoalescedUpdates, Coalescer};
use crate::xds::resource::{Key, Kind, SETTINGS};
use crate::xds::store::{PolicyUpdate, StageError};

/// Without Settings, an update is complete after this idle time.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1);
/// Timeout for Settings from a server that has sent some before; then the update is applied without them. Also the
/// maximum duration of an update from a server that sends none.
const SETTINGS_TIMEOUT: Duration = Duration::from_secs(5);
/// Timeout for the first response of each kind, before any policy is in force: an incomplete first policy would let
/// traffic through that it should block. Not longer than it takes to detect a dead connection.
const FIRST_POLICY_TIMEOUT: Duration = Duration::from_secs(10);
/// After a rejected response, the rest of its update is rejected too: until its Settings, or this idle time.
const REJECTED_IDLE_TIMEOUT: Duration = Duration::from_millis(300);
/// Interval of confirming that the cached policy is current.
const CONFIRM_INTERVAL: Duration = Duration::from_secs(5);

/// Updates without an acknowledgment after which a policy server sends no more.
const MAX_UNACKNOWLEDGED: usize = 4;

/// Kinds that every server responds to. The others are optional: overlay nodes, the cluster, Settings.
const KINDS: [Kind; 5] = [Kind::EgressPolicy, Kind::Vip, Kind::Endpoint, Kind::Service, Kind::Gateway];

impl Subscriber for GatewayPolicy {
    fn subscriptions(&self) -> Vec<DeltaDiscoveryRequest> {
        Kind::OF_GATEWAYS.map(|kind| self.subscription(kind)).into()
    }

    async fn follow(&mut self, open: &mut OpenStream) -> StreamEnd {
        let end = Stream {
            policy: self,
            open,
            pending: Vec::new(),
            accepted: Vec::new(),
            rejected: None,
            in_sync: false,
            missing_kinds: KINDS.into(),
            coalescer: Coalescer::default(),
        }
        .run()
        .await;
        self.store.discard();
        end.unwrap_or_else(|stopped| StreamEnd::Disconnected(stopped.to_string()))
    }
}

impl GatewayPolicy {
    fn subscription(&self, kind: Kind) -> DeltaDiscoveryRequest {
        // What isn't in force is sent again, and acknowledged then.
        let held = self.held.names(kind);
        let versions: HashMap<String, String> =
            self.store.versions(kind).filter(|(name, _)| !held.contains(name.as_str())).collect();
        DeltaDiscoveryRequest {
            type_url: kind.type_url().to_owned(),
            initial_resource_versions: versions,
            ..DeltaDiscoveryRequest::default()
        }
    }
}

struct Stream<'a> {
    policy: &'a mut GatewayPolicy,
    open: &'a mut OpenStream,
    /// Responses of the current update, with the times of their arrival.
    pending: Vec<(Pending, Instant)>,
    /// Responses of accepted updates that aren't in force yet.
    accepted: Vec<Pending>,
    /// Why the current update is rejected, and when its last response arrived.
    rejected: Option<(String, Instant)>,
    /// Whether the policy in force is the server's latest.
    in_sync: bool,
    /// Kinds without any response yet.
    missing_kinds: BTreeSet<Kind>,
    /// Responses deferred after the last update.
    coalescer: Coalescer,
}

impl Stream<'_> {
    /// Handles responses and timeouts until the server or a broken connection ends the stream.
    async fn run(&mut self) -> Result<StreamEnd, ClientStopped> {
        let mut confirm = tokio::time::interval(CONFIRM_INTERVAL);
        loop {
            if self.is_server_waiting() {
                return Ok(StreamEnd::Disconnected(
                    "the policy waits for the kernel; the latest is fetched".to_owned(),
                ));
            }
            let deadline = self.next_deadline();
            tokio::select! {
                response = self.open.next() => match response {
                    Ok(response) => self.receive(response).await?,
                    Err(end) => {
                        if let StreamEnd::TooLarge(reason) = &end {
                            // Counts as a rejected update.
                            self.report(reason).await;
                        }
                        return Ok(end);
                    }
                },
                () = sleep_until(deadline.unwrap_or_else(Instant::now)), if deadline.is_some() => {
                    if self.coalescer.is_empty() {
                        self.on_timeout().await?;
                    } else {
                        self.flush_coalesced().await?;
                    }
                }
                is_in_force = self.policy.held.in_force() => {
                    if is_in_force {
                        self.acknowledge();
                    }
                }
                _ = confirm.tick() => self.confirm(),
            }
        }
    }

    /// The next timeout, if one is running.
    fn next_deadline(&self) -> Option<Instant> {
        let store = &self.policy.store;
        let idle_timeout = if store.resources().is_empty() && !self.missing_kinds.is_empty() {
            FIRST_POLICY_TIMEOUT
        } else if store.expects_settings() && store.has_staged() {
            SETTINGS_TIMEOUT
        } else {
            IDLE_TIMEOUT
        };
        let idle = self.pending.last().map(|(_, at)| *at + idle_timeout);
        // A server that never pauses must not defer its update forever.
        let total = self.pending.first().filter(|_| idle_timeout == IDLE_TIMEOUT).map(|(_, at)| *at + SETTINGS_TIMEOUT);
        let rejected = self.rejected.as_ref().map(|(_, at)| *at + REJECTED_IDLE_TIMEOUT);
        [idle, total, rejected, self.coalescer.deadline()].into_iter().flatten().min()
    }

    async fn on_timeout(&mut self) -> Result<(), ClientStopped> {
        if self.rejected.take().is_some() {
            return Ok(());
        }
        if let Some(reason) = self.policy.store.count_mismatch() {
            let rejection = Rejection { resource: Some(Key { kind: Kind::Settings, name: SETTINGS.into() }), reason };
            self.reject(&rejection);
            self.report(&rejection.to_string()).await;
            return Ok(());
        }
        tracing::warn!(event = "policy_update_open", "no Settings complete the update: it is applied as received");
        self.apply_staged().await
    }

    /// Handles a response: stages it, or defers it to be coalesced.
    async fn receive(&mut self, response: DeltaDiscoveryResponse) -> Result<(), ClientStopped> {
        // Without Settings the boundaries of updates are unknown: no coalescing.
        let is_between_updates =
            self.pending.is_empty() && self.rejected.is_none() && self.policy.store.expects_settings();
        if is_between_updates && self.coalescer.should_defer() {
            self.in_sync = false;
            self.coalescer.push(response);
            return Ok(());
        }
        self.stage(response).await
    }

    /// Applies the deferred updates: as one, or each by itself if the coalesced update is invalid.
    async fn flush_coalesced(&mut self) -> Result<(), ClientStopped> {
        let coalesced = self.coalescer.take_complete();
        if coalesced.update_count < 2 || !self.apply_coalesced(&coalesced).await? {
            for response in coalesced.responses {
                self.stage(response).await?;
            }
        }
        Ok(())
    }

    /// Applies several updates as one. False: they are rejected, nothing has changed, and no NACK was sent.
    async fn apply_coalesced(&mut self, coalesced: &CoalescedUpdates) -> Result<bool, ClientStopped> {
        for response in &coalesced.responses {
            if self.policy.store.stage(response.clone()).is_err() {
                self.policy.store.discard();
                return Ok(false);
            }
        }
        let is_complete = self.policy.store.is_complete();
        let Some(Ok(effect)) =
            (if is_complete { Some(self.request_apply(coalesced.update_count).await?) } else { None })
        else {
            self.policy.store.discard();
            return Ok(false);
        };
        let pending = coalesced.responses.iter().map(|response| (Pending::of(response), Instant::now()));
        self.pending.extend(pending);
        self.accept(effect);
        Ok(true)
    }

    /// Stages a response; applies the update if that completes it.
    async fn stage(&mut self, response: DeltaDiscoveryResponse) -> Result<(), ClientStopped> {
        let pending = Pending::of(&response);
        let kind = Kind::from_type_url(&pending.type_url);
        let is_settings = kind == Some(Kind::Settings);
        kind.map(|kind| self.missing_kinds.remove(&kind));
        self.in_sync = false;
        if let Some((reason, at)) = &mut self.rejected {
            *at = Instant::now();
            let reason = format!("part of a rejected update: {reason}");
            self.open.reply(pending, Some(reason));
            if is_settings {
                self.rejected = None;
            }
            return Ok(());
        }
        let staged = self.policy.store.stage(response);
        self.pending.push((pending, Instant::now()));
        if let Err(error) = staged {
            self.reject_invalid(&error, is_settings).await;
            return Ok(());
        }
        if self.policy.store.is_complete() { self.apply_staged().await } else { Ok(()) }
    }

    /// Has the gateway apply the staged update, and sends ACKs or NACKs.
    async fn apply_staged(&mut self) -> Result<(), ClientStopped> {
        match self.request_apply(1).await? {
            Ok(effect) => self.accept(effect),
            Err(rejection) => {
                // No event: it has been reported already.
                self.reject(&rejection);
            }
        }
        Ok(())
    }

    /// Sends the staged update, made of `updates` updates, to the gateway and waits for the outcome.
    async fn request_apply(&mut self, updates: u64) -> Result<Result<Effect, Rejection>, ClientStopped> {
        if let Err(error) = self.policy.store.check_consistency() {
            if updates == 1 {
                self.report(&error.to_string()).await;
            }
            return Ok(Err(Rejection { resource: None, reason: error.to_string() }));
        }
        let update = PolicyUpdate { update_count: updates, ..self.policy.store.update_for(&self.policy.gateway) };
        let outcome = apply(&self.policy.events, update).await?;
        self.coalescer.start_interval();
        Ok(outcome)
    }

    /// Commits the accepted update; acknowledges it if it is in force.
    fn accept(&mut self, effect: Effect) {
        let changed = self.policy.store.commit();
        self.policy.held.push(changed, effect);
        self.accepted.extend(self.pending.drain(..).map(|(pending, _)| pending));
        if !self.policy.held.is_holding() {
            self.acknowledge();
        }
    }

    /// Whether the server may wait for acknowledgments before it sends more: then a new stream gets the latest policy.
    fn is_server_waiting(&self) -> bool {
        let settings = Kind::Settings.type_url();
        self.accepted.iter().filter(|pending| pending.type_url == settings).count() >= MAX_UNACKNOWLEDGED
    }

    /// All accepted updates are in force: sends the ACKs, and has the cache written.
    fn acknowledge(&mut self) {
        let at = SystemTime::now();
        self.policy.change_status(|status| status.confirmed_at = Some(at));
        self.in_sync = self.pending.is_empty() && self.coalescer.is_empty();
        for pending in self.accepted.drain(..) {
            self.open.reply(pending, None);
        }
        // After the ACKs: the cache is never newer than what is acknowledged.
        let changed = self.policy.held.take();
        // Fails if the writer has ended.
        let _ = self.policy.confirmations.send(Confirmation { changed, at });
    }

    /// The update was rejected: NACK for all its responses.
    fn reject(&mut self, rejection: &Rejection) {
        self.policy.store.discard();
        for (pending, _) in self.pending.drain(..) {
            self.open.reply(pending, Some(rejection.to_string()));
        }
    }

    /// The last pending response is invalid: NACK for it and for the rest of its update.
    async fn reject_invalid(&mut self, error: &StageError, is_last: bool) {
        let reason = error.to_string();
        self.policy.store.discard();
        let invalid = self.pending.pop();
        for (pending, _) in self.pending.drain(..) {
            self.open.reply(pending, Some(format!("part of a rejected update: {reason}")));
        }
        if let Some((pending, _)) = invalid {
            self.open.reply(pending, Some(reason.clone()));
        }
        // With Settings, more responses of the same update follow; without, each response is an update of its own.
        if !is_last && self.policy.store.expects_settings() {
            self.rejected = Some((reason.clone(), Instant::now()));
        }
        self.report(&reason).await;
    }

    async fn report(&self, reason: &str) {
        // Fails if the receiver is gone; then the stream ends anyway.
        let _ = self.policy.events.send(ClientEvent::Rejected(reason.to_owned())).await;
    }

    /// The stream is alive and in sync: confirms the policy in force.
    fn confirm(&self) {
        if !self.in_sync || !self.pending.is_empty() {
            return;
        }
        let at = SystemTime::now();
        self.policy.change_status(|status| status.confirmed_at = Some(at));
        // Fails if the writer has ended.
        let _ = self.policy.confirmations.send(Confirmation { changed: Vec::new(), at });
    }
}
