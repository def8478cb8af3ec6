//! What a publication leaves out: for all gateways what they can't decode, for one gateway what it refuses.

use std::collections::BTreeMap;

use vipgate_policy::compiler::SetAside;

use crate::xds::resource::slices::parse_name;
use crate::xds::resource::{Key, Kind};

/// The resources that are set aside for a gateway, and in which form.
pub type Selection = BTreeMap<Key, Form>;

/// How a resource is set aside.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// As closed as possible: an endpoint stays without VIPs.
    Closed,
    /// It was refused even closed: an endpoint is left out.
    Dropped,
}

/// What to leave out of a placement for these resources.
pub fn set_aside(selection: &Selection) -> SetAside {
    let mut all = SetAside::default();
    for (key, form) in selection {
        add(&mut all, key);
        if *form == Form::Dropped {
            add(&mut all, key);
        }
    }
    all
}

/// Adds a resource to what is left out. Of an endpoint the first time its VIPs alone. False: it can't be set aside, or is
/// set aside already.
pub fn add(set_aside: &mut SetAside, key: &Key) -> bool {
    let SetAside { policies, vips, closed, dropped, services, nodes } = set_aside;
    let (name, address) = (key.name.clone(), key.name.parse());
    match (key.kind, address) {
        (Kind::EgressPolicy, _) => policies.insert(name),
        (Kind::Vip, Ok(vip)) => vips.insert(vip),
        (Kind::Endpoint, Ok(endpoint)) => closed.insert(endpoint) || dropped.insert(endpoint),
        (Kind::BackendSlice, _) => parse_name(&name).is_some_and(|(service, _)| services.insert(service.into())),
        (Kind::Service, _) => services.insert(name),
        (Kind::OverlayNode, _) => nodes.insert(name),
        // All tenants depend on these, as they are.
        (Kind::ShardMap | Kind::Gateway | Kind::Cluster | Kind::Settings | Kind::NodePolicy | Kind::View, _)
        | (Kind::Vip | Kind::Endpoint, Err(_)) => false,
    }
}
