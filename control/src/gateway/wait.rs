//! The time before the first policy: the gateway is closed, says so to whoever asks, and waits for its server or its files.

use std::net::IpAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::watch;
use vipgate_dataplane::snapshot::build::Builder;

use super::feed::Feed;
use super::following::{check_own_addresses, reject, rejection};
use super::services::{Order, Services, Signals};
use super::state::{DeviceFigures, Figure, GatewayState, RingDrops};
use crate::failure::Failure;
use crate::metrics::Monitored;
use crate::xds::book::Offer;
use crate::xds::client::{Answer, Event, Rejection};
use crate::{admin, metrics, systemd};

/// How often the log says that there is still no policy.
const REMINDER: Duration = Duration::from_secs(30);

/// A policy that the builder has taken, and whom to tell when it is in force.
pub(super) struct Heard {
    pub(super) offer: Offer,
    pub(super) answer: Answer,
}

/// Waits for a policy that can be built, and builds it. `None` when told to stop.
pub(super) async fn for_policy(
    state: &Arc<GatewayState>,
    feed: &mut Feed,
    builder: &mut Builder,
    (metrics_listener, admin_socket): (TcpListener, admin::Socket),
    services: &Services,
    signals: &mut Signals,
) -> Result<Option<Heard>, Failure> {
    tracing::warn!(event = "no_policy", source = state.policy.load().source, "no policy yet: everything is dropped");
    let (stop, stopped) = watch::channel(false);
    let servers = [
        services.spawn(admin::serve(state.clone(), admin_socket, stopped.clone())),
        services.spawn(metrics::serve(
            Monitored::gateway(state.clone()),
            metrics_listener,
            state.rooms.metrics.clone(),
            stopped,
        )),
    ];
    systemd::waiting("no policy yet", 2 * REMINDER);
    let mut reminder = tokio::time::interval(REMINDER);
    reminder.tick().await;
    let heard = loop {
        tokio::select! {
            order = signals.next() => match order {
                Order::Stop => break None,
                // Files are read again as soon as they change.
                Order::Reload => {}
            },
            _ = reminder.tick() => {
                let why = state.waits_for().unwrap_or_default();
                tracing::warn!(event = "no_policy", reason = why, "still no policy: everything is dropped");
                systemd::waiting(&format!("no policy yet: {why}"), 2 * REMINDER);
            }
            event = feed.next() => match event {
                Event::Offer(offer, answer) => match build(&offer, builder, &state.network.load().locals) {
                    Ok(()) => break Some(Heard { offer: *offer, answer }),
                    Err(rejection) => {
                        reject(state, &rejection.to_string());
                        // The connection may be gone meanwhile; then the server asks again.
                        let _ = answer.send(Err(rejection));
                    }
                },
                Event::Refused(reason) => reject(state, &reason),
            },
        }
    };
    let _ = stop.send(true);
    for server in servers {
        // Whoever asks this moment is answered; the same addresses are opened again at once.
        let _ = tokio::time::timeout(Duration::from_secs(1), server).await;
    }
    if heard.is_none() {
        tracing::info!(event = "stopped", "stopped before there was a policy");
    }
    Ok(heard)
}

fn build(offer: &Offer, builder: &mut Builder, locals: &[IpAddr]) -> Result<(), Rejection> {
    check_own_addresses(&offer.change, locals)?;
    builder.with_change(&offer.change).map(drop).map_err(|error| rejection(&error))
}

/// Before there are workers, the device has nothing to say.
#[derive(Debug)]
pub(super) struct NoFigures;

impl DeviceFigures for NoFigures {
    fn ring_drops(&self, _: usize) -> RingDrops {
        RingDrops::default()
    }

    fn captures(&self, _: &[u8], _: u32) -> Option<bool> {
        None
    }

    fn figures(&self) -> Vec<Figure> {
        Vec::new()
    }
}
