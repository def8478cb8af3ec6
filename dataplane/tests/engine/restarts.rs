//! Restarts with other numbers of workers and capacities: every session continues, at any queue.

use std::collections::HashSet;
use std::fs;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::flow::tuple::HashKey;
use vipgate_dataplane::ports::PortRange;
use vipgate_dataplane::session::Sessions;
use vipgate_dataplane::session::migrate::{Migrated, migrate};
use vipgate_dataplane::session::persistence::{Identity, open_former};
use vipgate_mem::Region;
use vipgate_testkit::services::*;
use vipgate_testkit::*;

/// When the processes start.
pub(crate) const NOW: Tick = Tick(100_000);

/// A temporary folder of a test.
pub(crate) struct Folder(PathBuf);

impl Folder {
    pub(crate) fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("vipgate-restarts-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Self(path)
    }

    pub(crate) fn of_run(&self, run: u8) -> PathBuf {
        self.0.join(format!("run{run}"))
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Migrates the session tables of one process into new ones for the next.
pub(crate) fn migrate_files(from: &Path, to: &Path, setup: &Setup) -> Migrated {
    let regions: Vec<_> =
        (0..8).map(|id: u8| from.with_extension(id.to_string())).filter(|path| path.exists()).collect();
    let previous: Vec<Sessions> =
        regions.iter().map(|path| open_former(Region::open(path).unwrap(), [1; 16]).unwrap().0).collect();
    let (workers, capacity) = (u32::from(setup.workers), setup.capacity);
    let open = |worker: u32| {
        let identity = Identity { worker, workers, capacity, boot: [1; 16] };
        let region = Region::open(&to.with_extension(worker.to_string())).unwrap();
        Sessions::in_region(region, identity, setup.timeouts, HashKey::new([5, 6, 7, worker.into()])).unwrap().0
    };
    let mut next: Vec<Sessions> = (0..workers).map(open).collect();
    migrate(&previous, &mut next, NOW)
}

fn start(setup: &Setup) -> Gateway {
    let policy = with_services(&[service(&both_pods())]);
    let mut gateway = Gateway::starting_at(setup, network(), &policy, NOW);
    // The number of hand-offs depends on which worker a port block is assigned to.
    gateway.skip_counter_check();
    gateway
}

/// A pod's flow: its source, its destination, and its translated source.
#[derive(Clone, Copy, Debug)]
struct Flow {
    protocol: Protocol,
    pod: SocketAddr,
    remote: SocketAddr,
    seen: SocketAddr,
}

impl Flow {
    fn open(gateway: &mut Gateway, n: u16, worker: usize) -> Self {
        let (pod, remote) = match n % 3 {
            0 => (ip("fd00:244:1::5"), "[2001:db8:51::10]:443"),
            _ => (ip("10.244.1.5"), "198.51.100.10:443"),
        };
        let (pod, remote) = ((pod, 4000 + n).into(), at(remote));
        let protocol = [Protocol::Tcp, Protocol::Udp, Protocol::Echo][usize::from(n / 3 % 3)];
        let sent = gateway.receive(worker, INSIDE, &packet(protocol, pod, remote));
        assert_eq!(sent.len(), 1, "{protocol:?} from {pod}: {:?}", gateway.drops());
        let flow = Self { protocol, pod, remote, seen: ends(&sent[0].1).0 };
        assert_eq!(gateway.receive(worker, OUTSIDE, &reply_to(&sent[0].1, protocol)).len(), 1);
        flow
    }

    /// A packet in each direction, both received on this queue.
    fn assert_continues(&self, gateway: &mut Gateway, worker: usize) {
        let Self { protocol, pod, remote, seen } = *self;
        let request = match protocol {
            Protocol::Tcp => tcp(pod, remote, "A", 1001, 5001),
            _ => packet(protocol, pod, remote),
        };
        let sent = gateway.receive(worker, INSIDE, &request);
        assert_eq!(sent.len(), 1, "{self:?}: {:?}", gateway.drops());
        assert_eq!(ends(&sent[0].1).0, seen, "the same port: {self:?}");
        let reply = match protocol {
            Protocol::Tcp => tcp(remote, seen, "A", 5001, 1001),
            _ => reply_to(&sent[0].1, protocol),
        };
        let received = gateway.receive(worker, OUTSIDE, &reply);
        assert_eq!(received.len(), 1, "the reply to {self:?}: {:?}", gateway.drops());
        assert_eq!(ends(&received[0].1).1, pod);
    }
}

/// A client's connection: opens it, or continues with this backend; returns the backend.
fn continue_client(gateway: &mut Gateway, worker: usize, n: u16, backend: Option<SocketAddr>) -> SocketAddr {
    let n = 1000 + n;
    let segment = if backend.is_none() {
        packet(Protocol::Tcp, client(n), vip(80))
    } else {
        tcp(client(n), vip(80), "A", 1001, 5001)
    };
    let sent = gateway.receive(worker, OUTSIDE, &segment);
    assert_eq!(sent.len(), 1, "client {n}: {:?}", gateway.drops());
    let selected = ends(&sent[0].1).1;
    assert_eq!(backend.unwrap_or(selected), selected);
    let flags = if backend.is_none() { ("SA", 5000) } else { ("A", 5001) };
    let reply = tcp(selected, client(n), flags.0, flags.1, 1001);
    assert_eq!(gateway.backend_sends(worker, &reply), (vip(80), client(n)));
    selected
}

#[test]
fn sessions_continue_with_other_worker_counts_and_capacities() {
    let folder = Folder::new("numbers");
    let setup =
        |run, workers, capacity| Setup { workers, capacity, state: Some(folder.of_run(run)), ..Setup::default() };
    let mut last = setup(0, 2, 4096);
    let mut gateway = start(&last);
    let flows: Vec<Flow> = (0..36).map(|n| Flow::open(&mut gateway, n, usize::from(n % 2))).collect();
    let clients: Vec<SocketAddr> =
        (0..10).map(|n| continue_client(&mut gateway, usize::from(n % 2), n, None)).collect();
    assert_eq!(gateway.sessions(), 46);
    drop(gateway);
    for (run, workers, capacity) in [(1, 1, 4096), (2, 2, 60), (3, 3, 4096), (4, 2, 4096), (5, 1, 50)] {
        let next = setup(run, workers, capacity);
        let migrated = migrate_files(last.state.as_ref().unwrap(), next.state.as_ref().unwrap(), &next);
        assert_eq!(migrated, Migrated { active: 46, ..Migrated::default() }, "{workers} workers");
        let mut gateway = start(&next);
        for worker in 0..usize::from(workers) {
            for flow in &flows {
                flow.assert_continues(&mut gateway, worker);
            }
            for (n, backend) in (0..).zip(&clients) {
                continue_client(&mut gateway, worker, n, Some(*backend));
            }
        }
        assert_eq!(gateway.sessions(), 46, "no session was reopened");
        assert!(gateway.drops().is_empty(), "{:?}", gateway.drops());
        last = next;
    }
}

#[test]
fn no_port_is_allocated_twice_after_a_migration() {
    let folder = Folder::new("ports");
    let range = PortRange::new(20_000, 20_000 + 4 * 64 - 1).unwrap();
    let setup = |run, workers| Setup { workers, range, state: Some(folder.of_run(run)), ..Setup::default() };
    let remote = at("198.51.100.10:53");
    let send_request = |gateway: &mut Gateway, worker: u16, n: u16| {
        gateway.receive(worker.into(), INSIDE, &packet(Protocol::Udp, (ip("10.244.1.5"), 1000 + n).into(), remote))
    };
    let mut last = setup(0, 2);
    let mut gateway = start(&last);
    let mut ports = HashSet::new();
    for n in 0..150 {
        let sent = send_request(&mut gateway, n % 2, n);
        assert!(ports.insert(ends(&sent[0].1).0.port()));
    }
    drop(gateway);
    for (run, workers, from, to) in [(1, 1, 150, 180), (2, 3, 180, 220), (3, 2, 220, 256)] {
        let next = setup(run, workers);
        let migrated = migrate_files(last.state.as_ref().unwrap(), next.state.as_ref().unwrap(), &next);
        assert_eq!((migrated.active, migrated.dropped), (u32::from(from), 0));
        let mut gateway = start(&next);
        for n in from..to {
            let sent = send_request(&mut gateway, n % u16::from(workers), n);
            assert_eq!(sent.len(), 1, "session {n}: {:?}", gateway.drops());
            assert!(ports.insert(ends(&sent[0].1).0.port()), "the port is used twice");
        }
        if to == 256 {
            assert!(send_request(&mut gateway, 0, 300).is_empty());
            assert_eq!(gateway.drops(), [(DropReason::PortsExhausted, 1)].into(), "all ports are in use");
        }
        last = next;
    }
}
