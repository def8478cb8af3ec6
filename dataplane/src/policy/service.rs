//! Services as the stages read them: frontends, their backends, and the lookup tables that select a backend.

use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;

use super::maglev::{Maglev, WeightedBackend, address_seed, backend_hash};
use super::prefixes::Prefixes;
use super::spec::{BackendSpec, HealthSpec, Scope, ServiceSpec};
use crate::flow::address::{Address, V6};
use crate::flow::ids::{FrontendId, ServiceId};
use crate::flow::listener::Listener;
use crate::flow::sync::{AtomicU32, AtomicU64};
use crate::flow::tuple::Tuple;
use crate::policy::prefixes::prefix;
use crate::wire::health_responder::http_response;
use crate::wire::protocol;

/// Resource usage of a backend port, shared by the workers: updated when sessions open and end.
#[derive(Debug, Default)]
pub struct BackendUsage {
    sessions: AtomicU32,
    opened: AtomicU64,
    /// `opened` at the last rate measurement, and the rate.
    counted: AtomicU64,
    rate: AtomicU32,
}

impl BackendUsage {
    /// Counts a new session.
    pub fn open(&self) {
        self.sessions.fetch_add(1, Relaxed);
        self.opened.fetch_add(1, Relaxed);
    }

    /// Counts a session restored from the previous process.
    pub fn restore(&self) {
        self.sessions.fetch_add(1, Relaxed);
    }

    /// Counts a session as ended.
    pub fn close(&self) {
        // Never below zero: a backend that was removed and added again starts from zero.
        let _ = self.sessions.fetch_update(Relaxed, Relaxed, |now| now.checked_sub(1));
    }

    /// Open sessions.
    pub fn sessions(&self) -> u32 {
        self.sessions.load(Relaxed)
    }

    /// Updates the rate; called periodically, `ms` after the last call.
    pub fn measure(&self, ms: u64) {
        let opened = self.opened();
        let more = opened.wrapping_sub(self.counted.swap(opened, Relaxed));
        self.rate.store(u32::try_from(more * 1000 / ms.max(1)).unwrap_or(u32::MAX), Relaxed);
    }

    /// Sessions opened per second, as last measured.
    pub fn rate(&self) -> u32 {
        self.rate.load(Relaxed)
    }

    /// Sessions opened since the backend was added.
    pub fn opened(&self) -> u64 {
        self.opened.load(Relaxed)
    }
}

/// A backend of one Service port.
#[derive(Clone, Debug)]
pub struct Backend<A> {
    pub address: A,
    pub port: u16,
    /// Its index in [`ServiceSpec::backends`].
    pub number: u16,
    /// Its resource usage.
    pub usage: Arc<BackendUsage>,
}

impl<A: Address> Backend<A> {
    /// The tuple of a client's packet after DNAT to this backend.
    #[inline]
    pub fn dnat(&self, client: &Tuple<A>) -> Tuple<A> {
        Tuple { destination: self.address, destination_port: self.port, ..*client }
    }
}

/// One port of a Service, in one address family.
#[derive(Debug)]
pub struct Frontend<A> {
    /// All its backends, by address and port, including those that take no new sessions.
    pub backends: Box<[Backend<A>]>,
    /// Their [`backend_hash`], in the same order; empty for Services without client affinity.
    pub hashes: Box<[u64]>,
    external: Arc<Maglev>,
    internal: Arc<Maglev>,
}

impl<A: Address> Frontend<A> {
    /// The lookup table for external clients, or for pods; its values are indices in [`Frontend::backends`].
    #[inline]
    pub fn table(&self, is_external: bool) -> &Maglev {
        if is_external { &self.external } else { &self.internal }
    }

    /// The backend with this address and port.
    #[inline]
    pub fn backend(&self, address: A, port: u16) -> Option<&Backend<A>> {
        let at = self.backends.binary_search_by_key(&(address, port), |target| (target.address, target.port));
        at.ok().map(|at| &self.backends[at])
    }
}

/// A Service in one address family.
#[derive(Debug)]
pub struct ServicePart<A> {
    pub vips: Box<[A]>,
    /// Its ports, in the order of [`ServiceSpec::ports`].
    pub frontends: Box<[Frontend<A>]>,
    /// External clients that may reach it (source ranges); `None`: all.
    admits: Option<Prefixes<A, ()>>,
}

impl<A: Address> ServicePart<A> {
    /// Whether an external client may reach it.
    #[inline]
    pub fn admits(&self, client: A) -> bool {
        self.admits.as_ref().is_none_or(|ranges| ranges.find(client).is_some())
    }
}

#[derive(Debug)]
pub struct Service {
    pub spec: ServiceSpec,
    /// Its number.
    pub id: ServiceId,
    health_response: Option<Box<[u8]>>,
    /// Its IPv4 part.
    pub v4: ServicePart<u32>,
    /// Its IPv6 part.
    pub v6: ServicePart<V6>,
}

/// An address family of Services.
pub trait ServiceFamily: Address {
    /// The family's part of a Service.
    fn part(service: &Service) -> &ServicePart<Self>;
}

impl ServiceFamily for u32 {
    #[inline]
    fn part(service: &Service) -> &ServicePart<Self> {
        &service.v4
    }
}

impl ServiceFamily for V6 {
    #[inline]
    fn part(service: &Service) -> &ServicePart<Self> {
        &service.v6
    }
}

impl Service {
    /// Builds a Service; unchanged parts and counters of the previous version are kept.
    pub(super) fn new(spec: &ServiceSpec, id: ServiceId, before: Option<&Self>) -> Self {
        let name = spec.name.strip_prefix("Service ").unwrap_or(&spec.name);
        let (namespace, name) = name.split_once('/').unwrap_or(("default", name));
        let response = |health: HealthSpec| http_response(namespace, name, health.local_endpoints).into();
        Self {
            health_response: spec.health.map(response),
            v4: build_family(spec, before),
            v6: build_family(spec, before),
            spec: spec.clone(),
            id,
        }
    }

    /// The complete HTTP response to health checks.
    pub fn health_response(&self) -> Option<&[u8]> {
        self.health_response.as_deref()
    }

    /// The [`backend_hash`] of one of its backends.
    pub fn backend_hash<A: Address>(&self, backend: &Backend<A>) -> Option<u64> {
        self.spec.backends.get(usize::from(backend.number)).map(|it| backend_hash(backend.address, &it.ports))
    }

    /// Usage of its backends, per port, with their indices in [`ServiceSpec::backends`].
    pub fn backend_usage(&self) -> impl Iterator<Item = (usize, &BackendUsage)> {
        fn of<A: Address>(half: &ServicePart<A>) -> impl Iterator<Item = (usize, &BackendUsage)> {
            let targets = half.frontends.iter().flat_map(|frontend| &frontend.backends);
            targets.map(|target| (usize::from(target.number), &*target.usage))
        }
        of(&self.v4).chain(of(&self.v6))
    }

    /// Bytes of its lookup tables. Ports, and kinds of clients, with the same backends share one.
    pub fn lookup_table_bytes(&self) -> usize {
        fn of<A: Address>(half: &ServicePart<A>) -> impl Iterator<Item = &Arc<Maglev>> {
            half.frontends.iter().flat_map(|frontend| [&frontend.external, &frontend.internal])
        }
        let mut tables: Vec<&Arc<Maglev>> = of(&self.v4).chain(of(&self.v6)).collect();
        tables.sort_unstable_by_key(|table| Arc::as_ptr(table));
        tables.dedup_by_key(|table| Arc::as_ptr(table));
        tables.iter().map(|table| table.slot_bytes()).sum()
    }

    /// The scope of backends for external clients, or for pods.
    pub fn scope(&self, is_external: bool) -> Scope {
        if is_external { self.spec.external } else { self.spec.internal }
    }

    /// Its frontends at all VIPs.
    pub(super) fn frontends<A: ServiceFamily>(&self) -> impl Iterator<Item = (Listener<A>, FrontendId)> {
        let ports = self.spec.ports.iter().zip(0..);
        let ports = ports.map(|(it, port)| (it.port, it.protocol, FrontendId { service: self.id, port }));
        let health = self.spec.health.map(|it| (it.port, protocol::TCP, FrontendId::health(self.id)));
        ports.chain(health).flat_map(move |(port, protocol, id)| {
            A::part(self).vips.iter().map(move |&address| (Listener { address, port, protocol }, id))
        })
    }

    /// Its backends, with the frontend that they belong to.
    pub(super) fn listeners<A: ServiceFamily>(&self) -> impl Iterator<Item = (Listener<A>, FrontendId)> {
        let ports = self.spec.ports.iter().zip(0..).zip(&A::part(self).frontends);
        ports.flat_map(|((port, number), frontend)| {
            let id = FrontendId { service: self.id, port: number };
            let listener =
                |target: &Backend<A>| Listener { address: target.address, port: target.port, protocol: port.protocol };
            frontend.backends.iter().map(move |target| (listener(target), id))
        })
    }
}

fn build_family<A: ServiceFamily>(spec: &ServiceSpec, before: Option<&Service>) -> ServicePart<A> {
    let ranges = || spec.source_ranges.iter().filter_map(|net| prefix::<A, ()>(net, ()));
    let mut built: Vec<Arc<Maglev>> = Vec::new();
    let frontends = (0..spec.ports.len()).map(|port| {
        let known = before.and_then(|before| {
            let at = before.spec.ports.iter().position(|other| *other == spec.ports[port])?;
            A::part(before).frontends.get(at)
        });
        build_frontend(spec, port, known, &mut built)
    });
    ServicePart {
        frontends: frontends.collect(),
        vips: spec.vips.iter().filter_map(|vip| A::from_ip(*vip)).collect(),
        admits: (!spec.source_ranges.is_empty()).then(|| Prefixes::new(ranges())),
    }
}

fn build_frontend<A: Address>(
    spec: &ServiceSpec,
    port: usize,
    known: Option<&Frontend<A>>,
    built: &mut Vec<Arc<Maglev>>,
) -> Frontend<A> {
    let target = |(backend, number): (&BackendSpec, u16)| {
        let address = A::from_ip(backend.address)?;
        let port = backend.ports.get(port).copied().filter(|port| *port != 0)?;
        let same = known.and_then(|known| known.backend(address, port));
        let usage = same.map(|known| known.usage.clone()).unwrap_or_default();
        Some(Backend { address, port, number, usage })
    };
    let mut targets: Box<[Backend<A>]> = spec.backends.iter().zip(0..).filter_map(target).collect();
    // Backends of one address are in the order of their ports for all Service ports, not for this one alone.
    targets.sort_by_key(|target| (target.address, target.port));
    let hash = |target: &Backend<A>| backend_hash(target.address, &spec.backends[usize::from(target.number)].ports);
    let hashes = if spec.affinity.is_some() { targets.iter().map(hash).collect() } else { Box::default() };
    if let Some(known) = known {
        built.extend([known.external.clone(), known.internal.clone()]);
    }
    let mut table = |is_eligible: fn(&BackendSpec) -> bool| {
        let members = targets.iter().zip(0..).filter_map(|(target, place)| {
            let number = usize::from(target.number);
            let backend = spec.backends.get(number).filter(|backend| is_eligible(backend))?;
            let is_first = number == 0 || spec.backends[number - 1].address != backend.address;
            let seed = if is_first { address_seed(target.address) } else { hash(target) };
            Some(WeightedBackend::new(place, seed, backend.weight))
        });
        let members: Vec<WeightedBackend> = members.collect();
        if let Some(same) = built.iter().find(|table| table.is_built_from(spec.table_size, &members)) {
            return same.clone();
        }
        let table = Arc::new(Maglev::new(spec.table_size, members));
        built.push(table.clone());
        table
    };
    let external = table(|backend| backend.is_eligible(true));
    let internal = table(|backend| backend.is_eligible(false));
    Frontend { backends: targets, hashes, external, internal }
}
