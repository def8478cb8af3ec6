//! Manifests to the policy that the engine runs: which VIPs there are, which pod leaves with which.
//!
//! `compile` is a pure function: the order of the objects doesn't matter, and the same objects give the same policy
//! under the same version. What is wrong with single documents was said while reading; here is said what objects mean
//! together. In doubt a pod is covered without a VIP, so that its traffic is dropped: nothing leaves untranslated.

mod address;
mod claim;
mod endpoints;
mod fingerprint;
mod follow;
mod inventory;
mod pods;
mod pool;
mod services;
mod slices;
mod vips;

pub use self::follow::{Change, Follower, follow};

use std::path::PathBuf;

use vipgate_dataplane::snapshot::spec::PolicySet;

use self::claim::Serving;
use self::inventory::Inventory;
use self::pods::Pods;
use self::pool::Pools;
use self::slices::Slices;
use crate::complaint::{Complaint, Complaints, settle};
use crate::manifest::{Foreign, Object, load};

/// The annotation of a Service that makes it an egress policy too.
pub const EGRESS_ANNOTATION: &str = "vipgate.io/egress";
/// The annotation of a Service that says how its VIPs are announced.
pub const ANNOUNCE_ANNOTATION: &str = "vipgate.io/announce";
/// The load balancer class that is ours; Services without a class are too.
pub const LOAD_BALANCER_CLASS: &str = "vipgate.io/vipgate";

/// For whom a policy is compiled.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Options {
    /// Name of the gateway; without one, what all gateways together serve.
    pub gateway: Option<String>,
}

/// A policy, and what is wrong with the objects that it was made of.
#[derive(Clone, Debug, Default)]
pub struct Compiled {
    /// The policy; to be used only when there are no errors.
    pub set: PolicySet,
    /// What is wrong, in the order of files and lines.
    pub complaints: Vec<Complaint>,
}

impl Compiled {
    /// The policy and its warnings, or everything that is wrong if an error is among it.
    ///
    /// # Errors
    /// All complaints, warnings too, when at least one is an error.
    pub fn accept(self) -> Result<(PolicySet, Vec<Complaint>), Complaints> {
        if self.complaints.iter().any(Complaint::is_error) {
            Err(Complaints(self.complaints))
        } else {
            Ok((self.set, self.complaints))
        }
    }
}

/// Compiles the policy of all objects.
pub fn compile(objects: &[Object], options: &Options) -> Compiled {
    let mut complaints = Vec::new();
    let log = &mut complaints;
    let inventory = Inventory::new(objects, log);
    let pods = Pods::new(&inventory, log);
    let slices = Slices::new(&inventory, &pods, log);
    let services = services::read(&inventory, log);
    let pools = Pools::new(&inventory, log);
    let serving = Serving::new(&inventory, options);
    let sources = claim::Sources {
        inventory: &inventory,
        serving: &serving,
        pods: &pods,
        slices: &slices,
        services: &services,
        pools: &pools,
    };
    let claims = claim::collect(&sources, log);
    let vips = vips::settle(&sources, &claims, log);
    let endpoints = endpoints::settle(&claims, &pods, log);
    let mut policies: Vec<_> = claims.into_iter().map(|claim| claim.spec).collect();
    policies.sort_by(|a, b| a.name.cmp(&b.name));
    let mut set = PolicySet { version: String::new(), policies, vips, endpoints };
    set.version = fingerprint::version(&set);
    settle(&mut complaints);
    Compiled { set, complaints }
}

/// Reads files and directories and compiles them; complaints of both.
pub fn compile_files(paths: &[PathBuf], foreign: Foreign, options: &Options) -> Compiled {
    let manifests = load(paths, foreign);
    let mut compiled = compile(&manifests.objects, options);
    compiled.complaints.extend(manifests.complaints);
    settle(&mut compiled.complaints);
    compiled
}

#[cfg(test)]
mod tests;
