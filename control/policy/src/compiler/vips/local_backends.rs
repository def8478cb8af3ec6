//! Backends on gateways' nodes: with `externalTrafficPolicy: Local` an L2 VIP's clients reach only those of its owner's
//! node, so they decide about the owner.
//!
//! The oldest Service of the VIP's namespace decides: one that shares the VIP later doesn't move it. In a cloud none
//! does: each move would be a call of the provider's API, which allows few, and slices are written by tenants.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashMap;
use vipgate_dataplane::policy::spec::{BackendState, Scope};

use super::{Vip, mode};
use crate::compiler::backends::BackendBuilder;
use crate::compiler::changes::Changes;
use crate::compiler::claim::Inputs;
use crate::compiler::gateways::{GatewayId, Gateways};
use crate::compiler::inventory::ObjectRef;
use crate::compiler::placement::local_states;
use crate::manifest::{Announce, Family, Service};

/// The gateways on whose nodes a Service has backends of a family, ascending, with the best state of these.
type OnNodes = Vec<(GatewayId, BackendState)>;

/// What decides about the owners of VIPs, by the names of the deciding Services and by family.
#[derive(Clone, Debug, Default)]
pub(in crate::compiler) struct LocalBackends(HashMap<Arc<str>, [OnNodes; 2]>);

impl LocalBackends {
    /// Those of the Services that decide about one of these VIPs.
    pub(super) fn new(vips: &BTreeMap<IpAddr, Vip<'_>>, sources: &Inputs<'_>) -> Self {
        let mut local = Self::default();
        if sources.gateways.is_empty() {
            return local;
        }
        let mut builder = BackendBuilder::new(sources);
        for service in vips.iter().filter_map(|(address, vip)| deciding(*address, vip, sources)) {
            let backends = local.0.entry(service.name.clone());
            backends.or_insert_with(|| on_nodes(service, &mut builder, sources.gateways));
        }
        local
    }

    /// What decides about a VIP; empty: nothing.
    pub(super) fn of(&self, address: IpAddr, vip: &Vip<'_>, sources: &Inputs<'_>) -> &[(GatewayId, BackendState)] {
        let of_service = deciding(address, vip, sources).and_then(|service| self.0.get(service.name));
        of_service.map(|families| &*families[usize::from(address.is_ipv6())]).unwrap_or_default()
    }

    /// Whether other backends are there than before, of the Services that a change of slices and prefixes concerns.
    pub(in crate::compiler) fn differ(&self, sources: &Inputs<'_>, changes: &Changes<'_>) -> bool {
        if self.0.is_empty() {
            return false;
        }
        let mut builder = BackendBuilder::new(sources);
        sources.inventory.services.iter().any(|service| {
            let is_concerned = changes.has_pods || changes.services.contains(&service.namespaced_name());
            let before = self.0.get(service.name).filter(|_| is_concerned);
            before.is_some_and(|before| *before != on_nodes(*service, &mut builder, sources.gateways))
        })
    }
}

/// The Service whose backends decide about a VIP's owner, if any does.
fn deciding<'a>(address: IpAddr, vip: &Vip<'a>, sources: &Inputs<'_>) -> Option<ObjectRef<'a, Service>> {
    let oldest = vip.services.iter().find(|service| service.id.namespace == vip.namespace)?;
    let is_local = oldest.body.external == Scope::Local && mode(address, vip, sources) == Announce::L2;
    (is_local && sources.pools.cloud(address).is_none()).then_some(*oldest)
}

fn on_nodes<'a>(
    service: ObjectRef<'a, Service>,
    builder: &mut BackendBuilder<'a>,
    gateways: &Gateways<'_>,
) -> [OnNodes; 2] {
    // What is to be said of its slices is said where the Service itself is compiled.
    let backends = builder.backends_of(service, &mut Vec::new());
    Family::ALL.map(|family| gateways.on_nodes(&local_states(&backends, family)))
}
