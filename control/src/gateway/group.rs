//! This gateway among others: who serves as the policy server says, who is linked, and what follows of it for the engine. What follows
//! is decided without waiting for anybody; `Group` brings the news together.

mod authentication;
mod lease;
mod standing;

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use vipgate_dataplane::command::Command;
use vipgate_dataplane::copies::worker_of;
use vipgate_dataplane::link::outlet::Outlet;
use vipgate_dataplane::session::image::Image;
use vipgate_dataplane::snapshot::members::{GatewayId, MembersSpec};

use self::authentication::Tunnels;
pub use self::lease::{GroupLease, LeaseStatus};
pub(super) use self::standing::{Source, Standing};
use super::state::GatewayState;
use super::workers;
use crate::config::Config;
use crate::members::{Authority, Handle, Status, View, Wanted};
use crate::peer::{self, Event, Peers, PeersStatus, TunnelSecret, Workers};
use crate::policy;

/// How often it is looked at whether workers act by the last view.
const LOOK: Duration = Duration::from_millis(5);

/// What this gateway hears of others, and tells them.
pub(super) struct Group {
    standing: Standing,
    lease: Arc<GroupLease>,
    /// Where a policy server is asked who serves.
    client: Option<Handle>,
    client_task: Option<JoinHandle<()>>,
    links: Option<Links>,
    /// The view that workers were told and may not act by yet, and whether others serve by it than before.
    pending: Option<(u64, bool)>,
    acting: u64,
    /// The view since which the same ones serve, as workers were told.
    since: u64,
    /// Whether the lease is held, as the log has it.
    held: bool,
}

/// Links to other gateways.
pub(super) struct Links {
    pub(super) peers: Peers,
    pub(super) events: mpsc::Receiver<Event>,
    pub(super) status: watch::Receiver<Arc<PeersStatus>>,
    /// The view that they go by.
    pub(super) view: Arc<peer::View>,
}

/// How gateways stand as long as nobody has been asked: where somebody decides, none serves.
pub(super) fn at_start(config: &Config, peers: &[policy::Peer]) -> MembersSpec {
    let tunnels = Tunnels::new(config.peer_authentication(), None);
    let mut standing = Standing::new(config.name.as_str().into(), config.tunnel(), Source::of(config), tunnels);
    standing.set_policy(peers);
    standing.spec(Instant::now(), workers::now())
}

/// The workers, as links to other gateways need them.
#[derive(Debug)]
pub(super) struct LinkedWorkers(pub(super) Arc<GatewayState>);

impl Workers for LinkedWorkers {
    fn count(&self) -> usize {
        self.0.workers.len()
    }

    fn outlet(&self, worker: usize) -> &Outlet {
        &self.0.workers[worker].outlet
    }

    fn send(&self, worker: usize, command: Command, until: Instant) -> bool {
        let handle = &self.0.workers[worker];
        let sent = handle.commands.send_deadline(command, until).is_ok();
        handle.doorbell.wake();
        sent
    }

    fn replication_epoch(&self) -> u64 {
        self.0.compiled.load().members().replication_epoch()
    }

    fn gateway(&self, name: &str) -> Option<GatewayId> {
        self.0.compiled.load().members().id(name)
    }

    fn place(&self, image: &Image) -> usize {
        let workers = u8::try_from(self.0.workers.len()).unwrap_or(u8::MAX);
        worker_of(image, &self.0.compiled.load(), workers).0.into()
    }
}

/// How the group stands, for whoever asks.
#[derive(Clone, Debug, Default)]
pub struct GroupStatus {
    /// Who says who serves.
    pub authority: Option<Authority>,
    /// What was said last.
    pub view: Arc<View>,
    /// How links stand.
    pub links: Arc<PeersStatus>,
    /// Whether this gateway takes no new sessions, because somebody wants it to stop.
    pub draining: bool,
    /// What the engine was told.
    pub spec: MembersSpec,
    /// The lease of this gateway's shares; it changes without anybody being told.
    pub lease: Option<Arc<GroupLease>>,
}

impl GroupStatus {
    /// Whether this gateway serves: one that is alone does.
    pub fn serves(&self) -> bool {
        self.spec.this.is_none()
            || self.spec.gateways.iter().any(|it| Some(&it.name) == self.spec.this.as_ref() && it.serving)
    }

    /// How many gateways serve.
    pub fn serving(&self) -> usize {
        if self.spec.this.is_none() { 1 } else { self.spec.gateways.iter().filter(|it| it.serving).count() }
    }

    /// How the lease of this gateway's shares stands now.
    pub fn lease(&self) -> LeaseStatus {
        self.lease.as_ref().map_or(LeaseStatus::NotNeeded, |lease| lease.status())
    }

    /// Whether this gateway opens sessions in what it was dealt, or is alone.
    pub fn is_open(&self) -> bool {
        let Some(this) = &self.spec.this else { return true };
        self.spec.gateways.iter().any(|member| member.name == *this && member.serving && member.may_open)
    }
}

impl Group {
    /// A group of which nothing is known but its gateways' names.
    pub(super) fn new(
        config: &Config,
        lease: Arc<GroupLease>,
        client: Option<(Handle, JoinHandle<()>)>,
        links: Option<Links>,
        tunnel_secret: Option<TunnelSecret>,
    ) -> Self {
        let (client, client_task) = client.unzip();
        let tunnels = Tunnels::new(config.peer_authentication(), tunnel_secret);
        Self {
            standing: Standing::new(config.name.as_str().into(), config.tunnel(), Source::of(config), tunnels),
            lease,
            client,
            client_task,
            links,
            pending: None,
            acting: 0,
            since: 0,
            held: true,
        }
    }

    /// Waits until something is new, or it is time to look again. May be dropped and called again.
    pub(super) async fn changed(&mut self) {
        let due = match (self.pending, self.standing.due()) {
            (Some(_), _) => Some(LOOK),
            (None, due) => due.map(|due| due.saturating_duration_since(Instant::now())),
        };
        let time = async {
            match due {
                Some(due) => tokio::time::sleep(due).await,
                None => std::future::pending().await,
            }
        };
        let told = async {
            if let Some(client) = &mut self.client
                && client.status.changed().await.is_ok()
            {
                return;
            }
            std::future::pending::<()>().await;
        };
        let (event, linked) = match &mut self.links {
            Some(Links { events, status, .. }) => (Some(events), Some(status)),
            None => (None, None),
        };
        let event = async {
            match event {
                Some(events) => events.recv().await,
                None => std::future::pending().await,
            }
        };
        let linked = async {
            if let Some(status) = linked
                && status.changed().await.is_ok()
            {
                return;
            }
            std::future::pending::<()>().await;
        };
        tokio::select! {
            () = time => {}
            () = told => {}
            () = linked => {}
            event = event => match event {
                Some(event) => self.hear(event),
                None => std::future::pending().await,
            },
        }
    }

    fn hear(&mut self, event: Event) {
        match event {
            Event::Released { gateway, view } => self.standing.release(gateway, view),
            Event::Told { gateway, view } => {
                let number = view.number;
                if self.client.as_ref().is_some_and(|client| client.hear_elsewhere(view)) {
                    tracing::info!(
                        event = "view_from_gateway",
                        gateway = &*gateway,
                        view = number,
                        "gateway {gateway} says who serves, while the policy server can't be heard"
                    );
                }
            }
            // The links' status says it, too.
            Event::Synced { .. } => {}
        }
    }

    /// The gateways that the policy in force names.
    pub(super) fn set_policy(&mut self, gateways: &[policy::Peer]) {
        self.standing.set_policy(gateways);
    }

    /// Somebody wants this gateway to stop serving, or to serve again.
    pub(super) fn set_draining(&mut self, draining: bool) {
        self.standing.set_draining(draining);
    }

    /// This gateway can't do what it serves for, and why; or it can again.
    pub(super) fn set_unable(&mut self, reason: Option<Arc<str>>) {
        self.standing.set_unable(reason);
    }

    /// Takes in the news; what the engine is to be told.
    pub(super) fn settle(&mut self, now: Instant) -> MembersSpec {
        if let Some(client) = &mut self.client {
            let status: Status = client.status.borrow_and_update().clone();
            self.standing.set_status(&status, now);
        }
        if let Some(links) = &mut self.links {
            let status = links.status.borrow_and_update().clone();
            self.standing.set_links(status);
            for gateway in self.standing.overdue(now) {
                links.peers.request(&gateway);
            }
        }
        self.lease.need(self.standing.needs_lease());
        if let Some(until) = self.standing.lease_by_peers() {
            self.lease.extend_by_peers(until);
        }
        self.standing.spec(now, workers::now())
    }

    /// Workers were told what follows of the news; `moved`: others serve than before.
    pub(super) fn told(&mut self, moved: bool) {
        let before = self.pending.is_some_and(|(_, moved)| moved);
        // Whoever has stopped and serves again unseen may have lost what it was told.
        let since = self.standing.since();
        let moved = moved || before || std::mem::replace(&mut self.since, since) != since;
        self.pending = Some((self.standing.view().number, moved));
    }

    /// All workers act by what they were told last: others hear of it.
    pub(super) fn acts(&mut self) {
        let Some((number, moved)) = self.pending.take() else { return };
        self.acting = number;
        if let Some(links) = &mut self.links {
            // Only now: what comes over them is looked at by the view that workers act by.
            let view = self.standing.links_view();
            if *view != *links.view {
                links.peers.set_view(&view);
                links.view = view;
            }
            for other in self.standing.others() {
                if moved {
                    links.peers.resync(other);
                }
                links.peers.release(other, number);
            }
        }
    }

    /// Whether there is a view that workers act by without having been told anything: nothing follows of it.
    pub(super) fn is_behind(&self) -> bool {
        self.pending.is_none() && self.acting != self.standing.view().number
    }

    /// Whether it isn't known yet whether anybody says who serves.
    pub(super) fn is_unknown(&self) -> bool {
        self.standing.is_unknown()
    }

    /// Whether workers may not act yet by what they were told.
    pub(super) fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Says what this gateway wants.
    pub(super) fn wish(&self) {
        let Some(client) = &self.client else { return };
        let wanted =
            Wanted { wish: self.standing.wish(), seen_view: self.acting, unable: self.standing.unable().cloned() };
        client.wish.send_if_modified(|now| {
            let is_new = *now != wanted;
            *now = wanted;
            is_new
        });
    }

    /// How it stands.
    pub(super) fn status(&self, spec: &MembersSpec) -> GroupStatus {
        GroupStatus {
            authority: self.client.as_ref().map(|client| client.status.borrow().authority),
            view: self.standing.view().clone(),
            links: self.links.as_ref().map(|links| links.status.borrow().clone()).unwrap_or_default(),
            draining: self.standing.is_draining(),
            spec: spec.clone(),
            lease: Some(self.lease.clone()),
        }
    }

    /// Says once when the lease has lapsed, and once when it is held again. One that nobody has granted yet can't lapse.
    pub(super) fn watch_lease(&mut self) {
        self.lease.expire();
        let (held, view) = (self.lease.status() != LeaseStatus::Lapsed, self.standing.view().number);
        if held == self.held || (!held && !self.lease.was_granted()) {
            return;
        }
        self.held = held;
        if held {
            tracing::info!(
                event = "lease_held",
                view,
                "the lease of this gateway's shares is held again, or needed no more"
            );
        } else if self.standing.is_serving() {
            tracing::warn!(
                event = "lease_lapsed",
                view,
                "the lease of this gateway's shares has lapsed: it opens no sessions in them until it is held again; is the \
                 policy server reached in time?"
            );
        } else {
            tracing::info!(event = "lease_lapsed", view, "this gateway serves no more, and its lease has lapsed");
        }
    }

    /// Ends it: who is told nothing more knows by the lease.
    pub(super) async fn close(self) {
        drop(self.client);
        drop(self.links);
        if let Some(task) = self.client_task {
            let _ = tokio::time::timeout(Duration::from_secs(1), task).await;
        }
    }
}
