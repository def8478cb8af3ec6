//! What a policy server does beside serving if its source is the Kubernetes API: it takes part in the election of a
//! leader, and as the leader it writes addresses of Services, status of objects, and Events.

pub(super) mod writer;

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::watch;
use vipgate_common::Tasks;

use self::writer::KubeWriter;
use super::cloud::CloudState;
use super::ipam::{self, IpamState};
use super::leader::{self, KubernetesLease, Leadership, leads_for};
use super::membership::MembershipHandle;
use super::object_state::{Compilation, ObjectState};
use super::object_status::InputSources;
use super::registry::Registry;
use super::{events, object_status};
use crate::config::{KubernetesSource, PolicydSource};
use crate::metric::Family;
use crate::metrics::definitions::policy_server as defined;
use crate::source::store::CompileOutcome;
use crate::xds::publication::Publication;

/// State of such a server.
#[derive(Debug)]
pub struct KubernetesState {
    source: KubernetesSource,
    leadership: watch::Sender<Leadership>,
    /// Address management.
    pub(super) ipam: Arc<IpamState>,
    /// Objects of the API.
    pub(super) objects: Arc<ObjectState>,
}

impl KubernetesState {
    /// The state, if this is its source.
    pub(super) fn of(source: &PolicydSource) -> Option<Self> {
        let PolicydSource::Kubernetes(source) = source else { return None };
        let (leadership, ipam, objects) = Default::default();
        Some(Self { source: source.clone(), leadership, ipam, objects })
    }

    /// Until when this server leads, for whatever only the leader does.
    pub(super) fn leadership(&self) -> watch::Receiver<Leadership> {
        self.leadership.subscribe()
    }

    /// Whether this server leads.
    pub(super) fn leads(&self) -> bool {
        leads_for(*self.leadership.borrow(), Duration::ZERO)
    }

    /// Starts all tasks, among `tasks`. Of these, one ends when nothing is written any more and the Lease is given back.
    /// `registry` and `nodes` are the connected gateways and agents of nodes.
    pub(super) fn start(
        &self,
        registry: Arc<Registry>,
        nodes: Arc<Registry>,
        membership: MembershipHandle,
        cloud: Arc<CloudState>,
        tasks: &Tasks,
    ) {
        let (objects, ipam) = (self.objects.clone(), self.ipam.clone());
        let writer = KubeWriter::new(self.source.clone(), self.leadership(), tasks.clone(), objects.writes.clone());
        let writer = Arc::new(writer);
        let events = events::run(objects.events.clone(), writer.clone());
        let addresses = ipam::run(self.source.clone(), ipam.clone(), objects.clone(), cloud.clone(), writer.clone());
        let status = object_status::run(InputSources { objects, ipam, cloud, registry, nodes, membership }, writer);
        let writers = tasks.spawn("writers of objects", async move {
            tokio::join!(addresses, status, events);
        });
        let lease = KubernetesLease::new(&self.source);
        let election = leader::run(lease, self.leadership.clone(), Some(writers), tasks.clone());
        tasks.spawn("leader election", election);
    }

    /// Passes a compilation to the writer of status, once it is published.
    pub(super) fn share(&self, outcome: Arc<CompileOutcome>, published: &Arc<Publication>) {
        if published.number > 0 {
            self.objects.recent.record(published);
            self.objects.compilation.store(Some(Arc::new(Compilation { outcome, published: published.clone() })));
        }
    }

    /// Its metrics.
    pub(super) fn families(&self) -> Vec<Family> {
        let mut families = vec![defined::LEADER.single(self.leads().into())];
        families.extend(self.ipam.families());
        families.extend(self.objects.families());
        families
    }
}
