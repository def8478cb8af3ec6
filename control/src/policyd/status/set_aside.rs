//! What is set aside, in a status reply: by gateway, and by the policies and Services that it is part of. A gateway decides
//! what it refuses, so what exceeds the size limit is left out instead of failing the request.

use std::collections::BTreeMap;

use vipgate_dataplane::policy::spec::EndpointSpec;

use super::{Gateway, SizeLimit, StatusView};
use crate::policyd::policy_summary::{Parts, PolicySummary};
use crate::policyd::set_aside::Refusal;
use crate::xds::proto::SetAside;
use crate::xds::resource::{Key, Kind};

impl StatusView<'_> {
    fn connected_gateways(&self) -> impl Iterator<Item = (&String, &Gateway)> {
        self.gateways.iter().filter(|(_, gateway)| gateway.streams > 0)
    }

    /// All resources that are set aside: for all gateways, then for single ones.
    pub(super) fn set_aside(&self, limit: &mut SizeLimit) -> Vec<SetAside> {
        let left_out = self.published.left_out.iter();
        let for_all = left_out.map(|(key, reason)| SetAside {
            resource: key.to_string(),
            reason: reason.clone(),
            ..SetAside::default()
        });
        let refused = self.connected_gateways();
        let refused = refused.flat_map(|(name, it)| it.refusals.active().map(|(key, it)| message(name, key, it)));
        for_all.chain(refused).take_while(|it| limit.try_take(size(it))).collect()
    }

    /// The same for single gateways, by policy or Service.
    pub(super) fn set_aside_by_object(
        &self,
        summaries: &BTreeMap<&str, PolicySummary>,
        limit: &mut SizeLimit,
    ) -> BTreeMap<String, Vec<SetAside>> {
        let mut by_object: BTreeMap<String, Vec<SetAside>> = BTreeMap::new();
        if self.connected_gateways().all(|(_, gateway)| gateway.refusals.is_empty()) {
            return by_object;
        }
        let parts = Parts::new(&self.published, summaries);
        for (name, gateway) in self.connected_gateways() {
            for (key, refusal) in gateway.refusals.active() {
                for object in parts.of(key) {
                    let it = message(name, key, refusal);
                    if !limit.try_take(size(&it) + object.len()) {
                        return by_object;
                    }
                    by_object.entry(object.to_owned()).or_default().push(it);
                }
            }
        }
        by_object
    }

    /// Moves the gateways at which a part of an endpoint is set aside to those where it isn't in force.
    pub(super) fn without_set_aside(
        &self,
        endpoint: &EndpointSpec,
        in_force: &mut Vec<String>,
        pending: &mut Vec<String>,
    ) {
        let address = endpoint.address.to_string();
        let own = [(Kind::Endpoint, address.as_str()), (Kind::EgressPolicy, &*endpoint.policy)];
        let own = own.map(|(kind, name)| Key { kind, name: name.into() });
        let vips = endpoint.vips.iter().map(|vip| Key { kind: Kind::Vip, name: vip.to_string().into() });
        let keys: Vec<Key> = own.into_iter().chain(vips).collect();
        let refuses = |name: &String| {
            self.gateways.get(name).is_some_and(|it| it.refusals.active().any(|(key, _)| keys.contains(key)))
        };
        pending.extend(in_force.extract_if(.., |name| refuses(name)));
    }
}

fn message(gateway: &str, key: &Key, refusal: &Refusal) -> SetAside {
    SetAside {
        gateway: gateway.to_owned(),
        resource: key.to_string(),
        reason: refusal.reason.to_string(),
        since_seconds: refusal.since.elapsed().as_secs(),
    }
}

fn size(it: &SetAside) -> usize {
    size_of::<SetAside>() + it.gateway.len() + it.resource.len() + it.reason.len()
}
