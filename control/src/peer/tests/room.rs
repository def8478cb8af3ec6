//! Gateways whose workers are tables behind a lock: they do at once what a worker does between two batches.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::{Duration, Instant};

use tokio::sync::mpsc;
use vipgate_dataplane::command::Command;
use vipgate_dataplane::counters::Direction;
use vipgate_dataplane::link::outlet::{Outgoing, Outlet};
use vipgate_dataplane::session::image::{Fate, Half, Image, ImageOf};
use vipgate_dataplane::session::tuple::Tuple;
use vipgate_dataplane::snapshot::members::GatewayId;
use vipgate_dataplane::time::Tick;

use crate::members;
use crate::peer::identity::Fingerprint;
use crate::peer::{Bell, Event, Identity, Member, PeerStatus, Peers, Plan, VERSIONS, View, Workers};

/// Sessions with numbers up to here are of the first gateway, the next of the second.
pub(super) const EACH: u32 = 1_000_000;
pub(super) const NAMES: [&str; 3] = ["a", "b", "c"];
/// So long may anything take, however busy the machine is.
const PATIENCE: Duration = Duration::from_secs(30);

/// A session that differs from others by its number.
pub(in crate::peer) fn image(number: u32) -> Image {
    let tuple = |source, source_port| Tuple {
        source,
        destination: 0x0800_0001,
        source_port,
        destination_port: 443,
        protocol: 6,
    };
    let half = |flags| Half { flags, idle_ms: number, sequence: 3, acknowledged: 4, packets: 5, bytes: 1 << 40 };
    Image::V4(ImageOf {
        fate: Fate::Open,
        direction: Direction::Egress,
        origin: tuple(0x0a00_0000 + number, 40_000),
        translated: tuple(0xc000_0201, number as u16),
        halves: [half(1), half(2)],
    })
}

/// The same, ended.
pub(super) fn ended(number: u32) -> Image {
    match image(number) {
        Image::V4(image) => Image::V4(ImageOf { fate: Fate::Ended, ..image }),
        Image::V6(image) => Image::V6(image),
    }
}

fn number(image: &Image) -> (u32, Fate) {
    match image {
        Image::V4(image) => (image.origin.source - 0x0a00_0000, image.fate),
        Image::V6(_) => panic!("these tests have IPv4"),
    }
}

#[derive(Debug, Default)]
struct Table {
    own: BTreeMap<u32, GatewayId>,
    copies: BTreeMap<u32, u8>,
    told: HashMap<GatewayId, u64>,
}

#[derive(Debug)]
pub(super) struct Tables {
    workers: Vec<Mutex<Table>>,
    outlets: Vec<Outlet>,
    pub(super) silent: AtomicBool,
    /// Whether there is no policy yet.
    pub(super) lawless: AtomicBool,
}

impl Tables {
    fn new(count: usize, bell: &Arc<Bell>) -> Self {
        Self {
            workers: (0..count).map(|_| Mutex::default()).collect(),
            outlets: (0..count).map(|_| Outlet::new(bell.clone())).collect(),
            silent: AtomicBool::new(false),
            lawless: AtomicBool::new(false),
        }
    }

    fn table(&self, number: u32) -> (usize, MutexGuard<'_, Table>) {
        let worker = number as usize % self.workers.len();
        (worker, self.workers[worker].lock().unwrap())
    }

    fn tell(&self, worker: usize, table: &mut Table, to: GatewayId, image: Image) {
        let number = table.told.entry(to).or_default();
        *number += 1;
        self.outlets[worker].push(Outgoing { to, number: *number, image });
        self.outlets[worker].ring();
    }

    pub(super) fn open(&self, number: u32, to: GatewayId) {
        let (worker, mut table) = self.table(number);
        table.own.insert(number, to);
        self.tell(worker, &mut table, to, image(number));
    }

    pub(super) fn end(&self, number: u32) {
        let (worker, mut table) = self.table(number);
        let to = table.own.remove(&number).unwrap();
        self.tell(worker, &mut table, to, ended(number));
    }

    /// One that was there before anybody told anybody anything.
    pub(super) fn open_silently(&self, number: u32, to: GatewayId) {
        self.table(number).1.own.insert(number, to);
    }

    pub(super) fn own(&self) -> Vec<u32> {
        self.sorted(|table| table.own.keys().copied().collect())
    }

    pub(super) fn copies(&self) -> Vec<u32> {
        self.sorted(|table| table.copies.keys().copied().collect())
    }

    /// All copies get lost.
    pub(super) fn forget(&self) {
        self.workers.iter().for_each(|table| table.lock().unwrap().copies.clear());
    }

    fn sorted(&self, what: impl Fn(&Table) -> Vec<u32>) -> Vec<u32> {
        let mut all: Vec<u32> = self.workers.iter().flat_map(|table| what(&table.lock().unwrap())).collect();
        all.sort_unstable();
        all
    }

    /// Whether the other gateway has acknowledged all that it was told.
    pub(super) fn is_acknowledged(&self, by: GatewayId) -> bool {
        self.workers
            .iter()
            .zip(&self.outlets)
            .all(|(table, outlet)| outlet.acknowledged(by) == table.lock().unwrap().told.get(&by).copied().unwrap_or(0))
    }
}

impl Workers for Tables {
    fn count(&self) -> usize {
        self.workers.len()
    }

    fn outlet(&self, worker: usize) -> &Outlet {
        &self.outlets[worker]
    }

    fn send(&self, worker: usize, command: Command, _: Instant) -> bool {
        if self.silent.load(Ordering::Relaxed) {
            return false;
        }
        let mut table = self.workers[worker].lock().unwrap();
        match command {
            Command::Copies { mut chunk, reply } => {
                let from = chunk.cursor.unwrap() as u32;
                let room = chunk.images.capacity();
                let looked: Vec<_> = table.own.range(from..).take(room).collect();
                chunk
                    .images
                    .extend(looked.iter().filter(|(_, to)| **to == chunk.to).map(|(number, _)| image(**number)));
                chunk.cursor = (looked.len() == room).then(|| u64::from(*looked[room - 1].0) + 1);
                reply.send(chunk).unwrap();
            }
            Command::Take { mut images, round, reply, .. } => {
                for image in images.drain(..) {
                    match number(&image) {
                        (number, Fate::Open) => table.copies.insert(number, round),
                        (number, Fate::Ended) => table.copies.remove(&number),
                    };
                }
                reply.send(images).unwrap();
            }
            Command::Purge { mut chunk, reply } => {
                let before = table.copies.len();
                let owner = u32::from(chunk.owner.0);
                table.copies.retain(|number, round| number / EACH != owner || *round == chunk.round);
                chunk.forgotten += (before - table.copies.len()) as u64;
                chunk.cursor = None;
                reply.send(chunk).unwrap();
            }
            Command::Sessions { .. }
            | Command::Flush { .. }
            | Command::Explain { .. }
            | Command::Drops { .. }
            | Command::Ports { .. }
            | Command::Capture(_)
            | Command::LogSessions(_)
            | Command::Announce(_)
            | Command::Defend(_) => panic!("not of links"),
        }
        true
    }

    fn replication_epoch(&self) -> u64 {
        1
    }

    fn gateway(&self, name: &str) -> Option<GatewayId> {
        if self.lawless.load(Ordering::Relaxed) {
            return None;
        }
        NAMES.iter().position(|known| *known == name).map(|place| GatewayId(place as u8))
    }

    fn place(&self, image: &Image) -> usize {
        number(image).0 as usize % self.workers.len()
    }
}

/// A gateway.
pub(super) struct Gateway {
    pub(super) peers: Peers,
    pub(super) events: mpsc::Receiver<Event>,
    pub(super) tables: Arc<Tables>,
    pub(super) member: Member,
}

impl Gateway {
    pub(super) fn new(name: &str) -> Self {
        Self::speaking(name, VERSIONS)
    }

    pub(super) fn speaking(name: &str, versions: (u32, u32)) -> Self {
        let bell = Arc::new(Bell::default());
        let tables = Arc::new(Tables::new(2, &bell));
        let identity = Identity::generate().unwrap();
        let fingerprint = Some(identity.fingerprint());
        let plan = Plan {
            name: name.into(),
            incarnation: 7,
            identity,
            listen: "127.0.0.1:0".parse().unwrap(),
            heartbeat: Duration::from_millis(100),
            versions,
            workers: tables.clone(),
            bell,
            clock,
        };
        let (peers, events) = Peers::start(plan).unwrap();
        let address = Some(peers.address());
        let member = Member { name: name.into(), address, fingerprint, serving: true, incarnation: 7 };
        Self { peers, events, tables, member }
    }

    /// How the link to another one stands.
    pub(super) fn status(&self, name: &str) -> PeerStatus {
        self.peers.status().borrow().peers.get(name).cloned().unwrap_or_default()
    }

    /// Waits until it stands so.
    pub(super) async fn until(&self, name: &str, what: &str, so: impl Fn(&PeerStatus) -> bool) -> PeerStatus {
        until(what, || so(&self.status(name))).await;
        self.status(name)
    }
}

/// Milliseconds of a clock that never stops.
pub(super) fn clock() -> Tick {
    static BEGUN: std::sync::LazyLock<Instant> = std::sync::LazyLock::new(Instant::now);
    Tick(1000 + BEGUN.elapsed().as_millis() as u32)
}

/// What the policy server said of it.
pub(super) fn said(number: u64) -> Arc<members::View> {
    Arc::new(members::View {
        number,
        members: vec![members::Member::new("a".into(), number)],
        ..members::View::default()
    })
}

/// Tells all of them who there is.
pub(super) fn enter(number: u64, gateways: &[&Gateway]) {
    let view = Arc::new(View {
        number,
        members: gateways.iter().map(|gateway| gateway.member.clone()).collect(),
        said: said(number),
    });
    for gateway in gateways {
        gateway.peers.set_view(&view);
    }
}

/// A view of this gateway and somebody who comes as "a".
pub(super) fn view_with(gateway: &Gateway, other: Option<Fingerprint>) -> Arc<View> {
    // Nobody connects to it: of two gateways, that one does whose name comes first.
    let address = Some(SocketAddr::new(gateway.peers.address().ip(), 9));
    let other = Member { name: "a".into(), address, fingerprint: other, serving: true, incarnation: 7 };
    Arc::new(View { number: 1, members: vec![other, gateway.member.clone()], said: said(1) })
}

/// Waits until something is so.
pub(super) async fn until(what: &str, so: impl Fn() -> bool) {
    let begin = Instant::now();
    while !so() {
        assert!(begin.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        tokio::time::sleep(Duration::from_millis(2)).await;
    }
}
