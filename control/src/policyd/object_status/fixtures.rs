//! Inputs for tests: a policy `a/p` with a VIP of gateways `g1` and `g2`, published as number 1.

use std::sync::Arc;
use std::time::Duration;

use vipgate_dataplane::policy::spec::ShardSpec;
use vipgate_policy::compiler::{Peer, Placement};
use vipgate_policy::manifest::{Kind, ObjectId};

use super::inputs::{GatewayFacts, Inputs};
use crate::policyd::object_state::Compilation;
use crate::source::kubernetes::ObservedObject;
use crate::source::store::{CompileOutcome, Faulty};
use crate::xds::fixtures::sample_placement;
use crate::xds::publication::Publication;

fn placement() -> Placement {
    let mut placement = sample_placement(2);
    let mut vips = placement.vips.to_vec();
    vips[0].shards = vec![ShardSpec { gateway: "g1".into(), blocks: None, backups: vec!["g2".into()] }];
    placement.vips = vips.into();
    let second = Peer { name: "g2".into(), ..placement.peers[0].clone() };
    placement.peers.push(second);
    placement
}

/// A gateway that is connected and has a publication in force.
pub(super) fn connected(name: &str, in_force: u64) -> GatewayFacts {
    GatewayFacts { name: name.into(), is_known: true, is_connected: true, in_force, ..GatewayFacts::default() }
}

/// Inputs with these objects and gateways.
pub(super) fn inputs(objects: &[(&str, ObservedObject)], gateways: Vec<GatewayFacts>) -> Inputs {
    let published = Publication::default().next(Arc::new(placement())).unwrap();
    let outcome = CompileOutcome { revision: 1, ..CompileOutcome::default() };
    Inputs {
        observed: Arc::new(objects.iter().map(|(name, object)| ((*name).into(), object.clone())).collect()),
        compilation: Arc::new(Compilation { outcome: Arc::new(outcome), published: Arc::new(published) }),
        gateways,
        pools: vec![],
        clouds: vec![],
        leading_for: Duration::from_mins(1),
    }
}

/// The same, where the policy isn't in force as written.
pub(super) fn with_faulty(mut inputs: Inputs, has_last_good: bool) -> Inputs {
    let id = ObjectId { kind: Kind::EgressPolicy, namespace: "a".to_owned(), name: "p".to_owned() };
    let mut outcome = (*inputs.compilation.outcome).clone();
    outcome.faulty.insert(id, Faulty { has_last_good, reasons: vec!["it is invalid".to_owned()] });
    let published = inputs.compilation.published.clone();
    inputs.compilation = Arc::new(Compilation { outcome: Arc::new(outcome), published });
    inputs
}
