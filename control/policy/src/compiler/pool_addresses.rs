//! What a compilation gives of pools: who has which addresses, and the record that follows.

use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashSet;
use k8s_openapi::jiff::Timestamp;

use super::changes::Changes;
use super::claim::{Claim, Inputs, own_addresses};
use crate::address_record::AddressRecord;
use crate::diagnostic::{Code, Diagnostic};
use crate::manifest::ObjectId;

/// The addresses that objects have of pools.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PoolAddresses {
    /// VIPs that policies have of their own, not from a Service, or are to have, with their owners; by address.
    pub of_policies: Vec<(IpAddr, ObjectId)>,
    /// Whether policies are to have addresses that aren't recorded yet.
    pub are_pending: bool,
    /// The record once what is given is recorded; `None`: it is the same, or there is none.
    pub next_record: Option<Arc<AddressRecord>>,
    /// When a quarantine ends, if something waits for an address.
    pub waits_until: Option<Timestamp>,
}

impl PoolAddresses {
    /// `refused`: the names of Services that have no VIP.
    pub(super) fn new(
        claims: &[Claim<'_>],
        sources: &Inputs<'_>,
        refused: &HashSet<Arc<str>>,
        changes: &Changes<'_>,
        diagnostics: &[Diagnostic],
    ) -> Self {
        let own = own_addresses(claims);
        let reuse_after = |address| sources.pools.spec_of(address).map(|(_, spec)| spec.reuse_after);
        let next_record = sources.recorded.filter(|_| changes.concerns_vips).and_then(|recorded| {
            // One that is set aside keeps what it has by the record, and takes nothing else.
            let of_services = sources.inventory.services.iter().flat_map(|service| {
                let is_its =
                    |vip: &IpAddr| !refused.contains(service.name) || recorded.record.is_given_to(*vip, service.id);
                let vips = service.body.vips.iter().map(|(_, vip)| *vip);
                vips.filter(is_its).map(|vip| (vip, service.id)).collect::<Vec<_>>()
            });
            let given = of_services.chain(own.iter().copied()).filter(|(address, _)| reuse_after(*address).is_some());
            let next = recorded.next(given, reuse_after);
            (next != *recorded.record).then(|| Arc::new(next))
        });
        let codes = [Code::AddressQuarantined, Code::NamespaceLimit, Code::PoolExhausted];
        let waits = |it: &Diagnostic| codes.contains(&it.code);
        let is_waiting = diagnostics.iter().any(waits);
        Self {
            of_policies: own.into_iter().map(|(address, owner)| (address, owner.clone())).collect(),
            are_pending: claims.iter().any(|claim| !claim.pending.is_empty()),
            next_record,
            waits_until: sources.recorded.filter(|_| is_waiting).and_then(|recorded| recorded.first_end(reuse_after)),
        }
    }
}
