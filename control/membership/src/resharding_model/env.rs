//! What surrounds the processes of a world: the clock, the network with its delays and losses, and the choices that
//! make one world differ from another. Whatever happens later is an input in one queue.

use std::collections::BTreeMap;
use std::fmt;
use std::rc::Rc;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use vipgate_dataplane::flow::time::Tick;

use super::choices::{Choices, Delay};
use super::coverage::{Class, Counts};
use super::frames;
use super::policies::{MAX_GATEWAYS, ModelPolicy};
use crate::member;
use crate::replication::sender::ListRequest;
use crate::{DrainBlock, Heartbeat, MembershipView};

/// The origin of all worlds' clocks.
static ORIGIN: LazyLock<Instant> = LazyLock::new(Instant::now);
/// Ticks start here, so that nothing happens before the first one.
const FIRST_TICK: u32 = 100_000;

/// An input of a process or of the server.
#[derive(Clone, Debug)]
pub(super) enum Input {
    Server(ServerInput),
    Process {
        to: usize,
        incarnation: u64,
        input: ProcessInput,
    },
    /// The gateway with the lower number connects to the other one.
    Connect(usize, usize),
}

/// An input of the policy server.
#[derive(Clone, Debug)]
pub(super) enum ServerInput {
    Heartbeat {
        from: usize,
        stream: u32,
        is_first: bool,
        /// The number of the heartbeat.
        sent: u64,
        heartbeat: Box<Heartbeat>,
    },
    StreamClosed {
        from: usize,
        incarnation: u64,
        stream: u32,
    },
    Deadline,
    /// The next server starts.
    Start,
}

/// An input of a gateway's process.
#[derive(Clone, Debug)]
pub(super) enum ProcessInput {
    /// Heartbeats to peers are due.
    Heartbeat,
    /// All workers use the latest snapshot.
    Adopted,
    /// A deadline of the member.
    Deadline,
    /// A timer of the stream to the server.
    StreamTimer,
    /// An order of an operator, or a fault.
    Order(member::Input),
    Policy {
        policy: Rc<ModelPolicy>,
        rollout: u64,
    },
    Notice {
        stream: u32,
        notice: Box<Notice>,
    },
    /// The server has closed the stream; whether it rejects the gateway.
    StreamClosed {
        stream: u32,
        is_rejected: bool,
    },
    Link {
        link: usize,
        message: Message,
    },
    LinkDown {
        link: usize,
    },
    /// The record of a session is due.
    RecordDue,
    /// The worker lists sessions for a full sync.
    List {
        request: Box<ListRequest>,
    },
}

/// A reply to a heartbeat, or a new view.
#[derive(Clone, Debug)]
pub(super) struct Notice {
    /// The number of the acknowledged heartbeat.
    pub(super) sent: Option<u64>,
    pub(super) lease: Option<u64>,
    pub(super) view: Arc<MembershipView>,
    pub(super) drain_block: Option<DrainBlock>,
}

/// A message between gateways.
#[derive(Clone, Debug)]
pub(super) enum Message {
    Heartbeat { sent: Tick, view: u64 },
    Echo { sent: Tick, view: u64 },
    RelayedView(Arc<MembershipView>),
    SyncRequest,
    Frame(Vec<u8>),
    Acknowledgement { number: u64, is_rejected: bool },
}

/// What must always hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Invariant {
    OneOwner,
    PortsOnce,
    SessionsKept,
    Convergence,
    Protocol,
}

/// A violation of an invariant.
#[derive(Clone, Debug)]
pub(super) struct Violation {
    pub(super) invariant: Invariant,
    at: u64,
    what: String,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?} at {} ms: {}", self.invariant, self.at, self.what)
    }
}

/// A connection between two processes.
#[derive(Clone, Debug)]
pub(super) struct Link {
    ends: [(usize, u64); 2],
    /// When the last message arrives, by receiver: messages keep their order.
    arrivals: [u64; 2],
    /// What is sent from here on doesn't arrive.
    is_broken: bool,
}

/// The surroundings.
#[derive(Clone, Debug)]
pub(super) struct Env {
    pub(super) now: u64,
    pub(super) choices: Choices,
    pub(super) counts: Counts,
    /// The first violation of an invariant.
    pub(super) violation: Option<Violation>,
    /// Whether pairs of gateways, and gateways and the server, reach each other.
    pub(super) paths: [[bool; MAX_GATEWAYS]; MAX_GATEWAYS],
    /// Until when what pairs of gateways sent each other was last lost or stalled.
    pub(super) separated_until: [[u64; MAX_GATEWAYS]; MAX_GATEWAYS],
    pub(super) server_paths: [bool; MAX_GATEWAYS],
    pub(super) is_server_up: bool,
    /// Until when processes are suspended.
    pub(super) suspended_until: [u64; MAX_GATEWAYS],
    /// How long sessions wait for their first record.
    pub(super) record_age: u64,
    /// Whether sessions were removed from a table since the last check.
    pub(super) has_removed_sessions: bool,
    links: Vec<Link>,
    queue: BTreeMap<(u64, u64), Input>,
    sequence: u64,
    /// When the last message on a stream arrives at the server, and at the gateway.
    stream_arrivals: [[u64; 2]; MAX_GATEWAYS],
}

impl Env {
    pub(super) fn new(choices: Choices) -> Self {
        Self {
            now: 0,
            choices,
            counts: Counts::default(),
            violation: None,
            paths: [[true; MAX_GATEWAYS]; MAX_GATEWAYS],
            separated_until: [[0; MAX_GATEWAYS]; MAX_GATEWAYS],
            server_paths: [true; MAX_GATEWAYS],
            is_server_up: true,
            suspended_until: [0; MAX_GATEWAYS],
            record_age: 0,
            has_removed_sessions: false,
            links: Vec::new(),
            queue: BTreeMap::new(),
            sequence: 0,
            stream_arrivals: [[0; 2]; MAX_GATEWAYS],
        }
    }

    pub(super) fn instant(&self) -> Instant {
        *ORIGIN + Duration::from_millis(self.now)
    }

    pub(super) fn milliseconds(instant: Instant) -> u64 {
        instant.saturating_duration_since(*ORIGIN).as_millis() as u64
    }

    pub(super) fn tick(&self) -> Tick {
        Tick(FIRST_TICK + self.now as u32)
    }

    pub(super) fn time_of(tick: Tick) -> u64 {
        u64::from(tick.0 - FIRST_TICK)
    }

    pub(super) fn count(&mut self, class: Class) {
        self.counts.add(class, 1);
    }

    pub(super) fn violate(&mut self, invariant: Invariant, what: impl FnOnce() -> String) {
        if self.violation.is_none() {
            self.violation = Some(Violation { invariant, at: self.now, what: what() });
        }
    }

    pub(super) fn delay(&mut self, of: Delay) -> u64 {
        self.choices.delay(of)
    }

    pub(super) fn schedule(&mut self, at: u64, input: Input) {
        self.sequence += 1;
        self.queue.insert((at, self.sequence), input);
    }

    /// An input of a process itself.
    pub(super) fn schedule_for(&mut self, (to, incarnation): (usize, u64), at: u64, input: ProcessInput) {
        self.schedule(at, Input::Process { to, incarnation, input });
    }

    /// The next input that is due by then. Those of a suspended process wait, in order.
    pub(super) fn next(&mut self, until: u64) -> Option<Input> {
        loop {
            let entry = self.queue.first_entry().filter(|entry| entry.key().0 <= until)?;
            let ((at, sequence), input) = entry.remove_entry();
            self.now = self.now.max(at);
            let Input::Process { to, .. } = &input else { return Some(input) };
            let suspended_until = self.suspended_until[*to];
            if suspended_until <= self.now {
                return Some(input);
            }
            self.queue.insert((suspended_until, sequence), input);
        }
    }

    /// Sends something from a gateway to the server.
    pub(super) fn send_to_server(&mut self, from: usize, input: ServerInput) {
        if !self.server_paths[from] || !self.is_server_up {
            return self.count(Class::HeartbeatLost);
        }
        let delay = self.delay(Delay::Server);
        let arrival = &mut self.stream_arrivals[from][0];
        *arrival = (*arrival).max(self.now + delay);
        let at = *arrival;
        self.schedule(at, Input::Server(input));
    }

    /// Sends something from the server to a process.
    pub(super) fn send_from_server(&mut self, (to, incarnation): (usize, u64), input: ProcessInput) {
        if !self.server_paths[to] {
            return self.count(Class::NoticeLost);
        }
        let delay = self.delay(Delay::Server);
        let arrival = &mut self.stream_arrivals[to][1];
        *arrival = (*arrival).max(self.now + delay);
        let at = *arrival;
        self.schedule_for((to, incarnation), at, input);
    }

    /// A new link between two processes.
    pub(super) fn open_link(&mut self, ends: [(usize, u64); 2]) -> usize {
        self.links.push(Link { ends, arrivals: [self.now; 2], is_broken: false });
        self.links.len() - 1
    }

    pub(super) fn send_to_peer(&mut self, link: usize, from: usize, message: Message) {
        let delay = self.delay(Delay::Link);
        let now = self.now;
        let Link { ends, arrivals, is_broken } = &mut self.links[link];
        if *is_broken {
            return self.count(Class::LinkMessageLost);
        }
        let receiver = usize::from(ends[0].0 == from);
        arrivals[receiver] = arrivals[receiver].max(now + delay);
        let (to, at) = (ends[receiver], arrivals[receiver]);
        self.schedule_for(to, at, ProcessInput::Link { link, message });
    }

    pub(super) fn is_link_broken(&self, link: usize) -> bool {
        self.links[link].is_broken
    }

    /// A process has closed a link; the other one detects it, sooner or later.
    pub(super) fn close_link(&mut self, link: usize, by: usize) {
        if std::mem::replace(&mut self.links[link].is_broken, true) {
            return;
        }
        let Some(other) = self.links[link].ends.into_iter().find(|end| end.0 != by) else { return };
        let at = self.now + self.delay(Delay::Detection);
        self.schedule_for(other, at, ProcessInput::LinkDown { link });
    }

    /// Breaks the links between two gateways, which both ends detect, each at its time; `process`: only those of this
    /// process of the first one.
    pub(super) fn break_links(&mut self, a: usize, b: usize, process: Option<u64>) {
        for link in 0..self.links.len() {
            let ends = self.links[link].ends;
            let is_between = [(a, b), (b, a)].contains(&(ends[0].0, ends[1].0));
            let is_of_process = process.is_none_or(|process| ends.contains(&(a, process)));
            if !is_between || !is_of_process || std::mem::replace(&mut self.links[link].is_broken, true) {
                continue;
            }
            for end in ends {
                let at = self.now + self.delay(Delay::Detection);
                self.schedule_for(end, at, ProcessInput::LinkDown { link });
            }
        }
    }

    /// What two gateways send each other is lost or stalled until then.
    pub(super) fn separate(&mut self, a: usize, b: usize, until: u64) {
        (self.separated_until[a][b], self.separated_until[b][a]) = (until, until);
    }

    /// Delays all messages between two gateways, those in flight excepted.
    pub(super) fn stall_links(&mut self, a: usize, b: usize, duration: u64) {
        let until = self.now + duration;
        self.separate(a, b, until.max(self.separated_until[a][b]));
        for link in self.links.iter_mut().filter(|link| !link.is_broken) {
            if [(a, b), (b, a)].contains(&(link.ends[0].0, link.ends[1].0)) {
                link.arrivals.iter_mut().for_each(|arrival| *arrival = (*arrival).max(until));
            }
        }
    }

    /// Drops what is in flight between a gateway and the server.
    pub(super) fn drop_server_messages(&mut self, gateway: Option<usize>) {
        let is_dropped = |of: usize| gateway.is_none_or(|gateway| gateway == of);
        self.queue.retain(|_, input| match input {
            Input::Server(ServerInput::Heartbeat { from, .. } | ServerInput::StreamClosed { from, .. }) => {
                !is_dropped(*from)
            }
            Input::Process { to, input: ProcessInput::Notice { .. }, .. } => !(gateway.is_some() && is_dropped(*to)),
            _ => true,
        });
    }

    /// Whether the record of a session is in flight.
    pub(super) fn carries(&self, session: u32) -> bool {
        self.queue.values().any(|input| match input {
            Input::Process { input: ProcessInput::Link { link, message: Message::Frame(bytes) }, .. } => {
                !self.links[*link].is_broken && frames::carries(bytes, session)
            }
            _ => false,
        })
    }

    /// Whether a policy or a message of a link is in flight.
    pub(super) fn is_busy(&self) -> bool {
        self.queue.values().any(|input| {
            let Input::Process { input, .. } = input else { return false };
            match input {
                ProcessInput::Policy { .. } | ProcessInput::Adopted | ProcessInput::List { .. } => true,
                ProcessInput::Link { link, message } => {
                    matches!(message, Message::Frame(_)) && !self.links[*link].is_broken
                }
                _ => false,
            }
        })
    }
}
