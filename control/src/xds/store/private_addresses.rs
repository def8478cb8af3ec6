//! Private addresses of the VIPs in force. Outside, a gateway knows a VIP by its private address alone, so an address of two VIPs, or of
//! a VIP and itself one, is ambiguous.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::Arc;

use vipgate_dataplane::policy::spec::{PrivateAddressSpec, VipSpec};

use super::{Key, Kind, ResourceStore, StageError, Staged, StoredResource, decode};
use crate::xds::resource::Decoded;

/// The VIP of each private address, by address and gateway.
#[derive(Debug, Default)]
pub(super) struct PrivateAddresses(BTreeMap<(IpAddr, Arc<str>), IpAddr>);

impl PrivateAddresses {
    pub(super) fn insert(&mut self, vip: &VipSpec) {
        for private in &vip.private {
            self.0.insert((private.address, private.gateway.clone()), vip.address);
        }
    }

    /// Removes those of a VIP, which had this resource.
    pub(super) fn remove(&mut self, resource: Option<&StoredResource>, key: &Key) {
        let Some(StoredResource { body, .. }) = resource.filter(|_| key.kind == Kind::Vip && !self.0.is_empty()) else {
            return;
        };
        // Resources in force have been decoded before: this can't fail.
        let Ok(Decoded::Vip(vip)) = decode(key.kind, &key.name, body) else { return };
        for private in vip.private {
            let at = (private.address, private.gateway);
            // Another VIP of the same update may have it already.
            if self.0.get(&at) == Some(&vip.address) {
                self.0.remove(&at);
            }
        }
    }

    /// The VIPs that have an address as their private one, with their gateways.
    fn vips_at(&self, address: IpAddr) -> impl Iterator<Item = (&Arc<str>, IpAddr)> {
        let all = self.0.range((address, "".into())..).take_while(move |((at, _), _)| *at == address);
        all.map(|((_, gateway), vip)| (gateway, *vip))
    }
}

impl ResourceStore {
    /// Checks that after the update each private address belongs to one VIP at its gateway, and that none is a VIP.
    pub(super) fn check_private_addresses(&self) -> Result<(), StageError> {
        let first = Key { kind: Kind::Vip, name: "".into() };
        let staged = self.staged.range(first..).take_while(|(key, _)| key.kind == Kind::Vip);
        let is_kept = |vip: &IpAddr| !self.staged.contains_key(&key(*vip));
        let mut used = BTreeMap::new();
        for staged in staged.filter_map(|(_, staged)| staged.as_ref()) {
            let Staged { decoded: Decoded::Vip(vip), .. } = staged else { continue };
            let inconsistent = |reason| Err(StageError::Inconsistent { key: key(vip.address), reason });
            if let Some((gateway, other)) =
                self.private_addresses.vips_at(vip.address).find(|(_, other)| is_kept(other))
            {
                return inconsistent(format!("is the private address of VIP {other} at gateway {gateway}"));
            }
            for PrivateAddressSpec { gateway, address } in &vip.private {
                if self.is_vip_after(*address) {
                    return inconsistent(format!("its private address {address} at gateway {gateway} is a VIP"));
                }
                let mut in_force =
                    self.private_addresses.vips_at(*address).filter(|(at, vip)| *at == gateway && is_kept(vip));
                let staged = used.insert((*address, gateway), vip.address);
                if let Some(other) = in_force.next().map(|(_, vip)| vip).or(staged) {
                    return inconsistent(format!(
                        "its private address {address} at gateway {gateway} is the one of VIP {other}, too"
                    ));
                }
            }
        }
        Ok(())
    }

    fn is_vip_after(&self, address: IpAddr) -> bool {
        let key = key(address);
        self.staged.get(&key).map_or_else(|| self.resources.contains_key(&key), Option::is_some)
    }
}

fn key(vip: IpAddr) -> Key {
    Key { kind: Kind::Vip, name: vip.to_string().into() }
}
