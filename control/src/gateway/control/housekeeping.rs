//! Housekeeping of the control loop: reads what workers count, opens health check ports, measures event-loop stalls.

use std::sync::Arc;
use std::time::{Duration, Instant};

use tokio::time::Interval;
use vipgate_common::{Task, Tasks};

use crate::gateway::address_conflicts;
use crate::gateway::health_checks::HealthChecks;
use crate::gateway::port_exhaustion::PortExhaustionLog;
use crate::state::GatewayState;
use crate::systemd;

/// Interval of housekeeping, at most.
const INTERVAL: Duration = Duration::from_secs(1);

/// State of the periodic checks.
#[derive(Debug)]
pub(in crate::gateway) struct Housekeeping {
    state: Arc<GatewayState>,
    timer: Interval,
    /// When the rates of new sessions were last measured.
    rates_measured: Instant,
    shortages: PortExhaustionLog,
    health: HealthChecks,
    stalls: Option<Task>,
}

impl Housekeeping {
    /// Housekeeping that hasn't started.
    pub(in crate::gateway) fn new(state: Arc<GatewayState>, tasks: Tasks) -> Self {
        let interval = systemd::watchdog_interval().map_or(INTERVAL, |limit| limit.min(INTERVAL));
        Self {
            health: HealthChecks::new(state.clone(), tasks),
            state,
            timer: tokio::time::interval(interval),
            rates_measured: Instant::now(),
            shortages: PortExhaustionLog::default(),
            stalls: None,
        }
    }

    /// Starts the timer and the measurement of stalls of this thread.
    pub(super) fn start(&mut self) {
        self.timer.reset_immediately();
        self.rates_measured = Instant::now();
        self.stalls = Some(Task::spawn(self.state.stalls.clone().measure()));
    }

    /// Ends the measurement of stalls.
    pub(super) fn stop(&mut self) {
        self.stalls = None;
    }

    /// Waits until housekeeping is due. Cancel-safe.
    pub(super) async fn due(&mut self) {
        self.timer.tick().await;
    }

    /// Opens and closes health check ports to match the policy in force.
    pub(super) fn update_health_checks(&mut self) {
        self.health.update();
    }

    /// Reads what the workers have counted since the last time, and retries health check ports.
    pub(super) fn run(&mut self) {
        self.health.update();
        let now = Instant::now();
        address_conflicts::poll(&self.state, now);
        self.shortages.update(&self.state, now);
        measure_rates(&self.state, now - std::mem::replace(&mut self.rates_measured, now));
    }
}

/// Computes the rate of new sessions of each backend.
fn measure_rates(state: &GatewayState, elapsed: Duration) {
    let ms = u64::try_from(elapsed.as_millis()).unwrap_or(u64::MAX);
    for service in state.compiled.load().services() {
        service.backend_usage().for_each(|(_, usage)| usage.measure(ms));
    }
}
