//! The code that is tested, put together as in the product but for sockets, clocks and notifications of the kernel.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::Arc;

use envoy_types::pb::envoy::service::discovery::v3::{DeltaDiscoveryRequest, DeltaDiscoveryResponse};
use prost::Message;
use vipgate_dataplane::snapshot::build::Builder;
use vipgate_dataplane::snapshot::spec::PolicySet;

use super::disk::Disk;
use crate::gateway::feed::Feed;
use crate::policy::Viewer;
use crate::policyd::codec::Response;
use crate::policyd::publication::Publication;
use crate::policyd::stream::{Heard, Stream};
use crate::source::Event;
use crate::source::files::Reader;
use crate::source::intake::{Intake, SourceStatus};
use crate::source::store::Store;
use crate::xds::book::tests::{Seen, builder, seen};
use crate::xds::book::{Book, Offer};
use crate::xds::client;
use crate::xds::resource::Kind;

const GATEWAY: &str = "g1";

/// What a policy comes to that is built as a whole.
pub(super) fn built(set: &PolicySet) -> Seen {
    seen(&builder().with_policy(set).unwrap().policy)
}

fn states(status: &SourceStatus) -> [u64; 3] {
    status.compiled.load().states().map(|(_, count)| count)
}

/// A gateway with policy in files.
pub(super) struct Direct {
    feed: Feed,
    builder: Builder,
    /// What the engine has.
    pub(super) in_force: Option<Seen>,
}

impl Direct {
    pub(super) async fn start(disk: &Disk, allow_empty: bool) -> Self {
        let (feed, offer) = Feed::files(disk.paths(), Viewer::named(GATEWAY), allow_empty, None).await;
        let mut gateway = Self { feed, builder: builder(), in_force: None };
        if let Some(offer) = offer {
            gateway.put_in_force(&offer, &[]);
        }
        gateway
    }

    /// Reads the files, and puts in force what is offered.
    pub(super) async fn look(&mut self, log: &[String]) {
        let files = self.feed.files.clone().unwrap();
        self.follow(files.read(), log).await;
    }

    pub(super) async fn accept_empty(&mut self) -> Result<usize, ()> {
        let files = self.feed.files.clone().unwrap();
        let accepted = self.follow(files.accept_empty(), &[]).await.map_err(|_| ())?;
        Ok(accepted.texts.iter().map(|(_, objects)| objects).sum())
    }

    /// Does what the control thread does until something is done.
    async fn follow<T>(&mut self, work: impl Future<Output = T>, log: &[String]) -> T {
        let mut work = pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return done,
                event = self.feed.next() => match event {
                    client::Event::Offer(offer, answer) => {
                        self.put_in_force(&offer, log);
                        answer.send(Ok(())).unwrap();
                    }
                    client::Event::Refused(reason) => panic!("{reason}"),
                },
            }
        }
    }

    fn put_in_force(&mut self, offer: &Offer, log: &[String]) {
        let snapshot = self.builder.with_change(&offer.change);
        let snapshot = snapshot.unwrap_or_else(|error| panic!("the engine refuses: {error}: {log:#?}"));
        self.in_force = Some(seen(&snapshot.policy));
    }

    fn status(&self) -> &SourceStatus {
        &self.feed.files.as_ref().unwrap().status
    }

    pub(super) fn is_healthy(&self) -> bool {
        self.status().health.load().is_healthy()
    }

    pub(super) fn states(&self) -> [u64; 3] {
        states(self.status())
    }
}

/// A policy server, and a gateway that follows it.
pub(super) struct Served {
    reader: Reader,
    intake: Intake,
    last: Arc<Publication>,
    stream: Stream,
    is_subscribed: bool,
    book: Book,
    builder: Builder,
    /// What the gateway's engine has.
    pub(super) in_force: Option<Seen>,
    /// Whether that may be of a server before this one.
    pub(super) is_older: bool,
}

impl Served {
    pub(super) async fn start(disk: &Disk, allow_empty: bool) -> Self {
        let mut served = Self {
            reader: Reader::new(disk.paths()),
            intake: Intake::new("files".to_owned(), Store::new(allow_empty)),
            last: Arc::default(),
            stream: Stream::default(),
            is_subscribed: false,
            book: Book::default(),
            builder: builder(),
            in_force: None,
            is_older: false,
        };
        served.look(&[]).await;
        served
    }

    /// Another server; the gateway goes on.
    pub(super) async fn restart(self, disk: &Disk, allow_empty: bool) -> Self {
        let Self { book, builder, in_force, .. } = self;
        let mut served = Self {
            reader: Reader::new(disk.paths()),
            intake: Intake::new("files".to_owned(), Store::new(allow_empty)),
            last: Arc::default(),
            stream: Stream::default(),
            is_subscribed: false,
            is_older: in_force.is_some(),
            book,
            builder,
            in_force,
        };
        served.look(&[]).await;
        served
    }

    pub(super) async fn look(&mut self, log: &[String]) {
        let update = self.reader.read();
        self.intake.take([Event::Update(update)]).await.unwrap();
        self.publish(log);
    }

    pub(super) async fn accept_empty(&mut self) -> Result<usize, ()> {
        let accepted = self.intake.accept_empty().await.map_err(|_| ())?;
        self.publish(&[]);
        Ok(accepted.texts.iter().map(|(_, objects)| objects).sum())
    }

    fn publish(&mut self, log: &[String]) {
        let Some(deal) = self.intake.status().compiled.load().deal.clone() else { return };
        if let Some(next) = self.last.next(deal) {
            self.last = Arc::new(next);
        }
        if !self.is_subscribed {
            self.is_subscribed = true;
            for kind in Kind::ALL {
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
        self.stream.request(request, &self.last).unwrap();
    }

    /// What the client does: collects an update until it is whole, puts it in force, and acknowledges it.
    fn take(&mut self, log: &[String]) {
        let mut pending: BTreeMap<String, String> = BTreeMap::new();
        while let Some(Response { bytes, nonce, .. }) = self.stream.next_response() {
            let response = DeltaDiscoveryResponse::decode(bytes).unwrap();
            pending.insert(nonce, response.type_url.clone());
            self.book.stage(response).unwrap();
        }
        if pending.is_empty() {
            return;
        }
        assert!(self.book.is_whole(), "{log:#?}");
        let offer = self.book.offer(&Viewer::named(GATEWAY));
        let snapshot = self.builder.with_change(&offer.change);
        let snapshot = snapshot.unwrap_or_else(|error| panic!("the engine refuses: {error}: {log:#?}"));
        self.in_force = Some(seen(&snapshot.policy));
        self.is_older = false;
        self.book.commit();
        for (response_nonce, type_url) in pending {
            let request = DeltaDiscoveryRequest { type_url, response_nonce, ..DeltaDiscoveryRequest::default() };
            let heard = self.stream.request(request, &self.last).unwrap();
            assert_eq!((self.stream.next_size(), heard), (None, Heard::Accepted), "{log:#?}");
        }
    }

    pub(super) fn is_healthy(&self) -> bool {
        self.intake.status().health.load().is_healthy()
    }

    pub(super) fn states(&self) -> [u64; 3] {
        states(&self.intake.status())
    }
}
