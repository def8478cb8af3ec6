//! The worker threads: each pinned to its core, polling, and asleep while no packets arrive.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use vipgate_dataplane::io::PacketIo;
use vipgate_dataplane::io::handoff::Wake;
use vipgate_dataplane::worker::{Worker, WorkerParts};
use vipgate_xdp::device::XdpDevice;
use vipgate_xdp::doorbell::Doorbell;

use crate::clock::now;
use crate::command_error::CommandError;
use crate::config::{Idle, Privileges};
use crate::privileges;

/// Poll rounds without a packet before an adaptive worker sleeps: about 0.2 ms.
const MAX_IDLE_POLLS: u32 = 200;
/// Maximum sleep: timers, announcements and neighbors are polled.
const MAX_SLEEP: Duration = Duration::from_millis(50);

/// Removes the workers' cores from the CPU affinity of this thread, and of the threads that it starts other than
/// workers, so that they don't delay packets. No effect where there are no other cores.
pub(super) fn avoid_worker_cores(cores: &[usize]) {
    let remaining = sched_getaffinity(None).map(|mut set| {
        for &core in cores.iter().filter(|&&core| core < CpuSet::MAX_CPU) {
            set.unset(core);
        }
        set
    });
    let outcome = remaining.and_then(|set| if set.count() == 0 { Ok(()) } else { sched_setaffinity(None, &set) });
    if let Err(error) = outcome {
        tracing::warn!(%error, "cannot set the CPU affinity of the control thread");
    }
}

/// The running workers.
#[derive(Debug)]
pub(super) struct WorkerThreads {
    stop: Arc<AtomicBool>,
    doorbells: Vec<Arc<Doorbell>>,
    running: Vec<JoinHandle<()>>,
}

impl WorkerThreads {
    /// Starts the workers, each on its core.
    pub(super) fn start(
        workers: Vec<(usize, WorkerParts<XdpDevice>, Arc<Doorbell>)>,
        idle: Idle,
        privileges: Privileges,
    ) -> Result<Self, CommandError> {
        let stop = Arc::new(AtomicBool::new(false));
        let mut all = Self { stop: stop.clone(), doorbells: Vec::new(), running: Vec::new() };
        for (core, parts, doorbell) in workers {
            all.doorbells.push(doorbell.clone());
            let stop = stop.clone();
            let thread = thread::Builder::new()
                .name(format!("worker-{}", parts.id.0))
                .spawn(move || {
                    pin(core, parts.id.0);
                    privileges::restrict_worker(privileges);
                    work(parts, &doorbell, idle, &stop);
                })
                .map_err(|error| CommandError::runtime(error).context("cannot start a worker thread"))?;
            all.running.push(thread);
        }
        Ok(all)
    }

    /// Whether all worker threads are running.
    pub(super) fn are_alive(&self) -> bool {
        self.running.iter().all(|thread| !thread.is_finished())
    }

    /// Stops the workers after their current poll round and joins them. Returns whether none panicked.
    pub(super) fn stop(&mut self) -> bool {
        self.stop.store(true, Ordering::Relaxed);
        for doorbell in &self.doorbells {
            doorbell.wake();
        }
        self.running.drain(..).map(JoinHandle::join).all(|result| result.is_ok())
    }
}

impl Drop for WorkerThreads {
    fn drop(&mut self) {
        self.stop();
    }
}

fn pin(core: usize, worker: u8) {
    if !core_affinity::set_for_current(core_affinity::CoreId { id: core }) {
        tracing::warn!(worker, core, "cannot pin the worker to its core; the scheduler may migrate it");
    }
}

fn work(parts: WorkerParts<XdpDevice>, doorbell: &Doorbell, idle: Idle, stop: &AtomicBool) {
    let mut worker = Worker::new(parts, now());
    let mut idle_polls = 0;
    while !stop.load(Ordering::Relaxed) {
        if worker.turn(now) > 0 {
            idle_polls = 0;
            continue;
        }
        idle_polls += 1;
        if idle == Idle::Spin || idle_polls < MAX_IDLE_POLLS {
            std::hint::spin_loop();
            continue;
        }
        doorbell.arm();
        // Checked again: a wake-up before `listen` has no effect.
        if worker.is_idle() && !stop.load(Ordering::Relaxed) {
            worker.io().wait(MAX_SLEEP);
        }
        doorbell.disarm();
    }
}
