//! Services as the stages read them: their frontends, the backends behind each, and the tables that choose among those.

use std::net::IpAddr;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::build::prefix;
use super::maglev::{Maglev, Member};
use super::prefixes::Prefixes;
use super::spec::{BackendSpec, HealthSpec, Scope, ServiceSpec};
use crate::address::{Address, V6};
use crate::session::tuple::Tuple;
use crate::sync::{AtomicU32, AtomicU64};
use crate::wire::probe::http_answer;
use crate::wire::protocol;

/// A Service's number: it stays the same for as long as there is a Service of its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ServiceId(pub u32);

/// A port of a Service, wherever it is reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct FrontendId {
    /// The Service.
    pub service: ServiceId,
    /// Its port's place in [`ServiceSpec::ports`].
    pub port: u16,
}

impl FrontendId {
    /// A number that no packet is looked at by before it has a real one.
    pub const NONE: Self = Self { service: ServiceId(u32::MAX), port: 0 };

    /// The health check of a Service, which listens at its VIPs like a frontend.
    fn health(service: ServiceId) -> Self {
        Self { service, port: u16::MAX }
    }

    /// Whether it is a Service's health check.
    #[inline]
    pub fn is_health(self) -> bool {
        self.port == u16::MAX
    }
}

/// Where somebody listens: a frontend at its VIP, or a backend.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Listener<A> {
    /// The address.
    pub address: A,
    /// The port.
    pub port: u16,
    /// IP protocol number.
    pub protocol: u8,
}

/// What one backend uses of one port of its Service, shared by the workers: counted where sessions open and end.
#[derive(Debug, Default)]
pub struct BackendUse {
    sessions: AtomicU32,
    opened: AtomicU64,
    /// How many had been opened when the rate was computed last, and the rate.
    counted: AtomicU64,
    rate: AtomicU32,
}

impl BackendUse {
    /// Counts one more session.
    pub fn open(&self) {
        self.sessions.fetch_add(1, Relaxed);
        self.opened.fetch_add(1, Relaxed);
    }

    /// Counts a session that was open before this process began.
    pub fn adopt(&self) {
        self.sessions.fetch_add(1, Relaxed);
    }

    /// Counts one session less.
    pub fn close(&self) {
        // Never below zero: a backend that was taken away and came back starts from nothing.
        let _ = self.sessions.fetch_update(Relaxed, Relaxed, |now| now.checked_sub(1));
    }

    /// Sessions open now.
    pub fn sessions(&self) -> u32 {
        self.sessions.load(Relaxed)
    }

    /// Computes the rate anew: called again and again, `ms` after the last time.
    pub fn measure(&self, ms: u64) {
        let opened = self.opened();
        let more = opened.wrapping_sub(self.counted.swap(opened, Relaxed));
        self.rate.store(u32::try_from(more * 1000 / ms.max(1)).unwrap_or(u32::MAX), Relaxed);
    }

    /// Sessions opened a second when that was measured last.
    pub fn rate(&self) -> u32 {
        self.rate.load(Relaxed)
    }

    /// Sessions opened since it is known.
    pub fn opened(&self) -> u64 {
        self.opened.load(Relaxed)
    }
}

/// A backend of one port.
#[derive(Clone, Debug)]
pub struct Target<A> {
    /// Its address.
    pub address: A,
    /// Its port.
    pub port: u16,
    /// Its place in [`ServiceSpec::backends`].
    pub number: u16,
    /// What it uses.
    pub usage: Arc<BackendUse>,
}

impl<A: Address> Target<A> {
    /// A client's packet as it goes to this backend.
    #[inline]
    pub fn serves(&self, client: &Tuple<A>) -> Tuple<A> {
        Tuple { destination: self.address, destination_port: self.port, ..*client }
    }
}

/// One port of a Service, in one address family.
#[derive(Debug)]
pub struct Frontend<A> {
    /// Whoever serves it, by address: also those that take no new sessions.
    pub targets: Box<[Target<A>]>,
    external: Arc<Maglev>,
    internal: Arc<Maglev>,
}

impl<A: Address> Frontend<A> {
    /// The table for clients outside, or that for pods; its numbers are places in [`Frontend::targets`].
    #[inline]
    pub fn table(&self, is_external: bool) -> &Maglev {
        if is_external { &self.external } else { &self.internal }
    }

    /// The backend at an address, if it serves this port.
    #[inline]
    pub fn target(&self, address: A) -> Option<&Target<A>> {
        self.targets.binary_search_by_key(&address, |target| target.address).ok().map(|at| &self.targets[at])
    }
}

/// A Service in one address family.
#[derive(Debug)]
pub struct Half<A> {
    /// Its VIPs.
    pub vips: Box<[A]>,
    /// Its ports, as in [`ServiceSpec::ports`].
    pub frontends: Box<[Frontend<A>]>,
    /// The clients outside that it admits; `None`: all.
    admits: Option<Prefixes<A, ()>>,
}

impl<A: Address> Half<A> {
    /// Whether a client outside may reach it.
    #[inline]
    pub fn admits(&self, client: A) -> bool {
        self.admits.as_ref().is_none_or(|ranges| ranges.find(client).is_some())
    }
}

/// One Service.
#[derive(Debug)]
pub struct Service {
    /// What it was built from.
    pub spec: ServiceSpec,
    /// Its number.
    pub id: ServiceId,
    health_answer: Option<Box<[u8]>>,
    /// What it is in IPv4.
    pub v4: Half<u32>,
    /// The same for IPv6.
    pub v6: Half<V6>,
}

/// An address family that a Service has a half for.
pub trait ServiceFamily: Address {
    /// The half.
    fn half(service: &Service) -> &Half<Self>;
}

impl ServiceFamily for u32 {
    #[inline]
    fn half(service: &Service) -> &Half<Self> {
        &service.v4
    }
}

impl ServiceFamily for V6 {
    #[inline]
    fn half(service: &Service) -> &Half<Self> {
        &service.v6
    }
}

impl Service {
    /// Builds a Service; what stays of the one before it, and what that has counted, is taken along.
    pub(super) fn new(spec: &ServiceSpec, id: ServiceId, before: Option<&Self>) -> Self {
        let name = spec.name.strip_prefix("Service ").unwrap_or(&spec.name);
        let (namespace, name) = name.split_once('/').unwrap_or(("default", name));
        let answer = |health: HealthSpec| http_answer(namespace, name, health.local_endpoints).into();
        Self {
            health_answer: spec.health.map(answer),
            v4: half(spec, before),
            v6: half(spec, before),
            spec: spec.clone(),
            id,
        }
    }

    /// What a request for its health is answered with, as HTTP, whole.
    pub fn health_answer(&self) -> Option<&[u8]> {
        self.health_answer.as_deref()
    }

    /// What its backends use, port by port, with their addresses.
    pub fn uses(&self) -> impl Iterator<Item = (IpAddr, &BackendUse)> {
        fn of<A: Address>(half: &Half<A>) -> impl Iterator<Item = (IpAddr, &BackendUse)> {
            let targets = half.frontends.iter().flat_map(|frontend| &frontend.targets);
            targets.map(|target| (target.address.to_ip(), &*target.usage))
        }
        of(&self.v4).chain(of(&self.v6))
    }

    /// Which backends serve a kind of clients.
    pub fn scope(&self, is_external: bool) -> Scope {
        if is_external { self.spec.external } else { self.spec.internal }
    }

    /// Where it listens, with the place of each port.
    pub(super) fn frontends<A: ServiceFamily>(&self) -> impl Iterator<Item = (Listener<A>, FrontendId)> {
        let ports = self.spec.ports.iter().zip(0..);
        let ports = ports.map(|(it, port)| (it.port, it.protocol, FrontendId { service: self.id, port }));
        let health = self.spec.health.map(|it| (it.port, protocol::TCP, FrontendId::health(self.id)));
        ports.chain(health).flat_map(move |(port, protocol, id)| {
            A::half(self).vips.iter().map(move |&address| (Listener { address, port, protocol }, id))
        })
    }

    /// Where its backends listen, with the place of the port that they serve.
    pub(super) fn listeners<A: ServiceFamily>(&self) -> impl Iterator<Item = (Listener<A>, FrontendId)> {
        let ports = self.spec.ports.iter().zip(0..).zip(&A::half(self).frontends);
        ports.flat_map(|((port, number), frontend)| {
            let id = FrontendId { service: self.id, port: number };
            let listener =
                |target: &Target<A>| Listener { address: target.address, port: target.port, protocol: port.protocol };
            frontend.targets.iter().map(move |target| (listener(target), id))
        })
    }
}

fn half<A: ServiceFamily>(spec: &ServiceSpec, before: Option<&Service>) -> Half<A> {
    let ranges = || spec.source_ranges.iter().filter_map(|net| prefix::<A, ()>(net, ()));
    let mut made: Vec<Arc<Maglev>> = Vec::new();
    let frontends = (0..spec.ports.len()).map(|port| {
        let known = before.and_then(|before| {
            let at = before.spec.ports.iter().position(|other| *other == spec.ports[port])?;
            A::half(before).frontends.get(at)
        });
        frontend(spec, port, known, &mut made)
    });
    Half {
        frontends: frontends.collect(),
        vips: spec.vips.iter().filter_map(|vip| A::from_ip(*vip)).collect(),
        admits: (!spec.source_ranges.is_empty()).then(|| Prefixes::new(ranges())),
    }
}

fn frontend<A: Address>(
    spec: &ServiceSpec,
    port: usize,
    known: Option<&Frontend<A>>,
    made: &mut Vec<Arc<Maglev>>,
) -> Frontend<A> {
    let target = |(backend, number): (&BackendSpec, u16)| {
        let address = A::from_ip(backend.address)?;
        let port = backend.ports.get(port).copied().filter(|port| *port != 0)?;
        let same = known.and_then(|known| known.target(address)).filter(|known| known.port == port);
        let usage = same.map(|known| known.usage.clone()).unwrap_or_default();
        Some(Target { address, port, number, usage })
    };
    let targets: Box<[Target<A>]> = spec.backends.iter().zip(0..).filter_map(target).collect();
    if let Some(known) = known {
        made.extend([known.external.clone(), known.internal.clone()]);
    }
    let mut table = |is_eligible: fn(&BackendSpec) -> bool| {
        let members = targets.iter().zip(0..).filter_map(|(target, place)| {
            let backend = spec.backends.get(usize::from(target.number)).filter(|backend| is_eligible(backend))?;
            Some(Member::new(place, target.address, backend.weight))
        });
        let members: Vec<Member> = members.collect();
        if let Some(same) = made.iter().find(|table| table.is_of(spec.table_size, &members)) {
            return same.clone();
        }
        let table = Arc::new(Maglev::new(spec.table_size, members));
        made.push(table.clone());
        table
    };
    let external = table(|backend| backend.takes(true));
    let internal = table(|backend| backend.takes(false));
    Frontend { targets, external, internal }
}
