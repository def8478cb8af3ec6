//! Startup of what concerns the kernel's network state: interfaces, routes for the BGP daemon.

use vipgate_dataplane::flow::ids::InterfaceId;
use vipgate_dataplane::policy::spec::{InterfaceSpec, NetworkSpec};

use crate::command_error::CommandError;
use crate::config::Config;
use crate::kernel::{Advertiser, InterfaceConfig, Network, RouteTable};

/// Reads the network state of the configured interfaces and subscribes to its changes.
pub(super) async fn open(config: &Config) -> Result<Network, CommandError> {
    let wanted = config.interfaces.iter().zip(0..).map(|(interface, number)| InterfaceConfig {
        id: InterfaceId(number),
        name: interface.name.clone(),
        role: interface.role.into(),
    });
    let network = Network::open(wanted.collect()).await.map_err(CommandError::runtime)?;
    check_mtus(&network.current())?;
    Ok(network)
}

/// Rejects interfaces whose MTU is larger than the largest packet buffer: longer packets would be lost.
fn check_mtus(network: &NetworkSpec) -> Result<(), CommandError> {
    match network.interfaces.iter().find(|interface| interface.mtu > interface.usable_mtu()) {
        None => Ok(()),
        Some(InterfaceSpec { name, mtu, frames, .. }) => {
            let max = frames.max_mtu();
            Err(CommandError::runtime(format!(
                "interface {name} has an MTU of {mtu}, but the gateway receives packets of at most {max} bytes: longer \
                 ones would be lost; run `ip link set dev {name} mtu {max}`, or less, here and on hosts that send to it"
            )))
        }
    }
}

/// Starts the helper that keeps routes for the BGP daemon; withdraws those that a previous process has left.
pub(super) async fn open_advertiser(config: &Config) -> Result<Advertiser, CommandError> {
    let place = RouteTable { table: config.bgp.table, metric: config.bgp.metric };
    // The running executable, even if another version has been installed since.
    Advertiser::open(place, "/proc/self/exe".into()).await.map_err(CommandError::runtime)
}
