//! Keys of the objects of a policy.

use std::net::IpAddr;
use std::sync::Arc;

use super::{EgressSpec, EndpointSpec, NodeSpec, ServiceSpec, ShardMapSpec, VipSpec};

/// An object with a key that is unique among those of its kind.
pub trait Keyed {
    type Key: Clone + Ord;

    /// The object's key.
    fn key(&self) -> &Self::Key;
}

macro_rules! keyed {
    ($($object:ty: $field:ident: $key:ty,)*) => {
        $(impl Keyed for $object {
            type Key = $key;

            fn key(&self) -> &$key {
                &self.$field
            }
        })*
    };
}

keyed! {
    EgressSpec: name: Arc<str>,
    ShardMapSpec: name: Arc<str>,
    VipSpec: address: IpAddr,
    EndpointSpec: address: IpAddr,
    ServiceSpec: name: Arc<str>,
    NodeSpec: name: Arc<str>,
}
