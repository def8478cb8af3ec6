//! What moves when gateways stop or begin to serve, by the deal alone: nothing is asked, and nothing is changed.

use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;

use foldhash::HashMap;
use vipgate_dataplane::snapshot::spec::{EndpointSpec, ShareSpec, VipSpec};

/// Who serves a share before and after.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Move {
    /// The VIP that it is a part of.
    pub vip: IpAddr,
    /// The gateway that it was dealt to.
    pub home: Arc<str>,
    /// Who serves it before; `None`: nobody.
    pub before: Option<Arc<str>>,
    /// Who serves it after; `None`: nobody.
    pub after: Option<Arc<str>>,
    /// Endpoints that go with it: those of this home whose first VIP it is, so that each counts once.
    pub endpoints: usize,
}

impl Move {
    /// Whether another gateway serves it after than before.
    pub fn is_one(&self) -> bool {
        self.before != self.after
    }
}

/// Each share of these VIPs and who serves it while these gateways do, `before` and `after`; in the order of VIPs and their
/// shares. A VIP without shares is whoever's gets its packets: it has no moves.
pub fn moves(
    vips: &[VipSpec],
    endpoints: &[EndpointSpec],
    before: &BTreeSet<Arc<str>>,
    after: &BTreeSet<Arc<str>>,
) -> Vec<Move> {
    let mut counts: HashMap<(IpAddr, &str), usize> = HashMap::default();
    for endpoint in endpoints {
        if let (Some(vip), Some(home)) = (endpoint.vips.first(), &endpoint.gateway) {
            *counts.entry((*vip, &**home)).or_default() += 1;
        }
    }
    let of_share = |vip: IpAddr, share: &ShareSpec| Move {
        vip,
        home: share.gateway.clone(),
        before: owner(share, before),
        after: owner(share, after),
        endpoints: counts.get(&(vip, &*share.gateway)).copied().unwrap_or(0),
    };
    vips.iter().flat_map(|vip| vip.shares.iter().map(move |share| of_share(vip.address, share))).collect()
}

/// The first that serves of a share's home and those who stand in for it.
fn owner(share: &ShareSpec, serving: &BTreeSet<Arc<str>>) -> Option<Arc<str>> {
    std::iter::once(&share.gateway).chain(&share.backups).find(|name| serving.contains(*name)).cloned()
}
