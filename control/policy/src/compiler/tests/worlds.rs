//! Random worlds: gateways with zones, nodes and limits, and tenants with VIPs of both kinds, policies and pods.

use std::collections::BTreeMap;

use proptest::prelude::*;

use super::tenancy::cluster_policy;
use super::*;

/// Fields of a pool that only the tenants' namespace may use.
const OF_A: &str = "namespaces: {matchLabels: {kubernetes.io/metadata.name: a}}";
const NAMES: [&str; 6] = ["gw-a", "gw-b", "gw-c", "gw-d", "gw-e", "gw-f"];
/// Zones of the nodes `node-0` to `node-3`, on which the pods are.
const NODE_ZONES: [Option<&str>; 4] = [Some("z1"), Some("z1"), Some("z2"), None];

/// A gateway.
#[derive(Clone, Debug)]
pub(super) struct Site {
    pub(super) name: &'static str,
    /// The number of its node, if pods are on it.
    node: Option<usize>,
    zone: Option<&'static str>,
    pub(super) max_addresses: Option<usize>,
}

/// How a tenant gets its VIPs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    AnnotatedService,
    ServiceWithPolicy,
    Addresses,
    Pool,
    /// A ClusterEgressPolicy with addresses.
    OfCluster,
}

/// A Service or policy with VIPs, and pods.
#[derive(Clone, Debug)]
pub(super) struct Tenant {
    /// Its age, and part of its names and addresses.
    pub(super) id: usize,
    pub(super) kind: Kind,
    pub(super) bgp: bool,
    pub(super) is_dual_stack: bool,
    /// VIPs of each family.
    pub(super) vips: usize,
    pub(super) pods: usize,
    pub(super) affinity: &'static str,
    gateways: &'static str,
    /// Whether clients reach only backends on the owner's node.
    pub(super) is_local: bool,
}

#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) sites: Vec<Site>,
    pub(super) tenants: Vec<Tenant>,
    /// Other documents.
    pub(super) others: Vec<String>,
}

fn sites() -> impl Strategy<Value = Vec<Site>> {
    let zone = prop::sample::select(vec![None, Some("z1"), Some("z2")]);
    let place =
        prop_oneof![(0..4_usize).prop_map(|node| (Some(node), NODE_ZONES[node])), zone.prop_map(|zone| (None, zone))];
    let site = (place, prop::option::weighted(0.4, 1..4_usize));
    (prop::sample::subsequence(NAMES.to_vec(), 2..=NAMES.len()), prop::collection::vec(site, NAMES.len())).prop_map(
        |(names, sites)| {
            let site = |(name, ((node, zone), max_addresses))| Site { name, node, zone, max_addresses };
            names.into_iter().zip(sites).map(site).collect()
        },
    )
}

pub(super) fn tenant(id: usize) -> impl Strategy<Value = Tenant> {
    let kind = prop::sample::select(vec![
        Kind::AnnotatedService,
        Kind::ServiceWithPolicy,
        Kind::Addresses,
        Kind::Pool,
        Kind::OfCluster,
    ]);
    let affinity = prop::sample::select(vec!["None", "None", "Prefer", "Require"]);
    let gateways = prop::sample::select(vec![
        "",
        "",
        ", gateways: {names: [gw-a, gw-b, gw-c]}",
        ", gateways: {selector: {matchLabels: {tier: gold}}}",
    ]);
    let all = (kind, any::<bool>(), any::<bool>(), 1..4_usize, 0..8_usize, affinity, gateways);
    all.prop_map(move |(kind, bgp, is_dual_stack, vips, pods, affinity, gateways)| {
        let is_annotated = kind == Kind::AnnotatedService;
        let (affinity, gateways) = if is_annotated { ("None", "") } else { (affinity, gateways) };
        Tenant { id, kind, bgp, is_dual_stack, vips, pods, affinity, gateways, is_local: false }
    })
}

pub(super) fn worlds() -> impl Strategy<Value = World> {
    let tenants = (1..6_usize).prop_flat_map(|count| (0..count).map(tenant).collect::<Vec<_>>());
    (sites(), tenants).prop_map(|(sites, tenants)| World { sites, tenants, others: Vec::new() })
}

impl Site {
    fn document(&self) -> String {
        let node = self.node.map(|node| format!("node: node-{node}, "));
        // The zone of a node's gateway is that of the node.
        let zone = self.zone.filter(|_| self.node.is_none()).map(|zone| format!("zone: {zone}, "));
        let limit = self.max_addresses.map(|max| format!("maxAddresses: {max}, "));
        let fields: String = [node, zone, limit].into_iter().flatten().collect();
        gateway(self.name, if self.is_gold() { "tier: gold" } else { "" })
            .replace("spec: {", &format!("spec: {{{fields}"))
    }

    /// Whether it is on the node of the pods with this number.
    pub(super) fn is_on_node_of(&self, number: usize) -> bool {
        self.node == Some(number % NODE_ZONES.len())
    }

    fn is_gold(&self) -> bool {
        ["gw-a", "gw-d", "gw-e"].contains(&self.name)
    }

    /// 0: on the node of a pod, 1: in its zone, 2: elsewhere.
    pub(super) fn distance(&self, pod: IpAddr) -> u8 {
        let node = pod_of(pod).1 % NODE_ZONES.len();
        match NODE_ZONES[node] {
            _ if self.node == Some(node) => 0,
            Some(zone) if self.zone == Some(zone) => 1,
            _ => 2,
        }
    }
}

impl Tenant {
    /// The VIPs of a tenant without a pool.
    pub(super) fn addresses(&self) -> Vec<IpAddr> {
        let (v4, v6) = if self.bgp { ("198.51.100", "2001:db8:100") } else { ("203.0.113", "2001:db8:200") };
        let v4 = (0..self.vips).map(|n| ip(&format!("{v4}.{}", self.id * 8 + n)));
        let v6 = (0..self.vips).filter(|_| self.is_dual_stack).map(|n| ip(&format!("{v6}::{}:{n}", self.id)));
        v4.chain(v6).collect()
    }

    fn pods(&self) -> (Vec<String>, Vec<String>) {
        let v6 = if self.is_dual_stack { self.pods } else { 0 };
        let v6 = (0..v6).map(|pod| format!("fd00:{:x}::{pod:x}", self.id));
        ((0..self.pods).map(|pod| format!("10.0.{}.{pod}", self.id)).collect(), v6.collect())
    }

    fn documents(&self) -> Vec<String> {
        let Self { id, kind, bgp, vips, affinity, gateways, .. } = self;
        let name = format!("t{id}");
        let created = format!(", creationTimestamp: \"2020-01-01T00:00:{id:02}Z\"");
        let (v4, v6) = self.pods();
        let pod = |address: &String| {
            let (_, number) = pod_of(ip(address));
            let pod_name = format!("{name}-{}", address.replace([':', '.'], "-"));
            let pod = pod("a", &pod_name, &format!("app: {name}"), address);
            pod.replace("containers", &format!("nodeName: node-{}, containers", number % NODE_ZONES.len()))
        };
        let mut documents: Vec<String> = v4.iter().chain(&v6).map(pod).collect();
        let addresses: Vec<String> = self.addresses().iter().map(ToString::to_string).collect();
        let place = format!("zoneAffinity: {affinity}{gateways}");
        if matches!(kind, Kind::AnnotatedService | Kind::ServiceWithPolicy) {
            let extra = format!("{created}{}", if *kind == Kind::AnnotatedService { EGRESS } else { "" });
            let service = service(&name, &extra, 80, &addresses.iter().map(String::as_str).collect::<Vec<_>>());
            let fields = if self.is_local { "LoadBalancer, externalTrafficPolicy: Local," } else { "LoadBalancer," };
            documents.push(service.replace("LoadBalancer,", fields));
            for pods in [v4, v6].iter().filter(|pods| !pods.is_empty()) {
                documents.push(slice(&name, &pods.iter().map(String::as_str).collect::<Vec<_>>()));
            }
        }
        let vips = match kind {
            Kind::AnnotatedService => return documents,
            Kind::ServiceWithPolicy => format!("serviceRef: {{name: {name}}}"),
            Kind::Addresses | Kind::OfCluster => format!("addresses: [\"{}\"]", addresses.join("\", \"")),
            Kind::Pool => format!("pools: [{{name: {}, count: {vips}}}]", if *bgp { "bgp" } else { "l2" }),
        };
        let selectors = match kind {
            Kind::Addresses | Kind::Pool | Kind::OfCluster => {
                format!("selectors: [{{podSelector: {{matchLabels: {{app: {name}}}}}}}], ")
            }
            _ => String::new(),
        };
        let policy = if *kind == Kind::OfCluster { cluster_policy } else { policy };
        documents.push(policy(&name, &created, &format!("{{{selectors}{vips}, {place}}}")));
        documents
    }

    /// Whether the owners of its VIPs are those with local backends.
    pub(super) fn follows_backends(&self) -> bool {
        self.is_local && !self.bgp && matches!(self.kind, Kind::AnnotatedService | Kind::ServiceWithPolicy)
    }

    /// Whether a gateway may have its VIPs.
    pub(super) fn may_use(&self, site: &Site) -> bool {
        match self.gateways {
            "" => true,
            names if names.contains("names") => names.contains(site.name),
            _ => site.is_gold(),
        }
    }
}

impl World {
    pub(super) fn placement(&self) -> Placement {
        let mut documents = self.others.clone();
        documents.extend([
            pool("routed", "{ranges: [198.51.100.0/24, \"2001:db8:100::/48\"], announce: BGP}"),
            pool("bgp", "{ranges: [198.19.0.0/16, \"2001:db8:19::/64\"], announce: BGP}"),
            pool("l2", "{ranges: [198.18.0.0/16, \"2001:db8:18::/64\"]}"),
            pool("own", &format!("{{ranges: [203.0.113.0/24, \"2001:db8:200::/48\"], {OF_A}}}")),
        ]);
        for (node, zone) in NODE_ZONES.iter().enumerate() {
            let labels = zone.map(|zone| format!("topology.kubernetes.io/zone: {zone}")).unwrap_or_default();
            documents
                .push(format!("apiVersion: v1\nkind: Node\nmetadata: {{name: node-{node}, labels: {{{labels}}}}}\n"));
        }
        documents.extend(self.sites.iter().map(Site::document));
        documents.extend(self.tenants.iter().flat_map(Tenant::documents));
        let objects = objects(&documents.join("---\n"));
        let got = compile_for(Tenancy::Strict, &objects);
        let errors: Vec<_> = got.diagnostics.iter().filter(|it| it.is_error()).collect();
        assert!(errors.is_empty(), "{errors:?}");
        got.placement
    }

    /// The tenant of a VIP.
    pub(super) fn tenant_of(&self, vip: &VipSpec) -> &Tenant {
        let (_, id) = vip.name.split(", ").find_map(|name| name.rsplit_once('t')).unwrap();
        self.tenants.iter().find(|it| it.id.to_string() == id).unwrap()
    }

    pub(super) fn site(&self, name: &str) -> &Site {
        self.sites.iter().find(|site| site.name == name).unwrap()
    }
}

/// Tenant and number of the pod with this address.
pub(super) fn pod_of(address: IpAddr) -> (usize, usize) {
    match address {
        IpAddr::V4(v4) => (v4.octets()[2].into(), v4.octets()[3].into()),
        IpAddr::V6(v6) => (v6.segments()[1].into(), v6.segments()[7].into()),
    }
}

/// The gateways of an endpoint, home first; those of the first VIP at its home, if it has no slot.
pub(super) fn endpoint_order(placement: &Placement, endpoint: &EndpointSpec) -> Vec<Arc<str>> {
    if let Some(order) = slot_order(placement, endpoint) {
        return order.to_vec();
    }
    let vips = placement.vips.iter().filter(|vip| endpoint.vips.contains(&vip.address));
    let mut orders = vips.flat_map(|vip| block_orders(placement, vip));
    orders.find(|order| Some(&order[0]) == endpoint.gateway.as_ref()).unwrap_or_default()
}

/// Homes of the blocks of each VIP, by name and address.
pub(super) fn vip_homes(placement: &Placement) -> BTreeMap<(Arc<str>, IpAddr), Vec<Arc<str>>> {
    let homes = |vip: &VipSpec| block_orders(placement, vip).into_iter().map(|order| order[0].clone()).collect();
    placement.vips.iter().map(|vip| ((vip.name.clone(), vip.address), homes(vip))).collect()
}
