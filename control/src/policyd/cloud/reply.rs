//! The reply to `vipgate cloud`.

use std::collections::BTreeMap;

use vipgate_cloud::execute::{ActionKind, describe};
use vipgate_cloud::{Nic, Observation, PublicAddress};

use super::{NOT_CONFIGURED, PoolReport};
use crate::source::store::ProviderPool;
use crate::xds::proto::{CloudAction, CloudAddress, CloudFailure, CloudNic, CloudPool};

pub(super) fn pool(name: &str, report: &PoolReport) -> CloudPool {
    let state = &report.state;
    let error = report.error.clone().or_else(|| state.observe_error.as_ref().map(ToString::to_string));
    let observation = state.observation.as_deref();
    let action =
        |action| CloudAction { kind: ActionKind::of(action).as_str().to_owned(), description: describe(action) };
    let failure = |(kind, error): (&ActionKind, &vipgate_cloud::CloudError)| CloudFailure {
        kind: kind.as_str().to_owned(),
        code: error.code.clone(),
        message: error.message.clone(),
    };
    CloudPool {
        name: name.to_owned(),
        provider: report.provider.to_owned(),
        error: error.unwrap_or_default(),
        observed: observation.is_some(),
        age_seconds: state.observed_at.map(|at| at.elapsed().as_secs()).unwrap_or_default(),
        addresses: observation.map(|observation| addresses(report, observation)).unwrap_or_default(),
        nics: observation.map(|observation| observation.nics.iter().map(nic).collect()).unwrap_or_default(),
        actions: state.plan.actions.iter().map(action).collect(),
        failures: state.failures.iter().map(failure).collect(),
        lacking: report.lacking() as u64,
        beyond_limit: report.beyond_limit as u64,
    }
}

/// A pool that isn't observed.
pub(super) fn unobserved(name: &str, pool: &ProviderPool) -> CloudPool {
    CloudPool {
        name: name.to_owned(),
        provider: pool.spec.name().unwrap_or_default().to_owned(),
        error: NOT_CONFIGURED.to_owned(),
        ..CloudPool::default()
    }
}

fn nic(nic: &Nic) -> CloudNic {
    CloudNic {
        gateway: nic.gateway.clone(),
        id: nic.id.to_string(),
        zone: nic.zone.clone().unwrap_or_default(),
        capacity: nic.capacity.v4 as u64,
        ipv6_capacity: nic.capacity.v6 as u64,
        missing: nic.missing.clone(),
    }
}

fn addresses(report: &PoolReport, observation: &Observation) -> Vec<CloudAddress> {
    let gateways: BTreeMap<_, &str> = observation.nics.iter().map(|nic| (&nic.id, nic.gateway.as_str())).collect();
    let address = |address: &PublicAddress| {
        let desired = report.desired.as_ref().and_then(|desired| desired.vips.get(&address.address));
        let attachment = address.attachment.as_ref();
        let nic = attachment.and_then(|attachment| attachment.nic.as_ref());
        let attached_to = nic.map(|nic| gateways.get(nic).map_or_else(|| nic.to_string(), |name| (*name).to_owned()));
        let elsewhere = || attachment.map(|attachment| attachment.id.clone().unwrap_or_default());
        let plan = &report.state.plan;
        let state = match desired {
            Some(_) if plan.attached.contains(&address.address) => "attached",
            Some(_) => "pending",
            None if address.claim.is_none() && attachment.is_none() => "free",
            None => "other",
        };
        CloudAddress {
            address: address.address.to_string(),
            id: address.id.to_string(),
            state: state.to_owned(),
            owner: address.claim.as_ref().map(|claim| claim.owner.clone()).unwrap_or_default(),
            gateway: desired.and_then(|desired| desired.gateway.clone()).unwrap_or_default(),
            attached_to: attached_to.or_else(elsewhere).unwrap_or_default(),
            private: attachment.and_then(|it| it.private).map(|private| private.to_string()).unwrap_or_default(),
            problem: plan.problems.get(&address.address).map(ToString::to_string).unwrap_or_default(),
        }
    };
    observation.addresses.iter().map(address).collect()
}
