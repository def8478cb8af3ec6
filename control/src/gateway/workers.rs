//! The worker threads: each pinned to its core, taking turns, and asleep when nothing comes.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use vipgate_dataplane::io::PacketIo;
use vipgate_dataplane::link::handoff::Wake;
use vipgate_dataplane::time::Tick;
use vipgate_dataplane::worker::{Parts, Worker};
use vipgate_xdp::device::XdpDevice;
use vipgate_xdp::doorbell::Doorbell;

use crate::config::{Idle, Privileges};
use crate::failure::Failure;
use crate::privileges;

/// Turns without a packet before an adaptive worker sleeps: about a fifth of a millisecond.
const PATIENCE: u32 = 200;
/// The longest sleep: timers, announcements and neighbours want a look now and then.
const LONGEST_SLEEP: Duration = Duration::from_millis(50);

/// The moment that it is, as all workers and their successors count it: milliseconds of the kernel's monotonic clock. What
/// happens to the wall clock doesn't matter, and while the machine is suspended no time passes.
pub(super) fn now() -> Tick {
    let clock = rustix::time::clock_gettime(rustix::time::ClockId::Monotonic);
    // Only differences count, so the wrap after 49 days is no edge (see Tick).
    Tick((clock.tv_sec.cast_unsigned() * 1000 + clock.tv_nsec.cast_unsigned() / 1_000_000) as u32)
}

/// Keeps this thread, and all that it starts but the workers, off the cores of the workers, so that packets never wait for it.
/// Where there are no other cores, nothing changes.
pub(super) fn leave_alone(cores: &[usize]) {
    let left = sched_getaffinity(None).map(|mut set| {
        for &core in cores.iter().filter(|&&core| core < CpuSet::MAX_CPU) {
            set.unset(core);
        }
        set
    });
    let outcome = left.and_then(|set| if set.count() == 0 { Ok(()) } else { sched_setaffinity(None, &set) });
    if let Err(error) = outcome {
        tracing::warn!(%error, "cannot keep the control thread off the workers' cores");
    }
}

/// The running workers.
#[derive(Debug)]
pub(super) struct Threads {
    stop: Arc<AtomicBool>,
    doorbells: Vec<Arc<Doorbell>>,
    running: Vec<JoinHandle<()>>,
}

impl Threads {
    /// Starts a worker on each core.
    pub(super) fn start(
        workers: Vec<(usize, Parts<XdpDevice>, Arc<Doorbell>)>,
        idle: Idle,
        privileges: Privileges,
    ) -> Result<Self, Failure> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut all = Self { stop: stop.clone(), doorbells: Vec::new(), running: Vec::new() };
        for (core, parts, doorbell) in workers {
            all.doorbells.push(doorbell.clone());
            let stop = stop.clone();
            let thread = thread::Builder::new()
                .name(format!("worker-{}", parts.id.0))
                .spawn(move || {
                    pin(core, parts.id.0);
                    privileges::begin_worker(privileges);
                    work(parts, &doorbell, idle, &stop);
                })
                .map_err(|error| Failure::runtime(format_args!("cannot start a worker thread: {error}")))?;
            all.running.push(thread);
        }
        Ok(all)
    }

    /// Whether all of them still run.
    pub(super) fn are_alive(&self) -> bool {
        self.running.iter().all(|thread| !thread.is_finished())
    }

    /// Lets each worker end its turn, and waits for them; says whether all ended well.
    pub(super) fn stop(&mut self) -> bool {
        self.stop.store(true, Ordering::Relaxed);
        for doorbell in &self.doorbells {
            doorbell.wake();
        }
        self.running.drain(..).map(JoinHandle::join).all(|result| result.is_ok())
    }
}

impl Drop for Threads {
    fn drop(&mut self) {
        self.stop();
    }
}

fn pin(core: usize, worker: u8) {
    if !core_affinity::set_for_current(core_affinity::CoreId { id: core }) {
        tracing::warn!(worker, core, "cannot pin the worker to its core; the kernel moves it as it likes");
    }
}

fn work(parts: Parts<XdpDevice>, doorbell: &Doorbell, idle: Idle, stop: &AtomicBool) {
    let mut worker = Worker::new(parts, now());
    let mut quiet = 0;
    while !stop.load(Ordering::Relaxed) {
        if worker.turn(now()) > 0 {
            quiet = 0;
            continue;
        }
        quiet += 1;
        if idle == Idle::Spin || quiet < PATIENCE {
            std::hint::spin_loop();
            continue;
        }
        doorbell.listen();
        // Looked at once more: what came before we listened rang no bell.
        if worker.is_idle() && !stop.load(Ordering::Relaxed) {
            worker.io().wait(LONGEST_SLEEP);
        }
        doorbell.ignore();
    }
}
