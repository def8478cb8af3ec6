//! Manifests to the policy that the engine runs: which VIPs there are, which pod leaves with which.
//!
//! `compile` is a pure function: the order of the objects doesn't matter, and the same objects give the same policy
//! under the same version. What is wrong with single documents was said while reading; here is said what objects mean
//! together. In doubt a pod is covered without a VIP, so that its traffic is dropped: nothing leaves untranslated.

mod backends;
mod claim;
mod cluster;
mod deal;
mod endpoints;
mod fingerprint;
mod follow;
mod gateways;
mod inventory;
mod moves;
mod overlay;
mod pods;
mod pool;
mod services;
mod slices;
mod vips;

pub use self::cluster::Cluster;
pub use self::deal::{Deal, DealtBackend, DealtService, Peer, Viewer};
pub use self::fingerprint::{Fingerprint, mix};
pub use self::follow::{Change, Follower, follow};
pub use self::gateways::MOST_BACKUPS;
pub use self::moves::{Move, moves};

use std::path::PathBuf;

use self::gateways::Gateways;
use self::inventory::Inventory;
use self::pods::Pods;
use self::pool::Pools;
use self::slices::Slices;
use crate::complaint::{Complaint, Complaints, settle};
use crate::manifest::{Foreign, Object, load};

/// A policy, and what is wrong with the objects that it was made of.
#[derive(Clone, Debug, Default)]
pub struct Compiled {
    /// The policy of all gateways; to be used only when there are no errors.
    pub deal: Deal,
    /// What is wrong, in the order of files and lines.
    pub complaints: Vec<Complaint>,
}

impl Compiled {
    /// The policy and its warnings, or everything that is wrong if an error is among it.
    ///
    /// # Errors
    /// All complaints, warnings too, when at least one is an error.
    pub fn accept(self) -> Result<(Deal, Vec<Complaint>), Complaints> {
        if self.complaints.iter().any(Complaint::is_error) {
            Err(Complaints(self.complaints))
        } else {
            Ok((self.deal, self.complaints))
        }
    }
}

/// Compiles the policy of all objects.
pub fn compile<'a>(objects: impl IntoIterator<Item = &'a Object>) -> Compiled {
    let mut complaints = Vec::new();
    let log = &mut complaints;
    let inventory = Inventory::new(objects, log);
    let gateways = Gateways::new(&inventory, log);
    let pods = Pods::new(&inventory, log);
    let slices = Slices::new(&inventory, &pods);
    let pools = Pools::new(&inventory, log);
    let sources =
        claim::Sources { inventory: &inventory, gateways: &gateways, pods: &pods, slices: &slices, pools: &pools };
    let claims = claim::collect(&sources, log);
    let vips = vips::settle(&sources, &claims, log);
    let endpoints = endpoints::settle(&claims, &vips.held, &gateways, &pods, log);
    let services = services::settle(&sources, &vips, log);
    let nodes = overlay::settle(&inventory, log);
    let cluster = cluster::settle(&inventory, log);
    let mut policies: Vec<_> = claims.into_iter().map(|claim| claim.spec).collect();
    policies.sort_by(|a, b| a.name.cmp(&b.name));
    let vips = vips.held.into_iter().map(|held| held.spec).collect();
    settle(&mut complaints);
    let peers = gateways.peers();
    Compiled { deal: Deal { policies, vips, endpoints, services, nodes, peers, cluster }, complaints }
}

/// Reads files and directories and compiles them; complaints of both.
pub fn compile_files(paths: &[PathBuf], foreign: Foreign) -> Compiled {
    let manifests = load(paths, foreign);
    let mut compiled = compile(&manifests.objects);
    compiled.complaints.extend(manifests.complaints);
    settle(&mut compiled.complaints);
    compiled
}

#[cfg(test)]
mod tests;
