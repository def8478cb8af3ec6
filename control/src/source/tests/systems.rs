//! The systems under test, assembled as in the product, without sockets, clocks and inotify.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use prost::Message;
use vipgate_dataplane::policy::build::Builder;
use vipgate_policy::compiler::{GatewayLocality, Placement};

use super::disk::Disk;
use crate::gateway::policy_source::PolicySubscription;
use crate::policyd::codec::Response;
use crate::policyd::stream::{Acknowledgment, DeltaStream};
use crate::source::files::WatchedFiles;
use crate::source::ingest::{SourceIngester, SourceStatus};
use crate::source::store::ManifestStore;
use crate::xds::client;
use crate::xds::fixtures::whole_policy;
use crate::xds::publication::Publication;
use crate::xds::resource::{Kind, encode_all, version_of};
use crate::xds::store::tests::{PolicyView, builder, policy_view};
use crate::xds::store::{PolicyUpdate, ResourceStore};

const GATEWAY: &str = "g1";

/// The content of a gateway's policy built in full.
pub(super) fn built(placement: &Placement) -> PolicyView {
    let policy = whole_policy(placement, &GatewayLocality::named(GATEWAY), &version_of(placement));
    policy_view(&builder().with_change(&policy).unwrap().policy)
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
        let opened = PolicySubscription::files(files, GatewayLocality::named(GATEWAY), ingester).await;
        let (source, update) = opened.unwrap();
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
        self.status().compiled.load().states().map(|(_, count)| count)
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
    in_force: Option<PolicyView>,
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
        }
    }

    /// The same gateway, with a server that was restarted.
    pub(super) fn of_next_server(self) -> Self {
        Self { last: Arc::default(), stream: DeltaStream::default(), is_subscribed: false, ..self }
    }

    /// Publishes a placement, which the gateway brings into force.
    pub(super) fn publish(&mut self, placement: Arc<Placement>) {
        if let Some(next) = self.last.next(placement) {
            assert!(next.left_out.is_empty(), "gateways can't decode a resource: {:?}", next.left_out);
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
        self.take();
    }

    fn subscribe(&mut self, kind: Kind) {
        let initial_resource_versions = self.book.versions(kind).collect();
        let type_url = kind.type_url().to_owned();
        let request = DeltaDiscoveryRequest { type_url, initial_resource_versions, ..DeltaDiscoveryRequest::default() };
        self.stream.handle_request(request, &self.last).unwrap();
    }

    /// Does the client's part: stages an update until it is complete, applies it, and acknowledges it.
    fn take(&mut self) {
        let mut pending: BTreeMap<String, String> = BTreeMap::new();
        while let Some(Response { bytes, nonce, .. }) = self.stream.next_response() {
            let response = DeltaDiscoveryResponse::decode(bytes).unwrap();
            pending.insert(nonce, response.type_url.clone());
            self.book.stage(response).unwrap_or_else(|error| panic!("rejected by the decoder: {error}"));
        }
        if pending.is_empty() {
            return;
        }
        assert!(self.book.is_complete());
        let update = self.book.update_for(&self.gateway);
        let snapshot = self.builder.with_change(&update.change);
        let snapshot = snapshot.unwrap_or_else(|error| panic!("rejected by the engine: {error}"));
        self.in_force = Some(policy_view(&snapshot.policy));
        self.book.commit();
        for (response_nonce, type_url) in pending {
            let request = DeltaDiscoveryRequest { type_url, response_nonce, ..DeltaDiscoveryRequest::default() };
            let acknowledgment = self.stream.handle_request(request, &self.last).unwrap();
            assert_eq!((self.stream.next_size(), acknowledgment), (None, Acknowledgment::Ack));
        }
    }

    /// Checks that the gateway takes the whole policy as well, and has the same in force.
    pub(super) fn check_whole(&self) {
        let Publication { placement, version, .. } = &*self.last;
        let whole = builder().with_change(&whole_policy(placement, &self.gateway, version));
        let whole = whole.unwrap_or_else(|error| panic!("rejected by the engine: {error}"));
        assert_eq!(self.in_force, Some(policy_view(&whole.policy)), "the change, and the whole policy");
    }
}
