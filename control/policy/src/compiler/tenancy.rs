//! Tenancy: the pods, pools and addresses that the policies and Services of a namespace may use.
//!
//! What is refused claims nothing: neither does it take an address from its owner, nor one from a pool.

use std::net::IpAddr;
use std::sync::Arc;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::claim::Inputs;
use super::inventory::ObjectRef;
use super::pods::Reach;
use crate::diagnostic::{Code, Diagnostic};
use crate::manifest::{AddressPool, ObjectId, PodSelector, Service};

/// What tenants may use, who write policies and Services in their own namespaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Tenancy {
    /// An EgressPolicy covers pods of its own namespace. VIPs of policies are from AddressPools for their namespace, or
    /// addresses of its Services.
    #[default]
    Strict,
    /// An EgressPolicy may select pods of any namespace, and have any address that nobody else uses.
    Open,
}

impl<'a> Inputs<'a> {
    /// The namespaces that a policy's selectors reach. `namespace` is empty for a ClusterEgressPolicy.
    pub(super) fn reach(&self, namespace: &'a str) -> Reach<'a> {
        match self.tenancy {
            _ if namespace.is_empty() => Reach::Cluster,
            Tenancy::Strict => Reach::Own(namespace),
            Tenancy::Open => Reach::Named(namespace),
        }
    }

    /// What to say about a selector of an EgressPolicy that is meant for other namespaces, too. It follows from the selector
    /// alone: which pods others have is not the tenant's business.
    pub(super) fn pods_of_others(&self, selector: &PodSelector, namespace: &'a str) -> Option<String> {
        let Reach::Own(own) = self.reach(namespace) else { return None };
        let other = selector.namespace_selector.as_ref()?.selects_more_than(own);
        other.then(|| {
            "an EgressPolicy covers pods of its own namespace only, whatever `namespaceSelector` selects: write a \
             ClusterEgressPolicy for others"
                .to_owned()
        })
    }

    /// Checks that a policy may allocate from a pool.
    pub(super) fn check_pool(&self, policy: &ObjectId, name: &str) -> Result<(), (Code, String)> {
        let Some(pool) = self.pools.named(name) else {
            return Err((Code::NoSuchPool, format!("there is no AddressPool {name}")));
        };
        if policy.kind.is_namespaced() && !self.is_for(pool, &policy.namespace) {
            let reason = format!("AddressPool {name} {}", not_for(pool, &policy.namespace));
            return Err((Code::PoolOfOtherNamespaces, reason));
        }
        Ok(())
    }

    /// Why a policy may not have an address as VIP; `None`: it may, unless another object has it.
    pub(super) fn refused_address(&self, policy: &ObjectId, address: IpAddr) -> Option<(Code, String)> {
        if self.tenancy == Tenancy::Open {
            return None;
        }
        let has = |service: &ObjectRef<'_, Service>| service.body.vips.iter().any(|(_, vip)| *vip == address);
        match self.pools.of(address) {
            Some(_) if !policy.kind.is_namespaced() => None,
            Some(pool) if self.is_for(pool, &policy.namespace) => None,
            _ if self.inventory.services_of(&policy.namespace).iter().any(has) => None,
            Some(pool) => {
                let reason =
                    format!("{address} is in AddressPool {}, which {}", pool.id.name, not_for(pool, &policy.namespace));
                Some((Code::PoolOfOtherNamespaces, reason))
            }
            // A VIP of other Services is refused as such.
            None if self.inventory.services.iter().any(has) => None,
            None => {
                let own = if policy.kind.is_namespaced() { " and no address of an own Service" } else { "" };
                let reason = format!(
                    "{address} is in no AddressPool{own}: gateways would answer for the address of another host; add \
                     it to a pool, or use `pools`"
                );
                Some((Code::AddressOutsidePools, reason))
            }
        }
    }

    /// The VIPs of a Service that are in no pool of other namespaces.
    pub(super) fn vips_of(&self, service: &ObjectRef<'a, Service>) -> impl Iterator<Item = &'a (Arc<str>, IpAddr)> {
        let namespace = &service.id.namespace;
        service.body.vips.iter().filter(move |(_, vip)| self.pools.of(*vip).is_none_or(|it| self.is_for(it, namespace)))
    }

    /// Reports a VIP of a Service in a pool of other namespaces.
    pub(super) fn check_service_vip(
        &self,
        service: ObjectRef<'a, Service>,
        field: &str,
        vip: IpAddr,
    ) -> Option<Diagnostic> {
        let pool = self.pools.of(vip).filter(|pool| !self.is_for(*pool, &service.id.namespace))?;
        let reason =
            format!("{vip} is in AddressPool {}, which {}", pool.id.name, not_for(pool, &service.id.namespace));
        Some(service.error(Code::PoolOfOtherNamespaces, field, reason))
    }

    /// Whether objects of a namespace may have addresses of a pool.
    fn is_for(&self, pool: ObjectRef<'_, AddressPool>, namespace: &str) -> bool {
        let selector = pool.body.spec.namespaces.as_ref().filter(|_| self.tenancy == Tenancy::Strict);
        selector.is_none_or(|selector| selector.selects(&self.inventory.namespace_labels(namespace)))
    }
}

fn not_for(pool: ObjectRef<'_, AddressPool>, namespace: &str) -> String {
    format!("is not for namespace {namespace}: `spec.namespaces` of the pool ({}) doesn't select it", pool.origin)
}
