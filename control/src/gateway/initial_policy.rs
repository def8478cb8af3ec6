//! Waiting for the initial policy: the gateway drops everything and reports not ready until its policy source delivers
//! one.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use vipgate_dataplane::policy::build::Builder;

use crate::command_error::CommandError;
use crate::gateway::background::{BackgroundRuntime, SignalAction, Signals};
use crate::gateway::policy_source::PolicySubscription;
use crate::gateway::reconciler::{check_local_addresses, reject, rejection};
use crate::metrics::Monitored;
use crate::state::{DeviceMetric, DeviceStats, GatewayState, RingDrops};
use crate::xds::client::{ClientEvent, Rejection, UpdateReply};
use crate::xds::store::PolicyUpdate;
use crate::{admin, metrics, systemd};

/// Interval of the warning that there is still no policy.
const WARNING_INTERVAL: Duration = Duration::from_secs(30);

/// The initial policy, already in the builder, and the reply channel for when it is in force.
pub(super) struct InitialPolicy {
    pub(super) update: PolicyUpdate,
    pub(super) reply: UpdateReply,
}

/// Waits for a valid policy and builds it. `None`: stopped by a signal.
pub(super) async fn wait_for_policy(
    state: &Arc<GatewayState>,
    subscription: &mut PolicySubscription,
    builder: &mut Builder,
    (metrics_listener, admin_socket): (TcpListener, admin::Socket),
    background: &BackgroundRuntime,
    signals: &mut Signals,
) -> Result<Option<InitialPolicy>, CommandError> {
    tracing::warn!(event = "no_policy", source = state.policy.load().source, "no policy yet: everything is dropped");
    let (stop, stopped) = watch::channel(false);
    let servers = [
        background.spawn(admin::serve(state.clone(), admin_socket, stopped.clone())),
        background.spawn(metrics::serve(
            Monitored::gateway(state.clone()),
            metrics_listener,
            state.connections.metrics.clone(),
            stopped,
        )),
    ];
    systemd::extend_startup("no policy yet", 2 * WARNING_INTERVAL);
    let mut warning = tokio::time::interval(WARNING_INTERVAL);
    warning.tick().await;
    let policy = loop {
        tokio::select! {
            signal = signals.next() => match signal {
                SignalAction::Stop => break None,
                // Files are watched and read as soon as they change.
                SignalAction::Reload => {}
            },
            _ = warning.tick() => {
                let reason = state.no_policy_reason().unwrap_or_default();
                tracing::warn!(event = "no_policy", reason, "still no policy: everything is dropped");
                systemd::extend_startup(&format!("no policy yet: {reason}"), 2 * WARNING_INTERVAL);
            }
            event = subscription.next() => match event {
                ClientEvent::Update(update, reply) => match build(&update, builder, &state.network.load().locals) {
                    Ok(()) => break Some(InitialPolicy { update: *update, reply }),
                    Err(rejection) => {
                        reject(state, &rejection.to_string());
                        // If the connection has closed, the server sends the update again.
                        let _ = reply.send(Err(rejection));
                    }
                },
                ClientEvent::Rejected(reason) => reject(state, &reason),
            },
        }
    };
    let _ = stop.send(true);
    for server in servers {
        // Requests in progress complete first; the same addresses are bound again right after.
        let _ = tokio::time::timeout(Duration::from_secs(1), server).await;
    }
    if policy.is_none() {
        tracing::info!(event = "stopped", "stopped before the initial policy");
    }
    Ok(policy)
}

fn build(update: &PolicyUpdate, builder: &mut Builder, locals: &[IpAddr]) -> Result<(), Rejection> {
    check_local_addresses(&update.change, locals)?;
    builder.with_change(&update.change).map(drop).map_err(|error| rejection(&error))
}

/// The device statistics before there are workers: none.
#[derive(Debug)]
pub(super) struct NoDeviceStats;

impl DeviceStats for NoDeviceStats {
    fn ring_drops(&self, _: usize) -> RingDrops {
        RingDrops::default()
    }

    fn captures(&self, _: &[u8], _: u32) -> Option<bool> {
        None
    }

    fn metrics(&self) -> Vec<DeviceMetric> {
        Vec::new()
    }
}
