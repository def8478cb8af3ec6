//! Placement in force, for `vipgate placement --dry-run`.

use vipgate_policy::compiler::Homes;

use super::protocol::RequestError;
use crate::state::GatewayState;

/// The placement in force.
///
/// # Errors
/// While there is no policy yet.
pub(super) fn in_force(state: &GatewayState) -> Result<Homes, RequestError> {
    if state.engine.get().is_none() {
        return Err(RequestError::unavailable("the gateway is still starting: it has no policy yet"));
    }
    let (shard_maps, vips) = state.placement.get();
    let policy = state.compiled.load();
    let homes = policy.endpoints().map(|(address, it)| {
        let home = policy.home_of(it);
        (address, home.map(|home| policy.members().name(home)))
    });
    Ok(Homes::new(&state.policy.load().peers, &vips, &shard_maps, homes))
}
