//! A variant of a publication: for one gateway, without the resources that it refuses. It has the number of the
//! publication that it is a variant of, so in force means the same for both, and shares with it what isn't concerned.

use std::collections::HashSet;
use std::sync::Arc;

use vipgate_policy::compiler::Placement;

use super::resources::Resources;
use super::selection::{Selection, set_aside};
use super::{Next, Publication, PublishedResource};
use crate::xds::resource::encode::settings_of;
use crate::xds::resource::{Key, settings};

/// Separates the version of the publication from that of its variant.
const MARK: char = '~';
/// Digits of the variant's own version.
const OWN_DIGITS: usize = 8;

/// What only a variant has.
#[derive(Clone, Debug)]
pub(super) struct Variant {
    /// What is left out.
    selection: Arc<Selection>,
    /// Its number among the variants of one stream.
    serial: u64,
    /// Resources that it doesn't share with its publication.
    own_resources: usize,
}

impl Publication {
    /// The variant of this publication without these resources.
    #[must_use]
    pub fn variant(&self, selection: Arc<Selection>, serial: u64) -> Self {
        // Nodes get no variants.
        let placement = Placement { agents: [].into(), ..self.placement.without(&set_aside(&selection)) };
        let next = self.resources.next((&self.placement, &placement), self.number);
        let Next { mut resources, .. } = next;
        let (counts, sum) = (resources.counts(), resources.version_sum);
        let (_, _, own) = settings(counts, sum);
        let version = format!("{}{MARK}{:.OWN_DIGITS$}", self.version, own);
        let (key, content) = settings_of(counts, &version);
        resources.set_settings(PublishedResource { key, content, changed_in: self.number });
        let own_resources = own_resources(&self.resources, &resources);
        Self {
            number: self.number,
            version,
            placement: Arc::new(placement),
            shard_groups: self.shard_groups.clone(),
            left_out: self.left_out.clone(),
            variant: Some(Variant { selection, serial, own_resources }),
            resources,
            ..Self::default()
        }
    }

    /// Whether it is for one gateway only.
    pub fn is_variant(&self) -> bool {
        self.variant.is_some()
    }

    /// Whether it leaves out exactly these resources.
    pub fn leaves_out(&self, selection: &Selection) -> bool {
        self.variant.as_ref().map_or(selection.is_empty(), |variant| *variant.selection == *selection)
    }

    /// Whether a resource is set aside in it.
    pub fn has_set_aside(&self, key: &Key) -> bool {
        self.variant.as_ref().is_some_and(|variant| variant.selection.contains_key(key))
    }

    /// Resources of a variant that its publication doesn't have.
    pub fn own_resources(&self) -> Option<usize> {
        self.variant.as_ref().map(|variant| variant.own_resources)
    }

    /// What tells it from others of a stream: its number, and the serial number of a variant.
    pub fn id(&self) -> (u64, u64) {
        (self.number, self.variant.as_ref().map_or(0, |variant| variant.serial))
    }

    /// Whether it is the next one after `earlier`, so that what it has changed is the difference.
    pub fn follows(&self, earlier: &Self) -> bool {
        !self.is_variant() && !earlier.is_variant() && earlier.number + 1 == self.number
    }
}

/// The version of the publication that a version, as a gateway reports it, is a variant of; and whether it is one.
pub fn without_mark(version: &str) -> (&str, bool) {
    version.split_once(MARK).map_or((version, false), |(of, _)| (of, true))
}

/// The resources in chunks that a variant doesn't share with its publication.
fn own_resources(of: &Resources, variant: &Resources) -> usize {
    let shared: HashSet<_> = of.table.chunks().iter().map(Arc::as_ptr).collect();
    let own = variant.table.chunks().iter().filter(|chunk| !shared.contains(&Arc::as_ptr(chunk)));
    own.map(|chunk| chunk.len()).sum()
}
