//! Where the gateway's policy comes from: files that it compiles itself, or a server that has done so.

use std::path::PathBuf;

use tokio::sync::mpsc;
use vipgate_dataplane::snapshot::change::PolicyChange;
use vipgate_dataplane::snapshot::spec::PolicySet;

use crate::complaint::Complaints;
use crate::manifest::Foreign;
use crate::policy::{Follower, Viewer, compile_files};
use crate::xds::book::Offer;
use crate::xds::client::Event;
use crate::xds::resource::version_of;

/// Updates of a server that wait for the control thread.
pub(super) const EVENTS: usize = 4;

/// The source of policy.
pub(super) enum Feed {
    /// Manifests in files.
    Files(Box<Files>, mpsc::Receiver<()>),
    /// A policy server.
    Server(mpsc::Receiver<Event>),
}

/// Something happened at the source.
pub(super) enum News {
    /// Files have changed.
    Files,
    /// The server has said something.
    Server(Event),
}

impl Feed {
    /// Files, followed from now on; what they say now.
    pub(super) fn files(paths: Vec<PathBuf>, viewer: Viewer) -> Result<(Self, Offer), Complaints> {
        // Followed first, read then: what changes in between is not missed.
        let follower = Follower::new(paths.clone());
        let mut files = Files { paths, viewer, in_force: PolicySet::default(), read: PolicySet::default() };
        let offer = files.read()?;
        Ok((Self::Files(Box::new(files), follow(follower)), offer))
    }

    /// Waits for something to happen. May be dropped and called again.
    pub(super) async fn next(&mut self) -> News {
        let news = match self {
            Self::Files(_, changes) => changes.recv().await.map(|()| News::Files),
            Self::Server(events) => events.recv().await.map(News::Server),
        };
        match news {
            Some(news) => news,
            // Whoever follows ends only with the process; until then there is nothing to wait for.
            None => std::future::pending().await,
        }
    }
}

/// Manifests in files, and what they came to when they were last put in force.
pub(super) struct Files {
    paths: Vec<PathBuf>,
    viewer: Viewer,
    in_force: PolicySet,
    /// What was read last.
    read: PolicySet,
}

impl Files {
    /// Reads and compiles them; warnings are logged. What comes out is taken to be put in force.
    pub(super) fn read(&mut self) -> Result<Offer, Complaints> {
        let (deal, warnings) = compile_files(&self.paths, Foreign::Ignore).accept()?;
        for warning in &warnings {
            tracing::warn!(event = "policy_warning", "{warning}");
        }
        self.read = deal.part_of(Some(&self.viewer), &version_of(&deal));
        Ok(Offer { updates: 1, change: PolicyChange::between(&self.in_force, &self.read), peers: deal.peers })
    }

    /// What was read last is in force.
    pub(super) fn took(&mut self) {
        self.in_force = std::mem::take(&mut self.read);
    }
}

/// Follows the policy's files in a task of its own.
fn follow(mut follower: Follower) -> mpsc::Receiver<()> {
    let (sender, receiver) = mpsc::channel(1);
    tokio::spawn(async move {
        loop {
            follower.changed().await;
            if sender.send(()).await.is_err() {
                return;
            }
        }
    });
    receiver
}
