//! A gateway under test: workers over in-memory devices, a policy, and a clock that only the test advances.

use std::cell::RefCell;
use std::collections::HashMap;
use std::sync::Arc;

use crossbeam::channel::{Sender, bounded, unbounded};
use crossbeam::queue::ArrayQueue;
use vipgate_dataplane::flow::direction::Direction;
use vipgate_dataplane::flow::drop_reason::DropReason;
use vipgate_dataplane::flow::ids::{InterfaceId, WorkerId};
use vipgate_dataplane::flow::time::Tick;
use vipgate_dataplane::flow::tuple::HashKey;
use vipgate_dataplane::io::handoff::{Wake, WorkerLinks};
use vipgate_dataplane::io::memory::MemoryIo;
use vipgate_dataplane::io::{PacketIo, batch};
use vipgate_dataplane::observe::capture::CaptureRing;
use vipgate_dataplane::policy::build::Builder;
use vipgate_dataplane::policy::publish::Publisher;
use vipgate_dataplane::policy::spec::NetworkSpec;
use vipgate_dataplane::replication::lease::Lease;
use vipgate_dataplane::replication::sender::ReplicationSender;
use vipgate_dataplane::session::query::SessionFilter;
use vipgate_dataplane::worker::Worker;
use vipgate_dataplane::worker::builder::{ControlLinks, SharedKeys, WorkerBuilder, WorkerInputs, WorkerKeys};
use vipgate_dataplane::worker::command::{Command, FlushChunk};
use vipgate_dataplane::worker::neighbor_queue::ResolutionRequests;
use vipgate_mem::{Arena, FRAME_SIZE, Frame, HEADROOM};

use crate::accounting::CounterAccounting;
use crate::capture::{CaptureMode, capture_all};
use crate::setup::worker_key;
use crate::{
    INSIDE, OUTSIDE, PolicySet, Setup, WithPolicy, check_only_translated, check_packet, network, policy, prediction,
};

#[derive(Debug)]
struct NoopWaker;

impl Wake for NoopWaker {
    fn wake(&self) {}
}

/// A gateway under test.
#[derive(Debug)]
pub struct Gateway {
    pub workers: Vec<Worker<MemoryIo>>,
    /// Command queue of each worker.
    pub commands: Vec<Sender<Command>>,
    /// Replication sender side of each worker.
    pub replication_senders: Vec<Arc<ReplicationSender>>,
    /// Capture ring of each worker.
    pub capture_rings: Vec<Arc<CaptureRing>>,
    /// Whether packets are captured.
    pub capture_mode: CaptureMode,
    /// Its lease on its ports.
    pub lease: Arc<Lease>,
    /// Publishes snapshots to the workers.
    pub publisher: Publisher,
    /// Builds the snapshots.
    pub builder: Builder,
    /// Neighbors that workers want resolved.
    pub resolution_requests: ResolutionRequests,
    /// The current time.
    pub now: Tick,
    /// Received packets may be malformed, and so may those that are sent.
    pub hostile: bool,
    /// The counters, as far as they are asserted.
    pub accounting: CounterAccounting,
    frames: u64,
}

/// Free frames of a worker below which it gets some of others.
const MIN_FREE_FRAMES: u64 = 16;

thread_local! {
    /// Frames of dropped gateways, for reuse: arenas are never freed, and fuzzers create many gateways.
    static FREE_FRAMES: RefCell<Vec<Frame>> = const { RefCell::new(Vec::new()) };
}

fn frames(count: usize, size: u16) -> Vec<Frame> {
    let new = || Arena::allocate(count, size).unwrap().frames();
    if size != FRAME_SIZE {
        return new();
    }
    FREE_FRAMES.with_borrow_mut(|spare| {
        if spare.len() < count {
            spare.extend(new());
        }
        let mut frames = spare.split_off(spare.len() - count);
        for frame in &mut frames {
            frame.reset(HEADROOM);
        }
        frames
    })
}

impl Drop for Gateway {
    fn drop(&mut self) {
        for worker in &mut self.workers {
            let io = worker.io();
            while io.pop_sent().is_some() {}
            let frames = std::iter::from_fn(|| io.allocate(0)).filter(|frame| frame.capacity() == FRAME_SIZE);
            FREE_FRAMES.with_borrow_mut(|spare| spare.extend(frames));
        }
        self.check_unasserted();
    }
}

impl Gateway {
    /// A gateway with the policy and network of [`policy`] and [`network`].
    pub fn new(setup: &Setup) -> Self {
        Self::with(setup, network(), &policy())
    }

    /// A gateway with another network and policy.
    pub fn with(setup: &Setup, network: NetworkSpec, policy: &PolicySet) -> Self {
        // The clock starts shortly before it wraps.
        Self::starting_at(setup, network, policy, Tick(u32::MAX - 10_000))
    }

    /// A gateway that starts at a given time: the successor of another process, if session tables are persistent.
    pub fn starting_at(setup: &Setup, network: NetworkSpec, policy: &PolicySet, now: Tick) -> Self {
        let frame_size = network.frames().largest_frame_size();
        let mut builder = Builder::new(network).with_overlay(setup.overlay);
        let snapshot = builder.with_policy(policy).unwrap();
        let publisher = Publisher::new(snapshot);
        let resolution_requests =
            ResolutionRequests { queue: Arc::new(ArrayQueue::new(64)), waker: Arc::new(NoopWaker) };
        let lease = Arc::new(Lease::unlimited());
        let control = ControlLinks { publisher: &publisher, neighbor_requests: &resolution_requests, lease: &lease };
        let shared = SharedKeys { affinity: HashKey::new([5, 4, 3, 2]), directory: HashKey::new([9, 8, 7, 6]) };
        let worker_builder = WorkerBuilder::new(setup.config(), control, shared);
        let wakers: Vec<Arc<dyn Wake>> = (0..setup.workers).map(|_| Arc::new(NoopWaker) as _).collect();
        let (mut commands, mut replication_senders, mut capture_rings) = (Vec::new(), Vec::new(), Vec::new());
        let mut workers = Vec::new();
        for (links, id) in WorkerLinks::mesh(&wakers).into_iter().zip(0..) {
            let (sender, receiver) = unbounded();
            let replication = Arc::new(ReplicationSender::new(Arc::new(NoopWaker)));
            let inputs = WorkerInputs {
                io: MemoryIo::with_frames(frames(setup.frames, frame_size)),
                links,
                commands: receiver,
                replication: replication.clone(),
                keys: WorkerKeys::same(worker_key(id)),
            };
            let mut parts = worker_builder.build(inputs, now, |request| setup.open_sessions(request)).unwrap();
            let capture_ring = Arc::new(CaptureRing::new(4 * batch::BATCH_SIZE, frame_size.into()));
            parts.tables.observer.capture = Some(Box::new(capture_all(&capture_ring, WorkerId(id))));
            workers.push(Worker::new(parts, now));
            commands.push(sender);
            replication_senders.push(replication);
            capture_rings.push(capture_ring);
        }
        let frames = setup.frames as u64 * u64::from(setup.workers);
        Self {
            workers,
            commands,
            replication_senders,
            capture_rings,
            capture_mode: CaptureMode::On(1),
            lease,
            publisher,
            builder,
            resolution_requests,
            now,
            hostile: false,
            accounting: CounterAccounting::default(),
            frames,
        }
    }

    /// Publishes a policy.
    pub fn set_policy(&mut self, set: &PolicySet) {
        let snapshot = self.builder.with_policy(set).unwrap();
        self.publisher.publish(snapshot);
    }

    /// Ends the matching sessions of a worker by a flush command; returns their number.
    pub fn flush(&mut self, worker: usize, filter: SessionFilter) -> u64 {
        let mut chunk = FlushChunk { filter, cursor: Some(0), ended: 0 };
        while chunk.cursor.is_some() {
            let (reply, response) = bounded(1);
            self.commands[worker].send(Command::Flush { chunk, reply }).unwrap();
            self.turn();
            chunk = response.try_recv().unwrap();
        }
        chunk.ended
    }

    /// Publishes a network.
    pub fn set_network(&mut self, network: NetworkSpec) {
        let snapshot = self.builder.with_network(network);
        self.publisher.publish(snapshot);
    }

    /// Advances the clock, polling the workers all along; in coarser steps for long periods, to keep fuzzers fast.
    pub fn advance(&mut self, ms: u32) {
        let step = if ms < 30_000 { 10 } else { 50 };
        for _ in 0..ms / step {
            self.now = self.now.plus(step);
            self.turn();
        }
    }

    /// Runs one turn of each worker.
    pub fn turn(&mut self) {
        let now = self.now;
        for worker in &mut self.workers {
            worker.turn(now);
        }
    }

    /// Polls the workers until they are idle; returns what was sent, by interface.
    pub fn run(&mut self) -> Vec<(InterfaceId, Vec<u8>)> {
        for _ in 0..8 {
            self.turn();
        }
        self.toggle_capture();
        self.check_frames();
        let mut sent = Vec::new();
        for worker in &mut self.workers {
            while let Some((interface, bytes)) = worker.io().pop_sent() {
                if !self.hostile {
                    check_packet(&bytes);
                }
                sent.push((interface, bytes));
            }
        }
        sent
    }

    /// A worker receives a packet; returns what the gateway sends because of it.
    pub fn receive(&mut self, worker: usize, interface: InterfaceId, packet: &[u8]) -> Vec<(InterfaceId, Vec<u8>)> {
        let predicted = self.predict(worker, interface, packet);
        let is_captured = matches!(self.capture_mode, CaptureMode::On(_));
        self.balance_frames(worker);
        assert!(self.workers[worker].io().inject(interface, packet));
        let sent = self.run();
        match predicted {
            Some(predicted) if is_captured => self.check_prediction(&predicted, worker, packet),
            Some(predicted) => prediction::check_sent(&predicted, &sent),
            None => {}
        }
        sent
    }

    /// Gives a worker frames of others, as the shared pool of a real device does: those that it hands over are free at the other one.
    fn balance_frames(&mut self, worker: usize) {
        while self.workers[worker].io().audit().free < MIN_FREE_FRAMES {
            let of_other = |other: &mut Worker<MemoryIo>| {
                let io = other.io();
                if io.audit().free > MIN_FREE_FRAMES { io.allocate(0) } else { None }
            };
            let Some(frame) = self.workers.iter_mut().find_map(of_other) else { return };
            self.workers[worker].io().release(frame);
        }
    }

    /// A packet at a worker that must be forwarded to another interface; returns it as sent.
    #[track_caller]
    pub fn forwards(&mut self, worker: usize, interface: InterfaceId, packet: &[u8], out: InterfaceId) -> Vec<u8> {
        let mut sent = self.receive(worker, interface, packet);
        assert_eq!(sent.len(), 1, "one packet is forwarded: {:?}", self.drops());
        let (at, bytes) = sent.remove(0);
        assert_eq!(at, out);
        check_only_translated(packet, &bytes);
        bytes
    }

    /// A pod's packet at worker 0 that must be forwarded outside; returns it as sent.
    #[track_caller]
    pub fn pod_sends(&mut self, packet: &[u8]) -> Vec<u8> {
        self.forwards(0, INSIDE, packet, OUTSIDE)
    }

    /// A packet from outside at worker 0 that must reach a pod; returns it as the pod receives it.
    #[track_caller]
    pub fn remote_sends(&mut self, packet: &[u8]) -> Vec<u8> {
        self.forwards(0, OUTSIDE, packet, INSIDE)
    }

    /// No frame is lost: devices, rings and queues hold as many as there were at the start.
    pub fn check_frames(&mut self) {
        let held: u64 = self.workers.iter_mut().map(|w| w.io().audit().sum() + w.frames_held() as u64).sum();
        assert_eq!(held, self.frames, "frames are conserved");
    }

    /// Dropped packets, by reason.
    pub fn drops(&self) -> HashMap<DropReason, u64> {
        let all = DropReason::ALL.iter().map(|&reason| {
            (reason, self.workers.iter().map(|w| w.counters().drops[reason as usize].get()).sum::<u64>())
        });
        all.filter(|&(_, count)| count > 0).collect()
    }

    /// Packets not forwarded: dropped for any reason, or waiting.
    pub fn not_forwarded(&self) -> u64 {
        self.drops().values().sum::<u64>()
            + self.workers.iter().map(|w| w.counters().neighbor_waiting.get()).sum::<u64>()
    }

    /// Packets forwarded in a direction.
    pub fn forwarded(&self, direction: Direction) -> u64 {
        self.workers.iter().map(|w| w.counters().packets[direction as usize].get()).sum()
    }

    /// Active sessions.
    pub fn sessions(&self) -> u64 {
        self.workers.iter().map(|w| u64::from(w.tables().sessions.open_count())).sum()
    }

    /// Packets handed to other workers.
    pub fn handoffs(&self) -> u64 {
        self.workers.iter().map(|w| w.counters().handoffs.get()).sum()
    }
}
