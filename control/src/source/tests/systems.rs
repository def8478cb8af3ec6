//! The systems under test, assembled as in the product, without sockets, clocks and inotify.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use prost::Message;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::spec::PolicySet;
use vipgate_policy::compiler::{GatewayLocality, Placement};

use super::disk::Disk;
use crate::gateway::policy_source::PolicySubscription;
use crate::policyd::codec::Response;
use crate::policyd::publication::Publication;
use crate::policyd::stream::{Acknowledgment, DeltaStream};
use crate::source::SourceEvent;
use crate::source::files::{FileReader, WatchedFiles};
use crate::source::ingest::{SourceIngester, SourceStatus};
use crate::source::store::ManifestStore;
use crate::xds::client;
use crate::xds::resource::{Kind, encode_all, version_of};
use crate::xds::store::tests::{PolicyView, builder, policy_view};
use crate::xds::store::{PolicyUpdate, ResourceStore};

const GATEWAY: &str = "g1";

/// The content of a policy built in full.
pub(super) fn built(set: &PolicySet) -> PolicyView {
    policy_view(&builder().with_policy(set).unwrap().policy)
}

fn states(status: &SourceStatus) -> [u64; 3] {
    status.compiled.load().states().map(|(_, count)| count)
}

/// A gateway with policy in files.
pub(super) struct FileGateway {
    source: PolicySubscription,
    builder: Builder,
    /// The policy in the engine.
    pub(super) in_force: Option<PolicyView>,
}

impl FileGateway {
    pub(super) async fn start(disk: &Disk, allow_empty: bool) -> Self {
        let ingester = SourceIngester::new("files of a test".to_owned(), ManifestStore::new(allow_empty));
        let files = WatchedFiles::unwatched(disk.paths());
        let (source, update) = PolicySubscription::files(files, GatewayLocality::named(GATEWAY), ingester).await;
        let mut gateway = Self { source, builder: builder(), in_force: None };
        if let Some(update) = update {
            gateway.apply(&update, &[]);
        }
        gateway
    }

    /// Rereads the files and applies the updates.
    pub(super) async fn reread(&mut self, log: &[String]) {
        let files = self.source.files.clone().unwrap();
        self.follow(files.reload(), log).await;
    }

    pub(super) async fn accept_empty(&mut self) -> Result<usize, ()> {
        let files = self.source.files.clone().unwrap();
        let accepted = self.follow(files.accept_empty(), &[]).await.map_err(|_| ())?;
        Ok(accepted.entries.iter().map(|(_, objects)| objects).sum())
    }

    /// Processes events, as the control thread does, until `work` is done.
    async fn follow<T>(&mut self, work: impl Future<Output = T>, log: &[String]) -> T {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                output = &mut work => return output,
                event = self.source.next() => match event {
                    client::ClientEvent::Update(update, answer) => {
                        self.apply(&update, log);
                        answer.send(Ok(client::Effect::InForce)).unwrap();
                    }
                    client::ClientEvent::Rejected(reason) => panic!("{reason}"),
                },
            }
        }
    }

    fn apply(&mut self, update: &PolicyUpdate, log: &[String]) {
        let snapshot = self.builder.with_change(&update.change);
        let snapshot = snapshot.unwrap_or_else(|error| panic!("rejected by the engine: {error}: {log:#?}"));
        self.in_force = Some(policy_view(&snapshot.policy));
    }

    fn status(&self) -> &SourceStatus {
        &self.source.files.as_ref().unwrap().status
    }

    pub(super) fn is_healthy(&self) -> bool {
        self.status().health.load().is_healthy()
    }

    pub(super) fn states(&self) -> [u64; 3] {
        states(self.status())
    }
}

/// Checks that the resources are those of a placement that is encoded from nothing.
fn check_encoded(publication: &Publication) {
    assert_eq!(publication.version, version_of(&publication.placement));
    let counted = &Kind::ALL[..Kind::COUNTED];
    let published = counted.iter().flat_map(|kind| publication.of_kind(*kind));
    let mut published: Vec<_> = published.map(|it| (it.key.clone(), it.content.clone())).collect();
    published.sort_unstable_by(|a, b| a.0.cmp(&b.0));
    assert!(published.iter().all(|(key, _)| publication.get(key).is_some_and(|it| it.key == *key)));
    assert_eq!(published, encode_all(&publication.placement));
}

/// A policy server's stream to one gateway, and that gateway.
pub(super) struct Subscriber {
    gateway: GatewayLocality,
    last: Arc<Publication>,
    stream: DeltaStream,
    is_subscribed: bool,
    book: ResourceStore,
    builder: Builder,
    /// The policy in the gateway's engine.
    pub(super) in_force: Option<PolicyView>,
    /// Whether that may be from a previous server.
    pub(super) is_older: bool,
}

impl Subscriber {
    pub(super) fn new(gateway: &str) -> Self {
        Self {
            gateway: GatewayLocality::named(gateway),
            last: Arc::default(),
            stream: DeltaStream::default(),
            is_subscribed: false,
            book: ResourceStore::default(),
            builder: builder(),
            in_force: None,
            is_older: false,
        }
    }

    /// The same gateway, with a server that was restarted.
    pub(super) fn of_next_server(self) -> Self {
        let (stream, is_older) = (DeltaStream::default(), self.in_force.is_some());
        Self { last: Arc::default(), stream, is_subscribed: false, is_older, ..self }
    }

    /// Publishes a placement, which the gateway brings into force.
    pub(super) fn publish(&mut self, placement: Arc<Placement>, log: &[String]) {
        if let Some(next) = self.last.next(placement) {
            assert!(next.left_out.is_empty(), "gateways can't decode a resource: {:?}: {log:#?}", next.left_out);
            self.last = Arc::new(next);
            check_encoded(&self.last);
        }
        if !self.is_subscribed {
            self.is_subscribed = true;
            for kind in Kind::OF_GATEWAYS {
                self.subscribe(kind);
            }
        } else if let Some(update) = self.stream.update(&self.last).unwrap() {
            self.stream.publish(update);
        }
        self.take(log);
    }

    fn subscribe(&mut self, kind: Kind) {
        let initial_resource_versions = self.book.versions(kind).collect();
        let type_url = kind.type_url().to_owned();
        let request = DeltaDiscoveryRequest { type_url, initial_resource_versions, ..DeltaDiscoveryRequest::default() };
        self.stream.handle_request(request, &self.last).unwrap();
    }

    /// Does the client's part: stages an update until it is complete, applies it, and acknowledges it.
    fn take(&mut self, log: &[String]) {
        let mut pending: BTreeMap<String, String> = BTreeMap::new();
        while let Some(Response { bytes, nonce, .. }) = self.stream.next_response() {
            let response = DeltaDiscoveryResponse::decode(bytes).unwrap();
            pending.insert(nonce, response.type_url.clone());
            self.book.stage(response).unwrap_or_else(|error| panic!("rejected by the decoder: {error}: {log:#?}"));
        }
        if pending.is_empty() {
            return;
        }
        assert!(self.book.is_complete(), "{log:#?}");
        let update = self.book.update_for(&self.gateway);
        let snapshot = self.builder.with_change(&update.change);
        let snapshot = snapshot.unwrap_or_else(|error| panic!("rejected by the engine: {error}: {log:#?}"));
        self.in_force = Some(policy_view(&snapshot.policy));
        self.is_older = false;
        self.book.commit();
        for (response_nonce, type_url) in pending {
            let request = DeltaDiscoveryRequest { type_url, response_nonce, ..DeltaDiscoveryRequest::default() };
            let acknowledgment = self.stream.handle_request(request, &self.last).unwrap();
            assert_eq!((self.stream.next_size(), acknowledgment), (None, Acknowledgment::Ack), "{log:#?}");
        }
    }

    /// Checks that the gateway takes the whole policy as well, and has the same in force.
    pub(super) fn check_whole(&self) {
        let Publication { placement, version, .. } = &*self.last;
        let set = placement.policy_for(Some(&self.gateway), version);
        let whole = builder().with_policy(&set).unwrap_or_else(|error| panic!("rejected by the engine: {error}"));
        assert_eq!(self.in_force, Some(policy_view(&whole.policy)), "the change, and the whole policy");
    }
}

/// A policy server and one gateway of it.
pub(super) struct ServerGateway {
    reader: FileReader,
    intake: SourceIngester,
    pub(super) gateway: Subscriber,
}

impl ServerGateway {
    pub(super) async fn start(disk: &Disk, allow_empty: bool) -> Self {
        Self::with_gateway(Subscriber::new(GATEWAY), disk, allow_empty).await
    }

    /// Restarts the policy server; the gateway keeps running.
    pub(super) async fn restart(self, disk: &Disk, allow_empty: bool) -> Self {
        Self::with_gateway(self.gateway.of_next_server(), disk, allow_empty).await
    }

    async fn with_gateway(gateway: Subscriber, disk: &Disk, allow_empty: bool) -> Self {
        let intake = SourceIngester::new("files".to_owned(), ManifestStore::new(allow_empty));
        let mut served = Self { reader: FileReader::new(disk.paths()), intake, gateway };
        served.reread(&[]).await;
        served
    }

    pub(super) async fn reread(&mut self, log: &[String]) {
        let update = self.reader.read();
        self.intake.ingest([SourceEvent::Update(update)]).await.unwrap();
        self.publish(log);
    }

    pub(super) async fn accept_empty(&mut self) -> Result<usize, ()> {
        let accepted = self.intake.accept_empty().await.map_err(|_| ())?;
        self.publish(&[]);
        Ok(accepted.entries.iter().map(|(_, objects)| objects).sum())
    }

    fn publish(&mut self, log: &[String]) {
        if let Some(placement) = self.intake.status().compiled.load().placement.clone() {
            self.gateway.publish(placement, log);
        }
    }

    pub(super) fn is_healthy(&self) -> bool {
        self.intake.status().health.load().is_healthy()
    }

    pub(super) fn states(&self) -> [u64; 3] {
        states(&self.intake.status())
    }
}
