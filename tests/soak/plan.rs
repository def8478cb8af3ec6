//! What happens in a soak, and in which order: from a seed alone, whatever comes of it.

use std::fmt;

use vipgate_tests::flood::{Kind, Random};

/// Gateways of the soak.
pub(crate) const GATEWAYS: usize = 3;
/// Tenants that come, change, break and go.
pub(crate) const TENANTS: usize = 4;
/// How long the events of a segment take, milliseconds, as far as that is known before.
const SEGMENT: u64 = 40_000;

/// A cable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Cable {
    /// Between pods and gateway; its carrier goes, too.
    Inside,
    /// Between gateway and world; its carrier goes, too.
    Outside,
    /// The same, but the carrier stays: a switch in between fails.
    OutsideSilent,
    /// To the other gateways.
    Peers,
    /// To the policy server.
    Management,
}

/// A change of manifests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Change {
    /// A tenant comes.
    Add,
    /// It gets other endpoints.
    Alter,
    /// Its file can't be read any more.
    Break,
    /// It goes.
    Remove,
}

/// Something that happens. Times are milliseconds; gateways and tenants go by number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Event {
    /// SIGKILL; it comes back after a while.
    Kill { gateway: usize, away: u64 },
    /// Drained, ended, and back after a while.
    Drain { gateway: usize, away: u64 },
    /// Drained, and not any more.
    Undrain { gateway: usize, after: u64 },
    /// SIGTERM, and started at once.
    Restart { gateway: usize },
    /// The policy server dies, or ends, and comes back after a while.
    Server { signal: &'static str, away: u64 },
    /// A cable is pulled, and put back.
    Cut { gateway: usize, cable: Cable, time: u64 },
    /// The wall clock of a process jumps to so many seconds from the right time; the process after the gateways is the policy server.
    Clock { process: usize, seconds: i64 },
    /// Manifests change.
    Policy { tenant: usize, change: Change },
    /// Tenant B is flooded, by way of a gateway, while the next events happen.
    Flood { kind: Kind, gateway: usize, family: usize, pps: u32, time: u64 },
}

impl Event {
    /// How long it takes at least.
    fn takes(self) -> u64 {
        match self {
            Self::Kill { away, .. } | Self::Drain { away, .. } => away + 3_000,
            Self::Undrain { after, .. } => after + 1_000,
            Self::Restart { .. } => 2_500,
            Self::Server { away, .. } => away + 1_500,
            Self::Cut { time, .. } => time + 1_500,
            Self::Clock { .. } | Self::Policy { .. } | Self::Flood { .. } => 500,
        }
    }

    /// Whether connections may notice: new ones that begin meanwhile may fail.
    pub(crate) fn disturbs(self) -> bool {
        !matches!(self, Self::Clock { .. } | Self::Policy { .. } | Self::Flood { .. })
    }
}

impl fmt::Display for Event {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Kill { gateway, away } => write!(f, "kill gw-{}, away for {away} ms", gateway + 1),
            Self::Drain { gateway, away } => write!(f, "drain and end gw-{}, away for {away} ms", gateway + 1),
            Self::Undrain { gateway, after } => write!(f, "drain gw-{}, and undrain after {after} ms", gateway + 1),
            Self::Restart { gateway } => write!(f, "restart gw-{}", gateway + 1),
            Self::Server { signal, away } => write!(f, "SIG{signal} to the policy server, away for {away} ms"),
            Self::Cut { gateway, cable, time } => write!(f, "cut gw-{} {cable:?} for {time} ms", gateway + 1),
            Self::Clock { process, seconds } => {
                let who = if process < GATEWAYS { format!("gw-{}", process + 1) } else { "the policy server".into() };
                write!(f, "the clock of {who} is {seconds} s off")
            }
            Self::Policy { tenant, change } => write!(f, "{change:?} tenant c{tenant}"),
            Self::Flood { kind, gateway, family, pps, time } => {
                write!(f, "flood {kind} over IPv{} by gw-{}, {pps} a second for {time} ms", 4 + 2 * family, gateway + 1)
            }
        }
    }
}

/// How a tenant's manifests stand.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Absent,
    Whole,
    Broken,
}

/// The order of events: the same for the same seed.
#[derive(Debug)]
pub(crate) struct Plan {
    random: Random,
    tenants: [State; TENANTS],
}

impl Plan {
    pub(crate) fn new(seed: u64) -> Self {
        Self { random: Random(seed), tenants: [State::Absent; TENANTS] }
    }

    /// The next events, about a minute of them, each with a pause before it.
    pub(crate) fn segment(&mut self) -> Vec<(u64, Event)> {
        let (mut steps, mut time) = (Vec::new(), 0);
        while time < SEGMENT {
            let (pause, event) = (self.between(500, 4_000), self.event());
            time += pause + event.takes();
            steps.push((pause, event));
        }
        steps
    }

    fn event(&mut self) -> Event {
        let gateway = self.below(GATEWAYS as u64) as usize;
        match self.below(100) {
            0..12 => Event::Kill { gateway, away: self.between(200, 6_000) },
            12..20 => Event::Drain { gateway, away: self.between(200, 4_000) },
            20..27 => Event::Undrain { gateway, after: self.between(500, 3_000) },
            27..34 => Event::Restart { gateway },
            34..42 => {
                Event::Server { signal: ["KILL", "TERM"][self.below(2) as usize], away: self.between(200, 6_000) }
            }
            42..58 => {
                let cables = [Cable::Inside, Cable::Outside, Cable::OutsideSilent, Cable::Peers, Cable::Management];
                Event::Cut { gateway, cable: cables[self.below(5) as usize], time: self.between(200, 5_000) }
            }
            58..66 => {
                let process = self.below(GATEWAYS as u64 + 1) as usize;
                let far = [-86_400, -3_600, -5, 0, 5, 3_600, 86_400, 30 * 86_400];
                Event::Clock { process, seconds: far[self.below(8) as usize] }
            }
            66..84 => {
                let tenant = self.below(TENANTS as u64) as usize;
                let change = self.change(tenant);
                Event::Policy { tenant, change }
            }
            _ => Event::Flood {
                kind: Kind::ALL[self.below(Kind::ALL.len() as u64) as usize],
                gateway,
                family: self.below(2) as usize,
                pps: self.between(200, 3_000) as u32,
                time: self.between(1_000, 6_000),
            },
        }
    }

    fn change(&mut self, tenant: usize) -> Change {
        let change = match (self.tenants[tenant], self.below(3)) {
            (State::Absent, _) => Change::Add,
            (State::Whole, 0) | (State::Broken, 0..2) => Change::Alter,
            (State::Whole, 1) => Change::Break,
            (State::Whole | State::Broken, _) => Change::Remove,
        };
        self.tenants[tenant] = match change {
            Change::Add | Change::Alter => State::Whole,
            Change::Break => State::Broken,
            Change::Remove => State::Absent,
        };
        change
    }

    fn below(&mut self, end: u64) -> u64 {
        self.random.draw() % end
    }

    fn between(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }
}
