//! A policy server: a reconciler with its own provider, and its own belief about who leads.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use tokio::sync::watch;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use vipgate_cloud::NicId;
use vipgate_cloud::plan::GatewayState;
use vipgate_cloud::reconciler::{self, Inputs, PoolState};

use crate::reconcile::checked::{Checked, Views, lock};
use crate::reconcile::cloud::Cloud;
use crate::reconcile::log::Log;
use crate::reconcile::reached::Reached;

/// What all policy servers of a world share.
#[derive(Clone)]
pub(crate) struct Common {
    pub(crate) log: Log,
    pub(crate) reached: Reached,
    pub(crate) activity: Arc<AtomicU64>,
    pub(crate) nics: Arc<Mutex<Vec<(NicId, String)>>>,
    /// When a request failed or was late the last time.
    pub(crate) failed: Arc<Mutex<Option<Instant>>>,
}

pub(crate) struct Server {
    pub(crate) name: String,
    pub(crate) leads: Arc<AtomicBool>,
    pub(crate) task: JoinHandle<()>,
    pub(crate) states: watch::Receiver<Arc<PoolState>>,
    /// Whether it gets no inputs any more, as one that is cut off.
    pub(crate) is_cut_off: bool,
    inputs: watch::Sender<Inputs>,
    views: Views,
}

impl Server {
    pub(crate) fn start<C: Cloud>(name: &str, cloud: &C, url: &str, common: &Common) -> Self {
        let (inputs, receiver) = watch::channel(Inputs::default());
        let (sender, states) = watch::channel(Arc::new(PoolState::default()));
        let (leads, views) = (Arc::new(AtomicBool::new(false)), Views::default());
        let provider = Checked {
            provider: cloud.provider(url),
            views: views.clone(),
            nics: common.nics.clone(),
            log: common.log.clone(),
            name: name.to_owned(),
            reached: common.reached.clone(),
            activity: common.activity.clone(),
        };
        let flag = leads.clone();
        let run = reconciler::run(Arc::new(provider), receiver, sender, move || flag.load(Ordering::Relaxed));
        let task = tokio::spawn(run);
        Self { name: name.to_owned(), leads, task, states, is_cut_off: false, inputs, views }
    }

    /// Gives it inputs, unless it is cut off.
    pub(crate) fn publish(&self, mut inputs: Inputs) {
        if self.is_cut_off {
            return;
        }
        inputs.leads = self.leads.load(Ordering::Relaxed);
        let mut views = lock(&self.views);
        views.swap(0, 1);
        views[0] = inputs.clone();
        self.inputs.send_replace(inputs);
    }

    /// The gateways that are dead in its view.
    pub(crate) fn dead(&self) -> Vec<String> {
        let inputs = self.inputs.borrow();
        let gateways = inputs.desired.iter().flat_map(|it| &it.gateways);
        gateways.filter(|(_, state)| **state == GatewayState::Dead).map(|(name, _)| name.clone()).collect()
    }

    pub(crate) fn lead(&self, leads: bool) {
        self.leads.store(leads, Ordering::Relaxed);
        self.inputs.send_modify(|inputs| inputs.leads = leads);
    }

    pub(crate) fn leads(&self) -> bool {
        self.leads.load(Ordering::Relaxed)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.task.abort();
    }
}
