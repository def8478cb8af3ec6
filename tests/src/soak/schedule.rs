//! Schedule of a soak's events: a function of the seed alone.

#[cfg(test)]
mod tests;

use std::fmt;

use crate::flood::{FloodKind, Random};

/// Number of gateways.
pub const GATEWAYS: usize = 3;
/// Number of additional tenants, which are added, changed, broken and removed.
pub const TENANTS: usize = 4;
/// Duration of a segment's events, milliseconds, as far as it is known in advance.
const SEGMENT_DURATION: u64 = 40_000;

/// A link of a gateway.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Link {
    /// Between inside router and gateway; the carrier is lost.
    Inside,
    /// Between gateway and outside router; the carrier is lost.
    Outside,
    /// The same with carrier: a switch in between fails.
    OutsideSilent,
    /// To the other gateways.
    Peers,
    /// To the policy server.
    Management,
}

/// A change of a tenant's manifests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicyChange {
    /// The tenant is added.
    Add,
    /// Its endpoints change.
    Alter,
    /// Its file becomes invalid.
    Break,
    /// The tenant is removed.
    Remove,
}

/// An event of the soak. Times are milliseconds; gateways and tenants are indices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SoakEvent {
    /// SIGKILL, and a start after a while.
    Kill { gateway: usize, downtime: u64 },
    /// Drained, stopped, and started after a while.
    Drain { gateway: usize, downtime: u64 },
    /// Drained, and undrained after a while.
    Undrain { gateway: usize, after: u64 },
    /// SIGTERM, and started at once.
    Restart { gateway: usize },
    /// The policy server is stopped by a signal, and started after a while.
    Server { signal: &'static str, downtime: u64 },
    /// A link is cut and restored.
    Cut { gateway: usize, link: Link, time: u64 },
    /// The wall clock of a process jumps to an offset in seconds; the process after the gateways is the policy
    /// server.
    Clock { process: usize, seconds: i64 },
    /// Manifests change.
    Policy { tenant: usize, change: PolicyChange },
    /// Tenant B is flooded via a gateway while the next events run.
    Flood { kind: FloodKind, gateway: usize, family: usize, pps: u32, time: u64 },
}

impl SoakEvent {
    /// Minimum duration in milliseconds.
    fn min_duration(self) -> u64 {
        match self {
            Self::Kill { downtime, .. } | Self::Drain { downtime, .. } => downtime + 3_000,
            Self::Undrain { after, .. } => after + 1_000,
            Self::Restart { .. } => 2_500,
            Self::Server { downtime, .. } => downtime + 1_500,
            Self::Cut { time, .. } => time + 1_500,
            Self::Clock { .. } | Self::Policy { .. } | Self::Flood { .. } => 500,
        }
    }

    /// Whether new connections may fail meanwhile.
    pub fn is_disruptive(self) -> bool {
        !matches!(self, Self::Clock { .. } | Self::Policy { .. } | Self::Flood { .. })
    }
}

impl fmt::Display for SoakEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Kill { gateway, downtime } => write!(f, "kill gw-{}, down for {downtime} ms", gateway + 1),
            Self::Drain { gateway, downtime } => {
                write!(f, "drain and stop gw-{}, down for {downtime} ms", gateway + 1)
            }
            Self::Undrain { gateway, after } => write!(f, "drain gw-{}, and undrain after {after} ms", gateway + 1),
            Self::Restart { gateway } => write!(f, "restart gw-{}", gateway + 1),
            Self::Server { signal, downtime } => {
                write!(f, "SIG{signal} to the policy server, down for {downtime} ms")
            }
            Self::Cut { gateway, link, time } => write!(f, "cut gw-{} {link:?} for {time} ms", gateway + 1),
            Self::Clock { process, seconds } => {
                let name = if process < GATEWAYS { format!("gw-{}", process + 1) } else { "the policy server".into() };
                write!(f, "the clock of {name} jumps to an offset of {seconds} s")
            }
            Self::Policy { tenant, change } => write!(f, "{change:?} tenant c{tenant}"),
            Self::Flood { kind, gateway, family, pps, time } => {
                write!(
                    f,
                    "flood {kind} over IPv{} via gw-{}, {pps} per second for {time} ms",
                    4 + 2 * family,
                    gateway + 1
                )
            }
        }
    }
}

/// State of a tenant's manifests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum TenantState {
    Absent,
    Valid,
    Invalid,
}

/// The schedule of events, reproducible by seed.
#[derive(Debug)]
pub struct Schedule {
    random: Random,
    tenants: [TenantState; TENANTS],
}

impl Schedule {
    /// The schedule of a seed.
    pub fn new(seed: u64) -> Self {
        Self { random: Random(seed), tenants: [TenantState::Absent; TENANTS] }
    }

    /// The events of the next segment, about a minute, each with the pause before it.
    pub fn segment(&mut self) -> Vec<(u64, SoakEvent)> {
        let (mut steps, mut time) = (Vec::new(), 0);
        while time < SEGMENT_DURATION {
            let (pause, event) = (self.between(500, 4_000), self.event());
            time += pause + event.min_duration();
            steps.push((pause, event));
        }
        steps
    }

    fn event(&mut self) -> SoakEvent {
        let gateway = self.below(GATEWAYS as u64) as usize;
        match self.below(100) {
            0..12 => SoakEvent::Kill { gateway, downtime: self.between(200, 6_000) },
            12..20 => SoakEvent::Drain { gateway, downtime: self.between(200, 4_000) },
            20..27 => SoakEvent::Undrain { gateway, after: self.between(500, 3_000) },
            27..34 => SoakEvent::Restart { gateway },
            34..42 => SoakEvent::Server {
                signal: ["KILL", "TERM"][self.below(2) as usize],
                downtime: self.between(200, 6_000),
            },
            42..58 => {
                let links = [Link::Inside, Link::Outside, Link::OutsideSilent, Link::Peers, Link::Management];
                SoakEvent::Cut { gateway, link: links[self.below(5) as usize], time: self.between(200, 5_000) }
            }
            58..66 => {
                let process = self.below(GATEWAYS as u64 + 1) as usize;
                let offsets = [-86_400, -3_600, -5, 0, 5, 3_600, 86_400, 30 * 86_400];
                SoakEvent::Clock { process, seconds: offsets[self.below(8) as usize] }
            }
            66..84 => {
                let tenant = self.below(TENANTS as u64) as usize;
                let change = self.change(tenant);
                SoakEvent::Policy { tenant, change }
            }
            _ => SoakEvent::Flood {
                kind: FloodKind::ALL[self.below(FloodKind::ALL.len() as u64) as usize],
                gateway,
                family: self.below(2) as usize,
                pps: self.between(200, 3_000) as u32,
                time: self.between(1_000, 6_000),
            },
        }
    }

    fn change(&mut self, tenant: usize) -> PolicyChange {
        let change = match (self.tenants[tenant], self.below(3)) {
            (TenantState::Absent, _) => PolicyChange::Add,
            (TenantState::Valid, 0) | (TenantState::Invalid, 0..2) => PolicyChange::Alter,
            (TenantState::Valid, 1) => PolicyChange::Break,
            (TenantState::Valid | TenantState::Invalid, _) => PolicyChange::Remove,
        };
        self.tenants[tenant] = match change {
            PolicyChange::Add | PolicyChange::Alter => TenantState::Valid,
            PolicyChange::Break => TenantState::Invalid,
            PolicyChange::Remove => TenantState::Absent,
        };
        change
    }

    fn below(&mut self, end: u64) -> u64 {
        self.random.next_u64() % end
    }

    fn between(&mut self, min: u64, max: u64) -> u64 {
        min + self.below(max - min + 1)
    }
}
