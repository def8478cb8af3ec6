//! Metrics of the agent: the source of each value.

use vipgate_node::agent::Status;
use vipgate_node::drops::Reason;
use vipgate_node::mark_users::MarkUsers;
use vipgate_node::plan::counter_label;

use super::admin::pods;
use crate::logging;
use crate::metric::Family;
use crate::metrics::definitions::{BUILD, LOG_LINES_LOST, node as defined};
use crate::xds::client::ServerStatus;

/// All metric families of an agent.
pub(super) fn families(status: &Status, connection: &ServerStatus, mark_users: &MarkUsers) -> Vec<Family> {
    let (now, released, dropped) = status.held;
    let count = |name: &str| status.counters.get(name).copied().unwrap_or_default();
    let pods = status.plan.as_deref().map(pods).unwrap_or_default();
    let states = [
        ("covered", pods.covered),
        ("uncovered", pods.uncovered),
        ("no_vip", pods.no_vip),
        ("unreachable", pods.unreachable),
    ];
    let gateways = status.plan.as_deref().map(|plan| plan.gateways.as_slice()).unwrap_or_default();
    let (mut packets, mut bytes) = (Vec::new(), Vec::new());
    for (gateway, index) in gateways.iter().filter_map(|(gateway, index)| Some((gateway, (*index)?))) {
        for direction in ["to", "from"] {
            let counter = count(&format!("{direction}_{}", counter_label(index, &gateway.name)));
            let labels = || vec![("gateway", gateway.name.to_string()), ("direction", direction.to_owned())];
            packets.push((labels(), counter.packets));
            bytes.push((labels(), counter.bytes));
        }
    }
    let reachable = gateways.iter().map(|(gateway, _)| (&*gateway.name, u64::from(gateway.is_reachable)));
    let usable = gateways.iter().map(|(gateway, _)| (&*gateway.name, u64::from(gateway.fault.is_none())));
    vec![
        defined::CONNECTED.single(connection.connected.into()),
        defined::VIEW.single(status.view),
        defined::PODS.by_label(states),
        defined::REACHABLE.by_label(reachable),
        defined::USABLE.by_label(usable),
        defined::PACKETS.family(packets),
        defined::BYTES.family(bytes),
        defined::DROPS.by_label(Reason::ALL.map(|reason| (reason.as_str(), count(reason.as_str()).packets))),
        defined::HELD.single(now as u64),
        defined::HELD_ENDED.by_label([("released", released), ("dropped", dropped)]),
        defined::PROGRAMMED.single((status.plan.is_some() && status.error.is_none()).into()),
        defined::REPAIRS.single(status.repairs),
        defined::MARK_USERS.single(mark_users.len() as u64),
        BUILD.by_label([(env!("CARGO_PKG_VERSION"), 1)]),
        LOG_LINES_LOST.single(logging::lost_lines()),
    ]
}
