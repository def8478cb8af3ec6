//! kube-proxy of a node: the real one in iptables mode, or a ruleset in the shape that nftables mode writes since 1.31,
//! of which no version can be built here.

use std::fmt::Write as _;
use std::fs;
use std::path::Path;

use serde_json::Value;
use vipgate_lab::{Host, Process};

use crate::api_objects::items;

/// Pod prefixes of the cluster, IPv4 and IPv6.
const POD_CIDRS: [&str; 2] = ["10.244.0.0/16", "fd00:244::/32"];

/// Starts kube-proxy on a node.
pub(crate) fn start(node: &Host, name: &str, kubeconfig: &Path, log: &Path) -> Process {
    let program = std::env::var("VIPGATE_KUBE_PROXY").expect("VIPGATE_KUBE_PROXY is not set: run `make e2e-node`");
    let hostname = format!("--hostname-override={name}");
    let kubeconfig = format!("--kubeconfig={}", kubeconfig.display());
    let cluster = format!("--cluster-cidr={}", POD_CIDRS.join(","));
    let command = [
        program.as_str(),
        &kubeconfig,
        &hostname,
        &cluster,
        "--proxy-mode=iptables",
        "--masquerade-all=false",
        "--feature-gates=IPv6DualStack=true",
        // EndpointSlices are a custom resource here.
        "--kube-api-content-type=application/json",
        // Not in a namespace.
        "--conntrack-max-per-core=0",
        "--conntrack-tcp-timeout-established=0",
        "--conntrack-tcp-timeout-close-wait=0",
    ];
    node.spawn(&command, log).unwrap()
}

/// Loads a ruleset in one transaction.
#[track_caller]
pub(crate) fn load(node: &Host, ruleset: &str) {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), ruleset).unwrap();
    let loaded = node.output(&["nft", "-f", &file.path().display().to_string()]);
    loaded.unwrap_or_else(|error| panic!("{error}\n{ruleset}"));
}

/// A port of a Service in one family.
struct ServicePort {
    /// As kube-proxy names its chains: namespace, name, protocol, port name.
    name: String,
    cluster_ip: String,
    /// Of the load balancer.
    external_ips: Vec<String>,
    protocol: String,
    port: u64,
    /// Address and port.
    endpoints: Vec<(String, u64)>,
}

/// Loads the tables `ip kube-proxy` and `ip6 kube-proxy` for Services and EndpointSlices, and replaces those before.
pub(crate) fn load_nftables(node: &Host, services: &Value, slices: &Value) {
    for (family, (ip, cidr)) in [("ip", POD_CIDRS[0]), ("ip6", POD_CIDRS[1])].into_iter().enumerate() {
        load(node, &table(ip, cidr, &service_ports(family, services, slices)));
    }
}

fn texts(value: &Value) -> impl Iterator<Item = &str> {
    value.as_array().into_iter().flatten().filter_map(Value::as_str)
}

fn service_ports(family: usize, services: &Value, slices: &Value) -> Vec<ServicePort> {
    let is_ours = |address: &&str| address.contains(':') == (family == 1);
    let mut ports = Vec::new();
    for service in items(services) {
        let metadata = &service["metadata"];
        let Some(cluster_ip) = texts(&service["spec"]["clusterIPs"]).find(is_ours) else { continue };
        let ingress = service["status"]["loadBalancer"]["ingress"].as_array().into_iter().flatten();
        let external: Vec<&str> = ingress.filter_map(|ingress| ingress["ip"].as_str()).filter(is_ours).collect();
        let of_service = |slice: &&Value| {
            let (slice, kind) = (&slice["metadata"], &slice["addressType"]);
            slice["namespace"] == metadata["namespace"]
                && slice["labels"]["kubernetes.io/service-name"] == metadata["name"]
                && *kind == ["IPv4", "IPv6"][family]
        };
        for port in service["spec"]["ports"].as_array().unwrap() {
            let mut endpoints = Vec::new();
            for slice in items(slices).filter(of_service) {
                let same = |other: &&Value| other["name"] == port["name"];
                let target = slice["ports"].as_array().unwrap().iter().find(same);
                let Some(target) = target.and_then(|port| port["port"].as_u64()) else { continue };
                for endpoint in slice["endpoints"].as_array().into_iter().flatten() {
                    endpoints.extend(texts(&endpoint["addresses"]).map(|address| (address.to_owned(), target)));
                }
            }
            let text = |value: &Value| value.as_str().unwrap_or_default().to_lowercase();
            ports.push(ServicePort {
                name: ["namespace", "name"].map(|field| text(&metadata[field])).join("-") + "-" + &text(&port["name"]),
                cluster_ip: cluster_ip.to_owned(),
                external_ips: external.iter().map(|&address| address.to_owned()).collect(),
                protocol: text(&port["protocol"]),
                port: port["port"].as_u64().unwrap(),
                endpoints,
            });
        }
    }
    ports
}

/// Chains of a Service's port and of its endpoints.
fn service_chains(ip: &str, cidr: &str, service: &ServicePort) -> String {
    let ServicePort { name, cluster_ip, protocol, port, endpoints, .. } = service;
    let (mut chains, mut verdicts) = (String::new(), Vec::new());
    for (number, (endpoint, port)) in endpoints.iter().enumerate() {
        let target = if ip == "ip" { format!("{endpoint}:{port}") } else { format!("[{endpoint}]:{port}") };
        // A pod that reaches itself is masqueraded.
        let _ = write!(
            chains,
            "  chain endpoint-{name}-{number} {{\n    {ip} saddr {endpoint} jump mark-for-masquerade\n\
             \x20   meta l4proto {protocol} dnat to {target}\n  }}\n"
        );
        verdicts.push(format!("{number} : goto endpoint-{name}-{number}"));
    }
    let _ = write!(
        chains,
        "  chain service-{name} {{\n\
         \x20   {ip} daddr {cluster_ip} {protocol} dport {port} {ip} saddr != {cidr} jump mark-for-masquerade\n\
         \x20   numgen random mod {} vmap {{ {} }}\n  }}\n\
         \x20 chain external-{name} {{\n    jump mark-for-masquerade\n    goto service-{name}\n  }}\n",
        endpoints.len(),
        verdicts.join(", ")
    );
    chains
}

/// Elements of a set or map; nothing if there are none.
fn elements(elements: &[String]) -> String {
    if elements.is_empty() { String::new() } else { format!("    elements = {{ {} }}\n", elements.join(", ")) }
}

/// Names, hooks, priorities and marks are those of kube-proxy.
fn table(ip: &str, cidr: &str, services: &[ServicePort]) -> String {
    let address = if ip == "ip" { "ipv4_addr" } else { "ipv6_addr" };
    let (mut maps, mut reject, mut chains) = (Vec::new(), Vec::new(), String::new());
    let mut cluster_ips: Vec<String> = services.iter().map(|service| service.cluster_ip.clone()).collect();
    cluster_ips.sort_unstable();
    cluster_ips.dedup();
    for service in services {
        let ServicePort { name, cluster_ip, external_ips, protocol, port, endpoints } = service;
        let frontends = std::iter::once((cluster_ip, "service")).chain(external_ips.iter().map(|it| (it, "external")));
        for (frontend, kind) in frontends {
            let key = format!("{frontend} . {protocol} . {port}");
            if endpoints.is_empty() {
                reject.push(format!("{key} : goto reject-chain"));
            } else {
                maps.push(format!("{key} : goto {kind}-{name}"));
            }
        }
        if !endpoints.is_empty() {
            chains += &service_chains(ip, cidr, service);
        }
    }
    let [cluster_ips, maps, reject] = [cluster_ips, maps, reject].map(|list| elements(&list));
    format!(
        "table {ip} kube-proxy\ndelete table {ip} kube-proxy\n\
         table {ip} kube-proxy {{\n\
         \x20 comment \"rules for kube-proxy\"\n\
         \x20 set cluster-ips {{\n    type {address}\n{cluster_ips}  }}\n\
         \x20 map no-endpoint-services {{\n    type {address} . inet_proto . inet_service : verdict\n{reject}  }}\n\
         \x20 map firewall-ips {{\n    type {address} . inet_proto . inet_service : verdict\n  }}\n\
         \x20 map service-ips {{\n    type {address} . inet_proto . inet_service : verdict\n{maps}  }}\n\
         {chains}\
         \x20 chain reject-chain {{\n    reject\n  }}\n\
         \x20 chain mark-for-masquerade {{\n    meta mark set meta mark | 0x4000\n  }}\n\
         \x20 chain masquerading {{\n    meta mark & 0x4000 == 0 return\n    meta mark set meta mark ^ 0x4000\n\
         \x20   masquerade fully-random\n  }}\n\
         \x20 chain services {{\n    {ip} daddr . meta l4proto . th dport vmap @service-ips\n  }}\n\
         \x20 chain firewall-check {{\n    {ip} daddr . meta l4proto . th dport vmap @firewall-ips\n  }}\n\
         \x20 chain service-endpoints-check {{\n    {ip} daddr . meta l4proto . th dport vmap @no-endpoint-services\n  }}\n\
         \x20 chain cluster-ips-check {{\n    {ip} daddr @cluster-ips reject\n  }}\n\
         \x20 chain filter-prerouting {{\n    type filter hook prerouting priority -110;\n    ct state new jump firewall-check\n  }}\n\
         \x20 chain filter-input {{\n    type filter hook input priority -110;\n    ct state new jump service-endpoints-check\n  }}\n\
         \x20 chain filter-forward {{\n    type filter hook forward priority -110;\n\
         \x20   ct state new jump service-endpoints-check\n    ct state new jump cluster-ips-check\n  }}\n\
         \x20 chain filter-output {{\n    type filter hook output priority -110;\n\
         \x20   ct state new jump service-endpoints-check\n    ct state new jump firewall-check\n  }}\n\
         \x20 chain filter-output-post-dnat {{\n    type filter hook output priority -90;\n    ct state new jump cluster-ips-check\n  }}\n\
         \x20 chain nat-prerouting {{\n    type nat hook prerouting priority dstnat;\n    jump services\n  }}\n\
         \x20 chain nat-output {{\n    type nat hook output priority -100;\n    jump services\n  }}\n\
         \x20 chain nat-postrouting {{\n    type nat hook postrouting priority srcnat;\n    jump masquerading\n  }}\n\
         }}\n"
    )
}
