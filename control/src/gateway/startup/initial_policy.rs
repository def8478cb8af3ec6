//! The initial policy: the one that the source has at startup, else the first valid one that it delivers. Until then
//! the gateway drops everything and reports not ready.

use std::net::IpAddr;
use std::time::Duration;

use vipgate_dataplane::policy::build::Builder;

use crate::command_error::CommandError;
use crate::gateway::background::{SignalAction, Signals};
use crate::gateway::policy_source::PolicySubscription;
use crate::gateway::reconciler::{check_local_addresses, reject, rejection};
use crate::state::GatewayState;
use crate::systemd;
use crate::xds::client::{Client, ClientEvent, Rejection, UpdateReply};
use crate::xds::store::PolicyUpdate;

/// Interval of the warning that there is still no policy.
const WARNING_INTERVAL: Duration = Duration::from_secs(30);

/// The initial policy, already in the builder.
pub(super) struct InitialPolicy {
    pub(super) update: PolicyUpdate,
    /// For when it is in force; `None`: it was known at startup.
    reply: Option<UpdateReply>,
}

impl InitialPolicy {
    /// The reply to the source, if it waits for one.
    pub(super) fn into_reply(self) -> Option<UpdateReply> {
        self.reply
    }
}

/// Builds the policy that the source has at startup. An invalid one is an error if it comes from files, and discarded
/// if it comes from the cache of the policy server's `client`.
pub(super) fn build_known(
    update: Option<PolicyUpdate>,
    builder: &mut Builder,
    client: Option<&mut Client>,
    locals: &[IpAddr],
) -> Result<Option<InitialPolicy>, CommandError> {
    let Some(update) = update else { return Ok(None) };
    let check = check_local_addresses(&update.change, locals);
    match (builder.with_change(&update.change), client) {
        (Ok(_), None) => check.map_err(CommandError::usage)?,
        (Ok(_), Some(_)) => {
            // It was in force before. A local address that the host has got since then must not stop the gateway.
            if let Err(rejection) = check {
                tracing::error!(event = "policy_warning", "{rejection}");
            }
        }
        (Err(error), None) => return Err(CommandError::usage(error)),
        (Err(error), Some(client)) => {
            client.discard_cached(&error.to_string());
            return Ok(None);
        }
    }
    Ok(Some(InitialPolicy { update, reply: None }))
}

/// Waits for a valid policy and builds it. `None`: stopped by a signal.
pub(super) async fn wait(
    state: &GatewayState,
    subscription: &mut PolicySubscription,
    builder: &mut Builder,
    signals: &mut Signals,
) -> Option<InitialPolicy> {
    tracing::warn!(event = "no_policy", source = state.policy.load().source, "no policy yet: everything is dropped");
    systemd::extend_startup("no policy yet", 2 * WARNING_INTERVAL);
    let mut warning = tokio::time::interval(WARNING_INTERVAL);
    warning.tick().await;
    loop {
        tokio::select! {
            signal = signals.next() => match signal {
                SignalAction::Stop => return None,
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
                    Ok(()) => return Some(InitialPolicy { update: *update, reply: Some(reply) }),
                    Err(rejection) => {
                        reject(state, &rejection.to_string());
                        // If the connection has closed, the server sends the update again.
                        let _ = reply.send(Err(rejection));
                    }
                },
                ClientEvent::Rejected(reason) => reject(state, &reason),
            },
        }
    }
}

fn build(update: &PolicyUpdate, builder: &mut Builder, locals: &[IpAddr]) -> Result<(), Rejection> {
    check_local_addresses(&update.change, locals)?;
    builder.with_change(&update.change).map(drop).map_err(|error| rejection(&error))
}
